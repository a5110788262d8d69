"""Streaming observers: samples in, one range per tensor out. Memory does not grow with the number of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray
from onnx_ir.passes.common import ShapeInferencePass

from pipelines import graph
from pipelines.entry import OBSERVERS
from pipelines.errors import RequestError
from pipelines.files import read_json, write_json
from pipelines.progress import progress

Batch = Mapping[str, NDArray[Any]]
BINS = 2048
KEPT = 0.99
BATCH = 256  # samples run at once, for all activations of a batch are held in memory


class Histogram:
    """Counts of x in bins of one power-of-two width, anchored at zero: bins of a wider range are exact sums of finer ones.

    So the result does not depend on how samples are batched. At most `2 * BINS` bins are kept, BINS on either side of zero.
    """

    def __init__(self) -> None:
        self.low, self.high, self.count = np.inf, -np.inf, 0
        self.exponent: int | None = None  # bin width 2**exponent
        self.bins = np.zeros(2 * BINS, np.int64)  # bin i holds [(i - BINS) w, (i - BINS + 1) w)

    def add(self, x: NDArray[Any]) -> None:
        """Count every element of `x`. Raises RequestError on NaN or infinity."""
        if x.size == 0:
            return
        low, high = float(x.min()), float(x.max())
        if not np.isfinite([low, high]).all():
            raise RequestError("the model computes NaN or infinity on the calibration samples; check the samples and the model")
        self.low, self.high, self.count = min(self.low, low), max(self.high, high), self.count + x.size
        reach = max(-low, high)
        if reach > 0:
            # the width for which reach falls in the upper half of the bins: reach / w < BINS
            self._widen(int(np.frexp(reach / BINS)[1]))
        if self.exponent is not None:
            index = np.floor(x.ravel().astype(np.float64) * 2.0**-self.exponent).astype(np.int64) + BINS
            self.bins += np.bincount(index, minlength=2 * BINS)
        else:
            self.bins[BINS] += x.size  # nothing but zeros so far

    def _widen(self, exponent: int) -> None:
        if self.exponent is None:
            self.exponent = exponent
        while self.exponent < exponent:
            merged = np.zeros_like(self.bins)
            merged[BINS // 2 : 3 * BINS // 2] = self.bins.reshape(-1, 2).sum(axis=1)
            self.bins, self.exponent = merged, self.exponent + 1

    @property
    def width(self) -> float:
        """Width of one bin, in units of x."""
        return 2.0 ** (self.exponent or 0)


def minmax_range(histogram: Histogram) -> tuple[float, float]:
    """The least and the greatest value seen."""
    return histogram.low, histogram.high


def kl_range(histogram: Histogram) -> tuple[float, float]:
    """The clipping threshold of least Kullback-Leibler divergence (Migacz, "8-bit inference with TensorRT", GTC 2017).

    On the histogram of |x|: for i = 128 .. used bins, P is the first i bins with the outliers added to the last one, Q the same bins
    merged into 128 levels (256 where x has no negatives: u8) and expanded again over the non-empty bins; the i of least KL(P || Q) gives
    the threshold i * width, to which the observed range is clipped on both sides. A threshold that clips more than 1% of the values is no
    candidate: where a tensor lives far from zero, the few bins below it are trivially alike.
    """
    positive = histogram.bins[BINS:].astype(np.float64)
    bins = positive + histogram.bins[:BINS][::-1]
    bins[0] = 0 if histogram.low >= 0 and bins[1:].any() else bins[0]  # exact zeros, after a ReLU, quantize without error
    used = int(np.flatnonzero(bins)[-1]) + 1 if bins.any() else 0
    levels = 256 if histogram.low >= 0 else 128
    if used <= levels:
        return minmax_range(histogram)
    best, least = used, np.inf
    total = np.cumsum(bins)
    for i in range(levels, used + 1):
        p = bins[:i].copy()
        filled = p > 0
        if total[i - 1] < KEPT * total[-1]:
            continue
        q = _expand(p, filled, levels)
        p[-1] += total[-1] - total[i - 1]
        divergence = _kl(p, q)
        if divergence < least:
            best, least = i, divergence
    threshold = best * histogram.width
    return max(histogram.low, -threshold), min(histogram.high, threshold)


def _expand(p: NDArray[np.float64], filled: NDArray[np.bool_], levels: int) -> NDArray[np.float64]:
    """Merge `p` into `levels` equal runs of bins and spread every run's sum evenly over its non-empty bins."""
    level = (np.arange(len(p)) * levels) // len(p)
    sums = np.bincount(level, p, minlength=levels)
    counts = np.bincount(level, filled, minlength=levels)
    return np.where(filled, (sums / np.maximum(counts, 1))[level], 0.0)


