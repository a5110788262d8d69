"""Corrections: a shift is taken out where results pass, a table carries what was found, and bytes are the same
twice.
"""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.rewriting import EXACT, model, run

from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.graph import io, query
from pipelines.quantization import ptq
from pipelines.quantization.algorithms import correction
from pipelines.quantization.algorithms.correction import correct_layers
from pipelines.quantization.algorithms.equalize_channels import channel_statistics, scale_channels
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.layerwise import CHUNK, sample_chunks
from pipelines.quantization.calibration.range_search import output_sqnr
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

RECIPE = QuantRecipe(observer="minmax")


def quantized(found, feeds, **ranges):
    """The int8 model; `ranges` overrides what was calibrated: {tensor: (low, high)}."""
    table = calibrate(found, [feeds], "minmax")
    tensors = {
        name: replace(tensor, low=ranges[name][0], high=ranges[name][1]) if name in ranges else tensor
        for name, tensor in table.tensors.items()
    }
    return quantize(found, RECIPE, replace(table, tensors=tensors))[0]


def corrected(found, int8, feeds):
    """(corrected model, {layer: what became of it}); the result must be sound, and the models given unchanged."""
    before = io.digest(found), io.digest(int8)
    result, report = correct_layers(found, int8, [feeds], weights=False)
    assert (io.digest(found), io.digest(int8)) == before
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    assert report.samples == len(next(iter(feeds.values())))
    return result, {layer.name: layer for layer in report.layers}


def layers(found):
    return [node for node in found.graph if node.op_type in ("Conv", "Gemm", "MatMul")]


def bias(layer):
    return query.constant(layer.inputs[2].producer().inputs[0])


def shifted(int8, steps):
    """A copy whose first layer's bias is off by so many of its steps."""
    copy = int8.clone()
    value = layers(copy)[0].inputs[2].producer().inputs[0]
    value.const_value = ir.tensor((query.constant(value) + steps).astype(np.int32), name=value.name)
    return copy


CONV = """(float[N,3,9,9] x) => (float[N,4,7,7] y) {
    a = Conv(x, W, b)
    y = Relu(a)
}"""
IMAGES = {"x": normals(0)(20, 3, 9, 9)}


def conv(normal):
    fp32 = model(CONV, W=normal(4, 3, 3, 3), b=normal(4))
    return fp32, quantized(fp32, IMAGES)


def error(found, int8, feeds):
    (exact,), (rounded,) = run(found, **feeds).values(), run(int8, **feeds).values()
    return float(np.square(exact - rounded).mean())


def test_a_shift_is_removed(normal):
    fp32, int8 = conv(normal)
    steps = np.array([900, -700, 0, 400])
    result, report = corrected(fp32, shifted(int8, steps), IMAGES)
    left = bias(layers(result)[0]) - bias(layers(int8)[0])
    assert np.abs(left).max() < 40  # of its own steps: what rounding shifts
    assert error(fp32, result, IMAGES) <= 1.02 * error(fp32, int8, IMAGES)  # a bias is rounded to its steps
    (layer,) = report.values()
    assert layer.channels == 4 and layer.corrected >= 3 and layer.sqnr_after > layer.sqnr_before + 12


@pytest.mark.parametrize("engine", EXACT)
def test_engines_load_what_it_writes(normal, engine, tmp_path):
    fp32, int8 = conv(normal)
    result, _ = corrected(fp32, shifted(int8, np.array([900, -700, 0, 400])), IMAGES)
    session = load(io.save(result, tmp_path / "int8.onnx"), engine)
    np.testing.assert_allclose(session.run(IMAGES)["y"], run(fp32, **IMAGES)["y"], atol=0.4)


def test_same_inputs_give_the_same_bytes_however_samples_are_batched(normal):
    fp32, int8 = conv(normal)
    int8 = shifted(int8, np.array([900, -700, 0, 400]))
    one, again = (ir.to_proto(corrected(fp32, int8, IMAGES)[0]).SerializeToString(deterministic=True) for _ in range(2))
    assert one == again
    assert len(IMAGES["x"]) > 2 * CHUNK
    pieces, _ = correct_layers(fp32, int8, [{"x": IMAGES["x"][start : start + 3]} for start in range(0, 20, 3)])
    whole, _ = correct_layers(fp32, int8, [IMAGES])
    assert np.abs(bias(layers(pieces)[0]) - bias(layers(whole)[0])).max() <= 1


