"""Training on Ray: what torchrun gives, workers lost on the way, faults."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers.trainings import weights

import zoo
from pipelines.core.errors import RequestError
from zoo.distributed.ray.connection import parse_count
from zoo.distributed.ray.training import train_on_ray

torch = pytest.importorskip("torch", reason="needs the train extra")
ROOT = Path(__file__).resolve().parents[4]
SMALL = {
    "hidden": "16,8",
    "embedding_size": "8",
    "epochs": "5",
    "refit": "false",
    "batch_size": "128",
    "l2_embeddings": "10",
    "patience": "9",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    command = [sys.executable, ROOT / "scripts/synthesize_log.py", path, "-n", "4000", "--users", "80", "--items", "50"]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="a cluster needs ray: pip install 'int8-zoo[ray]'")
    pytest.importorskip("ray.train", reason="needs ray[train]")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def torchrun(log, tmp_path_factory):
    """What two processes of torchrun train."""
    folder = tmp_path_factory.mktemp("torchrun") / "model"
    words = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "zoo.cli.app",
    ]
    command += ["train", "deepfm", "--data", str(log), "-o", str(folder), *words]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    return folder


def workers() -> list[int]:
    """The processes that train."""
    pids = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes().startswith(b"ray::RayTrainWorker"):
                pids.append(int(place.parent.name))
        except OSError:  # it has ended
            continue
    return pids


@pytest.mark.parametrize(
    ("text", "expected"), [("4", 4), (3, 3), ("2:8", (2, 8)), ("0", None), ("3:2", None), ("x", None), ("1:2:3", None)]
)
def test_parse_count_workers(text, expected):
    if expected is None:
        with pytest.raises(RequestError, match="workers, expected a count such as 4"):
            parse_count(text, "workers")
    else:
        assert parse_count(text, "workers") == expected


def test_what_ray_does_not_train_is_refused(tmp_path):
    rows = tmp_path / "rows.tsv"
    rows.write_text("\t".join(["1", *map(str, range(13)), *"abcdefghijklmnopqrstuvwxyz"]) + "\n")
    with pytest.raises(RequestError, match="found sentence-encoder, expected a family with distributed training"):
        train_on_ray("train", "sentence-encoder", str(rows), tmp_path / "model", workers=2)


def test_all_processes_are_told_of_every_checkpoint(log, tmp_path):
    from zoo.training.runs import checkpoint_hook

    seen = []
    with checkpoint_hook(lambda folder: seen.append((folder / "checkpoint/state.pt").stat().st_mtime_ns)):
        zoo.train("deepfm", str(log), tmp_path / "model", settings={**SMALL, "epochs": "2"})
    assert len(set(seen)) == 2


@pytest.mark.slow
def test_two_workers_train_what_torchrun_does(ray, log, torchrun, tmp_path):
    metrics = train_on_ray("train", "deepfm", str(log), tmp_path / "model", workers=2, settings=SMALL)
    one, two = weights(torchrun), weights(tmp_path / "model")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    record = json.loads((tmp_path / "model/train.json").read_text())
    assert record["processes"] == 2 and record["metrics"] == metrics
    assert {path.name for path in tmp_path.iterdir()} == {"model"}  # the storage has gone
    assert zoo.load(tmp_path / "model").card.name == "model"


@pytest.mark.slow
def test_a_killed_worker_costs_what_came_after_the_last_checkpoint(ray, log, torchrun, tmp_path, capsys):
    def kill() -> None:
        while not kept:
            time.sleep(0.05)
            try:
                last = ray.train.Result.from_path(str(tmp_path / "storage/model")).checkpoint
                state = torch.load(Path(last.path) / "checkpoint/state.pt", weights_only=True)
            except (OSError, RuntimeError):  # none yet, or it goes just now
                continue
            kept.append(state["epoch"])
        os.kill(workers()[-1], signal.SIGKILL)

    kept: list[int] = []
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    storage = f"file://{tmp_path / 'storage'}"
    train_on_ray("train", "deepfm", str(log), tmp_path / "model", workers=2, storage=storage, settings=SMALL)
    killer.join(10)
    said = capsys.readouterr().err
    assert kept and said.count("lost a worker") == 1 and "going on from the last checkpoint" in said
    for number in range(1, kept[0] + 1):  # later ones may come twice
        assert said.count(f"epoch {number}/5") == 1
    one, two = weights(torchrun), weights(tmp_path / "model")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_a_fault_of_the_input_ends_the_training(ray, log, tmp_path, capsys):
    with pytest.raises(RequestError, match=r"log\.csv has no column 'nonsense'"):
        train_on_ray("train", "deepfm", str(log), tmp_path / "model", workers=2, settings=SMALL, label="nonsense")
    assert "lost" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_storages(ray, log, tmp_path):
    with pytest.raises(RequestError, match="found no checkpoint of model in .*; train without --resume"):
        train_on_ray("train", "deepfm", str(log), tmp_path / "model", workers=1, resume=True, settings=SMALL)
    name = "checkpoint_2026-11-24_00-00-00.000000"
    (tmp_path / "kept/model" / name).mkdir(parents=True)
    about = {"checkpoint_dir_name": name, "metrics": {}}
    lists = ("pending_training_results", "pending_validation_specs", "validated_checkpoint_dir_names")
    lists += ("timed_out_validation_checkpoint_dir_names", "failed_validation_checkpoint_dir_names")
    snapshot = {"checkpoint_results": [about], "latest_checkpoint_result": about, "checkpoint_report_indices": [0]}
    snapshot |= {"current_report_index": 1, "ray_version": ray.__version__, **{key: [] for key in lists}}
    (tmp_path / "kept/model/checkpoint_manager_snapshot.json").write_text(json.dumps(snapshot))
    with pytest.raises(RequestError, match="found a training of model in .*; go on with --resume"):
        train_on_ray("train", "deepfm", str(log), tmp_path / "model", workers=1, storage=str(tmp_path / "kept"))
