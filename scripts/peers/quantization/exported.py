"""Writes image networks of transformers and YOLO as users export them, for `own-models`: .onnx, .calib.npz, .test.npz.

Networks have the layers of public models and random weights, names end in -shaped: speed is measured, and how near int8
is to float. torch's TorchScript exporter writes the files, for one photo or, with --free-batch, any number; its dynamo
exporter writes those of `CHANNELS_LAST`, from an example of that memory format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from pipelines.data.preprocess import Preprocess
from scripts.peers import harness
from scripts.peers.quantization.yolo import yolo_11n, yolo_v8n
from scripts.peers.vision.float_networks import first_photos, obvious
from zoo.vision.models.efficientnet import build as build_inverted

CALIBRATED, TESTED = 32, 16  # photos
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def vit(width: int) -> nn.Module:
    """Returns ViT or DeiT of 12 layers (Dosovitskiy et al. 2020, Touvron et al. 2020), heads of 64 channels."""
    config = transformers.ViTConfig(
        hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width, num_labels=1000
    )
    return transformers.ViTForImageClassification(config)


def dinov2() -> nn.Module:
    """Returns DINOv2's small encoder (Oquab et al. 2023)."""
    config = transformers.Dinov2Config(
        hidden_size=384, num_attention_heads=6, image_size=224, patch_size=14, num_labels=1000
    )
    return transformers.Dinov2ForImageClassification(config)


def swin() -> nn.Module:
    """Returns Swin-T (Liu et al. 2021)."""
    return transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=1000))


def convnext() -> nn.Module:
    """Returns ConvNeXt-T (Liu et al. 2022)."""
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig(num_labels=1000))


def segformer() -> nn.Module:
    """Returns SegFormer-B0 (Xie et al. 2021)."""
    return transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(num_labels=150))


def mobilevit() -> nn.Module:
    """Returns MobileViT-S (Mehta and Rastegari 2021)."""
    return transformers.MobileViTForImageClassification(transformers.MobileViTConfig(num_labels=1000))


def efficientnet() -> nn.Module:
    """Returns EfficientNet-B0 (Tan and Le 2019)."""
    sizes = transformers.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
    sizes.num_labels = 1000
    return transformers.EfficientNetForImageClassification(sizes)


def inverted(arch: str) -> nn.Module:
    """Returns a network of inverted residuals: EfficientNet-Lite0, or MobileNetV3 Large (Howard et al. 2019)."""
    return build_inverted(arch, 1000)


def rt_detr() -> nn.Module:
    """Returns RT-DETR of 300 queries on a ResNet-18 (Zhao et al. 2023)."""
    backbone = transformers.RTDetrResNetConfig(
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_in_channels=[128, 256, 512], decoder_layers=3, hidden_expansion=0.5
    )
    return transformers.RTDetrForObjectDetection(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # network, pixels a side
    "vit-small-shaped": (lambda: vit(384), 224),
    "deit-tiny-shaped": (lambda: vit(192), 224),
    "dinov2-small-shaped": (dinov2, 224),
    "swin-tiny-shaped": (swin, 224),
    "convnext-tiny-shaped": (convnext, 224),
    "segformer-b0-shaped": (segformer, 512),
    "mobilevit-small-shaped": (mobilevit, 256),
    "efficientnet-b0-shaped": (efficientnet, 224),
    "efficientnet-lite0-shaped": (lambda: inverted("efficientnet-lite0"), 224),
    "mobilenet-v3-large-shaped": (lambda: inverted("mobilenet-v3-large"), 224),
    "rt-detr-r18-shaped": (rt_detr, 640),
    "yolov8n-shaped": (yolo_v8n, 640),
    "yolo11n-shaped": (yolo_11n, 640),
}
CHANNELS_LAST = {"efficientnet-lite0-shaped", "mobilenet-v3-large-shaped"}


class Results(nn.Module):
    """A network that returns tensors: of one of transformers its logits, and boxes if it finds them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what is found in float32 [n, 3, side, side]."""
        outputs = self.network(pixel_values)
        if isinstance(outputs, torch.Tensor):
            return (outputs,)
        return (outputs.logits, outputs.pred_boxes) if hasattr(outputs, "pred_boxes") else (outputs.logits,)


def drawn(network: nn.Module) -> nn.Module:
    """Draws all weights, so that signals keep their power through the layers and no norm is the identity."""
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim > 1 and "embed" not in name.rsplit(".", 1)[-1]:
            nn.init.normal_(parameter, 0, parameter[0].numel() ** -0.5)
        elif name.endswith("weight"):
            nn.init.uniform_(parameter, 0.8, 1.6)
        else:
            nn.init.normal_(parameter, 0, 0.1)
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.normal_(norm.running_mean, 0, 0.1)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return network.eval()


def export(network: nn.Module, side: int, path: Path, *, last: bool, free: bool) -> None:
    """Writes a network.

    Args:
        network: From float32 [n, 3, side, side] to a tuple of tensors.
        side: Height and width of photos.
        path: ONNX file to write.
        last: Whether the dynamo exporter writes it, from an example in the memory format channels_last.
        free: Whether the number of photos is free.
    """
    x = torch.zeros(2 if free and last else 1, 3, side, side)
    names = {"input_names": ["pixel_values"], "output_names": ["logits", "boxes"][: len(network(x))]}
    if last:
        example = x.to(memory_format=torch.channels_last)
        shapes = ({0: torch.export.Dim("n")},) if free else None
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        torch.onnx.export(network, (example,), path, dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
        return
    axes = {name: {0: "n"} for values in names.values() for name in values} if free else None
    torch.onnx.export(network, (x,), path, dynamo=False, dynamic_axes=axes, **names)


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", required=True, metavar="DIR", help=f"{CALIBRATED + TESTED} or more photos")
    parser.names("--networks", "network", NETWORKS)
    parser.add_argument("--free-batch", action="store_true", help="leave the number of photos free")


def measure(args: Any) -> None:
    """Writes the models and their samples."""
    photos = first_photos(args.photos, CALIBRATED + TESTED)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.networks:
        network, side = NETWORKS[name]
        torch.manual_seed(0)
        path = args.folder / f"{name}.onnx"
        export(Results(drawn(network())).eval(), side, path, last=name in CHANNELS_LAST, free=args.free_batch)
        spec = Preprocess.from_json({"size": side, "resize": side, "mean": MEAN, "std": DEVIATION, "channels": "RGB"})
        samples = np.concatenate([obvious(photo.read_bytes(), spec) for photo in photos])
        np.savez(path.with_suffix(".calib.npz"), pixel_values=samples[:CALIBRATED])
        np.savez(path.with_suffix(".test.npz"), pixel_values=samples[CALIBRATED:])
        print(path)
