"""Text classifiers and token classifiers learn from labelled texts and words, and keep what they learn in int8."""

import json

import pytest

pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="needs the train extra")

from helpers import text_models  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402

LETTERS = "abcdefghijklmnopqrst"
SETTINGS = {"epochs": "6", "batch_size": "16", "learning_rate": "0.003", "max_length": "32"}


def texts(count=192):
    """Texts of letters; those with "the cat" are good."""
    for i in range(count):
        words = [LETTERS[(i * 7 + k * 3) % len(LETTERS)] for k in range(3 + i % 4)]
        yield " ".join([*words, "the cat" if i % 2 else "the", LETTERS[i % 5]]), i % 2


def imported(path, task, names):
    text_models.write_task(path / "theirs", task, id2label=dict(enumerate(names)))
    zoo.import_model(path / "theirs", path / "ours")
    return path / "ours"


def test_a_text_classifier_learns(tmp_path):
    folder = imported(tmp_path, "AutoModelForSequenceClassification", ["bad", "good"])
    data = tmp_path / "data.tsv"
    data.write_text("\n".join(f"{text}\t{('bad', 'good')[label]}" for text, label in texts()))
    before = zoo.pipeline(folder, "fp32", "onnxruntime")
    zoo.finetune(folder, str(data), tmp_path / "tuned", settings=SETTINGS)
    report = zoo.evaluate(tmp_path / "tuned", data)
    assert report["metrics"]["fp32"]["accuracy"] > 0.95 and report["metrics"]["int8"]["accuracy"] > 0.95
    assert report["difference"]["agreement"] > 0.98
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "theirs")
    theirs = transformers.pipeline("text-classification", model=opened, tokenizer=fast)
    ours = zoo.pipeline(tmp_path / "tuned", "fp32", "onnxruntime")("a b the cat")
    assert ours[0]["label"] == "good"
    assert ours[0]["score"] == pytest.approx(theirs("a b the cat")[0]["score"], abs=1e-5)
    assert before("a b the cat") != ours
    data.write_text("a text\tugly\n")
    with pytest.raises(RequestError, match="has the label 'ugly', expected one of bad, good"):
        zoo.finetune(folder, str(data), tmp_path / "other")


def test_a_token_classifier_learns_labels_of_the_data(tmp_path):
    folder = imported(tmp_path, "AutoModelForTokenClassification", ["O", "B-PER"])
    rows = []
    for text, _ in texts():
        words = text.split()
        tags = ["I-PET" if word == "cat" else "B-PET" if words[i + 1 : i + 2] == ["cat"] else "O"
                for i, word in enumerate(words)]  # fmt: skip
        rows.append({"tokens": words, "ner_tags": tags})
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(RequestError, match=r"has the label 'B-PET', expected one of O, B-PER"):
        zoo.finetune(folder, str(data), tmp_path / "tuned", settings=SETTINGS)
    zoo.finetune(folder, str(data), tmp_path / "tuned", settings={**SETTINGS, "epochs": "16", "new_labels": "true"})
    report = zoo.evaluate(tmp_path / "tuned", data)
    assert report["metrics"]["fp32"]["f1"] > 0.95 and report["metrics"]["int8"]["f1"] > 0.95
    text = " ".join(rows[1]["tokens"])
    start = text.index("the cat")
    found = zoo.pipeline(tmp_path / "tuned")(text, aggregation_strategy="simple")[0]
    assert [(each["entity_group"], each["word"], each["start"], each["end"]) for each in found] == [
        ("PET", "the cat", start, start + 7)
    ]


def test_other_heads_are_not_trained(tmp_path):
    text_models.write_task(tmp_path / "theirs", "AutoModelForQuestionAnswering")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "data.tsv").write_text("the cat\ta\n")
    with pytest.raises(RequestError, match="found a question answering model, which is not fine-tuned here"):
        zoo.finetune(tmp_path / "ours", str(tmp_path / "data.tsv"), tmp_path / "tuned")
