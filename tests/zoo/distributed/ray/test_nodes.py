"""A cluster of two nodes, processes of this machine, one of which goes in the middle of scoring and of training."""

import gzip
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import zoo
from zoo.distributed import remote_files
from zoo.distributed.ray.scoring import run_on_ray
from zoo.distributed.ray.training import train_on_ray
from zoo.distributed.shards import check

ray = pytest.importorskip("ray", reason="a cluster needs ray: pip install 'int8-zoo[ray]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[4]
CLICKS = "shop-clicks"


@pytest.fixture
def nodes():
    """A cluster, and its second node."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def when(ready, act) -> threading.Thread:
    """Act as soon as something is ready, in a thread."""

    def wait() -> None:
        while not ready():
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_scoring_goes_on_where_a_node_goes(nodes, tmp_path):
    cluster, second = nodes
    text = gzip.decompress((zoo.load(CLICKS).path / "sample.csv.gz").read_bytes())
    head, rows = text.split(b"\n", 1)
    (tmp_path / "log").mkdir()
    for i in range(30):
        (tmp_path / "log" / f"{i:02d}.csv").write_bytes(head + b"\n" + rows * 20)
    out = tmp_path / "out"
    removed = when(lambda: len(list(out.glob("part-*.json"))) > 9, lambda: cluster.remove_node(second, False))
    report = run_on_ray(CLICKS, [str(tmp_path / "log")], out, address=cluster.address, workers=2)
    removed.join(30)
    assert report["lost"] >= 1 and not second.any_processes_alive()
    zoo.run(CLICKS, remote_files.expand([str(tmp_path / "log")]), tmp_path / "one.parquet")
    union = pa.concat_tables(pq.read_table(path) for path in check(out)["files"])
    assert union.equals(pq.read_table(tmp_path / "one.parquet"))


def test_an_elastic_training_goes_on_where_a_node_goes(nodes, tmp_path, capsys):
    cluster, second = nodes
    log = tmp_path / "log.csv"
    command = [sys.executable, ROOT / "scripts/synthesize_log.py", log, "-n", "20000", "--users", "80", "--items", "50"]
    subprocess.run(command, check=True)
    settings = {"hidden": "16,8", "epochs": "6", "refit": "false", "l2_embeddings": "10", "patience": "9"}
    storage = tmp_path / "storage"

    def kept() -> bool:
        from ray.train import Result

        try:
            return Result.from_path(str(storage / "model")).checkpoint is not None
        except (OSError, RuntimeError):
            return False

    connected = when(kept, lambda: cluster.remove_node(second, False))
    train_on_ray(
        "train",
        "deepfm",
        str(log),
        tmp_path / "model",
        workers="1:2",
        address=cluster.address,
        storage=str(storage),
        settings=settings,
    )
    connected.join(30)
    said = capsys.readouterr().err
    assert "going on from the last checkpoint" in said and said.count("epoch 1/6") == 1
    record = json.loads((tmp_path / "model/train.json").read_text())
    assert record["processes"] == 1 and [epoch["epoch"] for epoch in record["history"]] == [1, 2, 3, 4, 5, 6]
