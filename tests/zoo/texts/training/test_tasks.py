"""Text networks with heads learn from the data of their tasks."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="needs the train extra")

from helpers import text_models  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.data.tokenizer import Tokenizer  # noqa: E402
from zoo.texts.heads import labelled, token_classification  # noqa: E402
from zoo.texts.train_config import TrainConfig  # noqa: E402
from zoo.texts.training.span_tasks import Answering, MaskedLanguage  # noqa: E402
from zoo.texts.training.tasks import IGNORED, Classification, Tagging  # noqa: E402

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


def test_labels_that_are_numbers_are_in_their_order(tmp_path):
    """Label 10 is behind 9: readers of the scores take the numbers of the outputs for the labels."""
    data = tmp_path / "data.tsv"
    data.write_text("".join(f"text {label}\t{label}\n" for label in [10, 0, "b", 9, 2, "a", 1]))
    task = Classification({"function_to_apply": "softmax"}, TrainConfig())
    assert task.labels_of(str(data)) == ["0", "1", "2", "9", "10", "a", "b"]


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
    pipeline = zoo.pipeline(tmp_path / "tuned", "fp32", "onnxruntime")
    report = token_classification.evaluate({"fp32": pipeline}, data)
    assert report["metrics"]["fp32"]["f1"] > 0.95
    text = " ".join(rows[1]["tokens"])
    start = text.index("the cat")
    entities = pipeline(text, aggregation_strategy="simple")[0]
    assert [(entity["entity_group"], entity["word"], entity["start"], entity["end"]) for entity in entities] == [
        ("PET", "the cat", start, start + 7)
    ]


def test_labels_of_characters_are_those_of_words(tmp_path):
    """Spans of characters give the words' labels, whose tokens all learn with label_all_tokens."""
    text = "a zebra, the cat!"
    rows = [{"text": text, "spans": [{"start": 2, "end": 7, "label": "PET"}, {"start": 9, "end": 16, "label": "PET"}]}]
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(rows[0]))
    (sentence,) = labelled.read_sentences(str(data))
    assert sentence.words == ["a", "zebra", ",", "the", "cat", "!"]
    assert sentence.tags == ["O", "B-PET", "O", "B-PET", "I-PET", "O"]
    config = TrainConfig(label_all_tokens=True)
    names = Tagging({}, config).labels_of(str(data))
    assert names == ["O", "B-PET", "I-PET"]
    text_models.tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", 64, 32)
    task = Tagging({"names": names}, config)
    tokens, targets = task.examples(task.read(str(data), "raise"), tokenizer, np.random.default_rng(0))
    assert [tokenizer.token(i) for i in tokens.ids][:4] == ["[CLS]", "a", "z", "##e"]
    assert targets.tolist() == [[IGNORED, 0, 1, 2, 2, 2, 2, 0, 1, 2, 0, IGNORED]]
    first = Tagging({"names": names}, TrainConfig()).examples([sentence], tokenizer, np.random.default_rng(0)).targets
    assert (first != IGNORED).sum() == len(sentence.words)


def test_blanks_within_an_entity_are_of_it():
    """With label_all_tokens a blank that is a token, whose offsets may be empty, has the label of the words around it."""
    text = "a b  c  d"
    sentence = labelled.Sentence.of_spans("", text, [(2, 6, "PET"), (8, 9, "PET")])
    offsets = [(0, 0), (0, 1), (2, 3), (4, 4), (5, 6), (7, 7), (8, 9), (0, 0)]
    encoding = SimpleNamespace(special_tokens_mask=[1, 0, 0, 0, 0, 0, 0, 1], offsets=offsets)
    tokens = SimpleNamespace(lengths=np.array([8]), context=[encoding])
    task = Tagging({"names": ["O", "B-PET", "I-PET"]}, TrainConfig(label_all_tokens=True))
    targets = task.examples([sentence], lambda texts, offsets: tokens, np.random.default_rng(0)).targets
    assert targets.tolist() == [[IGNORED, 0, 1, 2, 2, 0, 1, IGNORED]]


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([{"start": 0, "end": 3, "label": "A"}, {"start": 2, "end": 4, "label": "B"}], "overlap"),
        ([{"start": 0, "end": 99, "label": "A"}], "not within the text"),
        ([{"start": 0, "end": 1}], 'expected {"start", "end", "label"}'),
    ],
)
def test_spans_that_are_none_are_refused(tmp_path, spans, why):
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "the cat", "spans": spans}))
    with pytest.raises(RequestError, match=re.escape(why)):
        list(labelled.read_sentences(str(tmp_path / "data.jsonl")))


def test_a_masked_language_model_learns(tmp_path):
    text_models.write_task(tmp_path / "theirs", "AutoModelForMaskedLM")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "texts.txt").write_text("a b the cat d e\n" * 96)
    zoo.finetune(
        tmp_path / "ours", str(tmp_path / "texts.txt"), tmp_path / "tuned", settings={**SETTINGS, "epochs": "16"}
    )
    best = zoo.pipeline(tmp_path / "tuned", "fp32", "onnxruntime")("a b the [MASK] d e")[0][0]
    assert best["token_str"] == "cat" and best["score"] > 0.5
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "tuned")


