"""Sessions of ONNX Runtime and OpenVINO: batches, executed operators, refused files and requests."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from helpers.arrays import normals
from helpers.rewriting import EXACT, model

from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import mapped
from pipelines.engines import catalog, stock
from pipelines.engines import session as engine
from pipelines.engines.onnxruntime import OnnxRuntimeSession
from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

ENGINES = pytest.mark.parametrize("name", list(stock.STOCK))
MIXED = """(int32[n,2] ids, float[n,3] x) => (float[n,2] y, int64[n] best) {
    i = Gather<axis=1>(ids, c) e = Gather(T, i) j = Concat<axis=1>(e, x) y = MatMul(j, w) best = ArgMax<axis=1, keepdims=0>(y) }"""
T, W = normals(0)(9, 4), normals(2)(7, 2)
MLP = "(float[n,32] x) => (float[n,8] y) { h = Gemm(x, w, b) r = Relu(h) k = Gemm(r, v, b) s = Relu(k) y = Gemm(s, u, d) }"


@pytest.fixture
def mixed(tmp_path):
    return io.save(model(MIXED, c=np.int64(1), T=T, w=W), tmp_path / "mixed.onnx")


def batch(rng, n):
    return {"ids": rng.integers(0, 9, (n, 2)).astype(np.int32), "x": rng.standard_normal((n, 3)).astype(np.float32)}


def check(session, feeds):
    outputs = session.run(feeds)
    y = np.concatenate([T[feeds["ids"][:, 1]], feeds["x"]], axis=1) @ W
    assert list(outputs) == ["y", "best"] and outputs["y"].dtype == np.float32 and outputs["best"].dtype == np.int64
    np.testing.assert_allclose(outputs["y"], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(outputs["best"], y.argmax(axis=1))
    assert outputs["y"].shape == (len(feeds["x"]), 2)


@ENGINES
def test_any_batch_size_after_any_other(rng, mixed, name):
    session = catalog.load(mixed, name)
    for n in (5, 3, 8, 1, 0, 5, 64, 7, 65, 0, 64):
        check(session, batch(rng, n))


@ENGINES
def test_a_first_batch_without_samples(rng, mixed, name):
    session = catalog.load(mixed, name)
    check(session, batch(rng, 0))
    check(session, batch(rng, 2))


def test_weights_beyond_memory_stay_in_their_file(rng, tmp_path, monkeypatch):
    path = io.save_mapped(model(MIXED, c=np.int64(1), T=normals(0)(90_000, 4), w=W), tmp_path / "tables.onnx")
    feeds = {"ids": rng.integers(0, 90_000, (512, 2)).astype(np.int32), "x": batch(rng, 512)["x"]}
    expected = catalog.load(path, "onnxruntime").run(feeds)["y"]
    monkeypatch.setattr(machine, "table_memory", lambda: 1 << 40)
    assert list(stock.candidates(path, 1)) == stock.available()
    monkeypatch.setattr(machine, "table_memory", lambda: 1 << 20)
    assert list(stock.candidates(path, 1)) == ["onnxruntime"]
    session = catalog.load(path)
    assert session.run(feeds)["y"].tobytes() == expected.tobytes() and session.engine == "onnxruntime"
    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    flags = [after.split("\n")[0].split() for before, after in pairwise(maps) if str(mapped(path)) in before]
    assert flags and all("rr" in flag for flag in flags)  # read at random places


@ENGINES
def test_inputs_are_described(mixed, name):
    session = catalog.load(mixed, name, 1)
    assert session.inputs == {
        "ids": engine.Port(np.dtype(np.int32), (None, 2)),
        "x": engine.Port(np.dtype(np.float32), (None, 3)),
    }
    assert (session.engine, session.threads) == (name, 1)


@ENGINES
def test_results_belong_to_the_caller(rng, mixed, name):
    session = catalog.load(mixed, name)
    feeds = batch(rng, 6)
    first = session.run(feeds)
    kept = {key: array.copy() for key, array in first.items()}
    for array in feeds.values():
        array[:] = 0  # inputs may be overwritten, too
    session.run(batch(rng, 6))
    for key, array in first.items():
        np.testing.assert_array_equal(array, kept[key])
        array[:] = 1


def test_openvino_pads_a_smaller_batch_instead_of_compiling(rng, mixed):
    session = catalog.load(mixed, "openvino")
    for n in (12, 7, 12, 6, 9):
        session.run(batch(rng, n))
    assert list(session._compiled) == [12]
    for n in (1, 3, 4, 17, 30, 12):
        session.run(batch(rng, n))
    assert list(session._compiled) == [12, 1, 4, 32]  # powers of two, none more than twice the batch


TURNED = "(float[n,3] x) => (float[4,n] y, float[n,3] z) { t = Transpose(x) y = MatMul(w, t) z = Relu(x) }"


def turned(rng, tmp_path):
    return io.save(model(TURNED, w=rng.standard_normal((4, 3)).astype(np.float32)), tmp_path / "turned.onnx")


@ENGINES
def test_results_that_count_samples_on_another_axis(rng, tmp_path, name):
    path = turned(rng, tmp_path)
    session, reference = catalog.load(path, name), catalog.load(path, "onnxruntime")
    for n in (4, 3, 2, 4, 1):
        x = {"x": rng.standard_normal((n, 3)).astype(np.float32)}
        for key, wanted in reference.run(x).items():
            np.testing.assert_allclose(session.run(x)[key], wanted, rtol=1e-5, atol=1e-5)


def test_an_input_of_a_type_that_numpy_has_not_is_named(tmp_path):
    path = io.save(model("(bfloat16[n] x) => (float[n] y) { y = Cast<to=1>(x) }"), tmp_path / "m.onnx")
    with pytest.raises(RequestError, match="input x"):
        catalog.load(path, "onnxruntime")


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_what_was_asked_for(rng, mixed, threads):
    assert catalog.load(mixed, "onnxruntime", threads)._session.get_session_options().intra_op_num_threads == threads
    session = catalog.load(mixed, "openvino", threads)
    session.run(batch(rng, 2))
    with session._compiled[2].one() as request:
        compiled = request.get_compiled_model()
    usable = min(threads, len(os.sched_getaffinity(0)))  # OpenVINO starts no more threads than the process has cores
    assert compiled.get_property("INFERENCE_NUM_THREADS") == usable and compiled.get_property("NUM_STREAMS") == 1


# --- what runs


@pytest.fixture(scope="module")
def mlps(tmp_path_factory):
    """(fp32, int8) files of a three-layer network."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("mlps")
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    fp32 = model(MLP, w=normal(32, 64), b=normal(64), v=normal(64, 64), u=normal(64, 8), d=normal(8))
    int8, _ = quantize(fp32, QuantRecipe(), calibrate(fp32, [{"x": normal(64, 32)}]))
    return io.save(fp32, folder / "fp32.onnx"), io.save(int8, folder / "int8.onnx")


