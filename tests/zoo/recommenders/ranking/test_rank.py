"""Ranking one user's candidates: the probabilities of full rows bit for bit, catalogues, and what is refused."""

import math
import random
import time
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.recommenders import log_pipeline
from zoo.recommenders.ranking.catalogue import best
from zoo.recommenders.ranking.order import Order
from zoo.recommenders.ranking.precomputed import is_quicker

pytestmark = pytest.mark.usefixtures("shared_home")


@pytest.fixture(scope="module")
def pipeline():
    return zoo.pipeline("shop-clicks", engine="native")


@pytest.fixture(scope="module")
def request_parts(pipeline):
    """(user, items, full rows) of the shipped sample."""
    rows = pipeline.example(150)
    user_columns = [column.name for column in pipeline.sides.user.features.schema.columns]
    item_columns = [column.name for column in pipeline.sides.item.features.schema.columns]
    user = {name: rows[3][name] for name in user_columns}
    items = [{name: row[name] for name in item_columns} for row in rows]
    return user, items, [item | user for item in items]


def probabilities(pipeline, rows):
    return pipeline.predict(pipeline.preprocess(rows))["probability"].ravel()


def by_row(ranked, count):
    scores = np.full(count, np.nan, np.float32)
    for hit in ranked:
        scores[hit["row"]] = hit["probability"]
    return scores


@pytest.mark.parametrize("engine", ["native", "onnxruntime", "auto"])
def test_same_bits_as_full_rows(request_parts, engine):
    user, items, rows = request_parts
    pipeline = zoo.pipeline("shop-clicks", engine=engine)
    ranked = pipeline.rank(user, items)
    expected = probabilities(pipeline, rows)
    scores = by_row(ranked, len(rows))
    if pipeline.engine == "native":
        assert scores.tobytes() == expected.tobytes()
    else:
        np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert [hit["probability"] for hit in ranked] == sorted(scores.tolist(), reverse=True)
    assert [hit["item"] for hit in ranked] == [items[hit["row"]]["item_id"] for hit in ranked]


def test_the_order_of_a_model_of_one_label_is_that_label(pipeline, request_parts):
    user, items, _ = request_parts
    (label,) = pipeline.features.schema.labels
    assert pipeline.rank(user, items, 5, by=label) == pipeline.rank(user, items, 5)
    with pytest.raises(RequestError, match=f"found the order 'bought', expected the label {label}$"):
        pipeline.rank(user, items, by="bought")


def test_an_order_sums_labels():
    a, b = np.float32([0.1, 0.4]), np.float32([0.3, 0.2])
    np.testing.assert_allclose(Order.of("click + 2*buy", ("click", "buy")).scores([a, b]), [0.7, 0.8])
    assert Order.of(None, ("click", "buy")).scores([a, b]) is a
    for by in ("", "click +", "2", "clicks", "click buy"):
        with pytest.raises(RequestError, match="or their sum such as 'click . 2 buy'"):
            Order.of(by, ("click", "buy"))


@pytest.mark.parametrize("price", ["9.5", 9.5, 12, None, True, Decimal("9.50"), np.float32(9.5), float("nan"), ["9.5"]])
def test_values_of_any_kind_are_those_of_full_rows(pipeline, request_parts, price):
    user, items, _ = request_parts
    items = [
        {**item, "price, EUR": price, "categories": kind}
        for item, kind in zip(items, ("a|b", ["a", None], ()) * 50, strict=True)
    ]
    user = {**user, "age": price, "history": ["books", "toys"]}
    items[7] = {name: value for name, value in items[7].items() if name != "categories"}
    expected = probabilities(pipeline, [dict.fromkeys(items[0]) | item | user for item in items])
    assert by_row(pipeline.rank(user, items), len(items)).tobytes() == expected.tobytes()


def test_threads_give_the_same_bits(request_parts):
    user, items, rows = request_parts
    pipeline = zoo.pipeline("shop-clicks", engine="native", threads=2)
    expected = probabilities(pipeline, rows * 3)
    assert by_row(pipeline.rank(user, items * 3), 3 * len(rows)).tobytes() == expected.tobytes()


def test_items_of_any_source(pipeline, request_parts, tmp_path):
    user, items, _ = request_parts
    expected = pipeline.rank(user, items, 5)
    frame = pd.DataFrame(items)
    frame.to_csv(tmp_path / "items.csv", index=False)
    frame.to_parquet(tmp_path / "items.parquet")
    for source in (frame, pa.table(frame), tmp_path / "items.csv", tmp_path / "items.parquet"):
        assert pipeline.rank(user, source, 5) == expected
    assert pipeline.rank(pd.DataFrame([user]), items, 5) == expected


def test_catalogue(pipeline, request_parts):
    user, items, _ = request_parts
    catalogue = pipeline.catalogue(items)
    ids = list(dict.fromkeys(item["item_id"] for item in items))
    assert len(catalogue) == len(ids) and catalogue.ids(np.arange(len(ids))) == ids
    first = {name: next(item for item in items if item["item_id"] == name) for name in ids}
    whole = pipeline.rank(user, catalogue)
    assert whole == pipeline.rank(user, list(first.values()))
    chosen = ids[7:30][::-1]
    ranked = pipeline.rank(user, catalogue, 4, ids=chosen)
    assert ranked == [hit for hit in whole if hit["item"] in chosen][:4]
    seen = [ranked[0]["item"], ranked[2]["item"], "no such item"]
    left = pipeline.rank(user, catalogue, 2, ids=chosen, exclude=seen)
    assert left == [ranked[1], ranked[3]]
    assert pipeline.rank(user, catalogue, exclude=ids) == []


