"""Every family of click models as one program, with random weights: near the float model, the same bytes, near misses."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from helpers.click_networks import FAMILIES, Network, network
from helpers.rewriting import model, run
from helpers.tiers import one_in

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.steps import Dense, Gather, Leaky, LookupSum, Mixed, Numbers
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import passes
from zoo.recommenders.lowering import lower as lowering
from zoo.recommenders.lowering import plan as folding
from zoo.recommenders.lowering.lower import lower

pytestmark = pytest.mark.usefixtures("caches")
BOUND = 0.005


def folded(found, feeds, rewritten=True, recipe=None):
    """(program, report) of a float model; its rewritten form."""
    found = found.clone()
    if rewritten:
        rewrite(found, passes({"schema": {}}))
    result, report = lower(found, calibrate(found, [feeds], "minmax"), recipe or QuantRecipe())
    assert report["fold"] is (result is not None) and report["reason"]
    return (None if result is None else click_program(result.graph[0])), report


def moved(found, program, feeds):
    """The largest change of each output."""
    wanted = run(found, **feeds)
    made = reference.run(program, feeds["ids"], feeds.get("numbers"), feeds.get("scales"))
    return [np.abs(result - expected).max() for result, expected in zip(made, wanted.values(), strict=True)]


def near(family, bound=BOUND, count=400, rewritten=True, **options):
    net = Network(family, **options)
    feeds = net.feeds(count)
    program, report = folded(net.model, feeds, rewritten)
    assert program is not None, report["reason"]
    changes = moved(net.model, program, feeds)
    assert changes[0] <= bound, changes
    return program, report


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, seed, rewritten):
    near(family, seed=seed, rewritten=rewritten)


@pytest.mark.parametrize("pool", one_in(2, ["sum", "mean", "max"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_lists_of_every_pooling(family, pool):
    near(family, fields=((40, 1, ""), (30, 6, pool), (9, 20, pool), (50, 1, "")), users=2)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "dlrm"])
def test_without_numbers(family):
    program, _ = near(family, numbers=0)
    assert program.numbers == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_one_number_a_layer(family):
    near(family, numbers=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_categories_alone(family):
    program, report = near(family, fields=((40, 1, ""),) * 5, width=16)
    assert program.means == 0
    if family in ("wide-deep", "two-tower"):
        assert report["forms"][0]["folded"]


def test_cross_layers_of_full_rank_and_of_other_depths():
    near("dcn-v2", rank=0)
    near("dcn-v2", rank=0, crosses=1)
    near("dcn-v2", crosses=3)
    near("dcn-v2", crosses=1)


@pytest.mark.parametrize("rank", [0, 6])
@pytest.mark.parametrize("crosses", [1, 3])
def test_biases_beside_the_products_of_cross_layers(crosses, rank):
    near("dcn-v2", crosses=crosses, rank=rank, beside=True)


@pytest.mark.parametrize("rewritten", [False, True])
@pytest.mark.parametrize(("rank", "beside"), [(1, False), (-1, False), (-1, True)])
def test_cross_layers_with_a_vector(rank, beside, rewritten):
    near("dcn-v2", crosses=3, rank=rank, beside=beside, rewritten=rewritten)


def test_towers_that_end_in_a_relu():
    near("two-tower", relu=True)


@pytest.mark.parametrize("fine", [0, 2**16])
@pytest.mark.parametrize("family", FAMILIES)
def test_slopes_below_zero(family, fine, monkeypatch):
    monkeypatch.setattr(folding, "FINE", fine)
    program, _ = near(family, activation="LeakyRelu<alpha=0.2>({})", relu=True)
    assert any(isinstance(step, Leaky) for step in program.steps)
    assert not any(isinstance(step, Dense) for step in program.steps)  # their layers read no bytes


@pytest.mark.parametrize("family", ["wide-deep", "deepfm", "dcn-v2"])
def test_numbers_times_vectors(family):
    program, _ = near(family, vectors=True, numbers=3, beside=True)
    spread = [step.columns.tolist() for step in program.steps if isinstance(step, Numbers)]
    codes = [[number for number in range(3) for _ in range(8)]] * (family != "wide-deep")
    assert spread == [[0, 1, 2], *codes]  # a layer reads a number, whatever vector it stands for


def test_numbers_through_a_relu():
    net = Network("wide-deep")
    text = "(int32[n,1] ids, float[n,3] numbers) => (float[n,1] probability) {"
    text += "e = Gather(T, ids) f = Squeeze(e, one) r = Relu(numbers) x = Concat<axis=1>(f, r) h = Gemm(x, w, b)"
    text += "q = Relu(h) logit = MatMul(q, v) probability = Sigmoid(logit) }"
    shapes = {"T": (40, 8), "w": (11, 16), "b": (16,), "v": (16, 1)}
    weights = {name: net.rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    onnx_model = model(text, **weights, one=np.int64([1]))
    feeds = {"ids": net.rng.integers(0, 40, (200, 1)).astype(np.int32)}
    feeds["numbers"] = net.rng.standard_normal((200, 3)).astype(np.float32)
    program, report = folded(onnx_model, feeds, rewritten=False)
    assert program is not None, report["reason"]
    assert moved(onnx_model, program, feeds)[0] <= BOUND


@pytest.mark.parametrize("fine", one_in(2, [0, 200, 1000]))
@pytest.mark.parametrize("family", FAMILIES)
def test_large_layers_read_bytes(family, fine, monkeypatch):
    monkeypatch.setattr(folding, "FINE", fine)
    program, _ = near(family, bound=0.03, hidden=(48, 24, 8))
    assert fine == 1000 or any(isinstance(step, Dense) for step in program.steps)


def test_tables_beyond_the_caches_have_rows_of_bytes(monkeypatch):
    monkeypatch.setattr(machine, "caches", dict)
    bytes_alone(near("wide-deep", bound=0.01, width=32)[0])


def bytes_alone(program):
    tables = [step.table for step in program.steps if isinstance(step, Mixed) and step.table is not None]
    assert tables and all(table.dtype == np.uint8 for table in tables)


@pytest.fixture
def unfolded(monkeypatch):
    """The forms of which nothing is folded."""
    monkeypatch.setattr(lowering, "FORMS", [form for form in lowering.FORMS if form.fold == "none"])


def test_nothing_is_folded_in_forms_that_multiply(unfolded):
    program, report = near("deepfm")
    assert not any(step.table is not None for step in program.steps if isinstance(step, Mixed))
    assert not any(form["folded"] for form in report["forms"])


def test_a_tower_passes_over_the_codes_of_the_other(unfolded):
    program, _ = near("two-tower", fields=((40, 6, "mean"), (30, 6, "mean")), width=16, users=1)
    first = [step for step in program.steps if isinstance(step, Mixed) and step.x == 0]
    assert len(first) == 2 and all(len(step.weight) <= 16 + program.numbers for step in first)


def test_units_that_are_most_often_active_stand_first():
    """Zeros of neighbours come together: more pairs of units are zero than where units stand as they come."""
    net = Network("wide-deep", hidden=(48, 24))
    feeds = net.feeds(400)
    program, _ = folded(net.model, feeds)
    hidden = next(step.outs[0][0] for step in program.steps if isinstance(step, Mixed))
    active = reference.buffers(program, feeds["ids"], feeds.get("numbers"), feeds.get("scales"))[hidden] > 0
    often = active.mean(axis=0)
    assert often[:12].mean() > often[12:24].mean() > often[24:36].mean() > often[36:].mean()
    mixed_up = active[:, np.random.default_rng(0).permutation(48)]
    pairs = [units.reshape(400, 24, 2).any(axis=2).mean() for units in (active, mixed_up)]
    assert pairs[0] < 0.95 * pairs[1]
    assert moved(net.model, program, feeds)[0] <= BOUND


def test_scalars_alone_are_summed_as_floats():
    program, _ = near("wide-deep", fields=((40, 1, ""), (30, 1, ""), (9, 3, "sum")))
    (summed,) = [step for step in program.steps if isinstance(step, LookupSum)]
    assert summed.columns.tolist() == [0, 1] and summed.rows.tolist() == [40, 30]
    assert [(step.width, step.pool) for step in program.steps if isinstance(step, Gather)] == [(9, "sum")]


def test_scalars_lie_beside_the_embeddings():
    program, _ = near("deepfm")
    gathers = [step for step in program.steps if isinstance(step, Gather)]
    assert len(gathers) == 6 and {step.width for step in gathers} == {9}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_inputs_give_the_same_file(family, tmp_path):
    onnx_model, feeds = network(family)
    rewrite(onnx_model, passes({"schema": {}}))
    table, before = calibrate(onnx_model, [feeds], "minmax"), io.digest(onnx_model)
    paths = []
    for number in range(2):
        result, _ = lower(onnx_model, table, QuantRecipe())
        assert io.digest(onnx_model) == before
        assert [value.name for value in result.graph.inputs] == [value.name for value in onnx_model.graph.inputs]
        assert [value.name for value in result.graph.outputs] == [value.name for value in onnx_model.graph.outputs]
        paths.append(io.save(result, tmp_path / f"{number}.onnx"))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    program, again = (click_program(native_model.graph[0]) for native_model in (result, io.load(paths[0])))
    arrays = feeds["ids"], feeds.get("numbers"), feeds.get("scales")
    for output, other in zip(reference.run(program, *arrays), reference.run(again, *arrays), strict=True):
        assert output.tobytes() == other.tobytes()


def test_the_recipe_is_kept():
    onnx_model, feeds = network("deepfm")
    program, report = folded(onnx_model, feeds, recipe=QuantRecipe(quantize_tables=False))
    assert program is None and report["reason"] == "the recipe keeps tables float"
    table = calibrate(onnx_model, [feeds], "minmax")
    with pytest.raises(RequestError, match="made for the graph"):
        lower(onnx_model, dataclasses.replace(table, graph="0" * 64), QuantRecipe())


def test_what_the_recipe_keeps_float_is_not_in_bytes(monkeypatch):
    monkeypatch.setattr(folding, "FINE", 0)
    monkeypatch.setattr(machine, "caches", dict)
    onnx_model, feeds = network("deepfm", width=32)
    for keep, coarse in (((), True), (("h0",), False)):
        program, _ = folded(onnx_model, feeds, recipe=QuantRecipe(keep_float=keep))
        tables = [step.table for step in program.steps if isinstance(step, Mixed) and step.table is not None]
        assert any(isinstance(step, Dense) for step in program.steps) is coarse
        assert tables and all((table.dtype == np.uint8) is coarse for table in tables)


def test_columns_of_zeros_do_not_make_others_coarse():
    """A hidden unit that the embeddings do not reach has weights of numbers far beyond its rows."""
    net = Network("wide-deep", width=16)
    weight = net.weights["Wh0"].copy()
    weight[::3, : 6 * 16] *= 1e-5
    value = net.model.graph.initializers["Wh0"]
    value.const_value = ir.tensor(weight, name="Wh0")
    feeds = net.feeds(400)
    program, _ = folded(net.model, feeds)
    assert moved(net.model, program, feeds)[0] <= 0.002


HEAD = "(int32[n,3] ids, float[n,2] numbers) => (float[n,1] y) { a = Gather<axis=1>(ids, zero) e = Gather(E, a) "
TAIL = " l = Gemm(h, U) y = Sigmoid(l) }"


@pytest.mark.parametrize(
    ("middle", "said"),
    [
        ("v = Concat<axis=1>(e, numbers) g = Gemm(v, W) h = Sin(g)", "Sin"),
        ("v = Concat<axis=1>(e, numbers) g = Gemm(v, W) h = Elu(g)", "Elu"),
        (
            "d = Gather(E, ids) s = ReduceMean<axes=[1], keepdims=0>(d) v = Concat<axis=1>(s, numbers) g = Gemm(v, W) h = Relu(g)",
            "ReduceMean",
        ),
        ("b = Neg(a) f = Gather(E, b) v = Concat<axis=1>(f, numbers) g = Gemm(v, W) h = Relu(g)", "Neg"),
        ("m = Mul(e, e) v = Concat<axis=1>(m, numbers) g = Gemm(v, W) h = Relu(g)", "not in int8"),
        ("v = Concat<axis=1>(e, numbers) g = Gemm(v, W) r = Relu(g) h = Add(r, e)", "no native form"),
    ],
)
def test_what_no_program_computes_is_named(middle, said):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    onnx_model = model(HEAD + middle + TAIL, zero=np.int64(0), E=normal(9, 4), W=normal(6, 4), U=normal(4, 1))
    feeds = {"ids": rng.integers(0, 9, (20, 3)).astype(np.int32), "numbers": normal(20, 2)}
    program, report = folded(onnx_model, feeds, rewritten=False)
    assert program is None and said in report["reason"] and "\n" not in report["reason"]


@pytest.mark.parametrize("name", ["numbers", "h0"])
def test_ranges_that_are_missing_are_named(name):
    onnx_model, feeds = network("wide-deep")
    table = calibrate(onnx_model, [feeds], "minmax")
    short = {key: limits for key, limits in table.tensors.items() if key != name}
    result, report = lower(onnx_model, dataclasses.replace(table, tensors=short), QuantRecipe())
    assert result is None and f"no calibrated range for {name}" in report["reason"]


def test_tables_that_are_not_finite_are_refused():
    onnx_model, feeds = network("deepfm")
    table = calibrate(onnx_model, [feeds], "minmax")
    for name in ("Te0", "Wh0"):
        broken = onnx_model.clone()
        value = broken.graph.initializers[name]
        array = value.const_value.numpy().copy()
        array[0, 0] = np.inf
        value.const_value = ir.tensor(array, name=name)
        made = dataclasses.replace(table, graph=io.digest(broken))
        with np.errstate(invalid="ignore"):
            result, report = lower(broken, made, QuantRecipe())
        assert result is None and "finite" in report["reason"]
