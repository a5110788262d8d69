"""Wide & Deep trained by two processes of TensorFlow's MultiWorkerMirroredStrategy, over loopback."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.training.runs import is_first

pytest.importorskip("zoo.recommenders.criteo.train", reason="needs the train extra")
from helpers import wide_deep_training as tests

CHANGES = {"dropout": 0.0, "batch_size": 50}  # the last batch has none for one process: 301 rows
CONFIG = replace(tests.TINY, **CHANGES)
SECONDS = 300

SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from dataclasses import replace
from helpers import wide_deep_training as tests
from pipelines.core.errors import ZooError
from zoo.wide_deep import checkpoint, train as training
CONFIG = replace(tests.TINY, **json.loads(sys.argv[2]))
steps, data, output, *more = sys.argv[3:]
if int(steps):
    made = training.Trainer.__init__
    checkpoint.CHECKPOINT_SECONDS = 0.0
    def dying(self, *arguments):
        made(self, *arguments)
        step, left = self.step, iter(range(int(steps)))
        def counted(*batch):
            if next(left, None) is None:
                sys.stdout.flush()
                import os; os._exit(9)
            return step(*batch)
        self.step = counted
    training.Trainer.__init__ = dying
try:
    print(json.dumps(tests.train(data, output, config=CONFIG, resume="--resume" in more)))
except ZooError as error:
    print(type(error).__name__, error)
    sys.exit(2)
"""


def places(count: int) -> list[str]:
    """Free addresses on loopback."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    found = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


@pytest.fixture
def pair(tmp_path):
    """Runs two processes with (data, output) each; returns their exit codes and what they printed."""
    script, here = tmp_path / "script.py", Path(__file__).resolve()
    script.write_text(SCRIPT)

    def run(*each: tuple[Path, Path], steps: int = 0, resume: bool = False) -> list[tuple[int, str]]:
        cluster = {"worker": places(2)}
        started = []
        for index, (data, output) in enumerate(each):
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_CONFIG": json.dumps(config),
            }
            command = [
                sys.executable,
                str(script),
                json.dumps([str(here.parents[4]), str(here.parents[3])]),
                json.dumps(CHANGES),
                str(steps),
                str(data),
            ]
            command += [str(output), *(["--resume"] if resume else [])]
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            )
        try:
            return [(process.wait(), said) for process in started for said in [process.communicate(timeout=SECONDS)[0]]]
        finally:
            for process in started:
                process.kill()

    return run


@pytest.fixture
def log(tmp_path):
    return tests.write_log(tmp_path / "log.tsv", rows=402)


def assert_close(a: Path, b: Path) -> None:
    """Float sums in another order, three epochs and a refit long: 1e-7 where the CPU's sums are alike, and on any less than
    a fiftieth of what Adam moves a weight in one step.
    """
    left, right = tests.weights_of(a), tests.weights_of(b)
    for name, array in left.items():
        np.testing.assert_allclose(array, right[name], atol=2e-4, err_msg=name)


def test_two_processes_train_what_one_does(tmp_path, pair, log):
    alone = tests.train(log, tmp_path / "one", config=CONFIG)
    done = pair((log, tmp_path / "two"), (log, tmp_path / "other"))
    assert [code for code, _ in done] == [0, 0], done
    metrics = [json.loads(said.strip().splitlines()[-1]) for _, said in done]
    assert metrics[0] == metrics[1] and metrics[0].keys() == alone.keys()
    assert {path.name for path in (tmp_path / "two").iterdir()} == tests.MADE
    assert not (tmp_path / "other").exists()  # the first process alone writes
    one, two = (tests.record_of(tmp_path / name) for name in ("one", "two"))
    for key in ("rows", "epochs", "trained_rows", "features"):
        assert one[key] == two[key]
    for a, b in zip(one["history"], two["history"], strict=True):
        assert a["train_logloss"] == pytest.approx(b["train_logloss"], abs=1e-4)
    # AUC and accuracy jump by a pair or a row of a hundred, so that no tolerance holds on every CPU: the weights say it
    assert metrics[0]["logloss"] == pytest.approx(alone["logloss"], abs=1e-4)
    assert_close(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_two_processes_that_died_go_on_from_the_middle_of_an_epoch(tmp_path, pair, log):
    pair((log, tmp_path / "whole"), (log, tmp_path / "other"))
    died = pair((log, tmp_path / "parts"), (log, tmp_path / "other"), steps=10)
    assert [code for code, _ in died] == [9, 9]
    done = pair((log, tmp_path / "parts"), (log, tmp_path / "other"), resume=True)
    assert [code for code, _ in done] == [0, 0], done
    whole, parts = (read_json(tmp_path / name / "train.json") for name in ("whole", "parts"))
    assert whole["history"] == parts["history"] and whole["trained_rows"] == parts["trained_rows"]
    tests.assert_same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_processes_with_other_rows_are_refused_together(tmp_path, pair, log):
    other = tests.write_log(tmp_path / "other.tsv", rows=402, seed=1)
    (first, said), (second, why) = pair((log, tmp_path / "a"), (other, tmp_path / "b"))
    assert (first, second) == (2, 2)
    assert "process 1 of 2 failed" in said and "found other rows" in why
    (first, said), (second, why) = pair(
        (log, log), (log, tmp_path / "b")
    )  # an output that the first process alone looks at
    assert (first, second) == (2, 2) and "in use" in said and "in use" in why


def test_the_first_process_writes(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert is_first()
    monkeypatch.setenv("RANK", "1")
    assert not is_first()
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}
    for task, first in ((("chief", 0), True), (("worker", 0), False), (("worker", 1), False)):
        monkeypatch.setenv(
            "TF_CONFIG", json.dumps({"cluster": cluster, "task": dict(zip(("type", "index"), task, strict=True))})
        )
        assert is_first() == first
    for text in (
        "{",
        "[]",
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
        '{"cluster": {}}',
    ):
        monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(RequestError, match="TF_CONFIG"):
            is_first()
