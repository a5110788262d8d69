"""DeBERTa-v2 and v3 (He et al. 2021): BERT with disentangled attention over content and relative position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Floats
from zoo.texts.models.config import Attention, Disentangled, ModelConfig

TO_POSITION, TO_CONTENT = "c2p", "p2c"


def read_deberta(file: ConfigFile, kind: str = "deberta_v2", **fields: Any) -> ModelConfig:
    """Describes a network with disentangled attention.

    Args:
        file: Its config.json.
        kind: Architecture.
        **fields: Fields in which it differs from DeBERTa-v2.

    Returns:
        The description.

    Raises:
        RequestError: A setting is not supported.
    """
    width, heads = file.get("hidden_size", default=1536), file.get("num_attention_heads", default=24)
    if convolution := file.get("conv_kernel_size", default=0):
        file.require("conv_groups", 1)
        if (activation := file.get("conv_act", default="tanh")) != file.get("hidden_act", default="gelu"):
            raise RequestError(f"its conv_act is {activation!r:.60}; expected that of its layers, hidden_act")
    for key, expected in (
        ("embedding_size", width),
        ("attention_head_size", width // heads),
        ("pooler_hidden_size", width),
        ("pooler_hidden_act", "gelu"),
    ):
        file.require(key, expected)
    kinds = file.get("pos_att_type", default=[])
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    disentangled = None
    positions = file.get("max_position_embeddings", default=512)
    if file.get("relative_attention") and {TO_POSITION, TO_CONTENT} & set(kinds):
        disentangled = Disentangled(
            buckets=max(file.get("position_buckets", default=-1), 0),
            distance=limit if (limit := file.get("max_relative_positions", default=-1)) > 0 else positions,
            to_position=TO_POSITION in kinds,
            to_content=TO_CONTENT in kinds,
            shared=bool(file.get("share_att_key")),
            norm="layer_norm" in str(file.get("norm_rel_ebd", default="none")).lower(),
        )
    parts = 1 + sum(kind in kinds for kind in (TO_POSITION, TO_CONTENT))
    return bert.read_bert(
        file,
        kind,
        layers=file.get("num_hidden_layers", default=24),
        width=width,
        heads=heads,
        hidden=file.get("intermediate_size", default=6144),
        vocabulary=file.get("vocab_size", default=128100),
        types=file.get("type_vocab_size", default=0),
        epsilon=float(file.get("layer_norm_eps", default=1e-7)),
        absolute=bool(file.get("position_biased_input", default=True)),
        attention=Attention(scale=(parts * (width // heads)) ** 0.5 if parts > 1 else 0.0),
        disentangled=disentangled,
        convolution=convolution,
        **fields,
    )


def _flatten(config: ModelConfig, weights: dict[str, Floats], tensors: Mapping[str, Floats], prefix: str) -> list[str]:
    """Makes the convolution a linear layer of several tokens side by side."""
    if config.convolution:
        kernel = weights["convolution.weight"]
        weights["convolution.weight"] = kernel.transpose(0, 2, 1).reshape(len(kernel), -1)
    return []


NAMES = {
    **bert.NAMES,
    "relative": "encoder.rel_embeddings",
    "relative_norm": "encoder.LayerNorm",
    "convolution": "encoder.conv.conv",
    "convolution_norm": "encoder.conv.LayerNorm",
}
PARTS = {
    **bert.PARTS,
    "query": "attention.self.query_proj",
    "key": "attention.self.key_proj",
    "value": "attention.self.value_proj",
    "position_key": "attention.self.pos_key_proj",
    "position_query": "attention.self.pos_query_proj",
}
HEAD = {"dense": "pooler.dense", "classifier": "classifier"}
ARCHITECTURE = Architecture(
    "deberta_v2", ("deberta-v2",), read_deberta, NAMES, bert.LAYER, PARTS, HEAD, "gelu", adapt=_flatten
)
