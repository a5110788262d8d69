"""Folds a product's constant factor, such as the 1 / sqrt(d) of attention, into the layer that computes one side."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

MOVES = ("Reshape", "Transpose")


class FoldScale(Rewrite):
    """Folds the scale of a product, as attention's 1 / sqrt(d), into a linear layer: c (x W + b) K = (x (c W) + c b) K.

    For a scalar c, a Mul or a Div after the product; Reshape and Transpose may stand in between. Exact if c is a power
    of two, else up to the rounding of the weights. For a first factor that a Gemm or a MatMul with constant weights
    computes, with or without an Add of a constant row. Does not fire if a value in between has another reader.

    Args:
        factors: Also fold the scale of a single factor, as torch exports scaled_dot_product_attention: sqrt(c) Q and
            sqrt(c) K.
    """

    def __init__(self, factors: bool = False) -> None:
        super().__init__()
        self.factors = factors

    def rewrite(self, model: ir.Model) -> int:
        """Folds every Mul and Div of a product by a scalar."""
        return sum(self._fold(model.graph, node) for node in list(model.graph) if query.is_op(node, "Mul", "Div"))

    def _fold(self, main: ir.Graph, scale: ir.Node) -> int:
        product, *others = (
            scale.inputs
            if scale.op_type == "Div"
            else sorted(scale.inputs, key=lambda operand: query.constant(operand) is not None)
        )
        factor = query.scalar(others[0])
        if factor is None or not factor or product is None or query.rank(others[0]):
            return 0
        source = self._scaled(product, scale)
        if source is None:
            return 0
        parameters = _layer(source)
        if parameters is None:
            self.refuse(scale, "its input is not the result of a linear layer with one reader")
            return 0
        times = np.float64(factor if scale.op_type == "Mul" else 1 / factor)
        for node, index in parameters:
            value = node.inputs[index]
            array = query.constant(value)
            assert value is not None and array is not None
            node.replace_input_with(
                index, edit.initializer(main, f"{value.name}.scaled", (array * times).astype(array.dtype))
            )
        edit.bypass(scale, product)
        return 1

    def _scaled(self, product: ir.Value, scale: ir.Node) -> ir.Value | None:
        """Returns the value to scale instead: the first factor of a product of activations, or a single factor."""
        if query.sole_user(product) is not scale:
            return None
        matmul = query.producer(product, "MatMul")
        if matmul is not None and query.constant(matmul.inputs[1]) is None:
            return matmul.inputs[0]
        reader = query.sole_user(scale.outputs[0])
        return product if self.factors and query.is_op(reader, "MatMul") else None


def _layer(value: ir.Value | None) -> list[tuple[ir.Node, int]] | None:
    """Returns the layer (node, input) in whose weights and bias `value` is linear, or None."""
    parameters: list[tuple[ir.Node, int]] = []
    while value is not None and (node := value.producer()) is not None and query.sole_user(value) is not None:
        constants = [index for index, operand in enumerate(node.inputs) if query.constant(operand) is not None]
        if query.is_op(node, *MOVES):
            value = node.inputs[0]
        elif query.is_op(node, "Add") and len(constants) == 1 and not parameters:
            parameters, value = [(node, constants[0])], node.inputs[1 - constants[0]]
        elif query.is_op(node, "MatMul") and constants == [1]:
            return [*parameters, (node, 1)]
        elif query.is_op(node, "Gemm") and constants == list(range(1, len(node.inputs))):
            return [*parameters, *((node, index) for index in constants)]
        else:
            return None
    return None
