"""Forms of a native program: the same bits on all instruction sets, errors within the bound, timing and choice."""

import json
import mmap

import numpy as np
import onnx_ir as ir
import pytest
from helpers.click_networks import FAMILIES, Network
from helpers.clicks_folded import needs_kernels, one_line
from helpers.rewriting import run

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.engines import timing
from pipelines.engines.catalog import load, native_candidates
from pipelines.engines.native import forms as native_forms
from pipelines.engines.native import recommender_files
from pipelines.engines.native.forms import Forms
from pipelines.engines.timing import Choice
from pipelines.graph import io
from pipelines.kernels import extension, program_file
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.steps import CodeBytes, CrossLayer, Dense, GateCodes, Gather, Mixed
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.integer_layers import balanced_units
from zoo.recommenders.lowering.lower import lower

pytestmark = pytest.mark.usefixtures("caches")
BOUND = 0.005
COARSE = QuantRecipe(bound=0.02)  # random weights are more sensitive than trained ones


def lowered(family, recipe=None, **options):
    """(network, inputs, graph, report) of a family with random weights."""
    net = Network(family, **options)
    feeds = net.feeds(400)
    graph, report = lower(net.model, calibrate(net.model, [feeds], "minmax"), recipe or QuantRecipe())
    assert graph is not None, report["reason"]
    return net, feeds, graph, report


def forms(graph):
    return {node.name: click_program(node) for node in graph.graph}


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_all_forms_have_the_bits_of_the_reference_and_are_near_the_float_model(family):
    net, feeds, graph, report = lowered(family, width=16)
    wanted = run(net.model, **feeds)
    arrays = feeds["ids"], feeds.get("numbers"), feeds.get("scales")
    programs = forms(graph)
    assert list(programs) == [form["form"] for form in report["forms"]]
    for name, program in programs.items():
        expected = reference.run(program, *arrays)
        for result, exact in zip(expected, wanted.values(), strict=True):
            assert np.abs(result - exact).max() <= BOUND, name
        made = [native.click_program(program, isa)(*arrays) for isa in extension.isas()]
        made = [outputs if isinstance(outputs, tuple) else (outputs,) for outputs in made]
        for result, same in zip(made[0], expected, strict=True):
            np.testing.assert_allclose(result, same, rtol=1e-6)  # the sigmoid may differ in its last bits
        assert all(
            array.tobytes() == same.tobytes() for other in made for array, same in zip(other, made[0], strict=True)
        )


def test_rows_that_one_layer_reads_are_looked_up_as_bytes():
    _, _, graph, _ = lowered("wide-deep", COARSE)
    steps = forms(graph)["int8"].steps
    assert sum(isinstance(step, Gather) and step.coarse for step in steps) >= 3
    assert any(isinstance(step, Mixed) and step.added >= 0 for step in steps)


def test_codes_that_are_read_elsewhere_too_become_bytes():
    _, _, graph, _ = lowered("deepfm", COARSE)
    assert any(isinstance(step, CodeBytes) for step in forms(graph)["int8"].steps)


def test_forms_share_the_tables_that_are_the_same():
    _, _, graph, _ = lowered("deepfm", COARSE)
    tables = [
        [id(value) for value in node.inputs[3:] if value.const_value.size > 300 and str(value.dtype) == "INT16"]
        for node in graph.graph
        if node.name in ("int16", "int8")
    ]
    assert len(tables) == 2 and set(tables[0]) & set(tables[1])


def test_a_form_beyond_the_bound_is_left_out_and_named():
    _, _, graph, report = lowered("wide-deep", QuantRecipe(bound=1e-7))
    assert list(forms(graph)) == ["int16"] and report["refused"]
    assert all("the bound is 1e-07" in reason for reason in report["refused"].values())


def test_a_layer_that_the_recipe_keeps_float_reads_codes_in_all_forms():
    recipe = QuantRecipe(keep_float=("h0",), bound=0.05)
    assert "int8" not in forms(lowered("wide-deep", recipe)[2])  # its other layers are small
    _, _, graph, _ = lowered("wide-deep", recipe, hidden=(300, 300, 300))
    programs = forms(graph)
    folded = [step for step in programs["folded-int16"].steps if isinstance(step, Mixed) and step.table is not None]
    assert folded and all(step.table.dtype == np.int16 for step in folded)
    assert [dense_layers(programs[name]) for name in ("int16", "int8")] == [[], [(300, 300), (300, 300)]]


