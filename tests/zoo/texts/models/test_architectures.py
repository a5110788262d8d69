"""Networks of every architecture compute what transformers does, at any length and with padding on either side."""

import json
from dataclasses import fields

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import CONFIGS, LONG, TEXTS  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.export.freeze import freeze  # noqa: E402
from zoo.texts.export.positions import distance_bias, rotary_angles  # noqa: E402
from zoo.texts.models.config import Attention, Dense, ModelConfig, Norm, Rotary  # noqa: E402


@pytest.mark.parametrize("kind", CONFIGS)
def test_embeddings_are_those_of_transformers(tmp_path, kind):
    network = text_networks.write(tmp_path / "theirs", CONFIGS[kind])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    found = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(text,) for text in TEXTS])
    expected = [text_networks.hidden(network, text).mean(axis=0) for text in TEXTS]
    assert np.abs(found - text_networks.unit(np.stack(expected))).max() < 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
def test_padding_on_either_side_changes_nothing(tmp_path, kind):
    text_networks.write(tmp_path / "theirs", CONFIGS[kind])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    freeze(tmp_path / "ours")
    session = onnxruntime.InferenceSession(tmp_path / "ours/fp32.onnx")
    for text in (TEXTS[2], LONG):
        ids = np.array([text_models.tokenizer().encode(text).ids])
        alone = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
        for pad in ((0, 9), (9, 0)):
            given = {
                "input_ids": np.pad(ids, ((0, 0), pad)),
                "attention_mask": np.pad(np.ones_like(ids), ((0, 0), pad)),
            }
            assert np.abs(session.run(None, given)[0] - alone).max() < 1e-5


@pytest.mark.parametrize("kind", CONFIGS)
def test_int8_is_near_fp32(tmp_path, kind):
    text_networks.write(tmp_path / "theirs", CONFIGS[kind])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 10))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts.txt"), samples=32)
    exact, found = (
        zoo.pipeline(tmp_path / "ours", precision, "onnxruntime").compute_texts([(text,) for text in TEXTS])
        for precision in ("fp32", "int8")
    )
    assert (exact * found).sum(axis=1).mean() > 0.95  # of random weights


def test_the_description_of_a_card_reads_back():
    config = ModelConfig(
        "modernbert",
        layers=4,
        width=32,
        heads=4,
        hidden=48,
        vocabulary=64,
        positions=100,
        rotary=Rotary(1000.0, 8, local_theta=10.0, scaling="ntk", factor=2.0),
        attention=Attention(key_heads=2, local=(1, 3), window=4),
        norm=Norm("rms", "pre"),
        unbiased=("query", "up"),
        dense=(Dense(16, "tanh"), Dense(8)),
        pooling="cls+mean",
    )
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.output_size == 8
    old = {"kind": "bert", "layers": 2, "width": 32, "heads": 2, "hidden": 64, "vocabulary": 64, "positions": 80}
    assert ModelConfig.from_json(old).to_json().keys() == {field.name for field in fields(ModelConfig)} - {
        field.name for field in fields(ModelConfig) if field.kw_only
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": Attention(key_heads=3)}, "cannot share 3 heads of keys"),
        ({"attention": Attention(local=(9,))}, "has local ones"),
        ({"norm": Norm("batch")}, "has the norm batch"),
        ({"rotary": Rotary(10.0, 9)}, "rotates 9 columns"),
        ({"rotary": Rotary(10.0, 8, scaling="yarn")}, "scaled by 'yarn'"),
        ({"distinct_layers": 3}, "cannot repeat 3 of them"),
        ({"dense": (Dense(8, "selu"),)}, "the activation selu"),
        ({"pooling": "mean+median"}, "the pooling mean.median"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, reason):
    with pytest.raises(RequestError, match=reason):
        ModelConfig("bert", layers=4, width=32, heads=4, hidden=48, vocabulary=64, positions=100, **changes)


def test_tables_of_positions_are_linear_in_the_length():
    config = ModelConfig(
        "modernbert",
        layers=3,
        width=32,
        heads=4,
        hidden=48,
        vocabulary=64,
        positions=8192,
        rotary=Rotary(1000.0, 8),
        attention=Attention(local=(1,), window=64),
    )
    assert rotary_angles(config, True).shape == (8192, 8)
    bias = distance_bias(config, {}, True)
    assert bias.shape == (2 * 8192 - 1, 1) and (bias[8191 - 64 : 8192 + 64] == 0).all()
    assert (bias[: 8191 - 64] < 0).all() and (bias[8192 + 64 :] < 0).all()
    assert distance_bias(config, {}, False) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_activation": "selu"}, "its activation is selu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "are scaled by yarn"),
        ({"architectures": ["ModernBertForSequenceClassification"]}, "modernbert with a classification head"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, changes, reason):
    text_networks.write(tmp_path / "theirs", CONFIGS["modernbert"])
    content = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps({**content, **changes}))
    with pytest.raises(RequestError, match=reason):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
