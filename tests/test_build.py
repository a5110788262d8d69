"""The road with a model of three lines, whose parts are here."""

import json
import multiprocessing
import zlib

import numpy as np
import pytest
from rewriting import model, run

from pipelines import build as road
from pipelines import graph
from pipelines.build import STAGES, ModelFolder, build, open_folder, read_npz, set_recipe
from pipelines.entry import Entry, QuantRecipe
from pipelines.errors import RequestError
from pipelines.files import sha256, write_json
from pipelines.hub import Card, CardFile
from pipelines.rewrites import SHARED

TEXT = "(float[n,8] x) => (float[n,2] y) { h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v) }"


def weights(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (8, 16)), ("b", (16,)), ("v", (16, 2)))}


def samples(count=50):
    return np.random.default_rng(9).standard_normal((count, 8)).astype(np.float32)


def freeze(folder):
    """The part "freeze": the checkpoint is a seed."""
    graph.save(model(TEXT, **weights(int((folder / "seed.txt").read_text()))), folder / "fp32.onnx")
    with (folder / "frozen.log").open("a") as log:
        log.write("frozen\n")
    return {"nodes": 4}


def rewrites(preprocessing):
    """The part "rewrites"."""
    assert preprocessing == {"mean": 0}
    return [each() for each in SHARED]


def entry(**changes):
    parts = dict.fromkeys(("train", "settings", "finetune_settings", "evaluate", "pipeline"), "nowhere:nothing")
    here = {"freeze": "test_build:freeze", "rewrites": "test_build:rewrites", "checkpoint": "seed.txt"}
    return Entry(name="fake", title="t", task="none", **parts | here | changes)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "seed.txt").write_text("1")
    np.savez(path / road.SAMPLES, x=samples())
    card = Card("mine", "fake", "of a test", (), {"preprocessing": {"mean": 0}})
    write_json(path / "card.json", card.to_json())
    return ModelFolder(path, card, entry())


def outcome(folder, **options):
    return "".join(each[0] for each in build(folder, **options).values())  # m(ade), k(ept) or g(iven), in order


# --- stages


def test_every_stage_is_made_once(folder):
    assert build(folder) == dict.fromkeys(STAGES, "made")
    assert build(folder) == dict.fromkeys(STAGES, "kept")
    assert (folder.path / "frozen.log").read_text() == "frozen\n"
    record = json.loads((folder.path / road.RECORD).read_text())
    assert list(record) == list(STAGES)
    assert record["fp32.onnx"]["inputs"] == {"seed.txt": sha256(folder.path / "seed.txt")} and record["fp32.onnx"]["nodes"] == 4
    assert record["rewritten.onnx"]["operators"]["after"] == {"Gemm": 1, "MatMul": 1, "Relu": 1}
    assert (record["calibration.json"]["observer"], record["calibration.json"]["samples"]) == ("minmax", 50)
    assert record["int8.onnx"]["precisions"] == {"int8": 3} and record["int8.onnx"]["seconds"] >= 0
    report = json.loads((folder.path / road.QUANTIZATION).read_text())
    assert [each["precision"] for each in report["operators"]] == ["int8"] * 3


def test_the_int8_model_computes_what_the_float_one_does(folder):
    build(folder)
    float32, int8 = (run(graph.load(folder.path / name), x=samples())["y"] for name in ("fp32.onnx", "int8.onnx"))
    assert 0 < np.abs(int8 - float32).max() < 0.05 * np.abs(float32).max()


def test_building_stops_where_it_is_told(folder):
    assert build(folder, until="rewritten.onnx") == {"fp32.onnx": "made", "rewritten.onnx": "made"}
    assert not (folder.path / "calibration.json").exists()
    assert folder.ensure("int8.onnx").is_file()
    assert outcome(folder) == "kkkk"


def test_force_makes_everything_again(folder):
    build(folder)
    before = {name: (folder.path / name).read_bytes() for name in STAGES}
    assert outcome(folder, force=True) == "mmmm"
    assert before == {name: (folder.path / name).read_bytes() for name in STAGES}  # the same bytes


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: (path / "seed.txt").write_text("2"), "mmmm"),
        (lambda path: (path / "fp32.onnx").unlink(), "mkkk"),  # made again with the same bytes: what follows stands
        (lambda path: (path / "rewritten.onnx").unlink(), "kmkk"),
        (lambda path: (path / "calibration.json").unlink(), "kkmk"),
        (lambda path: (path / "int8.onnx").unlink(), "kkkm"),
        (lambda path: (path / "calibration.json").write_text((path / "calibration.json").read_text() + " "), "kkkm"),
        (lambda path: (path / road.RECORD).unlink(), "mmmm"),
        (lambda path: (path / road.SAMPLES).unlink(), "kkkk"),  # not needed any more
    ],
)
def test_only_what_is_stale_is_made(folder, change, expected):
    build(folder)
    change(folder.path)
    assert outcome(folder) == expected
    assert outcome(folder) == "kkkk"


