"""DeBERTa-v2 and v3 (He et al. 2021): BERT with disentangled attention over content and relative position."""

from __future__ import annotations

from typing import Any

from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile
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
    for key, expected in (
        ("conv_kernel_size", 0),
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
        **fields,
    )


NAMES = {**bert.NAMES, "relative": "encoder.rel_embeddings", "relative_norm": "encoder.LayerNorm"}
PARTS = {
    **bert.PARTS,
    "query": "attention.self.query_proj",
    "key": "attention.self.key_proj",
    "value": "attention.self.value_proj",
    "position_key": "attention.self.pos_key_proj",
    "position_query": "attention.self.pos_query_proj",
}
HEAD = {"dense": "pooler.dense", "classifier": "classifier"}
ARCHITECTURE = Architecture("deberta_v2", ("deberta-v2",), read_deberta, NAMES, bert.LAYER, PARTS, HEAD, "gelu")
