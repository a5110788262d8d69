"""Preprocessings of image networks: letterbox, and the files of transformers and timm."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.core.errors import RequestError
from pipelines.data.images import prepare
from pipelines.data.preprocess import Preprocess
from zoo.vision.networks import transforms
from zoo.vision.networks.transforms import LETTERBOX, ImageTransform, Placement, of_preprocess, read_transform

FLOAT = np.dtype(np.float32)


def photo(rng: np.random.Generator, width: int, height: int) -> Any:
    small = rng.integers(0, 256, (height // 9 + 2, width // 9 + 2, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


@pytest.mark.parametrize(("width", "height"), [(101, 60), (50, 97), (64, 64), (20, 10)])
def test_a_letterbox_is_that_of_ultralytics(rng: np.random.Generator, width: int, height: int) -> None:
    torch = pytest.importorskip("torch", reason="needs the train extra")
    image = photo(rng, width, height)
    pixels, place = ImageTransform((64, 64), LETTERBOX).apply(image)
    ratio = min(64 / height, 64 / width)
    rows, columns = round(height * ratio), round(width * ratio)
    top, left = round((64 - rows) / 2 - 0.1), round((64 - columns) / 2 - 0.1)
    values = torch.from_numpy(image.transpose(2, 0, 1)[None].astype(np.float32))
    inner = torch.nn.functional.interpolate(values, (rows, columns), mode="bilinear")[0].numpy()
    assert np.abs(pixels[:, top : top + rows, left : left + columns] - inner).max() <= 1
    outside = np.ones((64, 64), bool)
    outside[top : top + rows, left : left + columns] = False
    assert (pixels[:, outside] == 114).all()
    assert place == Placement(width, height, (columns / width, rows / height), (left, top), (64, 64))
    whole = np.array([[left, top, left + columns, top + rows]], np.float32)
    np.testing.assert_allclose(place.boxes(whole), [[0, 0, width, height]], rtol=1e-5)


@pytest.mark.parametrize("resize", [0, 40])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_square_is_prepared_as_for_the_models_of_the_zoo(
    rng: np.random.Generator, resize: int, interpolation: str
) -> None:
    spec, image = Preprocess(32, resize, interpolation), photo(rng, 61, 47)
    assert np.array_equal(of_preprocess(spec).apply(image)[0], prepare(image, spec))


def test_a_crop_beyond_the_image_is_black(rng: np.random.Generator) -> None:
    image = photo(rng, 40, 20)
    pixels, place = ImageTransform((30, 30), transforms.CROP, (20,)).apply(image)
    assert not pixels[:, :5].any() and not pixels[:, 25:].any()
    assert np.array_equal(pixels[:, 5:25], image.transpose(2, 0, 1)[:, :, 5:35]) and place.offset == (-5, 5)


FILES = {  # file -> input size for 50 x 100 pixels (height, width), first value of pixels of 255, fit
    "vit": (
        {"do_resize": True, "size": {"height": 24, "width": 32}, "image_mean": 0.5, "image_std": 0.5},
        (24, 32),
        1.0,
    ),
    "convnext": (
        {"size": {"shortest_edge": 28}, "crop_pct": 0.875, "do_normalize": False, "do_resize": True},
        (28, 28),
        1.0,
    ),
    "clip": (
        {
            "size": {"shortest_edge": 30},
            "crop_size": {"height": 28, "width": 28},
            "do_center_crop": True,
            "do_resize": True,
        },
        (28, 28),
        1.0,
    ),
    "detr": (
        {"size": {"shortest_edge": 40, "longest_edge": 60}, "image_mean": [0.5] * 3, "do_pad": True},
        (30, 60),
        0.5,
    ),
    "yolos": (
        {
            "size": {"shortest_edge": 40, "longest_edge": 60},
            "do_resize": True,
            "image_processor_type": "YolosImageProcessor",
        },
        (16, 48),
        1.0,
    ),
    "old detr": ({"size": 40, "max_size": 200, "do_normalize": False}, (40, 80), 1.0),
    "unscaled": ({"size": 20, "do_rescale": False, "do_normalize": False}, (20, 20), 255.0),
    "offset": (
        {"size": 20, "rescale_factor": 1 / 127.5, "rescale_offset": True, "do_normalize": False},
        (20, 20),
        1.0,
    ),
    "efficientnet": ({"size": 20, "image_mean": [0] * 3, "image_std": [0.5] * 3, "include_top": True}, (20, 20), 4.0),
    "timm": (
        {"architecture": "x", "pretrained_cfg": {"input_size": [3, 28, 28], "mean": [0.5] * 3, "std": [0.5] * 3}},
        (28, 28),
        1.0,
    ),
    "squash": (
        {"input_size": [3, 28, 20], "crop_mode": "squash", "crop_pct": 1.0, "mean": [0] * 3, "std": [1] * 3},
        (28, 20),
        1.0,
    ),
    "rectangle": ({"size": [24, 32], "mean": [0, 0, 0], "std": [0.5, 0.5, 0.5]}, (24, 32), 2.0),
    "rectangle of a short side": (
        {"size": [24, 32], "resize": 40, "mean": [0.5, 0, 0], "std": [1, 1, 1]},
        (24, 32),
        [0.5, 1, 1],
    ),
    "rectangle of a larger one": (
        {"size": [24, 32], "resize": [28, 36], "mean": [0, 0, 0], "std": [1, 1, 1]},
        (24, 32),
        1.0,
    ),
    "zoo": ({"size": 20, "resize": 24, "mean": [0, 0, 0], "std": [1, 1, 1]}, (20, 20), 1.0),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_exporters_are_read(tmp_path: Path, name: str) -> None:
    value, size, white = FILES[name]
    (tmp_path / "spec.json").write_text(json.dumps(value))
    transform = read_transform(tmp_path / "spec.json")
    pixels, place = transform.apply(np.full((50, 100, 3), 255, np.uint8))
    values = transform.values(pixels, FLOAT)
    assert values.shape == (3, *size) == (3, *place.size)
    np.testing.assert_allclose(values[:, size[0] // 2, size[1] // 2], white, rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"pretrained_cfg": {"input_size": [3, 28, 28], "crop_mode": "border"}}, "crop_mode 'border'"),
        ({"size": {"height": 3}, "do_resize": True}, "'width'"),
        ({"size": 8, "do_resize": True, "resample": 5}, "interpolation ''"),
        ({"sizes": 8}, "unknown sizes"),
        ({"size": [8, 0]}, r"found the size \[8, 0\] and resize 0; expected \[height, width\]"),
        ({"size": [8, 9], "resize": [9, 9, 9]}, "resize also as the short side"),
        ({"size": [8, 9], "resize": "9"}, "resize also as the short side"),
        (["size"], "found"),
    ],
)
def test_a_file_that_is_not_read_is_refused_in_one_line(tmp_path: Path, value: Any, found: str) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(value))
    with pytest.raises(RequestError, match=found) as error:
        read_transform(tmp_path / "spec.json")
    assert "spec.json" in str(error.value) and "\n" not in str(error.value)


def test_files_beside_a_model_are_found(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "config.json").write_text('{"architectures": ["ViT"]}')
    model = tmp_path / "onnx" / "model.onnx"
    assert transforms.beside(model) is None
    (tmp_path / "preprocessor_config.json").write_text('{"size": 20, "do_resize": true}')
    transform = transforms.beside(model)
    assert transform is not None and transform.size == (20, 20)
    assert transforms.beside(tmp_path / "model.onnx") == transform


def test_values_are_in_the_order_and_type_of_the_input() -> None:
    pixels = np.arange(3, dtype=np.uint8)[:, None, None] * np.uint8(50)
    transform = ImageTransform((1, 1), channels="BGR")
    assert transform.values(pixels, np.dtype(np.uint8)).ravel().tolist() == [100, 50, 0]
    assert transform.values(pixels, np.dtype(np.float16)).dtype == np.float16