@pytest.mark.parametrize("threads", [1, 2])
def test_precomputed_items_have_the_bits_of_rows(request_parts, threads):
    user, items, _ = request_parts
    pipeline = zoo.pipeline("shop-clicks", engine="native", threads=threads)
    plain, made = (pipeline.catalogue(items, distinct=False, precompute=wanted) for wanted in (False, True))
    assert plain.precomputed is None and made.precomputed.items.nbytes > 0
    assert pipeline.rank(user, made) == pipeline.rank(user, plain)
    assert pipeline.rank(pd.DataFrame([user]), made, 7) == pipeline.rank(user, plain, 7)
    other = zoo.pipeline("shop-clicks", engine="native")
    assert other.rank(user, made, 3) == pipeline.rank(user, made, 3)  # by rows: another session
    assert zoo.pipeline("shop-clicks", engine="onnxruntime").catalogue(items, precompute=True).precomputed is None


def test_items_are_precomputed_where_they_fit_and_are_quicker(pipeline, request_parts, monkeypatch):
    _, items, _ = request_parts
    monkeypatch.setattr(log_pipeline, "is_quicker", lambda *_: False)
    assert pipeline.catalogue(items).precomputed is None
    monkeypatch.setattr(log_pipeline, "is_quicker", lambda *_: True)
    size = pipeline.catalogue(items).precomputed.items.nbytes
    monkeypatch.setattr(log_pipeline, "limit", lambda: size - 1)
    assert pipeline.catalogue(items, precompute=True).precomputed is None


def test_the_quicker_way_is_timed():
    class Items:
        def run(self, positions, user):
            assert user == "user" and positions.min() >= 0 and positions.max() < 9
            time.sleep(0.002)

    assert is_quicker(Items(), 9, "user", lambda positions: time.sleep(0.02))
    assert not is_quicker(Items(), 9, "user", len)


def test_left_out_rows_of_a_repeated_item(pipeline, request_parts):
    user, items, _ = request_parts
    repeated = items[0]["item_id"]
    ranked = pipeline.rank(user, items + items, exclude=[repeated])
    assert {hit["item"] for hit in ranked} == {item["item_id"] for item in items} - {repeated}


def test_the_context_is_the_users(pipeline, request_parts):
    user, items, _ = request_parts
    assert set(user) == {"user_id", "age", "country", "device", "history"}
    assert pipeline.rank({**user, "device": "tablet"}, items) != pipeline.rank({**user, "device": "phone"}, items)
    extra = {**user, "unknown column": 3, "price, EUR": 4}
    assert pipeline.rank(extra, items) == pipeline.rank(user, items)


def test_refusals(pipeline, request_parts):
    user, items, _ = request_parts
    catalogue = pipeline.catalogue(items)
    without = {name: value for name, value in user.items() if name != "age"}
    for call, words in (
        (
            lambda: pipeline.rank(without, items),
            'lacks the column age; found .* belongs to the user .* "tower": "item" and',
        ),
        (lambda: pipeline.rank(user, []), "found no item to rank"),
        (lambda: pipeline.rank(user, [{"item_id": "i1"}]), r'lacks the columns "price, EUR", categories'),
        (lambda: pipeline.rank([user, user], items), "found 2 rows as the user, expected one"),
        (lambda: pipeline.rank(user, []), "item"),
        (lambda: pipeline.rank(user, catalogue, ids=["i1", "nothing"]), "found no item nothing in the catalogue"),
        (lambda: pipeline.rank(user, items, ids=["i1"]), "ids of a catalogue"),
        (lambda: pipeline.rank(user, items, 0), "top"),
        (lambda: zoo.pipeline("wide-deep-criteo").rank({}, [{}]), "no column of items"),
    ):
        with pytest.raises(RequestError, match=words):
            call()


def test_best_scores_in_order():
    generator = np.random.default_rng(3)
    for _ in range(200):
        scores = generator.integers(0, 6, generator.integers(1, 40)).astype(np.float32)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        top = int(generator.integers(1, 45))
        assert best(scores, top).tolist() == order[:top] and best(scores, None).tolist() == order


def test_distinct_texts_are_found_natively(pipeline, request_parts):
    catalogue = pipeline.catalogue([{**item, "item_id": f"i{i}"} for i, item in enumerate(request_parts[1][:3])])
    texts = catalogue.find_texts(["i2", "i0"])
    assert texts.positions.tolist() == [2, 0] == catalogue.find(["i2", "i0"]).tolist() and list(texts) == ["i2", "i0"]
    for ids in (["i1", "i1"], ["nothing"], [1], ["i1", None], ("i1",), [["i1"]]):
        assert catalogue.find_texts(ids) is None


def test_values_of_any_kind_are_read_as_in_full_rows(pipeline):
    """Plain values go through CSV, others, here beside an unknown column, do not."""
    generator = random.Random(1)
    odd = [None, "", 5, 5.0, 1e-9, True, -3, "51.0", 51.0, math.nan, math.inf, 10**20, "a,b", 'q"x', "l\nm", " sp "]
    odd += ["NA", "['a','b']", "[1, 2]", "é", "1e5", 1e5, 2**53, "\ufeffx", "x\ry"]
    rows = pipeline.example(60)
    names = [
        [column.name for column in side.features.schema.columns] for side in (pipeline.sides.user, pipeline.sides.item)
    ]

    def drawn(row, columns):
        return {name: generator.choice([row[name], row[name], *odd]) for name in columns}

    for _ in range(60):
        user, items = drawn(rows[0], names[0]), [drawn(row, names[1]) for row in generator.sample(rows, 6)]
        slow = pipeline.rank({**user, "more": ["x"]}, [{**item, "more": ["x"]} for item in items])
        assert repr(pipeline.rank(user, items)) == repr(slow), (user, items)
