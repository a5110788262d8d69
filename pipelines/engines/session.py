"""Engines behind one small protocol: onnxruntime and OpenVINO here, `pipelines.engines.native_clicks` besides. Threads are always explicit."""

from __future__ import annotations

import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine, settings
from pipelines.core.batches import Batch, length
from pipelines.core.errors import RequestError, ZooError

logger = logging.getLogger(__name__)

BF16 = "bf16"


@dataclass(frozen=True)
class Executed:
    """One operator as an engine really ran it: its own type name and the element type it computed in ("u8", "s8", "f32", ...)."""

    name: str
    type: str
    precision: str


@dataclass(frozen=True)
class Port:
    """An input or output of a model: dtype, and shape with None for what is dynamic."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


class Runnable(Protocol):
    """What takes batches."""

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """{graph input: C-contiguous array, first axis = samples} -> {graph output: array the caller owns}. Any batch size, also 0.

        Raises RequestError where the engine refuses the batch.
        """


class Session(Runnable, Protocol):
    """A model ready to run."""

    engine: str
    threads: int
    inputs: dict[str, Port]

    def executed(self, batch: Batch) -> list[Executed]:
        """Run once with the engine's own profiler on and say what ran."""


_ORT_TYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.object_,
} | {f"tensor({name})": np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")}
_SHORT = {"float": "f32", "uint8": "u8", "int8": "s8", "int32": "s32", "int64": "s64"}


class OnnxRuntimeSession:
    """onnxruntime's CPU provider, every optimization on. `model`: the serialized model, where `path` only names it."""

    engine = "onnxruntime"
    optimize = True

    def __init__(self, path: Path, threads: int, model: bytes | None = None) -> None:
        self.path, self.threads = path, threads
        self._model: str | bytes = model if model is not None else str(path)
        self._session = self._open()
        self.inputs = {
            each.name: Port(np.dtype(_ORT_TYPES[each.type]), tuple(d if isinstance(d, int) else None for d in each.shape))
            for each in self._session.get_inputs()
        }
        self._outputs = [each.name for each in self._session.get_outputs()]

    def _open(self, profile: str | None = None, optimized: Path | None = None) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        if not machine.has_vnni():  # else sums of pairs of products saturate in 16 bits
            options.add_session_config_entry("session.x64quantprecision", "1")
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = profile
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
            options.add_session_config_entry("session.save_model_format", "ORT")
        if not self.optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return ort.InferenceSession(self._model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own kinds
            raise RequestError(f"onnxruntime cannot load {self.path}: {_line(error)}") from error

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Session`."""
        try:
            results = self._session.run(self._outputs, dict(batch))
        except Exception as error:  # onnxruntime raises its own kinds
            raise RequestError(f"onnxruntime cannot run {self.path} on this batch: {_line(error)}") from error
        return dict(zip(self._outputs, results, strict=True))

    def exported(self, size: int) -> bytes:
        """The graph as it was optimized for this machine, in onnxruntime's own format, for any batch size."""
        with tempfile.TemporaryDirectory() as folder:
            self._open(optimized=Path(folder) / "model.ort")
            return (Path(folder) / "model.ort").read_bytes()

    def executed(self, batch: Batch) -> list[Executed]:
        """See `Session`. The element type is that of the operator's first input."""
        with tempfile.TemporaryDirectory() as folder:
            session = self._open(profile=str(Path(folder) / "profile"))
            session.run(None, dict(batch))
            events = json.loads(Path(session.end_profiling()).read_text())
        found = []
        for event in events:
            arguments = event.get("args", {})
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                types = [next(iter(each)) for each in arguments.get("input_type_shape", []) if each]
                first = types[0] if types else ""
                found.append(Executed(event["name"].removesuffix("_kernel_time"), arguments["op_name"], _SHORT.get(first, first)))
        return found


def openvino() -> Any:
    """The library, without the telemetry to Google Analytics that it begins when it is imported."""
    try:
        from openvino_telemetry.utils.opt_in_checker import ConsentCheckResult, OptInChecker
    except ImportError:
        pass  # there is none
    else:
        OptInChecker.check = lambda *_, **__: ConsentCheckResult.DECLINED
    import openvino

    return openvino


class OpenVinoSession:
    """OpenVINO's CPU plugin. Shapes are compiled static, one compilation a batch size, since dynamic ones cost it a third of its speed.

    The first batch's size is compiled as it is, later ones as the next power of two, and a batch is padded to a compiled size of up to
    twice its own (the last chunk of a stream), so that few sizes are ever compiled. Compiled models are cached on disk. `model`: the
    serialized model, where `path` only names it. precision: "bf16" computes in bfloat16 what is float in the model, any other in float32.
    """

    engine = "openvino"
    cached = True

    def __init__(self, path: Path, threads: int, model: bytes | None = None, precision: str = "") -> None:
        ov = openvino()
        self.path, self.threads = path, threads
        self._float_type = precision if precision == BF16 else "f32"  # some machines would compute in bf16 unless told
        self._model: str | bytes = model if model is not None else str(path)
        self._core = ov.Core()
        try:
            if self.cached:
                self._core.set_property({"CACHE_DIR": str(settings.home() / "openvino")})
        except RuntimeError as error:
            logger.warning("openvino compiles without a cache: %s", _line(error))
        try:
            found = self._core.read_model(self._model)
        except Exception as error:  # openvino raises RuntimeError with a page of text
            raise RequestError(f"openvino cannot load {path}: {_line(error)}") from error
        self.inputs = {
            port.any_name: Port(
                np.dtype(port.element_type.to_dtype()), tuple(None if d.is_dynamic else d.get_length() for d in port.partial_shape)
            )
            for port in found.inputs
        }
        self._outputs = [port.any_name for port in found.outputs]  # a compiled one may have names of others, too
        self._compiled: dict[int, Any] = {}

    def _size(self, count: int) -> int:
        """The static batch size that `count` samples run at."""
        near = [each for each in self._compiled if count <= each <= 2 * count]
        if near or not self._compiled:
            return min(near, default=max(count, 1))
        return 1 << max(count - 1, 0).bit_length()

    def _compile(self, size: int) -> Any:
        if size not in self._compiled:
            self._compiled[size] = self._made(self._core, size).create_infer_request()
        return self._compiled[size]

    def _made(self, core: Any, size: int) -> Any:
        model = core.read_model(self._model)
        shapes = {name: [size, *(-1 if d is None else d for d in port.shape[1:])] for name, port in self.inputs.items()}
        options = {
            "INFERENCE_NUM_THREADS": self.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": self._float_type,
            "ENABLE_CPU_PINNING": False,  # the caller's own pinning (taskset) holds
        }
        try:
            model.reshape(shapes)
            return core.compile_model(model, "CPU", options)
        except RuntimeError as error:
            raise ZooError(f"openvino cannot compile {self.path} for batch size {size}: {_line(error)}") from error

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Session`."""
        if set(batch) != set(self.inputs):
            raise RequestError(f"found inputs {', '.join(batch) or 'none'}; {self.path} takes {', '.join(self.inputs)}")
        count, *others = {len(array) for array in batch.values()}
        if others:  # padding would hide it
            raise RequestError(f"the inputs for {self.path} hold {count} and {others[0]} samples; wanted the same number in each")
        size = self._size(count)
        request = self._compile(size)
        padded = {name: array if size == count else _pad(array, size) for name, array in batch.items()}
        try:
            results = request.infer(padded, share_inputs=True)
        except RuntimeError as error:
            raise RequestError(f"openvino cannot run {self.path} on this batch: {_line(error)}") from error
        # outputs are copied by infer
        return {
            name: array[:count] if array.shape[:1] == (size,) else array
            for name, array in zip(self._outputs, results.values(), strict=True)
        }

    def exported(self, size: int) -> bytes:
        """The model as it is compiled for this machine and batch size."""
        fresh = self._made(openvino().Core(), size)  # what comes from the cache is exported as something that cannot be read (2026.4)
        found: bytes = fresh.export_model().getvalue()
        return found

    def executed(self, batch: Batch) -> list[Executed]:
        """See `Session`. From the compiled (runtime) model; constants and shape arithmetic are left out."""
        request = self._compile(self._size(length(batch)))
        found = []
        for op in request.get_compiled_model().get_runtime_model().get_ordered_ops():
            info = op.get_rt_info()
            kind, precision = _text(info, "layerType"), _text(info, "runtimePrecision")
            if kind not in ("Const", "Input", "Output"):
                found.append(Executed(op.get_friendly_name(), kind, {"i8": "s8", "i32": "s32"}.get(precision, precision)))
        return found


def _text(info: Any, key: str) -> str:
    value = info[key] if key in info else ""  # noqa: SIM401 (openvino's map has no get)
    return str(value.astype(str) if hasattr(value, "astype") else value)


def _pad(array: NDArray[Any], size: int) -> NDArray[Any]:
    """`array` with zeros appended along the first axis, up to `size`."""
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])


def _line(error: Exception) -> str:
    """What an engine's exception says, in one line and without the places in its source."""
    lines = [line for line in str(error).splitlines() if not line.startswith(("Exception from ", "Check '"))]
    return " ".join(" ".join(lines).split()) or type(error).__name__


ENGINES: dict[str, type[OnnxRuntimeSession] | type[OpenVinoSession]] = {"onnxruntime": OnnxRuntimeSession, "openvino": OpenVinoSession}


def available() -> list[str]:
    """The engines whose library is installed, in order of preference."""
    import importlib.util

    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def exact(engine: str) -> bool:
    """Whether an engine sums int8 products without saturating on this CPU, whatever the weights: without VNNI, OpenVINO does not."""
    return engine != "openvino" or machine.has_vnni()


def computes(engine: str, precision: str) -> bool:
    """Whether an engine has a precision: bfloat16 is OpenVINO's alone."""
    return precision != BF16 or engine == "openvino"


def require_precision(precision: str, engine: str = "openvino") -> None:
    """Raise RequestError where the engine or this CPU does not compute in `precision`."""
    if not computes(engine, precision):
        raise RequestError(f"the engine {engine} does not compute in {precision}; choose openvino, or fp32 or int8")
    if precision == BF16 and not machine.has_bf16():
        raise RequestError(f"{machine.cpu()['name']} does not compute in bf16 (no avx512_bf16, no amx_bf16); choose fp32 or int8")


def load(path: str | Path, engine: str, threads: int = 1, precision: str = "", model: bytes | None = None) -> Session:
    """Open a model file in one engine ("onnxruntime" or "openvino") with `threads` intra-op threads.

    precision: "bf16" computes in bfloat16 what is float in the model; any other is only a name for what the file holds.
    model: the serialized model, where `path` only names the file that it was made from.
    Raises RequestError for an unknown or missing engine, a missing file, a model that the engine refuses, or a CPU or engine without bf16.
    """
    if engine not in ENGINES:
        raise RequestError(f"unknown engine {engine!r}; choose auto, {' or '.join(ENGINES)}")
    if engine not in available():
        raise RequestError(f"{engine} is not installed; run: pip install {engine}")
    machine.require_threads(threads)
    if not Path(path).is_file():
        raise RequestError(f"no model file at {path}")
    require_precision(precision, engine)
    if precision == BF16:
        return OpenVinoSession(Path(path), threads, model, precision)
    return ENGINES[engine](Path(path), threads, model)
