"""Build stages of a small model."""

import json
import multiprocessing
import os
import shutil
from dataclasses import replace

import filelock
import numpy as np
import pytest
from helpers.rewriting import run
from helpers.three_lines import entry, outcome, samples, weights

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.core.files import sha256, write_json
from pipelines.graph import edit, io, query
from pipelines.models import stages
from pipelines.models.folder import ModelFolder, open_folder
from pipelines.models.hub import Card, CardFile
from pipelines.models.record import BUILD_STAGES, HALF, QUANTIZATION, RECORD, SAMPLES
from pipelines.models.stages import build

# --- stages


def test_every_stage_is_made_once(folder):
    assert build(folder) == dict.fromkeys(BUILD_STAGES, "made")
    assert build(folder) == dict.fromkeys(BUILD_STAGES, "kept")
    assert (folder.path / "frozen.log").read_text() == "frozen\n"
    record = json.loads((folder.path / RECORD).read_text())
    assert list(record) == list(BUILD_STAGES)
    assert (
        record["fp32.onnx"]["inputs"] == {"seed.txt": sha256(folder.path / "seed.txt")}
        and record["fp32.onnx"]["nodes"] == 4
    )
    assert record["rewritten.onnx"]["operators"]["after"] == {"Gemm": 1, "MatMul": 1, "Relu": 1}
    assert (record["calibration.json"]["observer"], record["calibration.json"]["samples"]) == ("auto", 50)
    assert record["int8.onnx"]["precisions"] == {"int8": 3} and record["int8.onnx"]["seconds"] >= 0
    report = json.loads((folder.path / QUANTIZATION).read_text())
    assert [operator["precision"] for operator in report["operators"]] == ["int8"] * 3


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
    before = {name: (folder.path / name).read_bytes() for name in BUILD_STAGES}
    assert outcome(folder, force=True) == "mmmm"
    assert before == {name: (folder.path / name).read_bytes() for name in BUILD_STAGES}  # the same bytes


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
            lambda path: (path / "calibration.json").write_text((path / "calibration.json").read_text()[:-9]),
            "kkmk",
        ),  # damaged
        (lambda path: (path / "fp32.onnx").write_bytes((path / "fp32.onnx").read_bytes()[:-9]), "mkkk"),
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
        (lambda path: edit_record(path, "int8.onnx", lambda said: {**said, "files": {"int8.onnx": 3}}), "kkkm"),
        (lambda path: edit_record(path, "int8.onnx", lambda said: {**said, "files": []}), "kkkm"),
        (lambda path: (path / RECORD).unlink(), "mmmm"),
        (lambda path: (path / SAMPLES).unlink(), "kkkk"),  # not needed any more
    ],
)
def test_only_what_is_stale_is_made(folder, change, expected):
    build(folder)
    change(folder.path)
    assert outcome(folder) == expected
    assert outcome(folder) == "kkkk"


def other_int8(folder):
    """An int8.onnx of other weights."""
    path = folder.path.with_name("other")
    shutil.copytree(folder.path, path)
    (path / "seed.txt").write_text("2")
    other = ModelFolder(path, folder.card, folder.entry)
    build(other, force=True)
    return (path / "int8.onnx").read_bytes()


def test_an_int8_file_from_elsewhere_is_used_and_never_written_over(folder, caplog):
    build(folder)
    other, path = other_int8(folder), folder.path / "int8.onnx"
    files.write_bytes(path, other)
    assert outcome(folder) == "kkkr" and folder.ensure("int8.onnx") == path
    assert "int8.onnx is another file than build.json lists and is used as it is" in caplog.text
    (folder.path / "fp32.onnx").unlink()
    assert folder.ensure("int8.onnx") == path and not (folder.path / "fp32.onnx").exists()
    with pytest.raises(RequestError, match="the engine native would compute mine from rewritten"):
        folder.ensure("native.onnx")
    for damaged in (b"", b"no model", other[:-9]):
        files.write_bytes(path, damaged)
        for use in (lambda: build(folder), lambda: folder.ensure("int8.onnx")):
            with pytest.raises(
                RequestError, match=r"int8\.onnx is damaged .*; copy it again, or to rebuild it: zoo build"
            ):
                use()
        assert path.read_bytes() == damaged
    files.write_bytes(path, other)
    with pytest.raises(RequestError, match="the engine native"):
        build(folder, until="native.onnx")
    stages.set_recipe(folder, replace(folder.recipe, keep_float=("y",)))  # asked for: the other file is kept beside it
    assert (folder.path / "int8.found.onnx").read_bytes() == other and outcome(folder) == "kkkk"
    files.write_bytes(path, other[:-1] + other[-1:])
    assert outcome(folder, force=True) == "mmmm"
    assert (folder.path / "int8.found1.onnx").read_bytes() == other and outcome(folder) == "kkkk"
    assert not list(folder.path.glob(".*found*"))


