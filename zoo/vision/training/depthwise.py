"""Depthwise convolutions in training on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Depthwise(nn.Conv2d):
    """A depthwise convolution that avoids the two cases in which oneDNN's backward pass is ten times slower.

    Strided convolutions run in float32 instead of bfloat16; images smaller than the kernel are padded before the
    convolution.
    """

    def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        strided, small = max(self.stride) > 1, min(x.shape[2:]) < max(self.kernel_size)
        padding = self.padding
        if small:
            assert not isinstance(padding, str)
            x, padding = F.pad(x, (padding[1], padding[1], padding[0], padding[0])), (0, 0)
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not strided):
            x = x.float() if strided else x
            return F.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups)


def use_fast_depthwise(model: nn.Module) -> None:
    """Replaces the class of all depthwise convolutions by one that is fast in training on a CPU.

    Parameters, names and results do not change.

    Args:
        model: Network, changed in place.
    """
    for module in model.modules():
        if (
            type(module) is nn.Conv2d
            and module.groups == module.in_channels > 1
            and not isinstance(module.padding, str)
        ):
            module.__class__ = _Depthwise
