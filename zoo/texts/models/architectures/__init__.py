"""The architectures of text encoders, one file each: how config.json describes a network, and its names of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.texts.models.architectures import (
    albert,
    bart,
    bert,
    deberta,
    deberta_v2,
    distilbert,
    electra,
    ernie,
    esm,
    eurobert,
    gemma3,
    gte,
    jina_bert,
    jina_code,
    jina_v3,
    llama,
    modernbert,
    mosaic_bert,
    mpnet,
    neobert,
    nomic_bert,
    qwen2,
    qwen3,
    roberta,
    roformer,
    static,
    t5,
    ultrabert,
    xlm_roberta_xl,
)
from zoo.texts.models.architectures.base import Architecture

ARCHITECTURES = {
    module.ARCHITECTURE.name: module.ARCHITECTURE
    for module in (
        jina_code,
        jina_bert,
        mosaic_bert,
        jina_v3,
        bert,
        roberta,
        xlm_roberta_xl,
        roformer,
        electra,
        ernie,
        esm,
        distilbert,
        albert,
        mpnet,
        deberta,
        deberta_v2,
        modernbert,
        eurobert,
        ultrabert,
        neobert,
        nomic_bert,
        gte,
        t5,
        bart,
        llama,
        qwen2,
        qwen3,
        gemma3,
        static,
    )
}
MODEL_TYPES = tuple(dict.fromkeys(kind for architecture in ARCHITECTURES.values() for kind in architecture.model_types))


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture of a network.

    Args:
        config: Content of its config.json, with one of `MODEL_TYPES`.
    """
    architecture: Architecture = next(
        one for one in ARCHITECTURES.values() if config["model_type"] in one.model_types and one.matches(config)
    )
    return architecture
