"""Families of recommenders: the protocols of `pipelines.models.family`, implemented once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pipelines.core.errors import RequestError
from pipelines.models import family
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.train_config import TrainConfig, for_finetuning

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import nn

    from pipelines.core.batches import Batch
    from pipelines.kernels.recommenders.native import SharedInputs
    from pipelines.models.folder import ModelFolder
    from pipelines.models.hub import CardFile
    from pipelines.models.pipeline import Pipeline
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.rewrites.driver import Rewrite
    from zoo.recommenders.data.features import Features
    from zoo.recommenders.data.schema import Schema
    from zoo.serving.handlers.base import Handler

SUMMARY = "{rows:,} rows, {clicks:,} clicks predicted, {rows_per_second:,.0f} rows/s, {precision} in {engine}"
# Largest change of a probability by int8 on the calibration rows, so that it stays below 0.005 on other rows.
ERROR_BOUND = 0.003
RECIPE = QuantRecipe(observer="minmax", correct=False, bound=ERROR_BOUND)


KEEP = family.RunOption(
    "keep", str, None, "Columns of the log to write beside the probabilities, such as user_id,item_id."
)


@dataclass(frozen=True, kw_only=True)
class RankingFamily(
    family.Family,
    family.Lowerable,
    family.OnnxImportable,
    family.Servable,
    family.Explainable,
    family.HasTables,
):
    """Recommenders on the columns of any log: evaluation, lowering, import and serving."""

    command: ClassVar[str] = "zoo quantize RANKER.onnx --schema schema.json"
    task: str = "clicks"
    checkpoint: str = "model.pt"
    recipe: QuantRecipe = RECIPE
    files: tuple[str, ...] = ("sample.csv.gz", "sample.tsv.gz")
    summary: str = SUMMARY
    run_options: tuple[family.RunOption, ...] = (KEEP,)

    def pipeline(self) -> type[Pipeline]:
        """See `Family`."""
        from zoo.recommenders.log_pipeline import LogPipeline

        return LogPipeline

    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """See `Family`."""
        from zoo.recommenders.export.rewrites import passes

        return passes(preprocessing)

    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """See `Family` and `zoo.recommenders.metrics.evaluate`."""
        from zoo.recommenders.metrics import evaluate

        return evaluate(pipelines, data, on_error)

    def importance(self, pipeline: Any, data: Any, *, repeats: int, on_error: str) -> dict[str, Any]:
        """See `Explainable` and `zoo.recommenders.importance.importance`."""
        from zoo.recommenders.importance import importance

        return importance(pipeline, data, repeats=repeats, on_error=on_error)

    def export_tables(self, folder: ModelFolder, to: str, output: Path) -> dict[str, Any]:
        """See `HasTables` and `zoo.recommenders.export.tables.export_tables`."""
        from zoo.recommenders.export.tables import export_tables

        return export_tables(folder, to, output)

    def changed_rows(self, old: ModelFolder, new: ModelFolder) -> dict[str, dict[str, int]]:
        """See `HasTables` and `zoo.recommenders.export.tables.changed_rows`."""
        from zoo.recommenders.export.tables import changed_rows

        return changed_rows(old, new)

    def lower(
        self,
        model: ir.Model,
        table: CalibrationTable,
        recipe: QuantRecipe,
        earlier: Mapping[str, Any] = MappingProxyType({}),
        rows: Batch | None = None,
        held: bool = True,
    ) -> tuple[ir.Model | None, dict[str, Any], Mapping[str, Any]]:
        """See `Lowerable` and `zoo.recommenders.lowering.lower.lower`."""
        from zoo.recommenders.lowering.lower import lower
        from zoo.recommenders.lowering.table_scales import TableScales

        scales = TableScales(earlier)
        return *lower(model, table, recipe, scales, rows, held), scales.used

    def shared_inputs(self, preprocessing: Mapping[str, Any]) -> SharedInputs | None:
        """See `Lowerable`: the inputs of the user and the context."""
        from zoo.recommenders.data.features import Features
        from zoo.recommenders.ranking.sides import Sides

        features = Features.from_json(preprocessing)
        return Sides(features).user.shared if Sides.has_items(features) else None

    def from_onnx(
        self, path: Any, data: Any, output: Path, **options: Any
    ) -> tuple[str, dict[str, Any], Sequence[CardFile]]:
        """See `OnnxImportable` and `zoo.recommenders.importers.rankers.from_onnx`."""
        with self.needs("from_onnx"):
            from zoo.recommenders.importers.rankers import from_onnx
        return from_onnx(path, data, output, **options)

    def handler(self) -> type[Handler]:
        """See `Servable`."""
        from zoo.serving.handlers.rows import RowHandler

        return RowHandler


@dataclass(frozen=True)
class Preset:
    """Defaults of a family for logs of one form.

    Attributes:
        config: Settings of a training.
        recipe: Quantization recipe.
    """

    config: TrainConfig
    recipe: QuantRecipe


@dataclass(frozen=True, kw_only=True)
class TrainableRankingFamily(
    RankingFamily,
    family.Trainable,
    family.SchemaInferring,
    family.Freezable,
    family.Prunable,
    family.HasNetwork,
    family.Reported,
):
    """Recommenders that are trained here.

    Attributes:
        build: Class of the untrained network; it takes the features of a log and the settings. Its `forward` maps
            table rows int32 [n, columns], numbers float32 [n, numbers] and reciprocals of list lengths float32
            [n, lists] to logits float32 [n, labels].
        config: Default settings, an instance of the family's own class.
        headerless: Defaults for rows without a header, if they differ.
    """

    processes: ClassVar[str] = "torch"
    takes_schema: ClassVar[bool] = True
    build: Callable[[Features, Any], nn.Module]
    config: TrainConfig
    headerless: Preset | None = None

    def for_model(self, preprocessing: Mapping[str, Any]) -> Self:
        """See `Family`."""
        from zoo.recommenders.criteo import of_card

        return self._with_preset(lambda: of_card(preprocessing))

    def for_data(self, data: Any, schema: Any = None, label: str | Sequence[str] | None = None) -> Self:
        """See `Trainable`."""
        from zoo.recommenders.criteo import of_log

        return self._with_preset(lambda: of_log(data, schema, label))

    def _with_preset(self, headerless: Callable[[], bool]) -> Self:
        """The family; for rows without a header with its defaults for such rows, if there are any."""
        preset = self.headerless
        return self if preset is None or not headerless() else replace(self, config=preset.config, recipe=preset.recipe)

    def infer_schema(
        self,
        log: Any,
        *,
        label: str | Sequence[str] | None,
        delimiter: str | None,
        on_error: str,
        kinds: Mapping[str, str],
    ) -> tuple[Schema, list[str], list[list[str]]]:
        """See `SchemaInferring` and `zoo.recommenders.data.schema_inference.infer`."""
        from zoo.recommenders.data.logs import open_logs
        from zoo.recommenders.data.schema import COLUMNS
        from zoo.recommenders.data.schema_inference import infer

        logs = open_logs(log, delimiter)
        if delimiter is not None and not any(opened.kind == "csv" for opened in logs):
            raise RequestError(f"--delimiter requires CSV, found {logs[0].path} ({logs[0].kind}); leave it out")
        schema = infer(logs, label, on_error, kinds, getattr(self.build, "sequences", False))
        return schema, list(COLUMNS), schema.table()

    def train_config(self) -> TrainConfig:
        """See `Trainable`."""
        return self.config

    def finetune_config(self) -> Any:
        """See `Trainable`."""
        return for_finetuning(self.config)

    def train(self, data: Any, output: Path, **options: Any) -> dict[str, Any]:
        """See `Trainable` and `zoo.recommenders.training.train.train`."""
        with self.needs("train"):
            from zoo.recommenders.training.train import train
        return train(self.build, data, output, **options)

    def freeze(self, folder: Path) -> dict[str, Any]:
        """See `Freezable` and `zoo.recommenders.export.freeze.freeze`."""
        with self.needs("freeze"):
            from zoo.recommenders.export.freeze import freeze
        return freeze(folder, self.build, type(self.config))

    def network(self, folder: Path) -> tuple[dict[str, Any], nn.Module]:
        """See `HasNetwork` and `zoo.recommenders.models.checkpoints.load_network`."""
        with self.needs("network"):
            from zoo.recommenders.models.checkpoints import load_network
        return load_network(folder, self.build, type(self.config))

    def prunable(self) -> type[Any]:
        """See `Prunable`."""
        with self.needs("prune"):
            from zoo.recommenders.training.pruning import PrunableRecommender
        return PrunableRecommender

    def report_sections(self) -> family.ReportSections:
        """See `Reported`."""
        from zoo.recommenders import report_sections

        return report_sections
