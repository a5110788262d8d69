"""Int8 weights of layers inside subgraphs, and of recurrent layers."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import model, run

from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.qdq import weight_only
from pipelines.quantization.qdq.weight_only import NOTE
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_constants import FoldConstants


def whole_weights(found):
    """The names of the int8 initializers, and the elements of the float32 ones."""
    arrays = {name: value.const_value.numpy() for name, value in found.graph.initializers.items()}
    kept = sum(array.size for array in arrays.values() if array.dtype == np.float32)
    return sorted(name for name, array in arrays.items() if array.dtype == np.int8), kept


BRANCHES = """(float[n,40] x, bool c) => (float[n,32] y) {
    y = If(c) <then_branch = t () => (float[n,32] a) { a = MatMul(x, w) },
              else_branch = e () => (float[n,32] b) { m = MatMul(x, w) b = Gemm<transB=1>(m, v) }> }"""


@pytest.mark.parametrize("taken", [True, False])
def test_weights_of_both_branches_are_int8_and_stored_once(normal, taken):
    net, x, c = model(BRANCHES, w=normal(40, 32), v=normal(32, 32)), normal(16, 40), np.array(taken)
    result, report = quantize(net, QuantRecipe(), calibrate(net, [{"x": x, "c": c}]))
    noted = {op.name: (op.precision, op.reason) for op in report.operators if op.type != "If"}
    assert noted == {name: ("int8", NOTE) for name in ("a", "m", "b")}
    names, floats = whole_weights(result)
    assert names == ["v.quantized", "w.quantized"] and floats == 64  # the scales
    expected = run(net, x=x, c=c)["y"]
    np.testing.assert_allclose(run(result, x=x, c=c)["y"], expected, atol=0.03 * np.abs(expected).max())


def test_weights_of_a_loop_body_are_int8(normal):
    text = """(float[4,32] x, int64 count) => (float[4,32] y) {
        more = Constant<value = bool {1}>()
        y = Loop(count, more, x) <body = b (int64 i, bool go, float[4,32] h) => (bool on, float[4,32] out) {
            on = Identity(go) out = MatMul(h, w) }> }"""
    net, x, count = model(text, w=normal(32, 32) / 8), normal(4, 32), np.array(3)
    result, report = quantize(net, QuantRecipe(), calibrate(net, [{"x": x, "count": count}]))
    assert ("out", "int8") in {(op.name, op.precision) for op in report.operators}
    assert whole_weights(result)[0] == ["w.quantized"]
    expected = run(net, x=x, count=count)["y"]
    np.testing.assert_allclose(run(result, x=x, count=count)["y"], expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_weights_are_int8(normal, kind, gates, directions):
    way = "bidirectional" if directions == 2 else "forward"
    text = f"(float[5,n,48] x) => (float[5,d,n,32] y) {{ y = {kind}<hidden_size=32, direction='{way}'>(x, w, r) }}"
    weights = {"w": normal(directions, gates * 32, 48) / 8, "r": normal(directions, gates * 32, 32) / 8}
    net, x = model(text.replace("'", '"'), **weights), normal(5, 3, 48)
    result, report = quantize(net, QuantRecipe(), calibrate(net, [{"x": x}]))
    assert [(op.type, op.precision, op.reason) for op in report.operators] == [(kind, "int8", NOTE)]
    assert whole_weights(result)[0] == ["r.quantized", "w.quantized"]
    expected = run(net, x=x)["y"]
    np.testing.assert_allclose(run(result, x=x)["y"], expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("columns", "block"), [(64, 32), (100, 25), (48, 24), (40, 20), (31, 31), (37, 37), (22, 22), (74, 74)]
)
def test_a_large_weight_of_a_recurrent_layer_costs_its_block_alone(normal, columns, block):
    w = normal(1, 128, columns)
    w[..., 0] = 100
    text = "(float[5,n,c] x) => (float[5,d,n,32] y) { y = LSTM<hidden_size=32>(x, w, r) }"
    net = model(text.replace("n,c", f"n,{columns}"), w=w, r=normal(1, 128, 32))
    result, _ = quantize(net, QuantRecipe(), calibrate(net, [{"x": normal(5, 3, columns)}]))
    layer = next(node for node in result.graph if node.op_type == "LSTM")
    result.graph.outputs[0] = layer.inputs[1]
    errors = np.abs(run(result, x=normal(5, 3, columns))[layer.inputs[1].name] - w).max(axis=(0, 1))
    assert errors[:block].max() > 0.3 or block == columns
    assert (errors[block:] < 0.02).all()


def test_what_the_recipe_keeps_float_keeps_its_weights(normal):
    net, x, c = model(BRANCHES, w=normal(40, 32), v=normal(32, 32)), normal(16, 40), np.array(True)
    table = calibrate(net, [{"x": x, "c": c}])
    result, report = quantize(net, QuantRecipe(keep_float=("b",)), table)
    assert ("b", "float", "kept float by the recipe") in {(e.name, e.precision, e.reason) for e in report.operators}
    assert whole_weights(result)[0] == ["w.quantized"] and "v" in result.graph.initializers


@pytest.mark.parametrize(("text", "rounds"), [("Gemm<transB=1>(x, w)", True), ("MatMul(x, w)", False)])
def test_large_weights_of_a_float_layer_of_single_rows_are_rounded(normal, monkeypatch, text, rounds):
    monkeypatch.setattr(weight_only, "LARGE", 1600)
    net, x = model(f"(float[n,40] x) => (float[n,40] y) {{ y = {text} }}", w=normal(40, 40)), normal(16, 40)
    table = replace(calibrate(net, [{"x": x}]), keep_float={"y": "int8 costs"})
    result, report = quantize(net, QuantRecipe(), table)
    (layer,) = report.operators
    assert layer.precision == "float" and ("rounded to 8 bits" in layer.reason) == rounds
    (weight,) = [value.const_value.numpy() for value in result.graph.initializers.values()]
    scale = np.abs(weight).max(axis=1, keepdims=True) / 127
    assert np.array_equal(np.rint(weight / scale) * scale, weight) == rounds
    np.testing.assert_allclose(weight, net.graph.initializers["w"].const_value.numpy(), atol=0.03)


def test_constants_inside_a_branch_are_folded(normal):
    text = """(float[n,40] x, bool c) => (float[n,32] y) {
        y = If(c) <then_branch = t () => (float[n,32] a) { v = Transpose<perm=[1,0]>(w) a = MatMul(x, v) },
                  else_branch = e () => (float[n,32] b) { u = Transpose<perm=[1,0]>(w) b = MatMul(x, u) }> }"""
    net, x, c = model(text, w=normal(32, 40)), normal(4, 40), np.array(True)
    expected = run(net, x=x, c=c)["y"]
    rewrite(net, [FoldConstants()])
    kinds = [node.op_type for node in ir.traversal.RecursiveGraphIterator(net.graph)]
    assert sorted(kinds) == ["If", "MatMul", "MatMul"]
    np.testing.assert_allclose(run(net, x=x, c=c)["y"], expected, rtol=1e-5)
