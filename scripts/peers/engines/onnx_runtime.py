"""onnxruntime as its users open it, and its own quantizers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.core.batches import Batch


def session(path: str | Path, threads: int = 1) -> Any:
    """Opens a file on the CPU, with a number of threads within an operator, one operator at a time."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def quantize_static(
    source: Path,
    target: Path,
    samples: Iterable[Batch],
    *,
    method: str = "MinMax",
    prepare: bool = True,
    activations: str = "QUInt8",
    **options: Any,
) -> None:
    """Quantizes a file by `quantize_static`: QDQ, weights int8 per output channel.

    Args:
        source: Float32 ONNX model.
        target: The int8 file.
        samples: Batches of calibration.
        method: Name of a `CalibrationMethod`.
        prepare: Run `quant_pre_process` before, as the documentation asks for; it merges MatMul and Add.
        activations: Name of a `QuantType`.
        options: Extra options of the quantizer.
    """
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = iter(samples)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            """Returns the next batch, or None."""
            return next(batches, None)

    with tempfile.TemporaryDirectory() as scratch:
        prepared = Path(scratch) / "prepared.onnx"
        if prepare:
            quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            prepared if prepare else source,
            target,
            Reader(),
            per_channel=True,
            activation_type=QuantType[activations],
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod[method],
            extra_options=options,
        )


def quantize_dynamic(source: Path, target: Path) -> None:
    """Quantizes a file by `quantize_dynamic`: weights int8 per output channel, activations at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, target, per_channel=True, weight_type=QuantType.QInt8)
