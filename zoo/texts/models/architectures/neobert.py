"""NeoBERT (Le Breton et al. 2025): a deep network of RMS norms, rotary positions and SwiGLU, without biases.

The file has queries, keys and values as one layer, head by head, and the pairs of rotated columns as neighbours.
"""

from __future__ import annotations

from zoo.texts.models.architectures import roformer
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows
from zoo.texts.models.config import ModelConfig, Norm

MULTIPLE = 8  # of the units of the feed-forward, to which the custom code rounds two thirds of them up


def _read(file: ConfigFile) -> ModelConfig:
    file.require("hidden_act", "SwiGLU", "swiglu")
    file.require("rms_norm", True)
    file.require("rope", True)
    width, heads = file.get("hidden_size", default=768), file.get("num_attention_heads", default=12)
    hidden = int(2 * file.get("intermediate_size", default=3072) / 3)
    return ModelConfig(
        "neobert",
        layers=file.get("num_hidden_layers", default=28),
        width=width,
        heads=heads,
        hidden=-(-hidden // MULTIPLE) * MULTIPLE,
        vocabulary=file.get("vocab_size", default=30522),
        positions=file.get("max_length", default=1024),
        activation="swish",
        epsilon=float(file.get("norm_eps", default=1e-6)),
        absolute=False,
        rotary=file.rotary(width // heads, 10_000.0),
        norm=Norm("rms", "pre", embedding=False, final=True),
        gated=True,
        unbiased=("query", "key", "value", "output", "gate", "up", "down"),
    )


NAMES = {"token": "encoder", "final_norm": "layer_norm"}
PARTS: dict[str, str | Rows] = {
    **{name: Rows("qkv", i, 3, by_head=True) for i, name in enumerate(("query", "key", "value"))},
    "output": "wo",
    "attention_norm": "attention_norm",
    "gate": Rows("ffn.w12", 0, 2),
    "up": Rows("ffn.w12", 1, 2),
    "down": "ffn.w3",
    "norm": "ffn_norm",
}
HEAD = {"dense": "dense", "classifier": "classifier"}
ARCHITECTURE = Architecture(
    "neobert",
    ("neobert",),
    _read,
    NAMES,
    "transformer_encoder.{}",
    PARTS,
    HEAD,
    trainable=False,
    adapt=roformer.split_pairs,
)
