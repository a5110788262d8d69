"""The shipped Wide & Deep as a program: how far it moves probabilities, and AUC on real rows."""

import numpy as np
import pytest

import zoo
from pipelines.analysis.metrics import auc
from pipelines.graph import io
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.quantization.calibration.table import CalibrationTable
from zoo.recommenders.lowering.lower import lower

pytestmark = pytest.mark.usefixtures("caches")
NAME = "wide-deep-criteo"
BOUND = 0.003


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """(the folder, its program, rows -> probabilities in float)."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ZOO_HOME", str(tmp_path_factory.mktemp("shipped") / "home"))
    folder = zoo.load(NAME)
    table = CalibrationTable.load(folder.path / "calibration.json")
    result, report = lower(io.load(folder.path / "rewritten.onnx"), table, folder.recipe)
    assert report["fold"] and report["forms"]
    pipeline = zoo.pipeline(NAME, precision="fp32", engine="onnxruntime")
    yield folder, click_program(result.graph[0]), pipeline
    patch.undo()


def moved(shipped, rows):
    """(probabilities in float, those of the program)."""
    _, program, pipeline = shipped
    batch = pipeline.preprocess(rows)
    parts = [
        (batch["ids"][start : start + 512], batch["numbers"][start : start + 512])
        for start in range(0, len(batch["ids"]), 512)
    ]
    scores = np.concatenate([reference.run(program, *part)[0].ravel() for part in parts])
    return pipeline.predict(batch)["probability"].ravel(), scores


def test_the_shipped_model_on_its_sample(shipped):
    plain, native = moved(shipped, shipped[2].example(2000))
    assert len(plain) == 2000 and np.abs(native - plain).max() <= BOUND


@pytest.mark.slow
def test_the_shipped_model_on_its_whole_sample(shipped):
    plain, native = moved(shipped, shipped[0].path / "sample.tsv.gz")
    assert np.abs(native - plain).max() <= BOUND


@pytest.mark.data
def test_the_shipped_model_on_real_rows(shipped, shared):
    path = shared / "data" / "criteo" / "criteo_10390.tsv"
    plain, native = moved(shipped, path)
    labels = np.array([line[:1] == b"1" for line in path.read_bytes().splitlines()], np.float32)
    assert np.abs(native - plain).max() <= BOUND
    assert abs(auc(labels, native) - auc(labels, plain)) <= 0.0002
