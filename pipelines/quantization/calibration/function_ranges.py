"""Clips the range of a tensor that is read by one activation function to the part where the function changes.

HardSwish(x) is 0 below -3, SiLU(x) nearly 0 below -8, and a Sigmoid is flat at both ends: quantization steps there are
wasted. An end of the range moves inward while the function changes by less than `TOLERANCE` steps of its result. The
least squared error behind the function would move the end further, but the errors of clipped values then have one sign,
which costs more than it gains (PP-LCNet: 3 dB).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.quantization.calibration.observers import Floats, Range
from pipelines.quantization.calibration.table import CalibrationTable

TOLERANCE = 0.25  # of a step of the function's result in 255 steps
POINTS = 4097
Function = Callable[[Floats], Floats]


def clip_to_functions(model: ir.Model, table: CalibrationTable) -> CalibrationTable:
    """Narrows the ranges of tensors that are read by one activation function.

    Args:
        model: Graph that the table belongs to; it is not changed.
        table: Calibration table of `model`.

    Returns:
        A table with narrowed ranges, otherwise equal to `table`.
    """
    changed = dict(table.tensors)
    for node in model.graph:
        for x in node.outputs:
            observed, function = table.tensors.get(str(x.name)), read_by(x)
            if observed is not None and function is not None and observed.low < observed.high:
                low, high = function_range(function, observed.low, observed.high)
                changed[str(x.name)] = replace(observed, low=low, high=high)
    return replace(table, tensors=changed)


def function_range(function: Function, low: float, high: float) -> Range:
    """Narrows a range to the part in which a function changes.

    Args:
        function: Elementwise function of float64 arrays.
        low: Lower end of the range.
        high: Upper end of the range.

    Returns:
        (low, high) without the flat parts; zero stays inside.
    """
    points = np.linspace(low, high, POINTS)
    results = function(points)
    most = TOLERANCE * np.ptp(results) / 255
    before = np.maximum.accumulate(results) - np.minimum.accumulate(results)  # how far results differ up to a point
    behind = (np.maximum.accumulate(results[::-1]) - np.minimum.accumulate(results[::-1]))[::-1]
    first, last = np.flatnonzero(before <= most)[-1], np.flatnonzero(behind <= most)[0]
    if first >= last:
        return low, high
    return max(low, min(float(points[first]), 0.0)), min(high, max(float(points[last]), 0.0))


def read_by(x: ir.Value) -> Function | None:
    """Finds the activation function that alone reads a value; x f(x) counts as one function.

    Args:
        x: Value of the main graph.

    Returns:
        The function on float64 arrays, or None if the value has other readers.
    """
    readers = list(x.consumers())
    if not readers or x.is_graph_output():
        return None
    gates = [reader for reader in readers if query.is_op(reader, *_FUNCTIONS)]
    products = [reader for reader in readers if reader not in gates]
    if len(gates) != 1:
        return None
    function, gate = _FUNCTIONS[gates[0].op_type](gates[0]), gates[0].outputs[0]
    if not products:
        return function
    product = products[0]
    gated = len(products) == 1 and query.is_op(product, "Mul") and set(product.inputs) == {x, gate}
    return (lambda values: values * function(values)) if gated and query.sole_user(gate) is product else None


def _sigmoid(values: Floats) -> Floats:
    return 0.5 + 0.5 * np.tanh(values / 2)


def _hard_sigmoid(node: ir.Node) -> Function:
    slope, shift = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return lambda values: np.clip(slope * values + shift, 0, 1)


_FUNCTIONS: dict[str, Callable[[ir.Node], Function]] = {
    "HardSwish": lambda _: lambda values: values * np.clip(values / 6 + 0.5, 0, 1),
    "HardSigmoid": _hard_sigmoid,
    "Sigmoid": lambda _: _sigmoid,
    "Tanh": lambda _: np.tanh,
    "Mish": lambda _: lambda values: values * np.tanh(np.logaddexp(0, values)),
    "Softplus": lambda _: lambda values: np.logaddexp(0, values),
    "Elu": lambda node: (
        lambda values: np.where(
            values < 0, node.attributes.get_float("alpha", 1.0) * np.expm1(np.minimum(values, 0)), values
        )
    ),
}
