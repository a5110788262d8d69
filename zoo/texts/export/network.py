"""Layers of text encoders as operators of an ONNX graph."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from pipelines.graph.builder import MASKED
from zoo.texts.export.decoder import decode
from zoo.texts.export.disentangled import position_index, position_scores
from zoo.texts.export.positions import distance_bias, rotary_angles
from zoo.texts.models.architectures.base import Floats
from zoo.texts.models.config import ModelConfig
from zoo.training.onnx_builder import Writer

HIDDEN = "hidden"
END = 1 << 30  # of a slice up to the last index
INT64, FLOAT, BOOL = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL


class NetworkWriter(Writer):
    """Appends the layers of a network to a graph.

    Args:
        main: Graph to extend.
        config: Description of the network.
        weights: Weights by shared name.
        unattended: See `Head.UNATTENDED`.
    """

    def __init__(
        self, main: ir.Graph, config: ModelConfig, weights: Mapping[str, Floats], unattended: bool = False
    ) -> None:
        super().__init__(main)
        self.config, self.weights, self.unattended = config, weights, unattended
        self.cached: dict[str, ir.Value] = {}
        self.reached: dict[ir.Value, ir.Value] = {}  # by the bias of their attention

    # ------------------------------------------------------------------------------------------------------- primitives

    def tokens(self, name: str) -> ir.Value:
        """Adds an input, int64 [batch, tokens]."""
        self.taken.add(name)
        value = ir.Value(name=name, type=ir.TensorType(INT64), shape=ir.Shape(["batch", "tokens"]))
        self.main.inputs.append(value)
        return value

    def parameter(self, name: str, transposed: bool = False) -> ir.Value:
        """Returns a weight of the network.

        Args:
            name: Shared name.
            transposed: Whether it is transposed.
        """
        name = self.stored(name)
        array = self.weights[name]
        return self.weight(name, np.ascontiguousarray(array.T) if transposed else array)

    def stored(self, name: str) -> str:
        """Returns the shared name of a weight; layers that share their weights have those of the first one.

        Args:
            name: Name with the index of any layer.
        """
        layers, distinct = self.config.layers, self.config.distinct_layers
        group, _, tail = name.partition(".")
        if group != "layers" or not distinct:
            return name
        i, _, part = tail.partition(".")
        return f"layers.{int(int(i) / (layers / distinct))}.{part}"  # rounded as in transformers

    def linear(self, x: ir.Value, path: str, result: str = "") -> ir.Value:
        """Appends a linear layer over the last axis.

        Args:
            x: Input.
            path: Shared name of the layer.
            result: Name of the output; default: from `path`.

        Returns:
            Output, without a bias where the layer has none.
        """
        biased = self.stored(f"{path}.bias") in self.weights
        name = path if biased else result or path
        y = self.add("MatMul", [x, self.parameter(f"{path}.weight", transposed=True)], name)
        return self.add("Add", [y, self.parameter(f"{path}.bias")], result or f"{path}.biased") if biased else y

    def norm(self, x: ir.Value, path: str, result: str = "") -> ir.Value:
        """Appends a norm over the last axis.

        Args:
            x: Input.
            path: Shared name of the norm.
            result: Name of the output; default: `path`.

        Returns:
            Output, of the shape of the input.
        """
        if self.config.norm.kind == "rms":
            return self._rms_norm(x, path, result)
        size = len(self.weights[self.stored(f"{path}.weight")])
        biased = self.stored(f"{path}.bias") in self.weights
        weights = [
            self.parameter(f"{path}.weight"),
            self.parameter(f"{path}.bias") if biased else self.constant(f"zeros.{size}", np.zeros(size, np.float32)),
        ]
        return self.add("LayerNormalization", [x, *weights], result or path, axis=-1, epsilon=self.config.epsilon)

    def _rms_norm(self, x: ir.Value, path: str, result: str = "") -> ir.Value:
        """Appends an RMS norm. path: shared name of the norm; result: name of the output, by default `path`."""
        name = self.stored(f"{path}.weight")
        return self.rms_norm(x, path, (name, self.weights[name]), self.config.epsilon, result)

    def activate(self, x: ir.Value, path: str, kind: str = "") -> ir.Value:
        """Appends an activation.

        Args:
            x: Input.
            path: Prefix of the names.
            kind: See `Writer.activation`; default: that of feed-forward blocks.

        Returns:
            Output, of the shape of the input.
        """
        kind = kind or self.config.activation
        if not self.config.gated:  # first, as in the graphs of shipped tables
            for name, value in {"one": 1.0, "half": 0.5}.items():
                self.constant(name, value)
        return self.activation(x, path, kind)

    def slice(self, x: ir.Value, name: str, start: int, end: int, axis: int = -1) -> ir.Value:
        """Appends a slice of an axis.

        Args:
            x: Input.
            name: Name of the output.
            start: First index.
            end: Index after the last one.
            axis: The axis.

        Returns:
            Output.
        """
        bounds = [self.constant(f"index.{i}", [i]) for i in (start, end, axis)]
        return self.add("Slice", [x, *bounds], name, dtype=x.dtype or FLOAT)

    # -------------------------------------------------------------------------------------------------------- positions

    def _length(self, ids: ir.Value) -> ir.Value:
        return self.add("Shape", [ids], "length", dtype=INT64, start=1, end=2)

    def _distance(self, ids: ir.Value) -> ir.Value:
        """Appends the distance of each key from each query, plus max_tokens - 1: int64 [tokens, tokens]."""
        if "distance" not in self.cached:
            self.cached["distance"] = self.distances(self._length(ids), self.config.max_tokens - 1)
        return self.cached["distance"]

    def attention_bias(self, ids: ir.Value, mask: ir.Value, local: bool) -> ir.Value:
        """Appends the bias of attention scores: `MASKED` at padding, plus a function of the distance.

        Args:
            ids: Token ids.
            mask: Attention mask.
            local: Whether for the layers with sliding-window attention.

        Returns:
            float32 [batch, 1 or heads, 1 or tokens, tokens].
        """
        if "padding" not in self.cached:
            is_token = self.add("Cast", [mask], "given", to=int(FLOAT))
            missing = self.add("Sub", [self.constant("one", 1.0), is_token], "missing")
            scores = self.add("Mul", [missing, self.constant("nowhere", MASKED)], "padding")
            self.cached["padding"] = self.add("Unsqueeze", [scores, self.constant("heads_queries", [1, 2])], "mask")
        padding = self.cached["padding"]
        bias = distance_bias(self.config, self.weights, local)
        if bias is None:
            return padding
        name = "local" if local else "relative"
        total = self.add("Add", [padding, self.by_distance(ids, bias, name)], f"{name}.mask")
        if local and self.unattended:
            self.reached[total] = self._reached(total)
        return total

    def by_distance(self, ids: ir.Value, bias: Floats, name: str) -> ir.Value:
        """Appends a bias of attention scores for each query and key.

        Args:
            ids: Token ids.
            bias: Bias by distance, see `distance_bias`.
            name: Prefix of the names.

        Returns:
            float32 [heads or 1, tokens, tokens].
        """
        rows = self.add("Gather", [self.weight(name, bias), self._distance(ids)], f"{name}.gathered")
        return self.add("Transpose", [rows], f"{name}.heads", perm=[2, 0, 1])

    def _reached(self, bias: ir.Value) -> ir.Value:
        """Appends whether a token attends to any key, float32 [batch, tokens, 1]: without a key attention is 0."""
        largest = self.add("ReduceMax", [bias, self.constant("index.-1", [-1])], "local.largest", keepdims=0)
        rows = self.add("ReduceMax", [largest, self.constant("index.1", [1])], "local.heads.largest", keepdims=0)
        reached = self.add("Greater", [rows, self.constant("visible", MASKED / 2)], "local.found", dtype=BOOL)
        column = self.add("Unsqueeze", [reached, self.constant("last_axis", [2])], "local.found.column", dtype=BOOL)
        return self.add("Cast", [column], "local.reached", to=int(FLOAT))

    def rotations(self, ids: ir.Value, local: bool) -> tuple[ir.Value, ir.Value] | None:
        """Appends cosine and sine of the angles of rotary positions, float32 [tokens, size] each.

        Args:
            ids: Token ids.
            local: Whether for the layers with sliding-window attention.

        Returns:
            The values; None for a network without rotary positions.
        """
        if self.config.rotary is None:
            return None
        angles, name = rotary_angles(self.config, local), "local." if local else ""
        amplitude = np.float32(1 if local else self.config.rotary.amplitude)
        cosine, sine = (
            self.add(
                "Slice",
                [self.weight(name + key, table), self.constant("index.0", [0]), self._length(ids)],
                f"{name}{key}.sliced",
            )
            for key, table in (("cosine", amplitude * np.cos(angles)), ("sine", amplitude * np.sin(angles)))
        )
        return cosine, sine

    def rotate(self, x: ir.Value, rotations: tuple[ir.Value, ir.Value], path: str) -> ir.Value:
        """Appends the rotation of the pairs of columns (i, i + size / 2) of each head.

        Args:
            x: Queries or keys, float32 [batch, heads, tokens, head size].
            rotations: Cosine and sine.
            path: Prefix of the names.

        Returns:
            Output, of the shape of the input.
        """
        assert self.config.rotary is not None
        size, head_size = self.config.rotary.size, self.config.head_size
        part = x if size == head_size else self.slice(x, f"{path}.part", 0, size)
        first = self.slice(part, f"{path}.first", 0, size // 2)
        second = self.add("Neg", [self.slice(part, f"{path}.second", size // 2, size)], f"{path}.negated")
        turned = self.add("Concat", [second, first], f"{path}.turned", axis=-1)
        cosine, sine = (
            self.add("Mul", pair, f"{path}.{name}")
            for name, pair in (("cosine", [part, rotations[0]]), ("sine", [turned, rotations[1]]))
        )
        result = self.add("Add", [cosine, sine], f"{path}.rotated")
        if size == head_size:
            return result
        return self.add("Concat", [result, self.slice(x, f"{path}.rest", size, head_size)], f"{path}.joined", axis=-1)

    # ----------------------------------------------------------------------------------------------------------- layers

    def hidden(self, ids: ir.Value, mask: ir.Value, types: ir.Value | None) -> ir.Value:
        """Appends the network without its head.

        Args:
            ids: Token ids.
            mask: Attention mask.
            types: Token types, or None for the first type.

        Returns:
            Value `HIDDEN`, float32 [batch, tokens, width].
        """
        config = self.config
        x = self.embed(ids, types)
        kinds = [i in config.attention.local for i in range(config.layers)]
        biases = {local: self.attention_bias(ids, mask, local) for local in sorted(set(kinds))}
        if config.disentangled:
            self.cached["index"] = position_index(self, config, ids, self._distance(ids))
        rotations = {local: self.rotations(ids, local) for local in sorted(set(kinds))}
        embedded = x
        for i, local in enumerate(kinds):
            x = self.encoder_layer(x, i, biases[local], rotations[local])
            if config.convolution and not i:
                x = self.norm(self.add("Add", [x, self.convolve(embedded, mask)], "convolved"), "convolution_norm")
        return decode(self, ids, x, biases[False], HIDDEN) if config.decoder else x

    def convolve(self, x: ir.Value, mask: ir.Value) -> ir.Value:
        """Appends a convolution over tokens and its activation, as a linear layer of several tokens side by side.

        Args:
            x: Embeddings, float32 [batch, tokens, width].
            mask: Attention mask; other tokens are zeros.

        Returns:
            Output, float32 [batch, tokens, width].
        """
        count = self.config.convolution
        attended = self.add("Cast", [mask], "convolution.mask", to=FLOAT)
        attended = self.add("Unsqueeze", [attended, self.constant("index.2", [2])], "convolution.attended")
        x = self.add("Mul", [x, attended], "convolution.tokens")
        edge = count // 2
        x = self.add("Pad", [x, self.constant("convolution.edges", [0, edge, 0, 0, edge, 0])], "convolution.padded")
        end = [self.slice(x, f"convolution.{i}", i, i + 1 - count or END, axis=1) for i in range(count)]
        x = self.add("Concat", end, "convolution.joined", axis=-1)
        return self.activate(self.linear(x, "convolution"), "convolution")

    def embed(self, ids: ir.Value, types: ir.Value | None) -> ir.Value:
        """Appends the sum of token, position and type embeddings, and their norm: float32 [batch, tokens, width].

        Args:
            ids: Token ids.
            types: Token types, or None for the first type.

        Returns:
            The embeddings.
        """
        config = self.config
        table = self.weights["token.weight"]
        if config.types and types is None and not config.absolute:
            table = table + self.weights["type.weight"][0]
        x = self.add("Gather", [self.weight("token.weight", table), ids], "tokens" if config.layers else HIDDEN)
        if config.embedding_scale != 1:
            x = self.add("Mul", [x, self.constant("embedding.scale", config.embedding_scale)], "tokens.scaled")
        if config.absolute:
            offsets = self._positions(ids, types)
            x = self.add("Add", [x, offsets], "embedded")
        elif types is not None:
            x = self.add("Add", [x, self.add("Gather", [self.parameter("type.weight"), types], "types")], "embedded")
        if config.norm.embedding:
            x = self.norm(x, "embedding_norm")
        return self.linear(x, "projection") if config.embedding else x

    def _positions(self, ids: ir.Value, types: ir.Value | None) -> ir.Value:
        """Appends position and type embeddings, float32 [tokens, width] or [batch, tokens, width]."""
        first = self.config.first_position
        table = self.weights["position.weight"][first:]
        if self.config.types and types is None:
            table = table + self.weights["type.weight"][0]
        offsets = self.first_rows("positions", table, ids)
        if types is None:
            return offsets
        type_rows = self.add("Gather", [self.parameter("type.weight"), types], "types")
        return self.add("Add", [type_rows, offsets], "places")

    def first_rows(self, name: str, table: Floats, ids: ir.Value) -> ir.Value:
        """Appends the rows of a table for the positions of a text.

        Args:
            name: Name of the table.
            table: float32 [positions, width].
            ids: Token ids.

        Returns:
            float32 [tokens, width].
        """
        rows = [self.weight(name, table), self.constant("first", [0]), self._length(ids)]
        return self.add("Slice", rows, f"{name}.sliced")

    def encoder_layer(
        self, x: ir.Value, i: int, bias: ir.Value, rotations: tuple[ir.Value, ir.Value] | None
    ) -> ir.Value:
        """Appends a layer: self-attention, then feed-forward.

        Args:
            x: Output of the previous layer.
            i: Index of the layer.
            bias: Bias of attention scores, see `attention_bias`.
            rotations: See `rotations`.

        Returns:
            Output, float32 [batch, tokens, width]; that of the last layer is `HIDDEN`.
        """
        config = self.config
        path = f"layers.{i}"
        last, place = i == config.layers - 1 and not config.decoder, config.norm.place
        if place in ("post", "repeated"):
            y = self.add("Add", [x, self.attention(x, path, bias, rotations)], f"{path}.sum")
            y = self.norm(y, f"{path}.attention_norm")
            if place == "repeated":
                y = self.norm(self.add("Add", [x, y], f"{path}.second.sum"), f"{path}.attention_out_norm")
            x = y
            x = self.add("Add", [x, self.feed_forward(x, path)], f"{path}.feed.sum")
            return self.norm(x, f"{path}.norm", HIDDEN if last and not config.norm.final else "")
        y = self.norm(x, f"{path}.attention_norm") if i or config.norm.first else x
        y = self.attention(y, path, bias, rotations)
        if place == "sandwich":
            y = self.norm(y, f"{path}.attention_out_norm")
        x = self.add("Add", [x, y], f"{path}.sum")
        y = self.feed_forward(self.norm(x, f"{path}.norm"), path)
        if place == "sandwich":
            y = self.norm(y, f"{path}.out_norm")
        if not last or not config.norm.final:
            return self.add("Add", [x, y], HIDDEN if last else f"{path}.feed.sum")
        return self.norm(self.add("Add", [x, y], f"{path}.feed.sum"), "final_norm", HIDDEN)

    def attention(
        self,
        x: ir.Value,
        path: str,
        bias: ir.Value,
        rotations: tuple[ir.Value, ir.Value] | None = None,
        memory: ir.Value | None = None,
    ) -> ir.Value:
        """Appends attention.

        Args:
            x: Input, float32 [batch, tokens, width].
            path: Prefix of the layer's names.
            bias: Bias of attention scores.
            rotations: See `rotations`.
            memory: What keys and values are computed from, as `x`; None: `x`.

        Returns:
            Output, float32 [batch, tokens, width].
        """
        config = self.config
        heads = self.constant("heads", [0, 0, config.heads, -1])
        key_heads = (
            heads if config.key_heads == config.heads else self.constant("heads.key", [0, 0, config.key_heads, -1])
        )

        def split(kind: str, order: list[int]) -> ir.Value:
            shape = heads if kind == "query" else key_heads
            source = x if kind == "query" or memory is None else memory
            rows = self.linear(source, f"{path}.{kind}")
            if config.attention.row_norm and kind != "value":
                rows = self.norm(rows, f"{path}.{kind}_norm")
            parts = self.add("Reshape", [rows, shape], f"{path}.{kind}.heads")
            if config.attention.norm and kind != "value":
                parts = self._rms_norm(parts, f"{path}.{kind}_norm")
            parts = self.add("Transpose", [parts], f"{path}.{kind}.split", perm=order)
            if rotations and kind != "value":
                parts = self.rotate(parts, rotations, f"{path}.{kind}")
            if kind != "query" and config.key_heads != config.heads:
                parts = self._repeat(parts, f"{path}.{kind}")
            return parts

        whole = not rotations and not config.disentangled
        direct = whole and config.key_heads == config.heads  # keys are split and transposed in one step
        key_order = [0, 2, 3, 1] if direct else [0, 2, 1, 3]
        queries, keys, values = (
            split(kind, order) for kind, order in (("query", [0, 2, 1, 3]), ("key", key_order), ("value", [0, 2, 1, 3]))
        )
        columns = keys
        if not direct:
            columns = self.add("Transpose", [keys], f"{path}.key.transposed", perm=[0, 1, 3, 2])
        scores = self.add("MatMul", [queries, columns], f"{path}.products")
        scale = config.attention.scale or math.sqrt(config.head_size)
        if scale != 1:
            scores = self.add("Div", [scores, self.constant("attention.scale", scale)], f"{path}.scaled")
        if config.disentangled:
            parts = {"queries": queries, "keys": keys, "index": self.cached["index"]}
            for more in position_scores(self, config, self.weights, path, parts):
                scores = self.add("Add", [scores, more], f"{path}.disentangled")
        scores = self.add("Add", [scores, bias], f"{path}.masked")
        weights = self.add("Softmax", [scores], f"{path}.weights", axis=-1)
        context = self.add("MatMul", [weights, values], f"{path}.found")
        context = self.add("Transpose", [context], f"{path}.found.split", perm=[0, 2, 1, 3])
        joined = self.constant("joined", [0, 0, config.heads * config.head_size])
        context = self.add("Reshape", [context, joined], f"{path}.joined")
        if (reached := self.reached.get(bias)) is not None:
            context = self.add("Mul", [context, reached], f"{path}.reached")
        return self.linear(context, f"{path}.output")

    def _repeat(self, x: ir.Value, path: str) -> ir.Value:
        """Appends the repetition of grouped heads: [batch, key heads, tokens, size] to [batch, heads, tokens, size]."""
        config = self.config
        x = self.add("Unsqueeze", [x, self.constant("index.2", [2])], f"{path}.grouped")
        group = self.constant("group", [1, 1, config.heads // config.key_heads, 1, 1])
        x = self.add("Expand", [x, group], f"{path}.expanded")
        shape = self.constant("heads.repeated", [0, config.heads, -1, config.head_size])
        return self.add("Reshape", [x, shape], f"{path}.repeated")

    def feed_forward(self, x: ir.Value, path: str) -> ir.Value:
        """Appends a feed-forward block.

        Args:
            x: Input, float32 [batch, tokens, width].
            path: Prefix of the layer's names.

        Returns:
            Output, float32 [batch, tokens, width].
        """
        if not self.config.gated:
            return self.linear(self.activate(self.linear(x, f"{path}.up"), path), f"{path}.down")
        gate = self.activate(self.linear(x, f"{path}.gate"), path)
        return self.linear(self.add("Mul", [gate, self.linear(x, f"{path}.up")], f"{path}.gated"), f"{path}.down")
