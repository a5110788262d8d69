"""The summary of a quantized model: counts of layers, and warnings."""

import itertools

import numpy as np
import pytest
from helpers.rewriting import model

from pipelines.analysis import summary, tune
from pipelines.analysis.summary import summarize
from pipelines.core.errors import ZooError
from pipelines.engines.openvino.session import OpenVinoSession
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

NET = """(float[n,3,6,6] x) => (float[n,4] y) {
    s = Shape(x) c = Conv<pads=[1,1,1,1]>(x, w1) r = Relu(c) e = Erf(r) p = GlobalAveragePool(e) f = Flatten(p)
    y = Gemm<transB=1>(f, w2) }"""


@pytest.fixture(scope="module")
def net():
    rng = np.random.default_rng(0)
    return model(
        NET,
        w1=rng.normal(size=(8, 3, 3, 3)).astype(np.float32),
        w2=rng.normal(size=(4, 8)).astype(np.float32),
    )


def summary_of(rng, net, samples=True, quick=False, **recipe):
    feed = [{"x": rng.normal(size=(8, 3, 6, 6)).astype(np.float32)}]
    recipe = QuantRecipe(correct=False, **recipe)
    table = make_table(net, recipe, feed)
    return summarize(net, *quantize(net, recipe, table), table, feed if samples else (), quick=quick)


def test_the_line_counts_layers_and_macs(rng, net, monkeypatch):
    monkeypatch.setattr(summary, "measure", lambda sessions, batch: [3.2, 2.0])
    facts = summary_of(rng, net)
    assert (facts["layers"], facts["int8_layers"], facts["macs_int8"]) == (2, 2, 1.0)
    assert facts["line"].startswith("2 of 2 layers int8, 100% of the MACs; SQNR ") and "; 1.6x in " in facts["line"]
    assert facts["sqnr_db"] > summary.LOW_SQNR and facts["warnings"] == []
    assert "Shape" not in {layer["type"] for layer in facts["costliest"]}
    conv, gemm = 8 * 36 * 27, 4 * 8
    left = summary_of(rng, net, keep_float=("c",))
    assert left["macs_int8"] == pytest.approx(gemm / (conv + gemm))
    assert (left["costliest"][0]["type"], left["costliest"][0]["cost"]) == ("Conv", conv)
    costs = [layer["cost"] for layer in left["costliest"][1:]]
    assert costs == sorted(costs, reverse=True) and costs[0] == 8 * 36


def test_the_line_also_has_the_speed_in_onnxruntime(rng, net, monkeypatch):
    facts = summary_of(rng, net, quick=True)
    assert facts["line"].count(" in onnxruntime") == 1, "the only engine"
    facts |= {"engine": "openvino", "speed": {"onnxruntime": 1.24, "openvino": 2.0}, "speed_of_many": {}}
    assert "; 2.0x in openvino; 1.2x in onnxruntime" in summary._line(facts)


def test_an_engine_that_refuses_the_int8_file_alone_is_named(rng, net, monkeypatch):
    def refuse(path):
        if path.name == "int8.onnx":
            raise ZooError(f"openvino cannot compile {path} as it is: no QuantizeLinear")
        return "openvino", as_opened(path)[1]

    as_opened = summary.open_file
    monkeypatch.setattr(summary, "open_file", refuse)
    facts = summary_of(rng, net, quick=True)
    reason = "openvino cannot compile the int8 file as it is: no QuantizeLinear"
    assert facts["as_opened"] is None and facts["refused"] == reason
    assert f"{reason}; the float file runs there: run the int8 file in onnxruntime" in facts["warnings"]


def test_what_is_bad_is_said_and_what_costs_it(rng, net, monkeypatch):
    monkeypatch.setattr(summary, "measure", lambda sessions, batch: [1.0, 2.0])
    (slow,) = summary_of(rng, net)["warnings"]
    assert slow.startswith("SLOWER THAN FLOAT: 0.50x in ") and "(Erf: " in slow
    (nothing,) = summary_of(rng, net, keep_float=(".*",))["warnings"]
    assert nothing.startswith("NOTHING IS INT8: 0 of 2 layers") and "c (Conv: kept float by the recipe)" in nothing
    monkeypatch.setattr(summary, "measure", lambda sessions, batch: [2.0, 1.0])
    monkeypatch.setattr(summary, "LOW_SQNR", 99.0)
    (low,) = summary_of(rng, net)["warnings"]
    assert low.startswith("LOW ACCURACY: SQNR ") and "most of it comes from " in low


