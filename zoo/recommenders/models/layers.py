"""The parts in torch that the networks of recommenders are made of. A batch is `ids`, `numbers`, `scales` as
`zoo.recommenders.data.features.Rows` has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features


class Embeddings(nn.Module):
    """One vector a field, side by side: float32 [n, fields * size]. All tables lie in one parameter, one below the
    other; a list's vectors are summed, averaged or their largest values taken, as the schema says. sparse: gradients
    hold the rows of a batch alone.
    """

    offsets: torch.Tensor
    columns: torch.Tensor

    def __init__(self, fields: Sequence[Field], size: int, spread: float = 0.01) -> None:
        super().__init__()
        self.fields, self.size, self.sparse = tuple(fields), size, False
        starts = torch.tensor([0, *(each.rows for each in fields)]).cumsum(0)
        self.weight = nn.Parameter(torch.randn(int(starts[-1]), size) * spread)
        self.starts = starts.tolist()
        offsets = [torch.full((each.width,), start) for each, start in zip(fields, self.starts, strict=False)]
        columns = [torch.arange(each.start, each.start + each.width) for each in fields]
        self.register_buffer("offsets", torch.cat(offsets), persistent=False)
        self.register_buffer("columns", torch.cat(columns), persistent=False)
        self.clear()

    @property
    def width(self) -> int:
        """Columns of the result."""
        return len(self.fields) * self.size

    @property
    def padding(self) -> list[int]:
        """Rows of the parameter that stand for places without an item: zeros."""
        return [start + each.last for each, start in zip(self.fields, self.starts, strict=False) if each.is_list]

    @torch.no_grad()
    def clear(self) -> None:
        """Set the rows of `padding` to zero."""
        self.weight[self.padding] = 0

    def table(self, number: int) -> torch.Tensor:
        """The table of a field, [rows, size]."""
        return self.weight[self.starts[number] : self.starts[number + 1]]

    def forward(self, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """ids int32 [n, columns of all fields of the log], scales float32 [n, lists of mean pooling]."""
        rows = functional.embedding(ids[:, self.columns] + self.offsets, self.weight, sparse=self.sparse)
        parts, at = [], 0
        for each in self.fields:
            some = rows[:, at : at + each.width]
            at += each.width
            if not each.is_list:
                parts.append(some[:, 0])
            elif each.column.pooling == "max":
                parts.append(some.amax(1))
            else:
                total = some.sum(1)
                parts.append(total * scales[:, each.scale : each.scale + 1] if each.scale >= 0 else total)
        return torch.cat(parts, 1)


class FirstOrder(Embeddings):
    """The sum of one weight a field: float32 [n, 1]."""

    def __init__(self, fields: Sequence[Field]) -> None:
        super().__init__(fields, 1, 0.0)

    def forward(self, ids: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See `Embeddings.forward`."""
        return super().forward(ids, scales).sum(1, keepdim=True)


class FactorizationMachine(nn.Module):
    """All dot products of two different fields' vectors, summed (Rendle 2010): float32 [n, fields * size] -> [n, 1].

    sum_{f<g} e_f e_g = (|sum_f e_f|^2 - sum_f |e_f|^2) / 2
    """

    def __init__(self, fields: int, size: int) -> None:
        super().__init__()
        self.fields, self.size = fields, size

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        """flat: what `Embeddings` gives."""
        e = flat.view(-1, self.fields, self.size)
        total = e.sum(1)
        return 0.5 * (total * total - (e * e).sum(1)).sum(1, keepdim=True)


class DotInteraction(nn.Module):
    """The dot products of every two different vectors: float32 [n, count * size] -> [n, count * (count - 1) / 2]."""

    pairs: torch.Tensor

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.count, self.size = count, size
        rows, columns = torch.tril_indices(count, count, -1)
        self.register_buffer("pairs", rows * count + columns, persistent=False)

    def forward(self, flat: torch.Tensor) -> torch.Tensor:
        """flat: the vectors, side by side."""
        x = flat.view(-1, self.count, self.size)
        return torch.bmm(x, x.transpose(1, 2)).flatten(1)[:, self.pairs]


class SelectColumns(nn.Module):
    """Some columns of a matrix: float32 [n, m] -> [n, chosen]."""

    chosen: torch.Tensor

    def __init__(self, chosen: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("chosen", torch.tensor(chosen), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: any matrix of enough columns."""
        return x[:, self.chosen]


class L2Normalize(nn.Module):
    """x / |x|: float32 [n, size] -> [n, size]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: any vectors; of zeros come zeros."""
        return x / (x * x).sum(1, keepdim=True).clamp_min(1e-12).sqrt()


class RowDot(nn.Module):
    """The dot products of the rows of two matrices: float32 [n, size] twice -> [n, 1]."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a and b: of the same shape."""
        return (a * b).sum(1, keepdim=True)


def mlp(inputs: int, hidden: Sequence[int], outputs: int | None, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU between them; outputs: of a last one without, None for none."""
    layers: list[nn.Module] = []
    for before, size in zip([inputs, *hidden], hidden, strict=False):
        layers += [nn.Linear(before, size), nn.ReLU(), nn.Dropout(dropout)]
    if outputs is not None:
        layers.append(nn.Linear([inputs, *hidden][-1], outputs))
    return nn.Sequential(*layers)


def concat_numbers(flat: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Embeddings and, where there are any, numbers, side by side."""
    return torch.cat([flat, numbers], 1) if count else flat


def counts(features: Features) -> tuple[int, int]:
    """Fields and numbers of a log."""
    return len(features.fields), features.shape[1]
