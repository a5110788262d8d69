"""ModernBERT (Warner et al. 2024): rotary positions, two of three layers with sliding-window attention, and GeGLU."""

from __future__ import annotations

from zoo.texts.models.architectures.base import GLOBAL, LOCAL, Architecture, ConfigFile, Rows
from zoo.texts.models.config import Attention, ModelConfig, Norm


def _read(file: ConfigFile) -> ModelConfig:
    width, heads = file.get("hidden_size", default=768), file.get("num_attention_heads", default=12)
    layers, every = file.get("num_hidden_layers", default=22), file.get("global_attn_every_n_layers", default=3)
    kinds = file.get("layer_types", default=[LOCAL if i % every else GLOBAL for i in range(layers)])
    return ModelConfig(
        "modernbert",
        layers=layers,
        width=width,
        heads=heads,
        hidden=file.get("intermediate_size", default=1152),
        vocabulary=file.get("vocab_size", default=50368),
        positions=file.get("max_position_embeddings", default=8192),
        activation=file.activation("hidden_activation"),
        epsilon=float(file.get("norm_eps", default=1e-5)),
        absolute=False,
        rotary=file.rotary(
            width // heads,
            file.get("global_rope_theta", default=160_000.0),
            file.get("local_rope_theta", default=10_000.0),
        ),
        attention=Attention(
            local=tuple(i for i, kind in enumerate(kinds) if kind == LOCAL),
            window=file.get("local_attention", default=128) // 2,
        ),
        norm=Norm(place="pre", bias=bool(file.get("norm_bias")), first=False, final=True),
        gated=True,
        unbiased=(
            *(() if file.get("attention_bias") else ("query", "key", "value", "output")),
            *(() if file.get("mlp_bias") else ("gate", "up", "down")),
            *(() if file.get("classifier_bias") else ("dense",)),
        ),
    )


NAMES = {"token": "embeddings.tok_embeddings", "embedding_norm": "embeddings.norm", "final_norm": "final_norm"}
PARTS: dict[str, str | Rows] = {
    "query": Rows("attn.Wqkv", 0, 3),
    "key": Rows("attn.Wqkv", 1, 3),
    "value": Rows("attn.Wqkv", 2, 3),
    "output": "attn.Wo",
    "attention_norm": "attn_norm",
    "gate": Rows("mlp.Wi", 0, 2),
    "up": Rows("mlp.Wi", 1, 2),
    "down": "mlp.Wo",
    "norm": "mlp_norm",
}
HEAD = {"dense": "head.dense", "dense_norm": "head.norm", "classifier": "classifier"}
ARCHITECTURE = Architecture("modernbert", ("modernbert",), _read, NAMES, "layers.{}", PARTS, HEAD)
