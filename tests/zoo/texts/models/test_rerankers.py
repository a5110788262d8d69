"""Heads of ModernBERT, GTE, Nomic-BERT and Jina compute what transformers does."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import CONFIGS, TEXTS  # noqa: E402
from helpers.tiers import one_in  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import zoo  # noqa: E402

FLASH = {  # names of XLM-R by those of the code with flash attention
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.self.": "mixer.",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}
LABELS = {"id2label": {"0": "O", "1": "B-A", "2": "I-A"}, "label2id": {"O": 0, "B-A": 1, "I-A": 2}}


def logits(network, text):
    """The logits of transformers for one text without padding."""
    ids = torch.tensor([text_models.tokenizer().encode(text).ids])
    with torch.no_grad():
        return network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()


@pytest.mark.parametrize(
    ("kind", "changes"),
    one_in(
        2,
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
            ("gte", {"architectures": ["NewForTokenClassification"]}),
            ("nomic_bert", {"architectures": ["NomicBertForSequenceClassification"]}),
            ("nomic_bert", {"architectures": ["NomicBertForTokenClassification"]}),
            ("jina_embeddings_v3", {"architectures": ["JinaEmbeddingsV3ForSequenceClassification"]}),
            ("jina_embeddings_v3", {"architectures": ["JinaEmbeddingsV3ForTokenClassification"]}),
        ],
    ),
)
def test_logits_are_those_of_transformers(tmp_path, kind, changes):
    network = text_networks.write(tmp_path / "theirs", {**CONFIGS[kind], **LABELS, **changes}, None)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    for text in TEXTS:
        (scores,) = opened.predict(opened.preprocess([text])).values()
        expected = logits(network, text)
        assert np.abs(scores.reshape(expected.shape) - expected).max() < 1e-5 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize("kind", ["modernbert", "gte", "nomic_bert"])
def test_rerankers_of_newer_networks(tmp_path, kind):
    prefix = {"modernbert": "ModernBert", "gte": "New", "nomic_bert": "NomicBert"}[kind]
    values = {**CONFIGS[kind], "architectures": [f"{prefix}ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    network = text_networks.write(tmp_path / "theirs", values, None)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    tokens = text_models.tokenizer().encode_batch(pairs)
    expected = []
    for token in tokens:
        inputs = {"input_ids": torch.tensor([token.ids]), "attention_mask": torch.ones(1, len(token.ids), dtype=int)}
        inputs |= {"token_type_ids": torch.tensor([token.type_ids])} if kind != "modernbert" else {}
        with torch.no_grad():
            expected.append(network(**inputs).logits[0].numpy())
    scores = opened.compute_texts(pairs)
    assert np.abs(scores - np.stack(expected)).max() < 1e-5 * max(np.abs(expected).max(), 1)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("gte", "NewForMaskedLM"),
        ("nomic_bert", "NomicBertForMaskedLM"),
        ("jina_embeddings_v3", "JinaEmbeddingsV3ForMaskedLM"),
    ],
)
def test_masked_language_models_of_newer_networks(tmp_path, kind, architecture):
    folder, values = tmp_path / "theirs", {**CONFIGS[kind], "architectures": [architecture]}
    network = text_networks.write(folder, values, None)
    if kind == "nomic_bert":  # its custom code has no biases in the head
        head = network.cls.predictions
        with torch.no_grad():
            for bias in (head.transform.dense.bias, head.bias):
                bias.zero_()
    fast = text_models.save(folder, network)
    tensors = load_file(folder / "model.safetensors")
    biases = ("cls.predictions.transform.dense.bias", "cls.predictions.bias", "cls.predictions.decoder.bias")
    save_file({name: tensor for name, tensor in tensors.items() if name not in biases}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    zoo.import_model(folder, tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    for text in ("[MASK] the cat", "a zoo, yes? [MASK]!"):
        ids = torch.tensor([fast(text)["input_ids"]])
        with torch.no_grad():
            rows = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].softmax(-1).numpy()
        expected = rows[ids[0].tolist().index(fast.mask_token_id)]
        scores = {fill["token"]: fill["score"] for fill in opened(text, top_k=64)[0]}
        assert len(scores) == 64 and max(abs(score - expected[token]) for token, score in scores.items()) < 1e-5


def test_a_reranker_of_flash_attention_code_has_the_positions_of_xlm_r(tmp_path):
    """jina-reranker-v2: custom code with names of its own, a position embedding, and the head of RoBERTa."""
    values = {
        **CONFIGS["xlm-roberta-xl"],
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "position_embedding_type": "absolute",
    }
    network = text_networks.write(tmp_path / "theirs", values, None)
    file, tensors = tmp_path / "theirs/model.safetensors", {}
    for name, tensor in load_file(file).items():
        for part, theirs in FLASH.items():
            name = name.replace(part, theirs)
        tensors[name] = tensor
    for layer in [name.removesuffix(".query.weight") for name in tensors if name.endswith(".query.weight")]:
        for end in ("weight", "bias"):
            parts = [tensors.pop(f"{layer}.{part}.{end}") for part in ("query", "key", "value")]
            tensors[f"{layer}.Wqkv.{end}"] = torch.cat(parts)
    save_file(tensors, file)
    values |= {"auto_map": {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}}
    (tmp_path / "theirs/config.json").write_text(json.dumps(values))
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    assert opened.folder.entry.name == "cross-encoder"
    scores = opened.compute_texts([(TEXTS[0], text) for text in TEXTS])
    expected = []
    for text in TEXTS:
        ids = torch.tensor([text_models.tokenizer().encode(TEXTS[0], text).ids])
        with torch.no_grad():
            expected.append(network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].numpy())
    assert np.abs(scores - np.stack(expected)).max() < 1e-5 * max(np.abs(expected).max(), 1)