def gemms(session):
    """Element types of the operators that multiply matrices, and all types that ran."""
    ran = session.executed({"x": np.ones((16, 32), np.float32)})
    assert ran and all(node.name and node.type for node in ran)
    return [
        node.precision for node in ran if "Gemm" in node.type or "MatMul" in node.type or "FullyConnected" in node.type
    ], ran


@ENGINES
def test_an_int8_network_runs_in_int8(mlps, name):
    session = catalog.load(mlps[1], name)
    precisions, ran = gemms(session)
    assert precisions == ["u8"] * 3
    assert not any("Dequantize" in node.type for node in ran) and sum("Quantize" in node.type for node in ran) <= 1
    assert gemms(catalog.load(mlps[1], name))[0] == ["u8"] * 3  # also from the compiler's cache


@ENGINES
def test_a_float_network_runs_in_float(mlps, name):
    assert gemms(catalog.load(mlps[0], name))[0] == ["f32"] * 3  # in float32: bfloat16 is not used by itself


def test_engines_agree_on_int8(rng, mlps):
    x = rng.standard_normal((128, 32)).astype(np.float32)
    a, *others = (catalog.load(mlps[1], name).run({"x": x})["y"] for name in EXACT)
    exact = catalog.load(mlps[0], "onnxruntime").run({"x": x})["y"]
    assert all(np.abs(a - b).max() < 0.02 * np.abs(exact).max() for b in others)
    assert 0 < np.abs(a - exact).max() < 0.1 * np.abs(exact).max()


