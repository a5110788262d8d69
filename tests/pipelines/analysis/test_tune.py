"""Tuning: layers that stay float32 until an int8 model meets its goal."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.rewriting import model, run

from pipelines.analysis import tune, tuning_settings
from pipelines.analysis.quality_metric import OutputMetric, QualityDrop
from pipelines.analysis.tune import log_path
from pipelines.analysis.tuning_settings import Maker, Settings
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, sha256
from pipelines.core.progress import progress
from pipelines.engines.catalog import load
from pipelines.engines.stock import available
from pipelines.graph import io, query
from pipelines.quantization import ptq
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe


def weights(rng, *shape):
    return (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.fixture(scope="module")
def net():
    """Two convolutions and a classifier of 4."""
    rng = np.random.default_rng(0)
    return model(
        """(float[n,3,6,6] x) => (float[n,4] y) {
            a = Conv<pads=[1,1,1,1]>(x, w1, b1) ar = Relu(a) b = Conv<pads=[1,1,1,1]>(ar, w2) br = Relu(b)
            p = GlobalAveragePool(br) f = Flatten(p) y = Gemm(f, w3, b3) }""",
        w1=weights(rng, 8, 3, 3, 3),
        b1=weights(rng, 8),
        w2=weights(rng, 8, 8, 3, 3),
        w3=weights(rng, 8, 4),
        b3=weights(rng, 4),
    )


@pytest.fixture(scope="module")
def data():
    """(calibration, evaluation) samples."""
    return tuple(np.random.default_rng(seed).normal(size=(64, 3, 6, 6)).astype(np.float32) for seed in (1, 2))


@pytest.fixture
def all_observers():
    """For a test that tries every observer."""


@pytest.fixture(autouse=True)
def two_observers(request, monkeypatch):
    if "all_observers" not in request.fixturenames:
        monkeypatch.setattr(tune, "OBSERVERS", ("minmax", "percentile"))


def search(net, data, output, **options):
    options = {"engine": "onnxruntime", "max_drop": 0.02, **options}
    metric = options.pop("metric", None) or OutputMetric({"x": data[1]}, batch_size=8)
    return tune.tune(net, [{"x": data[0]}], metric, output, **options)


class Scripted:
    """A metric that says what it is told to, by the number of float layers in the file."""

    digest, name = "d", "scripted"

    def __init__(self, data, drop, sqnr=None):
        self.example, self.drop, self.sqnr, self.asked = {"x": data[1][:1]}, drop, sqnr or (lambda kept: None), 0

    def __call__(self, fp32, int8):
        kept = floats(int8.path)
        self.asked += 1
        return QualityDrop(self.drop(kept), self.sqnr(kept))


def floats(path):
    """How many layers of the file have float weights."""
    main = io.load(path).graph
    return sum(node.op_type in ("Conv", "Gemm") and query.constant(node.inputs[1]) is not None for node in main)


def test_the_search_keeps_a_model_that_meets_the_goal(net, data, tmp_path, all_observers):
    output = tmp_path / "int8.onnx"
    result = search(net, data, output)
    assert (result["met"], result["missed_by"], result["stopped"], result["metric"]) == (True, 0.0, "done", "agreement")
    tried = {trial["settings"]["observer"] for trial in result["trials"]}
    assert tried == {"auto", "minmax", "percentile", "mse", "kl"}
    assert {"correct", "symmetric"} <= {
        key for trial in result["trials"] for key in ("correct", "symmetric") if trial["settings"][key]
    }
    assert sha256(output) == result["best"]["sha256"] and floats(output) == 0
    meeting = [trial for trial in result["trials"] if trial["drop"] <= 0.02]
    assert result["best"]["milliseconds"] <= tune.LATENCY_TIE * min(trial["milliseconds"] for trial in meeting)
    y = load(output, "onnxruntime").run({"x": data[1]})["y"]
    agreement = (y.argmax(1) == run(net, x=data[1])["y"].argmax(1)).mean()
    assert result["best"]["drop"] == pytest.approx(1 - agreement, abs=0.02)


@pytest.mark.slow
def test_two_searches_try_the_same_and_leave_the_same_model(net, data, tmp_path):
    results = [search(net, data, tmp_path / name / "int8.onnx", max_drop=-1.0) for name in "ab"]
    assert [[trial["name"], trial["drop"], trial["sqnr_db"], trial["sha256"]] for trial in results[0]["trials"]] == [
        [trial["name"], trial["drop"], trial["sqnr_db"], trial["sha256"]] for trial in results[1]["trials"]
    ]


def test_layers_go_float_until_the_goal_is_met_and_no_more(net, data, tmp_path):
    metric = Scripted(data, lambda kept: 0.01 if kept >= 2 else 0.1)
    result = search(net, data, tmp_path / "int8.onnx", metric=metric)
    assert result["met"] and floats(result["path"]) == 2
    counts = [len(trial["settings"]["keep_float"]) for trial in result["trials"]]
    assert max(counts) < len(list(net.graph))


def test_the_layer_of_most_error_goes_float_first(rng, data, tmp_path):
    wide = weights(rng, 8, 8, 3, 3)
    wide[:, 0] *= 300  # its input channel 0 is tiny beside the others, but decides, and a Tanh forbids to equalize it
    first = weights(rng, 8, 3, 3, 3)
    first[0] /= 300
    net = model(
        """(float[n,3,6,6] x) => (float[n,8,6,6] y) {
            a = Conv<pads=[1,1,1,1]>(x, w1) t = Tanh(a) b = Conv<pads=[1,1,1,1]>(t, w2) y = Conv<pads=[1,1,1,1]>(b, w3) }""",
        w1=first,
        w2=wide,
        w3=weights(rng, 8, 8, 3, 3),
    )
    result = search(net, data, tmp_path / "int8.onnx", metric=Scripted(data, lambda kept: 0.0 if kept else 0.1))
    assert result["best"]["settings"]["keep_float"] == ["b"]
    lines = [json.loads(line) for line in log_path(tmp_path / "int8.onnx").read_text().splitlines()]
    gains = {line["layer"]: line["sqnr_db"] for line in lines if "layer" in line}
    assert max(gains, key=gains.get) == "b"


def test_a_goal_that_is_missed_leaves_the_best_and_says_by_how_much(net, data, tmp_path):
    metric = Scripted(data, lambda kept: 0.5 - 0.1 * min(kept, 2))
    result = search(net, data, tmp_path / "int8.onnx", metric=metric)
    assert not result["met"] and result["missed_by"] == pytest.approx(0.3 - 0.02) and floats(result["path"]) >= 2


def test_a_second_run_repeats_no_trial(net, data, tmp_path, monkeypatch):
    output = tmp_path / "int8.onnx"
    metric = Scripted(data, lambda kept: 0.5 if kept < 2 else 0.0)
    first = search(net, data, output, metric=metric)
    asked, log = metric.asked, log_path(output).read_text()
    second = search(net, data, output, metric=metric)
    assert metric.asked == asked and second == first and log_path(output).read_text() == log
    output.unlink()  # it is made again
    search(net, data, output, metric=metric)
    assert metric.asked == asked and sha256(output) == first["best"]["sha256"]


def test_a_run_that_was_killed_goes_on(net, data, tmp_path):
    output = tmp_path / "int8.onnx"
    metric = Scripted(data, lambda kept: 0.5)
    whole = search(net, data, output, metric=metric)
    lines = log_path(output).read_text().splitlines(keepends=True)
    end = [index for index, line in enumerate(lines) if '"settings"' in line][2] + 1  # three trials
    log_path(output).write_text("".join(lines[:end]) + lines[end][:20])  # killed in the middle of a line
    metric.asked = 0
    again = search(net, data, output, metric=metric)
    first, later = ({trial["sha256"] for trial in part} for part in (whole["trials"][:3], whole["trials"][3:]))
    assert metric.asked == len(later - first)  # the same bytes are judged once
    assert [trial["name"] for trial in again["trials"]] == [trial["name"] for trial in whole["trials"]]


def test_a_log_of_other_data_is_not_used(net, data, tmp_path, caplog):
    output = tmp_path / "int8.onnx"
    metric = Scripted(data, lambda kept: 0.0)
    search(net, data, output, metric=metric)
    asked = metric.asked
    search(net, (data[0][:32], data[1]), output, metric=metric)
    assert metric.asked > asked and "of another model, data or machine" in caplog.text


def test_another_goal_uses_the_trials_made(net, data, tmp_path):
    output = tmp_path / "int8.onnx"
    metric = Scripted(data, lambda kept: 0.1 if kept < 2 else 0.0)
    first = search(net, data, output, metric=metric, max_drop=0.2)
    assert floats(output) == 0
    asked = metric.asked
    second = search(net, data, output, metric=metric, max_drop=0.05)
    assert first["met"] and second["met"] and floats(output) >= 2
    made = [{trial["sha256"] for trial in result["trials"]} for result in (first, second)]
    assert metric.asked == asked + len(made[1] - made[0])


def test_the_budget_ends_the_search_with_what_there_is(net, data, tmp_path):
    result = search(net, data, tmp_path / "int8.onnx", seconds=0.0)
    assert result["stopped"] == "time" and len(result["trials"]) == 1
    assert sha256(result["path"]) == result["best"]["sha256"]


def test_a_trial_that_does_not_end_in_time_is_given_up_for_a_plain_model(net, data, tmp_path, monkeypatch):
    begun = []

    def slow(*arguments, **options):
        begun.append(time.monotonic())
        with progress("correcting layers", 100) as advance:
            for _ in range(100):
                time.sleep(0.1)
                advance(1)

    monkeypatch.setattr(ptq, "correct_table", slow)
    output = tmp_path / "int8.onnx"
    result = search(net, data, output, seconds=2.0)
    assert len(begun) == 1 and time.monotonic() - begun[0] < 5  # of 10
    assert result["stopped"] == "time" and [trial["name"] for trial in result["trials"]] == ["minmax, few samples"]
    assert sha256(output) == result["best"]["sha256"] and result["best"]["drop"] is not None
    assert "few samples" not in log_path(output).read_text()  # another run may have the time


def test_float_is_the_quickest_float_of_the_engines_allowed(net, data, tmp_path, monkeypatch):
    def timed(sessions, batch):  # int8 is quickest in onnxruntime, float in openvino
        table = {("onnxruntime", True): 0.5, ("openvino", True): 3.0, ("onnxruntime", False): 9.0}
        return [table.get((session.engine, floats(session.path) == 0), 1.0) for session in sessions]

    monkeypatch.setattr("pipelines.engines.timing.measure", timed)
    monkeypatch.setattr(tune, "measure", timed)
    result = search(net, data, tmp_path / "int8.onnx", engine="auto", seconds=20.0)
    assert (result["engine"], result["fp32_engine"], result["fp32_ms"]) == ("onnxruntime", "openvino", 1.0)


def test_ctrl_c_leaves_the_best_model(net, data, tmp_path):
    def drop(kept):
        if metric.asked == 3:
            raise KeyboardInterrupt
        return 0.3 / metric.asked

    metric = Scripted(data, drop)
    result = search(net, data, tmp_path / "int8.onnx", metric=metric)
    assert result["stopped"] == "interrupted" and len({trial["sha256"] for trial in result["trials"]}) == 2
    assert result["best"]["drop"] == 0.15 and sha256(result["path"]) == result["best"]["sha256"]


def test_histograms_are_collected_once_for_every_graph(net, data, tmp_path, monkeypatch):
    runs, observe = [], tuning_settings.observe
    monkeypatch.setattr(
        tuning_settings, "observe", lambda model, *args: runs.append(io.digest(model)) or observe(model, *args)
    )
    search(net, data, tmp_path / "int8.onnx")
    assert len(runs) == len(set(runs)) <= 2


@pytest.fixture(scope="module")
def uneven():
    """A depthwise convolution that reads channels of very uneven ranges."""
    rng = np.random.default_rng(0)
    first = weights(rng, 8, 3, 1, 1)
    first *= np.geomspace(0.02, 2, 8, dtype=np.float32).reshape(-1, 1, 1, 1)
    return model(
        """(float[n,3,6,6] x) => (float[n,4] y) { a = Conv(x, w1) ar = Relu(a)
            b = Conv<pads=[1,1,1,1], group=8>(ar, w2) br = Relu(b) c = Conv(br, w3) p = GlobalAveragePool(c) y = Flatten(p) }""",
        w1=first,
        w2=weights(rng, 8, 1, 3, 3) / np.geomspace(0.02, 2, 8, dtype=np.float32).reshape(-1, 1, 1, 1),
        w3=weights(rng, 4, 8, 1, 1),
    )


@pytest.mark.parametrize("correct", [True, False])
def test_a_trial_is_what_quantize_makes_of_the_same_recipe(uneven, data, correct):
    recipe = QuantRecipe(search=True, correct=correct)
    table = ptq.make_table(uneven, recipe, [{"x": data[0]}])
    assert table.equalization
    int8, report = quantize(uneven, recipe, table)
    made = Maker(uneven, [{"x": data[0]}], QuantRecipe()).make(Settings(search=True, correct=correct))
    assert (io.serialized(made[0]), made[1]) == (io.serialized(int8), report)
    quantized = {name: made[2].tensors[name] for name, tensor in table.tensors.items() if tensor.histogram}
    assert quantized.items() <= table.tensors.items()  # trials count the values of all tensors in bins
    assert replace(made[2], tensors=table.tensors) == table


def test_the_search_for_equalization_is_made_once_and_its_model_is_kept(uneven, data, tmp_path, monkeypatch):
    calls, searched = [], ptq.search_equalization
    monkeypatch.setattr(ptq, "search_equalization", lambda *arguments: calls.append(arguments) or searched(*arguments))
    metric = OutputMetric({"x": data[1]}, batch_size=8)
    result = search(uneven, data, tmp_path / "int8.onnx", metric=metric, max_drop=1.0)
    assert len(calls) == 1
    sqnr = {trial["name"]: trial["sqnr_db"] for trial in result["trials"]}
    assert sqnr["minmax + search + correct"] > sqnr["minmax + correct"] + 1
    assert sum(trial["settings"]["search"] for trial in result["trials"]) >= 3  # it is what the others build on
    lines = log_path(tmp_path / "int8.onnx").read_text().splitlines(keepends=True)
    end = next(index for index, line in enumerate(lines) if "minmax + search" in line) + 1
    log_path(tmp_path / "int8.onnx").write_text("".join(lines[:end]))
    again = search(uneven, data, tmp_path / "int8.onnx", metric=metric, max_drop=1.0)
    assert len(calls) == 1
    assert [trial["sha256"] for trial in again["trials"]] == [trial["sha256"] for trial in result["trials"]]


def test_of_equally_quick_models_the_one_of_least_error_is_kept(net, data, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "measure", lambda sessions, batch: [1.0] * len(sessions))
    drops, errors = iter([0.001, *[0.01] * 99]), iter([20.0, 20.0, 40.0, *[30.0] * 99])
    metric = Scripted(data, lambda kept: next(drops), lambda kept: next(errors))
    result = search(net, data, tmp_path / "int8.onnx", metric=metric)
    assert result["met"] and result["best"]["sqnr_db"] == 40.0


def test_models_that_differ_in_constants_alone_are_timed_once(net, data, tmp_path, monkeypatch):
    timed, measure = [], tune.measure
    monkeypatch.setattr(
        tune, "measure", lambda sessions, batch: timed.append(len(sessions)) or measure(sessions, batch)
    )
    result = search(net, data, tmp_path / "int8.onnx", metric=Scripted(data, lambda kept: 0.5 if kept < 2 else 0.0))
    models = {trial["sha256"]: trial["milliseconds"] for trial in result["trials"]}
    assert 1 < timed.count(2) < len(models) and len(set(models.values())) <= timed.count(2)
    same = ("minmax + correct", "minmax + search + correct", "minmax + search")
    assert len({trial["milliseconds"] for trial in result["trials"] if trial["name"] in same}) == 1


def test_a_search_that_would_end_too_late_is_passed_over(net, data, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tune, "SEARCH_COST", 1e9)
    result = search(net, data, tmp_path / "int8.onnx", seconds=1e4)
    assert result["stopped"] == "done" and not any(trial["settings"]["search"] for trial in result["trials"])
    assert "too short for the search for equalized channels" in caplog.text


def test_a_log_of_another_format_is_not_used(net, data, tmp_path, monkeypatch):
    metric = Scripted(data, lambda kept: 0.0)
    search(net, data, tmp_path / "int8.onnx", metric=metric)
    asked = metric.asked
    monkeypatch.setattr(tune, "FORMAT", tune.FORMAT + 1)
    search(net, data, tmp_path / "int8.onnx", metric=metric)
    assert metric.asked == 2 * asked


def test_models_are_judged_and_timed_in_what_the_opener_opens(net, data, tmp_path):
    opened = []

    class Opened:
        def __init__(self, path, engine, threads):
            opened.append((path.name, engine, threads))
            self.path, self.run = path, load(path, "onnxruntime").run

    options = {"opener": Opened, "engines": ["slow", "quick"], "seconds": 0.0}
    metric = Scripted(data, lambda kept: 0.0)
    result = search(net, data, tmp_path / "int8.onnx", engine="quick", threads=2, metric=metric, **options)
    assert result["engine"] == "quick" and set(opened) == {("fp32.onnx", "quick", 2), ("trial.onnx", "quick", 2)}
    opened.clear()
    search(net, data, tmp_path / "auto.onnx", engine="auto", metric=metric, **options)
    assert {engine for name, engine, _ in opened if name == "fp32.onnx"} == {"slow", "quick"}
    with pytest.raises(RequestError, match="unknown or missing engine 'onnxruntime'; choose auto, slow or quick"):
        search(net, data, tmp_path / "o.onnx", metric=metric, **options)


def test_a_trial_that_fails_is_noted_and_passed_over(net, data, tmp_path, monkeypatch):
    quantize = tuning_settings.quantize

    def failing(model, recipe, table):
        if recipe.observer != "percentile":
            raise ZooError("no")
        return quantize(model, recipe, table)

    monkeypatch.setattr(tuning_settings, "quantize", failing)
    result = search(net, data, tmp_path / "int8.onnx")
    assert result["best"]["settings"]["observer"] == "percentile"
    assert {trial.get("error") for trial in result["trials"]} == {None, "no"}
    monkeypatch.setattr(tuning_settings, "quantize", lambda *_: failing(None, Settings(), None))
    with pytest.raises(ZooError, match="no recipe gave a model that runs: no"):
        search(net, data, tmp_path / "none.onnx")
    assert not (tmp_path / "none.onnx").exists()


@pytest.mark.parametrize("name", available())
def test_trials_run_in_the_engine_asked_for(net, data, tmp_path, name):
    result = search(net, data, tmp_path / "int8.onnx", engine=name, seconds=0.0)
    assert result["engine"] == name and result["best"]["milliseconds"] > 0


def test_auto_takes_the_quicker_engine(net, data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "pipelines.engines.timing.measure",
        lambda sessions, batch: [{"openvino": 1.0}.get(session.engine, 2.0) for session in sessions],
    )
    assert search(net, data, tmp_path / "int8.onnx", engine="auto", seconds=0.0)["engine"] == "openvino"


def test_an_unknown_engine(net, data, tmp_path):
    with pytest.raises(RequestError, match="unknown or missing engine 'tpu'"):
        search(net, data, tmp_path / "int8.onnx", engine="tpu")


@pytest.fixture(scope="module")
def mlp():
    """Three products, the second of inputs whose largest values are rare and of no use."""
    rng = np.random.default_rng(0)
    return model(
        "(float[n,16] x) => (float[n,4] y) "
        "{ a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) s = Relu(b) y = MatMul(s, w) }",
        u=weights(rng, 16, 32),
        v=weights(rng, 32, 32),
        w=weights(rng, 32, 4),
    )


def kinds(path):
    return [node.op_type for node in io.load(path).graph]


def test_products_are_tried_with_ranges_of_run_time(mlp, tmp_path, monkeypatch):
    data = tuple(np.random.default_rng(seed).normal(size=(64, 16)).astype(np.float32) for seed in (1, 2))

    class Preferring(Scripted):
        """A metric that likes ranges of run time."""

        def __call__(self, fp32, int8):
            return QualityDrop(0.0 if "MatMulInteger" in kinds(int8.path) else 0.1)

    result = search(mlp, data, tmp_path / "int8.onnx", metric=Preferring(data, None))
    assert result["met"] and result["best"]["settings"]["dynamic"] and kinds(result["path"]).count("MatMulInteger") == 3
    slow = search(mlp, data, tmp_path / "slow.onnx", metric=Scripted(data, lambda kept: 0.1), seconds=1e6)
    assert [trial["settings"]["dynamic"] for trial in slow["trials"]].count(True) >= 1


def test_nets_of_convolutions_are_not(net, data, tmp_path):
    result = search(net, data, tmp_path / "int8.onnx", max_drop=-1.0)
    assert not any(trial["settings"]["dynamic"] for trial in result["trials"])


def test_what_helps_most_is_tried_first(net, data, tmp_path, all_observers):
    names = [trial["name"] for trial in search(net, data, tmp_path / "int8.onnx")["trials"]]
    assert names[:2] == ["auto + correct", "auto + search + correct"] and "symmetric" in names[-2]
    assert not any("correct" in name for name in names[-1:])


@pytest.mark.parametrize("error", [ValueError("of\nnumpy"), MemoryError("no room"), RuntimeError("of an engine")])
def test_any_failure_of_a_trial_is_passed_over(net, data, tmp_path, monkeypatch, caplog, error):
    def failing(*_):
        raise error

    monkeypatch.setattr(ptq, "correct_table", failing)
    result = search(net, data, tmp_path / "int8.onnx")
    assert result["stopped"] == "done" and any("correct fails: " in record.getMessage() for record in caplog.records)
    failed = [trial for trial in result["trials"] if "error" in trial]
    assert failed and all(trial["settings"]["correct"] and "\n" not in trial["error"] for trial in failed)


def test_a_goal_that_cannot_be_met_ends_and_a_second_run_adds_nothing(net, data, tmp_path):
    output = tmp_path / "int8.onnx"
    first = search(net, data, output, max_drop=-0.5)  # better than fp32 by half
    assert (
        not first["met"]
        and first["stopped"] == "done"
        and first["missed_by"] == pytest.approx(first["best"]["drop"] + 0.5)
    )
    assert (
        first["metric"] == "agreement"
        and first["best"]["drop"] == min(trial["drop"] for trial in first["trials"])
        and sha256(output) == first["best"]["sha256"]
    )
    assert floats(output) == 3 or first["best"]["drop"] == 0
    log = log_path(output).read_text()
    assert search(net, data, output, max_drop=-0.5) == first and log_path(output).read_text() == log


def test_the_report_is_of_the_model_found_and_nothing_is_made_again(net, data, tmp_path, monkeypatch):
    made, make = [], Maker.make
    monkeypatch.setattr(Maker, "make", lambda self, settings: made.append(settings) or make(self, settings))
    monkeypatch.setattr(tune._Search, "run", lambda self: self._try(Settings()))
    result = search(net, data, tmp_path / "int8.onnx", report_path=tmp_path / "r.json")
    assert len(made) == 1 and read_json(tmp_path / "r.json")["trials"] == result["trials"]
    search(net, data, tmp_path / "int8.onnx", report_path=tmp_path / "again.json")  # all from the log
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "r.json").read_bytes()
