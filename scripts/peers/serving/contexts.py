"""Two contexts of one opened model beside one: batches a second, memory, and samples a joule where RAPL can be read.

Every model is opened once, int8 in its quickest engine with one thread, and `session.map` computes the same batches
with one context and with two in turn; "times" is the median over the rounds of two beside one. "megabytes": growth of
the process's share of memory (PSS) by the second context. Needs two cores.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import zoo
from pipelines.analysis.power import Meter
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.models.pipeline import graph_file
from scripts.peers import harness
from scripts.peers.processes import memory_mb

MODELS = {"wide-deep-criteo": 512, "mobilenet-v1-cifar10": 4, "resnet26d-cifar10": 4}
SECONDS = 0.5  # a turn
ROUND = 16  # times that the batches are asked for before the last is waited for


def window(session: Any, batches: list[Any]) -> float:
    """Returns the batches per second with one batch more under way than there are contexts."""
    count, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < SECONDS:
        count += sum(1 for _ in session.map(batches * ROUND))
    return count / taken


def compare(name: str, rounds: int) -> dict[str, Any]:
    """Returns all measurements of one model."""
    size = MODELS[name]
    pipeline = zoo.pipeline(name, threads=1, batch_size=size)
    batches = [pipeline.preprocess(pipeline.example(size)) for _ in range(8)]
    path = graph_file(
        pipeline.folder, "int8", "native" if "native" in type(pipeline).engines(pipeline.folder) else "auto"
    )
    session: Any = load(path, "native" if path.name == "native.onnx" else "auto", 1)
    expected = [session.run(batch) for batch in batches]
    engine, meter, rates, joules = session.engine, Meter(), {1: [], 2: []}, {1: [], 2: []}
    before = memory_mb("Pss")
    for number in range(rounds + 1):
        for contexts in (1, 2):
            session.contexts, session._contexts = contexts, None
            used = 0.0 if meter.fault else meter.joules()
            rate = window(session, batches)
            if number:  # the first turn warms up
                rates[contexts].append(rate)
                joules[contexts].append(0.0 if meter.fault else size * rate * SECONDS / (meter.joules() - used))
    results = list(session.map(batches))
    for one, other in zip(expected, results, strict=True):
        assert all(np.array_equal(one[key], other[key]) for key in one), "contexts computed something else"
    power = (
        {"power": meter.fault}
        if meter.fault
        else {"samples_per_joule": {k: harness.median(v) for k, v in joules.items()}}
    )
    return {
        "model": name,
        "engine": engine,
        "batch_size": size,
        "batches_per_second": {str(contexts): harness.median(speeds, 1) for contexts, speeds in rates.items()},
        "times": harness.ratio(rates[2], rates[1]),
        "megabytes": round(memory_mb("Pss") - before, 1),
        **power,
    }


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.names("models", "model", MODELS)
    parser.count("--rounds", 9, "turns of each number of contexts")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    if machine.cores() < 2:
        raise RequestError(f"found {machine.cores()} core, expected 2 or more")
    facts = machine.environment(threads=1, rounds=args.rounds)
    return harness.gather("models", args.models, lambda name: compare(name, args.rounds), args.output, facts)
