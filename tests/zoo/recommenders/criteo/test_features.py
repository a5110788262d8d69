"""Features of rows: how numbers are normalized and encoded."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from helpers.criteo_logs import read

from pipelines.core.errors import RequestError
from zoo.recommenders.criteo.data import Rows, read_rows
from zoo.recommenders.criteo.features import Features
from zoo.recommenders.criteo.fitting import fit


def rows_of(numbers, ids=None):
    numbers = np.asarray(numbers, np.float32)
    ids = np.zeros((len(numbers), 2), np.int32) if ids is None else np.asarray(ids, np.int32)
    return Rows(numbers, ids, None, np.arange(len(numbers)))


E1 = math.e - 1  # log1p of it is 1


def test_fit_and_normalize():
    nan = math.nan
    batches = [rows_of([[0, E1, nan, 7], [nan, -5, nan, 7]]), rows_of([[math.e**2 - 1, math.e**3 - 1, nan, nan]])]
    features = fit(batches, buckets=50)
    assert (features.numeric, features.categorical, features.buckets) == (4, 2, 50)
    assert features.lo == pytest.approx([0, 0, 0, math.log(8)])
    assert features.hi == pytest.approx([2, 3, 0, math.log(8)])
    assert features.fill == (0, 0, 0, 0)
    values = features.normalize(
        np.array([[E1, E1, 4, 7], [nan, nan, nan, nan], [-3, 1e300, 1e300, 1e300], [1e9, 0, 0, 0]])
    )
    assert values.tolist() == [pytest.approx([1 / 2, 1 / 3, 0, 0]), [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert values.dtype == np.float32
    assert values.flags.c_contiguous


def test_fill_with_the_mean_of_the_normalized_column():
    features = fit(
        [rows_of([[0, 3], [math.nan, 3]]), rows_of([[E1, math.nan], [math.e**4 - 1, math.nan]])], fill="mean"
    )
    assert features.fill == pytest.approx((5 / 12, 0))
    assert features.normalize(np.full((1, 2), np.nan)).tolist() == [pytest.approx([5 / 12, 0])]


def test_fit_does_not_depend_on_the_batches(synthetic):
    once, parts = fit(read_rows(synthetic), fill="mean"), fit(read_rows(synthetic, batch_rows=777), fill="mean")
    assert (once.lo, once.hi) == (parts.lo, parts.hi)
    assert once.fill == pytest.approx(parts.fill)


def test_encode(synthetic):
    rows = read(synthetic)
    features = fit([rows])
    inputs = features.encode(rows)
    assert {name: (array.dtype, array.shape) for name, array in inputs.items()} == {
        "ids": (np.int32, (40_000, 26)),
        "numbers": (np.float32, (40_000, 13)),
    }
    assert all(array.flags.c_contiguous for array in inputs.values())
    numbers = inputs["numbers"]
    assert numbers.min() == 0
    assert numbers.max(axis=0).tolist() == [1] * 13
    logs = np.log1p(np.maximum(rows.numbers.astype(np.float64), 0))
    lo, hi = np.nanmin(logs, axis=0), np.nanmax(logs, axis=0)
    np.testing.assert_allclose(numbers, np.nan_to_num((logs - lo) / (hi - lo)), atol=3e-7)
    parts = [features.encode(batch)["numbers"] for batch in read_rows(synthetic, batch_rows=999)]
    assert np.array_equal(np.concatenate(parts), numbers)  # no row depends on its batch
    assert np.array_equal(features.normalize(rows.numbers.astype(np.float64)), numbers)
    assert np.array_equal(features.normalize(np.asfortranarray(rows.numbers)), numbers)


def test_encode_refuses_rows_read_otherwise():
    features = Features((0.0,), (1.0,), (0.0,), 1, 2, 10)
    assert features.counts == {"numeric": 1, "categorical": 2, "buckets": 10}
    with pytest.raises(RequestError, match=r"features.counts"):
        features.encode(rows_of([[1]], [[1, 10]]))
    with pytest.raises(RequestError, match=r"features.counts"):
        features.encode(rows_of([[1]], [[1, 1, 1]]))
    with pytest.raises(RequestError, match=r"wanted \[n, 1\]"):
        features.encode(rows_of([[1, 2]], [[1, 1]]))
    read_rows([b"1\ta\tb"], **features.counts)


def test_no_rows_to_fit():
    with pytest.raises(RequestError, match="no rows to fit"):
        fit([])
    with pytest.raises(RequestError, match="fill 'median'"):
        fit([rows_of([[1]])], fill="median")


def test_features_come_back_exactly(synthetic):
    features = fit(read_rows(synthetic), fill="mean")
    assert Features.from_json(json.loads(json.dumps(features.to_json()))) == features


GOOD = Features((0.0, 0.5), (1.0, 0.5), (0.0, 1.0), 2, 3, 10).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"lo": [0.0]},
        {"lo": [2.0, 0.0]},
        {"lo": [-1.0, 0.0]},
        {"hi": "no"},
        {"hi": [1.0, "x"]},
        {"hi": [1.0, True]},
        {"hi": [math.inf, 1.0]},
        {"hi": [math.nan, 1.0]},
        {"fill": [0.0, 1.5]},
        {"fill": None},
        {"numeric": 3},
        {"numeric": 0},
        {"numeric": 2.0},
        {"categorical": -1},
        {"buckets": 0},
        {"buckets": 2**31},
        {"buckets": True},
        {"hash": "murmur"},
        {"transform": "minmax"},
    ],
)
def test_broken_features_are_refused(change):
    with pytest.raises(RequestError, match="broken features"):
        Features.from_json({**GOOD, **change})


def test_features_with_something_missing_or_more():
    for key in GOOD:
        with pytest.raises(RequestError, match=f"broken features: {key} missing"):
            Features.from_json({name: value for name, value in GOOD.items() if name != key})
    for value in (None, [], "x"):
        with pytest.raises(RequestError, match="wanted an object"):
            Features.from_json(value)
    assert Features.from_json({**GOOD, "note": "kept by the card", "hi": [1, 0.5]}).to_json() == GOOD
