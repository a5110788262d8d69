"""Meanings of the tensors of a feature column graph, and helpers shared by the rules for operators.

A constant tensor is an array (shapes may contain `BATCH`). A tensor float [n, width] is an expression of
`zoo.recommenders.importers.tensorflow.expressions`. A tensor between a text and its embedding is a `LookupStage`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zoo.recommenders.importers.tensorflow.expressions import Apply, Column, Dense, Row, Sum

Array = npt.NDArray[Any]
Node = Any  # tf.compat.v1.NodeDef
Rule = Callable[[Node, list[Any], "Source"], Any]  # the outputs of a node, one or a tuple, for those of its inputs


class RuleRefused(Exception):
    """A rule does not apply, and why."""


class Batch:
    """Number of rows, as an entry of a shape."""

    def __mul__(self, other: Any) -> Batch:
        return (
            self
            if isinstance(other, int | np.integer) and other == 1
            else refuse("it computes with the number of rows")
        )

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return "?"


BATCH = Batch()


@dataclass(frozen=True)
class Refused:
    """Tensor without a meaning, with the reasons."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Feature:
    """Numeric feature, with the default of every entry."""

    fill: tuple[float, ...]


@dataclass
class Source:
    """Features found so far.

    Attributes:
        numbers: Numeric features by name.
        buckets: Hash buckets of categorical features by name.
    """

    numbers: dict[str, Feature] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LookupStage:
    """Tensor between a categorical text and its embedding, for n rows of which m have a value.

    - text: string [n] or [n, 1], by `rank`; present: bool mask of rows with a value
    - entries: int64 [m, 2], indices of the values; held: string [m], the values
    - bucket: int64 [m], hashes of the values; valid: bool [m], true; all: 0 .. m - 1
    - filled: int64 [n], hashes, `default` for missing values; filled entries: int64 [n, 2]; segments: 0 .. n - 1
    - empty: bool [n], mask of missing values; unique, positions: results of Unique on filled
    - unique rows: rows of `table` for unique
    - dense: int64 [n, 1], hashes, -1 for missing values; one hot: float [n, 1, depth] of dense
    - hashed: int64, hashes of all values, also missing ones

    Attributes:
        kind: One of the kinds above.
        field: Name of the categorical feature.
        rank: Rank of a text.
        buckets: Number of hash buckets.
        default: Bucket of missing values.
        table: Embedding table [buckets, width].
    """

    kind: str
    field: str
    rank: int = 0
    buckets: int = 0
    default: int = 0
    table: Array | None = None

    def to(self, kind: str, **changes: Any) -> LookupStage:
        """Returns another stage of the same field.

        Args:
            kind: Kind of the stage.
            **changes: Other attributes that change.

        Returns:
            The stage.
        """
        return replace(self, kind=kind, **changes)


@dataclass(frozen=True, eq=False)
class Flat:
    """Tensor [n] of an expression [n, 1]."""

    of: Dense


@dataclass(frozen=True, eq=False)
class Nested:
    """Tensor [n, 1, width] of an expression [n, width]."""

    of: Dense


@dataclass(frozen=True)
class Zeros:
    """Zeros [n, width]."""

    width: int


@dataclass(frozen=True, eq=False)
class TwoClass:
    """Logits [0, logit] of two classes, [n, 2]."""

    logit: Dense


@dataclass(frozen=True, eq=False)
class Pair:
    """Probabilities [1 - p, p] with p the sigmoid of a logit, [n, 2]."""

    logit: Dense


def flat(value: Any) -> Any:
    """Returns the expression [n, 1] of a tensor [n]; other tensors unchanged.

    Args:
        value: Meaning of a tensor.

    Returns:
        Its expression.
    """
    return value.of if isinstance(value, Flat) else value


def refuse(why: str) -> NoReturn:
    """Refuses an operator.

    Args:
        why: Reason.

    Raises:
        RuleRefused: Always.
    """
    raise RuleRefused(why)


def unknown(inputs: Sequence[Any]) -> str:
    """Describes why an operator has no meaning on its inputs.

    Args:
        inputs: Meanings of the inputs.

    Returns:
        Reason for messages.
    """
    steps = {source.kind for source in inputs if isinstance(source, LookupStage)}
    if steps & {"unique rows", "positions", "segments"}:
        return "rows are combined by other than mean, sum or sqrtn, or with weights; such columns are not mapped"
    kinds = ", ".join(kind_of(source) for source in inputs if not isinstance(source, np.ndarray))
    return f"not mapped here, on {kinds or 'constants'}"


def kind_of(value: Any) -> str:
    """Describes a tensor for messages.

    Args:
        value: Meaning of the tensor.

    Returns:
        Description.
    """
    if isinstance(value, LookupStage):
        return f"the {value.kind} of {value.field}"
    if isinstance(value, Row) and len(value.parts) == 1 and isinstance(value.parts[0], Column):
        return f"the number {value.parts[0].feature}"
    return {"Row": "joined columns", "Sum": "a sum", "Apply": "an activation"}.get(
        type(flat(value)).__name__, type(value).__name__
    )


def require(condition: Any, why: str = "it is not used as a column of one value a row") -> None:
    """Refuses the operator unless a condition holds.

    Args:
        condition: Condition.
        why: Reason for the refusal.

    Raises:
        RuleRefused: The condition does not hold.
    """
    if not condition:
        refuse(why)


def is_stage(value: Any, kind: str) -> bool:
    """Tells whether a tensor is a lookup stage of a kind.

    Args:
        value: Meaning of the tensor.
        kind: Kind of the stage.

    Returns:
        Whether it is.
    """
    return isinstance(value, LookupStage) and value.kind == kind


def same(*steps: LookupStage) -> bool:
    """Whether the stages are of one field."""
    return len({step.field for step in steps}) == 1


def as_dense(value: Any) -> Dense:
    """Returns the expression of a tensor.

    Args:
        value: Meaning of the tensor.

    Returns:
        Its expression, float [n, width].

    Raises:
        RuleRefused: The tensor is not an expression.
    """
    return value if isinstance(value, Row | Sum | Apply) else refuse(unknown([value]))


def axis_of(value: Any, rank: int) -> int:
    """Normalizes a constant axis.

    Args:
        value: Scalar, may be negative.
        rank: Rank of the tensor.

    Returns:
        Axis counted from 0.
    """
    axis = int(np.asarray(value).item())
    return axis + rank if axis < 0 else axis


def array_of(value: Any) -> Array:
    """Converts a numpy result on shapes and constants to an array.

    Args:
        value: Array or scalar.

    Returns:
        The array.
    """
    return value if isinstance(value, np.ndarray) else np.array(value, object if isinstance(value, Batch) else None)
