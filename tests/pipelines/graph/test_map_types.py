"""Files of sklearn's exporters: a ZipMap, which makes a sequence of maps, and classes that are strings."""

import itertools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from helpers.arrays import normals
from helpers.tiers import one_in

import zoo
from pipelines.core.errors import RequestError
from pipelines.graph import io

CLASSIFIER = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]> g (float[n,20] x) => (string[n] label, float[n,4] p)
    <string[4] classes = {"a", "b", "c", "d"}, int64[1] flat = {-1}> {
        s = ai.onnx.ml.Scaler<offset=[0.1], scale=[0.5]>(x) a = MatMul(s, W) b = Add(a, w) r = Relu(b)
        m = MatMul(r, V) p = Softmax(m) k = ArgMax<axis=1>(p) n = ai.onnx.ml.ArrayFeatureExtractor(classes, k)
        label = Reshape(n, flat) }"""


def classifier(zip_map="", keys="classlabels_strings"):
    normal = normals(1)
    proto = onnx.parser.parse_model(CLASSIFIER)
    arrays = {"W": normal(20, 64) / 4, "w": normal(64), "V": normal(64, 4) / 8}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    if zip_map:
        classes = list("abcd") if keys == "classlabels_strings" else [0, 1, 2, 3]
        proto.graph.node.append(onnx.helper.make_node("ZipMap", ["p"], ["pm"], domain="ai.onnx.ml", **{keys: classes}))
        kind = onnx.TypeProto()
        kind.sequence_type.elem_type.map_type.key_type = onnx.TensorProto.STRING if keys.endswith("strings") else 7
        kind.sequence_type.elem_type.map_type.value_type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        del proto.graph.output[1]
        proto.graph.output.append(onnx.helper.make_value_info("pm", kind))
    return proto


@pytest.mark.parametrize(
    ("keys", "zip_map"), one_in(3, itertools.product(["classlabels_strings", "classlabels_int64s"], ["", "ZipMap"]))
)
def test_classifiers_are_quantized(zip_map, keys, tmp_path):
    onnx.save(classifier(zip_map, keys), tmp_path / "float.onnx")
    x = normals(2)(200, 20)
    np.savez(tmp_path / "x.npz", x=x)
    target = tmp_path / "int8.onnx"
    result = zoo.quantize(tmp_path / "float.onnx", target, calibration_data=tmp_path / "x.npz")
    assert result["summary"]["int8_layers"] == 2 and result["summary"]["sqnr_db"] > 35
    onnx.checker.check_model(target, full_check=True)
    outputs = [ort.InferenceSession(tmp_path / f"{name}.onnx").run(None, {"x": x}) for name in ("float", "int8")]
    assert np.mean(outputs[0][0] == outputs[1][0]) > 0.97
    if zip_map:
        assert [list(row) for row in outputs[0][1]] == [list(row) for row in outputs[1][1]]
    tuned = zoo.tune(tmp_path / "float.onnx", tmp_path / "x.npz", tmp_path / "tuned.onnx", max_drop=0.05, seconds=20)
    assert tuned["met"]


def test_the_type_of_a_map_is_written_again(tmp_path):
    onnx.save(classifier("ZipMap"), tmp_path / "a.onnx")
    loaded = io.load(tmp_path / "a.onnx")
    io.save(loaded, tmp_path / "b.onnx")
    before, after = (onnx.load(tmp_path / name).graph.output[1].type for name in ("a.onnx", "b.onnx"))
    assert before == after
    assert io.digest(loaded) == io.digest(io.load(tmp_path / "b.onnx"))


def test_an_input_that_is_a_map_is_refused_by_name(tmp_path):
    proto = classifier("ZipMap")
    proto.graph.input.append(onnx.helper.make_value_info("words", proto.graph.output[1].type.sequence_type.elem_type))
    onnx.save(proto, tmp_path / "a.onnx")
    with pytest.raises(RequestError, match="its input words is a map; expected tensors"):
        io.load(tmp_path / "a.onnx")
