"""Protocols of `pipelines.models.family`, implemented for all image classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipelines.models import family
from pipelines.quantization.recipe import QuantRecipe
from zoo.vision.train_config import FINETUNE, TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from pipelines.models.pipeline import Pipeline
    from pipelines.rewrites.driver import Rewrite
    from zoo.serving.handlers.base import Handler
    from zoo.vision.export.freeze import State


@dataclass(frozen=True, kw_only=True)
class PublishedImageFamily(family.Family, family.Freezable, family.ScenarioBenchmark, family.Servable, family.Reported):
    """Image classifiers of published weights, which are not trained here.

    Attributes:
        build: `build(arch, classes, width)` returns the untrained network: normalized float32 [n, 3, height, width] to
            logits [n, classes].
        formats: {format of published weights: reader of a file into a state dict of `build`'s network}.
    """

    task: str = "images"
    checkpoint: str = "model.pt"
    recipe: QuantRecipe = field(default_factory=lambda: QuantRecipe(search=True))
    summary: str = "{images:,} images, {skipped:,} left out, {images_per_second:,.0f} images/s, {precision} in {engine}"
    build: Callable[[str, int, float], nn.Module]
    formats: Mapping[str, Callable[[Path], State]] = field(default_factory=dict, hash=False)

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.vision.inference import ImagePipeline

        return ImagePipeline

    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """See `Family`."""
        from zoo.vision.export.rewrites import passes

        return passes(preprocessing)

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `zoo.vision.metrics.evaluate`: top-1 and top-5 accuracy."""
        from zoo.vision.metrics import evaluate

        return evaluate(pipelines, data, on_error)

    def freeze(self, folder: Path) -> dict[str, Any]:
        """See `Freezable` and `zoo.vision.export.freeze.freeze`."""
        with self.needs("freeze"):
            from zoo.vision.export.freeze import freeze
        return freeze(folder, self.build, self.formats)

    def run_scenario(self, pipelines: Sequence[Any], data: Any, **options: Any) -> dict[str, Any]:
        """See `ScenarioBenchmark` and `zoo.vision.timed_evaluation.run_scenario`."""
        from zoo.vision.timed_evaluation import run_scenario

        return run_scenario(pipelines, data, **options)

    def handler(self) -> type[Handler]:
        """See `Servable`."""
        from zoo.serving.handlers.image_handler import ImageHandler

        return ImageHandler

    def report_sections(self) -> family.ReportSections:
        """See `Reported`."""
        from zoo.vision import report_sections

        return report_sections


@dataclass(frozen=True, kw_only=True)
class ImageFamily(PublishedImageFamily, family.Trainable, family.Prunable, family.HasNetwork):
    """Image classifiers that are trained here, too.

    Attributes:
        config: Default settings of a training.
    """

    processes: ClassVar[str] = "torch"
    config: TrainConfig

    def train_config(self) -> TrainConfig:
        """See `Trainable`."""
        return self.config

    def finetune_config(self) -> TrainConfig:
        """See `Trainable`."""
        return replace(FINETUNE, arch=self.config.arch)

    def train(self, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """See `Trainable` and `zoo.vision.training.train.fit`."""
        with self.needs("train"):
            from zoo.vision.training.train import fit
        return fit(self.build, data, output, **options)

    def network(self, folder: Path) -> tuple[dict[str, Any], nn.Module]:
        """See `HasNetwork` and `zoo.vision.training.initialization.network`."""
        with self.needs("network"):
            from zoo.vision.training.initialization import network
        return network(folder, self.build)

    def prunable(self) -> type[Any]:
        """See `Prunable`."""
        with self.needs("prune"):
            from zoo.vision.training.pruning import PrunableImages
        return PrunableImages
