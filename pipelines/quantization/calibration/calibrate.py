"""Streaming calibration: turns samples into a calibration table, one range per tensor, in bounded memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.core import machine
from pipelines.core.batches import Batch, joined, length
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_text
from pipelines.core.progress import progress
from pipelines.graph import edit, io, query, reference_session
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.calibration.observers import Histogram, Summary, choose, errors
from pipelines.quantization.recipe import OBSERVERS

BATCH = 256  # samples run at once, where the memory allows it
MEMORY = "128MB"
SHARED_WEIGHT_BYTES = 1 << 16  # bytes of a weight that sessions share
SEARCHED = ("clip", "equalization", "recipe", "smoothing", "keep_float")
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
        histogram: Summary of the observed values; None in tables of old versions.
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

        Takes the range of least squared error on the merged histogram, out of the two ranges and their union.

        Args:
            other: Range of the same tensor on other samples.
            observer: Observer of the table; "minmax" always takes the union.

        Returns:
            The range for the samples of both.

        Raises:
            RequestError: One of the ranges has no histogram (old versions, quantization-aware training).
        """
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
            [both] if observer == "minmax" else [both, *((each.low, each.high, each.method) for each in (self, other))]
        )
        lows, highs = np.array([each[:2] for each in candidates]).T
        low, high, method = candidates[int(np.argmin(errors(*histogram.density(minimum, maximum), count, lows, highs)))]
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

    def require(self, model: ir.Model) -> None:
        """Checks that the table was made for a graph.

        Args:
            model: Float model to be quantized.

        Raises:
            RequestError: The table was made for another graph.
        """
        digest = io.digest(model)
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
        more = max(self, other, key=lambda each: (each.samples, each.samples_digest))
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
        value = vars(self) | {"tensors": {name: each.to_json() for name, each in self.tensors.items()}}
        value = {key: each for key, each in value.items() if each or key not in ADJUSTMENTS}
        text = json.dumps(value, indent=2, ensure_ascii=False)
        return write_text(
            path, re.sub(r"\[\n[\d\s.,+eE-]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"
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
            tensors = {name: _range(**each) for name, each in value["tensors"].items()}
            for name, each in tensors.items():
                numbers = (each.minimum, each.maximum, each.low, each.high)
                if (
                    not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers)
                    or each.low > each.high
                ):
                    raise RequestError(
                        f"{path} gives tensor {name} the range {each.low!r} to {each.high!r} (observed "
                        f"{each.minimum!r} to "
                        f"{each.maximum!r}); wanted finite numbers, low <= high; make another table with: zoo calibrate"
                    )
            equalization, bias, smoothing = (
                {name: tuple(map(float, each)) for name, each in value.get(key, {}).items()}
                for key in ("equalization", "bias", "smoothing")
            )
            rounding, kept = (
                {name: str(each) for name, each in value.get(key, {}).items()} for key in ("rounding", "keep_float")
            )
            names = value["graph"], value["observer"], value["samples"], value["samples_digest"]
            clip, recipe = value.get("clip") is True, dict(value.get("recipe", {}))
            return cls(*names, tensors, clip, equalization, bias, rounding, recipe, smoothing, kept)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"{path} is not a calibration table ({error}); make one with: zoo calibrate") from error


def _range(histogram: Mapping[str, Any] | None = None, **value: Any) -> TensorRange:
    if histogram is not None:
        histogram = {**histogram, "counts": tuple(histogram["counts"])}
    return TensorRange(**value, histogram=None if histogram is None else Summary(**histogram))


