"""Merges chains of reshapes into one with a constant shape."""

from __future__ import annotations

import math
from collections import Counter
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite

RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


class ReshapeChains(OperatorRewrite):
    """Merges chains of reshapes into one: Reshape(Squeeze(Flatten(x))) = Reshape(x, s) with a constant s.

    A reshape without effect is removed. s holds the dimensions of the result: -1 for one that is not static, 0 for
    those that x has at the same position. A computed shape (Concat(Gather(Shape(x), 0), 64, 8), as exporters write it)
    becomes such an s too. Does not fire if more dimensions are not static, or a value in between has another reader.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = RESHAPES

    def replace(self, node: ir.Node) -> int:
        """See `OperatorRewrite`."""
        x, result = node.inputs[0], node.outputs[0]
        if x is None:
            return 0
        dims = _result(node)
        if dims is not None and None not in dims and dims == query.symbolic_shape(x):
            edit.bypass(node, x)
            return 1
        before = x.producer()
        chain = query.is_op(before, *RESHAPES)
        computed = node.op_type == "Reshape" and query.constant(node.inputs[1]) is None
        if not chain and not computed:
            return 0
        nodes = [node]
        if chain and before is not None and query.sole_user(x) is node and before.inputs[0] is not None:
            nodes, x = [before, node], before.inputs[0]
        elif not computed:
            self.refuse(node, "the reshape before it has another reader")
            return 0
        target = None if dims is None else _written(dims, query.symbolic_shape(x) or [])
        if target is None:
            self.refuse(node, "two dimensions of its result are not static")
            return 0
        main = node.graph
        assert isinstance(main, ir.Graph)
        shape = edit.initializer(main, f"{result.name}.shape", np.array(target, np.int64))
        edit.substitute(nodes, ir.node("Reshape", [x, shape], name=node.name))
        return 1


def _result(node: ir.Node) -> list[int | str | None] | None:
    """Returns the output shape of `node`, as `query.symbolic_shape`; None if a size may be 0 or the rank is unknown."""
    source, inferred = query.symbolic_shape(node.inputs[0]), query.symbolic_shape(node.outputs[0])
    dims = inferred
    target = (
        query.shape_elements(node.inputs[1])
        if node.op_type == "Reshape" and not node.attributes.get_int("allowzero", 0)
        else None
    )
    if target is not None:
        copied = [
            source[i] if dim == 0 and source is not None and i < len(source) else dim for i, dim in enumerate(target)
        ]
        dims = [None if dim in (-1, 0) else dim for dim in copied]
    if dims is None or any(isinstance(dim, int) and dim <= 0 for dim in dims):
        return None
    if source is not None and dims.count(None) == 1 and None not in source:
        # both have the same product, so the missing size is that of the source after all others are cancelled
        (names, size), (others, other) = map(_factors, (source, dims))
        if names == others:
            dims[dims.index(None)] = size // other
        elif size == other and len(left := list((names - others).elements())) == 1 and not others - names:
            dims[dims.index(None)] = left[0]
    if inferred is not None and len(inferred) == len(dims):
        dims = [a or b for a, b in zip(dims, inferred, strict=True)]
    return dims


def _factors(dims: list[int | str | None]) -> tuple[Counter[str], int]:
    """Returns the count of every name, and the product of the numbers."""
    return Counter(dim for dim in dims if isinstance(dim, str)), math.prod(dim for dim in dims if isinstance(dim, int))


def _written(dims: list[int | str | None], source: list[int | str | None]) -> list[int] | None:
    """Returns `dims` as the shape input of a Reshape of an input of dimensions `source`."""
    if sum(not isinstance(dim, int) for dim in dims) > 1:
        kept = [0 if isinstance(dim, str) and source[i : i + 1] == [dim] else dim for i, dim in enumerate(dims)]
    else:
        kept = dims
    target = [dim if isinstance(dim, int) else -1 for dim in kept]
    return target if target.count(-1) < 2 else None
