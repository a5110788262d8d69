"""OpenVINO runs every graph in a form that agrees with ONNX Runtime, also where its default form is wrong or crashes."""

import json
import logging
import math

import numpy as np
import pytest
from helpers.quirks import (
    attention_over_keys,
    bias_of_the_first_column,
    recurrent_time_first,
    rows_that_attend,
    time_first,
)
from helpers.rewriting import model, needs_vnni
from helpers.tiers import one_in

from pipelines.core import settings
from pipelines.core.errors import ZooError
from pipelines.engines import agreement, catalog, plan, timing
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.engines.openvino import child, forms
from pipelines.engines.openvino.session import OpenVinoSession
from pipelines.graph import io

pytest.importorskip("openvino")
pytestmark = needs_vnni
X = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)
BATCH = {"x": X, "v": X * 2}


@pytest.fixture
def wrong(tmp_path):
    """A file that OpenVINO 2026.4 computes wrongly at static batch sizes up to 8."""
    return io.save(bias_of_the_first_column(), tmp_path / "int8.onnx")


@pytest.fixture
def neg(tmp_path):
    return io.save(model("(float[n,2] x) => (float[n,2] y) { y = Neg(x) }"), tmp_path / "neg.onnx")


def verdicts():
    return [json.loads(file.read_text()) for file in sorted((settings.home() / "verdicts").glob("*.json"))]


@pytest.mark.parametrize("count", one_in(2, [1, 2, 3, 8, 9, 64]))
def test_wrong_at_small_static_batch_sizes(wrong, count):
    batch = {name: np.resize(array, (count, 2)) for name, array in BATCH.items()}
    expected = OnnxRuntimeSession(wrong, 1).run(batch)["y"]
    np.testing.assert_allclose(catalog.load(wrong, "openvino").run(batch)["y"], expected)
    (verdict,) = verdicts()
    assert verdict["form"] != forms.STATIC and "output y of openvino differs" in verdict["faults"][forms.STATIC]
    # the size of the caller is always compared, the others within a few seconds
    assert count in verdict["sizes"] and {*verdict["sizes"]} <= {1, 2, 8, 64, count}


def test_the_verdict_is_said_once_and_remembered(wrong, monkeypatch, caplog):
    session = OpenVinoSession(wrong, 1)
    session.run(BATCH)
    assert f"{wrong} runs in openvino with {session._form}: with {forms.STATIC} of" in caplog.text
    caplog.clear()
    forms._VERDICTS.clear()  # as in another process
    monkeypatch.setattr(child, "probe", lambda request: pytest.fail("probed again"))
    again = OpenVinoSession(wrong, 1)
    again.run(BATCH)
    assert again._form == session._form and not caplog.text


def test_a_new_batch_size_is_checked_and_the_form_changes(wrong, monkeypatch):
    """Where only the larger sizes were checked before."""
    monkeypatch.setattr(OpenVinoSession, "sizes", ())
    many = {name: np.resize(array, (16, 2)) for name, array in BATCH.items()}
    session, reference = OpenVinoSession(wrong, 1), OnnxRuntimeSession(wrong, 1)
    np.testing.assert_allclose(session.run(many)["y"], reference.run(many)["y"])
    assert session._form == forms.STATIC
    np.testing.assert_allclose(session.run(BATCH)["y"], reference.run(BATCH)["y"])
    assert session._form != forms.STATIC
    np.testing.assert_allclose(session.run(many)["y"], reference.run(many)["y"])


def test_timings_use_the_correct_form(wrong):
    openers = {"openvino": lambda: OpenVinoSession(wrong, 1), "onnxruntime": lambda: OnnxRuntimeSession(wrong, 1)}
    assert sorted(timing.time_each(openers, BATCH)) == ["onnxruntime", "openvino"]


