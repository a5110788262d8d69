"""What each form of decoding and each rewrite is worth, in ms a step: python scripts/translation_steps.py MODEL_FOLDER [--precision int8].

All forms of one model run in turn, one thread (pin it: taskset -c 1), exactly 30 steps on random sentences; medians. The naive decoder is
timed by one call with half of the tokens. "without X": the whole search, its graph rewritten without the pass X.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import zoo
from pipelines import graph
from pipelines.build import ModelFolder, open_folder, read_npz
from pipelines.calibrate import calibrate
from pipelines.engine import Session, load
from pipelines.quantize import quantize
from pipelines.rewrite import rewrite
from zoo.transformer_mt.cache import cached_step, incremental
from zoo.transformer_mt.data import START, VOCABULARY, Vocabulary
from zoo.transformer_mt.decode import beam_search
from zoo.transformer_mt.loop import search
from zoo.transformer_mt.predict import halves
from zoo.transformer_mt.rewrites import passes

STEPS, SOURCE = 30, 20  # tokens of a translation and of its source
NEVER = -1  # no token: translations run to their limit
ABLATIONS = ("FoldScale", "MergeSiblings")
CASES = ((1, 1), (1, 4), (32, 1), (32, 4))


def rewritten(folder: ModelFolder, precision: str, without: str = "") -> ir.Model:
    """The model's graph in this precision, one pass left out."""
    model = graph.load(folder.ensure("fp32.onnx"))
    rewrite(model, [each for each in passes() if each.name != without])
    if precision == "fp32":
        return model
    samples = read_npz(folder.path / "calibration.npz")[0]
    return quantize(model, folder.recipe, calibrate(model, samples, "minmax"))[0]


def forms(folder: ModelFolder, precision: str, place: Path) -> dict[str, Callable[[np.ndarray[Any, Any], int], float]]:
    """{name: (source tokens [n, s], beam) -> ms a step}."""
    path = graph.save(rewritten(folder, precision), place / "graph.onnx")

    def opened(model: ir.Model) -> Session:
        return load(path, "onnxruntime", 1, precision, graph.serialized(model))

    encoder, decoder = halves(path, "onnxruntime", 1, precision)
    model = incremental(graph.load(path))
    first, step = opened(model.encoder), opened(model.step)

    def naive(source: np.ndarray[Any, Any], beam: int) -> float:
        memory = encoder.run({"source": source})["memory"]
        rows = {"source": source, "memory": memory, "target": np.full((len(source), STEPS // 2), START)}
        batch = {name: np.repeat(each, beam, axis=0) for name, each in rows.items()}
        start = time.perf_counter()
        decoder.run(batch)
        return time.perf_counter() - start

    def python(source: np.ndarray[Any, Any], beam: int) -> float:
        start, limits = time.perf_counter(), np.full(len(source), STEPS)
        beam_search(cached_step(step, first.run({"source": source}), model.caches), limits, start=START, end=NEVER, beam=beam)
        return (time.perf_counter() - start) / STEPS

    def whole(session: Session) -> Callable[[np.ndarray[Any, Any], int], float]:
        def run(source: np.ndarray[Any, Any], beam: int) -> float:
            options = {"beam": np.array([beam]), "best": np.array([1]), "growth": np.array([0, STEPS])}
            start = time.perf_counter()
            session.run({"source": source, "length_penalty": np.ones(1, np.float32), **options})
            return (time.perf_counter() - start) / STEPS

        return run

    found = {
        "naive": naive,
        "caches, loop in Python": python,
        "loop in the graph": whole(opened(search(incremental(graph.load(path)), NEVER))),
    }
    for each in ABLATIONS:
        found[f"without {each}"] = whole(opened(search(incremental(rewritten(folder, precision, each)), NEVER)))
    return found


def main(words: list[str] | None = None) -> None:
    """Print one line a form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", choices=("fp32", "int8"), default="int8")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args(words)
    folder = open_folder(given.folder, zoo.entry)
    size = len(Vocabulary.read(folder.verify(VOCABULARY)))
    random, times = np.random.default_rng(0), {}
    with tempfile.TemporaryDirectory() as place:
        found = forms(folder, given.precision, Path(place))
        for count, beam in CASES:
            source = random.integers(START + 2, size, (count, SOURCE))
            taken: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(given.repeats):
                for name, run in found.items():
                    taken[name].append(1e3 * run(source, beam))
            times |= {(name, count, beam): statistics.median(each) for name, each in taken.items()}
    sys.stdout.write(f"{'ms a step, ' + given.precision:26}" + "".join(f"{f'B{count} beam {beam}':>14}" for count, beam in CASES) + "\n")
    for name in found:
        sys.stdout.write(f"{name:26}" + "".join(f"{times[name, *case]:14.3f}" for case in CASES) + "\n")


if __name__ == "__main__":
    main()
