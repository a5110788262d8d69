"""Engines are validated against ONNX Runtime, also with the file opened by default settings."""

import re

import numpy as np
import pytest
from helpers.rewriting import model, needs_vnni

from pipelines.analysis import summary
from pipelines.core.errors import ZooError
from pipelines.engines import agreement, plan, timing
from pipelines.engines.openvino import child
from pipelines.engines.session import Port
from pipelines.engines.stock import open_session
from pipelines.graph import io

pytest.importorskip("openvino")
FREE = Port(np.dtype(np.float32), (None, 2))


def bias_of_the_first_channel(sizes="n"):
    """A graph that OpenVINO 2026.4 computes wrongly where its shapes are free, see `engine_quirks.hide_sizes`."""
    return model(
        f"""(float[{sizes},1,2,2] x) => (float[{sizes},2,2,2] y, float[{sizes}] z) {{
            a = QuantizeLinear(x, step, zero) b = DequantizeLinear(a, step, zero) k = DequantizeLinear(weight, step)
            c = Conv(b, k, bias) d = QuantizeLinear(c, step, zero) y = DequantizeLinear(d, step, zero)
            s = Shape(x) n = Gather(s, first) z = ConstantOfShape(n) }}""",
        step=np.float32(0.5),
        zero=np.uint8(0),
        weight=np.full((2, 1, 1, 1), 2, np.int8),
        bias=np.array([1, 5], np.float32),
        first=np.array([0]),
    )


@pytest.fixture
def wrong(tmp_path):
    return io.save(bias_of_the_first_channel(), tmp_path / "int8.onnx")


BATCH = {"x": np.ones((3, 1, 2, 2), np.float32)}


def test_a_file_that_is_wrong_as_users_open_it(wrong):
    sessions = [open_session(wrong, name) for name in ("openvino", "onnxruntime")]
    results = [session.run(BATCH)["y"] for session in sessions]
    np.testing.assert_array_equal(*results)  # our session fixes the shapes
    with pytest.raises(ZooError, match=r"^output y of openvino \(the file as it is\) differs from .* by \d+% of"):
        agreement.require_correct_as_opened(sessions[0], BATCH)
    agreement.require_correct_as_opened(sessions[1], BATCH)
    assert "the file as it is" in agreement.fault_of_engine("openvino", *sessions, BATCH)


def test_it_is_neither_chosen_nor_planned(wrong, tmp_path, caplog):
    openers = {name: lambda name=name: open_session(wrong, name) for name in ("openvino", "onnxruntime")}
    assert list(timing.time_each(openers, BATCH)) == ["onnxruntime"]
    assert "the engine openvino is left out: output y of openvino (the file as it is)" in caplog.text
    candidates = [plan.Candidate(engine=name, precision="int8", path=wrong) for name in openers]
    made = plan.build(candidates, [BATCH], [1], tmp_path / "plan.zip", lambda path, name, *_: open_session(path, name))
    assert {profile["engine"] for profile in made["profiles"]} == {"onnxruntime"}
    assert any("the file as it is" in reason for reason in made["failed"])


@needs_vnni
def test_the_first_line_says_so(wrong):
    net = io.load(wrong)
    timed = summary._speed(net, net, BATCH)
    assert "onnxruntime" in timed["speed"] and "openvino" not in timed["speed"] and timed["engine"] != "openvino"
    assert list(timed["wrong"]) == ["openvino"] and timed["as_opened"] is None
    said = {
        "many": BATCH,
        "int8_layers": 1,
        "layers": 1,
        "macs_int8": 1.0,
        "sqnr_db": 40.0,
        "split": {},
        "costliest": [],
        **timed,
        "busy": False,
    }
    assert summary._line(said).endswith("in onnxruntime; WRONG in openvino")
    assert summary._warnings(said, list)[0].startswith("WRONG IN openvino: output y of openvino (the file as it is)")


