"""Graphs that select rows by their data, and outputs that are no float tensors: quantized, and compared on floats."""

import numpy as np
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run

from pipelines.analysis.summary import summarize
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import observe
from pipelines.quantization.calibration.compared_outputs import ComparedOutputs, OutputSqnr
from pipelines.quantization.calibration.float_layers import FloatLayers
from pipelines.quantization.calibration.range_search import output_sqnr
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

TOKENS = """(float[b,32] x) => (float[k,8] chosen, float[b,8] all) <float limit = {{{limit}}}, int64[1] flat = {{-1}}> {{
    g = Gemm(x, W, w) h = Relu(g) s = ReduceMean<axes=[1], keepdims=0>(x)
    m = Greater(s, limit) n = {choice} r = Gather<axis=0>(h, i)
    o = Gemm(r, V, w) p = Relu(o) chosen = Gemm(p, U) all = Gemm(h, U) }}"""
NON_ZERO = "NonZero(m) i = Reshape(n, flat)"
COMPRESS = "Shape<start=0, end=1>(x) z = Squeeze(n) f = Range(start, z, step) i = Compress<axis=0>(f, m)"
CROPS = """(float[b,3,8,8] x, float limit) => (float[k,5] chosen) <int64[1] first = {0}> {
    c = Conv<pads=[1,1,1,1]>(x, K, k) h = Relu(c) s = ReduceMean<axes=[1,2,3], keepdims=0>(x)
    m = Greater(s, limit) n = NonZero(m) i = Squeeze(n, first) r = Gather<axis=0>(h, i)
    o = Conv<pads=[1,1,1,1]>(r, L, k) p = Relu(o) q = GlobalAveragePool(p) f = Flatten(q) chosen = Gemm(f, V) }"""


def quantized(found, batches, **options):
    table = auto_calibrate(found, QuantRecipe(**options), batches)
    int8, report = quantize(found, QuantRecipe(**options), table)
    return int8, summarize(found, int8, report, table, batches)


def tokens(choice=NON_ZERO, limit=0.25, **more):
    normal = normals(1)
    weights = {"W": normal(32, 64) / 6, "w": normal(64), "V": normal(64, 64) / 8, "U": normal(64, 8) / 8}
    return model(TOKENS.format(limit=limit, choice=choice), **weights, **more)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize(("choice", "more"), [(NON_ZERO, {}), (COMPRESS, {"start": np.int64(0), "step": np.int64(1)})])
def test_layers_of_selected_rows_are_int8_and_compared(choice, more, search):
    net, batches = tokens(choice, **more), [{"x": normals(seed)(16, 32)} for seed in range(4)]
    int8, summary = quantized(net, batches, search=search)
    assert summary["int8_layers"] == summary["layers"] == 4
    compared = ComparedOutputs.of(net)
    assert compared.outputs == (1, 0) and compared.varying == {
        1
    }  # the rows themselves, where both models chose as many
    assert 30 < summary["sqnr_db"] < 60
    empty = {"x": np.full((3, 32), -1, np.float32)}
    assert run(int8, **empty)["chosen"].shape == (0, 8)


def test_no_row_is_selected_by_any_sample():
    net = tokens(limit=100)
    int8, summary = quantized(net, [{"x": normals(0)(48, 32)}])
    assert summary["int8_layers"] >= 2 and summary["sqnr_db"] > 30
    assert run(int8, x=normals(0)(3, 32))["chosen"].shape == (0, 8)


def test_crops_of_a_two_stage_detector():
    normal = normals(3)
    weights = {"K": normal(8, 3, 3, 3) / 5, "k": normal(8), "L": normal(8, 8, 3, 3) / 8, "V": normal(8, 5)}
    net = model(CROPS, **weights)
    batches = [{"x": normals(seed)(4, 3, 8, 8), "limit": np.array(0.05, np.float32)} for seed in range(8)]
    assert any(run(net, **batch)["chosen"].shape[0] == 0 for batch in batches)
    int8, summary = quantized(net, batches)
    assert summary["int8_layers"] == summary["layers"] == 3 and 25 < summary["sqnr_db"] < 60
    for batch in batches:
        assert run(int8, **batch)["chosen"].shape == run(net, **batch)["chosen"].shape


def test_a_sequence_is_compared_by_the_tensor_that_it_was_split_from():
    text = """(float[b,16] x) => (seq(float[b,k]) parts) <int64[2] sizes = {3, 9}> {
        g = Gemm(x, W) h = Relu(g) y = Gemm(h, V) parts = SplitToSequence<axis=1>(y, sizes) }"""
    normal = normals(4)
    net = model(text, W=normal(16, 32) / 4, V=normal(32, 12) / 5)
    batches = [{"x": normals(seed)(16, 16)} for seed in range(4)]
    int8, summary = quantized(net, batches)
    assert summary["int8_layers"] == 2 and 30 < summary["sqnr_db"] < 60
    assert ComparedOutputs.of(net).inner == ("y",)
    assert [part.shape for part in run(int8, **batches[0])["parts"]] == [(16, 3), (16, 9)]


