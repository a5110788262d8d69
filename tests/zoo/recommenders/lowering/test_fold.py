"""The first layer folded into the tables: algebra, bytes, cost model, near misses; the shipped model on its sample."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from helpers.folded_embeddings import CACHES, FOLD, network, normal, prepared
from helpers.rewriting import ops, run

import zoo
from pipelines.analysis.metrics import auc
from pipelines.core.errors import RequestError
from pipelines.graph import edit, io, query
from pipelines.kernels.recommenders.from_graph import embedding_layer
from pipelines.kernels.recommenders.reference import parallel_embedding
from pipelines.quantization.calibration.calibrate import CalibrationTable
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.lowering import fold as folding
from zoo.recommenders.lowering.fold import FoldParallelEmbedding, decide, fold, fold_layer

pytestmark = pytest.mark.usefixtures("caches")


def executor(found):
    """{input: array} -> {output: array}: the operator as `reference` defines it, the rest in onnxruntime."""
    rest = found.clone()
    node = next(each for each in rest.graph if each.domain)
    layer, names = embedding_layer(node), [value.name if value else None for value in node.inputs[:2]]
    concat = node.inputs[1].producer() if node.inputs[1] is not None else None  # several dense parts
    dense = [value.name for value in concat.inputs] if concat is not None else [name for name in names[1:] if name]
    for value in node.outputs:
        fed = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.replace_all_uses_with(fed, replace_graph_outputs=True)
        rest.graph.inputs.append(fed)
    outputs = [str(value.name) for value in node.outputs]
    for each in (node, concat) if concat is not None else (node,):
        rest.graph.remove(each, safe=True)
    for value in list(rest.graph.inputs):
        if not value.uses() and not value.is_graph_output():
            rest.graph.inputs.remove(value)
    for name in [name for name, value in rest.graph.initializers.items() if not value.uses()]:
        del rest.graph.initializers[name]
    session = ort.InferenceSession(ir.to_proto(rest).SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = [each.name for each in session.get_inputs()]

    def execute(**feeds):
        x = np.concatenate([np.zeros((len(feeds[names[0]]), 0), np.float32), *(feeds[name] for name in dense)], axis=1)
        made = dict(zip(outputs, parallel_embedding(layer, feeds[names[0]], x), strict=False))
        given = {name: array for name, array in (feeds | made).items() if name in wanted}
        return dict(zip([each.name for each in session.get_outputs()], session.run(None, given), strict=True))

    return execute


def folded(found, feeds, fuse=True):
    """(graph after the pass, its report); its hidden layer must be the float one to the roundings, the graph valid and
    settled.
    """
    found, table = prepared(found, feeds, fuse)
    expected = run(with_hidden(found), **feeds)
    result = found.clone()
    rule = FoldParallelEmbedding(table, CACHES)
    report = rewrite(result, [rule])
    assert report.fired(FOLD) == 1 and ops(result).count("ParallelEmbedding") == 1
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    before = io.digest(result)
    assert rewrite(result, [FoldParallelEmbedding(table, CACHES)]).fired(FOLD) == 0 and io.digest(result) == before
    outputs = executor(with_hidden(result))(**feeds)
    step = table.tensors["h"].high / 255
    assert (np.abs(outputs["h"] - expected["h"]) <= roundings(layer_of(result)) * step).all()
    np.testing.assert_allclose(outputs["y"], expected["y"], atol=0.02)
    return result, report


def roundings(layer):
    """By how many steps the hidden layer may be wrong, per column: half a step of the result, of every row, of every
    number and weight.
    """
    numbers = (np.abs(layer.weight.astype(np.float64)) + 2048).sum(axis=0) * layer.scale
    return (1 + layer.columns.size * layer.scale * 2.0**layer.shift + numbers) / 2 + 1e-3


def with_hidden(found):
    found = found.clone()
    found.graph.outputs.append(next(value for node in found.graph for value in node.outputs if value.name == "h"))
    return found


def layer_of(found):
    return embedding_layer(next(node for node in found.graph if node.domain))


# --- what folds

REST = ["DequantizeLinear", "Gemm", "Relu", "Gemm"]


def test_lookups_numbers_and_the_wide_part_become_one_operator():
    found, feeds = network()
    result, report = folded(found, feeds)
    assert ops(result) == ["ParallelEmbedding", *REST, "Add", "Sigmoid"]
    assert [value.name if value else "" for value in result.graph[0].inputs[:2]] == ["ids", "x"]
    assert not report.passes[0][2] and result.graph[1].outputs[0].name == "h"
    layer = layer_of(result)
    np.testing.assert_allclose(layer.number_scale, np.full(4, 2048 / np.abs(feeds["x"]).max()), rtol=1e-6)
    assert layer.table.shape == (21, 64) and (layer.table[:, 40:] == 128).all() and layer.table[:, :40].min() == 1
    assert layer.wide is not None and layer.rows.tolist() == [7, 3, 11] and layer.offsets.tolist() == [0, 7, 10]


@pytest.mark.parametrize(
    "changes",
    [
        {"wide": False},
        {"summed": [2, 0, 1]},
        {"dense": ()},
        {"dense": (), "wide": False},
        {"dense": (("x", 4), ("p", 1), ("q", 3))},
        {"dense": (("x", 4), ("p", 2)), "parts": ["p", "eE1", "eE0", "x", "eE2"]},
        {"hidden": 64},
        {"hidden": 65},
        {"ids": "int64"},
        {"columns": [2, 0, 1]},
        {"columns": [4, 1, 3]},
        {"columns": [0, 1, 0], "rows": (5, 9, 5)},
        {"width": (4, 4, 9)},
        {"rows": (1, 200, 2)},
        {"rows": (9,)},
        {"gemm": "Gemm<transB=1>(v, W, b)"},
        {"gemm": "Gemm<alpha=0.5, beta=2.0>(v, W, b)"},
        {"gemm": "Gemm(v, W)"},
    ],
    ids=str,
)
@pytest.mark.parametrize("fuse", [True, False])
def test_variants(changes, fuse):
    result, _ = folded(*network(**changes), fuse=fuse)
    layer = layer_of(result)
    rows, columns = changes.get("rows", (7, 3, 11)), changes.get("columns", range(3))
    wanted = dict(zip(columns, rows, strict=False))
    assert {int(c): int(r) for c, r in zip(layer.columns, layer.rows, strict=True)} == wanted
    assert (layer.wide is not None) == (
        fuse and changes.get("wide", True) and len(rows) > 1 and changes.get("columns") != [0, 1, 0]
    )
    assert layer.number_scale.size == sum(m for _, m in changes.get("dense", (("x", 4),)))


def test_the_algebra_is_exact():
    """In float64, rows times weights, less their middles, are the layer; so are the integers, to their steps."""
    found, feeds = network()
    weights = {name: query.constant(value).astype(np.float64) for name, value in found.graph.initializers.items()}
    w = np.split(weights["W"], [6, 12, 18])
    fields = [folding._Field(f, weights[f"E{f}"].astype(np.float32), w[f]) for f in range(3)]
    step, hidden = np.full(4, 2048.0), 0.01
    layer = fold_layer(fields, w[3], step, weights["b"], hidden)
    s = layer.scale.astype(np.float64) * 2.0**layer.shift * hidden
    products = np.concatenate([fields[f].table.astype(np.float64) @ w[f] for f in range(3)])
    middles = [(p.max(axis=0) + p.min(axis=0)) / 2 for p in np.split(products, [7, 10])]
    near = (layer.table[:, :40].astype(np.float64) - 128) * s + np.repeat(middles, [7, 3, 11], axis=0)
    assert (np.abs(near - products) <= 0.5001 * s).all()
    np.testing.assert_allclose(layer.bias * hidden, weights["b"] + sum(middles), atol=1e-6)
    np.testing.assert_allclose(
        layer.weight * s * 2048 / 2.0**layer.shift, w[3], atol=0.51 * 2048 * s.max() / 2.0**layer.shift
    )
    ids = feeds["ids"]
    exact = sum(np.split(products, [7, 10])[f][ids[:, f]] for f in range(3)) + feeds["x"] @ w[3] + weights["b"]
    joined = np.concatenate([*(weights[f"E{f}"][ids[:, f]] for f in range(3)), feeds["x"]], axis=1)
    np.testing.assert_allclose(exact, joined @ weights["W"] + weights["b"], rtol=1e-12, atol=1e-12)


def test_a_wide_part_that_the_numbers_depend_on_stays():
    found, feeds = network(wide=False, dense=(("x", 1),))
    text_sum = {"S": normal(21, 1), "o": np.array([0, 7, 10], np.int32), "a": np.array([1], np.int64)}
    main = found.graph
    values = {name: edit.initializer(main, name, array) for name, array in text_sum.items()}
    rows = edit.node("Add", [main.inputs[0], values["o"]], "rows", dtype=ir.DataType.INT32)
    gathered = edit.node("Gather", [values["S"], rows.outputs[0]], "gathered", dtype=ir.DataType.FLOAT, axis=0)
    total = edit.node("ReduceSum", [gathered.outputs[0], values["a"]], "total", dtype=ir.DataType.FLOAT, keepdims=0)
    concat = next(node for node in main if node.op_type == "Concat")
    main.insert_before(concat, [rows, gathered, total])
    concat.replace_input_with(len(concat.inputs) - 1, total.outputs[0])
    main.inputs.pop()
    found, table = prepared(found, feeds := {"ids": feeds["ids"]})
    report = rewrite(found, [FoldParallelEmbedding(table, CACHES)])
    assert report.passes[0][2] == {"total": "the numbers of the first layer depend on it"}
    assert "ReduceSum" in ops(found) and layer_of(found).wide is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("keepdims", "it does not sum over the fields, or keeps their axis"),
        ("axis", "it does not sum over the fields, or keeps their axis"),
        ("offsets", "its columns or their rows are not those of the first layer"),
    ],
)
def test_wide_parts_that_stay(change, reason):
    found, table = prepared(*network())
    node = next(each for each in found.graph if each.op_type == "ReduceSum")
    if change == "keepdims":
        node.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)
    elif change == "axis":
        node.inputs[1].const_value = ir.tensor(np.array([2], np.int64))
    else:
        node.inputs[0].producer().inputs[1].producer().inputs[1].const_value = ir.tensor(np.array([0, 6, 10], np.int32))
    report = rewrite(found, [FoldParallelEmbedding(replace(table, graph=io.digest(found)), CACHES)])
    assert report.fired(FOLD) == 1 and list(report.passes[0][2].values()) == [reason]
    assert "ReduceSum" in ops(found) and layer_of(found).wide is None


# --- integers at their bounds


def one_column(table, weight, step, bias=0.0, hidden=1.0, fields=1):
    table = np.asarray(table, np.float32)[:, None]
    parts = [folding._Field(f, table, np.ones((1, 1))) for f in range(fields)]
    return fold_layer(
        parts, np.asarray(weight, np.float64)[:, None], np.asarray(step, np.float64), np.array([bias]), hidden
    )


def test_weights_reach_the_end_of_int16():
    def of(weight, count=1):
        return one_column([127, -127], [weight] * count, [2048.0] * count)  # a table step of 1

    assert (of(4095.875).shift, of(4095.875).weight.item()) == (14, 32767)
    assert (of(4096).shift, of(4096).weight.item()) == (13, 16384)
    assert (of(-(2**26 - 2048)).shift, of(-(2**26 - 2048)).weight.item()) == (0, -32767)
    with pytest.raises(RequestError, match="do not fit int16"):
        of(2**26)
    assert of(4095.875, 31).shift == 14
    assert of(4095.875, 32).shift == 13  # 2048 * 32 * 32767 and the row: beyond int32


def test_sums_reach_the_end_of_int16():
    layer = one_column([127, -127], [], [], fields=258)
    assert layer.shift == 14 and layer.table[:2, 0].tolist() == [255, 1] and layer.reach().item() == 32766 << 14
    high, low = (
        parallel_embedding(layer, np.full((1, 258), i), np.zeros((1, 0), np.float32))[0].item() for i in (0, 1)
    )
    assert (high, low) == (255, 0)


def test_columns_of_zeros_and_equal_rows_have_a_step():
    zeros = one_column([0, 0], [3.0], [2048.0], bias=7.5)
    assert (zeros.table[:, 0] == 128).all() and zeros.bias.item() == 7.5
    found = parallel_embedding(zeros, np.array([[0], [1]]), np.array([[1], [0.5]], np.float32))[0].ravel()
    assert found.tolist() == [10, 9]  # 10.5 and 9
    same = one_column([5, 5], [], [])
    assert (same.table[:, 0] == 128).all() and same.bias.item() == 5  # the middle is in the bias, exactly
    assert (
        one_column([1e-30, -1e-30], [1.0], [2048.0]).shift >= 10
    )  # steps of the table are no finer than the hidden layer asks for


# --- the cost model


def test_the_cost_model_weighs_products_against_bytes():
    shipped = dict(widths=[32] * 26, rows=26000, hidden=1024)
    for level, size in (("L3", 2**25), ("DRAM", 2**24), ("DRAM", 0)):
        found = decide(**shipped, caches={"L2": 2**20, "L3": size})
        assert found.fold and f"in {level}" in found.reason
        assert (found.table_bytes, found.macs_saved) == (26_624_000, 851_968)
        assert found.estimated_us["rows"] < found.estimated_us["gemm"] == 2.13
    assert decide(**shipped, caches={}).fold
    assert "in L2" in decide([4] * 26, 2600, 64, CACHES).reason and decide([4] * 26, 2600, 64, CACHES).fold
    assert not decide([8] * 26, 26000, 1024, CACHES).fold  # 8 products a byte from L3 are faster
    assert not decide([16] * 26, 26000, 1024, {}).fold
    huge = decide([32] * 26, 26_000_000, 1024, CACHES)
    assert (
        not huge.fold
        and huge.reason == "a table of 26,624.0 MB is more than 268.4 MB"
        and huge.table_bytes == 26_624_000_000
    )
    assert set(huge.to_json()) == {"fold", "reason", "table_bytes", "macs_saved", "estimated_us"}


def test_what_does_not_pay_computes_no_table(monkeypatch):
    monkeypatch.setattr(folding, "fold_layer", None)
    monkeypatch.setattr(folding, "LIMIT", 21 * 64 - 1)
    found, table = prepared(*network())
    result, report = fold(found, table, QuantRecipe())
    assert result is None and report["reason"] == "a table of 0.0 MB is more than 0.0 MB"
    assert report["layers"]["h"]["fold"] is False and report["refused"] == {"g": report["reason"]}


# --- the native graph


def test_the_native_graph(tmp_path):
    found, table = prepared(*(made := network(dense=(("x", 4), ("p", 2)))))
    before = io.digest(found)
    result, report = fold(found, table, QuantRecipe())
    assert io.digest(found) == before
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    kinds = [(each["type"], each["precision"]) for each in report["quantization"]["operators"]]
    assert ("ParallelEmbedding", "int8") in kinds and kinds.count(("Gemm", "int8")) == 2
    assert report["fold"] and report["layers"]["h"]["fold"] and "us" in report["reason"]
    second = next(node for node in result.graph if node.outputs[0].name == "m")
    back = second.inputs[0].producer()
    assert back.op_type == "DequantizeLinear" and back.inputs[0].producer().op_type == "ParallelEmbedding"
    again, _ = fold(found, table, QuantRecipe())
    paths = [io.save(each, tmp_path / f"{number}.onnx") for number, each in enumerate((result, again))]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = io.load(paths[0])
    assert io.digest(loaded) == io.digest(result)
    plain = run(found, **made[1])["y"]
    assert np.abs(executor(loaded)(**made[1])["y"] - plain).max() < 0.03


def test_the_recipe_is_kept():
    found, table = prepared(*network())
    result, report = fold(found, table, QuantRecipe(quantize_tables=False))
    assert result is None and report["reason"] == "the recipe keeps tables float"
    for name in ("g", "h", "v", ".*embeddings.*"):
        result, report = fold(found, table, QuantRecipe(keep_float=(name,)))
        assert result is None and report["reason"] == "kept float by the recipe", name
    result, report = fold(found, table, QuantRecipe(keep_float=(".*wide",)))
    assert "ReduceSum" in ops(result) and "kept float by the recipe" in report["refused"].values()
    result, report = fold(found, table, QuantRecipe(keep_float=("m",)))
    assert {each["name"]: each["precision"] for each in report["quantization"]["operators"]}["m"] == "float"
    with pytest.raises(RequestError, match="made for the graph"):
        fold(found, replace(table, graph="0" * 64), QuantRecipe())


# --- the shipped model

NAME = "wide-deep-criteo"
BOUND = 0.003


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """(the folder, fold alone, native graph, rows -> (probabilities in float, model inputs))."""
    patch = pytest.MonkeyPatch()
    patch.setenv("ZOO_HOME", str(tmp_path_factory.mktemp("shipped") / "home"))
    folder = zoo.load(NAME)
    found = io.load(folder.path / "rewritten.onnx")
    table = CalibrationTable.load(folder.path / "calibration.json")
    alone = found.clone()
    rewrite(alone, [FoldParallelEmbedding(table, CACHES)])
    native, report = fold(found, table, folder.recipe)
    pipeline = zoo.pipeline(NAME, precision="fp32", engine="onnxruntime")
    yield folder, executor(alone), executor(native), pipeline, report
    patch.undo()


def moved(shipped, rows):
    """(probabilities in float, with the fold alone, of the native graph)."""
    _, alone, native, pipeline, _ = shipped
    batch = pipeline.preprocess(rows)
    parts = [{name: array[i : i + 512] for name, array in batch.items()} for i in range(0, len(batch["ids"]), 512)]
    found = [np.concatenate([each(**part)["probability"].ravel() for part in parts]) for each in (alone, native)]
    return pipeline.predict(batch)["probability"].ravel(), *found


def test_the_shipped_model_on_its_sample(shipped):
    plain, alone, native = moved(shipped, shipped[3].example(2000))
    assert shipped[4]["fold"] and len(plain) == 2000
    assert np.abs(alone - plain).max() <= BOUND / 2 and np.abs(native - plain).max() <= BOUND


@pytest.mark.slow
def test_the_shipped_model_on_its_whole_sample(shipped):
    plain, alone, native = moved(shipped, shipped[0].path / "sample.tsv.gz")
    assert np.abs(alone - plain).max() <= BOUND / 2 and np.abs(native - plain).max() <= BOUND


@pytest.mark.data
def test_the_shipped_model_on_real_rows(shipped, shared):
    path = shared / "data" / "criteo" / "criteo_10390.tsv"
    plain, _, native = moved(shipped, path)
    labels = np.array([line[:1] == b"1" for line in path.read_bytes().splitlines()], np.float32)
    assert np.abs(native - plain).max() <= BOUND
    assert abs(auc(labels, native) - auc(labels, plain)) <= 0.0002
