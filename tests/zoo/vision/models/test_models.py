"""The image networks: torch, ONNX and published weights say the same."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from helpers.rewriting import ops, run

from pipelines.core.errors import RequestError
from pipelines.data.preprocess import Preprocess
from pipelines.graph import io, query
from pipelines.rewrites.driver import rewrite
from zoo.vision.export.fx_export import export
from zoo.vision.export.rewrites import passes

torch = pytest.importorskip("torch", reason="training needs the train extra")
from helpers.published_networks import PREPROCESSING, build, build_of, normalized  # noqa: E402
from helpers.tiers import one_in  # noqa: E402
from torch import nn  # noqa: E402

from zoo.vision.models import convnext, vision_transformer  # noqa: E402
from zoo.vision.models.mobilenet import build as build_mobilenet  # noqa: E402
from zoo.vision.models.mobilenet import channels  # noqa: E402
from zoo.vision.models.resnet import build as build_resnet  # noqa: E402

# network: millions of parameters for 1,000 classes (the slim form has one bias in place of each batch norm's two
# parameters)
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet50-v1": 25_583_592,
    "resnet26d": 16_014_408,
    "mobilenet-v1": 4_231_976,
    "mobilenet-v1-slim": 4_221_032,
    "mobilenet-v2": 3_504_872,
    "mobilenet-v3-large": 5_483_032,
    "efficientnet-lite0": 4_652_008,
    "convnext-tiny": 28_589_128,
    "deit-tiny": 5_717_416,
    "vit-small": 22_050_664,
}
TOKENS = ("deit-tiny", "vit-small")  # networks of one size


def photos(size: int = 64, n: int = 2) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (n, 3, size, size), dtype=np.uint8)


@pytest.mark.parametrize("arch", PARAMETERS)
def test_the_networks_are_of_their_published_size(arch: str) -> None:
    model = build_of(arch)(arch, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[arch]


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
        (
            "mobilenet-v3-large",
            ["blocks.0.0.conv_dw.weight", "blocks.2.1.se.conv_reduce.bias", "blocks.6.0.bn1.weight", "conv_head.bias"],
        ),
        ("efficientnet-lite0", ["conv_stem.weight", "blocks.5.3.bn3.running_var", "bn2.bias", "classifier.weight"]),
        (
            "convnext-tiny",
            [
                "stem.1.weight",
                "stages.1.downsample.0.bias",
                "stages.2.blocks.8.gamma",
                "head.norm.weight",
                "head.fc.bias",
            ],
        ),
        ("deit-tiny", ["cls_token", "pos_embed", "blocks.11.attn.qkv.bias", "blocks.0.mlp.fc1.weight", "head.weight"]),
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
    assert [channels(width) for width in (32 * 0.25, 32 * 0.35, 64 * 0.75, 3)] == [8, 16, 48, 8]
    half = build_mobilenet("mobilenet-v1", 10, 0.5)
    assert half.classifier.in_features == 512 and half.conv_stem.out_channels == 16
    assert build_mobilenet("mobilenet-v2", 10, 0.5).classifier[1].in_features == 1280  # never narrower


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(RequestError, match="resnet26d"):
        build_resnet("resnet18", 10)
    with pytest.raises(RequestError, match="mobilenet-v2"):
        build_mobilenet("mobilenet-v3", 10)
    for arch in ("mobilenet-v3-large", "convnext-tiny", "deit-tiny"):
        with pytest.raises(RequestError, match="found the width 0.5"):
            build_of(arch)(arch, 10, 0.5)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="width is 0"):
        build_mobilenet("mobilenet-v1", 10, 0)


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize(
    "arch, channels",
    one_in(2, [("mobilenet-v1-slim", "BGR"), *((arch, "RGB") for arch in PARAMETERS if arch != "vit-small")]),
)
def test_the_exported_graph_computes_what_torch_does_and_so_does_the_rewritten_one(
    arch: str, channels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for configs, name, smaller in (
        (vision_transformer.CONFIGS, "deit-tiny", {"depth": 2}),
        (convnext.CONFIGS, "convnext-tiny", {"depths": (1, 1, 2, 1), "widths": (16, 32, 48, 64)}),
    ):
        monkeypatch.setitem(configs, name, dataclasses.replace(configs[name], **smaller))
    size = 224 if arch in TOKENS else 64
    model, preprocessing = build(arch), PREPROCESSING | {"channels": channels, "size": size, "resize": size}
    exported = export(model, Preprocess.from_json(preprocessing))
    onnx.checker.check_model(ir.to_proto(exported), full_check=True)
    x = photos(size, n=2 if arch in TOKENS else 3)
    with torch.no_grad():
        expected = model(normalized(x, preprocessing)).numpy()
    scale = np.abs(expected).max()
    assert np.abs(run(exported, image=x)["logits"] - expected).max() <= 1e-5 * scale
    report = rewrite(exported, passes(preprocessing))
    assert report.fired("FoldInputNormalization") == 1
    kinds = set(ops(exported))
    divides = {"Div", "Gather"} if arch in (*TOKENS, "convnext-tiny") else set()  # GELU, parts of qkv
    assert not kinds & ({"BatchNormalization", "Cast", "Sub", "Div", "Gather", "Identity"} - divides)
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
        (nn.GELU("tanh"), "0.1 is GELU"),
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
        (lambda x: torch.flatten(x, 3), "flatten"),
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
