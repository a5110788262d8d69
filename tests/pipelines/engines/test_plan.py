"""Plans of engines and threads: timing, storage and use."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from helpers.rewriting import model
from helpers.tiers import one_in

from pipelines.core import files, machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import catalog, plan, stock, timing
from pipelines.engines.catalog import load
from pipelines.engines.plan import Candidate
from pipelines.engines.stock import available
from pipelines.engines.timing import Choice, measure
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

FEEDS = {"x": np.ones((4, 3), np.float32)}


class Fake:
    """A session that takes its time."""

    ran: list[str] = []  # noqa: RUF012
    results: dict[str, np.ndarray] = {}  # noqa: RUF012  # of engines that differ

    def __init__(self, name, milliseconds):
        self.name, self.milliseconds = name, milliseconds

    def run(self, batch):
        Fake.ran.append(self.name)
        Fake.clock += self.milliseconds / 1e3
        return {"y": Fake.results.get(self.name, np.ones(3, np.float32))}


@pytest.fixture
def timed(monkeypatch):
    """Engines of known speed on a clock of their own; returns {engine: ms}, to be changed."""
    speeds = {"onnxruntime": 2.0, "openvino": 1.0}
    Fake.ran, Fake.results, Fake.clock = [], {}, 0.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: Fake.clock)
    monkeypatch.setattr(stock, "open_session", lambda path, name, *options: Fake(name, speeds[name]))
    monkeypatch.setattr(stock, "available", lambda: list(speeds))
    return speeds


@pytest.fixture
def path(tmp_path):
    return io.save(model("(float[n,3] x) => (float[n,3] y) { y = Relu(x) }"), tmp_path / "m.onnx")


def quickest(path, batch, threads=1, *, fresh=False):
    """The choice among the stock engines for one model file."""
    return timing.choose(files.sha256(path), stock.candidates(path, threads), batch, threads, fresh=fresh)


def kept(zoo_home):
    return sorted((zoo_home / "plans").iterdir())


def test_the_quickest_engine_is_chosen(path, timed):
    assert quickest(path, FEEDS, 2) == Choice(
        "openvino", 2, 4, {"onnxruntime": 2.0, "openvino": 1.0}, machine.fingerprint()
    )
    timed["openvino"] = 3.0
    assert quickest(path, FEEDS, 2, fresh=True).engine == "onnxruntime"


@pytest.mark.parametrize(
    ("floats", "chosen", "tried"),
    [
        ({"onnxruntime": 0.9, "openvino": 3.0}, "onnxruntime+fp32", 4),
        ({"onnxruntime": 3.0, "openvino": 0.5}, "openvino+fp32", 4),
        ({"onnxruntime": 0.97, "openvino": 3.0}, "openvino", 4),
        ({"onnxruntime": 5.0, "openvino": 0.1}, "openvino", 3),
    ],
)
def test_the_float_file_is_chosen_where_it_is_faster(path, timed, zoo_home, floats, chosen, tried):
    Fake.results = {"int8": np.zeros(3, np.float32)}  # float files agree with each other alone
    candidates = {name: lambda name=name: Fake("int8", timed[name]) for name in timed}
    candidates |= {f"{name}+fp32": lambda name=name: Fake("fp32", floats[name]) for name in floats}
    choice = timing.choose("digest", candidates, FEEDS)
    assert (choice.engine, len(choice.milliseconds)) == (chosen, tried)
    ran = len(Fake.ran)
    assert timing.choose("digest", candidates, FEEDS) == choice and len(Fake.ran) == ran


@pytest.mark.parametrize(
    ("found", "chosen"),
    [([1.2, 1.0, 0.8], "openvino"), ([0.0, 1.0, 2.0], "onnxruntime"), ([np.nan, 1.0, 1.0], "onnxruntime")],
)
def test_an_engine_that_computes_something_else_is_not_chosen(path, timed, caplog, found, chosen):
    Fake.results["openvino"] = np.array(found, np.float32)
    assert quickest(path, FEEDS).engine == chosen
    assert ("output y of openvino differs from that of other engines by" in caplog.text) == (chosen == "onnxruntime")
    candidates = [Candidate(name, "int8", path) for name in ("openvino", "onnxruntime")]
    built = plan.build(candidates, [FEEDS], [1], path.with_suffix(".plan"), stock.open_session)
    assert built["profiles"][0]["engine"] == chosen and len(built["failed"]) == (chosen == "onnxruntime")


def test_outputs_that_are_no_arrays_are_not_compared(path, timed):
    Fake.results = {name: [np.ones(2)] for name in timed}  # a sequence
    assert quickest(path, FEEDS).engine == "openvino"


def test_a_plan_is_remembered(path, timed, zoo_home):
    first = quickest(path, FEEDS)
    count = len(Fake.ran)
    timed["openvino"] = 9.0
    assert quickest(path, FEEDS) == first and len(Fake.ran) == count
    assert quickest(path, FEEDS, fresh=True).engine == "onnxruntime"
    assert quickest(path, FEEDS).engine == "onnxruntime"  # the new one took the old one's place
    assert len(kept(zoo_home)) == 1


def test_a_cache_that_may_not_be_written_is_named_with_what_to_do(path, timed, zoo_home, caplog):
    zoo_home.mkdir(parents=True)
    (zoo_home / "plans").write_text("no folder")
    assert quickest(path, FEEDS).engine == "openvino"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"the choice of an engine is not cached: cannot write {zoo_home / 'plans'}")
    assert said.endswith("set ZOO_HOME to a folder you may write") and "output path" not in said


def test_another_machine_kernel_model_batch_or_thread_count_has_another_plan(path, timed, zoo_home, monkeypatch):
    quickest(path, FEEDS)
    timed["openvino"] = 9.0
    assert quickest(path, FEEDS, 2).engine == "onnxruntime"
    assert quickest(path, {"x": np.ones((5, 3), np.float32)}).engine == "onnxruntime"
    with monkeypatch.context() as patch:
        patch.setattr(machine, "fingerprint", lambda: "another")
        other = quickest(path, FEEDS)
        assert (other.engine, other.machine) == ("onnxruntime", "another")
    with monkeypatch.context() as patch:
        patch.setattr(extension, "isas", lambda: ["another"])
        assert quickest(path, FEEDS).engine == "onnxruntime"
    io.save(model("(float[n,3] x) => (float[n,3] y) { y = Abs(x) }"), path)
    assert quickest(path, FEEDS).engine == "onnxruntime"
    assert len(kept(zoo_home)) == 6


@pytest.fixture
def idle(timed, monkeypatch):
    """A CPU that this process has for itself: all time is CPU time."""
    monkeypatch.setattr(timing.time, "process_time", lambda: Fake.clock)
    return timed


def test_a_choice_made_under_load_is_timed_again_soon(path, idle, zoo_home, monkeypatch):
    now = time.time()
    monkeypatch.setattr(timing.time, "time", lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(timing.time, "process_time", lambda: Fake.clock / 2)
        first = quickest(path, FEEDS)
    assert first.engine == "openvino" and not first.settled
    idle["openvino"] = 9.0
    now += timing.UNSETTLED_SECONDS - 1
    assert quickest(path, FEEDS) == first
    now += 2
    second = quickest(path, FEEDS)
    assert second.engine == "onnxruntime" and second.settled
    idle["openvino"] = 1.0
    now += timing.MAX_AGE_SECONDS - 1
    assert quickest(path, FEEDS) == second
    now += 2
    assert quickest(path, FEEDS).engine == "openvino"
    assert len(kept(zoo_home)) == 1


def test_rounds_that_differ_settle_nothing(path, idle, monkeypatch):
    rounds = iter([[1.0, 2.0], [2.5, 2.0], [1.0, 2.0], [1.5, 2.0]])
    monkeypatch.setattr(timing, "measure", lambda *_: next(rounds))
    assert not quickest(path, FEEDS).settled
    choice = quickest(path, FEEDS, fresh=True)
    assert choice.settled and choice.milliseconds == {"onnxruntime": 1.0, "openvino": 2.0}


@pytest.mark.parametrize(("other", "chosen"), [(0.97, "onnxruntime"), (0.9, "openvino")])
def test_a_choice_stays_unless_another_is_clearly_faster(path, idle, monkeypatch, other, chosen):
    now = time.time()
    monkeypatch.setattr(timing.time, "time", lambda: now)
    idle["onnxruntime"], idle["openvino"] = 1.0, 2.0
    assert quickest(path, FEEDS).engine == "onnxruntime"
    idle["openvino"] = other
    now += timing.MAX_AGE_SECONDS + 1
    assert quickest(path, FEEDS).engine == chosen


def test_a_choice_of_an_earlier_version_is_timed_again(path, timed, zoo_home):
    quickest(path, FEEDS)
    (file,) = kept(zoo_home)
    file.write_text(json.dumps({**WHOLE, "engine": "onnxruntime"}))
    assert quickest(path, FEEDS).engine == "openvino"


FIRST_USE = """
import sys, time
from pipelines.engines import timing

