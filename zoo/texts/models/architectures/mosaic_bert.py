"""MosaicBERT (Portes et al. 2023), which DNABERT-2 is too: Jina v2 with one layer for queries, keys and values.

Public models have the `model_type` of BERT, custom code, and an `alibi_starting_size`, to which no text is limited.
"""

from __future__ import annotations

from zoo.texts.models.architectures import bert, jina_bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Rows
from zoo.texts.models.config import ModelConfig


def _read(file: ConfigFile) -> ModelConfig:
    file.require("hidden_act", "gelu")
    return jina_bert.read_jina(file, "mosaic_bert")


PARTS: dict[str, str | Rows] = {
    **jina_bert.PARTS,
    **{name: Rows("attention.self.Wqkv", i, 3) for i, name in enumerate(("query", "key", "value"))},
}
ARCHITECTURE = Architecture(
    "mosaic_bert",
    ("bert",),
    _read,
    jina_bert.NAMES,
    bert.LAYER,
    PARTS,
    bert.HEAD,
    trainable=False,
    matches=lambda values: values.get("alibi_starting_size") is not None,
)
