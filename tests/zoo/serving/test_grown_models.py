"""Models that fine-tuning grew by new ids, elsewhere: served in place of the old one, with shards, and on Ray."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.click_logs import log_of_ages
from helpers.serving import Server, wait_until

import zoo
from zoo.distributed import parts
from zoo.distributed.shards import check, run_shard

pytest.importorskip("torch", reason="needs the train extra")
TINY = {"epochs": "1", "hidden": "8", "embedding_size": "8", "batch_size": "64"}
USER = {"user_id": "u25", "age": 33}
JSON = "application/json"


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models old and new, the grown one, the log of the second day and all items."""
    folder = tmp_path_factory.mktemp("days")
    first = log_of_ages(folder / "day0.csv", range(20), range(12), seed=0)
    second = log_of_ages(folder / "day1.csv", range(10, 30), range(6, 18), seed=1)
    zoo.train("deepfm", first, folder / "old", settings=TINY, label="click")
    zoo.finetune(folder / "old", second, folder / "new", settings={"epochs": "1", "batch_size": "64"})
    for name in ("old", "new"):
        zoo.quantize(folder / name)
    pd.DataFrame({"item_id": [f"i{item}" for item in range(18)]}).to_csv(folder / "items.csv", index=False)
    return folder


@pytest.mark.parametrize("how", [pytest.param("link", marks=pytest.mark.slow), "folder"])
def test_a_grown_model_takes_the_place_of_the_served_one(
    start: Callable[..., Server], days: Path, tmp_path: Path, how: str
) -> None:
    live, items = tmp_path / "live", days / "items.csv"
    if how == "link":
        live.symlink_to(days / "old")
    else:
        (days / "old").rename(live)
    server = start(live, "--workers", "1", "--watch", "--items", items)
    expected = []
    for path in (live, days / "new"):
        pipeline: Any = zoo.pipeline(path, engine="native")
        expected.append([hit["item"] for hit in pipeline.rank(USER, pipeline.catalogue(items))])
    name = zoo.load(live).card.name
    body, stop, answers = json.dumps({"user": USER}).encode(), threading.Event(), list[Any]()

    def ask() -> None:
        while not stop.wait(0.002):  # the new files are opened at a low priority
            results = server.json(f"/v1/models/{name}:rank", body, JSON)["results"]
            answers.append([hit["item"] for hit in results])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        if how == "link":
            (tmp_path / "next").symlink_to(days / "new")
            (tmp_path / "next").replace(live)
        else:
            live.rename(days / "old")
            (days / "new").rename(live)
        wait_until(lambda: any(f"the new files of {name} are served" in message for message in server.said))
        count = len(answers)
        wait_until(lambda: len(answers) > count + 5)
    finally:
        stop.set()
        thread.join()
        if how == "folder":
            live.rename(days / "new")
    assert answers[0] == expected[0] and answers[-1] == expected[1]
    assert all(answer in expected for answer in answers) and len(expected[1]) == 18
    assert server.end() == 0


def test_shards_of_a_grown_model(days: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MIN_PART_BYTES", 512)
    for shard in ("1/2", "2/2"):
        run_shard(str(days / "new"), [str(days / "day1.csv")], tmp_path / "out", shard)
    engine = json.loads((tmp_path / "out" / "plan.json").read_text())["engine"]
    zoo.run(days / "new", days / "day1.csv", tmp_path / "one.parquet", engine=engine)
    frame = pd.concat([pd.read_parquet(file) for file in check(tmp_path / "out")["files"]], ignore_index=True)
    assert frame.equals(pd.read_parquet(tmp_path / "one.parquet"))


@pytest.mark.slow
def test_a_grown_model_on_ray(days: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="needs ray[serve]: pip install 'int8-zoo[ray]'")
    import socket
    import urllib.request

    import ray
    from ray import serve

    from zoo.distributed.ray.connection import connect
    from zoo.distributed.ray.serving import app

    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    connect(None, 2)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
        serve.run(app({"models": str(days / "new")}), route_prefix="/")
        name = zoo.load(days / "new").card.name
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/models/{name}:run",
            (days / "day1.csv").read_bytes(),
            {"content-type": "text/csv"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            scores = [row["probability"] for row in json.loads(response.read())["results"]]
    finally:
        serve.shutdown()
        ray.shutdown()
    expected = zoo.pipeline(days / "new", engine="native")(days / "day1.csv")
    assert scores == pytest.approx([row["probability"] for row in expected], abs=1e-6)
