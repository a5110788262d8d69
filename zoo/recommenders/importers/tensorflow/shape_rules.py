"""Rules for operators that move the values of a feature column graph: shapes, slices, casts and constants.

See `zoo.recommenders.importers.tensorflow.rules`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from zoo.recommenders.importers.tensorflow.expressions import Apply, Column, Row
from zoo.recommenders.importers.tensorflow.input_rules import NUMBERS, type_of
from zoo.recommenders.importers.tensorflow.tensors import (
    BATCH,
    Flat,
    LookupStage,
    Nested,
    Node,
    Pair,
    Rule,
    Source,
    TwoClass,
    Zeros,
    array_of,
    as_dense,
    axis_of,
    is_stage,
    refuse,
    require,
    unknown,
)


def _shape(node: Node, inputs: list[Any], source: Source) -> Any:
    """Shape, with `BATCH` for the number of rows."""
    (value,) = inputs
    if isinstance(value, np.ndarray):
        return np.array(value.shape, np.int64)
    if isinstance(value, Flat):
        return np.array([BATCH], object)
    if isinstance(value, LookupStage):
        sizes = {"text": [BATCH, 1][: value.rank], "present": [BATCH, 1], "filled": [BATCH], "dense": [BATCH, 1]}.get(
            value.kind
        )
        return np.array(sizes, object) if sizes else refuse(unknown(inputs))
    width = (
        2 if isinstance(value, Pair | TwoClass) else value.width if isinstance(value, Zeros) else as_dense(value).width
    )
    return np.array([BATCH, width], object)


def _slice(node: Node, inputs: list[Any], source: Source) -> Any:
    """Slice of a constant."""
    value, begin, size = inputs
    spans = tuple(slice(int(b), None if s == -1 else int(b) + int(s)) for b, s in zip(begin, size, strict=True))
    return value[spans] if isinstance(value, np.ndarray) else refuse(unknown(inputs))


def _strided_slice(node: Node, inputs: list[Any], source: Source) -> Any:
    """StridedSlice: a column of numbers, an axis added or dropped, the click's probability of a pair."""
    value, begin, end, stride = inputs
    masks = {name: int(node.attr[f"{name}_mask"].i) for name in ("begin", "end", "shrink_axis", "ellipsis", "new_axis")}
    whole = masks["begin"] & masks["end"] & 1 and stride[0] == 1
    if masks["new_axis"] == 2 and whole and len(begin) == 2 and not masks["ellipsis"]:  # x[:, None]
        return (
            value.to("text", rank=2)
            if is_stage(value, "text") and value.rank == 1
            else value.of
            if isinstance(value, Flat)
            else refuse(unknown(inputs))
        )
    require(not (masks["ellipsis"] or masks["new_axis"]), unknown(inputs))
    spans: list[Any] = []
    for i, (b, e, s) in enumerate(zip(*(bound.astype(int).tolist() for bound in (begin, end, stride)), strict=True)):
        bounds = slice(None if masks["begin"] >> i & 1 else b, None if masks["end"] >> i & 1 else e, s)
        spans.append(b if masks["shrink_axis"] >> i & 1 else bounds)
    if isinstance(value, np.ndarray):
        return array_of(value[tuple(spans)])
    require(len(spans) == 2 and spans[0] in (slice(None, None, 1), slice(0, None, 1)), unknown(inputs))
    if is_stage(value, "text") and value.rank == 2 and spans[1] in (0, -1):
        return value.to("text", rank=1)
    if is_stage(value, "filled entries") and spans[1] == 0:
        return value.to("segments")
    if isinstance(value, Pair):
        require(np.ravel(np.arange(2)[spans[1]]).tolist() == [1], unknown(inputs))
        click = Apply("Sigmoid", (value.logit,), 1, {})
        return Flat(click) if isinstance(spans[1], int) else click
    require(isinstance(value, Row) and all(isinstance(part, Column) for part in value.parts), unknown(inputs))
    chosen = value.parts[spans[1]]
    return Flat(Row((chosen,))) if isinstance(spans[1], int) else Row(tuple(chosen))


def _expand_dims(node: Node, inputs: list[Any], source: Source) -> Any:
    """ExpandDims: [n] -> [n, 1]."""
    value, axis = inputs
    if isinstance(value, np.ndarray):
        return np.expand_dims(value, int(axis))
    require(axis_of(axis, 2) == 1, unknown(inputs))
    if is_stage(value, "text") and value.rank == 1:
        return value.to("text", rank=2)
    return value.of if isinstance(value, Flat) else refuse(unknown(inputs))