def test_a_perfect_model_stays_as_it_is(rng):
    """Weights and inputs are whole steps, the result is not rounded."""
    x = rng.integers(0, 256, (40, 6)).astype(np.float32)
    x[0, :2] = 0, 255
    weight = rng.integers(-127, 128, (6, 5)).astype(np.float32)
    weight[0] = 127
    fp32 = model(
        "(float[N,6] x) => (float[N,5] y) { y = Gemm(x, W, b) }",
        W=weight,
        b=rng.integers(-99, 99, 5).astype(np.float32),
    )
    int8 = quantized(fp32, {"x": x})
    result, report = corrected(fp32, int8, {"x": x})
    assert io.digest(result) == io.digest(int8)
    (layer,) = report.values()
    assert (layer.channels, layer.corrected, layer.reason) == (5, 0, "")


def test_what_a_relu_stops_does_not_count(normal):
    """Inputs that saturate move the mean before the ReLU by far, but only where nothing passes: nothing must be
    corrected for them.
    """
    x = np.abs(normal(4000, 2))
    x[::2] *= 8  # every other one saturates
    fp32 = model(
        "(float[N,2] x) => (float[N,1] y) { h = Gemm(x, W, b)\n r = Relu(h)\n y = Gemm(r, V) }",
        **{"W": np.float32([[-1], [-0.7]]), "b": np.float32([2]), "V": np.float32([[1]])},
    )
    feeds = {"x": x}
    int8 = quantized(fp32, feeds, x=(0, 3))
    before = (x @ [[-1], [-0.7]] + 2).ravel()
    rounded = (np.minimum(x, 3) @ [[-1], [-0.7]] + 2).ravel()
    assert (before - rounded).mean() < -1, "the naive correction would be large"
    result, report = corrected(fp32, int8, feeds)
    layer = report[str(layers(int8)[0].name)]
    step = float(query.constant(layers(int8)[0].inputs[2].producer().inputs[1])[0])
    assert abs(float((bias(layers(result)[0]) - bias(layers(int8)[0]))[0]) * step) < 0.05
    assert layer.sqnr_after >= layer.sqnr_before
    assert error(fp32, result, feeds) <= 1.1 * error(fp32, int8, feeds)


def test_later_layers_are_corrected_on_what_earlier_corrections_leave(normal):
    fp32 = model(
        "(float[N,8] x) => (float[N,4] y) { h = Gemm(x, W, b)\n r = Relu(h)\n y = Gemm(r, V, c) }",
        **{"W": normal(8, 8), "b": normal(8), "V": normal(8, 4), "c": normal(4)},
    )
    feeds = {"x": normal(500, 8)}
    int8 = quantized(fp32, feeds)
    result, report = corrected(fp32, shifted(int8, np.arange(8) * 300 - 1000), feeds)
    first, second = report.values()
    assert first.sqnr_after > first.sqnr_before + 3
    assert second.sqnr_before > 25, "measured behind the corrected layer"
    np.testing.assert_allclose(run(result, **feeds)["y"].mean(axis=0), run(fp32, **feeds)["y"].mean(axis=0), atol=0.01)


RESIDUAL = """(float[N,4,6,6] x) => (float[N,4,6,6] y) {
    a = Conv(x, W, b)
    c = Conv(x, V)
    s = Add(a, c)
    y = Relu(s)
}"""


def test_a_sum_is_corrected_once_where_both_parts_are_known(normal):
    fp32 = model(RESIDUAL, W=normal(4, 4, 1, 1), b=normal(4), V=normal(4, 4, 1, 1))
    feeds = {"x": normal(40, 4, 6, 6)}
    int8 = shifted(quantized(fp32, feeds), np.array([500, 0, 0, -800]))
    result, report = corrected(fp32, int8, feeds)
    first, second = report.values()
    assert "other part of its sum" in first.reason and first.corrected == 0
    assert second.corrected >= 2 and second.sqnr_after > second.sqnr_before
    assert len(layers(result)[1].inputs) == 3, "it had no bias"
    assert bias(layers(result)[1]).dtype == np.int32
    assert error(fp32, result, feeds) < 0.5 * error(fp32, int8, feeds)


