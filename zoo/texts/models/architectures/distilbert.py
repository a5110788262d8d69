"""DistilBERT (Sanh et al. 2019): BERT without token types."""

from __future__ import annotations

from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    return bert.read_bert(
        file,
        "distilbert",
        layers=file.get("num_hidden_layers", "n_layers", default=6),
        width=file.get("hidden_size", "dim", default=768),
        heads=file.get("num_attention_heads", "n_heads", default=12),
        hidden=file.get("intermediate_size", "hidden_dim", default=3072),
        types=0,
    )


PARTS = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "output": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm": "output_layer_norm",
}
HEAD = {"dense": "pre_classifier", "classifier": "classifier"}
ARCHITECTURE = Architecture(
    "distilbert", ("distilbert",), _read, bert.NAMES, "transformer.layer.{}", PARTS, HEAD, "relu"
)
