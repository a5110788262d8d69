"""ALBERT (Lan et al. 2020): BERT with embeddings of few columns, and layers that share their weights."""

from __future__ import annotations

from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    file.require("inner_group_num", 1)
    return bert.read_bert(
        file,
        "albert",
        width=file.get("hidden_size", default=4096),
        heads=file.get("num_attention_heads", default=64),
        hidden=file.get("intermediate_size", default=16384),
        vocabulary=file.get("vocab_size", default=30000),
        activation=file.activation("hidden_act", default="gelu_new"),
        embedding=file.get("embedding_size", default=128),
        distinct_layers=file.get("num_hidden_groups", default=1),
    )


NAMES = {**bert.NAMES, "projection": "encoder.embedding_hidden_mapping_in"}
LAYER = "encoder.albert_layer_groups.{}.albert_layers.0"
PARTS = {
    "query": "attention.query",
    "key": "attention.key",
    "value": "attention.value",
    "output": "attention.dense",
    "attention_norm": "attention.LayerNorm",
    "up": "ffn",
    "down": "ffn_output",
    "norm": "full_layer_layer_norm",
}
HEAD = {"dense": "{prefix}pooler", "classifier": "classifier"}
ARCHITECTURE = Architecture("albert", ("albert",), _read, NAMES, LAYER, PARTS, HEAD)
