"""Tables beyond memory: rows read from the file when they are looked up, the bits of tables in memory."""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from helpers.tiers import one_in

from pipelines.engines.native.recommender_files import CLASSES
from pipelines.kernels import extension, program_file
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import CODES, Gather, QuantizedGather, Weighted
from pipelines.kernels.recommenders.steps.base import unread_tables
from pipelines.kernels.recommenders.tables.cached_tables import CachedTables, cached_tables
from pipelines.kernels.recommenders.tables.quantized_rows import quantize

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())
ROWS, SMALL = 60_000, 20_000


def program():
    rng = np.random.default_rng(0)

    def quantized(position, width, bits, column, count=1, pool=""):
        table = quantize(rng.uniform(-CODES, CODES, (ROWS, width)).astype(np.float32), bits)
        units = table.scale_unit, table.bias_unit
        return QuantizedGather(
            0, position, table.data, ROWS, width, bits, *units, column, count, pool, 0.3 if pool else 1
        )

    words = np.zeros(SMALL * 40 + 32, np.int16)
    words[: SMALL * 40] = rng.integers(-CODES, CODES + 1, SMALL * 40)
    first = quantized(0, 32, 8, 0)
    steps = [
        first,
        replace(first, position=32, column=1),  # the same table
        quantized(64, 64, 4, 2, 5, "sum"),
        Gather(0, 128, words, SMALL, 40, 40, 7, 2, "sum", 0.5),
        Weighted(0, 0, rng.standard_normal(168).astype(np.float32), 1),
    ]
    rows = np.array([ROWS] * 7 + [SMALL] * 2, np.int32)
    return ClickProgram(rows, 0, 0, (("i2", 168), ("f4", 1)), tuple(steps), (1,))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A program whose tables are views of its file."""
    path = tmp_path_factory.mktemp("programs") / "program.zoo"
    program_file.save(path, (program(),), CLASSES, 1)
    with unread_tables():
        (loaded,) = program_file.load(path, CLASSES, 1)
    return loaded


def batch(stored, n, seed=0):
    """Ids of which few are frequent."""
    return (np.random.default_rng(seed).random((n, len(stored.rows))) ** 6 * stored.rows).astype(np.int32)


@pytest.mark.parametrize("memory", one_in(2, [0, 1000, 100_000, 2_000_000]))
def test_rows_from_the_file_give_the_bits_of_tables_in_memory(stored, memory):
    cached = cached_tables(stored, memory)
    for isa in extension.isas():
        made = native.click_program(stored, isa, cached=cached)
        for n in (0, 1, 63, 64, 513, 1500, 1500):
            ids = batch(stored, n)
            assert made(ids, None, None).tobytes() == reference.run(stored, ids)[0].tobytes(), (isa, n)
    looked_up, read = made.cached_rows
    assert looked_up == 9 * 3641 and (0.4 if memory < 1_000_000 else 0.1) * looked_up < read <= looked_up


def test_a_frequent_row_is_read_once(stored):
    made = native.click_program(stored, cached=cached_tables(stored, 2_000_000))
    ids = np.repeat(np.arange(100, 1000, 100, dtype=np.int32)[None], 512, axis=0)
    before = made(ids, None, None)
    assert made.cached_rows == (512 * 9, 9)
    strangers = np.random.default_rng(0).integers(0, stored.rows, (20_000, 9), np.int32)
    for first in range(0, 20_000, 500):
        made(strangers[first : first + 500], None, None)
        made(ids[:4], None, None)
    _, read = made.cached_rows
    assert made(ids, None, None).tobytes() == before.tobytes() and made.cached_rows[1] == read


def test_tables_that_fit_stay_mapped(stored):
    sizes = {step.table.ctypes.data: step.table.nbytes for step in stored.steps[:4]}
    total = sum(step.table.nbytes for step in stored.steps[:4])
    assert cached_tables(stored, total) is None
    cached = cached_tables(stored, total - 1)
    assert {address for address, _, _ in cached.tables} == set(sizes)
    halves = cached_tables(stored, total - 1, total // 2).tables
    assert sum(table[2] for table in halves) == pytest.approx(sum(table[2] for table in cached.tables) / 2, abs=9)
    assert cached_tables(program(), 0) is None  # its tables are in no file


def test_shared_inputs_and_wrong_ids(stored):
    cached = cached_tables(stored, 100_000)
    shared = native.click_program(stored, shared=native.SharedInputs(ids=range(7)), cached=cached)
    ids = batch(stored, 700)
    ids[:, :7] = ids[0, :7]
    assert shared(ids, None, None).tobytes() == reference.run(stored, ids)[0].tobytes()
    ids[600, 8] = SMALL
    with pytest.raises(IndexError, match="found id 20000 in row 600, column 8"):
        shared(ids, None, None)


def test_threads_and_forked_processes(stored):
    made = native.click_program(stored, cached=cached_tables(stored, 500_000))
    batches = [batch(stored, n, seed=n) for n in (1, 70, 600, 1100)]
    expected = [reference.run(stored, ids)[0].tobytes() for ids in batches]
    order = random.Random(0).sample([0, 1, 2, 3] * 10, 40)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda index: made(batches[index], None, None).tobytes() == expected[index], order))
    assert all(results)
    child = os.fork()
    if not child:
        right = all(made(ids, None, None).tobytes() == data for ids, data in zip(batches, expected, strict=True))
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert made(batches[3], None, None).tobytes() == expected[3]


def test_a_file_that_was_cut_is_an_error_until_it_is_whole(tmp_path):
    path = tmp_path / "program.zoo"
    program_file.save(path, (program(),), CLASSES, 1)
    (loaded,) = program_file.load(path, CLASSES, 1)
    cached = cached_tables(loaded, 100_000)
    whole = path.read_bytes()
    made = native.click_program(loaded, cached=cached)
    ids, expected = batch(loaded, 600), reference.run(loaded, batch(loaded, 600))[0]
    os.truncate(path, len(whole) // 3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot read .*program\.zoo"):
            made(ids, None, None)
    path.write_bytes(whole)
    assert made(ids, None, None).tobytes() == expected.tobytes()


def test_a_file_that_is_missing(stored, tmp_path):
    cached = CachedTables(tmp_path / "nothing.zoo", ())
    with pytest.raises(RuntimeError, match=r"cannot read .*nothing\.zoo \(No such file"):
        native.click_program(stored, cached=cached)