def test_fixed_shapes_and_float_models_are_no_case(tmp_path):
    fixed = io.save(bias_of_the_first_channel("3"), tmp_path / "fixed.onnx")
    floating = io.save(model("(float[n,2] x) => (float[n,2] y) { y = Relu(x) }"), tmp_path / "float.onnx")
    assert open_session(floating, "openvino").as_opened() is None
    assert open_session(fixed, "openvino").as_opened() is None
    whole = model(
        "(float[3,1] x) => (float[3,1] y) { a = QuantizeLinear(x, s) y = DequantizeLinear(a, s) }", s=np.float32(1)
    )
    assert open_session(io.save(whole, tmp_path / "whole.onnx"), "openvino").as_opened() is None


ROWS = """(float[n,16] x) => (float[n,8] y) { t = Transpose<perm=[1,0]>(k) s = MatMul(k, t) p = Softmax<axis=1>(s)
    y = MatMul(p, k) }"""  # the rows are the keys
TOKENS = """(float[b,n,16] x) => (float[b,n,8] y) { t = Transpose<perm=[0,2,1]>(k) s = MatMul(k, t) p = Softmax<axis=2>(s)
    y = MatMul(p, k) }"""
QUERIES = """(float[b,2,8] q, float[b,n,16] x) => (float[b,2,8] y) { t = Transpose<perm=[0,2,1]>(k) s = MatMul(q, t)
    p = Softmax<axis=2>(s) y = MatMul(p, k) }"""
LAYER = "a = QuantizeLinear(x, step, zero) b = DequantizeLinear(a, step, zero) w = DequantizeLinear(weight, step) k = MatMul(b, w)"


@needs_vnni
@pytest.mark.parametrize(
    ("text", "sizes", "shapes"),
    [
        (ROWS, {"x": (3, 16)}, "x [64, 16] after x [1, 16]"),
        (TOKENS, {"x": (3, 5, 16)}, "x [2, 64, 16] after x [1, 1, 16]"),
        (QUERIES, {"q": (3, 2, 8), "x": (3, 5, 16)}, "q [2, 2, 8], x [2, 64, 16] after q [1, 2, 8], x [1, 1, 16]"),
    ],
)
def test_attention_over_one_key_and_then_over_many(rng, tmp_path, caplog, text, sizes, shapes):
    """A plain session of OpenVINO 2026.4 keeps the buffers of the first shape, see `engine_quirks`."""
    net = model(
        text.replace("{", "{ " + LAYER, 1),
        step=np.float32(0.02),
        zero=np.uint8(128),
        weight=rng.integers(-90, 90, (16, 8), dtype=np.int8),
    )
    path = io.save(net, tmp_path / "int8.onnx")
    batch = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    sessions = [open_session(path, name) for name in ("openvino", "onnxruntime")]
    for size in (1, len(batch["x"])):  # our session opens it in a form that is right
        few = {name: array[:size] for name, array in batch.items()}
        agreement.require_alike("openvino", *(session.run(few) for session in sessions), sessions[1], few)
    wrong = re.escape(f" of its power, with {shapes}")
    with pytest.raises(agreement.WrongResultsError, match=rf"^output y of openvino \(the file as it is\) .*{wrong}$"):
        agreement.require_correct_as_opened(sessions[0], batch)
    for quick in (False, True):
        timed = summary._speed(net, net, batch, quick=quick)
        assert list(timed["wrong"]) == ["openvino"] and timed["as_opened"] is None


def test_a_crash_of_the_file_as_it_is_is_no_crash_of_ours(wrong, monkeypatch):
    session = open_session(wrong, "openvino")
    code = (
        "import os, signal; from pipelines.engines.openvino import probe; probe.check_as_opened = "
        "lambda *_: os.kill(os.getpid(), signal.SIGSEGV); probe.serve({idle})"
    )
    monkeypatch.setattr(child, "_START", child._START.partition("from")[0] + code)
    monkeypatch.setattr(child, "_running", None)
    with pytest.raises(agreement.WrongResultsError, match=r"^with the file as it is, it crashes \(SIGSEGV\)$"):
        agreement.require_correct_as_opened(session, BATCH)


