"""RoBERTa (Liu et al. 2019), and XLM-R, CamemBERT and data2vec-text, which have its network."""

from __future__ import annotations

from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile
from zoo.texts.models.config import ModelConfig

HEAD = {"dense": "classifier.dense", "classifier": "classifier.out_proj"}


def first_position(file: ConfigFile) -> int:
    """Returns the row of a text's first token in the position embedding: that after the padding token's."""
    return int(file.get("pad_token_id", default=1)) + 1


def _read(file: ConfigFile) -> ModelConfig:
    vocabulary = 50265 if file.get("model_type") == "roberta" else 30522
    return bert.read_bert(
        file,
        "roberta",
        first_position=first_position(file),
        vocabulary=file.get("vocab_size", default=vocabulary),
    )


TYPES = ("roberta", "xlm-roberta", "camembert", "data2vec-text")
ARCHITECTURE = Architecture("roberta", TYPES, _read, bert.NAMES, bert.LAYER, bert.PARTS, HEAD)
