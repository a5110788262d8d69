import numpy as np
import pytest
from rewriting import model

from pipelines import benchmark as module
from pipelines import graph
from pipelines.benchmark import Configuration, Stages, benchmark, memory_mb
from pipelines.errors import ZooError

FEEDS = {"x": np.ones((8, 64), np.float32)}


@pytest.fixture
def path(tmp_path):
    weight = np.ones((64, 64), np.float32)
    return graph.save(model("(float[n,64] x) => (float[n,64] y) { y = MatMul(x, w) }", w=weight), tmp_path / "m.onnx")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "ROUND_SECONDS", 0.002)
    monkeypatch.setattr(module, "memory_mb", lambda configuration, batch, threads: 12.5)


def test_results_have_the_promised_keys(path, quick):
    configurations = [Configuration(engine, "fp32", path) for engine in ("onnxruntime", "openvino")]
    found = benchmark(configurations, FEEDS, threads=1, rounds=3, stages=Stages(lambda: FEEDS, lambda out: out["y"].sum()))
    assert [each["engine"] for each in found] == ["onnxruntime", "openvino"]
    for each in found:
        assert list(each) == [
            *("engine", "precision", "batch_size", "threads", "instances"),
            *("samples_per_second", "spread", "latency_ms", "split_ms", "memory_mb"),
        ]
        assert (each["precision"], each["batch_size"], each["threads"], each["instances"]) == ("fp32", 8, 1, 1)
        latency = each["latency_ms"]
        assert list(latency) == ["p50", "p95", "p99"] and 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
        assert list(each["split_ms"]) == ["preprocess", "model", "postprocess"] and min(each["split_ms"].values()) >= 0
        assert each["spread"][0] <= each["samples_per_second"] <= each["spread"][1]
        assert each["memory_mb"] == 12.5


class Fake:
    """A session on a clock of its own; `each` gives the seconds of every call."""

    order: list[str] = []  # noqa: RUF012

    def __init__(self, name, each):
        self.name, self.each, self.calls = name, each, 0

    def run(self, batch):
        self.calls += 1
        Fake.order.append(self.name)
        Fake.clock += self.each(self.calls)
        return {"y": np.zeros(1)}


@pytest.fixture
def clock(monkeypatch):
    sessions = {}
    Fake.order, Fake.clock = [], 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: Fake.clock)
    monkeypatch.setattr(module, "load", lambda path, engine, threads: sessions[engine])
    monkeypatch.setattr(module, "memory_mb", lambda configuration, batch, threads: 1.0)
    return sessions


def test_figures_are_those_of_the_clock(clock, tmp_path):
    clock["a"], clock["b"] = Fake("a", lambda call: 0.02), Fake("b", lambda call: 0.05)
    configurations = [Configuration("a", "int8", tmp_path), Configuration("b", "fp32", tmp_path)]

    def preprocess():
        Fake.clock += 0.5
        return FEEDS

    def postprocess(out):
        Fake.clock += 0.25

    a, b = benchmark(configurations, FEEDS, rounds=4, stages=Stages(preprocess, postprocess))
    assert (a["samples_per_second"], b["samples_per_second"]) == (400.0, 160.0)
    assert a["latency_ms"] == {"p50": 20.0, "p95": 20.0, "p99": 20.0} and a["spread"] == [400.0, 400.0]
    assert a["split_ms"] == {"preprocess": 500.0, "model": 20.0, "postprocess": 250.0}
    assert b["split_ms"]["model"] == 50.0


def test_sessions_take_turns(clock, tmp_path):
    clock["a"], clock["b"] = Fake("a", lambda call: 0.1), Fake("b", lambda call: 0.1)
    benchmark([Configuration(each, "int8", tmp_path) for each in "ab"], FEEDS, rounds=3)
    turns = "".join(Fake.order)
    assert turns == "aabb" + "aabb" * 3  # two calls to size a turn; then one that warms up and one that is timed


def test_percentiles_are_of_single_calls(clock, tmp_path):
    clock["a"] = Fake("a", lambda call: 0.001 if call % 20 else 0.01)  # every twentieth call is slow
    (found,) = benchmark([Configuration("a", "int8", tmp_path)], FEEDS, rounds=20)
    assert found["latency_ms"]["p50"] == 1.0 and found["latency_ms"]["p99"] == 10.0
    assert found["split_ms"] == {"model": 1.0}
    assert found["samples_per_second"] == pytest.approx(8 / 0.00145, rel=0.02)  # the mean of a turn


def test_memory_is_that_of_the_model_and_not_of_the_process_that_asks(path):
    small = memory_mb(Configuration("onnxruntime", "fp32", path), FEEDS, 1)
    assert 20 < small < 400
    ballast = np.ones(int((small + 300) * 1e6), np.uint8)
    weight = np.ones((4000, 5000), np.float32)  # 80 MB
    big = graph.save(model("(float[n,4000] x) => (float[n,5000] y) { y = MatMul(x, w) }", w=weight), path.parent / "big.onnx")
    large = memory_mb(Configuration("onnxruntime", "fp32", big), {"x": np.ones((2, 4000), np.float32)}, 1)
    assert small + 60 < large < small + 280
    del ballast


def test_memory_of_a_model_that_does_not_load(path):
    path.write_bytes(b"broken")
    with pytest.raises(ZooError, match=r"measuring the memory of .*m\.onnx failed: .*onnxruntime cannot load") as caught:
        memory_mb(Configuration("onnxruntime", "fp32", path), FEEDS, 1)
    assert "\n" not in str(caught.value)
