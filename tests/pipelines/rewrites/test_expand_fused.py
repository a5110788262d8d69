"""Operators that ONNX Runtime's optimizer writes become the operators that it fused."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from helpers.arrays import normals
from helpers.rewriting import run

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.graph.infer import infer_shapes
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.expand_fused import ExpandFused
from pipelines.rewrites.shared import SHARED


def cases():
    """{name: (operator, inputs, weights, order of inputs, attributes)}."""
    normal = normals(3)
    X, WIDE = normal(2, 5, 8), normal(2, 7, 8)
    IMAGE, KERNEL = {"x": normal(2, 3, 6, 6)}, {"w": normal(4, 3, 3, 3), "c": normal(4)}
    SAME = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    QKV = {"w": normal(8, 24), "b": normal(24)}
    NORM = {"g": normal(8), "b": normal(8), "c": normal(8)}
    MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    IDS = {"i": np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32), "k": np.array([[0, 1] * 2 + [0]] * 2, np.int32)}
    TABLES = {"w": normal(20, 8), "p": normal(12, 8), "t": normal(2, 8), "g": normal(8), "b": normal(8)}
    return {
        "scaled and transposed weights": ("FusedMatMul", {"x": X}, {"w": normal(5, 8)}, "x w", {"alpha": 0.5, "transB": 1}),
        "transposed activations": ("FusedMatMul", {"x": X, "w": X}, {}, "x w", {"alpha": 0.5, "transA": 1}),
        "gemm": ("FusedGemm", {"x": X[0]}, {"w": normal(8, 5), "c": normal(5)}, "x w c",
                 {"activation": "LeakyRelu", "activation_alpha": 0.2}),
        "conv": ("FusedConv", IMAGE, KERNEL, "x w c", {"activation": "Relu", **SAME}),
        "conv and clip": ("FusedConv", IMAGE, KERNEL, "x w c",
                          {"activation": "Clip", "activation_params": [-0.2, 0.5], **SAME}),
        "conv and hard sigmoid": ("FusedConv", IMAGE, KERNEL, "x w c",
                                  {"activation": "HardSigmoid", "activation_params": [0.2, 0.5], **SAME}),
        "conv and sum": ("FusedConv", {**IMAGE, "z": normal(2, 4, 6, 6)}, KERNEL, "x w c z", {"activation": "Relu", **SAME}),
        "bias gelu": ("BiasGelu", {"x": X}, {"b": normal(8)}, "x b", {}),
        "fast gelu": ("FastGelu", {"x": X}, {"b": normal(8)}, "x b", {}),
        "gelu": ("Gelu", {"x": X}, {}, "x", {}),
        "quick gelu": ("QuickGelu", {"x": X}, {}, "x", {"alpha": 1.3}),
        "sum and norm": ("SkipLayerNormalization", {"x": X, "s": X[::-1]}, NORM, "x s g b c", {"epsilon": 1e-5}),
        "sum and rms norm": ("SkipSimplifiedLayerNormalization", {"x": X, "s": X[::-1]}, NORM, "x s g c", {"epsilon": 1e-5}),
        "embeddings": ("EmbedLayerNormalization", IDS, TABLES, "i k w p t g b", {"epsilon": 1e-5}),
        "attention": ("Attention", {"x": X}, QKV, "x w b", {"num_heads": 2}),
        "masked attention": ("Attention", {"x": X, "m": MASK}, QKV, "x w b m", {"num_heads": 2}),
        "masks of pairs": ("Attention", {"x": X, "m": np.stack([MASK] * 5, 1)}, QKV, "x w b m", {"num_heads": 2}),
        "causal attention": ("Attention", {"x": X, "m": MASK}, QKV, "x w b m", {"num_heads": 2, "unidirectional": 1}),
        "biased scores": ("Attention", {"x": X, "a": normal(2, 2, 5, 5)}, QKV, "x w b . . a", {"num_heads": 2, "scale": 0.3}),
        "narrow values": ("Attention", {"x": X}, {"w": normal(8, 20), "b": normal(20)}, "x w b",
                          {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 4]}),
        "heads": ("MultiHeadAttention", {"x": X, "k": WIDE, "v": WIDE}, {"b": normal(24)}, "x k v b", {"num_heads": 2}),
    }  # fmt: skip


CASES = cases()
X, QKV = CASES["attention"][1]["x"], CASES["attention"][2]


def fused(op, feeds, weights, order, attributes, opset=17, outputs=("y",)):
    """A model of one operator; its output has no type, as nothing but onnxruntime knows it."""
    inputs = ["" if name == "." else name for name in order.split()]
    node = onnx.helper.make_node(op, inputs, outputs, name="n", domain="com.microsoft", **attributes)
    float_ = onnx.TensorProto.FLOAT
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node],
            "g",
            [
                onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in feeds.items()
            ],
            [onnx.helper.make_tensor_value_info("y", float_, None)],
            [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
        ),
        opset_imports=[onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    return ir.from_proto(proto)


@pytest.mark.parametrize("opset", [14, 17, 20])
@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same(name, opset):
    op, feeds, *more = CASES[name]
    feeds = {key: np.ascontiguousarray(array) for key, array in feeds.items()}
    outputs = ("y", "mask_index") if op == "EmbedLayerNormalization" else ("y",)
    net = fused(op, feeds, *more, opset=opset, outputs=outputs)
    before = run(net, **feeds)["y"]
    expand = ExpandFused()
    rewrite(net, [expand])
    assert expand.fired == 1 and not expand.refused
    assert {node.domain for node in net.graph} == {""}
    np.testing.assert_allclose(run(net, **feeds)["y"], before, atol=3e-6)
    assert not ExpandFused()(net).modified


@pytest.mark.parametrize(
    ("order", "more", "attributes", "why"),
    [
        ("x w b m", {"m": np.array([3, 5], np.int32)}, {}, "its mask is no integer mask of tokens"),
        ("x w b . p", {"p": np.zeros((2, 2, 2, 3, 4), np.float32)}, {}, "it has a cache"),
        ("x v b", {"v": normals(4)(8, 24)}, {}, "its weights are not constant"),
    ],
)
def test_near_misses_stay_and_say_why(order, more, attributes, why):
    outputs = ("y", "present") if "p" in more else ("y",)
    net = fused("Attention", {"x": X, **more}, QKV, order, {"num_heads": 2, **attributes}, outputs=outputs)
    expand = ExpandFused()
    before = len(net.graph.initializers)
    assert not expand(net).modified and why in expand.refused["n"]
    assert len(net.graph.initializers) == before


BERT = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> g (float[b,6,16] x, int32[b,6] mask) => (float[b,6,4] y)
    <float half = {0.25}> {
        a = com.microsoft.Attention<num_heads=2>(x, QKV, qkv, mask) o = com.microsoft.FusedMatMul<alpha=0.5>(a, O)
        n = com.microsoft.SkipLayerNormalization<epsilon=0.00001>(o, x, g, s, o_bias)
        u = MatMul(n, U) v = com.microsoft.BiasGelu(u, u_bias) d = MatMul(v, D)
        m = com.microsoft.SkipLayerNormalization<epsilon=0.00001>(d, n, g, s) y = MatMul(m, Y) }"""


