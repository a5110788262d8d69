"""Folders of images as samples of an ONNX file: calibration, tuning, broken images."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.rewriting import model
from helpers.sample_files import call
from PIL import Image

import zoo
from pipelines.core.errors import RequestError
from pipelines.data import images
from pipelines.data.preprocess import Preprocess
from pipelines.engines.session import Port
from pipelines.graph import io
from zoo.vision.networks.transforms import LETTERBOX, ImageTransform

CONVNET = """(float[n,3,8,8] x) => (float[n,4] y) {
    c = Conv<pads=[1,1,1,1]>(x, w) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) y = MatMul(f, v) }"""
SPEC = {"size": 8, "resize": 10, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2], "channels": "BGR"}


@pytest.fixture
def photos(here: Path) -> Path:
    """net.onnx, spec.json, and photos/ with 20 images, one of them broken in all/, in one folder a class in
    classes/.
    """
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "v": rng.standard_normal((8, 4)).astype(np.float32),
    }
    io.save(model(CONVNET, **weights), "net.onnx")
    io.save(model(CONVNET.replace("[n,", "[3,"), **weights), "three.onnx")
    Path("spec.json").write_text(json.dumps(SPEC))
    for index in range(20):
        image = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
        for folder in ("photos", "all", f"classes/{'abcd'[index % 4]}"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            image.save(Path(folder) / f"{index:02}.png")
    Path("all/broken.png").write_bytes(b"no image")
    return here


def test_a_folder_of_images_calibrates_like_its_arrays(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ports = {"x": Port(np.dtype(np.float32), (None, 3, 8, 8))}
    (batch,) = images.batches("photos", Preprocess.from_json(SPEC), ports)
    np.savez("photos.npz", **batch)
    code, out, err = call(capsys, "quantize", "net.onnx", "--calibration-data", "photos", "--preprocess", "spec.json", "-o", "a.onnx",
                          "--report", "r.json", "--json")  # fmt: skip
    assert (code, err) == (0, "") and json.loads(out)["path"] == "a.onnx"
    zoo.quantize("net.onnx", "b.onnx", calibration_data="photos.npz")
    assert (
        Path("a.onnx").read_bytes() == Path("b.onnx").read_bytes()
        and json.loads(Path("r.json").read_text())["samples"] == 20
    )
    tables = [zoo.calibrate("net.onnx", data, f"{i}.json", preprocess=spec) for i, (data, spec) in
              enumerate((("photos", "spec.json"), ("photos.npz", None)))]  # fmt: skip
    assert [table["samples"] for table in tables] == [20, 20] and Path("0.json").read_bytes() == Path(
        "1.json"
    ).read_bytes()


DETECTOR = """(float[n,3,16,16] images) => (float[n,6,256] y) {
    a = Conv(images, w) b = Relu(a) c = Conv(b, v) y = Reshape(c, to) }"""


@pytest.mark.parametrize("file", ["", "preprocessor_config.json"])
def test_images_are_prepared_as_they_run(file: str, photos: Path) -> None:
    """Without `preprocess` by a letterbox, as YOLO's outputs say, or by the file of transformers beside the network."""
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(size).astype(np.float32) for name, size in (("w", (8, 3, 1, 1)), ("v", (6, 8, 1, 1)))
    }
    io.save(model(DETECTOR, **weights, to=np.array([0, 6, 256])), "yolo.onnx")
    expected = ImageTransform((16, 16), LETTERBOX)
    if file:
        Path(file).write_text(
            json.dumps({"do_resize": True, "size": {"height": 16, "width": 16}, "do_normalize": False})
        )
        expected = ImageTransform((16, 16))
    pixels = [expected.apply(images.as_pixels(path))[0] for path in images.listed("photos")]
    np.savez("photos.npz", images=np.stack([expected.values(image, np.dtype(np.float32)) for image in pixels]))
    zoo.calibrate("yolo.onnx", "photos", "0.json")
    zoo.calibrate("yolo.onnx", "photos.npz", "1.json")
    assert Path("0.json").read_bytes() == Path("1.json").read_bytes()
    if file:
        Path(file).rename("given.json")
        zoo.calibrate("yolo.onnx", "photos", "2.json", preprocess="given.json")
        assert Path("2.json").read_bytes() == Path("1.json").read_bytes()


def test_images_fill_the_batches_of_a_graph(photos: Path) -> None:
    assert zoo.calibrate("three.onnx", "photos", "t.json", preprocess="spec.json")["samples"] == 18
    assert zoo.calibrate("net.onnx", "photos", "t.json", preprocess="spec.json", samples=7)["samples"] == 7


