import json
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rewriting import model

from pipelines import graph
from pipelines.calibrate import BINS, KEPT, CalibrationTable, Histogram, TensorRange, calibrate, kl_range, minmax_range
from pipelines.errors import RequestError

RNG = np.random.default_rng(0)


def histogram(*parts):
    found = Histogram()
    for part in parts:
        found.add(np.asarray(part, np.float32))
    return found


def state(found):
    return found.low, found.high, found.count, found.exponent, found.bins.tolist()


# --- Histogram

values = arrays.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**60), 2.0**60, width=32))
tame = arrays.arrays(np.float32, st.integers(1, 60), elements=st.floats(-10, 10, width=32))


@given(values | tame, st.data())
@settings(max_examples=150, deadline=None)
def test_histogram_does_not_depend_on_batching(x, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=6)))
    order = data.draw(st.permutations(range(len(cuts) + 1)))
    parts = np.split(x, cuts)
    assert state(histogram(*(parts[i] for i in order))) == state(histogram(x))


@given(values | tame)
@settings(max_examples=150, deadline=None)
def test_histogram_counts_every_value_in_its_bin(x):
    found = histogram(*np.array_split(x, 3))
    assert found.bins.sum() == found.count == len(x) and minmax_range(found) == (x.min(), x.max())
    expected = np.zeros(2 * BINS, np.int64)
    for value in x.tolist():
        expected[math.floor(value / found.width) + BINS] += 1
    np.testing.assert_array_equal(found.bins, expected)
    if x.any():  # the widest value lies in the outer half: no resolution is given away
        assert BINS / 2 <= float(np.abs(x).max()) / found.width < BINS


def test_histogram_grows_by_merging_neighbours():
    fine = histogram(np.linspace(-1, 1, 5000, endpoint=False))
    grown = histogram(np.linspace(-1, 1, 5000, endpoint=False), [100.0])
    assert fine.width == 2**-10 and grown.width == 2**-4
    middle = grown.bins[BINS - 16 : BINS + 16]
    np.testing.assert_array_equal(middle, fine.bins[BINS - 1024 : BINS + 1024].reshape(-1, 64).sum(axis=1))


@pytest.mark.parametrize("x", [[0.0], [-0.0, 0.0], [1e-45], [-3.4e38, 3.4e38], [1.0, 2.0, 4.0], [2048.0, -2048.0]])
def test_histogram_of_extremes(x):
    found = histogram(x)
    assert found.bins.sum() == len(x) and minmax_range(found) == (np.float32(min(x)), np.float32(max(x)))


def test_histogram_of_nothing():
    found = histogram(np.zeros((0, 3)))
    assert found.count == 0 and found.bins.sum() == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_histogram_refuses_what_is_no_number(bad):
    with pytest.raises(RequestError, match="NaN or infinity"):
        histogram([1.0, bad, 2.0])


# --- kl


