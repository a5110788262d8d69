"""ONNX files of other people quantized by this project with each effort, by onnxruntime and by NNCF.

FOLDER holds, of every model, NAME.onnx, NAME.calib.npz and NAME.test.npz: an array for every input of the graph, its
first axis counts samples. A sample is of the input's rank, or lacks its batch axis. All settings get the same file and
samples; peers get the file brought to opset 13 where it is older.

Reported of each: SQNR of all outputs (of texts without padding) against the float file's in onnxruntime, in dB, over
all test samples one at a time, in all engines, which open the files as they are (shapes stay dynamic); the agreement of
the first output, see `agreement`; size; CPU seconds and peak memory of the quantization in a process of its own, on one
core; every core quantizes a model at once. Then all files of a model are timed on test samples in each engine, in turn,
on one thread and one core; files with a native form also in this project's native kernels. OpenVINO gets the shapes of
the batch, as static shapes are faster. "openvino" computes float operators in float32; "openvino-default" computes them
in bfloat16 on CPUs that have it, as OpenVINO does by default. --batch lists the batch sizes; files that fix another
size are timed at these sizes in OpenVINO alone. Of the models of --opened, each engine also opens the float file and
the one of "zoo" in new processes, see `opening`. A setting that fails is left out, with its error. Needs the `peers`
extra.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelines.core import machine
from pipelines.core.batches import joined, resized
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.graph import io, token_mask
from scripts.peers import harness, processes
from scripts.peers.quantization import opening, settings
from scripts.peers.quantization.settings import RUNS, Array, nncf, onnxruntime_dynamic, onnxruntime_static

Feed = dict[str, Array]
OPSET = 13  # the first with QuantizeLinear per channel
PACKAGES = ("nncf", "onnx")


# ------------------------------------------------------------------------------------------------------------- samples


def ranks(path: Path) -> dict[str, int]:
    """Returns the ranks of the graph's inputs, in order."""
    return {str(value.name): len(value.shape or ()) for value in io.load(path).graph.inputs}


def feeds(path: Path, samples: Path) -> list[Feed]:
    """Returns the samples of an .npz as feeds of the graph, one sample each."""
    axes = ranks(path)
    with np.load(samples) as arrays:
        columns = {name: arrays[name] for name in axes}
    count = min(map(len, columns.values()))
    return [
        {
            name: np.asarray(array[index]) if array.ndim - 1 == axes[name] else array[index : index + 1]
            for name, array in columns.items()
        }
        for index in range(count)
    ]


def batch_of(samples: Sequence[Feed], size: int) -> Feed:
    """Returns the first samples as one feed, repeated where there are fewer.

    Raises:
        RequestError: The first axis of an input is not that of samples.
    """
    if size == 1:
        return samples[0]
    odd = [name for name, array in samples[0].items() if array.ndim == 0 or len(array) != 1]
    if odd:
        raise RequestError(f"the first axis of {odd[0]} is not that of samples; give --batch 1")
    return resized(joined(samples[:size]), size)


@dataclass(frozen=True)
class Work:
    """Input of the process of one setting; `fp32` is brought to `OPSET` for the peers."""

    original: Path
    fp32: Path
    samples: Path

    def batches(self, size: int = 1) -> list[Feed]:
        """Returns the calibration samples, one a batch."""
        return feeds(self.fp32, self.samples)


def modernize(path: Path, target: Path) -> None:
    """Writes the file at `OPSET` or later."""
    import onnx

    proto = onnx.load(path)
    version = next(opset.version for opset in proto.opset_import if opset.domain in ("", "ai.onnx"))
    onnx.save(proto if version >= OPSET else onnx.version_converter.convert_version(proto, OPSET), target)


# ------------------------------------------------------------------------------------------------------------ settings


