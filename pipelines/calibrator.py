"""Any ONNX model to int8 in three lines: make it, feed it samples, save."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from pipelines import graph
from pipelines.batches import Batch
from pipelines.calibrate import MEMORY, CalibrationTable, Observation
from pipelines.entry import QuantRecipe
from pipelines.quantize import QuantReport, quantize
from pipelines.rewrite import rewrite
from pipelines.rewrites import SHARED


class Calibrator:
    """Observes a float model on the samples fed to it, and writes its int8 form.

        calibrator = Calibrator("model.onnx")
        calibrator.feed({"x": batch})
        calibrator.save("int8.onnx")

    model: the path of an ONNX file, or a model, which is left as it is; the shared passes rewrite it first, as `zoo quantize` does. recipe:
    how it becomes int8. max_memory: see `Observation`. Raises RequestError as `graph.load` and `Observation` do.
    """

    def __init__(self, model: str | Path | ir.Model, recipe: QuantRecipe | None = None, *, max_memory: str | int = MEMORY) -> None:
        self.recipe = recipe or QuantRecipe()
        self.model = model.clone() if isinstance(model, ir.Model) else graph.load(model)
        rewrite(self.model, [each() for each in SHARED])
        self.observation = Observation(self.model, max_memory=max_memory)

    def feed(self, batch: Batch) -> None:
        """Observe {graph input: array, first axis = samples}; as often as you like. See `Observation.feed`."""
        self.observation.feed(batch)

    def table(self) -> CalibrationTable:
        """The ranges that the recipe's observer chooses from what was fed so far."""
        return self.observation.table(self.recipe.observer, symmetric=self.recipe.symmetric)

    def save(self, path: str | Path) -> QuantReport:
        """Quantize by the recipe, write the int8 model to `path`; returns what became of every operator."""
        result, report = quantize(self.model, self.recipe, self.table())
        graph.save(result, path)
        return report
