import json

import numpy as np
import pytest
from rewriting import model

from pipelines import graph, machine, plan
from pipelines.errors import ZooError
from pipelines.plan import Plan, measure

FEEDS = {"x": np.ones((4, 3), np.float32)}


class Fake:
    """A session that takes its time."""

    ran: list[str] = []  # noqa: RUF012

    def __init__(self, name, milliseconds):
        self.name, self.milliseconds = name, milliseconds

    def run(self, batch):
        Fake.ran.append(self.name)
        Fake.clock += self.milliseconds / 1e3


@pytest.fixture
def timed(monkeypatch):
    """Engines of known speed on a clock of their own; returns {engine: ms}, to be changed."""
    speeds = {"onnxruntime": 2.0, "openvino": 1.0}
    Fake.ran, Fake.clock = [], 0.0
    monkeypatch.setattr(plan.time, "perf_counter", lambda: Fake.clock)
    monkeypatch.setattr(plan, "load", lambda path, name, threads: Fake(name, speeds[name]))
    monkeypatch.setattr(plan, "available", lambda: list(speeds))
    return speeds


@pytest.fixture
def path(tmp_path):
    return graph.save(model("(float[n,3] x) => (float[n,3] y) { y = Relu(x) }"), tmp_path / "m.onnx")


def kept(zoo_home):
    return sorted((zoo_home / "plans").iterdir())


def test_the_quickest_engine_is_chosen(path, timed):
    assert plan.plan(path, FEEDS, 2) == Plan("openvino", 2, 4, {"onnxruntime": 2.0, "openvino": 1.0}, machine.fingerprint())
    timed["openvino"] = 3.0
    assert plan.plan(path, FEEDS, 2, fresh=True).engine == "onnxruntime"


def test_a_plan_is_remembered(path, timed, zoo_home):
    first = plan.plan(path, FEEDS)
    count = len(Fake.ran)
    timed["openvino"] = 9.0
    assert plan.plan(path, FEEDS) == first and len(Fake.ran) == count
    assert plan.plan(path, FEEDS, fresh=True).engine == "onnxruntime"
    assert plan.plan(path, FEEDS).engine == "onnxruntime"  # the new one took the old one's place
    assert len(kept(zoo_home)) == 1


def test_another_machine_model_batch_or_thread_count_has_another_plan(path, timed, zoo_home, monkeypatch):
    plan.plan(path, FEEDS)
    timed["openvino"] = 9.0
    assert plan.plan(path, FEEDS, 2).engine == "onnxruntime"
    assert plan.plan(path, {"x": np.ones((5, 3), np.float32)}).engine == "onnxruntime"
    with monkeypatch.context() as patch:
        patch.setattr(machine, "fingerprint", lambda: "another")
        other = plan.plan(path, FEEDS)
        assert (other.engine, other.machine) == ("onnxruntime", "another")
    graph.save(model("(float[n,3] x) => (float[n,3] y) { y = Abs(x) }"), path)
    assert plan.plan(path, FEEDS).engine == "onnxruntime"
    assert len(kept(zoo_home)) == 5


@pytest.mark.parametrize("body", ["", "{", "[]", "3", '{"engine": "openvino"}', '{"other": 1}'])
def test_a_broken_plan_is_made_anew(path, timed, zoo_home, body):
    first = plan.plan(path, FEEDS)
    (file,) = kept(zoo_home)
    file.write_text(body)
    assert plan.plan(path, FEEDS) == first
    assert json.loads(file.read_text())["engine"] == "openvino"


def test_an_engine_that_fails_is_passed_over(path, timed, monkeypatch):
    quick = plan.load

    def load(path, name, threads):
        if name == "openvino":
            raise ZooError("cannot compile")
        return quick(path, name, threads)

    monkeypatch.setattr(plan, "load", load)
    assert plan.plan(path, FEEDS).engine == "onnxruntime"


def test_no_engine_runs_it(tmp_path):
    path = graph.save(model("(float[n,3] x) => (float[n,3] y) { y = Foo(x) }"), tmp_path / "foo.onnx")
    each = "onnxruntime cannot load .*foo.onnx: .*; openvino cannot load .*foo.onnx"
    with pytest.raises(ZooError, match=f"no engine runs the model: {each}") as caught:
        plan.plan(path, FEEDS)
    assert "\n" not in str(caught.value)


def test_a_batch_that_no_engine_takes(path):
    with pytest.raises(ZooError, match="no engine runs"):
        plan.plan(path, {"x": np.ones((4, 2), np.float32)})


def test_one_engine_needs_no_timing(path, monkeypatch, zoo_home):
    monkeypatch.setattr(plan, "available", lambda: ["onnxruntime"])
    assert plan.plan(path, FEEDS) == Plan("onnxruntime", 1, 4, {}, machine.fingerprint())
    assert not zoo_home.exists()


def test_real_engines(path):
    found = plan.plan(path, FEEDS)
    assert set(found.milliseconds) == {"onnxruntime", "openvino"} and min(found.milliseconds.values()) > 0
    assert found.engine == min(found.milliseconds, key=found.milliseconds.get)
    assert plan.plan(path, FEEDS) == found


def test_sessions_are_measured_in_turn(timed):
    assert measure([Fake("a", 1.0), Fake("b", 3.0)], FEEDS) == pytest.approx([1.0, 3.0])
    assert Fake.ran == ["a", "b"] * (plan.REPEATS + 1)


def test_slow_sessions_are_measured_less_often(timed):
    measure([Fake("a", 500.0)], FEEDS)
    assert 3 <= len(Fake.ran) < plan.REPEATS
