"""A small network that tells colors apart, pictures of them, and the command on both."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.rewriting import model
from pipelines.core import files
from pipelines.data import images
from pipelines.graph import io as graph
from pipelines.models.hub import Card, CardFile
from zoo.cli import app as cli

COLORS = {"blue": (30, 40, 220), "cyan": (30, 200, 210), "green": (40, 210, 50), "grey": (128, 128, 128),
          "magenta": (210, 40, 200), "red": (220, 30, 40), "yellow": (210, 200, 30)}  # fmt: skip
NAMES = list(COLORS)
SPEC = {"size": 16, "resize": 20, "interpolation": "bilinear", "mean": [0.5] * 3, "std": [0.25] * 3, "channels": "RGB"}
TEXT = """(uint8[batch,3,16,16] image) => (float[batch,7] logits) {
    f = Cast<to=1>(image) s = Div(f, white) c = Sub(s, mean) x = Div(c, std)
    h = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w, b) r = Relu(h) p = GlobalAveragePool(r) v = Flatten(p) logits = Gemm(v, head, bias)
}"""


def picture(color: str, seed: int = 0, width: int = 40, height: int = 30) -> Image.Image:
    """Noise around a color."""
    noise = np.random.default_rng(seed).normal(0, 20, (height, width, 3))
    return Image.fromarray(np.clip(COLORS[color] + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def network(classes: list[str]) -> Any:
    """Six channels, the positive and the negative part of R, G and B; a class's logit is how far the mean color lies in
    its direction.
    """
    w = np.zeros((6, 3, 3, 3), np.float32)
    for channel in range(3):
        w[channel, channel, 1, 1], w[3 + channel, channel, 1, 1] = 1, -1
    means = np.array([COLORS.get(name, (128,) * 3) for name in classes], np.float32) / 127.5 - 1
    directions = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 0.1)
    head = np.concatenate([directions, -directions], axis=1).T * 3
    values = {
        "white": np.float32(255),
        "mean": np.full((1, 3, 1, 1), 0.5, np.float32),
        "std": np.full((1, 3, 1, 1), 0.25, np.float32),
    }
    bias = np.array([{"grey": 3.0, "background": -50.0}.get(name, 0.0) for name in classes], np.float32)
    text = TEXT.replace("batch,7", f"batch,{len(classes)}")
    return model(text, w=w, b=np.zeros(6, np.float32), head=np.ascontiguousarray(head), bias=bias, **values)


def make_folder(path: Path, outputs: list[str], **details: Any) -> Path:
    path.mkdir(parents=True)
    file = graph.save(network(outputs), path / "fp32.onnx")
    card_files = (CardFile("fp32.onnx", file.stat().st_size, files.sha256(file), None),)
    files.write_json(
        path / "card.json",
        Card("colors", "mobilenet-v1", "of a test", card_files, {"preprocessing": SPEC, **details}).to_json(),
    )
    return path


def everything(folder: Path) -> list[Path]:
    return list(images.listed(folder))


def failure(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[Any, str, str]:
    """Exit code, stdout and the one line on stderr of a command."""
    with pytest.raises(SystemExit) as end:
        cli.call([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return end.value.code, captured.out, captured.err
