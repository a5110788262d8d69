"""The commands on invalid files and folders, with a small graph and the shipped models."""

import gzip
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import model
from helpers.tiers import one_in

import zoo
from pipelines.analysis.quality_metric import MetricError
from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.engines import catalog
from pipelines.engines.native import images, validation
from pipelines.engines.openvino import child
from pipelines.graph import edit, io
from pipelines.kernels import extension
from pipelines.models.hub import Hub
from pipelines.models.record import RECORD
from pipelines.quantization.calibration import effort
from pipelines.rewrites import driver
from zoo import api
from zoo.api.samples import TaskMetric, raw_samples
from zoo.cli import app as cli

TEXT = "(float[n,8] x) => (float[n,2] y) { h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v) }"
NAMES = [name for name in zoo.names() if (zoo.SHIPPED / name / "sample.tsv.gz").is_file()]
FLOAT = ("fp32.onnx", "rewritten.onnx")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """mlp.onnx (whose bias is an Add of its own), half.onnx (the same, float16 weights) and s.npz."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float16).astype(np.float32) for name, shape in
               (("w", (8, 16)), ("b", (16,)), ("v", (16, 2)))}  # fmt: skip
    made = model(TEXT, **weights)
    io.save(made, tmp_path / "mlp.onnx")
    edit.compress_fp16(made, minimum=1)
    io.save(made, tmp_path / "half.onnx")
    x = rng.standard_normal((64, 8)) + 4  # rounded weights shift the means of channels, which correction finds
    np.savez(tmp_path / "s.npz", x=x.astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A trained folder to change."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


# --- ONNX files


def test_files_of_ones_own_are_timed_in_turn(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch-size", "1,4", "--rounds", "2", "--engine", "onnxruntime"]
    cli.call(["benchmark", "mlp.onnx", "half.onnx", *arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    rows = report["results"]
    assert [(row["precision"], row["batch_size"]) for row in rows] == [
        ("mlp.onnx", 1), ("half.onnx", 1), ("mlp.onnx", 4), ("half.onnx", 4),
    ]  # fmt: skip
    assert [row["bytes"] for row in rows[:2]] == [(here / name).stat().st_size for name in ("mlp.onnx", "half.onnx")]
    for first, second in (rows[:2], rows[2:]):
        assert first["speedup"] == 1.0
        ratio = second["samples_per_second"] / first["samples_per_second"]
        assert second["speedup"] == pytest.approx(ratio, abs=0.006)
    cli.call(["benchmark", "mlp.onnx", "--data", "s.npz", *arguments])
    assert "vs mlp.onnx" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mlp.onnx", "none.onnx"], "no ONNX model at none.onnx"),
        (["mlp.onnx", "s.npz"], "s.npz"),
        (["mlp.onnx", "other.onnx"], "other.onnx has the inputs z FLOAT; expected those of mlp.onnx, x FLOAT"),
        (["mlp.onnx", "--engine", "tpu"], "unknown or missing engine tpu"),
        (["mlp.onnx", "--batch-size", "0"], "must all be 1 or more"),
        (["mlp.onnx", "--scenario", "offline"], "--scenario requires a zoo model"),
        (["wide-deep-criteo", "mlp.onnx"], "wide-deep-criteo is a zoo model"),
    ],
)
def test_files_that_cannot_be_timed_get_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    io.save(model("(float[n,8] z) => (float[n,8] y) { y = Relu(z) }"), here / "other.onnx")
    with pytest.raises(SystemExit) as end:
        cli.call(["benchmark", *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2 and says in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["mlp.onnx", "half.onnx"])
def test_an_onnx_file_is_rewritten_before_it_is_quantized(here: Path, name: str) -> None:
    report = api.quantize(name, "int8.onnx", calibration_data="s.npz", correct=False)
    assert [(op["type"], op["precision"]) for op in report["operators"] if op["type"] != "Relu"] == [
        ("Gemm", "int8"),
        ("MatMul", "int8"),
    ]
    api.calibrate(name, "s.npz", "table.json", correct=False)
    api.quantize(name, "by_table.onnx", table="table.json")
    assert Path("by_table.onnx").read_bytes() == Path("int8.onnx").read_bytes()


def test_biases_are_corrected_on_samples_or_by_a_table_and_the_report_says_so(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, "CHEAP", 0)  # on more samples, no correction is better
    report = api.quantize("mlp.onnx", "int8.onnx", calibration_data="s.npz")
    assert "bias corrected in" in " ".join(op["reason"] for op in report["operators"])
    api.calibrate("mlp.onnx", "s.npz", "table.json")
    assert api.quantize("mlp.onnx", "by_table.onnx", table="table.json")["operators"] == report["operators"]
    assert Path("by_table.onnx").read_bytes() == Path("int8.onnx").read_bytes()
    api.quantize("mlp.onnx", "plain.onnx", table="table.json", correct=False)
    assert Path("plain.onnx").read_bytes() != Path("int8.onnx").read_bytes()
    api.quantize("mlp.onnx", "searched.onnx", calibration_data="s.npz", search=True)
    assert Path("searched.onnx").is_file()


def test_quantizing_what_rewrite_wrote_is_quantizing_the_file(here: Path) -> None:
    api.rewrite("half.onnx", "rewritten.onnx")
    api.calibrate("half.onnx", "s.npz", "table.json")
    api.quantize("half.onnx", "a.onnx", table="table.json")
    api.quantize("rewritten.onnx", "b.onnx", table="table.json")
    assert Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()


# --- outputs that are inputs


@pytest.mark.parametrize(
    ("verb", "arguments", "output"),
    [
        ("rewrite", ["mlp.onnx"], "mlp.onnx"),
        ("rewrite", ["mlp.onnx"], "linked.onnx"),
        ("calibrate", ["mlp.onnx", "s.npz"], "mlp.onnx"),
        ("calibrate", ["mlp.onnx", "s.npz"], "s.npz"),
        ("quantize", ["mlp.onnx", {"calibration_data": "s.npz"}], "mlp.onnx"),
        ("quantize", ["mlp.onnx", {"calibration_data": "s.npz"}], "s.npz"),
        ("quantize", ["mlp.onnx", {"table": "t.json"}], "t.json"),
    ],
)
def test_an_output_never_replaces_an_input(here: Path, verb: str, arguments: list[Any], output: str) -> None:
    api.calibrate("mlp.onnx", "s.npz", "t.json")
    os.link("mlp.onnx", "linked.onnx")
    before = contents(here)
    options = arguments.pop() if isinstance(arguments[-1], dict) else {}
    with pytest.raises(RequestError, match="would replace the input .*; choose another output path$") as caught:
        getattr(api, verb)(*arguments, output=output, **options)
    assert output in str(caught.value) and contents(here) == before


def test_scores_never_replace_the_rows_or_the_model(tmp_path: Path) -> None:
    folder = zoo.load(NAMES[0]).path
    rows = tmp_path / "rows.csv"
    shutil.copy(folder / "sample.tsv.gz", rows)
    (tmp_path / "link.csv").symlink_to(rows)
    before = rows.read_bytes()
    for inputs, output in ((rows, rows), ([str(rows)], tmp_path / "link.csv"), (rows, folder / "calibration.json")):
        with pytest.raises(RequestError, match="would replace the input"):
            zoo.run(NAMES[0], inputs, output)
    for output in ("rewritten.onnx", "fp16.onnx"):
        with pytest.raises(RequestError, match="would replace the input"):
            zoo.quantize(NAMES[0], folder / output)
    with pytest.raises(RequestError, match="would replace the input"):
        zoo.calibrate(NAMES[0], str(rows), rows)
    assert rows.read_bytes() == before


# --- calibration


def test_calibrating_a_shipped_model_says_what_to_give() -> None:
    with pytest.raises(RequestError, match="ships its calibration table, .* with --data FILE -o FILE$"):
        zoo.calibrate(NAMES[0])


def test_calibrating_without_samples_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no samples of its training data; give yours with --data FILE$"):
        zoo.calibrate(NAMES[0], output=tmp_path / "table.json")


@pytest.mark.parametrize("samples", [0, -5])
def test_calibration_needs_a_sample(here: Path, samples: int) -> None:
    for source, data in (("mlp.onnx", "s.npz"), (NAMES[0], str(zoo.SHIPPED / NAMES[0] / "sample.tsv.gz"))):
        with pytest.raises(RequestError, match=f"samples is {samples}; calibration needs at least 1"):
            zoo.calibrate(source, data, "table.json", samples=samples)
    assert not Path("table.json").exists()


def test_own_calibration_survives(copied: Path, rows: Path) -> None:
    zoo.calibrate(copied, str(rows), samples=100)
    own = (copied / "calibration.json").read_bytes()
    with pytest.raises(RequestError, match="zoo calibrate .*copy --data FILE --observer minmax"):
        zoo.build(copied, force=True)
    assert (copied / "calibration.json").read_bytes() == own and zoo.build(copied)["stages"]["int8.onnx"] == "made"
    zoo.calibrate(copied)  # on the samples of the training, by request
    assert (copied / "calibration.json").read_bytes() != own
    assert set(zoo.build(copied, force=True)["stages"].values()) == {"made"}


# --- recipes and records


def test_a_typing_error_leaves_a_folder_as_it_was(copied: Path, rows: Path) -> None:
    before = contents(copied)
    for observer in (None, "kl"):
        with pytest.raises(RequestError, match="hiden_0.* matches no operator"):
            zoo.quantize(copied, keep_float=["hiden_0"], observer=observer)
    assert contents(copied) == before and set(zoo.build(copied)["stages"].values()) == {"kept"}
    report = zoo.quantize(copied, observer="kl", reduced_range=True)
    assert (report["recipe"]["observer"], report["recipe"]["reduced_range"]) == ("kl", True)
    assert set(zoo.build(copied)["stages"].values()) == {"kept"}


@pytest.mark.parametrize("record", one_in(4, ['{"int8.onnx": 3}', '{"int8.on', "null", "[1]"]))
def test_a_damaged_record_is_no_traceback(tmp_path: Path, record: str) -> None:
    path = Path(shutil.copytree(zoo.load(NAMES[0]).path, tmp_path / "copy"))
    (path / RECORD).write_text(record)
    assert "built" not in zoo.info(path)
    made = zoo.build(path)["stages"]
    assert [made[name] for name in FLOAT] == ["made", "made"] and list(zoo.info(path)["built"]) == list(FLOAT)


def test_a_damaged_file_of_a_copied_folder_is_named(tmp_path: Path) -> None:
    path = Path(shutil.copytree(zoo.load(NAMES[0]).path, tmp_path / "copy"))
    (path / "int8.onnx").write_bytes((path / "int8.onnx").read_bytes()[:-1])
    with pytest.raises(RequestError, match=r"copy/int8\.onnx is not the file that its card lists \(size "):
        zoo.pipeline(path)


# --- bfloat16


needs_bf16 = pytest.mark.skipif(not machine.has_bf16(), reason="the CPU does not compute in bf16")


@pytest.mark.usefixtures("shared_home")
@needs_bf16
@pytest.mark.slow
def test_bf16_is_a_precision_like_others(tmp_path: Path) -> None:
    sample = zoo.SHIPPED / NAMES[0] / "sample.tsv.gz"
    lines = gzip.decompress(sample.read_bytes()).splitlines()[:2000]
    (tmp_path / "rows.tsv").write_bytes(b"\n".join(lines) + b"\n")
    rows = str(tmp_path / "rows.tsv")
    report = zoo.evaluate(NAMES[0], rows, precisions=("fp32", "int8", "bf16"), engine="openvino")
    assert list(report["metrics"]) == ["fp32", "int8", "bf16"] and list(report["others"]) == ["bf16"]
    assert 0 < report["others"]["bf16"]["difference"]["max_probability"] < 0.02
    assert report["difference"]["auc"] == report["metrics"]["int8"]["auc"] - report["metrics"]["fp32"]["auc"]
    two = zoo.evaluate(NAMES[0], rows, engine="openvino")
    assert "others" not in two and {key: two[key] for key in ("difference", "interval")} == {
        key: report[key] for key in ("difference", "interval")
    }
    said = zoo.run(NAMES[0], rows, tmp_path / "scores.csv", precision="bf16", threads=2)
    assert (said["engine"], said["precision"], said["rows"]) == ("openvino", "bf16", 2000)
    (row,) = zoo.benchmark(NAMES[0], precisions=("bf16",), batch_sizes=(8,), rounds=1)["results"]
    assert (row["engine"], row["precision"]) == ("openvino", "bf16")


@pytest.mark.usefixtures("shared_home")
def test_bf16_is_refused_where_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = str(zoo.SHIPPED / NAMES[0] / "sample.tsv.gz")
    requests = {
        ("run", sample): "onnxruntime",
        ("benchmark", "--batch-size", "8"): "native",
        ("evaluate", "--data", sample): "onnxruntime",
    }
    for (verb, *arguments), name in requests.items():
        with pytest.raises(SystemExit, match="2"):
            cli.call([verb, NAMES[0], *arguments, "--precision", "bf16", "--engine", name])
        assert (
            f"the engine {name} does not compute in bf16; choose openvino, or fp32 or int8" in capsys.readouterr().err
        )
    monkeypatch.setattr(machine, "has_bf16", lambda: False)
    for act in (
        lambda: zoo.pipeline(NAMES[0], "bf16"),
        lambda: zoo.benchmark(NAMES[0], precisions=("bf16",), batch_sizes=(8,)),
    ):
        with pytest.raises(RequestError, match="does not compute in bf16 .*; choose fp32 or int8$"):
            act()


def test_fp32_alone_compares_nothing() -> None:
    with pytest.raises(RequestError, match="found --precision fp32 alone, expected int8 or bf16"):
        zoo.evaluate(NAMES[0], "rows.tsv", precisions=("fp32",))


# --- shipped models


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_of_a_shipped_model_holds_its_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = zoo.download(name)
    held = {"card.json", *FLOAT, "int8.onnx"}
    assert held <= set(contents(path))
    monkeypatch.setattr(driver.Rewrite, "call", lambda *_: pytest.fail("made twice"))
    assert zoo.load(name).path == path
    assert [zoo.build(name)["stages"][stage] for stage in FLOAT] == ["kept", "kept"]


@pytest.mark.parametrize("name", NAMES)
def test_opening_a_shipped_model_makes_its_float_graphs(name: str) -> None:
    assert set(FLOAT) <= set(contents(zoo.load(name).path))


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_cache_that_cannot_be_written_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    path = Hub(zoo.SHIPPED).fetch(NAMES[0])

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    monkeypatch.setattr(io, "save", refuse)
    report = zoo.run(NAMES[0], str(path / "sample.tsv.gz"), tmp_path / "scores.csv", engine="onnxruntime")
    assert report["rows"] == 10_000 and not (path / "fp32.onnx").exists()
    with pytest.raises(RequestError, match="cannot write"):
        zoo.pipeline(NAMES[0], "fp32")


@pytest.mark.usefixtures("shared_home")
def test_the_record_of_a_shipped_model_is_shown() -> None:
    path = zoo.download(NAMES[0])
    assert zoo.info(NAMES[0])["built"] == json.loads((path / RECORD).read_text())


# --- tuning by a family's own metric


@pytest.fixture(scope="module")
def pairs(language: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 sentences with their translations."""
    return Path(language.write(tmp_path_factory.mktemp("pairs") / "pairs.tsv", 24, seed=9))