def test_what_a_narrow_range_cuts_is_not_made_up_for(normal):
    fp32 = model("(float[N,8] x) => (float[N,4] y) { y = Gemm(x, W, b) }", W=np.abs(normal(8, 4)), b=normal(4))
    feeds = {"x": np.abs(normal(300, 8))}
    narrow = quantized(fp32, feeds, x=(0.0, 1.0))  # half of the mean of x is beyond it
    result, _ = corrected(fp32, narrow, feeds)
    inside = {"x": feeds["x"].clip(0, 1)}
    assert error(fp32, result, inside) <= 1.5 * error(fp32, narrow, inside)


def test_layers_that_cannot_be_corrected_say_why(normal):
    text = "(float[N,5,4] x) => (float[N,5,3] y) { y = MatMul(x, W) }"
    fp32 = model(text, W=normal(4, 3))
    feeds = {"x": normal(6, 5, 4)}
    int8 = quantized(fp32, feeds)
    assert any(node.op_type == "MatMul" for node in int8.graph)
    _, report = corrected(fp32, int8, feeds)
    assert [layer.reason for layer in report.values()] == ["it has no bias of its own"]


def test_branches_that_read_what_lies_around_them_are_run(normal):
    text = """(float[N,4] x, bool t) => (float[N,4] y) {
        h = Gemm(x, W, b)
        r = Relu(h)
        c = If(t) <then_branch = g () => (float[N,4] p) { d = Add(r, r)\n p = Add(d, x) },
                   else_branch = g () => (float[N,4] q) { q = Mul(r, r) }>
        y = Gemm(c, V, c0)
    }"""
    fp32 = model(text, W=normal(4, 4), b=normal(4), V=normal(4, 4), c0=normal(4))
    feeds = {"x": normal(30, 4), "t": np.array(True)}
    _, report = corrected(fp32, quantized(fp32, feeds), feeds)
    assert [layer.reason for layer in report.values()] == ["", ""]


def test_samples_must_be_there_and_fit(normal):
    fp32, int8 = conv(normal)
    with pytest.raises(RequestError, match="no samples"):
        correct_layers(fp32, int8, [])
    with pytest.raises(RequestError, match="hold z; the graph takes x"):
        correct_layers(fp32, int8, [{"z": IMAGES["x"]}])
    with pytest.raises(RequestError, match="do not fit"):
        correct_layers(fp32, int8, [{"x": normal(2, 5, 9, 9)}])


def test_sqnr_of_outputs_is_that_of_numpy_and_looks_before_a_softmax(normal):
    weights = {"W": normal(8, 4), "b": normal(4)}
    feeds = {"x": normal(30, 8)}
    plain = model("(float[N,8] x) => (float[N,4] y) { y = Gemm(x, W, b) }", **weights)
    int8 = quantized(plain, feeds)
    exact, rounded = run(plain, **feeds)["y"], run(int8, **feeds)["y"]
    sqnr = output_sqnr(plain, int8, [feeds])
    assert sqnr == pytest.approx(10 * np.log10(np.square(exact).sum() / np.square(exact - rounded).sum()), abs=1e-3)
    ending = model("(float[N,8] x) => (float[N,4] y) { h = Gemm(x, W, b)\n y = Softmax(h) }", **weights)
    assert output_sqnr(ending, quantized(ending, feeds), [feeds]) == pytest.approx(sqnr, abs=0.01)
    assert output_sqnr(plain, plain, [feeds]) == np.inf


def unequal(normal, spread):
    """Channels between two convolutions whose ranges differ by 2^spread."""
    text = """(float[N,3,8,8] x) => (float[N,8,8,8] y) {
        a = Conv<pads=[1,1,1,1]>(x, V, b)
        r = Relu(a)
        y = Conv<pads=[1,1,1,1], group=8>(r, W)
    }"""
    k = (2.0 ** np.linspace(-spread / 2, spread / 2, 8)).astype(np.float32)
    first = np.repeat(normal(1, 3, 3, 3), 8, axis=0) * k.reshape(-1, 1, 1, 1)
    return model(text, V=first, b=k, W=normal(8, 1, 3, 3) / k.reshape(-1, 1, 1, 1)), [{"x": normal(10, 3, 8, 8)}]


def test_equalization_is_kept_where_the_sqnr_rises(normal):
    fp32, samples = unequal(normal, 7)
    before = io.digest(fp32)
    (_, factors), tried = ptq.search_equalization(fp32, RECIPE, samples)
    assert io.digest(fp32) == before
    assert list(factors) == ["a"] and len(factors["a"]) == 8
    assert tried["depthwise"] > tried["none"] + 3


