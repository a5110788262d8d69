"""Rules for the operators of a feature column graph in front of its layers: inputs, hashing, embedding lookups, shapes.

See `zoo.wide_deep.tensorflow_graph.columns`. A rule refuses (`RuleRefused`) what it does not know to be so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from zoo.clicks.hashing import buckets_of, fingerprint64
from zoo.wide_deep.tensorflow_graph import expressions
from zoo.wide_deep.tensorflow_graph.expressions import Apply, Column, Lookup, Row
from zoo.wide_deep.tensorflow_graph.layers import LAYERS
from zoo.wide_deep.tensorflow_graph.tensors import (
    BATCH,
    Array,
    Feature,
    Flat,
    LookupStage,
    Nested,
    Node,
    Pair,
    Refused,
    Rule,
    RuleRefused,
    Source,
    TwoClass,
    Zeros,
    array_of,
    as_dense,
    axis_of,
    is_stage,
    refuse,
    require,
    same,
    unknown,
)

OUTPUTS = 64  # of a node that is refused: more than any has that is known here
REASONS = {  # what is known of operators that have no rule
    **dict.fromkeys(
        ("SparseCross", "SparseCrossV2", "SparseCrossHashed", "SparseFeatureCross"), "crossed columns are not mapped"
    ),
    "Bucketize": "bucketized columns are not mapped",
    **dict.fromkeys(
        ("LookupTableFindV2", "LookupTableFind"),
        "columns with a vocabulary are not mapped, those with hash buckets are",
    ),
    "StringToHashBucketStrong": "of the hashes, StringToHashBucketFast alone is mapped",
    "StringToHashBucket": "of the hashes, StringToHashBucketFast alone is mapped",
    "AsString": "categories that are numbers are not mapped, texts are",
    **dict.fromkeys(
        ("DynamicPartition", "DynamicStitch", "ParallelDynamicStitch"), "partitioned tables are not mapped"
    ),
    **dict.fromkeys(
        ("StatefulPartitionedCall", "PartitionedCall"), "a function; freeze the graph with its functions inlined"
    ),
    **dict.fromkeys(("VarHandleOp", "VariableV2", "Variable", "ReadVariableOp"), "a variable; freeze the graph first"),
    **dict.fromkeys(("StringSplit", "StringSplitV2"), "a column of several values a row is not mapped"),
}


def evaluate(node: Node, inputs: Sequence[Any], source: Source) -> tuple[Any, ...]:
    """The outputs of a node for those of its inputs; `Refused` where they have no meaning."""
    if reasons := dict.fromkeys(reason for each in inputs if isinstance(each, Refused) for reason in each.reasons):
        return (Refused(tuple(reasons)),) * OUTPUTS
    try:
        rule = RULES.get(node.op)
        if rule is None:
            refuse(REASONS.get(node.op) or unknown(inputs))
        found = rule(node, list(inputs), source)
    except (RuleRefused, RequestError) as why:
        return (Refused((f"{node.name} ({node.op}): {why}",)),) * OUTPUTS
    except (ValueError, TypeError, IndexError, AttributeError):
        return (Refused((f"{node.name} ({node.op}): {unknown(inputs)}",)),) * OUTPUTS
    return found if isinstance(found, tuple) else (found,)


# ------------------------------------------------------------------------------------------------ where features begin


def _placeholder(node: Node, inputs: list[Any], source: Source) -> Any:
    """An input of the graph: texts [n] or [n, 1], or numbers [n] or [n, k]."""
    shape = node.attr["shape"].shape
    if shape.unknown_rank or (node.op == "Placeholder" and "shape" not in node.attr):
        refuse("an input of unknown shape; wanted one value a row, [?] or [?, 1]")
    sizes = [each.size for each in shape.dim]
    if node.op == "PlaceholderWithDefault" and not sizes:
        return inputs[0]
    said = f"an input of the shape {['?' if each < 0 else each for each in sizes]}".replace("'", "")
    require(sizes and sizes[0] < 0, f"{said}; wanted any number of rows, [?] or [?, 1]")
    kind = _type(node, "dtype")
    if kind == "string":
        require(len(sizes) == 1 or sizes[1:] == [1], f"{said} holds several values a row; wanted [?] or [?, 1]")
        return LookupStage("text", node.name, rank=len(sizes))
    require(kind in NUMBERS, f"an input of {kind}; wanted text or numbers")
    require(len(sizes) == 1 or (len(sizes) == 2 and sizes[1] > 0), f"{said}; wanted a known number of columns")
    return _numbers(source, node.name, sizes[1:], np.zeros(sizes[1:]))


NUMBERS = ("float", "double", "half", "int32", "int64")


def _type(node: Node, name: str) -> str:
    """The name of a dtype attribute, e.g. float."""
    return _type_name(node.attr[name].type)


def _numbers(source: Source, name: str, sizes: Sequence[int], fill: Array) -> Any:
    """A numeric feature with `fill` for missing entries, as a row of columns; flat where it has no second axis."""
    width = sizes[0] if sizes else 1
    source.numbers[name] = Feature(tuple(np.broadcast_to(fill.ravel(), (width,)).astype(float).tolist()))
    row = Row(tuple(Column(name, i) for i in range(width)))
    return row if sizes else Flat(row)


def _parse_example(node: Node, inputs: list[Any], source: Source) -> Any:
    """Outputs: sparse indices, values and shapes, then dense values. A feature of any length is taken to hold one value
    or none.
    """
    require(is_stage(inputs[0], "text") and inputs[0].rank == 1, "its examples are no input of the graph")
    types = [_type_name(each) for each in node.attr["sparse_types"].list.type]
    shapes = [[each.size for each in shape.dim] for shape in node.attr["dense_shapes"].list.shape]
    if node.op == "ParseExampleV2":
        sparse, dense, ragged = ([each.decode() for each in np.ravel(keys)] for keys in inputs[2:5])
        defaults = inputs[5:]
    else:
        count, ragged = len(types), []
        sparse, dense = (
            [np.ravel(each)[0].decode() for each in keys]
            for keys in (inputs[2:][:count], inputs[2 + count :][: len(shapes)])
        )
        defaults = inputs[2 + count + len(shapes) :]
    found: list[Any] = []
    texts = [LookupStage("text", name, rank=2) for name in sparse]
    held = [kind == "string" for kind in types]
    whys = [
        Refused((f"{name} ({node.op}): numbers of any length a row are not mapped, those of a fixed length are",))
        for name in sparse
    ]
    for kind in ("entries", "held"):
        found += [text.to(kind) if fits else why for text, fits, why in zip(texts, held, whys, strict=True)]
    found += [np.array([BATCH, 1], object) if fits else why for fits, why in zip(held, whys, strict=True)]
    kinds = [_type_name(each) for each in node.attr["Tdense"].list.type]
    for name, kind, shape, default in zip(dense, kinds, shapes, defaults, strict=True):
        if len(shape) > 1 or any(each < 1 for each in shape) or (kind == "string" and shape not in ([], [1])):
            found.append(
                Refused((f"{name} ({node.op}): it has the shape {shape}; wanted one value a row, or a row of numbers",))
            )
        elif kind == "string":
            other = any(each != b"" for each in np.ravel(default))
            why = Refused(
                (
                    f"{name} ({node.op}): a missing text becomes {np.ravel(default)[:1]}; wanted no default, or an "
                    "empty one",
                )
            )
            found.append(why if other else LookupStage("text", name, rank=1 + len(shape)))
        else:
            found.append(_numbers(source, name, shape, default if np.size(default) else np.zeros(1)))
    return (
        *found,
        *[
            Refused((f"{name} ({node.op}): a column of several values a row is not mapped",))
            for name in ragged
            for _ in "ab"
        ],
    )


def _type_name(number: int) -> str:
    """The name of a TensorFlow dtype, e.g. float, by its number."""
    from tensorflow.core.framework import types_pb2

    return str(types_pb2.DataType.Name(number)).removeprefix("DT_").lower()


# ---------------------------------------------------------------------------------------- from a text to a table's row


def _not_equal(node: Node, inputs: list[Any], source: Source) -> Any:
    """NotEqual to the empty text: the mask of the rows that hold one."""
    texts = [each for each in inputs if not isinstance(each, np.ndarray)]
    ignored = [each.item() for each in inputs if isinstance(each, np.ndarray) and each.size == 1]
    if any(isinstance(each, Row | Flat) for each in texts):
        refuse(
            "a number that counts as missing where it has some value; weighted columns and categories that are "
            "numbers are not mapped"
        )
    (text,) = texts
    require(is_stage(text, "text") and text.rank == 2 and ignored == [b""], unknown(inputs))
    return text.to("present")


def _where(node: Node, inputs: list[Any], source: Source) -> Any:
    """Where: the indices of the rows that hold a text, or of the valid ids among those."""
    (step,) = inputs
    return step.to({"present": "entries", "valid": "all"}.get(step.kind) or refuse(unknown(inputs)))


def _gather_nd(node: Node, inputs: list[Any], source: Source) -> Any:
    """GatherND: the texts of the rows that hold one."""
    text, entries = inputs
    require(is_stage(text, "text") and is_stage(entries, "entries") and same(text, entries) and text.rank == 2)
    return text.to("held")


def _hash(node: Node, inputs: list[Any], source: Source) -> Any:
    """StringToHashBucketFast: the bucket of each text."""
    (text,) = inputs
    require(is_stage(text, "held") or is_stage(text, "text"), unknown(inputs))
    buckets = int(node.attr["num_buckets"].i)
    before = source.buckets.setdefault(text.field, buckets)
    require(
        before == buckets,
        f"{text.field} is hashed to {before} and to {buckets} buckets; one number of them a column is mapped",
    )
    return text.to("bucket" if text.kind == "held" else "hashed", buckets=buckets)


def _sparse_reshape(node: Node, inputs: list[Any], source: Source) -> Any:
    """SparseReshape [n, 1] -> [n, 1]: nothing."""
    entries, before, after = inputs
    one_a_row = (
        is_stage(entries, "entries")
        and list(before) == [BATCH, 1]
        and list(after) in ([BATCH, 1], [BATCH, -1], [-1, 1])
    )
    require(one_a_row, f"{unknown(inputs)} of the shape {list(np.ravel(before))} as {list(np.ravel(after))}")
    return entries, np.array([BATCH, 1], object)


def _greater_equal(node: Node, inputs: list[Any], source: Source) -> Any:
    """GreaterEqual 0: true for every bucket."""
    bucket, zero = inputs
    require(is_stage(bucket, "bucket") and np.size(zero) == 1 and int(zero) == 0, unknown(inputs))
    return bucket.to("valid")


def _fill_empty_rows(node: Node, inputs: list[Any], source: Source) -> Any:
    """SparseFillEmptyRows: a default bucket for the rows without a text."""
    entries, bucket, shape, default = inputs
    require(
        is_stage(entries, "entries")
        and is_stage(bucket, "bucket")
        and same(entries, bucket)
        and list(shape) == [BATCH, 1]
    )
    require(0 <= int(default) < bucket.buckets, f"its default {default} is no bucket")
    filled = bucket.to("filled", default=int(default))
    unread = Refused((f"{node.name} ({node.op}): its map back is not mapped",))
    return filled.to("filled entries"), filled, filled.to("empty"), unread


def _unique(node: Node, inputs: list[Any], source: Source) -> Any:
    """Unique: each bucket once, and where it stands among those."""
    require(is_stage(inputs[0], "filled"), unknown(inputs))
    return inputs[0].to("unique"), inputs[0].to("positions")


def _gather(node: Node, inputs: list[Any], source: Source) -> Any:
    """GatherV2: rows of a table by bucket; of the values of a category all."""
    values, indices, *axis = inputs
    if isinstance(values, np.ndarray) and isinstance(indices, np.ndarray):
        return array_of(np.take(values, indices.astype(np.int64), int(axis[0]) if axis else 0))
    require(not axis or int(axis[0]) == 0, unknown(inputs))
    if isinstance(values, np.ndarray) and isinstance(indices, LookupStage):
        require(values.ndim == 2 and indices.kind in ("unique", "hashed"), unknown(inputs))
        require(len(values) == indices.buckets, f"a table of {len(values)} rows for {indices.buckets} buckets")
        if indices.kind == "unique":
            return indices.to("unique rows", table=values)
        empty = buckets_of(fingerprint64(np.zeros(2, np.int64), np.zeros(0, np.uint8)), indices.buckets)
        row = _row(indices.field, values, int(empty[0]))
        return row if indices.rank == 1 else Nested(row)
    require(
        isinstance(values, LookupStage)
        and values.kind in ("entries", "bucket")
        and is_stage(indices, "all")
        and same(values, indices)
    )
    return values


def _row(name: str, table: Array, missing: int | None) -> Row:
    """Rows of a table, and the row `missing` where there is no value, or zeros."""
    last = np.zeros((1, table.shape[1])) if missing is None else table[missing : missing + 1]
    return Row((Lookup(name, np.concatenate([table, last]).astype(np.float32)),))


def _combine(node: Node, inputs: list[Any], source: Source) -> Any:
    """SparseSegmentMean, Sum or SqrtN of one row a segment: the row itself."""
    rows, positions, segments = inputs
    if isinstance(rows, np.ndarray) and is_stage(positions, "filled"):  # rows found in the table itself
        require(
            rows.ndim == 2
            and len(rows) == positions.buckets
            and is_stage(segments, "segments")
            and same(positions, segments)
        )
        return _row(positions.field, rows, positions.default)
    require(
        is_stage(rows, "unique rows")
        and is_stage(positions, "positions")
        and is_stage(segments, "segments")
        and same(rows, positions, segments)
    )
    return _row(rows.field, rows.table, rows.default)


def _tile(node: Node, inputs: list[Any], source: Source) -> Any:
    """Tile of the mask of empty rows to the table's width."""
    if isinstance(inputs[0], np.ndarray):
        return np.tile(inputs[0], inputs[1].astype(np.int64))
    require(is_stage(inputs[0], "empty") and len(inputs[1]) == 2 and inputs[1][0] == 1, unknown(inputs))
    return inputs[0]


