"""Qwen3 (Yang et al. 2025) as an encoder of texts: Qwen2 with a norm of each head of queries and keys."""

from __future__ import annotations

from zoo.texts.models.architectures import qwen2
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    biased = (
        ("gate", "up", "down")
        if file.get("attention_bias")
        else ("query", "key", "value", "output", "gate", "up", "down")
    )
    return qwen2.read_qwen(file, "qwen3", head_size=file.get("head_dim", default=128), norm=True, unbiased=biased)


PARTS = {**qwen2.PARTS, "query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
ARCHITECTURE = Architecture(
    "qwen3", ("qwen3",), _read, qwen2.NAMES, "layers.{}", PARTS, qwen2.HEAD, head_pooling="last"
)