def migacz(bins, width, low, high):
    """The pseudo-code of "8-bit inference with TensorRT" (GTC 2017), bin by bin, as `kl_range` says it is changed.

    bins: counts of |x|.
    """
    bins, levels = list(bins), 256 if low >= 0 else 128
    if low >= 0 and sum(bins[1:]):
        bins[0] = 0
    while bins and bins[-1] == 0:
        bins.pop()
    if len(bins) <= levels:
        return low, high
    divergences = {}
    for i in range(levels, len(bins) + 1):
        if sum(bins[:i]) < KEPT * sum(bins):
            continue
        reference = [float(count) for count in bins[:i]]
        reference[i - 1] += sum(bins[i:])
        candidate = [0.0] * i
        for level in range(levels):
            inside = [j for j in range(i) if j * levels // i == level]
            filled = [j for j in inside if bins[j]]
            for j in filled:
                candidate[j] = sum(bins[k] for k in inside) / len(filled)
        p = [each / sum(reference) for each in reference]
        q = [each / sum(candidate) for each in candidate]
        smallest = min(each for each in q if each > 0)
        divergences[i] = sum(a * math.log(a / max(b, smallest)) for a, b in zip(p, q, strict=True) if a > 0)
    threshold = min(divergences, key=lambda i: (divergences[i], i)) * width
    return max(low, -threshold), min(high, threshold)


def crafted(counts, signed):
    """A histogram with these counts of |x|; in `signed` ones a third of every bin is negative."""
    found = Histogram()
    counts = np.asarray(counts, np.int64)
    negative = counts // 3 if signed else np.zeros_like(counts)
    found.exponent, found.count = -5, int(counts.sum())
    found.bins[BINS : BINS + len(counts)] = counts - negative
    found.bins[BINS - len(counts) : BINS] = negative[::-1]
    edge = len(counts) * found.width
    found.low, found.high = (-edge if signed else 0.0), edge
    return found


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("shape", ["bell", "sparse", "tail", "far"])
def test_kl_is_that_of_the_paper(signed, shape):
    used, rng = (340, np.random.default_rng(1)) if not signed else (230, np.random.default_rng(2))
    x = np.arange(used)
    counts = {
        "bell": 1e5 * np.exp(-((x / (used / 5)) ** 2)),
        "sparse": rng.integers(0, 50, used) * (rng.uniform(size=used) < 0.2),
        "tail": 1e4 / (1 + x) ** 1.5,
        "far": 1e5 * np.exp(-(((x - used * 0.7) / 9) ** 2)),
    }[shape].astype(np.int64)
    counts[-1] = 3
    found = crafted(counts, signed)
    assert kl_range(found) == pytest.approx(migacz(counts, found.width, found.low, found.high))


def test_kl_clips_far_outliers():
    bell = RNG.normal(0, 1, 200_000)
    found = histogram(bell, [40.0, -35.0])
    low, high = kl_range(found)
    assert minmax_range(found) == (-35, 40)
    assert 3 < high < 12 and -12 < low < -3 and low == -high


def test_kl_clips_on_the_far_side_only():
    found = histogram(np.maximum(RNG.normal(0, 1, 200_000), -0.5), [40.0])
    low, high = kl_range(found)
    assert low == -0.5 and 2 < high < 20


def test_kl_of_a_relu_ignores_its_zeros():
    x = np.append(np.abs(RNG.normal(0, 1, 100_000)), 0)
    plain, zeros = histogram(x, [30.0]), histogram(x, [30.0], np.zeros(10_000_000))
    assert kl_range(plain) == kl_range(zeros)
    assert kl_range(zeros)[0] == 0 and kl_range(zeros)[1] < 10


def test_kl_keeps_nearly_all_of_what_is_spread_evenly():
    found = histogram(RNG.uniform(-1, 1, 200_000))
    low, high = kl_range(found)
    assert -1 <= low < -0.98 and 0.98 < high <= 1


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=15, deadline=None)
def test_kl_keeps_99_percent_and_never_widens(seed, positive):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, 3000) * 10.0 ** rng.uniform(-3, 3) + rng.normal(0, 3)
    x = np.abs(x) if positive else x
    found = histogram(x)
    low, high = kl_range(found)
    assert found.low <= low <= high <= found.high
    assert ((x >= low - found.width) & (x <= high + found.width)).mean() >= KEPT - 1e-9


@pytest.mark.parametrize("x", [[0.0], [5.0], [-5.0], [0.0, 0.0, 3.0]])
def test_kl_of_hardly_anything_is_minmax(x):
    assert kl_range(histogram(x)) == (min(x), max(x))


# --- calibrate

MLP = "(float[n,4] x, int64[n] i) => (float[n,3] y) { e = Gather(T, i) a = Add(x, e) h = MatMul(a, w) r = Relu(h) y = Mul(r, two) }"
WEIGHTS = {
    "T": RNG.standard_normal((9, 4)).astype(np.float32),
    "w": RNG.standard_normal((4, 3)).astype(np.float32),
    "two": np.float32(2),
}


def mlp():
    return model(MLP, **WEIGHTS)


def samples(count=100):
    return {"x": RNG.standard_normal((count, 4)).astype(np.float32), "i": RNG.integers(0, 9, count)}


def cut(batch, *sizes):
    ends = np.cumsum(sizes)[:-1]
    return [dict(zip(batch, parts, strict=True)) for parts in zip(*(np.split(array, ends) for array in batch.values()), strict=True)]


def test_minmax_sees_every_float_tensor_that_is_no_weight():
    batch = samples()
    table = calibrate(mlp(), cut(batch, 30, 70), "minmax", total=100)
    e = WEIGHTS["T"][batch["i"]]
    a = batch["x"] + e
    h = a @ WEIGHTS["w"]
    expected = {"x": batch["x"], "e": e, "a": a, "h": h, "r": np.maximum(h, 0), "y": 2 * np.maximum(h, 0)}
    assert list(table.tensors) == list(expected)
    for name, array in expected.items():
        found = table.tensors[name]
        np.testing.assert_allclose([found.minimum, found.maximum], [array.min(), array.max()], rtol=1e-5)
        assert (found.low, found.high, found.count) == (found.minimum, found.maximum, array.size)
    assert (table.observer, table.samples, table.graph) == ("minmax", 100, graph.digest(mlp()))


