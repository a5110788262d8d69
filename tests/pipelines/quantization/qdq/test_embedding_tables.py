"""Embedding tables as int8 rows with a scale each."""

import numpy as np
import pytest
from helpers.rewriting import model, run

from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

EMBEDDED = """(int64[n,m] i, int64[n] j) => (float[n,m,40] y, float[n,40] z, float[n,8] u) {
    a = Gather(T, i) y = Neg(a)
    b = Gather(T, j) z = Neg(b)
    c = Gather(S, j) u = Neg(c)
}"""


@pytest.mark.parametrize(
    ("recipe", "stored"),
    [
        (QuantRecipe(), {"int8"}),
        (QuantRecipe(quantize_tables=False), {"float32"}),
        (QuantRecipe(keep_float=("b",)), {"int8", "float32"}),
    ],
)
def test_a_table_whose_rows_stay_float_has_a_scale_a_row(rng, normal, recipe, stored):
    table = normal(7000, 40) * np.geomspace(1e-3, 10, 7000, dtype=np.float32)[:, None]
    table[7] = 0
    net = model(EMBEDDED, T=table, S=normal(7000, 8))
    feeds = {"i": rng.integers(-7000, 7000, (64, 3)), "j": np.arange(-7, 57)}
    result, report = quantize(net, recipe, calibrate(net, [feeds]))
    kept = [value.const_value.numpy() for value in result.graph.initializers.values()]
    assert {str(array.dtype) for array in kept if array.shape == (7000, 40)} == stored
    assert len([array for array in kept if array.shape == (7000, 40)]) == len(stored)  # one for both lookups
    assert [array.dtype for array in kept if array.shape == (7000, 8)] == [np.float32]  # too narrow to gain
    of_a = next(op for op in report.operators if op.name == "a")
    assert (of_a.precision, bool(of_a.reason)) == (("int8", True) if recipe.quantize_tables else ("float", True))
    outputs, expected = run(result, **feeds), run(net, **feeds)
    for name in ("y", "z", "u"):
        steps = np.abs(expected[name]).max(-1, keepdims=True) / 127
        assert (np.abs(outputs[name] - expected[name]) <= steps * (0 if name == "u" else 0.501)).all()
