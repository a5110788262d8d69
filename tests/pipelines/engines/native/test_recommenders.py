"""The engine native on one small folded click model: results, threads, wrong batches."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.click_networks import Network
from helpers.clicks_folded import ROWS, by_reference, feeds, first_form, folded, needs_kernels, one_line
from helpers.rewriting import run

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.engines.native import recommender_files
from pipelines.engines.native.recommenders import CHUNK, ProgramGraph
from pipelines.graph import io
from pipelines.kernels.recommenders.native import SharedInputs
from pipelines.models.record import NATIVE
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.lower import lower

COUNTS = (1, 2, 31, 32, 33, 127, 128, 129, 300, 512)


@pytest.fixture
def session(folder):
    return load(folder / NATIVE, first_form(folder / NATIVE), 1)


@needs_kernels
def test_the_engine_is_the_reference_and_near_float(session, folder):
    batch = feeds(2000)
    scores = session.run(batch)["y"]
    expected = by_reference(folder / NATIVE, batch)
    assert scores.dtype == np.float32 and scores.tobytes() == expected.tobytes()
    float32 = run(io.load(folder / "float.onnx"), **batch)["y"]
    assert 0 < np.abs(scores - float32).max() < 0.03 * np.ptp(float32)


@needs_kernels
def test_batches_of_all_sizes_in_any_order_give_the_rows_results(session):
    """A row's result depends neither on its batch nor on the batches before it."""
    batch = feeds(max(COUNTS))
    whole = session.run(batch)["y"]
    for count in np.random.default_rng(2).permutation([*COUNTS, *COUNTS]):
        scores = session.run({key: array[:count] for key, array in batch.items()})["y"]
        assert scores.tobytes() == whole[:count].tobytes()


@needs_kernels
@pytest.mark.parametrize(
    "changes",
    [{"dense": False}, {"wide": False}, {"dense": False, "wide": False}, {"sigmoid": True}, {"ids": "int64"}],
    ids=str,
)
def test_models_without_numbers_or_a_wide_part(tmp_path, changes):
    result, float32 = folded(**changes)
    path = io.save_mapped(result, tmp_path / NATIVE)
    batch = feeds(300, **{key: value for key, value in changes.items() if key in ("dense", "ids")})
    opened = load(path, first_form(path), 1)
    scores = opened.run(batch)["y"]
    expected = run(float32, **batch)["y"]
    assert scores.shape == (300, 1)
    assert np.abs(scores - expected).max() < 0.03 * np.ptp(expected)
    assert set(opened.inputs) == set(batch)


@needs_kernels
def test_two_threads_give_the_results_of_one(folder):
    one, two = (load(folder / NATIVE, "native", threads) for threads in (1, 2))
    for count in (*COUNTS, 2 * CHUNK - 1, 4 * CHUNK + 1):
        batch = feeds(count)
        assert one.run(batch)["y"].tobytes() == two.run(batch)["y"].tobytes()


@needs_kernels
def test_one_session_in_many_threads(session):
    batches = [feeds(count, seed=count) for count in COUNTS]
    expected = [session.run(batch)["y"] for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda batch: session.run(batch)["y"], batches * 10)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(results, expected * 10, strict=True))


@needs_kernels
def test_tables_beyond_the_memory_for_tables_give_the_same_bits(tmp_path, monkeypatch):
    net = Network("deepfm", fields=((70_000, 1, ""), (30, 1, ""), (50_000, 3, "sum")), width=16)
    calibration = calibrate(net.model, [net.feeds(700)], "minmax")
    path = io.save_mapped(lower(net.model, calibration, QuantRecipe())[0], tmp_path / NATIVE)
    io.save(net.model, tmp_path / "int8.onnx")
    batches = [net.feeds(count) for count in COUNTS]
    expected = [load(path, first_form(path)).run(batch)["probability"] for batch in batches]
    monkeypatch.setenv("ZOO_TABLE_MEMORY", "1MB")
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    graph = ProgramGraph(path, 2, recommender_files.opened(path)[0])
    assert graph.cached is not None and graph.sharing(SharedInputs(ids=[0])) is graph.program
    for threads in (1, 2):
        session = load(path, first_form(path), threads)
        for batch, before in zip(batches, expected, strict=True):
            assert session.run(batch)["probability"].tobytes() == before.tobytes()
    verdicts = list((tmp_path / "home/verdicts").glob("native-*.json"))  # by the numpy reference
    assert [json.loads(file.read_text())["fault"] for file in verdicts] == ["", ""]


