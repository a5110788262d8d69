"""Int8 operators between layers: additions, products, pools, concatenations and activation functions.

Such an operator is int8 if its inputs are int8 tensors anyway and an int8 operator downstream reads its output: the
whole path then stays int8. The last of them before an output therefore stay float32.
"""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq import layers
from pipelines.quantization.qdq.insertion import QdqInserter
from pipelines.quantization.qdq.quantize_early import moves
from pipelines.quantization.qdq.scales import dequantized_qparams

MIN_PRODUCTS = 8  # of a layer for each of its inputs and outputs: below, conversions to and from int8 cost more
OPERATORS = ("Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "ReduceMean", "Sigmoid", "LeakyRelu")
# without an int8 kernel in onnxruntime, which reads and writes int8 tensors around them all the same
FUNCTIONS = ("Relu", "Clip", "HardSwish", "HardSigmoid", "Tanh", "Elu", "Gelu", "PRelu", "Mish", "Softplus", "Erf")

GATES = ("Sigmoid", "HardSigmoid", "Tanh")


def activation_inputs(node: ir.Node) -> list[int]:
    """Returns the indices of the inputs that are activations, not constants.

    Args:
        node: Layer or one of `OPERATORS`.
    """
    if node.op_type in layers.LAYERS:
        return layers.activation_inputs(node)
    if node.op_type in ("Add", "Mul", "Concat"):
        return [index for index, value in enumerate(node.inputs) if query.constant(value) is None]
    return [0]


def refuse(node: ir.Node) -> str:
    """Returns why the form of an operator keeps it float32, or "".

    Args:
        node: One of `OPERATORS`.
    """
    data = node.inputs if node.op_type in ("Add", "Mul", "Concat") else node.inputs[:1]
    if any(value is None or value.dtype != ir.DataType.FLOAT for value in data):
        return "it is no float arithmetic"
    if node.op_type == "ReduceMean" and not _is_global_average_pool(node):
        return "its mean is not over height and width"
    if node.op_type == "AveragePool" and _counts_pixels_beyond(node) and _pads(node):
        return "onnxruntime counts pixels beyond its padding in int8 alone"
    if node.op_type in ("Add", "Mul") and len(activation_inputs(node)) == 1:
        source = data[activation_inputs(node)[0]].producer()  # type: ignore[union-attr]
        if source is not None and source.op_type in ("MatMul", "Gemm"):
            return "engines make it part of the product before it"
        if _continues_function(node):
            return "it is one function with the operator before it"
    return "" if activation_inputs(node) else "it is constant"


def gates_rows(node: ir.Node) -> bool:
    """Returns whether an operator gates the values of a row, as cells of LSTM and GRU do.

    Layers before it return float values at no cost, and conversions of single rows cost as much as the products: an
    LSTM of two directions and 20 steps takes 0.75 of the time of int8 gates, with 4 dB more (captcha-whisperer).

    Args:
        node: Operator.
    """
    indices = activation_inputs(node) if node.op_type == "Mul" and query.rank(node.outputs[0]) == 2 else []
    factors = [node.inputs[index] for index in indices]
    for gate, other in (factors, factors[::-1]) if len(factors) == 2 else ():
        source = query.producer(gate)
        if source is not None and source.op_type in GATES and source.inputs[0] is not other:  # x sigmoid(x) is SiLU
            return True
    return False


def deselect(graph: ir.Graph, selected: set[ir.Node], only_faster: bool = False) -> dict[ir.Node, str]:
    """Removes those of `OPERATORS` that are not between int8 operators.

    Args:
        graph: Float graph.
        selected: Int8 operators; it is changed.
        only_faster: Also remove layers whose input no int8 layer computes or reads, and whose output none reads, if
            they take fewer multiplications per value than the conversions to and from int8 cost: depthwise
            convolutions (ConvNeXt), and layers of few weights behind float operators (box sides of YOLOv8).

    Returns:
        Reason by removed operator.
    """
    reasons: dict[ir.Node, str] = {}
    while True:
        removed: dict[ir.Node, str] = {}
        for node in graph:
            if node in selected and node.op_type in OPERATORS and (why := _not_between(node, selected)):
                removed[node] = why
            elif only_faster and node in selected and (kind := _small_and_isolated(node, selected)):
                removed[node] = f"{kind} between float operators is no faster in int8"
        if not removed:
            return reasons
        selected.difference_update(removed)
        reasons |= removed


def _not_between(node: ir.Node, selected: set[ir.Node]) -> str:
    """Why `node` is not between int8 operators, "" where it is."""
    for index in activation_inputs(node):
        value = node.inputs[index]
        assert value is not None
        quantized_anyway = any(user in selected and user.op_type in layers.LAYERS for user in value.consumers())
        if not quantized_anyway and _source(value) not in selected and dequantized_qparams(value) is None:
            return f"its input {value.name} is float"
    return "" if _reaches(node.outputs[0], selected) else "nothing after it is int8"


def _small_and_isolated(layer: ir.Node, selected: set[ir.Node]) -> str:
    """What a layer of few multiplications is that no int8 layer feeds, shares the input of, or reads; "" for others."""
    x, weight = layer.inputs[0], query.constant(layer.inputs[1]) if layer.op_type in layers.LAYERS else None
    if x is None or weight is None or weight.ndim < 1:
        return ""
    others = {user for user in x.consumers() if user is not layer}
    source = _source(x)
    layers_near = {node for node in (*others, source) if node in selected and node.op_type in layers.LAYERS}
    if layers_near or dequantized_qparams(x) is not None or _reaches(layer.outputs[0], selected):
        return ""
    groups = layer.attributes.get_int("group", 1)
    if layer.op_type == "Conv" and weight.shape[1] == 1 != groups:
        return "a depthwise convolution"
    values = len(weight) + (weight.shape[1] * groups if weight.ndim > 1 else 1)
    few = weight.size < MIN_PRODUCTS * values
    return "a layer of few weights" if few and source is not None and source not in selected else ""


def _source(value: ir.Value) -> ir.Node | None:
    """The operator that computes `value`, before data movement and functions of one tensor."""
    node = value.producer()
    while node is not None and (moves(node) or _is_function(node)):
        data = node.inputs[activation_inputs(node)[0]]
        node = query.producer(data)
    return node


def _reaches(value: ir.Value, selected: set[ir.Node]) -> bool:
    """Whether an int8 operator reads `value`, maybe behind data movement and functions of one tensor."""
    for node, index in ((use.node, use.idx) for use in value.uses()):
        if node in selected and index in activation_inputs(node):
            return True
        passes = (moves(node) and index == 0) or _is_function(node)
        if passes and any(_reaches(result, selected) for result in node.outputs):
            return True
    return False


def _is_function(node: ir.Node) -> bool:
    """Whether `node` is one of `FUNCTIONS`, or adds or multiplies by a constant."""
    return node.op_type in FUNCTIONS or (node.op_type in ("Add", "Mul") and len(activation_inputs(node)) == 1)


def _continues_function(node: ir.Node) -> bool:
    """Whether `node` adds a number to the result of a function of one tensor, or multiplies it, and alone reads it."""
    if node.op_type not in ("Add", "Mul") or len(indices := activation_inputs(node)) != 1:
        return False
    value = node.inputs[indices[0]]
    numbers = (query.constant(operand) for index, operand in enumerate(node.inputs) if index not in indices)
    source = value.producer() if value is not None and query.sole_user(value) is node else None
    if source is None or not all(number is not None and number.size == 1 for number in numbers):
        return False
    curved = source.op_type in FUNCTIONS and source.op_type not in ("Relu", "Clip")  # those are parts of layers
    return curved or _continues_function(source)


def _is_global_average_pool(mean: ir.Node) -> bool:
    """Whether a ReduceMean is over height and width of [n, c, h, w]."""
    axes = query.integers(mean, "axes", 1) or []
    return query.rank(mean.inputs[0]) == 4 and sorted(axis % 4 for axis in axes) == [2, 3]


def _counts_pixels_beyond(pool: ir.Node) -> bool:
    """Whether onnxruntime divides by the whole window where ceil_mode lets one end behind the tensor, in int8 alone."""
    return all(pool.attributes.get_int(name, 0) == 1 for name in ("ceil_mode", "count_include_pad"))


def _pads(pool: ir.Node) -> bool:
    automatic = pool.attributes.get_string("auto_pad", "NOTSET")
    return automatic not in ("NOTSET", "VALID") or any(pool.attributes.get_ints("pads", []))


def quantize_operator(inserter: QdqInserter, node: ir.Node) -> None:
    """Inserts Q/DQ pairs at the inputs of an operator; see `QdqInserter.quantize_output` for its output.

    A Concat whose parts have no other reader needs no pairs: they take the qparams of its result (`QuantizeEarly`).

    Args:
        inserter: Inserter of the graph.
        node: One of `OPERATORS`.
    """
    if node.op_type == "ReduceMean":
        node = _as_global_average_pool(inserter, node)
    if node.op_type == "AveragePool" and _counts_pixels_beyond(node):
        node.attributes["count_include_pad"] = ir.AttrInt64("count_include_pad", 0)  # equal, as there is no padding
    if node.op_type == "Concat" and all(value is not None and query.sole_user(value) is node for value in node.inputs):
        return
    for index in range(len(node.inputs) if node.op_type in ("Add", "Mul", "Concat") else 1):
        if query.constant(node.inputs[index]) is None:
            inserter.quantize_input(node, index)
        else:
            inserter.quantize_constant(node, index)


def _as_global_average_pool(inserter: QdqInserter, mean: ir.Node) -> ir.Node:
    """ReduceMean over height and width as GlobalAveragePool, which engines have in int8, and Flatten for keepdims=0."""
    x, y = mean.inputs[0], mean.outputs[0]
    pool = edit.node("GlobalAveragePool", [x], f"{y.name}.pooled", dtype=ir.DataType.FLOAT, taken=inserter.taken)
    nodes = [pool]
    if not mean.attributes.get_int("keepdims", 1):
        nodes.append(
            edit.node("Flatten", [pool.outputs[0]], f"{y.name}.flat", dtype=ir.DataType.FLOAT, taken=inserter.taken)
        )
    nodes[-1].outputs[0].shape = y.shape
    pool.name = mean.name
    if len(nodes) > 1 and y.name in inserter.ranges:
        inserter.ranges[str(pool.outputs[0].name)] = inserter.ranges[y.name]
    ir.convenience.replace_nodes_and_values(inserter.graph, mean, [mean], nodes, [y], [nodes[-1].outputs[0]])
    return pool
