"""Evaluation of image classifiers: against a plain loop, archives, published weights; and the benchmark of a scenario, accuracy first."""

import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.color_networks import NAMES, everything, failure, make_folder

import zoo
from pipelines.core.errors import RequestError
from zoo.cli import app as cli
from zoo.vision import metrics
from zoo.vision.inference import ImagePipeline
from zoo.vision.timed_evaluation import STEPS


def plainly(opened: Any, paths: list[Path], labels: list[int]) -> dict[str, float]:
    logits = [opened.predict(opened.preprocess(path))["logits"][0] for path in paths]
    orders = [np.argsort(-row, kind="stable").tolist() for row in logits]
    return {
        f"top{k}": float(np.mean([y in order[:k] for order, y in zip(orders, labels, strict=True)])) for k in (1, 5)
    }


def test_evaluation_is_what_a_plain_loop_finds(folder: Path, photos: Path, tmp_path: Path) -> None:
    """Labels are wrong here and there, so that the figures are no round ones."""
    paths = everything(photos)
    labels = [(NAMES.index(path.parent.name) + (index % 3 == 0) * index) % 7 for index, path in enumerate(paths)]
    for path in paths:
        shutil.copy(path, tmp_path / f"{path.parent.name}{path.name}")
    named = [f"{path.parent.name}{path.name}" for path in paths]
    reports = []
    for column in (labels, [NAMES[label] for label in labels]):
        (tmp_path / "labels.csv").write_text(
            "file,label\n" + "".join(f"{n},{y}\n" for n, y in zip(named, column, strict=True))
        )
        reports.append(zoo.evaluate(folder, tmp_path, engine="onnxruntime", batch_size=4))
    assert reports[0]["metrics"] == reports[1]["metrics"]
    assert reports[0]["environment"]["batch_size"] == 4 and reports[0]["samples"] == 35
    for precision in ("fp32", "int8"):
        opened = zoo.pipeline(folder, precision, "onnxruntime")
        assert reports[0]["metrics"][precision] == pytest.approx(plainly(opened, paths, labels))
    assert set(reports[0]["difference"]) == {"top1", "top5", "agreement"} <= reports[0]["interval"].keys()
    assert reports[0]["difference"]["agreement"] == 1


def test_evaluation_reads_archives_and_leaves_out_what_is_broken(
    folder: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"x")
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(photos / "blue", "train/red")
        archive.add(photos / "red", "test/red")
        archive.add(photos / "green" / "0.jpg", "test/red/z.jpg")
        archive.add(tmp_path / "bad.jpg", "test/red/00.jpg")
    with pytest.raises(RequestError, match=r"00\.jpg is no image"):
        zoo.evaluate(folder, tmp_path / "data.tar.gz", engine="onnxruntime")
    report = zoo.evaluate(folder, [tmp_path / "data.tar.gz"], engine="onnxruntime", on_error="skip")
    assert (report["samples"], report["skipped"]) == (6, 1)
    assert report["metrics"]["fp32"]["top1"] == pytest.approx(5 / 6)
    assert "1 of 7 images could not be read" in caplog.text


def test_labels_count_without_the_background_and_unknown_ones_are_named(
    folder: Path, photos: Path, tmp_path: Path
) -> None:
    shifted = zoo.pipeline(
        make_folder(tmp_path / "shifted", ["background", *NAMES], classes=8, background="class 0 is none of them"),
        "fp32",
        "onnxruntime",
    )
    assert isinstance(shifted, ImagePipeline)
    assert (
        metrics.evaluate({"fp32": shifted}, photos)["metrics"]["fp32"]["top1"] == 1
    )  # as many labels as classes: in sorted order
    (tmp_path / "some").mkdir()
    shutil.copy(photos / "red" / "0.jpg", tmp_path / "some" / "a.jpg")
    for label, said in (
        ("5", ""),
        ("7", "1 of the 1 labels are no class of colors: 7; it numbers its classes 0 to 6"),
        ("red", "red; it"),
    ):
        (tmp_path / "some" / "labels.csv").write_text(f"file,label\na.jpg,{label}\n")
        if said:
            with pytest.raises(RequestError, match=said):
                metrics.find_labelled(shifted, tmp_path / "some")
        else:
            assert metrics.find_labelled(shifted, tmp_path / "some")[1].tolist() == [6]
    shutil.copytree(photos / "red", tmp_path / "odd" / "crimson")
    shutil.copytree(photos / "red", tmp_path / "odd" / "red")
    with pytest.raises(
        RequestError, match=r"1 of the 2 labels are no class of colors: crimson; it names blue, cyan, green, \.\.\."
    ):
        zoo.evaluate(folder, tmp_path / "odd", engine="onnxruntime")


