"""Image networks as exporters write them, quantized, and whether the native engine runs them whole or in parts.

Networks have random weights and the operators of the published ones, but few blocks. Without names all are exported,
one after the other; `--write` puts the table into docs/own-model.md. The slow test of this file holds the page to it.
"""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import zoo
from pipelines.engines.native import images

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parents[3] / "docs" / "own-model.md"
BEGIN, END = "<!-- exporters -->", "<!-- end of exporters -->"
SAMPLES = 4
TORCH = ("TorchScript", "TorchScript, free batch", "dynamo", "dynamo, free batch")
KERAS = "Keras, tf2onnx"
EXPORTERS = (*TORCH, KERAS)
OPSET = 17


def _mobilenet_v2(t: Any) -> Any:
    return t.MobileNetV2ForImageClassification(t.MobileNetV2Config(image_size=96, num_labels=10))


def _resnet(t: Any) -> Any:
    return t.ResNetForImageClassification(t.ResNetConfig(depths=[1, 1, 1, 1], num_labels=10))


def _convnext(t: Any) -> Any:
    sizes: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [48, 96, 192, 384]}
    return t.ConvNextForImageClassification(t.ConvNextConfig(num_labels=10, **sizes))


def _convnext_v2(t: Any) -> Any:
    sizes: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [48, 96, 192, 384]}
    return t.ConvNextV2ForImageClassification(t.ConvNextV2Config(num_labels=10, **sizes))


TRANSFORMER: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "num_labels": 10,
}


def _vit(t: Any) -> Any:
    return t.ViTForImageClassification(t.ViTConfig(image_size=96, **TRANSFORMER))


def _deit(t: Any) -> Any:
    return t.DeiTForImageClassification(t.DeiTConfig(image_size=96, **TRANSFORMER))


def _regnet(t: Any) -> Any:
    sizes: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": [32, 64, 128, 256], "depths": [1, 1, 1, 1]}
    return t.RegNetForImageClassification(t.RegNetConfig(groups_width=16, num_labels=10, **sizes))


def _small(name: str) -> Callable[[Any], Any]:
    """A network of `vision_networks`."""

    def make(_: Any) -> Any:
        from scripts.peers.scan import vision_networks

        return getattr(vision_networks, name)()

    return make


def _dinov2(t: Any) -> Any:
    config = t.Dinov2Config(image_size=98, patch_size=14, **TRANSFORMER)
    return t.Dinov2ForImageClassification(config)


def _dinov2_registers(t: Any) -> Any:
    config = t.Dinov2WithRegistersConfig(image_size=98, patch_size=14, **TRANSFORMER)
    return t.Dinov2WithRegistersForImageClassification(config)


def _dinov3(t: Any) -> Any:
    sizes = {key: value for key, value in TRANSFORMER.items() if key != "num_labels"}
    return t.DINOv3ViTModel(t.DINOv3ViTConfig(image_size=96, num_register_tokens=4, **sizes))


def _swin_v2(t: Any) -> Any:
    sizes: dict[str, Any] = {"embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 6}
    return t.Swinv2ForImageClassification(t.Swinv2Config(image_size=96, num_labels=10, **sizes))


def _pool_former(t: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1]}
    return t.PoolFormerForImageClassification(t.PoolFormerConfig(num_labels=10, **sizes))


