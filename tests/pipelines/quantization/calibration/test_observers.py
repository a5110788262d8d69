"""Histograms and the ranges of observers, against reference implementations."""

import itertools
import math

import numpy as np
import pytest
from helpers.arrays import normals
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipelines.core.errors import RequestError
from pipelines.quantization.calibration import observers
from pipelines.quantization.calibration.observers import (
    BINS,
    KEPT,
    MSE_RATIOS,
    OBSERVERS,
    RANGES,
    SUMMARY,
    Histogram,
    choose,
    kl_range,
    minmax_range,
    mse_range,
    percentile_range,
)
from pipelines.quantization.calibration.table import TensorRange
from pipelines.quantization.qdq.scales import activation_qparams, quantization_errors


def histogram(*parts):
    hist = Histogram()
    for part in parts:
        hist.add(np.asarray(part, np.float32))
    return hist


def state(found):
    return found.low, found.high, found.count, found.zeros, found.exponent, found.bins.tolist()


# --- Histogram

values = arrays.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**60), 2.0**60, width=32))
tame = arrays.arrays(np.float32, st.integers(1, 60), elements=st.floats(-10, 10, width=32))


@given(values | tame, st.data())
def test_histogram_does_not_depend_on_batching(x, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=6)))
    order = data.draw(st.permutations(range(len(cuts) + 1)))
    parts = np.split(x, cuts)
    assert state(histogram(*(parts[i] for i in order))) == state(histogram(x))


@given(values | tame)
def test_histogram_counts_every_value_in_its_bin(x):
    hist = histogram(*np.array_split(x, 3))
    assert hist.bins.sum() == hist.count == len(x) and minmax_range(hist) == (x.min(), x.max())
    expected = np.zeros(2 * BINS, np.int64)
    for value in x.tolist():
        expected[math.floor(value / hist.width) + BINS] += 1
    np.testing.assert_array_equal(hist.bins, expected)
    if x.any():  # the widest value lies in the outer half: no resolution is given away
        assert BINS / 2 <= float(np.abs(x).max()) / hist.width < BINS


@pytest.mark.parametrize("cuts", [(0, 24), (0, 1, 9, 24)])
def test_drawn_values_stand_for_all(rng, cuts):
    x = rng.standard_normal((24, 3, 7 * 16, 7 * 16)).astype(np.float32)
    x[:, :, :, 5] *= 4  # one column
    drawn, every = Histogram(drawn=4096), Histogram()
    for start, end in itertools.pairwise(cuts):
        drawn.add(x[start:end], end - start)
    every.add(x, 24)
    assert (drawn.low, drawn.high, drawn.count) == (every.low, every.high, every.count)
    assert drawn.mean_extremes() == pytest.approx(every.mean_extremes())
    assert drawn.bins.sum() == drawn.counted and 24 * 2048 < drawn.counted < 24 * 5000 and every.counted == x.size
    for method in ("percentile", "mse"):
        assert choose(drawn, method)[1:] == pytest.approx(choose(every, method)[1:], rel=0.1), method
    share = [
        1 - hist.bins[abs(np.arange(-2048, 2048) + 0.5) * hist.width < 4].sum() / hist.counted
        for hist in (drawn, every)
    ]
    assert share[0] == pytest.approx(share[1], rel=0.25)


def test_few_values_are_counted_all(rng):
    x = rng.standard_normal((3, 4096)).astype(np.float32)
    drawn, every = Histogram(drawn=4096), Histogram()
    drawn.add(x, 3)
    every.add(x, 3)
    assert np.array_equal(drawn.bins, every.bins) and drawn.counted == x.size


def test_histogram_grows_by_merging_neighbours():
    fine = histogram(np.linspace(-1, 1, 5000, endpoint=False))
    grown = histogram(np.linspace(-1, 1, 5000, endpoint=False), [100.0])
    assert fine.width == 2**-10 and grown.width == 2**-4
    middle = grown.bins[BINS - 16 : BINS + 16]
    np.testing.assert_array_equal(middle, fine.bins[BINS - 1024 : BINS + 1024].reshape(-1, 64).sum(axis=1))


