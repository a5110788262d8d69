"""The native form of a recommender is held to the bound of its recipe on rows of its log."""

import numpy as np
from helpers.rewriting import model

from pipelines.graph import reference_session
from pipelines.kernels.recommenders import reference
from pipelines.kernels.recommenders.from_graph import click_program
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.recipe import QuantRecipe
from zoo.recommenders.lowering.lower import lower

WIDTH = 288  # layers of so many columns read bytes, smaller ones codes


def network(scale):
    """(float model, rows): two fields and two layers, whose logits `scale` multiplies."""
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    onnx_model = model(
        """(int32[n,2] ids) => (float[n,1] probability) {
        i0 = Gather<axis=1>(ids, c0) e0 = Gather(E, i0) i1 = Gather<axis=1>(ids, c1) e1 = Gather(F, i1)
        v = Concat<axis=1>(e0, e1) a = Gemm(v, V, b) h = Relu(a) z = Gemm(h, W, b) g = Relu(z)
        logit = MatMul(g, U) probability = Sigmoid(logit) }""",
        c0=np.int64(0),
        c1=np.int64(1),
        E=normal(300, 8),
        F=normal(90, 8),
        V=normal(16, WIDTH) / 4,
        W=normal(WIDTH, WIDTH) / 12,
        b=normal(WIDTH) / 10,
        U=normal(WIDTH, 1) * np.float32(scale / 12),
    )
    return onnx_model, {"ids": rng.integers(0, [300, 90], (400, 2)).astype(np.int32)}


def lowered(scale, bound, held=True):
    """(largest change of a probability by the first form or None, report)"""
    float_model, rows = network(scale)
    table = calibrate(float_model, [rows], "minmax")
    made, report = lower(float_model, table, QuantRecipe(bound=bound), rows=rows if held else None)
    if made is None:
        return None, report
    (expected,) = reference_session.run(reference_session.session(float_model, "tests need"), rows)
    (result,) = reference.run(click_program(made.graph[0]), rows["ids"])
    return float(np.abs(result - expected).max()), report


def test_finer_codes_where_the_bound_needs_them():
    change, report = lowered(4, 0.004)
    assert change <= 0.004 and all(form["change"] <= 0.004 for form in report["forms"])
    assert lowered(4, 0.004, held=False)[0] > 0.004


def test_a_model_without_a_form_within_the_bound_is_refused():
    change, report = lowered(60, 0.003)
    assert change is None and "change an output by" in report["reason"] and "the bound is 0.003" in report["reason"]
    change, _ = lowered(60, 0.003, held=False)
    assert change > 0.003
