"""The image networks: torch, ONNX and published weights say the same."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from rewriting import ops, run

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.data.preprocess import Preprocess
from pipelines.graph import io, query
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.fold_input_normalization import FoldInputNormalization
from zoo.images.export import export
from zoo.images.rewrites import passes

torch = pytest.importorskip("torch", reason="training needs the train extra")
from torch import nn  # noqa: E402

from zoo.images.freeze import fill  # noqa: E402
from zoo.mobilenet import freeze as mobilenet_freeze  # noqa: E402
from zoo.mobilenet.model import build as build_mobilenet  # noqa: E402
from zoo.mobilenet.model import channels  # noqa: E402
from zoo.resnet import freeze as resnet_freeze  # noqa: E402
from zoo.resnet.model import build as build_resnet  # noqa: E402

PREPROCESSING = {"size": 64, "resize": 64, "interpolation": "bilinear", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
                 "channels": "RGB"}  # fmt: skip
# network: millions of parameters for 1,000 classes (the slim form has one bias in place of each batch norm's two
# parameters)
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet50-v1": 25_583_592,
    "resnet26d": 16_014_408,
    "mobilenet-v1": 4_231_976,
    "mobilenet-v1-slim": 4_221_032,
    "mobilenet-v2": 3_504_872,
}


def build(arch: str, classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = (build_resnet if arch.startswith("resnet") else build_mobilenet)(arch, classes)
    for name, each in model.named_parameters():  # none at the values that make a layer do nothing
        if each.ndim == 1:
            nn.init.uniform_(each, 0.2, 0.8)
        elif name.endswith(("fc.weight", "classifier.weight", "classifier.1.weight")):
            nn.init.normal_(each)
    for each in model.buffers():
        if each.ndim:
            nn.init.uniform_(each, 0.2, 0.8)
    return model.eval()


def normalized(pixels: npt.NDArray[np.uint8], preprocessing: dict[str, Any]) -> Any:
    mean, std = (torch.tensor(preprocessing[key], dtype=torch.float32).view(1, 3, 1, 1) for key in ("mean", "std"))
    x = (torch.from_numpy(pixels).float() / 255 - mean) / std
    return x.flip(1) if preprocessing["channels"] == "BGR" else x


def photos(size: int = 64, n: int = 2) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (n, 3, size, size), dtype=np.uint8)


@pytest.mark.parametrize("arch", PARAMETERS)
def test_the_networks_are_of_their_published_size(arch: str) -> None:
    model = (build_resnet if arch.startswith("resnet") else build_mobilenet)(arch, 1000)
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS[arch]


@pytest.mark.parametrize(
    "arch, names",
    [
        (
            "resnet50",
            ["conv1.weight", "bn1.running_var", "layer1.0.downsample.1.bias", "layer4.2.conv3.weight", "fc.bias"],
        ),
        (
            "resnet26d",
            [
                "conv1.0.weight",
                "conv1.4.running_mean",
                "conv1.6.weight",
                "layer2.0.downsample.1.weight",
                "layer4.1.bn3.bias",
            ],
        ),
        (
            "mobilenet-v1",
            ["conv_stem.weight", "blocks.0.0.conv_dw.weight", "blocks.3.5.bn2.running_var", "classifier.weight"],
        ),
        (
            "mobilenet-v2",
            ["features.0.0.weight", "features.1.conv.0.0.weight", "features.18.1.bias", "classifier.1.weight"],
        ),
    ],
)
def test_weights_are_called_as_in_torchvision_and_timm(arch: str, names: list[str]) -> None:
    assert set(names) <= set(build(arch).state_dict())


def test_where_the_two_resnets_stride() -> None:
    for arch, strides in (("resnet50", [(1, 1), (2, 2)]), ("resnet50-v1", [(2, 2), (1, 1)])):
        block = build(arch).get_submodule("layer3.0")
        assert [block.conv1.stride, block.conv2.stride] == strides


def test_a_residual_block_starts_as_its_shortcut() -> None:
    block = build_resnet("resnet26d", 10).layer1[1].eval()
    x = torch.rand(1, 256, 8, 8)
    assert torch.equal(block(x), x)
    inverted = build_mobilenet("mobilenet-v2", 10).get_submodule("features.3").eval()
    x = torch.randn(1, 24, 8, 8)
    assert torch.equal(inverted(x), x)


def test_same_padding_puts_the_odd_pixel_behind() -> None:
    model = build("mobilenet-v1-slim")
    x = torch.ones(1, 3, 8, 8)
    nn.init.ones_(model.conv_stem.weight)
    nn.init.zeros_(model.conv_stem.bias)
    y = model.conv_stem(model.pad(x))[0, 0]
    assert y.tolist() == [[27, 27, 27, 18]] * 3 + [[18, 18, 18, 12]]


def test_width() -> None:
    assert [channels(each) for each in (32 * 0.25, 32 * 0.35, 64 * 0.75, 3)] == [8, 16, 48, 8]
    half = build_mobilenet("mobilenet-v1", 10, 0.5)
    assert half.classifier.in_features == 512 and half.conv_stem.out_channels == 16
    assert build_mobilenet("mobilenet-v2", 10, 0.5).classifier[1].in_features == 1280  # never narrower


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(RequestError, match="resnet26d"):
        build_resnet("resnet18", 10)
    with pytest.raises(RequestError, match="mobilenet-v2"):
        build_mobilenet("mobilenet-v3", 10)
    with pytest.raises(RequestError, match="width is 0"):
        build_mobilenet("mobilenet-v1", 10, 0)


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("arch, channels", [*((arch, "RGB") for arch in PARAMETERS), ("mobilenet-v1-slim", "BGR")])
def test_the_exported_graph_computes_what_torch_does_and_so_does_the_rewritten_one(arch: str, channels: str) -> None:
    model, preprocessing = build(arch), PREPROCESSING | {"channels": channels}
    exported = export(model, Preprocess.from_json(preprocessing))
    onnx.checker.check_model(ir.to_proto(exported), full_check=True)
    x = photos(n=3)
    with torch.no_grad():
        expected = model(normalized(x, preprocessing)).numpy()
    scale = np.abs(expected).max()
    assert np.abs(run(exported, image=x)["logits"] - expected).max() <= 1e-5 * scale
    report = rewrite(exported, passes(preprocessing))
    assert report.fired("FoldInputNormalization") == 1
    kinds = set(ops(exported))
    assert not kinds & {"BatchNormalization", "Cast", "Sub", "Div", "Gather", "Identity"}
    assert np.abs(run(exported, image=x)["logits"] - expected).max() <= 1e-5 * scale


def test_names_come_from_module_paths() -> None:
    exported = export(build("resnet26d"), Preprocess.from_json(PREPROCESSING))
    nodes = {node.name: node for node in exported.graph}
    assert {"conv1.0", "layer1.0.conv1", "layer1.0.add", "layer2.0.downsample.0", "avgpool", "flatten", "fc"} <= set(
        nodes
    )
    assert nodes["layer1.0.conv1"].inputs[1].name == "layer1.0.conv1.weight"
    assert all(node.outputs[0].name == node.name for node in exported.graph if node.name != "fc")
    assert set(build("resnet26d").state_dict()) - set(exported.graph.initializers) == {
        name for name in build("resnet26d").state_dict() if name.endswith("num_batches_tracked")
    }
    (image,), (logits,) = exported.graph.inputs, exported.graph.outputs
    assert (image.name, image.dtype, query.symbolic_shape(image)) == ("image", ir.DataType.UINT8, ["batch", 3, 64, 64])
    assert (logits.name, logits.dtype, query.symbolic_shape(logits)) == ("logits", ir.DataType.FLOAT, ["batch", 10])


def test_the_digest_depends_on_the_weights_alone() -> None:
    model = build("mobilenet-v1")
    first = io.digest(export(model, Preprocess.from_json(PREPROCESSING)))
    assert io.digest(export(build("mobilenet-v1").train(), Preprocess.from_json(PREPROCESSING))) == first
    exported = export(model, Preprocess.from_json(PREPROCESSING))
    model.conv_stem.weight.data[0, 0, 0, 0] += 1
    assert io.digest(exported) == first, "the graph holds its own copy of the weights"
    assert io.digest(export(model, Preprocess.from_json(PREPROCESSING))) != first


class Odd(nn.Module):
    """What the networks of the zoo do not do, but export knows."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, (3, 1), padding=(1, 0), dilation=(1, 1))
        self.pool = pool
        self.tail = nn.Sequential(
            nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Dropout()
        )
        self.fc = nn.Linear(4, 3, bias=False)

    def forward(self, x: Any) -> Any:
        x = torch.nn.functional.pad(self.conv(x), (1, 2, 3, 4))
        x = self.pool(x)
        x += x
        return self.fc(self.tail(self.tail[1](x)))


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, padding=1, ceil_mode=True),
        nn.AvgPool2d(3, 2, padding=1, count_include_pad=True),
        nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d((2, 3), (3, 2), padding=(1, 0), count_include_pad=False),
    ],
)
def test_pools_and_pads_and_a_module_used_twice(pool: nn.Module) -> None:
    torch.manual_seed(0)
    model, preprocessing = Odd(pool).eval(), PREPROCESSING | {"size": 16}
    x = photos(16)
    exported = export(model, Preprocess.from_json(preprocessing))
    onnx.checker.check_model(ir.to_proto(exported), full_check=True)
    with torch.no_grad():
        np.testing.assert_allclose(
            run(exported, image=x)["logits"], model(normalized(x, preprocessing)).numpy(), rtol=1e-4, atol=1e-5
        )
    assert {"tail.1", "tail.1_1"} <= {node.name for node in exported.graph}


