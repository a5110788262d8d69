"""OpenVINO as its users open it on one thread, and NNCF, its quantizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.core.batches import Batch


def infer_request(model: Any, shapes: Any = None, threads: int = 1, float32: bool = True, **settings: Any) -> Any:
    """Compiles a model for latency on the CPU.

    Args:
        model: A file, or a model of OpenVINO, which is not changed.
        shapes: What `reshape` takes, as static shapes are faster; None keeps the shapes of the model.
        threads: Number of threads.
        float32: Float operators compute in float32; else, as by default, in bfloat16 on CPUs that have it.
        settings: Settings of the plugin beside the usual ones.

    Returns:
        An `InferRequest`.
    """
    import openvino as ov

    usual = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }
    if float32:
        usual["INFERENCE_PRECISION_HINT"] = "f32"
    opened = ov.Core().read_model(model) if isinstance(model, str | Path) else model.clone()
    if shapes is not None:
        opened.reshape(shapes)
    return ov.Core().compile_model(opened, "CPU", usual | settings).create_infer_request()


def quantize(source: Any, samples: Iterable[Batch], **options: Any) -> Any:
    """Quantizes a model by NNCF's post-training quantization.

    A file is converted by OpenVINO before: on models of `Core.read_model`, NNCF's bias correction is skipped
    silently. Only OpenVINO runs the result.

    Args:
        source: Float32 ONNX file, or a model of OpenVINO.
        samples: Batches of calibration; all of them are used.
        options: Options of `nncf.quantize`.

    Returns:
        A model of OpenVINO.
    """
    import nncf  # type: ignore[import-untyped]
    import openvino as ov

    batches = list(samples)
    model = ov.convert_model(source) if isinstance(source, str | Path) else source
    return nncf.quantize(model, nncf.Dataset(batches), subset_size=len(batches), **options)


def save(model: Any, target: Path) -> None:
    """Writes a model as .xml and .bin, its weights in their own types."""
    import openvino as ov

    ov.save_model(model, target, compress_to_fp16=False)
