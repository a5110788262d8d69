"""Histograms of activations, and the observers that choose a range from one: minmax, percentile, mse, kl and auto.

"auto" takes the method of least quantization error for each tensor.

A `Histogram` has a fixed size and is filled sample by sample. A range depends on the histogram alone, so another
observer can choose a new range without another run of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.quantization.qdq.scales import quantization_errors
from pipelines.quantization.recipe import OBSERVERS

BINS = 2048
KEPT = 0.99  # maximum share of values that kl clips is the rest
PERCENTILE = 99.99
SPIKE = 1e-4  # minimum share of values of an outermost bin that is no outlier
LEVELS, SYMMETRIC_LEVELS = 256, 128  # quantization levels of kl: u8 over the range, s8 over |x|
MSE_RATIOS = 128  # fractions of either end that mse tries
TRIED = 8  # of them at once
SUMMARY = 64  # maximum bins of a table
UNBINNED = "observed"  # method of min-max ranges of tensors without bins, which no recipe quantizes
CHUNK = 1 << 16  # values per count, which fit the cache
DRAWN = 1 << 14  # values of a tensor and sample that are counted where not all are: 1% of its error at 2048 bins

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Range = tuple[float, float]


@dataclass(frozen=True)
class Summary:
    """A histogram of at most `SUMMARY` bins, as a calibration table stores it.

    Attributes:
        start: Lower edge of the first bin, in units of the tensor.
        width: Width of a bin, in units of the tensor.
        zeros: Number of values that are exactly 0; `counts` includes them.
        counts: Bin i counts the values in [start + i width, start + (i + 1) width).
    """

    start: float
    width: float
    zeros: int
    counts: tuple[int, ...]

    def merge(self, other: Summary) -> Summary:
        """Adds two summaries, in bins at least as wide as the wider bins of the two.

        Args:
            other: Summary of other samples of the same tensor.

        Returns:
            The summary of both sets of samples.
        """
        width = max(self.width, other.width)
        offsets = [round(summary.start / summary.width) for summary in (self, other)]
        parts = [
            _coarsen(np.array(summary.counts), first, summary.width, width)
            for summary, first in zip((self, other), offsets, strict=True)
        ]
        first = min(part[0] for part in parts)
        counts = np.zeros(max(start + len(bins) for start, bins in parts) - first, np.int64)
        for start, added in parts:
            counts[start - first : start - first + len(added)] += added
        return _summary(counts, first, width, self.zeros + other.zeros)

    def density(self, low: float, high: float) -> tuple[Floats, Counts]:
        """Returns the bins without the exact zeros.

        Args:
            low: Least observed value; edges are clipped to it.
            high: Greatest observed value; edges are clipped to it.

        Returns:
            Edges, float64 [n + 1], and counts, int64 [n].
        """
        counts = np.array(self.counts, np.int64)
        first = round(self.start / self.width)
        if self.zeros:
            counts[-first] -= self.zeros
        return np.clip((first + np.arange(len(counts) + 1)) * self.width, low, high), counts


class Histogram:
    """Counts float values in bins of one power-of-two width, anchored at zero.

    Bins of a wider range are exact sums of finer bins, so the histogram does not depend on how samples are batched. It
    keeps at most `2 * BINS` bins, `BINS` on either side of zero.

    Attributes:
        low: Least value, inf before the first one.
        high: Greatest value, -inf before the first one.
        count: Number of values.
        counted: Number of values in bins.
        zeros: Number of those that are exactly 0.
        finite: False after a NaN or an infinity; the histogram is void then.
        binned: Whether values are counted in bins; without bins, min-max is the only range.
        samples: Number of samples.
        ends: Sums over the samples of (least value or 0, greatest value or 0) and of their squares, [2, 2].
        reached: Number of samples whose least value is `low`, and whose greatest value is `high`, [2].

    Args:
        binned: See above.
        drawn: Approximate number of values of a sample that bins count, evenly drawn; None: all.
    """

    def __init__(self, binned: bool = True, drawn: int | None = None) -> None:
        self.binned, self._drawn = binned, drawn
        self._ranges: dict[tuple[str, bool], Range] = {}
        self.low, self.high, self.count, self.finite = np.inf, -np.inf, 0, True
        self.counted, self.zeros, self.samples, self.ends, self.reached = 0, 0, 0, np.zeros((2, 2)), np.zeros(2, int)
        self.exponent: int | None = None  # bin width 2**exponent
        self.bins = np.zeros(2 * BINS, np.int64)  # bin i holds [(i - BINS) w, (i - BINS + 1) w)

    def add(self, x: NDArray[Any], samples: int = 1) -> None:
        """Counts the elements of an array.

        Args:
            x: float32 array of any shape.
            samples: Number of samples, equal parts of `x`.
        """
        if not x.size or not self.finite:
            return
        rows = x.reshape(samples, -1)
        lows, highs = rows.min(axis=1), rows.max(axis=1)
        if not np.isfinite([lows, highs]).all():
            self.finite = False
            return
        before = self.low, self.high
        self.low, self.high = min(self.low, float(lows.min())), max(self.high, float(highs.max()))
        self.count += x.size
        self._ranges.clear()
        if not self.binned:
            return
        self.samples += samples
        ends = np.array([np.minimum(lows, 0), np.maximum(highs, 0)], np.float64)
        self.ends += [ends.sum(axis=1), np.square(ends).sum(axis=1)]
        self.reached *= np.equal(before, (self.low, self.high))
        self.reached += np.count_nonzero(np.equal([lows, highs], [[self.low], [self.high]]), axis=1)
        values = rows[:, :: _stride(rows.shape[1], self._drawn)].ravel()
        for part in np.split(values, range(CHUNK, values.size, CHUNK)):
            self._add(part)

    def _add(self, x: NDArray[Any]) -> None:
        """Counts a few values in bins, which stay in the cache meanwhile."""
        low, high = float(x.min()), float(x.max())
        self.counted += x.size
        self.zeros += int(np.count_nonzero(x == 0))
        reach = max(-low, high)
        if reach > 0:
            # the width for which reach falls in the upper half of the bins: reach / w < BINS
            self._widen(int(np.frexp(reach / BINS)[1]))
        if self.exponent is None:
            self.bins[BINS] += x.size  # nothing but zeros so far
            return
        # a product with a power of two is exact, unless it leaves the normal numbers
        factor = np.float32(2.0**-self.exponent) if -100 < self.exponent <= 0 else np.float64(2.0**-self.exponent)
        scaled = x * factor
        if low >= 0:  # a conversion to integers is a floor
            self.bins[BINS:] += np.bincount(scaled.astype(np.intp), minlength=BINS)
            return
        index = np.floor(scaled, out=scaled)
        index += BINS
        self.bins += np.bincount(index.astype(np.intp), minlength=2 * BINS)

    def _widen(self, exponent: int) -> None:
        """Merge bins by two until their width is at least 2**exponent."""
        if self.exponent is None:
            self.exponent = exponent
        while self.exponent < exponent:
            merged = np.zeros_like(self.bins)
            merged[BINS // 2 : 3 * BINS // 2] = self.bins.reshape(-1, 2).sum(axis=1)
            self.bins, self.exponent = merged, self.exponent + 1

    @property
    def width(self) -> float:
        """Width of one bin, in units of the tensor."""
        return 2.0 ** (self.exponent or 0)

    @property
    def used(self) -> tuple[int, int]:
        """Index of the first bin that holds a value, and one past the index of the last."""
        filled = np.flatnonzero(self.bins)
        return (int(filled[0]), int(filled[-1]) + 1) if len(filled) else (BINS, BINS)

    def density(self) -> tuple[Floats, Counts]:
        """Returns the bins without the exact zeros; the outer edges are the least and the greatest value.

        Returns:
            Edges, float64 [n + 1], and counts, int64 [n].
        """
        first, end = self.used
        counts = self.bins[first:end].copy()
        if self.zeros:
            counts[BINS - first] -= self.zeros
        return np.clip(np.arange(first - BINS, end - BINS + 1) * self.width, self.low, self.high), counts

    def range_by(self, method: str, symmetric: bool = False) -> Range:
        """Returns the range of one of `RANGES`, computed once for the values so far.

        Args:
            method: Name of the method.
            symmetric: See the methods.

        Returns:
            (low, high) in units of the tensor.
        """
        key = method, symmetric
        if key not in self._ranges:
            self._ranges[key] = RANGES[method](self, symmetric)
        return self._ranges[key]

    def mean_extremes(self, deviations: float = 0.0) -> Range:
        """Returns the means of the least and of the greatest values of samples: few reach the ends of all.

        NNCF's default. A wider range may exceed the observed one, unless several samples share its end (a Clip).

        Args:
            deviations: Standard deviations of the extremes to widen the range by.

        Returns:
            (low, high) in units of the tensor.
        """
        means, squares = self.ends / max(self.samples, 1)
        wide = means + deviations * np.sqrt(np.maximum(squares - np.square(means), 0)) * (-1, 1)
        observed = np.clip(wide, min(self.low, 0), max(self.high, 0))
        low, high = np.where((self.reached > 1) | (not deviations), observed, wide).tolist()
        return low, high

    def without_bins(self) -> Histogram:
        """Returns the histogram without bins, for a tensor whose range is min-max."""
        ends = Histogram(False)
        ends.low, ends.high, ends.count, ends.finite = self.low, self.high, self.count, self.finite
        return ends

    def summary(self) -> Summary | None:
        """Returns the histogram in at most `SUMMARY` bins, for a calibration table; None without bins."""
        if not self.binned:
            return None
        first, end = self.used
        return _summary(self.bins[first:end], first - BINS, self.width, self.zeros)


def _stride(count: int, drawn: int | None) -> int:
    """Returns the distance of drawn values; it shares no factor with `count`, so that no row or column is left out."""
    stride = max(count // drawn, 1) if drawn else 1
    return next(step for step in range(stride, stride + count) if np.gcd(step, count) == 1) if stride > 1 else 1


def _summary(counts: Counts, first: int, width: float, zeros: int) -> Summary:
    """Merges bins by two until at most `SUMMARY` are left; `first` counts bins from zero."""
    while len(counts) > SUMMARY:
        first, counts = _coarsen(counts, first, width, 2 * width)
        width *= 2
    return Summary(first * width, width, zeros, tuple(counts.tolist()))


def _coarsen(counts: Counts, first: int, width: float, wider: float) -> tuple[int, Counts]:
    """Returns (first bin, counts) in bins `wider` by a power of two; `first` counts bins from zero."""
    index = np.floor((first + np.arange(len(counts))) * (width / wider)).astype(np.int64)
    sums = np.zeros(index[-1] - index[0] + 1, np.int64)
    np.add.at(sums, index - index[0], counts)
    return int(index[0]), sums


def minmax_range(histogram: Histogram, symmetric: bool = False) -> Range:
    """Returns the least and the greatest observed value.

    Args:
        histogram: Histogram of the tensor.
        symmetric: Use the greater of the two magnitudes at both ends.

    Returns:
        (low, high) in units of the tensor.
    """
    reach = max(-histogram.low, histogram.high)
    return (-reach, reach) if symmetric else (histogram.low, histogram.high)


def percentile_range(histogram: Histogram, symmetric: bool = False) -> Range:
    """Returns the range that holds `PERCENTILE` % of the values, rounded up to whole bins.

    Both ends lose the same number of values. If all values have one sign, only the end far from zero is cut.

    Args:
        histogram: Histogram of the tensor.
        symmetric: Cut all outliers at the end of |x|.

    Returns:
        (low, high) in units of the tensor.
    """
    bins = _magnitudes(histogram) if symmetric else histogram.bins
    ends = 1 if symmetric or histogram.low >= 0 or histogram.high <= 0 else 2
    cut = round(histogram.counted * (1 - PERCENTILE / 100) / ends, 6)

    def end(counts: Counts) -> float:
        """Upper edge of the first bin above which no more than `cut` values lie."""
        above = counts[::-1].cumsum()[::-1]
        return float(np.count_nonzero(above > cut)) * histogram.width

    reach = end(bins[BINS:])
    if symmetric:
        reach = min(reach, minmax_range(histogram, True)[1])
        return -reach, reach
    low = histogram.low if histogram.low >= 0 else max(histogram.low, -end(bins[:BINS][::-1]))
    return low, histogram.high if histogram.high <= 0 else min(histogram.high, reach)


def kl_range(histogram: Histogram, symmetric: bool = False) -> Range:
    """Returns the clipping threshold of least Kullback-Leibler divergence.

    Source: Migacz, "8-bit inference with TensorRT", GTC 2017. For i = 128 .. the last used bin, P is the window
    of i bins on either side of zero (limited to observed values) with the outliers of both tails added to its outermost
    bins. Q is the same bins without outliers, merged into levels and expanded over the non-empty bins of P. The i of
    least KL(P || Q) gives the threshold (i + 1/2) width. There are 256 levels (u8) over the window; if symmetric, 128
    levels (s8) over |x|, and the threshold holds at both ends. A tensor of one sign has one tail and starts at i = 256.

    Three guards apply. Exact zeros are left out, because they quantize without error (half of the outputs of a ReLU).
    An end whose outermost bin holds far more values than its neighbours is the bound of a clamp (ReLU6): it stays where
    it is, and the spike is left out of P and Q. A window with less than 1% of the remaining values is no candidate,
    because a few bins next to zero match trivially when a tensor is far from zero.

    Args:
        histogram: Histogram of the tensor.
        symmetric: Use one threshold for both ends.

    Returns:
        (low, high) in units of the tensor.
    """
    flipped = not symmetric and histogram.high <= 0
    bins = _magnitudes(histogram) if symmetric or flipped else histogram.bins.copy()
    bins[BINS] -= histogram.zeros
    filled = np.flatnonzero(bins)
    if not len(filled):
        return minmax_range(histogram, symmetric)
    ends = [int(filled[0]), int(filled[-1])]
    clamped = [_is_spike(bins, ends[0], 1), _is_spike(bins, ends[1], -1)]
    for end, spike in zip(ends, clamped, strict=True):
        bins[end] = 0 if spike else bins[end]
    first, end = min(ends[0], BINS), max(ends[1] + 1, BINS)
    reach = np.arange(1, max(BINS - first, end - BINS) + 1)
    a = np.full_like(reach, first) if clamped[0] else np.maximum(BINS - reach, first)
    b = np.full_like(reach, end) if clamped[1] else np.minimum(BINS + reach, end)
    levels = SYMMETRIC_LEVELS if symmetric else LEVELS
    kept = np.append(0, bins.cumsum())
    total = kept[-1]
    possible = (b - a >= levels) & (reach >= SYMMETRIC_LEVELS) & (kept[b] - kept[a] >= KEPT * total)
    if all(clamped) or not possible.any():
        return minmax_range(histogram, symmetric)
    a, b, reach = a[possible], b[possible], reach[possible]
    best = int(np.argmin(_divergences(bins.astype(np.float64), a, b, levels)))
    threshold = (float(reach[best]) + 0.5) * histogram.width
    if symmetric:
        threshold = min(threshold, minmax_range(histogram, True)[1])
        return -threshold, threshold
    if flipped:
        return (histogram.low if b[best] == end else max(histogram.low, -threshold)), histogram.high
    low = histogram.low if a[best] == first else max(histogram.low, -threshold)
    return low, histogram.high if b[best] == end else min(histogram.high, threshold)


def _divergences(bins: Floats, a: Counts, b: Counts, levels: int) -> Floats:
    """Computes KL(P || Q) of every window [a, b) of `bins`, see `kl_range`.

    A level that only P fills counts with Q's smallest share.
    """
    total = bins.sum()
    mass = np.append(0.0, bins.cumsum())
    entropy = np.append(0.0, _xlogx(bins).cumsum())
    filled = np.append(0, (bins > 0).cumsum())
    left, right = mass[a], total - mass[b]  # outliers
    cuts = a[:, None] + -(-np.arange(levels + 1) * (b - a)[:, None] // levels)
    q = np.diff(mass[cuts])
    spread = np.diff(filled[cuts]).astype(np.float64)
    spread[:, 0] += (left > 0) & (bins[a] == 0)
    spread[:, -1] += (right > 0) & (bins[b - 1] == 0)
    p = q.copy()
    p[:, 0] += left
    p[:, -1] += right
    plogp = entropy[b] - entropy[a]
    for outliers, edge in ((left, bins[a]), (right, bins[b - 1])):
        plogp += _xlogx(edge + outliers) - _xlogx(edge)
    share = np.where(q > 0, q / np.maximum(spread, 1), np.inf)
    share = np.where(q > 0, share, share.min(axis=1, keepdims=True))
    return np.asarray((plogp - (p * np.log(share)).sum(axis=1)) / total - np.log(total) + np.log(mass[b] - mass[a]))


def _xlogx(x: Floats) -> Floats:
    """Computes x log x, 0 for 0."""
    return x * np.log(np.where(x > 0, x, 1.0))


def _is_spike(bins: Counts, end: int, inward: int) -> bool:
    """Whether the outermost bin `end` holds far more than any of the eight next to it, and too much for outliers."""
    neighbours = bins[end + 1 : end + 9] if inward > 0 else bins[max(end - 8, 0) : end]
    return bool(
        bins[end] >= SPIKE * bins.sum() and bins[end] > 8 * neighbours.max(initial=1) and BINS - end not in (0, 1)
    )


def _magnitudes(histogram: Histogram) -> Counts:
    """Returns the bins of |x|, in the upper half."""
    bins = np.zeros_like(histogram.bins)
    bins[BINS:] = histogram.bins[BINS:] + histogram.bins[:BINS][::-1]
    return bins


def mse_range(histogram: Histogram, symmetric: bool = False) -> Range:
    """Returns the range of least `quantization_errors`: alternately tries every 1/128 of either observed end.

    Args:
        histogram: Histogram of the tensor.
        symmetric: Use one threshold for both ends.

    Returns:
        (low, high) in units of the tensor.
    """
    density, count = histogram.density(), histogram.counted
    fractions = np.arange(MSE_RATIOS, 0, -1) / MSE_RATIOS  # of equal errors the wider range is taken
    if symmetric:
        reach = minmax_range(histogram, True)[1] * fractions
        best = _least_error(density, count, -reach, reach, True)
        return -float(reach[best]), float(reach[best])
    low, high = minmax_range(histogram)
    for _ in range(4):
        before = low, high
        if histogram.high > 0:
            tried = histogram.high * fractions
            high = float(tried[_least_error(density, count, np.full_like(tried, low), tried)])
        if histogram.low < 0:
            tried = histogram.low * fractions
            low = float(tried[_least_error(density, count, tried, np.full_like(tried, high))])
        if (low, high) == before or histogram.low >= 0 or histogram.high <= 0:  # one end alone is free
            break
    return low, high


def _least_error(density: tuple[Floats, Counts], total: int, low: Floats, high: Floats, symmetric: bool = False) -> int:
    """Returns the position of the first range of least error; every range is part of all ranges before it.

    Later ranges clip at least the same values, so the search ends where the clipping error alone exceeds the least
    error.
    """
    edges, counts = density
    best, least = 0, np.inf
    for begin in range(0, len(low), TRIED):
        step = (max(high[begin], 0) - min(low[begin], 0)) / (127 if symmetric else 255)  # zero points are rounded
        beyond = np.maximum(edges[:-1] - max(high[begin], 0) - step, min(low[begin], 0) - step - edges[1:])
        if np.square(np.maximum(beyond, 0)) @ counts > least * max(total, 1):
            break
        errors = quantization_errors(
            edges, counts, total, low[begin : begin + TRIED], high[begin : begin + TRIED], symmetric
        )
        if errors.min() < least:
            best, least = begin + int(errors.argmin()), float(errors.min())
    return best


RANGES = {"minmax": minmax_range, "percentile": percentile_range, "mse": mse_range, "kl": kl_range}
assert {"auto", *RANGES} == set(OBSERVERS)


def choose(histogram: Histogram, observer: str, symmetric: bool = False) -> tuple[str, float, float]:
    """Chooses the range of a tensor.

    Args:
        histogram: Histogram of the tensor.
        observer: One of `OBSERVERS`; "auto" takes the method of least `quantization_errors`.
        symmetric: A tensor with negatives gets the range -high .. high.

    Returns:
        (method, low, high): the method that was used (`UNBINNED` for a histogram without bins), and the range in units
        of the tensor.

    Raises:
        RequestError: The observer is unknown.
    """
    if observer not in OBSERVERS:
        raise RequestError(f"unknown observer {observer!r}; choose one of {', '.join(OBSERVERS)}")
    if not histogram.binned:
        return UNBINNED, *minmax_range(histogram, symmetric and histogram.low < 0)
    symmetric = symmetric and histogram.low < 0
    ranges = {name: histogram.range_by(name, symmetric) for name in RANGES if observer in (name, "auto")}
    lows, highs = np.array(list(ranges.values())).T
    best = (
        list(ranges)[
            int(np.argmin(quantization_errors(*histogram.density(), histogram.counted, lows, highs, symmetric)))
        ]
        if len(ranges) > 1
        else observer
    )
    return best, *ranges[best]
