"""Lookups of all fields become one, from ONNX text."""

import subprocess
import sys

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import integers, model, ops, reasons, rewritten, run

from pipelines.graph import io, query
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import FuseParallelEmbedding, FuseParallelSum, passes_without_header

EMBEDDINGS, SUM = "FuseParallelEmbedding", "FuseParallelSum"


# how exporters take column c of the ids
FORMS = {
    "slice": lambda c: f"s{c} = Slice(ids, b{c}, b{c + 1}, b1) i{c} = Squeeze(s{c}, b1)",
    "slice with steps": lambda c: f"s{c} = Slice(ids, b{c}, b{c + 1}, last, b1) i{c} = Squeeze(s{c}, b1)",
    "slice of both axes": lambda c: f"s{c} = Slice(ids, from{c}, to{c}, both, ones) i{c} = Reshape(s{c}, flat)",
    "gather": lambda c: f"i{c} = Gather<axis=1>(ids, c{c})",
    "gather of one column": lambda c: f"s{c} = Gather<axis=-1>(ids, b{c}) i{c} = Squeeze(s{c}, b1)",
    "cast": lambda c: f"s{c} = Gather<axis=1>(ids, c{c}) i{c} = Cast<to=7>(s{c})",
    "cast before": lambda c: f"t{c} = Cast<to=7>(ids) i{c} = Gather<axis=1>(t{c}, c{c})",
}


def constants(fields):
    arrays = {
        "last": integers(-1),
        "both": integers(0, 1),
        "ones": integers(1, 1),
        "flat": integers(-1),
        "widths": integers(*[1] * fields),
    }
    for c in range(fields + 1):
        arrays |= {
            f"b{c}": integers(c),
            f"c{c}": np.int64(c),
            f"from{c}": integers(0, c),
            f"to{c}": integers(2**31 - 1, c + 1),
        }
    return arrays


def split(fields):
    names = ", ".join(f"s{c}" for c in range(fields))
    return f"{names} = Split<axis=1>(ids, widths) " + " ".join(f"i{c} = Squeeze(s{c}, b1)" for c in range(fields))


def fields(
    rng, heights, width=4, ids="int64", form="gather", order=None, parts=None, inputs="", tail="", out="float[n,k] y"
):
    """(model of a concatenation, feeds): lookup of column c in table c, joined in `order` with what else `parts`
    names.
    """
    normal = normals(rng)
    count = len(heights)
    columns = split(count) if form == "split" else " ".join(FORMS[form](c) for c in range(count))
    widths = width if isinstance(width, list) else [width] * count
    lookups = " ".join(f"e{c} = Gather(T{c}, i{c})" for c in range(count))
    joined = parts or [f"e{c}" for c in order or range(count)]
    text = f"({ids}[n,{count}] ids{inputs}) => ({out}) {{ {columns} {lookups} y = Concat<axis=1>({', '.join(joined)}) {tail} }}"
    used = {name: array for name, array in constants(count).items() if f"{name})" in text or f"{name}," in text}
    tables = {f"T{c}": normal(height, w) for c, (height, w) in enumerate(zip(heights, widths, strict=True))}
    values = np.stack([rng.integers(0, height, 40) for height in heights], axis=1)
    for row, edge in ((0, 0), (1, -1)):  # the first and the last row of every table
        values[row] = [range(height)[edge] for height in heights]
    return model(text, **used, **tables), {"ids": values.astype(ids)}


# --- FuseParallelEmbedding

ONE_GATHER = ["Add", "Gather", "Reshape", "Concat"]


@pytest.mark.parametrize("ids", ["int32", "int64"])
@pytest.mark.parametrize("form", [*FORMS, "split"])
def test_lookups_of_all_columns_become_one(rng, form, ids):
    net, feeds = fields(rng, [7, 7, 7], ids=ids, form=form)
    report = rewritten(net, FuseParallelEmbedding(), exact=True, **feeds)
    assert report.fired(EMBEDDINGS) == 1 and ops(net) == ONE_GATHER
    assert net.graph[0].inputs[0].name == "ids" and not reasons(report, EMBEDDINGS)


