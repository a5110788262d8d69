"""Rows from Parquet and data sets."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.criteo_logs import EMPTY, ROOT, buckets, read, read_rows, same, synthetic_lines

from pipelines.core.errors import RequestError, ZooError
from zoo.recommenders.data.row_errors import ErrorLog

INTEGER, TEXT = pa.int64(), pa.string()


def table(lines, names=None, numbers=INTEGER, text=TEXT, label=INTEGER):
    values = list(zip(*([value.decode() or None for value in row.split(b"\t")] for row in lines), strict=True))
    names = names or ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    kinds = [label, *[numbers] * 13, *[text] * 26]
    columns = [pa.array(column, pa.string()).cast(kind) for column, kind in zip(values, kinds, strict=True)]
    return pa.table(columns, names)


@pytest.mark.parametrize(
    ("numbers", "text", "label"),
    [
        (pa.int64(), pa.string(), pa.int8()),
        (pa.float32(), pa.large_string(), pa.bool_()),
        (pa.float64(), pa.binary(), pa.string()),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), pa.float64()),
    ],
)
def test_parquet(tmp_path, numbers, text, label):
    lines = synthetic_lines(60)
    whole = table(lines, None, numbers, text, label)
    file = tmp_path / "rows.parquet"
    pq.write_table(whole, file, row_group_size=25)
    same(read(file), read(lines))
    other = tmp_path / "other_name"
    order = np.random.default_rng(0).permutation(40).tolist()
    names = [
        f"{'' if i == 0 else 'integer_feature_' if i < 14 else 'Categorical_Feature_'}{[i, i - 13][i > 13] or 'CLICK'}"
        for i in range(40)
    ]
    renamed = whole.rename_columns(names).select(order).append_column("extra", pa.array([1] * 60))
    pq.write_table(renamed, other)
    same(read(other), read(lines))


def test_parquet_by_order_and_without_label(tmp_path):
    lines = synthetic_lines(10)
    whole = table(lines, [f"column{i}" for i in range(40)])
    pq.write_table(whole, tmp_path / "a.parquet")
    same(read(tmp_path / "a.parquet"), read(lines))
    pq.write_table(whole.drop_columns(["column0"]), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet").labels is None
    with pytest.raises(RequestError, match=r"b.parquet without a label"):
        read([tmp_path / "a.parquet", tmp_path / "b.parquet"])
    pq.write_table(whole.drop_columns(["column0", "column1"]), tmp_path / "c.parquet")
    with pytest.raises(RequestError, match=r"found the columns column2, .* expected label, I1 to I13 and C1 to C26"):
        read(tmp_path / "c.parquet")
    pq.write_table(whole.slice(0, 0), tmp_path / "d.parquet")
    with pytest.raises(RequestError, match=r"d.parquet empty"):
        read(tmp_path / "d.parquet")


@pytest.mark.parametrize("gone", ["I1", "C26", "I7"])
def test_parquet_without_some_of_the_named_columns(tmp_path, gone):
    whole = table(synthetic_lines(10))
    pq.write_table(whole.drop_columns(gone), tmp_path / "a.parquet")  # 39 columns, as many as by order without a label
    with pytest.raises(RequestError, match=f"found no column {gone.lower()} in .*a.parquet, expected all 39 by name"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["I2", "i2", "LABEL"])
def test_parquet_with_a_name_twice(tmp_path, name):
    whole = table(synthetic_lines(10))
    pq.write_table(whole.append_column(name, whole["I1"]), tmp_path / "a.parquet")
    with pytest.raises(RequestError, match=r"more than once in .*a.parquet"):
        read(tmp_path / "a.parquet")


def test_broken_values_in_parquet(tmp_path):
    lines = synthetic_lines(6)
    whole = table(lines, None, pa.float64(), pa.string(), pa.int64())
    infinite = whole.set_column(3, "I3", pa.array([1, math.inf, math.nan, None, 1e300, 5.0]))
    labels = infinite.set_column(0, "label", pa.array([0, 1, 1, None, 0, 2]))
    pq.write_table(labels, tmp_path / "rows.parquet")
    with pytest.raises(RequestError, match=r"rows.parquet:2: found inf in column 4"):
        read(tmp_path / "rows.parquet")
    log = ErrorLog()
    rows = read(tmp_path / "rows.parquet", on_error="skip", errors=log)
    assert (rows.index.tolist(), log.counts) == ([0, 2], {"number": 2, "label": 2})
    assert np.isnan(rows.numbers[1, 2])  # NaN in a table is missing
    for column, values, message in (
        (4, [[1]] * 6, "found list.* in the column I4"),
        (20, [1.5] * 6, "found double in the column C7"),
    ):
        name = whole.column_names[column]
        pq.write_table(whole.set_column(column, name, pa.array(values)), tmp_path / "kind.parquet")
        with pytest.raises(RequestError, match=message):
            read(tmp_path / "kind.parquet")


def test_whole_numbers_as_categories(tmp_path):
    lines = synthetic_lines(3)
    whole = table(lines).set_column(14, "C1", pa.array([7, None, -12])).set_column(15, "C2", pa.nulls(3))
    pq.write_table(whole, tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet")
    assert rows.ids[:, 0].tolist() == buckets(b"7", b"", b"-12")
    assert rows.ids[:, 1].tolist() == [EMPTY] * 3


def test_saved_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    lines = synthetic_lines(30)
    whole = datasets.Dataset(table(lines))
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(str(tmp_path / "two"))
    same(read(tmp_path / "one"), read(lines))
    same(read(f"{tmp_path / 'two'}:test"), read(lines[:5]))
    with pytest.raises(RequestError, match=r"found the splits train, test in .*, expected one of them: .*two:train"):
        read(tmp_path / "two")
    with pytest.raises(RequestError, match="found the splits"):
        read(f"{tmp_path / 'two'}:nonsense")
    with pytest.raises(RequestError, match="expected the folder without :train"):
        read(f"{tmp_path / 'one'}:train")


def test_hub_data_sets_are_streamed(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setenv("ZOO_OFFLINE", "0")
    lines = synthetic_lines(30)
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        stream = datasets.Dataset(table(lines)).to_iterable_dataset()
        return stream if split else datasets.IterableDatasetDict({"train": stream})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    same(read("someone/criteo"), read(lines))
    same(read("someone/criteo:test"), read(lines))
    assert asked == [("someone/criteo", None, True), ("someone/criteo", "test", True)]

    def broken(*arguments, **keywords):
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(
        RequestError, match=r"found neither a file someone/criteo nor that data set on the hub: no network$"
    ):
        read("someone/criteo")
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    with pytest.raises(RequestError, match="ZOO_OFFLINE"):
        read("someone/criteo")


def test_a_hub_that_fails_on_the_way(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)

    class Failing:
        def with_format(self, name):
            return self

        def iter(self, batch_size):
            yield table(synthetic_lines(3))
            raise ConnectionError("reset")

    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **keywords: Failing())
    rows = read_rows("someone/criteo", batch_rows=3)
    assert len(next(rows)) == 3
    with pytest.raises(ZooError, match="reading someone/criteo failed: reset"):
        next(rows)


def test_without_the_datasets_library(monkeypatch):
    monkeypatch.delenv("ZOO_OFFLINE", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        RequestError, match=r"needs datasets, which is not installed; run: pip install 'int8-zoo\[train\]'"
    ):
        read("someone/criteo")


def test_scoring_loads_nothing_heavy():
    code = (
        "import sys, zoo; zoo.pipeline('wide-deep-criteo', engine='native')(['\\t'.join(['1'] * 39)]); "
        "heavy = 'torch', 'tensorflow', 'datasets', 'pandas', 'pyarrow.parquet', 'pipelines.kernels.images.steps'; "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("named", [True, False])
def test_parquet_is_read_by_the_columns_of_a_row(tmp_path, named, monkeypatch):
    """Other columns are not read: here their bytes are damaged."""
    lines = synthetic_lines(500)
    whole = table(lines) if named else table(lines, [f"column{i}" for i in range(40)])
    if named:
        whole = whole.add_column(3, "other", pa.array([f"{i:x}" * 99 for i in range(500)]))
        whole = whole.append_column("nested", pa.array([{"a": "x" * 9} for _ in range(500)]))
    read_columns = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *arguments, **how: read_columns.append(how["columns"]) or batches(*arguments, **how),
    )
    file = tmp_path / "rows.parquet"
    pq.write_table(whole, file)
    if named:
        (chunk,) = (
            c
            for i in range(whole.num_columns)
            if (c := pq.read_metadata(file).row_group(0).column(i)).path_in_schema == "other"
        )
        content = bytearray(file.read_bytes())
        content[chunk.dictionary_page_offset : chunk.dictionary_page_offset + chunk.total_compressed_size] = bytes(
            chunk.total_compressed_size
        )
        file.write_bytes(content)
    same(read(file), read(lines))
    assert [len(names) for names in read_columns] == [40]
