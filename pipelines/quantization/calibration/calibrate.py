"""Streaming calibration: turns samples into a calibration table, one range per tensor, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.core.batches import Batch, joined, length
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from pipelines.core.settings import memory_bytes
from pipelines.graph import edit, io, query, reference_session, sample_axis
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.calibration.observers import DRAWN, Histogram, choose
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.recipe import OBSERVERS

BATCH = 256  # maximum samples per run
MEMORY = "128MB"
FOLDED_SAMPLES = range(8, 129)  # numbers of samples with which histograms are also counted in two folds
ACTIVATIONS = 0.9  # least share of the memory for activations; the less, the more often large models run


class FoldedHistogram(Histogram):
    """A histogram of all samples, and of two folds of few: the even and the odd ones; arguments: see `Histogram`."""

    def __init__(self, binned: bool = True, drawn: int | None = None) -> None:
        super().__init__(binned, drawn)
        self._folds = [Histogram(binned, drawn) for _ in range(2)]
        self._added = 0  # samples

    def add(self, x: NDArray[Any], samples: int = 1) -> None:
        """See `Histogram`."""
        super().add(x, samples)
        if self._folds and self._added + samples in range(FOLDED_SAMPLES.stop):
            rows = x.reshape(samples, -1)
            for odd, fold in enumerate(self._folds):
                if len(part := rows[(odd - self._added) % 2 :: 2]):
                    fold.add(part, len(part))
        else:
            self._folds = []
        self._added += samples

    def fold(self, odd: int) -> Histogram:
        """Returns the histogram of the even (0) or odd (1) samples, or of all if it counts nothing."""
        return self._folds[odd] if self._folds and self._folds[odd].count else self


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
        binned: Tensors whose values are counted in bins; the others get min-max ranges. None: all tensors.
        histograms: Histograms on the same samples, by tensor, of tensors that are not observed again.
        quick: Run the model with onnxruntime's optimizations, which change values by their rounding, and count at most
            `DRAWN` values of a tensor and sample in bins.

    Attributes:
        samples: Number of samples so far.
        histograms: `Histogram` of every float32 tensor, by name.

    Raises:
        RequestError: The opset is older than 13, the model has no float32 activations, or onnxruntime refuses it.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        max_memory: str | int = MEMORY,
        binned: Container[str] | None = None,
        histograms: Mapping[str, Histogram] = MappingProxyType({}),
        quick: bool = False,
    ) -> None:
        io.require_opset(model)
        self._binned, self._quick = binned, quick
        self.samples, self.histograms, self._known = 0, dict(histograms), frozenset(histograms)
        self._graph_digest = io.digest(model)
        self._model = model.clone()
        edit.expand_fp16(self._model)  # weights are no activations
        infer_shapes(self._model)  # an exporter may leave the types of inner values out
        self._tensors = [str(out.name) for node in self._model.graph for out in node.outputs if query.is_float(out)]
        self._order = [*(str(port.name) for port in model.graph.inputs), *self._tensors]
        self._tensors = [name for name in self._tensors if name not in histograms]
        if not self._tensors and not histograms:
            raise RequestError("the model has no float32 activation to quantize; export it in float32")
        most = memory_bytes(max_memory)
        loaded = 4 * query.weight_bytes(self._model)  # memory of the model and its loading, as measured
        self._activation_budget = max(most - loaded, int(ACTIVATIONS * most))
        self._shared_weights = reference_session.share_weights(self._model.graph)  # the engine does not keep it alive
        self._shape_session = _session(self._model, self._shared_weights, self._tensors, shapes=True)
        self._input_shapes: dict[str, Sequence[Any]] = {
            port.name: port.shape for port in self._shape_session.get_inputs()
        }
        firsts = {
            (shape[0] if isinstance(shape[0], int) else 0) if shape else -1 for shape in self._input_shapes.values()
        }  # 0: dynamic
        shared = len(firsts) == 1 and sample_axis.is_shared(model.graph)
        self._fixed_batch = firsts.pop() if shared else -1  # -1: no batch that all inputs share, so nothing is cut
        self._float_inputs = [
            str(port.name) for port in model.graph.inputs if query.is_float(port) and port.name in self._input_shapes
        ]
        self._output_names = {str(output.name) for output in model.graph.outputs}
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

    @property
    def has_folds(self) -> bool:
        """Whether tables of the two folds, the even and the odd samples, can be computed."""
        folded = any(isinstance(hist, FoldedHistogram) for hist in self.histograms.values())
        return folded and self.samples in FOLDED_SAMPLES

    def table(self, observer: str = "auto", *, symmetric: bool = False, fold: int | None = None) -> CalibrationTable:
        """Chooses ranges from the histograms.

        Args:
            observer: See `QuantRecipe.observer`.
            symmetric: Tensors with negatives get the range -high .. high.
            fold: 0 for the even samples alone, 1 for the odd ones, if `has_folds`; None for all.

        Returns:
            The calibration table, without corrections.

        Raises:
            RequestError: The observer is unknown, there are no samples, or their number is no multiple of the fixed
                batch size of the graph.
        """
        self.require_samples()
        tensors = {}
        with progress("choosing ranges", len(self.histograms)) as advance:
            for name in (tensor for tensor in self._order if tensor in self.histograms):
                hist = self._histogram(name, fold)
                if hist.count and hist.finite:
                    method, low, high = choose(hist, observer, symmetric)
                    tensors[name] = TensorRange(hist.low, hist.high, low, high, hist.count, method, hist.summary())
                advance(1)
        of_samples = hashlib.sha256(b"".join(sha.digest() for sha in self._input_digests.values())).hexdigest()
        return CalibrationTable(self._graph_digest, observer, self.samples, of_samples, tensors)

    def _histogram(self, name: str, fold: int | None) -> Histogram:
        histogram = self.histograms[name]
        return histogram if fold is None or not isinstance(histogram, FoldedHistogram) else histogram.fold(fold)

    def table_of_mean_extremes(
        self, deviations: float = 0.0, *, symmetric: bool = False, fold: int | None = None
    ) -> CalibrationTable:
        """Returns the table of min-max ranges, with `Histogram.mean_extremes` for the tensors counted in bins.

        Args:
            deviations: See `Histogram.mean_extremes`.
            symmetric: Tensors with negatives get the range -high .. high.
            fold: See `table`.

        Returns:
            The calibration table, without corrections.

        Raises:
            RequestError: See `table`.
        """
        table = self.table("minmax", symmetric=symmetric, fold=fold)
        tensors = dict(table.tensors)
        for name, observed in tensors.items():
            histogram = self._histogram(name, fold)
            low, high = histogram.mean_extremes(deviations)
            if symmetric and observed.low < 0:
                low, high = min(low, -high), max(-low, high)
            if histogram.binned and low < high:
                tensors[name] = replace(observed, low=low, high=high, method="mean of extremes")
        return replace(table, tensors=tensors)

    def release(self) -> None:
        """Frees the model and its sessions; no more samples can be fed afterwards."""
        del self._model, self._shape_session, self._shared_weights
        self._sessions.clear()
        reference_session.release()

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
        """Returns a batch size and groups of tensors that fit into the memory limit, for samples of these shapes.

        most: largest batch size, at least the size of `feed`; 0 for the size of `feed`.
        """
        key = most, *(array.shape for array in feed.values())
        if key not in self._plans:
            count = length(feed)
            shapes = reference_session.run(self._shape_session, feed, "calibration samples")
            bytes_of = {name: 4 * int(np.prod(shape)) for name, shape in zip(self._tensors, shapes, strict=True)}
            size = max(min(self._activation_budget // max(sum(bytes_of.values()), 1) * count, most), count)
            groups: list[list[str]] = []
            room = 0
            for name, nbytes in bytes_of.items():
                if not groups or nbytes * size // count > room:
                    groups.append([])
                    room = self._activation_budget
                groups[-1].append(name)
                room -= nbytes * size // count
            self._plans[key] = size, groups
        return self._plans[key]

    def _run(self, feed: Batch, groups: list[list[str]]) -> None:
        for name in self._float_inputs:
            if np.isnan(feed[name]).any():
                raise RequestError(f"{self._named(feed[name], np.isnan)} holds NaN in {name}; check the samples")
        samples = length(feed) if self._fixed_batch >= 0 else 1  # per array of the feed
        self._add({name: feed[name] for name in self._float_inputs if name not in self._known}, samples)
        for names in groups:
            if tuple(names) not in self._sessions:
                self._sessions[tuple(names)] = _session(self._model, self._shared_weights, names, quick=self._quick)
            self._add(
                dict(
                    zip(
                        names,
                        reference_session.run(self._sessions[tuple(names)], feed, "calibration samples"),
                        strict=True,
                    )
                ),
                samples,
            )
        for name, sha in self._input_digests.items():
            sha.update(feed[name].tobytes())
        self.samples += length(feed)

    def _add(self, arrays: Batch, samples: int) -> None:
        for name, array in arrays.items():
            if name not in self.histograms:
                binned = self._binned is None or name in self._binned
                kind = FoldedHistogram if binned else Histogram
                self.histograms[name] = kind(binned, DRAWN if self._quick else None)
            self.histograms[name].add(array, samples if array.ndim and len(array) == samples else 1)
            if name in self._output_names and not self.histograms[name].finite:
                where = self._named(array, lambda x: ~np.isfinite(x))
                raise RequestError(f"the model computes NaN or infinity on {where}; check the samples and the model")

    def _named(self, array: NDArray[Any], wrong: Callable[[NDArray[Any]], Any]) -> str:
        """Names the first sample of a batch with a wrong value, counted from 0 over all batches."""
        count = len(array) if array.ndim else 0
        if self._fixed_batch < 0 or not count:
            return f"calibration sample {self.samples}"
        first = int(wrong(array).reshape(count, -1).any(axis=1).argmax())
        return f"calibration sample {self.samples + first} (the first is 0)"


def observe(
    model: ir.Model,
    samples: Iterable[Batch],
    total: int | None = None,
    *,
    max_memory: str | int = MEMORY,
    binned: Container[str] | None = None,
    histograms: Mapping[str, Histogram] = MappingProxyType({}),
    quick: bool = False,
) -> Observation:
    """Observes a model on samples.

    Args:
        model: Float model.
        samples: Batches of any size, array [samples, ...] for every graph input.
        total: Number of samples, for the progress bar.
        max_memory: See `Observation`.
        binned: See `Observation`.
        histograms: See `Observation`.
        quick: See `Observation`.

    Returns:
        The observation, which accepts more samples.

    Raises:
        RequestError: See `Observation` and `Observation.feed`.
    """
    observation = Observation(model, max_memory=max_memory, binned=binned, histograms=histograms, quick=quick)
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
    binned: Container[str] | None = None,
) -> CalibrationTable:
    """Calibrates a float model on samples: `observe`, then `Observation.table`.

    Args:
        model: Float model.
        samples: Batches of any size, array [samples, ...] for every graph input.
        observer: See `QuantRecipe.observer`.
        total: Number of samples, for the progress bar.
        max_memory: See `Observation`.
        symmetric: Tensors with negatives get the range -high .. high.
        binned: See `Observation`.

    Returns:
        The calibration table, without search results and corrections.

    Raises:
        RequestError: See `observe` and `Observation.table`.
    """
    if observer not in OBSERVERS:
        raise RequestError(f"unknown observer {observer!r}; choose one of {', '.join(OBSERVERS)}")
    observation = observe(model, samples, total, max_memory=max_memory, binned=binned)
    observation.release()
    return observation.table(observer, symmetric=symmetric)


def _session(
    model: ir.Model,
    shared: Mapping[str, ort.OrtValue],
    names: Sequence[str],
    *,
    shapes: bool = False,
    quick: bool = False,
) -> ort.InferenceSession:
    """A session that computes the tensors `names` of `model`, in their order; or, if `shapes`, only their shapes.

    quick: with onnxruntime's optimizations.
    """
    copy = model.clone()
    values = {str(out.name): out for node in copy.graph for out in node.outputs}
    requested = [values[name] for name in names]
    for value in values.values():
        value.shape = None  # an output's shape is checked against the run's, and inference may have guessed
    if shapes:
        taken = query.used_names(copy.graph)
        nodes = [
            edit.node("Shape", [value], f"{value.name}.shape", dtype=ir.DataType.INT64, taken=taken)
            for value in requested
        ]
        copy.graph.extend(nodes)
        requested = [node.outputs[0] for node in nodes]
    copy.graph.outputs[:] = requested
    RemoveUnusedNodesPass()(copy)
    options = reference_session.options(quick, lean=True, prepack=quick)
    used = [name for name in shared if name in copy.graph.initializers]
    options.add_external_initializers(used, [shared[name] for name in used])
    return reference_session.session(copy, "calibration needs", options)
