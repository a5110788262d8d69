"""Labels of texts and of pairs of texts, equal to those of transformers' text-classification pipeline."""

import csv
import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402

TASK = "AutoModelForSequenceClassification"
TEXTS = [*text_models.TEXTS, " \u200bthe  CAT\u00e9, ½ ﬁ 漢字 🙂 ", "x" * 300, "no\nlines\tat all"]
NAMES = {0: "sad", 1: "so so", 2: "glad"}


def imported(path, kind="bert", names=NAMES, **more):
    """(an imported folder of a random classifier, transformers' pipeline of the original)."""
    model, fast = text_models.write_task(path / "theirs", TASK, kind, id2label=names, **more)
    zoo.import_model(path / "theirs", path / "ours")
    model.config.id2label = {int(key): name for key, name in names.items()}
    return path / "ours", transformers.pipeline("text-classification", model=model, tokenizer=fast)


def same(found, wanted):
    assert [label["label"] for label in found] == [label["label"] for label in wanted]
    assert np.abs([a["score"] - b["score"] for a, b in zip(found, wanted, strict=True)]).max() < 1e-5


@pytest.mark.parametrize("kind", text_models.CONFIGS)
def test_labels_are_those_of_transformers(tmp_path, kind):
    mpnet = kind == "mpnet"  # whose padding is the token 1 whatever its configuration says, here [UNK]
    folder, theirs = imported(tmp_path, kind, **({"pad_token_id": 1} if mpnet else {}))
    texts = text_models.TEXTS if mpnet else TEXTS
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    wanted = theirs(texts, truncation=True)
    same(ours(texts), wanted)
    assert set(ours(texts)[0]) == {"label", "score"}
    for labels, expected in zip(ours(texts, top_k=None), theirs(texts, top_k=None, truncation=True), strict=True):
        same(labels, expected)
    same(
        [ranked[1] for ranked in ours(texts, top_k=2)],
        [ranked[1] for ranked in theirs(texts, top_k=2, truncation=True)],
    )
    pairs = [{"text": a, "text_pair": b} for a, b in zip(texts, texts[::-1], strict=True)]
    same(ours(pairs), [theirs(pair, truncation=True) for pair in pairs])
    same(ours([tuple(pair.values()) for pair in pairs]), ours(pairs))
    same(ours("the cat"), theirs("the cat"))


@pytest.mark.parametrize(
    ("names", "problem", "function"),
    [
        (NAMES, None, "softmax"),
        (NAMES, "multi_label_classification", "sigmoid"),
        (NAMES, "regression", "none"),
        ({0: "NO", 1: "YES"}, "single_label_classification", "softmax"),
        ({0: "grade"}, "regression", "none"),
    ],
)
def test_the_function_of_the_logits_is_that_of_transformers(tmp_path, names, problem, function):
    folder, theirs = imported(tmp_path, names=names, problem_type=problem)
    assert zoo.info(folder)["preprocessing"]["function_to_apply"] == function
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    same(ours(TEXTS), theirs(TEXTS, truncation=True))
    for chosen in ("softmax", "sigmoid", "none"):
        same(ours(TEXTS, function_to_apply=chosen), theirs(TEXTS, function_to_apply=chosen, truncation=True))


def test_models_with_one_output_or_of_sentence_transformers_are_cross_encoders(tmp_path):
    text_models.write_task(tmp_path / "one", TASK, num_labels=1)
    text_models.write_task(tmp_path / "marked", TASK, id2label=NAMES, sbert_ce_default_activation_function="a.Identity")
    for name in ("one", "marked"):
        assert zoo.import_model(tmp_path / name, tmp_path / f"ours-{name}")["family"] == "cross-encoder"
        again = zoo.import_model(tmp_path / name, tmp_path / f"other-{name}", format="text-classification")
        assert again["family"] == "text-classification"
    text_models.write_task(tmp_path / "plain", TASK, id2label=NAMES)
    report = zoo.import_model(tmp_path / "plain", tmp_path / "ranks", format="cross-encoder")
    assert report["family"] == "cross-encoder"


def test_options_and_labels_out_of_range_are_refused(tmp_path):
    folder, _ = imported(tmp_path)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    for options, message in (
        ({"top_k": -1}, "found top_k -1; expected"),
        ({"function_to_apply": "tanh"}, "found function_to_apply 'tanh'; expected softmax, sigmoid, none"),
        ({"max_length": 500}, "found max length 500; expected"),
    ):
        with pytest.raises(RequestError, match=message):
            ours("the cat", **options)
    with pytest.raises(RequestError, match="expected the keys text and text_pair"):
        ours({"txt": "the cat"})
    assert [set(result) for result in ours(["the cat", " "], on_error="skip")] == [{"label", "score"}, {"error"}]
    for change, message in (
        ({"problem_type": "poetry"}, "its problem_type is 'poetry'"),
        ({"id2label": {"0": "a", "2": "b"}}, r"its labels have the numbers \[0, 2\], expected 0 to 1"),
    ):
        content = json.loads((tmp_path / "theirs/config.json").read_text()) | change
        (tmp_path / "theirs/config.json").write_text(json.dumps(content))
        with pytest.raises(RequestError, match=message):
            zoo.import_model(tmp_path / "theirs", tmp_path / "bad")
        assert not (tmp_path / "bad").exists()


