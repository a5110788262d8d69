"""Torch layers of recommenders.

A batch consists of `ids`, `numbers` and `scales`, see `zoo.recommenders.data.encoding.Rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from pipelines.core.errors import RequestError
from pipelines.core.machine import BLOCK_ROWS
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features

LARGE_ROWS = 2**17  # rows of tables beyond which a training step changes the rows of its batch alone

_RANDOM = ContextVar("_RANDOM", default=True)
_DEFERRED = ContextVar("_DEFERRED", default=False)


@contextmanager
def empty_tables() -> Iterator[None]:
    """Context in which the tables of new networks have no values, and take no memory, until some are loaded."""
    token = _RANDOM.set(False)
    try:
        yield
    finally:
        _RANDOM.reset(token)


@contextmanager
def deferred_tables() -> Iterator[None]:
    """Context in which large tables of new networks are on torch's device "meta", which takes no memory."""
    token = _DEFERRED.set(True)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


class TableRows(Protocol):
    """Rows of a table that is not in memory."""

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows.

        Args:
            rows: Row numbers, int64 of any shape.

        Returns:
            float32 [*rows.shape, size].
        """


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
        large: Whether the tables have more than `LARGE_ROWS` rows. Rows of large tables begin as `initial` says.
        stored: Rows of a table that is not in memory, whose parameter is on the device "meta".
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
        self.stored: TableRows | None = None
        self.large, self.spread = shape[0] > LARGE_ROWS, spread
        if self.large or not _RANDOM.get():
            empty = torch.empty(shape, device="meta" if _RANDOM.get() else None)
            self.weight = nn.Parameter(empty)
            self.seed = int(torch.randint(2**62, ())) if _RANDOM.get() else 0
        else:
            self.weight = nn.Parameter(torch.randn(shape).mul_(spread))
        pooled = [(field, start) for field, start in zip(fields, self.starts, strict=True) if not field.is_sequence]
        nothing = [torch.zeros(0, dtype=torch.long)]
        offsets = nothing + [torch.full((field.width,), start) for field, start in pooled]
        columns = nothing + [torch.arange(field.start, field.start + field.width) for field, _ in pooled]
        self.register_buffer("offsets", torch.cat(offsets), persistent=False)
        self.register_buffer("columns", torch.cat(columns), persistent=False)
        if not self.weight.is_meta:
            self.clear()
        elif not _DEFERRED.get():
            self.materialize()

    @property
    def width(self) -> int:
        """Width of the result."""
        return len(self.pooled) * self.size

    def owner(self, field: Field) -> str:
        """Returns the name of the field whose table a field uses.

        Args:
            field: One of `fields`.
        """
        return field.table if any(field.table == other.name for other in self.fields) else field.name

    @property
    def padding(self) -> list[int]:
        """Rows of the parameter for padded list positions, which are zero."""
        return [start + field.last for field, start in zip(self.fields, self.starts, strict=True) if field.is_list]

    @torch.no_grad()
    def clear(self) -> None:
        """Sets the rows of `padding` to zero."""
        self.weight[self.padding] = 0

    @torch.no_grad()
    def materialize(self) -> None:
        """Gives a large table of `deferred_tables` its memory and initial values."""
        weight = torch.empty(self.weight.shape)
        for first in range(0, len(weight), BLOCK_ROWS):
            block = weight[first : first + BLOCK_ROWS]
            block.copy_(self.initial(torch.arange(first, first + len(block))))
        self.weight = nn.Parameter(weight)

    def initial(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the initial values of rows of a large table, which depend on their numbers alone.

        Values are sums of four uniform variables (Irwin-Hall distribution), with standard deviation `spread`.

        Args:
            rows: Row numbers, int64 [n].

        Returns:
            float32 [n, size], zero for the rows of `padding`.
        """
        places = rows.numpy()[:, None] * self.size + np.arange(self.size) + self.seed
        words = hashed(places.astype(np.uint64))[..., None].view("<u2")
        factor = np.float32(self.spread * math.sqrt(3) / 2**16)
        values = (words.sum(axis=-1, dtype=np.int32) - 2 * (2**16 - 1)).astype(np.float32) * factor
        values[np.isin(rows.numpy(), self.padding)] = 0
        return torch.from_numpy(values)

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows of the parameter.

        Args:
            rows: Row numbers, int of any shape.

        Returns:
            float32 [*rows.shape, size].
        """
        if self.stored is not None:
            return self.stored.lookup(rows.long())
        if self.weight.is_meta:
            used, places = torch.unique(rows.long(), return_inverse=True)
            return functional.embedding(places, self.initial(used))
        return functional.embedding(rows, self.weight, sparse=self.sparse)

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
        rows = self.lookup(ids[:, self.columns] + self.offsets)
        parts, start = [], 0
        for field in self.pooled:
            embedded = rows[:, start : start + field.width]
            start += field.width
            if not field.is_list:
                parts.append(embedded[:, 0])
            elif field.column.pooling == "max":
                parts.append(embedded.amax(1))
            else:
                total = embedded.sum(1)
                parts.append(total * scales[:, field.scale : field.scale + 1] if field.scale >= 0 else total)
        return torch.cat(parts, 1)


def hashed(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns random integers of counters: the output function of SplitMix64 (Steele et al. 2014).

    Args:
        counters: uint64 of any shape.

    Returns:
        uint64 of the same shape.
    """
    mixed = counters * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


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
