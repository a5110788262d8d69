"""Rules for the operators between inputs and layers of a feature column graph: hashing and embedding lookups.

Rules for inputs and shapes are in `input_rules` and `shape_rules`. See `zoo.recommenders.importers.tensorflow.columns`.
A rule raises `RuleRefused` for every form that it does not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError
from zoo.recommenders.data.hashing import buckets_of, fingerprint64
from zoo.recommenders.importers.tensorflow import expressions
from zoo.recommenders.importers.tensorflow.expressions import Lookup, Row
from zoo.recommenders.importers.tensorflow.input_rules import INPUTS
from zoo.recommenders.importers.tensorflow.layers import LAYERS
from zoo.recommenders.importers.tensorflow.shape_rules import SHAPES
from zoo.recommenders.importers.tensorflow.tensors import (
    BATCH,
    Array,
    Flat,
    LookupStage,
    Nested,
    Node,
    Refused,
    Rule,
    RuleRefused,
    Source,
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
REASONS = {  # messages for operators without a rule
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
    """Evaluates the outputs of a node by the rule of its operator.

    Args:
        node: Node of the graph.
        inputs: Meanings of its inputs.
        source: Features found so far, extended by the rule.

    Returns:
        Meanings of its outputs; `Refused` with the reasons if an input is refused or no rule applies.
    """
    if reasons := dict.fromkeys(reason for value in inputs if isinstance(value, Refused) for reason in value.reasons):
        return (Refused(tuple(reasons)),) * OUTPUTS
    try:
        rule = RULES.get(node.op)
        if rule is None:
            refuse(REASONS.get(node.op) or unknown(inputs))
        outputs = rule(node, list(inputs), source)
    except (RuleRefused, RequestError) as why:
        return (Refused((f"{node.name} ({node.op}): {why}",)),) * OUTPUTS
    except (ValueError, TypeError, IndexError, AttributeError):
        return (Refused((f"{node.name} ({node.op}): {unknown(inputs)}",)),) * OUTPUTS
    return outputs if isinstance(outputs, tuple) else (outputs,)


# ---------------------------------------------------------------------------------------- from a text to a table's row


def _not_equal(node: Node, inputs: list[Any], source: Source) -> Any:
    """NotEqual to the empty text: the mask of the rows that hold one."""
    texts = [value for value in inputs if not isinstance(value, np.ndarray)]
    ignored = [value.item() for value in inputs if isinstance(value, np.ndarray) and value.size == 1]
    if any(isinstance(value, Row | Flat) for value in texts):
        refuse(
            "a number that counts as missing where it has some value; weighted columns and categories that are "
            "numbers are not mapped"
        )
    (text,) = texts
    require(is_stage(text, "text") and text.rank == 2 and ignored == [b""], unknown(inputs))
    return text.to("present")


def _where(node: Node, inputs: list[Any], source: Source) -> Any:
    """Where: indices of the rows with a text, or of the valid ids among them."""
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


def _one_text(entries: Any, bucket: Any, shape: Any) -> bool:
    """Whether a sparse tensor holds the buckets of a column with at most one text in a row."""
    is_sparse = is_stage(entries, "entries") and is_stage(bucket, "bucket") and same(entries, bucket)
    return is_sparse and list(shape) == [BATCH, 1]


def _fill_empty_rows(node: Node, inputs: list[Any], source: Source) -> Any:
    """SparseFillEmptyRows: a default bucket for the rows without a text."""
    entries, bucket, shape, default = inputs
    require(_one_text(entries, bucket, shape))
    require(0 <= int(default) < bucket.buckets, f"its default {default} is no bucket")
    filled = bucket.to("filled", default=int(default))
    unread = Refused((f"{node.name} ({node.op}): its map back is not mapped",))
    return filled.to("filled entries"), filled, filled.to("empty"), unread


def _unique(node: Node, inputs: list[Any], source: Source) -> Any:
    """Unique: the distinct buckets, and their index for every row."""
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
    require(_one_text(entries, bucket, shape) and int(default) == -1)
    return bucket.to("dense")


def _one_hot(node: Node, inputs: list[Any], source: Source) -> Any:
    """OneHot of buckets: an indicator, all zeros for -1."""
    dense, depth, on, off = inputs
    require(
        is_stage(dense, "dense") and int(depth) == dense.buckets and float(on) == 1 and float(off) == 0, unknown(inputs)
    )
    require(
        dense.buckets**2 <= expressions.MAX_TABLE_ENTRIES >> 4, f"an indicator of {dense.buckets:,} buckets is too wide"
    )
    return dense.to("one hot")


def _reduce(node: Node, inputs: list[Any], source: Source) -> Any:
    """Sum or Mean over an axis of size one; of one-hot values the indicator column."""
    value, axes = inputs
    if isinstance(value, np.ndarray):
        functions: dict[str, Any] = {"Prod": np.prod, "Sum": np.sum, "Mean": np.mean}
        keep = bool(node.attr["keep_dims"].b)
        return array_of(functions[node.op](value, axis=tuple(int(axis) for axis in np.ravel(axes)), keepdims=keep))
    require(
        node.op in ("Sum", "Mean") and np.size(axes) == 1 and axis_of(axes, 3) == 1 and not node.attr["keep_dims"].b,
        unknown(inputs),
    )
    if is_stage(value, "one hot") and node.op == "Sum":
        return Row((Lookup(value.field, np.eye(value.buckets + 1, value.buckets, dtype=np.float32), one_hot=True),))
    return value.of if isinstance(value, Nested) else refuse(unknown(inputs))


RULES: dict[str, Rule] = {
    **INPUTS,
    "NotEqual": _not_equal,
    "Where": _where,
    "GatherNd": _gather_nd,
    "StringToHashBucketFast": _hash,
    "SparseReshape": _sparse_reshape,
    "GreaterEqual": _greater_equal,
    "Unique": _unique,
    "SparseFillEmptyRows": _fill_empty_rows,
    **dict.fromkeys(("GatherV2", "Gather"), _gather),
    "Tile": _tile,
    "ZerosLike": _zeros_like,
    **dict.fromkeys(("SparseSegmentMean", "SparseSegmentSum", "SparseSegmentSqrtN"), _combine),
    **dict.fromkeys(("Select", "SelectV2"), _select),
    "SparseToDense": _sparse_to_dense,
    "OneHot": _one_hot,
    **dict.fromkeys(("Prod", "Sum", "Mean"), _reduce),
    **SHAPES,
    **LAYERS,
}
