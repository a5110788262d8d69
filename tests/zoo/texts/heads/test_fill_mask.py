"""Tokens in the place of a mask, equal to those of transformers' fill-mask pipeline."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.heads import fill_mask  # noqa: E402

TASK = "AutoModelForMaskedLM"
TEXTS = ["the [MASK] sat", "[MASK]", "a b c d, e [MASK]. the zoo!"]


def imported(path, kind="bert", **more):
    """(an imported folder of a random model, transformers' pipeline of the original)."""
    model, fast = text_models.write_task(path / "theirs", TASK, kind, **more)
    zoo.import_model(path / "theirs", path / "ours")
    return path / "ours", transformers.pipeline("fill-mask", model=model, tokenizer=fast)


def same(found, wanted):
    assert [{**line, "score": 0} for line in found] == [{**line, "score": 0} for line in wanted]
    assert np.allclose([line["score"] for line in found], [line["score"] for line in wanted], 0, 1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra", "electra small", "modernbert"])
def test_tokens_are_those_of_transformers(tmp_path, kind):
    folder, theirs = imported(tmp_path, kind)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    for fills, wanted in zip(ours(TEXTS), theirs(TEXTS), strict=True):
        same(fills, wanted)
    two = "the [MASK] sat, [MASK]"
    for fills, wanted in zip(ours(two, top_k=3)[0], theirs(two, top_k=3), strict=True):
        same(fills, wanted)
    same(ours(TEXTS[0], targets=["cat", "b", "the"])[0], theirs(TEXTS[0], targets=["cat", "b", "the"]))


NETWORKS = {  # with other activations than that of their heads
    **{kind: {"hidden_act": "relu"} for kind in ("albert", "deberta-v3", "xlm-roberta-xl")},
    "eurobert": {"hidden_act": "relu", "classifier_pooling": "late"},  # a key that transformers writes for any head
    "jina_embeddings_v3": {"hidden_act": "relu"},
    "ultrabert": {},  # with two layers and no norm
    "deberta": {"hidden_act": "relu"},
    "roformer": {},
    "gte": {},
    "nomic_bert": {},
    "deberta-v3 of its authors": {"hidden_act": "gelu_new", "legacy": False},
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_architecture_has_its_head(tmp_path, kind):
    base = text_networks.CONFIGS[kind.partition(" ")[0]]
    values = {**base, **NETWORKS[kind], "architectures": ["AnyForMaskedLM"]}
    network = text_networks.write(tmp_path / "theirs", values, None)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    ours = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")
    tokens = ours.tokenize([(TEXTS[2],)])
    scores, places = ours.probabilities(ours.compute(tokens), tokens)
    with text_networks.torch.no_grad():
        ids = text_networks.torch.tensor(tokens.ids[None].astype(np.int64))
        logits = network(input_ids=ids, attention_mask=ids * 0 + 1).logits[0, places]
    assert np.abs(scores - logits.softmax(-1).numpy()).max() < 1e-5


def test_heads_of_a_decoder_alone_are_native(tmp_path):
    """The graph ends with the last layer."""
    values = {**text_networks.CONFIGS["eurobert"], "architectures": ["AnyForMaskedLM"]}
    text_networks.write(tmp_path / "theirs", values, None)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "texts.txt").write_text("\n".join(text.replace("[MASK]", "cat") for text in TEXTS))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts.txt"), samples=8)
    exact, native = (zoo.pipeline(tmp_path / "ours", *names) for names in (("fp32", "onnxruntime"), ("int8", "native")))
    tokens = exact.tokenize([(TEXTS[2],)])
    rows = exact.compute(tokens)
    assert np.linalg.norm(native.compute(tokens) - rows) < 0.1 * np.linalg.norm(rows)


def test_a_file_without_the_head_is_refused(tmp_path):
    values = {**text_networks.CONFIGS["albert"], "architectures": ["AlbertModel"]}
    text_networks.write(tmp_path / "theirs", values, None)
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**values, "architectures": ["AlbertForMaskedLM"]}))
    with pytest.raises(RequestError, match="no head of a masked language model, such as cls.pred"):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    text_models.write_task(tmp_path / "other", TASK)
    config = json.loads((tmp_path / "other/config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    with pytest.raises(RequestError, match=r"word_embeddings.weight \[64, 32\], expected \[99, 32\]"):
        zoo.import_model(tmp_path / "other", tmp_path / "ours")


def test_a_network_with_a_pooling_is_a_sentence_encoder(tmp_path):
    text_models.write_task(tmp_path / "theirs", TASK)
    report = zoo.import_model(tmp_path / "theirs", tmp_path / "encoder", pooling="mean")
    assert report["family"] == "sentence-encoder"


def test_int8_masks_run_natively_and_are_evaluated(tmp_path):
    folder, theirs = imported(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 30))
    zoo.calibrate(folder, str(tmp_path / "texts.txt"), samples=16)
    assert zoo.pipeline(folder, "int8", "native")(TEXTS)[0][0]["sequence"]
    best = [fills[0]["token_str"] for fills in theirs(TEXTS)]
    fifth = theirs(TEXTS[0])[4]["token_str"]
    lines = [f"{text}\t{token}" for text, token in zip(TEXTS, [fifth, *best[1:]], strict=True)]
    (tmp_path / "data.tsv").write_text("\n".join(lines))
    opened = {"fp32": zoo.pipeline(folder, "fp32", "onnxruntime")}
    metrics = fill_mask.evaluate(opened, tmp_path / "data.tsv")["metrics"]["fp32"]
    assert metrics == {"accuracy": pytest.approx(2 / 3), "top5": 1.0}


def test_texts_without_a_mask_are_refused(tmp_path):
    folder, _ = imported(tmp_path)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    assert len(ours(ours.example(2))) == 2  # what a server warms up with
    with pytest.raises(RequestError, match=r"text 2 has no \[MASK\]; expected it"):
        ours([TEXTS[0], "the cat"])
    with pytest.raises(RequestError, match="found the target 'catsandzoos'; expected tokens"):
        ours(TEXTS[0], targets=["catsandzoos"])
    with pytest.raises(RequestError, match="found targets 3; expected a list of texts"):
        ours(TEXTS[0], targets=3)


def test_texts_without_a_mask_are_left_out_of_files(tmp_path):
    folder, _ = imported(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join([TEXTS[0], "the cat", "a b " * 60 + "[MASK]", TEXTS[1]]))
    options = {"precision": "fp32", "engine": "onnxruntime"}
    report = zoo.run(folder, tmp_path / "texts.txt", tmp_path / "out.jsonl", top_k=1, **options)
    assert (report["texts"], report["skipped"]) == (3, 1)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [1, 2, 4] and lines[1] == {"row": 2}
    ours = zoo.pipeline(folder, **options)
    results = ours([TEXTS[0], "the cat", "a b " * 60 + "[MASK]"], on_error="skip")
    assert "expected it in the place" in results[1]["error"] and results[2] == [] and len(results[0]) == 5
    zoo.calibrate(folder, str(tmp_path / "texts.txt"), samples=4)  # which reads texts without masks
    (tmp_path / "data.tsv").write_text(f"{TEXTS[0]}\tcat\n{'a b ' * 60}[MASK]\tcat\n")
    assert fill_mask.evaluate({"fp32": ours}, tmp_path / "data.tsv")["samples"] == 2
