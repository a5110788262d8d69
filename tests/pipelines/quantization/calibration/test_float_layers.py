"""Layers of an int8 model in float32: sessions of the edited protobuf against models that are edited and serialized."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import model

from pipelines.graph import edit, query, reference_session
from pipelines.quantization.calibration import float_layers
from pipelines.quantization.calibration.calibrate import calibrate, observe
from pipelines.quantization.calibration.compared_outputs import OutputSqnr
from pipelines.quantization.calibration.float_layers import FloatLayers, leave_float
from pipelines.quantization.quantizer import Quantizer, quantize
from pipelines.quantization.recipe import QuantRecipe

LAYERS = ("a", "b", "c", "d")


def branches():
    """A convolution, a depthwise one, and two linear layers; values after a Relu are read by two layers."""
    normal = normals(3)
    text = """(float[n,4,8,8] x) => (float[n,6] y) {
        a = Conv<pads=[1,1,1,1]>(x, A, p) r = Relu(a) b = Conv<group=8, pads=[1,1,1,1]>(r, B, p) s = Add(b, r)
        m = GlobalAveragePool(s) f = Flatten(m) c = Gemm<transB=1>(f, C, q) t = Relu(c) d = MatMul(t, D) y = Add(d, q)
    }"""
    net = model(
        text, A=normal(8, 4, 3, 3), B=normal(8, 1, 3, 3), C=normal(6, 8), D=normal(6, 6), p=normal(8), q=normal(6)
    )
    for node in net.graph:
        node.name = node.outputs[0].name
    return net, [{"x": normals(1)(8, 4, 8, 8)}, {"x": normals(2)(8, 4, 8, 8)}]


def edited(int8, float_model, kept):
    """The model with float layers, made from its graph."""
    copy = int8.clone()
    weights = {node.name: node.inputs[1] for node in float_model.graph if node.name in kept}
    for node in copy.graph:
        if node.name not in kept:
            continue
        for index, x in enumerate(node.inputs):
            quantize_node = x.producer().inputs[0].producer() if x is not None and x.producer() is not None else None
            if quantize_node is not None and quantize_node.op_type == "QuantizeLinear":
                node.replace_input_with(index, quantize_node.inputs[0])
        exact = query.constant(weights[node.name])
        node.replace_input_with(1, edit.initializer(copy.graph, f"{node.name}.float", exact))
    return copy


@pytest.mark.parametrize("optimized", [False, True])
def test_sessions_of_the_edited_protobuf_give_the_bits_of_edited_graphs(optimized):
    net, batches = branches()
    int8, _ = quantize(net, QuantRecipe(), calibrate(net, batches, "minmax"))
    metric = OutputSqnr(net, batches, optimized)
    trials = FloatLayers(metric, int8, net, LAYERS)
    assert trials.sqnr((), slice(None)) == metric(int8)
    results = {()}
    for kept in (*((name,) for name in LAYERS), ("a", "b"), ("b", "d"), LAYERS):
        expected = metric.of(metric.session(metric.cut(edited(int8, net, kept))), slice(None))
        assert trials.sqnr(kept, slice(None)) == expected
        results.add(expected)
    assert len(results) == 8  # every layer counts
    assert trials.sqnr((), slice(1, 2)) == metric.of(metric.session(metric.cut(int8)), slice(1, 2)) != metric(int8, 1)


@pytest.mark.parametrize("room", [0, float_layers.HELD])
def test_parts_of_a_model_give_the_bits_of_the_whole(monkeypatch, room):
    """Values between the parts are kept from the int8 model, or computed again where memory has no room for them."""
    net, batches = branches()
    int8, _ = quantize(net, QuantRecipe(), calibrate(net, batches, "minmax"))
    metric = OutputSqnr(net, batches)
    whole = FloatLayers(metric, int8, net, LAYERS)
    monkeypatch.setattr(float_layers, "LAYERS_OF_A_PART", 2)
    monkeypatch.setattr(float_layers, "HELD", room)
    parts = FloatLayers(metric, int8, net, LAYERS)
    for kept in ((), *((name,) for name in LAYERS), ("a", "b"), ("a", "d"), LAYERS, ()):
        for used in (slice(1), slice(1, 2)):
            assert parts.sqnr(kept, used) == whole.sqnr(kept, used)


def test_layers_of_one_part_open_and_run_no_other_part(monkeypatch):
    """Opening the whole network for each of 53 layers took a fifth of the time of a calibration of MobileNet-V2."""
    net, batches = branches()
    int8, _ = quantize(net, QuantRecipe(), calibrate(net, batches, "minmax"))
    metric = OutputSqnr(net, batches, optimized=True)
    monkeypatch.setattr(float_layers, "LAYERS_OF_A_PART", 2)
    trials, opened = FloatLayers(metric, int8, net, LAYERS), []
    sqnr, session = metric(int8), metric.session

    def noted(part):
        opened.append({node.name for node in part.proto.graph.node} & set(LAYERS))
        return session(part)

    monkeypatch.setattr(metric, "session", noted)
    base = trials.sqnr((), slice(None))
    assert base == pytest.approx(sqnr, abs=0.2)
    first, last = opened
    assert first | last == set(LAYERS) and not first & last
    opened.clear()
    assert trials.sqnr(("d",), slice(None)) != base and opened == [last]


def test_a_layer_in_float_costs_one_session_and_no_quantization(monkeypatch):
    """Quantizing and serializing anew for every layer took half of the time of a calibration."""
    net, batches = branches()
    observation = observe(net, batches)
    table = observation.table("minmax")
    metric = OutputSqnr(net, batches, optimized=True)
    counts = {"session": 0, "serialized": 0, "quantize": 0}

    def counted(name, function):
        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return call

    monkeypatch.setattr(reference_session, "session", counted("session", reference_session.session))
    of = reference_session.Serialized.of
    monkeypatch.setattr(reference_session.Serialized, "of", counted("serialized", of))
    quantizer = Quantizer(net, QuantRecipe())
    monkeypatch.setattr(Quantizer, "quantize", counted("quantize", Quantizer.quantize))
    monkeypatch.setattr(float_layers, "SENSITIVE", 1000.0)  # no layer gains as much
    sqnr = metric(quantize(net, QuantRecipe(), table)[0])
    counts.update(session=0, serialized=0)
    assert not leave_float(quantizer, table, metric, observation, sqnr, 90.0, False).keep_float
    assert counts == {"session": len(LAYERS) + 1, "serialized": 1, "quantize": 1}


def test_layers_whose_errors_hide_each_other_are_left_in_float_together():
    """A filter bank before a logarithm (basic-pitch): no filter alone raises the SQNR, all together do."""
    normal, filters = normals(5), 8
    bank = " ".join(
        f"a{i} = Conv(x, A{i}) b{i} = Abs(a{i}) c{i} = Add(b{i}, tiny) d{i} = Log(c{i})" for i in range(filters)
    )
    joined = ", ".join(f"d{i}" for i in range(filters))
    net = model(
        f"(float[n,1,12,12] x) => (float[n,16,12,12] y) {{ {bank} r = Concat<axis=1>({joined}) "
        "s = Conv<pads=[2,2,2,2]>(r, B) t = Relu(s) y = Conv<pads=[2,2,2,2]>(t, C) }",
        **{f"A{i}": normal(1, 1, 1, 1) for i in range(filters)},
        tiny=np.float32(1e-6),
        B=normal(32, filters, 5, 5),
        C=normal(16, 32, 5, 5),
    )
    for node in net.graph:
        node.name = node.outputs[0].name
    batches = [{"x": np.exp(normals(seed)(4, 1, 12, 12) * 4).astype(np.float32)} for seed in range(4)]
    observation = observe(net, batches)
    table = observation.table("minmax")
    metric = OutputSqnr(net, batches, optimized=True)
    sqnr = metric(quantize(net, QuantRecipe(), table)[0])
    kept = leave_float(Quantizer(net, QuantRecipe()), table, metric, observation, sqnr, 24.0, False, jointly=True)
    assert metric(quantize(net, QuantRecipe(), kept)[0]) > sqnr + 10
    assert {"a0", "a7"} <= set(kept.keep_float) and "y" not in kept.keep_float
