"""Image files to classes: a small network that tells colors apart, and every kind of file that people have."""

import csv
import io
import json
import shutil
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from PIL import Image
from rewriting import model

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError, ZooError
from pipelines.data import images
from pipelines.graph import io as graph
from pipelines.models.hub import Card, CardFile
from zoo import cli
from zoo.images import metrics, predict
from zoo.images.harness import STEPS
from zoo.images.predict import ImagePipeline

COLORS = {"blue": (30, 40, 220), "cyan": (30, 200, 210), "green": (40, 210, 50), "grey": (128, 128, 128),
          "magenta": (210, 40, 200), "red": (220, 30, 40), "yellow": (210, 200, 30)}  # fmt: skip
NAMES = list(COLORS)
SPEC = {"size": 16, "resize": 20, "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.25] * 3, "channels": "RGB"}
TEXT = """(uint8[batch,3,16,16] image) => (float[batch,7] logits) {
    f = Cast<to=1>(image) s = Div(f, white) c = Sub(s, mean) x = Div(c, std)
    h = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w, b) r = Relu(h) p = GlobalAveragePool(r) v = Flatten(p) logits = Gemm(v, head, bias)
}"""


def picture(color: str, seed: int = 0, width: int = 40, height: int = 30) -> Image.Image:
    """Noise around a color."""
    noise = np.random.default_rng(seed).normal(0, 20, (height, width, 3))
    return Image.fromarray(np.clip(COLORS[color] + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def network(classes: list[str]) -> Any:
    """Six channels, the positive and the negative part of R, G and B; a class's logit is how far the mean color lies in
    its direction.
    """
    w = np.zeros((6, 3, 3, 3), np.float32)
    for channel in range(3):
        w[channel, channel, 1, 1], w[3 + channel, channel, 1, 1] = 1, -1
    means = np.array([COLORS.get(name, (128,) * 3) for name in classes], np.float32) / 127.5 - 1
    directions = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 0.1)
    head = np.concatenate([directions, -directions], axis=1).T * 3
    values = {
        "white": np.float32(255),
        "mean": np.full((1, 3, 1, 1), 0.5, np.float32),
        "std": np.full((1, 3, 1, 1), 0.25, np.float32),
    }
    bias = np.array([{"grey": 3.0, "background": -50.0}.get(name, 0.0) for name in classes], np.float32)
    text = TEXT.replace("batch,7", f"batch,{len(classes)}")
    return model(text, w=w, b=np.zeros(6, np.float32), head=np.ascontiguousarray(head), bias=bias, **values)


def make_folder(path: Path, outputs: list[str], **details: Any) -> Path:
    path.mkdir(parents=True)
    file = graph.save(network(outputs), path / "fp32.onnx")
    given = (CardFile("fp32.onnx", file.stat().st_size, files.sha256(file), None),)
    files.write_json(
        path / "card.json",
        Card("colors", "mobilenet-v1", "of a test", given, {"preprocessing": SPEC, **details}).to_json(),
    )
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five JPEGs of every color, in a folder of its name."""
    folder = tmp_path_factory.mktemp("photos")
    for color in COLORS:
        (folder / color).mkdir()
        for seed in range(5):
            (folder / color / f"{seed}.jpg").write_bytes(encoded(picture(color, seed, 30 + 7 * seed, 50 - 5 * seed)))
    return folder


@pytest.fixture(scope="module")
def folder(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, calibrated on `photos` and built."""
    path = make_folder(tmp_path_factory.mktemp("models") / "colors", NAMES, classes=NAMES)
    zoo.calibrate(path, photos, samples=21)
    zoo.build(path)
    return path


@pytest.fixture
def opened(folder: Path) -> ImagePipeline:
    found = zoo.pipeline(folder, engine="onnxruntime")
    assert isinstance(found, ImagePipeline)
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def everything(folder: Path) -> list[Path]:
    return list(images.listed(folder))


# --- the parts


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_road_ends_in_a_pipeline_that_knows_the_colors(
    folder: Path, photos: Path, precision: str, engine: str
) -> None:
    opened = zoo.pipeline(folder, precision, engine)
    found = opened(photos)
    assert [each["label"] for each in found] == [path.parent.name for path in everything(photos)]
    assert opened.postprocess(opened.predict(opened.preprocess(photos))) == found


def test_a_pipeline_takes_what_people_have(opened: ImagePipeline, photos: Path) -> None:
    path = photos / "red" / "1.jpg"
    pixels = images.decode(path)
    expected = images.prepare(path, opened.spec)
    for raw in (
        path,
        str(path),
        path.read_bytes(),
        pixels,
        Image.fromarray(pixels),
        [path],
        (each for each in [pixels]),
        pixels[None],
    ):
        batch = opened.preprocess(raw)
        assert batch["image"].dtype == np.uint8 and batch["image"].flags.c_contiguous
        assert np.array_equal(batch["image"], expected[None])
    mixed = opened([photos / "red", pixels[:, :, 0], path.read_bytes()])
    assert [each["label"] for each in mixed] == ["red"] * 5 + ["grey", "red"]


@pytest.mark.parametrize(
    "raw, said",
    [
        (b"no image", "is no image"),
        ("nowhere.jpg", "nowhere.jpg does not exist"),
        ([], "found no images"),
        ([3], "found int; wanted a path"),
        (3, "found int; wanted a path"),
        (np.zeros((4, 4, 2), np.uint8), r"\[4, 4, 2\]; wanted pixels"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(opened: ImagePipeline, raw: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        opened.preprocess(raw)
    assert "\n" not in str(caught.value)


def test_probabilities_are_the_softmax_and_equal_ones_come_in_order(opened: ImagePipeline) -> None:
    logits = np.random.default_rng(0).normal(0, 3, (20, 7)).astype(np.float32)
    logits[0] = [1, 5, 2, 5, 5, 0, 2]
    powers = np.exp(logits.astype(np.float64))
    for row, found in zip(
        powers / powers.sum(axis=1, keepdims=True), opened.postprocess({"logits": logits}), strict=True
    ):
        order = np.argsort(-row, kind="stable")[:5]
        assert [name for name, _ in found["top5"]][:3] == [NAMES[i] for i in order[:3]]
        assert [p for _, p in found["top5"]] == pytest.approx(row[order], rel=1e-5)
        assert (found["index"], found["label"], found["probability"]) == (
            order[0],
            NAMES[order[0]],
            found["top5"][0][1],
        )
    for bad in (np.nan, np.inf):
        logits[3, 2] = bad
        with pytest.raises(ZooError, match="NaN or infinite"):
            opened.postprocess({"logits": logits})


def test_two_classes_have_no_top_five(opened: ImagePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.__dict__["given_names"] = ["no", "yes"]
    assert len(opened.postprocess({"logits": np.array([[0, 1]], np.float32)})[0]["top5"]) == 2


def test_names_come_from_the_card_a_file_or_the_training_or_are_numbers(
    photos: Path, folder: Path, tmp_path: Path
) -> None:
    def label(path: Path) -> str:
        return str(zoo.pipeline(path, "fp32", "onnxruntime")(photos / "red" / "0.jpg")[0]["label"])

    path = make_folder(tmp_path / "unnamed", ["background", *NAMES], classes=8, background="class 0 is none of them")
    assert label(path) == "class 5"
    (path / "train.json").write_text(json.dumps({"classes": [name.upper() for name in NAMES]}))
    assert label(path) == "RED"
    (path / "classes.txt").write_text("\n".join(["none", *NAMES]) + "\n")
    assert label(path) == "red"
    (path / "classes.txt").write_text("red\ngreen\n")
    with pytest.raises(RequestError, match=r"names 2 classes, and its network tells 8 apart"):
        label(path)
    (path / "classes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RequestError, match="UTF-8"):
        label(path)


# --- run


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_run_keeps_the_order_and_equals_the_call(folder: Path, photos: Path, tmp_path: Path, batch_size: int) -> None:
    before = set(threading.enumerate())
    found = zoo.run(folder, [photos / "red", photos], tmp_path / "out.csv", engine="onnxruntime", batch_size=batch_size)
    assert (found["images"], found["skipped"], found["engine"], found["precision"]) == (40, 0, "onnxruntime", "int8")
    assert set(found["split_ms"]) == {"decode", "preprocess", "model", "postprocess", "wall"}
    paths = [*everything(photos / "red"), *everything(photos)]
    written = rows(tmp_path / "out.csv")
    assert [row["file"] for row in written] == [str(path) for path in paths]
    for row, each in zip(written, zoo.pipeline(folder, engine="onnxruntime")(paths), strict=True):
        assert (row["label"], int(row["index"]), row["error"]) == (each["label"], each["index"], "")
        assert [row["label2"], row["label5"]] == [each["top5"][1][0], each["top5"][4][0]]
        assert [float(row["probability"]), float(row["probability5"])] == pytest.approx(
            [each["probability"], each["top5"][4][1]], abs=1e-6
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
    some = [photos / "red" / "0.jpg", tmp_path / "no.jpg"]
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        zoo.run(folder, some, tmp_path / name, engine="onnxruntime")
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
                for at in rng.integers(0, len(data), 8):
                    data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data = data[: int(rng.integers(len(data) * 3 // 4))]
            case 2:
                data[: int(rng.integers(4, len(data)))] = b""
            case 3:
                data = bytearray(rng.bytes(int(rng.integers(0, 300))))
        (tmp_path / f"{index:04}.jpg").write_bytes(data)
    (tmp_path / "0500.good.jpg").write_bytes(whole[0])
    found = zoo.run(folder, [tmp_path], tmp_path / "out.csv", engine="onnxruntime")
    written = rows(tmp_path / "out.csv")
    assert [Path(row["file"]).name for row in written] == sorted(path.name for path in tmp_path.glob("*.jpg"))
    assert all(bool(row["error"]) != bool(row["label"]) and "\n" not in row["error"] for row in written)
    assert found["skipped"] == sum(bool(row["error"]) for row in written) > 700
    assert found["images"] == len(written) - found["skipped"] >= 1
    assert [row["label"] for row in written if Path(row["file"]).name == "0500.good.jpg"] == ["red"]
    assert not any(
        row["label"] for row in written if int(Path(row["file"]).name[:4]) // 5 % 4 == 3 and "good" not in row["file"]
    )
    assert (
        f"{found['skipped']} of 1001 images could not be read: " in caplog.text
        and f"and {found['skipped'] - 3} more" in caplog.text
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


def failure(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[Any, str, str]:
    """Exit code, stdout and the one line on stderr of a command."""
    with pytest.raises(SystemExit) as end:
        cli.call([str(each) for each in arguments])
    found = capsys.readouterr()
    assert found.err.count("\n") == 1
    return end.value.code, found.out, found.err


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
        found, out, line = failure(capsys, *wrong, *(fixed if wrong[0] != "calibrate" else []))
        assert (found, out) == (code, "") and said in line
    assert not (tmp_path / "a.csv").exists()
    cli.call(["run", str(folder), str(photos), str(tmp_path / "bad.jpg"), "-o", str(tmp_path / "a.csv"), *fixed])
    assert "35 images, 1 left out" in capsys.readouterr().err


# --- calibration and examples


def test_calibration_takes_images_evenly_and_those_for_training(
    opened: ImagePipeline, photos: Path, tmp_path: Path
) -> None:
    batch = opened.calibration(photos, 7)
    assert np.array_equal(batch["image"], opened.preprocess([photos / color / "0.jpg" for color in NAMES])["image"])
    shutil.copytree(photos / "red", tmp_path / "train" / "red")
    shutil.copytree(photos / "blue", tmp_path / "test" / "blue")
    expected = opened.preprocess(photos / "red")["image"]
    assert np.array_equal(opened.calibration(tmp_path, 100)["image"], expected)
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        for name in ("train", "test"):
            archive.add(tmp_path / name, name)
    assert np.array_equal(opened.calibration([tmp_path / "all.tar.gz"], 100)["image"], expected)
    (tmp_path / "train" / "red" / "2.jpg").write_bytes(b"x")
    with pytest.raises(RequestError, match=r"2\.jpg is no image"):
        opened.calibration(tmp_path, 100)
    assert np.array_equal(opened.calibration(tmp_path, 100, "skip")["image"], expected[[0, 1, 3, 4]])


def test_examples_are_files_given_or_made_up(opened: ImagePipeline, photos: Path) -> None:
    assert opened.example(6, photos / "red") == [
        path.read_bytes() for path in [*everything(photos / "red"), photos / "red" / "0.jpg"]
    ]
    made = opened.example(20)
    assert len(set(made)) == predict.PHOTOS and made == opened.example(20)
    opened.spec = replace(opened.spec, size=224, resize=256)
    first = opened.example(1)[0]
    assert Image.open(io.BytesIO(first)).size == (500, 375) and 30_000 < len(first) < 200_000


# --- evaluation


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
    found = []
    for column in (labels, [NAMES[label] for label in labels]):
        (tmp_path / "labels.csv").write_text(
            "file,label\n" + "".join(f"{n},{y}\n" for n, y in zip(named, column, strict=True))
        )
        found.append(zoo.evaluate(folder, tmp_path, engine="onnxruntime", batch_size=4))
    assert found[0]["metrics"] == found[1]["metrics"]
    assert found[0]["environment"]["batch_size"] == 4 and found[0]["samples"] == 35
    for precision in ("fp32", "int8"):
        opened = zoo.pipeline(folder, precision, "onnxruntime")
        assert found[0]["metrics"][precision] == pytest.approx(plainly(opened, paths, labels))
    assert set(found[0]["difference"]) == {"top1", "top5", "agreement"} <= found[0]["interval"].keys()
    assert found[0]["difference"]["agreement"] == 1


def test_evaluation_reads_archives_and_leaves_out_what_is_broken(
    folder: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"x")
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as archive:
        archive.add(photos / "blue", "train/red")
        archive.add(photos / "red", "test/red")
        archive.add(photos / "green" / "0.jpg", "test/red/z.jpg")
        archive.add(tmp_path / "bad.jpg", "test/red/00.jpg")
    with pytest.raises(RequestError, match=r"00\.jpg: .* is no image"):
        zoo.evaluate(folder, tmp_path / "data.tar.gz", engine="onnxruntime")
    found = zoo.evaluate(folder, [tmp_path / "data.tar.gz"], engine="onnxruntime", on_error="skip")
    assert (found["samples"], found["skipped"]) == (6, 1)
    assert found["metrics"]["fp32"]["top1"] == pytest.approx(5 / 6)
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
    found = metrics.evaluate({"fp32": opened}, shared / "data" / "imagenet" / "nips17")
    assert found["metrics"]["fp32"] == pytest.approx({"top1": top1, "top5": top5}, abs=0.005)


# --- the harness


def test_the_harness_judges_then_times(folder: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "engines": ["onnxruntime"],
        "scenario": "single-stream",
        "min_top1": 0.9,
        "count": 12,
        "price_per_hour": 3.6,
    }
    found = zoo.benchmark(folder, data=photos, **options)
    assert (found["model"], found["samples"], found["images"]) == ("colors", 35, 12)
    assert [(each["precision"], each["engine"]) for each in found["results"]] == [
        ("fp32", "onnxruntime"),
        ("int8", "onnxruntime"),
    ]
    for each in found["results"]:
        assert each["top1"] == 1
        assert each["latency_ms"].keys() == {"mean", "p50", "p90", "p99"}
        assert each["latency_ms"]["p50"] <= each["latency_ms"]["p90"] <= each["latency_ms"]["p99"]
        assert tuple(each["split_ms"]) == STEPS
        assert sum(each["split_ms"].values()) == pytest.approx(each["latency_ms"]["mean"], abs=1e-3)
        assert each["offline"]["batch_size"] == max((1, 4, 16), key=lambda size: each["offline"]["by_batch"][str(size)])
        assert each["memory_mb"] > 20 and 0 < each["model_mb"] < 20
        assert each["cost_per_million"] == pytest.approx(1000 / each["offline"]["images_per_second"], rel=1e-3)
    cli.call(["benchmark", str(folder), "--data", str(photos), "--scenario", "offline", "--precision", "int8", "--engine", "onnxruntime",
              "--count", "5"])  # fmt: skip
    out = capsys.readouterr().out
    assert "100.000%" in out and "5 images timed, 35 judged" in out


def test_the_harness_times_the_native_kernels_of_int8_alone(folder: Path, photos: Path) -> None:
    found = zoo.benchmark(folder, data=photos, engines=["onnxruntime", "native"], scenario="offline", count=4)
    assert [(each["precision"], each["engine"]) for each in found["results"]] == [
        ("fp32", "onnxruntime"),
        ("int8", "onnxruntime"),
        ("int8", "native"),
    ]
    assert found["results"][2]["model_mb"] == found["results"][1]["model_mb"]


def test_the_harness_times_nothing_that_is_not_good_enough(
    folder: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.images.harness._offline", lambda *_: pytest.fail("timed"))
    shutil.copytree(photos / "red", tmp_path / "wrong" / "blue")
    (tmp_path / "loose").mkdir()
    shutil.copy(photos / "red" / "0.jpg", tmp_path / "loose")
    command = ["benchmark", folder, "--engine", "onnxruntime", "--precision", "int8"]
    for wrong, code, said in (
        (
            ["--data", tmp_path / "wrong", "--scenario", "offline", "--min-top1", "93%"],
            1,
            "colors in int8, onnxruntime: top1 is 0.0000 on 5 images, wanted 0.93 or more",
        ),
        (
            ["--data", tmp_path / "loose", "--scenario", "single-stream", "--min-top1", "50%"],
            2,
            "--min-top1 asks for the labels",
        ),
        (["--data", photos, "--min-top1", "0.5"], 2, "add --scenario"),
        (["--scenario", "offline"], 2, "--data FOLDER"),
        (["--data", photos, "--scenario", "offline", "--batch-size", "8"], 2, "leave out --batch-size"),
        (["--data", photos, "--scenario", "offline", "--count", "0"], 2, "count is 0"),
    ):
        found, out, line = failure(capsys, *command, *wrong)
        assert (found, out) == (code, "") and said in line


def test_the_harness_times_images_without_labels(
    folder: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in everything(photos / "red"):
        shutil.copy(path, tmp_path)
    found = zoo.benchmark(folder, data=tmp_path, engines=["onnxruntime"], precisions=["int8"], scenario="offline")
    assert (found["samples"], found["images"]) == (0, 5)
    assert "no accuracy: found " in caplog.text
    assert not {"top1", "latency_ms", "cost_per_million"} & found["results"][0].keys()


def test_the_model_alone_is_timed_on_made_up_photos(folder: Path) -> None:
    found = zoo.benchmark(folder, engines=["onnxruntime"], precisions=["int8"], rounds=1)
    assert [each["batch_size"] for each in found["results"]] == [ImagePipeline.BATCH_SIZE]