def _rt_detr(t: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    backbone = t.RTDetrResNetConfig(embedding_size=32, out_features=["stage2", "stage3", "stage4"], **sizes)
    layers: dict[str, Any] = {"decoder_layers": 2, "num_queries": 20, "d_model": 64, "encoder_hidden_dim": 64}
    widths: dict[str, Any] = {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_in_channels": [64, 64, 64]}
    config = t.RTDetrConfig(backbone_config=backbone, encoder_in_channels=[64, 96, 128], **layers, **widths)
    return t.RTDetrForObjectDetection(config)


# by name: the network, and the height and width of its images
NETWORKS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "MobileNetV2": (_mobilenet_v2, 96),
    "ResNet": (_resnet, 96),
    "ConvNeXt": (_convnext, 96),
    "ConvNeXtV2": (_convnext_v2, 96),
    "RegNet": (_regnet, 96),
    "MobileNetV3": (_small("mobilenet_v3"), 96),
    "EfficientNet": (_small("efficientnet"), 96),
    "MNASNet": (_small("mnasnet"), 96),
    "ShuffleNetV2": (_small("shufflenet_v2"), 96),
    "GhostNet": (_small("ghostnet"), 96),
    "DenseNet": (_small("densenet"), 96),
    "ViT": (_vit, 96),
    "DeiT": (_deit, 96),
    "DINOv2": (_dinov2, 98),
    "DINOv2 with registers": (_dinov2_registers, 98),
    "DINOv3": (_dinov3, 96),
    "SwinV2": (_swin_v2, 96),
    "PoolFormer": (_pool_former, 96),
    "YOLOv8": (_small("yolo_v8"), 96),
    "YOLOv10": (_small("yolo_v10"), 96),
    "YOLO11": (_small("yolo_11"), 96),
    "RT-DETR": (_rt_detr, 96),
    "U-Net": (_small("UNet"), 96),
    "EDSR": (_small("SuperResolution"), 48),
}

APPLICATIONS = {  # of Keras, for images of height and width 96
    "MobileNetV2": "MobileNetV2",
    "ResNet": "ResNet50",
    "MobileNetV3": "MobileNetV3Small",
    "EfficientNet": "EfficientNetB0",
    "DenseNet": "DenseNet121",
}


def export_application(name: str, path: Path) -> None:
    """Writes an application of Keras by tf2onnx.

    Args:
        name: Row of the table.
        path: ONNX file to write.
    """
    import keras

    keras.utils.set_random_seed(0)
    network = getattr(keras.applications, APPLICATIONS[name])(weights=None, input_shape=(96, 96, 3), classes=10)
    for layer in network.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0  # statistics of the example, see `_settle`
    network(np.random.default_rng(0).uniform(0, 255, (4, 96, 96, 3)).astype(np.float32), training=True)
    network.export(str(path.parent / "saved"), verbose=False)
    command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(path.parent / "saved")]
    subprocess.run([*command, "--opset", str(OPSET), "--output", str(path)], check=True, capture_output=True)


def export(name: str, exporter: str, path: Path) -> int:
    """Writes a network as an exporter of torch does.

    Args:
        name: Row of the table.
        exporter: Column of the table.
        path: ONNX file to write.

    Returns:
        Height and width of its images.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    make, size = NETWORKS[name]
    network = make(transformers).eval()
    example = torch.randn(2, 3, size, size)
    _settle(network, example)

    class Logits(torch.nn.Module):
        """The network's logits, pooled features or only output."""

        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            """Returns the output."""
            output = self.network(image)
            pooled = getattr(output, "pooler_output", output)
            return getattr(output, "logits", pooled)  # type: ignore[no-any-return]

    options: dict[str, Any] = {"input_names": ["image"], "output_names": ["logits"], "verbose": False}
    free = exporter.endswith("free batch")
    if exporter.startswith("dynamo"):
        options["dynamic_shapes"] = ({0: torch.export.Dim("batch")},) if free else None
    else:
        options["opset_version"] = OPSET
        options["dynamic_axes"] = {"image": {0: "batch"}, "logits": {0: "batch"}} if free else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = example if free else example[:1]
        torch.onnx.export(Logits().eval(), (batch,), str(path), dynamo=exporter.startswith("dynamo"), **options)
    return size


