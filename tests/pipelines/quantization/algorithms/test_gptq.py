"""Weights rounded together: against the plain algorithm, on every form of layer, and as a table carries them."""

import base64
import zlib
from itertools import product

import numpy as np
import pytest
from helpers.rewriting import model, run

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.quantization.algorithms import gptq as module
from pipelines.quantization.algorithms.correction import correct_layers
from pipelines.quantization.algorithms.gptq import (
    DAMPING,
    POSITIONS,
    WIDEST,
    WORK,
    drawn,
    gptq,
    gptq_groups,
    round_layer,
)
from pipelines.quantization.algorithms.weight_rounding import Weights, decode_rounding, encode_rounding
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe


def correlated(normal, samples, channels, *rest):
    """Inputs of which a few directions hold nearly all the power, as those of trained networks."""
    mixed = np.tensordot(normal(samples, 3, *rest), normal(3, channels), ((1,), (0,)))
    for axis in range(2, 2 + len(rest)):  # neighbours are alike
        mixed = np.cumsum(mixed, axis=axis - 1)
    return (np.moveaxis(mixed, -1, 1) + 0.05 * normal(samples, channels, *rest)).astype(np.float32)


def textbook_gptq(weights, scale, gram, most):
    """Frantar et al. 2023, algorithm 1, in the order of falling diagonals: the inverse is updated column by column."""
    order = np.argsort(-np.diag(gram), kind="stable")
    inverse = np.linalg.inv(gram[np.ix_(order, order)])
    w, result = weights[:, order].astype(np.float64), np.empty(weights.shape)
    for column in range(w.shape[1]):
        result[:, column] = np.clip(np.rint(w[:, column] / scale), -most, most)
        error = (w[:, column] - result[:, column] * scale) / inverse[column, column]
        w[:, column:] -= np.outer(error, inverse[column, column:])
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result[:, np.argsort(order)]


@pytest.mark.parametrize("most", [127, 63])
def test_the_published_algorithm(normal, most):
    x = correlated(normal, 400, 100)
    gram = x.T.astype(np.float64) @ x + 0.5 * np.eye(100)
    weights = normal(6, 100)
    scale = np.abs(weights).max(axis=1) / most
    rounded = gptq(weights, scale, gram, most)
    assert rounded.dtype == np.int8
    np.testing.assert_array_equal(rounded, textbook_gptq(weights, scale, gram, most))


@pytest.mark.parametrize("channels", [1, 3])
def test_groups_are_rounded_at_once_as_one_by_one(normal, channels):
    x = np.stack([correlated(normal, 200, 9) for _ in range(50)]).astype(np.float64)
    gram = x.swapaxes(1, 2) @ x + 0.5 * np.eye(9)
    weights = normal(50, channels, 9)
    scale = np.abs(weights).max(axis=2) / 127
    rounded = gptq_groups(weights, scale, gram)
    expected = [gptq(*group) for group in zip(weights, scale, gram, strict=True)]
    assert rounded.dtype == np.int8
    np.testing.assert_array_equal(rounded, np.stack(expected))


def test_it_is_better_than_nearest_and_near_the_best_of_all(normal):
    x = correlated(normal, 200, 4)
    gram = x.T.astype(np.float64) @ x + 1e-3 * np.eye(4)
    weights, scale = normal(1, 4), np.array([0.5])

    def loss(q):
        return float((weights - q * 0.5)[0] @ gram @ (weights - q * 0.5)[0])

    nearest = np.rint(weights / 0.5)
    best = min(loss(np.floor(weights / 0.5) + np.array(up)) for up in product((0, 1), repeat=4))
    assert best <= loss(gptq(weights, scale, gram)) < min(loss(nearest), 4 * best + 1e-9)


LAYERS = {
    "conv": (
        "(float[N,12,9,9] x) => (float[N,8,h,w] y) { y = Conv<pads=[1,0,2,1], strides=[2,1]>(x, W, b) }",
        (8, 12, 3, 3),
        (12, 9, 9),
    ),
    "dilated": (
        "(float[N,12,9,9] x) => (float[N,8,h,w] y) { y = Conv<dilations=[2,2]>(x, W, b) }",
        (8, 12, 3, 3),
        (12, 9, 9),
    ),
    "grouped": ("(float[N,12,9,9] x) => (float[N,8,h,w] y) { y = Conv<group=2>(x, W, b) }", (8, 6, 3, 3), (12, 9, 9)),
    "depthwise": ("(float[N,8,9,9] x) => (float[N,8,h,w] y) { y = Conv<group=8>(x, W, b) }", (8, 1, 3, 3), (8, 9, 9)),
    "one dimension": ("(float[N,12,9] x) => (float[N,8,h] y) { y = Conv(x, W, b) }", (8, 12, 3), (12, 9)),
    "gemm": ("(float[N,12] x) => (float[N,8] y) { y = Gemm<transB=1>(x, W, b) }", (8, 12), (12,)),
    "transposed": ("(float[N,12] x) => (float[N,8] y) { y = Gemm(x, W, b) }", (12, 8), (12,)),
    "matmul": ("(float[N,5,12] x) => (float[N,5,8] y) { z = MatMul(x, W)\n y = Add(z, b) }", (12, 8), (5, 12)),
}


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_every_form_of_layer_comes_closer_to_the_float_model(normal, name, reduced):
    text, weights, shape = LAYERS[name]
    feeds = {
        "x": correlated(normal, 40, *shape)
        if name != "matmul"
        else np.swapaxes(correlated(normal, 40, 12, 5), 1, 2).copy()
    }
    net = model(text, W=normal(*weights), b=normal(8))
    int8 = quantize(net, QuantRecipe(observer="minmax", reduced_range=reduced), calibrate(net, [feeds], "minmax"))[0]
    errors = []
    for together in (False, True):
        result, report = correct_layers(net, int8, [feeds], weights=together)
        errors.append(float(np.square(run(net, **feeds)["y"] - run(result, **feeds)["y"]).mean()))
        assert bool(report.layers[0].weights) is together
        layer = next(node for node in result.graph if node.op_type in ("Conv", "Gemm", "MatMul"))
        assert np.abs(Weights.of(layer).integers.astype(int)).max() <= (63 if reduced else 127)
    # the nine weights of a depthwise sum leave little to choose
    assert errors[1] < errors[0] * (0.9 if reduced and name != "depthwise" else 1.0)


