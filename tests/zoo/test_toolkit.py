"""The verbs `tune` and `plan`: ONNX files with and without labels, zoo models, and what a person is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rewriting import model, run

import zoo
from pipelines import files, graph
from pipelines.errors import RequestError
from pipelines.plan import open_plan
from zoo import cli, toolkit

TEXT = "(float[n,8] x) => (float[n,4] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mlp.onnx, e.npz with labels that are the float model's, and c.npz."""
    rng = np.random.default_rng(0)
    made = model(TEXT, w=rng.standard_normal((8, 16)).astype(np.float32), v=rng.standard_normal((16, 4)).astype(np.float32))
    graph.save(made, tmp_path / "mlp.onnx")
    x = rng.standard_normal((200, 8)).astype(np.float32)
    np.savez(tmp_path / "e.npz", x=x, label=run(made, x=x)["y"].argmax(1))
    np.savez(tmp_path / "unlabelled.npz", x=x)
    np.savez(tmp_path / "c.npz", x=rng.standard_normal((64, 8)).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        cli.call(arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


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
    found = json.loads(out)
    assert found["met"] and found["metric"] == "top1" and found["best"]["metrics"]["fp32"] == 1.0
    assert files.sha256("int8.onnx") == found["best"]["sha256"] and len(Path("int8.trials.jsonl").read_text().splitlines()) > 5
    assert json.loads(Path("r.json").read_text())["trials"] == found["trials"]


def test_a_missed_goal_is_an_exit_code_and_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit.ArrayJudge, "__call__", lambda *_: toolkit.Verdict(0.25, 20.0))
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
    assert code == 1 and "auto" in out and Path("int8.onnx").is_file()
    assert err.count("\n") == 1 and "the goal is missed by 24.500%: the best model, auto, loses 25.000%" in err


def test_without_calibration_data_every_fifth_sample_calibrates(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    judge, samples, total = toolkit._arrays(graph.load("mlp.onnx"), "e.npz", None, 1)
    x = np.load("e.npz")["x"]
    np.testing.assert_array_equal(np.concatenate([each["x"] for each in samples()]), x[::5])
    assert total == 40 and "every fifth" in caplog.text
    assert isinstance(judge, toolkit.ArrayJudge) and len(judge._arrays["x"]) == 160


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"output": "int8.bin"}, "the result is an ONNX model, not int8.bin"),
        ({"output": "mlp.onnx"}, "the output mlp.onnx is the input mlp.onnx"),
        ({"output": "o.onnx", "evaluation_data": "none.npz"}, "cannot read none.npz"),
        ({"output": "o.onnx", "report_path": "r.txt"}, "a report ends in .json or .html"),
        ({"output": "o.onnx", "batch_size": 4096}, "found 200 samples; the batch size 4096 needs at least so many"),
    ],
)
def test_requests_that_are_wrong(here: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        zoo.tune("mlp.onnx", **{"evaluation_data": "e.npz", "calibration_data": "c.npz", **arguments})


def test_a_wrong_input_name(here: Path) -> None:
    np.savez("z.npz", z=np.zeros((4, 8), np.float32))
    with pytest.raises(RequestError, match=r"z.npz holds z; wanted the graph's inputs, x, and label if known"):
        zoo.tune("mlp.onnx", "z.npz", "o.onnx")


def test_tune_a_zoo_model_by_its_own_metric(trained: Path, rows: Path, tmp_path: Path) -> None:
    found = zoo.tune(trained, str(rows), tmp_path / "int8.onnx", max_drop=0.02, engine="onnxruntime", seconds=0.0, batch_size=64)
    assert found["metric"] == "auc" and found["met"] and len(found["trials"]) == 1
    exact = zoo.evaluate(trained, str(rows), engine="onnxruntime")["metrics"]["fp32"]["auc"]
    assert found["best"]["metrics"]["fp32"] == pytest.approx(exact, abs=1e-6)
    assert (trained / "int8.onnx").read_bytes() != b""


def test_plan_an_onnx_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "plan", "mlp.onnx", "--batch-size", "1,8", "--threads", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [each["batch_size"] for each in found["profiles"]] == [1, 8] and found["path"] == "mlp.plan"
    x = np.load("c.npz")["x"]
    np.testing.assert_allclose(open_plan("mlp.plan").run({"x": x})["y"], run(graph.load("mlp.onnx"), x=x)["y"], rtol=1e-4, atol=1e-5)


def test_plan_shows_what_was_chosen(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "plan", "mlp.onnx", "--engine", "onnxruntime", "-o", "other.plan")
    assert code == 0 and "chosen" in out and out.splitlines()[-1] == "other.plan"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"engines": ("tpu",)}, "unknown engine tpu"),
        ({"precisions": ("int4",)}, "unknown precision int4"),
        ({"threads": (0,)}, r"threads \[0\] and batch sizes \[\] must all be 1 or more"),
        ({"output": "mlp.onnx"}, "the output mlp.onnx is the input"),
    ],
)
def test_plans_that_are_wrong(here: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        zoo.plan("mlp.onnx", **arguments)


def test_an_open_shape_asks_for_an_example(here: Path) -> None:
    graph.save(model("(float[n,m] x) => (float[n,m] y) { y = Relu(x) }"), "open.onnx")
    with pytest.raises(RequestError, match=r"input x has the shape .*; give an example with --data FILE.npz"):
        zoo.plan("open.onnx")
    assert zoo.plan("open.onnx", data="c.npz", engines=("onnxruntime",))["inputs"] == [{"x": ["float32", [1, 8]]}]


def test_plan_a_zoo_model(trained: Path, rows: Path, tmp_path: Path) -> None:
    found = zoo.plan(trained, tmp_path / "m.plan", data=rows, batch_sizes=(16,), engines=("onnxruntime",), precisions=("int8", "fp32"))
    assert {each["precision"] for each in found["timings"]} == {"int8", "fp32"}
    opened = zoo.pipeline(trained, engine="onnxruntime")
    batch = opened.preprocess(opened.example(16, rows))  # type: ignore[attr-defined]
    assert zoo.open_plan(tmp_path / "m.plan").run(batch).keys() == opened.predict(batch).keys()


@pytest.mark.parametrize(("text", "share"), [("0.5%", 0.005), ("0.01", 0.01), ("0", 0.0)])
def test_shares(text: str, share: float) -> None:
    assert cli.Share().convert(text, None, None) == pytest.approx(share)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("20m", 1200), ("1.5h", 5400), ("7", 7)])
