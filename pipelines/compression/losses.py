"""Losses of distillation beside that of soft labels (`pipelines.quantization.training.qat.distillation_loss`): what a
student's
features are to be like. All take torch's tensors and give a scalar."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def l2(student: Tensor, teacher: Tensor) -> Tensor:
    """|s - t|^2 / |t|^2 of features of one shape (Romero et al. 2015, "FitNets"): 0 alike, 1 for a student of zeros."""
    teacher = teacher.detach()
    return (student - teacher).square().mean() / teacher.square().mean().clamp_min(1e-12)


def fsp(first: Tensor, second: Tensor) -> Tensor:
    """The flow from one feature map to a later one: G[i, j] = sum over places of F1[i] F2[j] / places (Yim et al. 2017,
    "A Gift from Knowledge Distillation"); [n, c1, h1, w1], [n, c2, h2, w2] -> [n, c1, c2]. The larger is max-pooled."""
    import torch
    from torch.nn import functional

    first = functional.adaptive_max_pool2d(first, second.shape[2:])
    return torch.einsum("nihw,njhw->nij", first, second) / (second.shape[2] * second.shape[3])


def fsp_loss(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """`l2` of the `fsp` matrices of every two maps in a row; the maps of both of the same shapes, at least two."""
    import torch

    matrices = [[fsp(a, b) for a, b in itertools.pairwise(each)] for each in (student, teacher)]
    return torch.stack([l2(a, b) for a, b in zip(*matrices, strict=True)]).mean()
