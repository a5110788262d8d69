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
    """The number of rows, as an entry of a shape."""

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
    """A tensor without a meaning, and why."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Feature:
    """A numeric feature, with the default of every entry."""

    fill: tuple[float, ...]


@dataclass
class Source:
    """The features met so far: numbers, and hash buckets of categories."""

    numbers: dict[str, Feature] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LookupStage:
    """A tensor between a categorical text and its embedding. `kind`, with n rows of which m hold a value:

    text: string [n] or [n, 1], by rank. present: bool, whether there is one. entries: int64 [m, 2], where. held: string
    [m], those.
    bucket: int64 [m], their hashes. valid: bool [m], true. all: 0 .. m - 1. filled: int64 [n], hashes with `default`
    for the others. filled entries: int64 [n, 2]. segments: 0 .. n - 1. empty: bool [n], whether there was none. unique,
    positions: of filled. unique rows: of `table`. dense: int64 [n, 1], hashes and -1. one hot: float [n, 1, depth] of
    dense. hashed: int64 of all.
    """

    kind: str
    field: str
    rank: int = 0
    buckets: int = 0
    default: int = 0
    table: Array | None = None

    def to(self, kind: str, **changes: Any) -> LookupStage:
        """Another stage of the same field."""
        return replace(self, kind=kind, **changes)


@dataclass(frozen=True, eq=False)
class Flat:
    """[n] for an expression [n, 1]."""

    of: Dense


@dataclass(frozen=True, eq=False)
class Nested:
    """[n, 1, width] for an expression [n, width]."""

    of: Dense


@dataclass(frozen=True)
class Zeros:
    """Zeros [n, width]."""

    width: int


@dataclass(frozen=True, eq=False)
class TwoClass:
    """[0, logit], [n, 2]."""

    logit: Dense


@dataclass(frozen=True, eq=False)
class Pair:
    """[1 - p, p] of the sigmoid p of a logit, [n, 2]."""

    logit: Dense


def flat(value: Any) -> Any:
    """An expression [n, 1] for one of [n]; anything else as it is."""
    return value.of if isinstance(value, Flat) else value


def refuse(why: str) -> NoReturn:
    """Raise RuleRefused."""
    raise RuleRefused(why)


def unknown(inputs: Sequence[Any]) -> str:
    """Why an operator has no meaning on such inputs."""
    steps = {each.kind for each in inputs if isinstance(each, LookupStage)}
    if steps & {"unique rows", "positions", "segments"}:
        return "rows are combined by other than mean, sum or sqrtn, or with weights; such columns are not mapped"
    kinds = ", ".join(kind_of(each) for each in inputs if not isinstance(each, np.ndarray))
    return f"not mapped here, on {kinds or 'constants'}"


def kind_of(value: Any) -> str:
    """Description of a tensor for messages."""
    if isinstance(value, LookupStage):
        return f"the {value.kind} of {value.field}"
    if isinstance(value, Row) and len(value.parts) == 1 and isinstance(value.parts[0], Column):
        return f"the number {value.parts[0].feature}"
    return {"Row": "joined columns", "Sum": "a sum", "Apply": "an activation"}.get(
        type(flat(value)).__name__, type(value).__name__
    )


def require(held: Any, why: str = "it is not used as a column of one value a row") -> None:
    """Refuses the operator unless a condition holds.

    Args:
        held: Condition.
        why: Reason for the refusal.

    Raises:
        RuleRefused: The condition does not hold.
    """
    if not held:
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
    return len({each.field for each in steps}) == 1


def as_dense(value: Any) -> Dense:
    """The tensor as an expression; refuses other tensors."""
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
    """Result of numpy on shapes and constants, as an array; scalars too."""
    return value if isinstance(value, np.ndarray) else np.array(value, object if isinstance(value, Batch) else None)
