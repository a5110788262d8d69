"""Jina embeddings v2 (Günther et al. 2023): BERT with ALiBi in place of a position embedding, and GeGLU.

Public models have the `model_type` of BERT and custom code, JinaBert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows
from zoo.texts.models.config import ModelConfig

GATED = {"geglu": "gelu", "reglu": "relu"}


def is_jina(values: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a network of Jina embeddings v2.

    Args:
        values: Content of the config.json.
    """
    return values.get("position_embedding_type") == "alibi"


def read_jina(file: ConfigFile, kind: str = "jina_bert", **fields: Any) -> ModelConfig:
    """Describes a network of Jina embeddings v2.

    Args:
        file: Its config.json.
        kind: Architecture.
        **fields: Fields in which it differs.

    Returns:
        The description.

    Raises:
        RequestError: A setting is not supported.
    """
    file.require("feed_forward_type", *GATED)
    plain = ConfigFile({key: value for key, value in file.values.items() if key != "position_embedding_type"})
    return bert.read_bert(
        plain,
        kind,
        activation=GATED[file.get("feed_forward_type", default="geglu")],
        alibi=True,
        absolute=False,
        gated=True,
        unbiased=("gate", "up"),
        **fields,
    )


NAMES = {key: name for key, name in bert.NAMES.items() if key != "position"}
PARTS: dict[str, str | Rows] = {
    **bert.PARTS,
    "gate": Rows("mlp.gated_layers", 0, 2),
    "up": Rows("mlp.gated_layers", 1, 2),
    "down": "mlp.wo",
    "norm": "mlp.layernorm",
}
ARCHITECTURE = Architecture(
    "jina_bert", ("bert",), read_jina, NAMES, bert.LAYER, PARTS, bert.HEAD, trainable=False, matches=is_jina
)
