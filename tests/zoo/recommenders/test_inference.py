"""Build, inference, evaluation and benchmark of Wide & Deep: a small model, and the shipped one."""

import contextlib
import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewriting import needs_vnni

import zoo
from pipelines.core.errors import RequestError
from pipelines.engines import catalog, quickest
from pipelines.engines.catalog import load
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.quickest import Option
from pipelines.engines.session import Session
from pipelines.engines.stock import STOCK
from pipelines.engines.timing import Choice
from pipelines.kernels import extension
from pipelines.models import pipeline
from zoo.recommenders import inference as scoring
from zoo.recommenders.data import features
from zoo.recommenders.data.features import Features

NAME = "wide-deep-criteo"


def read_scores(path: Path) -> np.ndarray:
    return np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)


def test_the_whole_road_leaves_a_file_at_every_station(trained: Path) -> None:
    for name in (
        "model.pt",
        "fp32.onnx",
        "rewritten.onnx",
        "calibration.json",
        "int8.onnx",
        "quantization.json",
        "card.json",
    ):
        assert (trained / name).is_file(), name
    report = json.loads((trained / "quantization.json").read_text())
    linear = [op for op in report["operators"] if op["type"] in ("Gemm", "MatMul")]
    assert [op["precision"] for op in linear] == ["int8"] * 3
    assert all(op["reason"] for op in report["operators"] if op["precision"] == "float")
    fired = {
        graph_pass["name"]: graph_pass["fired"]
        for graph_pass in json.loads((trained / "build.json").read_text())["rewritten.onnx"]["passes"]
    }
    assert fired["FuseParallelEmbedding"] == fired["FuseParallelSum"] == fired["EqualizeConcat"] == 1
    assert fired["FuseLinear"] == 0


@pytest.mark.parametrize("engine", STOCK)
def test_the_int8_graph_runs_without_float_gemm_or_requantization_in_float(
    trained: Path, rows: Path, engine: str
) -> None:
    opened = zoo.pipeline(trained, engine=engine)
    executed = load(trained / "int8.onnx", engine).executed(opened.preprocess(opened.example(512, rows)))
    gemms = [node for node in executed if any(word in node.type for word in ("Gemm", "MatMul", "FullyConnected"))]
    assert len(gemms) == 3
    assert {node.precision for node in gemms} == {"u8"}
    if engine == "onnxruntime":  # the only quantize step left is that of the 13 numbers
        assert [node.type for node in executed].count("QuantizeLinear") == 1
        assert "DequantizeLinear" not in [node.type for node in executed]


def test_both_engines_and_precisions_agree(trained: Path, rows: Path) -> None:
    opened = zoo.pipeline(trained, precision="fp32", engine="onnxruntime")
    batch = opened.preprocess(opened.example(300, rows))
    reference = opened.predict(batch)["probability"]
    for precision, tolerance in (("fp32", 1e-5), ("int8", 0.01)):
        for engine in STOCK:
            scores = zoo.pipeline(trained, precision=precision, engine=engine, batch_size=128).predict(batch)[
                "probability"
            ]
            assert scores.shape == (300, 1)
            assert np.abs(scores - reference).max() < tolerance


def test_run_keeps_the_row_order_and_equals_the_call(trained: Path, rows: Path, tmp_path: Path) -> None:
    lines = rows.read_bytes().splitlines()
    report = zoo.run(trained, str(rows), tmp_path / "scores.csv", engine="onnxruntime", batch_size=100)
    assert report["rows"] == len(lines)
    scores = read_scores(tmp_path / "scores.csv")
    assert scores[:, 0].tolist() == list(range(len(lines)))
    called = zoo.pipeline(trained, engine="onnxruntime")(lines)
    assert np.allclose(scores[:, 1], [result["probability"] for result in called], atol=1e-6)


