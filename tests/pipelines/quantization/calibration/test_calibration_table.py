"""Calibration tables: saved, read, refused, merged."""

import json
from dataclasses import replace

import numpy as np
import pytest
from helpers.calibrating import DOUBLE, MLP, WEIGHTS, cut, mlp, samples
from helpers.rewriting import model

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.observers import Summary
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.recipe import QuantRecipe


def test_a_table_survives_saving(rng, tmp_path):
    table = calibrate(mlp(), [samples(rng)], "kl")
    path = table.save(tmp_path / "t.json")
    assert CalibrationTable.load(path) == table
    assert table.save(tmp_path / "u.json").read_bytes() == path.read_bytes()
    assert list(json.loads(path.read_text())["tensors"]) == list(table.tensors)


def test_a_table_belongs_to_one_graph(rng):
    table = calibrate(mlp(), [samples(rng)])
    table.require(mlp())
    other = model(MLP, **WEIGHTS | {"two": np.float32(3)})
    with pytest.raises(RequestError) as caught:
        table.require(other)
    assert table.graph[:12] in str(caught.value) and io.digest(other)[:12] in str(caught.value)
    assert "zoo calibrate" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        "3",
        '{"graph": "a", "observer": "kl", "samples": 1, "samples_digest": "d", "tensors": {"x": {"low": 1}}}',
    ],
)
def test_a_file_that_is_no_table(tmp_path, body):
    (tmp_path / "t.json").write_text(body)
    with pytest.raises(RequestError, match="t.json is not a calibration table"):
        CalibrationTable.load(tmp_path / "t.json")


@pytest.mark.parametrize(
    "change",
    [
        {"low": "text"},
        {"low": float("nan")},
        {"high": float("inf")},
        {"low": None},
        {"minimum": "1"},
        {"low": 2.0, "high": 1.0},
    ],
    ids=str,
)
def test_ranges_that_are_none(tmp_path, change):
    good = {"minimum": -1.0, "maximum": 1.0, "low": -1.0, "high": 1.0, "count": 3}
    table = {"graph": "a", "observer": "kl", "samples": 1, "samples_digest": "d"}
    (tmp_path / "t.json").write_text(json.dumps(table | {"tensors": {"fine": good, "odd": good | change}}))
    with pytest.raises(
        RequestError, match="^.*t.json gives tensor odd the range .*; expected finite numbers, low <= high; .*$"
    ):
        CalibrationTable.load(tmp_path / "t.json")


def test_an_old_table_is_read_and_written_as_it_was(tmp_path):
    ranges = {"minimum": 0.0, "maximum": 1.0, "low": 0.0, "high": 0.5, "count": 3}
    table = {"graph": "a", "observer": "minmax", "samples": 1, "samples_digest": "d", "tensors": {"x": ranges}}
    (tmp_path / "old.json").write_text(json.dumps(table, indent=2) + "\n")
    loaded = CalibrationTable.load(tmp_path / "old.json")
    assert loaded.tensors["x"] == TensorRange(0.0, 1.0, 0.0, 0.5, 3)
    assert loaded.save(tmp_path / "new.json").read_bytes() == (tmp_path / "old.json").read_bytes()


def test_a_table_can_be_read_by_a_person(tmp_path):
    x = np.float32([[-1, 0, 0, 0.5], [0.25, 0, 1, 3]])
    table = calibrate(model(DOUBLE.format("n", "n"), two=np.float32(2)), [{"x": x}])
    table = replace(table, bias={"y": (-0.375, 0.0, 0.5, 1.75)})
    text = table.save(tmp_path / "t.json").read_text()
    assert json.loads(text)["tensors"]["x"] == {
        **{"minimum": -1.0, "maximum": 3.0, "low": table.tensors["x"].low, "high": table.tensors["x"].high, "count": 8},
        **{"method": table.tensors["x"].method, "histogram": json.loads(text)["tensors"]["x"]["histogram"]},
    }
    summary = CalibrationTable.load(tmp_path / "t.json").tensors["x"].histogram
    assert (summary.start, summary.width, summary.zeros, sum(summary.counts)) == (-1.0, 0.0625 * 2, 3, 8)
    assert f'"counts": [{", ".join(map(str, summary.counts))}]\n' in text  # on one line
    assert '"y": [-0.375, 0.0, 0.5, 1.75]' in text and "equalization" not in text


