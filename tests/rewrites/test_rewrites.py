"""The shared passes, from ONNX text."""

import numpy as np
import onnx_ir as ir
import pytest
from rewriting import model, ops, reasons, rewritten, run

from pipelines.graph import query
from pipelines.quantization.calibrate import TensorRange, calibrate
from pipelines.quantization.quantize import quantize
from pipelines.quantization.quantize_early import QuantizeEarly
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.scales import activation_qparams, weight_qparams
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.equalize_concat import EqualizeConcat, _Columns, _search
from pipelines.rewrites.fold_index_wrap import FoldIndexWrap
from pipelines.rewrites.fuse_linear import FuseLinear
from pipelines.rewrites.shared import SHARED

RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def integers(*values):
    return np.array(values, np.int64)


# --- FoldIndexWrap

WHERE = "c = Less(i, zero) w = Add(i, length) s = Where(c, w, i)"
PRODUCTS = (
    "c = Less(i, zero) w = Add(length, i) m = Cast<to=7>(c) a = Mul(m, w)"
    " not = Not(c) inverse = Cast<to=7>(not) b = Mul(i, inverse) s = Add({})"
)


def wrapped(body, zero=0, length=5, axis=0, shape=(5, 4), ids=(-5, -1, 0, 4)):
    text = f"(int64[n] i) => (float[a,b] y) {{ {body} y = Gather<axis={axis}>(T, s) }}"
    return model(text, T=normal(*shape), zero=np.int64(zero), length=np.int64(length)), {"i": integers(*ids)}


@pytest.mark.parametrize(
    "body",
    [
        WHERE,
        PRODUCTS.format("a, b"),
        PRODUCTS.format("b, a"),
        WHERE.replace("Less(i, zero)", "Less(f, fzero)").replace(
            "c =", "f = Cast<to=1>(i) fzero = Cast<to=1>(zero) c =", 1
        ),
    ],
    ids=["where", "products", "products, complement first", "comparison in float"],
)
def test_fold_index_wrap_reads_the_index_itself(body):
    if "fzero = Cast" in body:  # a constant of the float type, as exporters write it
        body = body.replace("fzero = Cast<to=1>(zero)", "fzero = Constant<value_float=0.0>()")
    found, feeds = wrapped(body)
    report = rewritten(found, FoldIndexWrap(), exact=True, **feeds)
    assert report.fired("FoldIndexWrap") == 1
    assert ops(found) == ["Gather"] and found.graph[0].inputs[1].name == "i"


def test_fold_index_wrap_on_another_axis():
    found, feeds = wrapped(WHERE, axis=1, shape=(3, 5))
    assert rewritten(found, FoldIndexWrap(), exact=True, **feeds).fired("FoldIndexWrap") == 1


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        (WHERE.replace("Less", "LessOrEqual"), {"ids": (-5, -1, 1, 2)}),
        (WHERE.replace("Less", "Greater"), {"length": -5, "ids": (-4, 0, 1, 4)}),
        (WHERE, {"zero": 1, "ids": (-5, -1, 1, 4)}),
        (WHERE.replace("Where(c, w, i)", "Where(c, i, w)"), {"ids": (-5, -4, -1)}),
        (WHERE.replace("Add(i, length)", "Sub(i, length)"), {"length": -5}),
        (WHERE.replace("Add(i, length)", "Add(i, i)"), {"ids": (-2, -1, 3)}),
        (WHERE.replace("Add(i, length)", "Add(length, length)"), {"length": 1}),
        (PRODUCTS.format("a, a"), {"ids": (-4, -3, 1)}),
        (PRODUCTS.format("b, b"), {"ids": (-3, -2, 1)}),
        (
            PRODUCTS.format("a, b").replace("Mul(m, w)", "Mul(m, i)").replace("Mul(i, inverse)", "Mul(w, inverse)"),
            {"ids": (-5, -1)},
        ),
        (
            PRODUCTS.format("a, b").replace("Not(c)", "Not(d)").replace("not =", "d = Less(i, length) not =", 1),
            {"ids": (-5, -1)},
        ),
    ],
)
def test_fold_index_wrap_leaves_another_selection_alone(body, changes):
    found, feeds = wrapped(body, **changes)
    report = rewritten(found, FoldIndexWrap(), exact=True, **feeds)
    assert report.fired("FoldIndexWrap") == 0 and found.graph[-1].inputs[1].name == "s"