def _zeros_like(node: Node, inputs: list[Any], source: Source) -> Any:
    """ZerosLike: zeros [n, width]."""
    return np.zeros_like(inputs[0]) if isinstance(inputs[0], np.ndarray) else Zeros(as_dense(inputs[0]).width)


def _select(node: Node, inputs: list[Any], source: Source) -> Any:
    """Select: zeros where a row holds no text, else the table's row."""
    empty, zeros, row = inputs
    one = isinstance(row, Row) and len(row.parts) == 1 and isinstance(row.parts[0], Lookup)
    require(
        is_stage(empty, "empty") and isinstance(zeros, Zeros) and one and row.parts[0].field == empty.field,
        unknown(inputs),
    )
    return _row(empty.field, row.parts[0].table[:-1], None)


def _sparse_to_dense(node: Node, inputs: list[Any], source: Source) -> Any:
    """SparseToDense: buckets [n, 1], -1 where a row holds no text."""
    entries, shape, bucket, default = inputs
    require(
        is_stage(entries, "entries")
        and is_stage(bucket, "bucket")
        and same(entries, bucket)
        and list(shape) == [BATCH, 1]
        and int(default) == -1
    )
    return bucket.to("dense")


def _one_hot(node: Node, inputs: list[Any], source: Source) -> Any:
    """OneHot of buckets: an indicator, all zeros for -1."""
    dense, depth, on, off = inputs
    require(
        is_stage(dense, "dense") and int(depth) == dense.buckets and float(on) == 1 and float(off) == 0, unknown(inputs)
    )
    require(dense.buckets**2 <= expressions.LARGEST >> 4, f"an indicator of {dense.buckets:,} buckets is too wide")
    return dense.to("one hot")


