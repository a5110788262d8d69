"""Gates and attention between fields: the kernels' bits, refusals, and the layouts of exporters."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.click_networks import Network
from helpers.rewriting import run

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from pipelines.kernels.recommenders import native, reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.kernels.recommenders.operators import LinearLayer
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import (
    CODES,
    CodeProduct,
    Dense,
    FieldAttention,
    GateCodes,
    Mixed,
    Numbers,
    SigmoidProduct,
    Weighted,
)
from pipelines.kernels.recommenders.steps.base import Run
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.lower import lower

pytestmark = pytest.mark.usefixtures("caches")
NONE = [np.zeros(0, np.int32)] * 3


def attention(rng, x, out, fields, inputs, heads, size, parts, **options):
    """An attention step with random weights."""
    width = parts * heads * size
    weight = rng.integers(-3000, 3001, (inputs, width)).astype(np.int16)
    scale = np.full(width, 5e-4 / inputs**0.5, np.float32)
    bias = (rng.standard_normal(width) * 100).astype(np.float32)
    return FieldAttention(x, out, fields, heads, size, weight, scale, bias, 2e-7, 0.7, **options)


def attended(fields, inputs, heads, size, residual=True, relu=True):
    """Numbers as codes, two attentions on them, and a weighted sum of the results, which is the output."""
    rng, width = np.random.default_rng(fields), heads * size
    count = fields * inputs
    order = rng.permutation(fields).astype(np.int32) * inputs
    parts = 3 + residual
    steps = (
        Numbers(0, 0, np.arange(count, dtype=np.int32), np.full(count, 900, np.float32)),
        attention(rng, 0, 1, fields, inputs, heads, size, parts, relu=relu, positions=order),
        attention(rng, 1, 2, fields, width, heads, size, parts, relu=relu),
        *(Weighted(x, 0, rng.standard_normal(fields * width).astype(np.float32), x + 2) for x in (1, 2)),
    )
    slots = (("i2", count), ("i2", fields * width), ("i2", fields * width), ("f4", 1), ("f4", 1))
    return ClickProgram(np.ones(1, np.int32), count, 0, slots, steps, (3, 4))


def gated(width):
    """Numbers as codes and two layers on them; the products of the layers, of codes with gates and with floats."""
    rng = np.random.default_rng(width)
    padded = 2 * -(-width // 64) * 64
    weight = rng.integers(-300, 301, (width, padded)).astype(np.int16)
    bias = rng.standard_normal(padded).astype(np.float32)
    outs, eye = ((1, width, False), (2, width, False)), np.eye(width, dtype=np.int8)
    steps = (
        Numbers(0, 0, np.arange(width, dtype=np.int32), np.full(width, 900, np.float32)),
        Mixed(0, 0, weight, np.full(padded, 2e-6, np.float32), bias, outs, *NONE),
        SigmoidProduct(1, 2, 3),
        GateCodes(0, 2, 4, bytes=6, factors=(rng.random(width) * 0.2).astype(np.float32)),
        CodeProduct(3, 4, 5, 0.25),
        GateCodes(0, 1, None, bytes=7, factors=(rng.random(width) * 0.05).astype(np.float32)),
        *(Dense(x, x + 2, LinearLayer(eye, np.zeros(width, np.int32), np.ones(width, np.float32))) for x in (6, 7)),
    )
    slots = (("i2", width), *[("f4", width)] * 3, ("i2", width), ("f4", 1), *[("u1", width)] * 2, *[("f4", width)] * 2)
    return ClickProgram(np.ones(1, np.int32), width, 0, slots, steps, (3, 5, 8, 9))


def assert_same_bits(program):
    kernels, rng = {isa: native.click_program(program, isa) for isa in extension.isas()}, np.random.default_rng(0)
    for count in (0, 1, 5, 64, 65):
        x = (rng.standard_normal((count, program.numbers)) * 3).astype(np.float32)
        ids = np.zeros((count, 1), np.int32)
        expected = [output.tobytes() for output in reference.run(program, ids, x)]
        for isa, kernel in kernels.items():
            assert [output.tobytes() for output in kernel(ids, x, None)] == expected, isa


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize(
    ("fields", "inputs", "heads", "size"),
    [(1, 1, 1, 1), (2, 3, 2, 3), (7, 8, 1, 5), (16, 16, 2, 16), (17, 5, 3, 4), (33, 8, 2, 8), (100, 4, 1, 64)],
)
def test_attention_gives_the_bits_of_the_reference(fields, inputs, heads, size):
    assert_same_bits(attended(fields, inputs, heads, size))
    assert_same_bits(attended(fields, inputs, heads, size, residual=False, relu=False))


@pytest.mark.skipif(extension.native() is None, reason=extension.missing())
@pytest.mark.parametrize("width", [1, 3, 16, 33, 100])
def test_gates_give_the_bits_of_the_reference(width):
    assert_same_bits(gated(width))


def test_attention_is_that_of_floats():
    program = attended(9, 6, 2, 5)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, program.numbers)).astype(np.float32)
    codes, result, *_ = reference.buffers(program, np.zeros((50, 1), np.int32), x)
    step = program.steps[1]
    vectors = np.stack([codes[:, start : start + 6] for start in step.positions], axis=1).astype(np.float64)
    y = np.clip(vectors @ (step.weight * step.scale.astype(np.float64)) + step.bias, -4095, 4095)
    q, k, v, r = y.reshape(50, 9, 4, 2, 5).transpose(2, 0, 3, 1, 4)
    scores = q @ k.transpose(0, 1, 3, 2) * step.score
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = weights / weights.sum(axis=-1, keepdims=True) @ v * step.value + r
    attention = result.reshape(50, 2, 5, 9).transpose(0, 1, 3, 2)
    assert np.abs(attention - np.clip(exact, 0, 4095)).max() < 2


@pytest.mark.parametrize(
    "changes", [{"fields": 8}, {"heads": 3}, {"size": 65}, {"out": 1}, {"x": 3}, {"score": np.inf}, {"weight": 1}]
)
def test_attentions_that_do_not_fit_are_refused(changes):
    program = attended(9, 6, 2, 5)
    if "weight" in changes:
        changes = {"weight": np.full_like(program.steps[2].weight, 32767).repeat(100, axis=0)}
    with pytest.raises(RequestError):
        replace(program, steps=(*program.steps[:2], replace(program.steps[2], **changes)), outputs=(3,))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(
            ("autoint", {"layout": layout, "heads": heads})
            for layout in ("rows", "fuxictr", "deepctr", "flat")
            for heads in (1, 2)
        ),
        ("autoint", {"layout": "fuxictr", "heads": 2, "head_size": 4}),  # the residual is the input itself
        ("autoint", {"vectors": True, "layout": "fuxictr"}),
        ("gdcn", {"layout": "fuxictr"}),
        ("finalmlp", {"layout": "constant"}),
        ("finalmlp", {"layout": "heads"}),
        ("finalmlp", {"numbers": 0}),
    ],
)
def test_layouts_of_exporters_become_the_same_steps(family, options):
    net = Network(family, **options)
    feeds = net.feeds(300)
    result, report = lower(net.model, calibrate(net.model, [feeds], "minmax"), QuantRecipe())
    assert report["fold"], report["reason"]
    program = click_program(result.graph[0])
    kinds = [type(step).__name__ for step in program.steps]
    expected = {"autoint": ("FieldAttention", 2), "gdcn": ("SigmoidProduct", 2), "finalmlp": ("CodeProduct", 1)}[family]
    assert kinds.count(expected[0]) == expected[1]
    assert kinds.count("GateCodes") == 2 * (family == "finalmlp" and options.get("layout") != "constant")
    (output,) = reference.run(program, feeds["ids"], feeds.get("numbers"), feeds.get("scales"))
    assert np.abs(output - run(net.model, **feeds)["probability"]).max() <= 0.005


def test_gates_are_near_the_sigmoid():
    gates = np.concatenate([np.linspace(-12, 12, 4001), [-1e9, 1e9]]).astype(np.float32)[:, None]
    codes = np.full(gates.shape, CODES, np.int16)
    run = Run(np.zeros((len(gates), 1), np.int32), None, None, [codes, gates, codes])
    GateCodes(0, 1, 2).compute(run)
    expected = CODES / (1 + np.exp(-gates.astype(np.float64).clip(-60, 60)))
    np.testing.assert_allclose(run.buffers[2], expected, atol=0.63)  # half a code, and 3e-5 of CODES
