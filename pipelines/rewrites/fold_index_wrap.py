"""Removes the wrapping of negative indices before Gather, which counts them from the end itself."""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import query
from pipelines.rewrites.driver import Rewrite


class FoldIndexWrap(Rewrite):
    """Removes the wrapping of negative indices before Gather: Gather(T, i < 0 ? i + n : i) = Gather(T, i).

    n is the length of T's gathered axis. ONNX's Gather takes indices in [-n, n-1]. TensorFlow's does not, so Keras
    embeddings carry the selection, which tf2onnx writes either as Where(i < 0, i + n, i) or in numbers as (i < 0) * (i
    + n) + i * not(i < 0). Does not fire if n is another number.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Lets every Gather read the index that its wrapped index was computed from."""
        count = 0
        for gather in model.graph:
            if gather.op_type != "Gather" or (selection := _selection(gather.inputs[1])) is None:
                continue
            index, length = selection
            table = gather.inputs[0]
            axis = gather.attributes.get_int("axis", 0)
            if table is None or table.shape is None or table.shape[axis] != length:
                self.refuse(gather, f"indices wrap at {length}, the table's length is another")
                continue
            gather.replace_input_with(1, index)
            count += 1
        return count


def _selection(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """Returns (i, n) if `value` is i < 0 ? i + n : i."""
    select = query.producer(value)
    if select is None:
        return None
    if select.op_type == "Where":
        condition, wrapped, index = select.inputs
        negated = False
    elif select.op_type == "Add":
        products = [_mask_times(summand) for summand in select.inputs]
        if None in products:
            return None
        products.sort(key=lambda term: term[2])  # type: ignore[index]  # the plain condition first, its negation second
        (condition, wrapped, negated), (other, index, complement) = products  # type: ignore[misc]
        if not complement or other is not condition:
            return None
    else:
        return None
    if index is None or wrapped is None or negated or not _is_negative(condition, index):
        return None
    add = query.producer(wrapped, "Add")
    if add is None or index not in add.inputs:
        return None
    length = query.constant(next((summand for summand in add.inputs if summand is not index), None))
    return (index, int(length.item())) if length is not None and length.size == 1 else None


def _mask_times(value: ir.Value | None) -> tuple[ir.Value, ir.Value, bool] | None:
    """Returns (condition, x, negated) if `value` is Cast(condition) * x or, negated, Cast(Not(condition)) * x."""
    product = query.producer(value, "Mul")
    if product is None:
        return None
    for mask, x in (product.inputs, product.inputs[::-1]):
        cast = query.producer(mask, "Cast")
        if cast is None or (condition := cast.inputs[0]) is None or condition.dtype != ir.DataType.BOOL or x is None:
            continue
        inverse = query.producer(condition, "Not")
        if inverse is not None and inverse.inputs[0] is not None:
            return inverse.inputs[0], x, True
        return condition, x, False
    return None


def _is_negative(condition: ir.Value | None, index: ir.Value) -> bool:
    """Whether `condition` is index < 0."""
    less = query.producer(condition, "Less")
    if less is None or _uncast(less.inputs[0]) is not _uncast(index):
        return False
    zero = query.constant(less.inputs[1])
    return zero is not None and zero.size == 1 and zero.item() == 0


def _uncast(value: ir.Value | None) -> ir.Value | None:
    """Returns the input of the Cast that computes `value`, or `value`."""
    while cast := query.producer(value, "Cast"):
        value = cast.inputs[0]
    return value
