"""Wide & Deep in the engines of the peers and of this project: same weights, same inputs, one thread, in turn.

Every engine has a process of its own (TensorFlow, torch and OpenVINO disturb each other's threads), all pinned to one
core. Only one of them works at a time: a round gives each a turn of 0.1 s. Batches come from a pool of 32,768 rows or
64 batches, whichever is more, in order, so that no call finds the table rows of the last one in the cache by chance.
One call is timed, from inputs to probabilities; rates are of the CPU time of a turn. torch and TensorFlow get their own
tensors. Engines that read a graph get fp32.onnx as it was frozen; torch gets the network in torch, TensorFlow the same
weights, both with the embedding tables of all fields in one, which is faster there than one lookup a field.

Engines that quantize by themselves calibrate on 4,096 rows drawn like those they are timed on. This project's int8
model keeps the ranges of its training data. Needs the `train` and `peers` extras; an engine that cannot be opened is
left out, and the report says why.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.analysis.benchmark import speed
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from scripts.peers import harness, processes
from scripts.peers.engines import onnx_runtime
from scripts.peers.recommenders.engines import (
    COMPARED_ROWS,
    ENGINES,
    PACKAGES,
    Array,
    DrawnInputs,
    Engine,
    Inputs,
    Turn,
    joined,
    save_weights,
)


def drawn_inputs(model: str, scratch: Path) -> DrawnInputs:
    """Returns the inputs of a Wide & Deep model.

    Raises:
        RequestError: It is a model of another kind.
    """
    folder = zoo.load(model)
    if folder.card.entry != "wide-deep":
        raise RequestError(f"{model} is a {folder.card.entry} model; expected a wide-deep one")
    features = folder.preprocessing
    return DrawnInputs(model, scratch, features["categorical"], features["buckets"], features["numeric"])


def compare(
    inputs: Inputs, engines: Sequence[str], sizes: Sequence[int], kinds: Sequence[str], rounds: int
) -> dict[str, Any]:
    """Times engines in turn, for every batch size and kind of ids.

    Args:
        inputs: The model and its pool of inputs.
        engines: Names of `ENGINES`.
        sizes: Batch sizes.
        kinds: Kinds of ids.
        rounds: Turns of each engine.

    Returns:
        {"results": [{"engine", "ids", "batch_size", "samples_per_second" (CPU time; median of the rounds), "spread"
        (5th and 95th percentile of the same), "latency_ms": {"p50", "p95", "p99"} of single calls (wall time),
        "max_probability" (largest difference to onnxruntime fp32 on the pool's first rows), "core_share" (median share
        of a turn for which the process had the core: below 0.98 the machine was busy), "memory_mb" (peak of the process
        while timed, its inputs included)}], "ratios": [{"ids", "batch_size", "engine" of this project, "over": {peer:
        median over the rounds of its samples/s over the peer's}}], "left_out": {engine: reason}}.

    Raises:
        ZooError: No engine could be opened.
    """
    results: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    if {"onnxruntime-int8", "openvino-qdq"} & set(engines):
        onnx_runtime.quantize_static(inputs.fp32, inputs.stock, inputs.samples())
    if "tensorflow-fp32" in engines:
        processes.in_process(save_weights, inputs)
    steps = [(size, kind) for size in sizes for kind in kinds]
    with processes.Workers(inputs.scratch) as workers, progress("rounds", len(steps) * rounds) as advance:
        for name in engines:
            cache = str(inputs.scratch / "inductor")
            workers.open(name, partial(Engine, name, inputs), TORCHINDUCTOR_CACHE_DIR=cache)
        for size, kind in steps:
            outputs = workers.ask_all("begin", kind, size)
            turns: dict[str, list[Turn]] = {name: [] for name in outputs}
            for _ in range(rounds):
                for name, turn in workers.ask_all("turn").items():
                    turns[name].append(turn)
                advance(1)
            memory = workers.ask_all("memory")
            reference = _reference(inputs, kind, size)
            case = {"ids": kind, "batch_size": size}
            for name in memory:
                error = float(f"{np.abs(outputs[name] - reference).max():.2e}")
                figures = {**summary(size, turns[name]), "max_probability": error, "memory_mb": memory[name]}
                results.append({"engine": name, **case, **figures})
            ratios += [{**case, **speedup} for speedup in speedups({name: turns[name] for name in memory})]
        if not results:
            raise ZooError("no engine could be opened")
        return {"results": results, "ratios": ratios, "left_out": workers.left_out}


def _reference(inputs: Inputs, kind: str, size: int) -> Array:
    batches = inputs.batches(kind, size)[: -(-COMPARED_ROWS // size)]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return joined(zoo.pipeline(inputs.model, "fp32", "onnxruntime").predict(whole).values())


def summary(size: int, turns: Sequence[Turn]) -> dict[str, Any]:
    """Returns the figures of an engine's turns; see `compare`."""
    milliseconds = np.concatenate([taken for taken, _ in turns]) * 1e3
    share = round(float(np.median([share for _, share in turns])), 3)
    return {**speed(_rates(turns) * size, milliseconds), "core_share": share}


def _rates(turns: Sequence[Turn]) -> Array:
    """Returns the calls per second of each turn, of the time for which it had the core."""
    return np.array([1 / (taken.mean() * share) for taken, share in turns])


def speedups(turns: Mapping[str, Sequence[Turn]]) -> Iterator[dict[str, Any]]:
    """Yields the speed-ups of this project's engines over each peer; see `compare`."""
    rates = {name: _rates(series) for name, series in turns.items()}
    peers = [name for name in rates if not name.startswith("zoo-")]
    for name in rates:
        if name not in peers:
            yield {"engine": name, "over": {peer: harness.ratio(rates[name], rates[peer]) for peer in peers}}


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument(
        "model", nargs="?", default="wide-deep-criteo", help="name or folder (default wide-deep-criteo)"
    )
    parser.numbers("--batch-size", "512,64,1", "batch sizes")
    parser.names("--ids", "kind of ids", DrawnInputs.kinds)
    parser.names("--peers", "engine", ENGINES)
    parser.count("--rounds", 15, "turns of each engine")


def measure(args: Any) -> dict[str, Any]:
    """Returns {"model", "environment"} and the fields of `compare`."""
    facts = harness.environment(*PACKAGES, rounds=args.rounds, core=processes.last_core())
    with tempfile.TemporaryDirectory() as scratch:
        inputs = drawn_inputs(args.model, Path(scratch))
        compared = compare(inputs, args.peers, args.batch_size, args.ids, args.rounds)
    return {"model": zoo.load(args.model).card.name, **compared, "environment": facts}
