"""Freeze a ResNet: trained here, or published by torchvision, timm or Keras."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from zoo.vision.export import freeze as images
from zoo.vision.models.resnet import build

BLOCK = re.compile(
    r"conv(\d)_block(\d+)_(\d)_(conv|bn)"
)  # Keras numbers stages from 2, blocks from 1, the shortcut's layers 0
VARIABLES = (
    "weight",
    "bias",
    "running_mean",
    "running_var",
)  # in Keras' order: kernel and bias, or those of a batch norm


def freeze(folder: str | Path) -> dict[str, Any]:
    """fp32.onnx of a model folder; see `zoo.vision.export.freeze.freeze`."""
    return images.freeze(folder, build, {"keras": read_keras})


def read_keras(file: Path) -> images.State:
    """The weights of keras.applications.ResNet50 in a .weights.h5 file as Keras 3 writes it, under the names of
    "resnet50-v1".

    Keras keeps kernels as [height, width, inputs, outputs], torch as [outputs, inputs, height, width].
    """
    import h5py

    state = {}
    with h5py.File(file) as archive:
        for layer in archive["layers"].values():
            variables = layer["vars"]
            name = _path(str(variables.attrs["name"]))
            for index, key in enumerate(VARIABLES[: len(variables)]):
                array = variables[str(index)][()]
                state[f"{name}.{key}"] = torch.from_numpy(array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T)
    return state


def _path(layer: str) -> str:
    """The path in `ResNet` of what Keras calls `layer`; its own name where it holds no weights."""
    if match := BLOCK.fullmatch(layer):
        stage, block, number, kind = match.groups()
        inner = f"downsample.{('conv', 'bn').index(kind)}" if number == "0" else f"{kind}{number}"
        return f"layer{int(stage) - 1}.{int(block) - 1}.{inner}"
    return {"conv1_conv": "conv1", "conv1_bn": "bn1", "predictions": "fc"}.get(layer, layer)
