"""Rows of a training kept on disk: every one once an epoch, shared between processes, mixed, and nothing left."""

import importlib
import os

import numpy as np
import pytest

from pipelines.core.errors import ZooError
from zoo.recommenders.criteo.data import Counts, Rows, read_rows

training = pytest.importorskip("zoo.recommenders.criteo.train", reason="needs the train extra")
freezing = pytest.importorskip("zoo.recommenders.criteo.freeze")
row_store = importlib.import_module("zoo.recommenders.criteo.row_store")
from helpers.wide_deep_training import COUNTS  # noqa: E402


@pytest.fixture
def held(log, tmp_path, monkeypatch):
    """The log, in blocks of up to three chunks of 32 rows."""
    monkeypatch.setattr(row_store, "CHUNK_ROWS", 20)
    monkeypatch.setattr(row_store, "BLOCK_ROWS", 96)
    return row_store.RowStore(log, COUNTS, "raise", tmp_path / "not" / "there")


def joined(batches):
    return [np.concatenate(each) for each in zip(*(batch for batch, _ in batches), strict=True)]


@pytest.mark.parametrize("limit", [10_000, 96])  # one block, several
def test_every_row_comes_once_an_epoch(log, held, monkeypatch, limit):
    monkeypatch.setattr(row_store, "BLOCK_ROWS", limit)
    rows = Rows.concatenate(list(read_rows(log, **COUNTS)))
    features = training.fit(held.part(0, 310), buckets=50)
    expected = features.encode(rows[slice(0, 310)])
    epochs = []
    for epoch in (1, 2):
        found = list(held.batches(310, features, 32, [0, epoch]))
        assert [count for _, count in found] == [32] * 9 + [22] == [len(batch[2]) for batch, _ in found]
        ids, numbers, labels = joined(found)
        epochs.append(numbers)
        order, wanted = (
            np.lexsort((y, *i.T, *n.T)) for i, n, y in ((ids, numbers, labels), (*expected.values(), rows.labels[:310]))
        )
        np.testing.assert_array_equal(ids[order], expected["ids"][wanted])
        np.testing.assert_array_equal(numbers[order], expected["numbers"][wanted])
        np.testing.assert_array_equal(labels[order], rows.labels[:310][wanted])
    assert (epochs[0] != epochs[1]).any()
    assert (ids.dtype, numbers.dtype, labels.dtype) == (np.int32, np.float32, np.float32)


def test_a_block_holds_rows_from_all_over_the_log(log, held):
    features = training.fit(held.part(0, 400), buckets=50)
    every = features.encode(Rows.concatenate(list(read_rows(log, **COUNTS))))["numbers"]
    numbers = joined(list(held.batches(400, features, 32, [0, 1]))[:3])[1]  # one block
    places = [int(np.flatnonzero((every == row).all(axis=1))[0]) for row in numbers]
    assert max(places) - min(places) > 200 and (np.diff(places) < 0).any()


def test_batches_are_shared_and_skipped(held):
    features = training.fit(held.part(0, 310), buckets=50)
    whole = list(held.batches(310, features, 32, [0, 1]))
    for skip in (1, 3, 4, 9, 10):
        rest = list(held.batches(310, features, 32, [0, 1], skip=skip))
        assert len(rest) == 10 - skip
        for (batch, count), (wanted, _) in zip(rest, whole[skip:], strict=True):
            assert count == len(wanted[2])
            for found, array in zip(batch, wanted, strict=True):
                np.testing.assert_array_equal(found, array)
    shares = [list(held.batches(310, features, 32, [0, 1], rank=rank, processes=3)) for rank in range(3)]
    for (wanted, count), *parts in zip(whole, *shares, strict=True):
        assert {each for _, each in parts} == {count} and max(len(batch[2]) for batch, _ in parts) <= -(-count // 3)
        for i, array in enumerate(wanted):
            np.testing.assert_array_equal(np.concatenate([batch[i] for batch, _ in parts]), array)


def test_parts_of_a_log_are_its_rows(log, held):
    rows, found = Rows.concatenate(list(read_rows(log, **COUNTS))), Rows.concatenate(list(held.part(150, 400)))
    for name in ("numbers", "ids", "labels", "index"):
        np.testing.assert_array_equal(getattr(found, name), getattr(rows, name)[150:], err_msg=name)


def test_a_log_is_kept_on_disk_and_leaves_nothing_there(log, tmp_path):
    held = row_store.RowStore(log, COUNTS, "raise", tmp_path)
    assert held.record.itemsize == 1 + 3 * 4 + 2 and os.fstat(held.file.fileno()).st_size == 400 * held.record.itemsize
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("buckets", [256, 257, 70_000])
def test_large_buckets_are_kept(log, tmp_path, buckets):
    counts = Counts(numeric=3, categorical=2, buckets=buckets)
    found = next(row_store.RowStore(log, counts, "raise", tmp_path).part(0, 400))
    np.testing.assert_array_equal(found.ids, next(read_rows(log, **counts)).ids)


def test_a_full_disk_is_said(log, tmp_path, monkeypatch):
    monkeypatch.setattr(row_store.tempfile, "TemporaryFile", lambda **options: open("/dev/full", "wb", buffering=0))  # noqa: PTH123, SIM115
    with pytest.raises(ZooError, match="No space left"):
        row_store.RowStore(log, COUNTS, "raise", tmp_path)
