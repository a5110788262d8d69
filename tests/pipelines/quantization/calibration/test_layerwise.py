"""Layer-wise runs: whatever leaves a piece of the graph, each value is what the whole graph computes."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import integers, model, run

from pipelines.quantization.algorithms.correction import correct_layers
from pipelines.quantization.calibration import layerwise
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.layerwise import LayerwiseRun
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

# a block of YOLOv8: a half of what the first layer gives waits for the sum, or for the end, while others are computed
SPLITS = {
    "C2f": """(float[N,3,8,8] x) => (float[N,4,8,8] y) {
        s = Conv(x, W) r = Relu(s) a, b = Split<axis=1>(r, halves)
        c = Conv<pads=[1,1,1,1]>(b, V) d = Relu(c) e = Conv<pads=[1,1,1,1]>(d, V2) f = Add(b, e)
        g = Concat<axis=1>(a, b, f) y = Conv(g, U) }""",
    "three parts": """(float[N,3,8,8] x) => (float[N,4,8,8] y) {
        s = Conv(x, T) r = Relu(s) a, b, c = Split<axis=1>(r, thirds)
        d = Conv<pads=[1,1,1,1]>(b, V) e = Relu(d) f = Conv<pads=[1,1,1,1]>(c, V2) g = Add(e, f)
        h = Concat<axis=1>(a, b, g) y = Conv(h, U) }""",
    "outputs of the graph": """(float[N,3,8,8] x) => (float[N,4,8,8] a, float[N,4,8,8] b, float[N,4,8,8] y) {
        s = Conv(x, W) a, b = Split<axis=1>(s, halves) y = Conv<pads=[1,1,1,1]>(a, V) }""",
    "read in pieces far apart": """(float[N,3,8,8] x) => (float[N,4,8,8] y, float[N,4,8,8] z) {
        s = Conv(x, W) q = Sigmoid(s) r = Mul(s, q) a, b = Split<axis=1>(r, halves)
        c = Conv<pads=[1,1,1,1]>(a, V) d = Add(a, c) e = Conv<pads=[1,1,1,1]>(d, V2) f = Mul(b, e)
        z = Conv<pads=[1,1,1,1]>(b, V) g = Concat<axis=1>(a, b, f) y = Conv(g, U) }""",
    "a Split of a Split": """(float[N,3,8,8] x) => (float[N,4,8,8] y) {
        s = Conv(x, D) a, b = Split<axis=1>(s, eights) c, d = Split<axis=1>(b, halves)
        e = Conv<pads=[1,1,1,1]>(d, V) f = Add(c, e) g = Split<axis=1>(a, halves)
        h = Concat<axis=1>(c, d, f) y = Conv(h, U) }""".replace("g = Split", "g, g2 = Split"),
}


def split(name):
    """(float model of `SPLITS`, its samples)."""
    normal = normals(0)
    text = SPLITS[name]
    weights = {
        "W": normal(8, 3, 1, 1),
        "T": normal(12, 3, 1, 1),
        "D": normal(16, 3, 1, 1),
        "V": normal(4, 4, 3, 3, scale=0.3),
        "V2": normal(4, 4, 3, 3, scale=0.3),
        "U": normal(4, 12, 1, 1, scale=0.5),
        "halves": integers(4, 4),
        "thirds": integers(4, 4, 4),
        "eights": integers(8, 8),
    }
    used = {key: array for key, array in weights.items() if f" {key})" in text or f" {key}," in text}
    return model(text, **used), {"x": normal(20, 3, 8, 8)}


@pytest.mark.parametrize("name", SPLITS)
def test_parts_of_one_result_may_be_read_in_several_pieces(name):
    net, feeds = split(name)
    int8, _ = quantize(net, QuantRecipe(), calibrate(net, [feeds], "minmax"))
    result, report = correct_layers(net, int8, [feeds])
    assert all(not layer.reason or "sum" in layer.reason or "bias" in layer.reason for layer in report.layers)
    exact, before, after = run(net, **feeds), run(int8, **feeds), run(result, **feeds)
    for key, value in exact.items():
        errors = [float(np.square(value - outputs[key]).mean()) for outputs in (before, after)]
        assert errors[1] < 1.1 * errors[0]


@pytest.mark.parametrize("name", SPLITS)
def test_each_layer_computes_what_the_whole_graph_does(name):
    net, feeds = split(name)
    expected = net.clone()
    layers = [node for node in expected.graph if node.op_type == "Conv"]
    expected.graph.outputs[:] = [node.outputs[0] for node in layers]
    wanted = run(expected, **feeds)
    with tempfile.TemporaryDirectory() as folder:
        walk = LayerwiseRun(net, [layer.outputs[0].name for layer in layers], Path(folder))
        walk.feed({"x": feeds["x"][:12]})
        walk.feed({"x": feeds["x"][12:]})
        for layer in layers:
            node = walk.nodes[layer.outputs[0].name]
            walk.compute(node)
            np.testing.assert_array_equal(np.concatenate(list(walk.run(node))), wanted[layer.outputs[0].name])


@pytest.mark.parametrize("held", [0, 5000, layerwise.HELD])
def test_values_beyond_a_limit_of_memory_are_stored_on_disk(held, monkeypatch):
    net, feeds = split("C2f")
    monkeypatch.setattr(layerwise, "HELD", held)
    layers = [node.outputs[0].name for node in net.graph if node.op_type == "Conv"]
    with tempfile.TemporaryDirectory() as folder:
        walk = LayerwiseRun(net, layers, Path(folder))
        for start in range(0, 20, 4):
            walk.feed({"x": feeds["x"][start : start + 4]})
        files = 0
        for name in layers:
            walk.compute(walk.nodes[name])
            files = max(files, sum(path.is_file() for path in Path(folder).rglob("*")))
            walk.add(walk.nodes[name], np.zeros(4), 1)
        assert bool(files) == (held < 1e6)
        assert walk._room >= 0
        expected = run(net, **feeds)["y"]
        assert np.array_equal(np.concatenate(list(walk.values(net.graph.outputs[0]))), expected)


def test_the_batch_that_a_chunk_is_cut_from_is_not_held():
    net, feeds = split("C2f")
    with tempfile.TemporaryDirectory() as folder:
        walk = LayerwiseRun(net, [], Path(folder))
        walk.feed({"x": feeds["x"][:4]})
        assert not any(np.shares_memory(array, feeds["x"]) for array in walk.values(net.graph.inputs[0]))
