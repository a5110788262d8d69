"""Files of the engine native for click models: native.onnx, its data, and the packed program kept beside them, missing,
damaged and outdated.
"""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from helpers.click_networks import FAMILIES, Network
from helpers.clicks_folded import ROWS, by_reference, feeds, folded, needs_kernels, one_line
from helpers.rewriting import model

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import mapped
from pipelines.engines.catalog import load
from pipelines.engines.native import recommender_files
from pipelines.graph import io
from pipelines.kernels import program_file
from pipelines.models.record import NATIVE
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.lower import lower

FIRST = "native:folded-int16"  # the first form of the network, that of `by_reference`


@pytest.mark.parametrize("text", ["ids = Identity(x)", "h = Relu(x) ids = Neg(h)"])
def test_a_graph_without_the_operator_is_refused(tmp_path, text):
    path = io.save(model(f"(float[n,4] x) => (float[n,4] ids) {{ {text} }}"), tmp_path / "native.onnx")
    with pytest.raises(RequestError) as error:
        load(path, "native")
    one_line(error, "no ClickProgram operator", "native.onnx")
    with pytest.raises(RequestError) as error:  # of another name: it may be an image classifier
        load(path.rename(tmp_path / "int8.onnx"), "native")
    one_line(error, "the input x has shape", "expected [n, C, H, W]")


def test_engines_and_threads_are_checked(tmp_path):
    for wrong in ("tvm", "", "Native"):
        with pytest.raises(RequestError, match="choose auto, onnxruntime, openvino or native"):
            load(tmp_path / NATIVE, wrong)
    with pytest.raises(RequestError, match="1 or more"):
        load(tmp_path / NATIVE, "native", 0)
    with pytest.raises(RequestError) as error:
        load(tmp_path / NATIVE, "native")
    one_line(error, NATIVE)


@pytest.fixture
def copy(folder, tmp_path):
    for name in (NATIVE, f"{NATIVE}.data"):
        shutil.copy(folder / name, tmp_path / name)
    return tmp_path / NATIVE


def test_data_that_is_missing_or_too_short_is_refused(copy):
    data = mapped(copy)
    for size in (data.stat().st_size - 1, 4096, 0):
        with data.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(RequestError) as error:
            load(copy, FIRST)
        one_line(error, NATIVE, "it is rebuilt")
    data.unlink()
    with pytest.raises(RequestError) as error:
        load(copy, FIRST)
    one_line(error, NATIVE, "it is rebuilt")


@needs_kernels
def test_a_damaged_graph_is_refused_in_one_line_or_runs(copy):
    """Cut anywhere, or with wrong bytes: no traceback and no crash. `ModelFolder.ensure` finds every damage, by its
    digest.
    """
    content = copy.read_bytes()
    rng = np.random.default_rng(4)
    for part in range(40):
        copy.write_bytes(content[: len(content) * part // 40])
        with pytest.raises(ZooError) as error:
            load(copy, FIRST).run(feeds(5))
        one_line(error)
    for _ in range(60):
        wrong = bytearray(content)
        for place in rng.integers(0, len(content), 8):
            wrong[place] = rng.integers(256)
        copy.write_bytes(wrong)
        try:
            load(copy, FIRST).run(feeds(5))
        except ZooError as error:  # where no engine takes the layers after the operator
            assert "\n" not in str(error)


@needs_kernels
def test_the_table_is_the_mapped_file(copy):
    """Loading does not copy it: what is written to the file afterwards is what the kernel reads."""
    opened = load(copy, FIRST)
    before = opened.run(feeds(8))["y"]
    with mapped(copy).open("r+b") as file:
        file.write(bytes([200]) * mapped(copy).stat().st_size)
    assert not np.array_equal(before, opened.run(feeds(8))["y"])


# --- the packed program


@pytest.fixture
def kept(copy):
    """The packed program beside `copy`."""
    load(copy, FIRST)
    (packed,) = copy.parent.glob("native.clicks-*.zoo")
    return packed


def unread(*_):
    """In the place of what reads graphs."""
    pytest.fail("the graph was read")


@needs_kernels
def test_a_packed_program_is_made_once_and_opened_without_the_graph(copy, kept, monkeypatch, caplog):
    expected = by_reference(copy, feeds(50))
    assert kept.stat().st_size < 1 << 20 < mapped(copy).stat().st_size, "the table is not to be written twice"
    monkeypatch.setattr(recommender_files, "_graph", unread)
    opened = load(copy, FIRST)
    assert opened.run(feeds(50))["y"].tobytes() == expected.tobytes()
    assert {name: (port.dtype, port.shape) for name, port in opened.inputs.items()} == {
        "ids": (np.int32, (None, len(ROWS))),
        "x": (np.float32, (None, 4)),
    }
    assert not caplog.text


@needs_kernels
@pytest.mark.parametrize("damage", ["nothing", "cut", "header", "version", "names"])
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "of the same size and time"])
def test_a_damaged_packed_program_is_made_anew_or_the_graph_is_read(copy, kept, damage, seen, caplog):
    batch, (content, made) = feeds(50), (kept.read_bytes(), kept.stat())
    expected = by_reference(copy, batch)
    wrong = {
        "nothing": b"",
        "cut": content[:900],
        "header": content[:8] + content[8:].replace(b'"programs"', b'"programz"', 1),
        "version": content.replace(b'"version": %d' % recommender_files.VERSION, b'"version": 0', 1),
        "names": content.replace(b'"columns"', b'"colunms"', 1),
    }[damage]
    kept.write_bytes(wrong if seen else wrong.ljust(len(content), b" "))
    if not seen:
        os.utime(kept, ns=(made.st_atime_ns, made.st_mtime_ns))
    assert load(copy, FIRST).run(batch)["y"].tobytes() == expected.tobytes()
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (0 if seen else 1) and all("\n" not in message for message in warned)
    assert seen == (kept.read_bytes() == content)
    assert seen or f"{kept} is not readable" in warned[0]


