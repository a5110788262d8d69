"""ONNX Runtime's CPU provider as a `Session`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.core.files import mapped
from pipelines.engines.contexts import Asynchronous
from pipelines.engines.session import Executed, Port, brief

_ORT_TYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
    "tensor(string)": np.object_,
} | {
    f"tensor({name})": np.dtype(name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}
_SHORT = {"float": "f32", "uint8": "u8", "int8": "s8", "int32": "s32", "int64": "s64"}


class OnnxRuntimeSession(Asynchronous):
    """Session of ONNX Runtime's CPU provider with all optimizations; threads may share it.

    Args:
        path: ONNX file.
        threads: Intra-op threads.
        model: Serialized model to open instead of the file, which then only serves as its name.
        optimize: Whether the graph is optimized; None for the class's default.

    Raises:
        RequestError: ONNX Runtime refuses the model, or an input has a type that numpy does not have.
    """

    engine = "onnxruntime"
    optimize = True

    def __init__(self, path: Path, threads: int, model: bytes | None = None, *, optimize: bool | None = None) -> None:
        self.path, self.threads = path, threads
        if optimize is not None:
            self.optimize = optimize
        self._model: str | bytes = model if model is not None else str(path)
        self._session = self._open()
        for arg in self._session.get_inputs():
            if arg.type not in _ORT_TYPES:
                raise RequestError(f"the input {arg.name} of {path} is a {arg.type}, which numpy does not support")
        self.inputs = {
            port.name: Port(
                np.dtype(_ORT_TYPES[port.type]), tuple(d if isinstance(d, int) else None for d in port.shape)
            )
            for port in self._session.get_inputs()
        }
        self._outputs = [port.name for port in self._session.get_outputs()]

    def _open(self, profile: str | None = None, optimized: Path | None = None) -> Any:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors come as exceptions
        if not machine.has_vnni():
            self._be_exact(options)
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = profile
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
            options.add_session_config_entry("session.save_model_format", "ORT")
        if not self.optimize:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = ort.InferenceSession(self._model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own kinds
            raise RequestError(f"onnxruntime cannot load {self.path}: {brief(error)}") from error
        if machine.beyond_memory(self.path):
            machine.read_single_pages(mapped(self.path))
        return session

    def _be_exact(self, options: Any) -> None:
        """Avoids the saturation of 16-bit pair sums without VNNI.

        Weights become uint8, one copy per reader, because onnxruntime fails on shared int8 weights.
        """
        import onnx  # imported here: not needed with VNNI or in native kernels
        import onnx_ir as ir

        from pipelines.graph import edit

        options.add_session_config_entry("session.x64quantprecision", "1")
        try:
            source = self._model
            model = ir.load(source) if isinstance(source, str) else ir.from_proto(onnx.load_from_string(source))
            ir.external_data.load_to_model(model)
        except Exception:  # onnxruntime reports the error
            return
        if edit.own_weights(model):
            self._model = ir.to_proto(model).SerializeToString()

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes the outputs of a batch, see `Runnable.run`."""
        try:
            results = self._session.run(self._outputs, dict(batch))
        except Exception as error:  # onnxruntime raises its own kinds
            raise RequestError(f"onnxruntime cannot run {self.path} on this batch: {brief(error)}") from error
        return dict(zip(self._outputs, results, strict=True))

    def exported(self, size: int) -> bytes:
        """Returns the graph optimized for this machine, in ONNX Runtime's own format.

        Args:
            size: Batch size; the graph serves all.
        """
        with tempfile.TemporaryDirectory() as folder:
            self._open(optimized=Path(folder) / "model.ort")
            return (Path(folder) / "model.ort").read_bytes()

    def executed(self, batch: Batch) -> list[Executed]:
        """Lists the operators of a profiled run, with the element type of their first input.

        Args:
            batch: Batch to run.
        """
        with tempfile.TemporaryDirectory() as folder:
            session = self._open(profile=str(Path(folder) / "profile"))
            session.run(None, dict(batch))
            events = json.loads(Path(session.end_profiling()).read_text())
        operators = []
        for event in events:
            arguments = event.get("args", {})
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                types = [next(iter(shapes)) for shapes in arguments.get("input_type_shape", []) if shapes]
                first = types[0] if types else ""
                operators.append(
                    Executed(event["name"].removesuffix("_kernel_time"), arguments["op_name"], _SHORT.get(first, first))
                )
        return operators