def test_one_slow_timing_is_no_verdict(rng, net, monkeypatch):
    timings = itertools.cycle([[1.0, 2.0], [2.0, 1.0]])
    monkeypatch.setattr(summary, "measure", lambda sessions, batch: next(timings))
    assert summary_of(rng, net)["warnings"] == []


def test_without_samples_layers_alone_are_counted(rng, net):
    assert summary_of(rng, net, samples=False)["line"] == "2 of 2 layers int8"


@pytest.mark.parametrize(
    ("one", "many", "said", "warned"),
    [
        (0.5, 1.8, "; 0.5x in {engine} (1 sample), 1.8x (512 samples)", False),
        (0.5, 0.8, "; 0.5x in {engine} (1 sample), 0.8x (512 samples)", True),
    ],
)
def test_rows_are_timed_in_batches_too(rng, monkeypatch, one, many, said, warned):
    """A ranker that is slower on one row may be faster on 512, as it runs."""
    text = "(float[n,8] x, int64[n] i) => (float[n,4] y) { h = MatMul(x, w) y = Relu(h) j = Identity(i) }"
    net = model(text.replace(" j = Identity(i)", ""), w=rng.normal(size=(8, 4)).astype(np.float32))
    monkeypatch.setattr(
        summary,
        "measure",
        lambda sessions, batch: [(one if len(batch["x"]) == 1 else many) * 0.5, 0.5],
    )
    feed = [{"x": rng.normal(size=(20, 8)).astype(np.float32), "i": np.arange(20)}]
    table = make_table(net, QuantRecipe(correct=False), feed)
    facts = summarize(net, *quantize(net, QuantRecipe(correct=False), table), table, feed)
    assert facts["many"] == 512 and set(facts["speed_of_many"].values()) == {many}
    assert said.format(engine=facts["engine"]) in facts["line"]
    assert [note.startswith("SLOWER THAN FLOAT: 0.50x in ") for note in facts["warnings"]] == [True] * warned


def test_the_file_is_timed_as_users_open_it(rng, net, monkeypatch):
    """Int8 may be faster in the project's session and slower in a plain one: the plain one decides."""
    from pipelines.engines import as_opened

    plain = (as_opened._OpenVino, as_opened._OnnxRuntime)
    monkeypatch.setattr(
        summary, "measure", lambda sessions, batch: [1.0, 2.0] if isinstance(sessions[0], plain) else [2.0, 1.0]
    )
    facts = summary_of(rng, net)
    opened = facts["as_opened"]
    assert opened["speed"] == 0.5 and facts["speed"][facts["engine"]] == 2.0
    assert f"; 2.0x in {facts['engine']}; 0.5x as {opened['engine']} opens the file" in facts["line"]
    (slow,) = facts["warnings"]
    engine = opened["engine"]
    assert slow.startswith(
        f"SLOWER THAN FLOAT IN {engine}: 2.00x in {facts['engine']}, 0.50x as {engine} opens the file"
    )


@pytest.mark.parametrize("installed", [["onnxruntime"], ["onnxruntime", "openvino"]])
def test_a_file_as_users_open_it_computes_the_same(rng, net, tmp_path, monkeypatch, installed):
    from pipelines.engines import as_opened
    from pipelines.engines.stock import open_session
    from pipelines.graph import io

    pytest.importorskip(installed[-1])
    monkeypatch.setattr(as_opened, "available", lambda: installed)
    path = io.save(net.clone(), tmp_path / "float.onnx")
    feed = {"x": rng.normal(size=(3, 3, 6, 6)).astype(np.float32)}
    engine, session = as_opened.open_file(path)
    assert engine == installed[-1]
    expected = open_session(path, "onnxruntime").run(feed)
    np.testing.assert_allclose(session.run(feed)["y"], expected["y"], rtol=0.05, atol=0.05)  # bfloat16 by default


