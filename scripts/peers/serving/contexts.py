"""Two contexts of one opened model beside one: batches a second, memory, and samples a joule where RAPL can be read.

    python scripts/peers/serving/contexts.py [MODEL,...] [--rounds 9] [-o FILE]

Every model is opened once, int8 in its quickest engine with one thread, and asked by `session.submit` for the same
batches, with one context and with two in turn; "times" is the median over the rounds of two beside one. "megabytes":
what the process's share of memory (PSS) grew by for the second context. Needs two cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


import zoo
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.power import Meter
from pipelines.engines.catalog import load
from pipelines.models.pipeline import graph_file
from scripts.peers import harness

MODELS = {"wide-deep-criteo": 512, "mobilenet-v1-cifar10": 4, "resnet26d-cifar10": 4}
SECONDS = 0.5  # a turn
ROUND = 16  # times that the batches are asked for before the last is waited for


def window(session: Any, batches: list[Any]) -> float:
    """Batches a second, as many under way as there are contexts and one more."""
    count, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < SECONDS:
        count += sum(1 for _ in session.map(batches * ROUND))
    return count / taken


def megabytes() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) * 1024 / 1e6


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Everything of one model."""
    size = MODELS[name]
    pipeline = zoo.pipeline(name, threads=1, batch_size=size)
    batches = [pipeline.preprocess(pipeline.example(size)) for _ in range(8)]
    path = graph_file(
        pipeline.folder, "int8", "native" if "native" in type(pipeline).engines(pipeline.folder) else "auto"
    )
    session: Any = load(path, "native" if path.name == "native.onnx" else "auto", 1)
    wanted = [session.run(each) for each in batches]
    engine, meter, rates, joules = session.engine, Meter(), {1: [], 2: []}, {1: [], 2: []}
    before = megabytes()
    for number in range(rounds + 1):
        for contexts in (1, 2):
            session.contexts, session._contexts = contexts, None
            used = 0.0 if meter.fault else meter.joules()
            rate = window(session, batches)
            if number:  # the first turn warms up
                rates[contexts].append(rate)
                joules[contexts].append(0.0 if meter.fault else size * rate * SECONDS / (meter.joules() - used))
    found = list(session.map(batches))
    for one, other in zip(wanted, found, strict=True):
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
        "batches_per_second": {str(contexts): harness.median(each, 1) for contexts, each in rates.items()},
        "times": round(float(np.median(np.divide(rates[2], rates[1]))), 3),
        "megabytes": round(megabytes() - before, 1),
        **power,
    }


def table(report: Mapping[str, Any]) -> str:
    """The results as text."""
    return "\n".join(
        f"{each['model']} in {each['engine']}, batches of {each['batch_size']}: two contexts {each['times']:.2f}x one, "
        f"{each['megabytes']:+.1f} MB" + (f"; {each['power']}" if "power" in each else "")
        for each in report["models"]
    )


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("models", nargs="?", default=",".join(MODELS), help=f"with commas; of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default 9)")
    with harness.one_line("contexts"):
        args = parser.parse_args()
        names = harness.listed("model", args.models, MODELS)
        if args.rounds < 1 or len(os.sched_getaffinity(0)) < 2:
            raise RequestError(f"found {args.rounds} rounds and {machine.cores()} cores, wanted 1 and 2, or more")
        facts = machine.environment(threads=1, rounds=args.rounds)
        report = harness.gather("models", names, lambda name: measure(name, args.rounds), args.output, facts)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
