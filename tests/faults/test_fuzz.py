"""Bytes that nobody wrote: whatever comes in, either it is read or one line says why not. `make fuzz` tries for longer."""

import functools
import gzip
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import clicks_folded
from helpers.click_networks import FAMILIES, Network
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import zoo
from pipelines.core.errors import RequestError, ZooError
from pipelines.engines import catalog, plan
from pipelines.engines.native import forms, images, recommender_files
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels import program_file as packed_programs
from pipelines.kernels.transformer import program_file
from pipelines.models.hub import Card
from pipelines.models.npz import read_npz
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.lower import lower

pytestmark = pytest.mark.usefixtures("shared_home")

EXAMPLES = int(os.environ.get("ZOO_FUZZ", "0"))  # a test; 0: the fast tier's, always the same ones
fuzz = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def quietly(call, *arguments):
    """Whether `call` takes the arguments; what it raises is one line of the project's own."""
    try:
        call(*arguments)
    except ZooError as error:
        assert str(error) and "\n" not in str(error), error
        return False
    return True


def changed(draw, content: bytes) -> bytes:
    """`content` with a few bytes changed, cut out or doubled."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, max(len(damaged) - 1, 0)))
        kind = draw(st.sampled_from(["change", "cut", "double", "zero"]))
        if kind == "change":
            damaged[offset : offset + 1] = draw(st.binary(min_size=1, max_size=4))
        elif kind == "cut":
            del damaged[offset : offset + draw(st.integers(1, 200))]
        elif kind == "double":
            damaged[offset:offset] = damaged[offset : offset + draw(st.integers(1, 64))]
        else:
            damaged[offset : offset + draw(st.integers(1, 200))] = b""
    return bytes(damaged)


def mutated(content: bytes):
    return st.composite(lambda draw: changed(draw, content))()


# ---------------------------------------------------------------------------------------------------------------- rows


@pytest.fixture(scope="module")
def clicks():
    return zoo.pipeline("wide-deep-criteo", engine="onnxruntime")


@pytest.fixture(scope="module")
def translator():
    return zoo.pipeline("multi30k-en-de")


@pytest.fixture(scope="module")
def row():
    path = zoo.load("wide-deep-criteo").path / "sample.tsv.gz"
    with gzip.open(path) as file:
        return file.readline()


@fuzz
@given(st.data())
def test_rows(clicks, row, data):
    lines = data.draw(st.lists(mutated(row) | st.binary(max_size=80), min_size=1, max_size=3))
    if quietly(clicks.preprocess, lines):
        batch = clicks.preprocess(lines)
        assert (batch["ids"] >= 0).all() and np.isfinite(clicks.predict(batch)["probability"]).all()


@fuzz
@given(st.data(), st.booleans())
def test_files_of_rows(clicks, row, tmp_path, data, packed):
    content = gzip.compress(row * 3, mtime=0) if packed else row * 3
    (tmp_path / "rows.tsv").write_bytes(data.draw(mutated(content)))
    quietly(clicks.run, tmp_path / "rows.tsv", tmp_path / "out.csv", "skip")
    assert {path.name for path in tmp_path.iterdir()} <= {"rows.tsv", "out.csv"}


@fuzz
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda data: data.decode("utf-8", "surrogateescape")))
@example("\0" * 50)
def test_sentences(translator, text):
    if quietly(translator.preprocess, [text]):
        source = translator.preprocess([text])["source"]
        assert ((source >= 0) & (source < len(translator.vocabulary))).all()


@fuzz
@given(st.data())
def test_files_of_text(translator, tmp_path, data):
    content = b"Two children play.\nEin Hund.\n"
    packed = data.draw(st.booleans())
    path = tmp_path / f"t.txt{'.gz' * packed}"
    path.write_bytes(data.draw(mutated(gzip.compress(content * 30, mtime=0) if packed else content)))
    quietly(lambda: list(translator._read([str(path)])))


# ---------------------------------------------------------------------------------------------------------------- JSON


@fuzz
@given(JSON)
def test_json_of_every_kind(tmp_path, value):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(value))
    for read in (Card.read, CalibrationTable.load):
        quietly(read, path)
    (tmp_path / "build.json").write_text(json.dumps(value))
    (tmp_path / "card.json").write_text(json.dumps(value))
    quietly(zoo.load, tmp_path)


@fuzz
@given(st.data())
def test_cards_and_tables_that_are_nearly_right(tmp_path, data):
    folder = zoo.load("mobilenet-v1-cifar10").path
    for name, read in (("card.json", Card.read), ("calibration.json", CalibrationTable.load)):
        (tmp_path / name).write_bytes(data.draw(mutated((folder / name).read_bytes()[:20_000])))
        quietly(read, tmp_path / name)


# -------------------------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def model():
    text = """<ir_version: 8, opset_import: ["" : 17]> net (float[n, 4] x) => (float[n, 4] y) { a = MatMul(x, w) y = Relu(a) }"""
    made = onnx.parser.parse_model(text)
    made.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    return made.SerializeToString()


@fuzz
@given(st.data())
def test_models(model, tmp_path, data):
    path = tmp_path / "m.onnx"
    path.write_bytes(data.draw(mutated(model) | st.binary(max_size=100)))
    if quietly(io.load, path):
        quietly(lambda: catalog.load(path, "onnxruntime").run({"x": np.ones((2, 4), np.float32)}))


@fuzz
@given(st.data())
def test_samples(tmp_path, data):
    path = tmp_path / "x.npz"
    np.savez(path, x=np.ones((3, 4), np.float32))
    path.write_bytes(data.draw(mutated(path.read_bytes())))
    quietly(read_npz, path)


# -------------------------------------------------------------------------------------------------------------- caches


@pytest.fixture(scope="module")
def planned(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "m.onnx").write_bytes(model)
    batch = {"x": np.ones((2, 4), np.float32)}
    plan.build(
        [plan.Candidate("onnxruntime", "fp32", folder / "m.onnx")], [batch], [1], folder / "m.plan", catalog.load
    )
    return folder


@fuzz
@given(st.data())
def test_plans(planned, data):
    with zipfile.ZipFile(planned / "m.plan") as archive:
        contents = json.loads(archive.read(plan.CONTENTS))
        blobs = {name: archive.read(name) for name in archive.namelist() if name != plan.CONTENTS}
    contents[data.draw(st.sampled_from(sorted(contents)))] = data.draw(JSON)
    with zipfile.ZipFile(planned / "x.plan", "w") as archive:
        archive.writestr(plan.CONTENTS, json.dumps(contents))
        for name, blob in blobs.items():
            archive.writestr(name, blob)
    quietly(lambda: catalog.load(planned / "x.plan").run({"x": np.ones((2, 4), np.float32)}))


@fuzz
@given(st.data())
def test_stored_programs(tmp_path, data):
    header = data.draw(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
    size = data.draw(st.sampled_from([len(header), 2**62, 0, 5]))
    (tmp_path / "m.zoo").write_bytes(size.to_bytes(8, "little") + header + bytes(4096))
    assert not quietly(program_file.load, tmp_path / "m.zoo")


@pytest.fixture(scope="module")
def packed_image_network(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "m.zoo"
    zoo.load("mobilenet-v1-cifar10").ensure("int8.onnx")
    images.store(zoo.load("mobilenet-v1-cifar10").path / "int8.onnx", path)
    return path


def numbers(value, at=()):
    """The places of the numbers in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from numbers(item, (*at, key))
    if type(value) in (int, float):
        yield at


