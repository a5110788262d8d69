"""Freeze a MobileNet: trained here, or published by torchvision, timm or TF-Slim."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipelines.core.errors import RequestError
from zoo.vision.export import freeze as images
from zoo.vision.models.mobilenet import V1, build

LAYER = re.compile(
    r"(?:MobilenetV1/)+(Conv2d_\w+|Logits/Conv2d_1c_1x1)/(weights|depthwise_weights|convolution_bias|depthwise_bias)"
)


def freeze(folder: str | Path) -> dict[str, Any]:
    """fp32.onnx of a model folder; see `zoo.vision.export.freeze.freeze`."""
    return images.freeze(folder, build, {"tflite": read_tflite})


def read_tflite(file: Path) -> images.State:
    """The weights of TF-Slim's MobileNet V1 in a float .tflite file, under the names of "mobilenet-v1-slim".

    It keeps kernels as [outputs, height, width, inputs], depthwise ones as [1, height, width, channels]; the head is a
    1x1 convolution.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tf2onnx imports tensorflow, which talks, and oneDNN in it
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    from tf2onnx.tflite.Model import Model  # the format's schema

    model = Model.GetRootAsModel(file.read_bytes(), 0)
    main = model.Subgraphs(0)
    state = {}
    for tensor in (main.Tensors(index) for index in range(main.TensorsLength())):
        if (match := LAYER.fullmatch(tensor.Name().decode())) is None:
            continue
        if tensor.Type() != 0:
            raise RequestError(f"{file} holds {match[0]} in another type than float32; wanted is the float model")
        array = model.Buffers(tensor.Buffer()).DataAsNumpy().view(np.float32).reshape(tensor.ShapeAsNumpy())
        path = _path(match[1])
        if array.ndim == 4:
            array = array.transpose((3, 0, 1, 2) if match[2] == "depthwise_weights" else (0, 3, 1, 2))
            array = array.reshape(array.shape[:2]) if path == "classifier" else array
        state[f"{path}.{'bias' if match[2].endswith('bias') else 'weight'}"] = torch.from_numpy(array.copy())
    return state


def _path(layer: str) -> str:
    """The path in `MobileNetV1` of what TF-Slim calls `layer`: "Conv2d_0", "Conv2d_3_depthwise", ..."""
    blocks = [f"blocks.{stage}.{index}" for stage, (_, count, _) in enumerate(V1) for index in range(count)]
    if match := re.fullmatch(r"Conv2d_(\d+)_(depth|point)wise", layer):
        return f"{blocks[int(match[1]) - 1]}.conv_{'dw' if match[2] == 'depth' else 'pw'}"
    return {"Conv2d_0": "conv_stem", "Logits/Conv2d_1c_1x1": "classifier"}.get(layer, layer)