def _reduce(node: Node, inputs: list[Any], source: Source) -> Any:
    """Sum or Mean over an axis of size one; of one-hot values the indicator column."""
    value, axes = inputs
    if isinstance(value, np.ndarray):
        functions: dict[str, Any] = {"Prod": np.prod, "Sum": np.sum, "Mean": np.mean}
        keep = bool(node.attr["keep_dims"].b)
        return array_of(functions[node.op](value, axis=tuple(int(each) for each in np.ravel(axes)), keepdims=keep))
    require(
        node.op in ("Sum", "Mean") and np.size(axes) == 1 and axis_of(axes, 3) == 1 and not node.attr["keep_dims"].b,
        unknown(inputs),
    )
    if is_stage(value, "one hot") and node.op == "Sum":
        return Row((Lookup(value.field, np.eye(value.buckets + 1, value.buckets, dtype=np.float32), one_hot=True),))
    return value.of if isinstance(value, Nested) else refuse(unknown(inputs))


# -------------------------------------------------------------------------------------------------------------- shapes


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
    for i, (b, e, s) in enumerate(zip(*(each.astype(int).tolist() for each in (begin, end, stride)), strict=True)):
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
    require(isinstance(value, Row) and all(isinstance(each, Column) for each in value.parts), unknown(inputs))
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
        known = {
            ("empty", 2): value,
            ("all", 1): value,
            ("text", 1): value.to("text", rank=1),
            ("text", 2): value.to("text", rank=2),
        }
        fits = (rows and list(shape[1:]) in ([], [1])) or list(shape) == [BATCH, -1]
        return known[value.kind, len(shape)] if fits and (value.kind, len(shape)) in known else refuse(unknown(inputs))
    inner = value.of if isinstance(value, Flat | Nested) else as_dense(value)
    if rows and len(shape) == 2 and (shape[1] == inner.width or (shape[1] == -1 and shape[0] is BATCH)):
        return inner
    return Flat(inner) if rows and len(shape) == 1 and inner.width == 1 else refuse(unknown(inputs))