@pytest.mark.parametrize("body", [WHERE, PRODUCTS.format("a, b")])
def test_fold_index_wrap_refuses_another_length(body):
    found, feeds = wrapped(body, length=4, ids=(-4, -1, 0, 3))
    report = rewritten(found, FoldIndexWrap(), exact=True, **feeds)
    assert report.fired("FoldIndexWrap") == 0
    assert list(reasons(report, "FoldIndexWrap").values()) == ["indices wrap at 4, the table's length is another"]


# --- FuseLinear

LINEAR = "(float[n,3] x) => (float[n,2] y) { h = MatMul(x, w) y = Add(h, b) }"


@pytest.mark.parametrize("text", [LINEAR, LINEAR.replace("Add(h, b)", "Add(b, h)")])
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_fuse_linear(text, shape):
    found = model(text, w=normal(3, 2), b=normal(*shape))
    report = rewritten(found, FuseLinear(), x=normal(4, 3))
    assert report.fired("FuseLinear") == 1 and ops(found) == ["Gemm"]
    assert found.graph[0].name == "y" and query.constant(found.graph[0].inputs[2]).shape == (2,)


def test_fuse_linear_of_layers_that_share_weights_and_bias():
    text = (
        "(float[n,3] x) => (float[n,3] y) { h = MatMul(x, w) a = Add(h, b) r = Relu(a) k = MatMul(r, w) y = Add(k, b) }"
    )
    found = model(text, w=normal(3, 3), b=normal(1, 3))
    assert rewritten(found, FuseLinear(), x=normal(4, 3)).fired("FuseLinear") == 2
    assert ops(found) == ["Gemm", "Relu", "Gemm"]


def test_fuse_linear_of_one_column():
    found = model(LINEAR.replace("float[n,2]", "float[n,1]"), w=normal(3, 1), b=normal(1))
    assert rewritten(found, FuseLinear(), x=normal(4, 3)).fired("FuseLinear") == 1


ROW = "what is added is not a constant row of one value per output"


@pytest.mark.parametrize(
    ("text", "weights", "feeds", "reason"),
    [
        (LINEAR.replace("y = Add(h, b)", "a = Add(h, b) y = Mul(a, h)"), {}, {}, None),  # two readers
        (
            LINEAR.replace("(float[n,2] y)", "(float[n,2] y, float[n,2] h)"),
            {},
            {},
            None,
        ),  # the product leaves the graph
        (LINEAR.replace("Add(h, b)", "Sub(h, b)"), {}, {}, None),
        (LINEAR.replace("Add(h, b)", "Add(h, h)"), {}, {}, None),
        (
            LINEAR.replace("n,3", "n,5,3").replace("n,2", "n,5,2"),
            {},
            {"x": normal(4, 5, 3)},
            "input is not known to be 2-D (rank 3)",
        ),
        (LINEAR.replace("n,3] x", "n,3] x, float[2] b"), {"b": None}, {"b": normal(2)}, ROW),
        (LINEAR.replace("n,3] x", "n,3] x, float[3,2] w"), {"w": None}, {"w": normal(3, 2)}, None),
        (LINEAR, {"b": normal(4, 2)}, {}, ROW),
        (LINEAR, {"b": np.float32(0.5)}, {}, ROW),
        (LINEAR, {"b": normal(4, 1)}, {}, ROW),
        (LINEAR.replace("float[n,2]", "float[1,n,2]"), {"b": normal(1, 1, 2)}, {}, ROW),  # the sum is 3-D
        (LINEAR.replace("float[n,2]", "float[m,n,2]"), {"w": normal(5, 3, 2)}, {}, None),
        (
            "(float[n,3] x, int64[k] s) => (float[n,2] y) { z = Reshape(x, s) h = MatMul(z, w) y = Add(h, b) }",
            {},
            {"s": integers(-1, 3)},
            "input is not known to be 2-D (rank None)",
        ),
    ],
)
def test_fuse_linear_near_misses(text, weights, feeds, reason):
    values = {
        name: array for name, array in ({"w": normal(3, 2), "b": normal(2)} | weights).items() if array is not None
    }
    found = model(text, **values)
    kept = ops(found)
    report = rewritten(found, FuseLinear(), exact=True, **({"x": normal(4, 3)} | feeds))
    assert ops(found) == kept and report.fired("FuseLinear") == 0
    assert list(reasons(report, "FuseLinear").values()) == ([] if reason is None else [reason])


