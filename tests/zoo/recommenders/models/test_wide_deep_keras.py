"""Folders that version 0.2.0 trained in Keras: they are opened, frozen and trained on."""

import json

import numpy as np
import pytest

import zoo
from pipelines.core.errors import RequestError
from pipelines.core.files import write_json

torch = pytest.importorskip("torch", reason="needs the train extra")
h5py = pytest.importorskip("h5py")


from zoo.recommenders.models import wide_deep as family  # noqa: E402

FEATURES = {
    "hash": "farmhash fingerprint64 mod buckets",
    "transform": "log1p, minmax",
    "numeric": 3,
    "categorical": 2,
    "buckets": 50,
    "lo": [0.0] * 3,
    "hi": [4.6] * 3,
    "fill": [0.0] * 3,
}
CONFIG = {"numeric": 3, "categorical": 2, "buckets": 50, "embedding_size": 4, "hidden": [8, 6], "validation": 1500.0}
CONFIG |= {"l2_embeddings": 5000.0, "l2_wide": 8.0, "refit": True}


@pytest.fixture
def former(tmp_path):
    """(folder, the weights of its checkpoint by the names in Keras' file)"""
    folder, random, weights = tmp_path / "former", np.random.default_rng(0), {}
    folder.mkdir()
    write_json(folder / "train.json", {"config": CONFIG, "features": FEATURES})
    card = {"name": "former", "entry": "wide-deep", "description": "d", "files": {}, "preprocessing": FEATURES}
    write_json(folder / "card.json", card | {"training": {"config": CONFIG}})
    for name, shape in {"dense": (11, 8), "dense_1": (8, 6), "dense_2": (6, 1)}.items():
        weights[f"layers/{name}/vars/0"], weights[f"layers/{name}/vars/1"] = shape, shape[1:]
    for suffix in ("", "_1"):
        weights[f"layers/tables/tables/__table{suffix}/vars/0"] = (50, 4)
        weights[f"layers/tables_1/tables/__table{suffix}/vars/0"] = (50, 1)
    with h5py.File(folder / "model.weights.h5", "w") as file:
        for name, shape in weights.items():
            weights[name] = file[name] = random.normal(0, 0.3, shape).astype(np.float32)
    np.savez(folder / "calibration.npz", **some_inputs(200))
    return folder, weights


def some_inputs(rows):
    random = np.random.default_rng(rows)
    return {"ids": random.integers(0, 50, (rows, 2), np.int32), "numbers": random.random((rows, 3), np.float32)}


def expected(weights, inputs):
    tables = [weights[f"layers/tables/tables/__table{suffix}/vars/0"] for suffix in ("", "_1")]
    wide = [weights[f"layers/tables_1/tables/__table{suffix}/vars/0"] for suffix in ("", "_1")]
    x = np.concatenate([*(table[inputs["ids"][:, i]] for i, table in enumerate(tables)), inputs["numbers"]], axis=1)
    for name in ("dense", "dense_1"):
        x = np.maximum(x @ weights[f"layers/{name}/vars/0"] + weights[f"layers/{name}/vars/1"], 0)
    logit = x @ weights["layers/dense_2/vars/0"] + weights["layers/dense_2/vars/1"]
    return 1 / (1 + np.exp(-(logit + sum(table[inputs["ids"][:, i]] for i, table in enumerate(wide)))))


def test_a_checkpoint_of_keras_is_frozen_and_built(former, log, tmp_path):
    folder, weights = former
    zoo.build(folder)
    inputs = some_inputs(64)
    scores = zoo.pipeline(folder, "fp32", "onnxruntime").predict(inputs)["probability"]
    np.testing.assert_allclose(scores, expected(weights, inputs), atol=1e-6)
    assert zoo.run(folder, str(log), tmp_path / "scores.csv")["rows"] == 400
    assert zoo.evaluate(folder, str(log), engine="onnxruntime")["difference"]["max_probability"] < 0.02
    record = json.loads((folder / "build.json").read_text())
    assert list(record["fp32.onnx"]["inputs"]) == ["model.weights.h5"]


def test_it_is_trained_on_from_its_weights(former, log, tmp_path):
    folder, weights = former
    settings = {"learning_rate": "1e-12", "epochs": "1", "held_out": "0.25"}
    zoo.finetune(folder, log, tmp_path / "still", settings=settings)
    inputs = some_inputs(64)
    zoo.build(tmp_path / "still")
    scores = zoo.pipeline(tmp_path / "still", "fp32", "onnxruntime").predict(inputs)["probability"]
    np.testing.assert_allclose(scores, expected(weights, inputs), atol=1e-5)
    trained = json.loads((tmp_path / "still/train.json").read_text())
    assert (trained["config"]["hidden"], trained["config"]["embedding_size"]) == ([8, 6], 4)
    assert trained["features"]["schema"]["header"] is False


def test_graphs_with_the_names_of_keras_are_read(former):
    """fp32.onnx of 0.2.0 has the weights under the paths of Keras' variables."""
    import onnx

    folder, weights = former
    names = {"deep/C1/embeddings": "tables/tables/__table", "deep/C2/embeddings": "tables/tables/__table_1"}
    names |= {"wide/C1/weights": "tables_1/tables/__table", "wide/C2/weights": "tables_1/tables/__table_1"}
    arrays = {name: weights[f"layers/{path}/vars/0"] for name, path in names.items()}
    for name, path in (("hidden_0", "dense"), ("hidden_1", "dense_1"), ("deep_logit", "dense_2")):
        arrays |= {f"{name}/kernel": weights[f"layers/{path}/vars/0"], f"{name}/bias": weights[f"layers/{path}/vars/1"]}
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y], constants)
    opset = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), folder / "fp32.onnx")
    about, network = family.network(folder)
    assert about["config"].hidden == (8, 6)
    inputs = some_inputs(64)
    with torch.no_grad():
        logits = network(torch.from_numpy(inputs["ids"]), torch.from_numpy(inputs["numbers"]), torch.zeros(64, 0))
    np.testing.assert_allclose(torch.sigmoid(logits).numpy(), expected(weights, inputs), atol=1e-6)


def test_damage_is_said(former):
    folder, _ = former
    (folder / "model.weights.h5").write_bytes(b"no weights")
    with pytest.raises(RequestError, match="train it again") as caught:
        zoo.freeze(folder)
    assert "\n" not in str(caught.value)
