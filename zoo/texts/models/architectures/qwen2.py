"""Qwen2 (Yang et al. 2024) as an encoder of texts, and what Qwen3 shares with it.

A decoder of rotary positions, RMS norms before attention and feed-forward, grouped heads and SwiGLU. Embedders of the
gte-Qwen2 family, such as Stella, run it without a causal mask, by custom code of the name below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures.base import GLOBAL, LOCAL, SCORE, Architecture, ConfigFile
from zoo.texts.models.config import Attention, ModelConfig, Norm

BIDIRECTIONAL = "modeling_qwen.Qwen2Model"  # custom code of gte-Qwen2


def read_qwen(file: ConfigFile, kind: str, **fields: Any) -> ModelConfig:
    """Describes a network of Qwen2's shape.

    Args:
        file: Its config.json.
        kind: Architecture.
        **fields: Fields in which it differs, among them `head_size` and `norm` of the attention.

    Returns:
        The description.

    Raises:
        RequestError: A setting is not supported.
    """
    width, heads = file.get("hidden_size", default=4096), file.get("num_attention_heads", default=32)
    layers, causal = file.get("num_hidden_layers", default=32), _is_causal(file)
    window = file.get("sliding_window", default=4096) if file.get("use_sliding_window") else 0
    first = file.get("max_window_layers", default=28)
    kinds = file.get("layer_types", default=[LOCAL if window and i >= first else GLOBAL for i in range(layers)])
    local = tuple(i for i, layer in enumerate(kinds) if layer == LOCAL)
    head_size = fields.pop("head_size", 0) or width // heads
    values = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "hidden": file.get("intermediate_size", default=22016),
        "vocabulary": file.get("vocab_size", default=151936),
        "positions": file.get("max_position_embeddings", default=32768),
        "activation": file.activation("hidden_act", default="silu"),
        "epsilon": float(file.get("rms_norm_eps", default=1e-6)),
        "absolute": False,
        "rotary": file.rotary(head_size, 10_000.0),
        "attention": Attention(
            head_size=head_size,
            key_heads=file.get("num_key_value_heads", default=heads),
            causal=causal,
            local=local,
            window=window - causal if local else 0,
            norm=fields.pop("norm", False),
        ),
        "norm": Norm("rms", "pre", embedding=False, final=True),
        "gated": True,
    }
    return ModelConfig(kind, **{**values, **fields})


def unbiased_layers(file: ConfigFile) -> tuple[str, ...]:
    """Returns the linear layers without a bias of a network with `attention_bias` and `mlp_bias`.

    Args:
        file: Its config.json.
    """
    attention = () if file.get("attention_bias") else ("query", "key", "value", "output")
    return (*attention, *(() if file.get("mlp_bias") else ("gate", "up", "down")))


def _is_causal(file: ConfigFile) -> bool:
    """Returns whether a token reads only those before it."""
    code = file.get("auto_map", default={}).get("AutoModel")
    if (value := file.get("is_causal")) is not None:
        return bool(value)
    if code not in (None, BIDIRECTIONAL):
        raise RequestError(
            f"its custom code {code} is not known; expected {BIDIRECTIONAL}, or is_causal in config.json"
        )
    return code is None


def _read(file: ConfigFile) -> ModelConfig:
    return read_qwen(file, "qwen2", unbiased=("output", "gate", "up", "down"))


def _native(config: ModelConfig, content: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in content.items() if key != "auto_map"}, "is_causal": config.attention.causal}


NAMES = {"token": "embed_tokens", "final_norm": "norm"}
PARTS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm": "post_attention_layernorm",
}
HEAD = {"classifier": SCORE}  # of the last token
ARCHITECTURE = Architecture(
    "qwen2", ("qwen2",), _read, NAMES, "layers.{}", PARTS, HEAD, head_pooling="last", native=_native
)
