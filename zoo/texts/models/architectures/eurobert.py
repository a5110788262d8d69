"""EuroBERT (Boizard et al. 2025): a network of Llama's shape whose tokens read each other in both directions."""

from __future__ import annotations

from zoo.texts.models.architectures import qwen2
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig


def read_eurobert(file: ConfigFile, kind: str = "eurobert") -> ModelConfig:
    """Describes a network of EuroBERT's shape.

    Args:
        file: Its config.json.
        kind: Architecture.

    Returns:
        The description.

    Raises:
        RequestError: A setting is not supported.
    """
    values = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "rms_norm_eps": 1e-5}
    values |= {"intermediate_size": 3072, "vocab_size": 128256, "max_position_embeddings": 8192}
    values |= {key: value for key, value in file.values.items() if value is not None}
    return qwen2.read_qwen(
        ConfigFile({**values, "is_causal": False}),
        kind,
        head_size=file.get("head_dim", default=0),
        unbiased=qwen2.unbiased_layers(file),
    )


HEAD = {"dense": "dense", "classifier": "classifier"}
ARCHITECTURE = Architecture(
    "eurobert",
    ("eurobert",),
    read_eurobert,
    qwen2.NAMES,
    "layers.{}",
    qwen2.PARTS,
    HEAD,
    head_activation="gelu",
    head_pooling="late",
)
