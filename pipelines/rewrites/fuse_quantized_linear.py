"""MatMul of int8 tensors before an Add -> Gemm with an int32 bias: the form that engines run as one int8 operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite


class FuseQuantizedLinear(Rewrite):
    """Fuse MatMul and bias of a QDQ graph into Gemm: Add(MatMul(DQ(x), DQ(W)), b) = Gemm(DQ(x), DQ(W), DQ(b_q)).

    b_q = round(b / (s_x s_w)), int32, exact to half of s_x s_w. Where b is computed, such as a residual:
    Add(Gemm(DQ(x), DQ(W)), b), exact. For a graph that is int8 already, of which a part became 2-D after it was
    quantized: onnxruntime makes a float Gemm of MatMul and Add, and dequantizes W every time. For a 2-D x with one
    scale and a constant int8 2-D W with one scale or one per column. Does not fire where the product has another
    reader, or where b is constant and not one row, or b_q does not fit 32 bits.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Fuse every MatMul of int8 tensors that an Add follows."""
        count, taken = 0, query.used_names(model.graph)
        for matmul in [each for each in model.graph if query.is_op(each, "MatMul")]:
            x, weight = matmul.inputs
            add, x_scale, dequantized = query.sole_user(matmul.outputs[0]), _scale(x), query.dequantized(weight)
            if x is None or x_scale is None or dequantized is None or not query.is_op(add, "Add") or add is None:
                continue
            quantized, scale, _ = dequantized
            bias = next(each for each in add.inputs if each is not matmul.outputs[0])
            b, columns, result = query.constant(bias), quantized.shape[-1], add.outputs[0]
            if (
                query.rank(x) != 2
                or quantized.ndim != 2
                or scale.size not in (1, columns)
                or (scale.size > 1 and _axis(weight) != 1)
            ):
                self.refuse(matmul, "it is not 2-D, or its steps are not one a column")
                continue
            if b is None:
                product = matmul.outputs[0]
                gemm = edit.node("Gemm", [x, weight], str(product.name), dtype=product.dtype)
                edit.substitute([matmul], gemm)
                count += 1
                continue
            if b.shape not in ((columns,), (1, columns)):
                self.refuse(matmul, "what is added is not a constant row of one value per output")
                continue
            bias_scale = np.broadcast_to(x_scale * scale.ravel(), (columns,)).astype(np.float32)
            integers = np.rint(b.ravel() / bias_scale.astype(np.float64))
            if np.abs(integers).max(initial=0) > np.iinfo(np.int32).max:
                self.refuse(matmul, "its bias does not fit 32 bits in steps of the product")
                continue
            q, s = (
                edit.initializer(model.graph, f"{result.name}.bias.{kind}", array, taken)
                for kind, array in (("quantized", integers.astype(np.int32)), ("scale", bias_scale))
            )
            dq = edit.node(
                "DequantizeLinear", [q, s], f"{result.name}.bias", dtype=ir.DataType.FLOAT, taken=taken, axis=0
            )
            gemm = edit.node("Gemm", [x, weight, dq.outputs[0]], str(result.name), dtype=result.dtype)
            gemm.outputs[0].shape = result.shape
            ir.convenience.replace_nodes_and_values(model.graph, add, [matmul, add], [dq, gemm], [result], gemm.outputs)
            count += 1
        return count


def _scale(value: ir.Value | None) -> np.float32 | None:
    """The scale of a dequantized activation, per tensor; None where there is none."""
    producer = value.producer() if value is not None else None
    scale = (
        query.constant(producer.inputs[1]) if producer is not None and producer.op_type == "DequantizeLinear" else None
    )
    return None if scale is None or scale.size != 1 else np.float32(scale.item())


def _axis(weight: ir.Value | None) -> int:
    """The axis of a 2-D weight that is quantized per channel; -1 where it is not dequantized."""
    producer = weight.producer() if weight is not None else None
    return producer.attributes.get_int("axis", 1) % 2 if producer is not None else -1
