"""Calibration: ranges, streaming, memory."""

import itertools
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from helpers.calibrating import DOUBLE, MLP, WEIGHTS, cut, mlp, samples
from helpers.rewriting import model

from pipelines.core.errors import RequestError
from pipelines.core.settings import memory_bytes
from pipelines.graph import edit, io
from pipelines.quantization.calibration.calibrate import Observation, calibrate, observe
from pipelines.quantization.calibration.observers import Histogram, choose
from pipelines.quantization.calibration.table import CalibrationTable, TensorRange
from pipelines.quantization.recipe import OBSERVERS, QuantRecipe


def test_minmax_sees_every_float_tensor_that_is_no_weight(rng):
    batch = samples(rng)
    table = calibrate(mlp(), cut(batch, 30, 70), "minmax", total=100)
    e = WEIGHTS["T"][batch["i"]]
    a = batch["x"] + e
    h = a @ WEIGHTS["w"]
    expected = {"x": batch["x"], "e": e, "a": a, "h": h, "r": np.maximum(h, 0), "y": 2 * np.maximum(h, 0)}
    assert list(table.tensors) == list(expected)
    for name, array in expected.items():
        tensor = table.tensors[name]
        np.testing.assert_allclose([tensor.minimum, tensor.maximum], [array.min(), array.max()], rtol=1e-5)
        assert (tensor.low, tensor.high, tensor.count) == (tensor.minimum, tensor.maximum, array.size)
    assert (table.observer, table.samples, table.graph) == ("minmax", 100, io.digest(mlp()))


def test_the_model_is_left_as_it_is(rng):
    net = mlp()
    before = io.digest(net)
    calibrate(net, [samples(rng)])
    assert io.digest(net) == before and [output.name for output in net.graph.outputs] == ["y"]


@pytest.mark.parametrize("observer", OBSERVERS)
def test_the_table_does_not_depend_on_batching(rng, observer):
    # nothing that an engine sums
    text = "(float[n,4] x, int64[n] i) => (float[n,4] y) { e = Gather(T, i) a = Add(x, e) y = Relu(a) }"
    batch, net = samples(rng, 96), model(text, T=WEIGHTS["T"])
    tables = [calibrate(net, cut(batch, *sizes), observer) for sizes in ([96], [32, 64], [1, 0, 95])]
    assert tables[0] == tables[1] == tables[2]
    assert {tensor.method for tensor in tables[0].tensors.values()} <= set(OBSERVERS) - {"auto"}


def test_the_samples_digest_tells_samples_apart(rng):
    batch = samples(rng)
    digest = calibrate(mlp(), [batch]).samples_digest
    other = batch | {"i": batch["i"][::-1].copy()}
    assert calibrate(mlp(), [batch]).samples_digest == digest != calibrate(mlp(), [other]).samples_digest


def test_kl_is_narrower_than_minmax_where_there_are_outliers(rng):
    x = rng.standard_normal((4000, 4)).astype(np.float32)
    x[7, 2] = 60
    tensor = calibrate(mlp(), [{"x": x, "i": np.zeros(4000, np.int64)}], "kl").tensors["x"]
    assert tensor.maximum == 60 and tensor.high < 15


def test_a_model_without_shapes_is_calibrated_just_the_same(rng):
    """Many exporters write no type of the values between inputs and outputs."""
    proto = model(MLP, **WEIGHTS)
    for node in proto.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.type = value.shape = None
    assert list(calibrate(proto, [samples(rng)]).tensors) == ["x", "e", "a", "h", "r", "y"]


def test_memory_does_not_grow_with_the_number_of_samples(rng):
    def peak(batches):
        tracemalloc.start()
        calibrate(mlp(), (samples(rng, 2000) for _ in range(batches)), "minmax")
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return memory

    peak(1)
    assert peak(40) < 1.2 * peak(4)


@pytest.mark.parametrize("sizes", [[96], [1, 95], [7, 0, 50, 39]])
@pytest.mark.parametrize("fixed", [1, 4, 32])
def test_a_fixed_batch_size_takes_samples_in_any_batches(rng, fixed, sizes):
    batch = {"x": samples(rng, 96)["x"]}
    dynamic = calibrate(model(DOUBLE.format("n", "n"), two=np.float32(2)), [batch])
    table = calibrate(model(DOUBLE.format(fixed, fixed), two=np.float32(2)), cut(batch, *sizes))
    assert (table.samples, table.samples_digest, table.tensors) == (96, dynamic.samples_digest, dynamic.tensors)


def test_samples_that_do_not_fill_the_last_batch_are_not_dropped(rng):
    batch = {"x": samples(rng, 97)["x"]}
    with pytest.raises(
        RequestError, match="^the graph takes 32 samples at a time and 1 are left over; give a multiple of 32, or .*$"
    ):
        calibrate(model(DOUBLE.format(32, 32), two=np.float32(2)), [batch])