def zoo(*options: str) -> settings.Quantize:
    """Returns the command of this project with options."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "zoo", "quantize", str(work.original), *options]
        command += ["--calibration-data", str(work.samples), "-o", str(target.with_suffix(".onnx"))]
        return {"first_line": (processes.run(command).output.strip().splitlines() or [""])[0]}

    return make


SETTINGS: dict[str, settings.Quantize] = {
    "zoo": zoo(),
    "zoo-fast": zoo("--effort", "fast"),
    "zoo-best": zoo("--effort", "best"),
    "onnxruntime-static": onnxruntime_static("MinMax"),
    "onnxruntime-entropy": onnxruntime_static("Entropy"),
    "onnxruntime-dynamic": onnxruntime_dynamic,
    "nncf-default": nncf(preset="performance"),
    "nncf-transformer": nncf(model_type="transformer"),
}


def _make(setting: str, work: Work, target: Path) -> dict[str, Any]:
    facts = SETTINGS[setting](work, target)
    return facts | settings.used(resource.RUSAGE_CHILDREN if setting.startswith("zoo") else resource.RUSAGE_SELF)


# ----------------------------------------------------------------------------------------------------------- measuring


def at_tokens(feed: Feed, results: Sequence[Array]) -> list[Array]:
    """Returns results without the padded positions of texts, which mean nothing.

    Args:
        feed: Inputs of one sample; one that `token_mask` knows, [n, tokens], is 0 at padding.
        results: Results for the sample; those [n, tokens, ...] become [positions, ...].
    """
    mask = next((feed[name] for name in token_mask.NAMES if name in feed), None)
    if mask is None or mask.ndim != 2:
        return list(results)
    return [result[mask != 0] if result.shape[:2] == mask.shape else result for result in results]


def sqnr(expected: Sequence[Sequence[Array]], results: Sequence[Sequence[Array]]) -> float:
    """Returns the SQNR in dB over all floating-point outputs and samples; each output is scaled to power 1."""
    noise = []
    for i, output in enumerate(expected[0]):
        if output.dtype.kind != "f":
            continue
        signal = sum(float(np.square(sample[i], dtype=np.float64).sum()) for sample in expected)
        error = sum(
            float(np.square(a[i].astype(np.float64) - b[i]).sum()) for a, b in zip(expected, results, strict=True)
        )
        if signal:
            noise.append(error / signal)
    mean = float(np.mean(noise)) if noise else float("nan")
    return round(-10 * float(np.log10(max(mean, 1e-20))), 2)


def agreement(expected: Sequence[Sequence[Array]], results: Sequence[Sequence[Array]]) -> dict[str, float]:
    """Returns the agreement of the first output.

    Classes are the second axis of an output of at least four axes (maps [n, classes, rows, columns]), else the last.

    Returns:
        {"agreement": the percentage of positions with the same class of largest value, or on the same side of .5 where
        there is one class; "cosine": the mean cosine of the values of the classes, of one class those of all
        positions}.
    """
    same, cosines = [], []
    for a, b in ((_classes_last(a[0]), _classes_last(b[0])) for a, b in zip(expected, results, strict=True)):
        one = a.shape[1] == 1
        same.append(((a > 0.5) == (b > 0.5)).mean() if one else (a.argmax(1) == b.argmax(1)).mean())
        a, b = (a.T, b.T) if one else (a, b)
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines.append(float(np.mean(((a * b).sum(1) + 1e-30) / (norms + 1e-30))))
    return {"agreement": round(100 * float(np.mean(same)), 2), "cosine": round(float(np.mean(cosines)), 5)}


def _classes_last(output: Array) -> Array:
    """Returns an output as float64 [positions, classes]."""
    output = np.atleast_1d(output)
    output = np.moveaxis(output, 1, -1) if output.ndim > 3 else output
    return output.reshape(-1, output.shape[-1]).astype(np.float64)


def accuracy(path: Path, engine: str, samples: Sequence[Feed], expected: Sequence[Sequence[Array]]) -> dict[str, Any]:
    """Returns SQNR and agreement in one engine; its error where it fails."""
    try:
        run = RUNS[engine](path, machine.cores())
        results = [at_tokens(sample, run(sample)) for sample in samples]
        return {"sqnr_db": sqnr(expected, results), **agreement(expected, results)}
    except Exception as error:  # any engine's own kinds
        return {"failed": harness.reason(error)}


def _prepare(original: Path, target: Path, samples: Path) -> tuple[list[Feed], list[list[Array]]]:
    modernize(original, target)
    tested = feeds(target, samples)
    run = RUNS["onnxruntime"](original, machine.cores())
    return tested, [at_tokens(sample, run(sample)) for sample in tested]


class Quantized(NamedTuple):
    """A model with its files.

    Attributes:
        name: Its name.
        calibrated: Number of calibration samples.
        tested: Test samples.
        files: Files by setting, "fp32" among them.
        results: Fields of the report by setting.
        left_out: Why a setting is left out.
    """

    name: str
    calibrated: int
    tested: list[Feed]
    files: dict[str, Path]
    results: list[dict[str, Any]]
    left_out: dict[str, str]


def quantized(
    name: str, source: Path, chosen: Sequence[str], folder: Path, core: int, advance: harness.Advance
) -> Quantized:
    """Quantizes a model of `source` by the chosen settings on one core, and judges the files."""
    original = source / f"{name}.onnx"
    work = Work(original, folder / f"{name}-fp32.onnx", source / f"{name}.calib.npz")
    test, cores = source / f"{name}.test.npz", {core}
    tested, expected = processes.in_process(_prepare, original, work.fp32, test, cores=cores)

    def build(setting: str, target: Path) -> dict[str, Any]:
        facts = processes.in_process(_make, setting, work, target, cores=cores)
        path = settings.written(target)
        engines = settings.engines_of(path)
        judged = {
            engine: processes.in_process(accuracy, path, engine, tested, expected, cores=cores) for engine in engines
        }
        return {"bytes": settings.size_of(path), "accuracy": judged, **facts}

    results, paths, left_out = settings.quantize_all(folder / name, chosen, build, advance)
    results.insert(0, {"setting": "fp32", "bytes": settings.size_of(original)})
    return Quantized(name, len(work.batches()), tested, {"fp32": original} | paths, results, left_out)


def compare(
    model: Quantized, rounds: int, folder: Path, sizes: Sequence[int] = (1,), *, opened: bool = False
) -> dict[str, Any]:
    """Returns all measurements of one model.

    Args:
        model: The model.
        rounds: Turns of each engine, 0: no timing.
        folder: Folder for scratch files.
        sizes: Sizes of the batches that are timed.
        opened: Whether the opening of files is measured.
    """
    core = {processes.last_core()}

    def timed(size: int) -> dict[str, Any]:
        batch = batch_of(model.tested, size)
        shapes = {name: array.shape for name, array in batch.items()}
        engines = settings.engines_of()
        times = processes.in_process(settings.time_files, model.files, engines, batch, rounds, shapes, cores=core)
        return harness.medians(times)

    times = [timed(size) if rounds else {} for size in sizes]
    files = {name: path for name, path in model.files.items() if name in ("fp32", "zoo")}
    openings = opening.costs(files, settings.engines_of(), model.tested[0], folder) if opened else {}
    return {
        "model": model.name,
        "samples": {"calibration": model.calibrated, "test": len(model.tested)},
        "results": model.results,
        "left_out": model.left_out,
        "batch": sizes[0],
        "milliseconds": times[0],
        "larger": {str(size): figures for size, figures in zip(sizes[1:], times[1:], strict=True)},
        "opening": openings,
    }


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("folder", type=Path, help="with NAME.onnx, NAME.calib.npz and NAME.test.npz")
    parser.add_argument("models", nargs="?", help="models, comma-separated (default: all in the folder)")
    parser.names("--settings", "setting", SETTINGS)
    parser.numbers("--batch", "1", "numbers of samples of the timed batches")
    parser.count("--rounds", 9, "turns of each engine, 0: no timing", least=0)
    parser.add_argument("--opened", default="", metavar="MODEL,...", help="models with the costs of opening")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"models": [`compare`], "environment"}."""
    choices = sorted(path.stem for path in args.folder.glob("*.onnx") if path.with_suffix(".calib.npz").is_file())
    if not choices:
        raise RequestError(
            f"found no NAME.onnx beside a NAME.calib.npz in {args.folder}; name a folder that holds them"
        )
    names = harness.split_names("model", args.models or ",".join(choices), choices)
    opened = harness.split_names("model", args.opened, names) if args.opened else []
    facts = harness.environment(*PACKAGES, rounds=args.rounds)
    steps = len(names) * len(args.settings)
    with harness.folder(args.work) as folder, progress("comparing", steps) as advance:

        def quantize(name: str, core: int) -> Quantized:
            return quantized(name, args.folder, args.settings, folder, core, advance)

        def measured(model: Quantized) -> dict[str, Any]:
            return compare(model, args.rounds, folder, args.batch, opened=model.name in opened)

        models = processes.on_all_cores(quantize, names)
        return harness.gather("models", models, measured, args.output, facts)