def _squeeze(node: Node, inputs: list[Any], source: Source) -> Any:
    """Squeeze: an axis of size one dropped."""
    (value,) = inputs
    axes = [int(each) for each in node.attr["squeeze_dims"].list.i]
    if isinstance(value, np.ndarray):
        return np.squeeze(value, tuple(axes) or None)
    if isinstance(value, Nested):
        return value.of if axes and [axis_of(each, 3) for each in axes] == [1] else refuse(unknown(inputs))
    require(len(axes) == 1 and axis_of(axes[0], 2) == 1, unknown(inputs))
    if is_stage(value, "text") and value.rank == 2:
        return value.to("text", rank=1)
    return Flat(value) if as_dense(value).width == 1 else refuse(unknown(inputs))


def _concat(node: Node, inputs: list[Any], source: Source) -> Any:
    """ConcatV2 of columns; of zeros and a logit: the logits of two classes."""
    *values, axis = inputs
    if all(isinstance(each, np.ndarray) for each in values):
        return np.concatenate(values, int(axis))
    require(axis_of(axis, 2) == 1, unknown(values))
    if len(values) == 2 and isinstance(values[0], Zeros) and values[0].width == 1 == as_dense(values[1]).width:
        return TwoClass(values[1])
    if all(isinstance(each, Row) for each in values):
        return Row(tuple(part for each in values for part in each.parts))
    return Apply("Concat", tuple(map(as_dense, values)), sum(as_dense(each).width for each in values), {"axis": 1})


