"""The engine native on one small folded click model, in all its ways: results, choices, wrong batches."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from helpers.clicks_folded import ROWS, by_reference, feeds, folded, needs_kernels, one_line, way
from helpers.rewriting import EXACT, run

from pipelines.core.errors import RequestError
from pipelines.engines import quickest
from pipelines.engines.catalog import load
from pipelines.engines.native_recommenders import CHUNK, SMALL
from pipelines.engines.timing import Choice
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.models.folder import NATIVE

PLAN = Choice("", 1, 1, {}, "")


COUNTS = (1, 2, 31, 32, 33, 127, 128, 129, 300, 512)


@pytest.fixture
def session(folder):
    return load(folder / NATIVE, "native", 1)


def only(name):
    """A stand-in for `choose` that always takes one way."""
    return lambda digest, candidates, batch, threads: replace(
        PLAN, engine=way(name) if way(name) in candidates else min(candidates)
    )


@pytest.fixture
def mild(monkeypatch):
    """The quickest way is not timed: all batches run in native code."""
    monkeypatch.setattr(quickest, "choose", only("native"))


@needs_kernels
def test_the_native_way_is_the_reference_and_near_float(session, folder):
    batch = feeds(2000)
    found = session._open("native").run(batch)["y"]
    expected, _ = by_reference(folder / NATIVE, batch)
    assert found.dtype == np.float32 and found.tobytes() == expected.tobytes()
    float32 = run(io.load(folder / "float.onnx"), **batch)["y"]
    assert 0 < np.abs(found - float32).max() < 0.03 * np.ptp(float32)


@needs_kernels
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_ways_differ_by_one_step_of_a_hidden_value_at_most(session, folder, name):
    batch = feeds(1000)
    expected, layers = by_reference(folder / NATIVE, batch)
    found = session._open(way(name)).run(batch)["y"]
    assert found.shape == expected.shape
    step = layers[-1].scale.max() * np.abs(layers[-1].weight.astype(np.int32)).max()
    difference = np.abs(found - expected)
    assert difference.max() <= step * 1.01
    assert (difference < 1e-5).mean() > 0.95


@needs_kernels
@pytest.mark.parametrize("name", ["native", *EXACT])
def test_batches_of_all_sizes_in_any_order_give_the_rows_results(session, monkeypatch, name):
    """A row's result depends neither on its batch nor on the batches before it."""
    monkeypatch.setattr(quickest, "choose", only(name))
    batch = feeds(max(COUNTS))
    whole = session._open(way(name)).run(batch)["y"]
    small = session._open("native").run(batch)["y"]
    for count in np.random.default_rng(2).permutation([*COUNTS, *COUNTS]):
        found = session.run({key: array[:count] for key, array in batch.items()})["y"]
        assert found.tobytes() == (small if count <= SMALL else whole)[:count].tobytes()


@needs_kernels
@pytest.mark.parametrize(
    "changes",
    [{"dense": False}, {"wide": False}, {"dense": False, "wide": False}, {"sigmoid": True}, {"ids": "int64"}],
    ids=str,
)
def test_models_without_numbers_or_a_wide_part(tmp_path, mild, changes):
    result, float32 = folded(**changes)
    path = io.save_mapped(result, tmp_path / NATIVE)
    batch = feeds(300, **{key: value for key, value in changes.items() if key in ("dense", "ids")})
    opened = load(path, "native", 1)
    found = opened.run(batch)["y"]
    stock = opened._open(way("onnxruntime")).run(batch)["y"]
    expected = run(float32, **batch)["y"]
    assert found.shape == (300, 1)
    assert np.abs(found - expected).max() < 0.03 * np.ptp(expected)
    assert np.abs(found - stock).max() < 0.01 * np.ptp(expected)
    assert set(opened.inputs) == set(batch)