def _reshape(node: Node, inputs: list[Any], source: Source) -> Any:
    """Reshape that leaves the rows."""
    value, shape = inputs
    if isinstance(value, np.ndarray):
        return np.reshape(value, shape.astype(np.int64))
    rows = len(shape) > 0 and (shape[0] is BATCH or shape[0] == -1)
    if isinstance(value, LookupStage):
        views = {
            ("empty", 2): value,
            ("all", 1): value,
            ("text", 1): value.to("text", rank=1),
            ("text", 2): value.to("text", rank=2),
        }
        fits = (rows and list(shape[1:]) in ([], [1])) or list(shape) == [BATCH, -1]
        return views[value.kind, len(shape)] if fits and (value.kind, len(shape)) in views else refuse(unknown(inputs))
    inner = value.of if isinstance(value, Flat | Nested) else as_dense(value)
    if rows and len(shape) == 2 and (shape[1] == inner.width or (shape[1] == -1 and shape[0] is BATCH)):
        return inner
    return Flat(inner) if rows and len(shape) == 1 and inner.width == 1 else refuse(unknown(inputs))


def _squeeze(node: Node, inputs: list[Any], source: Source) -> Any:
    """Squeeze: an axis of size one dropped."""
    (value,) = inputs
    axes = [int(axis) for axis in node.attr["squeeze_dims"].list.i]
    if isinstance(value, np.ndarray):
        return np.squeeze(value, tuple(axes) or None)
    if isinstance(value, Nested):
        return value.of if axes and [axis_of(axis, 3) for axis in axes] == [1] else refuse(unknown(inputs))
    require(len(axes) == 1 and axis_of(axes[0], 2) == 1, unknown(inputs))
    if is_stage(value, "text") and value.rank == 2:
        return value.to("text", rank=1)
    return Flat(value) if as_dense(value).width == 1 else refuse(unknown(inputs))


def _concat(node: Node, inputs: list[Any], source: Source) -> Any:
    """ConcatV2 of columns; of zeros and a logit: the logits of two classes."""
    *values, axis = inputs
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate(values, int(axis))
    require(axis_of(axis, 2) == 1, unknown(values))
    if len(values) == 2 and isinstance(values[0], Zeros) and values[0].width == 1 == as_dense(values[1]).width:
        return TwoClass(values[1])
    if all(isinstance(value, Row) for value in values):
        return Row(tuple(part for value in values for part in value.parts))
    return Apply("Concat", tuple(map(as_dense, values)), sum(as_dense(value).width for value in values), {"axis": 1})


def _cast(node: Node, inputs: list[Any], source: Source) -> Any:
    """Cast between integers, or between floats."""
    (value,) = inputs
    before, after = type_of(node, "SrcT"), type_of(node, "DstT")
    if isinstance(value, np.ndarray):
        dtype = {"float": np.float32, "double": np.float64, "half": np.float16}.get(after, np.int64)
        return value if value.dtype == object else value.astype(dtype)
    if isinstance(value, LookupStage):
        return (
            value if value.kind in ("segments", "bucket") and after in ("int32", "int64") else refuse(unknown(inputs))
        )
    require(
        before in NUMBERS and after in NUMBERS and not (after.startswith("int") and not before.startswith("int")),
        unknown(inputs),
    )
    return value


def _const(node: Node, inputs: list[Any], source: Source) -> Any:
    """Const: its array."""
    from tensorflow import make_ndarray

    return np.asarray(make_ndarray(node.attr["value"].tensor))


def _identity(node: Node, inputs: list[Any], source: Source) -> Any:
    """Identity and its kin: nothing."""
    return tuple(inputs)


def _pack(node: Node, inputs: list[Any], source: Source) -> Any:
    """Pack of constants and sizes."""
    require(all(isinstance(part, np.ndarray) for part in inputs), unknown(inputs))
    return np.stack([part.astype(object) for part in inputs], int(node.attr["axis"].i))


SHAPES: dict[str, Rule] = {
    "Const": _const,
    "Pack": _pack,
    **dict.fromkeys(
        ("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics", "Snapshot"), _identity
    ),
    "Shape": _shape,
    "Slice": _slice,
    "StridedSlice": _strided_slice,
    "ExpandDims": _expand_dims,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "ConcatV2": _concat,
    "Cast": _cast,
}
