"""Averages of the weights of several epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def weights_after(output: Path, epoch: int) -> Path:
    """Returns the file of the weights after an epoch.

    Args:
        output: The model folder.
        epoch: Number of the epoch, from 1.
    """
    return output / "checkpoint" / f"epoch-{epoch:04d}.pt"


def groups(history: Sequence[Mapping[str, Any]], count: int) -> dict[str, list[int]]:
    """Returns the candidates for the final weights.

    Args:
        history: Entries of all epochs.
        count: Number of epochs to average.

    Returns:
        {description: epochs}: the last `count`, the best `count`, and the best one.
    """
    epochs = [entry["epoch"] for entry in history]
    ranked = sorted(epochs, key=lambda epoch: (-history[epoch - 1]["bleu"], history[epoch - 1]["loss"], epoch))
    return {
        f"average of the last {count}": epochs[-count:],
        f"average of the best {count}": sorted(ranked[:count]),
        "best": ranked[:1],
    }


def average(output: Path, epochs: Sequence[int]) -> dict[str, torch.Tensor]:
    """Averages the weights of several epochs.

    Args:
        output: The model folder.
        epochs: Numbers of the epochs.

    Returns:
        State dict of the mean.
    """
    import torch

    sums: dict[str, torch.Tensor] = {}
    for epoch in epochs:
        state = torch.load(weights_after(output, epoch), map_location="cpu", weights_only=True)
        sums = {name: sums[name] + tensor if sums else tensor for name, tensor in state.items()}
    return {name: total / len(epochs) for name, total in sums.items()}
