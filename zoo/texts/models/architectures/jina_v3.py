"""Jina embeddings v3 (Sturua et al. 2024): XLM-R with rotary positions, and low-rank adapters (LoRA) of tasks.

Public models have the `model_type` of XLM-R and custom code (`XLMRobertaFlashConfig`), which also runs the position
embedding of XLM-R (jina-reranker-v2); transformers 5 has the network as "jina_embeddings_v3", without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from zoo.texts.models.architectures import bert, roberta
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows, native_config
from zoo.texts.models.config import ModelConfig

TYPE, CODE = "jina_embeddings_v3", "XLMRobertaFlashConfig"
ABSOLUTE, ROTARY = "absolute", "rotary"


def _is_jina(values: Mapping[str, Any]) -> bool:
    code = str(values.get("auto_map"))
    return values.get("model_type") == TYPE or values.get("position_embedding_type") == ROTARY or CODE in code


def _read(file: ConfigFile) -> ModelConfig:
    is_own = file.get("model_type") == TYPE  # of transformers, not custom code
    is_absolute = file.get("position_embedding_type", default=ROTARY) == ABSOLUTE and not is_own
    theta = file.get("rotary_emb_base", default=20_000.0 if is_own else 10_000.0)
    if not is_absolute:
        file.require("position_embedding_type", ABSOLUTE, ROTARY)
    plain = ConfigFile({key: value for key, value in file.values.items() if key != "position_embedding_type"})
    width, heads = file.get("hidden_size", default=1024), file.get("num_attention_heads", default=16)
    return bert.read_bert(
        plain,
        "jina_v3",
        layers=file.get("num_hidden_layers", default=24),
        width=width,
        heads=heads,
        hidden=file.get("intermediate_size", default=4096),
        vocabulary=file.get("vocab_size", default=250002),
        positions=file.get("max_position_embeddings", default=8194),
        types=file.get("type_vocab_size", default=1),
        epsilon=float(file.get("layer_norm_eps", default=1e-5)),
        first_position=roberta.first_position(file) if is_absolute else 0,
        absolute=is_absolute,
        rotary=None if is_absolute else file.rotary(width // heads, theta),
        adapter=file.adapter(),
    )


NAMES = {**bert.NAMES, "embedding_norm": "emb_ln"}
PARTS: dict[str, str | Rows] = {
    "query": Rows("mixer.Wqkv", 0, 3),
    "key": Rows("mixer.Wqkv", 1, 3),
    "value": Rows("mixer.Wqkv", 2, 3),
    "output": "mixer.out_proj",
    "attention_norm": "norm1",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "norm": "norm2",
}
RENAMED = {".parametrizations.weight.original": ".weight"}  # of weights with adapters
ARCHITECTURE = Architecture(
    "jina_v3",
    (TYPE, "xlm-roberta"),
    _read,
    NAMES,
    "encoder.layers.{}",
    PARTS,
    roberta.HEAD,
    native=partial(native_config, TYPE, ()),
    matches=_is_jina,
    renamed=RENAMED,
)