def _kl(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """KL(P || Q) of two unnormalized histograms; a bin that only P fills counts with Q's smallest share."""
    p, q = p / p.sum(), q / q.sum()
    floor = q[q > 0].min()
    support = p > 0
    return float((p[support] * np.log(p[support] / np.maximum(q[support], floor))).sum())


RANGES = {"minmax": minmax_range, "kl": kl_range}
assert set(RANGES) == set(OBSERVERS)


@dataclass(frozen=True)
class TensorRange:
    """Observed and chosen range of one tensor, in the tensor's own units."""

    minimum: float
    maximum: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class CalibrationTable:
    """Ranges of a graph's tensors. It belongs to one graph: `require` refuses another one."""

    graph: str
    observer: str
    samples: int
    samples_digest: str
    tensors: dict[str, TensorRange] = field(default_factory=dict)

    def require(self, model: ir.Model) -> None:
        """Raise RequestError unless the table was made for `model`."""
        found = graph.digest(model)
        if found != self.graph:
            raise RequestError(
                f"the calibration table was made for the graph {self.graph[:12]}, this one is {found[:12]}; "
                "calibrate this graph with: zoo calibrate"
            )

    def save(self, path: str | Path) -> Path:
        """Write as JSON, tensors in the graph's order."""
        tensors = {name: vars(each) for name, each in self.tensors.items()}
        return write_json(
            path,
            {
                "graph": self.graph,
                "observer": self.observer,
                "samples": self.samples,
                "samples_digest": self.samples_digest,
                "tensors": tensors,
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> CalibrationTable:
        """Read a table. Raises RequestError for a missing or broken file."""
        value = read_json(path)
        try:
            tensors = {name: TensorRange(**each) for name, each in value["tensors"].items()}
            for name, each in tensors.items():
                numbers = (each.minimum, each.maximum, each.low, each.high)
                if not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers) or each.low > each.high:
                    raise RequestError(
                        f"{path} gives tensor {name} the range {each.low!r} to {each.high!r} (observed {each.minimum!r} to "
                        f"{each.maximum!r}); wanted finite numbers, low <= high; make another table with: zoo calibrate"
                    )
            return cls(value["graph"], value["observer"], value["samples"], value["samples_digest"], tensors)
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"{path} is not a calibration table ({error}); make one with: zoo calibrate") from error


def calibrate(model: ir.Model, samples: Iterable[Batch], observer: str = "minmax", total: int | None = None) -> CalibrationTable:
    """Run the float model on `samples` and choose a range for every float tensor that is no weight.

    samples: batches {graph input: array, first axis = samples} of any size; they run cut to the graph's own, where that is fixed.
    observer: see `QuantRecipe`. total: the number of samples, for the progress bar. Raises RequestError for no samples, wrong inputs, a
    number that is no multiple of the graph's batch size, NaN in the outputs, an opset older than 13, a model without float32 activations
    or one that onnxruntime refuses.
    """
    if observer not in RANGES:
        raise RequestError(f"unknown observer {observer!r}; choose one of {', '.join(RANGES)}")
    graph.require_opset(model)
    session, names = _observing_session(model)
    wanted = {each.name: each for each in session.get_inputs()}
    inputs = [str(value.name) for value in model.graph.inputs if value.dtype == ir.DataType.FLOAT and value.name in wanted]
    histograms = {name: Histogram() for name in (*inputs, *names)}
    seen, digests = 0, {name: hashlib.sha256() for name in sorted(wanted)}  # one an input: independent of batching
    with progress("calibrating", total) as advance:
        for feed in _recut(samples, {name: each.shape for name, each in wanted.items()}):
            try:
                outputs = session.run(names, feed)
            except Exception as error:  # onnxruntime raises its own kinds
                raise RequestError(f"the calibration samples do not fit the graph: {graph.one_line(error)}") from error
            for name, array in [*((name, feed[name]) for name in inputs), *zip(names, outputs, strict=True)]:
                histograms[name].add(array)
            for name, sha in digests.items():
                sha.update(feed[name].tobytes())
            count = _count(feed)
            seen += count
            advance(count)
    if seen == 0:
        raise RequestError("no calibration samples; pass at least one")
    tensors = {}
    for name, histogram in histograms.items():
        if histogram.count:
            low, high = RANGES[observer](histogram)
            tensors[name] = TensorRange(histogram.low, histogram.high, low, high, histogram.count)
    of_samples = hashlib.sha256(b"".join(sha.digest() for sha in digests.values())).hexdigest()
    return CalibrationTable(graph.digest(model), observer, seen, of_samples, tensors)


def _recut(samples: Iterable[Batch], shapes: Mapping[str, Sequence[Any]]) -> Iterator[Batch]:
    """The samples, in order, in batches of the fixed first dimension that all inputs share, or of up to `BATCH` where all are dynamic."""
    first = {(shape[0] if isinstance(shape[0], int) else 0) if shape else -1 for shape in shapes.values()}  # 0: dynamic
    fixed = first.pop() if len(first) == 1 else -1  # -1: no batch that all inputs share, so nothing is cut
    size = fixed or BATCH
    rest: Batch = {}
    for batch in samples:
        if set(batch) != set(shapes):
            raise RequestError(f"calibration samples hold {', '.join(sorted(batch))}; the graph takes {', '.join(shapes)}")
        feed = {name: np.ascontiguousarray(batch[name]) for name in shapes}
        if fixed < 0 or len({array.shape[:1] for array in feed.values()}) > 1:
            yield feed
            continue
        if rest:
            feed = {name: np.concatenate([rest[name], array]) for name, array in feed.items()}
        count = _count(feed)
        end = count - count % size if fixed else count
        for start in range(0, end, size):
            yield {name: array[start : min(start + size, end)] for name, array in feed.items()}
        rest = {name: array[end:] for name, array in feed.items()} if end < count else {}
    if rest:
        raise RequestError(
            f"the graph takes {size} samples at a time and {_count(rest)} are left over; "
            f"give a multiple of {size}, or export the model with a dynamic batch"
        )


def _count(feed: Batch) -> int:
    """Number of samples."""
    return next((len(array) for array in feed.values() if array.ndim), 1)


def _observing_session(model: ir.Model) -> tuple[ort.InferenceSession, list[str]]:
    """A session over a copy of `model` whose float activations are all outputs, in graph order."""
    copy = model.clone()
    graph.expand_fp16(copy)  # weights are no activations
    ShapeInferencePass()(copy)  # an exporter may leave the types of inner values out
    values = [out for node in copy.graph for out in node.outputs if out.dtype == ir.DataType.FLOAT]
    if not values:
        raise RequestError("the model has no float32 activation to quantize; export it in float32")
    copy.graph.outputs.extend(value for value in values if not value.is_graph_output())
    for value in values:
        if value.shape is not None:
            value.shape = None  # an output's shape is checked against the run's, and inference may have guessed
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(ir.to_proto(copy).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own kinds
        raise RequestError(f"onnxruntime cannot run the model, which calibration needs: {graph.one_line(error)}") from error
    return session, [str(value.name) for value in values]
