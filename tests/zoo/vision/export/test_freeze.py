"""Image networks frozen: trained folders, published weights of torchvision, timm and Keras, and what does not freeze."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.rewriting import run

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.rewrites.fold_input_normalization import FoldInputNormalization
from zoo.vision.export.rewrites import passes

torch = pytest.importorskip("torch", reason="training needs the train extra")
from helpers.published_networks import PREPROCESSING, build, normalized  # noqa: E402

from zoo.vision.export.freeze import fill, read_torch  # noqa: E402
from zoo.vision.models import mobilenet, resnet  # noqa: E402
from zoo.vision.models.mobilenet import build as build_mobilenet  # noqa: E402
from zoo.vision.models.resnet import build as build_resnet  # noqa: E402


def trained(folder: Path, **changes: Any) -> Path:
    """A folder as training leaves it."""
    about = {
        "arch": "mobilenet-v1",
        "classes": ["cat", "dog", "eel"],
        "width": 0.25,
        "features": PREPROCESSING,
    } | changes
    torch.manual_seed(0)
    torch.save({"state_dict": build_mobilenet("mobilenet-v1", 3, 0.25).state_dict()}, folder / "model.pt")
    files.write_json(folder / "train.json", about)
    return folder


def test_a_trained_folder_freezes_to_the_same_bytes(tmp_path: Path) -> None:
    said = mobilenet.MOBILENET_V1.freeze(trained(tmp_path))
    assert said["network"] == "mobilenet-v1" and said["parameters"] == sum(
        parameter.numel() for parameter in build_mobilenet("mobilenet-v1", 3, 0.25).parameters()
    )
    first = files.sha256(tmp_path / "fp32.onnx")
    mobilenet.MOBILENET_V1.freeze(tmp_path)
    assert files.sha256(tmp_path / "fp32.onnx") == first
    assert query.symbolic_shape(io.load(tmp_path / "fp32.onnx").graph.outputs[0]) == ["batch", 3]


@pytest.mark.parametrize("key", ["state_dict", "model", None])
def test_a_key_around_published_weights_is_removed(tmp_path: Path, key: str | None) -> None:
    state = {"head.bias": torch.arange(3.0)}
    torch.save(state if key is None else {key: state}, tmp_path / "weights.pth")
    assert read_torch(tmp_path / "weights.pth")["head.bias"].tolist() == [0, 1, 2]


def test_a_family_of_one_width_freezes_where_its_record_says_so(tmp_path: Path) -> None:
    trained(tmp_path, arch="resnet26d", width=1.0)
    torch.save({"state_dict": build_resnet("resnet26d", 3).state_dict()}, tmp_path / "model.pt")
    assert resnet.RESNET50.freeze(tmp_path)["network"] == "resnet26d"


def published(folder: Path, file: str, **weights: Any) -> Path:
    """A folder with a card that names the file of its weights."""
    details = {"weights": {"file": file, "format": "torch", "arch": "mobilenet-v2", "width": 0.25} | weights}
    card = {"name": "small", "entry": "mobilenet-v2", "description": "a test", "files": {}, **details}
    files.write_json(folder / "card.json", {**card, "classes": 3, "preprocessing": PREPROCESSING})
    return folder


@pytest.mark.parametrize("kind", ["pth", "bin", "safetensors"])
def test_published_weights_freeze_by_what_the_card_says(kind: str, tmp_path: Path) -> None:
    state = build_mobilenet("mobilenet-v2", 3, 0.25).state_dict()
    if kind == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "w.safetensors")
    else:
        torch.save(state, tmp_path / f"w.{kind}")
    mobilenet.MOBILENET_V1.freeze(published(tmp_path, f"w.{kind}"))
    weight = io.load(tmp_path / "fp32.onnx").graph.initializers["features.18.0.weight"]
    assert np.array_equal(query.constant(weight), state["features.18.0.weight"].numpy())


def test_the_road_starts_from_the_file_that_the_card_names(tmp_path: Path) -> None:
    torch.save(build_mobilenet("mobilenet-v2", 3, 0.25).state_dict(), tmp_path / "w.pth")
    folder = zoo.load(published(tmp_path, "w.pth"))
    assert folder.weights == "w.pth"
    folder.ensure("rewritten.onnx")
    assert folder.record["fp32.onnx"]["inputs"] == {"w.pth": files.sha256(tmp_path / "w.pth")}
    assert folder.record["fp32.onnx"]["network"] == "mobilenet-v2"
    (tmp_path / "w.pth").unlink()
    with pytest.raises(RequestError, match=r"w.pth is missing, which fp32.onnx is built from"):
        folder.ensure("rewritten.onnx")


def test_what_does_not_freeze_says_why(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(RequestError, match=match) as error:
            mobilenet.MOBILENET_V1.freeze(tmp_path)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "fp32.onnx").exists()

    published(tmp_path, "w.pth")
    refused("w.pth is missing")
    (tmp_path / "w.pth").write_bytes(b"nothing")
    refused("cannot read the weights")
    published(tmp_path, "w.pth", format="caffe")
    refused("'caffe'; supported: torch, tflite")
    published(tmp_path, "w.pth", arch="mobilenet-v9")
    refused("mobilenet-v9")
    for card in ({"classes": 3}, {"classes": 3, "weights": "w.pth", "preprocessing": PREPROCESSING}):
        files.write_json(tmp_path / "card.json", card)
        refused("does not say what network")
    trained(tmp_path, features={"mean": [0, 0, 0]})
    refused("no size")
    trained(tmp_path, classes=["a", "b"])
    refused(r"2 of another shape \(classifier.weight \[3, 256\], expected \[2, 256\], classifier.bias")


def test_weights_that_do_not_fit_are_all_named() -> None:
    model = build("mobilenet-v1")
    state = model.state_dict()
    for name in [name for name in state if name.startswith("blocks.0.0.bn1")] + ["conv_stem.weight"]:
        state.pop(name)
    state |= {"head.bias": torch.zeros(3), "classifier.bias": torch.zeros(11)}
    with pytest.raises(RequestError) as error:
        fill(model, state, "w.pth")
    assert "w.pth" in str(error.value)
    assert "5 missing (conv_stem.weight, blocks.0.0.bn1.weight, blocks.0.0.bn1.bias, ...)" in str(error.value)
    assert "1 unexpected (head.bias); 1 of another shape (classifier.bias [11], expected [10])" in str(error.value)


def test_keras_names_and_layouts(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    layers = {
        "conv1_conv": [(7, 7, 3, 4), (4,)],
        "conv1_bn": [(4,)] * 4,
        "conv2_block1_0_conv": [(1, 1, 4, 8), (8,)],
        "conv2_block1_0_bn": [(8,)] * 4,
        "conv5_block12_3_conv": [(1, 1, 4, 8), (8,)],
        "predictions": [(5, 6), (6,)],
        "avg_pool": [],
    }
    with h5py.File(tmp_path / "w.h5", "w") as archive:
        for number, (name, shapes) in enumerate(layers.items()):
            group = archive.create_group(f"layers/layer_{number}/vars")
            group.attrs["name"] = name
            for index, shape in enumerate(shapes):
                group[str(index)] = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    state = resnet.read_keras(tmp_path / "w.h5")
    assert set(state) == {
        *(
            f"{name}.{key}"
            for name in ("conv1", "layer1.0.downsample.0", "layer4.11.conv3", "fc")
            for key in ("weight", "bias")
        ),
        *(
            f"{name}.{key}"
            for name in ("bn1", "layer1.0.downsample.1")
            for key in ("weight", "bias", "running_mean", "running_var")
        ),
    }
    assert state["conv1.weight"].shape == (4, 3, 7, 7) and state["conv1.weight"][1, 2, 0, 1] == 3 * 4 + 2 * 4 + 1
    assert state["fc.weight"].shape == (6, 5) and state["fc.weight"][1, 0] == 1


@pytest.mark.parametrize(
    "arch, theirs",
    [
        ("resnet50", "resnet50"),
        ("resnet26d", "resnet26d"),
        ("mobilenet-v1", "mobilenetv1_100"),
        ("mobilenet-v2", "mobilenetv2_100"),
        ("mobilenet-v3-large", "mobilenetv3_large_100"),
        ("efficientnet-lite0", "tf_efficientnet_lite0"),
        ("convnext-tiny", "convnext_tiny"),
        ("deit-tiny", "deit_tiny_patch16_224"),
        ("vit-small", "vit_small_patch16_224"),
    ],
)
def test_timm_computes_the_same(arch: str, theirs: str) -> None:
    timm = pytest.importorskip("timm")
    ours, reference = build(arch), timm.create_model(theirs, num_classes=10).eval()
    state = ours.state_dict()
    if arch == "mobilenet-v2":  # torchvision's names, in the same order
        state = dict(zip(reference.state_dict(), state.values(), strict=True))
    reference.load_state_dict(state)
    x = torch.randn(1, 3, 224, 224) if arch in ("deit-tiny", "vit-small") else torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------- published models, photos

PUBLISHED = ("mobilenet-v1-imagenet", "mobilenet-v2-imagenet", "resnet50-imagenet")


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-imagenet")])
def test_a_card_of_published_weights_says_what_it_takes(name: str) -> None:
    card = json.loads((zoo.SHIPPED / name / "card.json").read_text())
    assert {"licence", "origin", "data", "architecture"} <= set(card)
    assert card["weights"]["file"] in card["files"] and card["classes"] in (1000, 1001)
    assert {"size", "resize", "interpolation", "mean", "std", "channels"} == set(card["preprocessing"])
    zoo.entry(card["entry"]).build(card["weights"]["arch"], 3)  # type: ignore[attr-defined]
    assert card["files"][card["weights"]["file"]]["url"] or "ZOO_MIRROR" in card["origin"]


@pytest.fixture(scope="module")
def twenty(shared: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """uint8 [20,3,224,224] and their classes."""
    image = pytest.importorskip("PIL.Image")
    folder = shared / "data" / "imagenet" / "nips17"
    with (folder / "labels.csv").open() as text:
        rows = list(csv.DictReader(text))[::25]
    crops = []
    for row in rows:
        photo = image.open(folder / row["file"]).convert("RGB")
        scale = 256 / min(photo.size)
        photo = photo.resize([round(side * scale) for side in photo.size], image.Resampling.BILINEAR)
        left, top = ((side - 224) // 2 for side in photo.size)
        crops.append(np.asarray(photo.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1))
    return np.ascontiguousarray(crops), np.array([int(row["label"]) for row in rows])


def reference(
    name: str, file: Path, pixels: npt.NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> npt.NDArray[np.float32]:
    """Logits, or for TFLite probabilities, of the software that the weights came from (for torchvision's: torch,
    normalizing by itself).
    """
    if name == "mobilenet-v2-imagenet":
        model = build_mobilenet("mobilenet-v2", 1000).eval()
        model.load_state_dict(torch.load(file, weights_only=True))
        with torch.no_grad():
            return np.asarray(model(normalized(pixels, PREPROCESSING)))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    x = pixels.transpose(0, 2, 3, 1).astype(np.float32)
    if name == "resnet50-imagenet":
        keras = pytest.importorskip("keras")
        model = keras.applications.ResNet50(weights=str(file), classifier_activation=None)
        return np.asarray(model.predict(keras.applications.resnet.preprocess_input(x), verbose=0))
    interpreter = pytest.importorskip("tensorflow").lite.Interpreter(str(file))
    interpreter.allocate_tensors()
    (taken,), (output,) = interpreter.get_input_details(), interpreter.get_output_details()
    outputs = []
    for image in x:
        interpreter.set_tensor(taken["index"], image[None] / 127.5 - 1)
        interpreter.invoke()
        outputs.append(interpreter.get_tensor(output["index"])[0])
    return np.stack(outputs)


@pytest.mark.data
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_weights_classify_as_where_they_came_from(
    name: str,
    shared: Path,
    twenty: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZOO_MIRROR", str(shared / "weights"))
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    folder, (pixels, labels) = zoo.load(name), twenty
    expected = reference(name, folder.path / folder.weights, pixels, monkeypatch)
    for file in ("fp32.onnx", "rewritten.onnx"):
        logits = run(io.load(folder.ensure(file)), optimized=True, image=pixels)["logits"]
        assert (logits.argmax(1) - (name == "mobilenet-v1-imagenet") == labels).mean() >= 0.75
        if name == "mobilenet-v1-imagenet":  # TFLite ends with a softmax
            odds = np.exp(logits - logits.max(axis=1, keepdims=True))
            logits = odds / odds.sum(axis=1, keepdims=True)
        assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_the_pass_for_pixels_is_the_first() -> None:
    assert isinstance(passes()[0], FoldInputNormalization)
