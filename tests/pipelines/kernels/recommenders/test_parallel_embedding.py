"""Graphs that version 0.2 wrote as native.onnx run as programs with the same integers."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.click_layers import same

from pipelines.core.errors import RequestError
from pipelines.engines.catalog import load
from pipelines.graph import io
from pipelines.kernels import extension
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.operators import LinearLayer
from pipelines.kernels.recommenders.parallel_embedding import program_of

ROWS, WIDTH, SHIFT = (7, 3, 11), 40, 5
INPUTS = "table, columns, offsets, rows, weight, scale, bias, step"


def arrays(rng, numbers, wide):
    total = sum(ROWS)
    table = np.full((total, 64), 128, np.uint8)
    table[:, :WIDTH] = rng.integers(1, 256, (total, WIDTH))
    made = {
        "table": table,
        "columns": np.array([2, 0, 1], np.int32),
        "offsets": np.array([0, 7, 10], np.int32),
        "rows": np.array(ROWS, np.int32),
        "weight": rng.integers(-900, 900, (numbers, WIDTH)).astype(np.int16),
        "scale": rng.uniform(0.5, 2, WIDTH).astype(np.float32) / np.float32(3 * 2**SHIFT),
        "bias": rng.uniform(-20, 60, WIDTH).astype(np.float32),
        "step": rng.uniform(10, 20, numbers).astype(np.float32),
    }
    return made | ({"wide": rng.standard_normal(total).astype(np.float32)} if wide else {})


def graph(rng, first, middle="Relu(m)"):
    """(model, its layers): the operator and two int8 layers in QDQ form."""
    numbers, wide = first["weight"].shape[0], "wide" in first
    weights = {
        "V": rng.integers(-127, 128, (WIDTH, 9)).astype(np.int8),
        "U": rng.integers(-127, 128, (9, 1)).astype(np.int8),
    }
    scales = {name: np.float32(data) for name, data in (("s", 0.02), ("sV", 0.01), ("t", 0.05), ("sU", 0.02))}
    zeros = {"z": np.uint8(0), "z8": np.int8(0)}
    x = "x" if numbers else ""
    text = f"""<ir_version: 9, opset_import: ["": 17, "int8.zoo": 1]> g (int32[n,3] ids{", float[n,4] x" if numbers else ""})
    => (float[n,1] y) {{
    {"q, total" if wide else "q"} = int8.zoo.ParallelEmbedding<shift={SHIFT}>(ids, {x}, {INPUTS}{", wide" if wide else ""})
    h = DequantizeLinear(q, s, z) v = DequantizeLinear(V, sV, z8) m = MatMul(h, v) r = {middle}
    k = QuantizeLinear(r, t, z) l = DequantizeLinear(k, t, z) u = DequantizeLinear(U, sU, z8) o = MatMul(l, u)
    {"w = Add(o, total) y = Sigmoid(w)" if wide else "y = Sigmoid(o)"} }}"""
    proto = onnx.parser.parse_model(text)
    inits = {**first, **weights, **scales, **zeros}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(data), name) for name, data in inits.items())
    factor = [np.float32(np.float64(a) * b) for a, b in ((scales["s"], scales["sV"]), (scales["t"], scales["sU"]))]
    second = np.full(9, np.float64(scales["s"]) * np.float64(scales["sV"]) / np.float64(scales["t"]), np.float32)
    layers = [
        LinearLayer(weights["V"], np.zeros(9, np.int32), second, 0, 0),
        LinearLayer(weights["U"], np.zeros(1, np.int32), np.full(1, factor[1])),
    ]
    return ir.from_proto(proto), layers


def expected(first, layers, ids, x):
    """The probabilities as version 0.2 defined them."""
    rows = first["offsets"] + ids[:, first["columns"]]
    sums = (first["table"][rows].astype(np.int64) - 128).sum(axis=1)[:, :WIDTH] << SHIFT
    codes = np.clip(np.rint(x * first["step"]), -2048, 2048).astype(np.int64)
    value = (sums + codes @ first["weight"]).astype(np.float32) * first["scale"] + first["bias"]
    value = np.clip(np.rint(value), 0, 255).astype(np.uint8)
    for layer in layers:
        value = layer.compute(value)
    logit = value[:, 0]
    if "wide" in first:
        wide = np.zeros(len(ids), np.float32)
        for column in rows.T:
            wide += first["wide"][column]
        logit = logit + wide
    return 1 / (1 + np.exp(-logit))[:, None]


@pytest.mark.parametrize(("numbers", "wide"), [(4, True), (0, True), (4, False), (0, False)])
def test_the_program_has_the_same_integers(rng, tmp_path, numbers, wide):
    first = arrays(rng, numbers, wide)
    model, layers = graph(rng, first)
    ids = rng.integers(0, [ROWS[1], ROWS[2], ROWS[0]], (300, 3)).astype(np.int32)
    x = rng.uniform(-90, 90, (300, numbers)).astype(np.float32)
    wanted = expected(first, layers, ids, x).astype(np.float32)
    program = program_of(model.graph[0])
    assert program.rows.tolist() == [ROWS[1], ROWS[2], ROWS[0]]
    same(reference.run(program, ids, x), [wanted])
    if extension.isas():
        session = load(io.save_mapped(model, tmp_path / "native.onnx"), "native")
        scores = session.run({"ids": ids, "x": x} if numbers else {"ids": ids})["y"]
        np.testing.assert_allclose(scores, wanted, rtol=1e-6)


def test_other_layers_and_missing_arrays_are_named(rng):
    first = arrays(rng, 4, True)
    with pytest.raises(RequestError, match="not int8 alone; build the model again"):
        program_of(graph(rng, first, "Tanh(m)")[0].graph[0])
    node = graph(rng, first)[0].graph[0]
    node.replace_input_with(2, node.inputs[0])  # a table that is computed
    with pytest.raises(RequestError, match="no constant table; build the model again"):
        program_of(node)
