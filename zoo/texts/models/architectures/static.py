"""Static embeddings: a vector a token, and their mean (Pennington et al. 2014, "GloVe"; model2vec)."""

from __future__ import annotations

from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import STATIC, ModelConfig, Norm

MAX_TOKENS = 8192  # tokens of a text


def _read(file: ConfigFile) -> ModelConfig:
    return ModelConfig(
        STATIC,
        layers=0,
        width=file.get("hidden_size"),
        heads=1,
        hidden=1,
        vocabulary=file.get("vocab_size"),
        positions=MAX_TOKENS,
        absolute=False,
        norm=Norm(embedding=False),
    )


ARCHITECTURE = Architecture(STATIC, (STATIC,), _read, {"token": "embedding"}, "", {}, trainable=False)