def test_a_tenth_of_the_masked_tokens_is_kept(tmp_path):
    text_models.tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", 64, 16)
    task = MaskedLanguage({"mask": "[MASK]"}, TrainConfig())
    texts = ["b " * 40] * 400  # of several windows
    tokens, targets = task.examples(texts, tokenizer, np.random.default_rng(0))
    mask, token = tokenizer.number("[MASK]"), tokenizer.number("b")
    masked = tokens.padded(["input_ids"])["input_ids"][targets != IGNORED]
    assert set(targets[targets != IGNORED].tolist()) == {token}
    assert len(masked) / (400 * 14) == pytest.approx(0.15, abs=0.02)
    assert (masked == mask).mean() == pytest.approx(0.8, abs=0.06) and (masked == token).mean() > 0.06
    assert not (tokens.ids == mask)[tokens.ids == token].any() and tokens.lengths.max() == 16


def test_a_question_answering_model_learns(tmp_path):
    text_models.write_task(tmp_path / "theirs", "AutoModelForQuestionAnswering")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    contexts = [f"{text} end" for text, good in texts(96) if good]
    rows = [{"question": "pet?", "context": text, "answers": {"text": ["the cat"], "answer_start": [text.index("the cat")]}}
            for text in contexts] * 4  # fmt: skip
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    zoo.finetune(tmp_path / "ours", str(data), tmp_path / "tuned", settings=SETTINGS)
    questions = [(row["question"], row["context"]) for row in rows[:8]]
    answers = zoo.pipeline(tmp_path / "tuned", "fp32", "onnxruntime")(questions)
    assert [answer["answer"] for answer in answers] == ["the cat"] * 8
    data.write_text(json.dumps({"question": "a?", "context": "b", "answers": ["c"]}))
    with pytest.raises(RequestError, match="line 1 has an answer that is not in the context"):
        zoo.finetune(tmp_path / "ours", str(data), tmp_path / "other")


def test_answers_are_tokens_of_a_window(tmp_path):
    text_models.tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", 64, 16, pairs=True)
    context = "b " * 20 + "the cat " + "c " * 20
    task = Answering({}, TrainConfig())
    samples = [("a?", context, 40, 47), ("a?", context, -1, -1)] * 50
    tokens, targets = task.examples(samples, tokenizer, np.random.default_rng(0))
    ids = tokens.padded(["input_ids"])["input_ids"]
    words = [[tokenizer.token(i) for i in row[start : end + 1]] for row, (start, end) in zip(ids, targets, strict=True)]
    answered = [span for span in words if span != ["[CLS]"]]
    assert answered == [["the", "cat"]] * len(answered) and 25 < len(answered) < 45
    assert (targets[1::2] == 0).all()


def test_a_zero_shot_classifier_learns_from_pairs(tmp_path):
    folder = imported(tmp_path, "AutoModelForSequenceClassification", ["contradiction", "entailment"])
    rows = [(word, other) for word in LETTERS for other in LETTERS if (word == other) or other == LETTERS[5]]
    data = tmp_path / "data.tsv"
    lines = [f"{word}\tthis is {other}\t{'entailment' if word == other else 'contradiction'}\n" for word, other in rows]
    data.write_text("".join(lines * 2))
    result = zoo.finetune(folder, str(data), tmp_path / "tuned", settings={**SETTINGS, "epochs": "1"})
    assert zoo.load(tmp_path / "tuned").entry.name == "zero-shot-classification" and result["loss"] < 2
    data.write_text("a\tthe cat\n")
    with pytest.raises(RequestError, match="has 2 columns, expected 3"):
        zoo.finetune(folder, str(data), tmp_path / "other")


def test_a_new_classifier_starts_from_an_encoder(tmp_path):
    """`zoo train FAMILY --set encoder=MODEL`: a model of another task, with the labels of the data."""
    text_models.write(mkdir(tmp_path / "theirs"))
    zoo.import_model(tmp_path / "theirs", tmp_path / "encoder")
    data = tmp_path / "data.tsv"
    data.write_text("\n".join(f"{text}\t{('bad', 'good')[label]}" for text, label in texts()))
    settings = {**SETTINGS, "encoder": str(tmp_path / "encoder")}
    zoo.train("text-classification", str(data), tmp_path / "new", settings=settings)
    results = zoo.pipeline(tmp_path / "new", "fp32", "onnxruntime")([text for text, _ in texts()])
    opened = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "new")
    assert type(opened).__name__ == "BertForSequenceClassification" and opened.config.id2label == {0: "bad", 1: "good"}
    right = [result["label"] == ("bad", "good")[label] for result, (_, label) in zip(results, texts(), strict=True)]
    assert np.mean(right) > 0.95
    with pytest.raises(RequestError, match="run: zoo finetune MODEL"):
        zoo.train("sentence-encoder", str(data), tmp_path / "other", settings=settings)
    with pytest.raises(RequestError, match="zoo train FAMILY --set encoder=MODEL"):
        zoo.train("text-classification", str(data), tmp_path / "other")
    with pytest.raises(RequestError, match="found device=abacus, which torch cannot use"):
        zoo.train("text-classification", str(data), tmp_path / "other", settings={**settings, "device": "abacus"})


def mkdir(path):
    path.mkdir()
    return path


def test_sparse_encoders_are_not_trained(tmp_path):
    text_models.write_task(tmp_path / "theirs", "AutoModelForMaskedLM")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", format="sparse-encoder")
    (tmp_path / "data.tsv").write_text("the cat\ta\n")
    with pytest.raises(RequestError, match="found a sparse encoder, which is not fine-tuned here"):
        zoo.finetune(tmp_path / "ours", str(tmp_path / "data.tsv"), tmp_path / "tuned")