class Observation:
    """Histograms of the float32 activations of a model on samples.

    `feed` may be called any number of times. `table` chooses ranges by any observer from the histograms so far, without
    another run of the model.

    Fewer samples than `BATCH` run at once if `max_memory` requires it. If one sample needs more memory, its tensors are
    observed in groups, with one run of the graph up to the last tensor of each group.

    Args:
        model: Float model; it is not changed.
        max_memory: Memory limit for the model and the activations held at once, in bytes or as text such as "1GB" (1000
            MB; "GiB" is 1024 MiB).

    Attributes:
        samples: Number of samples so far.
        histograms: `Histogram` of every float32 tensor, by name.

    Raises:
        RequestError: The opset is older than 13, the model has no float32 activations, or onnxruntime refuses it.
    """

    def __init__(self, model: ir.Model, *, max_memory: str | int = MEMORY) -> None:
        io.require_opset(model)
        self.samples, self.histograms = 0, dict[str, Histogram]()
        self._graph_digest = io.digest(model)
        self._model = model.clone()
        edit.expand_fp16(self._model)  # weights are no activations
        infer_shapes(self._model)  # an exporter may leave the types of inner values out
        self._tensors = [str(out.name) for node in self._model.graph for out in node.outputs if query.is_float(out)]
        if not self._tensors:
            raise RequestError("the model has no float32 activation to quantize; export it in float32")
        most = memory_bytes(max_memory)
        loaded = 4 * query.weight_bytes(self._model)  # what the model and its loading take, as measured
        self._activation_budget = max(most - loaded, most // 4)
        self._shared_weights = _share_large_weights(self._model.graph)  # the engine does not keep it alive
        self._shape_session = _session(self._model, self._shared_weights, self._tensors, shapes=True)
        self._input_shapes: dict[str, Sequence[Any]] = {
            each.name: each.shape for each in self._shape_session.get_inputs()
        }
        first = {
            (shape[0] if isinstance(shape[0], int) else 0) if shape else -1 for shape in self._input_shapes.values()
        }  # 0: dynamic
        self._fixed_batch = (
            first.pop() if len(first) == 1 else -1
        )  # -1: no batch that all inputs share, so nothing is cut
        self._float_inputs = [
            str(each.name) for each in model.graph.inputs if query.is_float(each) and each.name in self._input_shapes
        ]
        self._output_names = {str(each.name) for each in model.graph.outputs}
        self._leftover: Batch = {}
        self._plans: dict[Any, tuple[int, list[list[str]]]] = {}
        self._sessions: dict[tuple[str, ...], ort.InferenceSession] = {}
        self._input_digests = {
            name: hashlib.sha256() for name in sorted(self._input_shapes)
        }  # one an input: independent of batching

    def feed(self, batch: Batch) -> None:
        """Observes a batch of samples; any number is allowed, also if the graph has a fixed batch size.

        A tensor that holds NaN or infinity, such as a mask of -infinity in attention, gets no range.

        Args:
            batch: Array [samples, ...] for every graph input.

        Raises:
            RequestError: The inputs are wrong, or an output of the model is NaN or infinite.
        """
        if set(batch) != set(self._input_shapes):
            raise RequestError(
                f"calibration samples hold {', '.join(sorted(batch))}; the graph takes {', '.join(self._input_shapes)}"
            )
        feed = {name: np.ascontiguousarray(batch[name]) for name in self._input_shapes}
        if self._fixed_batch < 0 or len({array.shape[:1] for array in feed.values()}) > 1:
            self._run(feed, self._plan(feed)[1])
            return
        if self._leftover:
            feed = joined([self._leftover, feed])
        count = length(feed)
        if count < max(self._fixed_batch, 1):
            self._leftover = feed if count else {}
            return
        size, groups = self._plan(
            {name: array[: self._fixed_batch or 1] for name, array in feed.items()}, most=self._fixed_batch or BATCH
        )
        end = count - count % self._fixed_batch if self._fixed_batch else count
        for start in range(0, end, size):
            self._run({name: array[start : min(start + size, end)] for name, array in feed.items()}, groups)
        self._leftover = {name: array[end:].copy() for name, array in feed.items()} if end < count else {}

    def table(self, observer: str = "auto", *, symmetric: bool = False) -> CalibrationTable:
        """Chooses ranges from the histograms.

        Args:
            observer: See `QuantRecipe.observer`.
            symmetric: Tensors with negatives get the range -high .. high.

        Returns:
            The calibration table, without corrections.

        Raises:
            RequestError: The observer is unknown, there are no samples, or their number is no multiple of the fixed
                batch size of the graph.
        """
        self.require_samples()
        tensors = {}
        with progress("choosing ranges", len(self.histograms)) as advance:
            for name, each in self.histograms.items():
                if each.count and each.finite:
                    method, low, high = choose(each, observer, symmetric)
                    tensors[name] = TensorRange(each.low, each.high, low, high, each.count, method, each.summary())
                advance(1)
        of_samples = hashlib.sha256(b"".join(sha.digest() for sha in self._input_digests.values())).hexdigest()
        return CalibrationTable(self._graph_digest, observer, self.samples, of_samples, tensors)

    def release(self) -> None:
        """Frees the model and its sessions; no more samples can be fed afterwards."""
        del self._model, self._shape_session, self._shared_weights
        self._sessions.clear()
        machine.trim()

    def require_samples(self) -> None:
        """Checks that there are samples.

        Raises:
            RequestError: There are no samples, or their number is no multiple of the fixed batch size of the graph.
        """
        if self._leftover:
            raise RequestError(
                f"the graph takes {self._fixed_batch} samples at a time and {length(self._leftover)} are left over; "
                f"give a multiple of {self._fixed_batch}, or export the model with a dynamic batch"
            )
        if self.samples == 0:
            raise RequestError("no calibration samples; pass at least one")

    def _plan(self, feed: Batch, most: int = 0) -> tuple[int, list[list[str]]]:
        """(batch size, groups of tensors to observe in turn) that keep within the memory, for samples shaped like
        these.

        most: run so many at once where there is room, and no fewer than in `feed`; 0 runs just those.
        """
        key = most, *(array.shape for array in feed.values())
        if key not in self._plans:
            count = length(feed)
            shapes = reference_session.run(self._shape_session, feed, "calibration samples")
            bytes_of = {name: 4 * int(np.prod(shape)) for name, shape in zip(self._tensors, shapes, strict=True)}
            size = max(min(self._activation_budget // max(sum(bytes_of.values()), 1) * count, most), count)
            groups: list[list[str]] = []
            room = 0
            for name, each in bytes_of.items():
                if not groups or each * size // count > room:
                    groups.append([])
                    room = self._activation_budget
                groups[-1].append(name)
                room -= each * size // count
            self._plans[key] = size, groups
        return self._plans[key]

    def _run(self, feed: Batch, groups: list[list[str]]) -> None:
        if wrong := [name for name in self._float_inputs if np.isnan(feed[name]).any()]:
            raise RequestError(f"the calibration samples hold NaN in {wrong[0]}; check the samples")
        self._add({name: feed[name] for name in self._float_inputs})
        for names in groups:
            if tuple(names) not in self._sessions:
                self._sessions[tuple(names)] = _session(self._model, self._shared_weights, names)
            self._add(
                dict(
                    zip(
                        names,
                        reference_session.run(self._sessions[tuple(names)], feed, "calibration samples"),
                        strict=True,
                    )
                )
            )
        for name, sha in self._input_digests.items():
            sha.update(feed[name].tobytes())
        self.samples += length(feed)

    def _add(self, arrays: Batch) -> None:
        for name, array in arrays.items():
            self.histograms.setdefault(name, Histogram()).add(array)
            if name in self._output_names and not self.histograms[name].finite:
                raise RequestError(
                    "the model computes NaN or infinity on the calibration samples; check the samples and the model"
                )


def observe(
    model: ir.Model, samples: Iterable[Batch], total: int | None = None, *, max_memory: str | int = MEMORY
) -> Observation:
    """Observes a model on samples.

    Args:
        model: Float model.
        samples: Batches of any size, array [samples, ...] for every graph input.
        total: Number of samples, for the progress bar.
        max_memory: See `Observation`.

    Returns:
        The observation, which accepts more samples.

    Raises:
        RequestError: See `Observation` and `Observation.feed`.
    """
    observation = Observation(model, max_memory=max_memory)
    with progress("calibrating", total) as advance:
        for batch in samples:
            seen = observation.samples
            observation.feed(batch)
            advance(observation.samples - seen)
    return observation


def calibrate(
    model: ir.Model,
    samples: Iterable[Batch],
    observer: str = "auto",
    total: int | None = None,
    *,
    max_memory: str | int = MEMORY,
    symmetric: bool = False,
) -> CalibrationTable:
    """Calibrates a float model on samples: `observe`, then `Observation.table`.

    Args:
        model: Float model.
        samples: Batches of any size, array [samples, ...] for every graph input.
        observer: See `QuantRecipe.observer`.
        total: Number of samples, for the progress bar.
        max_memory: See `Observation`.
        symmetric: Tensors with negatives get the range -high .. high.

    Returns:
        The calibration table, without search results and corrections.

    Raises:
        RequestError: See `observe` and `Observation.table`.
    """
    if observer not in OBSERVERS:
        raise RequestError(f"unknown observer {observer!r}; choose one of {', '.join(OBSERVERS)}")
    return observe(model, samples, total, max_memory=max_memory).table(observer, symmetric=symmetric)


def memory_bytes(text: str | int) -> int:
    """Parses a memory size.

    Args:
        text: Size such as "1GB", "512 MiB" or 1000000.

    Returns:
        The size in bytes.

    Raises:
        RequestError: The text is not a size, or is 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(text).strip(), re.IGNORECASE)
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if size <= 0:
        raise RequestError(f"the memory {text!r} is no size; write it like 1GB or 512MB")
    return size


def rounded_to_float32(values: NDArray[np.float64]) -> tuple[float, ...]:
    """Rounds values to float32.

    Args:
        values: float64 array.

    Returns:
        For each value the float of the fewest decimal digits that rounds to the same float32.
    """
    return tuple(float(str(each)) for each in values.astype(np.float32))


def _session(
    model: ir.Model, shared: Mapping[str, ort.OrtValue], names: Sequence[str], *, shapes: bool = False
) -> ort.InferenceSession:
    """A session that computes the tensors `names` of `model`, in their order; or, if `shapes`, only their shapes."""
    copy = model.clone()
    values = {str(out.name): out for node in copy.graph for out in node.outputs}
    wanted = [values[name] for name in names]
    for value in values.values():
        value.shape = None  # an output's shape is checked against the run's, and inference may have guessed
    if shapes:
        taken = query.used_names(copy.graph)
        nodes = [
            edit.node("Shape", [value], f"{value.name}.shape", dtype=ir.DataType.INT64, taken=taken) for value in wanted
        ]
        copy.graph.extend(nodes)
        wanted = [each.outputs[0] for each in nodes]
    copy.graph.outputs[:] = wanted
    RemoveUnusedNodesPass()(copy)
    options = reference_session.options()
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # they keep more than is in use
    options.add_session_config_entry("session.disable_prepacking", "1")  # a copy of the weights
    used = [name for name in shared if name in copy.graph.initializers]
    options.add_external_initializers(used, [shared[name] for name in used])
    return reference_session.session(copy, "calibration needs", options)


def _share_large_weights(main: ir.Graph) -> dict[str, ort.OrtValue]:
    """Take large weights out of the graph, for all sessions to share, and for serialization below 2 GB: {name:
    value}.
    """
    shared = {}
    for name, value in main.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT and tensor.nbytes >= SHARED_WEIGHT_BYTES:
            shared[name] = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(tensor.numpy()))
            value.const_value = ir.ExternalTensor(
                name, 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.numpy().shape), name=name
            )
    return shared
