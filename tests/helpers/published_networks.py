"""Image networks with random weights, in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from zoo.vision.models import convnext, efficientnet, mobilenet, resnet, vision_transformer

PREPROCESSING = {"size": 64, "resize": 64, "interpolation": "bilinear", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
                 "channels": "RGB"}  # fmt: skip


def build_of(arch: str) -> Callable[[str, int], nn.Module]:
    """The function that builds an architecture."""
    modules = (convnext, efficientnet, vision_transformer)
    builder = next((module.build for module in modules if arch in module.CONFIGS), None)
    return builder or (resnet.build if arch.startswith("resnet") else mobilenet.build)


def build(arch: str, classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build_of(arch)(arch, classes)
    for name, tensor in model.named_parameters():  # none at the values that make a layer do nothing
        if tensor.ndim == 1:
            nn.init.uniform_(tensor, 0.2, 0.8)
        elif name.endswith(("fc.weight", "classifier.weight", "classifier.1.weight", "head.weight")):
            nn.init.normal_(tensor)
    for tensor in model.buffers():
        if tensor.ndim:
            nn.init.uniform_(tensor, 0.2, 0.8)
    return model.eval()


def normalized(pixels: npt.NDArray[np.uint8], preprocessing: dict[str, Any]) -> Any:
    mean, std = (torch.tensor(preprocessing[key], dtype=torch.float32).view(1, 3, 1, 1) for key in ("mean", "std"))
    x = (torch.from_numpy(pixels).float() / 255 - mean) / std
    return x.flip(1) if preprocessing["channels"] == "BGR" else x
