"""Post-training quantization in three lines: create a `Calibrator`, feed samples, save the int8 model."""

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
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import MEMORY, Observation
from pipelines.quantization.calibration.range_search import quantized_tensors
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.quantizer import QuantReport, quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import file_passes


class _BatchFiles:
    """Batches on disk, to iterate over as often as is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def append(self, batch: Batch) -> None:
        np.savez(self.folder / f"{self.count}.npz", **dict[str, Any](batch))
        self.count += 1

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        for index in range(self.count):
            with np.load(self.folder / f"{index}.npz") as arrays:
                yield dict(arrays)


class Calibrator:
    """Calibrates a float model on samples and writes its int8 QDQ model.

        calibrator = Calibrator("model.onnx")
        calibrator.feed({"x": batch})
        calibrator.save("int8.onnx")

    The shared rewrites are applied first, as `zoo quantize` does. The samples are kept in a temporary folder for the
    steps that read them again (search, bias correction, GPTQ).

    Args:
        model: Path of an ONNX file, or a model, which is not changed.
        recipe: Quantization options; by default `QuantRecipe()`.
        max_memory: Memory limit, see `Observation`.
        seconds: Time budget of GPTQ and bias correction, see `correct_layers`; None: no limit.

    Raises:
        RequestError: The file is not a valid model, or see `Observation`.
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
        rewrite(self.model, file_passes())
        binned = quantized_tensors(self.model, self.recipe)
        self.observation = Observation(self.model, max_memory=max_memory, binned=binned)
        self._folder = tempfile.TemporaryDirectory()
        self._batches = _BatchFiles(Path(self._folder.name))

    def feed(self, batch: Batch) -> None:
        """Observes a batch of samples; may be called any number of times.

        Args:
            batch: Array [samples, ...] for every graph input.

        Raises:
            RequestError: See `Observation.feed`.
        """
        self.observation.feed(batch)
        self._batches.append(batch)

    def table(self) -> CalibrationTable:
        """Returns the calibration table of the samples so far, with the search and corrections of the recipe.

        Raises:
            RequestError: There are no samples.
        """
        self.observation.require_samples()
        return auto_calibrate(
            self.model, self.recipe, self._batches, observation=self.observation, seconds=self.seconds
        )

    def save(self, path: str | Path) -> QuantReport:
        """Quantizes the model by the recipe and writes the int8 model.

        Args:
            path: ONNX file to write.

        Returns:
            The precision of every operator.

        Raises:
            RequestError: There are no samples, or see `quantize`.
        """
        result, report = quantize(self.model, self.recipe, self.table())
        io.save(result, path)
        return report
