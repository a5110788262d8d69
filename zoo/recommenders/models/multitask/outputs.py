"""Logits of recommenders as probabilities, and the losses of labels that may be missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

MIN_PROBABILITY = 1e-7  # probability in a cross-entropy


def first_of(results: Any) -> torch.Tensor:
    """Returns the logits among the results of a network.

    Args:
        results: Logits, float32 [n, labels], or a tuple that begins with them.

    Returns:
        float32 [n, labels].
    """
    logits: torch.Tensor = results[0] if isinstance(results, tuple) else results
    return logits


def parents_of(model: nn.Module) -> tuple[int, ...]:
    """Returns the label whose probability multiplies that of each label, -1 where there is none.

    Args:
        model: Network; `parents` if it has some.

    Returns:
        Indices of labels; () for a network of independent labels.
    """
    return tuple(getattr(model, "parents", ()))


def probabilities(model: nn.Module, results: Any) -> torch.Tensor:
    """Computes the probabilities of the labels.

    Args:
        model: Network.
        results: Results of the network, with logits float32 [n, labels].

    Returns:
        float64 [n] for one label, [n, labels] for several.
    """
    logits = first_of(results).double()
    return torch.sigmoid(logits[:, 0]) if logits.shape[1] == 1 else chained(logits, parents_of(model))


def chained(logits: torch.Tensor, parents: Sequence[int]) -> torch.Tensor:
    """Computes probabilities; some are products, as that of a purchase after a click.

    Args:
        logits: [n, labels].
        parents: See `parents_of`.

    Returns:
        [n, labels].
    """
    shares = torch.sigmoid(logits)
    columns = [shares[:, i] if parent < 0 else shares[:, i] * shares[:, parent] for i, parent in enumerate(parents)]
    return torch.stack(columns, 1) if columns else shares


def label_losses(logits: torch.Tensor, labels: torch.Tensor, parents: Sequence[int] = ()) -> torch.Tensor:
    """Computes the cross-entropy of every row, added over the labels that it has.

    Args:
        logits: float32 [n, labels].
        labels: 0 to 1, float32 [n], or [n, labels], NaN where missing.
        parents: See `parents_of`.

    Returns:
        float32 [n].
    """
    if labels.ndim == 1:
        return functional.binary_cross_entropy_with_logits(logits[:, 0], labels, reduction="none")
    missing = labels.isnan()
    labels = labels.masked_fill(missing, 0)
    if parents:
        shares = chained(logits, parents).clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
        losses = functional.binary_cross_entropy(shares, labels, reduction="none")
    else:
        losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.masked_fill(missing, 0).sum(1)