@pytest.mark.parametrize("x", [[0.0], [-0.0, 0.0], [1e-45], [-3.4e38, 3.4e38], [1.0, 2.0, 4.0], [2048.0, -2048.0]])
def test_histogram_of_extremes(x):
    hist = histogram(x)
    assert hist.bins.sum() == len(x) and minmax_range(hist) == (np.float32(min(x)), np.float32(max(x)))


def test_histogram_of_nothing():
    hist = histogram(np.zeros((0, 3)))
    assert hist.count == 0 and hist.bins.sum() == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_histogram_remembers_what_is_no_number(bad):
    hist = Histogram()
    for values in ([1.0], [1.0, bad, 2.0], [3.0]):
        hist.add(np.array(values, np.float32))
    assert not hist.finite and hist.count == 1 and histogram([1.0]).finite


# --- kl


def migacz(bins, zero, levels):
    """The pseudo-code of "8-bit inference with TensorRT" (GTC 2017), bin by bin: the i of least KL(P || Q), i bins
    beside zero.

    bins: counts; bins[zero:] are not negative (all of them, where |x| is quantized).
    """
    first, end = next(i for i, count in enumerate(bins) if count), max(i for i, count in enumerate(bins) if count) + 1
    first, end = min(first, zero), max(end, zero)
    divergences = {}
    for i in range(128, max(zero - first, end - zero) + 1):
        a, b = max(first, zero - i), min(end, zero + i)
        inside = bins[a:b]
        if len(inside) < levels or sum(inside) < KEPT * sum(bins):
            continue
        reference = [float(count) for count in inside]
        reference[0] += sum(bins[:a])
        reference[-1] += sum(bins[b:])
        candidate = [0.0] * len(inside)
        for level in range(levels):
            merged = [j for j in range(len(inside)) if j * levels // len(inside) == level]
            filled = [j for j in merged if reference[j]]
            for j in filled:
                candidate[j] = sum(inside[k] for k in merged) / len(filled)
        p = [count / sum(reference) for count in reference]
        q = [count / sum(candidate) for count in candidate]
        smallest = min(share for share in q if share > 0)
        divergences[i] = sum(x * math.log(x / max(y, smallest)) for x, y in zip(p, q, strict=True) if x > 0)
    return min(divergences, key=lambda i: (divergences[i], i))


SHAPES = ["bell", "sparse", "tail", "far"]


def counts_of(shape, used, seed):
    x, rng = np.arange(used), np.random.default_rng(seed)
    counts = {
        "bell": 1e5 * np.exp(-((x / (used / 5)) ** 2)),
        "sparse": rng.integers(0, 50, used) * (rng.uniform(size=used) < 0.2),
        "tail": 1e4 / (1 + x) ** 1.5,
        "far": 1e5 * np.exp(-(((x - used * 0.7) / 9) ** 2)),
    }[shape].astype(np.int64)
    counts[-1] = 3
    return counts


def crafted(positive, negative=()):
    """A histogram with these counts of bins from zero on, upwards and downwards."""
    hist = Histogram()
    hist.exponent = -5
    hist.bins[BINS : BINS + len(positive)] = positive
    hist.bins[BINS - len(negative) : BINS] = np.asarray(negative, np.int64)[::-1]
    hist.count = int(hist.bins.sum())
    hist.low, hist.high = -len(negative) * hist.width, len(positive) * hist.width
    return hist


@pytest.mark.parametrize("shape", SHAPES)
def test_kl_of_one_tail_is_that_of_the_paper(shape):
    counts = counts_of(shape, 340, 1)
    hist = crafted(counts)
    threshold = (migacz(counts.tolist(), 0, 256) + 0.5) * hist.width
    assert kl_range(hist) == (0, min(threshold, hist.high))
    mirrored = crafted([], counts)
    assert kl_range(mirrored) == (-min(threshold, hist.high), 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_kl_of_both_tails_is_that_of_the_paper(shape, symmetric):
    positive, negative = counts_of(shape, 230, 2), counts_of(shape, 190, 3)
    hist = crafted(positive, negative)
    if symmetric:
        both = positive.copy()
        both[:190] += negative
        threshold = min((migacz(both.tolist(), 0, 128) + 0.5) * hist.width, hist.high)
        assert kl_range(hist, symmetric=True) == (-threshold, threshold)
    else:
        threshold = (migacz([*negative.tolist()[::-1], *positive.tolist()], 190, 256) + 0.5) * hist.width
        assert kl_range(hist) == (max(-threshold, hist.low), min(threshold, hist.high))


def test_kl_clips_far_outliers(rng):
    bell = rng.normal(0, 1, 200_000)
    hist = histogram(bell, [40.0, -35.0])
    low, high = kl_range(hist)
    assert minmax_range(hist) == (-35, 40)
    assert 3 < high < 12 and -12 < low < -3 and low == -high


def test_kl_clips_on_the_far_side_only(rng):
    hist = histogram(np.maximum(rng.normal(0, 1, 200_000), -0.5), [40.0])
    low, high = kl_range(hist)
    assert low == -0.5 and 2 < high < 20


def test_kl_of_a_relu_ignores_its_zeros(rng):
    x = np.append(np.abs(rng.normal(0, 1, 100_000)), 0)
    plain, zeros = histogram(x, [30.0]), histogram(x, [30.0], np.zeros(10_000_000))
    assert kl_range(plain) == kl_range(zeros)
    assert kl_range(zeros)[0] == 0 and kl_range(zeros)[1] < 10


def test_kl_keeps_nearly_all_of_what_is_spread_evenly(rng):
    hist = histogram(rng.uniform(-1, 1, 200_000))
    low, high = kl_range(hist)
    assert -1 <= low < -0.98 and 0.98 < high <= 1


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=15)
def test_kl_keeps_99_percent_and_never_widens(seed, positive):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, 3000) * 10.0 ** rng.uniform(-3, 3) + rng.normal(0, 3)
    x = np.abs(x) if positive else x
    hist = histogram(x)
    low, high = kl_range(hist)
    assert hist.low <= low <= high <= hist.high
    assert ((x >= low - hist.width) & (x <= high + hist.width)).mean() >= KEPT - 1e-9