def shapes(inputs, **batch):
    variants = list(agreement.variants(inputs, {name: np.zeros(shape, np.float32) for name, shape in batch.items()}))
    assert all(compared for _, compared in variants[1:])
    return [[variant[name].shape for name in batch] for variant, _ in variants]


def test_one_element_first_and_many_later():
    whole = [[(1, 2)], [(64, 2)], [(2, 2)]]
    assert shapes({"x": FREE}, x=(5, 2)) == shapes({"x": FREE}, x=(1, 2)) == whole
    free = Port(np.dtype(np.float32), (None, 3, None))
    assert shapes({"x": free}, x=(4, 3, 30)) == [
        [(1, 3, 1)],
        [(1, 3, 30)],
        [(64, 3, 30)],
        [(2, 3, 30)],
        [(2, 3, 64)],
        [(2, 3, 20)],
    ]
    assert shapes({"x": free, "m": free}, x=(4, 3, 1), m=(4, 3, 3))[-1] == [(2, 3, 1), (2, 3, 2)]
    state = Port(np.dtype(np.float32), (2, None, 4))
    rate = Port(np.dtype(np.float32), ())
    assert shapes({"x": FREE, "s": state, "r": rate}, x=(3, 2), s=(2, 3, 4), r=()) == [
        [(1, 2), (2, 1, 4), ()],
        [(3, 2), (2, 3, 4), ()],
        [(64, 2), (2, 64, 4), ()],
        [(2, 2), (2, 2, 4), ()],
    ]


class Decision:
    """A network whose answer for an input is 0 or 1, by the last bits of its pixels, as two engines round them."""

    def __init__(self, gain, offset=0.0):
        self.gain, self.offset = gain, offset

    def run(self, batch):
        answer = 1 / (1 + np.exp(-self.gain * (batch["x"].sum(axis=1, dtype=np.float64) + self.offset)))
        return {"y": np.stack([answer, 1 - answer], axis=1).astype(np.float32)}


@pytest.mark.parametrize(
    ("gain", "offset", "right"),
    [
        pytest.param(200, 0.004, True, id="rounding decides"),
        pytest.param(1, 0.004, True, id="nothing decides"),
        pytest.param(1, 4, False, id="another result"),
        pytest.param(200, 4, False, id="another result beyond rounding"),
    ],
)
def test_samples_that_rounding_decides(gain, offset, right):
    batch = {"x": np.array([[0.5, -0.5]], np.float32)}
    reference, other = Decision(gain), Decision(gain, offset)
    pair = other.run(batch), reference.run(batch)
    assert (agreement.largest_difference("other", *pair)[0] > agreement.ALIKE) == (gain == 200 or not right)
    if right:
        agreement.require_alike("other", *pair, reference, batch)
    else:
        with pytest.raises(ZooError, match="differs from that of other engines"):
            agreement.require_alike("other", *pair, reference, batch)


def test_token_ids_are_not_rounded():
    ids = {"x": np.array([[3, 5]])}
    assert agreement.tolerance(Decision(150), ids, Decision(150).run(ids)) == agreement.ALIKE


def test_the_check_of_openvino_allows_what_rounding_decides(tmp_path, monkeypatch):
    from pipelines.engines.openvino import probe

    graph = model(
        "(float[n,2] x) => (float[n,1] y) { s = MatMul(x, w) y = Sigmoid(s) }", w=np.full((2, 1), 150, np.float32)
    )
    path = io.save(graph, tmp_path / "int8.onnx")
    config = {"path": path, "threads": 1, "model": None, "precision": None, "cached": False}
    run = probe._Uncached.run
    for offset, right in ((0.003, True), (3.0, False)):
        monkeypatch.setattr(
            probe._Uncached, "run", lambda self, batch, by=offset: run(self, {"x": batch["x"] - np.float32(by)})
        )
        result = probe.check(config, probe.DYNAMIC, {"x": np.array([[0.5, -0.5]], np.float32)}, [1])
        assert (result["difference"] <= agreement.ALIKE) == right, result
