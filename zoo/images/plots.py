"""Pictures of a training: learning curves, and which class was taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.files import replacing


def plot_curves(path: Path, history: Sequence[dict[str, Any]]) -> None:
    """Loss and top-1 accuracy by epoch; history: lines with "epoch", "train_loss", "loss", "train_top1" and "top1"."""
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    figure = Figure(figsize=(7, 4), layout="constrained")
    epochs, left = [each["epoch"] for each in history], figure.subplots()
    right = left.twinx()
    for axes, key, label, style in (
        (left, "train_loss", "loss, training", "C0--"),
        (left, "loss", "loss, held out", "C0-"),
        (right, "train_top1", "top-1, training", "C1--"),
        (right, "top1", "top-1, held out", "C1-"),
    ):
        axes.plot(epochs, [each[key] for each in history], style, label=label)
    left.set(xlabel="epoch", ylabel="cross entropy (training: of smoothed labels)")
    right.set(ylabel="top-1 accuracy")
    figure.legend(loc="outside upper center", ncols=4)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, metadata={"Software": None})


def plot_confusion(path: Path, classes: Sequence[str], labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]) -> None:
    """How often each class (a row) was taken for each other, as shares of the row; named and numbered where there is room."""
    from matplotlib.figure import Figure

    counts = np.zeros((len(classes), len(classes)))
    np.add.at(counts, (labels, predicted), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    few = len(classes) <= 20
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted", ylabel="is")
    if few:
        axes.set_xticks(range(len(classes)), classes, rotation=90)
        axes.set_yticks(range(len(classes)), classes)
        for row, column in np.ndindex(*shares.shape):
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{counts[row, column]:.0f}", ha="center", va="center", color=color, fontsize=7)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, metadata={"Software": None})