def test_what_a_failed_stage_leaves_is_made_next_time(folder, monkeypatch):
    build(folder, until="fp32.onnx")
    with monkeypatch.context() as patch:
        patch.setattr(graph, "save", lambda model, path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(folder)
    assert not (folder.path / "rewritten.onnx").exists()
    assert outcome(folder) == "kmmm"


def test_a_missing_checkpoint_is_named(folder):
    (folder.path / "seed.txt").unlink()
    with pytest.raises(RequestError, match=r"seed\.txt is missing, fp32\.onnx is made from it; train or download the model again"):
        build(folder)


def test_missing_samples_are_named(folder):
    (folder.path / road.SAMPLES).unlink()
    with pytest.raises(RequestError, match=r"holds no calibration\.npz; calibrate on your data with: zoo calibrate .* --data FILE"):
        build(folder)


def test_a_file_that_no_stage_makes(folder):
    assert folder.ensure("seed.txt") == folder.path / "seed.txt"
    with pytest.raises(RequestError, match=r"holds no vocabulary\.txt; train or download the model again"):
        folder.ensure("vocabulary.txt")


def build_there(path, barrier, results):
    folder = open_folder(path, lambda name: entry())
    barrier.wait()
    results.put(sorted(build(folder).values()))


def test_two_processes_build_one_folder_once(folder):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=build_there, args=(folder.path, barrier, results)) for _ in range(2)]
    for each in both:
        each.start()
    found = sorted(results.get(timeout=60) for _ in both)
    for each in both:
        each.join()
    assert found == [["kept"] * 4, ["made"] * 4]


# --- what ships


def shipped(folder, *names):
    files = tuple(CardFile(name, (folder.path / name).stat().st_size, sha256(folder.path / name), None) for name in names)
    return ModelFolder(folder.path, Card("mine", "fake", "of a test", files, folder.card.details), folder.entry)


def test_files_of_the_card_are_given(folder):
    build(folder)
    model_ = graph.load(folder.path / "fp32.onnx")
    graph.compress_fp16(model_)
    graph.save(model_, folder.path / road.HALF)
    for name in ("fp32.onnx", "rewritten.onnx", "seed.txt", road.RECORD):
        (folder.path / name).unlink()
    given = shipped(folder, road.HALF, "int8.onnx", "calibration.json")
    assert build(given) == {"fp32.onnx": "made", "rewritten.onnx": "made", "calibration.json": "given", "int8.onnx": "given"}
    w = graph.constant(graph.load(given.path / "fp32.onnx").graph.initializers["w"])
    np.testing.assert_array_equal(w, weights(1)["w"].astype(np.float16).astype(np.float32))


def test_a_given_file_is_not_touched(folder):
    (folder.path / "int8.onnx").write_text("as it came")
    assert shipped(folder, "int8.onnx").ensure("int8.onnx").read_text() == "as it came"
    assert not (folder.path / "fp32.onnx").exists()  # nor is anything before it made


# --- recipes


def observer_and_bits(folder):
    table = json.loads((folder.path / "calibration.json").read_text())
    stored = graph.load(folder.path / "int8.onnx").graph.initializers
    return table["observer"], max(int(np.abs(graph.constant(v)).max()) for k, v in stored.items() if k.endswith("w.quantized"))


def test_a_recipe_makes_int8_anew_and_is_kept(folder):
    build(folder)
    assert folder.recipe == QuantRecipe() and observer_and_bits(folder) == ("minmax", 127)
    recipe = QuantRecipe(reduced_range=True, keep_float=("y",))
    set_recipe(folder, recipe)
    assert folder.recipe == recipe and outcome(folder) == "kkkm"
    assert observer_and_bits(folder) == ("minmax", 63)
    (folder.path / "seed.txt").write_text("2")
    assert outcome(folder) == "mmmm" and folder.recipe == recipe and observer_and_bits(folder) == ("minmax", 63)


def test_another_observer_calibrates_anew(folder):
    build(folder)
    set_recipe(folder, QuantRecipe(observer="kl"))
    assert outcome(folder) == "kkmm" and observer_and_bits(folder)[0] == "kl"
    set_recipe(folder, QuantRecipe(observer="kl"))
    assert outcome(folder) == "kkkm"  # the table stands