# --- EqualizeConcat

EMBEDDED = """(int64[n] i, int64[n] j, float[n,3] numbers) => (float[n,6] y) {
    e = Gather(T, i) f = Gather(U, j) x = Concat<axis=1>(e, numbers, f) y = MatMul(x, w) }"""
RANGES = {"numbers": (0.0, 1.0)}


def embedded(text=EMBEDDED, table_scale=0.02, **changes):
    weights = {
        "T": normal(50, 8, scale=table_scale),
        "U": normal(70, 4, scale=table_scale),
        "w": normal(15, 6, scale=0.3),
    }
    return model(text, **{name: array for name, array in (weights | changes).items() if array is not None})


def rows(count=64):
    return {
        "i": RNG.integers(0, 50, count),
        "j": RNG.integers(0, 50, count),
        "numbers": RNG.uniform(0, 1, (count, 3)).astype(np.float32),
    }


@pytest.mark.parametrize(
    "text",
    [
        EMBEDDED,
        EMBEDDED.replace("MatMul(x, w)", "Gemm(x, w, b)"),
        EMBEDDED.replace("axis=1", "axis=-1"),
        EMBEDDED.replace("[n] i", "[n,1] i").replace("e = Gather(T, i)", "e3 = Gather(T, i) e = Reshape(e3, shape)"),
    ],
)
def test_equalize_concat_changes_no_bit_of_the_output(text):
    found = embedded(
        text,
        **({"b": normal(6)} if "Gemm" in text else {}),
        **({"shape": integers(-1, 8)} if "Reshape" in text else {}),
    )
    kept, before = ops(found), {name: query.constant(found.graph.initializers[name]) for name in ("T", "U", "w")}
    feeds = rows()
    if "Reshape" in text:
        feeds["i"] = feeds["i"][:, None]
    report = rewritten(found, EqualizeConcat(RANGES), exact=True, **feeds)
    assert report.fired("EqualizeConcat") == 1 and ops(found) == kept
    factors = []
    for name in ("T", "U"):
        k = np.abs(query.constant(found.graph.initializers[name])).max(axis=0) / np.abs(before[name]).max(axis=0)
        assert (np.log2(k) % 1 == 0).all() and (k > 2).any()
        factors.append(k)
    scaled = query.constant(found.graph.initializers["y.equalized"])
    np.testing.assert_array_equal(scaled * np.concatenate([factors[0], np.ones(3), factors[1]])[:, None], before["w"])
    assert "w" not in found.graph.initializers


