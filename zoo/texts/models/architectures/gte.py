"""GTE 1.5 and its multilingual models (Zhang et al. 2024, "mGTE"): BERT with rotary positions and GeGLU.

Public models have the custom code `NewModel` ("new"); transformers 5 has the same network as "gte".
"""

from __future__ import annotations

from functools import partial

from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows, native_config
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    file.require("position_embedding_type", "rope", "absolute" if file.get("model_type") == "gte" else "rope")
    file.require("layer_norm_type", "layer_norm")
    file.require("pack_qkv", True)
    file.require("logn_attention_scale", False)
    width, heads = file.get("hidden_size", default=768), file.get("num_attention_heads", default=12)
    return ModelConfig(
        "gte",
        layers=file.get("num_hidden_layers", default=12),
        width=width,
        heads=heads,
        hidden=file.get("intermediate_size", default=3072),
        vocabulary=file.get("vocab_size", default=30528 if file.get("model_type") == "new" else 250048),
        positions=file.get("max_position_embeddings", default=8192 if file.get("model_type") == "gte" else 2048),
        types=file.get("type_vocab_size", default=1),
        activation=file.activation("hidden_act"),
        epsilon=float(file.get("layer_norm_eps", default=1e-12)),
        absolute=False,
        rotary=file.rotary(width // heads, 160_000.0 if file.get("model_type") == "gte" else 10_000.0),
        gated=True,
        unbiased=("gate", "up"),
    )


NAMES = {"token": bert.NAMES["token"], "type": bert.NAMES["type"], "embedding_norm": bert.NAMES["embedding_norm"]}
PARTS: dict[str, str | Rows] = {
    "query": Rows("attention.qkv_proj", 0, 3),
    "key": Rows("attention.qkv_proj", 1, 3),
    "value": Rows("attention.qkv_proj", 2, 3),
    "output": "attention.o_proj",
    "attention_norm": "attn_ln",
    "up": Rows("mlp.up_gate_proj", 0, 2),
    "gate": Rows("mlp.up_gate_proj", 1, 2),
    "down": "mlp.down_proj",
    "norm": "mlp_ln",
}
NATIVE = partial(native_config, "gte", ("gate", "up"))
ARCHITECTURE = Architecture("gte", ("new", "gte"), _read, NAMES, bert.LAYER, PARTS, bert.HEAD, native=NATIVE)
