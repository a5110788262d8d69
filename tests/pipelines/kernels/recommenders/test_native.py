"""The native kernels, in every instruction set that this CPU runs, return the bits of `reference`."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import click_layers
from helpers.click_layers import RNG, dense, embedding, feeds, network, same

from pipelines.kernels import extension
from pipelines.kernels.recommenders import native as kernels
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.operators import FIELDS, LinearLayer

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
BATCHES = (0, 1, 2, 5, 6, 7, 255, 256, 257)


def check(layer, isa, ids, numbers):
    """The native result, which must be that of the reference; numbers may be None where the layer has none."""
    found = kernels.parallel_embedding(layer, isa)(ids, numbers if layer.number_scale.size else None)
    same(found, reference.parallel_embedding(layer, ids, numbers))
    return found


# --- the same bits as the reference


def test_the_fastest_version_is_chosen():
    layer = embedding()
    assert extension.isas()[-1] == "portable"
    assert kernels.parallel_embedding(layer).isa == extension.isas()[0] == kernels.linear(dense(3, 2)).isa


@pytest.mark.parametrize("width", [1, 40, 64, 65, 1000, 1024])
@pytest.mark.parametrize(("fields", "numbers"), [(1, 0), (1, 1), (2, 2), (26, 13), (FIELDS, 3)])
def test_embeddings_of_all_shapes(isa, width, fields, numbers):
    layer = embedding(fields, 5, width, numbers, wide=bool(width % 2))
    native = kernels.parallel_embedding(layer, isa)
    assert native.isa == isa
    for count in (0, 1, 2, 7):
        ids, x = feeds(layer, count, np.int64 if count % 2 else np.int32)
        same(native(ids, x if numbers else None), reference.parallel_embedding(layer, ids, x))


@pytest.mark.parametrize("count", [*BATCHES, 4099])
def test_embeddings_of_all_batches(isa, count):
    layer = embedding(4, 9, 70, 3)
    for dtype in (np.int32, np.int64):
        hidden, _ = check(layer, isa, *feeds(layer, count, dtype))
        assert count < 2 or len(np.unique(hidden)) > 50


@pytest.mark.parametrize("entry", [1, 255])
@pytest.mark.parametrize(("fields", "shift"), [(FIELDS, 0), (FIELDS, 14), (1, 14), (26, 14)])
def test_sums_at_the_bounds_of_16_and_32_bits(isa, fields, shift, entry):
    """All rows at their end; numbers at theirs, with weights that reach the last int32 before the overflow."""
    room = (2**31 - 1 - (127 << shift) * fields) // 2048
    weights = np.array([min(32767, room - 32767 * k) if room > 32767 * k else 0 for k in range(34)], np.int16)
    weight = np.repeat(weights[:, None] * np.int16(1 if entry == 255 else -1), 65, axis=1)
    layer = embedding(
        fields,
        2,
        65,
        34,
        shift,
        weight=weight,
        number_scale=np.ones(34, np.float32),
        scale=np.full(65, 2.0**-23, np.float32),
    )
    layer.table[:, :65] = entry
    assert 2**31 - 2048 <= layer.reach().max() < 2**31
    ids, _ = feeds(layer, 7)
    for reach in (3000, -3000, 2047):
        check(layer, isa, ids, np.full((7, 34), reach, np.float32))
        check(replace(layer, scale=np.full(65, 2.0**-3, np.float32)), isa, ids, np.full((7, 34), reach, np.float32))


def test_numbers_that_are_none_or_beyond_all_bounds(isa):
    odd = [
        np.nan,
        np.inf,
        -np.inf,
        3.4e38,
        -3.4e38,
        1e-45,
        -0.0,
        0.5 / 1024,
        1.5 / 1024,
        -0.5 / 1024,
        2.0,
        -2.0,
        2.0005,
        1.9995,
        2047.5 / 1024,
    ]
    layer = embedding(2, 3, 65, 5)
    x = RNG.choice(np.array(odd, np.float32), (300, 5))
    ids, _ = feeds(layer, 300)
    with np.errstate(over="ignore"):
        check(layer, isa, ids, x)
        check(
            replace(layer, number_scale=np.array([0, 1e30, -3, 1e-38, 3.4e38], np.float32)), isa, ids, np.nan_to_num(x)
        )


def test_results_at_a_half_round_to_even(isa):
    layer = embedding(1, 255, 64, 0, 0, scale=np.full(64, 0.5, np.float32), bias=np.full(64, 64, np.float32))
    layer.table[:] = np.arange(1, 256, dtype=np.uint8)[:, None]
    hidden, _ = check(layer, isa, np.arange(255)[:, None], np.zeros((255, 0), np.float32))
    assert hidden[127:132, 0].tolist() == [64, 64, 65, 66, 66]


def test_fields_may_share_columns_and_rows_and_skip_columns(isa):
    of = embedding(4, 6, 40, 2)
    layer = replace(
        of,
        columns=np.array([5, 1, 1, 3], np.int32),
        offsets=np.array([0, 20, 3, 0], np.int32),
        rows=np.array([24, 4, 4, 1], np.int32),
    )
    ids = RNG.integers(-(2**31), 2**31, (50, 7), np.int64)  # what no field reads is not looked at
    ids[:, [5, 1, 3]] = RNG.integers(0, [24, 4, 1], (50, 3))
    check(layer, isa, ids, feeds(layer, 50)[1])


@pytest.mark.parametrize("inputs", [1, 2, 3, 4, 5, 63, 64, 65, 130, 1024])
@pytest.mark.parametrize("outputs", [1, 7, 8, 9, 15, 16, 17, 64, 65, 100])
def test_linear_layers_of_all_shapes(isa, inputs, outputs):
    for zero, low in ((None, 0), (0, 0), (3, 0), (128, 128), (255, 7)):
        layer = dense(inputs, outputs, zero, low)
        native = kernels.linear(layer, isa)
        assert native.isa == isa
        for count in (0, 1, 7):
            x = RNG.integers(0, 256, (count, inputs), np.uint8)
            same([native(x)], [reference.linear(layer, x)])


@pytest.mark.parametrize(("inputs", "outputs"), [(7, 9), (70, 130), (64, 5), (33, 3)])
def test_linear_layers_of_all_batches(isa, inputs, outputs):
    for zero in (None, 5):
        layer = dense(inputs, outputs, zero)
        native = kernels.linear(layer, isa)
        for count in (*range(16), 63, 64, 65, 239, 240, 241, *BATCHES, 4099):
            x = RNG.integers(0, 256, (count, inputs), np.uint8)
            same([native(x)], [reference.linear(layer, x)])


@pytest.mark.parametrize("active", [0, 0.002, 0.02, 0.3])
def test_inputs_that_are_mostly_zero(isa, active):
    layer, real = dense(1021, 70), dense(1021, 70, None)
    for count in (1, 2, 5, 6, 13, 250):
        x = np.where(RNG.random((count, 1021)) < active, RNG.integers(1, 256, (count, 1021)), 0).astype(np.uint8)
        x[:, -1] = RNG.integers(0, 2, count)
        for each in (layer, real):
            same([kernels.linear(each, isa)(x)], [reference.linear(each, x)])


@pytest.mark.parametrize("outputs", [3, 70])
@pytest.mark.parametrize("sign", [1, -1])
def test_linear_sums_at_their_bounds(isa, outputs, sign):
    """All inputs 255, all weights at their end, and a bias that fills what an int32 has left."""
    for inputs, weight, kinds in ((2, 127, 4), (1024, 127, 4), (66000, 127, 1), (65700, 128, 1)):
        if (weight, sign) == (128, 1):
            continue
        reach = 255 * weight * inputs
        bias = np.full(outputs, sign * (2**31 - 1 - reach), np.int32)
        for zero, scale in ((None, 1.0), (0, 2.0**-23), (255, 2.0**-2), (100, -(2.0**-2)))[:kinds]:
            w = np.full((inputs, outputs), sign * weight, np.int8)
            layer = LinearLayer(w, bias, np.full(outputs, scale, np.float32), zero, 0)
            x = np.full((7 if inputs < 9999 else 1, inputs), 255, np.uint8)
            same([kernels.linear(layer, isa)(x)], [reference.linear(layer, x)])


@pytest.mark.parametrize("count", BATCHES)
@pytest.mark.parametrize(
    ("sizes", "numbers"), [((65, 33, 9, 1), 3), ((1, 1), 0), ((64, 200, 1), 1), ((40, 3, 130, 2, 1), 2)]
)
@pytest.mark.parametrize("wide", [True, False])
def test_networks_are_their_layers(isa, sizes, numbers, wide, count):
    first, native, expected = network(isa, sizes, numbers=numbers, wide=wide)
    ids, x = feeds(first, count)
    same([native(ids, x if numbers else None)], [expected(ids, x)])


def test_the_sigmoid_is_that_of_float_in_every_version(monkeypatch):
    results = []
    ids, x = RNG.integers(0, 8, (4099, 5)), RNG.uniform(-2, 2, (4099, 3)).astype(np.float32)
    for isa in extension.isas():
        monkeypatch.setattr(click_layers, "RNG", np.random.default_rng(3))  # the same layers for each
        _, native, expected = network(isa, sigmoid=True)
        results.append(native(ids, x))
        exact = 1 / (1 + np.exp(-expected(ids, x).astype(np.float64)))
        np.testing.assert_allclose(results[-1], exact, rtol=1e-6)
    for each in results:
        same([each], [results[0]])
