"""Protocols of `pipelines.models.family`, implemented for all text encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.models import family
from zoo.texts.training.config import TrainConfig

if TYPE_CHECKING:
    from pipelines.models.pipeline import Pipeline
    from pipelines.rewrites.driver import Rewrite
    from zoo.serving.handlers.base import Service


@dataclass(frozen=True, kw_only=True)
class TextFamily(
    family.Family, family.Trainable, family.Freezable, family.Importable, family.Servable, family.Reported
):
    """Networks of BERT's shape from Hugging Face.

    Attributes:
        scores: Whether the models score pairs of texts; otherwise they embed texts.
        config: Default settings of fine-tuning.
    """

    checkpoint: str = "model.safetensors"
    files: tuple[str, ...] = ("tokenizer.json", "config.json")
    scores: bool
    config: TrainConfig = field(default_factory=TrainConfig)

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.texts.inference import RankingPipeline, SentencePipeline

        return RankingPipeline if self.scores else SentencePipeline

    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """See `Family`."""
        from zoo.texts.export.rewrites import passes

        return passes(preprocessing)

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `zoo.texts.metrics.evaluate`: Spearman's correlation, or NDCG@10 and MRR@10."""
        from zoo.texts.metrics import evaluate

        return evaluate(pipelines, data, on_error)

    def train_config(self) -> TrainConfig:
        """See `Trainable`."""
        return self.config

    def train(self, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """See `Trainable` and `zoo.texts.training.train.train`."""
        with self.needs("train"):
            from zoo.texts.training.train import train
        return train(data, output, **options)

    def freeze(self, folder: Path) -> dict[str, Any]:
        """See `Freezable` and `zoo.texts.export.freeze.freeze`."""
        with self.needs("freeze"):
            from zoo.texts.export.freeze import freeze
        return freeze(folder)

    def importer(self) -> family.Importer:
        """See `Importable` and `zoo.texts.importers.huggingface`."""
        from zoo.texts.importers.huggingface import importer

        return importer(self.scores)

    def handler(self) -> type[Service]:
        """See `Servable`."""
        from zoo.serving.handlers.texts import Texts

        return Texts

    def report_sections(self) -> family.ReportSections:
        """See `Reported`."""
        from zoo.texts import report_sections

        return report_sections
