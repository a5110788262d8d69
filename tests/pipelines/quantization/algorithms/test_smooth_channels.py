"""Smoothing: outlier channels before linear layers, whatever computes them and whoever else reads them."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run

from pipelines.core.errors import RequestError
from pipelines.graph import io
from pipelines.quantization.algorithms.equalize_channels import channel_statistics
from pipelines.quantization.algorithms.smooth_channels import find_smoothing, smooth_channels, smoothable
from pipelines.quantization.calibration import calibrate
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import observe
from pipelines.quantization.calibration.range_search import output_sqnr
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

# a block behind a GELU, whose output a residual sum reads too
TEXT = """(float[n,s,16] x) => (float[n,s,8] y) {
    h = MatMul(x, w) b = Add(h, c) d = Div(b, root) e = Erf(d) f = Add(e, one) g = Mul(b, f)
    p = MatMul(g, v) q = MatMul(g, u) r = Add(p, q) t = MatMul(g, z) y = Add(r, t)
}"""


def block(outlier=60.0):
    normal = normals(0)
    c = np.zeros(32, np.float32)
    c[5] = outlier
    weights = {"w": normal(16, 32, scale=0.3), "c": c, "root": np.float32(2**0.5), "one": np.float32(1)}
    net = model(TEXT, **weights, **{name: normal(32, 8, scale=0.2) for name in "vuz"})
    return net, [{"x": normals(seed)(24, 5, 16)} for seed in (1, 2)]


def factors_of(found, samples):
    linear = {str(x.name): 32 if x.name == "g" else 16 for x in smoothable(found.graph)}
    return find_smoothing(found, channel_statistics(found, samples, linear=linear))


def test_the_outlier_is_scaled_down_and_the_float_model_computes_the_same():
    net, samples = block()
    factors = factors_of(net, samples)
    assert list(factors) == ["g"] and np.argmin(factors["g"]) == 5 and factors["g"][5] < 0.2
    assert max(factors["g"]) == 1
    smoothed = net.clone()
    assert smooth_channels(smoothed, factors) == {"g.smoothed"}
    onnx.checker.check_model(ir.to_proto(smoothed), full_check=True)
    assert [node.op_type for node in smoothed.graph].count("Mul") == 2  # one for all three readers
    x = samples[0]["x"]
    np.testing.assert_allclose(run(smoothed, x=x)["y"], run(net, x=x)["y"], rtol=1e-4, atol=1e-4)


def test_nothing_is_smoothed_without_outliers():
    """All channels alike; a block whose channels differ by chance gains too little, or nothing."""
    net, samples = block(0.0)
    for value, weights in (("w", np.eye(16, 32, dtype=np.float32)), ("c", np.full(32, 5, np.float32))):
        net.graph.initializers[value].const_value = ir.tensor(weights, name=value)
    assert factors_of(net, samples) == {}


def test_only_the_scaled_values_are_observed_again(monkeypatch):
    """The whole network was run once more for the ranges of one new value."""
    net, samples = block()
    smoothed = net.clone()
    smooth_channels(smoothed, factors_of(net, samples))
    first = observe(net, samples)
    asked = []
    open_session = calibrate._session
    monkeypatch.setattr(
        calibrate,
        "_session",
        lambda model, shared, names, **options: (asked.append(names), open_session(model, shared, names, **options))[1],
    )
    again = observe(smoothed, samples, histograms=first.histograms)
    assert asked == [["g.smoothed"]] * 2  # shapes, then values
    whole = observe(smoothed, samples)
    for observer in ("auto", "minmax", "percentile", "kl"):
        tables = again.table(observer), whole.table(observer)
        assert tables[0].samples == tables[1].samples and tables[0].samples_digest == tables[1].samples_digest
        assert list(tables[0].tensors) == list(tables[1].tensors)  # in the order of the graph
        for name, expected in tables[1].tensors.items():
            assert (expected.low, expected.high) == pytest.approx(
                (tables[0].tensors[name].low, tables[0].tensors[name].high), rel=0.02
            )


def test_factors_of_another_graph_are_refused():
    net, _ = block()
    for wrong in ({"no": (1.0,) * 32}, {"g": (1.0,) * 31}, {"g": (0.0,) * 32}):
        with pytest.raises(RequestError, match=r"^the smoothing of \w+ does not fit the graph; calibrate again"):
            smooth_channels(net.clone(), wrong)


def test_a_quantized_model_with_outliers_keeps_its_quality(tmp_path):
    net, samples = block()
    other = [{"x": normals(3)(24, 5, 16)}]
    table = auto_calibrate(net, QuantRecipe(), samples)
    assert list(table.smoothing) == ["g"] and not table.keep_float
    table = CalibrationTable.load(table.save(tmp_path / "calibration.json"))
    int8, report = quantize(net, QuantRecipe(), table)
    plain = make_table(net, QuantRecipe(), samples)
    before = output_sqnr(net, quantize(net, QuantRecipe(), plain)[0], other)
    assert output_sqnr(net, int8, other) > before + 3
    assert [op.precision for op in report.operators if op.type == "MatMul"] == ["int8"] * 4
    assert not any(op.name.endswith(".smoothed") for op in report.operators)  # part of the layers
    with pytest.raises(RequestError, match="searched or corrected differently"):
        table.merge(replace(table, smoothing={}))
    assert io.digest(quantize(net, QuantRecipe(), table)[0]) == io.digest(int8)