def _settle(network: Any, example: Any) -> None:
    """Gives batch norms the statistics of an example, as training would: random ones let values vanish."""
    import torch

    def take(norm: Any, inputs: tuple[Any, ...]) -> None:
        variance = inputs[0].var((0, 2, 3)).clamp(min=1e-12)
        norm.running_mean.copy_(inputs[0].mean((0, 2, 3)))
        norm.running_var.copy_(variance)
        norm.weight.data.copy_((1 + getattr(norm, "eps", 1e-5) / variance).sqrt())

    norms = [module for module in network.modules() if getattr(module, "running_mean", None) is not None]
    hooks = [norm.register_forward_pre_hook(take) for norm in norms]
    with torch.no_grad():
        network(example)
    for hook in hooks:
        hook.remove()


def cell(name: str, exporter: str, folder: Path) -> str:
    """Exports and quantizes a network, and says how the native engine runs it.

    Args:
        name: Row of the table.
        exporter: Column of the table.
        folder: Folder for files.

    Returns:
        "whole"; "parts" with the types of the operators between native layers; or "no" with the first operator without
        a native form. "not exported" where the exporter itself fails; empty for a network that Keras does not have.
    """
    path, int8, shape = folder / "m.onnx", folder / "int8.onnx", (96, 96, 3)
    if exporter == KERAS and name not in APPLICATIONS:
        return ""
    try:
        if exporter == KERAS:
            export_application(name, path)
        else:
            size = export(name, exporter, path)
            shape = (3, size, size)
    except ImportError:
        raise
    except Exception as error:  # exporters raise their own kinds
        logger.info("%s does not write %s: %s", exporter, name, error)
        return "not exported"
    count = SAMPLES if "free" in exporter or exporter == KERAS else 1
    data, image = folder / "samples.npz", onnx.load(path, load_external_data=False).graph.input[0].name
    np.savez(data, **{image: np.random.default_rng(0).normal(size=(count, *shape)).astype(np.float32)})  # type: ignore[arg-type]
    zoo.quantize(path, int8, calibration_data=data, effort="fast", correct=False, search=False)
    form = images.form(int8)
    if "steps" not in form:
        match = re.search(r"\((\w+)\)", form["reason"])
        return f"no: {match[1] if match else form['reason']}"
    between = [kind for kind in form.get("rest", {}) if kind not in ("QuantizeLinear", "DequantizeLinear")]
    return f"parts: {', '.join(between[:4])}" if "parts" in form else "whole"


def table(names: Iterable[str]) -> list[str]:
    """Makes the rows of the table.

    Args:
        names: Rows, in order.

    Returns:
        Lines of Markdown without the head.
    """
    rows = []
    for name in names:
        cells = []
        for exporter in EXPORTERS:
            with tempfile.TemporaryDirectory() as folder:
                cells.append(cell(name, exporter, Path(folder)))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def rows_of(page: str) -> dict[str, str]:
    """Reads the rows of the table in a page, by name.

    Args:
        page: Markdown.
    """
    lines = page[page.index(BEGIN) : page.index(END)].strip().splitlines()[3:]
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}


def written(page: str, rows: Iterable[str]) -> str:
    """Puts rows into the table of a page; other rows stay.

    Args:
        page: Markdown.
        rows: Lines of Markdown.
    """
    merged = rows_of(page) | {row.split("|")[1].strip(): row for row in rows}
    head = ["| network | " + " | ".join(EXPORTERS) + " |", "|" + " --- |" * (len(EXPORTERS) + 1)]
    lines = [BEGIN, *head, *(merged[name] for name in NETWORKS if name in merged)]
    return page[: page.index(BEGIN)] + "\n".join(lines) + "\n" + page[page.index(END) :]


def main() -> None:
    """Prints the rows of the table, and writes them with --write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"rows, of {', '.join(NETWORKS)}")
    parser.add_argument("--write", action="store_true", help="put them into docs/own-model.md")
    arguments = parser.parse_args()
    for name in arguments.names or list(NETWORKS):
        (row,) = table([name])
        print(row, flush=True)
        if arguments.write:
            PAGE.write_text(written(PAGE.read_text(), [row]))


if __name__ == "__main__":
    main()
