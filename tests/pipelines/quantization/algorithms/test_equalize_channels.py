"""Cross-layer equalization: exact in float, only where the closed form gains, and never past a value that a Clip
cuts.
"""

import re

import numpy as np
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.rewriting import EXACT, model, ops, reasons, rewritten, run

from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.graph import io, query
from pipelines.quantization.algorithms.equalize_channels import EqualizeChannels, channel_statistics, scale_channels
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.ptq import make_table, search_equalization
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite

SPREAD = (2.0 ** np.arange(-4, 4)).astype(np.float32)  # what the channels of an unequal layer differ by


IMAGES = normals(0)(6, 3, 8, 8)
CHAIN = """(float[N,3,8,8] x) => (float[N,M,H,W] y) {
    a = Conv<pads=[1,1,1,1]>(x, V, b)
    r = ACTIVATION
    y = Conv<pads=[1,1,1,1], group=GROUP>(r, W)
}"""


def chain(normal, activation="Relu(a)", group=8, spread=SPREAD, **weights):
    """Unequal channels between a convolution and one of `group` groups."""
    text = CHAIN.replace("ACTIVATION", activation).replace("GROUP", str(group))
    scaled = {"V": normal(8, 3, 3, 3) * spread.reshape(-1, 1, 1, 1), "b": normal(8) * spread}
    # what varies little counts as much, so that its rounding does
    reader = (
        np.float32(0.02)
        * normal(8, 8 // group, 3, 3)
        / spread.reshape(group, 1, -1, 1, 1).repeat(8 // group, 1).reshape(8, 8 // group, 1, 1)
    )
    return model(text, **scaled, W=reader, **weights)


def statistics(found, images=IMAGES):
    return channel_statistics(found, [{"x": images}])


def equalized(found, **options):
    """The pass over `found`, whose outputs must stay; (what fired, its report)."""
    equalizer = EqualizeChannels(statistics(found), **options)
    return equalizer, rewritten(found, equalizer, x=IMAGES)


def sqnr(found, images=IMAGES):
    int8, _ = quantize(found, QuantRecipe(observer="minmax"), calibrate(found, [{"x": images}], "minmax"))
    exact, rounded = run(found, x=images)["y"], run(int8, x=images)["y"]
    return 10 * np.log10(np.square(exact).sum() / np.square(exact - rounded).sum())


def peaks(found):
    return statistics(found)["r"].peak


def test_statistics_are_those_of_numpy_and_do_not_depend_on_batches(normal):
    net = chain(normal)
    whole, pieces = statistics(net), channel_statistics(net, [{"x": image[None]} for image in IMAGES])
    copy = net.clone()
    copy.graph.outputs.append(next(node for node in copy.graph if node.op_type == "Relu").outputs[0])
    r = run(copy, x=IMAGES)["r"].astype(np.float64)
    np.testing.assert_allclose(whole["r"].peak, np.abs(r).max(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(whole["r"].square, np.square(r).mean(axis=(0, 2, 3)), rtol=1e-5)
    for name, tensor in whole.items():
        np.testing.assert_allclose(tensor.peak, pieces[name].peak, rtol=1e-6)
        np.testing.assert_allclose(tensor.square, pieces[name].square, rtol=1e-5)
    assert set(whole) == {"x", "r"}


def test_samples_that_do_not_fit_are_refused(normal):
    with pytest.raises(RequestError, match="samples"):
        channel_statistics(chain(normal), [{"x": normal(1, 4, 8, 8)}])


@pytest.mark.parametrize(
    "activation", ["Relu(a)", "AveragePool<kernel_shape=[2,2]>(a)", "MaxPool<kernel_shape=[2,2]>(a)"]
)
@pytest.mark.parametrize("group", [8, 2, 1])
def test_channels_are_brought_to_one_range_and_the_outputs_stay(normal, activation, group):
    net = chain(normal, activation, group=group)
    before = sqnr(net)
    equalizer, _ = equalized(net)
    assert equalizer.fired == 1
    assert peaks(net).max() / peaks(net).min() < 4
    assert sqnr(net) > before + 0.5


def test_before_a_depthwise_convolution_every_channel_fills_the_range(normal):
    net = chain(normal)
    before = sqnr(net)
    equalized(net)
    np.testing.assert_allclose(peaks(net), peaks(net).max(), rtol=1e-5)
    assert sqnr(net) > before + 6


def test_equal_channels_are_left_alone(normal):
    net = chain(normal, spread=np.ones(8, np.float32))
    net.graph.initializers["V"].const_value = ir.tensor(np.repeat(normal(1, 3, 3, 3), 8, axis=0), name="V")
    net.graph.initializers["b"].const_value = ir.tensor(np.zeros(8, np.float32), name="b")
    equalizer, _ = equalized(net, depthwise_only=True)
    assert equalizer.fired == 0


def test_dense_readers_are_left_alone_if_asked(normal):
    equalizer, _ = equalized(chain(normal, group=1), depthwise_only=True)
    assert equalizer.fired == 0


SIX = {"zero": np.float32(0), "six": np.float32(6)}


def test_a_channel_that_its_clip_cuts_keeps_its_scale_and_the_others_stay_below_it(normal):
    net = chain(normal, "Clip(a, zero, six)", **SIX)
    before = peaks(net)
    assert (before == 6).any() and (before < 3).any()
    equalizer, _ = equalized(net)
    assert equalizer.fired == 1
    after = peaks(net)
    np.testing.assert_array_equal(after[before == 6], 6)
    assert (after[before < 6] <= 6 / 1.4999).all() or (after >= before).all()
    np.testing.assert_allclose(after[before < 4], 4, rtol=1e-5)  # 6 less the headroom
    kept = [query.constant(value) for value in next(node for node in net.graph if node.op_type == "Clip").inputs[1:]]
    assert kept == [0, 6]


def test_all_parts_of_a_residual_sum_get_the_same_factors(normal):
    text = """(float[N,3,8,8] x) => (float[N,8,8,8] y) {
        a = Conv(x, V)
        r = Relu(a)
        c = Conv<group=8>(r, D)
        s = Add(c, r)
        y = Conv(s, W)
    }"""
    weights = {
        "V": normal(8, 3, 1, 1) * SPREAD.reshape(-1, 1, 1, 1),
        "D": normal(8, 1, 1, 1),
        "W": np.float32(0.02) * normal(8, 8, 1, 1) / SPREAD.reshape(1, -1, 1, 1),
    }
    net = model(text, **weights)
    assert equalized(net)[0].fired == 1
    v, d = (
        query.constant(node.inputs[1]) for node in net.graph if node.op_type == "Conv" and node.outputs[0].name in "ac"
    )
    k = (v / weights["V"])[:, 0, 0, 0]
    assert k.std() > 0
    np.testing.assert_allclose(d, weights["D"], rtol=1e-6)  # read and written with the same factors
    np.testing.assert_allclose(v, weights["V"] * k.reshape(-1, 1, 1, 1), rtol=1e-6)


def test_shared_weights_are_not_scaled_for_others(normal):
    text = """(float[N,8,8,8] x) => (float[N,8,8,8] y, float[N,8,4,4] z) {
        a = Conv(x, V)
        r = Relu(a)
        y = Conv<group=8>(r, W)
        z = Conv<strides=[2,2]>(x, V)
    }"""
    net = model(text, V=normal(8, 8, 1, 1) * SPREAD.reshape(-1, 1, 1, 1), W=np.float32(0.02) * normal(8, 1, 1, 1))
    images = normal(2, 8, 8, 8)
    equalizer = EqualizeChannels(statistics(net, images))
    rewritten(net, equalizer, x=images)
    assert equalizer.fired == 1


@pytest.mark.parametrize(
    ("activation", "why"),
    [
        ("Sigmoid(a)", "Sigmoid"),
        ("HardSwish(a)", "HardSwish"),
        ("Clip(a, one, six)", "does not cut at 0"),
        ("Mul(a, k)", "Mul"),
    ],
)
def test_near_misses_say_why(normal, activation, why):
    net = chain(normal, activation, one=np.float32(1), six=np.float32(6), k=normal(1, 8, 1, 1))
    equalizer, report = equalized(net)
    assert equalizer.fired == 0
    assert why in " ".join(reasons(report, "EqualizeChannels").values())


def test_a_value_that_leaves_the_graph_is_left_alone(normal):
    text = """(float[N,3,8,8] x) => (float[N,8,8,8] y, float[N,8,8,8] r) {
        a = Conv(x, V)
        r = Relu(a)
        y = Conv<group=8>(r, W)
    }"""
    net = model(text, V=normal(8, 3, 1, 1) * SPREAD.reshape(-1, 1, 1, 1), W=np.float32(0.02) * normal(8, 1, 1, 1))
    equalizer, report = equalized(net)
    assert equalizer.fired == 0 and "output of the graph" in " ".join(reasons(report, "EqualizeChannels").values())


def test_weights_that_are_computed_are_left_alone(normal):
    text = """(float[N,3,8,8] x, float[8,1,1,1] W) => (float[N,8,8,8] y) {
        a = Conv(x, V)
        r = Relu(a)
        y = Conv<group=8>(r, W)
    }"""
    net = model(text, V=normal(8, 3, 1, 1) * SPREAD.reshape(-1, 1, 1, 1))
    feeds = {"x": IMAGES, "W": normal(8, 1, 1, 1)}
    equalizer = EqualizeChannels(channel_statistics(net, [feeds]))
    report = rewrite(net, [equalizer])
    assert equalizer.fired == 0 and "not constant" in " ".join(reasons(report, "EqualizeChannels").values())
    assert ops(net) == ["Conv", "Relu", "Conv"]


# --- linear layers

ROWS = normals(2)(48, 5, 16)  # more than the search judges by
OUTLIERS = np.where(np.arange(16) % 8 == 3, 24, 1).astype(np.float32)
NORM = """(float[N,T,16] x) => (float[N,T,24] y, float[N,T,8] z) {
    h = LayerNormalization(x, g, s)
    y = MatMul(h, V)
    z = MatMul(h, W)
}"""
FEED = """(float[N,T,16] x) => (float[N,T,8] y) {
    a = MatMul(x, V)
    b = Add(a, c)
    r = Relu(b)
    y = MatMul(r, W)
}"""
GEMM = """(float[N,16] x) => (float[N,8] y) {
    a = Gemm<transB=1>(x, V, c)
    r = Relu(a)
    y = Gemm<transB=TRANSPOSED, alpha=0.5>(r, W, d)
}"""


def norm(normal, text=NORM, **weights):
    """Outlier channels out of a LayerNormalization, that its readers' weights make up for."""
    defaults = {
        "g": OUTLIERS,
        "s": normal(16) * OUTLIERS,
        "V": normal(16, 24) / (4 * OUTLIERS[:, None]),
        "W": normal(16, 8) / (4 * OUTLIERS[:, None]),
    }
    return model(text, **defaults | weights)


def feed(normal, text=FEED):
    """Outlier channels between two linear layers."""
    return model(
        text, V=normal(16, 16) * OUTLIERS / 4, c=normal(16) * OUTLIERS, W=normal(16, 8) / (4 * OUTLIERS[:, None])
    )


def gemm(normal, transposed=0):
    last = normal(16, 8) / (4 * OUTLIERS[:, None])
    text = GEMM.replace("TRANSPOSED", str(transposed))
    return model(
        text,
        V=normal(16, 16) * OUTLIERS[:, None] / 4,
        c=normal(16) * OUTLIERS,
        W=last.T if transposed else last,
        d=normal(8),
    )


LINEAR = {
    "norm": (norm, "h", ROWS),
    "feed": (feed, "a", ROWS),
    "gemm": (gemm, "a", ROWS[:, 0]),
    "turned": (lambda normal: gemm(normal, 1), "a", ROWS[:, 0]),
}


def loss(found, rows, reference, table=None):
    """SQNR of the int8 model against `reference`, in dB, all outputs together; and that model."""
    int8, _ = quantize(found, QuantRecipe(observer="minmax"), table or calibrate(found, [{"x": rows}], "minmax"))
    exact, rounded = run(reference, x=rows), run(int8, x=rows)
    noise, power = (
        sum(np.square(array).sum() for array in outputs)
        for outputs in ([exact[k] - rounded[k] for k in exact], exact.values())
    )
    return 10 * np.log10(power / noise), int8


@pytest.mark.parametrize("name", LINEAR)
def test_outlier_channels_of_linear_layers_are_equalized_and_the_outputs_stay(normal, name, tmp_path):
    make, first, rows = LINEAR[name]
    net = make(normal)
    reference, (before, _) = net.clone(), loss(net, rows, net)
    equalizer = EqualizeChannels(channel_statistics(net, [{"x": rows}]))
    rewritten(net, equalizer, x=rows)
    assert equalizer.fired == 1 and list(equalizer.factors) == [first]
    after, int8 = loss(net, rows, reference)
    assert after > before + 5
    again = reference.clone()
    scale_channels(again, equalizer.factors)
    for key, value in run(net, x=rows).items():
        np.testing.assert_allclose(run(again, x=rows)[key], value, rtol=1e-5, atol=1e-6)
    exact, path = run(reference, x=rows), io.save(int8, tmp_path / "int8.onnx")
    for engine in EXACT:
        for key, value in load(path, engine).run({"x": rows}).items():
            assert np.square(value - exact[key]).sum() < np.square(exact[key]).sum() / 1000


def test_statistics_of_linear_layers_are_those_of_numpy_and_do_not_depend_on_batches(normal):
    net = feed(normal)
    copy = net.clone()
    copy.graph.outputs.append(next(node for node in copy.graph if node.op_type == "Relu").outputs[0])
    r = run(copy, x=ROWS)["r"].astype(np.float64).reshape(-1, 16)
    for batches in ([{"x": ROWS}], [{"x": ROWS[:10]}, {"x": ROWS[10:]}]):
        stats = channel_statistics(net, batches)
        assert set(stats) == {"r"}
        np.testing.assert_allclose(stats["r"].high, r.max(axis=0))
        np.testing.assert_allclose(stats["r"].low, np.minimum(r.min(axis=0), 0))
        np.testing.assert_allclose(stats["r"].square, np.square(r).mean(axis=0), rtol=1e-5)


def test_channels_of_a_linear_layer_that_were_quiet_in_calibration_are_not_blown_up(normal):
    net, rows = feed(normal), ROWS.copy()
    bias = query.constant(net.graph.initializers["c"]).copy()
    bias[0] = -4 * np.abs(query.constant(net.graph.initializers["V"])[:, 0]).sum()  # its ReLU lets next to nothing pass
    rows[0, 0] = 4.001 * np.sign(query.constant(net.graph.initializers["V"])[:, 0])
    net.graph.initializers["c"].const_value = ir.tensor(bias, name="c")
    equalizer = EqualizeChannels(channel_statistics(net, [{"x": rows}]))
    assert 0 < channel_statistics(net, [{"x": rows}])["r"].peak[0] < 0.1
    rewritten(net, equalizer, x=rows)
    assert (
        equalizer.fired == 1 and equalizer.factors["a"][0] < 2 * equalizer.factors["a"][1:].max()
    )  # its peak alone would ask for 400


PICKED = """(float[N,T,16] x, int64[N,1] at) => (float[N,8] y) {
    h = LayerNormalization(x, g, s)
    p = GatherND<batch_dims=1>(h, at)
    y = MatMul(p, W)
}"""


def test_rows_that_are_picked_count_as_all_that_they_are_picked_from(normal):
    net = norm(normal, PICKED)
    feeds = {"x": ROWS, "at": np.zeros((48, 1), np.int64)}
    stats = channel_statistics(net, [feeds])
    copy = net.clone()
    copy.graph.outputs.append(next(node for node in copy.graph if node.op_type == "LayerNormalization").outputs[0])
    np.testing.assert_allclose(stats["p"].peak, np.abs(run(copy, **feeds)["h"]).max(axis=(0, 1)), rtol=1e-6)
    equalizer = EqualizeChannels(stats)
    rewritten(net, equalizer, **feeds)
    assert list(equalizer.factors) == ["h"]


SHARED = """(float[N,T,16] x) => (float[N,T,16] y, float[N,T,16] z) {
    h = LayerNormalization(x, g, s)
    y = MatMul(h, V)
    k = LayerNormalization(x, g, s2)
    k2 = Sigmoid(k)
    z = MatMul(k2, V)
}"""


def test_shared_weights_of_linear_layers_are_not_scaled_for_others(normal):
    net = norm(normal, SHARED, V=normal(16, 16) / (4 * OUTLIERS[:, None]), s2=normal(16))
    equalizer = EqualizeChannels(channel_statistics(net, [{"x": ROWS}]))
    rewritten(net, equalizer, x=ROWS)
    assert list(equalizer.factors) == ["h"]


def around(body, outputs="float[N,T,16] y"):
    return f"(float[N,T,16] x) => ({outputs}) {{ h = LayerNormalization(x, g, s)\n {body} }}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (around("a = MatMul(h, S)\n y = Add(a, h)"), "y is an input or output of the graph"),  # a residual sum
        (around("a = Add(h, x)\n y = MatMul(a, S)"), "x is an input or output of the graph"),
        (around("a = MatMul(h, S)\n y = MatMul(a, h)"), "MatMul .* is not the same when its channels are scaled"),
        (around("y = MatMul(S, h)", "float[N,16,16] y"), "MatMul .* is not the same when its channels are scaled"),
        (around("a = Tanh(h)\n y = MatMul(a, S)"), "Tanh .* is not the same"),
        (
            around("a = MatMul(h, S)\n b = Add(a, h)\n y = LayerNormalization(b, g, s)"),
            "LayerNormalization .* is not the same",
        ),
        (
            around("a = Transpose<perm=[0,2,1]>(h)\n y = MatMul(a, L)", "float[N,16,8] y"),
            "may move the axis of the channels",
        ),
        (around("y = MatMul(h, T)", "float[2,N,16] y"), "no matrix"),
    ],
)
def test_near_misses_of_linear_layers_say_why(normal, text, why):
    rows = normal(2, 16, 16)
    net = model(text, g=OUTLIERS, s=normal(16), S=normal(16, 16), L=normal(16, 8), T=normal(2, 16, 16))
    equalizer = EqualizeChannels(channel_statistics(net, [{"x": rows}]))
    report = rewritten(net, equalizer, x=rows)
    assert equalizer.fired == 0
    assert any(re.search(why, reason) for reason in reasons(report, "EqualizeChannels").values())


def test_a_search_equalizes_linear_layers_and_its_table_belongs_to_the_graph(normal):
    net, rows = norm(normal), [{"x": np.tile(ROWS, (2, 1, 1))}]
    recipe = QuantRecipe(observer="minmax", search=True, correct=False)
    _, tried = search_equalization(net, recipe, rows)
    assert list(tried) == ["none", "all", "clipped"] and tried["all"] > tried["none"] + 5
    table = make_table(net, recipe, rows)
    assert list(table.equalization) == ["h"] and len(table.equalization["h"]) == 16
    assert loss(net, ROWS, net, table)[0] > loss(net, ROWS, net)[0] + 5
    with pytest.raises(RequestError, match="was made for the graph"):
        quantize(norm(normal), recipe, table)  # other weights


@pytest.mark.parametrize("factors", [{"y": (1.0,) * 24}, {"h": (1.0,) * 15}, {"h": (0.0,) * 16}, {"x": (1.0,) * 16}])
def test_factors_that_do_not_fit_linear_layers_are_refused(normal, factors):
    with pytest.raises(RequestError, match="does not fit the graph; calibrate again"):
        scale_channels(norm(normal), factors)
