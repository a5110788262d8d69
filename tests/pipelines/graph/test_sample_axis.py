"""Inputs of recurrent layers have time first: their feeds are neither joined nor cut along it."""

import numpy as np
import pytest
from helpers.arrays import normals
from helpers.rewriting import model, run

import zoo
from pipelines.graph import io, sample_axis
from pipelines.models.feeds import read_feeds

LSTM = """(float[{shape}] x) => (float[h,b,8] hn) {{
    a = MatMul(x, K) r = Relu(a) {turn} y, hn = LSTM<hidden_size=8{layout}>({read}, W, R) }}"""


def lstm(shape="t,b,6", turn="", read="r", layout=""):
    normal = normals(1)
    weights = {"K": normal(6, 16) / 3, "W": normal(1, 32, 16) / 4, "R": normal(1, 32, 8) / 4}
    return model(LSTM.format(shape=shape, turn=turn, read=read, layout=layout), **weights)


SCAN = """(float[b,4] h, float[t,b,4] x) => (float[t,b,4] ys) {
    a = MatMul(x, K) last, ys = Scan<num_scan_inputs=1, body = body (float[b,4] s, float[b,4] v) => (float[b,4] n, float[b,4] o) {
        n = Add(s, v) o = Identity(n) }>(h, a) }"""


@pytest.mark.parametrize(
    ("found", "shared"),
    [
        (lambda: lstm(), False),
        (lambda: lstm("b,t,6", "q = Transpose<perm=[1,0,2]>(r)", "q"), True),
        (lambda: lstm("b,t,6", layout=", layout=1"), True),
        (lambda: model(SCAN, K=normals(2)(4, 4)), False),
        (lambda: model("(float[b,t,4] x, float[t,4] p) => (float[b,t,4] y) { y = Add(x, p) }"), False),
        (lambda: model("(float[b,t,4] x, float[b,t] p) => (float[b,t,4] y) { y = Relu(x) }"), True),
        (lambda: model("(float[n,n] x, float[n] p) => (float[n,n] y) { y = Add(x, p) }"), True),
        (lambda: model("(float[b,4] x, float p) => (float[b,4] y) { y = Add(x, p) }"), False),
        (lambda: model("(float[2,4] x, float[b,4] p) => (float[2,4] y) { y = Add(x, p) }"), False),
    ],
)
def test_whether_the_first_axis_is_that_of_samples(found, shared):
    assert sample_axis.is_shared(found().graph) is shared


def test_a_folder_of_feeds_with_time_first(tmp_path):
    path = io.save(lstm(), tmp_path / "float.onnx")
    feeds = [normals(seed)(seed + 3, 2, 6) for seed in range(9)]
    (tmp_path / "feeds").mkdir()
    for index, x in enumerate(feeds):
        np.savez(tmp_path / "feeds" / f"{index}.npz", x=x)
    read = read_feeds(io.load(path), tmp_path / "feeds")
    assert [feed["x"].shape for feed in read] == [x.shape for x in feeds]  # joined along time before
    result = zoo.quantize(
        path, tmp_path / "int8.onnx", calibration_data=tmp_path / "feeds", report_path=tmp_path / "r.json"
    )
    assert result["summary"]["int8_layers"] == 1 and result["summary"]["sqnr_db"] > 30
    int8 = io.load(tmp_path / "int8.onnx")
    for x in feeds:
        before, after = (run(net, x=x)["hn"] for net in (io.load(path), int8))
        assert np.square(after - before).sum() < 0.005 * np.square(before).sum()


def test_a_scan_with_its_state(tmp_path):
    path = io.save(model(SCAN, K=normals(2)(4, 4)), tmp_path / "float.onnx")
    np.savez(tmp_path / "x.npz", h=np.zeros((16, 4), np.float32), x=normals(3)(9, 16, 4))  # refused before
    result = zoo.quantize(path, tmp_path / "int8.onnx", calibration_data=tmp_path / "x.npz")
    assert result["summary"]["int8_layers"] == 1
