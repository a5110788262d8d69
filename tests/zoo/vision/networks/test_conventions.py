"""Networks recognized by the shapes, graph and metadata of exporters, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.exported_networks import constant_network, ultralytics

import zoo
from pipelines.core.errors import RequestError
from zoo.vision.networks.conventions import read_signature
from zoo.vision.networks.pipeline import NetworkPipeline

ANCHORS = 84  # of 64 x 64 pixels
BOX, OTHER = [32, 24, 20, 10], [10, 10, 8, 8]  # centre and size, in pixels
CORNERS = [22, 19, 42, 29]
IMAGE = np.zeros((64, 64, 3), np.uint8)


def rows(*anchors: list[float], count: int = ANCHORS) -> Any:
    """Anchors [1, count, channels], the others without a score."""
    output = np.zeros((1, count, len(anchors[0])), np.float32)
    output[0, 3 : 3 + len(anchors)] = anchors
    return output


def opened(path: Path, **options: Any) -> NetworkPipeline:
    pipeline = zoo.pipeline(path, engine="onnxruntime", **options)
    assert isinstance(pipeline, NetworkPipeline)
    return pipeline


V8 = rows([*BOX, 0.1, 0.9], [*OTHER, 0.2, 0.1]).transpose(0, 2, 1)
V5 = rows([*BOX, 0.9, 0.1, 1.0], [*OTHER, 0.2, 1.0, 1.0], count=3 * ANCHORS)
SELECTED = rows([*CORNERS, 0.9, 1], [6, 6, 14, 14, 0.2, 0], count=30)
SHARES = [side / 64 for side in BOX]
NAMES = ultralytics("detect", ["cat", "dog"])
LOGIT = float(np.log(9))  # of 0.9, by a sigmoid
DETECTORS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # outputs, metadata, options
    "v8": ({"output0": V8}, NAMES, {}),
    "v8 of free sizes": ({"output0": V8}, NAMES, {"free": ("output0",)}),
    "v8 of free images": ({"output0": V8}, NAMES, {"shape": ("n", 3, "height", "width")}),
    "v8 without metadata": ({"output0": V8}, {}, {}),
    "v8 with anchors first": ({"output0": V8.transpose(0, 2, 1)}, NAMES, {}),
    "v5": ({"output0": V5}, {"stride": 32, "names": ["cat", "dog"]}, {}),
    "v5 without metadata": ({"output0": V5}, {}, {}),
    "v10": ({"output0": SELECTED}, NAMES, {}),
    "v10 without metadata": ({"output0": SELECTED}, {}, {}),
    "end to end": ({"output0": SELECTED}, NAMES | {"end2end": True}, {}),
    "RT-DETR of Ultralytics": (
        {"output0": rows([*SHARES, 0.1, 0.9], count=30)},
        NAMES | {"description": "Ultralytics rtdetr-l model"},
        {},
    ),
    "RT-DETR of Ultralytics 8.4": (
        {"output0": rows([*SHARES, 0.9, 1], count=30)},
        NAMES | {"head": "RTDETRDecoder"},
        {},
    ),
    "RT-DETR of transformers": (
        {
            "logits": rows([-9, LOGIT], count=30) - 9 * (rows([1, 1], count=30) == 0),
            "pred_boxes": rows(SHARES, count=30),
        },
        {},
        {"labels": 2},
    ),
    "DETR of transformers": (
        {
            "logits": rows([0, float(np.log(18)), 0], count=30) + np.array([0, 0, 9]) * (rows([1], count=30) == 0),
            "pred_boxes": rows(SHARES, count=30),
            "last_hidden_state": np.zeros((1, 30, 7), np.float32),
        },
        {},
        {"labels": 2},
    ),
    "probabilities of queries": (
        {"scores": rows([-99, LOGIT], count=30) - 99 * (rows([1, 1], count=30) == 0), "boxes": rows(SHARES, count=30)},
        {},
        {"last": "Sigmoid"},
    ),
    "torchvision": (
        {"boxes": rows(CORNERS)[0, 3:4], "labels": np.array([1]), "scores": np.array([0.9], np.float32)},
        {},
        {"shape": (3, "height", "width")},
    ),
    "RT-DETR of its authors": (
        {
            "labels": np.ones((1, 1), np.int64),
            "boxes": rows(CORNERS)[:, 3:4],
            "scores": np.full((1, 1), 0.9, np.float32),
        },
        {},
        {"sizes": True},
    ),
}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_is_recognized(tmp_path: Path, name: str) -> None:
    outputs, metadata, options = DETECTORS[name]
    outputs = {key: array.astype(np.float32) if array.dtype.kind == "f" else array for key, array in outputs.items()}
    arguments: dict[str, Any] = {}
    if count := options.pop("labels", 0) if "labels" in (options := dict(options)) else 0:
        (tmp_path / "labels.txt").write_text("\n".join(["cat", "dog"][:count]))
        arguments["labels"] = tmp_path / "labels.txt"
    if options.get("last"):  # boxes go through the sigmoid, too
        outputs["boxes"] = np.log(np.clip(outputs["boxes"], 1e-9, 1) / (1 - np.clip(outputs["boxes"], 1e-9, 0.999)))
    if not metadata and "labels" not in arguments and options.get("shape", (1,))[0] != 3 and "sizes" not in options:
        (tmp_path / "spec.json").write_text('{"size": 64, "mean": [0, 0, 0], "std": [1, 1, 1]}')
        arguments["preprocess"] = tmp_path / "spec.json"
    elif arguments:
        arguments["preprocess"] = tmp_path / "spec.json"
        (tmp_path / "spec.json").write_text('{"size": {"height": 64, "width": 64}, "do_resize": true}')
    network = constant_network(tmp_path / "model.onnx", outputs, metadata, **options)
    for task in ("detect", None):
        ((detection, *others),) = opened(network, task=task, **arguments)(IMAGE)
        assert not others and detection["score"] == pytest.approx(0.9, abs=1e-4)
        assert list(detection["box"].values()) == pytest.approx(CORNERS, abs=0.02)
        assert detection["label"] == ("dog" if metadata or "labels" in arguments else "class 1")


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "another task": ({"output0": V8}, NAMES | {"task": "pose"}, {}, "for the task 'pose'; expected detect"),
    "other names": (
        {"output0": V8},
        ultralytics("detect", ["cat"]),
        {},
        "does not fit 1 class names; expected 2 names, or 1 if anchors",
    ),
    "objectness or not": (
        {"output0": rows([*BOX, 0.9, 0.1, 1.0])},
        {},
        {},
        "may be .anchors, 4 . classes. or .anchors, 5 . classes.; give the names",
    ),
    "queries without names": (
        {"logits": rows([0, 1], count=9), "pred_boxes": rows(SHARES, count=9)},
        {},
        {"preprocess": True},
        "no names; give --labels FILE with 2 names .* or 1 ",
    ),
    "no detector": (
        {"probabilities": np.zeros((1, 5), np.float32)},
        {},
        {"preprocess": True},
        "no outputs for the task detect",
    ),
    "no preprocessing": ({"logits": np.zeros((1, 5), np.float32)}, {}, {}, "how images are prepared"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_is_ambiguous_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    outputs, metadata, options, message = REFUSED[name]
    (tmp_path / "spec.json").write_text('{"size": 64}')
    arguments = {"preprocess": tmp_path / "spec.json"} if options else {}
    network = constant_network(tmp_path / "model.onnx", outputs, metadata)
    with pytest.raises(RequestError, match=message) as error:
        opened(network, task="detect", **arguments)
    assert "\n" not in str(error.value) and "model.onnx" in str(error.value)


def test_raw_maps_of_a_detector_are_refused(tmp_path: Path) -> None:
    import onnx
    from onnx import helper, numpy_helper

    path = constant_network(tmp_path / "model.onnx", {"output0": V8}, NAMES)
    model = onnx.load(path)
    (node,) = [node for node in model.graph.node if node.output[0] == "output0"]
    model.graph.initializer.append(numpy_helper.from_array(np.eye(ANCHORS, dtype=np.float32)[:, :, None], "weights"))
    model.graph.node.insert(-1, helper.make_node("Transpose", [node.input[0]], ["rows"], perm=[0, 2, 1]))
    model.graph.node.insert(-1, helper.make_node("Conv", ["rows", "weights"], ["raw"]))
    model.graph.node[-1].CopyFrom(helper.make_node("Transpose", ["raw"], ["output0"], perm=[0, 2, 1]))
    onnx.save(model, path)
    with pytest.raises(RequestError, match="raw boxes that the graph does not decode"):
        opened(path)


def test_masks_of_prototypes_and_of_torchvision(tmp_path: Path) -> None:
    prototypes = np.stack([np.ones((16, 16)), np.tile(np.linspace(-1, 1, 16), (16, 1))])[None].astype(np.float32)
    v8 = rows([*BOX, 0.1, 0.9, 1, 0], [*OTHER, 0.9, 0.1, -1, 0]).transpose(0, 2, 1)  # the second has no pixel
    names = ultralytics("segment", ["cat", "dog"])
    selected = rows([*CORNERS, 0.9, 1, 0, 1], count=30)
    boxes, labels, scores = rows(CORNERS)[0, 3:4], np.array([1]), np.array([0.9], np.float32)
    masks = np.zeros((1, 1, 64, 64), np.float32)
    masks[0, 0, 20:25, 30:35] = 0.8
    networks = {
        "v8": ({"output0": v8, "output1": prototypes}, names, {}),
        "nms": ({"output0": selected, "output1": prototypes}, names, {}),
        "mask": ({"boxes": boxes, "labels": labels, "scores": scores, "masks": masks}, {}, {"shape": (3, "h", "w")}),
    }
    expected = {
        "v8": (slice(19, 29), slice(22, 42)),
        "nms": (slice(19, 29), slice(32, 42)),
        "mask": (slice(20, 25), slice(30, 35)),
    }
    for name, (outputs, metadata, options) in networks.items():
        pipeline = opened(constant_network(tmp_path / f"{name}.onnx", outputs, metadata, **options))
        assert pipeline.task == "segment"
        ((detection,),) = pipeline(IMAGE)
        mask = np.zeros((64, 64), np.uint8)
        mask[expected[name]] = 255
        assert detection["mask"].mode == "L" and np.array_equal(np.asarray(detection["mask"]), mask), name
        ((box,),) = (
            opened(tmp_path / f"{name}.onnx", task="detect", confidence=0.5)(IMAGE) if name == "mask" else [[detection]]
        )
        assert box["box"] == detection["box"]


def test_classes_of_pixels(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"id2label": {"0": "sky", "1": "road", "2": "tree"}}')
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 64, "width": 64}, "do_resize": true}')
    logits = np.zeros((1, 3, 16, 16), np.float32)
    logits[:, 0, :8], logits[:, 2, 8:] = 1, 1
    image = np.zeros((40, 30, 3), np.uint8)
    for name, outputs in {
        "segformer": {"logits": logits},
        "deeplab": {"out": logits, "aux": -logits},
        "argmax": {"classes": logits.argmax(axis=1)},
        "argmax kept": {"classes": logits.argmax(axis=1)[:, None]},
    }.items():
        pipeline = opened(constant_network(tmp_path / f"{name}.onnx", outputs), task="segment")
        ((sky, tree),) = pipeline(image)
        assert (sky["label"], tree["label"], sky["score"]) == ("sky", "tree", None)
        assert np.asarray(sky["mask"])[:20].all() and not np.asarray(tree["mask"])[:20].any()
    binary = constant_network(tmp_path / "binary.onnx", {"logits": logits[:, :1] - 0.5}, last="Sigmoid")
    ((one,),) = opened(binary, task="segment")(image)
    assert one["label"] == "sky" and np.asarray(one["mask"])[:19].all() and not np.asarray(one["mask"])[21:].any()


def test_classifiers_and_embeddings(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text('{"size": 64}')
    logits = np.array([[0, 2, 1]], np.float32)
    tokens = np.arange(2 * 17 * 3, dtype=np.float32).reshape(2, 17, 3)[:1]
    spec = {"preprocess": tmp_path / "spec.json"}
    network = constant_network(tmp_path / "model.onnx", {"output": logits})
    with pytest.raises(RequestError, match="classify or embed: say which with --task"):
        opened(network, **spec)
    (result,) = opened(network, task="classify", **spec)(IMAGE)
    powers = np.exp(logits[0]) / np.exp(logits).sum()
    assert result["label"] == "class 1" and result["probability"] == pytest.approx(powers[1])
    assert [name for name, _ in result["top5"]] == ["class 1", "class 2", "class 0"]
    softmax = constant_network(tmp_path / "softmax.onnx", {"output": logits}, last="Softmax")
    (result,) = opened(softmax, **spec)(IMAGE)
    assert result["probability"] == pytest.approx(powers[1])
    with pytest.raises(RequestError, match="2 class names for 3 classes"):
        (tmp_path / "two.json").write_text('["a", "b"]')
        opened(softmax, labels=tmp_path / "two.json", **spec)(IMAGE)
    for name, outputs, expected in (
        ("vector", {"output": logits}, logits[0]),
        ("pooled", {"last_hidden_state": tokens, "pooler_output": logits}, logits[0]),
        ("cls", {"last_hidden_state": tokens}, tokens[0, 0]),
        ("mean", {"last_hidden_state": tokens[:, 1:]}, tokens[0, 1:].mean(axis=0)),
        ("pixels", {"features": tokens[:, :, :, None]}, tokens[0].mean(axis=1)),
        ("clip", {"image_embeds": logits, "last_hidden_state": tokens}, logits[0]),
    ):
        network = constant_network(tmp_path / f"{name}.onnx", outputs)
        (result,) = opened(network, task="embed", **spec)(IMAGE)
        np.testing.assert_allclose(result["embedding"], expected, rtol=1e-6)


def test_ultralytics_classifiers_are_cropped(tmp_path: Path) -> None:
    scores = {"output0": np.array([[0.2, 0.8]], np.float32)}
    v8 = opened(constant_network(tmp_path / "v8.onnx", scores, ultralytics("classify", ["cat", "dog"]), last="Softmax"))
    assert v8.task == "classify" and v8.transform.resize == (64,) and v8.transform.std == (1, 1, 1)
    v5 = opened(
        constant_network(tmp_path / "v5.onnx", scores, {"stride": 32, "names": ["cat", "dog"]}), task="classify"
    )
    assert v5.transform.fit == "crop" and v5.transform.mean[0] == 0.485


@pytest.mark.parametrize(("kind", "precision"), [("float", "fp32"), ("float16", "fp16")])
def test_layers_with_float16_weights_are_named(tmp_path: Path, kind: str, precision: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17]> net ({kind}[n,2] x) => ({kind}[n,2] y)
        <{kind}[2,2] w = {{1, 0, 0, 1}}> {{ y = MatMul(x, w) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "net.onnx")
    assert read_signature(tmp_path / "net.onnx").precision == precision
