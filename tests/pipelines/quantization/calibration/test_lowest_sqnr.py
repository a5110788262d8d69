"""The worst samples decide among candidates that are close in mean SQNR."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import mlp, model

from pipelines.graph import reference_session
from pipelines.quantization.calibration import auto_calibration, lowest_sqnr
from pipelines.quantization.calibration.lowest_sqnr import LowestSqnr
from pipelines.quantization.ptq import make_table
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe


def outputs(network, batch):
    return reference_session.run(reference_session.session(network, "test"), batch)[0]


def single(network, int8, x):
    """SQNR of every sample in dB."""
    exact, tested = outputs(network, {"x": x}), outputs(int8, {"x": x})
    return 10 * np.log10((exact**2).sum(axis=1) / ((tested - exact) ** 2).sum(axis=1))


@pytest.mark.parametrize(("count", "worst", "room"), [(24, 2, 1 << 20), (256, 4, 1 << 20), (256, 4, 1000), (256, 4, 0)])
def test_the_lowest_are_the_worst_of_all_samples(monkeypatch, count, worst, room):
    monkeypatch.setattr(lowest_sqnr, "ROOM", room)
    samples = [{"x": normals(3)(count, 8)}]
    int8, _ = quantize(mlp(), QuantRecipe(), make_table(mlp(), QuantRecipe(correct=False), samples))
    expected = np.sort(single(mlp(), int8, samples[0]["x"]))[:worst].mean()
    lowest = LowestSqnr(mlp(), samples)
    np.testing.assert_allclose(lowest([int8, mlp()]), [expected, 120], rtol=1e-4)
    assert lowest([int8]) == lowest([mlp(), int8])[1:]


@pytest.mark.parametrize(
    ("sqnr", "worst", "best"),
    [
        ([27.5, 29.5, 30.8], [22.0, 25.1, 23.6], 1),  # 1.3 dB less, and 1.5 dB more of the worst samples
        ([27.5, 29.5, 30.8], [22.0, 23.8, 23.6], 2),  # nothing is won: the mean decides
        ([27.5, 28.0, 27.9], [22.0, 22.1, 22.2], 0),  # differences that may be noise
        ([27.5, 25.0, 31.0], [22.0, 40.0, 23.6], 2),  # not close
    ],
)
def test_close_candidates_are_chosen_by_their_worst_samples(sqnr, worst, best):
    tables = [str(number) for number in range(3)]
    chosen = auto_calibration._best(tables, sqnr, lambda close: [worst[int(name)] for name in close])
    assert chosen == (str(best), sqnr[best])
    assert auto_calibration._best(tables, sqnr, None)[0] == str(np.argmax(sqnr) if max(sqnr) > sqnr[0] + 1 else 0)


def test_the_worst_samples_decide_in_a_calibration(monkeypatch):
    """One sample of 64 has values that the ranges of least mean error clip."""
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
    monkeypatch.setattr(auto_calibration, "WORST", 0)
    mean_before, worst_before = calibrated()
    assert worst > worst_before + 1 and mean > mean_before - 1