@pytest.mark.data
@pytest.mark.parametrize(
    "name, top1, top5", [("mobilenet-v1-imagenet", 0.8, 0.938), ("mobilenet-v2-imagenet", 0.848, 0.972)]
)
def test_published_weights_are_as_good_as_they_should_be(
    name: str, top1: float, top5: float, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the files of photos, with numbers for labels, and for one of the networks a background."""
    for library in ("torch", "tf2onnx"):
        pytest.importorskip(library, reason="published weights are frozen with the train extra")
    monkeypatch.setenv("ZOO_MIRROR", str(shared / "weights"))
    opened = zoo.pipeline(name, "fp32", "onnxruntime")
    assert isinstance(opened, ImagePipeline)
    report = metrics.evaluate({"fp32": opened}, shared / "data" / "imagenet" / "nips17")
    assert report["metrics"]["fp32"] == pytest.approx({"top1": top1, "top5": top5}, abs=0.005)


# --- the benchmark of a scenario


def test_the_harness_judges_then_times(folder: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "engines": ["onnxruntime"],
        "scenario": "single-stream",
        "min_top1": 0.9,
        "count": 12,
        "price_per_hour": 3.6,
    }
    report = zoo.benchmark(folder, data=photos, **options)
    assert (report["model"], report["samples"], report["images"]) == ("colors", 35, 12)
    assert [(row["precision"], row["engine"]) for row in report["results"]] == [
        ("fp32", "onnxruntime"),
        ("int8", "onnxruntime"),
    ]
    for result in report["results"]:
        assert result["top1"] == 1
        assert result["latency_ms"].keys() == {"mean", "p50", "p90", "p99"}
        assert result["latency_ms"]["p50"] <= result["latency_ms"]["p90"] <= result["latency_ms"]["p99"]
        assert tuple(result["split_ms"]) == STEPS
        assert sum(result["split_ms"].values()) == pytest.approx(result["latency_ms"]["mean"], abs=1e-3)
        assert result["offline"]["batch_size"] == max(
            (1, 4, 16), key=lambda size: result["offline"]["by_batch"][str(size)]
        )
        assert result["memory_mb"] > 20 and 0 < result["model_mb"] < 20
        assert result["cost_per_million"] == pytest.approx(1000 / result["offline"]["images_per_second"], rel=1e-3)
    cli.call(["benchmark", str(folder), "--data", str(photos), "--scenario", "offline", "--precision", "int8", "--engine", "onnxruntime",
              "--count", "5"])  # fmt: skip
    out = capsys.readouterr().out
    assert "100.000%" in out and "5 images timed, 35 evaluated" in out


def test_the_harness_times_the_native_kernels_of_int8_alone(folder: Path, photos: Path) -> None:
    report = zoo.benchmark(folder, data=photos, engines=["onnxruntime", "native"], scenario="offline", count=4)
    assert [(row["precision"], row["engine"]) for row in report["results"]] == [
        ("fp32", "onnxruntime"),
        ("int8", "onnxruntime"),
        ("int8", "native"),
    ]
    assert report["results"][2]["model_mb"] == report["results"][1]["model_mb"]


def test_the_harness_times_nothing_that_is_not_good_enough(
    folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.vision.timed_evaluation._offline", lambda *_: pytest.fail("timed"))
    shutil.copytree(photos / "red", tmp_path / "wrong" / "blue")
    (tmp_path / "loose").mkdir()
    shutil.copy(photos / "red" / "0.jpg", tmp_path / "loose")
    command = ["benchmark", folder, "--engine", "onnxruntime", "--precision", "int8"]
    for wrong, code, said in (
        (
            ["--data", tmp_path / "wrong", "--scenario", "offline", "--min-top1", "93%"],
            1,
            "colors in int8, onnxruntime: top1 is 0.0000 on 5 images, expected 0.93 or more",
        ),
        (
            ["--data", tmp_path / "loose", "--scenario", "single-stream", "--min-top1", "50%"],
            2,
            "--min-top1 asks for the labels",
        ),
        (["--data", photos, "--min-top1", "0.5"], 2, "require --scenario"),
        (["--scenario", "offline"], 2, "--data FOLDER"),
        (["--data", photos, "--scenario", "offline", "--batch-size", "8"], 2, "leave out --batch-size"),
        (["--data", photos, "--scenario", "offline", "--count", "0"], 2, "count is 0"),
    ):
        status, out, line = failure(capsys, *command, *wrong)
        assert (status, out) == (code, "") and said in line


def test_the_harness_times_images_without_labels(
    folder: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in everything(photos / "red"):
        shutil.copy(path, tmp_path)
    report = zoo.benchmark(folder, data=tmp_path, engines=["onnxruntime"], precisions=["int8"], scenario="offline")
    assert (report["samples"], report["images"]) == (0, 5)
    assert "no accuracy: found " in caplog.text
    assert not {"top1", "latency_ms", "cost_per_million"} & report["results"][0].keys()


def test_the_model_alone_is_timed_on_made_up_photos(folder: Path) -> None:
    report = zoo.benchmark(folder, engines=["onnxruntime"], precisions=["int8"], rounds=1)
    assert [row["batch_size"] for row in report["results"]] == [ImagePipeline.BATCH_SIZE]