def test_tables_of_unequal_heights_are_stacked(rng):
    net, feeds = fields(rng, [3, 11, 1, 200])
    rewritten(net, FuseParallelEmbedding(), exact=True, **feeds)
    assert ops(net) == ONE_GATHER
    shapes = {name: value.shape for name, value in net.graph.initializers.items()}
    assert shapes["y.embeddings.table"] == (215, 4)
    assert query.constant(net.graph.initializers["y.embeddings.offsets"]).tolist() == [0, 3, 14, 15]


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 0], [2], [0, 2], [1, 2]])
def test_permuted_and_partial_columns_are_gathered_first(rng, order):
    net, feeds = fields(rng, [5, 9, 3], order=order)
    report = rewritten(net, FuseParallelEmbedding(), exact=True, **feeds)
    if len(order) == 1:
        assert report.fired(EMBEDDINGS) == 0
        assert list(reasons(report, EMBEDDINGS).values()) == ["e2 has no neighbour of the same input and width"]
    else:
        assert ops(net) == ["Gather", *ONE_GATHER]
        assert query.constant(net.graph[0].inputs[1]).tolist() == order


def test_other_parts_stay_where_they_are(rng, normal):
    net, feeds = fields(
        rng, [5, 9, 3, 4], parts=["z", "e0", "e1", "x", "e2", "e3", "x"], inputs=", float[n,2] x, float[n,3] z"
    )
    report = rewritten(net, FuseParallelEmbedding(), exact=True, **feeds, x=normal(40, 2), z=normal(40, 3))
    assert report.fired(EMBEDDINGS) == 2
    assert ops(net).count("Gather") == 4 and ops(net).count("Concat") == 1  # two tables, two selections of columns
    names = [value.name for value in net.graph[-1].inputs]
    assert (names[0], names[2], names[4]) == ("z", "x", "x")


def test_a_single_lookup_between_others_is_left_alone(rng, normal):
    net, feeds = fields(rng, [5, 9, 3], parts=["e0", "e1", "x", "e2"], inputs=", float[n,2] x")
    report = rewritten(net, FuseParallelEmbedding(), exact=True, **feeds, x=normal(40, 2))
    assert report.fired(EMBEDDINGS) == 1
    assert list(reasons(report, EMBEDDINGS).values()) == ["e2 has no neighbour of the same input and width"]


def test_runs_of_one_width_fuse(rng):
    net, feeds = fields(rng, [5, 9, 3, 4, 6], width=[4, 4, 8, 8, 4])
    report = rewritten(net, FuseParallelEmbedding(), exact=True, **feeds)
    assert report.fired(EMBEDDINGS) == 2
    widths = sorted(
        value.shape[1] for name, value in net.graph.initializers.items() if "table" in name or name.startswith("T")
    )
    assert widths == [4, 4, 8]


def test_fields_that_share_a_table_fuse_too(rng):
    net, feeds = fields(rng, [5, 5])
    net.graph[3].replace_input_with(0, net.graph[2].inputs[0])
    rewritten(net, FuseParallelEmbedding(), exact=True, **feeds)
    assert ops(net) == ONE_GATHER


def test_two_inputs_of_ids_are_two_runs(rng, normal):
    text = """(int64[n,2] a, int64[n,2] b) => (float[n,k] y) {
        i = Gather<axis=1>(a, c0) j = Gather<axis=1>(a, c1) k = Gather<axis=1>(b, c0) l = Gather<axis=1>(b, c1)
        e = Gather(T, i) f = Gather(T, j) g = Gather(T, k) h = Gather(T, l) y = Concat<axis=-1>(e, f, g, h) }"""
    net = model(text, T=normal(5, 3), c0=np.int64(0), c1=np.int64(1))
    feeds = {name: rng.integers(0, 5, (9, 2)) for name in "ab"}
    assert rewritten(net, FuseParallelEmbedding(), exact=True, **feeds).fired(EMBEDDINGS) == 2


def near_miss(normal, text, reason=None, fused=(EMBEDDINGS, FuseParallelEmbedding), weights=None, **feeds):
    used = {
        name: array
        for name, array in (
            constants(3) | {"T": normal(5, 4), "U": normal(6, 4), "W": normal(6, 3)} | (weights or {})
        ).items()
    }
    net = model(text, **{name: array for name, array in used.items() if f"{name})" in text or f"{name}," in text})
    name, kind = fused
    report = rewritten(net, kind(), exact=True, **feeds)
    assert report.fired(name) == 0
    assert list(reasons(report, name).values()) == ([] if reason is None else [reason])


IDS = np.random.default_rng(0).integers(0, 5, (9, 3))
TWO = """(int64[n,3] ids) => (float[n,k] y) { i = Gather<axis=1>(ids, c0) j = Gather<axis=1>(ids, c1)
    e = Gather(T, i) f = Gather(U, j) y = Concat<axis=1>(e, f) }"""
