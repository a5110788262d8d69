"""The quantization report: noise, ranges and saturation of every operator."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import EXACT, model, needs_vnni, run

from pipelines.analysis import report, report_html
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines.session import Executed
from pipelines.engines.stock import available
from pipelines.graph import io
from pipelines.quantization.algorithms.equalize_channels import scale_channels
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

X = np.random.default_rng(1).normal(size=(40, 3, 6, 6)).astype(np.float32)


def weights(*shape, seed=0):
    return (np.random.default_rng(seed).normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.fixture(scope="module")
def net():
    return model(
        """(float[n,3,6,6] x) => (float[n,4] y) {
            a = Conv<pads=[1,1,1,1]>(x, w1) ar = Relu(a) b = Conv<pads=[1,1,1,1]>(ar, w2) s = Add(b, ar) e = Erf(s)
            p = GlobalAveragePool(e) f = Flatten(p) y = Gemm(f, w3, b3) }""",
        w1=weights(8, 3, 3, 3),
        w2=weights(8, 8, 3, 3),
        w3=weights(8, 4),
        b3=weights(4),
    )


def explained(net, samples=X, recipe=None, cut=None, **options):
    recipe = recipe or QuantRecipe(observer="minmax")
    table = calibrate(net, [{"x": samples}], recipe.observer)
    int8, said = quantize(net, recipe, table)
    step = cut or len(samples)
    batches = ({"x": samples[start : start + step]} for start in range(0, len(samples), step))
    return int8, table, report.explain(net, int8, said, table, batches, **options)


@pytest.fixture(scope="module")
def found(net):
    return explained(net)


def operator(found, name):
    return next(node for node in found["operators"] if node["name"] == name)


def db(x, y):
    return 10 * np.log10((x.astype(np.float64) ** 2).sum() / ((x.astype(np.float64) - y) ** 2).sum())


def test_outputs_and_chain_are_measured_against_the_float_model(net, found):
    int8, _, what = found
    expected = db(run(net, x=X)["y"], run(int8, x=X)["y"])
    assert what["outputs"]["y"]["sqnr_db"] == operator(what, "y")["sqnr_db"] == pytest.approx(expected, abs=0.01)
    assert what["samples"] == len(X)


def test_a_layers_own_error_is_that_of_its_weights_and_the_rounding_of_its_input(net, found):
    _, _, what = found
    alone, table = (
        model("(float[n,3,6,6] x) => (float[n,8,6,6] a) { a = Conv<pads=[1,1,1,1]>(x, w1) }", w1=weights(8, 3, 3, 3)),
        None,
    )
    table = calibrate(alone, [{"x": X}], "minmax")
    int8, _ = quantize(alone, QuantRecipe(observer="minmax"), table)
    values = {output.name for output in int8.graph.outputs}
    assert values == {"a"}
    own = operator(what, "a")["own_db"]
    assert own == operator(what, "a")["sqnr_db"]  # the first layer: nothing came down the chain
    assert operator(what, "b")["own_db"] > operator(what, "b")["sqnr_db"]
    pair = db(run(alone, x=X)["a"], run(int8, x=X)["a"])
    assert own >= pair - 0.1  # the file's output is rounded once more


def test_layers_whose_channels_were_equalized_are_compared_so():
    net = model(
        "(float[n,3,6,6] x) => (float[n,4,6,6] y) { a = Conv(x, w1) b = Relu(a) y = Conv(b, w2) }",
        w1=weights(8, 3, 1, 1),
        w2=weights(4, 8, 1, 1),
    )
    factors = {"a": tuple(float(factor) for factor in np.linspace(0.5, 2, 8))}
    equalized = net.clone()
    scale_channels(equalized, factors)
    table = replace(calibrate(equalized, [{"x": X}], "minmax"), graph=io.digest(net), equalization=factors)
    int8, said = quantize(net, QuantRecipe(observer="minmax"), table)
    layers = [
        node for node in report.explain(net, int8, said, table, [{"x": X}])["operators"] if node["type"] == "Conv"
    ]
    assert len(layers) == 2 and all(node["sqnr_db"] > 30 and node["own_db"] > 30 for node in layers)
    assert min(report.noise_of_layers(net, int8, said, table, [{"x": X}]).values()) > 30


def test_a_float_operator_has_its_reason(found):
    erf = operator(found[2], "e")
    assert erf["precision"] == "float" and erf["reason"] and "e" not in found[2]["damaging"]
    assert found[2]["counts"]["int8"] >= 3


def test_the_most_damaging_layer_comes_first(net):
    spoilt = net.clone()
    w = weights(8, 8, 3, 3)
    w[:, 3] *= 200  # a channel that the input's scale leaves no steps for
    first = weights(8, 3, 3, 3)
    first[3] /= 200
    for name, array in (("w2", w), ("w1", first)):
        spoilt.graph.initializers[name].const_value = ir.tensor(array, name=name)
    what = explained(spoilt)[2]
    own = {node["name"]: node["own_db"] for node in what["operators"]}
    assert what["damaging"][0] == "b" and own["b"] == min(own[name] for name in what["damaging"])


def test_tensors_show_scale_saturation_and_rounding(net):
    samples = np.tile(X, (5, 1, 1, 1))
    samples[0, 0, 0, 0] = 500.0
    recipe = QuantRecipe(observer="percentile")
    int8, table, what = explained(net, samples, recipe)
    x, seen = what["tensors"]["x"], table.tensors["x"]
    assert x["maximum"] == 500.0 and x["high"] < 20 and x["method"] == "percentile"
    initializers = int8.graph.initializers
    assert x["scale"] == pytest.approx(float(initializers["x.scale"].const_value.numpy()))
    codes = np.rint(samples / np.float32(x["scale"])) + x["zero_point"]
    assert x["saturated"] == pytest.approx(((codes < 0) | (codes > 255)).mean(), abs=1e-4) and x["saturated"] > 0
    rounded = (np.clip(codes, 0, 255) - x["zero_point"]) * np.float32(x["scale"])
    assert x["sqnr_db"] == pytest.approx(db(samples, rounded), abs=0.01)
    assert sum(x["counts"]) == seen.count and len(x["edges"]) == len(x["counts"]) + 1


def test_nothing_saturates_with_minmax(found):
    assert {tensor["saturated"] for tensor in found[2]["tensors"].values()} == {0.0}


@pytest.mark.parametrize("cut", [1, 7, 16])
def test_batches_of_any_size_show_the_same(net, found, cut):
    what = explained(net, cut=cut)[2]
    for one, other in zip(what["operators"], found[2]["operators"], strict=True):
        assert one["sqnr_db"] == pytest.approx(other["sqnr_db"], abs=0.02)
        assert one["own_db"] == pytest.approx(other["own_db"], abs=0.02)


def test_little_memory_means_groups_and_the_same_result(net, found, monkeypatch):
    monkeypatch.setattr(report, "MEMORY", 4000)
    groups = []
    whole = report._TensorGroup.__init__
    monkeypatch.setattr(
        report._TensorGroup, "__init__", lambda self, pair, names: (groups.append(names), whole(self, pair, names))[1]
    )
    what = explained(net)[2]
    assert len(groups) > 2
    assert [node["own_db"] for node in what["operators"]] == pytest.approx(
        [node["own_db"] for node in found[2]["operators"]], abs=0.02
    )


def test_a_fixed_batch_size():
    fixed = model("(float[4,3] x) => (float[4,2] y) { y = Gemm(x, w) }", w=weights(3, 2))
    what = explained(fixed, np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32))[2]
    assert what["samples"] == 8 and what["outputs"]["y"]["sqnr_db"] > 30


def test_tables_of_embeddings_and_bytes_between_operators():
    net = model(
        "(int64[n,2] ids) => (float[n,3] y) { g = Gather(t, ids) f = Flatten(g) y = Gemm(f, w) }",
        t=weights(10, 4),
        w=weights(8, 3),
    )
    ids = np.random.default_rng(0).integers(0, 10, (32, 2))
    table = calibrate(net, [{"ids": ids}])
    int8, said = quantize(net, QuantRecipe(), table)
    what = report.explain(net, int8, said, table, [{"ids": ids}])
    assert what["outputs"]["y"]["sqnr_db"] > 30 and operator(what, "y")["own_db"] > 30
    assert all(node["precision"] == "int8" for node in what["operators"])


def test_bytes_that_are_moved_before_a_product_stand_for_their_own_tensors():
    net = model(
        """(float[n,4,6] x) => (float[n,2,4,4] y) { q0 = MatMul(x, w) q1 = Reshape(q0, heads) q = Transpose<perm=[0,2,1,3]>(q1)
            k1 = Reshape(q0, heads) k = Transpose<perm=[0,2,3,1]>(k1) y = MatMul(q, k) }""",
        w=weights(6, 6),
        heads=np.array([0, 4, 2, 3]),
    )
    x = np.random.default_rng(3).normal(size=(40, 4, 6)).astype(np.float32)
    what = explained(net, x)[2]
    assert what["outputs"]["y"]["sqnr_db"] > 30
    assert (
        operator(what, "q1")["sqnr_db"] == pytest.approx(operator(what, "q")["sqnr_db"])
        and operator(what, "q")["sqnr_db"] > 30
    )


@needs_vnni
def test_products_with_ranges_of_run_time():
    """One reads a tensor called like what the report itself feeds to the other."""
    net = model(
        "(float[n,6] x) => (float[n,4] y) { h = Gemm(x, w, b) r = Relu(h) y = MatMul(r, v) }",
        w=weights(6, 8),
        b=weights(8),
        v=weights(8, 4),
    )
    x = np.random.default_rng(3).normal(size=(40, 6)).astype(np.float32)
    table = calibrate(net, [{"x": x}], "minmax")
    int8, said = quantize(net, QuantRecipe(dynamic=("h", "y")), table)
    what = report.explain(net, int8, said, table, [{"x": x}])
    assert [node["reason"] for node in what["operators"] if node["name"] in "hy"] == [
        "its input is quantized at run time"
    ] * 2
    got = run(int8, x=x)["y"]
    assert operator(what, "y")["sqnr_db"] == pytest.approx(db(run(net, x=x)["y"], got), abs=0.01)
    assert operator(what, "y")["own_db"] > operator(what, "y")["sqnr_db"] and operator(what, "h")["own_db"] > 30


@pytest.mark.parametrize(
    ("end", "shape", "told"),
    [
        ("y = ReduceMean<keepdims=0>(h)", "", {"y"}),
        ("y = Reshape(h, wide)", "2,m", {"y"}),
        ("y = ArgMax<axis=1>(h)", "n,1", set()),
    ],
)
def test_outputs_of_any_shape(end, shape, told):
    kind = "int64" if "ArgMax" in end else "float"
    net = model(
        f"(float[n,6] x) => ({kind}[{shape}] y) {{ h = MatMul(x, w) {end} }}", w=weights(6, 8), wide=np.array([2, -1])
    )
    net.graph.outputs[0].shape = None
    what = explained(net, np.random.default_rng(3).normal(size=(40, 6)).astype(np.float32))[2]
    for engine in what["engines"].values():
        assert "error" not in engine and set(engine["outputs"]) <= told and engine["fallbacks"] == []


def test_no_samples(net):
    table = calibrate(net, [{"x": X}])
    int8, said = quantize(net, QuantRecipe(), table)
    with pytest.raises(RequestError, match="no samples to explain the model on"):
        report.explain(net, int8, said, table, [])
    with pytest.raises(RequestError, match="the samples do not fit the graph"):
        report.explain(net, int8, said, table, [{"x": X[:, :2]}])


@pytest.mark.parametrize("name", available())
def test_engines_ran_the_int8_operators_in_integers(found, name):
    said = found[2]["engines"][name]
    assert said["fallbacks"] == [] and any(kind.endswith(("u8", "s8")) for kind in said["ran"])
    if name in EXACT:  # each engine rounds in its own way
        assert said["outputs"]["y"] == pytest.approx(found[2]["outputs"]["y"]["sqnr_db"], abs=1)


class Spy:
    """A session that says it ran these."""

    def __init__(self, executed):
        self._executed = executed

    def executed(self, batch):
        if isinstance(self._executed, Exception):
            raise self._executed
        return self._executed

    def run(self, batch):
        return {}


def ran(monkeypatch, executed, int8=("conv", "conv2", "gemm")):
    monkeypatch.setitem(report.stock.STOCK, "onnxruntime", lambda *_: Spy(executed))
    operators = [{"name": name, "precision": "int8"} for name in int8] + [{"name": "softmax", "precision": "float"}]
    return report._ran("onnxruntime", model("(float[n] x) => (float[n] y) { y = Relu(x) }"), operators, {}, {})


def test_a_group_that_the_engine_did_not_fuse_is_a_fallback(monkeypatch):
    executed = [
        Executed("conv_token_3", "FusedConv", "f32"),
        Executed("conv2/WithoutBiases", "Convolution", "bf16"),
        Executed("gemm", "MatMulIntegerToFloat", "u8"),
        Executed("softmax", "Softmax", "f32"),
        Executed("conv.quantized", "QuantizeLinear", "f32"),
        Executed("conv2.dequantized/duplicated", "DequantizeLinear", "f32"),
    ]
    said = ran(monkeypatch, executed)
    assert [(fallback["name"], fallback["type"]) for fallback in said["fallbacks"]] == [
        ("conv", "FusedConv"),
        ("conv2", "Convolution"),
    ]


def test_a_real_fallback_is_found():
    """onnxruntime has no integer Conv for a weight that it does not know to be constant."""
    net = model("(float[n,3,6,6] x) => (float[n,8,6,6] y) { y = Conv<pads=[1,1,1,1]>(x, w1) }", w1=weights(8, 3, 3, 3))
    int8, _, what = explained(net)
    assert what["engines"]["onnxruntime"]["fallbacks"] == []
    lone = next(node for node in int8.graph if node.op_type == "Conv")
    lone.replace_input_with(0, int8.graph.inputs[0])  # no longer between a pair
    said = report._ran("onnxruntime", int8, what["operators"], {"x": X[:1]}, {})
    assert [fallback["name"] for fallback in said["fallbacks"]] == [lone.name]


def test_an_engine_that_refuses_the_model_says_so(monkeypatch):
    assert ran(monkeypatch, ZooError("cannot")) == {"error": "cannot"}


TRIALS = [
    {"name": "auto", "drop": 0.002, "milliseconds": 1.5, "max_drop": 0.005, "best": True},
    {"name": "kl <b>", "drop": 0.03, "milliseconds": 1.4, "max_drop": 0.005, "best": False},
    {"name": "broken", "drop": None, "error": "no"},
]


def test_the_page_is_whole_and_stands_alone(found, tmp_path):
    what = {**found[2], "trials": TRIALS}
    path = report_html.save(what, tmp_path / "r.html")
    text = path.read_text()
    assert not re.search(r"(src|href)=|@import|<script", text)
    assert text.count("<svg") == 2 + len(what["tensors"]) and "kl &lt;b&gt;" in text
    for svg in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(svg)
    ElementTree.fromstring(text.split("\n", 1)[1].replace('<meta charset="utf-8">', ""))
    assert not re.search(r"\b(nan|inf|None)\b", text)
    assert "prefers-color-scheme:dark" in text and 'name="viewport"' in text and text.count('class="wide"') == 2
    assert not re.search(r'(fill|stroke)="#', text), "a colour that the dark page does not change"
    assert (
        "at most 0.5% lost" in text and "<td>broken</td>" in text and "<td>no</td>" in text
    )  # a recipe that failed is in the table
    again = report_html.save(what, tmp_path / "again.html")
    assert again.read_bytes() == path.read_bytes()


def test_many_tensors_are_folded_away_and_the_worst_come_first(found):
    one = {**found[2]["tensors"]["x"]}
    text = report_html.page(
        {**found[2], "tensors": {f"t{i}": {**one, "sqnr_db": 90.0 - i} for i in range(report_html.SHOWN_TENSORS + 3)}}
    )
    shown, folded = text.split("<details>")
    assert "<summary>3 more</summary>" in folded and shown.count('title="t') == report_html.SHOWN_TENSORS
    assert f'title="t{report_html.SHOWN_TENSORS + 2}"' in shown and 'title="t0"' in folded


def test_a_report_as_json(found, tmp_path):
    assert json.loads(report_html.save(found[2], tmp_path / "r.json").read_text()) == json.loads(json.dumps(found[2]))


def test_another_format(tmp_path):
    with pytest.raises(RequestError, match=r"a report ends in .json or .html, not r.pdf"):
        report_html.require_format(tmp_path / "r.pdf")


def test_rows_for_a_terminal(found):
    columns, rows = report_html.rows(found[2])
    assert all(len(row) == len(columns) for row in rows) and len(rows) == len(found[2]["operators"])
