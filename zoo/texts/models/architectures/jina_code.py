"""Jina embeddings v2 of code (jina-embeddings-v2-base-code): Jina v2 with more norms.

Queries and keys have a norm of all heads together, and the normalized sum of attention and its input is added to that
input and normalized once more. Public models have the `model_type` of BERT and the custom code of the name below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.texts.models.architectures import bert, jina_bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows
from zoo.texts.models.config import Attention, ModelConfig, Norm

CODE = "qk-post-norm"


def _is_code(values: Mapping[str, Any]) -> bool:
    return jina_bert.is_jina(values) and CODE in str(values.get("auto_map"))


def _read(file: ConfigFile) -> ModelConfig:
    return jina_bert.read_jina(file, "jina_code", attention=Attention(row_norm=True), norm=Norm(place="repeated"))


PARTS: dict[str, str | Rows] = {
    **bert.PARTS,
    "query_norm": "attention.self.layer_norm_q",
    "key_norm": "attention.self.layer_norm_k",
    "attention_out_norm": "layer_norm_1",
    "up": Rows("mlp.up_gated_layer", 0, 2),
    "gate": Rows("mlp.up_gated_layer", 1, 2),
    "down": "mlp.down_layer",
    "norm": "layer_norm_2",
}
ARCHITECTURE = Architecture(
    "jina_code", ("bert",), _read, jina_bert.NAMES, bert.LAYER, PARTS, bert.HEAD, trainable=False, matches=_is_code
)
