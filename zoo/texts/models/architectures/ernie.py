"""ERNIE (Sun et al. 2020): BERT, in some models with an embedding of the task."""

from __future__ import annotations

from collections.abc import Mapping

from zoo.texts.models.architectures import bert
from zoo.texts.models.architectures.base import Architecture, ConfigFile, Floats
from zoo.texts.models.config import ModelConfig

TASK = "embeddings.task_type_embeddings.weight"


def _read(file: ConfigFile) -> ModelConfig:
    return bert.read_bert(file, "ernie" if file.get("use_task_id") else "bert")  # a BERT of another name


def _add_task(config: ModelConfig, weights: dict[str, Floats], tensors: Mapping[str, Floats], prefix: str) -> list[str]:
    """Adds the embedding of the first task, which all texts have, to those of the positions."""
    task = tensors.get(prefix + TASK)
    if task is None or task.shape[1:] != (config.width,):
        return [f"no {prefix}{TASK} of {config.width} columns"]
    weights["position.weight"] = weights["position.weight"] + task[0]
    return []


ARCHITECTURE = Architecture("ernie", ("ernie",), _read, bert.NAMES, bert.LAYER, bert.PARTS, bert.HEAD, adapt=_add_task)
