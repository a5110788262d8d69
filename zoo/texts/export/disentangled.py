"""Disentangled attention (He et al. 2021, "DeBERTa", section 3.1) as operators of an ONNX graph.

The scores of query i and key j, with Q and K of the content, and A and B, the keys and queries of relative positions:

    score[i, j] = (Q[i] . K[j] + Q[i] . A[row(i - j)] + K[j] . B[row(i - j)]) / scale

`row` maps a distance to a row of the table of relative positions: one row a distance up to buckets / 2, then rows that
distances share logarithmically. A and B depend on weights alone, so they are constants of each layer, divided by the
scale; there is no tensor of tokens x tokens x head size. In the graph, for n rows that texts of `max_tokens` can reach:

    index = Expand(Gather(rows, distance), [batch, heads, tokens, tokens])             int32, of all layers
    to_position = GatherElements(MatMul(Q, A), index, axis=3)  A: float32 [heads, size, n]
    to_content = Transpose(GatherElements(MatMul(K, B), index, axis=3), [0, 1, 3, 2])
    score = Div(MatMul(Q, Transpose(K)), scale) + to_position + to_content + mask

`rows` is a constant, int32 [2 max_tokens - 1], by the distance j - i of the key from the query, plus max_tokens - 1. It
is odd about its middle, row(i - j) = n - 1 - row(j - i), so the columns of B are stored in reverse, and both parts have
the same index. Which value is Q and which K follows from the MatMul of both; the mask is that of any other network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from zoo.texts.models.architectures.base import Floats
from zoo.texts.models.config import ModelConfig
from zoo.training.onnx_builder import Writer

INT32 = ir.DataType.INT32
PARTS = {"to_position": ("key", "queries"), "to_content": ("query", "keys")}  # layer of the positions, content


def position_scores(
    writer: Writer, config: ModelConfig, weights: Mapping[str, Floats], path: str, parts: Mapping[str, ir.Value]
) -> list[ir.Value]:
    """Appends the scores of content and relative position.

    Args:
        writer: Writer of the graph.
        config: Description of the network.
        weights: Weights by shared name.
        path: Prefix of the layer's names.
        parts: "queries" and "keys", float32 [batch, heads, tokens, size]; "index", see above.

    Returns:
        Scores to add to those of the content, float32 [batch, heads, tokens, tokens] each.
    """
    assert config.disentangled is not None
    scores = []
    for name, (layer, content) in PARTS.items():
        if not getattr(config.disentangled, name):
            continue
        table = writer.weight(f"{path}.{name}", position_table(config, weights, path, layer))
        products = writer.add("MatMul", [parts[content], table], f"{path}.{name}.products")
        score = writer.add("GatherElements", [products, parts["index"]], f"{path}.{name}.scores", axis=3)
        if name == "to_content":
            score = writer.add("Transpose", [score], f"{path}.{name}.transposed", perm=[0, 1, 3, 2])
        scores.append(score)
    return scores


def position_index(writer: Writer, config: ModelConfig, ids: ir.Value, distance: ir.Value) -> ir.Value:
    """Appends the row of relative positions of each query and key.

    Args:
        writer: Writer of the graph.
        config: Description of the network.
        ids: Token ids, int64 [batch, tokens].
        distance: Distance of each key from each query, plus max_tokens - 1, int64 [tokens, tokens].

    Returns:
        int32 [batch, heads, tokens, tokens].
    """
    rows = writer.weight("relative.rows", distance_rows(config).astype(np.int32))
    index = writer.add("Gather", [rows, distance], "relative.index", dtype=INT32)
    batch, tokens = (
        writer.add("Shape", [ids], f"relative.{name}", dtype=ir.DataType.INT64, start=axis, end=axis + 1)
        for axis, name in enumerate(("batch", "tokens"))
    )
    sizes = [batch, writer.constant("relative.heads", [config.heads]), tokens, tokens]
    shape = writer.add("Concat", sizes, "relative.shape", dtype=ir.DataType.INT64, axis=0)
    return writer.add("Expand", [index, shape], "relative.expanded", dtype=INT32)


def buckets(config: ModelConfig) -> NDArray[np.int64]:
    """Returns the signed bucket of every distance from -(max_tokens - 1) to max_tokens - 1."""
    part, last = config.disentangled, config.max_tokens - 1
    assert part is not None
    distances = np.arange(-last, last + 1)
    if not part.buckets:
        return distances
    middle = np.float32(part.buckets // 2)
    far = np.maximum(np.abs(distances), middle).astype(np.float32)
    share = np.log(far / middle) / np.float32(math.log((part.distance - 1) / middle))
    shared = np.sign(distances) * (np.ceil(share * (middle - 1)) + middle).astype(np.int64)
    signed: NDArray[np.int64] = np.where(np.abs(distances) <= middle, distances, shared)
    return signed


def distance_rows(config: ModelConfig) -> NDArray[np.int64]:
    """Returns the column of `position_table` by the distance of the key from the query: int64 [2 max_tokens - 1]."""
    bucket = buckets(config)
    rows: NDArray[np.int64] = bucket.max() - bucket  # -bucket is that of the query's distance from the key
    return rows


def position_table(config: ModelConfig, weights: Mapping[str, Floats], path: str, layer: str) -> Floats:
    """Returns keys or queries of the relative positions that texts can reach, divided by the scale.

    Args:
        config: Description of the network.
        weights: Weights by shared name.
        path: Prefix of the layer's names.
        layer: "key" or "query".

    Returns:
        float32 [heads, size, rows]; rows of queries are in reverse.
    """
    part, reach = config.disentangled, int(buckets(config).max())
    assert part is not None
    rows = weights["relative.weight"].astype(np.float64)
    if part.norm:
        centred = rows - rows.mean(axis=1, keepdims=True)
        rows = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + config.epsilon)
        rows = rows * weights["relative_norm.weight"] + weights["relative_norm.bias"]
    reached = np.clip(part.span + np.arange(-reach, reach + 1), 0, 2 * part.span - 1)
    name = f"{path}.{layer}" if part.shared else f"{path}.position_{layer}"
    table = rows[reached] @ weights[f"{name}.weight"].T.astype(np.float64) + weights.get(f"{name}.bias", 0)
    heads = table.reshape(len(reached), config.heads, config.head_size).transpose(1, 2, 0) / config.attention.scale
    return np.ascontiguousarray(heads[:, :, ::-1] if layer == "query" else heads, np.float32)
