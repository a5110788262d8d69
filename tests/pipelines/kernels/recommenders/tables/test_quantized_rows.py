"""Quantized rows: the packing, the error of a row, and the same bits of all instruction sets and numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders.tables import embedding_bags, quantized_rows
from pipelines.kernels.recommenders.tables.embedding_bags import Bag
from pipelines.kernels.recommenders.tables.quantized_rows import QuantizedRows, quantize, row_bytes

native = pytest.mark.skipif(extension.native() is None, reason="no native kernels here")


def table_of(rows, width, seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal((rows, width)) * scale).astype(np.float32)


@pytest.mark.parametrize(
    ("width", "bits", "expected"),
    [
        (64, 8, 68),
        (64, 4, 36),
        (64, 2, 20),
        (16, 4, 12),
        (16, 2, 8),
        (32, 2, 12),
        (128, 4, 68),
        (24, 8, 28),
        (48, 4, 28),
        (8, 4, 12),
    ],
)
def test_rows_have_the_bytes_of_their_codes_and_two_int16(width, bits, expected):
    assert row_bytes(width, bits) == expected


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 129])
def test_packing_keeps_all_codes(width, bits):
    codes = np.random.default_rng(width).integers(0, 2**bits, (50, width)).astype(np.uint8)
    if bits < 8:
        assert (quantized_rows._unpacked(quantized_rows._packed(codes, bits), width, bits) == codes).all()
    table = quantize(table_of(50, width), bits)
    table.check()
    assert table.codes(np.arange(50)).shape == (50, width)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.51), (4, 0.51), (2, 0.51)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_error_of_a_row_is_half_a_step_or_the_one_of_a_narrower_range(bits, most, scale):
    x = table_of(300, 40, scale=scale)
    x[7], x[8] = 0, 3 * scale
    table = quantize(x, bits)
    error = np.abs(table.dequantized(np.arange(300)) - x)
    step = (x.max(axis=1) - x.min(axis=1))[:, None] / (2**bits - 1)
    if bits == 8:
        assert (error <= 0.75 * step + 2e-3 * scale).all()
    whole = np.rint((x - x.min(axis=1, keepdims=True)) / np.where(step > 0, step, 1)) * step + x.min(
        axis=1, keepdims=True
    )
    assert np.square(error).mean() <= np.square(whole - x).mean() * 1.1 + (2e-3 * scale) ** 2
    assert error[7].max() == 0 and error[8].max() <= 2e-3 * scale


def test_some_rows_of_a_table_are_those_of_the_whole_table():
    x = table_of(50, 40)
    whole, part = quantize(x, 4), quantize(x, 4, np.array([3, 20]))
    assert (whole.scale_unit, whole.bias_unit) == (part.scale_unit, part.bias_unit)
    assert (part.matrix()[[3, 20]] == whole.matrix()[[3, 20]]).all() and not part.matrix()[4].any()


def test_wrong_tables_are_refused():
    with pytest.raises(RequestError, match="expected finite ones"):
        quantize(np.array([[np.nan, 1]], np.float32), 8)
    with pytest.raises(RequestError, match="expected rows and columns"):
        quantize(np.zeros((3, 2), np.float32), 5)
    table = quantize(table_of(3, 16), 4)
    with pytest.raises(RequestError, match="expected uint8"):
        QuantizedRows(table.data[:-1], 3, 16, 4, 1.0, 1.0).check()
    damaged = table.data.copy()
    damaged[8:10] = np.array([-1], np.int16).view(np.uint8)
    with pytest.raises(RequestError, match="outside 0 to 32639"):
        QuantizedRows(damaged, 3, 16, 4, 1.0, 1.0).check()


@native
@given(
    tables=st.lists(
        st.tuples(
            st.integers(1, 400),
            st.integers(1, 200),
            st.sampled_from([8, 4, 2]),
            st.integers(1, 90),
            st.sampled_from(["sum", "mean"]),
        ),
        min_size=1,
        max_size=4,
    ),
    n=st.integers(0, 70),
    wide=st.booleans(),
)
def test_the_bits_of_numpy_on_every_instruction_set(tables, n, wide):
    rng = np.random.default_rng(n)
    bags = [
        Bag(quantize(table_of(rows, width, scale=0.1), bits), count, pool) for rows, width, bits, count, pool in tables
    ]
    ids = np.concatenate([rng.integers(0, bag.table.rows, (n, bag.count)) for bag in bags], axis=1)
    ids = ids.astype(np.int64 if wide else np.int32)
    expected = embedding_bags.pooled(bags, ids)
    for isa in extension.isas():
        assert embedding_bags.embedding_bags(bags, isa)(ids).tobytes() == expected.tobytes(), isa


@native
def test_rows_far_apart_have_the_same_bits():
    bags = [Bag(quantize(table_of(20_000, 64), bits), count) for bits, count in ((8, 1), (4, 20), (2, 3))]
    ids = np.random.default_rng(1).integers(0, 20_000, (333, 24))
    expected = embedding_bags.pooled(bags, ids)
    for isa in extension.isas():
        assert embedding_bags.embedding_bags(bags, isa)(ids).tobytes() == expected.tobytes(), isa


@native
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("wrong", [-1, 10, 2**31 - 1])
def test_ids_outside_a_table_are_refused(dtype, wrong):
    bags = embedding_bags.embedding_bags([Bag(quantize(table_of(10, 16), 4), 2), Bag(quantize(table_of(10, 16), 8), 1)])
    ids = np.zeros((5, 3), dtype)
    ids[4, 2] = wrong
    with pytest.raises(IndexError, match=f"found id {wrong} in row 4, column 2; expected 0 to 9"):
        bags(ids)
    with pytest.raises(ValueError, match="another number of columns"):
        bags(np.zeros((5, 4), dtype))
    with pytest.raises(RequestError, match="found lists of 400 ids in a table of 8 bits; expected 1 to 258"):
        embedding_bags.embedding_bags([Bag(quantize(table_of(10, 16), 8), 400)])
    with pytest.raises(RequestError, match="expected sum or mean"):
        embedding_bags.embedding_bags([Bag(quantize(table_of(10, 16), 4), 2, "max")])