def test_an_engine_that_differs_on_float_too_is_no_fault_of_int8(rng, net, monkeypatch):
    pytest.importorskip("openvino")
    run = OpenVinoSession.run

    def spoiled(float_too):
        def run_spoiled(self, batch):
            results = run(self, batch)
            if float_too or "int8" in str(self.path):
                results = {name: -array for name, array in results.items()}
            return results

        return run_spoiled

    monkeypatch.setattr(OpenVinoSession, "run", spoiled(float_too=False))
    facts = summary_of(rng, net)
    assert "openvino" in facts["wrong"] and not facts["float_differs"] and "WRONG in openvino" in facts["line"]
    monkeypatch.setattr(OpenVinoSession, "run", spoiled(float_too=True))
    facts = summary_of(rng, net)
    assert not facts["wrong"] and "WRONG" not in facts["line"] + "".join(facts["warnings"])
    assert any(note.startswith("openvino computes the float file differently, too: ") for note in facts["warnings"])


@pytest.fixture
def opened_in(monkeypatch):
    """The engines in which files are opened in sessions of this project."""
    engines = []
    opened = tune.open_stock

    def open_stock(path, engine, threads):
        engines.append(engine)
        return opened(path, engine, threads)

    monkeypatch.setattr(tune, "open_stock", open_stock)
    return engines


def test_quick_timings_open_the_reference_and_the_files_as_users_do(rng, net, opened_in, monkeypatch):
    """Other sessions of this project compile the file again, and in processes of their own (1 to 3 s)."""
    repeats = []
    measure = summary.measure
    monkeypatch.setattr(summary, "measure", lambda *args, **more: (repeats.append(more), measure(*args, **more))[1])
    facts = summary_of(rng, net, quick=True)
    assert opened_in == ["onnxruntime"] * 2 and set(facts["speed"]) <= {"onnxruntime", "native"}
    assert facts["as_opened"]["speed"] > 0 and facts["wrong"] == {}
    assert all(options == {"repeats": summary.QUICK_REPEATS} for options in repeats)
    assert set(facts) == set(summary_of(rng, net))


def test_an_engine_that_differs_is_checked_in_full_after_quick_timings(rng, net, opened_in, monkeypatch):
    checked = summary.fault_of_engine
    monkeypatch.setattr(
        summary,
        "fault_of_engine",
        lambda engine, *more: "it differs" if engine == "openvino" else checked(engine, *more),
    )
    facts = summary_of(rng, net, quick=True)
    assert set(opened_in) == {"onnxruntime", "openvino"}
    assert facts["wrong"] == {"openvino": "it differs"} and facts["as_opened"] is None
    assert any(note.startswith("WRONG IN openvino: it differs") for note in facts["warnings"])


def test_the_line_says_that_other_processes_had_the_cpu(rng, net, monkeypatch):
    for busy in (False, True):
        monkeypatch.setattr(summary, "watch_cpu", lambda busy=busy: lambda: busy)
        facts = summary_of(rng, net, quick=True)
        assert facts["busy"] is busy and ("timed on a busy CPU" in facts["line"]) is busy


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"of_best": [0.5, 2.0]}, "SLOWER THAN FLOAT at 1 sample (0.50x)"),
        ({"of_best": [0.5, 0.9]}, "SLOWER THAN FLOAT at 1 sample (0.50x) and 512 samples (0.90x)"),
        ({"of_best": [1.1, 0.97]}, "1 of 1 layers int8"),
        (
            {"of_best": [2, None], "as_opened": ("onnxruntime", 0.5, 1)},
            "SLOWER THAN FLOAT IN onnxruntime at 1 sample (0.50x)",
        ),
        ({"of_best": [0.5, None], "as_opened": ("onnxruntime", 1.5, 0.8)}, "SLOWER THAN FLOAT at 512 samples (0.80x)"),
    ],
)
def test_the_line_begins_with_the_batch_sizes_at_which_int8_is_slower(changes, first):
    facts = {
        "layers": 1,
        "int8_layers": 1,
        "macs_int8": None,
        "sqnr_db": None,
        "split": {},
        "engine": None,
        "wrong": {},
        "busy": False,
    }
    facts |= {"as_opened": None, "many": 512, **changes}
    if changes.get("as_opened"):
        facts["as_opened"] = dict(zip(("engine", "speed", "speed_of_many"), changes["as_opened"], strict=True))
    assert summary._line(facts).split(";")[0] == first