@pytest.mark.parametrize("name", ["odd [\n1,\n2\n]", "a[0,  1]", 'quo"te', "[\n]"])
def test_names_are_kept(tmp_path, name):
    ranges = {name: TensorRange(0.0, 1.0, 0.0, 1.0, 1, "kl", Summary(0.0, 1.0, 0, (1,)))}
    table = CalibrationTable(
        "g",
        "kl",
        1,
        "d",
        ranges,
        True,
        {name: (1.0, 0.5)},
        {name: (-0.25,)},
        {name: "AQI="},
        QuantRecipe(keep_float=("a", "b")).to_json(),
    )
    assert CalibrationTable.load(table.save(tmp_path / "t.json")) == table


@pytest.mark.parametrize("histogram", [{"start": 0}, 3, {"start": 0.0, "width": 1.0, "zeros": 0, "counts": 7}])
def test_a_broken_histogram(tmp_path, histogram):
    good = {"minimum": -1.0, "maximum": 1.0, "low": -1.0, "high": 1.0, "count": 3, "histogram": histogram}
    table = {"graph": "a", "observer": "kl", "samples": 1, "samples_digest": "d", "tensors": {"x": good}}
    (tmp_path / "t.json").write_text(json.dumps(table))
    with pytest.raises(RequestError, match="^.*t.json is not a calibration table .*$"):
        CalibrationTable.load(tmp_path / "t.json")


# --- merge


def halves(rng, observer, **options):
    batch = samples(rng, 2000)
    batch["x"][7, 2] = 30
    return [
        calibrate(mlp(), batches, observer, **options)
        for batches in (cut(batch, 600, 1400)[:1], cut(batch, 600, 1400)[1:], [batch])
    ]


def test_tables_of_minmax_merge_to_that_of_all_samples(rng):
    one, other, both = halves(rng, "minmax")
    merged = one.merge(other)
    assert (merged.graph, merged.samples) == (both.graph, 2000) and list(merged.tensors) == list(both.tensors)
    for name, tensor in both.tensors.items():
        joined = merged.tensors[name]
        np.testing.assert_allclose(
            joined.histogram.counts, tensor.histogram.counts, atol=2
        )  # an engine sums other batches in another order
        ends = ("minimum", "maximum", "low", "high", "count")
        assert [getattr(joined, end) for end in ends] == pytest.approx([getattr(tensor, end) for end in ends], rel=1e-6)


@pytest.mark.parametrize("observer", ["kl", "auto"])
def test_a_merged_range_is_nearly_as_good_as_that_of_all_samples(rng, observer):
    one, other, both = halves(rng, observer)
    merged = one.merge(other)
    assert merged.tensors == other.merge(one).tensors and merged.samples_digest == other.merge(one).samples_digest
    for name, tensor in both.tensors.items():
        joined = merged.tensors[name]
        assert tensor.minimum <= joined.low <= joined.high <= tensor.maximum
        assert 0.8 * (tensor.high - tensor.low) < joined.high - joined.low < 1.6 * (tensor.high - tensor.low)


def test_tables_that_cannot_be_merged(rng):
    one, other, _ = halves(rng, "minmax")
    refused = {
        "cannot merge calibration tables of different graphs, .* and feed; make both alike: zoo calibrate": replace(
            other, graph="feed"
        ),
        "cannot merge calibration tables of different observers, minmax and kl; make both alike: zoo calibrate": replace(
            other, observer="kl"
        ),
        "cannot merge a calibration table without histograms .*; make one of all samples.*": replace(
            other, tensors={name: replace(tensor, histogram=None) for name, tensor in other.tensors.items()}
        ),
    }
    for what, table in refused.items():
        with pytest.raises(RequestError, match=f"^{what}$"):
            one.merge(table)
