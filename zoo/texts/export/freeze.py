"""Export of text encoders to fp32.onnx, without fusions, which the rewrites find."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from pipelines.core.files import read_json
from pipelines.graph import io, query
from pipelines.graph.infer import infer_shapes
from pipelines.models.hub import CARD
from zoo.texts.export.outputs import OutputWriter
from zoo.texts.models.architectures.base import Floats
from zoo.texts.models.config import ModelConfig
from zoo.texts.models.head import Head
from zoo.texts.models.weights import FILE, load_weights
from zoo.training.onnx_builder import OPSET


def freeze(folder: str | Path, head: Head | None = None) -> dict[str, Any]:
    """Writes fp32.onnx of a model folder (see `export`); the same weights give the same bytes.

    Args:
        folder: Folder with a card and weights.
        head: Head of its family, see `export`.

    Returns:
        {"parameters", "operators": {type: count}, "bytes": {file: size}}.

    Raises:
        RequestError: The weights are missing, damaged, or do not match the configuration.
    """
    folder = Path(folder)
    card = read_json(folder / CARD)
    config = ModelConfig.from_json(card["preprocessing"]["form"])
    file = folder / card.get("weights", {}).get("file", FILE)
    weights = load_weights(config, file, head=head)
    exported = export(config, weights, head)
    path = io.save(exported, folder / "fp32.onnx")
    return {
        "parameters": sum(array.size for array in weights.values()),
        "operators": query.op_counts(exported),
        "bytes": {written.name: written.stat().st_size for written in (file, path)},
    }


def export(config: ModelConfig, weights: Mapping[str, Floats], head: Head | None = None) -> ir.Model:
    """Exports a network as an ONNX graph without fusions.

    Inputs are those of `ModelConfig.inputs`, int64 [batch, tokens]: input_ids, attention_mask (1 for a token, 0 for
    padding) and token_type_ids. The output is embedding, float32 [batch, width], or scores, float32 [batch, labels], or
    that of `head`.
    The value `hidden`, float32 [batch, tokens, width], is the output of the last layer. Weights of linear layers are
    transposed.

    Args:
        config: Configuration of the network.
        weights: Weights by shared name, see `zoo.texts.models.weights.load_weights`.
        head: Head of the network; None: that of a cross-encoder, if `config` has labels.

    Returns:
        The graph, opset 18.
    """
    main = ir.Graph([], [], nodes=[], name="texts", opset_imports={"": OPSET})
    writer = OutputWriter(main, config, weights, unattended=head is not None and head.UNATTENDED)
    ids, mask, *types = (writer.tokens(name) for name in config.inputs)
    x = writer.hidden(ids, mask, types[0] if types else None)
    if head is not None and head.HAS_LAYERS:
        result = head.export(writer, x, ids, mask)
    else:
        result = writer.head(x, mask) if config.labels else writer.embedding(x, mask)
    tokens = ["tokens"] if head is not None and head.per_token(config) else []
    result.shape = ir.Shape(["batch", *tokens, config.output_size])
    main.outputs.append(result)
    exported = ir.Model(main, ir_version=9)
    infer_shapes(exported)
    return exported
