"""The decoder of a text network (BART) as operators of an ONNX graph."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from zoo.texts.export.positions import distance_bias

if TYPE_CHECKING:
    from zoo.texts.export.network import NetworkWriter

INT64 = ir.DataType.INT64


def decode(writer: NetworkWriter, ids: ir.Value, memory: ir.Value, padding: ir.Value, result: str) -> ir.Value:
    """Appends a decoder that reads `ModelConfig.start_token` and the tokens of the text but the last one.

    Each token attends to those before it and to the whole output of the encoder. Norms are after attention and
    feed-forward.

    Args:
        writer: Writer of the network.
        ids: Token ids, int64 [batch, tokens].
        memory: Output of the encoder, float32 [batch, tokens, width].
        padding: Bias of attention scores at padding, see `NetworkWriter.attention_bias`.
        result: Name of the output.

    Returns:
        Output of the last layer, float32 [batch, tokens, width].
    """
    config = writer.config
    x = _embed(writer, ids)
    causal = dataclasses.replace(config, attention=dataclasses.replace(config.attention, causal=True))
    bias = distance_bias(causal, writer.weights, local=False)
    assert bias is not None
    before = writer.by_distance(ids, bias, "causal")
    for i in range(config.decoder):
        path = f"decoder.{i}"
        x = writer.add("Add", [x, writer.attention(x, path, before)], f"{path}.sum")
        x = writer.norm(x, f"{path}.attention_norm")
        x = writer.add("Add", [x, writer.attention(x, f"{path}.cross", padding, memory=memory)], f"{path}.cross.sum")
        x = writer.norm(x, f"{path}.cross_norm")
        x = writer.add("Add", [x, writer.feed_forward(x, path)], f"{path}.feed.sum")
        x = writer.norm(x, f"{path}.norm", result if i == config.decoder - 1 else "")
    return x


def _embed(writer: NetworkWriter, ids: ir.Value) -> ir.Value:
    """Appends the embeddings of the decoder's tokens, float32 [batch, tokens, width]."""
    config, weights = writer.config, writer.weights
    first = writer.slice(ids, "first_token", 0, 1, axis=1)
    none = writer.add("Mul", [first, writer.constant("zero.int", np.array(0))], "none", dtype=INT64)
    start = writer.add("Add", [none, writer.constant("start", np.array(config.start_token))], "started", dtype=INT64)
    read = writer.add("Concat", [start, writer.slice(ids, "but_last", 0, -1, axis=1)], "read", dtype=INT64, axis=1)
    x = writer.add("Gather", [writer.parameter("token.weight"), read], "read.tokens")
    if config.embedding_scale != 1:
        x = writer.add("Mul", [x, writer.constant("embedding.scale", config.embedding_scale)], "read.scaled")
    positions = weights["decoder_position.weight"][config.first_position :]
    x = writer.add("Add", [x, writer.first_rows("decoder_positions", positions, ids)], "read.embedded")
    return writer.norm(x, "decoder_embedding_norm")
