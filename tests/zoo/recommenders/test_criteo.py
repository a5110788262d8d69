"""Criteo's rows as a schema: the built-in one, and the preprocessing of models of version 0.2.0."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from helpers.criteo_logs import read

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.recommenders import criteo
from zoo.recommenders.data.features import Features, Rows
from zoo.recommenders.data.schema import Schema

GOOD = {
    "hash": "farmhash fingerprint64 mod buckets",
    "transform": "log1p, minmax",
    "numeric": 2,
    "categorical": 3,
    "buckets": 10,
    "lo": [0.0, 0.5],
    "hi": [1.0, 0.5],
    "fill": [0.0, 1.0],
}
MAPPED = {
    "hash": "farmhash fingerprint64 mod buckets, missing = buckets",
    "numeric_columns": ["u", "v", "w"],
    "fill": [0.5, 0.0, 2.0],
    "categorical_columns": ["a", "b"],
    "buckets": [3, 4],
    "numbers": [
        {"column": 0, "steps": [["log1p"], ["divide", 2.0]], "lo": 0.0, "hi": 3.0},
        {"column": 2, "steps": [], "lo": 1.0, "hi": 1.0},
        {"column": 2, "steps": [["square"]], "lo": -1.0, "hi": 1.0},
    ],
}


def whole(features, source, **options):
    return Rows.concatenate(list(features.read(source, **options)))


def of_rows(lines, **counts):
    return Features(criteo.schema(lines, **counts))


E1 = math.e - 1  # log1p of it is 1


def test_numbers_are_fitted_and_scaled():
    lines = [
        f"0\t{E1!r}\t\t7\ta\tb",
        "\t-5\t\t7\ta\tb",
        f"{math.e**2 - 1!r}\t{math.e**3 - 1!r}\t\t\ta\tb",
    ]
    features = of_rows(lines, numeric=4, categorical=2, buckets=50)
    bounds = [[column.encoding[key] for column in features.numbers] for key in ("low", "high", "fill")]
    assert bounds[0] == pytest.approx([0, 0, 0, math.log(8)])
    assert bounds[1] == pytest.approx([2, 3, 0, math.log(8)])
    assert bounds[2] == [0, 0, 0, 0]
    rows = whole(
        features, [f"{E1!r}\t{E1!r}\t4\t7\ta\tb", "\t\t\t\ta\tb", "-3\t1e30\t1e30\t1e30\ta\tb", "1e9\t0\t0\t0\ta\tb"]
    )
    values = rows.numbers
    assert values.tolist() == [pytest.approx([1 / 2, 1 / 3, 0, 0]), [0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert values.dtype == np.float32
    assert values.flags.c_contiguous


def test_the_ranges_do_not_depend_on_the_batches(synthetic, monkeypatch):
    once = criteo.schema(synthetic)
    assert once.rows == 40_000
    monkeypatch.setattr("zoo.recommenders.data.sources.BLOCK", 5000)
    assert criteo.schema(synthetic) == once


def test_rows_are_encoded(synthetic):
    raw, features = read(synthetic), of_rows(synthetic)
    rows = whole(features, synthetic)
    inputs = features.encode(rows)
    assert {name: (array.dtype, array.shape) for name, array in inputs.items()} == {
        "ids": (np.int32, (40_000, 26)),
        "numbers": (np.float32, (40_000, 13)),
    }
    assert all(array.flags.c_contiguous for array in inputs.values())
    numbers = inputs["numbers"]
    assert numbers.min() == 0
    assert numbers.max(axis=0).tolist() == [1] * 13
    logs = np.log1p(np.maximum(raw.numbers.astype(np.float64), 0))
    lo, hi = np.nanmin(logs, axis=0), np.nanmax(logs, axis=0)
    np.testing.assert_allclose(numbers, np.nan_to_num((logs - lo) / (hi - lo)), atol=3e-7)
    assert np.array_equal(inputs["ids"], raw.ids)
    assert np.array_equal(whole(features, synthetic, batch_rows=999).numbers, numbers)  # no row depends on its batch


def test_no_rows_have_no_schema(tmp_path):
    with pytest.raises(RequestError, match="found no input"):
        criteo.schema([])
    (tmp_path / "rows.tsv").write_text("1\t2\n")
    with pytest.raises(RequestError, match="found 2 columns"):
        criteo.schema(tmp_path / "rows.tsv")
    with pytest.raises(RequestError, match="found no row to use"):
        criteo.schema(tmp_path / "rows.tsv", on_error="skip")


def test_the_built_in_schema_is_one_that_a_file_may_hold(synthetic, tmp_path):
    schema = criteo.schema(synthetic)
    assert Schema.load(schema.save(tmp_path / "schema.json")) == schema


# ----------------------------------------------------------------------------------------------- models of version 0.2.0


@pytest.mark.parametrize("native", [True, False])
def test_rows_are_encoded_as_by_0_2_0(native, monkeypatch):
    if not native:
        monkeypatch.setattr(extension, "native", lambda: None)
    features = Features.from_json(GOOD)
    assert (features.shape, features.last_ids.tolist()) == ((3, 2, 0), [9, 9, 9])
    values = ["", "-7", "0", "1", "2", "0.5", "70000", "1e30", "16777216"]
    rows = whole(features, [f"{a}\t{b}\t{a}\tx\t" for a in values for b in values])
    raw = read([f"{a}\t{b}\t{a}\tx\t" for a in values for b in values], numeric=2, categorical=3, buckets=10)
    lo, hi, fill = (np.array(GOOD[key], np.float32) for key in ("lo", "hi", "fill"))
    logs = np.clip(np.log1p(np.maximum(raw.numbers, np.float32(0))), lo, hi)
    expected = (logs - lo) / np.where(hi > lo, hi - lo, np.float32(1))
    expected = np.where(np.isnan(raw.numbers), fill, expected)
    assert rows.numbers.tobytes() == expected.astype(np.float32).tobytes()
    assert np.array_equal(rows.ids, raw.ids)


@pytest.mark.parametrize("native", [True, False])
def test_rows_of_a_graph_are_encoded_as_by_0_2_0(native, monkeypatch):
    if not native:
        monkeypatch.setattr(extension, "native", lambda: None)
    features = Features.from_json(json.loads(json.dumps(MAPPED)))
    assert [column.name for column in features.numbers] == ["u", "w", "w.2"]
    assert (features.shape, features.last_ids.tolist()) == ((2, 3, 0), [3, 4])
    assert Features.from_json({"schema": features.schema.to_json()}) == features
    lines = ["1\t9\t3\tx\ty", "\t\t\t\t", "0.25\t7\t-4\t\tz"]
    rows = whole(features, lines)
    u, w = np.array([1, 0.5, 0.25], np.float32), np.array([3, 2, -4], np.float32)
    span = np.float32(3), np.float32(1), np.float32(2)
    columns = [np.log1p(u) / np.float32(2) / span[0], (w - np.float32(1)) / span[1], (w * w + np.float32(1)) / span[2]]
    assert rows.numbers.tobytes() == np.column_stack(columns).astype(np.float32).tobytes()
    raw = read(lines, numeric=3, categorical=2, buckets=[3, 4])
    assert np.array_equal(rows.ids, raw.ids) and rows.ids[1].tolist() == [3, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"lo": [0.0]},
        {"lo": [2.0, 0.0]},
        {"lo": [-1.0, 0.0]},
        {"hi": "no"},
        {"hi": [1.0, "x"]},
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


@pytest.mark.parametrize(
    "change",
    [
        {"hash": "md5"},
        {"buckets": [3]},
        {"buckets": [0, 4]},
        {"fill": ["x"]},
        {"fill": [float("nan"), 0.0, 0.0]},
        *(
            {"numbers": [{**MAPPED["numbers"][0], **change}]}
            for change in ({"column": 3}, {"lo": 4.0}, {"steps": [["cube"]]})
        ),
        {"numbers": [{**MAPPED["numbers"][0], "steps": [["divide"]]}]},
    ],
)
def test_broken_features_of_a_graph_are_refused(change):
    with pytest.raises(RequestError, match="broken features"):
        Features.from_json({**MAPPED, **change})


def test_features_with_something_missing_or_more():
    for key in set(GOOD) - {"hash"}:
        with pytest.raises(RequestError, match=f"broken features: .*{key}"):
            Features.from_json({name: value for name, value in GOOD.items() if name != key})
    for value in ([], {}):
        with pytest.raises(RequestError, match="holds no schema"):
            Features.from_json(value)
    assert Features.from_json({**GOOD, "note": "kept by the card", "hi": [1, 0.5]}) == Features.from_json(GOOD)
