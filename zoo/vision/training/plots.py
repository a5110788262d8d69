"""A picture of a classifier: which class was taken for which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.core.files import replacing


def plot_confusion(
    path: Path, classes: Sequence[str], labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]
) -> None:
    """How often each class (a row) was taken for each other, as shares of the row; named and numbered where there is
    room.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

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
