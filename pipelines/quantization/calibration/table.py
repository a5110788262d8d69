"""Calibration tables: the ranges of one graph's tensors, with its equalization, corrections and rounding, as JSON."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_text
from pipelines.graph import io
from pipelines.quantization.calibration.observers import UNBINNED, Summary
from pipelines.quantization.qdq.scales import quantization_errors

SEARCHED = ("clip", "equalization", "recipe", "smoothing", "keep_float", "splitting")
ADJUSTMENTS = (*SEARCHED, "bias", "rounding")  # of a table that has them


@dataclass(frozen=True)
class TensorRange:
    """Observed and calibrated range of one tensor, in units of the tensor.

    Attributes:
        minimum: Least observed value.
        maximum: Greatest observed value.
        low: Lower end of the calibrated range.
        high: Upper end of the calibrated range.
        count: Number of observed values.
        method: Observer that chose the range; "" in tables of old versions.
        histogram: Summary of the observed values; None in tables of old versions, and for tensors that are not
            quantized (`Observation`).
    """

    minimum: float
    maximum: float
    low: float
    high: float
    count: int
    method: str = ""
    histogram: Summary | None = None

    def merge(self, other: TensorRange, observer: str) -> TensorRange:
        """Merges the ranges of two sets of samples.

        Takes the range of least squared error on the merged histogram, out of the two ranges and their union. Ranges of
        tensors without bins (`Histogram`) are joined.

        Args:
            other: Range of the same tensor on other samples.
            observer: Observer of the table; "minmax" always takes the union.

        Returns:
            The range for the samples of both.

        Raises:
            RequestError: One of the ranges has no histogram (old versions, quantization-aware training).
        """
        if self.method == other.method == UNBINNED:
            ends = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
            joined = min(self.low, other.low), max(self.high, other.high)
            return TensorRange(*ends, *joined, self.count + other.count, self.method)
        if self.histogram is None or other.histogram is None:
            raise RequestError(
                "cannot merge a calibration table without histograms (of quantization-aware training, or an old "
                "version); "
                "make one of all samples with: zoo calibrate"
            )
        histogram, count = self.histogram.merge(other.histogram), self.count + other.count
        minimum, maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        both = (
            min(self.low, other.low),
            max(self.high, other.high),
            self.method if self.method == other.method else "merge",
        )
        candidates = (
            [both] if observer == "minmax" else [both, *((side.low, side.high, side.method) for side in (self, other))]
        )
        lows, highs = np.array([candidate[:2] for candidate in candidates]).T
        low, high, method = candidates[
            int(np.argmin(quantization_errors(*histogram.density(minimum, maximum), count, lows, highs)))
        ]
        return TensorRange(minimum, maximum, low, high, count, method, histogram)

    def to_json(self) -> dict[str, Any]:
        """Returns the range as plain JSON values."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None)}


