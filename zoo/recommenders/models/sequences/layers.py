"""Torch layers of recommenders that read sequences.

The ids of a sequence are int32 [n, items] with the newest item first; the places behind its items have the id of the
padding, whose row of the table is zero. Every layer leaves these places out, so that a score does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from pipelines.core.errors import RequestError
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Embeddings

LARGE = 1e4  # subtracted from the scores of padding: its weight is exactly 0 in float32


def sequences_of(features: Features) -> list[tuple[Field, Field]]:
    """Finds the sequences of a log.

    Args:
        features: Encoding of the log.

    Returns:
        (sequence, category whose table it shares) for every list with the pooling none; without time gaps.

    Raises:
        RequestError: There is none, or a sequence shares no table.
    """
    fields = {field.name: field for field in features.fields}
    sequences = [field for field in features.fields if field.is_sequence and not field.is_gaps]
    if not sequences:
        raise RequestError(
            'the schema has no sequence; give the list of the items clicked before "pooling": "none" and "shares": '
            '"item_id", the name of the item\'s column (zoo schema LOG --family din -o schema.json proposes it)'
        )
    if alone := [field.name for field in sequences if field.column.shares not in fields]:
        raise RequestError(
            f'the sequence {alone[0]} shares no table; give it "shares": the name of the item\'s column in the schema'
        )
    return [(field, fields[field.column.shares]) for field in sequences]


def gaps_of(features: Features, sequence: Field) -> Field | None:
    """Returns the time gaps of a sequence, if its log has some.

    Args:
        features: Encoding of the log.
        sequence: The sequence.
    """
    return next((field for field in features.fields if field.column.gaps_of == sequence.name), None)


class FieldLookup(nn.Module):
    """Vector of one category: int32 [n, columns] -> float32 [n, size].

    Args:
        embeddings: Tables with that of the category. They belong to another module.
        field: The category.
    """

    def __init__(self, embeddings: Embeddings, field: Field) -> None:
        super().__init__()
        self._of, self.field, self.size = (embeddings,), field, embeddings.size
        self.start = embeddings.starts[embeddings.fields.index(field)]

    @property
    def embeddings(self) -> Embeddings:
        """The tables."""
        return self._of[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks up the vectors.

        Args:
            ids: Table rows of all fields of the log, int32 [n, columns].

        Returns:
            float32 [n, size].
        """
        tables = self.embeddings
        rows = ids[:, self.field.start] + self.start
        return tables.lookup(rows)


class SequenceLookup(FieldLookup):
    """Vectors of the items of a sequence, zero behind them: int32 [n, columns] -> float32 [n, items, size]."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Looks up the vectors.

        Args:
            ids: Table rows of all fields of the log, int32 [n, columns].

        Returns:
            float32 [n, items, size].
        """
        tables, field = self.embeddings, self.field
        rows = ids[:, field.start : field.start + field.width] + self.start
        return tables.lookup(rows)


class SequenceMask(nn.Module):
    """Tells items from padding: int32 [n, columns] -> float32 [n, items], 1 where there is an item."""

    def __init__(self, field: Field) -> None:
        super().__init__()
        self.field = field

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Computes the mask.

        Args:
            ids: Table rows of all fields of the log, int32 [n, columns].

        Returns:
            float32 [n, items].
        """
        field = self.field
        return (ids[:, field.start : field.start + field.width] != field.last).float()


class Dice(nn.Module):
    """Data adaptive activation (Zhou et al. 2018, section 5.3): p x + (1 - p) slope x.

    p = sigmoid((x - mean) / deviation). Mean and deviation of every unit are those of the batch in training, weighted
    by `weights`, and their running means afterwards.

    Args:
        units: Size of the last axis.
        momentum: Share of a batch in the running means.
        epsilon: Added to the variance.
    """

    mean: torch.Tensor
    variance: torch.Tensor

    def __init__(self, units: int, momentum: float = 0.01, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.slope = nn.Parameter(torch.zeros(units))
        self.register_buffer("mean", torch.zeros(units))
        self.register_buffer("variance", torch.ones(units))

    def restored(self, arrays: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
        """Recovers mean and variance from the exported scale and shift.

        Args:
            arrays: {name of an initializer: tensor}.
            path: Path of the module.

        Returns:
            {name in the state dict: tensor}.
        """
        scale, shift = arrays[f"{path}.scale"], arrays[f"{path}.shift"]
        return {f"{path}.mean": -shift / scale, f"{path}.variance": scale**-2 - self.epsilon}

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Applies the activation.

        Args:
            x: float32 [..., units].
            weights: Weights of the rows in the statistics of a batch, float32 [...]; None: 1.

        Returns:
            float32 [..., units].
        """
        mean, variance = self.mean, self.variance
        if self.training and self.slope.requires_grad:  # of frozen layers the statistics stay, too
            flat = x.reshape(-1, x.shape[-1])
            share = torch.ones(len(flat), 1) if weights is None else weights.reshape(-1, 1)
            total = share.sum().clamp_min(1)
            mean = (flat * share).sum(0) / total
            variance = ((flat - mean).square() * share).sum(0) / total
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.variance.lerp_(variance, self.momentum)
        p = torch.sigmoid((x - mean) / (variance + self.epsilon).sqrt())
        return x * (self.slope + (1 - self.slope) * p)


