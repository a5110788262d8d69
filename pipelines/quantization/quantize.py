"""Float model + recipe + calibration table -> QDQ model and a report on every operator. Pure: nothing is read or
written here.

Weights: symmetric int8 per output channel, W_q = round(W / s_w), s_w = max|W| / 127. Activations: uint8, s = (max -
min) / 255 with the range widened to hold zero, z = round(-min / s); tensors without negatives get z = 0 and s = max /
255. Bias: int32 in steps of s_x s_w, exact to half a step. An engine then computes with integers alone, the zero
point's term folded into the bias (the "shifted bias" of Intel's INT8 Wide & Deep):

    y = s_x s_w ( sum_c x_q W_q + b_q - z_x sum_c W_q ),   y_q = clip(round(y / s_y) + z_y, 0, 255)

(Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference").

Where the table knows them, channels are equalized before (`EqualizeChannels`), W rounded otherwise and b corrected
(`pipelines.quantization.correction`). What lies between layers is bytes too where that pays
(`pipelines.quantization.elementwise`), and what only moves values keeps their step. Embedding tables are bytes: in the
step of the int8 operator that they feed, else with a scale a row (`pipelines.quantization.embedding_tables`).
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.quantization import bias, elementwise, embedding_tables, layers, weight_rounding
from pipelines.quantization.calibrate import CalibrationTable
from pipelines.quantization.equalize_channels import scale_channels
from pipelines.quantization.qdq import Pairs
from pipelines.quantization.quantize_early import QuantizeEarly
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.scales import activation_parameters, given, weight_parameters
from pipelines.rewrites.driver import CleanUp

logger = logging.getLogger(__name__)

__all__ = ["Operator", "QuantReport", "activation_parameters", "quantize", "weight_parameters"]
RUN_TIME = "its input is quantized at run time"


@dataclass(frozen=True)
class Operator:
    """One operator of the quantized model: precision is "int8", "float" or "integer" (index arithmetic); reason says
    why not int8.
    """

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
        return {
            "graph": self.graph,
            "recipe": self.recipe.to_json(),
            "operators": [asdict(each) for each in self.operators],
        }


def quantize(model: ir.Model, recipe: QuantRecipe, table: CalibrationTable) -> tuple[ir.Model, QuantReport]:
    """The QDQ form of `model`, which is left as it is, and what became of every operator.

    The table's corrections count only for the recipe that they were found by, observers aside. Raises RequestError
    where the table belongs to another graph, the opset is older than 13, or keep_float or dynamic matches nothing.
    """
    io.require_opset(model)
    table.require(model)
    result = model.clone()
    scale_channels(result, table.equalization)
    CleanUp()(result)  # before QDQ: types are inferred, constants lifted
    main = result.graph
    _name(main)
    _require_patterns(main, recipe)
    pairs = Pairs(main, recipe, table)
    reasons = {node: _refuse(pairs, node) for node in main if _quantizable(node)}
    chosen = {node for node, why in reasons.items() if not why}
    reasons |= elementwise.choose(main, chosen)
    int8: dict[str, str] = {}  # name -> note
    for node in list(main):
        if node in reasons and recipe.is_dynamic(str(node.name)) and not recipe.keeps_float(str(node.name)):
            if not (why := layers.dynamic(pairs, node)):
                int8[str(node.name)] = RUN_TIME
                continue
            reasons[node] = reasons[node] or why
        if node in chosen:
            (layers if node.op_type in layers.LAYERS else elementwise).convert(pairs, node)
            int8[str(node.name)] = ""
    early = QuantizeEarly(recipe.quantize_tables, recipe.keeps_float)
    while early(result).modified:
        pass
    if recipe.quantize_tables:
        int8 |= embedding_tables.convert(pairs)
    for node in list(main):  # last, for their readers may quantize them by now
        if int8.get(str(node.name)) == "" and _quantizable(node) and node.outputs[0].dtype == ir.DataType.FLOAT:
            pairs.result(node, always=node.op_type not in ("Gemm", "MatMul"))
    for node in list(main):
        if node.op_type == "Transpose":
            pairs.transposed(node)
        elif node.op_type.startswith("Reduce"):
            pairs.reduced(node)
    if recipe.correct and (table.bias or table.rounding):
        if not recipe.same_but_observer(table.recipe):
            logger.warning(
                "the table's corrections were found by another recipe and are left out; for new ones run: zoo calibrate"
            )
        else:
            weight_rounding.apply(main, table.rounding)
            for name, channels in bias.correct(main, table.bias).items():
                int8[name] = int8.get(name) or f"bias corrected in {channels} channels"
    RemoveUnusedNodesPass()(result)
    for each in main.initializers.values():
        each.metadata_props.clear()
    described = {str(node.name): why for node, why in reasons.items() if why} | early.refused
    operators: list[Operator] = []
    for node in main:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") and node.name not in pairs.helpers:
            operators.append(_describe(node, described, int8))
            operators += _inside(node)
    return result, QuantReport(tuple(operators), replace(recipe, observer=table.observer), table.graph)


def _quantizable(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in (*layers.LAYERS, *elementwise.COMPUTES)


def _require_patterns(main: ir.Graph, recipe: QuantRecipe) -> None:
    for kind, patterns in (("keep_float", recipe.keep_float), ("dynamic", recipe.dynamic)):
        if unused := [each for each in patterns if not any(re.fullmatch(each, str(node.name)) for node in main)]:
            names = ", ".join(str(node.name) for node in main if _quantizable(node))
            raise RequestError(f"{kind} {unused[0]!r} matches no operator; quantizable ones are: {names}")


def _refuse(pairs: Pairs, node: ir.Node) -> str:
    """Why `node` stays float whatever is around it, "" where it need not."""
    if pairs.recipe.keeps_float(str(node.name)):
        return "kept float by the recipe"
    layer = node.op_type in layers.LAYERS
    if not layer and (why := elementwise.refuse(node)):
        return why
    for index in elementwise.activations(node):
        x = node.inputs[index]
        if x is None or (x.name not in pairs.ranges and given(x) is None):
            return f"no calibrated range for its input {x.name if x is not None else '?'}"
    return layers.refuse(node) if layer else ""


def _name(main: ir.Graph) -> None:
    """Give operators without a name of their own (ONNX asks for none) that of their output."""
    taken = set()
    for node in main:
        if not node.name or node.name in taken:
            node.name = node.outputs[0].name
        taken.add(node.name)


def _describe(node: ir.Node, reasons: dict[str, str], int8: dict[str, str]) -> Operator:
    name = str(node.name)
    dtypes = {value.dtype for value in (*node.inputs[:1], *node.outputs) if value is not None}
    if name in int8:
        return Operator(name, node.op_type, "int8", int8[name])
    if dtypes & {ir.DataType.UINT8, ir.DataType.INT8}:
        return Operator(name, node.op_type, "int8")
    if ir.DataType.FLOAT not in dtypes:
        return Operator(name, node.op_type, "integer")
    if node.op_type in ("Relu", "Clip") and _fused(node, int8):
        return Operator(name, node.op_type, "int8", "fused by engines into the operator before it")
    if name in reasons:
        return Operator(name, node.op_type, "float", reasons[name])
    x, reader = node.inputs[0], query.sole_user(node.outputs[0])
    between = x is not None and given(x) is not None and reader is not None and reader.op_type == "QuantizeLinear"
    if between and node.op_type == "Transpose":
        return Operator(name, node.op_type, "int8")
    return Operator(
        name,
        node.op_type,
        "float",
        "computed in float between bytes" if between else f"{node.op_type} has no int8 form here",
    )


def _inside(node: ir.Node) -> list[Operator]:
    """What stands in the subgraphs of `node` (the branches of an If, the body of a Loop): nothing there is
    quantized.
    """
    graphs = [each.as_graph() for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH]
    inner = [each for body in graphs for each in ir.traversal.RecursiveGraphIterator(body)]
    return [
        Operator(str(each.name or each.outputs[0].name), each.op_type, "float", f"inside a subgraph of {node.name}")
        for each in inner
    ]


def _fused(node: ir.Node, int8: dict[str, str]) -> bool:
    """Whether `node` stands between an int8 operator and a quantize step; engines make the three one."""
    x, reader = node.inputs[0], query.sole_user(node.outputs[0])
    layer = x.producer() if x is not None and query.sole_user(x) is node else None
    return layer is not None and str(layer.name) in int8 and reader is not None and reader.op_type == "QuantizeLinear"
