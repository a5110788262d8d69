"""The calibrator: batches, progress and the saved int8 model."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibrator import Calibrator
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

WEIGHTS = {"w": normals(0)(8, 5), "v": normals(2)(5, 3)}
TEXT = "(float[n,8] x) => (float[n,3] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }"


def batches(rng):
    return [{"x": rng.standard_normal((count, 8)).astype(np.float32)} for count in (40, 1, 59)]


def test_three_lines(rng, tmp_path):
    samples = batches(rng)
    source = io.save(model(TEXT, **WEIGHTS), tmp_path / "model.onnx")
    calibrator = Calibrator(source)
    for batch in samples:
        calibrator.feed(batch)
    report = calibrator.save(tmp_path / "int8.onnx")
    assert report.counts()["int8"] == 3 and report.recipe.observer == "auto" == calibrator.table().observer
    x = np.concatenate([batch["x"] for batch in samples])
    expected, actual = (run(io.load(tmp_path / name), x=x)["y"] for name in ("model.onnx", "int8.onnx"))
    assert 0 < np.abs(actual - expected).max() < 0.05 * np.abs(expected).max()
    first = (tmp_path / "int8.onnx").read_bytes()
    calibrator.save(tmp_path / "int8.onnx")
    assert (tmp_path / "int8.onnx").read_bytes() == first


def test_a_model_in_memory_is_left_as_it_is(rng, tmp_path):
    net = model(TEXT, **WEIGHTS)
    before = io.digest(net)
    calibrator = Calibrator(net, QuantRecipe(observer="kl", symmetric=True), max_memory="100MB")
    calibrator.feed(batches(rng)[0])
    calibrator.save(tmp_path / "int8.onnx")
    x = calibrator.table().tensors["x"]
    assert io.digest(net) == before and x.low == -x.high and x.method == "kl"


def test_it_is_what_quantizing_the_file_on_these_samples_gives(rng, tmp_path):
    samples, net = batches(rng), model(TEXT, **WEIGHTS)
    for recipe in (QuantRecipe(), QuantRecipe(search=True), QuantRecipe(correct=False)):
        calibrator = Calibrator(net, recipe)
        for batch in samples:
            calibrator.feed(batch)
        calibrator.save(tmp_path / "int8.onnx")
        table = auto_calibrate(calibrator.model, recipe, samples)
        assert bool(table.recipe) == recipe.correct and calibrator.table() == table
        io.save(quantize(calibrator.model, recipe, table)[0], tmp_path / "expected.onnx")
        assert (tmp_path / "int8.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes()


def test_a_time_budget_that_is_spent_leaves_corrections_out(rng, caplog):
    calibrator = Calibrator(model(TEXT, **WEIGHTS), seconds=0.0)
    calibrator.feed(batches(rng)[0])
    assert not calibrator.table().rounding and "the time budget of 0 s" in caplog.text


def test_nothing_fed(tmp_path):
    with pytest.raises(RequestError, match="^no calibration samples; pass at least one$"):
        Calibrator(model(TEXT, **WEIGHTS)).save(tmp_path / "int8.onnx")
    assert not (tmp_path / "int8.onnx").exists()
