"""MPNet (Song et al. 2020): BERT with a bias of relative positions, shared by the layers, and without token types."""

from __future__ import annotations

from zoo.texts.models.architectures import bert, roberta
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    return bert.read_bert(
        file,
        "mpnet",
        vocabulary=file.get("vocab_size", default=30527),
        first_position=2,  # for any pad_token_id
        types=0,
        buckets=file.get("relative_attention_num_buckets", default=32),
    )


NAMES = {**bert.NAMES, "relative": "encoder.relative_attention_bias"}
PARTS = {
    **bert.PARTS,
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "output": "attention.attn.o",
    "attention_norm": "attention.LayerNorm",
}
ARCHITECTURE = Architecture("mpnet", ("mpnet",), _read, NAMES, bert.LAYER, PARTS, roberta.HEAD)
