"""`:rank`: items of the body and of a catalogue, refusals in one line, and a catalogue that is exchanged under load."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.serving import Server, wait_until

import zoo

RANK = "/v1/models/shop-clicks:rank"
JSON = "application/json"


@pytest.fixture(scope="module")
def request_parts() -> tuple[Any, dict[str, Any], pd.DataFrame]:
    """(pipeline, user, items)."""
    pipeline: Any = zoo.pipeline("shop-clicks", engine="native")
    rows = pipeline.example(120)
    user = {column.name: rows[0][column.name] for column in pipeline.sides.user.features.schema.columns}
    names = [column.name for column in pipeline.sides.item.features.schema.columns]
    items = pd.DataFrame([{name: row[name] for name in names} for row in rows])
    return pipeline, user, items.drop_duplicates("item_id", ignore_index=True)


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], request_parts: Any, tmp_path_factory: pytest.TempPathFactory) -> Server:
    file = tmp_path_factory.mktemp("items") / "items.parquet"
    request_parts[2].to_parquet(file)
    return start("shop-clicks", "--workers", "1", "--items", file)


def body(**values: Any) -> bytes:
    return json.dumps(values).encode()


def of(items: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows in JSON."""
    return items.astype(object).where(items.notna(), None).to_dict("records")


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [(hit["item"], hit["row"]) for hit in found] == [(hit["item"], hit["row"]) for hit in expected]
    assert [hit["probability"] for hit in found] == pytest.approx([hit["probability"] for hit in expected], abs=1e-7)


def test_items_of_the_body_and_of_the_catalogue(server: Server, request_parts: Any) -> None:
    pipeline, user, items = request_parts
    records = [{name: value for name, value in row.items() if value is not None} for row in of(items)]
    records[0] = dict.fromkeys(items.columns, None) | records[0]
    catalogue = pipeline.catalogue(items)
    close(server.json(RANK, body(user=user, items=records), JSON)["results"], pipeline.rank(user, items))
    close(server.json(RANK, body(user=user, top=3), JSON)["results"], pipeline.rank(user, catalogue, 3))
    ids = items["item_id"].tolist()[5:20]
    best = pipeline.rank(user, catalogue, 1, ids=ids)[0]["item"]
    results = server.json(RANK, body(user=user, items=ids, top=2, exclude=[best, "unknown"]), JSON)["results"]
    close(results, pipeline.rank(user, catalogue, 2, ids=ids, exclude=[best]))
    status, headers, text = server.ask(RANK, body(user=user, top=2), JSON, accept="text/csv", timing="1")
    assert status == 200 and text.splitlines()[0] == b"row,item,probability" and len(text.splitlines()) == 3
    assert {name.lower(): value for name, value in headers.items()}["server-timing"].startswith("read")
    assert server.json("/v1/models/shop-clicks")["items"] == len(items)
    assert "/v1/models/shop-clicks:rank" in server.json("/openapi.json")["paths"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "no JSON"),
        (b"[1]", '"user"'),
        (body(items=["i1"]), '"user"'),
        (body(user={"age": 3}), "lacks the columns"),
        (body(user={}, items=[{"item_id": "i1"}]), "lacks the columns"),
        (body(user={}, items=[]), "items is empty"),
        (body(user={}, items=[1.5]), "list of ids"),
        (body(user={}, items=["i1", {"item_id": "i1"}]), "list of ids"),
        (body(user={}, items="i1"), "list of ids"),
        (body(user={}, exclude="i1"), "list of ids"),
        (body(user={}, top=0), "top must be 1 or more"),
        (body(user={}, top="many"), "top must be a whole number"),
        (body(user={}, top=True), "top must be a whole number, not True"),
        (body(user={}, exclude={}), "exclude must be a list of ids"),
        (body(user={}, items=[{"item_id": "i1"}, "i1"]), "or all of them objects of their columns"),
        (body(user={}, candidates=5), "found candidates without from"),
        (body(user={}, beam=3), "the key 'beam'"),
    ],
)
def test_refusals(server: Server, content: bytes, words: str) -> None:
    status, _, text = server.ask(RANK, content, JSON)
    assert status == 400 and words in json.loads(text)["error"], text


def test_unknown_items_and_content_types(server: Server, request_parts: Any) -> None:
    _, user, items = request_parts
    ids = items["item_id"].tolist()
    for answer, words in (
        (server.ask(RANK, body(user=user, items=["nothing", 7]), JSON), "found no item nothing, 7"),
        (server.ask(RANK, body(user=user, items=["i3", "i4", "i3"]), JSON), "items has the id 'i3' more than once"),
        (server.ask(RANK, body(user=user, items=[3, "3"]), JSON), "items has the id '3' more than once"),
        (server.ask(RANK, body(user=user, items=ids[:2], exclude=ids), JSON), "exclude leaves no item to rank"),
        (server.ask(RANK, body(user=user, exclude=ids), JSON), "exclude leaves no item to rank"),
        (server.ask(RANK, body(user=user, items=[of(items)[0]], exclude=ids), JSON), "exclude leaves no item to rank"),
        (server.ask(RANK, body(user={**user, "age": {"years": 3}}), JSON), "lacks the column age"),
        (server.ask(RANK, body(user=user, items=[{**of(items)[0], "categories": {"a": 1}}]), JSON), "lacks the column"),
        (server.ask(RANK, body(user=user), "text/csv"), "Content-Type"),
        (server.ask(f"{RANK}?top=3", body(user=user), JSON), "in the body"),
    ):
        assert answer[0] == 400 and words in json.loads(answer[2])["error"], answer


