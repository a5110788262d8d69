"""The architectures of text encoders, one file each: how config.json describes a network, and its names of weights."""

from __future__ import annotations

from zoo.texts.models.architectures import (
    bert,
    distilbert,
    electra,
    ernie,
    gemma3,
    gte,
    modernbert,
    mpnet,
    nomic_bert,
    qwen2,
    qwen3,
    roberta,
)

ARCHITECTURES = {
    module.ARCHITECTURE.name: module.ARCHITECTURE
    for module in (bert, roberta, electra, ernie, distilbert, mpnet, modernbert, nomic_bert, gte, qwen2, qwen3, gemma3)
}
MODEL_TYPES = {  # by the model_type of transformers
    model_type: architecture for architecture in ARCHITECTURES.values() for model_type in architecture.model_types
}