def bert(text=BERT):
    draw = normals(7)
    arrays = {"QKV": draw(16, 48) / 4, "qkv": draw(48) / 4, "O": draw(16, 16) / 4, "g": 1 + draw(16) / 9, "s": draw(16)}
    arrays |= {
        "o_bias": draw(16),
        "U": draw(16, 64) / 4,
        "u_bias": draw(64),
        "D": draw(64, 16) / 8,
        "Y": draw(16, 4) / 4,
    }
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


def test_all_layers_of_an_optimized_transformer_are_int8():
    net = ir.from_proto(bert())
    feeds = {"x": normals(8)(32, 6, 16), "mask": np.ones((32, 6), np.int32)}
    before = run(net, **feeds)["y"]
    rewrite(net, [pass_() for pass_ in SHARED])
    np.testing.assert_allclose(run(net, **feeds)["y"], before, atol=1e-5)
    int8, report = quantize(net, QuantRecipe(), calibrate(net, [feeds], "minmax"))
    layers = [op for op in report.operators if op.type in ("MatMul", "Gemm")]
    assert len(layers) == 9 and all(layer.precision == "int8" for layer in layers)  # 2 of 4 with a type before
    after = run(int8, **feeds)["y"]
    assert np.square(after - before).sum() < 0.01 * np.square(before).sum()


def test_values_behind_unknown_operators_get_their_types_from_onnxruntime():
    net = ir.from_proto(bert())
    infer_shapes(net)
    values = {value.name: value for node in net.graph for value in node.outputs}
    assert all(value.dtype == ir.DataType.FLOAT for value in values.values())
    assert [str(values[name].shape) for name in "anu"] == ["[b,6,16]", "[b,6,16]", "[b,6,64]"]


@pytest.mark.parametrize("opset", [11, 13, 17])
def test_files_that_onnxruntime_wrote_are_read(opset, tmp_path):
    """Its optimizer writes LayerNormalization at any opset; onnx has it since 17."""
    text = """(float[b,6,16] x) => (float[b,6,4] y) {
        h = MatMul(x, W) m = ReduceMean<axes=[-1]>(h) c = Sub(h, m) p = Pow(c, two) v = ReduceMean<axes=[-1]>(p)
        e = Add(v, eps) s = Sqrt(e) u = Div(c, s) w = Mul(u, g) n = Add(w, t) y = MatMul(n, V) }"""
    proto = onnx.parser.parse_model(f'<ir_version: 7, opset_import: ["": {opset}]> g {text}')
    draw = normals(9)
    arrays = {
        "W": draw(16, 16),
        "eps": np.float32(1e-5),
        "two": np.float32(2),
        "g": draw(16),
        "t": draw(16),
        "V": draw(16, 4),
    }
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items())
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "a.onnx")
    session = ort.InferenceSession(proto.SerializeToString(), options)
    assert "LayerNormalization" in {node.op_type for node in onnx.load(tmp_path / "a.onnx").graph.node}
    net = io.load(tmp_path / "a.onnx")
    rewrite(net, [pass_() for pass_ in SHARED])
    x = draw(3, 6, 16)
    np.testing.assert_allclose(run(net, x=x)["y"], session.run(None, {"x": x})[0], atol=2e-4)
    onnx.checker.check_model(io.save(net, tmp_path / "b.onnx"))


def test_a_file_for_one_machine_is_refused_by_name(tmp_path):
    text = (
        '<ir_version: 8, opset_import: ["": 17, "com.microsoft.nchwc": 1]> g (float[1,16,4,4] x) => (float[1,16,4,4] y)'
    )
    onnx.save(onnx.parser.parse_model(f"{text} {{ y = com.microsoft.nchwc.Conv(x, x) }}"), tmp_path / "a.onnx")
    with pytest.raises(RequestError, match="one machine.*expected the file before that, or one written with"):
        io.load(tmp_path / "a.onnx")


def test_graphs_without_a_name_are_read(tmp_path):
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
    )
    proto.graph.name = ""
    onnx.save(proto, tmp_path / "a.onnx")
    assert len(io.load(tmp_path / "a.onnx").graph) == 1
