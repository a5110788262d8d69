"""A model file opened with the default settings of an engine: no fixed shapes, no changes to the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.core.errors import ZooError
from pipelines.engines.session import Runnable, brief
from pipelines.engines.stock import available


class _OpenVino:
    """A file compiled by OpenVINO with its default hints: all cores, bfloat16 where the CPU has it."""

    def __init__(self, path: Path) -> None:
        from pipelines.engines.openvino.forms import Graph
        from pipelines.engines.openvino.session import library

        self.graph = Graph(path, model=None, threads=1, precision="", cached=False)  # for `require_correct_as_opened`
        try:
            self._compiled = library().Core().compile_model(str(path), "CPU")
            self._request = self._compiled.create_infer_request()
        except RuntimeError as error:
            raise ZooError(f"openvino cannot compile {path} as it is: {brief(error)}") from error

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Runnable`."""
        try:
            results = self._request.infer(dict(batch), share_inputs=True)
        except RuntimeError as error:
            raise ZooError(f"openvino cannot run the file as it is: {brief(error)}") from error
        return {port.get_any_name(): np.array(array) for port, array in results.items()}


class _OnnxRuntime:
    """A file in an onnxruntime session without options."""

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        try:
            self._session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own kinds
            raise ZooError(f"onnxruntime cannot open {path}: {brief(error)}") from error
        self._outputs = [port.name for port in self._session.get_outputs()]

    def run(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Runnable`."""
        try:
            return dict(zip(self._outputs, self._session.run(None, dict(batch)), strict=True))
        except Exception as error:  # onnxruntime raises its own kinds
            raise ZooError(f"onnxruntime cannot run the file: {brief(error)}") from error


def open_file(path: Path) -> tuple[str, Runnable]:
    """Opens a file by the default call of OpenVINO if it is installed, otherwise of ONNX Runtime.

    Args:
        path: ONNX file.

    Returns:
        The name of the engine, and the session.

    Raises:
        ZooError: The engine refuses the file.
    """
    if "openvino" in available():
        return "openvino", _OpenVino(path)
    return "onnxruntime", _OnnxRuntime(path)