LONE = "{} has no neighbour of the same input and width"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TWO.replace("axis=1>(e", "axis=0>(e"), None),
        (TWO.replace("Gather(U, j)", "Gather(W, j)"), LONE.format("f")),
        (TWO.replace("y)", "y, float[n,4] e)"), LONE.format("f")),  # the lookup leaves the graph
        (
            TWO.replace("y)", "y, float[n,4] z)").replace("y =", "z = Relu(e) y ="),
            LONE.format("f"),
        ),  # or is read elsewhere
        (TWO.replace("j = Gather<axis=1>(ids, c1)", "k = Gather<axis=1>(ids, c1) j = Abs(k)"), LONE.format("e")),
        (
            TWO.replace("j = Gather<axis=1>(ids, c1)", "s = Slice(ids, b1, b3, b1) j = Reshape(s, flat)").replace(
                "axis=1>(e", "axis=0>(e"
            ),
            None,
        ),
        (
            TWO.replace("n,k", "m,k").replace(
                "i = Gather<axis=1>(ids, c0) j = Gather<axis=1>(ids, c1)", "i = Gather(ids, c0) j = Gather(ids, c1)"
            ),
            None,
        ),
        (
            TWO.replace("[n,3]", "[n]").replace(
                "i = Gather<axis=1>(ids, c0) j = Gather<axis=1>(ids, c1)", "i = Abs(ids) j = Neg(i)"
            ),
            None,
        ),
    ],
    ids=["rows joined", "widths", "output", "read twice", "computed ids", "two columns", "rows of ids", "no columns"],
)
def test_near_misses(normal, text, reason):
    ids = IDS[:, 0] * 0 if "[n] ids" in text else IDS
    near_miss(normal, text, reason, ids=ids)


@pytest.mark.parametrize(
    ("columns", "weights"),
    [
        ("s{0} = Slice(ids, b{0}, b{2}, b1) i{0} = Reshape(s{0}, flat)", {}),  # two columns
        ("s{0} = Slice(ids, minus{0}, minus{1}, b1) i{0} = Squeeze(s{0}, b1)", {}),  # counted from the end
        (
            "s{0} = Slice(ids, from{0}, to{0}, both, steps) i{0} = Squeeze(s{0}, b1)",
            {"steps": integers(2, 1)},
        ),  # every second row
        ("s{0} = Slice(ids, from{0}, few{0}, both, ones) i{0} = Squeeze(s{0}, b1)", {}),  # the first rows
        ("s{0} = Slice(ids, b{0}, e{0}, b1) i{0} = Squeeze(s{0}, b1)", None),  # an end that is computed
    ],
    ids=["two columns", "negative", "steps", "first rows", "computed"],
)
def test_slices_that_are_no_plain_column(normal, columns, weights):
    lines = " ".join(columns.format(c, c + 1, c + 2) for c in range(2))
    if weights is None:
        lines = "shape = Shape(ids) two = Gather(shape, b1) e1 = Sub(two, b1) e0 = Sub(e1, b1) " + lines
    text = (
        f"(int64[n,3] ids) => (float[m,k] y) {{ {lines} e = Gather(T, i0) f = Gather(U, i1) y = Concat<axis=1>(e, f) }}"
    )
    more = {f"minus{c}": integers(c - 3) for c in range(3)} | {f"few{c}": integers(5, c + 1) for c in range(2)}
    near_miss(normal, text, weights=more | (weights or {}), ids=IDS)


def test_ids_that_come_as_numbers_are_added_to_after_the_cast(normal):
    """A cast from float truncates; offsets cannot be added before it."""
    text = TWO.replace("int64[n,3] ids", "float[n,3] x").replace("{ i", "{ ids = Cast<to=7>(x) i", 1)
    net = model(text, T=normal(5, 4), U=normal(6, 4), c0=np.int64(0), c1=np.int64(1))
    rewritten(net, FuseParallelEmbedding(), exact=True, x=(IDS + 0.25).astype(np.float32))
    assert ops(net) == ["Cast", "Gather", *ONE_GATHER]  # the ids begin after the cast


def test_ids_of_three_axes_are_left_alone(rng, normal):
    text = """(int64[n,2,3] ids) => (float[n,k,4] y) { i = Gather<axis=1>(ids, c0) j = Gather<axis=1>(ids, c1)
        e = Gather(T, i) f = Gather(U, j) y = Concat<axis=1>(e, f) }"""
    near_miss(normal, text, ids=rng.integers(0, 5, (9, 2, 3)))


# --- FuseParallelSum