def test_many_samples_at_once_run_in_parts(rng, monkeypatch):
    ran = []
    add = Histogram.add
    monkeypatch.setattr(Histogram, "add", lambda self, x, count: (ran.append(len(x)), add(self, x, count)))
    table = calibrate(mlp(), [samples(rng, 700)])
    assert table.samples == 700 and sum(ran) == 6 * 700 and set(ran) == {256, 188}


def test_inputs_without_a_common_batch_are_left_as_they_are(rng):
    net = model("(float[n,4] x, float[4,3] w) => (float[n,3] y) { y = MatMul(x, w) }")
    assert calibrate(net, [{"x": samples(rng, 9)["x"], "w": WEIGHTS["w"]}]).tensors["y"].count == 27
    net = model("(float[n,4] x, float[k,3] w) => (float[n,3] y, float[k,3] z) { y = MatMul(x, w) z = Neg(w) }")
    assert calibrate(net, [{"x": samples(rng, 9)["x"], "w": WEIGHTS["w"]}], max_memory=1).tensors["y"].count == 27


def test_a_model_without_float32_activations():
    net = model("(float16[n,4] x) => (float16[n,4] y) { y = Neg(x) }")
    with pytest.raises(RequestError, match="^the model has no float32 activation to quantize; .*$"):
        calibrate(net, [{"x": np.zeros((3, 4), np.float16)}])


def test_weights_stored_as_float16_are_no_activations(rng):
    net = mlp()
    edit.compress_fp16(net, minimum=1)
    assert list(calibrate(net, [samples(rng)]).tensors) == ["x", "e", "a", "h", "r", "y"]


@pytest.mark.parametrize("domain", ["com.example", ""])
def test_a_model_that_onnxruntime_refuses(domain):
    net = model("(float[n,4] x) => (float[n,4] y) { y = Neg(x) }")
    net.graph[0].domain, net.graph[0].op_type = domain, "Unheard"
    net.opset_imports[domain] = 17
    with pytest.raises(RequestError, match="^onnxruntime cannot run the model, which calibration needs: .*Unheard.*$"):
        calibrate(net, [{"x": np.zeros((3, 4), np.float32)}])


def test_what_onnxruntime_says_of_the_samples_is_not_cut_short(rng):
    with pytest.raises(RequestError) as caught:
        calibrate(mlp(), [samples(rng) | {"x": np.zeros((100, 5), np.float32)}])
    assert (
        "\n" not in str(caught.value)
        and "Got: 5 Expected: 4" in str(caught.value)
        and "Please fix" in str(caught.value)
    )


SAMPLES = samples(np.random.default_rng(0))


@pytest.mark.parametrize(
    ("batches", "what"),
    [
        ([], "no calibration samples; pass at least one"),
        ([{name: array[:0] for name, array in SAMPLES.items()}], "no calibration samples; pass at least one"),
        ([{"x": SAMPLES["x"]}], "calibration samples hold x; the graph takes x, i"),
        ([SAMPLES | {"z": np.zeros(1)}], "calibration samples hold i, x, z; the graph takes x, i"),
        ([SAMPLES | {"x": np.zeros((100, 5), np.float32)}], "the calibration samples do not fit the graph: .*"),
        ([SAMPLES | {"x": np.zeros((100, 4))}], "the calibration samples do not fit the graph: .*"),
        ([SAMPLES | {"i": np.full(100, 9)}], "the calibration samples do not fit the graph: .*"),
        (
            [SAMPLES, SAMPLES | {"x": np.full((100, 4), np.nan, np.float32)}],
            r"calibration sample \d+ \(the first is 0\) holds NaN in x; check the samples",
        ),
        ([SAMPLES | {"x": np.full((100, 4), 3e38, np.float32)}], "the model computes NaN or infinity on .*"),
    ],
    ids=range(9),
)
def test_samples_that_cannot_be_used(batches, what):
    with pytest.raises(RequestError, match=f"^{what}$"):
        calibrate(mlp(), batches)


def test_what_holds_infinity_within_gets_no_range(rng):
    text = "(float[n,4] x) => (float[n,4] y) { h = MatMul(x, w) m = Add(h, mask) y = Softmax(m) }"
    net = model(text, w=rng.standard_normal((4, 4)).astype(np.float32), mask=np.array([0, 0, -np.inf, 0], np.float32))
    assert set(calibrate(net, [{"x": samples(rng)["x"]}]).tensors) == {"x", "h", "y"}