def test_a_pool_whose_windows_fit_needs_no_ceil_mode() -> None:
    pools = [
        node
        for node in export(build("resnet26d"), Preprocess.from_json(PREPROCESSING)).graph
        if node.op_type == "AveragePool"
    ]
    assert len(pools) == 3 and not any("ceil_mode" in node.attributes for node in pools)


@pytest.mark.parametrize(
    "layer, said",
    [
        (nn.GELU(), "0.1 is GELU"),
        (nn.Conv2d(3, 3, 3, padding="same"), "0.1 is Conv2d"),
        (nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), "0.1 is Conv2d"),
        (nn.BatchNorm2d(3, affine=False), "0.1 is BatchNorm2d"),
        (nn.AdaptiveAvgPool2d(2), "0.1 is AdaptiveAvgPool2d"),
        (nn.MaxPool2d(3, dilation=2), "0.1 is MaxPool2d"),
    ],
)
def test_an_unknown_module_is_named(layer: nn.Module, said: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), layer), nn.Flatten(), nn.Linear(3, 3))
    with pytest.raises(RequestError, match=said):
        export(model, Preprocess.from_json(PREPROCESSING))


class Call(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.forward = function  # type: ignore[assignment]


@pytest.mark.parametrize(
    "function, said",
    [
        (torch.sigmoid, "sigmoid"),
        (lambda x: torch.add(x, x, alpha=2), "add"),
        (lambda x: x + 1, "add"),
        (lambda x: torch.flatten(x, 2), "flatten"),
        (lambda x: nn.functional.pad(x, (1, 1, 1, 1), "reflect"), "pad"),
        (lambda x: nn.functional.pad(x, (1, 1, 1, 1), value=1), "pad"),
        (lambda x: nn.functional.pad(x, (1, 1)), "pad"),
    ],
)
def test_an_unknown_function_is_named(function: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(RequestError, match=f"^0.{said} is .*no ONNX form here"):
        export(nn.Sequential(Call(function)), Preprocess.from_json(PREPROCESSING))


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(RequestError, match="linear layer"):
        export(nn.Sequential(nn.ReLU()), Preprocess.from_json(PREPROCESSING))


# -------------------------------------------------------------------------------------------------------------- freeze


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
    said = mobilenet_freeze.freeze(trained(tmp_path))
    assert said["network"] == "mobilenet-v1" and said["parameters"] == sum(
        each.numel() for each in build_mobilenet("mobilenet-v1", 3, 0.25).parameters()
    )
    first = files.sha256(tmp_path / "fp32.onnx")
    mobilenet_freeze.freeze(tmp_path)
    assert files.sha256(tmp_path / "fp32.onnx") == first
    assert query.symbolic_shape(io.load(tmp_path / "fp32.onnx").graph.outputs[0]) == ["batch", 3]


def test_a_family_of_one_width_freezes_where_its_record_says_so(tmp_path: Path) -> None:
    trained(tmp_path, arch="resnet26d", width=1.0)
    torch.save({"state_dict": build_resnet("resnet26d", 3).state_dict()}, tmp_path / "model.pt")
    assert resnet_freeze.freeze(tmp_path)["network"] == "resnet26d"


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
    mobilenet_freeze.freeze(published(tmp_path, f"w.{kind}"))
    found = io.load(tmp_path / "fp32.onnx").graph.initializers["features.18.0.weight"]
    assert np.array_equal(query.constant(found), state["features.18.0.weight"].numpy())


def test_the_road_starts_from_the_file_that_the_card_names(tmp_path: Path) -> None:
    torch.save(build_mobilenet("mobilenet-v2", 3, 0.25).state_dict(), tmp_path / "w.pth")
    folder = zoo.load(published(tmp_path, "w.pth"))
    assert folder.weights == "w.pth"
    folder.ensure("rewritten.onnx")
    assert folder.record["fp32.onnx"]["inputs"] == {"w.pth": files.sha256(tmp_path / "w.pth")}
    assert folder.record["fp32.onnx"]["network"] == "mobilenet-v2"
    (tmp_path / "w.pth").unlink()
    with pytest.raises(RequestError, match=r"w.pth is missing, fp32.onnx is made from it"):
        folder.ensure("rewritten.onnx")


def test_what_does_not_freeze_says_why(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(RequestError, match=match) as error:
            mobilenet_freeze.freeze(tmp_path)
        assert "\n" not in str(error.value)
        assert not (tmp_path / "fp32.onnx").exists()

    published(tmp_path, "w.pth")
    refused("w.pth is missing")
    (tmp_path / "w.pth").write_bytes(b"nothing")
    refused("cannot read the weights")
    published(tmp_path, "w.pth", format="caffe")
    refused("'caffe'; known: torch, tflite")
    published(tmp_path, "w.pth", arch="mobilenet-v9")
    refused("mobilenet-v9")
    for card in ({"classes": 3}, {"classes": 3, "weights": "w.pth", "preprocessing": PREPROCESSING}):
        files.write_json(tmp_path / "card.json", card)
        refused("does not say what network")
    trained(tmp_path, features={"mean": [0, 0, 0]})
    refused("no size")
    trained(tmp_path, classes=["a", "b"])
    refused(r"2 of another shape \(classifier.weight \[3, 256\], wanted \[2, 256\], classifier.bias")


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
    assert "1 unexpected (head.bias); 1 of another shape (classifier.bias [11], wanted [10])" in str(error.value)


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
    state = resnet_freeze.read_keras(tmp_path / "w.h5")
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
    ],
)
def test_timm_computes_the_same(arch: str, theirs: str) -> None:
    timm = pytest.importorskip("timm")
    ours, reference = build(arch), timm.create_model(theirs, num_classes=10).eval()
    state = ours.state_dict()
    if arch == "mobilenet-v2":  # torchvision's names, in the same order
        state = dict(zip(reference.state_dict(), state.values(), strict=True))
    reference.load_state_dict(state)
    x = torch.randn(2, 3, 96, 64)
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
    build_of = build_resnet if card["entry"].startswith("resnet") else build_mobilenet
    build_of(card["weights"]["arch"], 3)
    assert card["files"][card["weights"]["file"]]["url"] or "ZOO_MIRROR" in card["origin"]


@pytest.fixture(scope="module")
def twenty(shared: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """uint8 [20,3,224,224] and their classes."""
    image = pytest.importorskip("PIL.Image")
    folder = shared / "data" / "imagenet" / "nips17"
    with (folder / "labels.csv").open() as text:
        rows = list(csv.DictReader(text))[::25]
    found = []
    for row in rows:
        photo = image.open(folder / row["file"]).convert("RGB")
        scale = 256 / min(photo.size)
        photo = photo.resize([round(side * scale) for side in photo.size], image.Resampling.BILINEAR)
        left, top = ((side - 224) // 2 for side in photo.size)
        found.append(np.asarray(photo.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1))
    return np.ascontiguousarray(found), np.array([int(row["label"]) for row in rows])


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
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()
    found = []
    for each in x:
        interpreter.set_tensor(taken["index"], each[None] / 127.5 - 1)
        interpreter.invoke()
        found.append(interpreter.get_tensor(given["index"])[0])
    return np.stack(found)


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