def dense_layers(program):
    """Shapes of the layers that read bytes."""
    return [step.layer.weight.shape for step in program.steps if isinstance(step, Dense | CrossLayer)]


@needs_kernels
@pytest.mark.parametrize(
    ("family", "options", "layers"),
    [
        ("dcn-v2", {"rank": 192}, [192, 386, 192, 386]),
        ("dcn-v2", {"rank": 0}, [386, 386]),
        ("gdcn", {}, [386] * 4),
    ],
)
def test_large_cross_layers_read_bytes(family, options, layers):
    kept = QuantRecipe(keep_float=(r"x\d|p\d",), bound=0.02)
    net, feeds, graph, _ = lowered(family, kept, width=64, **options)
    program, arrays = forms(graph)["int8"], (feeds["ids"], feeds.get("numbers"), feeds.get("scales"))
    assert [columns for _, columns in dense_layers(program) if columns > 48] == layers
    wanted, expected = run(net.model, **feeds), reference.run(program, *arrays)
    for result, exact in zip(expected, wanted.values(), strict=True):
        assert np.abs(result - exact).max() <= BOUND
    made = [native.click_program(program, isa)(*arrays) for isa in extension.isas()]
    np.testing.assert_allclose(made[0], expected[0], rtol=1e-6)
    assert all(output.tobytes() == made[0].tobytes() for output in made)


def test_gated_vectors_are_bytes_with_a_scale_of_each_column():
    net, feeds, graph, _ = lowered("finalmlp", COARSE, width=16)
    program = forms(graph)["int8"]
    gates = [step for step in program.steps if isinstance(step, GateCodes)]
    assert len(gates) == 2 and all(gate.factors is not None and np.ptp(gate.factors) > 0 for gate in gates)
    read = [step for step in program.steps if isinstance(step, Dense) and step.x in [gate.bytes for gate in gates]]
    beside = [step for step in program.steps if isinstance(step, Mixed) and step.added in [dense.out for dense in read]]
    assert len(read) == len(beside) == 2 and all(len(step.weight) == net.numbers for step in beside)
    (wanted,) = run(net.model, **feeds).values()
    (result,) = reference.run(program, feeds["ids"], feeds.get("numbers"), feeds.get("scales"))
    assert np.abs(result - wanted).max() <= COARSE.bound


def test_vectors_whose_rounding_matters_most_stay_codes_in_a_form():
    """A table of much larger values than others, whose weights are as large, makes the steps of all weights coarse."""
    net = Network("finalmlp", width=64, fields=((40, 1, ""), (7, 1, ""), (31, 1, ""), (25, 1, ""), (60, 1, "")))
    table = net.model.graph.initializers["Te1"]
    table.const_value = ir.tensor(table.const_value.numpy() * 8)
    feeds = net.feeds(400)
    ranges = calibrate(net.model, [feeds], "minmax")
    _, report = lower(net.model, ranges, QuantRecipe(bound=1.0))
    changes = {form["form"]: form["change"] for form in report["forms"]}
    assert "part-int8" not in changes  # int8 is within the bound
    graph, report = lower(net.model, ranges, QuantRecipe(bound=changes["int8"] * 0.6))
    assert "int8" in report["refused"]
    program, arrays = forms(graph)["part-int8"], (feeds["ids"], feeds.get("numbers"), feeds.get("scales"))
    expected = reference.run(program, *arrays)
    for isa in extension.isas():
        np.testing.assert_allclose(native.click_program(program, isa)(*arrays), expected[0], rtol=1e-6)


def test_units_of_bytes_add_less_noise_than_the_finest_ones():
    rng = np.random.default_rng(0)
    weight, largest = (
        rng.standard_normal((60, 30)) * np.where(np.arange(60) < 3, 9, 0.05)[:, None],
        rng.random(60) + 0.1,
    )
    unit, _ = balanced_units(weight, largest, largest / 4)
    assert (unit >= largest / 127).all()
    x = rng.standard_normal((2000, 60)) * largest / 4

    def error(units):
        scaled = weight * units[:, None]
        steps = np.abs(scaled).max(axis=0) / 127
        return np.abs(np.rint(np.clip(x / units, -127, 127)) @ (np.rint(scaled / steps) * steps) - x @ weight).mean()

    assert error(unit) < 0.7 * error(largest / 127)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """native.onnx of a Wide & Deep network."""
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    return io.save_mapped(lowered("wide-deep", COARSE)[2], tmp_path / "native.onnx")


