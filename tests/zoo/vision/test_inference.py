"""Image files to classes: a small network that tells colors apart; calibration and examples."""

import io
import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.color_networks import NAMES, everything, make_folder
from PIL import Image

import zoo
from pipelines.core.errors import RequestError, ZooError
from pipelines.data import images
from zoo.vision import inference
from zoo.vision.inference import ImagePipeline


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_road_ends_in_a_pipeline_that_knows_the_colors(
    folder: Path, photos: Path, precision: str, engine: str
) -> None:
    opened = zoo.pipeline(folder, precision, engine)
    results = opened(photos)
    assert [result["label"] for result in results] == [path.parent.name for path in everything(photos)]
    assert opened.postprocess(opened.predict(opened.preprocess(photos))) == results


def test_a_pipeline_takes_what_people_have(opened: ImagePipeline, photos: Path) -> None:
    path = photos / "red" / "1.jpg"
    pixels = images.decode(path)
    expected = images.prepare(path, opened.spec)
    for raw in (
        path,
        path.read_bytes(),
        pixels,
        Image.fromarray(pixels),
        [path],
        (image for image in [pixels]),
        pixels[None],
    ):
        batch = opened.preprocess(raw)
        assert batch["image"].dtype == np.uint8 and batch["image"].flags.c_contiguous
        assert np.array_equal(batch["image"], expected[None])
    mixed = opened([photos / "red", pixels[:, :, 0], path.read_bytes()])
    assert [result["label"] for result in mixed] == ["red"] * 5 + ["grey", "red"]


@pytest.mark.parametrize(
    "raw, said",
    [
        (b"no image", "is no image"),
        (Path("nowhere.jpg"), "nowhere.jpg does not exist"),
        ("photo.jpg", r"found the text 'photo.jpg'; expected .*, or pathlib.Path\(...\) for a file"),
        (["photo.jpg"], "found the text 'photo.jpg'"),
        ([], "found no images"),
        ([3], "found int; expected a path"),
        (3, "found int; expected a path"),
        (np.zeros((4, 4, 2), np.uint8), r"\[4, 4, 2\]; expected pixels"),
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
    for row, result in zip(
        powers / powers.sum(axis=1, keepdims=True), opened.postprocess({"logits": logits}), strict=True
    ):
        order = np.argsort(-row, kind="stable")[:5]
        assert [name for name, _ in result["top5"]][:3] == [NAMES[i] for i in order[:3]]
        assert [p for _, p in result["top5"]] == pytest.approx(row[order], rel=1e-5)
        assert (result["index"], result["label"], result["probability"]) == (
            order[0],
            NAMES[order[0]],
            result["top5"][0][1],
        )
    for bad in (np.nan, np.inf):
        logits[3, 2] = bad
        with pytest.raises(ZooError, match="NaN or infinite"):
            opened.postprocess({"logits": logits})


def test_two_classes_have_no_top_five(opened: ImagePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    opened.__dict__["class_names"] = ["no", "yes"]
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
    with pytest.raises(RequestError, match=r"names 2 classes, but its network has 8 outputs"):
        label(path)
    (path / "classes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RequestError, match="UTF-8"):
        label(path)


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
    assert len(set(made)) == inference.SYNTHETIC_IMAGES and made == opened.example(20)
    opened.spec = replace(opened.spec, size=224, resize=256)
    first = opened.example(1)[0]
    assert Image.open(io.BytesIO(first)).size == (500, 375) and 30_000 < len(first) < 200_000