def test_durations(text: str, seconds: float) -> None:
    assert cli.Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize(("option", "value"), [("--max-drop", "lots"), ("--max-drop", "-1%"), ("--time-budget", "soon")])
def test_what_is_no_share_or_time(here: Path, capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    code, _, err = call(capsys, "tune", "mlp.onnx", "--evaluation-data", "e.npz", "-o", "o.onnx", option, value)
    assert code == 2 and "is not a" in err and err.count("\n") == 1


def test_quantize_with_a_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "quantize", "mlp.onnx", "--calibration-data", "c.npz", "-o", "int8.onnx", "--report", "r.json", "--json")
    assert (code, err) == (0, "")
    found, said = json.loads(Path("r.json").read_text()), json.loads(out)
    assert [each["name"] for each in found["operators"]] == [each["name"] for each in said["operators"]] and found["samples"] == 64
    assert found["outputs"]["y"]["sqnr_db"] > 20
    code, _, err = call(capsys, "quantize", "mlp.onnx", "--calibration-data", "c.npz", "-o", "int8.onnx", "--report", "r.pdf")
    assert code == 2 and "a report ends in .json or .html" in err
    zoo.calibrate("mlp.onnx", "c.npz", "t.json")
    code, _, err = call(capsys, "quantize", "mlp.onnx", "--table", "t.json", "-o", "int8.onnx", "--report", "r.html")
    assert code == 2 and "a report is measured on samples" in err
