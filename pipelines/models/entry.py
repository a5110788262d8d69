"""What a model family declares: its entry in the zoo. Frozen, and checked when it is made."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import RequestError
from pipelines.quantization.recipe import QuantRecipe

if TYPE_CHECKING:
    from pipelines.models.hub import CardFile


@dataclass(frozen=True)
class RunOption:
    """An option of `zoo run` that only this family has: passed to `Pipeline.run` as `name` where the user gives it.

    kind: int, float, str, or bool for a flag. default: what `run` takes without it; the help tells it, unless it is
    None or False. summary: the line that `zoo run` ends with where it is given, instead of the entry's.
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
    """How a family reads models of other toolkits.

    formats: {name: what it is of}. recognize(path) -> the name of a format, "" for none of them. write(path, output, *,
    format, **options) -> (details of a card, files that came): the model at `path` as a folder that freeze starts from;
    raises RequestError with all that is wrong with it, before anything is written. options: names of those it takes.
    patterns: of the files that are fetched from a hub.
    """

    formats: Mapping[str, str]
    recognize: Callable[[Path], str]
    write: Callable[..., tuple[dict[str, Any], list[CardFile]]]
    options: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A model family: its name, its task, where its parts are, and what verbs must know of it.

    The parts are "module:attribute" strings, imported on first use, so that opening an entry loads neither torch nor
    tensorflow:

    train(data, output, *, config, resume, start_from, on_error) -> metrics: raw data to a folder with a checkpoint,
        train.json ({"features": the preprocessing for the card, "rows", "metrics", "config"}) and, for calibration,
        calibration.npz (one array per graph input)
    settings, finetune_settings: the dataclass instances that are train's `config` unless the user changes them
    freeze(folder) -> statistics: checkpoint to fp32.onnx
    rewrites(preprocessing) -> passes: what turns fp32.onnx into rewritten.onnx
    evaluate({"fp32": pipeline, "int8": pipeline, ...}, data, on_error) -> {"samples", "metrics", "difference", ...},
        see `pipelines.analysis.metrics.against_fp32`
    pipeline: a subclass of `pipelines.models.pipeline.Pipeline`
    native: (rewritten model, calibration table, recipe) -> (model for the native kernels, or None, and a report with
        "fold" and "reason"); "" for a model that has no such form
    from_graph(path, data, output, *, columns, output_node, on_error) -> details of a card: a frozen TensorFlow graph
        from elsewhere, with rows to calibrate on, to a folder that freeze starts from; "" for a model without one
    from_onnx(path, data, output, *, schema, family, columns, output_node, on_error) -> (the family it is, details of a
        card, files that came): an ONNX model of other libraries with the schema of its log, the same way; "" for a
        model without one
    importer: a module's `Importer`, which reads models of other toolkits; "" for a family without one
    shortlist(folder, data) -> (what the card's preprocessing says of it, {name: bytes} of its files): which words a
        result may have, read or learned from `data`; "" for a family without one
    harness(pipelines, data, *, scenario, count, least, price_per_hour) -> figures: the quality, then the time from raw
        input to results, one sample after the other or in a stream; "" for a model without one
    network(folder) -> ({"features": the preprocessing, "classes", ...}, the trained network in torch) of an image
        classifier's folder with fp32.onnx; "" for a family that is none
    prune(folder, data, *, config, importance, on_error, like) -> a `pipelines.compression.search.Prunable` that also
        has metric, the name of what `quality(folder)` gives of an int8 model on the held-out data, drop, how much of it
        may be lost, and batch_size, of which the time counts; where tables have a row for each value of a vocabulary
        also fewer_rows(least, folder), see `zoo.recommenders.training.pruning`; "" for a family that cannot be pruned
    report_sections(name) -> Markdown: the part of MODELS.md on the model `name`; "" for a family without one. Its
        module may also have overview(name) -> {column: cell} and OVERVIEW, the unit, for its overview, and
        benchmarks(names) -> Markdown for docs/benchmarks.md

    Plain data:

    checkpoint: the file of a trained folder that freeze starts from
    former_checkpoint: the one in folders that an earlier version trained, "" where it was no other
    recipe: how the models are quantized unless a user says otherwise
    files: what ships with a model besides its graphs and tables, e.g. a vocabulary
    run_options: options of `zoo run` for this family alone
    processes: whose processes may train together: "torch" (torchrun, Ray); "" for one alone
    schema: whether train takes a schema of the log's columns and the name of its label, as keywords of these names
    by_schema: the family that trains on a log with columns of its own, where this one takes a fixed form alone
    summary: the line that `zoo run` ends with, a format of what `Pipeline.run` returns, e.g. "{rows:,} rows"
    """

    name: str
    title: str
    task: str
    train: str
    settings: str
    finetune_settings: str
    freeze: str
    rewrites: str
    evaluate: str
    pipeline: str
    checkpoint: str
    recipe: QuantRecipe = field(default_factory=QuantRecipe)
    native: str = ""
    importer: str = ""
    shortlist: str = ""
    harness: str = ""
    from_graph: str = ""
    from_onnx: str = ""
    report_sections: str = ""
    network: str = ""
    prune: str = ""
    files: tuple[str, ...] = ()
    run_options: tuple[RunOption, ...] = ()
    processes: str = ""
    former_checkpoint: str = ""
    schema: bool = False
    by_schema: str = ""
    summary: str = "{precision} in {engine}"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.name):
            raise ValueError(f"entry name {self.name!r} must be lower-case words with hyphens")
        parts = (
            self.train,
            self.settings,
            self.finetune_settings,
            self.freeze,
            self.rewrites,
            self.evaluate,
            self.pipeline,
        )
        optional = (self.native, self.importer, self.harness, self.from_graph, self.from_onnx, self.report_sections)
        late = (self.network, self.prune, self.shortlist)
        for part in (*parts, *filter(None, optional + late)):
            if part.count(":") != 1:
                raise ValueError(f"{self.name}: {part!r} is not 'module:attribute'")

    def part(self, name: str) -> Any:
        """Import and return one of the parts. Raises RequestError where a library it needs is not installed."""
        module, attribute = str(getattr(self, name)).split(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("zoo", "pipelines"):
                raise
            raise RequestError(
                f"{name} of {self.name} needs {error.name}, which is not installed; run: pip install 'int8-zoo[train]'"
            ) from error
