"""Self-check of int8 on this CPU: a layer that saturates 16-bit sums of products."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pipelines.engines.catalog import load
from pipelines.graph import edit, io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe


def largest_error(engine: str, reduced_range: bool = False) -> float:
    """Computes the largest |int8 - float| of a 256 x 64 linear layer on inputs near their maximum.

    With u8 255 and s8 127 in every product, pairwise sums exceed 16 bits unless the CPU sums in 32 bits.

    Args:
        engine: Name of the engine.
        reduced_range: Use 7-bit weights.

    Returns:
        The error relative to the largest output.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(0.8, 1.0, (32, 256)).astype(np.float32)
    weight = rng.uniform(0.5, 1.0, (256, 64)).astype(np.float32)
    source = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 256]))
    main = ir.Graph([source], [], nodes=[], opset_imports={"": 17}, name="layer")
    layer = edit.node("MatMul", [source, edit.initializer(main, "w", weight)], "y", dtype=ir.DataType.FLOAT)
    main.append(layer)
    main.outputs.extend(layer.outputs)
    model = ir.Model(main, ir_version=9)
    table = calibrate(model, [{"x": x}])
    quantized, _ = quantize(model, QuantRecipe(reduced_range=reduced_range), table)
    with tempfile.TemporaryDirectory() as folder:
        path = io.save(quantized, Path(folder) / "int8.onnx")
        y = load(path, engine).run({"x": x})["y"]
    expected = x @ weight
    return float(np.abs(y - expected).max() / np.abs(expected).max())