def _cast(node: Node, inputs: list[Any], source: Source) -> Any:
    """Cast between integers, or between floats."""
    (value,) = inputs
    before, after = _type(node, "SrcT"), _type(node, "DstT")
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
    require(all(isinstance(each, np.ndarray) for each in inputs), unknown(inputs))
    return np.stack([each.astype(object) for each in inputs], int(node.attr["axis"].i))


RULES: dict[str, Rule] = {
    **{"Const": _const, "Placeholder": _placeholder, "PlaceholderWithDefault": _placeholder, "Pack": _pack},
    **dict.fromkeys(
        ("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics", "Snapshot"), _identity
    ),
    **{
        "ParseExample": _parse_example,
        "ParseExampleV2": _parse_example,
        "NotEqual": _not_equal,
        "Where": _where,
        "GatherNd": _gather_nd,
    },
    **{
        "StringToHashBucketFast": _hash,
        "SparseReshape": _sparse_reshape,
        "GreaterEqual": _greater_equal,
        "Unique": _unique,
    },
    **{
        "SparseFillEmptyRows": _fill_empty_rows,
        "GatherV2": _gather,
        "Gather": _gather,
        "Tile": _tile,
        "ZerosLike": _zeros_like,
    },
    **dict.fromkeys(("SparseSegmentMean", "SparseSegmentSum", "SparseSegmentSqrtN"), _combine),
    **{"Select": _select, "SelectV2": _select, "SparseToDense": _sparse_to_dense, "OneHot": _one_hot},
    **dict.fromkeys(("Prod", "Sum", "Mean"), _reduce),
    **{
        "Shape": _shape,
        "Slice": _slice,
        "StridedSlice": _strided_slice,
        "ExpandDims": _expand_dims,
        "Reshape": _reshape,
    },
    **{"Squeeze": _squeeze, "ConcatV2": _concat, "Cast": _cast},
    **LAYERS,
}
