"""BART with a head: an encoder, and a decoder that reads the text once more."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402

LABELS = ["contradiction", "neutral", "entailment"]
PAIRS = [*zip(text_models.TEXTS, reversed(text_models.TEXTS), strict=True)]


def write(folder, head, **more):
    """A folder of a random model with a head of transformers; returns the model."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {name: i for i, name in enumerate(LABELS)}}
    config = transformers.BartConfig(**text_models.SIZES, **sizes | more, **tokens, **labels)
    model = getattr(transformers, f"Bart{head}")._from_config(config, attn_implementation="eager").eval()
    text_models.randomize(model)
    folder.mkdir()
    model.save_pretrained(folder)
    text_models.tokenizer().save(str(folder / "tokenizer.json"))
    return model


def expected(model, pairs):
    """What transformers computes of each pair alone."""
    made, rows = text_models.tokenizer(), []
    for one, other in pairs:
        with torch.no_grad():
            rows.append(model(input_ids=torch.tensor([made.encode(one, other).ids]), return_dict=True))
    return rows


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scores_are_those_of_transformers(tmp_path, scaled):
    model = write(tmp_path / "theirs", "ForSequenceClassification", scale_embedding=scaled)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="text-classification")
    wanted = np.stack([row.logits[0].numpy() for row in expected(model, PAIRS)])
    scores = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts(PAIRS)
    assert np.abs(scores - wanted).max() < 1e-5 and np.ptp(wanted, axis=0).min() > 0.1
    quantized = zoo.pipeline(tmp_path / "ours").compute_texts(PAIRS)
    assert np.abs(quantized - wanted).max() < 0.1 * np.abs(wanted).max()


def test_labels_of_the_call_are_those_of_transformers(tmp_path):
    model = write(tmp_path / "theirs", "ForSequenceClassification")
    assert zoo.import_model(tmp_path / "theirs", tmp_path / "ours")["family"] == "zero-shot-classification"
    (result,) = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")(["the cat sat"], ["zoo", "cat", "the zoo"])
    pairs = [("the cat sat", f"This example is {label}.") for label in ("zoo", "cat", "the zoo")]
    entailed = torch.tensor([float(row.logits[0, 2]) for row in expected(model, pairs)]).softmax(0)
    assert result["scores"] == pytest.approx(sorted(entailed.tolist(), reverse=True), abs=1e-5)


def test_answers_are_those_of_transformers(tmp_path):
    model = write(tmp_path / "theirs", "ForQuestionAnswering")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    opened = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    rows = [np.stack([row.start_logits[0], row.end_logits[0]], -1) for row in expected(model, PAIRS)]
    scores = opened.compute_texts(PAIRS)
    assert np.abs(np.concatenate(scores).reshape(-1, 2) - np.concatenate(rows)).max() < 1e-5


def test_a_network_without_a_head_is_refused(tmp_path):
    write(tmp_path / "theirs", "Model")
    with pytest.raises(RequestError, match="found BartModel, expected BartForSequenceClassification or"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="sentence-transformers")
    assert not (tmp_path / "ours").exists()


def test_a_decoder_with_other_attention_heads_is_refused(tmp_path):
    write(tmp_path / "theirs", "ForSequenceClassification", decoder_attention_heads=4)
    with pytest.raises(RequestError, match="decoder has 4 attention heads, expected those of its encoder, 2"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
