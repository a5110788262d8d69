"""ELECTRA (Clark et al. 2020): BERT with embeddings of fewer columns than the layers."""

from __future__ import annotations

from zoo.texts.models.architectures import bert, roberta
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    width, columns = file.get("hidden_size", default=256), file.get("embedding_size", default=128)
    return bert.read_bert(
        file,
        "electra",
        width=width,
        heads=file.get("num_attention_heads", default=4),
        hidden=file.get("intermediate_size", default=1024),
        embedding=0 if columns == width else columns,
    )


NAMES = {**bert.NAMES, "projection": "embeddings_project"}
ARCHITECTURE = Architecture("electra", ("electra",), _read, NAMES, bert.LAYER, bert.PARTS, roberta.HEAD, "gelu")
