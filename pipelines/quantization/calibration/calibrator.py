"""Post-training quantization of any ONNX model in three lines: a `Calibrator`, samples fed, int8 model saved."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.graph import io
from pipelines.quantization.algorithms.correction import SECONDS
from pipelines.quantization.calibration.auto_calibration import best_table
from pipelines.quantization.calibration.calibrate import MEMORY, CalibrationTable, Observation
from pipelines.quantization.quantize import QuantReport, quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED


class _BatchFiles:
    """Batches on disk, to iterate over as often as is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def append(self, batch: Batch) -> None:
        np.savez(self.folder / f"{self.count}.npz", **dict[str, Any](batch))
        self.count += 1

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        for at in range(self.count):
            with np.load(self.folder / f"{at}.npz") as arrays:
                yield dict(arrays)


class Calibrator:
    """Calibrates a float model on the samples fed to it, and writes its int8 QDQ form.

        calibrator = Calibrator("model.onnx")
        calibrator.feed({"x": batch})
        calibrator.save("int8.onnx")

    model: the path of an ONNX file, or a model, which is left as it is; the shared passes rewrite it first, as `zoo
    quantize` does. recipe: how it becomes int8; what needs the samples again (bias correction, a search) finds them in
    a temporary folder. max_memory: see `Observation`. seconds: the time budget of bias correction and GPTQ, see
    `correct_layers`; None: without. Raises RequestError as `graph.load` and `Observation` do.
    """

    def __init__(
        self,
        model: str | Path | ir.Model,
        recipe: QuantRecipe | None = None,
        *,
        max_memory: str | int = MEMORY,
        seconds: float | None = SECONDS,
    ) -> None:
        self.recipe, self.seconds = recipe or QuantRecipe(), seconds
        self.model = model.clone() if isinstance(model, ir.Model) else io.load(model)
        rewrite(self.model, [each() for each in SHARED])
        self.observation = Observation(self.model, max_memory=max_memory)
        self._folder = tempfile.TemporaryDirectory()
        self._batches = _BatchFiles(Path(self._folder.name))

    def feed(self, batch: Batch) -> None:
        """Observe {graph input: array, first axis = samples}; as often as you like. Raises as `Observation.feed`."""
        self.observation.feed(batch)
        self._batches.append(batch)

    def table(self) -> CalibrationTable:
        """The calibration table of the samples so far, with the search and the corrections that the recipe asks for."""
        self.observation.require_samples()
        return best_table(self.model, self.recipe, self._batches, observation=self.observation, seconds=self.seconds)

    def save(self, path: str | Path) -> QuantReport:
        """Quantize by the recipe, write the int8 model to `path`; the precision of every operator."""
        result, report = quantize(self.model, self.recipe, self.table())
        io.save(result, path)
        return report