class TargetAttention(nn.Module):
    """Weighted sum of a sequence; the weights come from comparing every item with the target (Zhou et al. 2018).

    The activation unit is a network on key, query and their product, the parts of W [k, q, k * q] kept apart:

        h = W_k k + W_q q + b + W_p (k * q);  a = w . f(W f(h) + c) + d;  result = sum_i s(a)_i k_i

    f is Dice or PReLU; s is the sigmoid, as the paper keeps the sum of the weights as the intensity of an interest, or
    softmax over the items. The result of an empty sequence is 0. With vectors g_i of time gaps, a_i has the summand
    v . g_i, and k_i + g_i are summed.

    Args:
        size: Width of the vectors.
        hidden: Widths of the two hidden layers.
        activation: "dice" or "prelu".
        weights: "sigmoid" or "softmax".
        gaps: Whether the items have time gaps.
    """

    def __init__(self, size: int, hidden: Sequence[int], activation: str, weights: str, gaps: bool = False) -> None:
        super().__init__()
        first, second = hidden
        self.weights = weights
        self.query = nn.Linear(size, first)
        self.key = nn.Linear(size, first, bias=False)
        self.product = nn.Linear(size, first, bias=False)
        self.hidden, self.score = nn.Linear(first, second), nn.Linear(second, 1)
        self.first, self.second = activation_of(activation, first), activation_of(activation, second)
        self.gap = nn.Linear(size, 1, bias=False) if gaps else None

    def forward(
        self, query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, gaps: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes the sums.

        Args:
            query: Vectors of the targets, float32 [n, size].
            keys: Vectors of the items, float32 [n, items, size].
            mask: 1 where there is an item, float32 [n, items].
            gaps: Vectors of the time gaps, float32 [n, items, size].

        Returns:
            float32 [n, size].
        """
        x = self.key(keys) + self.product(keys * query[:, None]) + self.query(query)[:, None]
        x = self.second(self.hidden(self.first(x, mask)), mask)
        scores = self.score(x)[:, :, 0]
        if self.gap is not None and gaps is not None:
            scores, keys = scores + self.gap(gaps)[:, :, 0], keys + gaps
        if self.weights == "softmax":
            shares = torch.softmax(scores + (mask - 1) * LARGE, 1)
        else:
            shares = torch.sigmoid(scores) * mask
        return torch.bmm(shares[:, None], keys)[:, 0]


class PReLU(nn.Module):
    """x, multiplied by a slope of its unit where it is negative."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((units,), 0.25))

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """See `Dice.forward`."""
        return torch.where(x < 0, x * self.slope, x)


def activation_of(name: str, units: int) -> nn.Module:
    """Creates an activation.

    Args:
        name: "dice" or "prelu".
        units: Size of the last axis.

    Returns:
        The module.

    Raises:
        RequestError: The name is unknown.
    """
    kinds: dict[str, Callable[[int], nn.Module]] = {"dice": Dice, "prelu": PReLU}
    if name not in kinds:
        raise RequestError(f"found the activation {name!r}, expected {' or '.join(kinds)}")
    return kinds[name](units)
