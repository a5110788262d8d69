"""ONNX forms of the layers of sequences (`zoo.recommenders.models.sequences.layers`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from zoo.recommenders.export.sequence_blocks import LARGE, encode, linear, target_transformer

if TYPE_CHECKING:
    from zoo.recommenders.export.fx_export import RecommenderWriter

PARTS = (
    *("FieldLookup", "SequenceLookup", "SequenceMask", "Dice", "PReLU", "TargetAttention"),
    *("SequenceEncoder", "NewestState", "TargetTransformer"),
)


def part(writer: RecommenderWriter, inputs: list[ir.Value], path: str, module: Any) -> ir.Value:
    """Appends a module.

    Args:
        writer: Writer of the graph.
        inputs: Inputs of the module.
        path: Path of the module in the network, the prefix of its names.
        module: A module of one of the types `PARTS`.

    Returns:
        Its result.
    """
    match type(module).__name__:
        case "FieldLookup" | "SequenceLookup":
            return writer.rows(module.embeddings, writer.paths[id(module.embeddings)], module.field)
        case "SequenceMask":
            return _mask(writer, path, module)
        case "Dice" | "PReLU":
            return _activation(writer, inputs[0], path, module)
        case "SequenceEncoder":
            return encode(writer, inputs, path, module)
        case "TargetTransformer":
            return target_transformer(writer, inputs, path, module)
        case "NewestState":
            return writer.add("Squeeze", [inputs[0], writer.weight("axis1", np.array([1], np.int64))], path)
    return _target_attention(writer, inputs, path, module)


def _mask(writer: RecommenderWriter, path: str, module: Any) -> ir.Value:
    padding = writer.weight(f"{path}.padding", np.array(module.field.last, np.int32))
    empty = writer.add("Equal", [writer.ids(module.field), padding], f"{path}.empty", dtype=ir.DataType.BOOL)
    full = writer.add("Not", [empty], f"{path}.full", dtype=ir.DataType.BOOL)
    return writer.add("Cast", [full], path, to=ir.DataType.FLOAT)


def _activation(writer: RecommenderWriter, x: ir.Value, path: str, module: Any) -> ir.Value:
    """Dice: x (slope + (1 - slope) sigmoid(x a + b)); PReLU: x, times slope below 0."""
    slope = module.slope.detach().numpy()
    if type(module).__name__ == "PReLU":
        return writer.add("PRelu", [x, writer.weight(f"{path}.slope", slope)], path)
    deviation = np.sqrt(module.variance.numpy() + module.epsilon)
    scale, shift = 1 / deviation, -module.mean.numpy() / deviation
    affine = writer.add("Mul", [x, writer.weight(f"{path}.scale", scale)], f"{path}.scaled")
    affine = writer.add("Add", [affine, writer.weight(f"{path}.shift", shift)], f"{path}.standard")
    share = writer.add("Sigmoid", [affine], f"{path}.share")
    rise = writer.add("Mul", [share, writer.weight(f"{path}.rise", 1 - slope)], f"{path}.risen")
    gate = writer.add("Add", [rise, writer.weight(f"{path}.slope", slope)], f"{path}.gate")
    return writer.add("Mul", [x, gate], path)


def _target_attention(writer: RecommenderWriter, inputs: list[ir.Value], path: str, module: Any) -> ir.Value:
    query, keys, mask, *gaps = inputs
    axis1 = writer.weight("axis1", np.array([1], np.int64))
    axis2 = writer.weight("axis2", np.array([2], np.int64))

    def apart(x: ir.Value, name: str) -> ir.Value:
        return writer.add("Unsqueeze", [x, axis1], f"{path}.{name}")

    products = writer.add("Mul", [keys, apart(query, "target")], f"{path}.products")
    x = linear(writer, keys, f"{path}.key", module.key)
    x = writer.add("Add", [x, linear(writer, products, f"{path}.product", module.product)], f"{path}.compared")
    queried = writer.layer([query], f"{path}.query", module.query)
    x = writer.add("Add", [x, apart(queried, "query.apart")], f"{path}.unit")
    x = _activation(writer, x, f"{path}.first", module.first)
    x = _activation(writer, linear(writer, x, f"{path}.hidden", module.hidden), f"{path}.second", module.second)
    scores = linear(writer, x, f"{path}.score", module.score)
    if gaps:
        scores = writer.add("Add", [scores, linear(writer, gaps[0], f"{path}.gap", module.gap)], f"{path}.distant")
        keys = writer.add("Add", [keys, gaps[0]], f"{path}.gaps")
    mask = writer.add("Unsqueeze", [mask, axis2], f"{path}.mask")
    if module.weights == "softmax":
        absent = writer.add("Sub", [mask, writer.constant("one", 1.0)], f"{path}.absent")
        absent = writer.add("Mul", [absent, writer.constant("large", LARGE)], f"{path}.barred")
        shares = writer.add(
            "Softmax", [writer.add("Add", [scores, absent], f"{path}.scores")], f"{path}.shares", axis=1
        )
    else:
        shares = writer.add("Mul", [writer.add("Sigmoid", [scores], f"{path}.sigmoid"), mask], f"{path}.shares")
    turned = writer.add("Transpose", [shares], f"{path}.turned", perm=[0, 2, 1])
    total = writer.add("MatMul", [turned, keys], f"{path}.total")
    return writer.add("Squeeze", [total, axis1], path)
