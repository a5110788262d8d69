"""Family of translation models: encoder-decoder Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pipelines.models import family
from pipelines.models.protocols import ShipsSamples
from zoo.translation.train_config import FINETUNE, DraftConfig, ImportedConfig, TrainingConfig

if TYPE_CHECKING:
    from pipelines.core.batches import Batch
    from pipelines.models.folder import ModelFolder
    from pipelines.models.pipeline import Pipeline
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.quantization.recipe import QuantRecipe
    from pipelines.rewrites.driver import Rewrite
    from zoo.serving.handlers.base import Handler
    from zoo.translation.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class TranslationFamily(
    family.Family,
    family.Trainable,
    family.Freezable,
    family.Importable,
    family.Prunable,
    family.HasNetwork,
    family.Shortlistable,
    family.Servable,
    family.Reported,
    ShipsSamples,
):
    """Encoder-decoder Transformers.

    Attributes:
        build: Class of the network.
        config: Default settings of a training.
        finetuning: Default settings of fine-tuning: few steps at a low rate.
    """

    processes: ClassVar[str] = "torch"
    task: str = "translation"
    checkpoint: str = "model.pt"
    transient: tuple[str, ...] = ("fp32.onnx", "rewritten.onnx")  # the weights are in the checkpoint
    files: tuple[str, ...] = ("vocabulary.model", "shortlist.npz", "draft.npz")
    summary: str = (
        "{sentences:,} sentences, {skipped:,} left out, {sentences_per_second:,.0f} sentences/s, "
        "{precision} in {engine}"
    )
    build: type[Transformer]
    config: TrainingConfig = field(default_factory=TrainingConfig)
    finetuning: TrainingConfig = FINETUNE

    def for_model(self, preprocessing: Mapping[str, Any]) -> Self:
        """See `Family`: imported models are fine-tuned by another recipe, and have vocabularies of their own."""
        if "vocabulary" not in preprocessing:
            return self
        languages = str(preprocessing.get("languages"))
        config = ImportedConfig()
        if languages.count("-") == 1:  # names of columns of data sets
            config = replace(config, languages=languages)
        from zoo.translation.data.vocabularies import PIECES

        own = preprocessing["vocabulary"].get("files", ())
        return replace(self, finetuning=config, files=(*self.files, *own, PIECES))

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.translation.inference import TranslationPipeline

        return TranslationPipeline

    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """See `Family`."""
        from zoo.translation.export.rewrites import passes

        return passes(preprocessing)

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Family` and `zoo.translation.metrics.evaluate`: BLEU and chrF."""
        from zoo.translation.metrics import evaluate

        return evaluate(pipelines, data, on_error)

    def train_config(self) -> TrainingConfig:
        """See `Trainable`."""
        return self.config

    def finetune_config(self) -> TrainingConfig:
        """See `Trainable`."""
        return self.finetuning

    def train(self, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """See `Trainable` and `zoo.translation.training.train.train`."""
        with self.needs("train"):
            from zoo.translation.training.train import train
        return train(self.build, data, output, **options)

    def freeze(self, folder: Path) -> dict[str, Any]:
        """See `Freezable` and `zoo.translation.export.freeze.freeze`."""
        with self.needs("freeze"):
            from zoo.translation.export.freeze import freeze
        return freeze(folder, self.build)

    def importer(self) -> family.Importer:
        """See `Importable` and `zoo.translation.importers`."""
        from zoo.translation.importers import importer

        return importer(self.build)

    def samples(self, folder: ModelFolder) -> Batch:
        """See `ShipsSamples` and `zoo.translation.default_calibration`."""
        from zoo.translation.default_calibration import samples

        return samples(folder)

    def judged(
        self, folder: ModelFolder, path: Path, recipe: QuantRecipe, table: CalibrationTable
    ) -> tuple[CalibrationTable, dict[str, Any]]:
        """See `ShipsSamples` and `zoo.translation.default_calibration.judged`."""
        from zoo.translation.default_calibration import judged

        return judged(folder, path, recipe, table)

    def network(self, folder: Path) -> tuple[dict[str, Any], Transformer]:
        """See `HasNetwork` and `zoo.translation.models.checkpoints.load_model`."""
        with self.needs("network"):
            from zoo.translation.models.checkpoints import load_model, read_features
        return {"features": read_features(folder)}, load_model(folder, self.build)[0]

    def export_huggingface(self, folder: ModelFolder, output: Path) -> dict[str, Any]:
        """See `HuggingFaceExportable` and `zoo.translation.export.huggingface`."""
        with self.needs("network"):
            from zoo.translation.export.huggingface import export_huggingface
        return export_huggingface(folder, self.build, output)

    def prunable(self) -> type[Any]:
        """See `Prunable`."""
        with self.needs("prune"):
            from zoo.translation.training.pruning import PrunableTranslator
        return PrunableTranslator

    def shortlist(self, folder: ModelFolder, data: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        """See `Shortlistable` and `zoo.translation.search.shortlist.build_shortlist`."""
        from zoo.translation.search.shortlist import build_shortlist

        return build_shortlist(folder, data)

    def draft_config(self) -> DraftConfig:
        """See `Draftable`."""
        return DraftConfig()

    def train_draft(
        self, folder: ModelFolder, data: Any, config: DraftConfig
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        """See `Draftable` and `zoo.translation.training.draft.train_draft`."""
        with self.needs("train"):
            from zoo.translation.training.draft import train_draft
        return train_draft(folder, data, config)

    def handler(self) -> type[Handler]:
        """See `Servable`."""
        from zoo.serving.handlers.translation import TranslationHandler

        return TranslationHandler

    def report_sections(self) -> family.ReportSections:
        """See `Reported`."""
        from zoo.translation import report_sections

        return report_sections
