"""Opening models by the name of an engine."""

import numpy as np
import pytest
from helpers.rewriting import model

from pipelines.core.errors import RequestError
from pipelines.engines import catalog, plan, stock
from pipelines.graph import io

FEEDS = {"x": np.arange(-6, 6, dtype=np.float32).reshape(4, 3)}


@pytest.fixture
def path(tmp_path):
    return io.save(model("(float[n,3] x) => (float[n,3] y) { y = Relu(x) }"), tmp_path / "m.onnx")


@pytest.mark.parametrize("engine", ["auto", *stock.available()])
def test_a_model_file_in_every_stock_engine_and_the_quickest(path, engine):
    session = catalog.load(path, engine)
    np.testing.assert_array_equal(session.run(FEEDS)["y"], np.maximum(FEEDS["x"], 0))
    assert session.engine in stock.available() and session.threads == 1 and list(session.inputs) == ["x"]


def test_a_plan_file_is_opened_by_the_same_function(path, tmp_path):
    candidates = [plan.Candidate(name, "fp32", path) for name in stock.available()]
    plan.build(candidates, [FEEDS], [1], tmp_path / "m.plan", catalog.load)
    session = catalog.load(tmp_path / "m.plan")
    np.testing.assert_array_equal(session.run(FEEDS)["y"], np.maximum(FEEDS["x"], 0))
    assert session.engine == "plan" and session.executed(FEEDS)
    with pytest.raises(
        RequestError, match="is a plan file, which determines the engine; leave out the engine openvino"
    ):
        catalog.load(tmp_path / "m.plan", "openvino")


@pytest.mark.parametrize("engine", ["auto", "native", "onnxruntime"])
def test_a_missing_file(tmp_path, engine):
    with pytest.raises(RequestError, match="^no model file at "):
        catalog.load(tmp_path / "none.onnx", engine)
