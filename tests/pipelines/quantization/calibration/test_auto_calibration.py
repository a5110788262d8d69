"""The best calibration table: what loses on samples held back is taken back."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import mlp, model, run

from pipelines.core.batches import length
from pipelines.core.errors import RequestError
from pipelines.graph import io, query, reference_session
from pipelines.quantization.calibration import auto_calibration as module
from pipelines.quantization.calibration import candidates, effort
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import observe
from pipelines.quantization.calibration.effort import split_held_out
from pipelines.quantization.calibration.float_layers import FLOAT_SHARE
from pipelines.quantization.calibration.range_search import output_sqnr, quantized_tensors
from pipelines.quantization.ptq import correct_table, equalized, make_table
from pipelines.quantization.quantizer import Quantizer, quantize
from pipelines.quantization.recipe import QuantRecipe


def samples(count=80, seed=1):
    return [{"x": normals(seed)(count, 8)}]


@pytest.mark.parametrize(("count", "held"), [(80, 24), (96, 32), (400, 32), (16, 8)])
def test_a_share_of_the_samples_is_held_back_drawn_evenly(count, held):
    judging, fitting = split_held_out(mlp(), samples(count), count)
    x = samples(count)[0]["x"]
    judged = np.concatenate([batch["x"] for batch in judging])
    assert len(judged) == held
    for _ in range(2):  # as often as is needed
        fitted = np.concatenate([batch["x"] for batch in fitting])
        np.testing.assert_array_equal(np.sort(np.concatenate([judged, fitted]), axis=0), np.sort(x, axis=0))


def test_a_single_chunk_is_both():
    for count in (3, 8):
        judging, fitting = split_held_out(mlp(), samples(count), count)
        for batches in (judging, fitting):
            np.testing.assert_array_equal(np.concatenate([part["x"] for part in batches]), samples(count)[0]["x"])


def test_few_samples_are_held_back_where_they_are_large(monkeypatch):
    monkeypatch.setattr(effort, "MAX_HELD_OUT_ELEMENTS", 100)
    judging, fitting = split_held_out(mlp(), samples(400), 400)
    assert sum(map(length, judging)) == 8 and sum(map(length, fitting)) == 392


def spoiled(which):
    """`correct_table` whose corrections are far off."""

    def correct(float_model, recipe, table, batches, seconds, room, positions=None, int8=None):
        corrected = correct_table(float_model, recipe, table, batches, seconds=seconds, room=room)
        bias = {
            name: tuple(offset + 3 for offset in shift) for name, shift in {"h": (0.0,) * 16, **corrected.bias}.items()
        }
        rounding = dict.fromkeys(corrected.rounding, next(iter(corrected.rounding.values())))
        return replace(
            corrected, bias=bias if "bias" in which else corrected.bias, rounding=rounding | corrected.rounding
        )

    return correct


def test_a_correction_that_loses_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "correct_table", spoiled("bias"))
    table = auto_calibrate(mlp(), QuantRecipe(), samples(400))
    assert not table.bias
    other = samples(64, 5)
    sqnr = output_sqnr(mlp(), quantize(mlp(), QuantRecipe(), table)[0], other)
    bad = make_table(mlp(), QuantRecipe(correct=False), samples())
    bad = spoiled("bias")(mlp(), QuantRecipe(), bad, samples(), None, module.ROOM)
    assert sqnr > output_sqnr(mlp(), quantize(mlp(), QuantRecipe(), bad)[0], other) + 10


def test_plain_min_max_is_taken_where_all_else_loses(monkeypatch):
    """Ranges that clip all but the least values, by every observer but min-max, and bad corrections."""
    chosen = module.Observation.table

    def table(self, observer="auto", *, symmetric=False, fold=None):
        original = chosen(self, observer, symmetric=symmetric, fold=fold)
        if observer == "minmax":
            return original
        tensors = {
            name: replace(tensor, low=tensor.low / 9, high=tensor.high / 9) for name, tensor in original.tensors.items()
        }
        return replace(original, tensors=tensors)

    monkeypatch.setattr(module.Observation, "table", table)
    monkeypatch.setattr(module.Observation, "table_of_mean_extremes", lambda self, _, **options: table(self, **options))
    monkeypatch.setattr(module, "correct_table", spoiled("bias"))
    calibrated = auto_calibrate(mlp(), QuantRecipe(), samples())
    assert calibrated.observer == "auto" and not calibrated.bias
    assert all((tensor.low, tensor.high) == (tensor.minimum, tensor.maximum) for tensor in calibrated.tensors.values())


def test_an_observer_that_was_asked_for_is_taken_and_without_corrections_none_is_tried():
    table = auto_calibrate(mlp(), QuantRecipe(observer="percentile", correct=False), samples())
    plain = make_table(mlp(), QuantRecipe(observer="percentile", correct=False), samples())
    quantized = quantized_tensors(mlp(), QuantRecipe())
    assert {name: table.tensors[name] for name in quantized} == {name: plain.tensors[name] for name in quantized}
    assert replace(table, tensors={}) == replace(plain, tensors={})
    table = auto_calibrate(mlp(), QuantRecipe(observer="kl"), samples())
    assert {table.tensors[name].method for name in quantized} == {"kl"}


def embedded():
    """Embeddings beside numbers: their QuantizeLinear moves through the Concat and into the table."""
    normal = normals(4)
    text = """(int64[n,2] i, float[n,3] x) => (float[n,4] y) {
        a = Gather(T, i) f = Flatten(a) c = Concat<axis=1>(f, x) h = Gemm<transB=1>(c, W, p) r = Clip(h, zero, six)
        y = Gemm<transB=1>(r, V) }"""
    constants = {"T": normal(50, 5), "W": normal(16, 13), "V": normal(4, 16), "p": normal(16) - 2}
    net = model(text, **constants, zero=np.float32(0), six=np.float32(6))
    rng = np.random.default_rng(5)
    return net, [{"i": rng.integers(0, 50, (80, 2)), "x": rng.standard_normal((80, 3)).astype(np.float32) ** 3}]


@pytest.mark.parametrize("net", [lambda: (mlp(), samples()), embedded])
def test_the_ranges_that_a_recipe_reads_are_those_that_change_the_file(net):
    float_model, batches = net()
    table = observe(float_model, batches).table("minmax")
    digest = io.digest(quantize(float_model, QuantRecipe(), table)[0])
    changing = set()
    for name, tensor in table.tensors.items():
        narrow = replace(
            table, tensors=table.tensors | {name: replace(tensor, low=tensor.low / 2, high=tensor.high / 2)}
        )
        if io.digest(quantize(float_model, QuantRecipe(), narrow)[0]) != digest:
            changing.add(name)
    assert changing == quantized_tensors(float_model, QuantRecipe())


@pytest.mark.parametrize("net", [lambda: (mlp(), samples()), embedded])
def test_tensors_whose_range_no_recipe_reads_get_min_max_ranges_and_the_file_is_the_same(monkeypatch, net):
    """The result of a layer before its Relu is never quantized; counting its values took a third of the time."""
    float_model, batches = net()
    table = auto_calibrate(float_model, QuantRecipe(), batches)
    others = set(table.tensors) - quantized_tensors(equalized(float_model, {}, table.smoothing), QuantRecipe())
    assert others and all(
        (tensor.low, tensor.high, tensor.method, tensor.histogram) == (tensor.minimum, tensor.maximum, "observed", None)
        for tensor in map(table.tensors.__getitem__, others)
    )
    merged = table.merge(table).tensors
    for name in others:
        assert (merged[name].low, merged[name].high) == (table.tensors[name].low, table.tensors[name].high)
    monkeypatch.setattr(module, "quantized_tensors", lambda model, _: query.used_names(model.graph))
    whole = auto_calibrate(float_model, QuantRecipe(), batches)
    assert all(tensor.histogram for tensor in whole.tensors.values())
    files = [io.digest(quantize(float_model, QuantRecipe(), candidate)[0]) for candidate in (table, whole)]
    assert files[0] == files[1]


def heavy_tailed():
    """Two branches of equal weight in the result; what one of them multiplies has one huge value in a thousand."""
    normal = normals(0)
    text = """(float[n,8] x, float[n,8] t) => (float[n,64] y) {
        a = MatMul(x, w) r = Relu(a) b = MatMul(r, v) c = MatMul(t, u) y = Add(b, c)
    }"""
    net = model(text, w=normal(8, 64, scale=0.3), v=normal(64, 64, scale=0.2), u=normal(8, 64, scale=0.6))
    for value in net.graph.outputs:
        value.shape = None
    rng = np.random.default_rng(4)
    t = normals(2)(200, 8) * np.where(rng.random((200, 1)) < 0.15, 1, 0.004).astype(np.float32)
    t /= np.abs(t).mean()
    return net, [{"x": normals(1)(200, 8), "t": t}]


def test_a_correction_that_helps_is_kept():
    net, feeds = heavy_tailed()
    assert auto_calibrate(net, QuantRecipe(), feeds).rounding


def test_a_layer_that_int8_hurts_stays_float_and_says_so(monkeypatch):
    net, feeds = heavy_tailed()
    monkeypatch.setattr(module, "GOAL", 90.0)  # never reached: as many as there is room for
    table = auto_calibrate(net, QuantRecipe(), feeds)
    sizes = {"a": 8 * 64, "b": 64 * 64, "c": 8 * 64}
    names = {str(node.name or node.outputs[0].name): node.outputs[0].name for node in net.graph}
    kept = [names[name] for name in table.keep_float]
    assert kept and sum(sizes[layer] for layer in kept) <= FLOAT_SHARE * sum(sizes.values())
    int8, report = quantize(net, QuantRecipe(), table)
    reasons = {op.name: op.reason for op in report.operators if op.precision == "float"}
    assert all(
        reasons[name].startswith("int8 costs") and reasons[name].endswith("SQNR here") for name in table.keep_float
    )
    everything, _ = quantize(net, QuantRecipe(), replace(table, keep_float={}))
    assert output_sqnr(net, int8, feeds) > output_sqnr(net, everything, feeds)


def test_no_layer_stays_float_where_the_goal_is_met():
    table = auto_calibrate(mlp(), QuantRecipe(), samples())
    assert not table.keep_float


def test_the_same_samples_give_the_same_table():
    net, feeds = heavy_tailed()
    assert auto_calibrate(net, QuantRecipe(), feeds) == auto_calibrate(net, QuantRecipe(), feeds)


def test_the_model_itself_is_left_alone():
    net = mlp()
    before = run(net, x=samples()[0]["x"])["y"]
    auto_calibrate(net, QuantRecipe(), samples())
    np.testing.assert_array_equal(run(net, x=samples()[0]["x"])["y"], before)


BOXES = """(float[1,16] x) => (float[k,4] y) { b = Gemm(x, B) c = Reshape(b, rows) s = Gemm(x, S) t = Reshape(s, classes)
    p = Sigmoid(t) chosen = NonMaxSuppression(c, p, most, overlap, least) i = Gather<axis=1>(chosen, two)
    a = Squeeze(c, zero) y = Gather<axis=0>(a, i) }"""


def test_outputs_as_many_as_were_found_are_judged_by_what_they_were_chosen_from():
    """Of an int8 detector NonMaxSuppression may leave more boxes, or fewer."""
    normal = normals(2)
    corners = np.tile(np.float32([0, 0, 1, 1]), 20) + np.repeat(np.arange(20, dtype=np.float32), 4) * 0.3
    net = model(BOXES, B=normal(16, 80) * 0.01 + corners / 16, S=normal(16, 40), rows=np.array([1, 20, 4]),
                  classes=np.array([1, 2, 20]), most=np.array([20]), overlap=np.float32([0.5]), least=np.float32([0.5]),
                  two=np.int64(2), zero=np.array([0]))  # fmt: skip
    batches = [{"x": normals(seed)(1, 16) + 1} for seed in range(24)]
    table = auto_calibrate(net, QuantRecipe(), batches)
    int8, _ = quantize(net, QuantRecipe(), table)
    assert 20 < output_sqnr(net, int8, batches) < 80


def quantized_tables(monkeypatch):
    """Returns a list that gets the tables of all further int8 models of a calibration."""
    tables, function = [], Quantizer.quantize
    monkeypatch.setattr(Quantizer, "quantize", lambda self, table: (tables.append(table), function(self, table))[1])
    return tables


def test_a_fast_calibration_runs_fewer_samples_and_rounds_weights_to_nearest(monkeypatch):
    monkeypatch.setattr(effort, "SMALL", 0)
    float_model, batches = mlp(), samples(400)
    fast = auto_calibrate(float_model, QuantRecipe(), batches, 400, effort="fast")
    assert fast.samples == 64 and not fast.rounding and not fast.keep_float
    default = auto_calibrate(float_model, QuantRecipe(), batches, 400, effort="default")
    assert default.samples == 400 and default.rounding
    other = samples(64, 5)
    fast_db, default_db, best_db = (
        output_sqnr(float_model, quantize(float_model, QuantRecipe(), table)[0], other)
        for table in (fast, default, auto_calibrate(float_model, QuantRecipe(), batches, 400, effort="best"))
    )
    assert fast_db > best_db - 8 and default_db > best_db - 1


def test_a_fast_calibration_opens_one_session_a_candidate(monkeypatch):
    """And those of shapes and values, with and without smoothing, a chunk's size, statistics and the float model."""
    opened, quantized = [], quantized_tables(monkeypatch)
    session = reference_session.session
    monkeypatch.setattr(
        reference_session, "session", lambda *args, **options: (opened.append(args[1]), session(*args, **options))[1]
    )
    auto_calibrate(mlp(), QuantRecipe(), samples(400), 400, effort="fast")
    tried = 2 * (len(module.OBSERVERS) + 1) + 1  # with and without smoothing; the best, for its corrected biases
    assert len(quantized) <= tried and len(opened) <= len(quantized) + 10


