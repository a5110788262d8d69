"""The road with a model of three lines, whose parts are here."""

import json
import multiprocessing
import os
import zlib

import filelock
import numpy as np
import onnx_ir as ir
import pytest
from rewriting import model, run

from pipelines.core import derived
from pipelines.core.errors import RequestError
from pipelines.core.files import mapped, sha256, write_json
from pipelines.graph import edit, io, query
from pipelines.models import stages
from pipelines.models.entry import Entry
from pipelines.models.folder import HALF, QUANTIZATION, RECORD, ROAD, SAMPLES, ModelFolder, open_folder
from pipelines.models.hub import Card, CardFile
from pipelines.models.stages import build, read_npz, set_recipe
from pipelines.quantization.calibrate import CalibrationTable
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.shared import SHARED

TEXT = "(float[n,8] x) => (float[n,2] y) { h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v) }"


def weights(seed):
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in (("w", (8, 16)), ("b", (16,)), ("v", (16, 2)))
    }


def samples(count=50):
    return np.random.default_rng(9).standard_normal((count, 8)).astype(np.float32)


def freeze(folder):
    """The part "freeze": the checkpoint is a seed."""
    io.save(model(TEXT, **weights(int((folder / "seed.txt").read_text()))), folder / "fp32.onnx")
    with (folder / "frozen.log").open("a") as log:
        log.write("frozen\n")
    return {"nodes": 4}


def rewrites(preprocessing):
    """The part "rewrites"."""
    assert preprocessing == {"mean": 0}
    return [each() for each in SHARED]


def entry(**changes):
    parts = dict.fromkeys(("train", "settings", "finetune_settings", "evaluate", "pipeline"), "nowhere:nothing")
    here = {"freeze": f"{__name__}:freeze", "rewrites": f"{__name__}:rewrites", "checkpoint": "seed.txt"}
    return Entry(name="fake", title="t", task="none", **parts | here | changes)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "seed.txt").write_text("1")
    np.savez(path / SAMPLES, x=samples())
    card = Card("mine", "fake", "of a test", (), {"preprocessing": {"mean": 0}})
    write_json(path / "card.json", card.to_json())
    return ModelFolder(path, card, entry())


def outcome(folder, **options):
    return "".join(each[0] for each in build(folder, **options).values())  # m(ade), k(ept) or g(iven), in order


# --- stages


def test_every_stage_is_made_once(folder):
    assert build(folder) == dict.fromkeys(ROAD, "made")
    assert build(folder) == dict.fromkeys(ROAD, "kept")
    assert (folder.path / "frozen.log").read_text() == "frozen\n"
    record = json.loads((folder.path / RECORD).read_text())
    assert list(record) == list(ROAD)
    assert (
        record["fp32.onnx"]["inputs"] == {"seed.txt": sha256(folder.path / "seed.txt")}
        and record["fp32.onnx"]["nodes"] == 4
    )
    assert record["rewritten.onnx"]["operators"]["after"] == {"Gemm": 1, "MatMul": 1, "Relu": 1}
    assert (record["calibration.json"]["observer"], record["calibration.json"]["samples"]) == ("auto", 50)
    assert record["int8.onnx"]["precisions"] == {"int8": 3} and record["int8.onnx"]["seconds"] >= 0
    report = json.loads((folder.path / QUANTIZATION).read_text())
    assert [each["precision"] for each in report["operators"]] == ["int8"] * 3


def test_the_int8_model_computes_what_the_float_one_does(folder):
    build(folder)
    float32, int8 = (run(io.load(folder.path / name), x=samples())["y"] for name in ("fp32.onnx", "int8.onnx"))
    assert 0 < np.abs(int8 - float32).max() < 0.05 * np.abs(float32).max()


def test_building_stops_where_it_is_told(folder):
    assert build(folder, until="rewritten.onnx") == {"fp32.onnx": "made", "rewritten.onnx": "made"}
    assert not (folder.path / "calibration.json").exists()
    assert folder.ensure("int8.onnx").is_file()
    assert outcome(folder) == "kkkk"


def test_force_makes_everything_again(folder):
    build(folder)
    before = {name: (folder.path / name).read_bytes() for name in ROAD}
    assert outcome(folder, force=True) == "mmmm"
    assert before == {name: (folder.path / name).read_bytes() for name in ROAD}  # the same bytes