def test_equalization_is_not_kept_where_nothing_is_to_be_gained_or_the_sqnr_falls(normal, monkeypatch):
    fp32, samples = unequal(normal, 0)
    (clip, factors), tried = ptq.search_equalization(fp32, RECIPE, samples)
    assert not clip and factors == {} and list(tried) == ["none", "clipped"]
    fp32, samples = unequal(normal, 7)
    monkeypatch.setattr(ptq, "_sound", lambda model, factors, samples: factors)
    falling = iter([20.0, 19.0, 20.1, 20.3])
    monkeypatch.setattr(ptq, "output_sqnr", lambda *_: next(falling))
    (clip, factors), tried = ptq.search_equalization(fp32, RECIPE, samples)
    assert clip and factors == {} and tried == {"none": 20.0, "depthwise": 19.0, "all": 20.1, "clipped": 20.3}


@pytest.mark.parametrize(("further", "kept"), [(1, True), (20, False)])
def test_channels_that_other_samples_find_cut_are_not_equalized(normal, further, kept):
    text = """(float[N,3,8,8] x) => (float[N,8,8,8] y) {
        a = Conv<pads=[1,1,1,1]>(x, V)
        r = Clip(a, zero, six)
        y = Conv<pads=[1,1,1,1], group=8>(r, W)
    }"""
    k = np.array([1, 1, 1, 1, 1, 1, 1, 0.01], np.float32).reshape(-1, 1, 1, 1)
    fp32 = model(text, V=normal(8, 3, 3, 3) * k, W=normal(8, 1, 3, 3) / k, zero=np.float32(0), six=np.float32(6))
    judges, others = normal(ptq.HELD_OUT, 3, 8, 8), normal(ptq.HELD_OUT, 3, 8, 8)
    factors = ptq._equalization(fp32, channel_statistics(fp32, [{"x": others}]), True)
    assert list(factors) == ["a"]
    assert bool(ptq._sound(fp32, factors, [{"x": further * judges}])) is kept


def test_a_table_carries_what_was_found_so_that_quantizing_needs_no_samples(normal, tmp_path):
    fp32, samples = unequal(normal, 7)
    recipe = replace(RECIPE, search=True)
    table = make_table(fp32, recipe, samples)
    assert table.equalization and table.bias and recipe.same_but_observer(table.recipe)
    table = CalibrationTable.load(table.save(tmp_path / "calibration.json"))
    int8, report = quantize(fp32, recipe, table)
    equalized = fp32.clone()
    scale_channels(equalized, table.equalization)
    direct = replace(table, graph=io.digest(equalized), equalization={}, bias={}, rounding={})
    expected, said = correct_layers(equalized, quantize(equalized, recipe, direct)[0], samples)
    assert io.digest(int8) == io.digest(expected)
    assert sum(layer.corrected for layer in said.layers) > 0 and "bias corrected" in " ".join(
        operator.reason for operator in report.operators
    )
    for changes in ({"correct": False}, {"keep_float": ("y",)}):
        other, report = quantize(fp32, replace(recipe, **changes), table)
        assert "bias corrected" not in " ".join(operator.reason for operator in report.operators)
        assert io.digest(other) == io.digest(
            quantize(fp32, replace(recipe, **changes), replace(table, bias={}, rounding={}))[0]
        )


def test_corrections_by_another_recipe_are_left_out_with_a_word(normal, caplog):
    fp32, samples = unequal(normal, 3)
    table = make_table(fp32, RECIPE, samples)
    quantize(fp32, replace(RECIPE, observer="kl"), table)
    assert not caplog.records
    quantize(fp32, replace(RECIPE, reduced_range=True), table)
    assert "belong to another recipe" in caplog.text


@pytest.mark.parametrize("factors", [{"z": (1.0,) * 8}, {"r": (1.0,) * 8}, {"a": (1.0,) * 7}, {"a": (0.0,) * 8}])
def test_an_equalization_that_does_not_fit(normal, factors):
    with pytest.raises(RequestError, match="does not fit the graph; calibrate again"):
        scale_channels(unequal(normal, 1)[0], factors)


