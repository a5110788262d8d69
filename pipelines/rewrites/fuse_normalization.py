"""Recognizes normalizations that exporters write as single operators, by their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, query, reference_session
from pipelines.rewrites.driver import Rewrite

LAYER_NORM = 17  # first opset with LayerNormalization
CHANGED = ("RoiAlign",)  # operators whose defaults changed between io.OPSET and LAYER_NORM
PARTS = ("Add", "Div", "Mul", "Neg", "Pow", "Reciprocal", "ReduceMean", "ReduceSum", "Sqrt", "Sub")
MAX_OPERATORS = 16  # operators of a normalization
ROWS = 32  # rows that are computed
SIDE = 2  # of axes between rows and channels, so that means over them are other results
ALIKE = 1e-3  # largest difference of results as a share of the gain
ROUNDING = 1e-6  # the same as a share of the bias
MAX_EPSILON = 1e-2  # epsilon

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Normalization:
    """gain (x - mean) / sqrt(variance + epsilon) + bias over an axis; without mean: gain x / sqrt(mean(x x) + epsilon).

    Attributes:
        x: The value that is normalized.
        nodes: The operators, in order.
        axis: Axis: 1 of [n, C, H, W], or -1.
        centered: Whether the mean is subtracted.
        gain: float32 [channels].
        bias: float32 [channels].
        epsilon: Added to the variance.
    """

    x: ir.Value
    nodes: tuple[ir.Node, ...]
    axis: int
    centered: bool
    gain: NDArray[np.float32]
    bias: NDArray[np.float32]
    epsilon: float


class FuseNormalization(Rewrite):
    """Fuses operators that compute gain (x - mean(x)) / sqrt(variance(x) + epsilon) + bias into LayerNormalization.

    Over the last axis, or over the channels of [n, C, H, W] between two Transposes. The operators are found from the
    mean on, and recognized by their results for random numbers, in whichever form they are (PyTorch before opset 17,
    Keras, ConvNeXt over channels). A graph of an opset before 17 gets opset 17, which changed no operator of it for
    inference. Does not fire if a value in between has another reader.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Fuses every layer normalization of the main graph."""
        opset = model.opset_imports.get("", io.OPSET)
        if opset < io.OPSET or (
            opset < LAYER_NORM and any(query.is_op(node, *CHANGED) for node in model.graph.all_nodes())
        ):
            return 0
        count = 0
        for node in list(model.graph):
            if node.graph is None or not query.is_op(node, "ReduceMean"):
                continue
            if (matched := normalization(model, node)) is not None and matched.centered:
                _replace(model.graph, matched)
                count += 1
        if count and opset < LAYER_NORM:
            model.opset_imports[""] = LAYER_NORM
        return count


def _replace(main: ir.Graph, matched: Normalization) -> None:
    last, result = matched.nodes[-1], matched.nodes[-1].outputs[0]
    taken = query.used_names(main)
    constants = [
        edit.initializer(main, f"{result.name}.{key}", constant, taken)
        for key, constant in (("gain", matched.gain), ("bias", matched.bias))
    ]
    attributes: dict[str, Any] = {"axis": -1, "epsilon": matched.epsilon}
    if matched.axis != 1:
        edit.substitute(
            [*matched.nodes], ir.node("LayerNormalization", [matched.x, *constants], attributes, name=last.name)
        )
        return
    shape = matched.x.shape
    first = edit.node(
        "Transpose", [matched.x], f"{result.name}.last", dtype=ir.DataType.FLOAT, taken=taken, perm=[0, 2, 3, 1]
    )
    values: list[ir.Value | None] = [first.outputs[0], *constants]
    norm = edit.node(
        "LayerNormalization", values, f"{result.name}.normalized", dtype=ir.DataType.FLOAT, taken=taken, **attributes
    )
    if shape is not None:
        first.outputs[0].shape = norm.outputs[0].shape = ir.Shape([shape[axis] for axis in (0, 2, 3, 1)])
    back = ir.node("Transpose", [norm.outputs[0]], {"perm": [0, 3, 1, 2]}, name=last.name)
    back.outputs[0].type, back.outputs[0].shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(
        main, last, [*matched.nodes[::-1]], [first, norm, back], [result], back.outputs
    )


def normalized_value(mean: ir.Node) -> ir.Value | None:
    """Returns the value whose mean, or whose mean of squares, a ReduceMean is.

    Args:
        mean: The ReduceMean.
    """
    x = mean.inputs[0]
    square = query.producer(x, "Pow", "Mul")
    if square is not None and (square.op_type == "Pow" or len(set(square.inputs)) == 1):
        return square.inputs[0]
    return x


def normalization(model: ir.Model, mean: ir.Node, sizes: Sequence[int | None] | None = None) -> Normalization | None:
    """Recognizes the normalization that a mean belongs to.

    Args:
        model: Model of the graph.
        mean: The first ReduceMean of it.
        sizes: Shape of `normalized_value(mean)`, None where it is free; by default the one in the graph.

    Returns:
        The normalization of the most operators; None if there is none.
    """
    axes, source = query.integers(mean, "axes", 1), normalized_value(mean)
    sizes = query.dimensions(source) if sizes is None else sizes
    if source is None or axes is None or len(axes) != 1 or not sizes or not mean.attributes.get_int("keepdims", 1):
        return None
    rank, axis = len(sizes), axes[0] % len(sizes)
    channels = sizes[axis]
    if (
        channels is None
        or channels < 2
        or not (axis == rank - 1 or (axis == 1 and rank == 4))
        or source.dtype not in (None, ir.DataType.FLOAT)
    ):
        return None
    largest = None
    for nodes in _regions(source, mean):
        larger = _recognized(model, source, nodes, -1 if axis == rank - 1 else axis, rank, channels)
        if largest is not None and larger is None:
            break
        largest = larger
    return largest


def _regions(x: ir.Value, mean: ir.Node) -> list[list[ir.Node]]:
    """Operators in order that compute one value of x and constants, the mean among them."""
    computed, order = {x}, list[ir.Node]()
    waiting = list(x.consumers())
    while waiting and len(order) < MAX_OPERATORS:
        ready = [node for node in waiting if _fits(node, computed)]
        if not ready:
            break
        node = ready[0]
        waiting.remove(node)
        order.append(node)
        computed.add(node.outputs[0])
        waiting += [consumer for consumer in node.outputs[0].consumers() if consumer not in waiting]
    regions = []
    for last in order:
        nodes, reached = {last}, [last]
        while reached:
            for value in reached.pop().inputs:
                before = value.producer() if value is not None and value is not x else None
                if before is not None and before in order and before not in nodes:
                    nodes.add(before)
                    reached.append(before)
        inner = [node for node in nodes if node is not last]
        closed = all(consumer in nodes for node in inner for consumer in node.outputs[0].consumers())
        if mean in inner and closed and not any(node.outputs[0].is_graph_output() for node in inner):
            regions.append([node for node in order if node in nodes])
    return regions


def _fits(node: ir.Node, computed: set[ir.Value]) -> bool:
    """Whether an operator of `PARTS` reads known values and constants alone."""
    values = [value for value in node.inputs if value is not None]
    return query.is_op(node, *PARTS) and all(value in computed or query.constant(value) is not None for value in values)


def _recognized(
    model: ir.Model, x: ir.Value, nodes: Sequence[ir.Node], axis: int, rank: int, channels: int
) -> Normalization | None:
    """The normalization that operators compute, by their results for random numbers."""
    constants = [query.constant(value) for node in nodes for value in node.inputs]
    small = {
        float(constant.item())
        for constant in constants
        if constant is not None and constant.size == 1 and constant.dtype == np.float32
    }
    epsilons = sorted(number for number in small if 0 < number <= MAX_EPSILON) or [0.0]
    numbers = np.random.default_rng(0).normal(0, 1, (ROWS, channels)) + np.linspace(-1, 1, ROWS)[:, None]
    inputs = [numbers, *(numbers * np.sqrt(epsilon or 1) for epsilon in epsilons)]
    outputs = _computed(model, x, nodes[-1], np.concatenate([0 * numbers, *inputs]), axis, rank)
    if outputs is None:
        return None
    (zeros, *_), rows, *narrow = np.split(outputs, len(inputs) + 1)
    for epsilon, small_ones, results in zip(epsilons, inputs[1:], narrow, strict=True):
        for centered in (True, False):
            normal = _normalized(numbers, epsilon, centered)
            gain = ((rows - zeros) * normal).sum(0) / np.square(normal).sum(0)
            most = ALIKE * np.abs(gain) + ROUNDING * np.abs(zeros)
            pairs = ((rows, normal), (results, _normalized(small_ones, epsilon, centered)))
            if all((np.abs(actual - (gain * other + zeros)) <= most).all() for actual, other in pairs):
                gain, bias = gain.astype(np.float32), zeros.astype(np.float32)
                return Normalization(x, tuple(nodes), axis, centered, gain, bias, epsilon)
    return None


def _normalized(x: Array, epsilon: float, centered: bool) -> Array:
    x = x - x.mean(1, keepdims=True) if centered else x
    return np.asarray(x / np.sqrt(np.square(x).mean(1, keepdims=True) + epsilon))


def _computed(model: ir.Model, x: ir.Value, last: ir.Node, rows: Array, axis: int, rank: int) -> Array | None:
    """Results [rows, channels] of the operators from x on, for rows of channels; None where they have another shape."""
    between = [SIDE] * (rank - 2)
    if len(rows) % math.prod(between):
        return None
    values = np.moveaxis(rows.astype(np.float32).reshape(-1, *between, rows.shape[1]), -1, axis)
    part = edit.extract(model, [str(x.name)], [str(last.outputs[0].name)])
    source = part.graph.inputs[0]
    source.type, source.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(values.shape)
    for value in (value for node in part.graph for value in node.outputs):
        value.shape = None
    try:
        opened = reference_session.session(
            part, "recognizing a normalization needs", reference_session.options(quick=True)
        )
        (results,) = reference_session.run(opened, {str(x.name): values})
    except RequestError:
        return None
    same = results.shape == values.shape
    return np.moveaxis(np.asarray(results, np.float64), axis, -1).reshape(rows.shape) if same else None
