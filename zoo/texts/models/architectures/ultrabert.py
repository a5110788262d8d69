"""UltraBERT: EuroBERT with sliding-window attention in two of three layers, whose rotary positions differ.

Older files have the window and the base of the wavelengths of each layer (`attention_windows`, `rope_theta`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zoo.texts.models.architectures import eurobert, qwen2
from zoo.texts.models.architectures.base import GLOBAL, LOCAL, Architecture, ConfigFile
from zoo.texts.models.config import Attention, ModelConfig

DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}
DEFAULTS |= {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 32768}
THETA = {GLOBAL: 2_560_000.0, LOCAL: 10_000.0}


def _read(file: ConfigFile) -> ModelConfig:
    values: dict[str, Any] = DEFAULTS | {key: value for key, value in file.values.items() if value is not None}
    windows, bases = values.pop("attention_windows", []), values.pop("rope_theta", [])
    layers, size = values["num_hidden_layers"], values["hidden_size"] // values["num_attention_heads"]
    kinds = [LOCAL if (windows[i] if windows else (i + 1) % 3) else GLOBAL for i in range(layers)]
    kinds = values.pop("layer_types", kinds)
    theta = THETA | (dict(zip(kinds, bases, strict=False)) if isinstance(bases, list) else {})
    parameters = values.pop("rope_parameters", {})
    rotary = ConfigFile({**values, "rope_parameters": parameters}).rotary(
        values.get("head_dim", size), theta[GLOBAL], theta[LOCAL]
    )
    network = eurobert.read_eurobert(ConfigFile(values), "ultrabert")
    attention = Attention(
        head_size=network.head_size,
        key_heads=network.key_heads,
        local=tuple(i for i, kind in enumerate(kinds) if kind == LOCAL),
        window=next(filter(None, windows), values.get("sliding_window", 128)),
    )
    return replace(network, rotary=rotary, attention=attention)


HEAD = {"classifier": "classifier"}
RENAMED = {"cls.weight": "head.decoder.weight"}  # of masked language models
ARCHITECTURE = Architecture(
    "ultrabert", ("ultrabert",), _read, qwen2.NAMES, "layers.{}", qwen2.PARTS, HEAD, renamed=RENAMED
)