@dataclass(frozen=True)
class CalibrationTable:
    """Calibrated ranges of the tensors of one graph, with its equalization, bias correction and GPTQ rounding.

    Attributes:
        graph: Digest of the float graph that the table was made for; `require` refuses other graphs.
        observer: Observer that was asked for, such as "auto".
        samples: Number of calibration samples.
        samples_digest: SHA-256 of the samples, in hexadecimal.
        tensors: Range of every tensor, by name, in the order of the graph.
        clip: Whether weights are clipped, see `weight_qparams`.
        equalization: Factor of each output channel, by the name of the first layer's output, see `EqualizeChannels`.
            The ranges belong to the equalized graph.
        bias: Bias correction of each output channel, by layer, in units of the layer's output
            (`pipelines.quantization.algorithms.correction`).
        rounding: GPTQ rounding by layer, see `encode_rounding`.
        recipe: Recipe that `bias` and `rounding` were computed for; they are ignored for other recipes.
        smoothing: Factor of each channel, by the name of the value, see `smooth_channels`. The ranges belong to the
            smoothed graph.
        keep_float: Operators that stay float32, with the reason.
        splitting: Channels of which copies are appended, by the name of the value, see `split_channels`. The ranges
            belong to the split graph, and smoothing factors to all of its channels.
    """

    graph: str
    observer: str
    samples: int
    samples_digest: str
    tensors: dict[str, TensorRange] = field(default_factory=dict)
    clip: bool = False
    equalization: dict[str, tuple[float, ...]] = field(default_factory=dict)
    bias: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rounding: dict[str, str] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    smoothing: dict[str, tuple[float, ...]] = field(default_factory=dict)
    keep_float: dict[str, str] = field(default_factory=dict)
    splitting: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def require(self, model: ir.Model) -> None:
        """Checks that the table was made for a graph.

        Args:
            model: Float model to be quantized.

        Raises:
            RequestError: The table was made for another graph.
        """
        self.require_digest(io.digest(model))

    def require_digest(self, digest: str) -> None:
        """Checks that the table was made for a graph, see `require`.

        Args:
            digest: Digest of the graph, see `pipelines.graph.io.digest`.

        Raises:
            RequestError: The table was made for another graph.
        """
        if digest != self.graph:
            raise RequestError(
                f"the calibration table was made for the graph {self.graph[:12]}, this one is {digest[:12]}; "
                "calibrate this graph with: zoo calibrate"
            )

    def merge(self, other: CalibrationTable) -> CalibrationTable:
        """Merges the tables of two sets of samples; the order of the two does not matter.

        Ranges are merged by `TensorRange.merge`. Corrections are those of the table with more samples.

        Args:
            other: Table of the same graph, observer and search results.

        Returns:
            The table for the samples of both.

        Raises:
            RequestError: The tables have different graphs, observers, recipes or equalizations, or no histograms.
        """
        if any(getattr(self, key) != getattr(other, key) for key in SEARCHED):
            raise RequestError(
                "cannot merge calibration tables that were searched or corrected differently; make one of all samples"
            )
        for what, mine, its in (
            ("graphs", self.graph[:12], other.graph[:12]),
            ("observers", self.observer, other.observer),
        ):
            if mine != its:
                raise RequestError(
                    f"cannot merge calibration tables of different {what}, {mine} and {its}; make both alike: zoo "
                    "calibrate"
                )
        both = [
            name for name in self.tensors if name in other.tensors
        ]  # the rest hold infinity, or nothing, in one of the two
        tensors = {name: self.tensors[name].merge(other.tensors[name], self.observer) for name in both}
        samples = self.samples + other.samples
        more = max(self, other, key=lambda table: (table.samples, table.samples_digest))
        digest = hashlib.sha256("".join(sorted([self.samples_digest, other.samples_digest])).encode()).hexdigest()
        return replace(
            self, samples=samples, samples_digest=digest, tensors=tensors, bias=more.bias, rounding=more.rounding
        )

    def save(self, path: str | Path) -> Path:
        """Writes the table as JSON, tensors in graph order, a list of numbers on one line.

        Args:
            path: File to write.

        Returns:
            The path.
        """
        value = vars(self) | {"tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()}}
        value = {key: entry for key, entry in value.items() if entry or key not in ADJUSTMENTS}
        text = json.dumps(value, indent=2, ensure_ascii=False)
        return write_text(
            path, re.sub(r"\[\n[\d\s.,+eE-]*\]", lambda match: f"[{' '.join(match[0][1:-1].split())}]", text) + "\n"
        )

    @classmethod
    def load(cls, path: str | Path) -> CalibrationTable:
        """Reads a table from a JSON file.

        Args:
            path: File that `save` wrote.

        Returns:
            The table.

        Raises:
            RequestError: The file is missing or is not a valid table.
        """
        value = read_json(path)
        try:
            tensors = {name: _range(**fields) for name, fields in value["tensors"].items()}
            for name, tensor in tensors.items():
                numbers = (tensor.minimum, tensor.maximum, tensor.low, tensor.high)
                if (
                    not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers)
                    or tensor.low > tensor.high
                ):
                    raise RequestError(
                        f"{path} gives tensor {name} the range {tensor.low!r} to {tensor.high!r} (observed "
                        f"{tensor.minimum!r} to "
                        f"{tensor.maximum!r}); expected finite numbers, low <= high; make another with: zoo calibrate"
                    )
            equalization, bias, smoothing = (
                {name: tuple(map(float, values)) for name, values in value.get(key, {}).items()}
                for key in ("equalization", "bias", "smoothing")
            )
            rounding, kept = (
                {name: str(note) for name, note in value.get(key, {}).items()} for key in ("rounding", "keep_float")
            )
            splitting = {name: tuple(map(int, channels)) for name, channels in value.get("splitting", {}).items()}
            names = value["graph"], value["observer"], value["samples"], value["samples_digest"]
            clip, recipe = value.get("clip") is True, dict(value.get("recipe", {}))
            return cls(*names, tensors, clip, equalization, bias, rounding, recipe, smoothing, kept, splitting)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"{path} is not a calibration table ({error}); make one with: zoo calibrate") from error


def _range(histogram: Mapping[str, Any] | None = None, **value: Any) -> TensorRange:
    if histogram is not None:
        histogram = {**histogram, "counts": tuple(histogram["counts"])}
    return TensorRange(**value, histogram=None if histogram is None else Summary(**histogram))


def rounded_to_float32(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Rounds values to float32.

    Args:
        values: float64 array.

    Returns:
        For each value the float of the fewest decimal digits that rounds to the same float32.
    """
    return tuple(float(str(value)) for value in values.astype(np.float32))
