"""ONNX forms of self-attention over sequences (`zoo.recommenders.models.sequences.blocks`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from zoo.recommenders.export.fx_export import RecommenderWriter

LARGE = 1e4  # subtracted from the scores of padding


def linear(writer: RecommenderWriter, x: ir.Value, path: str, module: Any) -> ir.Value:
    """Appends a linear layer of the last axis of a tensor of three axes.

    Args:
        writer: Writer of the graph.
        x: float32 [batch, items, inputs].
        path: Path of the layer.
        module: The layer.

    Returns:
        float32 [batch, items, outputs].
    """
    weight = writer.weight(f"{path}.kernel", np.ascontiguousarray(module.weight.detach().numpy().T))
    if module.bias is None:
        return writer.add("MatMul", [x, weight], path)
    product = writer.add("MatMul", [x, weight], f"{path}.product")
    return writer.add("Add", [product, writer.weight(f"{path}.bias", module.bias.detach().numpy())], path)


def encode(writer: RecommenderWriter, inputs: list[ir.Value], path: str, module: Any) -> ir.Value:
    """Appends a `SequenceEncoder` up to the state of the newest item.

    Args:
        writer: Writer of the graph.
        inputs: Vectors of the items, float32 [batch, items, size], their mask, float32 [batch, items], and vectors of
            time gaps, as those of the items, if there are some.
        path: Path of the module in the network.
        module: The encoder.

    Returns:
        float32 [batch, 1, size].
    """
    x, mask, *gaps = inputs
    items = len(module.positions.position)
    first = np.zeros((1, items), np.float32)
    first[0, 0] = 1
    mask = writer.add("Max", [mask, writer.weight(f"{path}.first", first)], f"{path}.mask")
    axes = writer.weight("axes12", np.array([1, 2], np.int64))
    mask = writer.add("Unsqueeze", [mask, axes], f"{path}.mask.heads")
    x = writer.add("Mul", [x, writer.constant(f"{path}.root", float(module.size**0.5))], f"{path}.scaled")
    x = writer.add("Add", [x, *gaps], f"{path}.gaps") if gaps else x
    position = writer.weight(f"{path}.positions.position", module.positions.position.detach().numpy())
    x = writer.add("Add", [x, position], f"{path}.positions")
    for number, block in enumerate(module.blocks):
        newest = number == len(module.blocks) - 1
        write = _attention_block if type(block).__name__ == "AttentionBlock" else _hstu_block
        x = write(writer, x, mask, f"{path}.blocks.{number}", block, items, newest)
    return _norm(writer, x, f"{path}.norm", module.norm)


def target_transformer(writer: RecommenderWriter, inputs: list[ir.Value], path: str, module: Any) -> ir.Value:
    """Appends a `TargetTransformer`.

    Args:
        writer: Writer of the graph.
        inputs: Vectors of the target, [batch, size], and of the items, [batch, items, size], the mask of these, and
            vectors of time gaps, as those of the items, if there are some.
        path: Path of the module in the network.
        module: The layer.

    Returns:
        float32 [batch, size].
    """
    query, keys, mask, *gaps = inputs
    keys = writer.add("Add", [keys, *gaps], f"{path}.gaps") if gaps else keys
    items, size = module.position.shape
    axis1 = writer.weight("axis1", np.array([1], np.int64))
    position = module.position.detach().numpy()
    joined = writer.add(
        "Concat", [writer.add("Unsqueeze", [query, axis1], f"{path}.target"), keys], f"{path}.items", axis=1
    )
    x = writer.add("Add", [joined, writer.weight(f"{path}.position", position)], f"{path}.placed")
    pads = writer.weight("front", np.array([0, 1, 0, 0], np.int64))
    mask = writer.add("Pad", [mask, pads, writer.constant("one", 1.0)], f"{path}.mask")
    mask = writer.add("Unsqueeze", [mask, writer.weight("axes12", np.array([1, 2], np.int64))], f"{path}.mask.heads")
    parts = linear(writer, x, f"{path}.projected", module.projected)
    key, value = (
        _cut(writer, parts, i * size, (i + 1) * size, 2, f"{path}.{name}") for i, name in enumerate(("key", "value"))
    )
    target = _cut(writer, x, 0, 1, 1, f"{path}.own")
    root = writer.constant(f"{path}.scale", float((size // module.heads) ** -0.5))
    own = _heads(writer, linear(writer, target, f"{path}.query", module.query), 1, module, f"{path}.query")
    own = writer.add("Mul", [own, root], f"{path}.query.scaled")
    scores = writer.add(
        "MatMul", [own, _heads(writer, key, items, module, f"{path}.key", key=True)], f"{path}.products"
    )
    absent = writer.add("Sub", [mask, writer.constant("one", 1.0)], f"{path}.absent")
    barred = writer.add("Mul", [absent, writer.constant("large", LARGE)], f"{path}.barred")
    weights = writer.add("Softmax", [writer.add("Add", [scores, barred], f"{path}.scores")], f"{path}.weights", axis=-1)
    total = writer.add("MatMul", [weights, _heads(writer, value, items, module, f"{path}.value")], f"{path}.total")
    x = linear(writer, _together(writer, total, 1, module, f"{path}.together"), f"{path}.joined", module.joined)
    x = _norm(
        writer, writer.add("Add", [target, x], f"{path}.attended"), f"{path}.attention_norm", module.attention_norm
    )
    inner = writer.add("LeakyRelu", [linear(writer, x, f"{path}.inner", module.inner)], f"{path}.leaky", alpha=0.01)
    x = writer.add("Add", [x, linear(writer, inner, f"{path}.outer", module.outer)], f"{path}.result")
    x = _norm(writer, x, f"{path}.network_norm", module.network_norm)
    return writer.add("Squeeze", [x, axis1], path)


def _norm(writer: RecommenderWriter, x: ir.Value, path: str, module: Any) -> ir.Value:
    weights = [writer.weight(f"{path}.{name}", getattr(module, name).detach().numpy()) for name in ("weight", "bias")]
    return writer.add("LayerNormalization", [x, *weights], path, axis=-1, epsilon=module.eps)


def _cut(writer: RecommenderWriter, x: ir.Value, start: int, end: int, axis: int, name: str) -> ir.Value:
    ends = [writer.weight(f"at{bound}", np.array([bound], np.int64)) for bound in (start, end)]
    return writer.add("Slice", [x, *ends, writer.weight(f"axis{axis}", np.array([axis], np.int64))], name)


def _heads(writer: RecommenderWriter, x: ir.Value, items: int, block: Any, name: str, key: bool = False) -> ir.Value:
    """[batch, items, size] -> [batch, heads, items, size of a head], or with the last axes exchanged."""
    shape = writer.weight(f"heads{items}.{block.heads}", np.array([-1, items, block.heads, block.size // block.heads]))
    apart = writer.add("Reshape", [x, shape], f"{name}.apart")
    return writer.add("Transpose", [apart], f"{name}.heads", perm=[0, 2, 3, 1] if key else [0, 2, 1, 3])


def _together(writer: RecommenderWriter, x: ir.Value, items: int, block: Any, name: str) -> ir.Value:
    turned = writer.add("Transpose", [x], f"{name}.turned", perm=[0, 2, 1, 3])
    shape = writer.weight(f"joined{items}.{block.size}", np.array([-1, items, block.size]))
    return writer.add("Reshape", [turned, shape], name)


def _projected(writer: RecommenderWriter, x: ir.Value, path: str, block: Any) -> ir.Value:
    normed = _norm(writer, x, f"{path}.attention_norm", block.attention_norm)
    return linear(writer, normed, f"{path}.projected", block.projected)


def _projections(
    writer: RecommenderWriter, x: ir.Value, path: str, size: int, names: Sequence[str]
) -> Iterator[ir.Value]:
    """The parts of `size` columns of a projection."""
    return (_cut(writer, x, i * size, (i + 1) * size, 2, f"{path}.{name}") for i, name in enumerate(names))


def _attention_block(
    writer: RecommenderWriter, x: ir.Value, mask: ir.Value, path: str, block: Any, items: int, newest: bool
) -> ir.Value:
    size, queries = block.size, 1 if newest else items
    query, key, value = _projections(writer, _projected(writer, x, path, block), path, size, ("query", "key", "value"))
    if newest:
        query, x = _cut(writer, query, 0, 1, 1, f"{path}.query.newest"), _cut(writer, x, 0, 1, 1, f"{path}.newest")
    root = writer.constant(f"{path}.scale", float((size // block.heads) ** -0.5))
    query = writer.add("Mul", [_heads(writer, query, queries, block, f"{path}.query"), root], f"{path}.query.scaled")
    scores = writer.add(
        "MatMul", [query, _heads(writer, key, items, block, f"{path}.key", key=True)], f"{path}.products"
    )
    absent = writer.add("Sub", [mask, writer.constant("one", 1.0)], f"{path}.absent")
    barred = writer.add("Mul", [absent, writer.constant("large", LARGE)], f"{path}.barred")
    if not newest:
        future = np.tril(np.full((items, items), -LARGE, np.float32), -1)
        barred = writer.add("Add", [barred, writer.weight("future", future)], f"{path}.visible")
    weights = writer.add("Softmax", [writer.add("Add", [scores, barred], f"{path}.scores")], f"{path}.weights", axis=-1)
    total = writer.add("MatMul", [weights, _heads(writer, value, items, block, f"{path}.value")], f"{path}.total")
    joined = linear(
        writer, _together(writer, total, queries, block, f"{path}.together"), f"{path}.joined", block.joined
    )
    x = writer.add("Add", [x, joined], f"{path}.attended")
    inner = linear(writer, _norm(writer, x, f"{path}.network_norm", block.network_norm), f"{path}.inner", block.inner)
    inner = writer.add("Relu", [inner], f"{path}.relu")
    return writer.add("Add", [x, linear(writer, inner, f"{path}.outer", block.outer)], path)


def _silu(writer: RecommenderWriter, x: ir.Value, name: str) -> ir.Value:
    return writer.activation(x, name, "swish")


def _hstu_block(
    writer: RecommenderWriter, x: ir.Value, mask: ir.Value, path: str, block: Any, items: int, newest: bool
) -> ir.Value:
    size, queries = block.size, 1 if newest else items
    parts = _silu(writer, _projected(writer, x, path, block), f"{path}.parts")
    gate, query, key, value = _projections(writer, parts, path, size, ("gate", "query", "key", "value"))
    if newest:
        gate, query, x = (
            _cut(writer, part, 0, 1, 1, f"{path}.{name}.newest")
            for part, name in ((gate, "gate"), (query, "query"), (x, "x"))
        )
    query = _heads(writer, query, queries, block, f"{path}.query")
    scores = writer.add(
        "MatMul", [query, _heads(writer, key, items, block, f"{path}.key", key=True)], f"{path}.products"
    )
    bias = writer.weight(f"{path}.bias", block.bias().detach().numpy()[:queries])
    scores = _silu(writer, writer.add("Add", [scores, bias], f"{path}.biased"), f"{path}.scores")
    visible = writer.weight(f"visible{queries}", block.visible().numpy()[:queries])
    weights = writer.add("Mul", [writer.add("Mul", [scores, visible], f"{path}.visible"), mask], f"{path}.weights")
    total = writer.add("MatMul", [weights, _heads(writer, value, items, block, f"{path}.value")], f"{path}.total")
    normed = _norm(
        writer, _together(writer, total, queries, block, f"{path}.together"), f"{path}.gated_norm", block.gated_norm
    )
    joined = linear(writer, writer.add("Mul", [normed, gate], f"{path}.gated"), f"{path}.joined", block.joined)
    return writer.add("Add", [x, joined], path)
