"""Networks that hold several in the branches of an If, such as one for each sample rate.

Ranges inside an If are not observed, so layers there compute in float32 (`weight_only`). Where all samples take one
branch, the model of this branch is quantized as any other, and chosen by the same condition afterwards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir

from pipelines.core.batches import Batch
from pipelines.graph import edit, query, reference_session
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.qdq import layers, weight_only
from pipelines.quantization.qdq.insertion import QdqInserter
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import file_passes

logger = logging.getLogger(__name__)
BRANCHES = ("else_branch", "then_branch")


@dataclass(frozen=True)
class TakenBranch:
    """A model with the branch of an If that all samples take in place of the If.

    Attributes:
        model: This model after the rewrites.
        other: The model with the other branch.
        condition: The model that computes the condition.
        taken: Value of the condition.
    """

    model: ir.Model
    other: ir.Model
    condition: ir.Model
    taken: bool

    def restored(self, int8: ir.Model, recipe: QuantRecipe, table: CalibrationTable) -> ir.Model:
        """Returns the whole model with a quantized branch; layers of the other one get int8 weights.

        Args:
            int8: Quantized `model`; it is not changed.
            recipe: Quantization options.
            table: Calibration table of `model`.
        """
        whole = ir.to_proto(_renamed(self.condition, ".condition", inner=True))
        branches = {self.taken: int8, not self.taken: self.other}
        node = onnx.helper.make_node("If", [whole.graph.output[0].name], [str(y.name) for y in int8.graph.outputs])
        for value, key in enumerate(BRANCHES):
            proto = ir.to_proto(_renamed(branches[bool(value)], f".{key}")).graph
            del proto.input[:]
            node.attribute.append(onnx.helper.make_attribute(key, proto))
        ends = ir.to_proto(self.other)
        del whole.graph.input[:], whole.graph.output[:], whole.opset_import[:]
        whole.graph.node.append(node)
        whole.graph.input.extend(ends.graph.input)
        whole.graph.output.extend(ends.graph.output)
        whole.opset_import.extend(ir.to_proto(int8).opset_import)
        result = ir.from_proto(whole)
        kept = [re.escape(query.label(node)) for node in ir.traversal.RecursiveGraphIterator(int8.graph)]
        recipe = replace(recipe, keep_float=(*recipe.keep_float, *kept))
        weight_only.quantize_weights(QdqInserter(result.graph, recipe, table))
        for operator in ir.traversal.RecursiveGraphIterator(result.graph):
            operator.metadata_props.clear()
        return result


def taken_branch(model: ir.Model, samples: Iterable[Batch]) -> TakenBranch | None:
    """Returns the model of the branch that all samples take of an If over layers.

    Args:
        model: Float model after the rewrites; it is not changed.
        samples: Batches.

    Returns:
        The model; None if there is no such If, layers are outside of it too, or its condition varies or is an input.
    """
    outside = any(map(_is_layer, model.graph))
    for outer in dict.fromkeys(outer for outer, inner in weight_only.subgraph_nodes(model.graph) if _is_layer(inner)):
        condition = outer.inputs[0] if query.is_op(outer, "If") else None
        if condition is None or condition.producer() is None or outside:
            continue
        part = edit.extract(model, [str(value.name) for value in model.graph.inputs], [str(condition.name)])
        session = reference_session.session(part, "the choice of its branch needs")
        names = [port.name for port in session.get_inputs()]
        values = {
            bool(value)
            for batch in samples
            for value in reference_session.run(session, {name: batch[name] for name in names})[0].ravel()
        }
        if len(values) == 1:
            position, taken = list(model.graph).index(outer), values.pop()
            logger.warning(
                "no sample takes the %s of %s: its layers compute in float32", BRANCHES[not taken], query.label(outer)
            )
            chosen, other = (_with_branch(model, position, value) for value in (taken, not taken))
            return TakenBranch(chosen, other, part, taken)
    return None


def _is_layer(node: ir.Node) -> bool:
    """Whether an operator multiplies by a constant."""
    return query.is_op(node, *layers.LAYERS) and query.constant(node.inputs[1]) is not None


def _with_branch(model: ir.Model, position: int, taken: bool) -> ir.Model:
    """Returns a model with a branch of the If at a position in its place."""
    copy = model.clone()
    constant = edit.initializer(copy.graph, "taken", np.array(taken))
    copy.graph[position].replace_input_with(0, constant)
    rewrite(copy, file_passes())
    return copy


def _renamed(model: ir.Model, end: str, inner: bool = False) -> ir.Model:
    """Returns a copy with `end` appended to the names of its results, or of all values but its inputs (`inner`)."""
    copy = model.clone()
    for value in _inner(copy.graph) if inner else copy.graph.outputs:
        value.name = f"{value.name}{end}"
    return copy


def _inner(graph: ir.Graph) -> list[ir.Value]:
    """Returns the initializers of a graph and the results of its operators."""
    return [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