@pytest.mark.parametrize("form", forms.FORMS)
def test_plans_hold_the_correct_form(wrong, neg, tmp_path, form):
    file, batch = (wrong, BATCH) if form == forms.UNFUSED else (neg, {"x": X})  # the former is right in that one alone
    OpenVinoSession(file, 1).run(batch)
    (kept,) = (settings.home() / "verdicts").glob("*.json")
    kept.write_text(json.dumps(verdicts()[0] | {"form": form}))
    forms._VERDICTS.clear()
    candidate = plan.Candidate("openvino", "int8", file)
    built = plan.build(
        [candidate], [batch], [1], tmp_path / "plan.zip", lambda path, name, *_: catalog.load(path, name)
    )
    assert bool(built["profiles"][0]["compiled"]) == (form == forms.STATIC)
    opened, expected = catalog.load(tmp_path / "plan.zip"), OnnxRuntimeSession(file, 1).run(batch)["y"]
    np.testing.assert_allclose(opened.run(batch)["y"], expected)
    one = {name: array[:1] for name, array in batch.items()}
    np.testing.assert_allclose(opened.run(one)["y"], expected[:1])


@pytest.mark.parametrize("form", forms.FORMS)
def test_every_form_takes_batches_of_every_size(neg, form):
    session = OpenVinoSession(neg, 1, form=form)
    for count in (3, 0, 1, 7):
        x = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
        np.testing.assert_array_equal(session.run({"x": x})["y"], -x)
    assert session.executed({"x": np.zeros((3, 2), np.float32)})
    assert sorted(session._compiled) == ([0] if form == forms.DYNAMIC else [1, 3, 8])


@pytest.mark.parametrize(("make", "shape"), [(rows_that_attend, (4,)), (time_first, (2, 3))])
@pytest.mark.parametrize("cached", [True, False])
def test_samples_that_depend_on_each_other_are_not_padded(normal, tmp_path, make, shape, cached):
    """A batch of 3 was padded to a compiled size of 4: rows attended to zeros, the end of a series was zeros."""
    path = io.save(make(), tmp_path / "float.onnx")
    session, reference = catalog.load(path, "openvino"), OnnxRuntimeSession(path, 1)
    for count in (4, 3, 7, 1, 12, 64, 33):
        if not cached:
            session = catalog.load(path, "openvino")
        x = normal(count, *shape)
        np.testing.assert_allclose(session.run({"x": x})["y"], reference.run({"x": x})["y"], atol=1e-5)
    (verdict,) = verdicts()
    assert verdict["form"] == forms.DYNAMIC and "a padded batch is wrong" in verdict["faults"][forms.STATIC]


def crashing(monkeypatch, *crashes):
    """Children that crash in some forms."""
    code = (
        "import os, signal; from pipelines.engines.openvino import probe; real = probe.check; probe.check = "
        "lambda graph, form, batch, sizes: os.kill(os.getpid(), signal.SIGSEGV) if form in "
        f"{crashes!r} else real(graph, form, batch, sizes); probe.serve("
    )
    monkeypatch.setattr(child, "_START", child._START.partition("from")[0] + code + "{idle})")
    monkeypatch.setattr(child, "_running", None)


@pytest.mark.parametrize("count", [1, 2])
def test_a_crash_is_no_crash_of_ours(neg, monkeypatch, caplog, count):
    crashing(monkeypatch, *forms.FORMS[:count])
    session = OpenVinoSession(neg, 1)
    np.testing.assert_array_equal(session.run({"x": X})["y"], -X)
    assert session._form == forms.FORMS[count]
    assert "with static batch sizes, it crashes (SIGSEGV)" in caplog.text


