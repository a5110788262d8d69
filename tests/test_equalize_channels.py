"""Cross-layer equalization: exact in float, only where the closed form gains, and never past a value that a Clip cuts."""

import numpy as np
import onnx_ir as ir
import pytest
from rewriting import model, ops, reasons, rewritten, run

from pipelines import graph
from pipelines.calibrate import calibrate
from pipelines.entry import QuantRecipe
from pipelines.errors import RequestError
from pipelines.quantize import quantize
from pipelines.rewrite import rewrite
from pipelines.rewrites.equalize_channels import EqualizeChannels, channel_statistics

RNG = np.random.default_rng(0)
SPREAD = (2.0 ** np.arange(-4, 4)).astype(np.float32)  # what the channels of an unequal layer differ by


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


IMAGES = normal(6, 3, 8, 8)
CHAIN = """(float[N,3,8,8] x) => (float[N,M,H,W] y) {
    a = Conv<pads=[1,1,1,1]>(x, V, b)
    r = ACTIVATION
    y = Conv<pads=[1,1,1,1], group=GROUP>(r, W)
}"""


def chain(activation="Relu(a)", group=8, spread=SPREAD, **weights):
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
    each = EqualizeChannels(statistics(found), **options)
    return each, rewritten(found, each, x=IMAGES)


def sqnr(found, images=IMAGES):
    int8, _ = quantize(found, QuantRecipe(observer="minmax"), calibrate(found, [{"x": images}], "minmax"))
    exact, rounded = run(found, x=images)["y"], run(int8, x=images)["y"]
    return 10 * np.log10(np.square(exact).sum() / np.square(exact - rounded).sum())


def peaks(found):
    return statistics(found)["r"].peak


def test_statistics_are_those_of_numpy_and_do_not_depend_on_batches():
    found = chain()
    whole, pieces = statistics(found), channel_statistics(found, [{"x": each[None]} for each in IMAGES])
    copy = found.clone()
    copy.graph.outputs.append(next(node for node in copy.graph if node.op_type == "Relu").outputs[0])
    r = run(copy, x=IMAGES)["r"].astype(np.float64)
    np.testing.assert_allclose(whole["r"].peak, np.abs(r).max(axis=(0, 2, 3)))
    np.testing.assert_allclose(whole["r"].square, np.square(r).mean(axis=(0, 2, 3)), rtol=1e-5)
    for name, each in whole.items():
        np.testing.assert_allclose(each.peak, pieces[name].peak)
        np.testing.assert_allclose(each.square, pieces[name].square, rtol=1e-5)
    assert set(whole) == {"x", "r"}


def test_samples_that_do_not_fit_are_refused():
    with pytest.raises(RequestError, match="samples"):
        channel_statistics(chain(), [{"x": normal(1, 4, 8, 8)}])


@pytest.mark.parametrize("activation", ["Relu(a)", "AveragePool<kernel_shape=[2,2]>(a)", "MaxPool<kernel_shape=[2,2]>(a)"])
@pytest.mark.parametrize("group", [8, 2, 1])
def test_channels_are_brought_to_one_range_and_the_outputs_stay(activation, group):
    found = chain(activation, group=group)
    before = sqnr(found)
    each, _ = equalized(found)
    assert each.fired == 1
    assert peaks(found).max() / peaks(found).min() < 4
    assert sqnr(found) > before + 0.5


def test_before_a_depthwise_convolution_every_channel_fills_the_range():
    found = chain()
    before = sqnr(found)
    equalized(found)
    np.testing.assert_allclose(peaks(found), peaks(found).max(), rtol=1e-5)
    assert sqnr(found) > before + 6


def test_equal_channels_are_left_alone():
    found = chain(spread=np.ones(8, np.float32))
    found.graph.initializers["V"].const_value = ir.tensor(np.repeat(normal(1, 3, 3, 3), 8, axis=0), name="V")
    found.graph.initializers["b"].const_value = ir.tensor(np.zeros(8, np.float32), name="b")
    each, _ = equalized(found, depthwise_only=True)
    assert each.fired == 0


def test_dense_readers_are_left_alone_if_asked():
    each, _ = equalized(chain(group=1), depthwise_only=True)
    assert each.fired == 0


