"""A table that is looked up and multiplied by is stored once in int8."""

import numpy as np
import onnx_ir as ir
import pytest
from helpers.arrays import normals
from helpers.quantizing import LAYERS
from helpers.rewriting import EXACT, model, run

from pipelines.engines.catalog import load
from pipelines.graph import io, query
from pipelines.quantization.calibration.auto_calibration import auto_calibrate
from pipelines.quantization.calibration.range_search import output_sqnr
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.shared import SHARED

MATMUL = """(int64[b,t] ids) => (float[b,t,3000] y) { e = Gather(E, ids) h = MatMul(e, W) r = Relu(h) s = Add(e, r)
    w = Transpose<perm=[1,0]>(E) y = MatMul(s, w) }"""
GEMM = "(int64[b] ids) => (float[b,3000] y) { e = Gather(E, ids) h = Gemm(e, W) r = Relu(h) y = Gemm<transB=1>(r, E) }"
TWICE = "(int64[b] ids) => (float[b,3000] y) { e = Gather(E, ids) h = Gemm(e, W) r = Relu(h) y = MatMul(r, F) }"


@pytest.mark.parametrize(("text", "shape"), [(MATMUL, (16, 6)), (GEMM, (96,)), (TWICE, (96,))])
def test_one_matrix_for_both(text, shape, tmp_path, rng):
    normal = normals(1)
    matrix = normal(3000, 96)
    weights = {"E": matrix, "W": normal(96, 96) / 10, **({"F": matrix.T.copy()} if text is TWICE else {})}
    net = model(text, **weights)
    rewrite(net, [pass_() for pass_ in SHARED])
    batches = [{"ids": rng.integers(0, 3000, shape)} for _ in range(4)]
    recipe = QuantRecipe(tie_tables=True)
    table = auto_calibrate(net, recipe, batches)
    int8, report = quantize(net, recipe, table)
    assert query.weight_bytes(int8) < 1.4 * 3000 * 96  # 2.1 before; scales and biases too
    assert {op.precision for op in report.operators if op.type in ("Gather", "MatMul", "Gemm")} == {"int8"}
    assert output_sqnr(net, int8, batches) > 30
    path = io.save(int8, tmp_path / "int8.onnx")
    for engine in EXACT:
        session = load(path, engine)
        ran = [op for op in session.executed(batches[0]) if op.type in LAYERS[engine]]
        assert [op.precision for op in ran] == ["u8", "u8"], (engine, ran)
        expected = run(int8, **batches[0])["y"]
        np.testing.assert_allclose(session.run(batches[0])["y"], expected, atol=0.06 * np.abs(expected).max())


def test_a_table_of_other_values_stays_apart():
    normal = normals(1)
    table = normal(3000, 96)
    other = table.T.copy()
    other[5, 7] += 1
    net = model(TWICE, E=table, W=normal(96, 96) / 10, F=other)
    batches = [{"ids": np.arange(96)}]
    recipe = QuantRecipe(tie_tables=True)
    int8, _ = quantize(net, recipe, auto_calibrate(net, recipe, batches))
    assert query.weight_bytes(int8) > 1.9 * 3000 * 96
    assert not any(node.op_type == "Transpose" for node in int8.graph)
    assert isinstance(int8, ir.Model)


def test_recipes_of_zoo_models_leave_it_off(rng):
    """The bytes of models that ship do not change, nor does the JSON of their recipes."""
    net = model(GEMM, E=normals(1)(3000, 96), W=normals(2)(96, 96) / 10)
    batches = [{"ids": rng.integers(0, 3000, 96)}]
    int8, _ = quantize(net, QuantRecipe(), auto_calibrate(net, QuantRecipe(), batches))
    assert query.weight_bytes(int8) > 1.9 * 3000 * 96
    assert "tie_tables" not in QuantRecipe().to_json() and QuantRecipe(tie_tables=True).to_json()["tie_tables"]
