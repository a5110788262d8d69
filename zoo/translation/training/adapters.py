"""Low-rank adapters of linear layers (Hu et al. 2022, "LoRA"), which are merged into the weights after training."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 2.0  # of the product of both factors
FACTORS = (".down", ".up")  # ends of their names


class AdaptedLinear(nn.Module):
    """Linear layer with a low-rank addition to its weight: W + SCALE up down."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        """Adds an adapter of zeros.

        Args:
            linear: The layer.
            rank: Rank of the addition.
        """
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes float [..., inputs] -> float [..., outputs]."""
        return self.linear(x) + SCALE * F.linear(F.linear(x, self.down), self.up)  # type: ignore[no-any-return]

    def merged(self) -> torch.Tensor:
        """Returns the weight with the addition, float [outputs, inputs]."""
        return self.linear.weight.detach() + SCALE * (self.up.detach() @ self.down.detach())


def add(model: nn.Module, rank: int, frozen: tuple[str, ...] = ()) -> None:
    """Adds adapters to all linear layers, in place.

    Args:
        model: The network.
        rank: Rank of the adapters.
        frozen: Prefixes of the names of layers that get none.
    """
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and not path.startswith(frozen):
            model.set_submodule(path, AdaptedLinear(layer, rank))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict of the network with its adapters merged.

    Args:
        model: A network, with or without adapters.
    """
    adapted = {path: layer for path, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}
    tensors = {}
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if module in adapted:
            continue  # a factor
        path = module.removesuffix(".linear")
        if path in adapted:
            tensors[f"{path}.{kind}"] = adapted[path].merged() if kind == "weight" else tensor
        else:
            tensors[name] = tensor
    return tensors


def merge(model: nn.Module) -> None:
    """Replaces adapted layers by plain ones with the merged weights, in place.

    Args:
        model: A network, with or without adapters.
    """
    for path, layer in list(model.named_modules()):
        if isinstance(layer, AdaptedLinear):
            layer.linear.weight.data = layer.merged()
            model.set_submodule(path, layer.linear)