@pytest.mark.parametrize(
    ("text", "changes", "ranges", "reason"),
    [
        (EMBEDDED, {}, {}, "the range of its part numbers is not known"),
        (EMBEDDED.replace("Gather(U, j)", "Gather(T, j)"), {"w": normal(19, 6)}, RANGES, "table T has another reader"),
        (
            EMBEDDED.replace("(float[n,6] y)", "(float[n,6] y, float[n,8] z)").replace(
                "y = M", "z = Gather(T, j) y = M"
            ),
            {},
            RANGES,
            "table T has another reader",
        ),
        (
            EMBEDDED.replace("(float[n,6] y)", "(float[n,6] y, float[n,15] z)").replace("y = M", "z = Relu(x) y = M"),
            {},
            RANGES,
            "its only reader is not a MatMul or Gemm",
        ),
        (
            EMBEDDED.replace("(float[n,6] y)", "(float[n,6] y, float[n,15] x)"),
            {},
            RANGES,
            "its only reader is not a MatMul or Gemm",
        ),
        (
            EMBEDDED.replace("MatMul(x, w)", "Relu(x)").replace("n,6", "n,15"),
            {},
            RANGES,
            "its only reader is not a MatMul or Gemm",
        ),
        (
            EMBEDDED.replace("MatMul(x, w)", "MatMul(v, x)").replace("[n,6]", "[a,b]"),
            {"v": normal(2, 64)},
            RANGES,
            "its only reader is not a MatMul or Gemm",
        ),
        (
            EMBEDDED.replace("MatMul", "Gemm<transB=1>"),
            {"w": normal(6, 15)},
            RANGES,
            "the weights that read it are not a constant, untransposed matrix",
        ),
        (
            EMBEDDED.replace("numbers)", "numbers, float[15,6] w)"),
            {"w": None},
            RANGES,
            "the weights that read it are not a constant, untransposed matrix",
        ),
    ],
)
def test_equalize_concat_refuses(text, changes, ranges, reason):
    found = embedded(text, **changes)
    before = {name: query.constant(value).tobytes() for name, value in found.graph.initializers.items()}
    feeds = rows() | ({"w": normal(15, 6)} if changes.get("w", 1) is None else {})
    report = rewritten(found, EqualizeConcat(ranges), exact=True, **feeds)
    assert report.fired("EqualizeConcat") == 0
    assert list(reasons(report, "EqualizeConcat").values()) == [reason]
    after = {name: query.constant(value).tobytes() for name, value in found.graph.initializers.items()}
    assert {name: before[name] for name in after} == after


def test_equalize_concat_leaves_an_embedding_that_leaves_the_graph_alone():
    found = embedded(EMBEDDED.replace("(float[n,6] y)", "(float[n,6] y, float[n,8] e)"))
    report = rewritten(found, EqualizeConcat(RANGES | {"e": (-1, 1)}), exact=True, **rows())  # compares e, too
    assert report.fired("EqualizeConcat") == 1  # for the columns of the other table


def test_equalize_concat_of_another_axis_is_left_alone():
    text = "(int64[n] i, int64[n] j) => (float[m,6] y) { e = Gather(T, i) f = Gather(U, j) x = Concat<axis=0>(e, f) y = MatMul(x, w) }"
    found = embedded(text, U=normal(70, 8, scale=3.0), w=normal(8, 6))
    feeds = rows()
    report = rewritten(found, EqualizeConcat({}), exact=True, i=feeds["i"], j=feeds["j"])
    assert report.fired("EqualizeConcat") == 0 and list(reasons(report, "EqualizeConcat").values()) == [
        "it does not join columns"
    ]


def test_equalize_concat_needs_a_clear_gain():
    text = "(int64[n] i, int64[n] j) => (float[n,6] y) { e = Gather(T, i) f = Gather(U, j) x = Concat<axis=1>(e, f) y = MatMul(x, w) }"
    tables = {
        "T": RNG.uniform(-1, 1, (500, 8)).astype(np.float32),
        "U": RNG.uniform(-1, 1, (500, 4)).astype(np.float32),
    }
    found = embedded(text, **tables, w=RNG.uniform(-1, 1, (12, 6)).astype(np.float32))
    feeds = rows()
    assert rewritten(found, EqualizeConcat({}), exact=True, i=feeds["i"], j=feeds["j"]).fired("EqualizeConcat") == 0


def test_equalize_concat_passes_a_gain_of_three_percent_by():
    rng = np.random.default_rng(3)
    x, w = rng.uniform(-1, 1, (500, 12)) * rng.uniform(0.7, 1.4, 12), rng.uniform(-1, 1, (12, 6))
    columns = _Columns(x.min(axis=0), x.max(axis=0), (x**2).mean(axis=0), np.ones(12, bool))
    best = _search(columns, w, 1.0)
    assert 0.95 < columns.error(w, best) / columns.error(w, np.ones(12)) < 1
    assert _search(columns, w, EqualizeConcat.MARGIN) is None


