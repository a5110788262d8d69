"""MatMul + bias -> Gemm: the fully connected pattern that engines run as one operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite


class FuseLinear(Rewrite):
    """Fuses MatMul and bias into Gemm: Add(MatMul(x, W), b) = Gemm(x, W, b).

    For a 2-D x, a constant 2-D W and a constant b of one row. A ReLU after it does not change, because engines fuse it
    by themselves (float or int8). Does not fire if the product has another reader, x is not known to be 2-D, or b
    varies along the batch.

    The factors of a Gemm move into its constants: alpha x W + beta b = x (alpha W) + (beta b), for a b of one row.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Fuses every MatMul that an Add of a constant row follows, and folds the factors of every Gemm."""
        count = sum(self._fold_factors(model.graph, node) for node in model.graph if node.op_type == "Gemm")
        for matmul in [node for node in model.graph if node.op_type == "MatMul"]:
            x, weight = matmul.inputs
            w = query.constant(weight)
            if w is None or w.ndim != 2 or w.dtype.kind != "f":  # a Gemm of integers has no kernel
                continue
            add = query.sole_user(matmul.outputs[0])
            if add is None or add.op_type != "Add":
                continue
            if query.rank(x) != 2:
                self.refuse(matmul, f"input is not known to be 2-D (rank {query.rank(x)})")
                continue
            bias = next(value for value in add.inputs if value is not matmul.outputs[0])
            b = query.constant(bias)
            columns = w.shape[1]
            if b is None or b.shape not in ((columns,), (1, columns)):
                self.refuse(matmul, "the addend is not a constant with one value per output")
                continue
            result = add.outputs[0]
            if b.ndim != 1:
                bias = edit.initializer(model.graph, f"{result.name}.bias", b.reshape(columns))
            gemm = edit.node("Gemm", [x, weight, bias], str(result.name), dtype=result.dtype)
            gemm.outputs[0].shape = result.shape
            ir.convenience.replace_nodes_and_values(model.graph, add, [matmul, add], [gemm], [result], gemm.outputs)
            count += 1
        return count

    @staticmethod
    def _fold_factors(graph: ir.Graph, gemm: ir.Node) -> int:
        """Folds alpha and beta into the constants of a Gemm; returns whether it did."""
        alpha, beta = (gemm.attributes.get_float(key, 1.0) for key in ("alpha", "beta"))
        arrays = [query.constant(value) for value in gemm.inputs[1:]]
        columns = gemm.attributes.get_int("transB", 0) - 1
        if (alpha, beta) == (1, 1) or any(array is None or array.dtype.kind != "f" for array in arrays):
            return 0
        weight, *biases = (array for array in arrays if array is not None)
        if any(size != 1 for bias in biases for size in bias.shape[:-1]):
            return 0
        changed = [(1, "weight", weight * weight.dtype.type(alpha))]
        for bias in biases:
            row = np.broadcast_to(bias.ravel(), weight.shape[columns]) * bias.dtype.type(beta)
            changed.append((2, "bias", np.ascontiguousarray(row)))
        for position, kind, array in changed:
            made = edit.initializer(graph, f"{gemm.outputs[0].name}.{kind}", array)
            gemm.replace_input_with(position, made)
        for key in ("alpha", "beta"):
            gemm.attributes.pop(key, None)
        return 1
