"""Self-attention over sequences, the newest item first: a position attends to itself and to older items."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from pipelines.core.errors import RequestError
from zoo.recommenders.models.sequences.layers import LARGE

SLOPE = 0.01  # of the leaky ReLU in a transformer layer of BST


class SequencePositions(nn.Module):
    """Adds a vector of its position to every item, counted from the newest one: float32 [n, items, size]."""

    def __init__(self, items: int, size: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(items, size) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the vectors.

        Args:
            x: float32 [n, items, size].

        Returns:
            float32 [n, items, size].
        """
        return x + self.position


def _require_heads(size: int, heads: int) -> None:
    """Raises a RequestError if vectors of `size` columns cannot be divided among so many heads."""
    if size % heads:
        raise RequestError(f"found heads={heads} for vectors of {size} columns, expected a divisor of {size}")


class AttentionBlock(nn.Module):
    """Block of SASRec (Kang & McAuley 2018): self-attention and a feed-forward network, normalized before each.

    Args:
        size: Width of the vectors.
        heads: Number of attention heads.
        inner: Width of the feed-forward network.
        dropout: Dropout probability of attention weights and of both results.
    """

    def __init__(self, size: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        _require_heads(size, heads)
        self.size, self.heads, self.dropout = size, heads, dropout
        self.attention_norm, self.network_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.projected, self.joined = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.inner, self.outer = nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, newest: bool = False) -> torch.Tensor:
        """Computes the block.

        Args:
            x: float32 [n, items, size].
            mask: 1 where there is an item, float32 [n, items].
            newest: Whether to compute the newest position alone.

        Returns:
            float32 [n, items, size], or [n, 1, size].
        """
        n, items, size = x.shape
        parts = self.projected(self.attention_norm(x)).view(n, items, 3, self.heads, size // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        x, query = (x[:, :1], query[:, :, :1]) if newest else (x, query)
        scores = query @ key.transpose(2, 3) * (size // self.heads) ** -0.5
        barred = older(items)[: x.shape[1]] + (mask[:, None, None] - 1) * LARGE
        weights = functional.dropout(torch.softmax(scores + barred, -1), self.dropout, self.training)
        joined = self.joined((weights @ value).transpose(1, 2).reshape(n, x.shape[1], size))
        x = x + functional.dropout(joined, self.dropout, self.training)
        inner = functional.dropout(torch.relu(self.inner(self.network_norm(x))), self.dropout, self.training)
        return x + functional.dropout(self.outer(inner), self.dropout, self.training)


class HSTUBlock(nn.Module):
    """Block of HSTU (Zhai et al. 2024, section 3): pointwise attention SiLU(q k + b) / items, gated, without softmax.

    b is a bias of the relative position. The sum over the items keeps the intensity of an interest.

    Args:
        size: Width of the vectors.
        heads: Number of attention heads.
        items: Places of a sequence.
        dropout: Dropout probability of the result.
    """

    def __init__(self, size: int, heads: int, items: int, dropout: float) -> None:
        super().__init__()
        _require_heads(size, heads)
        self.size, self.heads, self.items, self.dropout = size, heads, items, dropout
        self.attention_norm, self.gated_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.projected, self.joined = nn.Linear(size, 4 * size), nn.Linear(size, size)
        self.relative = nn.Parameter(torch.zeros(items))

    def restored(self, arrays: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
        """See `Dice.restored`; the relative biases are those of the newest query."""
        return {f"{path}.relative": arrays[f"{path}.bias"][0]}

    def bias(self) -> torch.Tensor:
        """Returns b of every query and key, float32 [items, items]."""
        places = torch.arange(self.items)
        return self.relative[(places - places[:, None]).clamp(min=0)]

    def visible(self) -> torch.Tensor:
        """Returns 1 / items for the item itself and older ones, else 0, float32 [items, items]."""
        return (older(self.items) == 0).float() / self.items

    def forward(self, x: torch.Tensor, mask: torch.Tensor, newest: bool = False) -> torch.Tensor:
        """See `AttentionBlock.forward`."""
        n, items, size = x.shape
        gate, parts = functional.silu(self.projected(self.attention_norm(x))).tensor_split((size,), -1)
        query, key, value = parts.view(n, items, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        x, query, gate = (x[:, :1], query[:, :, :1], gate[:, :1]) if newest else (x, query, gate)
        scores = functional.silu(query @ key.transpose(2, 3) + self.bias()[: x.shape[1]])
        weights = scores * self.visible()[: x.shape[1]] * mask[:, None, None]
        joined = self.gated_norm((weights @ value).transpose(1, 2).reshape(n, x.shape[1], size)) * gate
        return x + functional.dropout(self.joined(joined), self.dropout, self.training)


def older(items: int) -> torch.Tensor:
    """Returns the bias of the scores: 0 for the item itself and older ones, else a large negative number.

    Args:
        items: Places of a sequence.

    Returns:
        float32 [items, items], queries by keys.
    """
    return torch.tril(torch.full((items, items), -LARGE), -1)


class SequenceEncoder(nn.Module):
    """Encodes sequences: float32 [n, items, size] and a mask -> the same shape in training, else [n, 1, size].

    The newest state alone is computed outside training. The first place counts as an item even where it is none: its
    state is that of an empty sequence.

    Args:
        size: Width of the vectors.
        items: Places of a sequence.
        heads: Number of attention heads.
        inner: Width of the feed-forward networks.
        blocks: Number of blocks.
        dropout: Dropout probability.
        block: "sasrec" or "hstu".

    Attributes:
        every: Whether training computes the states of all positions, or that of the newest one alone.
    """

    def __init__(
        self, size: int, items: int, heads: int, inner: int, blocks: int, dropout: float, block: str = "sasrec"
    ) -> None:
        super().__init__()
        if block not in ("sasrec", "hstu"):
            raise RequestError(f"found the block {block!r}, expected sasrec or hstu")
        self.size, self.dropout, self.every = size, dropout, True
        self.positions = SequencePositions(items, size)
        self.blocks = nn.ModuleList(
            AttentionBlock(size, heads, inner, dropout) if block == "sasrec" else HSTUBlock(size, heads, items, dropout)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, gaps: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the states.

        Args:
            x: Vectors of the items, zero behind them, float32 [n, items, size].
            mask: 1 where there is an item, float32 [n, items].
            gaps: Vectors of the time gaps, which add to those of the positions, float32 [n, items, size].

        Returns:
            States of all positions, or of the newest one, float32 [n, items or 1, size].
        """
        mask = torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], 1)
        x = x * self.size**0.5
        x = functional.dropout(self.positions(x if gaps is None else x + gaps), self.dropout, self.training)
        for number, block in enumerate(self.blocks, 1):
            newest = number == len(self.blocks) and not (self.training and self.every)
            x = block(x, mask, newest=newest)
        states: torch.Tensor = self.norm(x)
        return states


class TargetTransformer(nn.Module):
    """Transformer layer of BST, normalized after each part: the result of the target, which attends to all items.

    Args:
        size: Width of the vectors.
        items: Places of a sequence.
        heads: Number of attention heads.
        inner: Width of the feed-forward network.
        dropout: Dropout probability of both results.
    """

    def __init__(self, size: int, items: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        _require_heads(size, heads)
        self.size, self.heads, self.dropout = size, heads, dropout
        self.position = nn.Parameter(torch.randn(1 + items, size) * 0.02)
        self.query, self.projected = nn.Linear(size, size), nn.Linear(size, 2 * size)
        self.joined, self.inner, self.outer = nn.Linear(size, size), nn.Linear(size, inner), nn.Linear(inner, size)
        self.attention_norm, self.network_norm = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(
        self, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, gaps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the layer.

        Args:
            query: Vectors of the targets, float32 [n, size].
            keys: Vectors of the items, float32 [n, items, size].
            mask: 1 where there is an item, float32 [n, items].
            gaps: Vectors of the time gaps, which add to those of the positions, float32 [n, items, size].

        Returns:
            float32 [n, size].
        """
        n, items, size = keys.shape
        keys = keys if gaps is None else keys + gaps
        x = torch.cat([query[:, None], keys], 1) + self.position
        mask = functional.pad(mask, (1, 0), value=1.0)
        parts = self.projected(x).view(n, 1 + items, 2, self.heads, size // self.heads)
        key, value = parts.permute(2, 0, 3, 1, 4)
        target = x[:, 0]
        own = self.query(target).view(n, self.heads, 1, size // self.heads) * (size // self.heads) ** -0.5
        weights = torch.softmax(own @ key.transpose(2, 3) + (mask[:, None, None] - 1) * LARGE, -1)
        joined = self.joined((weights @ value).reshape(n, size))
        x = self.attention_norm(target + functional.dropout(joined, self.dropout, self.training))
        inner = functional.leaky_relu(self.inner(x), SLOPE)
        result: torch.Tensor = self.network_norm(x + functional.dropout(self.outer(inner), self.dropout, self.training))
        return result


class NewestState(nn.Module):
    """State of the newest item: float32 [n, items, size] -> [n, size]."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Selects the state.

        Args:
            states: float32 [n, items, size].

        Returns:
            float32 [n, size].
        """
        return states[:, 0]
