"""Ranking: scores of pairs of texts by cross-encoders of sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.texts import metrics
from zoo.texts.importers.sentence_modules import SETTINGS
from zoo.texts.inference import RankingPipeline
from zoo.texts.models.config import IDENTITY, SCORES, SIGMOID
from zoo.texts.models.head import Head, label_count, label_names


class Ranking(Head):
    """Scores of a pair of texts."""

    FORMAT: ClassVar[str] = "cross-encoder"
    TITLE: ClassVar[str] = "cross-encoder"
    ENDS: ClassVar[tuple[str, ...]] = ("ForSequenceClassification",)
    MODEL: ClassVar[str] = "AutoModelForSequenceClassification"
    OUTPUT: ClassVar[str] = SCORES
    HAS_LAYERS: ClassVar[bool] = False
    PAIRS: ClassVar[bool] = True

    def recognizes(self, path: Path, config: Mapping[str, Any]) -> bool:
        """See `Head`: sentence-transformers has written it, or it has one output that is no regression."""
        if not super().recognizes(path, config):
            return False
        is_marked = "sentence_transformers" in config or "sbert_ce_default_activation_function" in config
        is_ranking = label_count(config) == 1 and config.get("problem_type") != "regression"
        return is_marked or is_ranking or (path / SETTINGS).is_file()

    def outputs(self, config: Mapping[str, Any]) -> int:
        """See `Head`."""
        return label_count(config)

    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`: "activation" of the logits, and "names" of the labels."""
        settings = read_json(path / SETTINGS) if (path / SETTINGS).is_file() else {}
        activation = _activation(config, settings if isinstance(settings, dict) else {}, self.outputs(config))
        return {"activation": activation, "names": label_names(config) if config.get("id2label") else []}

    def pipeline(self) -> type[RankingPipeline]:
        """See `Head`."""
        return RankingPipeline

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Head` and `zoo.texts.metrics.evaluate`."""
        return metrics.evaluate(pipelines, data, on_error)


def _activation(config: Mapping[str, Any], settings: Mapping[str, Any], labels: int) -> str:
    """Returns the activation of the logits, as sentence-transformers' CrossEncoder chooses it."""
    names = [settings.get("activation_fn"), config.get("sentence_transformers", {}).get("activation_fn")]
    names.append(config.get("sbert_ce_default_activation_function"))
    name = next((str(name) for name in names if name), "")
    if not name:
        return SIGMOID if labels == 1 else IDENTITY
    kind = name.rpartition(".")[2].lower()
    if kind not in (IDENTITY, SIGMOID):
        raise RequestError(f"its scores go through {name}; known are Identity and Sigmoid")
    return kind


HEAD = Ranking()
