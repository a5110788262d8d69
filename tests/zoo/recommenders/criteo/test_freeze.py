"""Freezing of Wide & Deep, and the passes that prune a TensorFlow graph."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json

freezing = pytest.importorskip(
    "zoo.recommenders.criteo.freeze", reason="needs the train extra"
)  # before tensorflow, which it quiets
training = pytest.importorskip("zoo.recommenders.criteo.train")
tf = pytest.importorskip("tensorflow")
freeze, load_model = freezing.freeze, freezing.load_model
remove_training_ops, remove_unused_nodes, remove_attributes = (
    freezing.remove_training_ops,
    freezing.remove_unused_nodes,
    freezing.remove_attributes,
)

FIELDS = 4
SIZES = {"numeric": 3, "categorical": FIELDS, "buckets": 20}
CONFIG = replace(
    training.TRAIN, **SIZES, embedding_size=4, hidden=(8, 6), epochs=1, batch_size=32, validation=0.25, refit=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model, trained for one epoch and frozen."""
    folder = tmp_path_factory.mktemp("frozen") / "model"
    random = np.random.default_rng(0)
    kinds, numbers = random.integers(0, 9, (200, FIELDS)), random.integers(0, 99, (200, 3))
    rows = [
        "\t".join(map(str, [i % 2, *numbers[i], *(f"{kind}" * 80 for kind in kinds[i])])) for i in range(200)
    ]  # raw rows, long ones
    training.train(rows, folder, config=CONFIG)
    freeze(folder)
    return folder


def some_inputs(rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(rows)
    return {"ids": random.integers(0, 20, (rows, FIELDS), np.int32), "numbers": random.random((rows, 3), np.float32)}


@pytest.mark.parametrize("rows", [1, 7])
def test_fp32_onnx_equals_keras(folder, rows):
    inputs = some_inputs(rows)
    session = onnxruntime.InferenceSession(folder / "fp32.onnx", providers=["CPUExecutionProvider"])
    expected = load_model(folder)([inputs["ids"], inputs["numbers"]], training=False).numpy()
    np.testing.assert_allclose(session.run(None, inputs)[0], expected, atol=1e-5, rtol=0)
    assert expected.std() > 0 or rows == 1


def test_openvino_reads_fp32_onnx(folder):
    import openvino

    inputs = some_inputs(7)
    compiled = openvino.Core().compile_model(folder / "fp32.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    expected = load_model(folder)([inputs["ids"], inputs["numbers"]], training=False).numpy()
    np.testing.assert_allclose(compiled(inputs)[0], expected, atol=1e-5, rtol=0)


def test_frozen_pb_runs_alone(folder):
    graph = tf.compat.v1.GraphDef.FromString((folder / "frozen.pb").read_bytes())
    inputs = some_inputs(7)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph, name="")
        got = session.run("probability:0", {"ids:0": inputs["ids"], "numbers:0": inputs["numbers"]})
    np.testing.assert_allclose(
        got, load_model(folder)([inputs["ids"], inputs["numbers"]], training=False).numpy(), atol=1e-6
    )
    assert [node.name for node in graph.node if node.op in ("Identity", "NoOp", "VarHandleOp", "ReadVariableOp")] == [
        "probability"
    ]
    assert {variable.path for variable in load_model(folder).weights} <= {node.name for node in graph.node}


def test_the_signature(folder):
    model = onnx.load(folder / "fp32.onnx")
    onnx.checker.check_model(model, full_check=True)

    def said(value):
        kind = value.type.tensor_type
        return value.name, kind.elem_type, [dim.dim_param or dim.dim_value for dim in kind.shape.dim]

    assert [said(value) for value in model.graph.input] == [
        ("ids", onnx.TensorProto.INT32, ["batch", FIELDS]),
        ("numbers", onnx.TensorProto.FLOAT, ["batch", 3]),
    ]
    assert [said(value) for value in model.graph.output] == [("probability", onnx.TensorProto.FLOAT, ["batch", 1])]
    assert [(each.domain, each.version >= 17) for each in model.opset_import] == [("", True)]


def test_the_operators(folder):
    model = onnx.load(folder / "fp32.onnx")
    counts = read_json(folder / "freeze.json")["operators"]
    assert counts == {
        "Gather": 8,
        "Add": 7,
        "Slice": 4,
        "Squeeze": 4,
        "MatMul": 3,
        "Relu": 2,
        "Concat": 1,
        "Sigmoid": 1,
    }
    assert len(model.graph.node) == sum(counts.values())
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)
    assert {"deep/C1/Gather", "wide/C4/Gather", "hidden_0/MatMul", "hidden_0/Add", "deep_logit/MatMul"} <= set(names)
    assert {
        value.type.tensor_type.shape.dim[0].dim_param
        for value in model.graph.value_info
        if value.name.endswith("Gather:0")
    } == {"batch"}


def test_weights_are_the_initializers_as_they_are(folder):
    initializers = {
        each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(folder / "fp32.onnx").graph.initializer
    }
    weights = {variable.path: variable.numpy() for variable in load_model(folder).weights}
    for name, array in weights.items():
        np.testing.assert_array_equal(initializers[name], array)
    assert all(array.dtype.kind == "i" for name, array in initializers.items() if name not in weights)


def test_values_of_the_weights_do_not_change_the_graph(folder):
    """Zero biases are not dropped, and equal tables not merged."""
    model = load_model(folder)
    for variable in model.weights:
        variable.assign(np.zeros(variable.shape))
    graph = freezing.to_graph(model)
    converted = freezing.to_onnx(graph, {variable.path: variable.numpy() for variable in model.weights})
    known = onnx.load(folder / "fp32.onnx").graph
    assert [(node.op_type, node.name) for node in converted.graph] == [(node.op_type, node.name) for node in known.node]
    assert sorted(converted.graph.initializers) == sorted(each.name for each in known.initializer)


