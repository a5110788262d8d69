"""EmbeddingGemma (Vera et al. 2025): Gemma 3 as an encoder, with norms before and after attention and feed-forward."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.texts.models.architectures import qwen2, qwen3
from zoo.texts.models.architectures.base import GLOBAL, LOCAL, Architecture, ConfigFile, Floats
from zoo.texts.models.config import Attention, ModelConfig, Norm


def _read(file: ConfigFile) -> ModelConfig:
    file.require("attn_logit_softcapping")
    width, heads = file.get("hidden_size", default=2304), file.get("num_attention_heads", default=8)
    layers, size = file.get("num_hidden_layers", default=26), file.get("head_dim", default=256)
    every = file.get("sliding_window_pattern", "_sliding_window_pattern", default=6)
    kinds = file.get("layer_types", default=[LOCAL if (i + 1) % every else GLOBAL for i in range(layers)])
    causal = not file.get("use_bidirectional_attention")
    window = file.get("sliding_window", default=4096)
    bias = () if file.get("attention_bias") else ("query", "key", "value", "output")
    return ModelConfig(
        "gemma3",
        layers=layers,
        width=width,
        heads=heads,
        hidden=file.get("intermediate_size", default=9216),
        vocabulary=file.get("vocab_size", default=262208),
        positions=file.get("max_position_embeddings", default=131072),
        activation=file.activation("hidden_activation", default="gelu_pytorch_tanh"),
        epsilon=float(file.get("rms_norm_eps", default=1e-6)),
        absolute=False,
        rotary=file.rotary(size, 1_000_000.0, file.get("rope_local_base_freq", default=10_000.0)),
        attention=Attention(
            head_size=size,
            key_heads=file.get("num_key_value_heads", default=4),
            scale=float(file.get("query_pre_attn_scalar", default=256)) ** 0.5,
            causal=causal,
            local=tuple(i for i, kind in enumerate(kinds) if kind == LOCAL),
            window=window - 1 if causal else window // 2,
            norm=True,
        ),
        norm=Norm("rms", "sandwich", embedding=False, final=True),
        gated=True,
        unbiased=(*bias, "gate", "up", "down"),
        embedding_scale=float(width) ** 0.5,
    )


def _add_one(config: ModelConfig, weights: dict[str, Floats], tensors: Mapping[str, Floats], prefix: str) -> list[str]:
    """Adds 1 to the weights of the norms, which the file stores as differences from it."""
    for name in weights:
        if "norm" in name:
            weights[name] = weights[name] + 1
    return []


PARTS = {
    **qwen3.PARTS,
    "attention_out_norm": "post_attention_layernorm",
    "norm": "pre_feedforward_layernorm",
    "out_norm": "post_feedforward_layernorm",
}
ARCHITECTURE = Architecture(
    "gemma3",
    ("gemma3_text",),
    _read,
    qwen2.NAMES,
    "layers.{}",
    PARTS,
    qwen2.HEAD,
    head_pooling="last",
    adapt=_add_one,
)
