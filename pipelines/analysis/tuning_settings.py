"""Trial recipes of the tuner, and the builder of their int8 models from shared calibrations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch, cut, joined, length, share_axis
from pipelines.graph import io
from pipelines.quantization import ptq
from pipelines.quantization.calibration.calibrate import Observation, observe
from pipelines.quantization.calibration.range_search import search_ranges
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.quantizer import QuantReport, quantize
from pipelines.quantization.recipe import QuantRecipe

LAYERS = ("Conv", "Gemm", "MatMul")
Searched = tuple[bool, dict[str, tuple[float, ...]]]  # `clip` and `equalization` of a `CalibrationTable`
Made = tuple[ir.Model, QuantReport, CalibrationTable]


@dataclass(frozen=True)
class Settings:
    """One recipe to try, see `QuantRecipe`.

    Attributes:
        observer: See `QuantRecipe`.
        symmetric: See `QuantRecipe`.
        search: See `QuantRecipe`.
        correct: See `QuantRecipe`.
        dynamic: Whether all matrix products are dynamic (`Maker.products`).
        keep_float: Names of float operators.
    """

    observer: str = "auto"
    symmetric: bool = False
    search: bool = False
    correct: bool = True
    dynamic: bool = False
    keep_float: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The settings as text, such as "auto + search + correct"."""
        words = [self.observer, *(key for key in ("symmetric", "search", "correct", "dynamic") if getattr(self, key))]
        return " + ".join([*words, *([f"{len(self.keep_float)} float"] if self.keep_float else [])])

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as plain JSON values."""
        return {**dataclasses.asdict(self), "keep_float": list(self.keep_float)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Settings:
        """Reads settings.

        Args:
            value: Result of `to_json`.
        """
        return cls(**{**value, "keep_float": tuple(value["keep_float"])})


PLAIN = Settings("minmax", correct=False)  # the fastest to make


class Maker:
    """Makes the int8 model of any `Settings` by the steps of `ptq.make_table`; shared steps run once.

    Shared are the search for equalization and clipping, the observation of each graph (original and equalized), and the
    ranges of each observer.

    Args:
        model: Float model.
        samples: Calibration batches; iterated several times.
        recipe: Options that all trials share.
        total: Number of samples.
    """

    def __init__(
        self, model: ir.Model, samples: Iterable[Batch], recipe: QuantRecipe, total: int | None = None
    ) -> None:
        self.model, self.samples, self._recipe, self._total = model, samples, recipe, total
        self.searched: Searched | None = None  # result of `ptq.search_equalization`, computed on demand
        self._observations: dict[bool, tuple[ir.Model, Observation]] = {}  # by whether channels are equalized
        self._tables: dict[Settings, CalibrationTable] = {}

    def recipe(self, settings: Settings) -> QuantRecipe:
        """Returns the shared recipe with these settings.

        Args:
            settings: Settings of a trial.
        """
        dynamic = self.products(settings) if settings.dynamic else []
        return dataclasses.replace(
            self._recipe,
            observer=settings.observer,
            symmetric=settings.symmetric,
            search=settings.search,
            correct=settings.correct,
            keep_float=(*self._recipe.keep_float, *map(re.escape, settings.keep_float)),
            dynamic=(*self._recipe.dynamic, *map(re.escape, dynamic)),
        )

    def products(self, settings: Settings) -> list[str]:
        """Returns the names of the int8 Gemm and MatMul operators if they are the majority of the int8 layers, else [].

        Args:
            settings: Settings of a trial.
        """
        quantized = self.make(Settings(settings.observer, settings.symmetric, correct=False))[1]
        layers = {operator.name: operator.type for operator in quantized.operators if operator.precision == "int8"}
        layers = {name: kind for name, kind in layers.items() if kind in LAYERS}
        products = [name for name, kind in layers.items() if kind != "Conv"]
        return products if 2 * len(products) > len(layers) else []

    def make(self, settings: Settings) -> Made:
        """Makes the int8 model of a trial.

        Args:
            settings: Settings of a trial.

        Returns:
            The int8 model, its report and its calibration table.
        """
        recipe = self.recipe(settings)
        table = self._table(Settings(settings.observer, settings.symmetric, settings.search))
        if settings.correct:
            table = ptq.correct_table(self.model, recipe, table, self.samples)
        return *quantize(self.model, recipe, table), table

    def plain(self, count: int) -> Made:
        """Makes the int8 model of `PLAIN`, calibrated on the first samples.

        Args:
            count: Number of calibration samples.

        Returns:
            See `make`.
        """
        recipe = self.recipe(PLAIN)
        table = ptq.make_table(self.model, recipe, [first_samples(self.samples, count)])
        return *quantize(self.model, recipe, table), table

    def _table(self, settings: Settings) -> CalibrationTable:
        """Makes the table with equalization, clipping and ranges, without corrections."""
        if settings not in self._tables:
            clip, factors = self._search() if settings.search else (False, {})
            model, observation = self._observed(factors)
            table = observation.table(settings.observer, symmetric=settings.symmetric)
            if settings.search:
                table = search_ranges(model, self.recipe(settings), table, ptq.held_out(self.model, self.samples)[0])
            self._tables[settings] = dataclasses.replace(
                table, graph=io.digest(self.model), clip=clip, equalization=factors
            )
        return self._tables[settings]

    def _search(self) -> Searched:
        """Whether weights are clipped, and the equalization, by the default observer: the same in every run."""
        if self.searched is None:
            self.searched = ptq.search_equalization(self.model, self.recipe(Settings(search=True)), self.samples)[0]
        return self.searched

    def _observed(self, factors: dict[str, tuple[float, ...]]) -> tuple[ir.Model, Observation]:
        """Returns the equalized model and its observation."""
        if bool(factors) not in self._observations:
            model = ptq.equalized(self.model, factors)
            self._observations[bool(factors)] = model, observe(model, self.samples, self._total)
        return self._observations[bool(factors)]


def first_samples(samples: Iterable[Batch], count: int) -> dict[str, NDArray[Any]]:
    """Returns the first samples as one batch; only the first batch if others have other shapes.

    Args:
        samples: Batches.
        count: Number of samples.

    Returns:
        The batch.
    """
    parts: list[Batch] = []
    for batch in samples:
        if not share_axis(batch):
            return dict(parts[0] if parts else batch)
        if parts and any(array.shape[1:] != parts[0][name].shape[1:] for name, array in batch.items()):
            break
        parts.append(batch)
        if sum(map(length, parts)) >= count:
            break
    return next(cut(joined(parts), count))
