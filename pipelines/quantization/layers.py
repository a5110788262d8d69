"""Gemm, MatMul and Conv in int8: why one cannot be, and how one is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.quantization.qdq import Pairs
from pipelines.quantization.scales import given, weight_parameters

LAYERS = ("Conv", "Gemm", "MatMul")


def refuse(node: ir.Node) -> str:
    """Why a layer cannot be int8, "" where it can: its form, not its ranges."""
    return {"Gemm": _refuse_gemm, "MatMul": _refuse_matmul, "Conv": _refuse_conv}[node.op_type](node)


def _refuse_gemm(node: ir.Node) -> str:
    if node.attributes.get_int("transA", 0):
        return "its input is transposed (transA)"
    if any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta")):
        return "alpha or beta is not 1"
    weight = query.constant(node.inputs[1])
    if weight is None:
        return "its weights are not constant"
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = query.constant(node.inputs[2])
        columns = weight.shape[0 if node.attributes.get_int("transB", 0) else 1]
        if bias is None or bias.shape not in ((columns,), (1, columns)):
            return "its bias is not a constant row"
    return ""


def _refuse_matmul(node: ir.Node) -> str:
    weight = query.constant(node.inputs[1])
    if weight is not None and weight.ndim < 2:
        return "its weights are a vector"
    if query.constant(node.inputs[0]) is not None:
        return "its first factor is constant"
    return ""


def _refuse_conv(node: ir.Node) -> str:
    constant = query.constant(node.inputs[1]) is not None
    if not constant or (len(node.inputs) > 2 and node.inputs[2] is not None and query.constant(node.inputs[2]) is None):
        return "its weights or bias are not constant"
    return ""


def activations(node: ir.Node) -> list[int]:
    """Which inputs of a layer are activations."""
    return [0, 1] if node.op_type == "MatMul" and query.constant(node.inputs[1]) is None else [0]


def convert(pairs: Pairs, node: ir.Node) -> None:
    """Make a layer int8 that `refuse` has nothing against."""
    _stride_first(pairs, node)
    scale = pairs.activation(node)
    if len(activations(node)) > 1:
        pairs.second(node)
        return
    weight = query.constant(node.inputs[1])
    assert weight is not None
    if node.op_type == "MatMul":
        after = query.sole_user(node.outputs[0])
        if weight.ndim == 2 and query.rank(node.inputs[0]) == 2 and after is not None and after.op_type == "Add":
            node.op_type = "Gemm"  # the same; onnxruntime would make a float Gemm of MatMul and Add
        pairs.weight(node, 1 if weight.ndim == 2 else None, scale)
    else:
        pairs.weight(node, 0 if node.op_type == "Conv" or node.attributes.get_int("transB", 0) != 0 else 1, scale)


def _stride_first(pairs: Pairs, node: ir.Node) -> None:
    """Leave out what a 1x1 Conv strides over by a MaxPool of 1x1 before it: on bytes, once for all such readers.

    OpenVINO does the same by itself, but between the bytes and their scale, and computes those convolutions in float.
    """
    x, weight = node.inputs[:2]
    strides = tuple(node.attributes.get_ints("strides", []))
    if node.op_type != "Conv" or x is None or weight is None or weight.shape is None or given(x) is not None:
        return
    padded = any(node.attributes.get_ints("pads", [])) or node.attributes.get_string("auto_pad", "NOTSET") not in (
        "NOTSET",
        "VALID",
    )
    if len(strides) != 2 or max(strides) == 1 or padded or weight.shape[2:] != (1, 1):
        return
    key = (str(x.name), strides)
    if key not in pairs.strided:
        pool = edit.node(
            "MaxPool",
            [x],
            f"{x.name}.strided",
            dtype=ir.DataType.FLOAT,
            taken=pairs.taken,
            kernel_shape=[1, 1],
            strides=list(strides),
        )
        if x.shape is not None:
            pool.outputs[0].shape = ir.Shape(
                [
                    *x.shape[:2],
                    *(-(-d // s) if isinstance(d, int) else None for d, s in zip(x.shape[2:], strides, strict=True)),
                ]
            )
        pairs.main.insert_before(node, pool)
        pairs.strided[key] = pool.outputs[0]
        pairs.ranges[str(pool.outputs[0].name)] = pairs.ranges[str(x.name)]
    node.replace_input_with(0, pairs.strided[key])
    node.attributes["strides"] = ir.AttrInt64s("strides", [1, 1])


def dynamic(pairs: Pairs, node: ir.Node) -> str:
    """Make a Gemm or MatMul with a constant matrix int8 with its input's range taken at run time; says why it cannot
    be.

    x_q, s_x, z_x = DynamicQuantizeLinear(x) over the whole batch, y = float(MatMulInteger(x_q, W_q, z_x)) s_x s_w + b,
    with int8 weights per column: onnxruntime runs all of it as one operator.
    """
    weight = query.constant(node.inputs[1])
    if node.op_type == "Conv" or weight is None or weight.ndim != 2:
        return "only a product with a constant matrix is quantized at run time"
    main, taken, x, y = pairs.main, pairs.taken, node.inputs[0], node.outputs[0]
    assert x is not None
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0:
        weight = np.ascontiguousarray(weight.T)
    made: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value | None], stem: str, dtype: ir.DataType, **attributes: int) -> ir.Value:
        made.append(edit.node(op, inputs, stem, dtype=dtype, taken=taken, **attributes))
        return made[-1].outputs[0]

    if x.name not in pairs.run_time:
        step = ir.node("DynamicQuantizeLinear", [x], name=f"{x.name}.dynamic", num_outputs=3)
        for value, kind, dtype in zip(
            step.outputs,
            ("bytes", "scale", "zero"),
            (ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.UINT8),
            strict=True,
        ):
            value.name, value.type = f"{step.name}.{kind}", ir.TensorType(dtype)
        pairs.run_time[str(x.name)] = step
        made.append(step)
    q, s, z = pairs.run_time[str(x.name)].outputs
    scale, array = weight_parameters(weight, 1, pairs.bits, clip=pairs.clip)
    stem = str(y.name)
    w = edit.initializer(main, f"{stem}/{node.inputs[1].name}.quantized", array, taken)  # type: ignore[union-attr]
    t = edit.initializer(main, f"{stem}/{node.inputs[1].name}.scale", scale, taken)  # type: ignore[union-attr]
    product = add("MatMulInteger", [q, w, z], f"{stem}.integer", ir.DataType.INT32)
    made[-1].name = node.name
    value = add("Cast", [product], f"{stem}.float", ir.DataType.FLOAT, to=int(ir.DataType.FLOAT))
    value = add(
        "Mul", [value, add("Mul", [s, t], f"{stem}.step", ir.DataType.FLOAT)], f"{stem}.scaled", ir.DataType.FLOAT
    )
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        value = add("Add", [value, node.inputs[2]], f"{stem}.biased", ir.DataType.FLOAT)
    value.shape = y.shape
    pairs.helpers |= {str(each.name) for each in made if each.op_type != "MatMulInteger"}
    ir.convenience.replace_nodes_and_values(main, node, [node], made, [y], [value])
    return ""