def test_a_table_carries_them(normal, tmp_path):
    text, weights, shape = LAYERS["conv"]
    net, samples = model(text, W=normal(*weights), b=normal(8)), [{"x": correlated(normal, 20, *shape)}]
    table = make_table(net, QuantRecipe(), samples)
    assert table.rounding
    loaded = CalibrationTable.load(table.save(tmp_path / "calibration.json"))
    assert loaded == table
    direct = quantize(net, QuantRecipe(), calibrate(net, samples, "auto"))[0]
    assert io.digest(quantize(net, QuantRecipe(), loaded)[0]) == io.digest(correct_layers(net, direct, samples)[0])
    assert io.digest(quantize(net, QuantRecipe(correct=False), loaded)[0]) == io.digest(direct)


def test_what_does_not_fit_or_is_broken(normal, tmp_path):
    text, weights, shape = LAYERS["conv"]
    net, samples = model(text, W=normal(*weights), b=normal(8)), [{"x": correlated(normal, 20, *shape)}]
    table = make_table(net, QuantRecipe(), samples)
    (name,) = table.rounding
    plain = CalibrationTable(**{**vars(table), "rounding": {}})
    other = CalibrationTable(**{**vars(table), "rounding": {name: encode_rounding(np.ones(5, np.int8))}})
    assert io.digest(quantize(net, QuantRecipe(), other)[0]) == io.digest(quantize(net, QuantRecipe(), plain)[0])
    for text in ("no base 64", "AAAA"):
        broken = CalibrationTable(**{**vars(table), "rounding": {name: text}})
        with pytest.raises(RequestError, match=f"the rounding of {name} is broken .*zoo calibrate"):
            quantize(net, QuantRecipe(), broken)


def test_wide_layers_take_fewer_positions(normal):
    """A Gram matrix costs its positions times the square of its width; small maps are taken whole."""
    assert [drawn(width) for width in (9, 576, 1024)] == [POSITIONS] * 3
    assert drawn(2304) == WORK // 2304**2 and drawn(WIDEST) == 2 * WIDEST
    assert [drawn(width, 1000) for width in (9, 576, 2304, WIDEST)] == [1000, 1152, 4608, 2 * WIDEST]
    layer = model("(float[N,12] x) => (float[N,8] y) { y = Gemm<transB=1>(x, W) }", W=normal(8, 12)).graph[0]
    weights, x = normal(8, 12), correlated(normal, 300, 12)
    scale = np.abs(weights).max(axis=1) / 127
    expected = gptq(weights, scale, x.T.astype(np.float64) @ x + DAMPING * np.square(x).sum() / 12 * np.eye(12))
    for chunks in (1, 3, 100):  # more positions than inputs in a chunk, and fewer
        rounded = round_layer([layer], weights, scale, 127, ([part] for part in np.array_split(x, chunks)), chunks)
        assert (rounded != expected).mean() < 0.02


def test_the_widest_layers_are_rounded_in_sections(normal, monkeypatch):
    """Errors cancel within a section, as within a layer of its own."""
    layer = model("(float[N,12] x) => (float[N,8] y) { y = Gemm<transB=1>(x, W) }", W=normal(8, 12)).graph[0]
    weights, x = normal(8, 12), correlated(normal, 300, 12)
    scale = np.abs(weights).max(axis=1) / 127
    monkeypatch.setattr(module, "SECTION", 8)
    rounded = round_layer([layer], weights, scale, 127, [[x]], 1)
    parts = [
        round_layer([layer], weights[:, part], scale, 127, [[x[:, part]]], 1) for part in (slice(0, 8), slice(8, 12))
    ]
    np.testing.assert_array_equal(rounded, np.concatenate(parts, axis=1))


@pytest.mark.parametrize("size", [1, 4, 63, 64, 66, 1001])
@pytest.mark.parametrize("most", [1, 2, 7, 9])
def test_rounding_is_read_as_it_was_written(size: int, most: int) -> None:
    changes = np.random.default_rng(size).integers(-most, most + 1, size).astype(np.int8)
    text = encode_rounding(changes)
    decoded = decode_rounding(text, size)
    assert decoded is not None and decoded.dtype == np.int8 and (decoded == changes).all()
    assert decode_rounding(text, 7 * size + 3) is None
    old = base64.b64encode(zlib.compress(changes.tobytes())).decode()
    assert (decode_rounding(old, size) == changes).all()


def test_rounding_takes_its_entropy() -> None:
    """Nine of ten weights that stay take .57 bits each, not the one bit of a Huffman code."""
    changes = np.random.default_rng(0).choice([-1, 0, 1], 100_000, p=[0.05, 0.9, 0.05]).astype(np.int8)
    assert len(encode_rounding(changes)) * 6 / changes.size < 0.62