@ENGINES
def test_looking_at_what_runs_leaves_no_files(mlps, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    catalog.load(mlps[1], name).executed({"x": np.ones((4, 32), np.float32)})
    assert list(tmp_path.iterdir()) == []


# --- refusals


def refused(kind, action, *parts):
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text and all(part in text for part in parts), text


@ENGINES
@pytest.mark.parametrize("body", [b"", b"hello", bytes(range(256))])
def test_a_file_that_is_no_model(tmp_path, name, body):
    path = tmp_path / "bad.onnx"
    path.write_bytes(body)
    refused(RequestError, lambda: catalog.load(path, name), f"{name} cannot load {path}: ")


@ENGINES
def test_a_truncated_model(mlps, tmp_path, name):
    path = tmp_path / "cut.onnx"
    path.write_bytes(mlps[0].read_bytes()[:-500])
    refused(RequestError, lambda: catalog.load(path, name), f"{name} cannot load {path}: ")


@ENGINES
def test_an_operator_that_no_engine_knows_is_named(tmp_path, name):
    path = io.save(model("(float[n,3] x) => (float[n,3] y) { y = Foo(x) }"), tmp_path / "foo.onnx")
    refused(RequestError, lambda: catalog.load(path, name), "Foo")


@ENGINES
def test_requests_that_are_wrong(mixed, name):
    refused(RequestError, lambda: catalog.load(mixed.parent / "none.onnx", name), "no model file at")
    refused(RequestError, lambda: catalog.load(mixed.parent, name), "no model file at")
    refused(RequestError, lambda: catalog.load(mixed, name, 0), "threads must be 1 or more, not 0")
    refused(
        RequestError,
        lambda: catalog.load(mixed, "tvm"),
        "unknown engine 'tvm'; choose auto, onnxruntime, openvino or native",
    )


@ENGINES
@pytest.mark.parametrize(
    "change",
    [
        lambda feeds: feeds.pop("x"),
        lambda feeds: feeds.clear(),
        lambda feeds: feeds.update(x=feeds["x"][:, :2]),
        lambda feeds: feeds.update(x=feeds["x"][:3]),
        lambda feeds: feeds.update(z=feeds["x"]),
    ],
    ids=["missing", "none", "width", "length", "unknown"],
)
def test_a_batch_that_does_not_fit(rng, mixed, name, change):
    session = catalog.load(mixed, name)
    check(session, batch(rng, 8))
    feeds = batch(rng, 4)
    change(feeds)
    refused(RequestError, lambda: session.run(feeds), str(mixed))
    check(session, batch(rng, 4))  # and the session still works


def test_an_index_beyond_the_table(rng, mixed):
    feeds = batch(rng, 4)
    feeds["ids"][1] = 9
    refused(
        RequestError, lambda: catalog.load(mixed, "onnxruntime").run(feeds), "indices element out of data bounds, idx=9"
    )


def test_openvino_says_which_batch_size_a_model_cannot_have(tmp_path):
    fixed = model("(float[2,3] x) => (float[3,2] y) { y = Reshape(x, s) }", s=np.array([3, 2]))
    session = catalog.load(io.save(fixed, tmp_path / "fixed.onnx"), "openvino")
    refused(ZooError, lambda: session.run({"x": np.ones((5, 3), np.float32)}), "cannot compile", "for batch size 5")


def test_an_engine_that_is_not_installed(mixed, monkeypatch):
    monkeypatch.setattr(stock, "available", lambda: ["onnxruntime"])
    refused(
        RequestError,
        lambda: catalog.load(mixed, "openvino"),
        "openvino is not installed; run: pip install 'int8-zoo[openvino]'",
    )


# --- bfloat16


needs_bf16 = pytest.mark.skipif(not machine.has_bf16(), reason="the CPU does not compute in bf16")


@needs_bf16
def test_bf16_runs_in_bf16_and_fp32_does_not_whatever_the_cache_holds(rng, mlps, zoo_home):
    for _ in range(2):
        for precision, ran in (("bf16", "bf16"), ("fp32", "f32"), ("int8", "f32")):
            assert gemms(catalog.load(mlps[0], "openvino", 1, precision))[0] == [ran] * 3
    x = {"x": rng.standard_normal((16, 32)).astype(np.float32)}
    exact, brief = (catalog.load(mlps[0], "openvino", 1, precision).run(x)["y"] for precision in ("fp32", "bf16"))
    assert 0 < np.abs(brief - exact).max() < 0.02 * np.abs(exact).max()


def test_bf16_is_refused_by_another_engine_and_without_the_instructions(mlps, monkeypatch):
    refused(
        RequestError,
        lambda: catalog.load(mlps[0], "onnxruntime", 1, "bf16"),
        "the engine onnxruntime does not compute in bf16",
    )
    monkeypatch.setattr(machine, "has_bf16", lambda: False)
    refused(
        RequestError,
        lambda: catalog.load(mlps[0], "openvino", 1, "bf16"),
        "does not compute in bf16 (no avx512_bf16, no amx_bf16); choose fp32 or int8",
    )


def test_shared_weights_without_vnni(monkeypatch, tmp_path):
    """onnxruntime itself cannot load such a file with the option that makes it exact there."""
    rng = np.random.default_rng(0)
    fp32 = model(
        "(float[n,8] x) => (float[n,8] y) { h = Gemm(x, w) r = Relu(h) y = Gemm(r, w) }",
        w=rng.standard_normal((8, 8)).astype(np.float32),
    )
    feeds = {"x": rng.standard_normal((16, 8)).astype(np.float32)}
    int8, _ = quantize(fp32, QuantRecipe(), calibrate(fp32, [feeds], "minmax"))
    assert [value.dtype.name for value in int8.graph.initializers.values()].count("INT8") == 2, "weights, zero point"
    path = io.save(int8, tmp_path / "int8.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", "1")
    with pytest.raises(Exception, match="Attempt to replace the existing tensor"):
        onnxruntime.InferenceSession(path, options)
    expected = catalog.load(path, "onnxruntime").run(feeds)["y"]
    monkeypatch.setattr(machine, "has_vnni", lambda: False)
    for content in (None, path.read_bytes()):
        session = OnnxRuntimeSession(path, 1, content)
        np.testing.assert_allclose(session.run(feeds)["y"], expected, atol=0.02 * np.abs(expected).max())
