"""Rules for the float operators of a feature column graph: arithmetic, activations, dense layers.

See `zoo.recommenders.importers.tensorflow.columns`.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from zoo.recommenders.data.transforms import STEPS
from zoo.recommenders.importers.tensorflow import expressions
from zoo.recommenders.importers.tensorflow.expressions import Apply, Row
from zoo.recommenders.importers.tensorflow.tensors import (
    Flat,
    Node,
    Pair,
    Rule,
    Source,
    TwoClass,
    array_of,
    as_dense,
    flat,
    refuse,
    require,
    unknown,
)

BINARY = {  # operator: steps with the constant behind and in front, and ONNX's name
    **dict.fromkeys(("Add", "AddV2", "BiasAdd"), ("add", "add", "Add")),
    "Sub": ("subtract", "subtract from", "Sub"),
    "Mul": ("multiply", "multiply", "Mul"),
    **dict.fromkeys(("RealDiv", "Div"), ("divide", "divide from", "Div")),
    "Maximum": ("maximum", "maximum", "Max"),
    "Minimum": ("minimum", "minimum", "Min"),
    "Pow": ("power", "", "Pow"),
}
UNARY = {  # operator: step, ONNX's name
    **{
        "Relu": ("relu", "Relu"),
        "Sigmoid": ("sigmoid", "Sigmoid"),
        "Tanh": ("tanh", "Tanh"),
        "Exp": ("exp", "Exp"),
        "Log": ("log", "Log"),
    },
    **{
        "Sqrt": ("sqrt", "Sqrt"),
        "Abs": ("absolute", "Abs"),
        "Sign": ("sign", "Sign"),
        "Floor": ("floor", "Floor"),
        "Neg": ("negative", "Neg"),
    },
    **{"Log1p": ("log1p", ""), "Square": ("square", ""), "Rsqrt": ("rsqrt", "")},
    **{
        "Elu": ("", "Elu"),
        "Selu": ("", "Selu"),
        "Softplus": ("", "Softplus"),
        "Softsign": ("", "Softsign"),
        "Erf": ("", "Erf"),
    },
    **{"LeakyRelu": ("", "LeakyRelu"), "Relu6": ("", "Clip")},
}


def _binary(node: Node, inputs: list[Any], source: Source) -> Any:
    """Add, Sub, Mul, ... of two expressions, or of one and a constant, which a `Sum` takes into its weights."""
    behind, before, op = BINARY[node.op]
    a, b = inputs
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return array_of(STEPS[behind](a, b))
    if isinstance(a, Flat) or isinstance(b, Flat):
        if not all(isinstance(side, Flat) or (isinstance(side, np.ndarray) and side.size == 1) for side in (a, b)):
            refuse("it joins [n] and [n, 1], which makes [n, n]")
        both = [side.of if isinstance(side, Flat) else side for side in (a, b)]
        return Flat(_binary(node, both, source))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        x, c, step = (as_dense(b), a, before) if isinstance(a, np.ndarray) else (as_dense(a), b, behind)
        require(
            c.shape in ((), (1,), (1, 1), (x.width,), (1, x.width)),
            f"a constant of the shape {list(c.shape)} on {x.width} columns",
        )
        constant = np.broadcast_to(np.ravel(c), (x.width,)).astype(np.float64)
        if isinstance(x, Row) and step:
            return expressions.elementwise(step, x, constant)
        match step:
            case "add":
                return expressions.affine(x, 1, constant)
            case "subtract":
                return expressions.affine(x, 1, -constant)
            case "subtract from":
                return expressions.affine(x, -1, constant)
            case "multiply":
                return expressions.affine(x, constant, 0)
            case "divide":
                return expressions.affine(x, 1 / constant, 0)
        operands = [constant.astype(np.float32), x] if isinstance(a, np.ndarray) else [x, constant.astype(np.float32)]
        return Apply(op, tuple(operands), x.width, {})
    x, y = as_dense(a), as_dense(b)
    require(x.width == y.width, f"on {x.width} and {y.width} columns")
    if op in ("Add", "Sub"):
        return expressions.add(x, y if op == "Add" else expressions.affine(y, -1, 0))
    return Apply(op, (x, y), x.width, {})


def _unary(node: Node, inputs: list[Any], source: Source) -> Any:
    """Relu, Sigmoid, Log1p, ...: a transform of numbers and tables, or an activation."""
    step, op = UNARY[node.op]
    (value,) = inputs
    if isinstance(value, np.ndarray):
        return STEPS[step](value)
    if isinstance(value, Flat):
        return Flat(_unary(node, [value.of], source))
    x = as_dense(value)
    if isinstance(x, Row) and step and (node.op != "Sigmoid" or x.width > 1):
        return expressions.elementwise(step, x)
    match node.op:
        case "Neg":
            return expressions.affine(x, -1, 0)
        case "Log1p":
            return Apply("Log", (expressions.affine(x, 1, 1),), x.width, {})
        case "Square":
            return Apply("Mul", (x, x), x.width, {})
        case "Rsqrt":
            return Apply("Reciprocal", (Apply("Sqrt", (x,), x.width, {}),), x.width, {})
        case "Relu6":
            return Apply("Clip", (x, np.array(0, np.float32), np.array(6, np.float32)), x.width, {})
        case "LeakyRelu":
            return Apply(op, (x,), x.width, {"alpha": float(node.attr["alpha"].f)})
    return Apply(op, (x,), x.width, {})


def _add_n(node: Node, inputs: list[Any], source: Source) -> Any:
    """AddN: a sum of expressions of one width."""
    flats = [isinstance(term, Flat) for term in inputs]
    require(all(flats) or not any(flats), "it joins [n] and [n, 1]")
    values = [as_dense(flat(term)) for term in inputs]
    require(len({value.width for value in values}) == 1, "on different numbers of columns")
    total = reduce(expressions.add, values)
    return Flat(total) if any(flats) else total


def _matmul(node: Node, inputs: list[Any], source: Source) -> Any:
    """MatMul with constant weights [width, m]."""
    x, weight = inputs
    require(isinstance(weight, np.ndarray) and not node.attr["transpose_a"].b, unknown(inputs))
    weight = weight.T if node.attr["transpose_b"].b else weight
    x = as_dense(x)
    require(x.width == len(weight), f"{len(weight)} rows of weights for {x.width} columns")
    return expressions.multiply(x, weight)


def _softmax(node: Node, inputs: list[Any], source: Source) -> Any:
    """Softmax over two classes: the sigmoid of the difference of their logits."""
    (value,) = inputs
    if isinstance(value, TwoClass):
        return Pair(value.logit)
    x = as_dense(value)
    require(x.width == 2, f"over {x.width} classes; expected two, no click and click")
    return Pair(expressions.linear(expressions.as_sum(x), np.array([[-1.0], [1.0]])))


LAYERS: dict[str, Rule] = {
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(UNARY, _unary),
    **{"AddN": _add_n, "MatMul": _matmul, "Softmax": _softmax},
}