def test_the_memory_for_tables(monkeypatch):
    monkeypatch.setenv("ZOO_TABLE_MEMORY", "2 GiB")
    assert machine.table_memory() == recommender_files.rows_memory() == 2**31
    monkeypatch.setenv("ZOO_TABLE_MEMORY", "")
    assert machine.table_memory() == pytest.approx(machine.available_memory() // 2, rel=0.1)
    assert recommender_files.rows_memory() <= machine.table_memory() / machine.cores() * 1.1
    monkeypatch.setenv("ZOO_TABLE_MEMORY", "much")
    with pytest.raises(RequestError, match="found ZOO_TABLE_MEMORY=much, expected a size such as 4GB or 512MB"):
        machine.table_memory()


# --- wrong input


@needs_kernels
@pytest.mark.parametrize("count", [1, 300])
def test_ids_out_of_range_are_refused_before_anything(session, count):
    right = feeds(count)
    session.run(right)
    for wrong, dtype in ((-1, "int32"), (3, "int32"), (2**32 + 1, "int64"), (2**31 - 1, "int32")):
        ids = right["ids"].astype(dtype)
        ids[-1, 1] = wrong
        with pytest.raises(RequestError) as error:
            session.run({**right, "ids": ids})
        one_line(error, f"found id {wrong} in row {count - 1}, column 1; expected 0 to 2")
    assert session.run(right)["y"].shape == (count, 1)


@needs_kernels
def test_ids_out_of_range_are_refused_in_every_thread(folder):
    for threads in (1, 2):
        opened = load(folder / NATIVE, "native", threads)
        batch = feeds(300)
        batch["ids"][299, 0] = ROWS[0]
        with pytest.raises(RequestError, match="found id 20000 in row 299"):  # not the row of its thread's part
            opened.run(batch)


@needs_kernels
@pytest.mark.parametrize("count", [5, 300])
def test_arrays_that_are_not_aligned_or_contiguous_are_copied(session, count):
    right = feeds(count)
    wanted = session.run(right)["y"]
    raw = np.zeros(right["x"].nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(right["x"].shape)
    odd[:] = right["x"]
    assert not odd.flags.aligned
    np.testing.assert_array_equal(session.run({**right, "x": odd})["y"], wanted)
    np.testing.assert_array_equal(session.run({**right, "ids": np.asfortranarray(right["ids"])})["y"], wanted)


@needs_kernels
@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {"ids": batch["ids"]},
        lambda batch: {"x": batch["x"]},
        lambda batch: {},
        lambda batch: {**batch, "x": batch["x"][:-1]},
        lambda batch: {**batch, "x": batch["x"].astype(np.float64)},
        lambda batch: {**batch, "ids": batch["ids"].astype(np.float32)},
        lambda batch: {**batch, "ids": batch["ids"][:, :2]},
        lambda batch: {**batch, "ids": batch["ids"][:, 0]},
        lambda batch: {**batch, "x": None},
    ],
)
@pytest.mark.parametrize("count", [5, 300])
def test_a_wrong_batch_is_refused_in_one_line(session, change, count):
    with pytest.raises(RequestError) as error:
        session.run(change(feeds(count)))
    one_line(error, "cannot run")
    session.run(feeds(count))
