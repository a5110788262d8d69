"""Layers of recommenders with experts (Jacobs et al. 1991, "Adaptive Mixtures of Local Experts")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zoo.training.lazy_module import LazyModule

if TYPE_CHECKING:
    import torch


class GatedSum(LazyModule):
    """Mixture of experts: sum_e softmax(gates)_e x_e."""

    def forward(self, gates: torch.Tensor, *experts: torch.Tensor) -> Any:
        """Computes the mixture.

        Args:
            gates: Logits of the experts, float32 [n, experts].
            *experts: Outputs of the experts, float32 [n, width] each.

        Returns:
            float32 [n, width].
        """
        import torch

        return (torch.softmax(gates, 1)[:, :, None] * torch.stack(experts, 1)).sum(1)


def concatenated(logits: Sequence[torch.Tensor]) -> Any:
    """Concatenates the logits of labels.

    Args:
        logits: float32 [n, 1] of every label.

    Returns:
        float32 [n, labels].
    """
    import torch

    return torch.cat(list(logits), 1) if len(logits) > 1 else logits[0]


def experts(count: int, inputs: int, hidden: Sequence[int], dropout: float) -> Any:
    """Creates experts: multilayer perceptrons on the same input.

    Args:
        count: Number of experts.
        inputs: Width of the input.
        hidden: Widths of the layers, of which each ends in a ReLU.
        dropout: Dropout probability after every layer.

    Returns:
        `torch.nn.ModuleList` of the experts.
    """
    from torch import nn

    from zoo.recommenders.models.layers import mlp

    return nn.ModuleList(mlp(inputs, hidden, None, dropout) for _ in range(count))
