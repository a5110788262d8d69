"""Folds padding into the operator that reads it."""

from __future__ import annotations

import math
from typing import ClassVar

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import OperatorRewrite

POSITIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Exp", "Softplus")


class FoldPad(OperatorRewrite):
    """Folds Pad into the pads of the Conv or pooling that reads it: Conv(Pad(x)) = Conv(x; more pads).

    For zeros around the image; also for AveragePool that counts its padding. MaxPool pads with the lowest value: exact
    if Pad writes -inf, or writes 0 and x has no negative values (x comes from a Relu, a Clip from 0 on, ...), because
    every window then holds some x. Does not fire for other modes and values, pads of batch or channels, negative pads,
    a padded value with another reader, auto_pad, or ceil_mode.
    """

    OPERATORS: ClassVar[tuple[str, ...]] = ("Pad",)

    def replace(self, pad: ir.Node) -> int:
        """See `OperatorRewrite`."""
        x, reader = pad.inputs[0], next(iter(pad.outputs[0].consumers()), None)
        if (
            x is None
            or reader is None
            or not query.is_op(reader, "Conv", "AveragePool", "MaxPool")
            or reader.inputs[0] is not pad.outputs[0]
        ):
            return 0
        pads = _pads(pad, query.rank(pad.outputs[0]))
        why = self._why_not(pad, reader, pads)
        if why or pads is None:
            self.refuse(pad, why)
            return 0
        spatial = len(pads) // 2 - 2
        before, after = pads[2 : 2 + spatial], pads[-spatial:]
        own = list(reader.attributes.get_ints("pads", ())) or [0] * (2 * spatial)
        reader.attributes["pads"] = ir.AttrInt64s("pads", [a + b for a, b in zip(own, [*before, *after], strict=True)])
        reader.attributes.pop("auto_pad", None)  # VALID would mean no padding
        if reader.op_type == "AveragePool":
            reader.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 1)
        edit.bypass(pad, x)
        return 1

    def _why_not(self, pad: ir.Node, reader: ir.Node, pads: list[int] | None) -> str:
        value = query.scalar(pad.inputs[2]) if len(pad.inputs) > 2 and pad.inputs[2] is not None else 0.0
        if query.sole_user(pad.outputs[0]) is not reader:
            return "its result has several readers"
        if pad.attributes.get_string("mode", "constant") != "constant" or pads is None:
            return "it does not pad with constants by constant widths"
        if min(pads) < 0 or any(pads[:2]) or any(pads[len(pads) // 2 :][:2]):
            return "it pads batch or channels, or cuts"
        if (
            reader.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
            or reader.attributes.get_int("ceil_mode", 0) != 0
        ):
            return f"{reader.op_type} {query.label(reader)} has auto_pad or ceil_mode"
        own, kernel = (
            reader.attributes.get_ints("pads", ()) or [0] * (len(pads) - 4),
            reader.attributes.get_ints("kernel_shape", ()),
        )
        both = zip((*pads[2 : len(pads) // 2], *pads[len(pads) // 2 + 2 :]), own, (*kernel, *kernel), strict=False)
        if reader.op_type != "Conv" and any(a + b >= k for a, b, k in both):
            return f"{reader.op_type} {query.label(reader)} would have windows of padding alone"
        if reader.op_type == "MaxPool":
            if any(rate != 1 for rate in reader.attributes.get_ints("dilations", ())) or len(reader.outputs) > 1:
                return f"MaxPool {query.label(reader)} has dilations or returns indices"
            if any(own):
                return f"MaxPool {query.label(reader)} pads with its own value already"
            if value == -math.inf or (value == 0 and _positive(pad.inputs[0])):
                return ""
            return (
                f"MaxPool {query.label(reader)} pads with the lowest value, not {value:g}"
                if value is not None
                else "its value is not constant"
            )
        if value != 0:
            return f"{reader.op_type} {query.label(reader)} pads with 0"
        if reader.op_type == "AveragePool" and any(own) and not reader.attributes.get_int("count_include_pad", 0):
            return f"AveragePool {query.label(reader)} does not count its own padding"
        return ""


def _pads(pad: ir.Node, rank: int | None) -> list[int] | None:
    """Returns begin and end of every axis if they are constant."""
    sizes = query.integers(pad, "pads", 1)
    if rank is None or rank < 3 or sizes is None:
        return None
    axes = query.integers(pad, "axes", 3) if len(pad.inputs) > 3 and pad.inputs[3] is not None else list(range(rank))
    if axes is None:
        return None
    pads = [0] * (2 * rank)
    for index, axis in enumerate(axes):
        pads[axis % rank], pads[rank + axis % rank] = sizes[index], sizes[len(axes) + index]
    return pads


def _positive(value: ir.Value | None) -> bool:
    """Whether nothing in `value` can be negative."""
    node = query.producer(value)
    if node is None:
        return False
    if query.is_op(node, "Clip"):
        low = query.scalar(node.inputs[1]) if len(node.inputs) > 1 else None
        return low is not None and low >= 0
    if query.is_op(node, "MaxPool", "AveragePool", "GlobalAveragePool", "Identity"):
        return _positive(node.inputs[0])
    return query.is_op(node, *POSITIVE)
