"""Graph rewrite: numbers get a separate linear layer, with separate quantization scales."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite


class SplitNumbers(Rewrite):
    """[e; x] W + b = (e W_e + b) + x W_x, for numbers x next to embeddings e.

    An int8 input has one scale, and the range of numbers is ten times that of embeddings, which would leave e few
    levels. Scaling columns against rows (`EqualizeConcat`) only moves the error into the weights, which share a scale
    per output. Two layers have two scales each. The second layer has few rows and is cheap.

    Fires for every Gemm with a constant weight matrix that reads a Concat of other values and of the graph input
    `numbers` or some of its columns.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Splits every such layer.

        Args:
            model: Model to rewrite in place.

        Returns:
            Number of layers.
        """
        taken = query.used_names(model.graph)
        return sum(self._split(model.graph, node, taken) for node in list(model.graph) if node.op_type == "Gemm")

    def _split(self, main: ir.Graph, gemm: ir.Node, taken: set[str]) -> int:
        x = gemm.inputs[0]
        concat = query.producer(x, "Concat")
        if concat is None or concat.attributes.get_int("axis", 0) not in (1, -1):
            return 0
        parts = [source for source in concat.inputs if source is not None]
        numbers = [is_numbers(part) for part in parts]
        if not any(numbers) or all(numbers):
            return 0
        weight, widths = query.constant(gemm.inputs[1]), [query.dimensions(part) for part in parts]
        sizes = [width[1] for width in widths if width is not None and len(width) == 2 and width[1] is not None]
        plain = all(gemm.attributes.get_float(key, 1.0) == 1.0 for key in ("alpha", "beta"))
        if weight is None or len(sizes) < len(parts) or gemm.attributes.get_int("transA", 0) != 0 or not plain:
            self.refuse(gemm, "its weights, or the widths of what it reads, are not known")
            return 0
        turned = query.is_transposed(gemm)
        rows = np.split(weight.T if turned else weight, np.cumsum(sizes)[:-1])
        name, total = str(gemm.outputs[0].name), []
        for kind, suffix in ((False, "embeddings"), (True, "numbers")):
            own = [index for index, is_number in enumerate(numbers) if is_number is kind]
            w = np.concatenate([rows[index] for index in own])
            value = parts[own[0]]
            if len(own) > 1:
                joined = edit.node(
                    "Concat", [parts[index] for index in own], f"{name}.{suffix}.input", dtype=ir.DataType.FLOAT, axis=1
                )
                joined.outputs[0].shape = ir.Shape([value.shape[0] if value.shape else None, len(w)])
                main.insert_before(gemm, joined)
                value = joined.outputs[0]
            stored = edit.initializer(
                main, f"{name}.{suffix}.weight", np.ascontiguousarray(w.T if turned else w), taken
            )
            bias = list(gemm.inputs[2:]) if suffix == "embeddings" else []
            layer = edit.node(
                "Gemm",
                [value, stored, *bias],
                f"{name}.{suffix}",
                dtype=ir.DataType.FLOAT,
                taken=taken,
                transB=int(turned),
            )
            layer.outputs[0].shape = gemm.outputs[0].shape
            main.insert_before(gemm, layer)
            total.append(layer.outputs[0])
        summed = edit.node("Add", list(total), name, dtype=ir.DataType.FLOAT)
        summed.outputs[0].shape = gemm.outputs[0].shape
        ir.convenience.replace_nodes_and_values(main, gemm, [gemm], [summed], gemm.outputs, summed.outputs)
        return 1


def is_numbers(value: ir.Value) -> bool:
    """Whether a value is the graph input `numbers`, or columns of it.

    Args:
        value: Value of the graph.

    Returns:
        Whether it is.
    """
    gather = query.producer(value, "Gather")
    if gather is not None and gather.inputs[0] is not None:
        value = gather.inputs[0]
    return value.is_graph_input() and value.name == "numbers" and value.dtype == ir.DataType.FLOAT
