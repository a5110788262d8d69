"""The encoder of T5 (Raffel et al. 2020), as in Sentence-T5 and Instructor, and of mT5.

RMS norms before attention and feed-forward, products of queries and keys without a scale, and a bias of relative
positions, which the first layer has and all share.
"""

from __future__ import annotations

from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import Attention, ModelConfig, Norm

GATED = "gated-"
MT5 = {
    "num_layers": 8,
    "num_heads": 6,
    "d_ff": 1024,
    "vocab_size": 250112,
    "feed_forward_proj": "gated-gelu",
}  # defaults


def _read(file: ConfigFile) -> ModelConfig:
    file = ConfigFile({**(MT5 if file.get("model_type") == "mt5" else {}), **file.values})
    feed = str(file.get("feed_forward_proj", default="relu"))
    name = feed.removeprefix(GATED)
    activation = (
        "gelu_tanh" if feed == "gated-gelu" else ConfigFile({"feed_forward_proj": name}).activation("feed_forward_proj")
    )
    return ModelConfig(
        "t5",
        layers=file.get("num_layers", default=6),
        width=file.get("d_model", default=512),
        heads=file.get("num_heads", default=8),
        hidden=file.get("d_ff", default=2048),
        vocabulary=file.get("vocab_size", default=32128),
        positions=file.get("n_positions", default=512),
        activation=activation,
        epsilon=float(file.get("layer_norm_epsilon", default=1e-6)),
        buckets=file.get("relative_attention_num_buckets", default=32),
        bucket_distance=file.get("relative_attention_max_distance", default=128),
        absolute=False,
        attention=Attention(head_size=file.get("d_kv", default=64), scale=1.0),
        norm=Norm("rms", "pre", embedding=False, final=True),
        gated=feed.startswith(GATED),
        unbiased=("query", "key", "value", "output", "gate", "up", "down"),
    )


NAMES = {
    "token": "shared",
    "relative": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "final_norm": "encoder.final_layer_norm",
}
PARTS = {
    "query": "layer.0.SelfAttention.q",
    "key": "layer.0.SelfAttention.k",
    "value": "layer.0.SelfAttention.v",
    "output": "layer.0.SelfAttention.o",
    "attention_norm": "layer.0.layer_norm",
    "gate": "layer.1.DenseReluDense.wi_0",
    "up": "layer.1.DenseReluDense.wi_1",
    "down": "layer.1.DenseReluDense.wo",
    "norm": "layer.1.layer_norm",
}
OTHERS = {"encoder.embed_tokens": "shared", "DenseReluDense.wi.": "DenseReluDense.wi_1."}
ARCHITECTURE = Architecture(
    "t5",
    ("t5", "mt5"),
    _read,
    NAMES,
    "encoder.block.{}",
    PARTS,
    encoder="AutoModelForTextEncoding",
    renamed=OTHERS,
    decoded=("ForSequenceClassification", "ForQuestionAnswering"),
)