def test_only_a_path_names_a_file_to_the_pipeline(trained: Path, rows: Path) -> None:
    opened = zoo.pipeline(trained, engine="onnxruntime")
    lines = rows.read_text().splitlines()[:3]
    assert opened(lines) == opened(rows)[:3] == opened([rows])[:3]
    assert opened(lines[0]) == opened(lines[:1])
    for raw in (str(rows), [str(rows)], [rows, str(rows)], np.array([str(rows)]), "-"):
        with pytest.raises(RequestError, match=r"found the text .*; expected rows, or pathlib.Path"):
            opened(raw)


def test_run_writes_parquet_and_gzip_and_reads_gzip_and_unlabelled_rows(
    trained: Path, rows: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as parquet

    unlabelled = tmp_path / "rows.gz"
    unlabelled.write_bytes(
        gzip.compress(b"".join(line.partition(b"\t")[2] for line in rows.read_bytes().splitlines(keepends=True)))
    )
    zoo.run(trained, str(rows), tmp_path / "a.csv.gz", engine="onnxruntime")
    zoo.run(trained, str(unlabelled), tmp_path / "b.parquet", engine="onnxruntime")
    table = parquet.read_table(tmp_path / "b.parquet")
    assert table.column_names == ["row", "probability"]
    assert np.allclose(read_scores(tmp_path / "a.csv.gz")[:, 1], table["probability"].to_numpy(), atol=1e-6)


def test_skipped_rows_are_counted_and_the_others_keep_their_position(trained: Path, rows: Path, tmp_path: Path) -> None:
    lines = rows.read_bytes().splitlines()[:10]
    lines[3] = b"one\tcolumn\ttoo\tfew"
    lines[7] = lines[7].replace(b"\t", b"\tx", 1)
    (tmp_path / "rows.tsv").write_bytes(b"\n".join(lines))
    with pytest.raises(RequestError, match=r"rows\.tsv:4"):
        zoo.run(trained, str(tmp_path / "rows.tsv"), tmp_path / "scores.csv")
    assert not (tmp_path / "scores.csv").exists()
    report = zoo.run(trained, str(tmp_path / "rows.tsv"), tmp_path / "scores.csv", on_error="skip")
    assert (report["rows"], report["skipped"]) == (8, 2)
    assert read_scores(tmp_path / "scores.csv")[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 8, 9]


def test_evaluate_gives_the_keys_that_the_house_promises(trained: Path, rows: Path) -> None:
    report = zoo.evaluate(trained, str(rows), engine="onnxruntime")
    assert {"model", "data", "samples", "metrics", "difference", "environment"} <= set(report)
    assert (
        set(report["metrics"]["fp32"])
        == set(report["metrics"]["int8"])
        == {"auc", "logloss", "accuracy", "calibration_error"}
    )
    assert {"auc", "logloss", "accuracy", "max_probability"} <= set(report["difference"])
    assert report["samples"] == 1500
    assert report["difference"]["max_probability"] < 0.01
    assert report["difference"]["auc"] == pytest.approx(
        report["metrics"]["int8"]["auc"] - report["metrics"]["fp32"]["auc"]
    )


def test_evaluate_refuses_rows_without_labels(trained: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(
        b"".join(line.partition(b"\t")[2] for line in rows.read_bytes().splitlines(keepends=True))
    )
    with pytest.raises(RequestError, match="label"):
        zoo.evaluate(trained, str(tmp_path / "rows.tsv"))


def test_wrong_arrays_are_refused_before_the_engine_sees_them(trained: Path, rows: Path) -> None:
    opened = zoo.pipeline(trained, engine="onnxruntime")
    batch = opened.preprocess(opened.example(4, rows))
    for name, array, message in [
        ("ids", batch["ids"] + 100, "found id .* in row 0, column 0; expected 0 to 99"),
        ("ids", batch["ids"] - 100, "found id -"),
        ("ids", batch["ids"].astype(np.int64), "int32"),
        ("ids", batch["ids"][:, :-1], "26"),
        ("numbers", batch["numbers"][:2], "same number"),
        ("numbers", batch["numbers"].astype(np.float64), "float32"),
    ]:
        with pytest.raises(RequestError, match=message):
            opened.predict({**batch, name: array})
    with pytest.raises(RequestError):
        opened.predict({name: array[:0] for name, array in batch.items()})


def test_finetune_starts_from_the_model_and_its_folder_serves_like_any(
    trained: Path, rows: Path, tmp_path: Path
) -> None:
    settings = {"epochs": "1", "hidden": "64,32", "embedding_size": "8", "buckets": "100"}
    zoo.finetune(trained, str(rows), tmp_path / "tuned", settings=settings)
    assert zoo.run(tmp_path / "tuned", str(rows), tmp_path / "scores.csv")["rows"] == 1500
    before = zoo.evaluate(trained, str(rows), engine="onnxruntime")["metrics"]["fp32"]
    after = zoo.evaluate(tmp_path / "tuned", str(rows), engine="onnxruntime")["metrics"]["fp32"]
    assert after["logloss"] < before["logloss"]


def test_a_stage_is_made_again_when_what_it_was_made_from_changed(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    assert set(zoo.build(folder)["stages"].values()) == {"kept"}
    zoo.calibrate(folder, observer="kl")
    assert zoo.build(folder)["stages"] == {
        "fp32.onnx": "kept", "rewritten.onnx": "kept", "calibration.json": "kept", "int8.onnx": "made",
    }  # fmt: skip
    zoo.quantize(folder, keep_float=[r"deep\.6.*"])
    precisions = {
        op["name"]: op["precision"] for op in json.loads((folder / "quantization.json").read_text())["operators"]
    }
    assert [precision for name, precision in precisions.items() if name.startswith("deep.6")] == ["float"]
    (folder / "rewritten.onnx").unlink()
    assert zoo.build(folder)["stages"]["rewritten.onnx"] == "made"


@pytest.mark.parametrize("engine", ["onnxruntime", "native"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_wrong_id_is_named_by_its_row_in_the_whole_batch(
    trained: Path, rows: Path, engine: str, threads: int
) -> None:
    if engine == "native" and not extension.isas():
        pytest.skip(extension.missing())
    opened = zoo.pipeline(trained, engine=engine, threads=threads, batch_size=256)
    batch = opened.preprocess(opened.example(1000, rows))
    batch["ids"][900, 3] = 5000
    with pytest.raises(RequestError, match="^found id 5000 in row 900, column 3; expected 0 to 99$"):
        opened.predict(batch)


def test_a_remembered_engine_that_cannot_be_opened_now_gives_way(
    trained: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose(digest: str, candidates: dict[str, Any], *rest: Any, **options: Any) -> Any:
        name = "native" if "native" in candidates else "onnxruntime"
        return Choice(name, 1, 8, {}, "")

    def fails() -> Session:
        raise RequestError("cannot write it")

    monkeypatch.setattr(quickest, "choose", choose)
    monkeypatch.setattr(pipeline.extension, "isas", lambda: ["portable"])
    monkeypatch.setattr(catalog, "native_options", lambda *_: {"native": Option(fails)})
    opened = zoo.pipeline(trained)
    assert len(opened(opened.example(8, rows))) == 8 and opened.engine == "onnxruntime"
    assert "the engine native is left out: cannot write it" in caplog.text


def test_benchmark_gives_the_keys_that_the_house_promises(trained: Path, rows: Path) -> None:
    report = zoo.benchmark(trained, data=rows, batch_sizes=[8], rounds=2)
    assert {"model", "results", "environment"} <= set(report)
    both = {(engine, precision) for engine in STOCK for precision in ("fp32", "int8")}
    assert {(timing["engine"], timing["precision"]) for timing in report["results"]} == both | (
        {("native", "int8")} if extension.isas() else set()
    )
    for result in report["results"]:
        assert {
            "batch_size",
            "threads",
            "instances",
            "samples_per_second",
            "latency_ms",
            "split_ms",
            "memory_mb",
        } <= set(result)
        assert set(result["latency_ms"]) == {"p50", "p95", "p99"}
        assert set(result["split_ms"]) == {"preprocess", "model", "postprocess"}
        assert 20 < result["memory_mb"] < 2000


def test_running_int8_loads_neither_tensorflow_nor_torch(trained: Path, rows: Path) -> None:
    code = "import sys, zoo; zoo.run(sys.argv[1], sys.argv[2], sys.argv[3]); print(*sys.modules)"
    target = rows.parent / "modules.csv"
    done = subprocess.run(
        [sys.executable, "-c", code, trained, rows, target], capture_output=True, text=True, check=True
    )
    assert not {"tensorflow", "torch", "keras", "datasets", "tf2onnx"} & set(done.stdout.split())


@pytest.mark.parametrize("threads", ["1", "2"])
def test_interrupting_a_run_leaves_nothing(trained: Path, rows: Path, tmp_path: Path, threads: str) -> None:
    """The input is a pipe that never ends, so the run is in the middle when the signal comes."""
    pipe = tmp_path / "rows.pipe"
    os.mkfifo(pipe)
    target = tmp_path / "out" / "scores.csv"
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "zoo.cli.app",
        "run",
        trained,
        pipe,
        "-o",
        target,
        "--threads",
        threads,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with pipe.open("wb") as feed:
        feed.write(rows.read_bytes())
        feed.flush()
        for _ in range(200):
            if target.parent.is_dir() and any(target.parent.iterdir()):
                break
            time.sleep(0.1)
        assert any(target.parent.iterdir()), "the run has opened its temporary file"
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler shows where it hangs
            pytest.fail(process.communicate()[1])
    assert process.returncode == 130
    assert said.strip().splitlines()[-1] == "zoo: interrupted"
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("engine", STOCK)
def test_several_threads_write_the_same_file(trained: Path, rows: Path, tmp_path: Path, engine: str) -> None:
    (tmp_path / "rows.tsv").write_bytes(rows.read_bytes() * 9)  # some pieces of work
    reports = [
        zoo.run(
            trained,
            str(tmp_path / "rows.tsv"),
            tmp_path / f"{threads}.csv",
            engine=engine,
            threads=threads,
            batch_size=500,
        )
        for threads in (1, 2, 5)
    ]
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes() == (tmp_path / "5.csv").read_bytes()
    for key in ("rows", "clicks", "expected_clicks", "engine"):
        assert len({summary[key] for summary in reports}) == 1
    for report in reports:
        assert list(report["split_us"]) == ["read", "parse", "model", "write", "wall"]
        assert all(value >= 0 for value in report["split_us"].values())
        assert report["split_us"]["wall"] == pytest.approx(1e6 / report["rows_per_second"], rel=0.01, abs=0.001)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stage", ["read", "encode", "model", "write"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RequestError, OSError])
def test_whatever_goes_wrong_ends_all_threads(
    trained: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    stage: str,
    kind: type[BaseException],
) -> None:
    """Whichever stage fails, on its third piece of work, its exception arrives, no thread stays and no file."""
    (tmp_path / "rows.tsv").write_bytes(rows.read_bytes() * 9)
    opened = zoo.pipeline(trained, engine="onnxruntime", threads=threads, batch_size=500)
    places = {
        "read": (features, "read_lines", "rows"),
        "encode": (Features, "encode", None),
        "model": (OnnxRuntimeSession, "run", None),
        "write": (scoring, "writing", "context"),
    }
    owner, name, kind_of = places[stage]
    calls = itertools.count()

    def fail(*_: object) -> None:
        if next(calls) == (2 if stage != "model" else 20):
            raise kind("it went wrong")

    original = getattr(owner, name)

    def failing(*arguments: object, **options: object) -> object:
        if kind_of == "rows":
            return (batch for batch in original(*arguments, **options) if fail() is None)
        if kind_of == "context":
            return _wrapped(original(*arguments, **options), fail)
        fail()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, failing)
    before = set(threading.enumerate())
    with pytest.raises(kind, match="it went wrong"):
        opened.run(str(tmp_path / "rows.tsv"), tmp_path / "out" / "scores.csv")
    assert set(threading.enumerate()) <= before
    assert list((tmp_path / "out").iterdir()) == []


@contextlib.contextmanager
def _wrapped(writing: Any, before: Callable[[], None]) -> Iterator[Callable[[Any], None]]:
    with writing as write:
        yield lambda rows: (before(), write(rows))[1]


def test_the_shipped_model_scores_its_sample_and_int8_stays_close_to_fp32(tmp_path: Path) -> None:
    folder = zoo.load(NAME)
    sample = str(folder.path / "sample.tsv.gz")
    for precision in ("fp32", "int8"):
        zoo.run(NAME, sample, tmp_path / f"{precision}.csv", precision=precision)
    fp32, int8 = (read_scores(tmp_path / f"{precision}.csv")[:, 1] for precision in ("fp32", "int8"))
    assert len(fp32) == 10_000
    assert np.abs(fp32 - int8).max() <= 0.01
    assert fp32.std() > 0.05


@pytest.mark.data
def test_the_shipped_model_on_real_rows(shared: Path) -> None:
    report = zoo.evaluate(NAME, str(shared / "data" / "criteo" / "criteo_10390.tsv"))
    assert report["difference"]["max_probability"] <= 0.01
    assert abs(report["difference"]["auc"]) <= 0.0005
    assert report["difference"]["accuracy"] > -0.002
    assert report["metrics"]["int8"]["logloss"] <= 1.001 * report["metrics"]["fp32"]["logloss"]


@needs_vnni
@pytest.mark.slow
def test_int8_is_at_least_three_times_as_fast_at_batch_512() -> None:
    results = zoo.benchmark(NAME, batch_sizes=[512], rounds=9)["results"]
    speed = {(result["engine"], result["precision"]): result["samples_per_second"] for result in results}
    # the bounds are those of the VNNI CPUs that were measured, less what a busy machine takes
    assert speed["onnxruntime", "int8"] >= 2.7 * speed["onnxruntime", "fp32"]
    assert speed["openvino", "int8"] >= 3.0 * speed["openvino", "fp32"]


def test_a_cpu_without_vnni_is_said_at_load(
    trained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pipelines.core import machine

    monkeypatch.setattr(machine, "has_vnni", lambda: False)
    zoo.pipeline(trained, precision="fp32", engine="onnxruntime")
    assert caplog.text == ""
    zoo.pipeline(trained, engine="onnxruntime")
    assert "--reduced-range" in caplog.text


def test_a_benchmark_reads_its_rows_as_every_verb_does(trained: Path, rows: Path, tmp_path: Path) -> None:
    opened = zoo.pipeline(trained, engine="onnxruntime")
    packed = tmp_path / "packed"  # gzip is told by content, not by name
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    assert opened.example(2000, packed) == [*rows.read_bytes().splitlines(), *rows.read_bytes().splitlines()[:500]]
    for content, message in (
        (gzip.compress(rows.read_bytes())[:-2000], "cut short"),
        (b"", "empty"),
        (b"x" * (20 << 20), "MB"),
    ):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(RequestError, match=message):
            opened.example(2000, tmp_path / "bad")
    with pytest.raises(RequestError, match="no file"):
        opened.example(5, tmp_path / "nothing.tsv")
    with pytest.raises(RequestError, match="--data"):
        opened.example(5)


def test_finetuning_keeps_the_sizes_of_the_model(trained: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fine-tuning keeps that of the model"):
        zoo.finetune(trained, str(rows), tmp_path / "tuned", settings={"hidden": "7,7"})
    assert not (tmp_path / "tuned").exists()


def test_calibration_counts_the_rows_it_leaves_out(
    trained: Path, rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.tsv").write_bytes(b"\n".join([b"no row", *rows.read_bytes().splitlines()[:20]]))
    report = zoo.calibrate(trained, str(tmp_path / "rows.tsv"), tmp_path / "table.json", on_error="skip")
    assert report["samples"] == 20
    assert "1 row left out" in caplog.text