@needs_kernels
@pytest.mark.parametrize("changes", [{"outputs": 2, "wide": False}, {"middle": "Tanh"}], ids=str)
def test_other_layers_run_in_a_stock_engine_at_all_sizes(tmp_path, changes):
    result, float32 = folded(**changes)
    opened = load(io.save_mapped(result, tmp_path / NATIVE), "native", 1)
    for count in (1, 300):
        batch = feeds(count)
        expected = run(float32, **batch)["y"]
        assert np.abs(opened.run(batch)["y"] - expected).max() < 0.05 * max(np.ptp(expected), 1)
    assert set(opened._sessions) <= {way("onnxruntime"), way("openvino")} and len(opened.executed(batch)) > 1


@needs_kernels
def test_two_threads_give_the_results_of_one(folder, mild):
    one, two = (load(folder / NATIVE, "native", threads) for threads in (1, 2))
    for count in (*COUNTS, 2 * CHUNK - 1, 4 * CHUNK + 1):
        batch = feeds(count)
        for name in ("native", "onnxruntime"):
            assert one._open(way(name)).run(batch)["y"].tobytes() == two._open(way(name)).run(batch)["y"].tobytes()


@needs_kernels
def test_one_session_in_many_threads(session, mild):
    batches = [feeds(count, seed=count) for count in COUNTS]
    expected = [session.run(batch)["y"] for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda batch: session.run(batch)["y"], batches * 10)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected * 10, strict=True))


@needs_kernels
def test_the_quickest_way_is_timed_once_a_size_and_kept_for_shorter_batches(folder, monkeypatch):
    asked = []

    def choose(digest, candidates, batch, threads):
        asked.append(len(batch["ids"]))
        assert list(candidates) == ["native", *map(way, EXACT)]
        return replace(PLAN, engine=way("onnxruntime"))

    monkeypatch.setattr(quickest, "choose", choose)
    opened = load(folder / NATIVE, "native")
    for count in (1, SMALL, 512, 500, 300, 40, 512, 33, 600, 64):
        opened.run(feeds(count))
    assert asked == [512, 600]
    assert [each.type for each in opened.executed(feeds(8))] == [
        f"{kind} {extension.isas()[0]}" for kind in ("ParallelEmbedding", "Linear")
    ]
    assert "QLinearMatMul" in {each.type for each in opened.executed(feeds(64))} or len(opened.executed(feeds(64))) > 2


@needs_kernels
def test_the_timed_choice_is_remembered(folder, zoo_home):
    batch = feeds(256)
    found = load(folder / NATIVE, "native", 1).run(batch)["y"]
    kept = [json.loads(each.read_text()) for each in (zoo_home / "plans").iterdir()]
    assert (
        len(kept) == 1 and set(kept[0]["milliseconds"]) == {"native", *map(way, EXACT)} and kept[0]["batch_size"] == 256
    )
    again = load(folder / NATIVE, "native", 1)
    assert again.run(batch)["y"].tobytes() == found.tobytes()
    assert list(again._sessions) == [kept[0]["engine"]]


# --- wrong input


@needs_kernels
@pytest.mark.parametrize("name", ["native", "onnxruntime", "openvino"])
@pytest.mark.parametrize("count", [1, 300])
def test_ids_out_of_range_are_refused_before_anything(session, monkeypatch, name, count):
    monkeypatch.setattr(quickest, "choose", only(name))
    right = feeds(count)
    session.run(right)
    for wrong, dtype in ((-1, "int32"), (3, "int32"), (2**32 + 1, "int64"), (2**31 - 1, "int32")):
        ids = right["ids"].astype(dtype)
        ids[-1, 1] = wrong
        with pytest.raises(RequestError) as error:
            session.run({**right, "ids": ids})
        one_line(error, f"found id {wrong} in row {count - 1}, column 1; wanted 0 to 2")
    assert session.run(right)["y"].shape == (count, 1)


@needs_kernels
def test_ids_out_of_range_are_refused_in_every_thread_and_while_timing(folder):
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
def test_a_wrong_batch_is_refused_in_one_line(session, mild, change, count):
    with pytest.raises(RequestError) as error:
        session.run(change(feeds(count)))
    one_line(error, "cannot run")
    session.run(feeds(count))
