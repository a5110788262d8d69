"""Rerankers that are language models: their prompts, and the logits of two tokens, equal to transformers'."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models, text_networks  # noqa: E402
from helpers.text_networks import CONFIGS, TEXTS  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.importers import chat_templates  # noqa: E402

TEMPLATE = (
    "a {{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('the zoo') }} q "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} d {{ messages | "
    "selectattr('role', 'eq', \"document\") | map(attribute='content') | first }} . cat ."
)
PAIRS = [("the cat", text) for text in TEXTS[:5]]


def tokenizer():
    """The tokenizer of letters with the words of the answers."""
    content = json.loads(text_models.tokenizer().to_str())
    for token, word in (("##w", "1"), ("##x", "0"), ("##y", "yes"), ("##z", "no")):
        content["model"]["vocab"][word] = content["model"]["vocab"].pop(token)
    return content


def write(folder, kind="qwen3", template="", modules=(), limit=40, **changes):
    """A folder of a random language model; returns it, and its layer of the vocabulary."""
    torch.manual_seed(1)
    values = {**CONFIGS[kind], "tie_word_embeddings": False, **changes}
    values = {key: value for key, value in values.items() if value is not None}
    folder.mkdir(parents=True)
    config = transformers.AutoConfig.for_model(**values)
    loader = getattr(transformers, "AutoModel" + values["architectures"][0].removeprefix("Qwen3").removeprefix("Qwen2"))
    network = loader.from_config(config, attn_implementation="eager").float().eval()
    text_networks.randomize(network)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": limit}
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "chat_template": template or None}))
    for i, (kind, config) in enumerate(modules):
        (folder / f"{i}_{kind}").mkdir()
        (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(config))
    if modules:
        kinds = {"text": {}, **({"message": {}} if template else {})}
        (folder / "sentence_bert_config.json").write_text(json.dumps({"modality_config": kinds}))
        listed = [
            {"type": f"sentence_transformers.x.{kind}", "path": f"{i}_{kind}"} for i, (kind, _) in enumerate(modules)
        ]
        listed[0]["path"] = ""
        (folder / "modules.json").write_text(json.dumps(listed))
    return network


def opened(path, **options):
    """The pipeline of the imported folder path/theirs."""
    assert zoo.import_model(path / "theirs", path / "ours", int8=False, **options)["family"] == "cross-encoder"
    return zoo.pipeline(path / "ours", "fp32", "onnxruntime")


def last(network, text, behind=".", limit=40):
    """The logits of transformers behind a text."""
    made = Tokenizer.from_str(json.dumps(tokenizer()))
    ids = made.encode(text, add_special_tokens=False).ids
    if len(ids) > limit:
        end = made.encode(behind, add_special_tokens=False).ids
        ids = [*ids[: limit - len(end)], *end]
    with torch.no_grad():
        out = network(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64))
    return out.logits[0, -1] if out.logits.ndim == 3 else out.logits[0]


def numbers(*words):
    return [tokenizer()["model"]["vocab"][word] for word in words]


@pytest.mark.parametrize("false", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_modules_of_sentence_transformers(tmp_path, false, tied):
    answers = {"true_token_id": 40, "false_token_id": 41 if false else None}
    modules = [("Transformer", {}), ("LogitScore", answers)]
    network = write(tmp_path / "theirs", template=TEMPLATE, modules=modules, tie_word_embeddings=tied)
    ours, behind = opened(tmp_path), " . cat ."
    for prompt, instruction in ((None, "the zoo"), ("b c :", "b c :")):
        scores = [result["score"] for result in ours(PAIRS, prompt=prompt)]
        for (query, document), score in zip(PAIRS, scores, strict=True):
            logits = last(network, f"a {instruction} q {query} d {document}{behind}", behind)
            expected = (logits[40] - (logits[41] if false else 0)).sigmoid().item()
            assert abs(score - expected) < 1e-5
    assert any(result["cut"] for result in ours([("the cat", "a b " * 100)]))
    assert [hit["corpus_id"] for hit in ours.rank("the cat", TEXTS[:5])] == np.argsort(
        [-result["score"] for result in ours(PAIRS)], kind="stable"
    ).tolist()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-reranker", "<Query>: {}\n<Document>: {}"),
        ("mxbai-rerank-v2", "query: {}\ndocument: {}\nYou are a search relevance"),
    ],
)
def test_templates_of_model_cards(tmp_path, name, text):
    parts, answers = chat_templates.named(name)
    filled = "".join({"query": "x?", "document": "the cat"}.get(part, part) for part in parts["plain"])
    assert text.format("x?", "the cat") in filled and filled.startswith("<|im_start|>system\n")
    network = write(tmp_path / "theirs", limit=400)
    ours = opened(tmp_path, format="cross-encoder", template=name)
    (yes, no), (result,) = numbers(*answers), ours([("x?", "the cat")])
    logits = last(network, filled, limit=400)
    assert abs(result["score"] - (logits[yes] - logits[no]).sigmoid().item()) < 1e-5


def test_modules_without_messages_take_plain_pairs(tmp_path):
    network = write(tmp_path / "theirs", modules=[("Transformer", {}), ("LogitScore", {"true_token_id": 40})])
    scores = [result["score"] for result in opened(tmp_path)(PAIRS)]
    made, expected = Tokenizer.from_str(json.dumps(tokenizer())), []
    for pair in PAIRS:
        ids = torch.tensor([made.encode(*pair).ids])
        with torch.no_grad():
            logits = network(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        expected.append(logits[0, -1, 40].sigmoid().item())
    assert np.allclose(scores, expected, 0, 1e-5)


def test_sequence_classifiers_with_a_template(tmp_path):
    changes = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "id2label": {"0": "LABEL_0"}}
    network = write(tmp_path / "theirs", template=TEMPLATE, **changes)
    scores = [result["score"] for result in opened(tmp_path)(PAIRS)]
    expected = [last(network, f"a the zoo q {q} d {d} . cat .", " . cat .")[0].sigmoid().item() for q, d in PAIRS]
    assert np.allclose(scores, expected, 0, 1e-5)


def test_a_file_of_a_template_is_found_from_other_folders(tmp_path, monkeypatch):
    write(tmp_path / "theirs")
    (tmp_path / "pairs.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    zoo.import_model("theirs", "ours", format="cross-encoder", template="pairs.jinja")
    monkeypatch.chdir(tmp_path / "theirs")
    for name in ("model.safetensors", "fp32.onnx", "rewritten.onnx"):
        (tmp_path / "ours" / name).unlink(missing_ok=True)
    assert len(zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime")(PAIRS)) == len(PAIRS)  # by weights made again


def test_native_int8_is_close(tmp_path):
    write(tmp_path / "theirs", template=TEMPLATE)
    exact = opened(tmp_path)
    (tmp_path / "pairs.tsv").write_text("\n".join(f"{q}\t{d}" for q, d in PAIRS * 10))
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "pairs.tsv"), samples=16)
    native = zoo.pipeline(tmp_path / "ours", "int8", "native")
    scores, expected = native.compute_texts(PAIRS), exact.compute_texts(PAIRS)
    assert np.abs(scores - expected).max() < 0.1 * np.ptp(expected) + 0.05


@pytest.mark.parametrize(
    ("template", "options", "reason"),
    [
        ("{{ messages[0].content }}", {"format": "cross-encoder"}, "no place for a query and a document"),
        ("{{ raise_exception('no') }}", {"format": "cross-encoder"}, "its chat template fails"),
        (TEMPLATE.replace("| first }}", "| first | trim }}"), {}, "changes the texts"),
        ("", {"format": "cross-encoder", "template": "qwen4"}, "found the template 'qwen4'; expected qwen3-reranker"),
        ("", {"format": "cross-encoder", "template": "none.jinja"}, "found no file none.jinja"),
        ("", {}, "it generates text; a reranker needs"),
    ],
)
def test_refusals(tmp_path, template, options, reason):
    write(tmp_path / "theirs", template=template)
    with pytest.raises(RequestError, match=reason):
        zoo.import_model(tmp_path / "theirs", tmp_path / "ours", **options)
    assert not (tmp_path / "ours").exists()
