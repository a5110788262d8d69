"""Networks of ONNX files from images to files of results, pictures and answers of a server."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.exported_networks import bright_box_network, constant_network
from PIL import Image

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io
from zoo.cli import app as cli
from zoo.serving.handlers.image_handler import NetworkHandler
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job
from zoo.serving.workers.model_loader import parse_options
from zoo.vision.networks.pipeline import NetworkPipeline

BOXES = {"wide.png": (40, 20, 120, 50), "high.png": (10, 60, 30, 90), "black.png": None}
SIZES = {"wide.png": (200, 100), "high.png": (50, 130), "black.png": (64, 64)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Black images with one white rectangle."""
    folder = tmp_path_factory.mktemp("photos")
    for name, box in BOXES.items():
        pixels = np.zeros(SIZES[name][::-1], np.uint8)
        if box is not None:
            pixels[box[1] : box[3], box[0] : box[2]] = 255
        Image.fromarray(pixels).convert("RGB").save(folder / name)
    return folder


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector of white rectangles, see `bright_box_network`."""
    return bright_box_network(tmp_path_factory.mktemp("network") / "bright boxes.onnx")


@pytest.fixture
def opened(detector: Path) -> NetworkPipeline:
    pipeline = zoo.pipeline(detector, task="detect", engine="onnxruntime")
    assert isinstance(pipeline, NetworkPipeline)
    return pipeline


def call(*words: object) -> None:
    cli.call([str(word) for word in words])


def test_boxes_are_in_pixels_of_the_image(opened: NetworkPipeline, photos: Path) -> None:
    results = opened([photos / name for name in BOXES])
    for (name, box), result in zip(BOXES.items(), results, strict=True):
        if box is None:
            assert result == []
            continue
        ((detection),) = result
        assert detection["label"] == "bright" and detection["score"] == 0.75
        pixel = max(SIZES[name]) / 64  # of the network's input
        assert np.abs(np.array(list(detection["box"].values())) - box).max() <= pixel
    with Image.open(photos / "wide.png") as image:
        assert opened(image) == opened(np.asarray(image)) == opened((photos / "wide.png").read_bytes()) == results[:1]
    assert opened.folder.card.name == "bright-boxes" and (opened.task, opened.precision) == ("detect", "fp32")


def test_the_three_parts_chain(opened: NetworkPipeline, photos: Path) -> None:
    batch = opened.preprocess(photos / "wide.png")
    assert batch["images"].shape == (1, 3, 64, 64) and batch["images"].flags.c_contiguous
    ((detection,),) = opened.postprocess(opened.predict(batch))  # in pixels of the input
    whole = opened(photos / "wide.png")[0][0]["box"]
    assert detection["box"]["xmin"] == pytest.approx(whole["xmin"] * 64 / 200, abs=0.01)


def test_a_folder_is_run_to_a_file_and_drawn(detector: Path, photos: Path, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "out.jsonl"
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    call("run", detector, "--task", "detect", photos, tmp_path / "broken.jpg", photos / "wide.png", "-o", output,
         "--engine", "onnxruntime", "--draw", tmp_path / "drawn", "--json")  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["skipped"], report["precision"]) == (4, 1, "fp32")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [Path(line["file"]).name for line in lines] == [
        "black.png",
        "high.png",
        "wide.png",
        "broken.jpg",
        "wide.png",
    ]
    assert set(lines[2]) == {"file", "label", "score", "xmin", "ymin", "xmax", "ymax"} and lines[2] == lines[4]
    assert "is no image" in lines[3]["error"] and "label" not in lines[3]
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        "black.png",
        "high.png",
        "wide-2.png",
        "wide.png",
    ]
    with Image.open(tmp_path / "drawn" / "wide.png") as picture:
        pixels = np.asarray(picture)
    assert pixels.shape == (100, 200, 3) and len(np.unique(pixels[49, 45:115], axis=0)) == 1
    assert np.ptp(pixels[21, 100]) > 50  # the frame has a color
    call("run", detector, photos, "--confidence", "0.8", "-o", tmp_path / "none.csv", "--engine", "onnxruntime")
    rows = list(csv.DictReader((tmp_path / "none.csv").open()))
    assert len(rows) == 3 and not any(row["label"] for row in rows)


def test_masks_and_embeddings_are_written(photos: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    (tmp_path / "spec.json").write_text('{"size": 64}')
    logits = np.zeros((1, 2, 8, 8), np.float32)
    logits[:, 1, 4:] = 1
    network = constant_network(tmp_path / "map.onnx", {"logits": logits})
    options: dict[str, Any] = {"preprocess": tmp_path / "spec.json", "engine": "onnxruntime"}
    zoo.run(network, photos / "wide.png", tmp_path / "map.jsonl", task="segment", draw=tmp_path / "drawn", **options)
    first, second = (json.loads(line) for line in (tmp_path / "map.jsonl").read_text().splitlines())
    assert first["mask"]["size"] == [100, 200] and "xmin" not in first and second["label"] == "class 1"
    zoo.run(network, photos / "wide.png", tmp_path / "map.csv", task="segment", **options)
    assert json.loads(next(csv.DictReader((tmp_path / "map.csv").open()))["mask"]) == first["mask"]
    vector = constant_network(tmp_path / "vector.onnx", {"output": np.array([[0.1, 2]], np.float32)})
    for suffix in ("jsonl", "csv", "parquet"):
        zoo.run(vector, photos, tmp_path / f"vectors.{suffix}", task="embed", **options)
    assert json.loads((tmp_path / "vectors.jsonl").read_text().splitlines()[0])["embedding"] == [0.1, 2]
    assert json.loads(next(csv.DictReader((tmp_path / "vectors.csv").open()))["embedding"]) == [0.1, 2]
    table = parquet.read_table(tmp_path / "vectors.parquet")
    assert np.float32(table["embedding"][2].as_py()).tolist() == [np.float32(0.1), 2]
    with pytest.raises(RequestError, match="an embedding has none"):
        zoo.run(vector, photos, tmp_path / "no.jsonl", task="embed", draw=tmp_path / "no", **options)
    classes = constant_network(tmp_path / "classes.onnx", {"output": np.array([[0, 3]], np.float32)})
    zoo.run(classes, photos, tmp_path / "classes.jsonl", task="classify", draw=tmp_path / "drawn", **options)
    assert json.loads((tmp_path / "classes.jsonl").read_text().splitlines()[0])["label2"] == "class 0"


def test_batches_of_a_fixed_size_are_filled_up(photos: Path, tmp_path: Path) -> None:
    scores = np.tile(np.float32([[1, 3]]), (2, 1))
    network = constant_network(tmp_path / "two.onnx", {"output": scores}, {}, (2, 3, 64, 64))
    (tmp_path / "spec.json").write_text('{"size": 64}')
    report = zoo.run(
        network, photos, tmp_path / "out.csv", task="classify", preprocess=tmp_path / "spec.json", engine="onnxruntime"
    )
    assert report["images"] == 3


def test_quantized_networks_keep_their_conventions(detector: Path, tmp_path: Path, photos: Path) -> None:
    io.save(io.load(detector), tmp_path / "saved.onnx")
    opened = zoo.pipeline(tmp_path / "saved.onnx", engine="onnxruntime")
    assert opened(photos / "wide.png")[0][0]["label"] == "bright"


def test_requests_are_refused_in_one_line(detector: Path, tmp_path: Path, photos: Path, folder: Path) -> None:
    for options, message in (
        ({"task": "pose"}, "unknown task 'pose'; choose one of detect, segment, classify, embed"),
        ({"confidence": 1.5}, "--confidence is 1.5; expected 0 to 1"),
        ({"labels": tmp_path / "none.txt"}, "cannot read the class names"),
        ({"engine": "native"}, "native computes in int8"),
    ):
        with pytest.raises(RequestError, match=message):
            zoo.pipeline(detector, **options)
    with pytest.raises(RequestError, match="--task is for .onnx files"):
        zoo.pipeline(folder, task="detect")
    with pytest.raises(RequestError, match="no ONNX model at"):
        zoo.pipeline(tmp_path / "none.onnx")
    with pytest.raises(RequestError, match="would replace the input"):
        zoo.run(detector, photos, detector)


def test_shipped_names_are_those_of_coco(detector: Path, tmp_path: Path) -> None:
    boxes = np.zeros((1, 84, 21), np.float32)
    network = constant_network(tmp_path / "coco.onnx", {"output0": boxes}, {}, (1, 3, 32, 32))
    assert zoo.pipeline(network, labels="coco", engine="onnxruntime").name(16) == "dog"
    one = {"boxes": np.zeros((1, 4), np.float32), "labels": np.array([18]), "scores": np.ones(1, np.float32)}
    network = constant_network(tmp_path / "torchvision.onnx", one, {}, (3, "height", "width"))
    ((detection,),) = zoo.pipeline(network, labels="coco91", engine="onnxruntime")(np.zeros((20, 30, 3), np.uint8))
    assert detection["label"] == "dog"


def test_empty_lines_and_numbers_of_names_keep_the_classes(detector: Path, tmp_path: Path) -> None:
    """Of labels files with unused classes, and of metadata written as JSON: the names of later classes were shifted."""
    boxes = np.zeros((1, 7, 21), np.float32)
    network = constant_network(tmp_path / "model.onnx", {"output0": boxes}, {}, (1, 3, 32, 32))
    labels = tmp_path / "labels.txt"
    labels.write_text("cat\r\n\r\ndog\u2028puppy\r\n\r\n")
    (tmp_path / "labels.json").write_text('{"0": "cat", "2": "dog\u2028puppy"}')
    metadata = {"names": '{"0": "cat", "2": "dog\u2028puppy"}', "task": "detect", "stride": "32"}
    named = constant_network(tmp_path / "named.onnx", {"output0": boxes}, metadata, (1, 3, 32, 32))
    for path, source in ((network, labels), (network, tmp_path / "labels.json"), (named, None)):
        opened = zoo.pipeline(path, labels=source, engine="onnxruntime")
        assert [opened.name(i) for i in range(3)] == ["cat", "class 1", "dog\u2028puppy"]


def multipart(*files: tuple[str, bytes]) -> tuple[str, bytes]:
    parts = [b'--x\r\nContent-Disposition: form-data; filename="' + name.encode() + b'"\r\n\r\n' + content + b"\r\n"
             for name, content in files]  # fmt: skip
    return "multipart/form-data; boundary=x", b"".join(parts) + b"--x--\r\n"


def test_a_server_answers_with_boxes(detector: Path, photos: Path) -> None:
    (served,), _ = parse_options([str(detector)], task="detect", confidence=0.5, engine="onnxruntime")
    served.prepare()
    handler = served.handler()
    assert (
        isinstance(handler, NetworkHandler) and handler.describe()["task"] == "detect" and served.name == "bright-boxes"
    )
    kind, body = multipart(*((name, (photos / name).read_bytes()) for name in BOXES))
    (result,) = handler.run([Job(1, "run", kind, responses.JSON, {}, -1, body)])
    results = json.loads(result.body)["results"]
    assert result.status == 200 and [row["row"] for row in results][:2] == [1, 2] and results[0]["file"] == "wide.png"
    assert results[0]["label"] == "bright" and results[0]["xmax"] == pytest.approx(120, abs=4)
    (result,) = handler.run([Job(2, "run", "image/png", responses.JSON, {}, -1, (photos / "high.png").read_bytes())])
    assert json.loads(result.body)["results"][0]["ymin"] == pytest.approx(60, abs=3)
    with pytest.raises(RequestError, match="--task is for .onnx files; found none to serve"):
        parse_options(["wide-deep-criteo"], task="detect")