def test_a_recipe_before_anything_was_built(folder):
    set_recipe(folder, QuantRecipe(observer="kl"))
    assert outcome(folder) == "mmmm" and observer_and_bits(folder)[0] == "kl"


def calibrated_on_own_data(folder, observer):
    """As `zoo calibrate FOLDER --data FILE --observer ...` leaves a folder."""
    from pipelines.calibrate import calibrate

    folder.ensure("rewritten.onnx")
    table = calibrate(graph.load(folder.path / "rewritten.onnx"), [{"x": 2 * samples()}], observer)
    table.save(folder.path / "calibration.json")
    road.note(folder, "calibration.json", {"observer": observer, "samples": 50, "own_data": True})


def test_own_calibration_is_used_with_its_observer(folder):
    calibrated_on_own_data(folder, "kl")
    own = (folder.path / "calibration.json").read_bytes()
    assert folder.recipe == QuantRecipe(observer="kl")
    set_recipe(folder, folder.recipe)  # what `zoo quantize FOLDER` does
    assert outcome(folder) == "kkkm"
    assert (folder.path / "calibration.json").read_bytes() == own
    assert json.loads((folder.path / road.QUANTIZATION).read_text())["recipe"]["observer"] == "kl"


def test_own_calibration_is_not_thrown_away_for_another_observer(folder):
    calibrated_on_own_data(folder, "minmax")
    with pytest.raises(RequestError, match=r"was calibrated on own data with minmax; run: zoo calibrate .* --data FILE --observer kl"):
        set_recipe(folder, QuantRecipe(observer="kl"))


# --- folders


def test_a_folder_is_opened_with_its_entry(folder):
    opened = open_folder(folder.path, {"fake": entry()}.__getitem__)
    assert opened == folder and opened.preprocessing == {"mean": 0} and opened.record == {}


def test_a_folder_without_a_card(tmp_path):
    with pytest.raises(RequestError, match=r"is no model folder \(it has no card\.json\)"):
        open_folder(tmp_path, {}.__getitem__)


# --- .npz


def test_read_npz(tmp_path):
    x, i = samples(10), np.arange(10)
    np.savez_compressed(tmp_path / "s.npz", x=x, i=i)
    batches, total = read_npz(tmp_path / "s.npz", 4)
    batches = list(batches)
    assert total == 10 and [len(each["x"]) for each in batches] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([each["x"] for each in batches]), x)
    np.testing.assert_array_equal(np.concatenate([each["i"] for each in batches]), i)


def archive(path, **arrays):
    np.savez(path, **arrays)


def damaged(path):
    np.savez_compressed(path, x=samples(1000))
    body = bytearray(path.read_bytes())
    body[500:900] = bytes(400)
    path.write_bytes(body)


def member(path):
    import zipfile

    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "hello")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: None, "cannot read"),
        (lambda path: path.mkdir(), "cannot read"),
        (lambda path: path.write_bytes(b""), "cannot read"),
        (lambda path: path.write_bytes(b"x,y\n1,2\n"), "cannot read"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut"), "cannot read"),
        (lambda path: path.write_bytes(zlib.compress(b"x" * 99)), "cannot read"),
        (damaged, "cannot read"),
        (lambda path: path.open("wb").write(b"") or np.save(path.open("wb"), samples()), "cannot read"),
        (lambda path: archive(path, x=np.array([{}], dtype=object)), "cannot read"),
        (member, "holds arrays of"),
        (lambda path: archive(path), "holds arrays of nothing samples"),
        (lambda path: archive(path, x=samples(3), y=samples(4)), r"holds arrays of \{'x': 3, 'y': 4\} samples"),
        (lambda path: archive(path, x=samples(0)), r"holds arrays of \{'x': 0\} samples"),
        (lambda path: archive(path, x=np.float32(1)), r"holds arrays of \{'x': 0\} samples"),
    ],
    ids=[
        "none",
        "folder",
        "empty",
        "csv",
        "cut",
        "zlib",
        "damaged",
        "npy",
        "objects",
        "text",
        "nothing",
        "lengths",
        "no samples",
        "scalar",
    ],
)
def test_what_is_no_npz_of_samples(tmp_path, make, what):
    path = tmp_path / "s.npz"
    make(path)
    with pytest.raises(RequestError, match=what) as caught:
        read_npz(path)
    assert "s.npz" in str(caught.value) and "\n" not in str(caught.value)
