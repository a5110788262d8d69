"""Activation functions behind int8 convolutions, in the form that OpenVINO fuses."""

import numpy as np
import pytest
from helpers.quantizing import checked, decibels
from helpers.rewriting import EXACT, model, run

from pipelines.engines.catalog import load
from pipelines.engines.openvino.session import library
from pipelines.graph import io
from pipelines.quantization.qdq.fused_functions import fuse_functions

NET = """(float[1,8,12,12] x) => (float[1,8,12,12] y) {{
    a = Conv<pads=[1,1,1,1]>(x, k, b) {} c = Conv<pads=[1,1,1,1]>(f, l, b) y = Relu(c) }}"""
SILU = "g = Sigmoid(a) f = Mul(a, g)"
BODIES = {
    "SiLU": SILU,
    "SiLU, the gate first": "g = Sigmoid(a) f = Mul(g, a)",
    "HardSwish": "f = HardSwish(a)",
    "LeakyRelu": "f = LeakyRelu<alpha=0.1>(a)",
    "Tanh": "f = Tanh(a)",
}


def net(normal, body):
    kernels = {name: normal(8, 8, 3, 3, scale=0.2) for name in "kl"}
    return model(NET.format(body), **kernels, b=normal(8, scale=0.3))


def layer_types(path):
    """The operators that OpenVINO runs for a file that is opened without settings."""
    compiled = library().Core().compile_model(str(path), "CPU")
    infos = [op.get_rt_info()["layerType"] for op in compiled.get_runtime_model().get_ordered_ops()]
    return [info.astype(str) if hasattr(info, "astype") else str(info) for info in infos]


def between_convolutions(path):
    types = layer_types(path)
    first = types.index("Convolution")
    return [
        kind for kind in types[first + 1 : types.index("Convolution", first + 1)] if kind not in ("Const", "Reshape")
    ]


def sqnr_of(int8, expected, path, x):
    """SQNR in every engine, by its name."""
    io.save(int8.clone(), path)
    return {engine: decibels(load(path, engine).run({"x": x})["y"], expected) for engine in EXACT}


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_openvino_computes_the_function_with_the_convolution(normal, tmp_path, body):
    network, x = net(normal, body), normal(1, 8, 12, 12)
    int8, _ = checked(network, x=x)
    expected, pairs, fused = run(network, x=x)["y"], tmp_path / "pairs.onnx", tmp_path / "fused.onnx"
    before = sqnr_of(int8, expected, pairs, x)
    assert between_convolutions(pairs)
    assert fuse_functions(int8) == 1
    after = sqnr_of(int8, expected, fused, x)
    assert between_convolutions(fused) == []
    assert min(after.values()) > before["onnxruntime"] - 1, (before, after)
    assert fuse_functions(int8) == 0


def test_a_channel_without_weights_keeps_its_bias(normal, tmp_path):
    weight, bias = normal(8, 8, 3, 3, scale=0.2), np.linspace(-2, 2, 8).astype(np.float32)
    weight[3] = 0
    network, x = model(NET.format(SILU), k=weight, l=normal(8, 8, 3, 3, scale=0.2), b=bias), normal(1, 8, 12, 12)
    int8, _ = checked(network, x=x)
    expected = run(network, x=x)["y"]
    before = sqnr_of(int8, expected, tmp_path / "pairs.onnx", x)
    assert fuse_functions(int8) == 1
    after = sqnr_of(int8, expected, tmp_path / "fused.onnx", x)
    assert min(after.values()) > before["onnxruntime"] - 1, (before, after)


@pytest.mark.parametrize(
    "body",
    [
        "f = Relu(a)",
        "g = Sigmoid(a) h = Mul(a, g) f = Add(h, a)",
        "g = Sigmoid(a) h = Exp(a) f = Mul(g, h)",
        "f = Softplus(a)",
    ],
)
def test_other_readers_are_left_alone(normal, body):
    int8, _ = checked(net(normal, body), x=normal(1, 8, 12, 12))
    before = io.digest(int8)
    assert fuse_functions(int8) == 0
    assert io.digest(int8) == before
