"""Llama (Touvron et al. 2023) and Mistral (Jiang et al. 2023) as encoders of texts: Qwen2 without biases.

Embedders of the custom code `llama_bidirec` read texts without a causal mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.texts.models.architectures import qwen2
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig

MISTRAL, BIDIRECTIONAL = "mistral", "llama_bidirec"
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048, "num_key_value_heads": None},
    MISTRAL: {"intermediate_size": 14336, "max_position_embeddings": 131072, "num_key_value_heads": 8},
}


def _read(file: ConfigFile) -> ModelConfig:
    kind = str(file.get("model_type"))
    is_mistral, is_bidirectional = kind == MISTRAL, kind == BIDIRECTIONAL
    values = {"vocab_size": 32000, "layer_types": None, **DEFAULTS[MISTRAL if is_mistral else "llama"]}
    values |= {key: value for key, value in file.values.items() if value is not None}
    if is_mistral:  # all layers, unless sliding_window is null
        window = file.values.get("sliding_window", 4096)
        values |= {"use_sliding_window": bool(window), "sliding_window": window or 0, "max_window_layers": 0}
    values |= {"auto_map": None, "is_causal": False} if is_bidirectional else {}
    head_size = file.get("head_dim", default=0)
    return qwen2.read_qwen(ConfigFile(values), "llama", head_size=head_size, unbiased=qwen2.unbiased_layers(file))


def _native(config: ModelConfig, content: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in content.items() if key != "auto_map"}
    if content.get("model_type") == BIDIRECTIONAL:
        values |= {"model_type": "llama", "is_causal": config.attention.causal}
    return values


ARCHITECTURE = Architecture(
    "llama",
    (*DEFAULTS, BIDIRECTIONAL),
    _read,
    qwen2.NAMES,
    "layers.{}",
    qwen2.PARTS,
    qwen2.HEAD,
    head_pooling="last",
    native=_native,
)
