"""Classification heads of the architectures compute the logits of transformers, and run where the kernels do not."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import CONFIGS  # noqa: E402
from helpers.tiers import one_in  # noqa: E402

import zoo  # noqa: E402

PAIRS = [("the cat", "a zoo, yes?"), ("zebra!", "the cat sat. " * 40), ("a", "b")]
HEADS = {
    "albert": "AlbertForSequenceClassification",
    "xlm-roberta-xl": "XLMRobertaXLForSequenceClassification",
    "deberta-v3": "DebertaV2ForSequenceClassification",
    "eurobert": "EuroBertForSequenceClassification",
    "gemma3": "Gemma3TextForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "deberta": "DebertaForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "ultrabert": "UltrabertForSequenceClassification",
}
SETTINGS = {}


def write(folder, kind):
    """A folder of a random network with two labels; returns the network."""
    torch.manual_seed(0)
    values = {**CONFIGS[kind], "architectures": [HEADS[kind]], "id2label": {"0": "SAFE", "1": "INJECTION"}}
    values |= SETTINGS.get(kind, {})
    network = getattr(transformers, HEADS[kind])(transformers.AutoConfig.for_model(**values)).eval()
    text_networks.randomize(network)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    text_networks.finish(folder, ())
    (folder / "modules.json").unlink()
    return network


def logits(network, first, second):
    """The logits of a pair, float32 [labels]."""
    encoded = text_models.tokenizer().encode(first, second)
    types = (
        {"token_type_ids": torch.tensor([encoded.type_ids])}
        if getattr(network.config, "type_vocab_size", 1) > 1
        else {}
    )
    with torch.no_grad():
        return network(input_ids=torch.tensor([encoded.ids]), **types).logits[0].numpy()


@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_those_of_transformers(tmp_path, kind):
    network = write(tmp_path / "theirs", kind)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="cross-encoder")
    outputs = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts(PAIRS)
    expected = np.stack([logits(network, *pair) for pair in PAIRS])
    assert np.abs(outputs - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("pooling", one_in(3, ["late", "mean", "bos"]))
def test_poolings_of_eurobert_are_native(tmp_path, monkeypatch, pooling):
    monkeypatch.setitem(SETTINGS, "eurobert", {"classifier_pooling": pooling})
    network = write(tmp_path / "theirs", "eurobert")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="cross-encoder")
    expected = np.stack([logits(network, *pair) for pair in PAIRS])
    outputs = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts(PAIRS)
    assert np.abs(outputs - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    (tmp_path / "pairs.tsv").write_text("\n".join("\t".join(pair) for pair in PAIRS * 5))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "pairs.tsv"), samples=8)
    native = zoo.pipeline(tmp_path / "ours", "int8", "native").compute_texts(PAIRS)
    assert np.abs(native - expected).max() < 0.1 * np.abs(expected).max()


def test_the_last_token_is_none_of_padding(tmp_path, monkeypatch):
    """Tokenizers of Qwen3-Embedding end texts with the token that is the padding, which transformers passes over."""
    monkeypatch.setitem(SETTINGS, "qwen3", {"pad_token_id": text_models.SPECIAL.index("[SEP]")})
    network = write(tmp_path / "theirs", "qwen3")
    (tmp_path / "theirs" / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    for name, rows in (("cross-encoder", PAIRS), ("text-classification", [("the cat",), ("the zoo! " * 40,)])):
        zoo.import_model(tmp_path / "theirs", tmp_path / name, format=name)
        ours = zoo.pipeline(tmp_path / name, "fp32", "onnxruntime")
        for row in rows:
            encoded = text_models.tokenizer()
            encoded.enable_truncation(40)
            with torch.no_grad():
                expected = network(input_ids=torch.tensor([encoded.encode(*row).ids])).logits[0].numpy()
            output = ours.compute(ours.tokenize([row]))[0]
            assert np.abs(output - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("kind", ["t5", *(pytest.param(head, marks=pytest.mark.slow) for head in HEADS)])
def test_networks_without_kernels_run_in_another_engine_without_a_word(tmp_path, kind, capfd):
    text_networks.write(tmp_path / "theirs", CONFIGS[kind])
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "texts.txt").write_text("\n".join(text_networks.TEXTS))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts.txt"))
    capfd.readouterr()
    vectors = zoo.pipeline(tmp_path / "ours").compute_texts([(text,) for text in text_networks.TEXTS])
    exact = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([(x,) for x in text_networks.TEXTS])
    assert (vectors * exact).sum(axis=1).mean() > 0.95
    assert capfd.readouterr() == ("", "")