@pytest.mark.parametrize("seed", range(8))
def test_equalize_concat_settles(seed):
    rng = np.random.default_rng(seed)
    spread = lambda *shape: (rng.standard_normal(shape) * np.exp(rng.normal(0, 1.5, shape[-1]))).astype(np.float32)  # noqa: E731
    found = embedded(T=spread(50, 8), U=spread(70, 4), w=spread(6, 15).T.copy())
    rewritten(found, EqualizeConcat(RANGES), exact=True, **rows())


def simulated_error(x, w):
    """Mean over samples of the squared int8 error of x @ w, summed over the outputs."""
    s, z = activation_qparams(TensorRange(0, 0, float(x.min()), float(x.max()), 0))
    t, q = weight_qparams(w, 1)
    rounded = (np.clip(np.rint(x / s) + z, 0, 255) - z) * np.float64(s)
    return (((rounded @ (q * np.float64(t))) - x.astype(np.float64) @ w) ** 2).sum(axis=1).mean()


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_equalize_concat_predicts_the_error_of_int8(spread):
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, (20000, 24)) * rng.uniform(0.5, 2, 24)
    w = rng.standard_normal((24, 40)).astype(np.float32)
    columns = _Columns(x.min(axis=0), x.max(axis=0), (x**2).mean(axis=0), np.ones(24, bool))
    k = 2.0 ** rng.integers(-2, 3, 24) ** spread if spread else np.ones(24)
    simulated = simulated_error((x * k).astype(np.float32), (w / k[:, None]).astype(np.float32))
    assert columns.error(w.astype(np.float64), k) == pytest.approx(simulated, rel=0.2)


def test_equalize_concat_saves_small_embeddings_beside_numbers():
    feeds, errors = rows(512), []
    plain = embedded()
    equal = plain.clone()
    rewrite(equal, [EqualizeConcat(RANGES)])
    for each in (plain, equal):
        rewrite(each, [])
        quantized, _ = quantize(each, QuantRecipe(), calibrate(each, [feeds]))
        errors.append(np.sqrt(((run(quantized, **feeds)["y"] - run(each, **feeds)["y"]) ** 2).mean()))
    assert errors[1] < errors[0] / 2


# --- QuantizeEarly

STEP = {"s": np.float32(0.02), "z": np.uint8(100)}


@pytest.mark.parametrize(
    ("move", "shape"),
    [
        ("Reshape(x, to)", "m"),
        ("Flatten<axis=1>(x)", "a,b"),
        ("Unsqueeze(x, zero)", "a,b,c,d"),
        ("Squeeze(x, one)", "a,b"),
        ("Transpose<perm=[2,0,1]>(x)", "a,b,c"),
        ("Slice(x, zero, one, two)", "a,b,c"),
    ],
)
def test_quantize_early_moves_bytes(move, shape):
    text = f"(float[n,1,6] x) => (uint8[{shape}] q) {{ m = {move} q = QuantizeLinear(m, s, z) }}"
    found = model(text, **STEP, to=integers(-1), zero=integers(0), one=integers(1), two=integers(2))
    report = rewritten(found, QuantizeEarly(), exact=True, x=normal(4, 1, 6))
    assert report.fired("QuantizeEarly") == 1 and ops(found) == ["QuantizeLinear", move.split("(")[0].split("<")[0]]


def test_quantize_early_passes_a_whole_chain_and_splits_at_a_concatenation():
    text = """(float[n,2] a, float[n,3] b) => (uint8[k,1] q) {
        c = Concat<axis=1>(a, b) d = Transpose<perm=[1,0]>(c) e = Reshape(d, to) q = QuantizeLinear(e, s, z) }"""
    found = model(text, **STEP, to=integers(-1, 1))
    rewritten(found, QuantizeEarly(), exact=True, a=normal(4, 2), b=normal(4, 3))
    assert ops(found) == ["QuantizeLinear", "QuantizeLinear", "Concat", "Transpose", "Reshape"]


