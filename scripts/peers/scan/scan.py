"""Every engine compared with ONNX Runtime at many batch sizes: zoo models, model folders and ONNX files.

Without names, all kinds are scanned: "shipped" models, "families" of click logs (trained first), and "foreign" networks
(third-party networks of `networks.py`, in float and quantized by `zoo quantize`). The samples of a named .onnx file are
in NAME.test.npz. Every model runs in each engine and precision in its own process, so that a crash is a line of the
report. "openvino-file" is the file opened with default settings and dynamic shapes; "onnxruntime" is compared with
itself at the largest batch. With --unchecked, OpenVINO runs with static shapes without its validation.

A result is wrong if it differs by more than rounding, by more than at the best batch size, and by more than int8
differs from float, unless the same samples differ as much in a larger batch.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch, resized
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.engines import catalog
from pipelines.engines.agreement import largest_difference
from pipelines.engines.openvino import forms
from scripts.peers import harness, processes

SIZES = "1,2,3,4,7,8,9,16,17,31,32,33,64,127,128"
SHORT_SAMPLES = 8  # samples of the batches that are shorter along other axes
LOG_FAMILIES = ("wide-deep", "deepfm", "dcn-v2", "dlrm", "autoint", "finalmlp", "gdcn", "two-tower")
SETTINGS = ("epochs=1", "l2_embeddings=10", "refit=false")
KINDS = ("shipped", "families", "foreign")
ENGINES = ("onnxruntime", "openvino", "openvino-file", "native")
ROUNDING = {"float": 1e-6, "int8": 1e-4}  # share of the power that engines may differ by
UNEVEN = 30  # times the least difference of all batch sizes
MAX_NOISE_RATIO = 4  # times the difference of int8 from float: a few samples may have more than all
DEPENDENT = ("set",)  # networks whose samples depend on each other
TOKENS = 0.9  # share of translations that are the same tokens in two engines
Run = Callable[[Batch], dict[str, NDArray[Any]]]


class Scan(NamedTuple):
    """The part of a scan that one process measures.

    Attributes:
        model: Name, model folder or .onnx file.
        precision: Precision of a model; "file" for an .onnx file.
        engine: Name of the engine, see `ENGINES`.
        sizes: Batch sizes.
        threads: Intra-op threads.
        unchecked: Whether OpenVINO runs with static shapes.
        data: Samples of a model folder; None for its own.
    """

    model: str
    precision: str
    engine: str
    sizes: Sequence[int]
    threads: int
    unchecked: bool
    data: str | None


# ------------------------------------------------------------------------------------------------------------- models


def trained(work: Path) -> list[Path]:
    """Trains every family of click logs on a synthetic log; models that are there are kept."""
    log = work / "shop.csv"
    if not log.is_file():
        processes.run([sys.executable, harness.ROOT / "scripts" / "synthesize_log.py", log, "-n", 6000])
    for family in LOG_FAMILIES:
        if not (work / family / "card.json").is_file():
            options = [word for setting in SETTINGS for word in ("--set", setting)]
            zoo("train", family, "--data", log, "-o", work / family, *options)
    return [work / family for family in LOG_FAMILIES]


def foreign(work: Path, names: Sequence[str]) -> list[Path]:
    """Writes the networks of `networks.NETWORKS` and their int8 files; files that are there are kept."""
    folder = work / "foreign"
    folder.mkdir(exist_ok=True)
    paths = []
    for name in names:
        path, int8 = folder / f"{name}.onnx", folder / f"{name}.int8.onnx"
        if not path.is_file():
            processes.in_process(write_network, name, folder)
        if not int8.is_file():
            samples = path.with_suffix(".calib.npz")
            zoo("quantize", path, "--calibration-data", samples, "-o", int8, "--effort", "fast")
        paths += [path, int8]
    return paths


def write_network(name: str, folder: Path) -> None:
    """See `networks.write`, which imports torch."""
    from scripts.peers.scan import networks

    networks.write(name, folder)


def zoo(*arguments: Any) -> None:
    """Runs a command of this project."""
    command = [sys.executable, "-m", "zoo", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=harness.ROOT)
    if done.returncode:
        raise ZooError(f"zoo {' '.join(command[3:])} failed: {done.stderr.strip().rpartition(chr(10))[2]}")


# ------------------------------------------------------------------------------------------------------------ scanning


def scan(case: Scan) -> dict[str, Any]:
    """Compares an engine with ONNX Runtime at every batch size, and on shorter samples where another axis is dynamic.

    Returns:
        {"shares": difference as a share of an output's power, by batch, "larger": the least difference of the same
        samples in a larger batch, by batch, "form": of OpenVINO where it is not the first, "noise": difference of int8
        from float}, or {"left_out": reason}.
    """
    if case.unchecked:
        forms.correct_form = lambda *_: forms.STATIC
    try:
        if case.precision == "file":
            run, reference, batch, axis, exact = _file(case)
        else:
            run, reference, batch, exact = _pipelines(case)
            axis = 0
        shares: dict[str, float] = {}
        larger: dict[str, float] = {}
        before: list[int] = []
        alone = Path(case.model).name.partition(".")[0] not in DEPENDENT
        whole = reference(batch) if case.engine == "onnxruntime" and alone else {}
        for name, example, size in _batches(batch, axis, case.sizes):
            expected = reference(example)
            if whole and name == str(size):
                expected = {
                    key: _cut(array, size, next(iter(batch.values())).shape[axis], axis) for key, array in whole.items()
                }
            outputs = run(example)
            shares[name] = difference(case.engine, outputs, expected)
            if name != str(size):
                continue
            for few in before:
                parts = (
                    {key: _cut(array, few, size, axis) for key, array in side.items()} for side in (outputs, expected)
                )
                share = difference(case.engine, *parts)
                larger[str(few)] = min(share, larger.get(str(few), np.inf))
            before = [count for count in (*before, size) if count < max(case.sizes)]
        noise = difference("int8", reference(batch), exact(batch)) if exact else None
    except ZooError as error:
        return {"left_out": harness.reason(error)}
    forms_used = [verdict.form for verdict in forms._VERDICTS.values() if verdict.form != forms.STATIC]
    return {"shares": shares, "larger": larger, "form": forms_used[0] if forms_used else "", "noise": noise}


def _file(case: Scan) -> tuple[Run, Run, dict[str, NDArray[Any]], int, Run | None]:
    path = Path(case.model)
    name = path.stem.removesuffix(".int8")
    with np.load(path.with_name(f"{name}.test.npz")) as arrays:
        batch = {key: arrays[key] for key in arrays.files}
    engine, _, opened = case.engine.partition("-")
    session = catalog.load(path, engine, case.threads)
    run: Run | None = session.run
    if opened:
        run = session.as_opened()  # type: ignore[attr-defined]
    if run is None:
        raise RequestError("the file has no dynamic shape or no int8 operator")
    own = path.with_name(f"{name}.onnx")
    exact = catalog.load(own, "onnxruntime").run if own != path and own.is_file() else None
    axis = int(name.endswith("time-first"))
    return run, catalog.load(path, "onnxruntime", case.threads).run, batch, axis, exact


def _pipelines(case: Scan) -> tuple[Run, Run, dict[str, NDArray[Any]], Run | None]:
    import zoo

    def opened(engine: str, precision: str = case.precision) -> Any:
        return zoo.pipeline(case.model, precision, engine, case.threads, max(case.sizes))

    pipeline, reference = opened(case.engine), opened("onnxruntime")
    batch = reference.preprocess(reference.example(max(case.sizes), case.data))
    exact = None
    with contextlib.suppress(ZooError):  # float weights that are not here
        exact = opened("onnxruntime", "fp32").predict if case.precision == "int8" else None
    return pipeline.predict, reference.predict, dict(batch), exact


def _batches(batch: Batch, axis: int, sizes: Sequence[int]) -> Iterator[tuple[str, Batch, int]]:
    """Yields (name, batch, size) of every size, and of shorter samples."""
    turned = {name: np.moveaxis(array, axis, 0) for name, array in batch.items()}

    def back(parts: Batch) -> dict[str, NDArray[Any]]:
        return {name: np.ascontiguousarray(np.moveaxis(array, 0, axis)) for name, array in parts.items()}

    for size in sizes:
        yield str(size), back(resized(turned, size)), size
    other = 1 - axis
    if axis or set(batch) == {"ids", "mask"}:  # time, or tokens
        for share in (0.9, 0.5, 0.3):
            few = back(resized(turned, SHORT_SAMPLES))
            cut = {name: np.take(array, range(int(array.shape[other] * share)), other) for name, array in few.items()}
            yield f"{SHORT_SAMPLES} at {share}", cut, SHORT_SAMPLES


def _cut(array: NDArray[Any], size: int, count: int, axis: int) -> NDArray[Any]:
    """Returns the first samples of an output, whose axis is that of the inputs, or the first."""
    place = next((dim for dim in (axis, 0) if array.ndim > dim and array.shape[dim] == count), None)
    return array if place is None else np.take(array, range(size), place)


def difference(engine: str, outputs: Batch, expected: Batch) -> float:
    """Returns the largest difference of the float outputs; infinite where shapes or too many tokens differ."""
    if "tokens" in expected:
        width = max(outputs["tokens"].shape[-1], expected["tokens"].shape[-1])
        pads = [((0, 0), (0, 0), (0, width - side["tokens"].shape[-1])) for side in (outputs, expected)]
        a, b = (np.pad(side["tokens"], pad) for side, pad in zip((outputs, expected), pads, strict=True))
        if (same := (a == b).all(axis=(1, 2)).mean()) < TOKENS and len(a) > 1:
            print(f"{engine}: {same:.0%} of {len(a)} translations are the same", file=sys.stderr)
        outputs, expected = ({"scores": side["scores"]} for side in (outputs, expected))
    if outputs.keys() != expected.keys():
        return float("inf")
    try:
        return largest_difference(engine, outputs, expected)[0]
    except ZooError:
        return float("inf")


def judged(case: Scan) -> dict[str, Any]:
    """Scans in a process of its own and judges the result."""
    row: dict[str, Any] = {"model": _name(case.model), "precision": case.precision, "engine": case.engine}
    try:
        result = processes.in_process(scan, case)
    except Exception as error:  # a crash, or an error of any library
        return row | {"verdict": "FAILED", "reason": harness.reason(error)}
    if "left_out" in result:
        folder = f"{Path(case.model).parent}/"
        return row | {"verdict": "left out", "reason": result["left_out"].replace(folder, "")}
    shares, noise = result["shares"], result["noise"]
    worst, least = max(shares, key=shares.__getitem__), min(shares.values())
    kind = "int8" if case.precision == "int8" or case.model.endswith(".int8.onnx") else "float"
    larger = result["larger"] | {str(max(case.sizes)): (noise or 0.0) / UNEVEN}  # of all samples: the error of int8
    faults = [batch for batch, share in shares.items() if share > _usual(kind, least, larger.get(batch, 0.0), noise)]
    if str(max(case.sizes)) in faults:
        faults = [batch for batch, share in shares.items() if share > _usual(kind, least, 0.0, noise)]
    worst = max(faults or [worst], key=shares.__getitem__)
    row |= {
        "verdict": "WRONG" if faults else "ok",
        "largest": _short(shares[worst]),
        "at": worst,
        "least": _short(least),
    }
    return row | ({"noise": _short(noise)} if noise is not None else {}) | {"reason": result["form"]}


def _usual(kind: str, least: float, larger: float, noise: float | None) -> float:
    """Returns the difference that a batch may have; larger: that of its samples in a larger one."""
    if kind == "float":
        return ROUNDING[kind]
    same = max(least, larger)
    return max(ROUNDING[kind], min(UNEVEN * same, max(np.inf if noise is None else MAX_NOISE_RATIO * noise, 2 * same)))


def _name(model: str) -> str:
    path = Path(model)
    return path.name if path.exists() else model


def _short(share: float) -> float | str:
    return float(f"{share:.2g}") if np.isfinite(share) else "inf"


# -------------------------------------------------------------------------------------------------------------- report


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("models", nargs="*", help="names, model folders and .onnx files (default: all of --kinds)")
    parser.names("--kinds", "kind", KINDS)
    parser.names("--engines", "engine", ENGINES)
    parser.names("--precisions", "precision", ("fp32", "int8"))
    parser.numbers("--sizes", SIZES, "batch sizes")
    parser.count("--threads", 1, "intra-op threads")
    parser.add_argument("--networks", metavar="NAMES", help="foreign networks, comma-separated (default: all)")
    parser.add_argument("--data", help="samples of the model folders (default: their own)")
    parser.add_argument("--unchecked", action="store_true", help="OpenVINO with static shapes, without its check")
    parser.work()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns {"results": [{"model", "precision", "engine", "verdict", "largest", "at", "least", ...}], "environment"}.

    Raises:
        ZooError: A model crashed, or an engine computes it wrongly; after the report is written.
    """
    with harness.folder(args.work) as work:
        data = {model: args.data for model in args.models} or all_models(args, work.absolute())
        scans = [
            Scan(model, precision, engine, args.sizes, args.threads, args.unchecked, rows)
            for model, rows in data.items()
            for precision in (["file"] if model.endswith(".onnx") else args.precisions)
            for engine in args.engines
            if _possible(model, precision, engine)
        ]
        facts = harness.environment("torch", rounds=1)
        with progress("scanning", len(scans)) as advance:

            def one(case: Scan) -> dict[str, Any]:
                row = judged(case)
                advance(1)
                print(" ".join(f"{value}" for value in row.values()), file=sys.stderr, flush=True)
                return row

            report = harness.gather("results", scans, one, args.output, facts)
    faults = [row for row in report["results"] if row["verdict"] in ("WRONG", "FAILED")]
    if faults:
        raise ZooError(f"{len(faults)} of {len(scans)} scans are wrong or crash, such as {faults[0]}")
    return report


def _possible(model: str, precision: str, engine: str) -> bool:
    """Whether an engine may run a model: native kernels compute int8, users open files."""
    if engine == "native":
        return precision == "int8" or model.endswith(".int8.onnx")
    return engine != "openvino-file" or model.endswith(".int8.onnx")


def all_models(args: argparse.Namespace, work: Path) -> dict[str, str | None]:
    """Returns the models of the kinds that are asked for, with their data."""
    import zoo as package

    data: dict[str, str | None] = {}
    if "shipped" in args.kinds:
        data |= {name: None for name in package.registry.hub().names()}
    if "families" in args.kinds:
        data |= {str(path): str(work / "shop.csv") for path in trained(work)}
    if "foreign" in args.kinds:
        from scripts.peers.scan.networks import NETWORKS

        names = harness.split_names("network", args.networks or ",".join(NETWORKS), NETWORKS)
        data |= {str(path): None for path in foreign(work, names)}
    return data
