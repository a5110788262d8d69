"""`zoo run` on photos: order, preloading, tables, every kind of file that people have, damaged ones, the exit code."""

import csv
import io
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from helpers.color_networks import COLORS, encoded, everything, failure, picture
from PIL import Image

import zoo
from pipelines.core.errors import RequestError
from zoo.cli import app as cli
from zoo.vision.inference import ImagePipeline


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_run_keeps_the_order_and_equals_the_call(folder: Path, photos: Path, tmp_path: Path, batch_size: int) -> None:
    before = set(threading.enumerate())
    summary = zoo.run(
        folder, [photos / "red", photos], tmp_path / "out.csv", engine="onnxruntime", batch_size=batch_size
    )
    assert (summary["images"], summary["skipped"], summary["engine"], summary["precision"]) == (
        40,
        0,
        "onnxruntime",
        "int8",
    )
    assert set(summary["split_ms"]) == {"decode", "preprocess", "model", "postprocess", "wall"}
    paths = [*everything(photos / "red"), *everything(photos)]
    written = rows(tmp_path / "out.csv")
    assert [row["file"] for row in written] == [str(path) for path in paths]
    for row, result in zip(written, zoo.pipeline(folder, engine="onnxruntime")(paths), strict=True):
        assert (row["label"], int(row["index"]), row["error"]) == (result["label"], result["index"], "")
        assert [row["label2"], row["label5"]] == [result["top5"][1][0], result["top5"][4][0]]
        assert [float(row["probability"]), float(row["probability5"])] == pytest.approx(
            [result["probability"], result["top5"][4][1]], abs=1e-6
        )
    assert set(threading.enumerate()) <= before


