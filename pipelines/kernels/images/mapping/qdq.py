"""Quantization in an ONNX graph, as the mapping of image networks reads it: qparams, weights, biases, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, ZooError
from pipelines.graph import query, reference_session
from pipelines.kernels.arrays import Array


def data_input(node: ir.Node) -> ir.Value:
    """Returns the first input of a node.

    Args:
        node: Operator with at least one input.
    """
    value = node.inputs[0]
    assert value is not None
    return value


def input_at(node: ir.Node, position: int) -> ir.Value | None:
    """Returns the input at a position, None if it is absent.

    Args:
        node: Operator.
        position: Index of the input.
    """
    return node.inputs[position] if len(node.inputs) > position else None


def refused(node: ir.Node, why: str) -> RequestError:
    """Returns the error for an operator without a native form.

    Args:
        node: Operator.
        why: The reason, a predicate such as "has no constant scale".
    """
    return RequestError(f"the operator {query.label(node)} ({node.op_type}) {why}")


def split_sizes(node: ir.Node, size: int) -> list[int]:
    """Returns the sizes of the parts of a Split.

    Args:
        node: The Split.
        size: Size of the axis.

    Raises:
        RequestError: The parts are not the whole axis.
    """
    count, sizes = len(node.outputs), query.integers(node, "split", 1)
    if sizes is None:
        chunk = -(-size // count)
        sizes = [*[chunk] * (count - 1), size - chunk * (count - 1)]
    if sum(sizes) != size or min(sizes) < 1:
        raise refused(node, f"splits {size} elements into {sizes}")
    return sizes


def qparams(node: ir.Node) -> tuple[np.float32, int]:
    """Reads the qparams of a QuantizeLinear or DequantizeLinear.

    Args:
        node: The operator.

    Returns:
        Scale, and zero point from 0 to 255; 128 is added to a signed one.

    Raises:
        RequestError: The qparams are not constant, per tensor and of 8 bits.
    """
    scale, zero = query.constant(input_at(node, 1)), query.constant(input_at(node, 2))
    if scale is None or scale.size != 1 or scale.dtype != np.float32:
        raise refused(node, "has no single constant scale")
    if zero is None and input_at(node, 2) is None:
        zero = np.zeros((), np.uint8)
    if zero is None or zero.size != 1 or zero.dtype not in (np.uint8, np.int8) or not scale.item() > 0:
        raise refused(node, "is not 8 bits with a constant zero point")
    return np.float32(scale.item()), int(zero.item()) + (128 if zero.dtype == np.int8 else 0)


def quantized(real: Any, scale: np.float32, zero: int) -> NDArray[np.uint8]:
    """Applies QuantizeLinear.

    Args:
        real: Array of any float dtype and shape.
        scale: Scale.
        zero: Zero point, 0 to 255.

    Returns:
        uint8 of the same shape, ties rounded to even.
    """
    steps = np.rint(np.asarray(real, np.float32) / scale) + zero
    return np.asarray(np.minimum(np.maximum(steps, 0), 255), np.uint8)


def int8_weight(node: ir.Node, axis: int) -> tuple[Array, Array]:
    """Returns int8 weights of a layer and their scales.

    Args:
        node: Layer.
        axis: Axis of the output channels.

    Returns:
        Weights, int8 of the initializer's shape, and scales, float32 of one element or [outputs].

    Raises:
        RequestError: The weights are not symmetric int8 with scales per output.
    """
    weight = input_at(node, 1)
    parts = query.dequantized(weight)
    if weight is None or parts is None or parts[0].dtype != np.int8 or (parts[2] is not None and parts[2].any()):
        raise refused(node, "has weights that are not symmetric int8")
    integers, scale, _ = parts
    dequantize = weight.producer()
    assert dequantize is not None
    along = dequantize.attributes.get_int("axis", 1)
    if scale.size > 1 and (scale.shape != (integers.shape[axis],) or along % integers.ndim != axis):
        raise refused(node, "has weights whose scales are not per output channel")
    return integers, scale


def int32_bias(node: ir.Node, bias: ir.Value | None, scales: Array, outputs: int) -> NDArray[np.int64]:
    """Returns a layer's bias in units of its int32 sums.

    Args:
        node: Layer.
        bias: Bias value, or None.
        scales: Scale of the sums, float32 [outputs].
        outputs: Number of output channels.

    Returns:
        int64 [outputs].

    Raises:
        RequestError: The bias is not constant or has another size.
    """
    if bias is None:
        return np.zeros(outputs, np.int64)
    parts = query.dequantized(bias)
    if parts is not None and parts[0].dtype == np.int32 and not (parts[2] is not None and parts[2].any()):
        same = np.allclose(np.broadcast_to(parts[1].ravel(), outputs), scales, rtol=1e-4, atol=0)
        biases = parts[0] if same else parts[0] * (parts[1].ravel().astype(np.float64) / scales)
    else:
        constant = query.constant(bias)
        if constant is None or constant.dtype != np.float32:
            raise refused(node, "has a bias that is not constant")
        biases = constant / scales.astype(np.float64)
    if biases.size != outputs:
        raise refused(node, f"has {biases.size} biases for {outputs} outputs")
    return np.asarray(np.rint(biases).ravel(), np.int64)


def per_channel(node: ir.Node, position: int, channels: int, axis: int) -> tuple[NDArray[np.uint8], np.float32, int]:
    """Returns an int8 constant with one value, or one per channel.

    Args:
        node: Operator that reads it behind a DequantizeLinear.
        position: Index of the input.
        channels: Number of channels.
        axis: Axis of the channels, from the end (-1: the last).

    Returns:
        uint8 [1] or [channels, 1], scale, and zero point from 0 to 255; 128 is added to signed ones.

    Raises:
        RequestError: The input is no such constant, or has several scales.
    """
    parts = query.dequantized(input_at(node, position))
    if parts is None or parts[1].size != 1 or parts[0].dtype not in (np.uint8, np.int8):
        raise refused(node, "has no constant of 8 bits with a single scale")
    integers, scale, zero = parts
    if integers.size != 1 and not integers.size == channels == _length(integers, axis):
        raise refused(node, "has a constant with neither one value nor one per channel")
    shift = 128 if integers.dtype == np.int8 else 0
    values = (integers.astype(np.int32) + shift).astype(np.uint8).reshape(1 if integers.size == 1 else (-1, 1))
    return values, np.float32(scale.item()), shift + (0 if zero is None else int(zero.item()))


def is_integer(node: ir.Node) -> bool:
    """Returns whether onnxruntime computes a sum or product with integers: it dequantizes inputs of one type.

    Args:
        node: Operator.
    """
    dequantize = [query.producer(value) for value in node.inputs]
    if any(producer is None or producer.op_type != "DequantizeLinear" for producer in dequantize):
        return False
    zeros = [query.constant(input_at(producer, 2)) for producer in dequantize if producer is not None]
    return len({np.dtype(np.uint8) if zero is None else zero.dtype for zero in zeros}) == 1


def evaluated(
    model: ir.Model,
    node: ir.Node,
    arguments: Sequence[NDArray[np.float32] | ir.Value | None],
    channels: int,
    axis: int,
) -> Array:
    """Evaluates a node in onnxruntime for all 256 bytes of its input.

    Args:
        model: Model of the node.
        node: Elementwise operator.
        arguments: float32 [256] for each varying input; constants as values.
        channels: Number of channels.
        axis: Axis of the channels, from the end (-1: the last).

    Returns:
        float32 [256], or float32 [channels, 256] if an argument has a value per channel.

    Raises:
        RequestError: An argument is neither constant nor one value per channel.
    """
    inputs: list[ir.Value | None] = []
    constants, feeds = [], {}
    own = any(_size(value) > 1 for value in arguments if isinstance(value, ir.Value))
    for i, argument in enumerate(arguments):
        if isinstance(argument, ir.Value):
            constant = real_constant(argument)
            single = constant is not None and constant.size == 1
            if constant is None or not (single or (constant.size == channels == _length(constant, axis))):
                raise refused(node, "has an argument that is neither constant nor one value per channel")
            constant = constant.reshape(() if single else (-1, 1))
            value = ir.Value(name=f"c{i}", const_value=ir.tensor(constant, name=f"c{i}"))
            constants.append(value)
            inputs.append(value)
        elif argument is None:
            inputs.append(None)
        else:
            feeds[f"x{i}"] = np.broadcast_to(argument, (channels, 256)).copy() if own else argument
            shape = ir.Shape(feeds[f"x{i}"].shape)
            inputs.append(ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=shape))
    return _computed(model, node, inputs, constants, feeds)


def computed(model: ir.Model, node: ir.Node, x: Array, others: Mapping[int, Array] | None = None) -> Array:
    """Evaluates a node in onnxruntime for an array; other arguments are constants.

    Args:
        model: Model of the node.
        node: Operator.
        x: float32 of any shape, the first input.
        others: Values of further inputs, by position.

    Returns:
        float32, the first output.

    Raises:
        RequestError: An argument is not constant.
    """
    x_value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(x.shape))
    inputs: list[ir.Value | None] = [x_value]
    constants = []
    for i, argument in enumerate(node.inputs[1:]):
        constant = (others or {}).get(i + 1, query.constant(argument))
        if argument is not None and constant is None:
            raise refused(node, "has an argument that is not constant")
        value = None if constant is None else ir.Value(name=f"c{i}", const_value=ir.tensor(constant, name=f"c{i}"))
        constants += [] if value is None else [value]
        inputs.append(value)
    return _computed(model, node, inputs, constants, {"x": np.ascontiguousarray(x, np.float32)})


def _computed(
    model: ir.Model,
    node: ir.Node,
    inputs: Sequence[ir.Value | None],
    constants: Sequence[ir.Value],
    feeds: dict[str, NDArray[np.float32]],
) -> Array:
    """The result of a graph of this one node; `constants` are the inputs without a feed."""
    alone = ir.node(node.op_type, inputs, attributes=dict(node.attributes), name="alone")
    alone.outputs[0].name, alone.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [value for value in inputs if value is not None and value not in constants],
        alone.outputs,
        nodes=[alone],
        initializers=constants,
        opset_imports=dict(model.graph.opset_imports),
        name="alone",
    )
    try:
        opened = reference_session.session(ir.Model(graph, ir_version=model.ir_version), "the image kernels")
        return np.asarray(reference_session.run(opened, feeds)[0], np.float32)
    except ZooError as error:
        raise refused(node, f"cannot be computed alone: {error}") from error


def _length(array: Array, axis: int) -> int:
    return array.shape[axis] if array.ndim >= -axis else 1


def real_constant(value: ir.Value) -> Array | None:
    """Returns a float constant, or a dequantized one with a single scale; None for another value.

    Args:
        value: Value of the graph.
    """
    if (parts := query.dequantized(value)) is None:
        return query.constant(value)
    integers, scale, zero = parts
    if scale.size != 1:
        return None
    whole = integers.astype(np.float32) - np.float32(0 if zero is None else zero.item())
    return whole * scale.astype(np.float32).reshape(())


def _size(value: ir.Value) -> int:
    constant = real_constant(value)
    return 0 if constant is None else constant.size
