"""Modules of sentence-transformers after the network: pooling, Dense layers, normalization and truncation."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.export.freeze import freeze  # noqa: E402

BERT = {**text_models.USUAL, "model_type": "bert", "architectures": ["BertModel"]}
POOLINGS = {  # of the last layer of one text, by the key of config.json
    "cls_token": lambda x: x[0],
    "max_tokens": lambda x: x.max(axis=0),
    "mean_tokens": lambda x: x.mean(axis=0),
    "mean_sqrt_len_tokens": lambda x: x.sum(axis=0) / np.sqrt(len(x)),
    "weightedmean_tokens": lambda x: np.average(x, axis=0, weights=np.arange(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}
TEXTS = text_models.TEXTS


def embeddings(tmp_path, modules, settings=None, **options):
    """(embeddings of the imported model, last layers of the network)."""
    network = text_networks.write(tmp_path / "theirs", BERT, modules)
    (tmp_path / "theirs/config_sentence_transformers.json").write_text(json.dumps(settings or {}))
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", **options)
    vectors = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    return vectors, [text_networks.hidden(network, text) for text in TEXTS]


@pytest.mark.parametrize("modes", [[mode] for mode in POOLINGS] + [["mean_tokens", "cls_token"], [*POOLINGS]])
def test_poolings_alone_and_concatenated(tmp_path, modes):
    about = {f"pooling_mode_{mode}": mode in modes for mode in reversed(POOLINGS)}
    vectors, layers = embeddings(tmp_path, [("Pooling", about)])
    expected = np.stack([np.concatenate([POOLINGS[mode](x) for mode in POOLINGS if mode in modes]) for x in layers])
    assert vectors.shape[1] == 32 * len(modes)
    assert np.abs(vectors - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("mode", ["cls", "weightedmean", "lasttoken", ["mean", "cls"]])
def test_poolings_under_the_names_of_newer_versions(tmp_path, mode):
    vectors, layers = embeddings(tmp_path, [("Pooling", {"pooling_mode": mode})])
    names = {"cls": "cls_token", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens", "lasttoken": "lasttoken"}
    modes = [mode] if isinstance(mode, str) else mode
    expected = np.stack([np.concatenate([POOLINGS[names[mode]](x) for mode in modes]) for x in layers])
    assert np.abs(vectors - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("mode", ["last", "weighted_mean", "mean_sqrt_len", "mean", "max"])
def test_poolings_with_padding_on_the_left(tmp_path, mode):
    import onnxruntime

    values = {**text_networks.CONFIGS["modernbert"], "num_hidden_layers": 2}
    text_networks.write(tmp_path / "theirs", values, [("Pooling", {"pooling_mode_mean_tokens": True})])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", pooling=mode)
    freeze(tmp_path / "ours")
    session = onnxruntime.InferenceSession(tmp_path / "ours/fp32.onnx")
    ids = np.array([text_models.tokenizer().encode(TEXTS[2]).ids])
    alone = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
    for pad in ((5, 0), (0, 5)):
        padded = [np.pad(array, ((0, 0), pad)) for array in (ids, np.ones_like(ids))]
        outputs = session.run(None, dict(zip(("input_ids", "attention_mask"), padded, strict=True)))[0]
        assert np.abs(outputs - alone).max() < 1e-5


DENSE = {"in_features": 32, "out_features": 48, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
BACK = {"in_features": 48, "out_features": 24, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
MEAN = ("Pooling", {"pooling_mode_mean_tokens": True})


def dense(folder, rows, activation):
    """A Dense layer of sentence-transformers."""
    from safetensors.numpy import load_file

    weights = load_file(folder / "model.safetensors")
    return activation(rows @ weights["linear.weight"].T + weights.get("linear.bias", np.float32(0)))


@pytest.mark.parametrize("pickled", [False, True])
def test_dense_layers_follow_the_pooling(tmp_path, pickled):
    modules = [MEAN, ("Dense", DENSE), ("Dense", BACK), ("Normalize", {})]
    network = text_networks.write(tmp_path / "theirs", BERT, modules)
    expected = np.stack([text_networks.hidden(network, text).mean(axis=0) for text in TEXTS])
    expected = dense(tmp_path / "theirs/2_Dense", expected, np.tanh)
    expected = dense(tmp_path / "theirs/3_Dense", expected, lambda x: x)
    if pickled:
        from safetensors.torch import load_file

        path = tmp_path / "theirs/2_Dense/model.safetensors"
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    exact = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    assert exact.shape == (len(TEXTS), 24)
    assert np.abs(exact - text_networks.unit(expected)).max() < 1e-5
    (tmp_path / "t.txt").write_text("\n".join(TEXTS * 4))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "t.txt"), samples=8)
    zoo.run(tmp_path / "ours", str(tmp_path / "t.txt"), tmp_path / "v.npy")
    vectors = np.load(tmp_path / "v.npy")
    assert (vectors[: len(TEXTS)] * exact).sum(axis=1).min() > 0.95


@pytest.mark.parametrize(("key", "value"), [("use_residual", True), ("activation_function", "torch.nn.SELU")])
def test_other_dense_layers_are_refused(tmp_path, key, value):
    text_networks.write(tmp_path / "theirs", BERT, [MEAN, ("Dense", {**DENSE, key: value})])
    with pytest.raises(RequestError, match=f"{key}|activation selu"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")


def test_a_dense_layer_without_weights_is_named(tmp_path):
    text_networks.write(tmp_path / "theirs", BERT, [MEAN, ("Dense", DENSE)])
    (tmp_path / "theirs/2_Dense/model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"there is no model.safetensors, nor pytorch_model.bin, in 2_Dense"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(("listed", "option"), [(True, False), (True, True), (False, True), (False, False)])
def test_embeddings_are_truncated_as_sentence_transformers_does(tmp_path, listed, option):
    modules = [MEAN, *([("Normalize", {})] if listed else [])]
    vectors, layers = embeddings(tmp_path, modules, {"truncate_dim": 8}, normalize=option)
    expected = np.stack([x.mean(axis=0) for x in layers])
    expected = (text_networks.unit(expected) if listed else expected)[:, :8]
    expected = text_networks.unit(expected) if option else expected
    assert vectors.shape == (len(TEXTS), 8)
    assert np.abs(vectors - expected).max() < 1e-5


def test_prompts_that_are_not_pooled_are_refused(tmp_path):
    embeddings(tmp_path, [("Pooling", {"pooling_mode": "mean", "include_prompt": False})])
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    assert (opened.encode(TEXTS, prompt="") == opened.encode(TEXTS)).all()
    with pytest.raises(RequestError, match="found the prompt 'query: ', which the model's pooling leaves out"):
        opened.encode(TEXTS, prompt="query: ")
