"""Data movement operators (Transpose, GatherND, Slice) as index arithmetic on layouts; Einsum as MatMul."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from zoo.recommenders.importers.values import Array, Layout


def transposed(x: Layout, perm: Sequence[int] | None) -> Layout:
    """Transposes a layout.

    Args:
        x: Layout.
        perm: Order of the axes, including the batch axis; None: reversed order.

    Returns:
        Transposed layout.
    """
    rank = x.entries.ndim + 1
    order = list(range(rank))[::-1] if perm is None else [axis % rank for axis in perm]
    turned = [axis - (axis > x.batch) for axis in order if axis != x.batch]
    return Layout(np.transpose(x.entries, turned), order.index(x.batch))


def gathered(x: Layout, indices: Array, batch_dims: int) -> Layout | None:
    """Applies GatherND along the first axes.

    Args:
        x: Layout.
        indices: Constant indices, int64 [..., depth].
        batch_dims: Attribute of the operator.

    Returns:
        Gathered layout; None if `batch_dims` is not 0 or the batch is among the gathered axes.
    """
    depth = indices.shape[-1]
    if batch_dims or x.batch < depth:
        return None
    return Layout(x.entries[tuple(np.moveaxis(indices, -1, 0))], x.batch - depth + indices.ndim - 1)


def sliced(x: Array, bounds: Sequence[Any]) -> Array | None:
    """Applies Slice with constant inputs.

    Args:
        x: Entries of the value, without the batch.
        bounds: starts, ends, axes and optionally steps; constants as arrays.

    Returns:
        Sliced entries; None if an input is not constant or the batch is sliced.
    """
    if len(bounds) < 3 or any(not isinstance(known_value, np.ndarray) for known_value in bounds):
        return None
    starts, ends, axes, *tail = (known_value.ravel().tolist() for known_value in bounds)
    steps = tail[0] if tail else [1] * len(axes)
    cut = [slice(None)] * (x.ndim + 1)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cut[axis] = slice(start, end if abs(end) < 2**31 - 1 else None, step)
    whole = cut[0] in (slice(None), slice(0, None, 1))
    return x[tuple(cut[1:])] if whole else None


def is_matmul(node: ir.Node) -> bool:
    """Whether an Einsum is a product of two matrices.

    Args:
        node: Operator.

    Returns:
        Whether it is; False for other operators.
    """
    if node.op_type != "Einsum":
        return False
    equation = node.attributes["equation"].as_string().replace(" ", "")
    return re.fullmatch(r"(\w)(\w),\2(\w)->\1\3", equation) is not None