def test_infinity_within_the_samples_of_one_table_is_remembered_by_both(rng):
    net = model("(float[n,4] x, float[n,4] m) => (float[n,4] y) { a = Add(x, m) y = Softmax(a) }")
    x, m = (rng.standard_normal((20, 4)).astype(np.float32) for _ in range(2))
    tables = [
        calibrate(net, [{"x": x, "m": mask}])
        for mask in (m, np.where(np.eye(20, 4, dtype=bool), -np.inf, m).astype(np.float32))
    ]
    assert set(tables[0].tensors) == {"x", "m", "a", "y"} and set(tables[1].tensors) == {"x", "y"}
    assert tables[0].merge(tables[1]).tensors.keys() == tables[1].merge(tables[0]).tensors.keys() == {"x", "y"}


def test_an_unknown_observer(rng):
    with pytest.raises(
        RequestError, match="unknown observer 'median'; choose one of auto, minmax, percentile, mse, kl"
    ):
        calibrate(mlp(), [samples(rng)], "median")


# --- Observation


def test_histograms_serve_every_observer_without_another_run(rng, monkeypatch):
    batch = samples(rng, 300)
    observation = observe(mlp(), [batch])
    monkeypatch.setattr("pipelines.graph.reference_session.run", None)  # nothing may run
    for observer in OBSERVERS:
        assert observation.table(observer).tensors == {
            name: TensorRange(
                histogram.low,
                histogram.high,
                *choose(histogram, observer)[1:],
                histogram.count,
                choose(histogram, observer)[0],
                histogram.summary(),
            )
            for name, histogram in observation.histograms.items()
        }
    low, high = (getattr(observation.table("auto", symmetric=True).tensors["x"], end) for end in ("low", "high"))
    assert low == -high and observation.table("kl", symmetric=True).tensors["r"] == observation.table("kl").tensors["r"]


def test_fed_piece_by_piece_it_is_the_same(rng):
    batch, observation = samples(rng, 100), Observation(mlp())
    for part in cut(batch, 30, 0, 70):
        observation.feed(part)
    assert observation.table("kl") == calibrate(mlp(), cut(batch, 30, 0, 70), "kl")
    before = observation.table("minmax")
    observation.feed({name: 2 * array // 2 for name, array in batch.items()})
    assert before.samples == 100 and observation.table("minmax").samples == 200


@pytest.mark.parametrize(
    ("fixed", "memory", "size", "groups"),
    [
        ("n", "1GB", 256, ["abcdy"]),
        ("n", 4 * 148 + 67 * 140, 67, ["abcdy"]),  # the weights four times, 140 bytes a sample
        ("n", 4 * 148 + 5 * 140, 8, ["abcdy"]),  # never less than nine tenths for the activations
        ("n", 89, 1, ["abc", "dy"]),
        ("n", 1, 1, ["a", "b", "c", "d", "y"]),
        (20, "1GB", 20, ["abcdy"]),
        (20, 778, 20, ["ab", "c", "d", "y"]),
    ],
)
def test_less_memory_runs_fewer_samples_at_once_and_then_fewer_tensors(rng, fixed, memory, size, groups):
    text = f"(float[{fixed},4] x) => (float[{fixed},9] y) {{ a = Mul(x, two) b = Relu(a) c = MatMul(b, w) d = Relu(c) y = Add(d, two) }}"
    net = model(text, two=np.float32(2), w=rng.standard_normal((4, 9)).astype(np.float32))
    batch = {"x": samples(rng, 60)["x"]}
    observation = observe(net, [batch], max_memory=memory)
    assert list(observation._plans.values()) == [(size, [list(group) for group in groups])]
    expected, table = calibrate(net, [batch], "minmax"), observation.table("minmax")
    assert table.samples_digest == expected.samples_digest
    for name, tensor in table.tensors.items():
        assert [tensor.low, tensor.high, tensor.count] == pytest.approx(
            [expected.tensors[name].low, expected.tensors[name].high, expected.tensors[name].count], rel=1e-6
        )


def test_a_run_is_planned_anew_for_longer_samples():
    net = model("(float[n,t] x) => (float[n,t] y) { y = Neg(x) }")
    observation = Observation(net, max_memory=4000)
    for length, size in ((100, 10), (1, 256), (400, 2)):
        observation.feed({"x": np.ones((512, length), np.float32)})
        assert list(observation._plans.values())[-1] == (size, [["y"]])
    assert observation.histograms["y"].count == 512 * 501


def test_merging_keeps_the_corrections_of_more_samples_and_equalizations_must_be_the_same():
    one, other = (
        replace(CalibrationTable("g", "kl", n, "d"), bias={"y": shifts, "z": (1.0,)}, rounding={"y": str(n)})
        for n, shifts in ((1, (1.0, 0.0)), (3, (5.0, 4.0)))
    )
    other = replace(other, bias={"y": other.bias["y"]})
    assert one.merge(other).bias == other.merge(one).bias == {"y": (5.0, 4.0)}
    assert one.merge(other).rounding == other.merge(one).rounding == {"y": "3"}
    for change in ({"clip": True}, {"equalization": {"y": (1.0, 2.0)}}, {"recipe": QuantRecipe().to_json()}):
        with pytest.raises(RequestError, match="searched or corrected differently"):
            one.merge(replace(other, **change))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GB", 10**9),
        ("512 MiB", 2**29),
        ("1.5k", 1500),
        (77, 77),
        ("0.5gb", 5 * 10**8),
        ("300", 300),
        ("2T", 2 * 10**12),
    ],
)
def test_memory_sizes(text, size):
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "1 GB free", "GB", None])
def test_what_is_no_size(text):
    with pytest.raises(RequestError, match="^the memory .* is no size; write it like 1GB or 512MB$"):
        memory_bytes(text)


