"""Export of BERT-shaped networks to fp32.onnx, without fusions, which the rewrites find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.core.files import read_json
from pipelines.graph import io, query
from pipelines.graph.infer import infer_shapes
from pipelines.models.hub import CARD
from zoo.texts.models.config import EMBEDDING, SCORES, ModelConfig
from zoo.texts.models.weights import ARCHITECTURES, FILE, Floats, load_weights
from zoo.training.onnx_builder import OPSET, Writer

HIDDEN = "hidden"
MASKED = -1e9  # added to the attention scores of padding: their softmax is 0
MIN_NORM = 1e-12  # of an embedding, before L2 normalization
MAX_DISTANCE = 128  # tokens, from which on MPNet's relative positions share a bucket


def freeze(folder: str | Path) -> dict[str, Any]:
    """Writes fp32.onnx of a model folder (see `export`); the same weights give the same bytes.

    Args:
        folder: Folder with a card and weights.

    Returns:
        {"parameters", "operators": {type: count}, "bytes": {file: size}}.

    Raises:
        RequestError: The weights are missing, damaged, or do not match the configuration.
    """
    folder = Path(folder)
    card = read_json(folder / CARD)
    config = ModelConfig.from_json(card["preprocessing"]["form"])
    file = folder / card.get("weights", {}).get("file", FILE)
    weights = load_weights(config, file)
    exported = export(config, weights)
    path = io.save(exported, folder / "fp32.onnx")
    return {
        "parameters": sum(array.size for array in weights.values()),
        "operators": query.op_counts(exported),
        "bytes": {written.name: written.stat().st_size for written in (file, path)},
    }


def export(config: ModelConfig, weights: Mapping[str, Floats]) -> ir.Model:
    """Exports a network as an ONNX graph without fusions.

    Inputs are those of `ModelConfig.inputs`, int64 [batch, tokens]: input_ids, attention_mask (1 for a token, 0 for
    padding) and token_type_ids. The output is embedding, float32 [batch, width], or scores, float32 [batch, labels].
    The value `hidden`, float32 [batch, tokens, width], is the output of the last layer. Weights of linear layers are
    transposed.

    Args:
        config: Configuration of the network.
        weights: Weights by shared name, see `zoo.texts.models.weights.load_weights`.

    Returns:
        The graph, opset 18.
    """
    main = ir.Graph([], [], nodes=[], name="texts", opset_imports={"": OPSET})
    writer = _Writer(main, config, weights)
    ids, mask, *types = (writer.tokens(name) for name in config.inputs)
    x = writer.embed(ids, types[0] if types else None)
    bias = writer.attention_bias(ids, mask)
    for i in range(config.layers):
        x = writer.encoder_layer(x, bias, f"layers.{i}", last=i == config.layers - 1)
    result = writer.head(x) if config.labels else writer.pool(x, mask)
    result.shape = ir.Shape(["batch", config.output_size])
    main.outputs.append(result)
    exported = ir.Model(main, ir_version=9)
    infer_shapes(exported)
    return exported


class _Writer(Writer):
    """Appends the layers of a network to a graph."""

    def __init__(self, main: ir.Graph, config: ModelConfig, weights: Mapping[str, Floats]) -> None:
        super().__init__(main)
        self.config, self.weights = config, weights

    def tokens(self, name: str) -> ir.Value:
        """Adds an input, int64 [batch, tokens]."""
        self.taken.add(name)
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "tokens"]))
        self.main.inputs.append(value)
        return value

    def parameter(self, name: str, transposed: bool = False) -> ir.Value:
        """Returns a weight of the network."""
        array = self.weights[name]
        return self.weight(name, np.ascontiguousarray(array.T) if transposed else array)

    def linear(self, x: ir.Value, path: str, result: str = "") -> ir.Value:
        """Appends a linear layer over the last axis."""
        y = self.add("MatMul", [x, self.parameter(f"{path}.weight", transposed=True)], path)
        return self.add("Add", [y, self.parameter(f"{path}.bias")], result or f"{path}.biased")

    def norm(self, x: ir.Value, path: str, result: str = "") -> ir.Value:
        """Appends layer normalization over the last axis."""
        weights = [self.parameter(f"{path}.{key}") for key in ("weight", "bias")]
        return self.add("LayerNormalization", [x, *weights], result or path, axis=-1, epsilon=self.config.epsilon)

    def _length(self, ids: ir.Value) -> ir.Value:
        return self.add("Shape", [ids], "length", dtype=ir.DataType.INT64, start=1, end=2)

    def embed(self, ids: ir.Value, types: ir.Value | None) -> ir.Value:
        """Appends token + (position + type) embeddings, normalized: float32 [batch, tokens, width]."""
        rows = self.add("Gather", [self.parameter("token.weight"), ids], "tokens")
        first = self.config.first_position
        table = self.weights["position.weight"][first:]
        if self.config.types and types is None:
            table = table + self.weights["type.weight"][0]
        offsets = self.add(
            "Slice",
            [self.weight("positions", table), self.constant("first", [0]), self._length(ids)],
            "positions.sliced",
        )
        if types is not None:
            type_rows = self.add("Gather", [self.parameter("type.weight"), types], "types")
            offsets = self.add("Add", [type_rows, offsets], "places")
        x = self.norm(self.add("Add", [rows, offsets], "embedded"), "embedding_norm")
        return self.linear(x, "projection") if self.config.embedding else x

    def attention_bias(self, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """Appends the bias of attention scores: `MASKED` at padding, plus MPNet's relative positions.

        Returns float32 [batch, 1 or heads, 1 or tokens, tokens].
        """
        is_token = self.add("Cast", [mask], "given", to=int(ir.DataType.FLOAT))
        missing = self.add("Sub", [self.constant("one", 1.0), is_token], "missing")
        scores = self.add("Mul", [missing, self.constant("nowhere", MASKED)], "padding")
        scores = self.add("Unsqueeze", [scores, self.constant("heads_queries", [1, 2])], "mask")
        if not self.config.buckets:
            return scores
        count = self.add("Squeeze", [self._length(ids)], "count", dtype=ir.DataType.INT64)
        bounds = [self.constant("zero.int", np.array(0)), count, self.constant("one.int", np.array(1))]
        keys = self.add("Range", bounds, "places", dtype=ir.DataType.INT64)
        queries = self.add("Unsqueeze", [keys, self.constant("columns", [1])], "place", dtype=ir.DataType.INT64)
        ahead = self.add("Sub", [keys, queries], "ahead", dtype=ir.DataType.INT64)
        offset = self.constant("furthest", np.array(self.config.max_tokens - 1))
        index = self.add("Add", [ahead, offset], "distance", dtype=ir.DataType.INT64)
        table = self.weight("relative", relative_bias(self.config, self.weights["relative.weight"]))
        relative = self.add("Gather", [table, index], "relative.gathered")
        relative = self.add("Transpose", [relative], "relative.heads", perm=[2, 0, 1])
        return self.add("Add", [scores, relative], "relative.mask")

    def encoder_layer(self, x: ir.Value, bias: ir.Value, path: str, last: bool) -> ir.Value:
        """Appends a post-LN layer: self-attention, then feed-forward."""
        config = self.config
        heads = self.constant("heads", [0, 0, config.heads, -1])

        def split(kind: str, order: list[int]) -> ir.Value:
            parts = self.add("Reshape", [self.linear(x, f"{path}.{kind}"), heads], f"{path}.{kind}.heads")
            return self.add("Transpose", [parts], f"{path}.{kind}.split", perm=order)

        queries, keys, values = (
            split(kind, order)
            for kind, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scores = self.add("MatMul", [queries, keys], f"{path}.products")
        scale = math.sqrt(config.width // config.heads)
        scores = self.add("Div", [scores, self.constant("attention.scale", scale)], f"{path}.scaled")
        scores = self.add("Add", [scores, bias], f"{path}.masked")
        weights = self.add("Softmax", [scores], f"{path}.weights", axis=-1)
        context = self.add("MatMul", [weights, values], f"{path}.found")
        context = self.add("Transpose", [context], f"{path}.found.split", perm=[0, 2, 1, 3])
        context = self.add("Reshape", [context, self.constant("joined", [0, 0, config.width])], f"{path}.joined")
        x = self.add("Add", [x, self.linear(context, f"{path}.output")], f"{path}.sum")
        x = self.norm(x, f"{path}.attention_norm")
        y = self.activate(self.linear(x, f"{path}.up"), path)
        y = self.add("Add", [x, self.linear(y, f"{path}.down")], f"{path}.feed.sum")
        return self.norm(y, f"{path}.norm", HIDDEN if last else "")

    def activate(self, x: ir.Value, path: str, kind: str = "") -> ir.Value:
        """Appends an activation; kind: default that of feed-forward blocks."""
        kind = kind or self.config.activation
        for name, value in {"one": 1.0, "half": 0.5}.items():  # first, as in the graphs of shipped tables
            self.constant(name, value)
        return self.activation(x, path, kind)

    def pool(self, x: ir.Value, mask: ir.Value) -> ir.Value:
        """Appends pooling and, if configured, L2 normalization: float32 [batch, width]."""
        result = "pooled" if self.config.normalize else EMBEDDING
        if self.config.pooling == "cls":
            pooled = self.add("Gather", [x, self.constant("zero.int", np.array(0))], result, axis=1)
        else:
            tokens = self.constant("token_axis", [1])
            is_token = self.add("Cast", [mask], "counted", to=int(ir.DataType.FLOAT))
            is_token = self.add("Unsqueeze", [is_token, self.constant("last_axis", [2])], "weights")
            if self.config.pooling == "mean":
                total = self.add("ReduceSum", [self.add("Mul", [x, is_token], "chosen"), tokens], "total", keepdims=0)
                pooled = self.add(
                    "Div", [total, self.add("ReduceSum", [is_token, tokens], "number", keepdims=0)], result
                )
            else:
                missing = self.add("Sub", [self.constant("one", 1.0), is_token], "left_out")
                low = self.add("Mul", [missing, self.constant("nowhere", MASKED)], "lowered")
                pooled = self.add("ReduceMax", [self.add("Add", [x, low], "chosen"), tokens], result, keepdims=0)
        if not self.config.normalize:
            return pooled
        norm = self.add("ReduceL2", [pooled, self.constant("row_axis", [1])], "size", keepdims=1)
        norm = self.add("Max", [norm, self.constant("shortest", MIN_NORM)], "size.clipped")
        return self.add("Div", [pooled, norm], EMBEDDING)

    def head(self, x: ir.Value) -> ir.Value:
        """Appends the classification head over the first token: float32 [batch, labels]."""
        row = self.add("Gather", [x, self.constant("zero.int", np.array(0))], "first_row", axis=1)
        row = self.linear(row, "dense")
        kind = ARCHITECTURES[self.config.kind].activation
        if kind == "gelu":
            row = self.activate(row, "dense", kind)
        else:
            row = self.add("Tanh" if kind == "tanh" else "Relu", [row], "dense.activated")
        return self.linear(row, "classifier", SCORES)


def relative_bias(config: ModelConfig, table: Floats) -> Floats:
    """Expands MPNet's relative position bias from buckets to distances (Raffel et al. 2020, "T5", section 2.1).

    Half of the buckets are of keys before the query, half of keys after it; in each half, one half of the buckets is
    one distance each, the other half grows logarithmically up to `MAX_DISTANCE`.

    Args:
        config: Configuration of the network.
        table: Bias by bucket, float32 [buckets, heads].

    Returns:
        Bias by distance of the key from the query, -(max_tokens - 1) first, float32 [2 max_tokens - 1, heads].
    """
    ahead = np.arange(-(config.max_tokens - 1), config.max_tokens)
    half = config.buckets // 2
    exact = half // 2
    distance = np.abs(ahead)
    large = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / math.log(MAX_DISTANCE / exact)
    large = np.minimum(exact + (large * (half - exact)).astype(np.int64), half - 1)
    rows: Floats = table[np.where(ahead > 0, half, 0) + np.where(distance < exact, distance, large)]
    return rows