def test_a_ruined_translator_is_judged_worse(translator: Path, pairs: Path, tmp_path: Path) -> None:
    folder = zoo.load(translator)
    samples = next(iter(raw_samples(folder, str(pairs), "--calibration-data", 4)))
    measure = TaskMetric(folder, str(pairs), samples, batch_size=2)
    assert list(measure.example) == ["source"] and len(measure.example["source"]) == 2
    ruined = io.load(folder.path / "int8.onnx")
    for value in ruined.graph.initializers.values():
        if value.dtype == ir.DataType.INT8 and value.const_value is not None and value.const_value.size > 1:
            value.const_value = ir.tensor(-value.const_value.numpy(), name=value.name)
    models = (folder.path / "int8.onnx", io.save(ruined, tmp_path / "ruined.onnx"))
    for engine in measure.engines:
        fp32, good, bad = (measure.open(path, engine, 1) for path in (folder.ensure("rewritten.onnx"), *models))
        assert fp32.run(measure.example)["tokens"].shape[0] == 2
        near, far = measure(fp32, good), measure(fp32, bad)
        assert measure.name == "bleu" and far.metrics["fp32"] == near.metrics["fp32"] > 50
        assert abs(near.drop) < 0.1 and far.drop > 0.3
        assert far.drop == pytest.approx((far.metrics["fp32"] - far.metrics["int8"]) / 100)


