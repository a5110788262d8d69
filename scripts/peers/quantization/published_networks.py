"""The float networks that `vision.py` quantizes, from their published weights to ONNX as tf2onnx and torch write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OPSET, SIZE = 17, 224


def convert_resnet50(weights: Path, target: Path) -> None:
    """Keras ResNet-50, NCHW input `image`, dynamic batch."""
    import keras
    import tensorflow as tf
    import tf2onnx

    model = keras.applications.ResNet50(weights=str(weights))
    signature = [tf.TensorSpec([None, SIZE, SIZE, 3], tf.float32, name="image")]
    function = tf.function(lambda image: model(image, training=False), input_signature=signature)
    proto, _ = tf2onnx.convert.from_function(function, input_signature=signature, opset=OPSET, inputs_as_nchw=["image"])
    _save(proto, target)


def convert_mobilenet_v1(weights: Path, target: Path) -> None:
    """TF-Slim MobileNet-V1 from its .tflite, NCHW input `input`; its batch of 1 is made dynamic."""
    import onnx
    import tf2onnx

    proto, _ = tf2onnx.convert.from_tflite(str(weights), opset=OPSET, inputs_as_nchw=["input"])
    del proto.graph.value_info[:]
    reshapes = {node.input[1] for node in proto.graph.node if node.op_type == "Reshape"}
    for tensor in proto.graph.initializer:
        if tensor.name in reshapes:
            shape = onnx.numpy_helper.to_array(tensor).copy()
            shape[0] = -1
            tensor.CopyFrom(onnx.numpy_helper.from_array(shape, tensor.name))
    _save(proto, target)


def convert_mobilenet_v2(weights: Path, target: Path) -> None:
    """torchvision's MobileNet-V2, NCHW input `image`, dynamic batch."""
    import torch
    from torch import nn

    def block(width: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
        convolution = nn.Conv2d(width, out, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU6())

    class Bottleneck(nn.Module):
        def __init__(self, width: int, out: int, stride: int, factor: int) -> None:
            super().__init__()
            inner = width * factor
            expand = [block(width, inner, 1)] if factor > 1 else []
            project = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
            self.conv = nn.Sequential(*expand, block(inner, inner, 3, stride, inner), *project)
            self.sums = stride == 1 and width == out

        def forward(self, x: Any) -> Any:
            return x + self.conv(x) if self.sums else self.conv(x)

    class MobileNetV2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = [block(3, 32, 3, 2)]
            width = 32
            stages = (
                (1, 16, 1, 1),
                (6, 24, 2, 2),
                (6, 32, 3, 2),
                (6, 64, 4, 2),
                (6, 96, 3, 1),
                (6, 160, 3, 2),
                (6, 320, 1, 1),
            )
            for factor, out, count, stride in stages:
                for at in range(count):
                    layers.append(Bottleneck(width, out, 1 if at else stride, factor))
                    width = out
            self.features = nn.Sequential(*layers, block(width, 1280, 1))
            self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

        def forward(self, x: Any) -> Any:
            return self.classifier(nn.functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))

    model = MobileNetV2()
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    names: dict[str, Any] = {
        "input_names": ["image"],
        "output_names": ["logits"],
        "dynamic_axes": {"image": [0], "logits": [0]},
    }
    torch.onnx.export(
        model.eval(), (torch.zeros(1, 3, SIZE, SIZE),), str(target), opset_version=OPSET, dynamo=False, **names
    )


def _save(proto: Any, target: Path) -> None:
    """The batch becomes dynamic; a softmax goes: in eight bits its probabilities tell most classes apart no more."""
    import onnx

    for softmax in [node for node in proto.graph.node if node.op_type == "Softmax"]:
        before = next(node for node in proto.graph.node if softmax.input[0] in node.output)
        before.output[0] = softmax.output[0]
        proto.graph.node.remove(softmax)
    for value in (proto.graph.input[0], proto.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(proto, target)
