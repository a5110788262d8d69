"""Networks in the branches of an If, from ONNX text."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from helpers.rewriting import model, ops, run

import zoo
from pipelines.graph import io
from pipelines.quantization.calibration.calibrate import calibrate
from pipelines.quantization.quantizer import quantize
from pipelines.quantization.recipe import QuantRecipe
from pipelines.quantization.taken_branch import taken_branch

RATES = """(float[n,32] x, int64 rate) => (float[n,4] y) {
    wide = Equal(rate, limit)
    y = If (wide) <
        then_branch = f () => (float[n,4] a) { h = Gemm(x, w) r = Relu(h) a = Gemm(r, v) },
        else_branch = g () => (float[n,4] b) { k = Gemm(x, u) s = Relu(k) b = Gemm(s, v) }> }"""


def rates(normal, text=RATES):
    return model(text, limit=np.int64(16), w=normal(32, 64) / 6, u=normal(32, 64) / 6, v=normal(64, 4) / 8)


def feeds(normal, *values):
    return [{"x": normal(8, 32), "rate": np.array(value)} for value in values]


@pytest.mark.parametrize("rate", [8, 16])
def test_the_branch_that_all_samples_take_is_int8(normal, rate):
    net, samples = rates(normal), feeds(normal, *[rate] * 4)
    branch = taken_branch(net, samples)
    assert ops(branch.model) == ["Gemm", "Relu", "Gemm"] and branch.taken == (rate == 16)
    table = calibrate(branch.model, samples)
    int8, _ = quantize(branch.model, QuantRecipe(), table)
    whole = branch.restored(int8, QuantRecipe(), table)
    onnx.checker.check_model(ir.to_proto(whole), full_check=True)
    assert ops(net) == ["Equal", "If"] and set(ops(whole)) == {"Cast", "Mul", "Equal", "If"}
    for value in (8, 16):
        x = feeds(normal, value)[0]
        expected = run(net, **x)["y"]
        np.testing.assert_allclose(run(whole, optimized=True, **x)["y"], expected, atol=0.03 * np.abs(expected).max())
        exact = int8 if value == rate else None
        assert exact is None or np.array_equal(run(whole, **x)["y"], run(exact, **x)["y"])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (RATES, (8, 16)),  # both branches
        (RATES.replace("Gemm(r, v)", "Slice(r, w, w)").replace("Gemm(", "Add("), (8,)),  # no layers
        (RATES.replace("int64 rate", "bool wide").replace("wide = Equal(rate, limit)", ""), (True,)),
        (
            RATES.replace("(rate", "(sum").replace(
                "wide =", "m = Gemm(x, w) t = ReduceSum<keepdims=0>(m) sum = Cast<to=7>(t) wide ="
            ),
            (8,),
        ),
    ],
)
def test_other_branches_stay_as_they_are(normal, text, values):
    name = "wide" if "bool" in text else "rate"
    samples = [{"x": normal(8, 32), name: np.array(value)} for value in values]
    assert taken_branch(rates(normal, text), samples) is None


@pytest.mark.slow
def test_quantize_writes_both_branches(normal, tmp_path, caplog):
    io.save(rates(normal), tmp_path / "float.onnx")
    np.savez(tmp_path / "x.npz", x=normal(6, 1, 32), rate=np.full(6, 16))
    path = tmp_path / "int8.onnx"
    result = zoo.quantize(tmp_path / "float.onnx", path, calibration_data=tmp_path / "x.npz", effort="fast")
    assert result["summary"]["int8_layers"] == 2 and result["effort"] == "fast"
    assert "no sample takes the else_branch of" in caplog.text and ops(io.load(path))[-1] == "If"