def edit_record(path, stage, change):
    """Change what build.json says of a stage."""
    record = json.loads((path / RECORD).read_text())
    write_json(path / RECORD, {**record, stage: change(record[stage])})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: (path / "seed.txt").write_text("2"), "mmmm"),
        (lambda path: (path / "fp32.onnx").unlink(), "mkkk"),  # made again with the same bytes: what follows stands
        (lambda path: (path / "rewritten.onnx").unlink(), "kmkk"),
        (lambda path: (path / "calibration.json").unlink(), "kkmk"),
        (lambda path: (path / "int8.onnx").unlink(), "kkkm"),
        (
            lambda path: (path / "calibration.json").write_text((path / "calibration.json").read_text() + " "),
            "kkmk",
        ),  # damaged
        (lambda path: (path / "fp32.onnx").write_bytes((path / "fp32.onnx").read_bytes()[:-9]), "mkkk"),
        (lambda path: (path / "int8.onnx").write_bytes(b""), "kkkm"),
        (lambda path: (path / RECORD).write_text("null"), "mmmm"),
        (lambda path: (path / RECORD).write_text("[1]"), "mmmm"),
        (lambda path: (path / RECORD).write_text((path / RECORD).read_text()[:-9]), "mmmm"),
        (lambda path: edit_record(path, "int8.onnx", lambda said: 3), "kkkm"),
        (lambda path: edit_record(path, "int8.onnx", lambda said: {**said, "recipe": [1]}), "kkkm"),
        (
            lambda path: edit_record(path, "int8.onnx", lambda said: {**said, "recipe": {**said["recipe"], "bits": 4}}),
            "kkkm",
        ),
        (lambda path: edit_record(path, "calibration.json", lambda said: {**said, "observer": [1]}), "kkmk"),
        (lambda path: edit_record(path, "rewritten.onnx", lambda said: {"sha256": said["sha256"]}), "kmkk"),
        (lambda path: (path / RECORD).unlink(), "mmmm"),
        (lambda path: (path / SAMPLES).unlink(), "kkkk"),  # not needed any more
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
        patch.setattr(io, "save", lambda model, path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build(folder)
    assert not (folder.path / "rewritten.onnx").exists()
    assert outcome(folder) == "kmmm"


def test_a_table_of_another_graph_is_made_anew(folder, monkeypatch):
    build(folder)
    digest = io.digest
    monkeypatch.setattr(io, "digest", lambda model: digest(model)[::-1])  # as a change of its code does
    monkeypatch.setattr(stages, "_reader", lambda: "changed")
    assert outcome(folder) == "kkmm"
    assert outcome(folder) == "kkkk"


def test_a_complete_folder_may_be_read_only(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(filelock.FileLock, "acquire", lambda lock, **_: refuse(lock.lock_file))
        with pytest.raises(
            RequestError, match=r"cannot write .*model: Permission denied; copy the model to a folder you may write"
        ):
            build(folder)
    build(folder)
    monkeypatch.setattr(filelock.FileLock, "acquire", lambda lock, **_: refuse(lock.lock_file))
    assert outcome(folder) == "kkkk" and folder.ensure("int8.onnx").is_file()


def test_a_missing_checkpoint_is_named(folder):
    (folder.path / "seed.txt").unlink()
    with pytest.raises(
        RequestError, match=r"seed\.txt is missing, fp32\.onnx is made from it; train or download the model again"
    ):
        build(folder)


def test_missing_samples_are_named(folder):
    (folder.path / SAMPLES).unlink()
    with pytest.raises(
        RequestError, match=r"holds no calibration\.npz; calibrate on your data with: zoo calibrate .* --data FILE"
    ):
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
    files = tuple(
        CardFile(name, (folder.path / name).stat().st_size, sha256(folder.path / name), None) for name in names
    )
    return ModelFolder(folder.path, Card("mine", "fake", "of a test", files, folder.card.details), folder.entry)


def test_files_of_the_card_are_given(folder):
    build(folder)
    model_ = io.load(folder.path / "fp32.onnx")
    edit.compress_fp16(model_)
    io.save(model_, folder.path / HALF)
    for name in ("fp32.onnx", "rewritten.onnx", "seed.txt", RECORD):
        (folder.path / name).unlink()
    given = shipped(folder, HALF, "int8.onnx", "calibration.json")
    assert build(given) == {
        "fp32.onnx": "made",
        "rewritten.onnx": "made",
        "calibration.json": "given",
        "int8.onnx": "given",
    }
    w = query.constant(io.load(given.path / "fp32.onnx").graph.initializers["w"])
    np.testing.assert_array_equal(w, weights(1)["w"].astype(np.float16).astype(np.float32))


def test_a_given_file_is_not_touched(folder):
    (folder.path / "int8.onnx").write_text("as it came")
    assert shipped(folder, "int8.onnx").ensure("int8.onnx").read_text() == "as it came"
    assert not (folder.path / "fp32.onnx").exists()  # nor is anything before it made


def test_a_given_file_that_is_not_the_one_of_the_card_is_named(folder):
    build(folder)
    model_ = io.load(folder.path / "fp32.onnx")
    edit.compress_fp16(model_, minimum=8)
    io.save(model_, folder.path / HALF)
    given = shipped(folder, HALF, "int8.onnx")
    for name, use in (
        ("int8.onnx", lambda: given.ensure("int8.onnx")),
        (HALF, lambda: given.ensure("fp32.onnx")),
    ):
        body = bytearray((folder.path / name).read_bytes())
        body[50] ^= 1
        (folder.path / name).write_bytes(body)
        with pytest.raises(
            RequestError, match=rf"{name} is not the file that its card lists \(sha256 .*; download or copy"
        ):
            use()
    (folder.path / "int8.onnx").unlink()
    with pytest.raises(RequestError, match=r"holds no int8\.onnx"):
        given.ensure("int8.onnx")


# --- recipes


def observer_and_bits(folder):
    table = json.loads((folder.path / "calibration.json").read_text())
    stored = io.load(folder.path / "int8.onnx").graph.initializers
    return table["observer"], max(
        int(np.abs(query.constant(v)).max()) for k, v in stored.items() if k.endswith("w.quantized")
    )


def test_a_recipe_makes_int8_anew_and_is_kept(folder):
    build(folder)
    assert folder.recipe == QuantRecipe() and observer_and_bits(folder) == ("auto", 127)
    recipe = QuantRecipe(reduced_range=True, keep_float=("y",))
    set_recipe(folder, recipe)
    assert folder.recipe == recipe and outcome(folder) == "kkkk"
    assert observer_and_bits(folder) == ("auto", 63)
    (folder.path / "seed.txt").write_text("2")
    assert outcome(folder) == "mmmm" and folder.recipe == recipe and observer_and_bits(folder) == ("auto", 63)


def test_another_observer_calibrates_anew(folder):
    build(folder)
    set_recipe(folder, QuantRecipe(observer="kl"))
    assert outcome(folder) == "kkkk" and observer_and_bits(folder)[0] == "kl"
    corrected = CalibrationTable.load(folder.path / "calibration.json")
    set_recipe(folder, QuantRecipe(observer="kl", reduced_range=True))
    again = CalibrationTable.load(folder.path / "calibration.json")
    assert again.tensors == corrected.tensors and again.recipe["reduced_range"]  # biases were corrected anew
    assert observer_and_bits(folder) == ("kl", 63)
    table = (folder.path / "calibration.json").stat()
    set_recipe(folder, QuantRecipe(observer="kl", reduced_range=True, quantize_tables=True))
    assert (folder.path / "calibration.json").stat() == table  # it stands


def test_a_recipe_before_anything_was_built(folder):
    set_recipe(folder, QuantRecipe(observer="kl"))
    assert outcome(folder) == "kkkk" and observer_and_bits(folder)[0] == "kl"


@pytest.mark.parametrize("observer", ["auto", "kl"])
def test_a_recipe_that_fails_changes_nothing(folder, observer):
    build(folder)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(RequestError, match="keep_float 'hiden_0' matches no operator"):
        set_recipe(folder, QuantRecipe(keep_float=("hiden_0",), observer=observer))
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    assert folder.recipe == QuantRecipe() and outcome(folder) == "kkkk"


def calibrated_on_own_data(folder, observer):
    """As `zoo calibrate FOLDER --data FILE --observer ...` leaves a folder."""
    from pipelines.quantization.calibrate import calibrate

    folder.ensure("rewritten.onnx")
    table = calibrate(io.load(folder.path / "rewritten.onnx"), [{"x": 2 * samples()}], observer)
    stages.set_table(folder, table, own_data=True)


def test_own_calibration_is_used_with_its_observer(folder):
    calibrated_on_own_data(folder, "kl")
    own = (folder.path / "calibration.json").read_bytes()
    assert folder.recipe == QuantRecipe(observer="kl")
    set_recipe(folder, folder.recipe)  # what `zoo quantize FOLDER` does
    assert outcome(folder) == "kkkk"
    assert (folder.path / "calibration.json").read_bytes() == own
    assert json.loads((folder.path / QUANTIZATION).read_text())["recipe"]["observer"] == "kl"


@pytest.mark.parametrize(
    ("act", "observer"),
    [
        (lambda folder: set_recipe(folder, QuantRecipe(observer="kl")), "kl"),
        (lambda folder: build(folder, force=True), "auto"),
        (lambda folder: (folder.path / "calibration.json").unlink() or build(folder), "auto"),
        (lambda folder: (folder.path / "seed.txt").write_text("2") and build(folder), "auto"),
    ],
    ids=["another observer", "force", "deleted", "another graph"],
)
def test_own_calibration_is_not_thrown_away(folder, act, observer):
    calibrated_on_own_data(folder, "auto")
    command = rf"run: zoo calibrate .*model --data FILE --observer {observer}$"
    with pytest.raises(RequestError, match=rf"was calibrated on own data, .*; {command}"):
        act(folder)
    calibrated_on_own_data(folder, observer)  # which mends it
    assert outcome(folder) == "kkkm" and observer_and_bits(folder)[0] == observer


def test_one_process_at_a_time_writes_the_record(folder, monkeypatch):
    """What changes build.json holds the lock while it does."""
    held = []
    write = stages.files.write_json
    lock = filelock.FileLock(folder.path / ".build.lock")

    def watched(path, value):
        if path.name == RECORD:
            try:
                lock.acquire(timeout=0)
                lock.release()
                held.append(False)
            except filelock.Timeout:
                held.append(True)
        return write(path, value)

    build(folder, until="rewritten.onnx")
    monkeypatch.setattr(stages.files, "write_json", watched)
    calibrated_on_own_data(folder, "auto")
    set_recipe(folder, QuantRecipe(reduced_range=True))
    assert held == [True, True]


# --- folders


def test_a_folder_is_opened_with_its_entry(folder):
    opened = open_folder(folder.path, {"fake": entry()}.__getitem__)
    assert opened == folder and opened.preprocessing == {"mean": 0} and opened.record == {}


def test_preprocessing_that_is_no_object_is_named_with_its_card(folder):
    write_json(folder.path / "card.json", {**folder.card.to_json(), "preprocessing": [1]})
    with pytest.raises(RequestError, match=r"card\.json: preprocessing is \[1\]; wanted an object"):
        open_folder(folder.path, {"fake": entry()}.__getitem__)


def test_an_interrupted_training_can_go_on(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(
        RequestError, match=r"training that was interrupted; go on with: zoo train \.\.\. -o .* --resume"
    ):
        open_folder(tmp_path, {}.__getitem__)


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


def test_another_form_of_a_file_is_derived_once_for_each_source_and_form(folder):
    calls = []

    def make(found):
        calls.append(found)
        return found

    path = stages.derived_graph(folder, "int8.onnx", "other", "1", make)
    assert path.parent == folder.path
    assert path.name.startswith("int8.other-")
    assert stages.derived_graph(folder, "int8.onnx", "other", "1", make) == path
    assert len(calls) == 1
    newer = stages.derived_graph(folder, "int8.onnx", "other", "2", make)
    assert not path.exists()  # nobody asks for it again
    (folder.path / "seed.txt").write_text("2")
    assert stages.derived_graph(folder, "int8.onnx", "other", "2", make) != newer
    last = stages.derived_graph(folder, "int8.onnx", "other", "2", make)
    assert sorted(folder.path.glob("int8.other-*")) == [last, mapped(last), derived._identities(last)]


@pytest.mark.parametrize("part", ["graph", "weights", "identities"])
def test_another_form_that_has_changed_since_is_derived_anew(folder, part):
    made = []

    def make(found):
        made.append(found)
        weight = ir.tensor(np.arange(8192, dtype=np.float32), name="large")
        found.graph.initializers["large"] = ir.Value(name="large", const_value=weight)
        found.graph.initializers["large"].const_value = weight
        return found

    def derive():
        return stages.derived_graph(folder, "int8.onnx", "other", "1", make)

    path = derive()
    files = {"graph": path, "weights": mapped(path), "identities": derived._identities(path)}
    content = {name: each.read_bytes() for name, each in files.items()}
    os.utime(files["weights"])  # another time, the same bytes
    assert derive() == path and len(made) == 1
    damaged = bytearray(content[part])
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    files[part].write_bytes(damaged)
    assert derive() == path and len(made) == 2
    assert path.read_bytes() == content["graph"] and mapped(path).read_bytes() == content["weights"]


def test_where_the_folder_may_not_be_written_the_cache_is(folder, monkeypatch, tmp_path):
    build(folder)
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "home"))
    save = io.save_mapped

    def refuse(found, path, least):
        if path.parent == folder.path:
            raise PermissionError(13, "Permission denied")
        return save(found, path, least)

    monkeypatch.setattr(io, "save_mapped", refuse)
    path = stages.derived_graph(folder, "int8.onnx", "other", "1", lambda found: found)
    assert path.is_relative_to(tmp_path / "home")
    assert stages.derived_graph(folder, "int8.onnx", "other", "1", lambda found: found) == path


def test_a_table_of_own_data_outlives_a_damaged_record(folder, caplog):
    stages.build(folder)
    (folder.path / RECORD).write_text("{")
    stages.build(folder)  # the very same table is made anew: nothing to keep
    assert not (folder.path / stages.UNTOLD).exists() and not caplog.records
    calibrated_on_own_data(folder, "auto")
    own = (folder.path / "calibration.json").read_bytes()
    (folder.path / RECORD).write_text("{")
    stages.build(folder)
    assert (folder.path / stages.UNTOLD).read_bytes() == own != (folder.path / "calibration.json").read_bytes()
    assert [each.getMessage() for each in caplog.records if "the one found is kept as" in each.getMessage()]