def with_other_numbers(packed, target, data):
    """Write a packed program to `target` with up to three numbers of its header changed."""
    content = packed.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    arrays = content[-(-(8 + size) // packed_programs.PAGE) * packed_programs.PAGE :]
    for path in data.draw(st.lists(st.sampled_from(list(numbers(header["programs"]))), min_size=1, max_size=3)):
        *way, last = path
        place = functools.reduce(lambda value, key: value[key], way, header["programs"])
        place[last] = data.draw(st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 1024, 2**31, 2**62]) | st.integers(0, 300))
    encoded = json.dumps(header).encode()
    start = -(8 + len(encoded)) % packed_programs.PAGE
    target.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(start) + arrays)


@pytest.fixture(scope="module", params=["folded", *FAMILIES])
def packed_click_model(request, tmp_path_factory):
    """(native.onnx, its packed program, feeds) of a folded Wide & Deep, and of a program of each family."""
    folder = tmp_path_factory.mktemp("clicks")
    if request.param == "folded":
        graph, feeds = clicks_folded.folded()[0], clicks_folded.feeds(3)
    else:
        net = Network(request.param)
        feeds = net.feeds(3)
        graph, _ = lower(net.model, calibrate(net.model, [net.feeds(300)], "minmax"), QuantRecipe())
    path = io.save_mapped(graph, folder / "native.onnx")
    recommender_files.store(path, folder / "m.zoo")
    return path, folder / "m.zoo", feeds


@pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
@fuzz
@given(st.data())
def test_packed_click_models(packed_click_model, tmp_path, monkeypatch, data):
    """Steps of other sizes than the arrays and buffers have are refused, not computed out of bounds."""
    path, packed, feeds = packed_click_model
    with_other_numbers(packed, tmp_path / "m.zoo", data)

    def run():
        with monkeypatch.context() as patch:
            patch.setattr(recommender_files, "derived", lambda *_: tmp_path / "m.zoo")
            patch.setattr(recommender_files, "_graph", refuse)
            session = forms.options(path, 1)["native"].open()
        session.run(feeds)

    def refuse(path):
        raise RequestError("refused")

    quietly(run)


@pytest.mark.skipif(not extension.isas(), reason="needs the native kernels")
@fuzz
@given(st.data())
def test_packed_image_networks(packed_image_network, tmp_path, monkeypatch, data):
    """Steps of other sizes than the arrays have are refused, not computed out of bounds."""
    with_other_numbers(packed_image_network, tmp_path / "m.zoo", data)

    def run():
        (program,) = packed_programs.load(tmp_path / "m.zoo", images.CLASSES, images.VERSION)
        monkeypatch.setattr(images, "packed", lambda *_: program)
        session = images.ImageSession(tmp_path / "m.zoo", 1)
        ((name, port),) = session.inputs.items()
        if min(port.shape[1:]) >= 0 and np.prod(port.shape[1:], dtype=float) < 1e6:
            session.run({name: np.zeros((1, *port.shape[1:]), port.dtype)})

    quietly(run)


# ----------------------------------------------------------------------------------------------------------- long runs


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "auto"])
def test_memory_and_descriptors_stay_over_many_calls(engine):
    pipeline = zoo.pipeline("wide-deep-criteo", engine=engine)
    batch = pipeline.preprocess(pipeline.example(3))

    def held():
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status["VmRSS"].split()[0]), len(list(Path("/proc/self/fd").iterdir()))

    for _ in range(2000):
        pipeline.predict(batch)
    memory, descriptors = held()
    for _ in range(20_000):
        pipeline.predict(batch)
    after = held()
    assert after[0] - memory < 8_000 and after[1] <= descriptors  # kB; a leak of a batch would be thousands of these
