"""BERT (Devlin et al. 2019), which encoders of DPR are too (Karpukhin et al. 2020), and what its descendants share."""

from __future__ import annotations

from typing import Any

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig

NAMES = {
    "token": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "type": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
LAYER = "encoder.layer.{}"
PARTS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
HEAD = {"dense": "{prefix}pooler.dense", "classifier": "classifier"}


def read_bert(file: ConfigFile, kind: str = "bert", **fields: Any) -> ModelConfig:
    """Describes a network of BERT's shape.

    Args:
        file: Its config.json.
        kind: Architecture.
        **fields: Fields in which it differs from BERT.

    Returns:
        The description.

    Raises:
        RequestError: A setting is not supported.
    """
    if (positions := file.get("position_embedding_type", default="absolute")) != "absolute":
        raise RequestError(f"its positions are {positions}; expected absolute positions")
    if file.get("is_decoder"):
        raise RequestError(
            "it is a decoder (is_decoder in config.json): a token reads only those before it; expected an encoder"
        )
    file.require("projection_dim", 0)  # of DPR
    values = {
        "layers": file.get("num_hidden_layers", default=12),
        "width": file.get("hidden_size", default=768),
        "heads": file.get("num_attention_heads", default=12),
        "hidden": file.get("intermediate_size", default=3072),
        "vocabulary": file.get("vocab_size", default=30522),
        "positions": file.get("max_position_embeddings", default=512),
        "types": file.get("type_vocab_size", default=2),
        "activation": file.activation("hidden_act", "activation"),
        "epsilon": float(file.get("layer_norm_eps", default=1e-12)),
    }
    return ModelConfig(kind, **{**values, **fields})


ARCHITECTURE = Architecture("bert", ("bert", "dpr"), read_bert, NAMES, LAYER, PARTS, HEAD)
