"""`ParallelEmbedding` and `ClickProgram` nodes of an ONNX graph, written and read, and the int8 linear layers that
follow the former.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query
from pipelines.kernels.recommenders.operators import DOMAIN, EmbeddingLayer, LinearLayer
from pipelines.kernels.recommenders.program import STEPS, ClickProgram

VERSION = 1  # of the domain, as the opset imports name it
EMBEDDING = EmbeddingLayer.name
PROGRAM = ClickProgram.name
# the inputs after ids and numbers: fields of `EmbeddingLayer`, and how the initializers are called
ARRAYS = {
    **{name: name for name in ("table", "columns", "offsets", "rows", "weight", "scale", "bias")},
    "number_scale": "step",
    "wide": "wide",
}


def parallel_embedding(
    main: ir.Graph, layer: EmbeddingLayer, ids: ir.Value, numbers: ir.Value | None, name: str, taken: set[str]
) -> ir.Node:
    """A `ParallelEmbedding` node, not yet in `main`: its arrays become initializers of `main`, its domain one of the
    graph's imports.

    Inputs: ids (integer [n, columns]), numbers (float32 [n, M], none where M is 0), then `ARRAYS`. Attribute: shift.
    Outputs: hidden uint8 [n, H] and, if the layer has a wide part, wide float32 [n, 1]; they are called `name`.hidden
    and `name`.sum.
    """
    while {name, f"{name}.hidden", f"{name}.sum"} & taken:
        name += "_"
    arrays: list[ir.Value | None] = []
    for field, suffix in ARRAYS.items():
        array = getattr(layer, field)
        arrays.append(None if array is None else edit.initializer(main, f"{name}.{suffix}", array, taken))
    node = ir.node(
        EMBEDDING,
        [ids, numbers, *arrays],
        attributes={"shift": layer.shift},
        domain=DOMAIN,
        name=name,
        num_outputs=1 if layer.wide is None else 2,
    )
    batch = ids.shape[0] if ids.shape is not None else None
    outputs = (("hidden", ir.DataType.UINT8, layer.width), ("sum", ir.DataType.FLOAT, 1))
    for value, (kind, dtype, width) in zip(node.outputs, outputs, strict=False):
        value.name, value.type, value.shape = f"{name}.{kind}", ir.TensorType(dtype), ir.Shape([batch, width])
    taken |= {name, *(str(value.name) for value in node.outputs)}
    main.opset_imports[DOMAIN] = VERSION
    return node


def embedding_layer(node: ir.Node) -> EmbeddingLayer:
    """The layer that a `ParallelEmbedding` node holds. Raises RequestError for another node, or one that is no valid
    layer.
    """
    if (node.domain, node.op_type) != (DOMAIN, EMBEDDING):
        raise RequestError(f"the operator {node.name or '?'} is {node.op_type}; wanted {EMBEDDING} of {DOMAIN}")
    constants = zip(ARRAYS, map(query.constant, node.inputs[2:]), strict=False)
    arrays = {name: np.ascontiguousarray(array) for name, array in constants if array is not None}
    if missing := [name for name in ARRAYS if name not in arrays and name != "wide"]:
        raise RequestError(
            f"the operator {node.name or '?'} has no constant {ARRAYS[missing[0]]}; build the model again"
        )
    return EmbeddingLayer(shift=node.attributes.get_int("shift", -1), **arrays)


def dense_layers(first: ir.Node) -> tuple[list[LinearLayer], bool] | None:
    """The int8 layers that follow a `ParallelEmbedding` node down to the graph's only output, and whether a sigmoid
    ends them.

    Follows DequantizeLinear -> Gemm or MatMul with int8 weights -> (Relu) -> QuantizeLinear, again and again; the last
    layer gives one float, to which the operator's wide sum, if it has one, is added. None for any other graph, which
    then is a stock engine's.
    """
    value, layers = first.outputs[0], []
    while (dequantize := _only(value, "DequantizeLinear")) is not None:
        x_scale, x_zero = map(query.constant, dequantize.inputs[1:3])
        dense = _only(dequantize.outputs[0], "Gemm") or _only(dequantize.outputs[0], "MatMul")
        weight = None if dense is None else _symmetric(dense.inputs[1])
        if (
            dense is None
            or weight is None
            or x_scale is None
            or x_zero is None
            or x_scale.size != 1
            or dense.inputs[0] is not dequantize.outputs[0]
        ):
            return None
        if (
            any(dense.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
            or dense.attributes.get_int("transA", 0) != 0
        ):
            return None
        w, w_scale = weight
        if dense.attributes.get_int("transB", 0) != 0:
            w = w.T
        bias = (
            _symmetric(dense.inputs[2])
            if len(dense.inputs) > 2
            else (np.zeros(w.shape[1], np.int32), np.float64(x_scale) * w_scale)
        )
        if w.dtype != np.int8 or w_scale.size not in (1, w.shape[1]) or bias is None or bias[0].size != w.shape[1]:
            return None
        if not np.allclose(bias[1], np.float64(x_scale) * w_scale, rtol=1e-5, atol=0):  # not the scale of the sums
            return None
        b = bias[0].ravel().astype(np.int64) - int(x_zero) * w.astype(np.int64).sum(axis=0)
        if np.abs(b).max() >= 2**31:
            return None
        scale = np.broadcast_to(np.float64(x_scale) * w_scale.astype(np.float64), w.shape[1])
        value = dense.outputs[0]
        relu = _only(value, "Relu")
        last = _only(relu.outputs[0] if relu is not None else value, "QuantizeLinear")
        y_scale, y_zero = (None, None) if last is None else (query.constant(each) for each in last.inputs[1:3])
        try:
            if last is None:
                layers.append(LinearLayer(w, b.astype(np.int32), scale.astype(np.float32)))
                break
            if y_scale is None or y_zero is None or y_scale.size != 1 or y_zero.dtype != np.uint8:
                return None
            zero = int(y_zero.item())
            scaled = (scale / np.float64(y_scale.item())).astype(np.float32)
            layers.append(LinearLayer(w, b.astype(np.int32), scaled, zero, zero if relu is not None else 0))
        except RequestError:  # beyond 32 bits
            return None
        value = last.outputs[0]
    if not layers or layers[-1].zero_point is not None or layers[-1].weight.shape[1] != 1:
        return None
    if len(first.outputs) > 1:
        add = _only(value, "Add")
        if add is None or _only(first.outputs[1], "Add") is not add:
            return None
        value = add.outputs[0]
    sigmoid = _only(value, "Sigmoid")
    if sigmoid is not None:
        value = sigmoid.outputs[0]
    main = first.graph
    return (layers, sigmoid is not None) if isinstance(main, ir.Graph) and list(main.outputs) == [value] else None


def program_node(
    main: ir.Graph,
    program: ClickProgram,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[str],
    name: str,
    taken: set[str],
) -> ir.Node:
    """A `ClickProgram` node, not yet in `main`, whose arrays become initializers of `main`.

    Inputs: ids, numbers and scales (none where the program has none), then the arrays. Attribute `program`: the rest as
    JSON, in which {"array": i} is input 3 + i. outputs: their names.
    """
    arrays: list[NDArray[Any]] = []
    written = {
        "numbers": program.numbers,
        "means": program.means,
        "slots": program.slots,
        "outputs": program.outputs,
        "rows": _written(program.rows, arrays),
        "steps": [{"step": type(each).__name__} | _written(each, arrays) for each in program.steps],
    }
    constants = [edit.initializer(main, f"{name}.{i}", array, taken) for i, array in enumerate(arrays)]
    text = json.dumps(written, separators=(",", ":"))
    node = ir.node(
        PROGRAM,
        [*inputs, *constants],
        attributes={"program": text},
        domain=DOMAIN,
        name=edit.unique(name, taken),
        num_outputs=len(outputs),
    )
    batch = inputs[0].shape[0] if inputs[0] is not None and inputs[0].shape is not None else None
    for value, output, slot in zip(node.outputs, outputs, program.outputs, strict=True):
        value.name, value.type = output, ir.TensorType(ir.DataType.FLOAT)
        value.shape = ir.Shape([batch, program.slots[slot][1]])
    main.opset_imports[DOMAIN] = VERSION
    return node


def click_program(node: ir.Node) -> ClickProgram:
    """The program that a `ClickProgram` node holds. Raises RequestError for another node, or one that is no valid
    program.
    """
    if (node.domain, node.op_type) != (DOMAIN, PROGRAM):
        raise RequestError(f"the operator {node.name or '?'} is {node.op_type}; wanted {PROGRAM} of {DOMAIN}")
    try:
        arrays = [query.constant(each) for each in node.inputs[3:]]
        if any(each is None for each in arrays):
            raise RequestError(
                f"the operator {node.name or '?'} has inputs that are no constants; build the model again"
            )
        found = json.loads(node.attributes["program"].as_string())
        steps = [STEPS[each.pop("step")](**_read(each, arrays)) for each in found.pop("steps")]
        return ClickProgram(steps=tuple(steps), **_read(found, arrays))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RequestError(
            f"the operator {node.name or '?'} holds no program ({error}); build the model again"
        ) from error


def _written(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """`value` as JSON, its arrays moved to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"array": len(arrays) - 1}
    if type(value) in (*STEPS.values(), LinearLayer):
        return {each.name: _written(getattr(value, each.name), arrays) for each in fields(value)}
    return value


def _read(value: dict[str, Any], arrays: Sequence[NDArray[Any] | None]) -> dict[str, Any]:
    """`_written` undone, for the fields of one dataclass."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        if isinstance(each, dict):
            found[key] = arrays[each["array"]] if "array" in each else LinearLayer(**_read(each, arrays))
        else:
            found[key] = tuple(tuple(i) if isinstance(i, list) else i for i in each) if isinstance(each, list) else each
    return found


def _only(value: ir.Value, kind: str) -> ir.Node | None:
    """The one reader of `value`, where it is of this type."""
    user = query.sole_user(value)
    return user if user is not None and user.op_type == kind else None


def _symmetric(value: ir.Value | None) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """(integers, scale) of a constant behind a DequantizeLinear with zero point 0."""
    found = query.dequantized(value)
    return None if found is None or (found[2] is not None and found[2].any()) else found[:2]
