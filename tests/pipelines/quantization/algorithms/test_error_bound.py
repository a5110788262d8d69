"""Layers stay float32 until int8 moves no result further than the recipe allows."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import integers, model, run

from pipelines.core.errors import RequestError
from pipelines.quantization.algorithms.error_bound import OPEN
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe

PLAIN = QuantRecipe(observer="minmax", correct=False)
NETWORK = """(int32[n] ids, float[n,3] numbers) => (float[n,1] y) {
    x = Gather(table, ids)
    h = MatMul(x, large)
    few = Slice(numbers, zero, two, one)
    own = MatMul(few, open)
    s = Add(h, own)
    r = Relu(s)
    m = MatMul(r, middle)
    q = Relu(m)
    y = MatMul(q, last)
}"""


def network():
    """Rows of a table through three layers, beside a layer of columns of the graph's input."""
    normal = normals(3)
    weights = {"table": normal(50, 64), "large": normal(64, 64), "open": normal(2, 64)}
    weights |= {"middle": normal(64, 8), "last": normal(8, 1)}
    return model(NETWORK, zero=integers(0), one=integers(1), two=integers(2), **weights)


def samples(count=600):
    rng = np.random.default_rng(4)
    ids, numbers = rng.integers(0, 50, count).astype(np.int32), rng.normal(size=(count, 3)).astype(np.float32)
    return {"ids": ids, "numbers": numbers}


def moved(int8):
    return float(np.abs(run(int8, **samples())["y"] - run(network(), **samples())["y"]).max())


def test_no_result_moves_further_than_the_bound():
    plain, _ = quantize(network(), PLAIN, make_table(network(), PLAIN, [samples()]))
    assert moved(plain) > 3.0
    for bound in (3.0, 2.5):
        recipe = replace(PLAIN, bound=bound)
        table = make_table(network(), recipe, [samples()])
        int8, report = quantize(network(), recipe, table)
        assert moved(int8) <= bound
        reasons = {op.name: op.reason for op in report.operators if op.precision == "float"}
        assert reasons["own"] == OPEN
        assert all("moves a result by up to" in reasons[name] for name in table.keep_float if name != "own")
        assert any(op.type in ("Gemm", "MatMul") and op.precision == "int8" for op in report.operators)


def test_an_open_input_stays_float_and_later_rows_may_reach_further():
    bound = replace(PLAIN, bound=1e6)
    table = make_table(network(), bound, [samples()])
    assert set(table.keep_float) == {"own"}
    far = samples() | {"numbers": samples()["numbers"] * 20}
    truth = run(network(), **far)["y"]
    errors = [
        np.abs(
            run(quantize(network(), recipe, make_table(network(), recipe, [samples()]))[0], **far)["y"] - truth
        ).max()
        for recipe in (bound, PLAIN)
    ]
    assert errors[0] < errors[1]


def test_everything_is_float_where_nothing_else_keeps_within_the_bound():
    recipe = replace(PLAIN, bound=1e-4)
    table = make_table(network(), recipe, [samples()])
    assert set(table.keep_float) == {"own", "h", "m", "y"}


def test_a_bound_is_part_of_a_recipe_only_where_there_is_one():
    assert "bound" not in PLAIN.to_json()
    assert QuantRecipe(**replace(PLAIN, bound=0.5).to_json()).bound == 0.5
    with pytest.raises(RequestError, match="bound is -1"):
        QuantRecipe(bound=-1)
