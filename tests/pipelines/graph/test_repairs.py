"""Files that onnxruntime runs, or ran, and that onnx's checker or onnx_ir refuses."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.quantizing import decibels
from helpers.rewriting import run

from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

DENSE = "(float[n,8] x) => (float[n,4] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) }"


def parsed(normal):
    proto = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {DENSE}')
    arrays = {"w": normal(8, 8), "v": normal(8, 4)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


@pytest.mark.parametrize("side", ["input", "output"])
def test_an_input_or_output_without_a_shape(normal, tmp_path, side):
    proto, x = parsed(normal), normal(16, 8)
    expected = run(ir.from_proto(proto), x=x)["y"]
    getattr(proto.graph, side)[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, tmp_path / "m.onnx")
    net = io.load(tmp_path / "m.onnx")
    int8, _ = quantize(net, QuantRecipe(), calibrate(net, [{"x": x}], "minmax"))
    again = io.load(io.save(int8, tmp_path / "int8.onnx"))
    assert decibels(run(again, x=x)["y"], expected) > 30


def test_operators_of_one_name_are_told_apart(normal, tmp_path):
    proto, x = parsed(normal), normal(16, 8)
    expected = run(ir.from_proto(proto), x=x)["y"]
    for node in proto.graph.node:
        node.name = "layer"
    proto.graph.node[1].name = "y"
    onnx.save(proto, tmp_path / "m.onnx")
    net = io.load(tmp_path / "m.onnx")
    assert [node.name for node in net.graph] == ["layer", "y", "layer_0"]
    np.testing.assert_array_equal(run(net, x=x)["y"], expected)


def test_a_sparse_constant_is_made_dense(normal, tmp_path):
    proto, x = parsed(normal), normal(16, 8)
    values = onnx.helper.make_tensor("values", onnx.TensorProto.FLOAT, [3], [1.0, 2.0, -1.0])
    places = onnx.helper.make_tensor("places", onnx.TensorProto.INT64, [3], [0, 9, 31])
    sparse = onnx.helper.make_sparse_tensor(values, places, [8, 4])
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["s"], sparse_value=sparse))
    proto.graph.node[-1].input[1] = "s"
    onnx.save(proto, tmp_path / "m.onnx")
    dense = np.zeros(32, np.float32)
    dense[[0, 9, 31]] = 1, 2, -1
    w = onnx.numpy_helper.to_array(proto.graph.initializer[0])
    output = run(io.load(tmp_path / "m.onnx"), x=x)["y"]
    np.testing.assert_allclose(output, np.maximum(x @ w, 0) @ dense.reshape(8, 4), rtol=1e-5, atol=1e-6)
