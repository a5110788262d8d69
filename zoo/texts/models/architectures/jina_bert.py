"""Jina embeddings v2 (Günther et al. 2023): BERT with ALiBi in place of a position embedding, and GeGLU.

Public models have the `model_type` of BERT and custom code, JinaBert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows
from zoo.texts.models.config import ModelConfig

GATED = {"geglu": "gelu", "reglu": "relu"}
OTHER_CODE = "qk-post-norm"  # of jina-embeddings-v2-base-code


def _is_jina(values: Mapping[str, Any]) -> bool:
    return values.get("position_embedding_type") == "alibi"


def _read(file: ConfigFile) -> ModelConfig:
    if OTHER_CODE in str(file.get("auto_map", default="")):
        raise RequestError(
            f"its custom code normalizes queries and keys ({OTHER_CODE}); expected jina-bert-implementation"
        )
    file.require("feed_forward_type", *GATED)
    plain = ConfigFile({key: value for key, value in file.values.items() if key != "position_embedding_type"})
    return bert.read_bert(
        plain,
        "jina_bert",
        activation=GATED[file.get("feed_forward_type", default="geglu")],
        alibi=True,
        absolute=False,
        gated=True,
        unbiased=("gate", "up"),
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
    "jina_bert", ("bert",), _read, NAMES, bert.LAYER, PARTS, bert.HEAD, trainable=False, matches=_is_jina
)
