"""Torch layers of recommenders.

A batch consists of `ids`, `numbers` and `scales`, see `zoo.recommenders.data.encoding.Rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pipelines.core.errors import RequestError
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features

_RANDOM = ContextVar("_RANDOM", default=True)


@contextmanager
def empty_tables() -> Iterator[None]:
    """Context in which the tables of new networks have no values, and take no memory, until some are loaded."""
    token = _RANDOM.set(False)
    try:
        yield
    finally:
        _RANDOM.reset(token)


class Embeddings(nn.Module):
    """Embedding tables of several fields, concatenated: one vector per field, float32 [n, fields * size].

    All tables are one parameter; a field that shares the table of another one has no table of its own. The vectors of
    a list are pooled by sum, mean or maximum, as in the schema. Sequences have no pooled vector: they are refused, or
    looked up by `zoo.recommenders.models.sequences.layers.SequenceLookup`.

    Args:
        fields: Fields, one table each.
        size: Embedding size.
        spread: Standard deviation of the initial weights.
        sequences: Whether sequences may be among the fields.

    Attributes:
        fields: Fields, with the sequences.
        pooled: Fields without the sequences.
        tables: Names of the fields whose tables these are.
        sparse: Whether gradients are sparse tensors with the rows of the batch only.
    """

    offsets: torch.Tensor
    columns: torch.Tensor

    def __init__(self, fields: Sequence[Field], size: int, spread: float = 0.01, sequences: bool = False) -> None:
        super().__init__()
        self.fields, self.size, self.sparse = tuple(fields), size, False
        self.pooled = tuple(field for field in fields if not field.is_sequence)
        if not sequences and len(self.pooled) < len(fields):
            (name, *_) = (field.name for field in fields if field.is_sequence)
            raise RequestError(
                f'found the sequence {name} ("pooling": "none"), expected "mean", "sum" or "max": this family pools '
                "lists; din, bst and sasrec read sequences"
            )
        own = {field.name: field.rows for field in fields if self.owner(field) == field.name}
        self.tables, self.heights = tuple(own), tuple(own.values())
        starts = dict(zip(own, [0, *np.cumsum(self.heights).tolist()], strict=False))
        self.starts: list[int] = [starts[self.owner(field)] for field in fields]
        shape = sum(self.heights), size
        self.weight = nn.Parameter(torch.randn(shape).mul_(spread) if _RANDOM.get() else torch.empty(shape))
        pooled = [(field, start) for field, start in zip(fields, self.starts, strict=True) if not field.is_sequence]
        nothing = [torch.zeros(0, dtype=torch.long)]
        offsets = nothing + [torch.full((field.width,), start) for field, start in pooled]
        columns = nothing + [torch.arange(field.start, field.start + field.width) for field, _ in pooled]
        self.register_buffer("offsets", torch.cat(offsets), persistent=False)
        self.register_buffer("columns", torch.cat(columns), persistent=False)
        self.clear()

    @property
    def width(self) -> int:
        """Width of the result."""
        return len(self.pooled) * self.size

    def owner(self, field: Field) -> str:
        """Returns the name of the field whose table a field uses.

        Args:
            field: One of `fields`.
        """
        return field.table if any(field.table == each.name for each in self.fields) else field.name

    @property
    def padding(self) -> list[int]:
        """Rows of the parameter for padded list positions, which are zero."""
        return [start + each.last for each, start in zip(self.fields, self.starts, strict=True) if each.is_list]

    @torch.no_grad()
    def clear(self) -> None:
        """Sets the rows of `padding` to zero."""
        self.weight[self.padding] = 0

    def table(self, number: int) -> torch.Tensor:
        """Returns the table of a field.

        Args:
            number: Index of the field.

        Returns:
            View of the parameter, float32 [rows, size].
        """
        start = self.starts[number]
        return self.weight[start : start + self.fields[number].rows]

    def forward(self, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Looks up and pools the vectors of all fields.

        Args:
            ids: Table rows of all fields of the log, int32 [n, columns].
            scales: Reciprocals of list lengths for mean pooling, float32 [n, lists].

        Returns:
            float32 [n, fields * size].
        """
        rows = functional.embedding(ids[:, self.columns] + self.offsets, self.weight, sparse=self.sparse)
        parts, at = [], 0
        for field in self.pooled:
            embedded = rows[:, at : at + field.width]
            at += field.width
            if not field.is_list:
                parts.append(embedded[:, 0])
            elif field.column.pooling == "max":
                parts.append(embedded.amax(1))
            else:
                total = embedded.sum(1)
                parts.append(total * scales[:, field.scale : field.scale + 1] if field.scale >= 0 else total)
        return torch.cat(parts, 1)


