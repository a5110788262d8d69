"""Merges chains of reshapes into one with a constant shape."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


class ReshapeChains(Rewrite):
    """Merges chains of reshapes into one: Reshape(Squeeze(Flatten(x))) = Reshape(x, s) with a constant s.

    A reshape without effect is removed. s holds the dimensions of the result: -1 for one that is not static, 0 for
    those that x has at the same position. A computed shape (Concat(Gather(Shape(x), 0), 64, 8), as exporters write it)
    becomes such an s too. Does not fire if more dimensions are not static, or a value in between has another reader.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Shortens the chain before every Reshape, Flatten, Squeeze and Unsqueeze."""
        return sum(self._shorten(each) for each in list(model.graph) if query.is_op(each, *RESHAPES))

    def _shorten(self, node: ir.Node) -> int:
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
    found = inferred
    given = (
        query.shape_elements(node.inputs[1])
        if node.op_type == "Reshape" and not node.attributes.get_int("allowzero", 0)
        else None
    )
    if given is not None:
        copied = [
            source[i] if each == 0 and source is not None and i < len(source) else each for i, each in enumerate(given)
        ]
        found = [None if each in (-1, 0) else each for each in copied]
    if found is None or any(isinstance(each, int) and each <= 0 for each in found):
        return None
    if source is not None and found.count(None) == 1 and None not in source:
        # both have the same product, so the missing size is that of the source after all others are cancelled
        (names, size), (others, other) = map(_factors, (source, found))
        if names == others:
            found[found.index(None)] = size // other
        elif size == other and len(left := list((names - others).elements())) == 1 and not others - names:
            found[found.index(None)] = left[0]
    if inferred is not None and len(inferred) == len(found):
        found = [a or b for a, b in zip(found, inferred, strict=True)]
    return found


def _factors(dims: list[int | str | None]) -> tuple[Counter[str], int]:
    """Returns the count of every name, and the product of the numbers."""
    return Counter(each for each in dims if isinstance(each, str)), math.prod(
        each for each in dims if isinstance(each, int)
    )


def _written(dims: list[int | str | None], source: list[int | str | None]) -> list[int] | None:
    """Returns `dims` as the shape input of a Reshape of an input of dimensions `source`."""
    if sum(not isinstance(each, int) for each in dims) > 1:
        kept = [0 if isinstance(each, str) and source[i : i + 1] == [each] else each for i, each in enumerate(dims)]
    else:
        kept = dims
    target = [each if isinstance(each, int) else -1 for each in kept]
    return target if target.count(-1) < 2 else None