WIDE = """(int64[n,3] ids, float[n,1] x) => (float[n,1] y) {
    i = Gather<axis=1>(ids, c0) j = Gather<axis=1>(ids, c1) k = Gather<axis=1>(ids, c2)
    e = Gather(A, i) f = Gather(B, j) g = Gather(C, k) """


def wide(rng, body, text=WIDE, width=1, **weights):
    normal = normals(rng)
    tables = {
        "A": normal(5, width),
        "B": normal(8, width),
        "C": normal(6, width),
        "bias": normal(width),
        "c0": np.int64(0),
    }
    tables |= {"c1": np.int64(1), "c2": np.int64(2), "one": integers(1)} | weights
    text = (text + body + " }").replace("[n,1]", f"[n,{width}]")
    used = {name: array for name, array in tables.items() if f"{name})" in text or f"{name}," in text}
    return model(text, **used), {"ids": rng.integers(0, 5, (9, 3)), "x": normal(9, width)}


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("body", "selects", "rest"),
    [
        ("y = Sum(e, f, g)", False, 0),
        ("a = Add(e, f) y = Add(a, g)", False, 0),
        ("a = Add(f, g) y = Add(e, a)", False, 0),
        ("a = Add(e, f) y = Add(a, x)", True, 1),
        ("a = Add(x, e) b = Add(a, f) d = Add(b, g) y = Add(d, bias)", False, 2),
        ("a = Add(e, bias) b = Add(f, x) y = Add(a, b)", True, 2),
        ("a = Sum(e, f, x) y = Add(g, a)", True, 1),
    ],
)
def test_sums_of_lookups_become_one_gather(rng, body, selects, rest, width):
    net, feeds = wide(rng, body, width=width)
    report = rewritten(net, FuseParallelSum(), **feeds)
    assert report.fired(SUM) == 1
    assert ops(net) == [*["Gather"] * selects, "Add", "Gather", "ReduceSum", *["Add"] * rest]


@pytest.mark.parametrize(
    ("body", "changes", "reason"),
    [
        ("a = Add(e, x) y = Sigmoid(a)", {}, None),  # one lookup
        ("a = Add(x, bias) y = Add(a, x)", {}, None),  # none
        ("a = Mul(e, f) y = Add(a, x)", {}, None),
        ("y = Sum(e, f, g)", {"C": normals(0)(6, 1), "width": 2}, "its lookups differ in input or width"),
        ("y = Add(e, e)", {}, None),
    ],
)
def test_sums_that_are_left_alone(rng, body, changes, reason):
    net, feeds = wide(rng, body, **changes)
    report = rewritten(net, FuseParallelSum(), exact=True, **feeds)
    assert report.fired(SUM) == 0
    assert list(reasons(report, SUM).values()) == ([] if reason is None else [reason])


def test_a_partial_sum_that_is_read_elsewhere_stays(rng):
    net, feeds = wide(rng, "a = Add(e, f) b = Add(a, g) s = Relu(a) y = Add(b, s)")
    report = rewritten(net, FuseParallelSum(), **feeds)
    assert report.fired(SUM) == 1  # a itself; b adds one lookup to it
    assert "Relu" in ops(net)


def test_a_partial_sum_that_leaves_the_graph_stays(rng):
    body = "s = Add(e, f) a = Add(s, x) b = Add(a, g) h = Gather(A, k) y = Add(b, h)"
    net, feeds = wide(rng, body, WIDE.replace("(float[n,1] y)", "(float[n,1] y, float[n,1] a)"))
    report = rewritten(net, FuseParallelSum(), **feeds)
    assert report.fired(SUM) == 2 and [value.name for value in net.graph.outputs] == ["y", "a"]


@pytest.mark.parametrize("tail", ["y = Squeeze(s, one)", "y = Add(s, z)"])
def test_a_sum_of_three_axes_keeps_its_shape(rng, normal, tail):
    """Keras looks a column [n, 1] up as [n, 1, width]."""
    text = """(int64[n,3] ids, float[n,1] x) => (float y) {
        i = Slice(ids, zero, one, one) j = Slice(ids, one, two, one) e = Gather(A, i) f = Gather(B, j) """
    net, feeds = wide(rng, f"s = Add(e, f) {tail}", text, zero=integers(0), two=integers(2), z=normal(2, 1, 1, 1))
    net.graph.outputs[0].shape = None
    rewritten(net, FuseParallelSum(), **feeds)


# --- the whole model