class FirstOrder(Embeddings):
    """Sum of one first-order weight per field: float32 [n, 1]."""

    def __init__(self, fields: Sequence[Field]) -> None:
        super().__init__(fields, 1, 0.0)

    def forward(self, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See `Embeddings.forward`."""
        return super().forward(ids, scales).sum(1, keepdim=True)


class FactorizationMachine(nn.Module):
    """Sum of the dot products of all pairs of fields (Rendle 2010): float32 [n, fields * size] -> [n, 1].

    sum_{f<g} e_f e_g = (|sum_f e_f|^2 - sum_f |e_f|^2) / 2
    """

    def __init__(self, fields: int, size: int) -> None:
        super().__init__()
        self.fields, self.size = fields, size

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        """Computes the sum.

        Args:
            flat: Result of `Embeddings`, float32 [n, fields * size].

        Returns:
            float32 [n, 1].
        """
        e = flat.view(-1, self.fields, self.size)
        total = e.sum(1)
        return 0.5 * (total * total - (e * e).sum(1)).sum(1, keepdim=True)


class DotInteraction(nn.Module):
    """Dot products of all pairs of vectors: float32 [n, count * size] -> [n, count * (count - 1) / 2]."""

    pairs: torch.Tensor

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count, self.size = count, size
        rows, columns = torch.tril_indices(count, count, -1)
        self.register_buffer("pairs", rows * count + columns, persistent=False)

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        """Computes the dot products.

        Args:
            flat: Concatenated vectors, float32 [n, count * size].

        Returns:
            float32 [n, count * (count - 1) / 2].
        """
        x = flat.view(-1, self.count, self.size)
        return torch.bmm(x, x.transpose(1, 2)).flatten(1)[:, self.pairs]


class SelectColumns(nn.Module):
    """Selects columns of a matrix: float32 [n, m] -> [n, chosen]."""

    chosen: torch.Tensor

    def __init__(self, chosen: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.tensor(chosen), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Selects the columns.

        Args:
            x: float32 [n, m].

        Returns:
            float32 [n, chosen].
        """
        return x[:, self.chosen]


class L2Normalize(nn.Module):
    """L2 normalization: float32 [n, size] -> [n, size]; zero vectors remain zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes every row.

        Args:
            x: float32 [n, size].

        Returns:
            float32 [n, size].
        """
        return x / (x * x).sum(1, keepdim=True).clamp_min(1e-12).sqrt()


class RowDot(nn.Module):
    """Dot products of corresponding rows of two matrices: float32 [n, size] each -> [n, 1]."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Computes the dot products.

        Args:
            a: float32 [n, size].
            b: float32 [n, size].

        Returns:
            float32 [n, 1].
        """
        return (a * b).sum(1, keepdim=True)


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None, dropout: float = 0.0) -> nn.Sequential:
    """Creates a multilayer perceptron: linear layers with ReLU and dropout.

    Args:
        inputs: Width of the input.
        hidden: Widths of the hidden layers.
        outputs: Width of a last layer without ReLU; None for no such layer.
        dropout: Dropout probability after every hidden layer.

    Returns:
        The layers.
    """
    layers: list[nn.Module] = []
    for before, size in zip([inputs, *hidden], hidden, strict=False):
        layers += [nn.Linear(before, size), nn.ReLU(), nn.Dropout(dropout)]
    if outputs is not None:
        layers.append(nn.Linear([inputs, *hidden][-1], outputs))
    return nn.Sequential(*layers)


def concat_numbers(flat: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Concatenates embeddings and numbers.

    Args:
        flat: Embeddings, float32 [n, width].
        numbers: float32 [n, count].
        count: Number of numbers; 0 returns the embeddings.

    Returns:
        float32 [n, width + count].
    """
    return torch.cat([flat, numbers], 1) if count else flat


def counts(features: Features) -> tuple[int, int]:
    """Returns the number of fields and of numbers of a log.

    Args:
        features: Encoding of the log.

    Returns:
        (fields, numbers including missing-value indicators).
    """
    return len(features.fields), features.shape[1]