@needs_kernels
def test_a_form_is_pinned_by_its_name(path):
    feeds = Network("wide-deep").feeds(100)
    for model in recommender_files.opened(path):
        session = load(path, f"native:{model.form}")
        expected = reference.run(model.program, feeds["ids"], feeds["numbers"], feeds.get("scales"))
        np.testing.assert_allclose(session.run(feeds)["probability"], expected[0], rtol=1e-6)
        assert session.engine == "native"
    with pytest.raises(RequestError) as error:
        load(path, "native:int3")
    one_line(error, "found the form int3", "expected folded-int16, folded,", "int8")


@needs_kernels
def test_forms_are_timed_once_a_machine_and_one_runs_all_batches(path):
    forms = Forms(path)
    assert forms.chosen in forms.names
    kept = [json.loads(file.read_text()) for file in (path.parent / "home" / "plans").glob("*.json")]
    assert sorted(plan["batch_size"] for plan in kept) == [1, 64, 512]
    assert all(list(plan["milliseconds"]) == forms.names for plan in kept)
    session, pinned = load(path, "native", 2), load(path, f"native:{forms.chosen}")
    for count in (1, 100, 700):
        batch = Network("wide-deep").feeds(count)
        assert session.run(batch)["probability"].tobytes() == pinned.run(batch)["probability"].tobytes()


@needs_kernels
def test_forms_of_a_model_that_ranks_are_timed_with_a_ranking_too(path, monkeypatch):
    seen = {}

    def timed(digest, openers, batch, **_):
        milliseconds = {name: 1.0 + (name == "folded-int16") for name in openers}
        if "sharing" in digest:  # a ranking, in which other forms are faster
            milliseconds = {name: 9.0 - 8 * (name == "int16") for name in openers}
            seen.update({name: opener().run(batch)["probability"] for name, opener in openers.items()})
        return Choice("", 1, 1, milliseconds, "")

    monkeypatch.setattr(native_forms, "choose", timed)
    assert Forms(path).chosen == "folded"
    graph = io.load_mapped(path)
    shared = native.SharedInputs([0, 1], [0])
    recommender_files.note_shared(graph, shared)
    ranked = io.save_mapped(graph, path.parent / "ranked" / "native.onnx")
    assert Forms(ranked).chosen == "int16" and len(seen) == len(Forms(ranked).names)
    model = recommender_files.opened(ranked)[0]
    batch = native_forms.random_batch(model, native_forms.RANKED_ITEMS)
    batch["ids"][:, :2], batch["numbers"][:, :1] = batch["ids"][:1, :2], batch["numbers"][:1, :1]
    np.testing.assert_allclose(seen["int16"], load(ranked, "native:int16").run(batch)["probability"], rtol=1e-6)


def timings(monkeypatch, milliseconds, settled=True):
    """Injects the times of forms that this process measures."""
    monkeypatch.setattr(native_forms, "choose", lambda *_, **more: Choice("", 1, 1, milliseconds, "", settled))


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        ({"folded-int16": 1.04, "folded": 1.0, "int8": 2.0}, "folded-int16"),
        ({"folded-int16": 1.2, "folded": 1.0, "int8": 2.0}, "folded"),
        ({"folded-int16": 1.2, "folded": 1.0, "int8": 0.5}, "int8"),
    ],
)
def test_the_finest_of_the_fastest_forms_is_chosen(path, monkeypatch, milliseconds, chosen):
    timings(monkeypatch, milliseconds)
    assert Forms(path).chosen == chosen


