"""model.npz to fp32.onnx: a dynamic batch, stable names."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from toy_sums.data import COLUMNS


def freeze(folder):
    """Write fp32.onnx: numbers float32 [batch, 8] -> sum float32 [batch, 1]."""
    with np.load(folder / "model.npz") as weights:
        constants = [numpy_helper.from_array(weights[name], name) for name in ("first", "second")]
    nodes = [
        helper.make_node("MatMul", ["numbers", "first"], ["hidden"], name="hidden"),
        helper.make_node("Relu", ["hidden"], ["positive"], name="relu"),
        helper.make_node("MatMul", ["positive", "second"], ["sum"], name="sum"),
    ]
    inputs = [helper.make_tensor_value_info("numbers", onnx.TensorProto.FLOAT, ["batch", COLUMNS])]
    outputs = [helper.make_tensor_value_info("sum", onnx.TensorProto.FLOAT, ["batch", 1])]
    graph = helper.make_graph(nodes, "sums", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "fp32.onnx")
    return {"nodes": len(nodes)}