@pytest.mark.parametrize("x", [[0.0], [5.0], [-5.0], [0.0, 0.0, 3.0]])
def test_kl_of_hardly_anything_is_minmax(x):
    assert kl_range(histogram(x)) == (min(x), max(x))


def test_kl_leaves_the_bound_of_a_clamp_where_it_is(rng):
    """The published algorithm alone takes what a ReLU6 gathers at 6 for outliers, or spreads it over a level's bins."""
    x = np.clip(rng.normal(1, 2, 300_000), 0, 6)
    assert 0.001 < (x == 6).mean() < 0.01  # less than what may be clipped
    assert kl_range(histogram(x)) == (0, 6)
    bins = histogram(x).bins
    hist = histogram(np.clip(rng.normal(0, 1, 300_000), -8, 2.5), [-8.0])
    assert bins[BINS + 1536] == (x == 6).sum() and kl_range(hist)[1] == 2.5 and -6 < kl_range(hist)[0] < -3


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("below", [0, 3, 7])
def test_a_spike_at_the_last_bins(sign, below):
    """All values lie in the last bin on their side of zero, or in one with fewer than eight behind it."""
    x = np.full(1000, sign * (BINS - 0.5 - below))
    hist = histogram(x)
    assert hist.used[0] in (2 * BINS - 1 - below, below) and hist.width == 1
    for observer in ("kl", "auto"):
        low, high = choose(hist, observer)[1:]
        assert low == high == x[0]


