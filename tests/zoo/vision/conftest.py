"""The model that tells colors apart, its photos, and the pipeline of it."""

from pathlib import Path

import pytest
from helpers.color_networks import COLORS, NAMES, encoded, make_folder, picture

import zoo
from zoo.vision.inference import ImagePipeline


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
    pipeline = zoo.pipeline(folder, engine="onnxruntime")
    assert isinstance(pipeline, ImagePipeline)
    return pipeline