PEAK = """
import resource, sys
import numpy as np
from helpers.rewriting import model
from pipelines.quantization.calibration.calibrate import observe

layers = " ".join(f"a{i + 1} = Conv<pads = [1, 1, 1, 1]>(a{i}, w)" for i in range(10))
found = model(f"(float[n,32,64,64] a0) => (float[n,32,64,64] a10) {{ {layers} }}", w=np.full((32, 32, 3, 3), 1 / 288, np.float32))
batches = ({"a0": np.random.default_rng(i).random((64, 32, 64, 64), np.float32)} for i in range(int(sys.argv[1])))
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
observe(found, batches, max_memory="100MB")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024)
"""


@pytest.mark.slow
def test_memory_of_the_engine_is_bounded():
    """The activations of one batch of these take 336 MB, the samples themselves 34 MB a batch."""

    def peak(batches):
        command = [sys.executable, "-c", PEAK, str(batches)]
        return float(
            subprocess.run(
                command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
            ).stdout
        )

    few, many = peak(1), peak(4)
    assert few < 230 and many < 1.15 * few + 40


@pytest.mark.parametrize("cuts", [(40,), (1, 7, 30, 40)])
def test_means_of_the_extremes_of_samples(rng, cuts):
    x = rng.standard_normal((40, 3, 5)).astype(np.float32) * np.linspace(1, 9, 40, dtype=np.float32)[:, None, None]
    net = model("(float[n,3,5] x) => (float[n,3,5] y) { r = Relu(x) s = Add(r, one) y = Neg(s) }", one=np.float32(1))
    batches = [{"x": x[start:end]} for start, end in itertools.pairwise((0, *cuts))]
    table = observe(net, batches).table_of_mean_extremes()
    expected = {"x": x, "r": np.maximum(x, 0), "s": np.maximum(x, 0) + 1, "y": -np.maximum(x, 0) - 1}
    for name, tensor in table.tensors.items():
        rows = expected[name].reshape(40, -1)
        low, high = np.minimum(rows.min(axis=1), 0).mean(), np.maximum(rows.max(axis=1), 0).mean()
        assert (tensor.low, tensor.high) == pytest.approx((low, high), rel=1e-5), name
        assert (tensor.minimum, tensor.maximum) == pytest.approx((rows.min(), rows.max())), name
    symmetric = observe(net, batches).table_of_mean_extremes(symmetric=True).tensors["x"]
    assert symmetric.low == -symmetric.high and symmetric.high == pytest.approx(
        max(-table.tensors["x"].low, table.tensors["x"].high)
    )


@pytest.mark.parametrize("cuts", [(3, 7, 40), (40,)])
def test_ranges_some_deviations_wider_than_the_mean_extremes_end_where_several_samples_do(rng, cuts):
    x = rng.standard_normal((40, 3, 5)).astype(np.float32)
    net = model(
        "(float[n,3,5] x) => (float[n,3,5] y) { y = Clip(x, zero, one) }", zero=np.float32(0), one=np.float32(1)
    )
    table = observe(net, [{"x": x[start:end]} for start, end in itertools.pairwise((0, *cuts))])
    wide = table.table_of_mean_extremes(3.0).tensors
    ends = np.array([x.reshape(40, -1).min(axis=1), x.reshape(40, -1).max(axis=1)])
    expected = ends.mean(axis=1) + 3 * ends.std(axis=1) * (-1, 1)
    assert (wide["x"].low, wide["x"].high) == pytest.approx(expected, rel=1e-4)
    assert wide["x"].high > wide["x"].maximum and (wide["y"].low, wide["y"].high) == (0, 1)


def test_a_tensor_without_sample_axis_has_one_mean_extreme_a_run(rng):
    net = model("(float[n,4] x) => (float[4] y) { y = ReduceMax<axes = [0], keepdims = 0>(x) }")
    table = observe(net, [{"x": np.full((9, 4), value, np.float32)} for value in (1, 0)])
    assert table.table_of_mean_extremes().tensors["y"].high == 0.5