@pytest.mark.parametrize("axis", [0, 1])
def test_quantize_early_stores_a_table_as_bytes(axis):
    text = f"(int64[n] i) => (uint8[a,b] q) {{ e = Gather<axis={axis}>(T, i) q = QuantizeLinear(e, s, z) }}"
    table = np.append(normal(6, 5), [[-9.0, 9.0, 0.01, 0.03, -0.05]], axis=0).astype(
        np.float32
    )  # saturates; halves round to even
    found = model(text, **STEP, T=table)
    rewritten(found, QuantizeEarly(), exact=True, i=integers(4, 0, -1, 3))
    assert ops(found) == ["Gather"] and found.graph[0].inputs[0].dtype == ir.DataType.UINT8
    assert "T" not in found.graph.initializers


MOVED = "(float[n,3] x) => (uint8[a,b] q) { m = Reshape(x, to) q = QuantizeLinear(m, s, z) }"
LOOKED_UP = "(int64[n] i) => (uint8[n,4] q) { e = Gather(T, i) q = QuantizeLinear(e, s, z) }"
READ = "its result is also read as float"


@pytest.mark.parametrize(
    ("text", "tables", "reason"),
    [
        (MOVED.replace("q)", "q, float[a,b] m)"), True, READ),
        (MOVED.replace("q)", "q, float[a,b] r)").replace("q =", "r = Relu(m) q ="), True, READ),
        (MOVED.replace("(m, s, z)", "(m, ss, zz)"), True, None),  # a scale a column
        (MOVED.replace("Reshape(x, to)", "Relu(x)"), True, None),
        (LOOKED_UP, False, "the recipe keeps tables float"),
        (LOOKED_UP.replace("q)", "q, float[n,4] e)"), True, READ),
        (LOOKED_UP.replace("i)", "i, float[9,4] T)", 1), True, None),  # a table that comes as input
    ],
)
def test_quantize_early_near_misses(text, tables, reason):
    weights = STEP | {"ss": np.full(3, 0.02, np.float32), "zz": np.full(3, 100, np.uint8), "to": integers(-1, 3)}
    feeds = {"x": normal(4, 3)} if "x)" in text else {"i": integers(4, 0, 8)}
    if "float[9,4]" in text:
        feeds["T"] = normal(9, 4)
    else:
        weights["T"] = normal(9, 4)
    found = model(text, **weights)
    kept = ops(found)
    report = rewritten(found, QuantizeEarly(tables), exact=True, **feeds)
    assert ops(found) == kept and report.fired("QuantizeEarly") == 0
    assert list(reasons(report, "QuantizeEarly").values()) == ([] if reason is None else [reason])


def test_quantize_early_with_an_output_read_twice_quantizes_it_where_all_read_bytes():
    text = """(float[n,2] a, float[n,3] b) => (uint8[n,5] q, uint8[n,5] r) {
        c = Concat<axis=1>(a, b) q = QuantizeLinear(c, s, z) r = Transpose<perm=[0,1]>(q) }"""
    found = model(text, **STEP)
    rewritten(found, QuantizeEarly(), exact=True, a=normal(4, 2), b=normal(4, 3))
    assert ops(found) == ["QuantizeLinear", "QuantizeLinear", "Concat", "Transpose"]


# --- together


def test_the_shared_passes_bring_a_keras_export_to_gemms():
    text = f"""(int64[n] i) => (float[n,2] y) {{
        {WHERE} e = Gather(T, s) h = MatMul(e, u) a = Add(h, b) r = Relu(a) k = MatMul(r, v) y = Add(d, k) }}"""
    weights = {"T": normal(5, 4), "u": normal(4, 3), "b": normal(3), "v": normal(3, 2), "d": normal(1, 2)}
    found = model(text, **weights, zero=np.int64(0), length=np.int64(5))
    report = rewritten(found, *[each() for each in SHARED], i=integers(-5, 4, 0))
    assert ops(found) == ["Gather", "Gemm", "Relu", "Gemm"]
    assert report.to_json()["nodes"] == {"before": 9, "after": 4}
