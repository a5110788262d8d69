"""The engine `native` on click programs: the kernels' own bits in every batch and with threads; errors in one line."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from helpers.click_networks import FAMILIES, Network
from helpers.clicks_folded import first_form
from helpers.rewriting import run

from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.engines.session import BatchError
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.lower import lower

pytestmark = pytest.mark.skipif(extension.native() is None, reason=extension.missing())


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    """(network, native.onnx, feeds, its program)."""
    net = Network(request.param)
    feeds = net.feeds(700)
    result, report = lower(net.model, calibrate(net.model, [feeds], "minmax"), QuantRecipe())
    assert report["fold"]
    path = io.save_mapped(result, tmp_path_factory.mktemp(request.param) / "native.onnx")
    return net, path, feeds, click_program(io.load(path).graph[0])


def part(feeds, count):
    return {name: np.ascontiguousarray(array[:count]) for name, array in feeds.items()}


@pytest.mark.parametrize("threads", [1, 3])
def test_sessions_give_what_the_program_says(made, threads):
    net, path, feeds, program = made
    session = load(path, first_form(path), threads)
    assert set(session.inputs) == set(feeds) and session.threads == threads
    for count in (0, 1, 2, 127, 128, 700):
        batch = part(feeds, count)
        outputs = session.run(batch)
        wanted = reference.run(program, batch["ids"], batch.get("numbers"), batch.get("scales"))
        assert session.engine == "native"
        for array, expected in zip(outputs.values(), wanted, strict=True):
            assert array.shape == expected.shape and array.dtype == np.float32
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-7)
        plain = run(net.model, **batch)
        assert list(outputs) == list(plain)
        assert not count or np.abs(outputs["probability"] - plain["probability"]).max() <= 0.005
    ran = session.executed(part(feeds, 5))
    assert any("Mixed" in operator.type for operator in ran) and {operator.precision for operator in ran} == {"s16"}


def test_threads_share_a_session(made):
    _, path, feeds, _ = made
    session = load(path, "native", 2)
    wanted = session.run(feeds)["probability"].tobytes()
    with ThreadPoolExecutor(4) as pool:
        assert all(outputs["probability"].tobytes() == wanted for outputs in pool.map(session.run, [feeds] * 12))


@pytest.mark.parametrize("threads", [1, 3])
def test_wrong_batches_are_refused(made, threads):
    _, path, feeds, program = made
    session = load(path, first_form(path), threads)
    ids = feeds["ids"].copy()
    ids[650, 1] = program.rows[1]
    with pytest.raises(BatchError, match=f"found id {program.rows[1]} in row 650, column 1; expected 0 to"):
        session.run(feeds | {"ids": ids})
    for wrong in ({"ids": feeds["ids"][:, :-1].copy()}, {"numbers": feeds["numbers"][:5].copy()}, {"scales": None}):
        with pytest.raises(BatchError):
            session.run({**feeds, **wrong})
    with pytest.raises(BatchError):
        session.run({"ids": feeds["ids"]})
    session.run(feeds)


def test_damaged_files_are_refused(made, tmp_path):
    _, path, _, _ = made
    proto = onnx.load(path)
    proto.graph.node[0].attribute[0].s = b"{}"
    broken = tmp_path / "broken.onnx"
    onnx.save(proto, broken)
    with pytest.raises(RequestError) as error:
        load(broken, "native")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("threads", [1, 3])
def test_arrays_of_other_layouts_are_copied(made, threads):
    _, path, feeds, _ = made
    session = load(path, first_form(path), threads)
    wanted = session.run(feeds)["probability"].tobytes()
    for change in (np.asfortranarray, lambda x: np.repeat(x, 2, axis=0)[::2]):
        assert session.run({name: change(array) for name, array in feeds.items()})["probability"].tobytes() == wanted
