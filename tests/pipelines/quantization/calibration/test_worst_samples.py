"""The worst samples decide among candidates that are close in mean SQNR."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import mlp, model

from pipelines.graph import reference_session
from pipelines.quantization.calibration import auto_calibration, candidates, effort
from pipelines.quantization.calibration.compared_outputs import Errors, OutputSqnr
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe


def outputs(network, batch):
    return reference_session.run(reference_session.session(network, "test"), batch)[0]


def single(network, int8, x):
    """SQNR of every sample in dB."""
    exact, tested = outputs(network, {"x": x}), outputs(int8, {"x": x})
    return 10 * np.log10((exact**2).sum(axis=1) / ((tested - exact) ** 2).sum(axis=1))


@pytest.mark.parametrize(("count", "worst"), [(24, 2), (256, 4)])
def test_the_lowest_are_the_worst_of_all_samples(count, worst):
    samples = [{"x": normals(3)(count, 8)}]
    int8, _ = quantize(mlp(), QuantRecipe(), make_table(mlp(), QuantRecipe(correct=False), samples))
    expected = np.sort(single(mlp(), int8, samples[0]["x"]))[:worst].mean()
    metric = OutputSqnr(mlp(), [{"x": samples[0]["x"][start : start + 8]} for start in range(0, count, 8)])
    errors = metric.errors(session := metric.open(int8), slice(1))
    errors.add(metric.errors(session, slice(1, None)))  # in parts
    assert errors.worst == pytest.approx(expected, rel=1e-4)
    assert errors.sqnr == pytest.approx(metric(int8), rel=1e-12)
    assert metric.errors(metric.open(mlp()), slice(None)).worst == 120


@pytest.mark.parametrize(
    ("sqnr", "worst", "best"),
    [
        ([27.5, 29.5, 30.8], [22.0, 25.1, 23.6], 1),  # 1.3 dB less, and 1.5 dB more of the worst samples
        ([27.5, 29.5, 30.8], [22.0, 23.8, 23.6], 2),  # nothing is won: the mean decides
        ([27.5, 28.0, 27.9], [22.0, 22.1, 22.2], 0),  # differences that may be noise
        ([27.5, 25.0, 31.0], [22.0, 40.0, 23.6], 2),  # not close
    ],
)
def test_close_candidates_are_chosen_by_their_worst_samples(sqnr, worst, best, monkeypatch):
    monkeypatch.setattr(candidates, "_is_plain", lambda table: False)
    tables, errors = [str(number) for number in range(3)], [of_decibel(ratio, ratio) for ratio in sqnr]
    chosen = candidates.select_table(tables, errors, lambda close: [worst[int(name)] for name in close])
    assert chosen == (str(best), errors[best])
    assert candidates.select_table(tables, errors, None)[0] == str(np.argmax(sqnr) if max(sqnr) > sqnr[0] + 1 else 0)


def of_decibel(overall, mean):
    return Errors({0: 10 ** (-overall / 10)}, {0: 1.0}, [mean] * 64)


@pytest.mark.parametrize(
    ("overall", "mean", "plain", "best"),
    [
        ([17.5, 17.7, 20.3], [24.9, 26.3, 22.0], 2, 2),  # few samples outweigh the others: min-max alone holds them
        ([20.1, 17.7, 20.3], [24.9, 30.3, 22.0], 2, 0),  # the best of those that hold them
        ([20.1, 20.4, 20.3], [24.9, 27.3, 22.0], 2, 1),
        ([17.5, 17.7, 20.3], [24.9, 26.3, 22.0], None, 0),  # min-max ranges were left out before
    ],
)
@pytest.mark.parametrize("worst", [None, [20.0, 20.0, 20.0]])
def test_none_is_kept_whose_samples_together_have_more_error_than_with_minmax(
    overall, mean, plain, best, worst, monkeypatch
):
    monkeypatch.setattr(candidates, "_is_plain", lambda table: table == str(plain))
    errors = [of_decibel(*pair) for pair in zip(overall, mean, strict=True)]
    lowest = (lambda close: [worst[int(name)] for name in close]) if worst else None
    assert candidates.select_table(["0", "1", "2"], errors, lowest)[0] == str(best)


def test_the_worst_samples_decide_in_a_calibration(monkeypatch):
    """One sample of 64 has values that the ranges of least mean error clip."""
    monkeypatch.setattr(effort, "CHEAP", 0)
    monkeypatch.setattr(auto_calibration, "DEVIATIONS", (0.0,))  # wider ones hold these samples, too
    normal = normals(5)
    text = "(float[n,16] x) => (float[n,4] y) { h = MatMul(x, w) y = MatMul(h, v) }"
    network = model(text, w=normal(16, 16), v=normal(16, 4))
    x = normal(512, 16)
    x[5::64] *= 3.2

    def calibrated():
        table = auto_calibration.auto_calibrate(network, QuantRecipe(), [{"x": x}], 512)
        sqnr = single(network, quantize(network, QuantRecipe(), table)[0], x)
        return sqnr.mean(), np.sort(sqnr)[:8].mean()

    mean, worst = calibrated()
    monkeypatch.setattr(candidates, "WORST", 0)
    mean_before, worst_before = calibrated()
    assert worst > worst_before + 1 and mean > mean_before - 1


def test_no_further_samples_are_computed_for_candidates_that_are_far_behind(monkeypatch):
    monkeypatch.setattr(effort, "CHEAP", 0)
    samples = [{"x": normals(3)(512, 8)}]
    computed = []
    errors = OutputSqnr.errors
    monkeypatch.setattr(
        OutputSqnr, "errors", lambda *args: (computed.append((args[2].start, args[2].stop)), errors(*args))[1]
    )
    for far, count in ((0.0, 0), (np.inf, 2)):
        computed.clear()
        monkeypatch.setattr(candidates, "FAR", far)
        auto_calibration.auto_calibrate(mlp(), QuantRecipe(correct=False), samples, 512, effort="default")
        assert sum(start == 8 and stop > 8 for start, stop in computed) >= count and (count or (8, 32) not in computed)


def test_layers_stay_float_for_the_worst_samples(monkeypatch):
    """One sample of 32 has small inputs, on which int8 computes little more than noise; the mean SQNR is high."""
    normal = normals(7)
    text = """(float[n,16] x) => (float[n,4] y) {
        h = MatMul(x, w) g = Relu(h) a = MatMul(g, v) wide = MatMul(x, u) r = Relu(wide) b = MatMul(r, t) y = Add(a, b) }"""
    network = model(text, w=normal(16, 16), v=normal(16, 4), u=normal(16, 256), t=normal(256, 4) * 1e-3)
    x = normal(512, 16)
    x[5::32] *= 0.02

    def calibrated():
        table = auto_calibration.auto_calibrate(network, QuantRecipe(), [{"x": x}], 512, effort="default")
        sqnr = single(network, quantize(network, QuantRecipe(), table)[0], x)
        return table.keep_float, sqnr.mean(), np.sort(sqnr)[:16].mean()

    kept, mean, worst = calibrated()
    monkeypatch.setattr(auto_calibration, "TAIL", -np.inf)
    none, mean_before, worst_before = calibrated()
    assert kept and not none and mean_before > 24 > 16 > worst_before
    assert worst > worst_before + 1 and mean > mean_before - 0.5