def test_kl_of_a_clamp_and_nothing_else_is_minmax():
    for x in ([0.0] * 50 + [6.0] * 50, [-1.0] * 50 + [1.0] * 50, [0.0] * 9 + [1.0] * 5000 + [6.0] * 50):
        assert kl_range(histogram(x)) == (min(x), max(x))


# --- percentile


def percentile_reference(x, width, symmetric):
    """Value by value: drop the outermost until no more may go, then the whole bin of the last one stays."""
    x = np.abs(x) if symmetric else x
    cut = 1e-4 * len(x) / (1 if symmetric or x.min() >= 0 or x.max() <= 0 else 2) + 1e-6
    high = next(edge for edge in np.arange(BINS + 1) * width if (x >= edge).sum() <= cut)
    low = next(edge for edge in np.arange(BINS + 1) * width if (x < -edge).sum() <= cut)
    low, high = max(x.min(), -low), min(x.max(), high)
    if symmetric:
        return -high, high
    return (low if x.min() < 0 else x.min()), (high if x.max() > 0 else x.max())


@pytest.mark.parametrize("kind", ["both", "positive", "negative", "few"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_percentile_is_that_of_the_reference(rng, kind, symmetric):
    x = rng.standard_t(3, 100 if kind == "few" else 50_000).astype(np.float32)
    x = {"positive": np.abs(x), "negative": -np.abs(x)}.get(kind, x)
    hist = histogram(x)
    assert percentile_range(hist, symmetric) == pytest.approx(
        percentile_reference(x.astype(float), hist.width, symmetric)
    )


def test_percentile_cuts_what_it_says(rng):
    x = rng.standard_t(3, 400_000)
    low, high = percentile_range(histogram(x))
    assert 0.9998 < ((low <= x) & (x <= high)).mean() < 0.99995
    ones = np.append(np.full(9_999, 1.0), 50.0)
    assert percentile_range(histogram(ones)) == (1, 1 + histogram(ones).width)  # exactly one in ten thousand may go


# --- errors, mse


def quantized(x, low, high):
    """x through uint8 and back, by the quantizer's own parameters."""
    scale, zero = activation_qparams(TensorRange(low, high, low, high, 1))
    return (np.clip(np.rint(x / np.float64(scale)) + int(zero), 0, 255) - int(zero)) * np.float64(scale)


def error(found, low, high):
    return float(quantization_errors(*found.density(), found.count, low, high))


def error_reference(found, low, high):
    """Bin by bin, the square of the error integrated over a fine grid of the bin."""
    total = 0.0
    for i in np.flatnonzero(found.bins):
        count = found.bins[i] - (found.zeros if i == BINS else 0)
        a, b = (min(max((i + k - BINS) * found.width, found.low), found.high) for k in (0, 1))
        x = a + (b - a) * (np.arange(400) + 0.5) / 400
        total += count * ((x - quantized(x, low, high)) ** 2).mean()
    return total / found.count


@pytest.mark.parametrize(("low", "high"), [(-3.0, 5.0), (0.0, 2.0), (-1.3, 0.0), (-9.0, 9.0), (0.5, 1.0), (0.0, 0.0)])
def test_error_is_that_of_the_reference(rng, low, high):
    hist = histogram(rng.normal(0, 2, 500), [0.0] * 70)
    assert error(hist, low, high) == pytest.approx(error_reference(hist, low, high), rel=1e-4)


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["bell", "relu", "relu6", "shifted"])
def test_error_is_that_of_the_samples(rng, kind, share):
    x = rng.normal(0, 2, 200_000).astype(np.float32)
    x = {"relu": np.maximum(x, 0), "relu6": np.clip(3 * x, 0, 6), "shifted": x + 20}.get(kind, x)
    low, high = share * float(min(x.min(), 0)), share * float(x.max())
    measured = ((x - quantized(x.astype(np.float64), low, high)) ** 2).mean()
    assert error(histogram(x), low, high) == pytest.approx(measured, rel=0.02)


def test_pixels_cost_nothing(rng):
    """Whole numbers of 0 .. 255 are quantized without error, and no observer may clip them."""
    x = np.append(rng.integers(0, 256, 100_000), [0, 255])
    assert choose(histogram(x), "auto") == ("minmax", 0, 255)


def mse_reference(found, symmetric):
    tried = [k / MSE_RATIOS for k in range(MSE_RATIOS, 0, -1)]
    reach = max(-found.low, found.high)
    if symmetric:
        return min(((-k * reach, k * reach) for k in tried), key=lambda ends: error_of(found, *ends, symmetric))
    low, high = found.low, found.high
    for _ in range(4):
        if found.high > 0:
            high = min((k * found.high for k in tried), key=lambda end: error_of(found, low, end))
        if found.low < 0:
            low = min((k * found.low for k in tried), key=lambda end: error_of(found, end, high))
    return low, high


def error_of(found, low, high, symmetric=False):
    """As `error_reference`, but exact: every bin is cut where the rounding changes."""
    scale, zero = (float(number) for number in activation_qparams(TensorRange(low, high, low, high, 1), symmetric))
    total = 0.0
    for i in np.flatnonzero(found.bins).tolist():
        if not (count := int(found.bins[i]) - (found.zeros if i == BINS else 0)):
            continue
        a, b = (min(max((i + k - BINS) * found.width, found.low), found.high) for k in (0, 1))
        cuts = [a, *((k + 0.5) * scale for k in range(math.ceil(a / scale - 0.5), math.floor(b / scale - 0.5) + 1)), b]
        square = 0.0
        for start, end in itertools.pairwise(cuts):
            level = min(max(round((start + end) / 2 / scale) + zero, 0), 255) - zero
            square += ((end - level * scale) ** 3 - (start - level * scale) ** 3) / 3
        total += count * square / (b - a)
    return total


@pytest.mark.parametrize("change", [np.positive, np.abs, lambda x: -np.abs(x)], ids=["both", "positive", "negative"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_mse_is_that_of_the_reference(rng, change, symmetric):
    hist = histogram(change(rng.standard_t(2, 90)), [0.0, 0.0])
    hist.low, hist.high = (
        float(end(bound / hist.width)) * hist.width for end, bound in ((np.floor, hist.low), (np.ceil, hist.high))
    )
    assert mse_range(hist, symmetric) == pytest.approx(mse_reference(hist, symmetric))


@pytest.mark.parametrize("shape", ["normal", "tail", "shifted"])
def test_mse_leaves_out_ranges_that_clip_more_than_the_least_error(rng, monkeypatch, shape):
    """Trying all fractions took a tenth of the time of a fast calibration."""
    x = {
        "normal": rng.normal(0, 1, 20_000),
        "tail": rng.standard_t(2, 20_000),
        "shifted": rng.exponential(1, 20_000) - 0.3,
    }
    hist, tried = histogram(x[shape]), []
    function = observers.quantization_errors
    monkeypatch.setattr(
        observers, "quantization_errors", lambda *args: (tried.append(len(args[3])), function(*args))[1]
    )
    for symmetric in (False, True):
        pruned, count = mse_range(hist, symmetric), sum(tried)
        monkeypatch.setattr(observers, "TRIED", MSE_RATIOS)
        assert mse_range(hist, symmetric) == pruned
        assert count < 0.8 * (sum(tried) - count)
        monkeypatch.setattr(observers, "TRIED", 8)
        tried.clear()


def test_mse_clips_a_long_tail_and_no_even_spread(rng):
    hist = histogram(rng.normal(0, 1, 200_000), [12.0])
    assert 3 < mse_range(hist)[1] < 10 and -6 < mse_range(hist)[0] < -3
    even = histogram(rng.uniform(0, 1, 200_000))
    assert mse_range(even) == minmax_range(even)


# --- choose


@given(st.integers(0, 2**32 - 1), st.sampled_from(["both", "positive", "relu6", "negative"]))
@settings(max_examples=25)
def test_auto_is_the_best_of_all_and_never_wider_than_what_was_seen(seed, kind):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, 3000) * 10.0 ** rng.uniform(-3, 3) + rng.normal(0, 3)
    x = {"positive": np.abs(x), "negative": -np.abs(x), "relu6": np.clip(x, 0, 6)}.get(kind, x)
    hist = histogram(x)
    chosen = {name: choose(hist, name) for name in RANGES}
    method, low, high = choose(hist, "auto")
    assert chosen[method] == (method, low, high)
    assert error(hist, low, high) == min(error(hist, *choice[1:]) for choice in chosen.values())
    for _, a, b in chosen.values():
        assert hist.low <= a <= b <= hist.high


@pytest.mark.parametrize("observer", OBSERVERS)
def test_a_symmetric_range(rng, observer):
    x = rng.normal(1, 2, 50_000)
    _, low, high = choose(histogram(x), observer, symmetric=True)
    assert -low == high <= histogram(x).high
    assert choose(histogram(np.abs(x)), observer, symmetric=True) == choose(histogram(np.abs(x)), observer)


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("x", [[0.0], [5.0], [-5.0], [0.0, 0.0, 3.0], [1e-45], [-3e38, 3e38]])
def test_hardly_anything_is_left_whole(observer, x):
    _, low, high = choose(histogram(x), observer)
    assert (low, high) == minmax_range(histogram(x))


def test_an_unknown_observer():
    with pytest.raises(
        RequestError, match="^unknown observer 'median'; choose one of auto, minmax, percentile, mse, kl$"
    ):
        choose(histogram([1.0]), "median")


# --- Summary


@given(values | tame)
def test_a_summary_counts_every_value_in_few_bins(x):
    summary = histogram(x).summary()
    assert (
        len(summary.counts) <= SUMMARY
        and summary.counts[0] > 0
        and summary.counts[-1] > 0
        and summary.zeros == (x == 0).sum()
    )
    expected = [
        ((x >= summary.start + i * summary.width) & (x < summary.start + (i + 1) * summary.width)).sum()
        for i in range(len(summary.counts))
    ]
    assert list(summary.counts) == expected


@given(values | tame, values | tame)
def test_summaries_merge_to_that_of_all_values(x, y):
    one, other, both = (histogram(*parts).summary() for parts in ([x], [y], [x, y]))
    merged = one.merge(other)
    assert merged == other.merge(one) and len(merged.counts) <= SUMMARY
    assert (sum(merged.counts), merged.zeros) == (sum(both.counts), both.zeros) and merged.width >= both.width
    wide = merged.width
    exact = np.array(
        [
            sum(count for i, count in enumerate(both.counts) if (both.start + i * both.width) // wide == k)
            for k in spread(merged)
        ]
    )
    np.testing.assert_array_equal(exact, merged.counts)


def spread(summary):
    return [round(summary.start / summary.width) + i for i in range(len(summary.counts))]


def test_the_density_of_a_summary_gives_about_the_same_error(rng):
    hist = histogram(np.maximum(rng.normal(0, 1, 100_000), 0))
    edges, counts = hist.summary().density(hist.low, hist.high)
    for high in (hist.high, 3.0, 2.0):
        assert quantization_errors(edges, counts, hist.count, 0.0, high) == pytest.approx(
            error(hist, 0.0, high), rel=0.1
        )


def test_a_range_is_computed_once_for_the_values_so_far_and_anew_for_more(monkeypatch):
    calls = []
    methods = {name: lambda h, s, name=name, f=f: (calls.append(name), f(h, s))[1] for name, f in RANGES.items()}
    monkeypatch.setattr(observers, "RANGES", methods)
    histogram = Histogram()
    histogram.add(normals(1)(1000))
    first = [choose(histogram, name) for name in ("auto", "minmax", "percentile", "kl", "mse", "auto")]
    assert sorted(calls) == sorted(RANGES)
    histogram.add(5 * normals(2)(1000))
    assert choose(histogram, "minmax")[1:] == (histogram.low, histogram.high) != first[1][1:]
