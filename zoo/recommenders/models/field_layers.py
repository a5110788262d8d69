"""Torch layers on the fields of a log as vectors of one size: attention between fields, gates of fields."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class NumberVectors(nn.Module):
    """One vector per number, multiplied by the number: float32 [n, count] -> [n, count * size].

    Args:
        count: Number of numbers.
        size: Size of the vectors.
    """

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count, self.size = count, size
        self.weight = nn.Parameter(torch.randn(count, size) * 0.01)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Computes the vectors.

        Args:
            numbers: float32 [n, count].

        Returns:
            float32 [n, count * size].
        """
        return (numbers[:, :, None] * self.weight).flatten(1)

    def restored(self, arrays: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
        """See `ConstantGates.restored`; of the exported vectors."""
        return {f"{path}.weight": arrays[f"{path}.weight"]}


class SplitFields(nn.Module):
    """Vectors of all fields as rows: float32 [n, fields * size] -> [n * fields, size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        """Splits the vectors.

        Args:
            flat: float32 [n, fields * size].

        Returns:
            float32 [n * fields, size].
        """
        return flat.reshape(-1, self.size)


class JoinFields(nn.Module):
    """Rows as vectors of all fields: float32 [n * fields, size] -> [n, fields * size]."""

    def __init__(self, fields: int, size: int) -> None:
        super().__init__()
        self.fields, self.size = fields, size

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Joins the vectors.

        Args:
            rows: float32 [n * fields, size].

        Returns:
            float32 [n, fields * size].
        """
        return rows.reshape(-1, self.fields * self.size)


class FieldAttention(nn.Module):
    """Multi-head attention of every field to all fields of its sample, plus a residual.

    head_h(i) = sum_j softmax_j(<q_hi, k_hj>) v_hj; the result of field i is [head_1(i) .. head_H(i)] + r_i.

    Args:
        fields: Fields of a sample.
        heads: Heads H.
        size: Size of the vectors of a head.
    """

    def __init__(self, fields: int, heads: int, size: int) -> None:
        super().__init__()
        self.fields, self.heads, self.size = fields, heads, size

    def forward(self, projections: torch.Tensor) -> torch.Tensor:
        """Computes the attention.

        Args:
            projections: Queries, keys, values and residuals, float32 [n * fields, 4 * heads * size].

        Returns:
            float32 [n * fields, heads * size].
        """
        *parts, residual = projections.chunk(4, 1)
        q, k, v = (part.reshape(-1, self.fields, self.heads, self.size).transpose(1, 2) for part in parts)
        attended = torch.softmax(q @ k.transpose(2, 3), 3) @ v
        return attended.transpose(1, 2).reshape(-1, self.heads * self.size) + residual


class ConstantGates(nn.Module):
    """Gates that are the same in all samples: x * 2 sigmoid(logits), float32 [n, width] -> [n, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies by the gates.

        Args:
            x: float32 [n, width].

        Returns:
            float32 [n, width].
        """
        return x * self.gates()

    def gates(self) -> torch.Tensor:
        """Returns the gates, float32 [width]."""
        return 2 * torch.sigmoid(self.logits)

    def restored(self, arrays: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
        """Recovers the logits from the exported gates.

        Args:
            arrays: {name of an initializer: tensor}.
            path: Path of the module.

        Returns:
            {name in the state dict: tensor}.
        """
        return {f"{path}.logits": torch.logit(arrays[f"{path}.gates"] / 2)}


class BilinearHeads(nn.Module):
    """Linear layers of neighbouring slices, one a head: float32 [n, inputs] -> [n, outputs].

    Args:
        inputs: Width of the input, divisible by `heads`.
        outputs: Width of the result, divisible by `heads`.
        heads: Number of slices.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads, inputs // heads, outputs // heads))
        nn.init.xavier_normal_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the layers.

        Args:
            x: float32 [n, inputs].

        Returns:
            float32 [n, outputs].
        """
        slices = x.reshape(len(x), self.heads, -1)
        return torch.einsum("nhi,hio->nho", slices, self.weight).flatten(1)

    def matrix(self) -> torch.Tensor:
        """Returns the layers as one matrix with blocks on its diagonal, float32 [inputs, outputs]."""
        heads, inputs, outputs = self.weight.shape
        blocks = torch.zeros(heads, inputs, heads, outputs)
        places = torch.arange(heads)
        blocks[places, :, places] = self.weight.detach()
        return blocks.reshape(heads * inputs, heads * outputs)

    def restored(self, arrays: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
        """See `ConstantGates.restored`; of the exported matrix."""
        heads, inputs, outputs = self.weight.shape
        places = torch.arange(heads)
        blocks = arrays[f"{path}.matrix"].reshape(heads, inputs, heads, outputs)
        return {f"{path}.weight": blocks[places, :, places]}