def test_models_without_items(start: Callable[..., Server], request_parts: Any) -> None:
    _, user, items = request_parts
    server = start("shop-clicks", "mobilenet-v1-cifar10", "--workers", "1")
    status, _, text = server.ask(RANK, body(user=user, items=["i1"]), JSON)
    assert status == 400 and "has no catalogue" in json.loads(text)["error"]
    close(
        server.json(RANK, body(user=user, items=of(items)[:3]), JSON)["results"],
        request_parts[0].rank(user, items[:3]),
    )
    status, _, text = server.ask("/v1/models/mobilenet-v1-cifar10:rank", body(user=user), JSON)
    assert status == 400 and "not rank" in json.loads(text)["error"]


@pytest.mark.slow
def test_a_catalogue_is_exchanged_under_load(start: Callable[..., Server], request_parts: Any, tmp_path: Path) -> None:
    pipeline, user, items = request_parts
    file = tmp_path / "items.csv"
    parts = items[:20], items[20:60]
    parts[0].to_csv(file, index=False)
    server = start("shop-clicks", "--workers", "2", "--watch", "--items", file)
    expected = [[hit["item"] for hit in pipeline.rank(user, pipeline.catalogue(part), 5)] for part in parts]
    stop, answers = threading.Event(), list[Any]()

    def ask() -> None:
        while not stop.is_set():
            answers.append([hit["item"] for hit in server.json(RANK, body(user=user, top=5), JSON)["results"]])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    parts[1].to_csv(tmp_path / "new.csv", index=False)
    (tmp_path / "new.csv").replace(file)
    wait_until(lambda: any("the new files of shop-clicks are served" in line for line in server.said))
    count = len(answers)
    wait_until(lambda: len(answers) > count + 20)
    stop.set()
    for thread in threads:
        thread.join()
    assert answers[0] == expected[0] and answers[-1] == expected[1]
    assert all(answer in expected for answer in answers)
    (tmp_path / "broken.csv").write_text("item_id\ni1\n")
    (tmp_path / "broken.csv").replace(file)
    wait_until(lambda: any("are not served" in line and "lacks the columns" in line for line in server.said))
    assert [hit["item"] for hit in server.json(RANK, body(user=user, top=5), JSON)["results"]] == expected[1]
    assert server.end() == 0


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-tower model of the columns of shop-clicks."""
    pytest.importorskip("torch", reason="needs the train extra")
    folder, pipeline = tmp_path_factory.mktemp("towers"), zoo.pipeline("shop-clicks", engine="native")
    rows: Any = pipeline.example(120)
    log = pd.DataFrame(rows).assign(clicked=[i % 2 for i in range(len(rows))])
    label = next(column.name for column in pipeline.features.schema.columns if column.kind == "label")  # type: ignore[attr-defined]
    log.rename(columns={"clicked": label}).to_csv(folder / "log.csv", index=False)
    settings = {"epochs": "1", "refit": "false", "hidden": "8", "embedding_size": "4", "batch_size": "32"}
    pipeline.features.schema.save(folder / "schema.json")  # type: ignore[attr-defined]
    zoo.train("two-tower", folder / "log.csv", folder / "towers", settings=settings, schema=folder / "schema.json")
    zoo.quantize(folder / "towers")
    return folder / "towers"


def test_candidates_of_another_model(
    start: Callable[..., Server], request_parts: Any, towers: Path, tmp_path: Path
) -> None:
    pipeline, user, items = request_parts
    file, name = tmp_path / "items.parquet", zoo.load(towers).card.name
    items.to_parquet(file)
    server = start(
        "shop-clicks", towers, "--workers", "1", "--items", f"shop-clicks={file}", "--items", f"{name}={file}"
    )
    nearest: Any = zoo.pipeline(towers, engine="native")
    ids = nearest.retrieve(user, nearest.catalogue(items), 7)
    expected = pipeline.rank(user, pipeline.catalogue(items), 3, ids=ids)
    asked = {"user": user, "from": name, "candidates": 7, "top": 3}
    close(server.json(RANK, body(**asked), JSON)["results"], expected)
    ids = nearest.retrieve(user, nearest.catalogue(items), 7, exclude=[expected[0]["item"]])
    without = server.json(RANK, body(**asked, exclude=[expected[0]["item"]]), JSON)["results"]
    close(without, pipeline.rank(user, pipeline.catalogue(items), 3, ids=ids))
    for changed, words in (
        ({"from": "who"}, f"expected a model that retrieves items: {name}"),
        ({"items": ["i1"]}, "found from and items"),
        ({"candidates": 0}, "candidates"),
    ):
        status, _, text = server.ask(RANK, body(**asked | changed), JSON)
        assert status == 400 and words in text.decode()
