"""Labels of a call, equal to those of transformers' zero-shot-classification pipeline."""

import csv

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
transformers = pytest.importorskip("transformers", reason="the originals are its models")

from helpers import text_models  # noqa: E402

import zoo  # noqa: E402
from pipelines.core.errors import RequestError  # noqa: E402
from zoo.texts.heads import zero_shot  # noqa: E402

TASK = "AutoModelForSequenceClassification"
NAMES = {0: "contradiction", 1: "neutral", 2: "entailment"}
LABELS = ["cat", "a zoo", "b c d"]


def imported(path, kind="bert", names=NAMES, **more):
    """(an imported folder of a random model, transformers' pipeline of the original)."""
    numbers = {name: i for i, name in names.items()}
    model, fast = text_models.write_task(path / "theirs", TASK, kind, id2label=names, label2id=numbers, **more)
    zoo.import_model(path / "theirs", path / "ours")
    return path / "ours", transformers.pipeline("zero-shot-classification", model=model, tokenizer=fast)


@pytest.mark.parametrize(
    ("kind", "names"),
    [("bert", NAMES), ("distilbert", {0: "ENTAILMENT", 1: "not_entailment"}), ("modernbert", NAMES)],
)
def test_labels_are_those_of_transformers(tmp_path, kind, names):
    folder, theirs = imported(tmp_path, kind, names)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    texts = [*text_models.TEXTS, " ".join(text_models.TEXTS * 4)]
    for options in ({}, {"multi_label": True}, {"hypothesis_template": "the {} sat."}):
        for labels in (LABELS, "cat, a zoo", ["cat"]):
            results, wanted = ours(texts, labels, **options), theirs(texts, labels, **options)
            for a, b in zip(results, wanted, strict=True):
                assert (a["sequence"], a["labels"]) == (b["sequence"], b["labels"])
                assert np.allclose(a["scores"], b["scores"], 0, 1e-5)


def test_labels_must_be_named(tmp_path):
    folder, _ = imported(tmp_path)
    ours = zoo.pipeline(folder, "fp32", "onnxruntime")
    with pytest.raises(RequestError, match="name those to choose from: candidate_labels"):
        ours("the cat")
    with pytest.raises(RequestError, match="found candidate_labels 3; expected a list of texts"):
        ours("the cat", 3)
    with pytest.raises(RequestError, match="found hypothesis_template 'the cat'; expected {}"):
        ours("the cat", LABELS, hypothesis_template="the cat")


def test_int8_runs_natively_and_labels_are_evaluated(tmp_path):
    folder, theirs = imported(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(text_models.TEXTS * 30))
    zoo.calibrate(folder, str(tmp_path / "texts.txt"), samples=16)
    assert zoo.pipeline(folder, "int8").engine == "native"
    zoo.run(folder, tmp_path / "texts.txt", tmp_path / "out.csv", candidate_labels="cat,zoo")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert len(rows) == 2 * 30 * len(text_models.TEXTS) and {*rows[0]} == {"row", "label", "score"}
    best = [result["labels"][0] for result in theirs(text_models.TEXTS, LABELS)]
    labels = [label for label in LABELS if label != best[0]]
    lines = [f"{text}\t{label}" for text, label in zip(text_models.TEXTS, [labels[0], *best[1:]], strict=True)]
    lines += [f"the cat\t{label}" for label in LABELS]
    (tmp_path / "data.tsv").write_text("\n".join(lines))
    opened = {"fp32": zoo.pipeline(folder, "fp32", "onnxruntime")}
    report = zero_shot.evaluate(opened, tmp_path / "data.tsv")
    assert set(report["labels"]) == set(LABELS) and 0 < report["metrics"]["fp32"]["accuracy"] < 1
