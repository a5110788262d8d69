"""Benchmarks: timing, memory and their results."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.rewriting import model

from pipelines.analysis import benchmark as module
from pipelines.analysis.benchmark import Configuration, Stages, benchmark, instances, memory_mb, pinned
from pipelines.core.errors import RequestError, ZooError
from pipelines.graph import io
from zoo.cli import app as cli

FEEDS = {"x": np.ones((8, 64), np.float32)}


@pytest.fixture
def path(tmp_path):
    weight = np.ones((64, 64), np.float32)
    return io.save(model("(float[n,64] x) => (float[n,64] y) { y = MatMul(x, w) }", w=weight), tmp_path / "m.onnx")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "ROUND_SECONDS", 0.002)
    monkeypatch.setattr(module, "memory_mb", lambda configuration, batch, threads: 12.5)


def test_results_have_the_promised_keys(path, quick):
    configurations = [Configuration(engine, "fp32", path) for engine in ("onnxruntime", "openvino")]
    results = benchmark(
        configurations, FEEDS, threads=1, rounds=3, stages=Stages(lambda: FEEDS, lambda out: out["y"].sum())
    )
    assert [result["engine"] for result in results] == ["onnxruntime", "openvino"]
    for row in results:
        assert list(row) == [
            *("engine", "precision", "batch_size", "threads", "instances"),
            *("samples_per_second", "spread", "latency_ms", "split_ms", "memory_mb"),
        ]
        assert (row["precision"], row["batch_size"], row["threads"], row["instances"]) == ("fp32", 8, 1, 1)
        latency = row["latency_ms"]
        assert list(latency) == ["p50", "p95", "p99"] and 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
        assert list(row["split_ms"]) == ["preprocess", "model", "postprocess"] and min(row["split_ms"].values()) >= 0
        assert row["spread"][0] <= row["samples_per_second"] <= row["spread"][1]
        assert row["memory_mb"] == 12.5


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
    monkeypatch.setattr(module, "load", lambda path, engine, *options: sessions[engine])
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
    benchmark([Configuration(engine, "int8", tmp_path) for engine in "ab"], FEEDS, rounds=3)
    turns = "".join(Fake.order)
    assert turns == "aabb" + "aabb" * 3  # two calls to size a turn; then one that warms up and one that is timed


def test_percentiles_are_of_single_calls(clock, tmp_path):
    clock["a"] = Fake("a", lambda call: 0.001 if call % 20 else 0.01)  # every twentieth call is slow
    (row,) = benchmark([Configuration("a", "int8", tmp_path)], FEEDS, rounds=20)
    assert row["latency_ms"]["p50"] == 1.0 and row["latency_ms"]["p99"] == 10.0
    assert row["split_ms"] == {"model": 1.0}
    assert row["samples_per_second"] == pytest.approx(8 / 0.00145, rel=0.02)  # the mean of a turn


def test_memory_is_that_of_the_model_and_not_of_the_process_that_asks(path):
    small = memory_mb(Configuration("onnxruntime", "fp32", path), FEEDS, 1)
    assert 20 < small < 400
    ballast = np.ones(int((small + 300) * 1e6), np.uint8)
    weight = np.ones((4000, 5000), np.float32)  # 80 MB
    big = io.save(
        model("(float[n,4000] x) => (float[n,5000] y) { y = MatMul(x, w) }", w=weight), path.parent / "big.onnx"
    )
    large = memory_mb(Configuration("onnxruntime", "fp32", big), {"x": np.ones((2, 4000), np.float32)}, 1)
    assert small + 60 < large < small + 280
    del ballast


def test_memory_of_a_model_that_does_not_load(path):
    path.write_bytes(b"broken")
    with pytest.raises(
        ZooError, match=r"measuring the memory of .*m\.onnx failed: .*onnxruntime cannot load"
    ) as caught:
        memory_mb(Configuration("onnxruntime", "fp32", path), FEEDS, 1)
    assert "\n" not in str(caught.value)


FIRST, LAST = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
TWO = [[FIRST], [LAST]]


@pytest.fixture
def started(monkeypatch):
    """The processes of all workers."""
    processes = []

    class Noted(module._Worker):
        def __init__(self, what):
            super().__init__(what)
            processes.append(self.process)

    monkeypatch.setattr(module, "_Worker", Noted)
    return processes


def test_two_instances_of_a_model(path, started, monkeypatch):
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.05)
    rows = {"x": np.ones((32, 64), np.float32)}
    (row,) = instances([Configuration("onnxruntime", "fp32", path)], rows, 8, TWO, rounds=2)
    assert list(row) == [
        *("engine", "precision", "batch_size", "threads", "instances"),
        *("samples_per_second", "spread", "latency_ms", "split_ms", "memory_mb", "rss_mb"),
    ]
    assert [row[key] for key in ("engine", "precision", "batch_size", "threads", "instances")] == [
        "onnxruntime",
        "fp32",
        8,
        1,
        2,
    ]
    assert json.loads(json.dumps(row)) == row
    latency = row["latency_ms"]
    assert list(latency) == ["p50", "p95", "p99"] and 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
    assert row["split_ms"] == {"model": latency["p50"]}
    assert 0 < row["spread"][0] <= row["samples_per_second"] <= row["spread"][1]
    assert len(row["rss_mb"]) == 2 and min(row["rss_mb"]) > 20
    assert 0 < row["memory_mb"] < sum(row["rss_mb"])  # the libraries' pages count once: less, where others map them
    assert len(started) == 4 and all(process.returncode == 0 for process in started)


def test_each_instance_is_pinned_and_begins_elsewhere(path, tmp_path):
    rows = {"x": np.zeros((4, 64), np.float32)}
    with module._saved(rows) as saved:
        with module._workers("it", Configuration("onnxruntime", "fp32", path), saved, 2, 1, TWO) as workers:
            assert [os.sched_getaffinity(worker.process.pid) for worker in workers] == [{FIRST}, {LAST}]
        assert all(worker.process.returncode == 0 for worker in workers)
    assert not any(Path(file).exists() for file in saved.values())
    with module._saved({"x": np.arange(8), "y": np.arange(16).reshape(8, 2)}) as saved:
        request = {"inputs": saved, "batch_size": 2, "begin": 0.5}
        batches = module._batches(request)
        assert [batch["x"].tolist() for batch in batches] == [[4, 5], [6, 7], [0, 1], [2, 3]]
        assert batches[0]["y"].tolist() == [[8, 9], [10, 11]]
        assert [batch["x"].tolist() for batch in module._batches({**request, "batch_size": 3, "begin": 0})] == [
            [0, 1, 2],
            [3, 4, 5],
        ]


def test_figures_of_instances_are_sums_over_them_and_configurations_take_turns(monkeypatch, tmp_path):
    asked = []

    class Told:
        def __init__(self, engine, milliseconds):
            self.engine, self.milliseconds = engine, milliseconds

        def tell(self, request):
            asked.append(self.engine)

        def hear(self):
            return {"nanoseconds": [self.milliseconds * 1_000_000] * 4}

    def workers(what, configuration, saved, size, threads, cores):
        return contextlib.nullcontext(
            [Told(configuration.engine, 10), Told(configuration.engine, 40 if configuration.engine == "a" else 20)]
        )

    monkeypatch.setattr(module, "_workers", workers)
    monkeypatch.setattr(module, "_memory", lambda configuration, batch, cores: ([10.25, 20.5], [30.0, 40.0]))
    a, b = instances([Configuration(engine, "int8", tmp_path) for engine in "ab"], FEEDS, 8, [[0, 1], [2, 3]], rounds=3)
    assert (a["samples_per_second"], b["samples_per_second"]) == (1000.0, 1200.0)
    assert a["latency_ms"] == {"p50": 25.0, "p95": 40.0, "p99": 40.0} and a["spread"] == [1000.0, 1000.0]
    assert (a["threads"], a["instances"], a["memory_mb"], a["rss_mb"]) == (2, 2, 30.8, [30.0, 40.0])
    assert "".join(asked) == "aabb" * 3


def test_a_window_takes_every_call_until_its_time_is_over(monkeypatch):
    ticks = iter([0, 40, 90, 160])
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: next(ticks))
    seen = []

    class Seen:
        def run(self, batch):
            seen.append(batch)

    assert module._window(Seen(), iter("abcd"), 100e-9) == [40, 50, 70]
    assert seen == ["a", "b", "c"]


def test_more_instances_than_cores_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5, 4, 9})
    assert pinned(5) == [[3], [4], [5], [7], [9]] and pinned(2, 2) == [[3, 4], [5, 7]]
    with pytest.raises(
        RequestError, match=r"found 5 core\(s\), expected 6 for 3 x 2 thread\(s\); at most: --instances 2"
    ):
        pinned(3, 2)
    with pytest.raises(RequestError, match="--threads 1"):
        pinned(2, 6)
    with pytest.raises(SystemExit, match="2"):
        cli.call(["benchmark", "wide-deep-criteo", "--instances", "6"])
    said = capsys.readouterr()
    assert (
        said.out == "" and said.err.startswith("zoo: found 5 core(s), expected 6") and len(said.err.splitlines()) == 1
    )


def test_a_model_that_does_not_load_gives_one_line_and_leaves_no_process(path, started):
    broken = path.parent / "broken.onnx"
    broken.write_bytes(b"broken")
    configurations = [Configuration("onnxruntime", "fp32", file) for file in (path, broken)]
    with pytest.raises(
        ZooError, match=r"^an instance of .*broken\.onnx in onnxruntime failed: onnxruntime cannot load"
    ) as caught:
        instances(configurations, FEEDS, 8, TWO[:1])
    assert "\n" not in str(caught.value)
    assert len(started) == 2 and all(process.returncode is not None for process in started)


def test_an_instance_that_dies_gives_one_line(path, started):
    with (
        pytest.raises(ZooError, match=r"^it failed: it ended with code -9$"),
        module._saved(FEEDS) as saved,
        module._workers("it", Configuration("onnxruntime", "fp32", path), saved, 8, 1, TWO[:1]) as (worker,),
    ):
        worker.process.kill()
        worker.process.wait()
        worker.tell({"warm": 0, "seconds": 1})
        worker.hear()
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_no_instance_outlives_the_process_that_asked(how, path):
    code = f"""
