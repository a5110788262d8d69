"""Distillation losses on features; each takes torch tensors and returns a scalar.

The loss on soft labels is `pipelines.quantization.training.qat.distillation_loss`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def l2(student: Tensor, teacher: Tensor) -> Tensor:
    """Computes |s - t|^2 / |t|^2 of features (Romero et al. 2015, "FitNets"): 0 for equal features, 1 for zeros.

    Args:
        student: Features of any shape.
        teacher: Features of the same shape.

    Returns:
        Scalar loss.
    """
    teacher = teacher.detach()
    return (student - teacher).square().mean() / teacher.square().mean().clamp_min(1e-12)


def fsp(first: Tensor, second: Tensor) -> Tensor:
    """Computes the flow from one feature map to a later one: G[i, j] = sum over positions of F1[i] F2[j] / positions.

    The larger map is max-pooled (Yim et al. 2017, "A Gift from Knowledge Distillation").

    Args:
        first: [n, c1, h1, w1].
        second: [n, c2, h2, w2].

    Returns:
        [n, c1, c2].
    """
    import torch
    from torch.nn import functional

    first = functional.adaptive_max_pool2d(first, second.shape[2:])
    return torch.einsum("nihw,njhw->nij", first, second) / (second.shape[2] * second.shape[3])


def fsp_loss(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Computes `l2` of the `fsp` matrices of consecutive feature maps.

    Args:
        student: At least two feature maps, float [n, channels, height, width].
        teacher: Feature maps of the same shapes.

    Returns:
        Scalar loss.
    """
    import torch

    matrices = [[fsp(a, b) for a, b in itertools.pairwise(maps)] for maps in (student, teacher)]
    return torch.stack([l2(a, b) for a, b in zip(*matrices, strict=True)]).mean()
