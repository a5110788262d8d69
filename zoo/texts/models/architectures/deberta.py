"""DeBERTa (He et al. 2020), the first version: queries, keys and values are one layer, and all distances have a row."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.texts.models.architectures import bert, deberta_v2
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Floats, Rows
from zoo.texts.models.config import ModelConfig

DEFAULTS = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072}
DEFAULTS |= {"vocab_size": 50265}
OF_V2 = ("position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size", "attention_head_size")
BIASES = {"query": "q_bias", "value": "v_bias"}


def _read(file: ConfigFile) -> ModelConfig:
    file.require("talking_head", False)
    values = {key: value for key, value in file.values.items() if value is not None and key not in OF_V2}
    unbiased = ("query", "key", "value", "position_key")
    return deberta_v2.read_deberta(ConfigFile({**DEFAULTS, **values}), "deberta", unbiased=unbiased)


def _add_biases(
    config: ModelConfig, weights: dict[str, Floats], tensors: Mapping[str, Floats], prefix: str
) -> list[str]:
    """Adds the biases of queries and values, which are parameters of their own; returns errors."""
    errors = []
    for i in range(config.layers):
        for part, name in BIASES.items():
            full = f"{prefix}{bert.LAYER.format(i)}.attention.self.{name}"
            bias = tensors.get(full)
            if bias is None or bias.shape != (config.width,):
                errors.append(f"no {full} of {config.width} values")
            else:
                weights[f"layers.{i}.{part}.bias"] = bias
    return errors


PARTS: dict[str, str | Rows] = {
    **bert.PARTS,
    **{name: Rows("attention.self.in_proj", i, 3, by_head=True) for i, name in enumerate(("query", "key", "value"))},
    "position_key": "attention.self.pos_proj",
    "position_query": "attention.self.pos_q_proj",
}
ARCHITECTURE = Architecture(
    "deberta",
    ("deberta",),
    _read,
    deberta_v2.NAMES,
    bert.LAYER,
    PARTS,
    deberta_v2.HEAD,
    "gelu",
    adapt=_add_biases,
)