def test_candidates_are_judged_on_a_part_until_they_are_close(monkeypatch):
    monkeypatch.setattr(effort, "CHEAP", 0)
    judged = []
    errors = module.OutputSqnr.errors

    def count(self, session, batches):
        judged.append((batches.start, batches.stop))
        return errors(self, session, batches)

    monkeypatch.setattr(module.OutputSqnr, "errors", count)
    monkeypatch.setattr(candidates, "CLOSE", 0.0)  # the first and the best alone go on
    module.auto_calibrate(mlp(), QuantRecipe(correct=False), samples(400), 400, effort="default")
    assert judged.count((0, 2)) >= 4 and judged.count((2, 7)) in (0, 2) and len(judged) <= 8, judged


@pytest.mark.parametrize(("count", "crosses"), [(7, False), (8, True), (128, True), (129, False)])
def test_ranges_of_few_samples_are_judged_on_the_other_half(monkeypatch, count, crosses):
    """Every sample is `scale` times 1: the ranges of even samples end at 1, those of odd ones at 2."""
    net = model("(float[n,2,3,3] x) => (float[n,2,3,3] y) { y = Conv(x, w) }", w=normals(3)(2, 2, 1, 1))
    batch = {"x": np.resize(np.float32([1, 2]), count)[:, None, None, None] * np.ones((1, 2, 3, 3), np.float32)}
    tables, errors = [], []
    quantize_by, errors_of = Quantizer.quantize, module.OutputSqnr.errors
    monkeypatch.setattr(Quantizer, "quantize", lambda self, table: (tables.append(table), quantize_by(self, table))[1])

    def record(self, session, batches):
        errors.append((tables[-1].tensors["x"].maximum, {batch["x"].max() for batch in self._samples[batches]}))
        return errors_of(self, session, batches)

    monkeypatch.setattr(module.OutputSqnr, "errors", record)
    best = auto_calibrate(net, QuantRecipe(correct=False), [batch], count, effort="best")
    assert best.tensors["x"].maximum == 2
    assert ((1, {2}) in errors and (2, {1}) in errors) == crosses


