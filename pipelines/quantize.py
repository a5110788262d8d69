"""Float model + recipe + calibration table -> QDQ model and a report on every operator. Pure: nothing is read or written here.

Weights: symmetric int8 per output channel, W_q = round(W / s_w), s_w = max|W| / 127. Activations: uint8, s = (max - min) / 255 with the
range widened to hold zero, z = round(-min / s); tensors without negatives get z = 0 and s = max / 255. Bias: int32 in steps of s_x s_w,
exact to half a step. An engine then computes with integers alone, the zero point's term folded into the bias (the "shifted bias" of
Intel's INT8 Wide & Deep):

    y = s_x s_w ( sum_c x_q W_q + b_q - z_x sum_c W_q ),   y_q = clip(round(y / s_y) + z_y, 0, 255)

(Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference").
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines import graph
from pipelines.calibrate import CalibrationTable, TensorRange
from pipelines.entry import QuantRecipe
from pipelines.errors import RequestError
from pipelines.rewrite import CleanUp
from pipelines.rewrites.quantize_early import QuantizeEarly

Array = NDArray[Any]
BIAS = 2**30  # largest bias in its own steps: leaves int32 room for the sum of products
NOTHING = 1e-20  # weights below it count as zero, for their steps would leave float32


@dataclass(frozen=True)
class Operator:
    """One operator of the quantized model: precision is "int8", "float" or "integer" (index arithmetic); reason says why not int8."""

    name: str
    type: str
    precision: str
    reason: str = ""


@dataclass(frozen=True)
class QuantReport:
    """Every operator of the model with its precision, and the recipe that made it so."""

    operators: tuple[Operator, ...]
    recipe: QuantRecipe
    graph: str

    def counts(self) -> dict[str, int]:
        """How many operators run in each precision."""
        found: dict[str, int] = {}
        for each in self.operators:
            found[each.precision] = found.get(each.precision, 0) + 1
        return found

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {"graph": self.graph, "recipe": self.recipe.to_json(), "operators": [asdict(each) for each in self.operators]}


def activation_parameters(observed: TensorRange) -> tuple[np.float32, np.uint8]:
    """(scale, zero point) of a uint8 tensor with this range; zero is always represented exactly."""
    low, high = min(observed.low, 0.0), max(observed.high, 0.0)
    if high - low < 1e-12:
        return np.float32(1.0), np.uint8(0)
    scale = np.float32((high - low) / 255)
    return scale, np.uint8(np.clip(np.rint(-low / scale), 0, 255))


def weight_parameters(weight: Array, axis: int, bits: int = 8, least: Array | float = 0.0) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """(scales, int8 weights) of a float weight, one scale per index of `axis`, never saturated.

    least: scales are at least this (float, or one per channel). A channel of zeros gets it, or 1 where it is 0.
    """
    top = 2 ** (bits - 1) - 1
    reach = np.abs(weight).max(axis=tuple(i for i in range(weight.ndim) if i != axis))
    scale = np.maximum(np.where(reach > NOTHING, reach / top, 0.0), least)
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    shape = [1] * weight.ndim
    shape[axis] = -1
    return scale, np.clip(np.rint(weight / scale.reshape(shape)), -top, top).astype(np.int8)


def quantize(model: ir.Model, recipe: QuantRecipe, table: CalibrationTable) -> tuple[ir.Model, QuantReport]:
    """The QDQ form of `model`, which is left as it is, and what became of every operator.

    Raises RequestError where the table belongs to another graph, the opset is older than 13, or keep_float matches nothing.
    """
    graph.require_opset(model)
    table.require(model)
    result = model.clone()
    CleanUp()(result)  # before QDQ: types are inferred, constants lifted
    _name(result.graph)
    if unused := [each for each in recipe.keep_float if not any(re.fullmatch(each, str(node.name)) for node in result.graph)]:
        names = ", ".join(str(node.name) for node in result.graph if node.op_type in CONVERTERS)
        raise RequestError(f"keep_float {unused[0]!r} matches no operator; quantizable ones are: {names}")
    quantizer = _Quantizer(result.graph, recipe, table)
    reasons: dict[str, str] = {}
    for node in list(result.graph):
        convert = CONVERTERS.get(node.op_type)
        reasons[str(node.name)] = quantizer.refuse(node) or convert(quantizer, node) if convert else f"{node.op_type} has no int8 form here"
    early = QuantizeEarly(recipe.quantize_tables, recipe.keeps_float)
    while early(result).modified:
        pass
    for node in list(result.graph):  # last, for their readers may quantize them by now
        if node.op_type in CONVERTERS and not reasons[str(node.name)]:
            quantizer.result(node)
    RemoveUnusedNodesPass()(result)
    for each in result.graph.initializers.values():
        each.metadata_props.clear()
    operators: list[Operator] = []
    for node in result.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            operators.append(_describe(node, reasons, early))
            operators += _inside(node)
    return result, QuantReport(tuple(operators), replace(recipe, observer=table.observer), table.graph)


def _name(main: ir.Graph) -> None:
    """Give operators without a name of their own (ONNX asks for none) that of their output."""
    taken = set()
    for node in main:
        if not node.name or node.name in taken:
            node.name = node.outputs[0].name
        taken.add(node.name)


class _Quantizer:
    """Inserts the Q/DQ pairs of one graph; one pair per tensor, shared by its readers."""

    def __init__(self, main: ir.Graph, recipe: QuantRecipe, table: CalibrationTable) -> None:
        self.main, self.recipe, self.table = main, recipe, table
        self.done: dict[str, ir.Value] = {}
        self.taken = graph.names(main)

    def refuse(self, node: ir.Node) -> str:
        """Why `node` stays float, "" where it need not."""
        x = node.inputs[0]
        if self.recipe.keeps_float(str(node.name)):
            return "kept float by the recipe"
        if x is None or (x.name not in self.table.tensors and _given(x) is None):
            return f"no calibrated range for its input {x.name if x is not None else '?'}"
        return ""

    def activation(self, node: ir.Node) -> np.float32:
        """Feed input 0 of `node` through a Q/DQ pair, unless it is bytes behind a DequantizeLinear already; returns its scale."""
        x = node.inputs[0]
        assert x is not None and x.name is not None
        if (given := _given(x)) is not None:
            return given
        scale, zero = activation_parameters(self.table.tensors[x.name])
        if x.name not in self.done:
            q, dq = self._pair(x, scale, zero)
            self.main.insert_before(node, [q, dq])
            self.done[x.name] = dq.outputs[0]
        node.replace_input_with(0, self.done[x.name])
        return scale

    def _pair(self, x: ir.Value, scale: np.float32, zero: np.uint8) -> tuple[ir.Node, ir.Node]:
        s = graph.initializer(self.main, f"{x.name}.scale", np.asarray(scale), self.taken)
        z = graph.initializer(self.main, f"{x.name}.zero_point", np.asarray(zero), self.taken)
        q = graph.node("QuantizeLinear", [x, s, z], f"{x.name}.quantized", dtype=ir.DataType.UINT8, taken=self.taken)
        q.outputs[0].shape = x.shape
        return q, self._back(x, q)

    def _back(self, x: ir.Value, q: ir.Node) -> ir.Node:
        dq = graph.node(
            "DequantizeLinear", [q.outputs[0], *q.inputs[1:]], f"{x.name}.dequantized", dtype=ir.DataType.FLOAT, taken=self.taken
        )
        dq.outputs[0].shape = x.shape
        return dq

    def result(self, node: ir.Node) -> None:
        """Feed all readers of an int8 operator's result through one Q/DQ pair, where engines would compute in float without.

        onnxruntime has no integer Conv with a float result, and no Gemm or MatMul with one that a Relu or Clip reads. The pair stands
        after the Relu or Clip where saturation does the same (engines then drop it), else before it, with the range after it.
        """
        x = node.outputs[0]
        after = graph.sole_user(x)
        if after is None or after.op_type not in ("Relu", "Clip"):
            if node.op_type != "Conv":
                return
            after = None
        y = x if after is None else after.outputs[0]
        if y.name not in self.table.tensors:
            return
        found = [each for each in y.consumers() if each.op_type == "QuantizeLinear" and _step(each) is not None]
        step = (_step(found[0]) if found else None) or activation_parameters(self.table.tensors[y.name])
        if after is not None and (self.recipe.keeps_float(str(after.name)) or not _saturates(after, *step)):
            step, y, found = activation_parameters(self.table.tensors[y.name]), x, []
        if found and len(y.uses()) == 1 and not y.is_graph_output():
            return
        if found:
            q = found[0]
            dq = next((each for each in q.outputs[0].consumers() if each.op_type == "DequantizeLinear"), None) or self._back(y, q)
        else:
            q, dq = self._pair(y, *step)
        y.replace_all_uses_with(dq.outputs[0], replace_graph_outputs=True)
        q.replace_input_with(0, y)
        if dq.outputs[0].is_graph_output():
            y.name, dq.outputs[0].name = dq.outputs[0].name, y.name
        producer = y.producer()
        assert producer is not None
        self.main.insert_after(producer, [q, dq])

    def weight(self, node: ir.Node, axis: int, x_scale: np.float32) -> None:
        """Replace weight (input 1) and bias (input 2, if any) of `node` by int8 / int32 constants behind DequantizeLinear."""
        weight = node.inputs[1]
        w = graph.constant(weight)
        assert weight is not None and w is not None
        bits = 7 if self.recipe.reduced_range else 8
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        b = graph.constant(bias)
        b = None if b is None else b.ravel()  # a Gemm's may be [1, N]
        # a bias that int32 cannot hold in steps of s_x s_w widens its channel's step
        least = 0.0 if b is None else np.abs(b.astype(np.float64)) / (float(x_scale) * BIAS)
        scale, quantized = weight_parameters(w, axis, bits, least)
        node.replace_input_with(1, self._dequantized(node, str(weight.name), quantized, scale, axis))
        if b is not None and bias is not None:
            step = (np.float32(x_scale) * scale).astype(np.float32)
            node.replace_input_with(
                2, self._dequantized(node, str(bias.name), np.rint(b / step.astype(np.float64)).astype(np.int32), step, 0)
            )

    def _dequantized(self, before: ir.Node, name: str, quantized: Array, scale: Array, axis: int) -> ir.Value:
        stem = f"{before.outputs[0].name}/{name}"  # a weight may be shared by operators with other scales
        q = graph.initializer(self.main, f"{stem}.quantized", quantized, self.taken)
        s = graph.initializer(self.main, f"{stem}.scale", scale, self.taken)
        z = graph.initializer(self.main, f"{stem}.zero_point", np.zeros(scale.shape, quantized.dtype), self.taken)
        dq = graph.node("DequantizeLinear", [q, s, z], f"{stem}.dequantized", dtype=ir.DataType.FLOAT, taken=self.taken, axis=axis)
        dq.outputs[0].shape = q.shape
        self.main.insert_before(before, dq)
        return dq.outputs[0]


def _gemm(quantizer: _Quantizer, node: ir.Node) -> str:
    transposed = node.attributes.get_int("transB", 0)
    if node.attributes.get_int("transA", 0):
        return "its input is transposed (transA)"
    if any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta")):
        return "alpha or beta is not 1"
    weight = graph.constant(node.inputs[1])
    if weight is None:
        return "its weights are not constant"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = graph.constant(node.inputs[2])
        if bias is None or bias.shape not in ((columns := weight.shape[0 if transposed else 1],), (1, columns)):
            return "its bias is not a constant row"
    quantizer.weight(node, 0 if transposed else 1, quantizer.activation(node))
    return ""


def _matmul(quantizer: _Quantizer, node: ir.Node) -> str:
    weight = graph.constant(node.inputs[1])
    if weight is None or weight.ndim != 2:
        return "its weights are not a constant matrix"
    after = graph.sole_user(node.outputs[0])
    if graph.rank(node.inputs[0]) == 2 and after is not None and after.op_type == "Add":
        node.op_type = "Gemm"  # the same; onnxruntime would make a float Gemm of MatMul and Add
    quantizer.weight(node, 1, quantizer.activation(node))
    return ""


def _conv(quantizer: _Quantizer, node: ir.Node) -> str:
    if graph.constant(node.inputs[1]) is None or (
        len(node.inputs) > 2 and node.inputs[2] is not None and graph.constant(node.inputs[2]) is None
    ):
        return "its weights or bias are not constant"
    quantizer.weight(node, 0, quantizer.activation(node))
    return ""


def _step(node: ir.Node) -> tuple[np.float32, np.uint8] | None:
    """(scale, zero point) of a QuantizeLinear or DequantizeLinear of an activation that is like those made here."""
    scale, zero = (graph.constant(each) for each in (*node.inputs[1:], None)[:2])
    if scale is None or zero is None or scale.size != 1 or zero.dtype != np.uint8:
        return None
    return np.float32(scale.item()), np.uint8(zero.item())


def _given(x: ir.Value) -> np.float32 | None:
    """The scale of an activation that is bytes already: the DequantizeLinear that computes `x` is like those made here."""
    producer = x.producer()
    step = _step(producer) if producer is not None and producer.op_type == "DequantizeLinear" else None
    return None if step is None else step[0]


def _saturates(node: ir.Node, scale: np.float32, zero: np.uint8) -> bool:
    """Whether quantizing with these parameters leaves the Relu or Clip `node` nothing to do."""
    low, high = (float(scale * np.float32(q - int(zero))) for q in (0, 255))  # in float32, as engines compare
    if node.op_type == "Relu":
        return low == 0
    bounds = []
    for value, unbounded in zip((*node.inputs[1:], None, None), (-np.inf, np.inf), strict=False):
        bound = graph.constant(value)
        if value is not None and bound is None:
            return False
        bounds.append(unbounded if bound is None else bound.item())
    return bool(bounds[0] <= low and high <= bounds[1])


CONVERTERS: dict[str, Callable[[_Quantizer, ir.Node], str]] = {"Gemm": _gemm, "MatMul": _matmul, "Conv": _conv}


def _describe(node: ir.Node, reasons: dict[str, str], early: QuantizeEarly) -> Operator:
    name = str(node.name)
    dtypes = {value.dtype for value in (*node.inputs[:1], *node.outputs) if value is not None}
    if node.op_type in CONVERTERS:
        reason = reasons.get(name, "")
        return Operator(name, node.op_type, "float" if reason else "int8", reason)
    if ir.DataType.UINT8 in dtypes:
        return Operator(name, node.op_type, "int8")
    if ir.DataType.FLOAT not in dtypes:
        return Operator(name, node.op_type, "integer")
    if node.op_type in ("Relu", "Clip") and _fused(node, reasons):
        return Operator(name, node.op_type, "int8", "fused by engines into the operator before it")
    return Operator(name, node.op_type, "float", early.refused.get(name) or reasons.get(name) or f"{node.op_type} has no int8 form here")


def _inside(node: ir.Node) -> list[Operator]:
    """What stands in the subgraphs of `node` (the branches of an If, the body of a Loop): nothing there is quantized."""
    graphs = [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
    inner = [each for body in graphs for each in ir.traversal.RecursiveGraphIterator(body)]
    return [Operator(str(each.name or each.outputs[0].name), each.op_type, "float", f"inside a subgraph of {node.name}") for each in inner]


def _fused(node: ir.Node, reasons: dict[str, str]) -> bool:
    """Whether `node` stands between an int8 operator and a quantize step; engines make the three one."""
    x, reader = node.inputs[0], graph.sole_user(node.outputs[0])
    layer = x.producer() if x is not None and graph.sole_user(x) is node else None
    int8 = layer is not None and layer.op_type in CONVERTERS and not reasons.get(str(layer.name))
    return int8 and reader is not None and reader.op_type == "QuantizeLinear"
