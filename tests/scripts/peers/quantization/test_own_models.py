"""The comparison of quantizers on ONNX files of other people, without the peers."""

import numpy as np
import onnx
import onnxruntime
import pytest

from pipelines.core import machine
from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from scripts.peers import harness, processes
from scripts.peers.quantization import opening, own_models, settings
from scripts.rendering import third_party


@pytest.fixture
def folder(tmp_path):
    """A linear layer [batch, 4] -> [batch, 3], and a state whose batch is its second axis."""
    text = """<ir_version: 8, opset_import: ["" : 13]>
    net (float[n, 4] x, float[2, n, 3] state) => (float[n, 3] y, float[2, n, 3] kept) { y = MatMul(x, w) kept = Mul(state, half) }"""
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    arrays = {"w": random.normal(size=(4, 3)).astype(np.float32), "half": np.float32(0.5)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in arrays.items())
    onnx.save(model, tmp_path / "net.onnx")
    for kind, count in (("calib", 6), ("test", 5)):
        x, state = random.normal(size=(count, 4)), random.normal(size=(count, 2, 1, 3))
        np.savez(tmp_path / f"net.{kind}.npz", x=x.astype(np.float32), state=state.astype(np.float32))
    return tmp_path


def test_a_sample_gets_the_batch_axis_that_it_lacks(folder):
    feeds = own_models.feeds(folder / "net.onnx", folder / "net.test.npz")
    assert len(feeds) == 5
    assert {name: array.shape for name, array in feeds[0].items()} == {"x": (1, 4), "state": (2, 1, 3)}
    onnxruntime.InferenceSession(folder / "net.onnx").run(None, feeds[0])


def test_every_output_counts_alike():
    expected = [[np.array([[100.0, 0.0]], np.float32), np.array([0.1], np.float32), np.array([3])]]
    actual = [[np.array([[100.0, 0.0]], np.float32), np.array([0.09], np.float32), np.array([4])]]
    assert own_models.sqnr(expected, actual) == pytest.approx(-10 * np.log10(0.01 / 2), abs=0.01)
    assert own_models.sqnr(expected, expected) == 200


def test_padding_of_texts_does_not_count():
    feed = {"input_ids": np.array([[5, 6, 0]]), "attention_mask": np.array([[1, 1, 0]])}
    tokens, pooled = np.arange(6.0).reshape(1, 3, 2), np.ones((1, 2))
    left, same = own_models.at_tokens(feed, [tokens, pooled])
    assert left.tolist() == [[0, 1], [2, 3]]
    assert same is pooled


def test_agreement_is_of_classes_or_of_the_side_of_a_half():
    two = [[np.array([[0.1, 0.9], [0.8, 0.2]])], [np.array([[0.1, 0.9], [0.2, 0.8]])]]
    assert own_models.agreement(two[:1], two[1:])["agreement"] == 50
    one = [[np.array([0.4])], [np.array([0.6])]]
    assert own_models.agreement(one[:1], one[1:]) == {"agreement": 0, "cosine": 1}


@pytest.mark.parametrize(("classes", "share"), [(1, 100), (3, 75)])
def test_the_classes_of_a_map_are_its_second_axis(classes, share):
    """A text detector's map has one class; the largest pixel of a row is none."""
    x = np.random.default_rng(0).uniform(0.6, 0.9, (1, classes, 2, 2)).astype(np.float32)
    y = x + np.float32([0.4, 0.0])
    y[0, x[0, :, 0, 0].argmin(), 0, 0] += classes > 1
    assert own_models.agreement([[x]], [[y]])["agreement"] == share


def test_a_setting_that_fails_is_left_out(folder, tmp_path, monkeypatch):
    def copy(work, target):
        target.with_suffix(".onnx").write_bytes(work.fp32.read_bytes())
        return {}

    def broken(work, target):
        raise ValueError("no\nway")

    monkeypatch.setattr(own_models, "SETTINGS", {"copy": copy, "broken": broken})
    monkeypatch.setattr(processes, "in_process", lambda function, *args, **_: function(*args))
    monkeypatch.setattr(harness, "TURN_SECONDS", 0)
    monkeypatch.setattr(opening, "costs", lambda *_: {})
    (tmp_path / "work").mkdir()
    model = own_models.quantized("net", folder, ["copy", "broken"], tmp_path / "work", 0, lambda _: None)
    report = own_models.compare(model, 2, tmp_path / "work")
    assert report["samples"] == {"calibration": 6, "test": 5}
    assert report["left_out"] == {"broken": "ValueError: no way"}
    assert report["results"][1]["accuracy"]["onnxruntime"] == {"sqnr_db": 200.0, "agreement": 100.0, "cosine": 1.0}
    assert report["milliseconds"]["openvino"].keys() == {"fp32", "copy"}
    assert ("openvino-default" in report["milliseconds"]) == machine.has_bf16()
    assert read_json(tmp_path / "work" / "net-copy.json") == report["results"][1]
    assert report["larger"] == {}
    rows = third_party.rows({"models": [report]})
    assert [row[:2] for row in rows] == [["net", "fp32"], ["net", "copy"]]
    assert len(rows[0]) == len(rows[1]) == len(third_party.COLUMNS)
    assert "- broken of net: ValueError: no way" in third_party.failures({"models": [report]})
    lines = harness.table({"models": [report]}).splitlines()
    assert lines[0].startswith("model net, samples.calibration 6") and "left_out.broken ValueError: no way" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["setting", "fp32", "copy"]