def test_the_model_is_left_as_it_is():
    found = mlp()
    before = graph.digest(found)
    calibrate(found, [samples()])
    assert graph.digest(found) == before and [each.name for each in found.graph.outputs] == ["y"]


@pytest.mark.parametrize("observer", ["minmax", "kl"])
def test_the_table_does_not_depend_on_batching(observer):
    batch = samples(96)
    tables = [calibrate(mlp(), cut(batch, *sizes), observer) for sizes in ([96], [32, 64], [1, 0, 95])]
    assert len({each.samples_digest for each in tables}) == 1 and {each.samples for each in tables} == {96}
    for name in tables[0].tensors:  # to float32 rounding: an engine may sum a row of another batch in another order
        first, *others = (each.tensors[name] for each in tables)
        for other in others:
            np.testing.assert_allclose(list(vars(other).values()), list(vars(first).values()), rtol=1e-6)


def test_the_samples_digest_tells_samples_apart():
    batch = samples()
    digest = calibrate(mlp(), [batch]).samples_digest
    other = batch | {"i": batch["i"][::-1].copy()}
    assert calibrate(mlp(), [batch]).samples_digest == digest != calibrate(mlp(), [other]).samples_digest


def test_kl_is_narrower_than_minmax_where_there_are_outliers():
    x = RNG.standard_normal((4000, 4)).astype(np.float32)
    x[7, 2] = 60
    found = calibrate(mlp(), [{"x": x, "i": np.zeros(4000, np.int64)}], "kl").tensors["x"]
    assert found.maximum == 60 and found.high < 15


def test_a_model_without_shapes_is_calibrated_just_the_same():
    """Many exporters write no type of the values between inputs and outputs."""
    proto = model(MLP, **WEIGHTS)
    for node in proto.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    assert list(calibrate(proto, [samples()]).tensors) == ["x", "e", "a", "h", "r", "y"]


def test_memory_does_not_grow_with_the_number_of_samples():
    def peak(batches):
        tracemalloc.start()
        calibrate(mlp(), (samples(2000) for _ in range(batches)), "minmax")
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)
    assert peak(40) < 1.2 * peak(4)


DOUBLE = "(float[{},4] x) => (float[{},4] y) {{ y = Mul(x, two) }}"


@pytest.mark.parametrize("sizes", [[96], [1, 95], [7, 0, 50, 39]])
@pytest.mark.parametrize("fixed", [1, 4, 32])
def test_a_fixed_batch_size_takes_samples_in_any_batches(fixed, sizes):
    batch = {"x": samples(96)["x"]}
    dynamic = calibrate(model(DOUBLE.format("n", "n"), two=np.float32(2)), [batch])
    table = calibrate(model(DOUBLE.format(fixed, fixed), two=np.float32(2)), cut(batch, *sizes))
    assert (table.samples, table.samples_digest, table.tensors) == (96, dynamic.samples_digest, dynamic.tensors)


def test_samples_that_do_not_fill_the_last_batch_are_not_dropped():
    batch = {"x": samples(97)["x"]}
    with pytest.raises(RequestError, match="^the graph takes 32 samples at a time and 1 are left over; give a multiple of 32, or .*$"):
        calibrate(model(DOUBLE.format(32, 32), two=np.float32(2)), [batch])


def test_many_samples_at_once_run_in_parts(monkeypatch):
    ran = []
    add = Histogram.add
    monkeypatch.setattr(Histogram, "add", lambda self, x: (ran.append(len(x)), add(self, x)))
    table = calibrate(mlp(), [samples(700)])
    assert table.samples == 700 and sum(ran) == 6 * 700 and set(ran) == {256, 188}


def test_inputs_without_a_common_batch_are_left_as_they_are():
    found = model("(float[n,4] x, float[4,3] w) => (float[n,3] y) { y = MatMul(x, w) }")
    assert calibrate(found, [{"x": samples(9)["x"], "w": WEIGHTS["w"]}]).tensors["y"].count == 27


def test_a_model_without_float32_activations():
    found = model("(float16[n,4] x) => (float16[n,4] y) { y = Neg(x) }")
    with pytest.raises(RequestError, match="^the model has no float32 activation to quantize; .*$"):
        calibrate(found, [{"x": np.zeros((3, 4), np.float16)}])


def test_weights_stored_as_float16_are_no_activations():
    found = mlp()
    graph.compress_fp16(found, minimum=1)
    assert list(calibrate(found, [samples()]).tensors) == ["x", "e", "a", "h", "r", "y"]


