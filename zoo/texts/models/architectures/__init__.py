"""The architectures of text encoders, one file each: how config.json describes a network, and its names of weights."""

from __future__ import annotations

from zoo.texts.models.architectures import (
    albert,
    bert,
    deberta_v2,
    distilbert,
    electra,
    ernie,
    eurobert,
    gemma3,
    gte,
    modernbert,
    mpnet,
    nomic_bert,
    qwen2,
    qwen3,
    roberta,
    t5,
    xlm_roberta_xl,
)

ARCHITECTURES = {
    module.ARCHITECTURE.name: module.ARCHITECTURE
    for module in (
        bert,
        roberta,
        xlm_roberta_xl,
        electra,
        ernie,
        distilbert,
        albert,
        mpnet,
        deberta_v2,
        modernbert,
        eurobert,
        nomic_bert,
        gte,
        t5,
        qwen2,
        qwen3,
        gemma3,
    )
}
MODEL_TYPES = {  # by the model_type of transformers
    model_type: architecture for architecture in ARCHITECTURES.values() for model_type in architecture.model_types
}