@needs_kernels
def test_processes_that_time_differently_run_the_form_of_the_first(path, monkeypatch):
    """Other homes and other loads too: the choice lies beside the model."""
    feeds = Network("wide-deep").feeds(40)
    timings(monkeypatch, {"folded-int16": 2.0, "folded": 1.0, "int8": 2.0}, settled=False)
    first = load(path, "native").run(feeds)["probability"].tobytes()
    monkeypatch.setenv("ZOO_HOME", str(path.parent / "another home"))
    timings(monkeypatch, {"folded-int16": 2.0, "folded": 2.0, "int8": 1.0})
    assert Forms(path).chosen == "folded"
    assert load(path, "native").run(feeds)["probability"].tobytes() == first
    assert load(path, "native:int8").run(feeds)["probability"].tobytes() != first


@needs_kernels
@pytest.mark.parametrize(
    ("settled", "milliseconds", "chosen"),
    [
        (False, {"folded": 2.0, "int8": 1.0}, "folded"),  # under load again
        (True, {"folded": 1.05, "int8": 1.0}, "folded"),
        (True, {"folded": 2.0, "int8": 1.0}, "int8"),
    ],
)
def test_a_form_chosen_under_load_is_replaced_later_with_a_warning(
    path, monkeypatch, caplog, settled, milliseconds, chosen
):
    timings(monkeypatch, {"folded": 1.0, "int8": 2.0}, settled=False)
    assert Forms(path).chosen == "folded"
    timings(monkeypatch, milliseconds, settled)
    assert Forms(path).chosen == "folded" and not caplog.records
    now = native_forms.time.time()
    monkeypatch.setattr(native_forms.time, "time", lambda: now + native_forms.UNSETTLED_SECONDS + 1)
    assert Forms(path).chosen == chosen
    assert [record.message for record in caplog.records if "from now on" in record.message] == [
        record.message for record in caplog.records if chosen == "int8"
    ]
    timings(monkeypatch, {"folded": 1.0, "int8": 9.0})
    assert Forms(path).chosen == chosen


@needs_kernels
def test_a_plan_times_every_form(path):
    candidates, failed = native_candidates(path, "int8", ["native"])
    assert [option.engine for option in candidates] == [f"native:{name}" for name in Forms(path).names] and not failed
    candidates, _ = native_candidates(path, "int8", ["native:int8", "onnxruntime"])
    assert [option.engine for option in candidates] == ["native:int8"]


@needs_kernels
def test_a_form_chosen_while_other_processes_have_the_core_is_not_final(path, monkeypatch):
    monkeypatch.setattr(timing.time, "process_time", lambda: 0.0)  # no CPU time passes here
    chosen = Forms(path).chosen
    kept = [json.loads(file.read_text()) for file in (path.parent / "home" / "plans").glob("*.json")]
    assert chosen and kept and not any(plan["settled"] for plan in kept)


def test_other_weights_take_the_choice_of_the_same_structure(path, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        native_forms, "choose", lambda digest, *_, **more: seen.append(digest) or Choice("", 1, 1, {"int8": 1.0}, "")
    )
    other = io.save_mapped(lowered("wide-deep", COARSE, seed=1)[2], tmp_path / "other.onnx")
    wider = io.save_mapped(lowered("wide-deep", COARSE, width=32)[2], tmp_path / "wider.onnx")
    for file in (path, other, wider):
        assert Forms(file).chosen
    assert len(set(seen)) == 2 and seen[0] == seen[3]


def test_rows_that_are_fetched_earlier_are_those_of_the_folded_form():
    _, _, graph, report = lowered("wide-deep", COARSE)
    near, far = (node for node in graph.graph if node.name in ("folded", "folded-far"))
    assert list(near.inputs) == list(far.inputs) and "folded-far" in [form["form"] for form in report["forms"]]
    steps = [[step for step in click_program(node).steps if isinstance(step, Mixed)] for node in (near, far)]
    assert [step.ahead for step in steps[0]] != [step.ahead for step in steps[1]]


@needs_kernels
def test_tables_lie_in_huge_pages_where_the_system_has_them(tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    path = io.save_mapped(lowered("wide-deep")[2], tmp_path / "native.onnx", 2**10)
    monkeypatch.setattr(program_file, "HUGE_PAGE", 1)
    monkeypatch.setattr(program_file.MappedFile, "madvise", lambda _, advice: asked.append(advice), raising=False)
    recommender_files.opened(path)
    assert asked == [mmap.MADV_HUGEPAGE]
    monkeypatch.setattr(machine, "table_memory", lambda: 0)
    recommender_files.opened(path)
    assert len(asked) == 1
