"""Reference sessions of ONNX Runtime: fixed batch sizes and errors, memory."""

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.rewriting import model

from pipelines.core.errors import RequestError
from pipelines.graph import query, reference_session
from pipelines.rewrites.driver import CleanUp

NET = """(float[n,3,8,8] x) => (float[n,10] y) { a = Conv<pads=[1,1,1,1]>(x, w) p = GlobalAveragePool(a) flat = Reshape(p, s)
    y = MatMul(flat, v) }"""


def net(rng, *shape, text=NET):
    rows = {
        "w": rng.standard_normal((16, 3, 3, 3)).astype(np.float32),
        "v": rng.standard_normal((16, 10)).astype(np.float32),
    }
    return model(text, s=np.array(shape), t=np.array([-1, 16]), **rows)


@pytest.mark.parametrize("size", [1, 4])
def test_a_batch_size_fixed_inside_becomes_that_of_the_inputs(rng, size, capfd):
    built = net(rng, size, 16)
    said = reference_session.fix_batch(built)
    assert said.startswith(f"the graph computes only batches of {size} (Reshape") and capfd.readouterr().err == ""
    assert [query.dimensions(port) for port in (built.graph.inputs[0], built.graph.outputs[0])] == [
        [size, 3, 8, 8],
        [size, 10],
    ]
    assert reference_session.fix_batch(built) == ""


def test_an_operator_that_fails_later_is_named(rng):
    assert "(MatMul" in reference_session.fix_batch(net(rng, 1, -1))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((-1, 16), NET),
        ((0, 16), NET),
        ((1, 16), NET.replace("[n,3,8,8]", "[1,3,8,8]").replace("[n,10]", "[1,10]")),
        ((1, -1), NET.replace("y = MatMul(flat, v)", "back = Reshape(flat, t) y = MatMul(back, v)")),
        ((4096, 16), NET),
        ((1, 16), NET.replace("[n,3,8,8]", "[n,3,h,8]")),
    ],
)
def test_other_graphs_stay_as_they_are(rng, shape, text):
    built = net(rng, *shape, text=text)
    before = [query.dimensions(port) for port in built.graph.inputs]
    assert (
        reference_session.fix_batch(built) == "" and [query.dimensions(port) for port in built.graph.inputs] == before
    )


def test_errors_are_one_line(rng):
    opened = reference_session.session(net(rng, -1, 16), "a test needs")
    with pytest.raises(RequestError, match="^the rows do not fit the graph: ") as caught:
        reference_session.run(opened, {"x": np.zeros((1, 2), np.float32)}, "rows")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", ["c", "Expand(c, s)"])
def test_a_class_token_of_one_sample_fixes_the_batch(rng, token):
    """As torch traces `token.expand(len(x), -1, -1)`: the batch of the trace becomes a constant."""
    text = f"(float[n,4,8] x) => (float[n,5,8] y) {{ t = {token} y = Concat<axis=1>(t, x) }}".replace(
        "= c y", "= Identity(c) y"
    )
    token_of_one = rng.normal(size=(1, 1, 8)).astype(np.float32)
    built = model(text, c=token_of_one, **({"s": np.array([1, 1, 8])} if "Expand" in token else {}))
    if "Expand" not in token:
        CleanUp()(built)
    assert reference_session.fix_batch(built).startswith("the graph computes only batches of 1 (Concat")
    assert query.dimensions(built.graph.inputs[0]) == [1, 4, 8]


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_lean_sessions_share_the_memory_of_their_runs():
    """In a process of its own, whose arena no other session uses."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(run_two_lean_sessions).result()


def run_two_lean_sessions():
    built = model("(float[n,1024] x) => (float[n,1024] y) { a = Exp(x) b = Neg(a) y = Exp(b) }")
    x = np.zeros((4096, 1024), np.float32)  # 16 MB each
    sessions = [reference_session.session(built, "", reference_session.options(lean=True)) for _ in range(2)]
    reference_session.run(sessions[0], {"x": x})
    before = faults()
    results = reference_session.run(sessions[1], {"x": x})
    assert faults() - before < 2000  # of 4 KB; a result alone has 4096
    assert np.allclose(results[0], np.exp(-1))
    before = resident()
    del results, sessions
    reference_session.release()
    assert before - resident() > 10e6


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
