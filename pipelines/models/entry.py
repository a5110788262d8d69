"""What a model family declares: its entry in the zoo. Frozen, and validated on creation."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.quantization.recipe import QuantRecipe


@dataclass(frozen=True)
class Entry:
    """One model of the zoo: its name, its task, and where its parts are.

    The parts are "module:attribute" strings, resolved on first use, so that looking at an entry loads neither torch nor
    tensorflow:

    train(data, output, *, config, resume, start_from, on_error) -> metrics: raw data to a folder with a checkpoint
    settings, finetune_settings: the dataclass instances that are train's `config` unless the user changes them
    freeze(folder) -> statistics: checkpoint to fp32.onnx
    rewrites(preprocessing) -> passes: what turns fp32.onnx into rewritten.onnx
    evaluate({"fp32": pipeline, "int8": pipeline, ...}, data, on_error) -> metrics and differences
    checkpoint: the file of a trained folder that freeze starts from
    pipeline: class with preprocess / predict / postprocess, see `zoo.pipeline`
    native: (rewritten model, calibration table, recipe) -> (model for the native kernels, or None, and a report with
        "fold" and "reason"); "" for a model that has no such form
    from_graph(path, data, output, *, columns, output_node, on_error) -> details of a card: a frozen TensorFlow graph
        from elsewhere, with rows to calibrate on, to a folder that freeze starts from; "" for a model without one
    harness(pipelines, data, *, scenario, count, least, price_per_hour) -> figures: the quality, then the time from raw
        input to results, one sample after the other or in a stream; "" for a model without one
    report_sections(name) -> Markdown: the part of MODELS.md on the model `name`; "" for a family without one. Its
        module may also have overview(name) -> {column: cell} for the table above, headline(name) -> lines of README and
        benchmarks(names) -> Markdown for docs/benchmarks.md
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
    harness: str = ""
    from_graph: str = ""
    report_sections: str = ""

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
        for part in (*parts, *filter(None, (self.native, self.harness, self.from_graph, self.report_sections))):
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