def wide_and_deep(rng, count=5, width=4, buckets=20):
    """As version 0.2.0 wrote it: slices shared by the deep and the wide part."""
    normal = normals(rng)
    lines, weights = [], constants(count)
    for c in range(count):
        lines.append(FORMS["slice"](c))
        lines.append(f"d{c} = Gather(deep{c}, i{c}) w{c} = Gather(wide{c}, i{c})")
        weights |= {f"deep{c}": normal(buckets, width) * np.float32(0.02), f"wide{c}": normal(buckets, 1)}
    parts = [f"d{c}" for c in range(count)]
    lines.append(f"x = Concat<axis=1>({', '.join(parts)}, numbers)")
    size, source = count * width + 3, "x"
    for layer, units in enumerate((32, 16, 1)):
        lines.append(f"m{layer} = MatMul({source}, k{layer}) a{layer} = Add(m{layer}, h{layer})")
        source = f"a{layer}"
        if units > 1:
            lines.append(f"r{layer} = Relu({source})")
            source = f"r{layer}"
        weights |= {f"k{layer}": normal(size, units) / np.float32(np.sqrt(size)), f"h{layer}": normal(units)}
        size = units
    lines.append("t0 = Add(a2, w0) " + " ".join(f"t{c} = Add(t{c - 1}, w{c})" for c in range(1, count)))
    lines.append(f"probability = Sigmoid(t{count - 1})")
    text = f"(int32[n,{count}] ids, float[n,3] numbers) => (float[n,1] probability) {{ {' '.join(lines)} }}"
    used = {name: array for name, array in weights.items() if f"{name})" in text or f"{name}," in text}
    feeds = {
        "ids": rng.integers(0, buckets, (64, count)).astype(np.int32),
        "numbers": rng.uniform(0, 1, (64, 3)).astype(np.float32),
    }
    return model(text, **used), feeds


DEEP, LAYERS = ["Add", "Gather", "Reshape", "Concat"], ["Gemm", "Relu", "Gemm", "Relu", "Gemm"]


def test_the_whole_model(rng):
    net, feeds = wide_and_deep(rng)
    chosen = passes_without_header()
    report = rewritten(net, *chosen, **feeds)
    assert ops(net) == [*DEEP, *LAYERS, "Add", "Gather", "ReduceSum", "Add", "Sigmoid"]
    fired = {graph_pass.name: report.fired(graph_pass.name) for graph_pass in chosen}
    assert fired == {
        "FoldIndexWrap": 0,
        "FuseLinear": 3,
        "SimplifyConcat": 0,
        "EqualizeConcat": 1,
        EMBEDDINGS: 1,
        SUM: 1,
    }
    assert {value.name for value in net.graph.inputs} == {"ids", "numbers"}


def test_the_pass_order_does_not_take_a_bias_for_a_summand(rng):
    net, _ = wide_and_deep(rng)
    rewrite(net, passes_without_header())
    gemms = [node for node in net.graph if node.op_type == "Gemm"]
    assert all(len(node.inputs) == 3 for node in gemms)


def test_any_batch_size_runs(rng):
    net, feeds = wide_and_deep(rng)
    rewrite(net, passes_without_header())
    whole = run(net, **feeds)["probability"]
    for rows in (1, 7):
        part = run(net, **{name: array[:rows] for name, array in feeds.items()})["probability"]
        np.testing.assert_allclose(part, whole[:rows], rtol=1e-5)


PEAK = """
import resource, sys
import numpy as np, onnx_ir as ir
from pipelines.graph import io
from pipelines.rewrites.driver import rewrite
from zoo.recommenders.export.rewrites import passes
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
model = io.load(sys.argv[1])
for name, megabytes in (("T0", 96), ("T1", 32)):
    value = model.graph.initializers[name]
    value.const_value = ir.tensor(np.ones((megabytes << 15, 8), np.float32), name=name)
    value.shape = value.const_value.shape
before = peak()
assert rewrite(model, passes()).fired("FuseParallelEmbedding") == 1
io.save(model, sys.argv[1] + ".onnx")
print(peak() - before)
"""


def test_large_tables_are_stacked_without_a_copy(tmp_path):
    fields = [f"i{c} = Gather<axis=1>(ids, c{c}) r{c} = Gather(T{c}, i{c})" for c in range(2)]
    text = f"(int32[n,2] ids) => (float[n,16] y) {{ {' '.join(fields)} y = Concat<axis=1>(r0, r1) }}"
    tables = {f"T{c}": normals(c)(3, 8) for c in range(2)}
    path = io.save(model(text, **tables, c0=np.int64(0), c1=np.int64(1)), tmp_path / "model.onnx")
    command = [sys.executable, "-c", PEAK, str(path)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 64, f"{grown} MB more for tables of 128 MB"