@pytest.mark.parametrize("stage", BUILD_STAGES)
@pytest.mark.parametrize("listed", [True, False])
def test_no_valid_file_is_written_over(folder, stage, listed):
    build(folder)
    other_int8(folder)
    other = (folder.path.with_name("other") / stage).read_bytes()
    files.write_bytes(folder.path / stage, other)
    if not listed:
        (folder.path / RECORD).unlink()
    if (stage, listed) == ("int8.onnx", True):
        return  # it is used
    if (stage, listed) == ("calibration.json", False):
        build(folder)
        assert (folder.path / "calibration.found.json").read_bytes() == other
        return
    message = "is another file than" if listed else "which build.json does not list"
    with pytest.raises(RequestError, match=f"{stage}.* {message}.* zoo build .* --force"):
        build(folder)
    assert (folder.path / stage).read_bytes() == other
    build(folder, force=True)
    assert outcome(folder) == "kkkk"


@pytest.mark.parametrize("stage", BUILD_STAGES)
def test_a_build_that_was_killed_goes_on(folder, stage, monkeypatch):
    build(folder)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "_record_reports", lambda folder, said: 1 / 0)  # the file is written, the record is not
        (folder.path / "seed.txt").write_text("2")
        (folder.path / stage).unlink()
        with pytest.raises(ZeroDivisionError):
            build(folder)
    assert outcome(folder)[-1] == "m" and outcome(folder) == "kkkk"
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_bytes", lambda path, content: 1 / 0)  # nor the file
        patch.setattr(io, "save", lambda model, path: 1 / 0)
        (folder.path / "seed.txt").write_text("3")
        with pytest.raises(ZeroDivisionError):
            build(folder)
    assert outcome(folder) == "mmmm" and outcome(folder) == "kkkk"


def test_files_that_nobody_touched_are_not_read_again(folder, monkeypatch):
    build(folder)
    files._digest.cache_clear()  # as in a process of its own
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256", lambda path: pytest.fail(f"{path} is read"))
        assert outcome(folder) == "kkkk"
    table = folder.path / "calibration.json"
    content = bytearray(table.read_bytes())
    content[0] ^= 1  # of the same size
    table.write_bytes(content)
    assert outcome(folder) == "kkmk"
    os.utime(folder.path / "int8.onnx", (1, 1))  # another time, the same bytes
    assert outcome(folder) == "kkkk"
    edit_record(folder.path, "int8.onnx", lambda said: {key: said[key] for key in said if key != "files"})  # of old
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
        RequestError, match=r"seed\.txt is missing, which fp32\.onnx is built from; train or download the model again"
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
    for process in both:
        process.start()
    states = sorted(results.get(timeout=60) for _ in both)
    for process in both:
        process.join()
    assert states == [["kept"] * 4, ["made"] * 4]


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
    published = shipped(folder, HALF, "int8.onnx", "calibration.json")
    assert build(published) == {
        "fp32.onnx": "made",
        "rewritten.onnx": "made",
        "calibration.json": "given",
        "int8.onnx": "given",
    }
    w = query.constant(io.load(published.path / "fp32.onnx").graph.initializers["w"])
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
    published = shipped(folder, HALF, "int8.onnx")
    for name, use in (
        ("int8.onnx", lambda: published.ensure("int8.onnx")),
        (HALF, lambda: published.ensure("fp32.onnx")),
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
        published.ensure("int8.onnx")


# --- folders


def test_a_folder_is_opened_with_its_entry(folder):
    opened = open_folder(folder.path, {"fake": entry()}.__getitem__)
    assert opened == folder and opened.preprocessing == {"mean": 0} and opened.record == {}


def test_preprocessing_that_is_no_object_is_named_with_its_card(folder):
    write_json(folder.path / "card.json", {**folder.card.to_json(), "preprocessing": [1]})
    with pytest.raises(RequestError, match=r"card\.json: preprocessing is \[1\]; expected an object"):
        open_folder(folder.path, {"fake": entry()}.__getitem__)


def test_an_interrupted_training_can_go_on(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(RequestError, match=r"an interrupted training; resume it with: zoo train \.\.\. -o .* --resume"):
        open_folder(tmp_path, {}.__getitem__)


def test_a_folder_without_a_card(tmp_path):
    with pytest.raises(RequestError, match=r"is no model folder \(it has no card\.json\)"):
        open_folder(tmp_path, {}.__getitem__)
