"""Recipes: what they make anew, what a failed one leaves, and calibrations on own data."""

import json

import filelock
import numpy as np
import pytest
from helpers.three_lines import outcome, samples

from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.models import stages
from pipelines.models.record import QUANTIZATION, RECORD
from pipelines.models.stages import build, set_recipe
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.recipe import QuantRecipe


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
    from pipelines.quantization.calibration.calibrate import calibrate

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


def test_a_table_of_own_data_outlives_a_damaged_record(folder, caplog):
    stages.build(folder)
    (folder.path / RECORD).write_text("{")
    stages.build(folder)  # the very same table is made anew: nothing to keep
    assert not (folder.path / "calibration.found.json").exists() and not caplog.records
    calibrated_on_own_data(folder, "auto")
    own = (folder.path / "calibration.json").read_bytes()
    (folder.path / RECORD).write_text("{")
    stages.build(folder)
    assert (
        (folder.path / "calibration.found.json").read_bytes() == own != (folder.path / "calibration.json").read_bytes()
    )
    assert [record.getMessage() for record in caplog.records if "the previous file is kept as" in record.getMessage()]
