"""The native search for the largest dot products: the reference's results, ties and all, on every instruction set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.kernels import extension
from zoo.recommenders.retrieval.index import ItemIndex, quantized, top_k

native = extension.native()
pytestmark = pytest.mark.skipif(native is None, reason="no native kernels here")


def isas():
    supported = []
    for isa in ("avx512", "avx2", "portable"):
        try:
            native.top_k(np.zeros((1, 1), np.int8), np.zeros((1, 1), np.int8), 1, isa)
            supported.append(isa)
        except ValueError:
            continue
    return supported


@given(
    n=st.integers(1, 40),
    m=st.integers(1, 1200),
    size=st.integers(1, 70),
    reach=st.sampled_from([1, 127]),
    data=st.data(),
)
def test_the_same_rows_as_the_reference(n, m, size, reach, data):
    count = data.draw(st.integers(1, min(m, 30)))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    queries, items = (rng.integers(-reach, reach + 1, (rows, size)).astype(np.int8) for rows in (n, m))
    wanted = top_k(queries, items, count)
    for isa in isas():
        for array, expected in zip(native.top_k(queries, items, count, isa), wanted, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_extremes_do_not_overflow():
    items = np.full((2, 65_536), -128, np.int8)
    rows, products = native.top_k(items[:1], items, 2)
    assert rows.tolist() == [[0, 1]] and products.tolist() == [[2**30, 2**30]]


@pytest.mark.parametrize("count", [0, -1, 4])
def test_more_results_than_items_are_refused(count):
    codes = np.zeros((3, 2), np.int8)
    with pytest.raises(ValueError, match="as many results"):
        native.top_k(codes, codes, count)
    with pytest.raises(ValueError, match="one size"):
        native.top_k(codes, np.zeros((3, 3), np.int8), 1)


def test_an_index_finds_a_vector_itself():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((500, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows, scores = ItemIndex(vectors).top(vectors[:9], 3)
    assert rows[:, 0].tolist() == list(range(9)) and np.abs(scores[:, 0] - 1).max() < 0.01
    assert (np.diff(scores, axis=1) <= 0).all() and quantized(vectors).dtype == np.int8


def test_the_largest_scores():
    scores = np.array([0.5, np.nan, 2, 2, -1, 0.5], np.float32)
    assert native.largest(scores, 6).tolist() == [2, 3, 0, 5, 4, 1] and native.largest(scores, 3).tolist() == [2, 3, 0]
    for count in (0, 7):
        with pytest.raises(ValueError, match="1 to as many"):
            native.largest(scores, count)
