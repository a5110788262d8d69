"""Matches operators from results to inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import query

Array = NDArray[Any]
Columns = Callable[[ir.Value | None], list[tuple[int, int]]]  # reads integers as (column of the ids, offset)


class NoMatch(Exception):
    """The operators are others."""


class Matcher:
    """Walks from results to inputs, and keeps the operators that it passes."""

    def __init__(self) -> None:
        self.nodes: set[ir.Node] = set()

    def up(self, value: ir.Value | None, op: str, inputs: int) -> list[ir.Value | None]:
        """Inputs of the operator of this type that computes a value.

        Args:
            value: The result.
            op: Type of the operator.
            inputs: Its least number of inputs.

        Returns:
            The inputs.

        Raises:
            NoMatch: The operators are others.
        """
        node = query.producer(value, op)
        if node is None or len(node.inputs) < inputs:
            raise NoMatch
        self.nodes.add(node)
        return list(node.inputs)

    def with_constant(self, value: ir.Value | None, op: str) -> tuple[ir.Value | None, Array]:
        """The other input, and the constant one, of an operator of two inputs.

        Args:
            value: The result.
            op: Type of the operator.

        Returns:
            The other input, and the constant.

        Raises:
            NoMatch: The operators are others.
        """
        first, second = self.up(value, op, 2)[:2]
        for x, other in ((first, second), (second, first)):
            if (constant := query.constant(other)) is not None:
                return x, constant
        raise NoMatch

    def layer(self, value: ir.Value | None) -> tuple[ir.Value | None, Array, Array]:
        """Input, weight [inputs, outputs] and bias, 0 without an Add, of a linear layer on the last of three axes.

        Args:
            value: Result of the layer.
        """
        product, bias = value, np.zeros(1, np.float32)
        with contextlib.suppress(NoMatch):
            product, bias = self.with_constant(value, "Add")
        x, weight = self.with_constant(product, "MatMul")
        return x, weight, np.broadcast_to(bias.ravel(), weight.shape[1:])

    def mask(self, value: ir.Value | None) -> tuple[ir.Value | None, int]:
        """The ids of a sequence and the id of the padding, of a mask that is 1 where there is an item.

        Args:
            value: The mask.
        """
        empty = self.up(self.up(self.up(value, "Cast", 1)[0], "Not", 1)[0], "Equal", 2)
        padding = query.constant(empty[1])
        if padding is None or padding.size != 1:
            raise NoMatch
        return empty[0], int(padding.item())

    def barred(self, value: ir.Value | None) -> ir.Value | None:
        """The mask of a bias of scores: (mask - 1) times a large number.

        Args:
            value: The bias.
        """
        absent, large = self.with_constant(value, "Mul")
        mask, one = self.with_constant(absent, "Sub")
        if large.min() < 1e3 or (one != 1).any():
            raise NoMatch
        return mask

    def lookup(self, value: ir.Value | None) -> tuple[Array, ir.Value | None]:
        """Table and ids of rows of a table.

        Args:
            value: Result of the lookup.
        """
        table, ids = self.up(value, "Gather", 2)
        rows = query.constant(table)
        if rows is None or rows.ndim != 2:
            raise NoMatch
        return rows, ids

    def cut(self, value: ir.Value | None, axis: int) -> tuple[ir.Value | None, int, int]:
        """Input, start and end of a Slice along an axis.

        Args:
            value: The result.
            axis: The axis.

        Returns:
            The input, start and end.

        Raises:
            NoMatch: The operators are others.
        """
        x, *bounds = self.up(value, "Slice", 4)
        constants = [query.constant(bound) for bound in bounds if bound is not None]
        if len(constants) != 3 or any(constant is None or constant.size != 1 for constant in constants):
            raise NoMatch
        start, end, cut_axis = (int(constant.item()) for constant in constants if constant is not None)
        if cut_axis != axis:
            raise NoMatch
        return x, start, end

    def norm(self, value: ir.Value | None) -> tuple[ir.Value | None, Array, float]:
        """Input, scale and bias [2, width], and epsilon of a layer normalization of the last axis.

        Args:
            value: Result of the normalization.
        """
        x, *arrays = self.up(value, "LayerNormalization", 3)
        scale, bias = (query.constant(array) for array in arrays[:2])
        assert value is not None
        node = value.producer()
        assert node is not None
        if scale is None or bias is None or node.attributes.get_int("axis", -1) not in (-1, 2):
            raise NoMatch
        return x, np.stack([scale, bias]), node.attributes.get_float("epsilon", 1e-5)

    def heads(self, value: ir.Value | None, key: bool = False) -> tuple[ir.Value | None, int]:
        """Input [n, items, width] of [n, heads, items, size], or of [n, heads, size, items] for keys; and the heads.

        Args:
            value: The result.
            key: Whether the last axes are exchanged, as for keys.

        Returns:
            The input, and the number of heads.

        Raises:
            NoMatch: The operators are others.
        """
        apart = self.transposed(value, [0, 2, 3, 1] if key else [0, 2, 1, 3])
        x, shape = self.up(apart, "Reshape", 2)
        sizes = query.constant(shape)
        if sizes is None or sizes.size != 4:
            raise NoMatch
        return x, int(sizes[2])

    def together(self, value: ir.Value | None) -> ir.Value | None:
        """Input [n, heads, items, size] of [n, items, width].

        Args:
            value: Value [n, items, width].
        """
        return self.transposed(self.up(value, "Reshape", 2)[0], [0, 2, 1, 3])

    def transposed(self, value: ir.Value | None, perm: list[int]) -> ir.Value | None:
        """Input of a Transpose.

        Args:
            value: The result.
            perm: Its permutation.

        Returns:
            The input.

        Raises:
            NoMatch: The operators are others.
        """
        x = self.up(value, "Transpose", 1)[0]
        assert value is not None
        node = value.producer()
        if node is None or "perm" not in node.attributes or list(node.attributes["perm"].as_ints()) != perm:
            raise NoMatch
        return x

    def sum_of(self, value: ir.Value | None, op: str) -> tuple[ir.Value | None, ir.Value | None]:
        """The summand that an operator of this type computes, and the other one.

        Args:
            value: The result.
            op: Type of the operator.

        Returns:
            The summand, and the other one.

        Raises:
            NoMatch: The operators are others.
        """
        for one, other in both(self.up(value, "Add", 2)):
            if query.producer(one, op) is not None:
                return one, other
        raise NoMatch


def both(pair: list[ir.Value | None]) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """Returns a pair in both orders.

    Args:
        pair: Two values.

    Returns:
        [(first, second), (second, first)].
    """
    return [(pair[0], pair[1]), (pair[1], pair[0])]


def same(a: Array, b: Array | None) -> bool:
    """Whether two arrays hold the same.

    Args:
        a: Array.
        b: Array, or None.

    Returns:
        Whether they do.
    """
    return b is not None and (a is b or (a.shape == b.shape and np.array_equal(a, b)))


def sequence_columns(columns: Columns, sequence: ir.Value | None) -> tuple[int, int]:
    """Returns the first column of the ids of a sequence and the number of its places.

    Args:
        columns: Reads integers.
        sequence: The ids of the sequence.

    Raises:
        NoMatch: They are no neighbouring columns, or have offsets.
    """
    places = columns(sequence)
    start = places[0][0]
    if any(place != (start + offset, 0) for offset, place in enumerate(places)):
        raise NoMatch
    return start, len(places)


def target_column(columns: Columns, target: ir.Value | None) -> int:
    """Returns the column of the ids of a target.

    Args:
        columns: Reads integers.
        target: The ids of the target.

    Raises:
        NoMatch: There are several columns, or an offset.
    """
    (column, offset), *more = columns(target)
    if more or offset:
        raise NoMatch
    return column