def test_a_translator_is_tuned_by_bleu_and_misses_what_cannot_be_met(
    translator: Path, pairs: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"calibration_data": str(pairs), "engine": "onnxruntime", "seconds": 0.0}
    report = zoo.tune(translator, str(pairs), tmp_path / "int8.onnx", max_drop=0.2, **options)
    assert report["metric"] == "bleu" and report["met"] and report["best"]["metrics"]["fp32"] > 50
    report = zoo.tune(translator, str(pairs), tmp_path / "int8.onnx", max_drop=-1.0, **options)
    assert not report["met"] and report["missed_by"] == pytest.approx(report["best"]["drop"] + 1)


def test_evaluation_data_that_cannot_be_read_end_the_search(translator: Path, pairs: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("no translation beside it\n")
    folder = zoo.load(translator)
    measure = TaskMetric(folder, str(tmp_path / "one.txt"), next(iter(raw_samples(folder, str(pairs), "", 4))), 2)
    models = [measure.open(folder.ensure(name), "onnxruntime", 1) for name in ("rewritten.onnx", "int8.onnx")]
    with pytest.raises(MetricError, match=r"one\.txt, line 1: no TAB"):
        measure(*models)


@pytest.mark.parametrize("name", ["empty.tsv", "blank.tsv", "missing.tsv"])
def test_data_are_looked_at_before_a_model_is_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setattr(zoo, "load", lambda model: pytest.fail("the model was opened"))
    (tmp_path / "empty.tsv").touch()
    (tmp_path / "blank.tsv").write_text(" \n\n")
    data, message = str(tmp_path / name), f"found no (data in|file) .*{name}"
    commands = [
        lambda: zoo.evaluate("minilm-l6", data),
        lambda: zoo.finetune("minilm-l6", [data], tmp_path / "out"),
        lambda: zoo.calibrate("minilm-l6", data),
        lambda: zoo.quantize("minilm-l6", tmp_path / "out.onnx", calibration_data=data),
        lambda: zoo.tune("minilm-l6", data, tmp_path / "out.onnx"),
    ]
    for command in commands:
        with pytest.raises(RequestError, match=message):
            command()


@pytest.mark.usefixtures("shared_home")
def test_a_model_is_evaluated_on_the_sample_that_ships_with_it(translator: Path) -> None:
    report = zoo.evaluate("shop-clicks", engine="onnxruntime")
    assert report["data"] == ["sample.csv.gz"] and report["samples"] == 2000
    with pytest.raises(RequestError, match=r"ships no labelled sample; pass labelled data \(--data FILE\)"):
        zoo.evaluate(translator)


# --- the native kernels beside engines


@pytest.fixture
def cnn(here: Path) -> Path:
    """A folder with a small convolutional network, samples for it, and its int8 form."""
    weight, bias = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((8, 3, 3, 3), 8))
    text = """(float[n,3,16,16] x) => (float[n,8] y) {
        c = Conv <pads = [1,1,1,1]> (x, w, b)
        r = Relu(c)
        p = GlobalAveragePool(r)
        f = Flatten(p)
        y = Gemm <transB = 1> (f, v, b)
    }"""
    io.save(model(text, w=weight / 5, b=bias, v=weight[:, 0, :, :].reshape(8, 9)[:, :8]), here / "cnn.onnx")
    np.savez(here / "x.npz", x=np.random.default_rng(1).standard_normal((16, 3, 16, 16)).astype(np.float32))
    zoo.quantize("cnn.onnx", "int8.onnx", calibration_data="x.npz")
    return here


@pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
def test_the_native_kernels_are_timed_where_they_compute_a_file(cnn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = zoo.benchmark("cnn.onnx", ["int8.onnx"], rounds=2)
    native = [result["precision"] for result in timed["results"] if result["engine"] == "native"]
    assert native == ["int8.onnx"] and [result["speedup"] > 0 for result in timed["results"]]
    (failed,) = timed["failed"]
    assert failed.startswith("cnn.onnx: native: no layer has weights of 8 bits")
    for name, there in (("cnn.onnx", False), ("int8.onnx", True)):
        report = zoo.plan(name)
        assert ("native" in {timing["engine"] for timing in report["timings"]}) == there
        assert bool(report["failed"]) != there
        assert ("steps" in zoo.info(name)["native"]) == there
    cli.call(["plan", "int8.onnx"])
    with pytest.raises(RequestError, match=r"found the plan int8.plan, expected a model; run: zoo plan MODEL -o int8"):
        zoo.plan("int8.plan")
    assert re.search(r"batch 1: \w+, \d\.\d\dx \w+", capsys.readouterr().out)
    with pytest.raises(RequestError, match=r"cnn.onnx: native: no layer has weights of 8 bits"):
        zoo.benchmark("cnn.onnx", engines=["native"])
    summary = zoo.quantize("cnn.onnx", "again.onnx", calibration_data="x.npz")["summary"]
    assert "native" in summary["speed"]


@pytest.mark.skipif(not extension.isas(), reason="there are no kernels")
def test_quantizing_packs_and_validates_the_file_for_its_first_use(cnn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_FAULTS", {})
    made = zoo.quantize("cnn.onnx", "again.onnx", calibration_data="x.npz")["summary"]["prepared"]
    monkeypatch.setattr(validation, "_FAULTS", {})  # as in another process
    monkeypatch.setattr(images, "store", lambda *_, **__: pytest.fail("packed at its first use"))
    monkeypatch.setattr(child, "probe", lambda _: pytest.fail("validated at its first use"))
    with np.load("x.npz") as samples:
        batch = {"x": samples["x"][:1]}
    expected = catalog.load("again.onnx", "native").run(batch)
    monkeypatch.setenv("ZOO_HOME", str(cnn.parent / "other"))  # on another machine, to which both files are copied
    (cnn.parent / "copied").mkdir()
    path, _ = (Path(shutil.copy(name, cnn.parent / "copied")) for name in ("again.onnx", made))
    np.testing.assert_equal(catalog.load(path, "native").run(batch), expected)
    assert not (cnn.parent / "other").exists()
    with pytest.raises(RequestError, match=r"is the native engine's program of again\.onnx; run: zoo info again\.onnx"):
        zoo.info(made)