def test_an_unknown_effort_is_named():
    with pytest.raises(RequestError, match="found the effort 'much', expected one of fast, default, best"):
        auto_calibrate(mlp(), QuantRecipe(), samples(16), effort="much")


def test_tables_that_differ_in_corrections_alone_are_quantized_once(monkeypatch):
    tables = quantized_tables(monkeypatch)
    table = auto_calibrate(mlp(), QuantRecipe(observer="minmax"), samples(64), 64)
    assert table.rounding and not any(tried.bias or tried.rounding for tried in tables)
    shared = candidates.Int8Models(Quantizer(mlp(), QuantRecipe()))
    for candidate in (replace(table, bias={}, rounding={}), table, replace(table, bias={})):
        assert io.digest(shared.of(candidate)) == io.digest(quantize(mlp(), QuantRecipe(), candidate)[0])


def test_a_convolutional_network_is_smoothed_with_the_best_ranges_alone(monkeypatch):
    normal = normals(3)
    net = model(
        "(float[n,4,6,6] x) => (float[n,8] y) { a = Conv<pads = [1,1,1,1]>(x, w) b = Relu(a) c = Conv<pads = [1,1,1,1]>(b, v)"
        " d = Relu(c) p = GlobalAveragePool(d) f = Flatten(p) y = Gemm(f, u) }",
        w=normal(8, 4, 3, 3), v=normal(8, 8, 3, 3), u=normal(8, 8),
    )  # fmt: skip
    tried = quantized_tables(monkeypatch)
    monkeypatch.setattr(module, "splits_and_smoothing", lambda *_: ({}, {"f": (1.0,) * 7 + (0.5,)}))
    auto_calibrate(net, QuantRecipe(), [{"x": normal(96, 4, 6, 6)}], 96, effort="default")
    ranges = [
        tuple((tensor.low, tensor.high) for tensor in table.tensors.values()) for table in tried if table.smoothing
    ]
    assert len(set(ranges)) == 1