def test_no_correct_form(neg, monkeypatch, caplog):
    crashing(monkeypatch, *forms.FORMS)
    for _ in range(2):  # found, and remembered
        with pytest.raises(
            ZooError,
            match=r"^openvino does not compute .*neg.onnx correctly on this machine \(with static batch sizes, it "
            r"crashes \(SIGSEGV\)\); use onnxruntime$",
        ):
            OpenVinoSession(neg, 1).run({"x": X})
    assert verdicts()[0]["form"] == ""
    assert "crashes" in agreement.fault_of_engine(
        "openvino", OpenVinoSession(neg, 1), OnnxRuntimeSession(neg, 1), {"x": X}
    )
    with caplog.at_level(logging.WARNING):
        openers = {"openvino": lambda: OpenVinoSession(neg, 1), "onnxruntime": lambda: OnnxRuntimeSession(neg, 1)}
        assert list(timing.time_each(openers, {"x": X})) == ["onnxruntime"]
    assert "the engine openvino is left out" in caplog.text


@pytest.mark.parametrize(
    ("differences", "form"),
    [
        ([1e-6, None, None], forms.STATIC),
        ([1e-3, 0.0, 0.0], forms.UNFUSED),  # what rounding does not explain
        ([0.05, None, 0.04], forms.STATIC),  # all forms differ: rounding in a deep network
        ([0.05, 0.05, 1e-6], forms.DYNAMIC),
        ([math.inf, None, 0.02], forms.DYNAMIC),
        ([0.5, 0.5, 0.2], ""),
        ([None, None, None], forms.STATIC),  # refused: the session says why
    ],
)
def test_the_first_form_that_agrees(neg, monkeypatch, differences, form):
    results = [
        {"difference": math.inf if gap is None else gap, "fault": "?", "refused": gap is None, "sizes": [2]}
        for gap in differences
    ]
    monkeypatch.setattr(child, "probe", lambda request: results[forms.FORMS.index(request["form"])])
    if not form:
        with pytest.raises(ZooError, match="does not compute"):
            OpenVinoSession(neg, 1).run({"x": X})
        return
    session = OpenVinoSession(neg, 1)
    session.run({"x": X})
    assert session._form == form


def test_no_child_no_check(neg, monkeypatch):
    monkeypatch.setattr(child.sys, "executable", "/nowhere/python")
    monkeypatch.setattr(child, "_running", None)
    np.testing.assert_array_equal(OpenVinoSession(neg, 1).run({"x": X})["y"], -X)
    assert not verdicts()


def test_a_child_ends_when_it_is_idle_and_another_takes_its_place(neg, tmp_path, monkeypatch):
    monkeypatch.setattr(child, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(child, "_running", None)
    OpenVinoSession(neg, 1).run({"x": X})
    first = child._running
    first._process.wait(10)
    other = io.save(model("(float[n,2] x) => (float[n,2] y) { y = Abs(x) }"), tmp_path / "abs.onnx")
    np.testing.assert_array_equal(OpenVinoSession(other, 1).run({"x": -X})["y"], X)
    assert child._running is not first and len(verdicts()) == 2


def test_attention_over_one_key_and_then_over_many(normal, tmp_path):
    path = io.save(attention_over_keys(), tmp_path / "float.onnx")
    session, reference = OpenVinoSession(path, 1), OnnxRuntimeSession(path, 1)
    for keys in (1, 2, 9, 40):
        batch = {"q": normal(3, 2, 8), "k": normal(3, keys, 8)}
        np.testing.assert_allclose(session.run(batch)["y"], reference.run(batch)["y"], atol=1e-5)
    (verdict,) = verdicts()
    assert verdict["form"] == forms.UNFUSED and "a batch of length 64 after one of" in verdict["faults"][forms.STATIC]


def test_a_recurrent_layer_from_the_cache(normal, tmp_path):
    """A session that compiled it was right, the next one, which read the cache, was wrong for more than one series."""
    path = io.save(recurrent_time_first(), tmp_path / "float.onnx")
    reference = OnnxRuntimeSession(path, 1)
    for series in (1, 2, 7, 7):
        x = normal(5, series, 3)
        np.testing.assert_allclose(OpenVinoSession(path, 1).run({"x": x})["y"], reference.run({"x": x})["y"], atol=1e-5)
    assert verdicts()[0]["form"] == forms.DYNAMIC
