"""What the kernels compute, by hand and against plain float; layers that could overflow are refused."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from pipelines.core.errors import RequestError
from pipelines.graph import io, query
from pipelines.kernels.recommenders.from_graph import embedding_layer
from pipelines.kernels.recommenders.from_graph import parallel_embedding as node_of
from pipelines.kernels.recommenders.operators import EmbeddingLayer, LinearLayer
from pipelines.kernels.recommenders.reference import linear, parallel_embedding

RNG = np.random.default_rng(0)


def layer(rows=(3, 5, 2), columns=None, width=40, numbers=4, shift=6, wide=True):
    """A layer with random arrays in all their ranges."""
    fields, total, padded = len(rows), sum(rows), -(-width // 64) * 64
    table = np.full((total, padded), 128, np.uint8)
    table[:, :width] = RNG.integers(1, 256, (total, width))
    return EmbeddingLayer(
        table=table,
        columns=np.array(columns or range(fields), np.int32),
        offsets=np.cumsum([0, *rows])[:-1].astype(np.int32),
        rows=np.array(rows, np.int32),
        weight=RNG.integers(-900, 900, (numbers, width)).astype(np.int16),
        scale=RNG.uniform(0.5, 2, width).astype(np.float32) / np.float32(3 * 2**shift),
        bias=RNG.uniform(-20, 60, width).astype(np.float32),
        number_scale=RNG.uniform(10, 20, numbers).astype(np.float32),
        shift=shift,
        wide=RNG.standard_normal(total).astype(np.float32) if wide else None,
    )


def feeds(of, count=50):
    ids = np.zeros((count, of.columns.max() + 1), np.int32)
    for column, rows in zip(of.columns, of.rows, strict=True):
        ids[:, column] = RNG.integers(0, rows, count)
    return ids, RNG.standard_normal((count, of.number_scale.size)).astype(np.float32)


@pytest.mark.parametrize(
    ("columns", "width", "numbers"), [(None, 40, 4), ([2, 0, 1], 64, 1), ([3, 1, 0], 65, 0), ([1, 1, 1], 1, 13)]
)
def test_an_embedding_layer_is_rows_plus_numbers_in_float(columns, width, numbers):
    of = replace(layer(columns=columns, width=width, numbers=numbers))
    of = (
        replace(of, rows=np.full(3, 2, np.int32)) if columns == [1, 1, 1] else of
    )  # one column, so ids fit the shortest field
    ids, x = feeds(of)
    hidden, wide = parallel_embedding(of, ids, x)
    rows = [offset + ids[:, column] for offset, column in zip(of.offsets, of.columns, strict=True)]
    values = (of.table.astype(np.float64) - 128)[:, :width] * 2.0**of.shift
    sums = sum(values[row] for row in rows) + np.rint(x * of.number_scale).astype(np.float64) @ of.weight.astype(
        np.float64
    )
    expected = np.clip(sums * of.scale + of.bias, 0, 255)
    assert (
        hidden.dtype == np.uint8 and hidden.shape == (50, width) and wide.dtype == np.float32 and wide.shape == (50, 1)
    )
    assert np.abs(hidden - expected).max() <= 0.5001
    assert (hidden > 0).any() and (hidden < 255).any()
    np.testing.assert_allclose(wide[:, 0], sum(of.wide[row].astype(np.float64) for row in rows), rtol=1e-5, atol=1e-6)


def by_hand(**changes):
    found = {
        "table": np.full((3, 64), 128, np.uint8),
        "columns": np.array([1, 0], np.int32),
        "offsets": np.array([0, 1], np.int32),
        "rows": np.array([1, 2], np.int32),
        "weight": np.array([[3], [-1]], np.int16),
        "scale": np.array([0.5], np.float32),
        "bias": np.array([10], np.float32),
        "number_scale": np.array([2, 1000], np.float32),
        "shift": 1,
        "wide": np.array([1, 10, 100], np.float32),
    }
    found["table"][:, 0] = [255, 1, 130]  # 127, -127, 2
    return EmbeddingLayer(**found | changes)


@pytest.mark.parametrize(
    ("ids", "numbers", "hidden", "wide"),
    [
        ([1, 0], [0, 0], 139, 101),  # (127 + 2) 2 / 2 + 10
        ([0, 0], [0, 0], 10, 11),
        ([0, 0], [0.25, 0], 10, 11),  # half a step rounds to even, to 0
        ([0, 0], [0.75, 0], 13, 11),  # and 1.5 steps to 2: 10 + 3
        ([0, 0], [0, 5], 0, 11),  # 2048 steps at most: 10 - 1024, the ReLU
        ([0, 0], [np.inf, 0], 255, 11),
        ([0, 0], [0, -np.inf], 255, 11),
        ([0, 0], [np.nan, np.nan], 10, 11),  # no number is 0
        ([0, 0], [-1, 0], 7, 11),  # rint(10 - 3)
    ],
)
def test_an_embedding_layer_by_hand(ids, numbers, hidden, wide):
    found = parallel_embedding(by_hand(), np.array([ids]), np.array([numbers], np.float32))
    assert (found[0].item(), found[1].item()) == (hidden, wide)


def test_results_at_a_half_round_to_even():
    found = by_hand(scale=np.array([0.25], np.float32), bias=np.array([10], np.float32))
    half = [parallel_embedding(found, np.array([[0, 0]]), np.array([[x, 0]], np.float32))[0].item() for x in (1, 3)]
    assert half == [12, 14]  # 10 + 6 / 4 = 11.5 and 10 + 18 / 4 = 14.5


def test_the_wide_sum_adds_in_the_order_of_the_fields():
    rows = (1, 1, 1)
    values = np.array([1e8, 1, -1e8], np.float32)
    of = replace(layer(rows, numbers=0), wide=values)
    ids, x = np.zeros((1, 3), np.int32), np.zeros((1, 0), np.float32)
    assert parallel_embedding(of, ids, x)[1].item() == 0  # 1e8 + 1 = 1e8 in float32
    turned = replace(of, offsets=np.array([0, 2, 1], np.int32))
    assert parallel_embedding(turned, ids, x)[1].item() == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"table": np.zeros((3, 1), np.uint8)}, "table uint8 [3, 1]; wanted uint8 [3, 64]"),
        ({"table": np.zeros((3, 64), np.int8)}, "table int8"),
        ({"weight": np.zeros((1, 1), np.int16)}, "weight int16 [1, 1]; wanted int16 [2, 1]"),
        ({"wide": np.zeros(2, np.float32)}, "wide float32 [2]"),
        ({"shift": 15}, "shifts by 15"),
        ({"shift": -1}, "shifts by -1"),
        ({"rows": np.array([1, 3], np.int32)}, "outside its table"),
        ({"rows": np.array([0, 2], np.int32)}, "outside its table"),
        ({"columns": np.array([-1, 2], np.int32)}, "outside its table"),
        ({"scale": np.array([np.nan], np.float32)}, "not finite"),
        ({"bias": np.array([np.inf], np.float32)}, "not finite"),
        ({"number_scale": np.array([1, np.inf], np.float32)}, "not finite"),
        ({"scale": np.array([1e8], np.float32)}, "beyond 32 bits"),
    ],
)
def test_layers_that_are_refused(changes, reason):
    with pytest.raises(RequestError, match=reason.replace("[", r"\[")):
        by_hand(**changes)


def test_fields_and_sums_at_their_limits():
    def of(fields, numbers, weight, shift):
        return EmbeddingLayer(
            table=np.full((fields, 64), 255, np.uint8),
            columns=np.zeros(fields, np.int32),
            offsets=np.arange(fields, dtype=np.int32),
            rows=np.ones(fields, np.int32),
            weight=np.full((numbers, 1), weight, np.int16),
            scale=np.array([2.0**-24], np.float32),
            bias=np.zeros(1, np.float32),
            number_scale=np.ones(numbers, np.float32),
            shift=shift,
        )

    widest = of(258, 0, 0, 14)  # 258 * 127 = 32766 fits int16
    hidden, _ = parallel_embedding(widest, np.zeros((1, 1), np.int32), np.zeros((1, 0), np.float32))
    assert widest.reach().item() == 32766 << 14 and hidden.item() == 32
    with pytest.raises(RequestError, match="259 fields"):
        of(259, 0, 0, 14)
    assert of(1, 31, 32767, 14).reach().item() == (127 << 14) + 2048 * 31 * 32767 < 2**31
    with pytest.raises(RequestError, match="overflow 32 bits"):
        of(1, 32, 32767, 14)
    assert of(1, 32, 32767, 8).reach().item() == 2**31 - 2**16 + (127 << 8)
    with pytest.raises(RequestError, match="overflow 32 bits"):
        of(1, 32, 32767, 10)


# --- LinearLayer


@pytest.mark.parametrize("zero", [None, 0, 100])
def test_a_linear_layer_is_a_product_in_float(zero):
    weight = RNG.integers(-127, 128, (30, 7)).astype(np.int8)
    bias = RNG.integers(-5000, 5000, 7).astype(np.int32)
    scale = RNG.uniform(0.5, 1, 7).astype(np.float32) / 200
    of = LinearLayer(weight, bias, scale, zero, zero or 0)
    x = RNG.integers(0, 256, (20, 30)).astype(np.uint8)
    expected = (x.astype(np.float64) @ weight + bias) * scale
    found = linear(of, x)
    assert found.shape == (20, 7)
    if zero is None:
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    else:
        assert found.dtype == np.uint8 and found.min() == zero
        assert np.abs(found - np.clip(expected + zero, zero, 255)).max() <= 0.5001


def test_a_linear_layer_by_hand():
    of = LinearLayer(
        np.array([[2], [-3]], np.int8), np.array([1], np.int32), np.array([0.5], np.float32), zero_point=10
    )
    x = np.array([[1, 0], [2, 0], [0, 1], [0, 255], [255, 0]], np.uint8)
    assert linear(of, x).ravel().tolist() == [12, 12, 9, 0, 255]  # 1.5 -> 2, 2.5 -> 2, -1, and both ends
    assert linear(replace(of, low=10), x).ravel().tolist() == [12, 12, 10, 10, 255]
    assert linear(replace(of, zero_point=None), x).ravel().tolist() == [1.5, 2.5, -1.0, -382.0, 255.5]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weight": np.zeros(3, np.int8)}, "shape"),
        ({"weight": np.zeros((2, 1), np.uint8)}, "weight uint8"),
        ({"bias": np.zeros(2, np.int32)}, "bias int32"),
        ({"bias": np.array([2**31 - 1], np.int32), "weight": np.ones((2, 1), np.int8)}, "overflow"),
        ({"scale": np.array([np.inf], np.float32)}, "overflow"),
        ({"zero_point": 256}, "zero point 256"),
        ({"low": -1}, "lower bound -1"),
    ],
)
def test_linear_layers_that_are_refused(changes, reason):
    found = {
        "weight": np.ones((2, 1), np.int8),
        "bias": np.zeros(1, np.int32),
        "scale": np.ones(1, np.float32),
        "zero_point": 0,
    }
    with pytest.raises(RequestError, match=reason):
        LinearLayer(**found | changes)


# --- nodes


def graph_of(of):
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["n", 3]))
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", of.number_scale.size]))
    main = ir.Graph([ids, x], [], nodes=[], name="g", opset_imports={"": 17})
    node = node_of(main, of, ids, x if of.number_scale.size else None, "e", query.used_names(main))
    main.append(node)
    main.outputs.extend(node.outputs)
    return ir.Model(main, ir_version=9)


@pytest.mark.parametrize(("numbers", "wide"), [(4, True), (0, True), (4, False), (0, False)])
def test_a_node_keeps_its_layer_in_a_file(tmp_path, numbers, wide):
    of = layer(numbers=numbers, wide=wide)
    found = io.load(io.save(graph_of(of), tmp_path / "m.onnx"))
    assert found.opset_imports["int8.zoo"] == 1 and len(found.graph.outputs) == 1 + wide
    back = embedding_layer(found.graph[0])
    for name, array in vars(of).items():
        np.testing.assert_array_equal(getattr(back, name), array)
        assert not isinstance(array, np.ndarray) or getattr(back, name).dtype == array.dtype


def test_other_nodes_are_no_layer():
    with pytest.raises(RequestError, match="is Relu; wanted ParallelEmbedding of int8.zoo"):
        embedding_layer(ir.node("Relu", [None], name="r"))
    node = graph_of(layer()).graph[0]
    node.replace_input_with(2, node.inputs[0])  # a table that is computed
    with pytest.raises(RequestError, match="e has no constant table"):
        embedding_layer(node)
    with pytest.raises(RequestError, match="has no constant table"):
        embedding_layer(ir.node("ParallelEmbedding", [None], domain="int8.zoo", attributes={"shift": 3}))