CHAIN = """(float[N,3,9,9] x) => (float[N,4,9,9] y) {
    a = Conv(x, W) r = Relu(a) b = Conv(r, V) s = Relu(b) y = Conv(s, V)
}"""


def test_what_the_time_budget_does_not_suffice_for_is_left_as_it_is(normal, caplog, monkeypatch):
    fp32 = model(CHAIN, W=normal(4, 3, 1, 1), V=normal(4, 4, 1, 1))
    int8 = quantized(fp32, IMAGES)
    plain, none = correct_layers(fp32, int8, [IMAGES], seconds=0.0)
    assert io.digest(plain) == io.digest(int8) and {layer.reason for layer in none.layers} == {correction.SPENT}
    assert [record.getMessage() for record in caplog.records] == [
        "the time budget of 0 s sufficed to correct 0 of 3 layers; for the others give more (--time-budget), "
        "or fewer samples"
    ]
    clock = iter(range(100))  # each look at it takes a second
    with monkeypatch.context() as patched:
        patched.setattr(correction.time, "monotonic", lambda: next(clock))
        _, part = correct_layers(fp32, int8, [IMAGES], seconds=6.0)
    reasons = [layer.reason for layer in part.layers]
    assert reasons[0] == "" and reasons[-1] == correction.SPENT
    _, whole = correct_layers(fp32, int8, [IMAGES], seconds=1000.0)
    assert correction.SPENT not in [layer.reason for layer in whole.layers] and len(caplog.records) == 2


@pytest.mark.parametrize(("side", "at_once"), [(64, CHUNK), (1600, 3), (3500, 1)])
def test_few_samples_of_large_maps_are_computed_at_once(side, at_once):
    fp32 = model("(float[N,1,h,w] x) => (float[N,1,h,w] y) { a = Relu(x) y = Neg(a) }")
    samples = [{"x": np.zeros((count, 1, side, side), np.float32)} for count in ((1, 8) if side == 64 else (1, 3))]
    sizes = [len(chunk["x"]) for chunk in sample_chunks(fp32, samples, chunk_samples=0)]
    assert sizes[0] == at_once and sum(sizes) == sum(len(batch["x"]) for batch in samples)
    assert [len(chunk["x"]) for chunk in sample_chunks(fp32, samples, chunk_samples=2)][:-1] == [2] * (
        (sum(sizes) - 1) // 2
    )


@pytest.mark.parametrize(
    ("function", "weight", "offset"),
    [
        ("HardSwish", 1.0, -8.0),
        ("HardSigmoid<alpha=0.1666667, beta=0.5>", 0.02, -3.5),
        ("Relu", 1.0, -8.0),
    ],
)
def test_what_a_hard_activation_makes_zero_says_nothing_of_what_passes(function, weight, offset):
    """Small values are rounded down to 0, all of them where the function is 0; the others are rounded as often up."""
    fp32 = model(
        f"(float[n,1,8,8] x) => (float[n,1,8,8] y) {{ a = Conv(x, k, b) h = {function}(a) y = Conv(h, one, zero) }}",
        k=np.full((1, 1, 1, 1), weight, np.float32),
        b=np.full(1, offset, np.float32),
        one=np.ones((1, 1, 1, 1), np.float32),
        zero=np.zeros(1, np.float32),
    )
    rng = np.random.default_rng(0)
    shape = (64, 1, 8, 8)
    x = np.where(rng.random(shape) < 0.8, rng.uniform(0, 0.49, shape), rng.uniform(30, 255, shape))
    x[0, 0, 0, :2] = 250, -5  # a scale of 1, and small values that do not lie at the end of the range
    feeds = {"x": x.astype(np.float32)}
    int8 = quantized(fp32, feeds)
    after, said = corrected(fp32, int8, feeds)
    first = said[str(layers(int8)[0].name)]
    assert abs(np.array(first.shift or [0.0])[0]) < 0.05 * weight  # the small values alone would shift it by a fifth
    assert output_sqnr(fp32, after, [feeds]) > output_sqnr(fp32, int8, [feeds]) - 0.05


def test_samples_of_two_shapes_share_no_chunk():
    net = model("(float[n,t] x) => (float[n,t] y) { y = Relu(x) }")
    samples = [{"x": np.ones(shape, np.float32)} for shape in ((3, 4), (2, 4), (2, 5))]
    assert [chunk["x"].shape for chunk in sample_chunks(net, samples)] == [(5, 4), (2, 5)]