def test_the_same_weights_give_the_same_bytes(folder):
    names = ("fp32.onnx", "frozen.pb", "freeze.json")
    before = [(folder / name).read_bytes() for name in names]
    freeze(folder)  # TensorFlow and tf2onnx count their names on within one process
    assert [(folder / name).read_bytes() for name in names] == before


def test_the_report(folder):
    report = freeze(folder)
    assert report == read_json(folder / "freeze.json")
    assert report["bytes"]["fp32.onnx"] == (folder / "fp32.onnx").stat().st_size
    assert report["nodes"]["frozen.pb"] == len(
        tf.compat.v1.GraphDef.FromString((folder / "frozen.pb").read_bytes()).node
    )
    assert (
        report["nodes"]["tensorflow"] - report["removed"]["training_ops"] - report["removed"]["unused_nodes"]
        == report["nodes"]["frozen.pb"]
    )
    assert report["removed"]["training_ops"] > 0


def test_nothing_is_said(folder, capfd):
    freeze(folder)
    assert capfd.readouterr() == ("", "")


def test_a_folder_without_a_model_is_refused(tmp_path, folder):
    with pytest.raises(RequestError, match=r"train\.json"):
        freeze(tmp_path)
    (tmp_path / "train.json").write_bytes((folder / "train.json").read_bytes())
    (tmp_path / "model.weights.h5").write_bytes(b"no weights")
    with pytest.raises(RequestError) as caught:
        freeze(tmp_path)
    assert "train it again" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "fp32.onnx").exists()


def test_a_transposed_weight_is_noticed(folder, monkeypatch):
    import tf2onnx

    convert = tf2onnx.convert.from_graph_def

    def transposing(*arguments, **options):
        proto, more = convert(*arguments, **options)
        for each in proto.graph.initializer:
            if list(each.dims) == [6, 1]:
                each.dims[:] = [1, 6]
        return proto, more

    monkeypatch.setattr(tf2onnx.convert, "from_graph_def", transposing)
    with pytest.raises(ZooError, match="deep_logit/kernel"):
        freeze(folder)


# ------------------------------------------------------------------------------------------------------------- pruning


def graph_of(text: str):
    return text_format.Parse(text, tf.compat.v1.GraphDef())


def nodes(graph) -> dict[str, list[str]]:
    return {node.name: list(node.input) for node in graph.node}


TRAINING = """
node { name: "x" op: "Placeholder" }
node { name: "check" op: "CheckNumerics" input: "x:0" }
node { name: "assert" op: "Assert" input: "x" }
node { name: "stop" op: "StopGradient" input: "check" input: "^assert" }
node { name: "both" op: "IdentityN" input: "stop" input: "x" }
node { name: "step" op: "NoOp" input: "^assert" }
node { name: "relu" op: "Relu" input: "both:1" input: "^step" }
node { name: "add" op: "AddV2" input: "stop:0" input: "relu" }
node { name: "out" op: "Identity" input: "add" }
"""


def test_training_operators_go():
    graph = graph_of(TRAINING)
    assert remove_training_ops(graph, {"out"}) == 4
    assert nodes(graph) == {"x": [], "both": ["x:0", "x"], "relu": ["both:1"], "add": ["x:0", "relu"], "out": ["add"]}
    before = graph.SerializeToString()
    assert remove_training_ops(graph, {"out"}) == 0
    assert graph.SerializeToString() == before


def test_training_operators_go_by_type_not_by_name():
    graph = graph_of(
        'node { name: "Identity" op: "Placeholder" } node { name: "dropout/NoOp" op: "Relu" input: "Identity" }'
    )
    before = graph.SerializeToString()
    assert remove_training_ops(graph, {"dropout/NoOp"}) == 0
    assert graph.SerializeToString() == before


UNUSED = """
node { name: "x" op: "Placeholder" }
node { name: "unread" op: "Placeholder" }
node { name: "pair" op: "Split" input: "x" }
node { name: "order" op: "NoOp" }
node { name: "out" op: "Relu" input: "pair:1" input: "^order" }
node { name: "loss" op: "Square" input: "out" }
node { name: "summary" op: "ScalarSummary" input: "loss" }
"""


def test_nodes_that_no_output_needs_go():
    graph = graph_of(UNUSED)
    assert remove_unused_nodes(graph, {"out"}) == 2
    assert list(nodes(graph)) == ["x", "unread", "pair", "order", "out"]
    assert remove_unused_nodes(graph, {"out"}) == 0


def test_nodes_that_an_output_needs_stay():
    graph = graph_of(UNUSED)
    before = graph.SerializeToString()
    assert remove_unused_nodes(graph, {"out", "summary"}) == 0
    assert graph.SerializeToString() == before


def test_attributes_that_no_engine_needs_go():
    graph = graph_of("""
        node { name: "x" op: "Placeholder"
          attr { key: "dtype" value { type: DT_FLOAT } }
          attr { key: "_output_shapes" value { i: 1 } }
          attr { key: "_class" value { i: 1 } } }
        node { name: "y" op: "MatMul" input: "x" input: "x"
          attr { key: "_XlaMustCompile" value { b: true } }
          attr { key: "grad_a" value { b: false } }
          attr { key: "transpose_a" value { b: true } } }
    """)
    assert remove_attributes(graph) == 4
    assert [sorted(node.attr) for node in graph.node] == [["dtype"], ["transpose_a"]]
    assert remove_attributes(graph) == 0
