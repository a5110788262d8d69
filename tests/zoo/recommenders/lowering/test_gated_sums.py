"""Mixtures of experts, sum_k softmax(g)_k x_k: the kernels' bits, refusals, and lowering of the forms of exporters."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.rewriting import model, run

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import GatedSum, Mixed, Numbers
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.lower import lower

WIDTH, EXPERTS = 20, 3


def program(width, experts, relu=False):
    """Experts and gates as layers on three numbers, then their sum; outputs: experts, gates, sum."""
    rng = np.random.default_rng(width + experts)
    sizes = [*[width] * experts, experts]
    padded = sum(-(-size // 64) * 64 for size in sizes)
    layer = Mixed(
        0,
        0,
        rng.integers(-300, 301, (3, padded)).astype(np.int16),
        np.full(padded, 2e-6, np.float32),
        rng.standard_normal(padded).astype(np.float32),
        tuple((1 + place, size, False) for place, size in enumerate(sizes)),
        *[np.zeros(0, np.int32)] * 3,
    )
    slots = [("i2", 3), *(("f4", size) for size in sizes), ("f4", width)]
    summed = GatedSum(tuple(range(1, experts + 1)), experts + 1, experts + 2, relu)
    numbers = Numbers(0, 0, np.arange(3, dtype=np.int32), np.full(3, 900, np.float32))
    outputs = tuple(range(1, experts + 3))
    return ClickProgram(np.ones(1, np.int32), 3, 0, tuple(slots), (numbers, layer, summed), outputs)


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("isa", extension.isas())
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("width", "experts"), [(1, 1), (3, 2), (16, 4), (33, 7), (64, 3), (100, 62)])
def test_kernels_give_the_bits_of_the_reference(isa, width, experts, relu):
    made = program(width, experts, relu)
    kernel, rng = native.click_program(made, isa), np.random.default_rng(0)
    for count in (0, 1, 5, 64, 65, 200):
        x = (rng.standard_normal((count, 3)) * 3).astype(np.float32)
        ids = np.zeros((count, 1), np.int32)
        results, wanted = kernel(ids, x, None), reference.run(made, ids, x)
        for result, expected in zip(results, wanted, strict=True):
            assert result.tobytes() == expected.tobytes()
    *parts, gates, total = (array.astype(np.float64) for array in wanted)
    weights = np.exp(gates) / np.exp(gates).sum(axis=1, keepdims=True)
    parts = [np.maximum(part, 0) if relu else part for part in parts]
    exact = sum(weights[:, [place]] * part for place, part in enumerate(parts))
    np.testing.assert_allclose(total, exact, atol=1e-5 * max(np.abs(exact).max(), 1))


@pytest.mark.parametrize(
    "changes",
    [{"x": (1, 2)}, {"x": ()}, {"x": (1, 2, 4)}, {"x": (1, 2, 9)}, {"gates": 1}, {"out": 4}, {"out": 3}, {"gates": 0}],
)
def test_steps_that_do_not_fit_are_refused(changes):
    made = program(WIDTH, EXPERTS)
    with pytest.raises(RequestError):
        replace(made, steps=(*made.steps[:2], replace(made.steps[2], **changes)), outputs=(1,))


EACH = " ".join(
    f"p{k} = Gemm<transB=1>(v, W{k}, b{k}) r{k} = {{relu}}(p{k}) u{k} = Unsqueeze(r{k}, one)" for k in range(EXPERTS)
)
STACK = "x = Concat<axis=1>(u0, u1, u2)"
AT_ONCE = "p = Gemm<transB=1>(v, W, b) r = {relu}(p) x = Reshape(r, shape)"
COLUMN = "gu = Unsqueeze(s, last) m = Mul({order}) y = ReduceSum<keepdims=0>(m, one)"
ROW = "gu = Unsqueeze(s, one) m = MatMul(gu, x) y = Squeeze(m, one)"


def network(experts, mixture, relu="Relu", rows=WIDTH):
    """(float model, feeds): two fields and numbers, the mixture, a layer and two probabilities."""
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    inputs = 2 * 8 + 2
    weights = {f"W{k}": normal(WIDTH, inputs, scale=0.4) for k in range(EXPERTS)}
    weights |= {f"b{k}": normal(WIDTH, scale=0.2) for k in range(EXPERTS)}
    weights |= {"W": np.concatenate([weights[f"W{k}"] for k in range(EXPERTS)])}
    weights |= {"b": np.concatenate([weights[f"b{k}"] for k in range(EXPERTS)])}
    weights |= {"E": normal(40, 8, scale=0.5), "F": normal(9, 8, scale=0.5), "G": normal(inputs, EXPERTS, scale=0.7)}
    weights |= {"T": normal(rows, 8, scale=0.4), "t": normal(8, scale=0.1), "U": normal(8, 1, scale=0.5)}
    weights |= {"c0": np.int64(0), "c1": np.int64(1), "one": np.int64([1]), "last": np.int64([2])}
    weights |= {"shape": np.int64([-1, EXPERTS, WIDTH]), "turned": np.int64([-1, WIDTH, EXPERTS])}
    text = f"""(int32[n,2] ids, float[n,2] numbers) => (float[n,1] probability) {{
    i0 = Gather<axis=1>(ids, c0) e0 = Gather(E, i0) i1 = Gather<axis=1>(ids, c1) e1 = Gather(F, i1)
    v = Concat<axis=1>(e0, e1, numbers) {experts.format(relu=relu)} g = MatMul(v, G) s = Softmax<axis=1>(g)
    {mixture} z = Gemm(y, T, t) h = Relu(z) logit = MatMul(h, U) probability = Sigmoid(logit) }}"""
    used = {
        name: array
        for name, array in weights.items()
        if f" {name})" in text or f", {name}," in text or f"({name}," in text
    }
    feeds = {"ids": rng.integers(0, [40, 9], (500, 2)).astype(np.int32), "numbers": normal(500, 2)}
    return model(text, **used), feeds


STACKED = f"{EACH} {STACK}"


@pytest.mark.parametrize(
    ("experts", "relu"),
    [
        *((STACKED, relu) for relu in ("Relu", "Identity", "Tanh", "LeakyRelu<alpha=0.2>")),
        *((AT_ONCE, relu) for relu in ("Relu", "Identity")),
    ],
)
@pytest.mark.parametrize(
    "mixture", [COLUMN.format(order="x, gu"), COLUMN.format(order="gu, x"), ROW], ids=["mul", "mul turned", "matmul"]
)
def test_forms_of_exporters_become_one_step(experts, mixture, relu):
    net, feeds = network(experts, mixture, relu)
    result, report = lower(net, calibrate(net, [feeds], "minmax"), QuantRecipe())
    assert report["fold"], report["reason"]
    made = click_program(result.graph[0])
    (step,) = [step for step in made.steps if isinstance(step, GatedSum)]
    assert len(step.x) == EXPERTS and step.relu == (relu == "Relu")
    (probability,) = reference.run(made, feeds["ids"], feeds["numbers"])
    assert np.abs(probability - run(net, **feeds)["probability"]).max() <= 0.005


@pytest.mark.parametrize(
    ("experts", "mixture", "said"),
    [
        (STACKED.replace("r1 = {relu}", "r1 = Identity"), COLUMN.format(order="x, gu"), "ReduceSum"),
        (STACKED, "gu = Unsqueeze(s, last) m = Mul(x, gu) y = ReduceSum<keepdims=0>(m, last)", "ReduceSum"),
        (
            AT_ONCE.replace("r, shape", "r, turned"),
            "gu = Unsqueeze(s, one) m = Mul(x, gu) y = ReduceSum<keepdims=0>(m, last)",
            "Mul",
        ),
        (
            STACKED,
            f"gr = Relu(g) sr = Softmax<axis=1>(gr) {COLUMN.format(order='x, gu').replace('(s,', '(sr,')}",
            "Softmax",
        ),
    ],
    ids=["one without a ReLU", "summed over columns", "gates along columns", "gates behind a ReLU"],
)
def test_near_misses_are_refused(experts, mixture, said):
    net, feeds = network(experts, mixture, rows=EXPERTS if said == "ReduceSum" and "m, last" in mixture else WIDTH)
    result, report = lower(net, calibrate(net, [feeds], "minmax"), QuantRecipe())
    assert result is None and said in report["reason"]
