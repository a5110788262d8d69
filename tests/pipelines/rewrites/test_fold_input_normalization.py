"""Raw pixels into the first convolution."""

import numpy as np
import pytest
from helpers.rewriting import EXACT, model, ops, reasons, rewritten, run

from pipelines.engines import catalog
from pipelines.graph import io, query
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_input_normalization import FoldInputNormalization
from pipelines.rewrites.fold_pad import FoldPad

MEAN, STD = [np.array(rgb, np.float32).reshape(1, 3, 1, 1) for rgb in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
HEAD = "(uint8[n,3,9,10] x) => (float[n,k,h,w] y) { f = Cast<to = 1>(x)"
CONV = "y = Conv<kernel_shape = [3, 3], strides = [2, 2], pads = [0, 1, 1, 2]>(z, w, b) }"
USUAL = "s = Div(f, white) c = Sub(s, mean) z = Div(c, std)"
# one way or another to normalize channels
CHAINS = {
    USUAL: "usual",
    "c = Sub(f, pixels) z = Mul(c, gain)": "pixels",
    "c = Add(pixels, f) z = Mul(gain, c)": "constant first",
    "z = BatchNormalization(f, flat, flat, flat, wide)": "batch norm",
    "g = Gather<axis = 1>(f, order) s = Div(g, white) c = Sub(s, mean) z = Div(c, std)": "reversed first",
    "s = Div(f, white) c = Sub(s, mean) g = Gather<axis = 1>(c, order) z = Div(g, std)": "reversed between",
    "s = Div(f, white) c = Sub(s, mean) g = Gather<axis = -3>(c, again) z = Div(g, std)": "a channel twice",
}


@pytest.fixture
def weights(rng):
    return {
        "w": (rng.standard_normal((5, 3, 3, 3)) / 50).astype(np.float32),
        "b": rng.standard_normal(5).astype(np.float32),
        "mean": MEAN,
        "std": STD,
        "white": np.float32(255),
        "pixels": MEAN * 255,
        "gain": 1 / STD / 255,
        "flat": STD.ravel(),
        "wide": STD.ravel() * 1000,
        "order": np.array([2, 1, 0]),
        "again": np.array([1, -1, 1]),
        "half": np.float32(127.5),
        "one": np.float32(1),
    }


def photo(rng, n=2):
    return rng.integers(0, 256, (n, 3, 9, 10), dtype=np.uint8)


def used(text, weights):
    """Those of `weights` that `text` names."""
    words = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return {name: array for name, array in weights.items() if name in words}


def made(chain, weights, head=HEAD, conv=CONV):
    return model(f"{head} {chain} {conv}", **used(f"{chain} {conv}", weights))


@pytest.mark.parametrize("chain", CHAINS, ids=CHAINS.values())
def test_with_padding_a_channel_that_says_where_the_image_is_makes_it_exact(rng, chain, weights):
    net = made(chain, weights)
    rewritten(net, FoldInputNormalization(), x=photo(rng))
    assert ops(net) == ["Pad", "DequantizeLinear", "Conv"]
    assert query.constant(net.graph[2].inputs[1]).shape == (5, 4, 3, 3)


@pytest.mark.parametrize("chain", CHAINS, ids=CHAINS.values())
def test_without_padding_the_bias_takes_it_all(rng, chain, weights):
    net = made(chain, weights, conv="y = Conv<kernel_shape = [3, 3], strides = [2, 2]>(z, w) }")
    rewritten(net, FoldInputNormalization(), x=photo(rng))
    assert ops(net) == ["DequantizeLinear", "Conv"]


@pytest.mark.parametrize(
    "text, constant, zero, level",
    [
        ("c = Sub(f, half)", 127.5, 128, 1),  # 255 / 2: what is left is half a step, at most as large as a weight
        ("c = Sub(f, half)", 31, 31, 1),
        ("c = Add(f, half)", 127.5, 0, 128),  # means outside the bytes
        ("c = Sub(f, half)", 300, 255, -45),
        ("c = Sub(f, half)", 5000, 255, -255),  # as far as bytes go
    ],
)
def test_the_zero_point_is_the_mean_and_the_level_the_least_that_widens_no_weight(
    rng, text, constant, zero, level, weights
):
    weights["w"] = np.zeros((5, 3, 3, 3), np.float32)
    weights["w"][:3, 0, 0, 0] = 0.01, -0.02, 0.03  # what is left at a tap is one mean's part; two outputs are dead
    net = made(f"{text} z = Div(c, white)", weights | {"half": np.float32(constant)})
    rewritten(net, FoldInputNormalization(), x=photo(rng))
    inside, point = (int(query.scalar(node.inputs[2])) for node in list(net.graph)[:2])
    assert (point, inside - point) == (zero, level)
    weight = np.abs(query.constant(net.graph[2].inputs[1]))
    assert constant == 5000 or (weight[:, 3] <= weight[:, :3].max(axis=1) * (1 + 1e-6)).all()


def test_a_pad_between_goes_into_the_convolution_first(rng, weights):
    net = made(
        f"{USUAL} p = Pad(z, widths)", weights | {"widths": np.array([0, 0, 0, 0, 0, 0, 1, 1])},
        conv="y = Conv<kernel_shape = [3, 3], strides = [2, 2]>(p, w, b) }",
    )  # fmt: skip
    rewritten(net, FoldInputNormalization(), FoldPad(), x=photo(rng))
    assert ops(net) == ["Pad", "DequantizeLinear", "Conv"]


def test_auto_pad_counts_as_padding(rng, weights):
    net = made(USUAL, weights, conv='y = Conv<kernel_shape = [3, 3], auto_pad = "SAME_UPPER">(z, w, b) }')
    rewritten(net, FoldInputNormalization(), x=photo(rng))
    assert ops(net) == ["Pad", "DequantizeLinear", "Conv"]


NEAR = {
    "group": (HEAD, "z = Sub(f, pixels)", "y = Conv<kernel_shape = [3, 3], group = 3>(z, thin) }", "no Conv with constant"),
    "computed weights": (HEAD, "z = Sub(f, pixels) v = Relu(w)", "y = Conv<kernel_shape = [3, 3]>(z, v) }", "no Conv with constant"),
    "another operator": (HEAD, "z = Sub(f, pixels)", "y = MaxPool<kernel_shape = [3, 3]>(z) }", "MaxPool y is no Conv"),
    "not by channel": (HEAD, "z = Sub(f, plane)", "y = Conv<kernel_shape = [3, 3]>(z, w) }", "Sub z is no Conv"),
    "read twice": (HEAD, "z = Sub(f, pixels)", "r = Relu(z) q = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(z, same) y = Add(q, r) }",
                   "several readers"),
    "channels not known": (HEAD.replace("[n,3,9,10]", "[n,c,9,10]"), "z = Sub(f, half)", "y = Conv<kernel_shape = [3, 3]>(z, w) }",
                           "channels of x are not known"),
}  # fmt: skip


@pytest.mark.parametrize("head, chain, conv, why", NEAR.values(), ids=NEAR)
def test_near_misses_are_left_alone(rng, head, chain, conv, why, weights):
    more = {
        "thin": np.ones((5, 1, 3, 3), np.float32)[:3],
        "plane": np.ones((1, 3, 9, 10), np.float32),
        "same": np.ones((3, 3, 3, 3), np.float32),
    }
    net = made(chain, weights | more, head, conv)
    before = ops(net)
    report = rewritten(net, FoldInputNormalization(), x=photo(rng))
    assert ops(net) == before and report.fired("FoldInputNormalization") == 0
    assert any(why in reason for reason in reasons(report, "FoldInputNormalization").values())


@pytest.mark.parametrize("kind", ["float", "int8", "int32"])
def test_other_inputs_than_bytes_are_not_looked_at(kind, weights):
    net = made(USUAL, weights, head=HEAD.replace("uint8", kind))
    report = rewrite(net, [FoldInputNormalization()])
    assert report.fired("FoldInputNormalization") == 0 and reasons(report, "FoldInputNormalization") == {}


@pytest.mark.parametrize("chain", [USUAL, "c = Sub(f, half) z = Mul(c, gain)"], ids=["channel", "zero point"])
def test_the_quantizer_takes_the_pixels_as_they_are(rng, chain, weights, tmp_path):
    tail = CONV.replace("y = Conv", "v = Conv").replace(" }", " r = Relu(v) y = Conv<kernel_shape = [1, 1]>(r, last) }")
    net = made(chain, weights | {"last": rng.standard_normal((5, 5, 1, 1)).astype(np.float32)}, conv=tail)
    rewrite(net, [FoldInputNormalization()])
    samples = photo(rng, 32)
    made_int8, report = quantize(net, QuantRecipe(observer="minmax"), calibrate(net, [{"x": samples}]))
    assert {op.precision for op in report.operators} == {"int8"}
    first = next(node for node in made_int8.graph if node.op_type == "QuantizeLinear")
    assert query.label(first) == "r.quantized", "no step is left before the first convolution"
    path = io.save(made_int8, tmp_path / "int8.onnx")
    for name in EXACT:
        session = catalog.load(path, name)
        kinds = {op.type: op.precision for op in session.executed({"x": samples[:1]})}
        assert kinds.get("QLinearConv" if name == "onnxruntime" else "Convolution") == "u8", kinds
        assert "QuantizeLinear" not in kinds
        expected, actual = run(net, x=samples)["y"], session.run({"x": samples})["y"]
        assert np.square(expected - actual).sum() < 1e-3 * np.square(expected).sum()