def test_images_are_what_open_sizes_are_timed_with(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    io.save(model("(float[n,3,h,w] x) => (float[n,3,h,w] y) { y = Relu(x) }"), "open.onnx")
    images_of = ("--data", "photos", "--preprocess", "spec.json")
    code, out, _ = call(capsys, "plan", "open.onnx", *images_of, "--batch-size", "1,30", "--json")
    assert (code, json.loads(out)["inputs"]) == (0, [{"x": ["float32", [size, 3, 8, 8]]} for size in (1, 30)])
    assert zoo.info("open.plan")["stale"] == "no" and len(zoo.info("open.plan")["profiles"]) == 2
    Path("cut.plan").write_bytes(Path("open.plan").read_bytes()[:200])
    with pytest.raises(RequestError, match="cut.plan is not a plan of this version"):
        zoo.info("cut.plan")
    code, out, _ = call(capsys, "benchmark", "open.onnx", *images_of, "--rounds", "1", "--json")
    assert code == 0 and {result["batch_size"] for result in json.loads(out)["results"]} == {1}


def test_the_file_beside_a_network_prepares_images_of_all_commands(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `zoo run` and `zoo quantize`; arrays are no images."""
    Path("preprocessor_config.json").write_text(json.dumps({"size": {"height": 8, "width": 8}, "do_normalize": False}))
    assert call(capsys, "plan", "net.onnx", "--data", "photos", "--batch-size", "2")[0] == 0
    assert call(capsys, "benchmark", "net.onnx", "--data", "photos", "--rounds", "1")[0] == 0
    tuned = [
        zoo.tune("net.onnx", "classes", "a.onnx", calibration_data="photos", engine="onnxruntime", seconds=0.0, **more)
        for more in ({}, {"preprocess": "preprocessor_config.json"})
    ]
    assert tuned[0]["best"]["metrics"] == tuned[1]["best"]["metrics"]
    code, _, err = call(capsys, "run", "net.onnx", "x.npz", "--task", "classify")
    assert (code, err.count("\n")) == (2, 1)
    assert "found arrays in x.npz, expected images for net.onnx; to time the graph" in err


@pytest.mark.parametrize("verb", ["calibrate", "quantize", "plan", "report"])
def test_an_output_never_replaces_the_spec(photos: Path, verb: str) -> None:
    before = Path("spec.json").read_bytes()
    acts: dict[str, Any] = {
        "calibrate": lambda: zoo.calibrate("net.onnx", "photos", "spec.json", preprocess="spec.json"),
        "quantize": lambda: zoo.quantize("net.onnx", "spec.json", calibration_data="photos", preprocess="spec.json"),
        "plan": lambda: zoo.plan("net.onnx", "spec.json", data="photos", preprocess="spec.json"),
        "report": lambda: zoo.quantize(
            "net.onnx", "a.onnx", calibration_data="photos", preprocess="spec.json", report_path="spec.json"
        ),
    }
    with pytest.raises(RequestError, match=r"the output spec.json would replace the input spec.json"):
        acts[verb]()
    assert Path("spec.json").read_bytes() == before and not Path("a.onnx").exists()


def test_a_broken_image_is_named_or_left_out(
    photos: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = ("net.onnx", "--calibration-data", "all", "--preprocess", "spec.json", "-o")
    for verb in ("calibrate", "quantize"):
        code, _, err = call(capsys, verb, *options, "a.onnx")
        assert code == 2 and "all/broken.png is no image" in err and err.count("\n") == 1
        assert call(capsys, verb, *options, "a.onnx", "--on-error", "skip")[0] == 0
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 2 and all("broken.png" in message for message in said)


def test_tune_on_folders_of_images(photos: Path) -> None:
    options: dict[str, Any] = {"engine": "onnxruntime", "preprocess": "spec.json", "seconds": 0.0, "max_drop": 1.0}
    labelled = zoo.tune("net.onnx", "classes", "a.onnx", calibration_data="photos", **options)
    assert labelled["metric"] == "top1"
    assert zoo.tune("net.onnx", "photos", "b.onnx", **options)["metric"] == "agreement"
    Path("photos/labels.csv").write_text("file,label\n" + "".join(f"{i:02}.png,{i % 4}\n" for i in reversed(range(20))))
    numbered = zoo.tune("net.onnx", "photos", "c.onnx", calibration_data="photos", **options)
    assert numbered["best"]["metrics"] == labelled["best"]["metrics"]
    np.savez("c.npz", x=np.zeros((4, 3, 8, 8), np.float32))
    assert zoo.tune("net.onnx", "c.npz", "d.onnx", calibration_data="photos", **options)["met"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {},
            r"net.onnx does not say how images are prepared; give .* --preprocess FILE.json",
        ),
        ({"preprocess": "none.json"}, "none.json"),
        ({"preprocess": "bad.json"}, "bad.json: preprocess: no size"),
        (
            {"calibration_data": "photos.npz", "preprocess": "spec.json"},
            "requires a folder of images; photos.npz is none",
        ),
        ({"calibration_data": "empty", "preprocess": "spec.json"}, "no images in the folder empty"),
    ],
)
def test_folders_that_say_too_little(photos: Path, arguments: dict[str, Any], said: str) -> None:
    Path("bad.json").write_text('{"resize": 256}')
    Path("empty").mkdir()
    with pytest.raises(RequestError, match=said):
        zoo.quantize("net.onnx", "a.onnx", **{"calibration_data": "photos", **arguments})


def test_a_zoo_model_brings_its_own_spec() -> None:
    tune = functools.partial(zoo.tune, evaluation_data="rows", output="o.onnx")
    for act in (zoo.calibrate, zoo.quantize, zoo.benchmark, zoo.plan, tune):
        with pytest.raises(RequestError, match="--preprocess is for ONNX files; .* has its own preprocessing"):
            act(zoo.names()[0], preprocess="spec.json")
