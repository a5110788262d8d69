"""Operators of ONNX for the functions and methods of tensors that `forward` of a network calls.

The first axis is that of the samples: its size is -1 in `reshape`, and no function reduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from zoo.training.onnx_builder import Writer

ARITHMETIC = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "truediv": "Div",
    "div": "Div",
    "pow": "Pow",
    "matmul": "MatMul",
}
ARITHMETIC |= {"bmm": "MatMul"}
OF_ONE = {
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "abs": "Abs",
}
OF_ONE |= {"neg": "Neg"}
SHAPES = {"unsqueeze": "Unsqueeze", "squeeze": "Squeeze"}
REDUCTIONS = {"sum": "ReduceSum", "mean": "ReduceMean"}


def function(
    writer: Writer, kind: str, inputs: Sequence[Any], options: Mapping[str, Any], path: str
) -> ir.Value | None:
    """Appends the operators of a function.

    Args:
        writer: Writer of the graph.
        kind: Name of the function or method in torch, such as "sum".
        inputs: Its positional arguments; tensors are values of the graph.
        options: Its keyword arguments.
        path: Prefix of the names.

    Returns:
        Its result; None for a function without a rule, and for arguments that a rule does not know.
    """
    rule = next((rule for names, rule in RULES if kind in names), None)
    return None if rule is None else rule(writer, kind, [*inputs], dict(options), path)


def _numbers(writer: Writer, values: Any) -> ir.Value:
    array = np.asarray(values, np.int64).reshape(-1)
    return writer.constant(f"numbers.{'.'.join(map(str, array))}", array)


def _arithmetic(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    if options or len(inputs) != 2 or not all(isinstance(operand, ir.Value | float | int) for operand in inputs):
        return None
    if kind == "pow" and inputs[1] == 2:
        inputs = [inputs[0], inputs[0]]
        kind = "mul"
    values = [x if isinstance(x, ir.Value) else writer.constant(f"factor.{x:g}", float(x)) for x in inputs]
    return writer.add(ARITHMETIC[kind], values, path)


def _of_one(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    return writer.add(OF_ONE[kind], inputs, path) if len(inputs) == 1 and not {*options} - {"inplace"} else None


def _softmax(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    axis = inputs[1] if len(inputs) > 1 else options.get("dim")
    return writer.add("Softmax", inputs[:1], path, axis=axis) if isinstance(axis, int) and axis else None


def _reduction(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    arguments = dict(zip(("dim", "keepdim"), inputs[1:], strict=False)) | options
    axes, keep = arguments.get("dim"), int(arguments.get("keepdim", False))
    axes = [axes] if isinstance(axes, int) else axes
    if not axes or 0 in axes:
        return None
    return writer.add(REDUCTIONS[kind], [inputs[0], _numbers(writer, axes)], path, keepdims=keep)


def _reshape(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    shape = inputs[1] if len(inputs) == 2 and isinstance(inputs[1], tuple | list) else inputs[1:]
    if kind == "flatten":
        return (
            writer.add("Flatten", inputs[:1], path, axis=1) if [*shape] == [1] or options == {"start_dim": 1} else None
        )
    if options or not all(isinstance(size, int) for size in shape) or shape[0] != -1:
        return None
    return writer.add("Reshape", [inputs[0], _numbers(writer, shape)], path)


def _axis(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    axis = inputs[1] if len(inputs) > 1 else options.get("dim")
    return writer.add(SHAPES[kind], [inputs[0], _numbers(writer, axis)], path) if axis else None


def _permute(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    order = inputs[1] if isinstance(inputs[1], tuple | list) else inputs[1:]
    return None if options or order[0] else writer.add("Transpose", inputs[:1], path, perm=[*order])


def _joined(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    parts, axis = inputs[0], inputs[1] if len(inputs) > 1 else options.get("dim", 0)
    if not axis or not isinstance(parts, tuple | list):
        return None
    if kind == "stack":
        axes = _numbers(writer, axis)
        parts = [writer.add("Unsqueeze", [part, axes], f"{path}.part{i}") for i, part in enumerate(parts)]
    return writer.add("Concat", parts, path, axis=axis)


def _columns(writer: Writer, kind: str, inputs: list[Any], options: dict[str, Any], path: str) -> ir.Value | None:
    """Elements of the second axis by constant numbers: x[:, [0, 0, 1]]."""
    match inputs:
        case [ir.Value() as x, (every, [*numbers])] if every == slice(None) and all(type(n) is int for n in numbers):
            return writer.add("Gather", [x, _numbers(writer, numbers)], path, axis=1)
    return None


RULES: tuple[tuple[Sequence[str] | Mapping[str, str], Callable[..., ir.Value | None]], ...] = (
    (ARITHMETIC, _arithmetic),
    (OF_ONE, _of_one),
    (("softmax",), _softmax),
    (REDUCTIONS, _reduction),
    (("reshape", "view", "flatten"), _reshape),
    (SHAPES, _axis),
    (("permute",), _permute),
    (("cat", "stack"), _joined),
    (("getitem",), _columns),
)
