"""Quantizers by their settings; a comparison quantizes once by each, judges the files and times them in turn."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.core import files, machine
from pipelines.core.batches import Batch
from pipelines.engines import catalog
from scripts.peers import harness
from scripts.peers.engines import onnx_runtime, open_vino

Array = NDArray[Any]
Run = Callable[[Batch], list[Array]]  # a batch -> the outputs in the order of the graph


class Work(Protocol):
    """Input of the process of one setting."""

    @property
    def fp32(self) -> Path:
        """The float32 ONNX file."""

    def batches(self, size: int = 1) -> list[Batch]:
        """Returns the calibration samples."""


Quantize = Callable[[Any, Path], dict[str, Any]]  # (work, target without suffix) -> facts for the report


def onnxruntime_static(method: str, **options: Any) -> Quantize:
    """Returns the quantize_static of onnxruntime, as its documentation recommends it."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        batches = work.batches(1)
        onnx_runtime.quantize_static(work.fp32, target.with_suffix(".onnx"), batches, method=method, **options)
        return {}

    return make


def onnxruntime_dynamic(work: Work, target: Path) -> dict[str, Any]:
    """Quantizes by the quantize_dynamic of onnxruntime."""
    onnx_runtime.quantize_dynamic(work.fp32, target.with_suffix(".onnx"))
    return {}


def nncf(**options: Any) -> Quantize:
    """Returns NNCF's quantizer of the model as OpenVINO converts it; "preset" and "model_type" by name."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        open_vino.save(
            open_vino.quantize(work.fp32, work.batches(1), **enumerated(options)), target.with_suffix(".xml")
        )
        return {}

    return make


def nncf_onnx(**options: Any) -> Quantize:
    """Returns NNCF's quantizer of the ONNX file itself."""

    def make(work: Work, target: Path) -> dict[str, Any]:
        import nncf as library  # type: ignore[import-untyped]
        import onnx

        samples = work.batches(1)
        data, count = library.Dataset(samples), len(samples)
        made = library.quantize(onnx.load(work.fp32), data, subset_size=count, **enumerated(options))
        onnx.save(made, target.with_suffix(".onnx"))
        return {}

    return make


def enumerated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of `nncf.quantize`, names replaced by members of its enumerations."""
    import nncf as library

    kinds = {"preset": library.QuantizationPreset, "model_type": library.ModelType}
    return {key: kinds[key](value) if key in kinds else value for key, value in options.items()}


# ----------------------------------------------------------------------------------------------------------- the models


def written(target: Path) -> Path:
    """Returns the file that a setting wrote: `target` with its suffix."""
    paths = (target.with_name(target.name + suffix) for suffix in (".onnx", ".xml"))
    return next(path for path in paths if path.is_file())


def size_of(path: Path) -> int:
    """Returns the bytes of a model, with the weights that OpenVINO or torch's dynamo exporter write beside it."""
    weights = path.with_suffix(".bin") if path.suffix == ".xml" else path.with_name(f"{path.name}.data")
    return path.stat().st_size + (weights.stat().st_size if weights.is_file() else 0)


def used(who: int = resource.RUSAGE_SELF) -> dict[str, Any]:
    """Returns {"seconds" of processor time, "peak_mb"} of this process, or of its children."""
    usage = resource.getrusage(who)
    return {"seconds": round(usage.ru_utime + usage.ru_stime, 1), "peak_mb": round(usage.ru_maxrss / 1024)}


def quantize_all(
    prefix: Path, settings: Sequence[str], build: Callable[[str, Path], dict[str, Any]], advance: harness.Advance
) -> tuple[list[dict[str, Any]], dict[str, Path], dict[str, str]]:
    """Builds and judges a model by every setting; results beside `prefix` are kept and not built again.

    Args:
        prefix: Files are PREFIX-SETTING and a suffix.
        settings: Names.
        build: (setting, target without suffix) -> fields of the result; writes the model.
        advance: Progress, one a setting.

    Returns:
        (results with "setting", the files by setting, the reason of each setting that is left out).
    """
    results: list[dict[str, Any]] = []
    paths: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    for setting in settings:
        target = prefix.with_name(f"{prefix.name}-{setting}")
        kept = prefix.with_name(f"{target.name}.json")
        with harness.leave_out(setting, left_out):
            if not kept.is_file():
                files.write_json(kept, {"setting": setting, **build(setting, target)})
            results.append(files.read_json(kept))
            paths[setting] = written(target)
        advance(1)
    return results, paths, left_out


# -------------------------------------------------------------------------------------------------------------- engines


def onnxruntime_run(path: Path, threads: int, shapes: Any = None) -> Run:
    """Opens a file in onnxruntime."""
    session = onnx_runtime.session(path, threads)
    return lambda batch: list(session.run(None, batch))


def openvino_run(path: Path, threads: int, shapes: Any = None, float32: bool = True) -> Run:
    """Opens a file in OpenVINO, with static `shapes` if there are any, see `open_vino.infer_request`."""
    request = open_vino.infer_request(path, shapes, threads, float32)
    count = len(request.model_outputs)

    def run(batch: Batch) -> list[Array]:
        request.infer(batch, share_inputs=shapes is not None)
        return [np.array(request.get_output_tensor(index).data) for index in range(count)]

    return run


def native_run(path: Path, threads: int, shapes: Any = None) -> Run:
    """Opens a file in this project's kernels, where it has such a form."""
    session = catalog.load(path, "native", threads)
    return lambda batch: list(session.run(batch).values())


RUNS: dict[str, Callable[..., Run]] = {
    "onnxruntime": onnxruntime_run,
    "openvino": openvino_run,
    "openvino-default": functools.partial(openvino_run, float32=False),
    "native": native_run,
}


def engines_of(path: Path | None = None) -> list[str]:
    """Returns the engines that open a file, or any; OpenVINO's default settings only where they compute in bfloat16."""
    names = [name for name in RUNS if name != "openvino-default" or machine.has_bf16()]
    return [name for name in names if path is None or path.suffix == ".onnx" or name.startswith("openvino")]


def time_files(
    paths: Mapping[str, Path], engines: Sequence[str], batch: Batch, rounds: int, shapes: Any = None
) -> dict[str, dict[str, list[float]]]:
    """Times the files in all engines in turn on one thread: {engine: {setting: milliseconds, one number a round}}.

    `shapes` are OpenVINO's: one shape, or by name of input; without any, OpenVINO takes those of the file.
    """
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for engine in engines:
        for name, path in paths.items():
            if engine not in engines_of(path):
                continue
            try:
                run = RUNS[engine](path, 1, shapes)
                run(batch)
            except Exception:  # the accuracy says why
                continue
            calls[engine, name] = lambda run=run: run(batch)  # type: ignore[misc]
    times: dict[str, dict[str, list[float]]] = {engine: {} for engine in engines}
    for (engine, name), taken in harness.in_turn(calls, rounds).items():
        times[engine][name] = taken
    return times
