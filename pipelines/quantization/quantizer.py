"""Post-training quantization: float model + recipe + calibration table -> QDQ model and a report on every operator.

Weights are symmetric int8 per output channel, W_q = round(W / s_w), s_w = max|W| / 127. Activations are uint8 per
tensor, s = (max - min) / 255 with the range widened to hold zero, z = round(-min / s); tensors without negatives get z
= 0 and s = max / 255. Biases are int32 of scale s_x s_w. An engine then computes with integers alone, with the zero
point's term folded into the bias (the "shifted bias" of Intel's INT8 Wide & Deep):

    y = s_x s_w ( sum_c x_q W_q + b_q - z_x sum_c W_q ),   y_q = clip(round(y / s_y) + z_y, 0, 255)

(Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference"). The
functions are pure: they read and write no files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.quantization.algorithms import bias, weight_rounding
from pipelines.quantization.algorithms.equalize_channels import scale_channels
from pipelines.quantization.algorithms.smooth_channels import smooth_channels
from pipelines.quantization.algorithms.split_channels import split_channels
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq import (
    elementwise,
    embedding_tables,
    engine_quirks,
    layers,
    quantize_early,
    shared_ranges,
    weight_only,
)
from pipelines.quantization.qdq.insertion import QdqInserter
from pipelines.quantization.qdq.scales import QuantizedWeights, dequantized_qparams
from pipelines.quantization.recipe import QuantRecipe, matching
from pipelines.rewrites.driver import CleanUp

logger = logging.getLogger(__name__)

RUN_TIME = "its input is quantized at run time"


@dataclass(frozen=True)
class Operator:
    """One operator of a quantized model.

    Attributes:
        name: Name of the operator.
        type: Operator type.
        precision: "int8", "float" or "integer" (index arithmetic).
        reason: Why the operator is not int8, or a note.
    """

    name: str
    type: str
    precision: str
    reason: str = ""


@dataclass(frozen=True)
class QuantReport:
    """Precision of every operator of a quantized model.

    Attributes:
        operators: The operators, those of subgraphs last.
        recipe: Recipe of the model.
        graph: Digest of the float graph.
    """

    operators: tuple[Operator, ...]
    recipe: QuantRecipe
    graph: str

    def counts(self) -> dict[str, int]:
        """Returns the number of operators by precision."""
        counts: dict[str, int] = {}
        for operator in self.operators:
            counts[operator.precision] = counts.get(operator.precision, 0) + 1
        return counts

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {
            "graph": self.graph,
            "recipe": self.recipe.to_json(),
            "operators": [asdict(operator) for operator in self.operators],
        }


def quantize(model: ir.Model, recipe: QuantRecipe, table: CalibrationTable) -> tuple[ir.Model, QuantReport]:
    """Inserts QDQ pairs into a float model according to a recipe.

    1. Cross-layer equalization, SmoothQuant and smoothing, by the factors of the table.
    2. Graph clean-up: types are inferred, constants lifted.
    3. Selection of int8 operators; the reasons for the others go into the report.
    4. Dynamic quantization of the layers that the recipe names. A Split and its parts get one range (`shared_ranges`).
    5. Q/DQ insertion: inputs of int8 operators, per-channel weights, biases.
    6. Int8 propagation through data movement (`QuantizeEarly`).
    7. Weight-only quantization of the remaining float32 embedding tables, with a scale per row, and of recurrent layers
       and layers inside If and Loop (`weight_only`).
    8. Output quantization: Q/DQ pairs on outputs of int8 operators that engines need.
    9. Engine quirks.
    10. GPTQ rounding of weights, then bias correction, from the table. 11. The report.

    Args:
        model: Float32 ONNX model, opset 13 or later, after the rewrites; it is not changed.
        recipe: Quantization options.
        table: Calibration table of this graph (same digest).

    Returns:
        The QDQ model, and the precision of every operator with the reason if it stays float32.

    Raises:
        RequestError: The table belongs to another graph, the opset is older than 13, or a pattern of `keep_float` or
            `dynamic` matches no operator.
    """
    io.require_opset(model)
    table.require(model)
    return _quantize(_Scaled.of(model, table), recipe, table)


class Quantizer:
    """Quantizes a float model by several tables.

    Tables with the same scaled channels share the clean-up of the graph, and the weights that are int8 alike.

    Args:
        model: Float32 ONNX model, see `quantize`; it is not changed.
        recipe: Quantization options.

    Attributes:
        model: See above.
        recipe: See above.
    """

    def __init__(self, model: ir.Model, recipe: QuantRecipe) -> None:
        io.require_opset(model)
        self.model, self.recipe = model, recipe
        self._digest = io.digest(model)
        self._scaled: _Scaled | None = None

    def quantize(self, table: CalibrationTable) -> tuple[ir.Model, QuantReport]:
        """See `quantize`.

        Args:
            table: Calibration table of the model.

        Returns:
            See `quantize`.
        """
        table.require_digest(self._digest)
        if self._scaled is None or self._scaled.key != _Scaled.key_of(table):
            self._scaled = _Scaled.of(self.model, table)
        return _quantize(replace(self._scaled, model=self._scaled.model.clone()), self.recipe, table)


def _quantize(scaled: _Scaled, recipe: QuantRecipe, table: CalibrationTable) -> tuple[ir.Model, QuantReport]:
    """Computes `quantize` from its third step on; the scaled model is changed."""
    result, graph = scaled.model, scaled.model.graph
    require_patterns(graph, recipe)
    inserter = QdqInserter(graph, recipe, table, scaled.weights)
    inserter.helpers |= scaled.helpers
    selected, reasons = select_operators(inserter, table.keep_float)
    notes = quantize_dynamically(inserter, selected, reasons)
    shared_ranges.share_ranges(inserter, selected)
    notes |= insert_qdq(inserter, selected)
    reasons |= propagate_int8(result, recipe)
    if recipe.quantize_tables:
        notes |= embedding_tables.quantize_tables(inserter)
    new_notes, new_reasons = weight_only.quantize_weights(inserter)
    notes |= new_notes
    reasons |= new_reasons
    for name in weight_only.round_weights(inserter, table.keep_float):
        reasons[name] += "; its weights are rounded to 8 bits"
    quantize_outputs(inserter, notes, table.keep_float)
    work_around_engines(inserter)
    notes |= correct(graph, recipe, table, notes)
    RemoveUnusedNodesPass()(result)
    for part in (*graph.initializers.values(), *ir.traversal.RecursiveGraphIterator(graph)):
        part.metadata_props.clear()  # an exporter's stack traces can be larger than the weights
    operators = tuple(describe(inserter, reasons, notes))
    return result, QuantReport(operators, replace(recipe, observer=table.observer), table.graph)


@dataclass(frozen=True)
class _Scaled:
    """A float model with scaled channels, cleaned up.

    Attributes:
        key: See `key_of`.
        model: The model.
        helpers: Names of the operators that scale channels.
        weights: Weights quantized so far.
    """

    key: tuple[Any, ...]
    model: ir.Model
    helpers: set[str]
    weights: QuantizedWeights

    @classmethod
    def of(cls, model: ir.Model, table: CalibrationTable) -> _Scaled:
        """Scales the channels of a copy of a model by a table."""
        copy = model.clone()
        scale_channels(copy, table.equalization)
        split_channels(copy, table.splitting)
        helpers = smooth_channels(copy, table.smoothing)
        clean_up(copy)
        return cls(cls.key_of(table), copy, helpers, QuantizedWeights())

    @staticmethod
    def key_of(table: CalibrationTable) -> tuple[Any, ...]:
        """Returns the cache key of the scaled model."""
        return table.equalization, table.splitting, table.smoothing


def clean_up(model: ir.Model) -> None:
    """Applies `CleanUp`, and names operators without a unique name by their first output.

    Args:
        model: Float model; it is changed.
    """
    CleanUp()(model)
    taken = set()
    for node in model.graph:
        if not node.name or node.name in taken:
            node.name = node.outputs[0].name
        taken.add(node.name)


def require_patterns(graph: ir.Graph, recipe: QuantRecipe) -> None:
    """Checks that every pattern of `keep_float` and `dynamic` matches an operator.

    Args:
        graph: Float graph.
        recipe: Quantization options.

    Raises:
        RequestError: A pattern matches no operator.
    """
    operators = {query.label(node) for node in ir.traversal.RecursiveGraphIterator(graph)}
    for kind, patterns in (("keep_float", recipe.keep_float), ("dynamic", recipe.dynamic)):
        for pattern in patterns:
            if not matching((pattern,), operators):
                names = ", ".join(str(node.name) for node in graph if _quantizable(node))
                raise RequestError(f"{kind} {pattern!r} matches no operator; quantizable ones are: {names}")


def select_operators(inserter: QdqInserter, keep_float: Mapping[str, str]) -> tuple[set[ir.Node], dict[str, str]]:
    """Selects the operators that can be int8.

    Args:
        inserter: Inserter of the graph.
        keep_float: Reason by name of operators that stay float32, from the table.

    Returns:
        The int8 operators, and the reason by name of the other quantizable ones.
    """
    refused = {
        node: keep_float.get(str(node.name)) or _refuse(inserter, node) for node in inserter.graph if _quantizable(node)
    }
    selected = {node for node, why in refused.items() if not why}
    refused |= elementwise.deselect(inserter.graph, selected, inserter.recipe.only_faster)
    return selected, {str(node.name): why for node, why in refused.items() if why}


def _quantizable(node: ir.Node) -> bool:
    """Returns whether int8 kernels of the operator exist."""
    return node.domain == "" and node.op_type in (*layers.LAYERS, *elementwise.OPERATORS)


def _refuse(inserter: QdqInserter, node: ir.Node) -> str:
    """Returns why a node stays float32 in any context, or ""."""
    if inserter.recipe.keeps_float(str(node.name)):
        return "kept float by the recipe"
    if node.name in inserter.helpers:
        return "it scales channels before they are quantized"
    layer = node.op_type in layers.LAYERS
    if why := layers.refuse(node) if layer else elementwise.refuse(node):
        return why
    for index in elementwise.activation_inputs(node):
        x = node.inputs[index]
        if x is None or (x.name not in inserter.ranges and dequantized_qparams(x) is None):
            return f"no calibrated range for its input {x.name if x is not None else '?'}"
    if inserter.recipe.only_faster and layers.small_product(node, inserter.ranges):
        return "so small a product of activations is no faster in int8"
    if inserter.recipe.only_faster and elementwise.gates_rows(node):
        return "gates of single rows are no faster in int8"
    return ""


def quantize_dynamically(inserter: QdqInserter, selected: set[ir.Node], reasons: dict[str, str]) -> dict[str, str]:
    """Quantizes the layers that the recipe calls `dynamic`, with qparams computed at run time.

    Args:
        inserter: Inserter of the graph.
        selected: Int8 operators; dynamic layers are removed.
        reasons: Reason by name; those of layers that cannot be dynamic are added.

    Returns:
        Note by name of the dynamic layers.
    """
    notes = {}
    for node in list(inserter.graph):
        name = str(node.name)
        if not _quantizable(node) or not inserter.recipe.is_dynamic(name) or inserter.recipe.keeps_float(name):
            continue
        if why := layers.quantize_layer_dynamically(inserter, node):
            reasons.setdefault(name, why)
        else:
            selected.discard(node)
            notes[name] = RUN_TIME
    return notes


def insert_qdq(inserter: QdqInserter, selected: set[ir.Node]) -> dict[str, str]:
    """Makes operators int8: Q/DQ pairs at their inputs, quantized weights and biases.

    Args:
        inserter: Inserter of the graph.
        selected: Int8 operators.

    Returns:
        Empty note by name of each operator.
    """
    notes = {}
    for node in list(inserter.graph):
        if node in selected:
            (layers.quantize_layer if node.op_type in layers.LAYERS else elementwise.quantize_operator)(inserter, node)
            notes[str(node.name)] = ""
    return notes


def propagate_int8(model: ir.Model, recipe: QuantRecipe) -> dict[str, str]:
    """Moves QuantizeLinear before data movement until none moves.

    Args:
        model: QDQ model; it is changed.
        recipe: Quantization options.

    Returns:
        Reason by name of operators that move float32.
    """
    early = quantize_early.QuantizeEarly(recipe.quantize_tables, recipe.keeps_float, recipe.tie_tables)
    while early(model).modified:
        pass
    return early.refused


def quantize_outputs(inserter: QdqInserter, notes: dict[str, str], keep_float: Mapping[str, str]) -> None:
    """Quantizes float32 outputs of statically quantized operators.

    This runs last, because readers may have quantized an output already. What layers read that the table keeps in
    float32 stays float32, too: its quantization is the error that they are kept for.

    Args:
        inserter: Inserter of the graph.
        notes: Note by name of int8 operators.
        keep_float: See `select_operators`.
    """
    for node in list(inserter.graph):
        if notes.get(str(node.name)) != "" or _is_kept(node, keep_float):
            continue
        if _quantizable(node) and query.is_float(node.outputs[0]):
            inserter.quantize_output(node)


def _is_kept(node: ir.Node, keep_float: Mapping[str, str]) -> bool:
    """Returns whether only operators of `keep_float` read a result, or an elementwise operator that only they read."""
    readers = node.outputs[0].consumers()
    if len(readers) == 1 and query.is_op(readers[0], "Relu", "Clip"):
        readers = readers[0].outputs[0].consumers()
    return bool(readers) and all(str(reader.name) in keep_float for reader in readers)


def work_around_engines(inserter: QdqInserter) -> None:
    """Applies the engine quirks that need a finished QDQ graph; the others apply where pairs are inserted.

    Args:
        inserter: Inserter of the graph.
    """
    for node in list(inserter.graph):
        engine_quirks.dequantize_around_transpose(node, inserter.taken)
        quantize_early.dequantize_before_subgraph(node, inserter.taken)
        inserter.helpers |= engine_quirks.pad_all_axes(node, inserter.taken)
        inserter.helpers |= engine_quirks.cast_untyped_results(node, inserter.taken)
        if (squeeze := engine_quirks.keep_reduced_axes(node, inserter.taken)) is not None:
            inserter.helpers.add(str(squeeze.name))
    inserter.helpers |= engine_quirks.hide_sizes(inserter.graph, inserter.taken)


def correct(graph: ir.Graph, recipe: QuantRecipe, table: CalibrationTable, notes: dict[str, str]) -> dict[str, str]:
    """Applies GPTQ rounding and bias correction of the table.

    Corrections apply only to the recipe that they were computed for, observers aside, or one whose patterns match the
    same operators; for another recipe a warning is logged.

    Args:
        graph: Int8 graph; it is changed.
        recipe: Quantization options.
        table: Calibration table.
        notes: Note by name of int8 operators.

    Returns:
        Note by layer with a changed bias.
    """
    if not recipe.correct or not (table.bias or table.rounding):
        return {}
    names = {query.label(node) for node in graph if node.op_type not in ("QuantizeLinear", "DequantizeLinear")}
    if not recipe.same_but_observer(table.recipe, names):
        logger.warning(
            "the corrections of the table belong to another recipe and are ignored; recompute them with: zoo calibrate"
        )
        return {}
    weight_rounding.apply(graph, table.rounding)
    changed = bias.apply(graph, table.bias)
    return {name: notes.get(name) or f"bias corrected in {channels} channels" for name, channels in changed.items()}


def describe(inserter: QdqInserter, reasons: dict[str, str], notes: dict[str, str]) -> list[Operator]:
    """Lists the operators of the report, those of subgraphs last.

    Args:
        inserter: Inserter of the graph.
        reasons: Reason by name of operators that are not int8.
        notes: Note by name of int8 operators.

    Returns:
        The operators.
    """
    operators: list[Operator] = []
    for node in inserter.graph:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") and node.name not in inserter.helpers:
            operators.append(_describe(node, reasons, notes))
    return [*operators, *_in_subgraphs(inserter, reasons, notes)]


def _describe(node: ir.Node, reasons: dict[str, str], notes: dict[str, str]) -> Operator:
    name = str(node.name)
    dtypes = {value.dtype for value in (*node.inputs[:1], *node.outputs) if value is not None}
    if name in notes:
        return Operator(name, node.op_type, "int8", notes[name])
    if dtypes & {ir.DataType.UINT8, ir.DataType.INT8}:
        return Operator(name, node.op_type, "int8")
    if ir.DataType.FLOAT not in dtypes and None not in dtypes:  # None: an unknown type
        return Operator(name, node.op_type, "integer")
    if node.op_type in ("Relu", "Clip") and _fused(node, notes):
        return Operator(name, node.op_type, "int8", "fused by engines into the operator before it")
    if reasons.get(name) == layers.INT8_ALREADY and dequantized_qparams(node.inputs[0]) is not None:
        return Operator(name, node.op_type, "int8", layers.INT8_ALREADY)
    if name in reasons:
        return Operator(name, node.op_type, "float", reasons[name])
    x, reader = node.inputs[0], query.sole_user(node.outputs[0])
    in_qdq = dequantized_qparams(x) is not None and reader is not None and reader.op_type == "QuantizeLinear"
    if in_qdq and node.op_type == "Transpose":
        return Operator(name, node.op_type, "int8")
    why = "computed in float between int8 tensors" if in_qdq else f"{node.op_type} has no int8 form here"
    return Operator(name, node.op_type, "float", why)


def _in_subgraphs(inserter: QdqInserter, reasons: dict[str, str], notes: dict[str, str]) -> list[Operator]:
    """Operators in subgraphs (branches of an If, body of a Loop): only weights are quantized there."""
    operators = []
    for node, inner in weight_only.subgraph_nodes(inserter.graph):
        name = query.label(inner)
        if inner.name in inserter.helpers or query.is_op(inner, "Constant"):
            continue
        why = reasons.get(name) or f"inside a subgraph of {node.name}"
        precision, reason = ("int8", notes[name]) if name in notes else ("float", why)
        operators.append(Operator(name, inner.op_type, precision, reason))
    return operators


def _fused(node: ir.Node, notes: dict[str, str]) -> bool:
    """Returns whether engines fuse a node with an int8 operator before it and a QuantizeLinear after it."""
    x, reader = node.inputs[0], query.sole_user(node.outputs[0])
    layer = x.producer() if x is not None and query.sole_user(x) is node else None
    return layer is not None and str(layer.name) in notes and reader is not None and reader.op_type == "QuantizeLinear"