SIX = {"zero": np.float32(0), "six": np.float32(6)}


def test_a_channel_that_its_clip_cuts_keeps_its_scale_and_the_others_stay_below_it():
    found = chain("Clip(a, zero, six)", **SIX)
    before = peaks(found)
    assert (before == 6).any() and (before < 3).any()
    each, _ = equalized(found)
    assert each.fired == 1
    after = peaks(found)
    np.testing.assert_array_equal(after[before == 6], 6)
    assert (after[before < 6] <= 6 / 1.4999).all() or (after >= before).all()
    np.testing.assert_allclose(after[before < 4], 4, rtol=1e-5)  # 6 less the headroom
    kept = [graph.constant(value) for value in next(node for node in found.graph if node.op_type == "Clip").inputs[1:]]
    assert kept == [0, 6]


def test_all_parts_of_a_residual_sum_get_the_same_factors():
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
    found = model(text, **weights)
    assert equalized(found)[0].fired == 1
    v, d = (graph.constant(node.inputs[1]) for node in found.graph if node.op_type == "Conv" and node.outputs[0].name in "ac")
    k = (v / weights["V"])[:, 0, 0, 0]
    assert k.std() > 0
    np.testing.assert_allclose(d, weights["D"], rtol=1e-6)  # read and written with the same factors
    np.testing.assert_allclose(v, weights["V"] * k.reshape(-1, 1, 1, 1), rtol=1e-6)


def test_shared_weights_are_not_scaled_for_others():
    text = """(float[N,8,8,8] x) => (float[N,8,8,8] y, float[N,8,4,4] z) {
        a = Conv(x, V)
        r = Relu(a)
        y = Conv<group=8>(r, W)
        z = Conv<strides=[2,2]>(x, V)
    }"""
    found = model(text, V=normal(8, 8, 1, 1) * SPREAD.reshape(-1, 1, 1, 1), W=np.float32(0.02) * normal(8, 1, 1, 1))
    images = normal(2, 8, 8, 8)
    each = EqualizeChannels(statistics(found, images))
    rewritten(found, each, x=images)
    assert each.fired == 1


@pytest.mark.parametrize(
    ("activation", "why"),
    [
        ("Sigmoid(a)", "Sigmoid"),
        ("HardSwish(a)", "HardSwish"),
        ("Clip(a, one, six)", "does not cut at 0"),
        ("Mul(a, k)", "Mul"),
    ],
)
def test_near_misses_say_why(activation, why):
    found = chain(activation, one=np.float32(1), six=np.float32(6), k=normal(1, 8, 1, 1))
    each, report = equalized(found)
    assert each.fired == 0
    assert why in " ".join(reasons(report, "EqualizeChannels").values())


def test_a_value_that_leaves_the_graph_is_left_alone():
    text = """(float[N,3,8,8] x) => (float[N,8,8,8] y, float[N,8,8,8] r) {
        a = Conv(x, V)
        r = Relu(a)
        y = Conv<group=8>(r, W)
    }"""
    found = model(text, V=normal(8, 3, 1, 1) * SPREAD.reshape(-1, 1, 1, 1), W=np.float32(0.02) * normal(8, 1, 1, 1))
    each, report = equalized(found)
    assert each.fired == 0 and "output of the graph" in " ".join(reasons(report, "EqualizeChannels").values())


def test_weights_that_are_computed_are_left_alone():
    text = """(float[N,3,8,8] x, float[8,1,1,1] W) => (float[N,8,8,8] y) {
        a = Conv(x, V)
        r = Relu(a)
        y = Conv<group=8>(r, W)
    }"""
    found = model(text, V=normal(8, 3, 1, 1) * SPREAD.reshape(-1, 1, 1, 1))
    feeds = {"x": IMAGES, "W": normal(8, 1, 1, 1)}
    each = EqualizeChannels(channel_statistics(found, [feeds]))
    report = rewrite(found, [each])
    assert each.fired == 0 and "not constant" in " ".join(reasons(report, "EqualizeChannels").values())
    assert ops(found) == ["Conv", "Relu", "Conv"]
