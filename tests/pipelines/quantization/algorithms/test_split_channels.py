"""Splitting: a hidden channel of one outlier weight gets copies, and the other weights of that output survive int8."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run

from pipelines.core.errors import RequestError
from pipelines.quantization.algorithms.equalize_channels import channel_statistics
from pipelines.quantization.algorithms.split_channels import find_splits, split_channels, splittable
from pipelines.quantization.calibration import auto_calibration, candidates
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.table import CalibrationTable
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

# the feed-forward block of BERT; at d, x is the first token of a sequence, whose activation of hidden channel 7 is huge
TEXT = """(float[n,s,16] x) => (float[n,s,16] y) {
    h = MatMul(x, w) b = Add(h, c) d = Div(b, root) e = Erf(d) f = Add(e, one) g = Mul(b, f) k = Mul(g, half)
    r = MatMul(k, v) y = Add(r, o)
}"""
HIDDEN, CHANNEL, OUTPUT = 768, 7, 3


def block(outlier=8.0):
    normal = normals(0)
    w, v = normal(16, HIDDEN, scale=0.2), normal(HIDDEN, 16, scale=0.02)
    w[:, CHANNEL] = 0
    w[0, CHANNEL] = 1  # fires where input 0 does
    v[CHANNEL, OUTPUT] = outlier
    constants = {"root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5), "o": normal(16)}
    network = model(TEXT, w=w, v=v, c=normal(HIDDEN, scale=0.1), **constants)
    return network, [{"x": tokens(seed)} for seed in (1, 2)]


def tokens(seed):
    """float32 [sequences, tokens, width]; the first token of each has a massive activation."""
    x = normals(seed)(16, 8, 16)
    x[:, :, 0] = np.where(np.arange(8) == 0, 20, -3)
    return x


def test_the_channel_of_an_outlier_weight_gets_copies_and_float_computes_the_same():
    network, samples = block()
    assert [str(x.name) for x in splittable(network.graph)] == ["k"]
    splits = find_splits(network, channel_statistics(network, samples, linear={"k": HIDDEN}))
    assert splits == {"k": (CHANNEL,) * 16}
    split = network.clone()
    split_channels(split, splits)
    onnx.checker.check_model(ir.to_proto(split), full_check=True)
    x = tokens(5)
    np.testing.assert_allclose(run(split, x=x)["y"], run(network, x=x)["y"], rtol=1e-4, atol=1e-4)


def test_nothing_is_split_without_outlier_weights():
    network, samples = block(0.02)
    assert find_splits(network, channel_statistics(network, samples, linear={"k": HIDDEN})) == {}


@pytest.mark.parametrize("wrong", [{"no": (1,)}, {"k": (HIDDEN,)}, {"k": (-1,)}])
def test_splits_of_another_graph_are_refused(wrong):
    with pytest.raises(RequestError, match=r"^the splitting of \w+ does not fit the graph; calibrate again"):
        split_channels(block()[0], wrong)


def test_other_tokens_keep_the_output_of_the_outlier_weight(tmp_path):
    network, samples = block()
    recipe = QuantRecipe(smooth=True, correct=False)
    table = make_table(network, recipe, samples)
    assert set(table.splitting) == {"k"}
    table = CalibrationTable.load(table.save(tmp_path / "calibration.json"))
    x = tokens(5)
    exact = run(network, x=x)["y"][:, 1:, OUTPUT]
    error = np.abs(run(quantize(network, recipe, table)[0], x=x)["y"][:, 1:, OUTPUT] - exact).mean()
    plain = replace(make_table(network, replace(recipe, smooth=False), samples), splitting={})
    before = np.abs(run(quantize(network, recipe, plain)[0], x=x)["y"][:, 1:, OUTPUT] - exact).mean()
    assert error < before / 3


def test_onnx_files_get_copies_where_they_raise_the_held_out_sqnr(monkeypatch):
    network, samples = block()
    table = auto_calibrate(network, QuantRecipe(), samples)
    assert table.splitting == {"k": (CHANNEL,) * 16}
    x = tokens(5)
    exact = run(network, x=x)["y"][:, 1:, OUTPUT]
    error = np.abs(run(quantize(network, QuantRecipe(), table)[0], x=x)["y"][:, 1:, OUTPUT] - exact).mean()
    monkeypatch.setattr(auto_calibration, "SPLIT_GAIN", np.inf)
    monkeypatch.setattr(candidates, "WORST_GAIN", np.inf)
    plain = auto_calibrate(network, QuantRecipe(), samples)
    assert plain.splitting == {}
    before = np.abs(run(quantize(network, QuantRecipe(), plain)[0], x=x)["y"][:, 1:, OUTPUT] - exact).mean()
    assert error < 0.75 * before


def test_onnx_files_without_outlier_weights_are_left_alone():
    network, samples = block(0.02)
    assert auto_calibrate(network, QuantRecipe(), samples).splitting == {}
    network, samples = block()
    assert auto_calibrate(network, QuantRecipe(), samples, effort="fast").splitting == {}
