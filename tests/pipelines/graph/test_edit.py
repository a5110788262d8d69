"""Edits that passes share: float16 weights, names of new initializers and nodes."""

import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import BRANCH, mlp, model, ops, run

from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, query


def test_float16_round_trip(rng, tmp_path):
    net, x = mlp(), rng.standard_normal((5, 8)).astype(np.float32)
    before = {name: query.constant(value) for name, value in net.graph.initializers.items()}
    full = run(net, x=x)["y"]

    edit.compress_fp16(net)
    small = io.save(net, tmp_path / "half.onnx")
    half = io.load(small)
    stored = {name: query.constant(value).dtype for name, value in half.graph.initializers.items()}
    assert stored == {"w.fp16": np.float16, "b": np.float32, "v": np.float32}  # those of 64 elements or more
    rounded = run(half, x=x)["y"]
    assert 0 < np.abs(rounded - full).max() < 0.05

    edit.expand_fp16(half)
    back = io.load(io.save(half, tmp_path / "full.onnx"))
    assert ops(back) == ["Gemm", "LeakyRelu", "MatMul"] and set(back.graph.initializers) == set(before)
    for name, value in back.graph.initializers.items():
        expected = before[name].astype(np.float16).astype(np.float32) if name == "w" else before[name]
        np.testing.assert_array_equal(query.constant(value), expected)
    np.testing.assert_array_equal(run(back, x=x)["y"], rounded)


def test_float16_halves_a_file_and_can_be_done_again(rng, tmp_path):
    weight = rng.standard_normal((200, 300)).astype(np.float32)
    net = model("(float[n,200] x) => (float[n,300] y) { y = MatMul(x, w) }", w=weight)
    full = io.save(net, tmp_path / "full.onnx").stat().st_size
    edit.compress_fp16(net)
    first = io.save(net, tmp_path / "half.onnx").read_bytes()
    assert len(first) < 0.51 * full
    edit.expand_fp16(net)
    edit.compress_fp16(net)
    assert io.save(net, tmp_path / "half.onnx").read_bytes() == first


def test_float16_of_a_weight_with_two_readers():
    net = model(
        "(float[n,9] x) => (float[n,9] y) { h = MatMul(x, w) y = MatMul(h, w) }", w=np.eye(9, dtype=np.float32) / 3
    )
    edit.compress_fp16(net)
    assert ops(net) == ["Cast", "MatMul", "MatMul"]
    edit.expand_fp16(net)
    assert ops(net) == ["MatMul", "MatMul"] and list(net.graph.initializers) == ["w"]


def test_a_weight_beyond_float16_is_refused(recwarn):
    net = model("(float[n,9] x) => (float[n,9] y) { y = MatMul(x, w) }", w=np.full((9, 9), 70000, np.float32))
    with pytest.raises(RequestError, match=r"weight w does not fit float16 \(largest magnitude 70000\)"):
        edit.compress_fp16(net)
    assert not recwarn.list


def test_expanding_leaves_other_casts_alone():
    text = "(float[n,9] x) => (double[9] y, float16[n,9] z) { y = Cast<to=11>(h) z = Cast<to=10>(x) }"
    net = model(text, h=np.ones(9, np.float16))
    edit.expand_fp16(net)
    assert ops(net) == ["Cast", "Cast"] and list(net.graph.initializers) == ["h"]


def test_expanding_float16_weights_of_other_exporters():
    net = model(
        "(float[n,3] x) => (float[n,3] y, float[3,3] z) { w = Cast<to=1>(half) y = MatMul(x, w) z = Cast<to=1>(half) }",
        half=np.eye(3, dtype=np.float16),
    )
    edit.expand_fp16(net)
    assert ops(net) == ["MatMul", "Cast"]  # the second one leaves the graph
    np.testing.assert_array_equal(run(net, x=np.ones((2, 3), np.float32))["y"], np.ones((2, 3)))


def test_new_initializers_get_names_of_their_own():
    net = mlp()
    names = [edit.initializer(net.graph, "w", np.zeros(1, np.float32)).name for _ in range(2)]
    assert names == ["w_1", "w_2"] and {"w", *names} <= set(net.graph.initializers)


def test_new_names_are_not_those_of_values_or_nodes():
    net = model(BRANCH)
    taken = query.used_names(net.graph)
    used = [value.name for node in ir.traversal.RecursiveGraphIterator(net.graph) for value in node.outputs]
    for name in (*used, *(value.name for value in net.graph.inputs)):
        assert name in taken and edit.initializer(net.graph, name, np.zeros(1, np.float32)).name == f"{name}_1"
    source = net.graph.inputs[0]
    made = [edit.node("Relu", [source], used[0], taken=taken) for _ in range(2)]
    assert [node.name for node in made] == [node.outputs[0].name for node in made] == [f"{used[0]}_1", f"{used[0]}_2"]
    assert edit.node("Relu", [source], used[0]).name == used[0]  # takes another one's place


def test_weights_that_several_operators_dequantize_get_copies_of_their_own():
    net = model(
        "(float[n,2] x) => (float[n,2] y) { a = DequantizeLinear(codes, s) b = DequantizeLinear(codes, t)"
        " c = MatMul(x, a) y = MatMul(c, b) }",
        codes=np.int8([[1, 2], [3, 4]]), s=np.float32(0.5), t=np.float32(2),
    )  # fmt: skip
    before = run(net, x=np.eye(2, dtype=np.float32))["y"]
    assert edit.own_weights(net) == 1 and edit.own_weights(net) == 0
    assert net.graph[0].inputs[0] is not net.graph[1].inputs[0]
    np.testing.assert_array_equal(run(net, x=np.eye(2, dtype=np.float32))["y"], before)
