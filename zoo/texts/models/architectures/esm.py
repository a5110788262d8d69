"""ESM-2 (Lin et al. 2023), of the letters of proteins: BERT with norms before its layers and rotary positions.

Networks were trained with 12 % of the tokens masked to zeros, for which the embeddings of texts without masks are
scaled (`token_dropout`).
"""

from __future__ import annotations

from zoo.texts.models.architectures import bert, roberta
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig, Norm

THETA = 10_000.0
UNMASKED = 1 - 0.15 * 0.8  # share of the tokens of texts in training


def _read(file: ConfigFile) -> ModelConfig:
    file.require("is_folding_model", False)
    file.require("emb_layer_norm_before", False)
    file.require("position_embedding_type", "rotary")
    width, heads = file.get("hidden_size", default=768), file.get("num_attention_heads", default=12)
    return bert.read_bert(
        ConfigFile({**file.values, "position_embedding_type": None}),
        "esm",
        positions=file.get("max_position_embeddings", default=1026),
        types=0,
        activation="gelu",
        absolute=False,
        rotary=ConfigFile({}).rotary(width // heads, THETA),
        norm=Norm(place="pre", embedding=False, final=True),
        embedding_scale=UNMASKED if file.get("token_dropout") else 1.0,
    )


NAMES = {"token": "embeddings.word_embeddings", "final_norm": "encoder.emb_layer_norm_after"}
PARTS = {**bert.PARTS, "attention_norm": "attention.LayerNorm", "norm": "LayerNorm"}
ARCHITECTURE = Architecture("esm", ("esm",), _read, NAMES, bert.LAYER, PARTS, roberta.HEAD)
