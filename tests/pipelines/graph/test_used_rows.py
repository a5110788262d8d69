"""Lookup tables cut to the rows that samples read."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from pipelines.graph import io, large_weights, reference_session
from pipelines.quantization import QuantRecipe, make_table
from pipelines.quantization.ptq import make_table_of_file

IDS = [{"ids": np.arange(start, start + 24).reshape(4, 6) * 97 % 900 // 7 * 7} for start in (0, 24, 48)]


def network(extra=()):
    nodes = [
        onnx.helper.make_node("Gather", ["table", "ids"], ["x"], "lookup"),
        onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "layer"),
        *extra,
    ]
    rng = np.random.default_rng(0)
    weights = {"table": rng.normal(size=(1000, 8)), "w": rng.normal(size=(8, 5))}
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n", "t"])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", "t", 5])],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9))


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    monkeypatch.setattr(large_weights, "LARGE_BYTES", 1000)


def outputs(model, samples):
    session = reference_session.session(model, "the test needs")
    return [reference_session.run(session, batch)[0] for batch in samples]


def test_the_copy_computes_the_same():
    model = network()
    cut, samples = large_weights.used_rows(model, iter(IDS))
    rows = cut.graph.initializers["table"].const_value.shape[0]
    assert rows == len(np.unique(np.concatenate([batch["ids"] for batch in IDS]))) < 150
    assert model.graph.initializers["table"].const_value.shape[0] == 1000
    for x, y in zip(outputs(model, IDS), outputs(cut, samples), strict=True):
        assert np.array_equal(x, y)


def test_inputs_that_count_otherwise_are_left():
    model = network([onnx.helper.make_node("Cast", ["ids"], ["f"], "cast", to=onnx.TensorProto.FLOAT)])
    assert large_weights.used_rows(model, IDS) == (model, IDS)


def test_invalid_ids_are_left_to_the_run():
    cut, samples = large_weights.used_rows(network(), [{"ids": np.array([[5000]])}])
    assert cut.graph.initializers["table"].const_value.shape[0] == 1000
    assert next(iter(samples))["ids"][0, 0] == 5000


def test_the_calibration_is_that_of_the_whole_table(tmp_path):
    model, recipe = network(), QuantRecipe(smooth=True)
    whole = make_table(model, recipe, IDS)
    cut = make_table_of_file(io.save(model, tmp_path / "model.onnx"), recipe, IDS)
    assert cut.graph == whole.graph == io.digest(model)
    assert (cut.tensors, cut.bias, cut.rounding) == (whole.tensors, whole.bias, whole.rounding)