def test_preloading_changes_nothing(
    opened: ImagePipeline, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for workers in (0, 1, 4):
        monkeypatch.setattr(ImagePipeline, "workers", workers)
        opened.run([photos], tmp_path / "out.csv")
        written.append((tmp_path / "out.csv").read_bytes())
    assert written[0] == written[1] == written[2]


def test_the_next_images_decode_while_the_model_runs(
    opened: ImagePipeline, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = [threading.Event() for _ in range(9)]  # 35 images, four at a time
    load, predict_batch, left = opened.load, opened.predict, iter(range(9))
    assert opened.classes == 7

    def loading(some: Any, on_error: str) -> Any:
        begun[next(left)].set()
        return load(some, on_error)

    def waiting(batch: Any) -> Any:
        if len(batch["image"]) == 4:  # not the last
            assert begun[waited.pop(0)].wait(20)
        return predict_batch(batch)

    waited = list(range(1, 9))
    monkeypatch.setattr(ImagePipeline, "workers", 1)
    monkeypatch.setattr(opened, "load", loading)
    monkeypatch.setattr(opened, "predict", waiting)
    assert opened.run([photos], tmp_path / "out.csv")["images"] == 35
    assert not waited


def test_results_go_where_they_are_wanted(folder: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "no.jpg").write_bytes(b"no image")
    paths = [photos / "red" / "0.jpg", tmp_path / "no.jpg"]
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        zoo.run(folder, paths, tmp_path / name, engine="onnxruntime")
    good, bad = (json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert list(good) == [
        "file",
        "label",
        "index",
        "probability",
        *(f"{key}{i}" for i in (2, 3, 4, 5) for key in ("label", "probability")),
    ]
    assert bad.keys() == {"file", "error"} and bad["error"].startswith("is no image")
    table = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [{key: value for key, value in row.items() if value is not None} for row in table] == [good, bad]
    first, second = rows(tmp_path / "a.csv")
    assert first == {**{key: str(value) for key, value in good.items()}, "error": ""}
    assert second == {**dict.fromkeys(first, ""), **bad}


def test_a_terminal_shows_a_table(folder: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", shown)
    zoo.run(folder, [photos / "red" / "0.jpg", photos / "blue" / "0.jpg"], engine="onnxruntime", batch_size=1)
    lines = shown.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["label", "red", "blue"]
    assert len({line.index(word) for line, word in zip(lines, ("file", str(photos), str(photos)), strict=True)}) == 1


def test_paths_come_from_stdin(folder: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = b"\n".join(str(path).encode() for path in everything(photos))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(listing + b"\n\n")))
    assert zoo.run(folder, ["-"], tmp_path / "out.csv", engine="onnxruntime")["images"] == 35
    assert [row["label"] for row in rows(tmp_path / "out.csv")] == [path.parent.name for path in everything(photos)]


def test_a_name_of_any_bytes_is_written(folder: Path, photos: Path, tmp_path: Path) -> None:
    path = tmp_path / 'caf\udce9, "x"\n.jpg'
    try:
        shutil.copy(photos / "red" / "0.jpg", path)
    except OSError:
        pytest.skip("the file system allows no such name")
    zoo.run(folder, [path], tmp_path / "out.csv", engine="onnxruntime")
    assert [(Path(row["file"]).name, row["label"]) for row in rows(tmp_path / "out.csv")] == [
        ('caf?, "x"\n.jpg', "red")
    ]


KINDS = {
    "cmyk.jpg": lambda image: encoded(image.convert("CMYK")),
    "alpha.png": lambda image: encoded(image.convert("RGBA"), "PNG"),
    "palette.gif": lambda image: encoded(image, "GIF"),
    "photo.webp": lambda image: encoded(image, "WEBP"),
    "photo.bmp": lambda image: encoded(image, "BMP"),
    "photo.tiff": lambda image: encoded(image, "TIFF"),
    "wrong.png": lambda image: encoded(image),
}


def test_kinds_of_files_are_read_as_people_see_them(opened: ImagePipeline, tmp_path: Path) -> None:
    for color in ("red", "green"):
        for name, made in KINDS.items():
            (tmp_path / name).write_bytes(made(picture(color)))
        assert [(name, opened(tmp_path / name)[0]["label"]) for name in KINDS] == [(name, color) for name in KINDS]
    half = np.full((40, 40), 128, np.uint16) << 8
    for name, image in (("grey.jpg", Image.new("L", (40, 40), 128)), ("deep.png", Image.fromarray(half))):
        image.save(tmp_path / name)
        assert opened(tmp_path / name)[0]["label"] == "grey"


def test_a_photo_is_turned_before_it_is_cropped(opened: ImagePipeline) -> None:
    """Red above, blue below, in a tall picture that lies on its side: what the crop keeps depends on the turn."""
    upright = np.zeros((60, 20, 3), np.uint8)
    upright[:30], upright[30:] = COLORS["red"], COLORS["blue"]
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by 90 degrees, clockwise, to see it
    lying = encoded(Image.fromarray(np.rot90(upright).copy()), "PNG", exif=exif)
    assert np.array_equal(opened.preprocess(lying)["image"], opened.preprocess(upright)["image"])


def test_a_thousand_damaged_files_stop_nothing_and_each_is_reported(
    folder: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    whole = [
        encoded(picture("red", seed, 32, 24), kind) for seed, kind in enumerate(("JPEG", "PNG", "GIF", "WEBP", "TIFF"))
    ]
    for index in range(1000):
        data = bytearray(whole[index % 5])
        match index // 5 % 4:
            case 0:
                for position in rng.integers(0, len(data), 8):
                    data[position] ^= 1 << int(rng.integers(8))
            case 1:
                data = data[: int(rng.integers(len(data) * 3 // 4))]
            case 2:
                data[: int(rng.integers(4, len(data)))] = b""
            case 3:
                data = bytearray(rng.bytes(int(rng.integers(0, 300))))
        (tmp_path / f"{index:04}.jpg").write_bytes(data)
    (tmp_path / "0500.good.jpg").write_bytes(whole[0])
    summary = zoo.run(folder, [tmp_path], tmp_path / "out.csv", engine="onnxruntime")
    written = rows(tmp_path / "out.csv")
    assert [Path(row["file"]).name for row in written] == sorted(path.name for path in tmp_path.glob("*.jpg"))
    assert all(bool(row["error"]) != bool(row["label"]) and "\n" not in row["error"] for row in written)
    assert summary["skipped"] == sum(bool(row["error"]) for row in written) > 700
    assert summary["images"] == len(written) - summary["skipped"] >= 1
    assert [row["label"] for row in written if Path(row["file"]).name == "0500.good.jpg"] == ["red"]
    assert not any(
        row["label"] for row in written if int(Path(row["file"]).name[:4]) // 5 % 4 == 3 and "good" not in row["file"]
    )
    assert (
        f"{summary['skipped']} of 1001 images could not be read: " in caplog.text
        and f"and {summary['skipped'] - 3} more" in caplog.text
    )


def test_the_run_stops_where_that_is_asked(folder: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes((photos / "red" / "0.jpg").read_bytes()[:200])
    before = set(threading.enumerate())
    with pytest.raises(RequestError, match=r"bad\.jpg is broken"):
        zoo.run(
            folder, [photos, tmp_path / "bad.jpg", photos], tmp_path / "out.csv", engine="onnxruntime", on_error="raise"
        )
    with pytest.raises(
        RequestError, match=r"none of 2 images could be read: .*bad.jpg is broken.*; .*nowhere\.jpg does not exist"
    ):
        zoo.run(folder, [tmp_path / "bad.jpg", tmp_path / "nowhere.jpg"], tmp_path / "out.csv", engine="onnxruntime")
    assert not (tmp_path / "out.csv").exists()
    assert set(threading.enumerate()) <= before


def test_the_command_ends_as_scripts_want_it(
    folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jpg").write_bytes(b"x")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    fixed = ["--engine", "onnxruntime"]
    for wrong, code, said in (
        (["run", folder, tmp_path / "empty"], 2, "found no images in the folder"),
        (["run", folder], 2, "paths on stdin"),
        (["run", folder, photos, "-o", tmp_path / "a.txt"], 2, "cannot tell the format"),
        (["run", folder, photos, "--batch-size", 0], 2, "must be 1 or more"),
        (
            ["run", folder, photos, tmp_path / "bad.jpg", "--on-error", "raise", "-o", tmp_path / "a.csv"],
            2,
            "bad.jpg is no image",
        ),
        (["run", folder, tmp_path / "bad.jpg", "-o", tmp_path / "a.csv"], 2, "none of 1 images"),
        (["evaluate", folder, "--data", tmp_path / "empty"], 2, "found no images"),
        (["calibrate", folder, "--data", tmp_path / "nowhere"], 2, "nowhere"),
    ):
        status, out, line = failure(capsys, *wrong, *(fixed if wrong[0] != "calibrate" else []))
        assert (status, out) == (code, "") and said in line
    assert not (tmp_path / "a.csv").exists()
    cli.call(["run", str(folder), str(photos), str(tmp_path / "bad.jpg"), "-o", str(tmp_path / "a.csv"), *fixed])
    assert "35 images, 1 left out" in capsys.readouterr().err
