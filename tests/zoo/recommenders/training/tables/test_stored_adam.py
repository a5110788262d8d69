"""Tables beyond memory in training: the weights of tables in memory, also after the process was killed."""

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.trainings import assert_same_weights

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import DiskFull

torch = pytest.importorskip("torch", reason="needs the train extra")
layers = importlib.import_module("zoo.recommenders.models.layers")
row_file = importlib.import_module("zoo.recommenders.training.tables.row_file")
training = importlib.import_module("zoo.recommenders.training.train")
deepfm = importlib.import_module("zoo.recommenders.models.deepfm")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[5]
CONFIG = deepfm.DeepFMConfig(
    hidden=(16, 8), embedding_size=32, epochs=3, batch_size=128, l2_embeddings=(10.0, 1000.0), patience=1
)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "log.csv"
    made = [sys.executable, ROOT / "scripts/synthesize_log.py", path, "-n", "2000", "--users", "80", "--items", "50"]
    subprocess.run(made, check=True)
    return path


@pytest.fixture
def small(monkeypatch):
    """Every table is large."""
    monkeypatch.setattr(layers, "LARGE_ROWS", 0)
    return monkeypatch


@pytest.mark.parametrize("refit", [True, False])
def test_rows_in_a_file_are_trained_as_those_in_memory(log, tmp_path, small, capsys, refit):
    config = replace(CONFIG, refit=refit)
    expected = training.train(deepfm.DeepFM, str(log), tmp_path / "memory", config=config)
    assert "are kept in" not in capsys.readouterr().err
    small.setenv("ZOO_TABLE_MEMORY", "1KB")
    actual = training.train(deepfm.DeepFM, str(log), tmp_path / "file", config=config)
    assert "trained rows are kept in" in capsys.readouterr().err
    assert actual == expected
    assert_same_weights(tmp_path / "memory", tmp_path / "file")
    assert [path.name for path in (tmp_path / "file/checkpoint").iterdir()] == ["state.pt"]


KILLED = """
import json, os, signal, sys
from zoo.recommenders.models import layers
from zoo.recommenders.training.tables import row_file, stored_adam
from zoo.recommenders.training import train
from tests.zoo.recommenders.training.tables import test_stored_adam as test
layers.LARGE_ROWS = 0

def training(log, folder, where, at):
    calls = []
    kind, name = (row_file.RowFile, "_keep") if where == "journal" else (stored_adam.StoredAdam, where)
    original = getattr(kind, name)
    def killed(*arguments, **options):
        calls.append(name)
        result = original(*arguments, **options)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(kind, name, killed)
    train.train(test.deepfm.DeepFM, log, folder, config=test.CONFIG)

for line in sys.stdin:  # a training to be killed, in a process that need not import all this
    child = os.fork()
    if child == 0:
        training(*json.loads(line))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed_training():
    """Trains in a process that is killed behind a call: killed_training(log, folder, name of the call, its number)."""
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "ZOO_TABLE_MEMORY": "1KB"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, env=os.environ | paths, **pipes) as trainer:

        def train(log, folder, where, at):
            trainer.stdin.write(json.dumps([str(log), str(folder), where, at]) + "\n")
            trainer.stdin.flush()
            assert int(trainer.stdout.readline()) == -signal.SIGKILL

        yield train


@pytest.fixture(scope="module")
def whole(log, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "LARGE_ROWS", 0)
        patch.setenv("ZOO_TABLE_MEMORY", "1KB")
        training.train(deepfm.DeepFM, str(log), folder, config=CONFIG)
    return folder


MORE = [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("catch_up", 5), ("step", 43), ("state", 4), ("step", 120))
]


@pytest.mark.parametrize(("where", "at"), [("journal", 45), ("step", 195), *MORE])
def test_a_killed_training_goes_on_where_it_was(killed_training, log, tmp_path, small, whole, where, at):
    """Killed within a batch, between batches, at an evaluation and at a checkpoint, in every phase."""
    small.setenv("ZOO_TABLE_MEMORY", "1KB")
    killed_training(log, tmp_path / "model", where, at)
    training.train(deepfm.DeepFM, str(log), tmp_path / "model", config=CONFIG, resume=True)
    assert_same_weights(tmp_path / "model", whole)


def test_rows_before_the_first_checkpoint_do_not_block_a_new_training(killed_training, log, tmp_path, small, whole):
    small.setenv("ZOO_TABLE_MEMORY", "1KB")
    killed_training(log, tmp_path / "model", "step", 7)
    assert [path.name for path in tmp_path.glob("model/checkpoint/*")]
    training.train(deepfm.DeepFM, str(log), tmp_path / "model", config=CONFIG)
    assert_same_weights(tmp_path / "model", whole)


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_file.os, "posix_fallocate", full)
    with pytest.raises(DiskFull, match=r"rows-0: No space left on device"):
        row_file.RowFile(tmp_path / "rows-0", 10, [("x", "<f4")]).create()


def test_what_keeps_tables_in_memory_says_so(log, tmp_path, small):
    settings = {"hidden": "8", "embedding_size": "4", "epochs": "1", "refit": "false", "batch_size": "256"}
    zoo.train("deepfm", str(log), tmp_path / "model", settings=settings)
    zoo.build(tmp_path / "model")
    small.setenv("ZOO_TABLE_MEMORY", "1KB")
    wanted = r"tables of 316 rows beyond the memory for tables; fine-tuning keeps .* set ZOO_TABLE_MEMORY=1MB"
    with pytest.raises(RequestError, match=wanted):
        zoo.finetune(tmp_path / "model", str(log), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()
