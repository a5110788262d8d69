"""Model families: a small description, and the protocols of its abilities.

Callers ask `isinstance(family, Trainable)`. Methods import torch and tensorflow, which opening a family does not load.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

from pipelines.core.errors import RequestError, requires
from pipelines.quantization.recipe import QuantRecipe

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipelines.core.batches import Batch
    from pipelines.kernels.recommenders.native import SharedInputs
    from pipelines.models.folder import ModelFolder
    from pipelines.models.hub import CardFile
    from pipelines.models.pipeline import Pipeline
    from pipelines.quantization.calibration.table import CalibrationTable
    from pipelines.rewrites.driver import Rewrite


@dataclass(frozen=True)
class RunOption:
    """An option of `zoo run` of one family, passed to `Pipeline.run` as a keyword.

    Attributes:
        name: Keyword of `Pipeline.run`; the flag has hyphens in place of underscores.
        kind: int, float, str, or bool for a flag.
        default: Value that `Pipeline.run` takes without the option.
        help: Help text of the command line.
        summary: Last line of `zoo run` with this option, in place of the family's.

    Raises:
        ValueError: The name is no Python name, or the kind is another type.
    """

    name: str
    kind: type
    default: Any
    help: str
    summary: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.kind not in (int, float, str, bool):
            raise ValueError(f"run option {self.name!r} must be a Python name, of the kind int, float, str or bool")


@dataclass(frozen=True)
class Importer:
    """Reader of models of other toolkits.

    Attributes:
        formats: {name of a format: its description}.
        recognize: `recognize(path)` returns the name of the format of a file or folder, "" if it has none of them.
        write: `write(path, output, *, format, **options)` writes a folder that `Freezable.freeze` starts from, and
            returns (card details, files), or raises RequestError with all faults before anything is written.
        options: Names of the options that `write` takes; `runtime_options`: those that do not change the weights.
        path_options: Names of the options that may name a file.
        patterns: Patterns of the files to fetch from a model hub.
        supports: Whether the architecture of a file or folder that it recognizes is one that it can read.
    """

    formats: Mapping[str, str]
    recognize: Callable[[Path], str]
    write: Callable[..., tuple[dict[str, Any], list[CardFile]]]
    options: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    runtime_options: tuple[str, ...] = ()
    path_options: tuple[str, ...] = ()
    supports: Callable[[Path], bool] = lambda path: True


@dataclass(frozen=True, kw_only=True)
class Family(abc.ABC):
    """A model family. A task derives its own class and adds the protocols of this module that the task implements.

    Attributes:
        name: Lower-case words with hyphens.
        title: One line for people.
        task: Task of the models, such as "translation".
        checkpoint: File of a trained folder that fp32.onnx is made from.
        former_checkpoint: That file in folders of an earlier version, "" if it has the same name.
        recipe: Default quantization recipe.
        transient: Stages whose files are removed when the stages that read them are made, and made again on demand.
        files: Files of a model besides its graphs and tables, such as a vocabulary.
        run_options: Options of `zoo run` for this family.
        summary: Last line of `zoo run`, a format string over the keys that `Pipeline.run` returns.

    Raises:
        ValueError: The name is not made of lower-case words with hyphens.
    """

    name: str
    title: str
    task: str
    checkpoint: str
    former_checkpoint: str = ""
    recipe: QuantRecipe = field(default_factory=QuantRecipe)
    transient: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    run_options: tuple[RunOption, ...] = ()
    summary: str = "{precision} in {engine}"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"family name {self.name!r} must be lower-case words with hyphens")

    @abc.abstractmethod
    def pipeline(self) -> type[Pipeline]:
        """Returns the class that opens a model of this family."""

    @abc.abstractmethod
    def passes(self, preprocessing: Mapping[str, Any]) -> Sequence[Rewrite]:
        """Returns the passes from fp32.onnx to rewritten.onnx, in order.

        Args:
            preprocessing: Preprocessing of the model's card.
        """

    @abc.abstractmethod
    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """Measures the quality of several precisions on the same labelled data.

        Args:
            pipelines: {precision: opened pipeline}, fp32 first.
            data: Labelled raw data.
            on_error: "raise", or "skip" to leave out bad input.

        Returns:
            {"samples", "metrics", "difference", ...}, see `pipelines.analysis.metrics.against_fp32`.
        """

    def for_model(self, preprocessing: Mapping[str, Any]) -> Self:
        """Returns the family with its recipe and settings for one model.

        Args:
            preprocessing: Preprocessing of the model's card.
        """
        return self

    def needs(self, part: str) -> AbstractContextManager[None]:
        """Context in which a missing library raises RequestError with the command that installs it.

        Args:
            part: Part of the family that is imported in the context, such as "train".
        """
        return requires(f"{part} of {self.name}", "int8-zoo[train]")


@runtime_checkable
class Trainable(Protocol):
    """A family that trains models on raw data.

    Attributes:
        processes: How several processes train together: "torch" (torchrun, Ray), or "" if they cannot.
        takes_schema: Whether `train` takes the keywords `schema` and `label` of a log.
    """

    processes: ClassVar[str] = ""
    takes_schema: ClassVar[bool] = False

    @abc.abstractmethod
    def train_config(self) -> Any:
        """Returns the default settings of a training, a dataclass instance."""

    def for_data(self, data: Any, schema: Any = None, label: str | Sequence[str] | None = None) -> Self:
        """Returns the family with its settings for the form of training data.

        Args:
            data: Raw labelled data.
            schema: Schema that the user named, or None.
            label: Name of the label that the user gave, or None.
        """
        return self

    def finetune_config(self) -> Any:
        """Returns the default settings of fine-tuning, a dataclass instance."""
        return self.train_config()

    @abc.abstractmethod
    def train(
        self,
        data: Any,
        output: Path,
        *,
        config: Any,
        resume: bool = False,
        start_from: Path | None = None,
        on_error: str = "raise",
        **options: Any,
    ) -> dict[str, Any]:
        """Trains a model.

        Args:
            data: Raw labelled data.
            output: New folder. It gets the checkpoint, calibration.npz (one array per graph input) and train.json
                ({"features": the preprocessing for the card, "rows", "metrics", "config"}).
            config: Settings, as those of `train_config`.
            resume: Continue from the checkpoint in `output`.
            start_from: Model folder whose weights training starts from.
            on_error: "raise", or "skip" to leave out bad input.
            options: `schema` and `label` if `takes_schema`.

        Returns:
            {metric: value} on held-out data.
        """


@runtime_checkable
class SchemaInferring(Protocol):
    """A family whose data are logs with a schema, which it infers."""

    @abc.abstractmethod
    def infer_schema(
        self,
        log: Any,
        *,
        label: str | Sequence[str] | None,
        delimiter: str | None,
        on_error: str,
        kinds: Mapping[str, str],
    ) -> tuple[Any, list[str], list[list[str]]]:
        """Infers the schema of a log from all its rows.

        Args:
            log: File, folder or pattern, or a list of them.
            label: Column to predict; None to find it by its name.
            delimiter: Delimiter of CSV; None to detect it.
            on_error: "raise", or "skip" to leave out bad rows.
            kinds: {column: kind}, instead of the inferred kinds.

        Returns:
            The schema, with `to_json()` and `save(path)`; the header and the rows of its table for people.
        """


@runtime_checkable
class Freezable(Protocol):
    """A family that exports a checkpoint."""

    @abc.abstractmethod
    def freeze(self, folder: Path) -> dict[str, Any]:
        """Writes fp32.onnx from the checkpoint of a model folder; returns statistics of the graph for build.json.

        Args:
            folder: Model folder with the checkpoint.
        """


@runtime_checkable
class Lowerable(Protocol):
    """A family that lowers its models for the native kernels."""

    @abc.abstractmethod
    def lower(
        self,
        model: ir.Model,
        table: CalibrationTable,
        recipe: QuantRecipe,
        earlier: Mapping[str, Any],
        rows: Batch | None = None,
        held: bool = True,
    ) -> tuple[ir.Model | None, dict[str, Any], Mapping[str, Any]]:
        """Lowers rewritten.onnx for the native kernels.

        Args:
            model: Graph of rewritten.onnx.
            table: Calibration table of that graph.
            recipe: Quantization recipe.
            earlier: Arrays of scales of an earlier model to keep, or {}.
            rows: Samples of the model's inputs, or None.
            held: Whether the error bound of the recipe applies to the results of `rows`.

        Returns:
            The lowered model, or None, a report with the keys "fold" and "reason", and arrays of its scales.
        """

    def shared_inputs(self, preprocessing: Mapping[str, Any]) -> SharedInputs | None:
        """Returns the inputs that all samples of a ranking share, by the preprocessing; None if no items are ranked.

        Args:
            preprocessing: Preprocessing of the model's card.
        """
        return None


@runtime_checkable
class Importable(Protocol):
    """A family that imports models of other toolkits."""

    @abc.abstractmethod
    def importer(self) -> Importer:
        """Returns the reader of other formats."""


@runtime_checkable
class OnnxImportable(Protocol):
    """A family that imports ONNX models of other libraries.

    Attributes:
        command: Command that imports a model.
    """

    command: ClassVar[str]

    @abc.abstractmethod
    def from_onnx(
        self, path: Any, data: Any, output: Path, **options: Any
    ) -> tuple[str, dict[str, Any], Sequence[CardFile]]:
        """Writes a folder with fp32.onnx.

        Args:
            path: ONNX model.
            data: Rows to calibrate on.
            output: New folder.
            options: schema, family (None: found by the structure of the graph), columns, output_node, on_error.

        Returns:
            The name of the family, details of the model's card, and its files.
        """


@runtime_checkable
class Prunable(Protocol):
    """A family whose models can be pruned."""

    @abc.abstractmethod
    def prunable(self) -> type[Any]:
        """Returns the class that opens a model with its data to be pruned.

        The class takes (folder, data, *, config, importance, on_error, like) and implements
        `pipelines.compression.search.Prunable`. It also has `metric`, the name of what `quality(pipeline)` returns of
        an int8 model on held-out data, `drop`, the default accepted loss of that metric, and `batch_size`, the batch
        that is timed. With embedding tables it has `prune_rows(min_count, folder)`.
        """


@runtime_checkable
class HasNetwork(Protocol):
    """A family whose trained networks open as torch modules."""

    @abc.abstractmethod
    def network(self, folder: Path) -> tuple[dict[str, Any], Any]:
        """Opens the trained network of a folder with fp32.onnx.

        Args:
            folder: Model folder.

        Returns:
            ({"features": the preprocessing, ...}, the torch module in evaluation mode).
        """


def network_of(folder: ModelFolder) -> tuple[dict[str, Any], Any]:
    """Opens the trained network of a model folder.

    Args:
        folder: Model folder.

    Returns:
        See `HasNetwork.network`.

    Raises:
        RequestError: The family has no network in torch.
    """
    if not isinstance(folder.entry, HasNetwork):
        raise RequestError(f"found {folder.card.name} of {folder.entry.name}, a family without torch networks")
    folder.ensure("fp32.onnx")
    return folder.entry.network(folder.path)


@runtime_checkable
class Explainable(Protocol):
    """A family that measures how much the quality of its models depends on every column of the data."""

    @abc.abstractmethod
    def importance(self, pipeline: Any, data: Any, *, repeats: int, on_error: str) -> dict[str, Any]:
        """Measures the importance of every column.

        Args:
            pipeline: Opened model.
            data: Labelled raw data.
            repeats: Measurements of every column.
            on_error: "raise", or "skip" to leave out bad input.

        Returns:
            {"columns": [{"column", measure: value, ...}, ...], ...}, the most important first.
        """


@runtime_checkable
class HasTables(Protocol):
    """A family whose models look vectors up in tables, which other programs may read."""

    @abc.abstractmethod
    def export_tables(self, folder: ModelFolder, to: str, output: Path) -> dict[str, Any]:
        """Writes the tables.

        Args:
            folder: Model folder.
            to: Format: "npz" or "safetensors".
            output: File to write.

        Returns:
            {"path", ...}.
        """

    @abc.abstractmethod
    def changed_rows(self, old: ModelFolder, new: ModelFolder) -> dict[str, dict[str, int]]:
        """Counts the ids whose vectors differ: {column: {"new", "changed", "evicted", "rows" of the newer model}}.

        Args:
            old: Folder of a model.
            new: Folder of a newer one.
        """


@runtime_checkable
class Shortlistable(Protocol):
    """A family whose results can be restricted to a shortlist of words."""

    @abc.abstractmethod
    def shortlist(self, folder: ModelFolder, data: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Reads a shortlist, or builds one from parallel text.

        Args:
            folder: Model folder.
            data: Shortlist or parallel text.

        Returns:
            (entries of the card's preprocessing, {file name: content}).
        """