@needs_kernels
def test_where_no_packed_program_can_be_kept_the_graph_is_read(copy, monkeypatch, caplog):
    def refuse(*_):
        raise RequestError("cannot write anywhere")

    monkeypatch.setattr(recommender_files, "derived", refuse)
    expected = by_reference(copy, feeds(50))
    assert load(copy, FIRST).run(feeds(50))["y"].tobytes() == expected.tobytes()
    assert "cannot write anywhere" in caplog.text


def test_another_graph_is_packed_anew_and_the_old_program_removed(copy, kept):
    result, _ = folded(sigmoid=True)
    io.save_mapped(result, copy)
    scores = load(copy, FIRST).run(feeds(50))["y"]
    assert scores.min() >= 0 and scores.max() <= 1
    (new,) = copy.parent.glob("*.zoo")
    assert new != kept


# (recommender_files.VERSION, digest of what the models below are in a file of that version)
RECORDED = (12, "424f41c6534c8949")


def summary(value):
    """What a packed program holds, numbers by their size, which CPUs may round otherwise."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), f"{np.abs(value.astype(np.float64)).sum():.2g}"]
    if isinstance(value, list | tuple):
        return [summary(element) for element in value]
    if isinstance(value, float):
        return f"{value:.2g}"
    if type(value).__name__ in recommender_files.CLASSES:
        return {type(value).__name__: {name: summary(field) for name, field in vars(value).items()}}
    return value


def test_the_version_changes_with_what_is_in_a_packed_program(tmp_path):
    graphs = [folded()[0]]
    for family in FAMILIES:
        net = Network(family)
        table = calibrate(net.model, [net.feeds(700)], "minmax")
        graphs.append(lower(net.model, table, QuantRecipe())[0])
    summaries = []
    for number, graph in enumerate(graphs):
        path = io.save_mapped(graph, tmp_path / f"{number}.onnx")
        recommender_files.store(path, tmp_path / f"{number}.zoo")
        content = (tmp_path / f"{number}.zoo").read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header["version"] == recommender_files.VERSION
        programs = program_file.load(
            tmp_path / f"{number}.zoo", recommender_files.CLASSES, recommender_files.VERSION, mapped(path)
        )
        summaries.append(summary(programs))
    digest = (recommender_files.VERSION, hashlib.sha256(json.dumps(summaries).encode()).hexdigest()[:16])
    assert digest == RECORDED, (
        "a graph becomes another packed program than when RECORDED was written: bump VERSION in "
        f"pipelines/engines/native/recommender_files.py, so that those kept are made anew, and record {digest} here with the new "
        "version"
    )
