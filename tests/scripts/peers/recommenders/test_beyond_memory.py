"""The comparison of tables beyond memory: its files, and a small run of the native kernels beside their mapping."""

import itertools

import numpy as np
import pytest

from pipelines.core.errors import ZooError
from pipelines.kernels import extension
from scripts.peers import harness, processes
from scripts.peers.recommenders import beyond_memory
from scripts.peers.recommenders.beyond_memory import Case, Engine

needs_kernels = pytest.mark.skipif(extension.native() is None, reason=extension.missing())


@pytest.fixture
def case(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "TURN_SECONDS", 0.001)
    made = Case(tmp_path, 2, 20_000, 64, 32, "zipf")
    beyond_memory.write_tables(made)
    return made


def test_batches_differ_and_have_the_ids_of_their_kind(case):
    first, second = itertools.islice(case.batches(), 2)
    assert first.shape == (32, 2) and not np.array_equal(first, second)
    assert min(first.min(), second.min()) >= 0 and max(first.max(), second.max()) < case.rows
    again, _ = itertools.islice(case.batches(), 2)
    assert np.array_equal(first, again)


@needs_kernels
def test_rows_of_the_file_have_the_bits_of_the_mapping(case):
    results = []
    for name in ("zoo", "mapping"):
        engine = Engine(name, case, 0, 200_000)
        engine.open()
        results.append(engine.begin(0.01))
        assert engine.turn() > 0 and engine.peak() == 0
    assert results[0].any() and results[0].tobytes() == results[1].tobytes()


def test_lmdb_returns_the_rows_of_the_file(case):
    pytest.importorskip("lmdb", reason="a peer")
    beyond_memory.write_database(case)
    engine = Engine("lmdb", case, 0, 0)
    engine.open()
    engine.begin(0)
    (case.folder / beyond_memory.TABLES).write_bytes(bytes(2 * case.table_bytes))
    with pytest.raises(ZooError, match="other rows"):
        engine.begin(0)


def test_a_limit_of_memory_that_the_system_refuses_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "CGROUPS", tmp_path / "none")
    with pytest.raises(ZooError, match=r"cannot limit memory .* systemd-run --scope -p MemoryMax=5M"):
        processes.limit_memory(5, "x")
