"""Near misses of the first layer folded into the tables, each with its reason; the graph stays as it was."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from helpers.folded_embeddings import CACHES, FOLD, network, normal, prepared
from helpers.rewriting import model

from pipelines.graph import edit, io, query
from pipelines.quantization.calibration.calibrate import TensorRange, calibrate
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import FuseParallelEmbedding, FuseParallelSum
from zoo.recommenders.lowering.fold import FoldParallelEmbedding, fold

pytestmark = pytest.mark.usefixtures("caches")


def refused(found, feeds, reason, fuse=True, change=lambda table: table, caches=CACHES):
    found, table = prepared(found, feeds, fuse)
    before = io.digest(found)
    rule = FoldParallelEmbedding(change(table), caches)
    report = rewrite(found, [rule])
    assert report.fired(FOLD) == 0 and io.digest(found) == before
    assert reason in next(iter(report.passes[0][2].values()))


def test_layers_whose_sums_are_read_elsewhere_are_left_alone():
    for leaving in ("g", "v"):
        found, feeds = network()
        rewrite(found, [FuseParallelEmbedding(), FuseParallelSum()])
        found.graph.outputs.append(
            next(value for node in found.graph for value in node.outputs if value.name == leaving)
        )
        refused(found, feeds, "its sum is read by other than one Relu")
    found, feeds = network()
    next(node for node in found.graph if node.outputs[0].name == "h").op_type = "Tanh"
    refused(found, feeds, "its sum is read by other than one Relu")


def test_parts_of_unknown_width_and_rows_that_are_joined_are_left_alone():
    found, feeds = network(wide=False)
    found.graph.inputs[1].shape = ir.Shape(["n", "k"])
    refused(found, feeds, "its part x is not known to be float32 of a fixed number of columns")
    found, feeds = network(rows=(9,), dense=(), wide=False)
    next(node for node in found.graph if node.op_type == "Concat").attributes["axis"] = ir.AttrInt64("axis", 0)
    refused(found, feeds, "what it reads is not joined by columns")


def test_a_lookup_that_is_read_elsewhere_is_left_alone():
    found, feeds = network()
    found.graph.outputs.append(next(value for node in found.graph for value in node.outputs if value.name == "eE1"))
    refused(found, feeds, "its part eE1 is no lookup by columns of one input that only this layer reads", fuse=False)


def test_ids_of_two_inputs_are_left_alone():
    found, feeds = network(wide=False)
    other = ir.Value(name="other", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["n", 3]))
    found.graph.inputs.append(other)
    next(node for node in found.graph if node.op_type == "Gather").replace_input_with(0, other)
    refused(found, feeds | {"other": feeds["ids"]}, "its lookups do not read one graph input", fuse=False)


def test_ids_that_are_computed_are_left_alone():
    found, feeds = network(wide=False)
    negative = edit.node("Abs", [found.graph.inputs[0]], "abs", dtype=ir.DataType.INT32)
    negative.outputs[0].shape = found.graph.inputs[0].shape
    for node in [node for node in found.graph if node.op_type == "Gather" and node.inputs[0] is found.graph.inputs[0]]:
        node.replace_input_with(0, negative.outputs[0])
    found.graph.insert_before(found.graph[0], negative)
    refused(found, feeds, "its lookups do not read one graph input")


def without(name):
    return lambda table: replace(table, tensors={key: each for key, each in table.tensors.items() if key != name})


def ranged(name, low, high):
    return lambda table: replace(table, tensors=table.tensors | {name: TensorRange(low, high, low, high, 1)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("x"), "no calibrated range for its part x"),
        (without("h"), "no calibrated range from 0 on for its result h"),
        (ranged("h", -1, 1), "no calibrated range from 0 on for its result h"),
        (ranged("x", 0, 0), "its part x was 0 at most in calibration, which gives no step"),
        (ranged("x", -1e-40, 1e-40), "which gives no step"),
        (
            ranged("h", 0, 1e-9),
            "ParallelEmbedding has scales or biases that are not finite, or results beyond 32 bits",
        ),
    ],
)
def test_ranges_that_are_missing_or_give_no_step(change, reason):
    refused(*network(), reason, change=change)


@pytest.mark.parametrize("gemm", ["Gemm(v, W, B)", "Gemm(v, P, b)"])
def test_weights_that_are_no_constants_are_left_alone(gemm):
    found, feeds = network(gemm=gemm, dense=(("x", 4),), extra={"B": normal(40), "P": normal(22, 40)})
    name, place, reason = (
        ("P", 1, "its weights are no constant float32 matrix")
        if "P" in gemm
        else ("B", 2, "its bias is not a constant row")
    )
    value = found.graph.initializers[name]
    same = edit.node("Identity", [value], "same", dtype=ir.DataType.FLOAT)
    product = edit.node("Mul", [same.outputs[0], value], "square", dtype=ir.DataType.FLOAT)
    node = next(node for node in found.graph if node.outputs[0].name == "g")
    found.graph.insert_before(found.graph[0], [same, product])
    node.replace_input_with(place, product.outputs[0])
    refused(found, feeds, reason)


def test_more_fields_than_an_int16_sum_holds_are_left_alone():
    found, feeds = network(rows=(1,) * 259, width=1, wide=False, dense=())
    refused(found, feeds, "it has 259 fields; an int16 sum holds 1 to 258", fuse=False)


def test_tables_that_are_not_finite_are_left_alone():
    found, table = prepared(*network())
    name = next(name for name in found.graph.initializers if name.endswith("embeddings.table"))
    value = found.graph.initializers[name]
    array = query.constant(value).copy()
    array[3, 2] = np.inf
    value.const_value = ir.tensor(array, name=name)
    with np.errstate(invalid="ignore"):
        report = rewrite(found, [FoldParallelEmbedding(table, CACHES)])
    assert list(report.passes[0][2].values()) == ["its tables or weights are not finite"]


def test_a_graph_without_lookups_has_nothing_to_refuse():
    found = model("(float[n,4] x) => (float[n,3] y) { g = Gemm(x, W) y = Relu(g) }", W=normal(4, 3))
    feeds = {"x": normal(9, 4)}
    result, report = fold(found, calibrate(found, [feeds], "minmax"), QuantRecipe())
    assert (
        result is None
        and report["reason"] == "no layer that reads lookups by columns of one input"
        and not report["refused"]
    )
