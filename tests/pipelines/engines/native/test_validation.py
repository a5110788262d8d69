"""Native kernels are validated against ONNX Runtime once per machine, before the first batch."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from helpers.rewriting import model

import zoo
from pipelines.core import settings
from pipelines.core.errors import ZooError
from pipelines.engines import agreement, catalog, timing
from pipelines.engines.native import images, recommenders, translation, translation_check, validation
from pipelines.engines.native.texts import NativeTexts
from pipelines.engines.openvino import child
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.models import line_pipeline
from zoo.translation.data.tokens import END, PAD, START
from zoo.translation.search.scores import expected

pytestmark = pytest.mark.skipif(not extension.isas(), reason=f"no native kernels: {extension.missing()}")
INT8 = Path(zoo.__file__).parent / "weights" / "mobilenet-v1-cifar10" / "int8.onnx"


@pytest.fixture(autouse=True)
def _unknown(monkeypatch):
    monkeypatch.setattr(validation, "_FAULTS", {})  # of this process


@pytest.fixture
def photos(rng):
    return {"image": rng.integers(0, 256, (3, 3, 64, 64), dtype=np.uint8)}


@pytest.fixture
def wrong(tmp_path):
    """A reference of the same inputs and outputs that computes something else."""
    return io.save(
        model(
            "(uint8[n,3,64,64] image) => (float[n,10] logits) { a = Cast<to=1>(image) b = Flatten(a) c = MatMul(b, w) "
            "logits = Neg(c) }",
            w=np.eye(3 * 64 * 64, 10, dtype=np.float32),
        ),
        tmp_path / "other.onnx",
    )


def verdicts():
    return [json.loads(file.read_text()) for file in sorted((settings.home() / "verdicts").glob("native-*.json"))]


def test_the_verdict_is_remembered(photos, monkeypatch):
    catalog.load(INT8, "native").run(photos)
    (verdict,) = verdicts()
    assert verdict["fault"] == "" and {1, 2, 3, 9} <= {*verdict["sizes"]}
    monkeypatch.setattr(validation, "_FAULTS", {})  # as in another process
    monkeypatch.setattr(child, "probe", lambda request: pytest.fail("checked again"))
    catalog.load(INT8, "native").run(photos)


def test_a_file_of_another_folder_than_that_of_the_child_process_is_validated(photos, tmp_path, monkeypatch):
    shutil.copy(INT8, tmp_path / "copy.onnx")
    catalog.load(INT8, "native").run(photos)  # starts the child process
    monkeypatch.setattr(validation, "_FAULTS", {})
    for file in (settings.home() / "verdicts").glob("native-*.json"):
        file.unlink()
    monkeypatch.chdir(tmp_path)
    catalog.load("copy.onnx", "native").run(photos)
    assert [verdict["model"] for verdict in verdicts()] == ["copy.onnx"]


def test_kernels_that_differ_are_refused_and_left_out(photos, wrong, monkeypatch, caplog):
    def opened():
        session = images.ImageSession(INT8, 1)
        session._unvalidated = dataclasses.replace(session._unvalidated, reference=wrong)
        return session

    for _ in range(2):  # found, and remembered
        with pytest.raises(
            agreement.WrongResultsError,
            match=r"^the native kernels do not compute .*int8.onnx correctly on this machine \(with a batch of 3, output "
            r"logits of native differs from that of other engines by .* of its power\); use onnxruntime$",
        ):
            opened().run(photos)
        monkeypatch.setattr(validation, "_FAULTS", {})
    openers = {"native": opened, "onnxruntime": lambda: catalog.load(INT8, "onnxruntime")}
    assert list(timing.time_each(openers, photos)) == ["onnxruntime"]
    assert "the engine native is left out: the native kernels do not compute" in caplog.text


def test_a_sample_must_not_depend_on_its_batch(photos, monkeypatch):
    """Kernels that are right for one sample and off by little for several."""
    session = images.ImageSession(INT8, 1, validate=False)

    def run(batch):
        outputs = session.run(batch)
        return {name: array * (1 + 0.01 * (len(array) > 1)) for name, array in outputs.items()}

    subject = validation.NativeModel(lambda *_: run, INT8, INT8, 1)
    for sizes, repeated in (((1, 2), ()), ((1,), (2,))):
        subject = dataclasses.replace(subject, sizes=sizes, repeated=repeated)
        result = validation.compare(subject, {name: array[:1] for name, array in photos.items()})
        assert result["difference"] == np.inf
        assert result["fault"] == "with a batch of 2, a sample in the batch differs from the sample alone"


def test_a_sample_alone_is_computed_once():
    counts = []

    def run(batch, *_):
        counts.append(len(batch["x"]))
        return {"y": batch["x"]}

    subject = validation.NativeModel(lambda *_: run, INT8, INT8, 1, expected=lambda *_, **__: run)
    validation.compare(subject, {"x": np.ones((1, 4), np.float32)})
    assert sorted(counts) == [1, 1, 2, 2, 8, 8, 128, 128]


@pytest.mark.parametrize(
    ("change", "right"),
    [
        pytest.param(lambda rows: rows[:, ::-1], True, id="another order"),
        pytest.param(lambda rows: rows * 1.5, False, id="other rows"),
        pytest.param(lambda rows: np.repeat(rows[:, ::2], 2, axis=1), False, id="every other row"),
    ],
)
@pytest.mark.parametrize("chooses", [True, False])
def test_rows_that_a_network_chooses_may_come_in_another_order(rng, tmp_path, change, right, chooses):
    """Their scores may be almost equal."""
    places = "v, p = TopK(s, k)" if chooses else "p = Identity(all)"
    text = f"(float[n,20,6] x) => (float[n,20,6] y) {{ s = ReduceMax<axes=[2], keepdims=0>(x) {places} "
    text += "i = Unsqueeze(p, two) t = Tile(i, often) y = GatherElements<axis=1>(x, t) }"
    constants = {"two": np.array([2]), "often": np.array([1, 1, 6])}
    constants |= {"k": np.array([20])} if chooses else {"all": np.arange(20)[None]}
    path = io.save(model(text, **constants), tmp_path / "m.onnx")
    expect = validation.onnxruntime(path, 1)
    run = lambda batch: {"y": np.ascontiguousarray(change(expect(batch, {})["y"]))}  # noqa: E731
    batch = {"x": rng.normal(0, 1, (1, 20, 6)).astype(np.float32)}
    result = validation.compare(validation.NativeModel(lambda *_: run, path, path, 1), batch)
    assert (result["difference"] <= agreement.ALIKE) == (right and chooses)


def test_maps_of_classes_are_compared(rng):
    def expect(batch, _):
        return {"classes": batch["x"].argmax(axis=1)}

    def run(batch):
        return {"classes": expect(batch, {})["classes"].swapaxes(1, 2)}

    for size, right in ((8, False), (4, True)):  # few classes may turn on the last bits of scores
        batch = {"x": rng.normal(0, 1, (1, 5, size, size)).astype(np.float32)}
        subject = validation.NativeModel(
            lambda *_: run, INT8, INT8, 1, expected=lambda *_, **__: expect, limit=validation.EXACT
        )
        assert (validation.compare(subject, batch)["difference"] <= validation.EXACT) == right


@pytest.mark.parametrize("last", [0, np.inf])
@pytest.mark.parametrize(("share", "mixed"), [(1e-3, False), (0.5, True)])
def test_roundings_of_a_batch_are_no_mixed_samples(share, mixed, last):
    """An operator in float before int8 layers may compute other last bits in a batch, which are rounded otherwise."""

    def run(batch):
        x = batch["x"]
        return {"y": expected(x + share * (x[::-1] - x))}

    def expected(x):  # the last value of the second sample may be infinite
        return np.where((np.arange(len(x)) % 2 == 1)[:, None] & (np.arange(16) == 15), x + last, x)

    subject = validation.NativeModel(
        lambda *_: run, INT8, INT8, 1, expected=lambda *_, **__: lambda batch, _: {"y": expected(batch["x"])}
    )
    batch = {"x": np.random.default_rng(0).normal(10, 1, (2, 16)).astype(np.float32)}
    assert (validation.compare(subject, batch)["difference"] == np.inf) == mixed


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (lambda sums: sums, ""),
        (lambda sums: sums * (sums < 192), r"with a batch of shape \[2, 400\], output sums of native differs"),
        (
            lambda sums: sums * (1 + 0.01 * (sums.size > 400)),
            r"with a batch of shape \[2, 400\], a sample in the batch differs from the sample alone",
        ),
    ],
)
def test_batches_of_other_shapes_are_checked_too(wrong, fault):
    def sums(batch):
        return {"sums": np.cumsum(batch["x"], axis=1)}

    def run(batch):
        return {"sums": wrong(sums(batch)["sums"])}

    subject = validation.NativeModel(
        lambda *_: run, INT8, INT8, 1, expected=lambda *_, **__: lambda batch, _: sums(batch)
    )
    few, long = ({"x": np.ones((2, size), np.float32)} for size in (3, 400))
    assert validation.compare(subject, few)["difference"] == 0
    result = validation.compare(subject, few, long)
    assert re.match(fault, result["fault"]) and (result["difference"] == 0) == (not fault)


def test_a_text_encoder_that_is_wrong_for_long_texts_is_noticed(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="writes the model")
    from helpers import text_models

    text_models.write(tmp_path / "theirs", max_position_embeddings=512)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    zoo.calibrate(tmp_path / "ours")
    requests = []
    monkeypatch.setattr(child, "probe", requests.append)
    zoo.pipeline(tmp_path / "ours", engine="native")(["the cat"])
    (request,) = requests
    (other,) = request["others"]
    assert other["attention_mask"].sum(axis=1).tolist() == [400, 5]
    assert validation.compare(request["native"], request["batch"], other)["difference"] <= agreement.ALIKE
    compute = NativeTexts.compute

    def wrong(self, tokens, types, lengths, attended):
        sign = np.where(lengths > 192, -1, 1).astype(np.float32)[:, None]
        return compute(self, tokens, types, lengths, attended) * sign

    monkeypatch.setattr(NativeTexts, "compute", wrong)
    assert validation.compare(request["native"], request["batch"])["difference"] <= agreement.ALIKE
    result = validation.compare(request["native"], request["batch"], other)
    assert result["difference"] > agreement.ALIKE and result["fault"].startswith("with a batch of shape [2, 400], ")


def test_a_crash_is_no_crash_of_ours(photos, monkeypatch):
    code = (
        "import os, signal; from pipelines.engines.native import validation; validation.compare = "
        "lambda *_: os.kill(os.getpid(), signal.SIGILL); from pipelines.engines.openvino import probe; probe.serve("
    )
    monkeypatch.setattr(child, "_START", child._START.partition("from")[0] + code + "{idle})")
    monkeypatch.setattr(child, "_running", None)
    with pytest.raises(ZooError, match=r"with native kernels, it crashes \(SIGILL\)"):
        catalog.load(INT8, "native").run(photos)


def test_recommenders_and_texts_are_validated(monkeypatch):
    checked = []
    monkeypatch.setattr(child, "probe", lambda request: checked.append(request["native"]))
    ctr = zoo.pipeline("shop-clicks", engine="native")
    ctr.predict(ctr.preprocess(ctr.example(3)))
    assert [(check.open, check.reference.name) for check in checked] == [(recommenders.unvalidated, "int8.onnx")]
    monkeypatch.undo()
    monkeypatch.setattr(validation, "BUDGET", 60.0)  # on a loaded machine, too
    result = validation.compare(checked[0], ctr.preprocess(ctr.example(3)))
    assert result["difference"] < 0.01 and result["sizes"] == [3, 1, 2, 8, 128]


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """A translation model, and its native program with columns of the output layer exchanged."""
    path = Path(zoo.__file__).parent / "weights" / "multi30k-en-de-student" / "int8.onnx"
    net = io.load(path)
    weight = next(value for value in net.graph.initializers.values() if value.shape == (256, 8000))
    weight.const_value = ir.tensor(np.roll(weight.const_value.numpy(), 16, axis=1), name=weight.name)
    program = tmp_path_factory.mktemp("wrong") / "int8.native.zoo"
    translation.store(io.save(net, program.with_name("int8.onnx")), program)
    return path, program


@pytest.mark.slow
def test_translations_are_validated_short_and_long_alone_and_in_batches(student):
    sources = [np.arange(10, 10 + size) for size in (5, 9, 7)]
    batch = translation_check.example(sources, 40, PAD)
    assert (batch["source"] != PAD).sum(axis=1).tolist() == [40, 2, 5, 9, 7]
    batch["words"] = np.zeros((5, 8000), bool)
    batch["words"][:, :400] = True
    path, wrong = student
    tokens = (START, END, PAD)
    for few in ({"source": batch["source"]}, batch):  # of all tokens, and of shortlists
        subject = validation.NativeModel(translation_check.unvalidated, path, path, 1, tokens, expected)
        result = validation.compare(subject, few)
        assert result["difference"] < 1e-3 and result["sizes"][0] == 5
        result = validation.compare(dataclasses.replace(subject, path=wrong), few)
        assert result["difference"] > 2 * agreement.ALIKE


def test_a_wrong_translator_is_refused_and_auto_takes_another_engine(student, monkeypatch, caplog):
    monkeypatch.setattr(line_pipeline.LinePipeline, "_program", lambda self, store: student[1])
    fault = r"the native kernels do not compute .*int8.native.zoo correctly on this machine \(with a batch of \d+, .*\)"
    for _ in range(2):  # found, and remembered
        with pytest.raises(agreement.WrongResultsError, match=rf"^{fault}; use onnxruntime$"):
            zoo.pipeline("multi30k-en-de-student", engine="native")
        monkeypatch.setattr(validation, "_FAULTS", {})
        monkeypatch.setattr(child, "probe", lambda request: pytest.fail("checked again"))
    pipe = zoo.pipeline("multi30k-en-de-student")
    assert pipe.engine == "onnxruntime" and re.fullmatch(rf"{fault}; falling back to onnxruntime", caplog.messages[-1])
    assert pipe(["A man rides a bike."])[0]["translation"] == "Ein Mann fährt Fahrrad."