@runtime_checkable
class ScenarioBenchmark(Protocol):
    """A family that measures the time from raw input to results under the scenarios of MLPerf Inference."""

    @abc.abstractmethod
    def run_scenario(self, pipelines: Sequence[Any], data: Any, **options: Any) -> dict[str, Any]:
        """Measures the quality, then the time from raw input to results.

        Args:
            pipelines: Opened pipelines.
            data: Labelled raw data.
            options: scenario, count, min_accuracy, price_per_hour.
        """


@runtime_checkable
class Servable(Protocol):
    """A family with its own request handler; other families are served by the Open Inference Protocol only."""

    @abc.abstractmethod
    def handler(self) -> type[Any]:
        """Returns the subclass of `zoo.serving.handlers.base.Handler`."""


class ReportSections(Protocol):
    """Renders the reports of a family's models.

    It may also have these functions and constants:
    overview(name) -> {column: cell} for the overview of MODELS.md, OVERVIEW, the unit of these cells, and
    benchmarks(names) -> a page of docs/benchmarks/.
    """

    def sections(self, name: str) -> str:
        """Renders the section of a model in MODELS.md.

        Args:
            name: Name of the model.

        Returns:
            Markdown.
        """


@runtime_checkable
class Reported(Protocol):
    """A family whose models have sections in MODELS.md."""

    @abc.abstractmethod
    def report_sections(self) -> ReportSections:
        """Returns the module that renders reports."""