@pytest.mark.parametrize("domain", ["com.example", ""])
def test_a_model_that_onnxruntime_refuses(domain):
    found = model("(float[n,4] x) => (float[n,4] y) { y = Neg(x) }")
    found.graph[0].domain, found.graph[0].op_type = domain, "Unheard"
    found.opset_imports[domain] = 17
    with pytest.raises(RequestError, match="^onnxruntime cannot run the model, which calibration needs: .*Unheard.*$"):
        calibrate(found, [{"x": np.zeros((3, 4), np.float32)}])


def test_what_onnxruntime_says_of_the_samples_is_not_cut_short():
    with pytest.raises(RequestError) as caught:
        calibrate(mlp(), [samples() | {"x": np.zeros((100, 5), np.float32)}])
    assert "\n" not in str(caught.value) and "Got: 5 Expected: 4" in str(caught.value) and "Please fix" in str(caught.value)


@pytest.mark.parametrize(
    ("batches", "what"),
    [
        ([], "no calibration samples; pass at least one"),
        ([samples(0)], "no calibration samples; pass at least one"),
        ([{"x": samples()["x"]}], "calibration samples hold x; the graph takes x, i"),
        ([samples() | {"z": np.zeros(1)}], "calibration samples hold i, x, z; the graph takes x, i"),
        ([samples() | {"x": np.zeros((100, 5), np.float32)}], "the calibration samples do not fit the graph: .*"),
        ([samples() | {"x": np.zeros((100, 4))}], "the calibration samples do not fit the graph: .*"),
        ([samples() | {"i": np.full(100, 9)}], "the calibration samples do not fit the graph: .*"),
        ([samples(), samples() | {"x": np.full((100, 4), np.nan, np.float32)}], "the model computes NaN or infinity on .*"),
        ([samples() | {"x": np.full((100, 4), 3e38, np.float32)}], "the model computes NaN or infinity on .*"),
    ],
)
def test_samples_that_cannot_be_used(batches, what):
    with pytest.raises(RequestError, match=f"^{what}$"):
        calibrate(mlp(), batches)


def test_an_unknown_observer():
    with pytest.raises(RequestError, match="unknown observer 'median'; choose one of minmax, kl"):
        calibrate(mlp(), [samples()], "median")


# --- CalibrationTable


def test_a_table_survives_saving(tmp_path):
    table = calibrate(mlp(), [samples()], "kl")
    path = table.save(tmp_path / "t.json")
    assert CalibrationTable.load(path) == table
    assert table.save(tmp_path / "u.json").read_bytes() == path.read_bytes()
    assert list(json.loads(path.read_text())["tensors"]) == list(table.tensors)


def test_a_table_belongs_to_one_graph():
    table = calibrate(mlp(), [samples()])
    table.require(mlp())
    other = model(MLP, **WEIGHTS | {"two": np.float32(3)})
    with pytest.raises(RequestError) as caught:
        table.require(other)
    assert table.graph[:12] in str(caught.value) and graph.digest(other)[:12] in str(caught.value)
    assert "zoo calibrate" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "body", ["[]", "{}", "3", '{"graph": "a", "observer": "kl", "samples": 1, "samples_digest": "d", "tensors": {"x": {"low": 1}}}']
)
def test_a_file_that_is_no_table(tmp_path, body):
    (tmp_path / "t.json").write_text(body)
    with pytest.raises(RequestError, match="t.json is not a calibration table"):
        CalibrationTable.load(tmp_path / "t.json")


@pytest.mark.parametrize(
    "change",
    [{"low": "text"}, {"low": float("nan")}, {"high": float("inf")}, {"low": None}, {"minimum": "1"}, {"low": 2.0, "high": 1.0}],
    ids=str,
)
def test_ranges_that_are_none(tmp_path, change):
    good = {"minimum": -1.0, "maximum": 1.0, "low": -1.0, "high": 1.0, "count": 3}
    table = {"graph": "a", "observer": "kl", "samples": 1, "samples_digest": "d"}
    (tmp_path / "t.json").write_text(json.dumps(table | {"tensors": {"fine": good, "odd": good | change}}))
    with pytest.raises(RequestError, match="^.*t.json gives tensor odd the range .*; wanted finite numbers, low <= high; .*$"):
        CalibrationTable.load(tmp_path / "t.json")


def test_ranges_are_plain():
    assert vars(TensorRange(0.0, 1.0, 0.0, 0.5, 3)) == {"minimum": 0.0, "maximum": 1.0, "low": 0.0, "high": 0.5, "count": 3}
