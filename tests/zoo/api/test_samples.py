"""The commands `tune` and `plan`: ONNX files with and without labels, zoo models, and messages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import model, run
from helpers.sample_files import call

import zoo
from pipelines.analysis.quality_metric import OutputMetric, QualityDrop
from pipelines.core import files
from pipelines.core.batches import joined, length
from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load as open_plan
from pipelines.graph import io
from zoo.api import samples
from zoo.cli import options


def test_tune_an_onnx_file_with_labels(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--evaluation-data",
        "e.npz",
        "--calibration-data",
        "c.npz",
        "--max-drop",
        "5%",
        "--engine",
        "onnxruntime",
        "-o",
        "int8.onnx",
    )
    code, out, err = call(capsys, "tune", "mlp.onnx", *options, "--json", "--report", "r.json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["met"] and report["metric"] == "top1" and report["best"]["metrics"]["fp32"] == 1.0
    assert (
        files.sha256("int8.onnx") == report["best"]["sha256"]
        and len(Path("int8.trials.jsonl").read_text().splitlines()) > 5
    )
    assert json.loads(Path("r.json").read_text())["trials"] == report["trials"]


def test_a_missed_goal_is_an_exit_code_and_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputMetric, "__call__", lambda *_: QualityDrop(0.25, 20.0))
    options = (
        "--evaluation-data",
        "e.npz",
        "--calibration-data",
        "c.npz",
        "--engine",
        "onnxruntime",
        "-o",
        "int8.onnx",
        "--time-budget",
        "0",
    )
    code, out, err = call(capsys, "tune", "mlp.onnx", *options)
    assert code == 1 and "minmax, few samples" in out and Path("int8.onnx").is_file()
    assert (
        err.count("\n") == 1
        and "the maximum drop is exceeded by 24.500%: the best model, minmax, few samples in" in err
    )


def test_without_calibration_data_every_fifth_sample_calibrates(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    judge, batches = samples.quality_metric_of(io.load("mlp.onnx"), "e.npz", None, 1)
    x = np.load("e.npz")["x"]
    for _ in range(2):
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), x[::5])
    assert batches.total == 40 and "every fifth" in caplog.text
    assert isinstance(judge, OutputMetric) and len(judge._arrays["x"]) == 160


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"output": "int8.bin"}, "found the output int8.bin, expected a name that ends in .onnx"),
        ({"output": "mlp.onnx"}, "the output mlp.onnx would replace the input mlp.onnx"),
        ({"output": "o.onnx", "evaluation_data": "none.npz"}, "cannot read none.npz"),
        ({"output": "o.onnx", "report_path": "r.txt"}, "a report ends in .json or .html"),
        ({"output": "o.onnx", "batch_size": 4096}, "found 200 samples, expected at least the batch size 4096"),
    ],
)
def test_requests_that_are_wrong(here: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        zoo.tune("mlp.onnx", **{"evaluation_data": "e.npz", "calibration_data": "c.npz", **arguments})


def test_a_wrong_input_name(here: Path) -> None:
    np.savez("z.npz", z=np.zeros((4, 8), np.float32))
    with pytest.raises(
        RequestError,
        match=r"z.npz holds z float32 \[4, 8\]; expected the graph's inputs, x float32 \[n, 8\], and label if known",
    ):
        zoo.tune("mlp.onnx", "z.npz", "o.onnx")


def test_tune_a_zoo_model_by_its_own_metric(trained: Path, rows: Path, tmp_path: Path) -> None:
    report = zoo.tune(
        trained, str(rows), tmp_path / "int8.onnx", max_drop=0.02, engine="onnxruntime", seconds=0.0, batch_size=64
    )
    assert report["metric"] == "auc" and report["met"] and len(report["trials"]) == 1
    exact = zoo.evaluate(trained, str(rows), engine="onnxruntime")["metrics"]["fp32"]["auc"]
    assert report["best"]["metrics"]["fp32"] == pytest.approx(exact, abs=1e-6)
    assert (trained / "int8.onnx").read_bytes() != b""


def test_plan_an_onnx_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "plan", "mlp.onnx", "--batch-size", "1,8", "--threads", "1", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert [profile["batch_size"] for profile in report["profiles"]] == [1, 8] and report["path"] == "mlp.plan"
    x = np.load("c.npz")["x"]
    np.testing.assert_allclose(
        open_plan("mlp.plan").run({"x": x})["y"], run(io.load("mlp.onnx"), x=x)["y"], rtol=1e-4, atol=1e-5
    )


def test_plan_shows_what_was_chosen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "plan", "mlp.onnx", "--engine", "onnxruntime", "-o", "other.plan")
    assert code == 0 and "chosen" in out and out.splitlines()[-1] == "other.plan"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"engines": ("tpu",)}, "unknown engine tpu"),
        ({"precisions": ("int4",)}, "unknown precision int4"),
        ({"threads": (0,)}, r"threads \[0\] and batch sizes \[\] must all be 1 or more"),
        ({"output": "mlp.onnx"}, "the output mlp.onnx would replace the input"),
    ],
)
def test_plans_that_are_wrong(here: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        zoo.plan("mlp.onnx", **arguments)


def test_an_open_shape_asks_for_an_example(here: Path) -> None:
    io.save(model("(float[n,m] x) => (float[n,m] y) { y = Relu(x) }"), "open.onnx")
    with pytest.raises(RequestError, match=r"input x has the shape .*; give an example with --data FILE.npz"):
        zoo.plan("open.onnx")
    assert zoo.plan("open.onnx", data="c.npz", engines=("onnxruntime",))["inputs"] == [{"x": ["float32", [1, 8]]}]


def test_plan_a_zoo_model(trained: Path, rows: Path, tmp_path: Path) -> None:
    report = zoo.plan(
        trained,
        tmp_path / "m.plan",
        data=rows,
        batch_sizes=(16,),
        engines=("onnxruntime",),
        precisions=("int8", "fp32"),
    )
    assert {timing["precision"] for timing in report["timings"]} == {"int8", "fp32"}
    opened = zoo.pipeline(trained, engine="onnxruntime")
    batch = opened.preprocess(opened.example(16, rows))  # type: ignore[attr-defined]
    assert zoo.open_plan(tmp_path / "m.plan").run(batch).keys() == opened.predict(batch).keys()


@pytest.mark.parametrize(("text", "share"), [("0.5%", 0.005), ("0.01", 0.01), ("0", 0.0)])
def test_shares(text: str, share: float) -> None:
    assert options.Share().convert(text, None, None) == pytest.approx(share)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("7", 7)])
def test_durations(text: str, seconds: float) -> None:
    assert options.Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("option", "value"), [("--max-drop", "lots"), ("--max-drop", "-1%"), ("--time-budget", "soon")]
)
def test_what_is_no_share_or_time(here: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    code, _, err = call(capsys, "tune", "mlp.onnx", "--evaluation-data", "e.npz", "-o", "o.onnx", option, value)
    assert code == 2 and "is not a" in err and err.count("\n") == 1


def test_quantize_with_a_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(
        capsys, "quantize", "mlp.onnx", "--calibration-data", "c.npz", "-o", "int8.onnx", "--report", "r.json", "--json"
    )
    assert (code, err) == (0, "")
    report, said = json.loads(Path("r.json").read_text()), json.loads(out)
    assert [op["name"] for op in report["operators"]] == [op["name"] for op in said["operators"]] and report[
        "samples"
    ] == 64
    assert report["outputs"]["y"]["sqnr_db"] > 20
    code, _, err = call(
        capsys, "quantize", "mlp.onnx", "--calibration-data", "c.npz", "-o", "int8.onnx", "--report", "r.pdf"
    )
    assert code == 2 and "a report ends in .json or .html" in err
    zoo.calibrate("mlp.onnx", "c.npz", "t.json")
    code, _, err = call(capsys, "quantize", "mlp.onnx", "--table", "t.json", "-o", "int8.onnx", "--report", "r.html")
    assert code == 2 and "a report needs samples" in err


# --- batches and memory


@pytest.mark.parametrize("size", [1, 4])
def test_a_graph_that_computes_only_some_batch_size(here: Path, caplog: pytest.LogCaptureFixture, size: int) -> None:
    rng = np.random.default_rng(0)
    text = "(float[n,8] x) => (float[n,4] y) { h = MatMul(x, w) s = Reshape(h, t) r = Relu(s) y = MatMul(r, v) }"
    weights = {
        "w": rng.standard_normal((8, 16)).astype(np.float32),
        "v": rng.standard_normal((16, 4)).astype(np.float32),
    }
    io.save(model(text, t=np.array([size, 16]), **weights), "fixed.onnx")
    report = zoo.quantize("fixed.onnx", "int8.onnx", calibration_data="c.npz", search=True, report_path="r.json")
    assert f"fixed.onnx: the graph computes only batches of {size} (Reshape" in caplog.text
    assert report["recipe"]["search"] and json.loads(Path("r.json").read_text())["samples"] == 64
    zoo.calibrate("fixed.onnx", "c.npz", "t.json")
    tuned = zoo.tune("fixed.onnx", "e.npz", "tuned.onnx", calibration_data="c.npz", seconds=0.0, max_drop=1.0)
    assert tuned["met"] and tuned["environment"]["batch_size"] == size


@pytest.mark.parametrize(("count", "rows"), [(3, [0, 2, 4]), (7, range(7)), (70, range(7)), (None, range(7))])
def test_some_samples_of_a_file_are_spread_over_it(tmp_path: Path, count: int | None, rows: Sequence[int]) -> None:
    array = np.arange(14, dtype=np.float32).reshape(7, 2)
    np.savez(tmp_path / "x.npz", x=array)
    net = model("(float[n,2] x) => (float[n,2] y) { y = Relu(x) }")
    batches = samples.samples_of(net, tmp_path / "x.npz", count=count)
    assert batches.total == len(rows)
    np.testing.assert_array_equal(joined(list(batches))["x"], array[list(rows)])
    fixed = model("(float[2,2] x) => (float[2,2] y) { y = Relu(x) }")
    assert [length(batch) for batch in samples.samples_of(fixed, tmp_path / "x.npz", count=5)] == [2, 2]


def test_max_memory_reaches_the_calibration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("mlp.onnx", "--calibration-data", "c.npz", "-o")
    assert call(capsys, "quantize", *options, "a.onnx", "--max-memory", "20KB")[0] == 0
    assert call(capsys, "quantize", *options, "b.onnx")[0] == 0
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
    code, _, err = call(capsys, "quantize", *options, "c.onnx", "--max-memory", "lots")
    assert code == 2 and "the memory 'lots' is no size" in err


def test_an_output_may_lie_in_a_model_folder_but_replaces_nothing_there(trained: Path, rows: Path) -> None:
    with pytest.raises(RequestError, match="would replace the input"):
        zoo.tune(trained, str(rows), trained / "int8.onnx")
    output = trained / "tuned.onnx"
    for _ in range(2):  # a second search goes on from the first
        assert zoo.tune(trained, str(rows), output, max_drop=0.02, engine="onnxruntime", seconds=0.0)["path"] == str(
            output
        )
    for path in (output, output.with_suffix(".trials.jsonl")):
        path.unlink()


STATEFUL = """(float[batch,t] x, float[2,batch,3] state, int64 rate) => (float[batch,t] y) { y = Relu(x) }"""


def stateful() -> ir.Model:
    net = model(STATEFUL)
    net.graph.inputs[1].shape = ir.Shape([2, None, 3])
    net.graph.inputs[2].shape = ir.Shape([])
    return net


@pytest.mark.parametrize("state", [(5, 2, 1, 3), (5, 2, 3)])
def test_stacked_feeds_are_cut_into_their_own_shapes(tmp_path: Path, state: tuple[int, ...]) -> None:
    arrays = {"x": np.ones((5, 1, 7), np.float32), "state": np.ones(state, np.float32), "rate": np.arange(5)}
    np.savez(tmp_path / "s.npz", **arrays)
    feeds = samples.samples_of(stateful(), tmp_path / "s.npz")
    assert feeds.total == 5
    assert [{name: array.shape for name, array in feed.items()} for feed in feeds] == [
        {"x": (1, 7), "state": (2, 1, 3), "rate": ()}
    ] * 5
    assert [int(feed["rate"]) for feed in feeds] == [0, 1, 2, 3, 4]
    assert [int(feed["rate"]) for feed in samples.samples_of(stateful(), tmp_path / "s.npz", count=2)] == [0, 2]


def test_a_folder_of_npz_is_a_feed_a_file(tmp_path: Path) -> None:
    for i, (n, t) in enumerate([(1, 7), (3, 9)]):
        feed = {"x": np.ones((n, t), np.float32), "state": np.ones((2, n, 3), np.float32), "rate": np.array(16)}
        np.savez(tmp_path / f"{i}.npz", **feed)
    both = [tmp_path / "0.npz", tmp_path / "1.npz"]
    for data in (tmp_path, both):
        feeds = list(samples.samples_of(stateful(), data))
        assert [feed["x"].shape for feed in feeds] == [(1, 7), (3, 9)] and feeds[1]["state"].shape == (2, 3, 3)


def test_files_of_one_shape_are_joined_and_of_others_kept_apart(tmp_path: Path) -> None:
    net = model("(float[n,t] x) => (float[n,t] y) { y = Relu(x) }")
    for i, shape in enumerate([(2, 4), (3, 4), (2, 5)]):
        np.savez(tmp_path / f"{i}.npz", x=np.ones(shape, np.float32))
    paths = [tmp_path / f"{i}.npz" for i in range(3)]
    assert [batch["x"].shape for batch in samples.samples_of(net, paths[:2])] == [(5, 4)]
    assert [batch["x"].shape for batch in samples.samples_of(net, paths)] == [(2, 4), (3, 4), (2, 5)]
    judge, calibrating = samples.quality_metric_of(net, paths, None, 1)
    assert [batch["x"].shape for batch in calibrating] == [(2, 4)]
    assert judge.example["x"].shape == (3, 4) and judge(Twice(1), Twice(1.5)).drop == pytest.approx(0.5)
    assert [batch["x"].shape for batch in samples.examples_of(net, paths, [1, 3])] == [(1, 4), (3, 4)]
    np.savez(tmp_path / "2.npz", x=np.ones((2, 5), np.float32), label=np.zeros(2))
    with pytest.raises(RequestError, match="cannot be cut into batches, .* such samples are evaluated without label"):
        samples.quality_metric_of(net, paths, None, 1)


class Twice:
    """A session that multiplies, and says what shapes it saw."""

    def __init__(self, factor):
        self.factor = factor

    def run(self, batch):
        assert np.ndim(batch.get("rate", 0)) == 0
        return {"y": batch["x"] * self.factor, "state": np.float32(self.factor)}


def test_stateful_graphs_are_judged_and_timed_feed_by_feed(tmp_path: Path) -> None:
    for i, (count, width) in enumerate([(1, 7), (3, 9), (2, 7)]):
        np.savez(
            tmp_path / f"{i}.npz",
            x=np.ones((count, width), np.float32),
            state=np.zeros((2, count, 3), np.float32),
            rate=np.array(16000),
        )
    judge, calibrating = samples.quality_metric_of(stateful(), tmp_path, None, 1)
    assert [batch["x"].shape for batch in calibrating] == [(1, 7)] and judge.example["x"].shape == (3, 9)
    verdict = judge(Twice(1), Twice(1.1))
    assert verdict.drop == pytest.approx(0.1) and verdict.sqnr_db == pytest.approx(20, abs=0.1)
    judge, calibrating = samples.quality_metric_of(stateful(), tmp_path, tmp_path / "1.npz", 1)
    assert [batch["x"].shape for batch in calibrating] == [(3, 9)] and judge.example["x"].shape == (1, 7)
    assert [batch["state"].shape for batch in samples.examples_of(stateful(), tmp_path, [1, 4])] == [(2, 1, 3)]
    with pytest.raises(RequestError, match="found one sample"):
        samples.quality_metric_of(stateful(), tmp_path / "1.npz", None, 1)


@pytest.mark.parametrize(
    ("given", "wanted"), [(np.float64, "float"), (np.uint8, "float"), (np.int32, "int64"), (np.float16, "float")]
)
def test_other_dtypes_are_cast_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: type, wanted: str
) -> None:
    net = model(f"({wanted}[n,4] x) => ({wanted}[n,4] y) {{ y = Abs(x) }}")
    np.savez(tmp_path / "x.npz", x=np.arange(8).reshape(2, 4).astype(given))
    (batch,) = samples.samples_of(net, tmp_path / "x.npz")
    assert batch["x"].dtype == {"float": np.float32, "int64": np.int64}[wanted]
    assert batch["x"].ravel().tolist() == list(range(8))
    assert f"x is cast from {np.dtype(given)} to {batch['x'].dtype}" in caplog.text


@pytest.mark.parametrize(
    ("array", "wanted"),
    [
        (np.array([1e300]), "float"),
        (np.array([2**24 + 1]), "float"),
        (np.array([0.5]), "int64"),
        (np.array([2**40]), "int32"),
        (np.array([2**63], np.uint64), "int64"),
        (np.array([np.nan]), "int64"),
    ],
)
def test_a_cast_that_loses_values_is_refused(tmp_path: Path, array: np.ndarray, wanted: str) -> None:  # type: ignore[type-arg]
    np.savez(tmp_path / "x.npz", x=array)
    with pytest.raises(RequestError, match="which cannot hold its values"):
        samples.samples_of(model(f"({wanted}[n] x) => ({wanted}[n] y) {{ y = Abs(x) }}"), tmp_path / "x.npz")


def test_padding_behind_texts_is_cut_from_the_samples_of_a_calibration(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "(int64[b,t] input_ids, int64[b,t] attention_mask) => (float[b,t,32] y) { h = Gather(e, input_ids) y = MatMul(h, w) }"
    network = model(text, e=rng.normal(size=(9, 32)).astype(np.float32), w=rng.normal(size=(32, 32)).astype(np.float32))
    mask = (np.arange(6) < rng.integers(1, 6, (40, 1))).astype(np.int64)
    np.savez(tmp_path / "texts.npz", input_ids=rng.integers(1, 9, mask.shape) * mask, attention_mask=mask)
    opened = samples.Calibration(tmp_path / "texts.npz").samples(network)
    batches = list(opened)
    assert opened.total == sum(map(length, batches)) == 40 and all(batch["attention_mask"].all() for batch in batches)
    io.save(network, tmp_path / "text.onnx")
    options: dict[str, Any] = {"calibration_data": tmp_path / "texts.npz", "effort": "fast"}
    summary = zoo.quantize(str(tmp_path / "text.onnx"), str(tmp_path / "int8.onnx"), **options)["summary"]
    assert summary["many"] == 512 and summary["sqnr_db"] > 30
