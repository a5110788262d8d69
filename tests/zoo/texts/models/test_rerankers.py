"""Classifiers and rerankers of ModernBERT and GTE compute what transformers does."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import CONFIGS, TEXTS  # noqa: E402

import zoo  # noqa: E402

LABELS = {"id2label": {"0": "O", "1": "B-A", "2": "I-A"}, "label2id": {"O": 0, "B-A": 1, "I-A": 2}}


def logits(network, text):
    """The logits of transformers for one text without padding."""
    ids = torch.tensor([text_models.tokenizer().encode(text).ids])
    with torch.no_grad():
        return network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("modernbert", {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean"}),
        (
            "modernbert",
            {
                "architectures": ["ModernBertForSequenceClassification"],
                "classifier_pooling": "cls",
                "classifier_activation": "silu",
                "classifier_bias": True,
                "norm_bias": True,
            },
        ),
        ("modernbert", {"architectures": ["ModernBertForTokenClassification"]}),
        ("gte", {"architectures": ["NewForSequenceClassification"]}),
    ],
)
def test_logits_are_those_of_transformers(tmp_path, kind, changes):
    network = text_networks.write(tmp_path / "theirs", {**CONFIGS[kind], **LABELS, **changes}, None)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    for text in TEXTS:
        (found,) = opened.predict(opened.preprocess([text])).values()
        expected = logits(network, text)
        assert np.abs(found.reshape(expected.shape) - expected).max() < 1e-5 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("kind", ["modernbert", "gte"])
def test_rerankers_of_newer_networks(tmp_path, kind):
    architecture = {"modernbert": "ModernBertForSequenceClassification", "gte": "NewForSequenceClassification"}[kind]
    values = {**CONFIGS[kind], "architectures": [architecture], "id2label": {"0": "LABEL_0"}}
    network = text_networks.write(tmp_path / "theirs", values, None)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    tokens = text_models.tokenizer().encode_batch(pairs)
    expected = []
    for token in tokens:
        given = {"input_ids": torch.tensor([token.ids]), "attention_mask": torch.ones(1, len(token.ids), dtype=int)}
        given |= {"token_type_ids": torch.tensor([token.type_ids])} if kind == "gte" else {}
        with torch.no_grad():
            expected.append(network(**given).logits[0].numpy())
    found = opened.compute_texts(pairs)
    assert np.abs(found - np.stack(expected)).max() < 1e-5 * max(np.abs(expected).max(), 1)
