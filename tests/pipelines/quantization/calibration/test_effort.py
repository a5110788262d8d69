"""Efforts beside each other: more work gives no less SQNR on other samples, and the least work no less than min-max."""

import itertools

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import MLP, model

from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.effort import EFFORTS, effort_of
from pipelines.quantization.calibration.range_search import output_sqnr
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

LESS = 1.0  # dB that more work may lose by chance

MOBILE = """(float[n,8,12,12] x) => (float[n,10] y) {
    a = Conv<pads=[1,1,1,1]>(x, w1, b1) c = Clip(a, zero, six) d = Conv<pads=[1,1,1,1],group=32>(c, w2, b2)
    e = Clip(d, zero, six) f = Conv(e, w3, b3) s = Add(f, x) g = Conv(s, w4, b4) h = HardSwish(g)
    p = GlobalAveragePool(h) q = Flatten(p) y = Gemm(q, v, c1) }"""

RESIDUAL = """(float[n,6,16] x) => (float[n,6,8] y) {
    a = MatMul(x, w1) b = Add(a, b1) c = Relu(b) d = MatMul(c, w2) e = Add(d, x) f = MatMul(e, w3) y = Add(f, b3) }"""


def network(name):
    normal = normals(3)
    if name == "mlp":
        return model(MLP, w=normal(8, 16), b=normal(16), v=normal(16, 2)), (8,)
    if name == "mobile":
        weights = {"w1": (32, 8, 3, 3), "w2": (32, 1, 3, 3), "w3": (8, 32, 1, 1), "w4": (24, 8, 1, 1), "v": (24, 10)}
        arrays = {key: normal(*shape) / np.float32(np.prod(shape[1:]) ** 0.5) for key, shape in weights.items()}
        arrays["w2"] *= np.exp(normal(32, 1, 1, 1))  # channels of different reach
        biases = {"b1": normal(32), "b2": normal(32), "b3": normal(8), "b4": normal(24), "c1": normal(10)}
        ends = {"zero": np.float32(0), "six": np.float32(6)}
        return model(MOBILE, **arrays, **{key: bias / 4 for key, bias in biases.items()}, **ends), (8, 12, 12)
    arrays = {"w1": normal(16, 32) / 4, "w2": normal(32, 16) / 6, "w3": normal(16, 8) / 4}
    return model(RESIDUAL, **arrays, b1=normal(32), b3=normal(8)), (6, 16)


@pytest.mark.parametrize("name", ["mlp", pytest.param("mobile", marks=pytest.mark.slow), "residual"])
def test_more_work_loses_nothing_and_the_least_is_no_worse_than_minmax(name):
    net, shape = network(name)

    def drawn(count, seed):
        x = normals(seed)(count, *shape)
        return [{"x": x * np.linspace(0.5, 1.5, count, dtype=np.float32).reshape(-1, *[1] * len(shape))}]

    batches, other = drawn(384, 1), drawn(192, 2)
    plain = calibrate(net, batches, "minmax")
    tables = [plain, *(auto_calibrate(net, QuantRecipe(), batches, 384, effort=effort) for effort in EFFORTS)]
    sqnr = [output_sqnr(net, quantize(net, QuantRecipe(), table)[0], other) for table in tables]
    assert list(EFFORTS) == ["fast", "default", "best"]
    for less, more in itertools.pairwise(sqnr):
        assert more > less - LESS, dict(zip(["minmax", *EFFORTS], sqnr, strict=True))


def test_a_step_takes_more_samples_where_these_are_small():
    work = effort_of("default")
    assert work.at_least(32, 1e7) == 32 and work.at_least(32, 1e3) > 4000 and work.at_least(0, 1) == 0