def test_run_writes_a_line_a_label(tmp_path):
    folder, theirs = imported(tmp_path)
    data = tmp_path / "texts.csv"
    data.write_text("name,text\na,the cat\nb,\nc,a zoo\n")
    report = zoo.run(folder, data, tmp_path / "out.csv", precision="fp32", engine="onnxruntime")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    wanted = theirs(["the cat", "a zoo"])
    assert [row["row"] for row in rows] == ["1", "2", "3"]
    assert [row["label"] for row in rows] == [wanted[0]["label"], "", wanted[1]["label"]]
    assert float(rows[0]["score"]) == pytest.approx(wanted[0]["score"], abs=1e-5) and rows[1]["score"] == ""
    assert (report["texts"], report["skipped"]) == (2, 1)
    zoo.run(folder, data, tmp_path / "out.jsonl", top_k=0, precision="fp32", engine="onnxruntime")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [1, 1, 1, 2, 3, 3, 3]
    zoo.run(folder, data, tmp_path / "out.parquet", column="text,name", precision="fp32", engine="onnxruntime")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A classifier, built up to int8, and its original."""
    path = tmp_path_factory.mktemp("classifier")
    folder, theirs = imported(path)
    (path / "texts.txt").write_text("\n".join(text_models.TEXTS * 30))
    zoo.calibrate(folder, str(path / "texts.txt"), samples=16)
    zoo.build(folder)
    return folder, theirs


@pytest.mark.usefixtures("openvino")
def test_int8_runs_in_every_engine(classifier):
    folder, _ = classifier
    exact = zoo.pipeline(folder, "fp32")(text_models.TEXTS, top_k=None)
    for engine in ("native", "onnxruntime", "openvino"):
        ours = zoo.pipeline(folder, "int8", engine)
        assert ours.engine == engine
        results = ours(text_models.TEXTS, top_k=None)
        for a, b in zip(exact, results, strict=True):
            scores = {label["label"]: label["score"] for label in b}
            assert max(abs(label["score"] - scores[label["label"]]) for label in a) < 0.1, engine


def test_accuracy_and_f1_of_labelled_texts(classifier, tmp_path):
    folder, theirs = classifier
    labels = [label["label"] for label in theirs(text_models.TEXTS)]
    wrong = next(name for name in NAMES.values() if name != labels[0])
    rows = [
        {"label": wrong if not i else name, "text": text}
        for i, (text, name) in enumerate(zip(text_models.TEXTS, labels, strict=True))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = zoo.evaluate(folder, tmp_path / "data.jsonl")
    assert report["samples"] == 5
    assert report["metrics"]["fp32"]["accuracy"] == pytest.approx(0.8)
    expected, predicted = [row["label"] for row in rows], labels
    per_class = []
    for name in {*expected, *predicted}:
        right = sum(a == b == name for a, b in zip(expected, predicted, strict=True))
        per_class.append(2 * right / (expected.count(name) + predicted.count(name)))
    assert report["metrics"]["fp32"]["f1"] == pytest.approx(np.mean(per_class))
    assert 0 <= report["difference"]["agreement"] <= 1 and len(report["interval"]["accuracy"]) == 2
    (tmp_path / "data.tsv").write_text("the cat\t7\n")
    with pytest.raises(RequestError, match="has the label '7', expected one of sad, so so, glad"):
        zoo.evaluate(folder, tmp_path / "data.tsv")


def test_several_labels_a_text_and_numbers(tmp_path):
    folder, theirs = imported(tmp_path, problem_type="multi_label_classification")
    scores = [{label["label"]: label["score"] for label in labels} for labels in theirs(text_models.TEXTS, top_k=None)]
    rows = [
        {"text": text, "labels": [name for name, score in by_label.items() if score > 0.5]}
        for text, by_label in zip(text_models.TEXTS, scores, strict=True)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    from zoo.texts.heads.sequence_classification import evaluate

    opened = {"fp32": zoo.pipeline(folder, "fp32", "onnxruntime")}
    assert evaluate(opened, tmp_path / "data.jsonl")["metrics"]["fp32"] == {"accuracy": 1.0, "f1": 1.0}
    folder, theirs = imported(tmp_path / "number", names={0: "grade"}, problem_type="regression")
    grades = [label["score"] for label in theirs(text_models.TEXTS)]
    lines = [f"{text}\t{grade}" for text, grade in zip(text_models.TEXTS, grades, strict=True)]
    (tmp_path / "data.tsv").write_text("\n".join(lines))
    opened = {"fp32": zoo.pipeline(folder, "fp32", "onnxruntime")}
    wanted = {"spearman": 1, "pearson": 1, "mse": 0}
    assert evaluate(opened, tmp_path / "data.tsv")["metrics"]["fp32"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pairs_have_the_token_types_that_the_tokenizer_names(tmp_path, typed):
    import torch

    model, fast = text_models.write_task(tmp_path / "theirs", TASK, id2label=NAMES)
    fast.model_input_names = ["input_ids", "attention_mask", *["token_type_ids"] * typed]
    fast.save_pretrained(tmp_path / "theirs")
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours")
    pair = ("the cat", "sat, and sat.")
    with torch.no_grad():
        wanted = model(**fast(*pair, return_tensors="pt")).logits.numpy()
    logits = zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").compute_texts([pair])
    assert np.abs(logits - wanted).max() < 1e-5
    int8 = zoo.pipeline(tmp_path / "ours", "int8", "native").compute_texts([pair])
    assert np.abs(int8 - wanted).max() < 0.25 * np.abs(wanted).max()