import sys, numpy as np
from pipelines.analysis import benchmark as module
module.WINDOW_SECONDS = 0.2
tell = module._Worker.tell
module._Worker.tell = lambda self, request: (tell(self, request), "warm" in request and print(self.process.pid, flush=True))
rows = {{"x": np.ones((8, 64), np.float32)}}
module.instances([module.Configuration("onnxruntime", "fp32", module.Path(sys.argv[1]))], rows, 8, {TWO}, rounds=1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        workers = [int(process.stdout.readline()) for _ in TWO]
        assert all(Path(f"/proc/{pid}").exists() for pid in workers)
        process.send_signal(how)
        process.communicate(timeout=20)
    assert process.returncode == -how
    for _ in range(100):
        if not any(_runs(pid) for pid in workers):
            return
        time.sleep(0.1)
    pytest.fail("a worker goes on")


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_table_shows_the_instances(monkeypatch, capsys):
    from zoo import api

    row = {
        "engine": "native",
        "precision": "int8",
        "batch_size": 512,
        "threads": 1,
        "instances": 3,
        "samples_per_second": 1234.5,
    }
    row |= {
        "spread": [1200.0, 1250.0],
        "latency_ms": {"p50": 1.0, "p95": 2.0, "p99": 3.0},
        "split_ms": {"model": 1.0},
        "memory_mb": 77.7,
    }
    received = {}
    monkeypatch.setattr(
        api,
        "benchmark",
        lambda model, others, **options: (
            received.update(options) or {"model": model, "results": [row], "environment": {"cpu": "C"}}
        ),
    )
    cli.call(["benchmark", "m", "--instances", "3"])
    header, line, last = capsys.readouterr().out.strip().splitlines()
    assert received["instances"] == 3
    assert (
        header.split("inst.")[0].split() == ["engine", "precision", "batch"]
        and "model ms" in header
        and "pre /" not in header
    )
    assert line.split() == ["native", "int8", "512", "3", "1,234", "1.000", "2.000", "3.000", "1.000", "78"]
    assert last.strip() == "C, 1 thread(s) per instance"