class Noisy:
    def run(self, batch):
        time.sleep(0.001 * (1 + (time.perf_counter_ns() >> 10) % 5))
        return {}

print(timing.choose("digest", dict.fromkeys("abc", Noisy), {}).engine)
"""


def test_first_uses_at_once_make_one_choice(zoo_home):
    """Also where timing is chance."""
    command = [sys.executable, "-c", FIRST_USE]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) for _ in range(4)
    ]
    assert len({process.communicate()[0] for process in running} - {""}) == 1
    assert not any(process.returncode for process in running)


WHOLE = {"threads": 1, "batch_size": 4, "milliseconds": {"onnxruntime": 1.0, "openvino": 2.0}, "machine": ""}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "3",
        '{"engine": "openvino"}',
        '{"other": 1}',
        "[" * 200_000,
        json.dumps({**WHOLE, "engine": "another"}),
        json.dumps({**WHOLE, "engine": 3}),
        json.dumps({**WHOLE, "engine": ["openvino"]}),
        json.dumps({**WHOLE, "engine": "onnxruntime", "milliseconds": 5}),
        json.dumps({**WHOLE, "engine": "onnxruntime", "milliseconds": {"onnxruntime": 1.0}}),  # without the other
    ],
)
def test_a_broken_plan_is_made_anew(path, timed, zoo_home, body):
    first = quickest(path, FEEDS)
    (file,) = kept(zoo_home)
    file.write_text(body)
    assert quickest(path, FEEDS) == first
    assert json.loads(file.read_text())["engine"] == "openvino"


def test_an_engine_that_fails_is_passed_over(path, timed, monkeypatch):
    quick = stock.open_session

    def load(path, name, *options):
        if name == "openvino":
            raise ZooError("cannot compile")
        return quick(path, name, *options)

    with monkeypatch.context() as patch:
        patch.setattr(stock, "open_session", load)
        assert quickest(path, FEEDS).engine == "onnxruntime"
    assert quickest(path, FEEDS).engine == "openvino", "a reason that passed is no choice for good"


def test_no_engine_runs_it(tmp_path):
    path = io.save(model("(float[n,3] x) => (float[n,3] y) { y = Foo(x) }"), tmp_path / "foo.onnx")
    reasons = "onnxruntime cannot load .*foo.onnx: .*; openvino cannot load .*foo.onnx"
    with pytest.raises(ZooError, match=f"no engine runs the model: {reasons}") as caught:
        quickest(path, FEEDS)
    assert "\n" not in str(caught.value)


def test_a_batch_that_no_engine_takes(path):
    with pytest.raises(ZooError, match="no engine runs"):
        quickest(path, {"x": np.ones((4, 2), np.float32)})


def test_one_engine_needs_no_timing(path, monkeypatch, zoo_home):
    monkeypatch.setattr(stock, "available", lambda: ["onnxruntime"])
    assert quickest(path, FEEDS) == Choice("onnxruntime", 1, 4, {}, machine.fingerprint())
    assert not zoo_home.exists()


def test_real_engines(path):
    choice = quickest(path, FEEDS)
    assert set(choice.milliseconds) == {"onnxruntime", "openvino"} and min(choice.milliseconds.values()) > 0
    assert choice.engine == min(choice.milliseconds, key=choice.milliseconds.get)
    assert quickest(path, FEEDS) == choice


def test_sessions_are_measured_in_turn(timed):
    assert measure([Fake("a", 1.0), Fake("b", 3.0)], FEEDS) == pytest.approx([1.0, 3.0])
    assert Fake.ran == ["a", "b"] * (timing.REPEATS + 1)


def test_slow_sessions_are_measured_less_often(timed):
    measure([Fake("a", 500.0)], FEEDS)
    assert 3 <= len(Fake.ran) < timing.REPEATS


@pytest.fixture
def planned(path, tmp_path):
    """(plan file of both engines for batch sizes 1 and 4, what `build` said)."""
    batches = [{"x": np.ones((size, 3), np.float32)} for size in (1, 4)]
    output = tmp_path / "m.plan"
    return output, plan.build([Candidate(name, "fp32", path) for name in available()], batches, [1], output, load)


def rewrite_plan(path, **changed):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["plan.json"] = json.dumps({**json.loads(members["plan.json"]), **changed}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, body in members.items():
            archive.writestr(name, body)


def test_a_plan_file_holds_every_timing_and_the_quickest_of_each_batch_size(planned):
    output, built = planned
    assert plan.read_plan(output) == built
    assert {(entry["engine"], entry["batch_size"]) for entry in built["timings"]} == {
        (name, size) for name in available() for size in (1, 4)
    }
    for profile in built["profiles"]:
        same = [entry["milliseconds"] for entry in built["timings"] if entry["batch_size"] == profile["batch_size"]]
        assert profile["milliseconds"] == min(same) and profile["compiled"] > 0
    assert plan.stale(output, built) == ""
    assert built["models"]["m.onnx"]["sha256"] == files.sha256(output.parent / "m.onnx")


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
def test_a_plan_runs_batches_of_any_size_from_its_compiled_models(path, tmp_path, name, count):
    x = np.arange(count * 3, dtype=np.float32).reshape(count, 3) - 5
    batches = [{"x": np.ones((size, 3), np.float32)} for size in (1, 4)]
    plan.build([Candidate(name, "fp32", path)], batches, [1], tmp_path / "m.plan", load)
    path.unlink()  # it needs its model no more
    opened = catalog.load(tmp_path / "m.plan")
    assert (opened.inputs["x"].dtype, opened.inputs["x"].shape) == (np.float32, (None, 3))
    np.testing.assert_array_equal(opened.run({"x": x})["y"], np.maximum(x, 0))


@pytest.mark.parametrize("name", available())
def test_a_plan_made_again_can_be_opened(path, tmp_path, name):
    """What an engine has compiled before comes from its cache, which OpenVINO cannot export."""
    for _ in range(2):
        plan.build([Candidate(name, "fp32", path)], [FEEDS], [1], tmp_path / "m.plan", load)
    np.testing.assert_array_equal(catalog.load(tmp_path / "m.plan").run(FEEDS)["y"], FEEDS["x"])


def test_a_plan_of_another_machine_says_so_and_is_built_anew(planned, caplog, monkeypatch):
    output, built = planned
    elsewhere = {
        **built["environment"],
        "cpu": "Elbrus",
        "versions": {**built["environment"]["versions"], "openvino": "1.0"},
    }
    rewrite_plan(output, machine="another", environment=elsewhere)
    opened = catalog.load(output)
    assert re.search(r"m.plan: made with cpu Elbrus \(here .*\), openvino 1.0 \(here .*\); rebuilding it", caplog.text)
    np.testing.assert_array_equal(opened.run({"x": -np.ones((2, 3), np.float32)})["y"], np.zeros((2, 3)))
    assert plan.stale(output, plan.read_plan(output)) == ""


def test_a_plan_of_other_native_kernels_is_built_anew(planned, caplog, monkeypatch):
    output, _ = planned
    monkeypatch.setattr(extension, "isas", lambda: ["another"])
    catalog.load(output)
    assert "here ['another']); rebuilding it" in caplog.text
    assert plan.stale(output, plan.read_plan(output)) == ""


def test_a_plan_of_another_machine_without_its_model(planned):
    output, _ = planned
    rewrite_plan(output, machine="another")
    (output.parent / "m.onnx").unlink()
    with pytest.raises(RequestError, match=r"must be rebuilt here, but its model is not at .*m.onnx; run: zoo plan"):
        catalog.load(output)


def test_a_plan_of_a_model_that_has_changed_is_built_anew(planned, caplog):
    output, _ = planned
    model_file = output.parent / "m.onnx"
    os.utime(model_file, (1, 1))
    assert plan.stale(output, plan.read_plan(output)) == ""  # touched only
    io.save(model("(float[n,3] x) => (float[n,3] y) { y = Neg(x) }"), model_file)
    np.testing.assert_array_equal(catalog.load(output).run(FEEDS)["y"], -FEEDS["x"])
    assert "m.onnx has changed since; rebuilding it" in caplog.text


def test_a_plan_that_cannot_be_written_is_used_all_the_same(planned, caplog, monkeypatch):
    output, _ = planned
    rewrite_plan(output, machine="another")
    replacing = files.replacing

    def refuse(target):
        if target == output:
            raise RequestError("read-only")
        return replacing(target)

    monkeypatch.setattr(files, "replacing", refuse)
    assert catalog.load(output).run(FEEDS)["y"].shape == (4, 3)
    assert "not saved: read-only" in caplog.text


@pytest.mark.parametrize("body", [b"", b"nothing", b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_no_plan(tmp_path, body):
    (tmp_path / "m.plan").write_bytes(body)
    with pytest.raises(
        RequestError, match="m.plan is not a plan of this version .*; make one with: zoo plan"
    ) as caught:
        plan.open_plan(tmp_path / "m.plan", load)
    assert "\n" not in str(caught.value)


def _without(key):
    return lambda plan: plan.pop(key)


@pytest.mark.parametrize(
    "damage",
    one_in(
        3,
        [
            *map(_without, ("machine", "environment", "models", "inputs", "candidates", "threads", "profiles")),
            lambda plan: plan.update(machine=3, inputs=[]),
            lambda plan: plan["inputs"][0].update(x=["float32", [2**40, 3]]),
            lambda plan: plan["inputs"][0].update(x=["no dtype", [4, 3]]),
            lambda plan: plan["profiles"][0].update(engine=7),
            lambda plan: plan["profiles"][0].update(batch_size=-1),
            lambda plan: plan["profiles"][0].pop("path"),
            lambda plan: plan["models"].update(a=[]),
            lambda plan: plan["candidates"].append({}),
        ],
    ),
)
def test_a_plan_whose_contents_are_no_plan_is_refused_in_one_line(planned, damage):
    output, built = planned
    built = json.loads(json.dumps(built))
    damage(built)
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr(plan.CONTENTS, json.dumps(built))
    with pytest.raises(RequestError, match="is not a plan of this version") as raised:
        load(output)
    assert "\n" not in str(raised.value)


def test_a_plan_without_its_compiled_models(planned):
    output, built = planned
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr(plan.CONTENTS, json.dumps(built))
    with pytest.raises(RequestError, match="run: zoo plan"):
        load(output).run(FEEDS)


def test_a_candidate_that_fails_is_named_in_the_plan(path, tmp_path):
    broken = io.save(model("(float[n,3] x) => (float[n,3] y) { y = Foo(x) }"), tmp_path / "foo.onnx")
    built = plan.build(
        [Candidate("onnxruntime", "a", broken), Candidate("onnxruntime", "b", path)],
        [FEEDS],
        [1],
        tmp_path / "m.plan",
        load,
    )
    assert built["profiles"][0]["precision"] == "b" and "foo.onnx" in built["failed"][0]
    with pytest.raises(ZooError, match="no engine runs the model"):
        plan.build([Candidate("onnxruntime", "a", broken)], [FEEDS], [1], tmp_path / "n.plan", load)
    assert not (tmp_path / "n.plan").exists()


@pytest.mark.parametrize(("name", "depth"), [("onnxruntime", 48), ("openvino", 8)])
def test_a_plan_loads_faster_than_its_model(tmp_path, name, depth):
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.normal(size=(8, 8, 3, 3)).astype(np.float32) for i in range(depth)}
    layers = " ".join(f"c{i} = Conv<pads=[1,1,1,1]>(h{i}, w{i}) h{i + 1} = Relu(c{i})" for i in range(depth))
    deep = model(f"(float[n,8,8,8] x) => (float[n,8,8,8] h{depth}) {{ h0 = Identity(x) {layers} }}", **weights)
    batch = {"x": np.ones((1, 8, 8, 8), np.float32)}
    path = io.save(quantize(deep, QuantRecipe(), calibrate(deep, [batch]))[0], tmp_path / "deep.onnx")
    plan.build([Candidate(name, "fp32", path)], [batch], [1], tmp_path / "m.plan", load)

    def seconds(opener):
        before = time.process_time()
        opener().run(batch)
        return time.process_time() - before

    def anew():
        shutil.rmtree(os.environ["ZOO_HOME"], ignore_errors=True)  # openvino's own cache
        return load(path, name)

    pairs = [(seconds(lambda: catalog.load(tmp_path / "m.plan")), seconds(anew)) for _ in range(3)]
    quick, slow = np.median(pairs, axis=0)
    assert quick < slow


@pytest.mark.skipif(not machine.has_bf16(), reason="the CPU does not compute in bf16")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_plan_of_bf16_stays_bf16(tmp_path, monkeypatch, compiled):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(64, 64)).astype(np.float32) for _ in range(2))
    path = io.save(model("(float[n,64] x) => (float[n,64] y) { y = MatMul(x, w) }", w=w), tmp_path / "m.onnx")
    if not compiled:
        monkeypatch.setattr(plan, "_compiled", lambda *_: b"")
    built = plan.build([Candidate("openvino", "bf16", path)], [{"x": x}], [1], tmp_path / "m.plan", load)
    assert (built["profiles"][0]["precision"], built["profiles"][0]["compiled"] > 0) == ("bf16", compiled)
    off = np.abs(catalog.load(tmp_path / "m.plan").run({"x": x})["y"] - x @ w).max()
    assert 1e-3 < off < 0.02 * np.abs(x @ w).max()


@pytest.mark.parametrize("name", available())
def test_a_plan_refuses_batches_whose_results_it_cannot_join(tmp_path, name):
    path = io.save(model("(float[n,3] x) => (float[3,n] y) { y = Transpose(x) }"), tmp_path / "t.onnx")
    batches = [{"x": np.ones((size, 3), np.float32)} for size in (1, 3)]
    plan.build([Candidate(name, "fp32", path)], batches, [1], tmp_path / "t.plan", load)
    opened, x = catalog.load(tmp_path / "t.plan"), np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(opened.run({"x": x[:3]})["y"], x[:3].T)
    for count in (5, 4):
        with pytest.raises(RequestError, match="does not count samples first.*--batch-size"):
            opened.run({"x": x[:count]})
