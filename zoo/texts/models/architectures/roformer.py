"""RoFormer (Su et al. 2021): BERT with rotary positions, whose pairs of columns are neighbours in the file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zoo.texts.models.architectures import bert, electra, roberta
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Floats
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    file.require("rotary_value", False)
    file.require("hidden_act", "gelu")  # also that of the head
    width, heads = file.get("hidden_size", default=768), file.get("num_attention_heads", default=12)
    columns = file.get("embedding_size", default=width)
    return bert.read_bert(
        file,
        "roformer",
        vocabulary=file.get("vocab_size", default=50000),
        positions=file.get("max_position_embeddings", default=1536),
        embedding=0 if columns == width else columns,
        absolute=False,
        rotary=file.rotary(width // heads, 10_000.0),
    )


def split_pairs(
    config: ModelConfig, weights: dict[str, Floats], tensors: Mapping[str, Floats], prefix: str
) -> list[str]:
    """Moves the pairs (2 i, 2 i + 1) of the columns of queries and keys to (i, i + size / 2), as they are rotated.

    Args:
        config: Configuration of the network.
        weights: Weights by shared name, changed in place.
        tensors: Tensors of the file.
        prefix: Prefix of their names.

    Returns:
        No errors.
    """
    order = np.concatenate([np.arange(0, config.head_size, 2), np.arange(1, config.head_size, 2)])
    for name in [name for name in weights if name.split(".")[-2] in ("query", "key")]:
        array = weights[name]
        heads = array.reshape(config.heads, config.head_size, -1)[:, order]
        weights[name] = np.ascontiguousarray(heads.reshape(array.shape))
    return []


NAMES = {key: name for key, name in electra.NAMES.items() if key != "position"}
ARCHITECTURE = Architecture(
    "roformer", ("roformer",), _read, NAMES, bert.LAYER, bert.PARTS, roberta.HEAD, "gelu", adapt=split_pairs
)
