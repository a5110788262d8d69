"""EqualizeConcat, from ONNX text."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import integers, model, ops, reasons, rewritten, run

from pipelines.graph import query
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.calibration.table import TensorRange
from pipelines.quantization.qdq.scales import activation_qparams, weight_qparams
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.rewrites.driver import rewrite
from pipelines.rewrites.equalize_concat import EqualizeConcat, _Columns, _search

EMBEDDED = """(int64[n] i, int64[n] j, float[n,3] numbers) => (float[n,6] y) {
    e = Gather(T, i) f = Gather(U, j) x = Concat<axis=1>(e, numbers, f) y = MatMul(x, w) }"""
RANGES = {"numbers": (0.0, 1.0)}


def embedded(normal, text=EMBEDDED, table_scale=0.02, **changes):
    weights = {
        "T": normal(50, 8, scale=table_scale),
        "U": normal(70, 4, scale=table_scale),
        "w": normal(15, 6, scale=0.3),
    }
    return model(text, **{name: array for name, array in (weights | changes).items() if array is not None})


def rows(rng, count=64):
    return {
        "i": rng.integers(0, 50, count),
        "j": rng.integers(0, 50, count),
        "numbers": rng.uniform(0, 1, (count, 3)).astype(np.float32),
    }


@pytest.mark.parametrize(
    "text",
    [
        EMBEDDED,
        EMBEDDED.replace("MatMul(x, w)", "Gemm(x, w, b)"),
        EMBEDDED.replace("MatMul(x, w)", "Gemm<transB=1>(x, w, b)"),
        EMBEDDED.replace("axis=1", "axis=-1"),
        EMBEDDED.replace("[n] i", "[n,1] i").replace("e = Gather(T, i)", "e3 = Gather(T, i) e = Reshape(e3, shape)"),
    ],
)
def test_equalize_concat_changes_no_bit_of_the_output(rng, normal, text):
    net = embedded(
        normal,
        text,
        **({"b": normal(6)} if "Gemm" in text else {}),
        **({"w": normal(6, 15, scale=0.3)} if "transB" in text else {}),
        **({"shape": integers(-1, 8)} if "Reshape" in text else {}),
    )
    kept, before = ops(net), {name: query.constant(net.graph.initializers[name]) for name in ("T", "U", "w")}
    feeds = rows(rng)
    if "Reshape" in text:
        feeds["i"] = feeds["i"][:, None]
    report = rewritten(net, EqualizeConcat(RANGES), exact=True, **feeds)
    assert report.fired("EqualizeConcat") == 1 and ops(net) == kept
    factors = []
    for name in ("T", "U"):
        k = np.abs(query.constant(net.graph.initializers[name])).max(axis=0) / np.abs(before[name]).max(axis=0)
        assert (np.log2(k) % 1 == 0).all() and (k > 2).any()
        factors.append(k)
    scaled = query.constant(net.graph.initializers["y.equalized"])
    scaled, weight = (matrix.T if "transB" in text else matrix for matrix in (scaled, before["w"]))
    np.testing.assert_array_equal(scaled * np.concatenate([factors[0], np.ones(3), factors[1]])[:, None], weight)
    assert "w" not in net.graph.initializers


@pytest.mark.parametrize(
    ("text", "changes", "ranges", "reason"),
    [
        (EMBEDDED, {}, {}, "the range of its part numbers is not known"),
        (
            EMBEDDED.replace("Gather(U, j)", "Gather(T, j)"),
            {"w": normals(0)(19, 6)},
            RANGES,
            "table T has another reader",
        ),
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
            {"v": normals(0)(2, 64)},
            RANGES,
            "its only reader is not a MatMul or Gemm",
        ),
        (
            EMBEDDED.replace("MatMul(x, w)", "Gemm<transA=1>(x, w)").replace("[n,6]", "[a,b]"),
            {"w": normals(0)(64, 6)},
            RANGES,
            "the weights that read it are not a constant matrix",
        ),
        (
            EMBEDDED.replace("numbers)", "numbers, float[15,6] w)"),
            {"w": None},
            RANGES,
            "the weights that read it are not a constant matrix",
        ),
    ],
)
def test_equalize_concat_refuses(rng, normal, text, changes, ranges, reason):
    net = embedded(normal, text, **changes)
    before = {name: query.constant(value).tobytes() for name, value in net.graph.initializers.items()}
    feeds = rows(rng) | ({"w": normal(15, 6)} if changes.get("w", 1) is None else {})
    report = rewritten(net, EqualizeConcat(ranges), exact=True, **feeds)
    assert report.fired("EqualizeConcat") == 0
    assert list(reasons(report, "EqualizeConcat").values()) == [reason]
    after = {name: query.constant(value).tobytes() for name, value in net.graph.initializers.items()}
    assert {name: before[name] for name in after} == after


def test_equalize_concat_leaves_an_embedding_that_leaves_the_graph_alone(rng, normal):
    w = normal(15, 6, scale=0.3) * np.where(np.arange(15) < 11, 1, 3).astype(np.float32)[:, None]  # U counts
    net = embedded(normal, EMBEDDED.replace("(float[n,6] y)", "(float[n,6] y, float[n,8] e)"), w=w)
    report = rewritten(net, EqualizeConcat(RANGES | {"e": (-1, 1)}), exact=True, **rows(rng))  # compares e, too
    assert report.fired("EqualizeConcat") == 1  # for the columns of the other table


def test_equalize_concat_of_another_axis_is_left_alone(rng, normal):
    text = "(int64[n] i, int64[n] j) => (float[m,6] y) { e = Gather(T, i) f = Gather(U, j) x = Concat<axis=0>(e, f) y = MatMul(x, w) }"
    net = embedded(normal, text, U=normal(70, 8, scale=3.0), w=normal(8, 6))
    feeds = rows(rng)
    report = rewritten(net, EqualizeConcat({}), exact=True, i=feeds["i"], j=feeds["j"])
    assert report.fired("EqualizeConcat") == 0 and list(reasons(report, "EqualizeConcat").values()) == [
        "it does not join columns"
    ]


def test_equalize_concat_needs_a_clear_gain(rng, normal):
    text = "(int64[n] i, int64[n] j) => (float[n,6] y) { e = Gather(T, i) f = Gather(U, j) x = Concat<axis=1>(e, f) y = MatMul(x, w) }"
    tables = {
        "T": rng.uniform(-1, 1, (500, 8)).astype(np.float32),
        "U": rng.uniform(-1, 1, (500, 4)).astype(np.float32),
    }
    net = embedded(normal, text, **tables, w=rng.uniform(-1, 1, (12, 6)).astype(np.float32))
    feeds = rows(rng)
    assert rewritten(net, EqualizeConcat({}), exact=True, i=feeds["i"], j=feeds["j"]).fired("EqualizeConcat") == 0


def test_equalize_concat_passes_a_gain_of_three_percent_by():
    rng = np.random.default_rng(3)
    x, w = rng.uniform(-1, 1, (500, 12)) * rng.uniform(0.7, 1.4, 12), rng.uniform(-1, 1, (12, 6))
    columns = _Columns(x.min(axis=0), x.max(axis=0), (x**2).mean(axis=0), np.ones(12, bool))
    best = _search(columns, w, 1.0)
    assert 0.95 < columns.error(w, best) / columns.error(w, np.ones(12)) < 1
    assert _search(columns, w, EqualizeConcat.MARGIN) is None


@pytest.mark.parametrize("seed", range(8))
def test_equalize_concat_settles(normal, seed):
    rng = np.random.default_rng(seed)
    spread = lambda *shape: (rng.standard_normal(shape) * np.exp(rng.normal(0, 1.5, shape[-1]))).astype(np.float32)  # noqa: E731
    net = embedded(normal, T=spread(50, 8), U=spread(70, 4), w=spread(6, 15).T.copy())
    rewritten(net, EqualizeConcat(RANGES), exact=True, **rows(rng))


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


def test_equalize_concat_saves_small_embeddings_beside_numbers(rng, normal):
    ratios = []  # of several draws: one alone says anything from 0.47 to 0.78
    for _ in range(6):
        feeds, errors = rows(rng, 512), []
        plain = embedded(normal)
        equal = plain.clone()
        rewrite(equal, [EqualizeConcat(RANGES)])
        for variant in (plain, equal):
            rewrite(variant, [])
            quantized, _ = quantize(variant, QuantRecipe(), calibrate(variant, [feeds]))
            errors.append(np.sqrt(((run(quantized, **feeds)["y"] - run(variant, **feeds)["y"]) ** 2).mean()))
        ratios.append(errors[1] / errors[0])
    assert max(ratios) < 0.9 and np.mean(ratios) < 0.75