def test_a_sequence_between_layers():
    text = """(float[b,16] x) => (float[b,8] y) <int64[2] sizes = {5, 27}, int64 one = {1}> {
        g = Gemm(x, W) h = Relu(g) s = SplitToSequence<axis=1>(h, sizes) a = SequenceAt(s, one)
        c = ConcatFromSequence<axis=1>(s) d = Concat<axis=1>(a, c) y = Gemm(d, V) }"""
    normal = normals(5)
    net = model(text, W=normal(16, 32) / 4, V=normal(59, 8) / 5)
    _, summary = quantized(net, [{"x": normals(seed)(16, 16)} for seed in range(4)])
    assert summary["int8_layers"] == 2 and 30 < summary["sqnr_db"] < 60


def test_class_numbers_alone_are_compared_by_their_logits():
    text = "(float[b,16] x) => (int64[b] label) { g = Gemm(x, W) p = Softmax(g) label = ArgMax<axis=1, keepdims=0>(p) }"
    net = model(text, W=normals(6)(16, 8) / 4)
    batches = [{"x": normals(seed)(16, 16)} for seed in range(4)]
    _, summary = quantized(net, batches)
    assert ComparedOutputs.of(net).inner == ("g",)
    assert 30 < summary["sqnr_db"] < 60  # None before: nothing was compared


def test_half_outputs_are_compared():
    text = "(float[b,16] x) => (float16[b,8] y) { g = Gemm(x, W) y = Cast<to=10>(g) }"
    net = model(text, W=normals(6)(16, 8) / 4)
    batches = [{"x": normals(seed)(16, 16)} for seed in range(4)]
    _, summary = quantized(net, batches)
    assert 30 < summary["sqnr_db"] < 60
    assert output_sqnr(net, net, batches) == np.inf


def test_tensors_that_only_exist_as_integers_are_dequantized():
    """Int8 propagation moves the QuantizeLinear before a Transpose, which is read by an operator that selects rows."""
    text = """(float[8,b] x) => (float[k,8] y) <float limit = {0.1}, int64[1] flat = {-1}> {
        t = Transpose<perm=[1,0]>(x) a = Gemm(t, W) h = Relu(a) s = ReduceMean<axes=[1], keepdims=0>(h)
        m = Greater(s, limit) n = NonZero(m) i = Reshape(n, flat) r = Gather<axis=0>(h, i) y = Gemm(r, W) }"""
    net = model(text, W=normals(6)(8, 8) / 3)
    int8, summary = quantized(net, [{"x": normals(seed)(8, 16)} for seed in range(6)])
    compared = ComparedOutputs.of(net)
    assert "h" in compared.inner
    names = [str(value.name) for value in compared.cut(int8).graph.outputs]
    assert len(names) == len(compared.outputs) + len(compared.inner)
    assert all(value.dtype == ir.DataType.FLOAT for value in compared.cut(int8).graph.outputs)
    assert summary["sqnr_db"] > 25


def test_behind_a_topk_an_int8_model_goes_on_with_the_positions_of_the_float_model():
    """A detector's queries in another order had more error than all quantization."""
    text = """(float[n,40,8] x) => (float[n,10,4] y) {
        h = MatMul(x, w) s = ReduceMax<axes = [2], keepdims = 0>(h) v, i = TopK(s, k) u = Unsqueeze(i, two)
        g = Expand(u, wide) c = GatherElements<axis = 1>(h, g) y = MatMul(c, z) }"""
    normal = normals(3)
    constants = {"k": np.array([10]), "two": np.array([2]), "wide": np.array([1, 1, 16])}
    network = model(text, w=normal(8, 16), z=normal(16, 4), **constants)
    batches = [{"x": normals(seed)(4, 40, 8)} for seed in range(4)]
    int8, report = quantize(network, QuantRecipe(), observe(network, batches).table("minmax"))
    metric = OutputSqnr(network, batches)
    assert output_sqnr(network, int8, batches) < 10 and metric(int8) > 35
    assert set(metric.errors(metric.open(int8), slice(1)).noise) == {0, 1}  # of the output, and of the scores
    layers = [operator.name for operator in report.operators if operator.type == "MatMul"]
    parts = FloatLayers(metric, int8, network, layers)
    assert parts.sqnr((), slice(4)) == pytest.approx(metric(int8))
    assert parts.sqnr(layers, slice(4)) > 100