def test_larger_batches_are_timed_where_files_take_them(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    for axis in ("n", "1"):
        text = f"""<ir_version: 8, opset_import: ["" : 13]>
        net (float[{axis}, 4] x) => (float[{axis}, 4] y) {{ y = Neg(x) }}"""
        onnx.save(onnx.parser.parse_model(text), tmp_path / f"net{axis}.onnx")
        for kind in ("calib", "test"):
            np.savez(tmp_path / f"net{axis}.{kind}.npz", x=random.normal(size=(5, 4)).astype(np.float32))
    monkeypatch.setattr(processes, "in_process", lambda function, *args, **_: function(*args))
    monkeypatch.setattr(harness, "TURN_SECONDS", 0)
    monkeypatch.setattr(opening, "costs", lambda *_: {})
    (tmp_path / "work").mkdir()
    work = tmp_path / "work"
    models = (own_models.quantized(f"net{axis}", tmp_path, [], work, 0, lambda _: None) for axis in "n1")
    free, fixed = (own_models.compare(model, 2, work, (1, 8)) for model in models)
    assert free["larger"]["8"]["onnxruntime"].keys() == fixed["milliseconds"]["onnxruntime"].keys() == {"fp32"}
    assert fixed["larger"]["8"]["onnxruntime"] == {} and fixed["larger"]["8"]["openvino"].keys() == {"fp32"}
    rows = third_party.rows({"models": [free, fixed]})
    assert [row[1] for row in rows] == ["fp32", "fp32, batch 8"] * 2
    assert {len(row) for row in rows} == {len(third_party.COLUMNS)}


@pytest.mark.parametrize(("file", "weights"), [("m.xml", "m.bin"), ("m.onnx", "m.onnx.data")])
def test_weights_beside_a_file_count_as_its_bytes(tmp_path, file, weights):
    (tmp_path / file).write_bytes(b"123")
    assert settings.size_of(tmp_path / file) == 3
    (tmp_path / weights).write_bytes(b"45")
    assert settings.size_of(tmp_path / file) == 5


def test_samples_of_another_axis_make_no_batch(folder):
    feeds = own_models.feeds(folder / "net.onnx", folder / "net.test.npz")
    with pytest.raises(RequestError, match="the first axis of state is not that of samples; give --batch 1"):
        own_models.batch_of(feeds, 8)


def test_files_are_opened_in_new_processes_with_a_cache_of_their_own(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "COUNT", 1)
    batch = own_models.feeds(folder / "net.onnx", folder / "net.test.npz")[0]
    paths, work = {"fp32": folder / "net.onnx", "gone": folder / "gone.onnx"}, tmp_path / "opened"
    work.mkdir()
    figures = opening.costs(paths, ["onnxruntime"], batch, work)
    assert figures.keys() == {"onnxruntime"} and figures["onnxruntime"].keys() == {"fp32"}
    cost = figures["onnxruntime"]["fp32"]
    assert cost["cpu_milliseconds"] > 0 and 10 < cost["imports_mb"] <= cost["peak_mb"]
    assert not list(work.iterdir())
    models = [{"model": "net", "opening": figures}, {"model": "of an earlier report"}]
    cells = f"{cost['cpu_milliseconds']:.0f} / {cost['peak_mb']:.0f}"
    assert third_party.opening_rows({"models": models}) == [["net", "fp32", cells, "", "", "", ""]]


def test_the_own_file_is_compared_with_the_fastest_other_one_in_a_stock_engine():
    def figures(**milliseconds):
        return {name: {"median": median} for name, median in milliseconds.items()}

    results = [
        {"setting": "zoo", "accuracy": {"native": {"sqnr_db": 30.0}}},
        {"setting": "nncf", "accuracy": {"openvino": {"sqnr_db": 20.0}}},
        {"setting": "static", "accuracy": {"openvino": {"failed": "no"}, "native": {"sqnr_db": 25.0}}},
    ]
    milliseconds = {"openvino": figures(fp32=9, zoo=5, nncf=4, static=6), "native": figures(zoo=2, static=1)}
    model = {"model": "net", "results": results, "milliseconds": milliseconds, "larger": {"8": {"openvino": {}}}}
    expected = ["net", "1", "2.00 (native)", "30.0", "4.00 (nncf in openvino)", "20.0", "2.00x", "25.0 (static)"]
    assert third_party.best({"models": [model]}) == [expected]
