"""MatMul + bias -> Gemm: the fully connected pattern that engines run as one operator."""

from __future__ import annotations

import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite


class FuseLinear(Rewrite):
    """Fuses MatMul and bias into Gemm: Add(MatMul(x, W), b) = Gemm(x, W, b).

    For a 2-D x, a constant 2-D W and a constant b of one row. A ReLU after it does not change, because engines fuse it
    by themselves (float or int8). Does not fire if the product has another reader, x is not known to be 2-D, or b
    varies along the batch.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Fuses every MatMul that an Add of a constant row follows."""
        count = 0
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
