"""Plot of the confusion matrix of a classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.core.files import replacing


def plot_confusion(
    path: Path, classes: Sequence[str], labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]
) -> None:
    """Plots a confusion matrix, with rows normalized to 1; classes and counts are printed for up to 20 classes.

    Args:
        path: Image file to write.
        classes: Names of the classes.
        labels: Correct classes, int64 [n].
        predicted: Predicted classes, int64 [n].
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
