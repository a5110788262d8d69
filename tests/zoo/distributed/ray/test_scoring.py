"""Scoring on a Ray cluster."""

import gzip
import os
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import zoo
from pipelines.core.errors import RequestError
from zoo.distributed import parts
from zoo.distributed.ray import scoring
from zoo.distributed.ray.connection import connect
from zoo.distributed.ray.scoring import run_on_ray
from zoo.distributed.shards import check

ray = pytest.importorskip("ray", reason="a cluster needs ray: pip install 'int8-zoo[ray]'")
pytestmark = pytest.mark.slow
CLICKS = "shop-clicks"


@pytest.fixture(scope="module")
def cluster():
    yield connect(None, 2)
    ray.shutdown()


@pytest.fixture
def log(tmp_path):
    """Forty files of rows."""
    text = gzip.decompress((zoo.load(CLICKS).path / "sample.csv.gz").read_bytes())
    head, rows = text.split(b"\n", 1)
    (tmp_path / "log").mkdir()
    for i in range(40):
        (tmp_path / "log" / f"{i:02d}.csv").write_bytes(head + b"\n" + rows * (20 if i % 2 else 1))
    return str(tmp_path / "log")


def scorers() -> list[int]:
    """The processes of the actors."""
    pids = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes().startswith(b"ray::Scorer"):
                pids.append(int(place.parent.name))
        except OSError:  # it has ended
            continue
    return pids


def test_actors_write_what_one_process_writes_though_some_are_lost(cluster, log, tmp_path):
    def kill(times: int) -> None:
        for _ in range(times):
            before = len(list((tmp_path / "out").glob("*.json")))
            while len(list((tmp_path / "out").glob("*.json"))) < before + 4:
                time.sleep(0.05)
            os.kill(scorers()[0], signal.SIGKILL)
            killed.append(before)

    killed: list[int] = []
    killer = threading.Thread(target=kill, args=(2,), daemon=True)
    killer.start()
    report = run_on_ray(CLICKS, [log], tmp_path / "out", workers=2)
    killer.join(30)
    assert len(killed) == 2 and report["lost"] >= 1 and report["workers"] == 2
    zoo.run(CLICKS, [str(path) for path in parts.remote_files.expand([log])], tmp_path / "one.parquet")
    union = pa.concat_tables(pq.read_table(path) for path in check(tmp_path / "out")["files"])
    assert union.equals(pq.read_table(tmp_path / "one.parquet"))
    assert run_on_ray(CLICKS, [log], tmp_path / "out", workers=2)["kept"] == 40


def test_a_fault_of_the_input_ends_the_run(cluster, log, tmp_path):
    (tmp_path / "bad.csv").write_text("user_id\nu1\n")
    with pytest.raises(RequestError, match=r"bad\.csv lacks the columns"):
        run_on_ray(CLICKS, [log, str(tmp_path / "bad.csv")], tmp_path / "out", workers=2)


def test_wrong_requests(tmp_path, log):
    with pytest.raises(RequestError, match="found 0 workers"):
        run_on_ray(CLICKS, [log], tmp_path / "out", workers=0)


def test_a_cluster_of_its_own_begins_after_the_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "connected", lambda *_: pytest.fail("a cluster began before there was a plan"))
    with pytest.raises(RequestError, match=r"none\.csv"):
        run_on_ray("shop-clicks", [str(tmp_path / "none.csv")], tmp_path / "out")
    assert not (tmp_path / "out").exists()
