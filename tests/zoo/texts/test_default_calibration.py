"""Calibration without data: texts that ship, the quality of int8 on other texts, layers in float32, and the disk."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
import transformers
from helpers import text_models
from safetensors.numpy import load_file, save_file

import zoo
from pipelines.data import sample_texts
from pipelines.models.record import read_record
from zoo.texts import default_calibration


@pytest.fixture
def few_texts(monkeypatch):
    """Fewer texts, since the models are random."""
    texts = sample_texts.evaluation_texts()[::20]
    monkeypatch.setattr(sample_texts, "evaluation_texts", lambda: texts)
    return texts


def theirs(folder, labels=0):
    folder.mkdir()
    text_models.write(folder, labels=labels)
    return folder


def test_the_texts_are_distinct_and_small():
    calibration, evaluation = sample_texts.calibration_texts(), sample_texts.evaluation_texts()
    assert len(evaluation) == len(set(evaluation)) == 1500
    assert 300 < len(calibration) == len(set(calibration))
    assert not set(calibration) & set(evaluation)
    words = [len(text.split()) for text in (*calibration, *evaluation)]
    assert min(words) == 1 and max(words) > 100
    assert sum(path.stat().st_size for path in sample_texts.FOLDER.iterdir()) < 200_000
    for a, b in sample_texts.pairs(calibration):
        assert a != b and len(a) <= len(b)


def test_an_import_needs_no_data(tmp_path, few_texts):
    source, ours = theirs(tmp_path / "theirs"), tmp_path / "ours"
    report = zoo.import_model(source, ours, int8=True)
    quality = report["quality"]
    assert quality["texts"] == len(few_texts) and 0.9 < quality["minimum"] <= quality["mean"] <= 1
    assert read_record(ours)["calibration.json"]["quality"] == quality == zoo.build(ours)["quality"]
    embedding = zoo.pipeline(ours)(["the cat"])[0]["embedding"]
    exact = zoo.pipeline(ours, precision="fp32")(["the cat"])[0]["embedding"]
    assert np.dot(embedding, exact) > 0.9


def test_an_imported_folder_holds_int8_and_links(tmp_path, few_texts):
    source, ours = theirs(tmp_path / "theirs"), tmp_path / "ours"
    (source / "model.safetensors").chmod(0o400)
    zoo.import_model(source, ours, int8=True)
    assert (source / "model.safetensors").samefile(ours / "model.safetensors")
    assert (source / "model.safetensors").stat().st_mode & 0o777 == 0o400
    assert not (ours / "fp32.onnx").exists() and not (ours / "rewritten.onnx").exists()
    (source / "model.safetensors").unlink()
    assert zoo.pipeline(ours, precision="fp32")(["a"])


@pytest.mark.parametrize("labels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_scores_are_judged_by_change_and_agreement(tmp_path, few_texts, labels):
    quality = zoo.import_model(theirs(tmp_path / "theirs", labels), tmp_path / "ours", int8=True)["quality"]
    assert quality["largest_change"] > 0 and 0.5 < quality["agreement"] <= 1
    assert quality.get("pearson", 1) > 0.9 and ("pearson" in quality) == (labels == 1)


def test_labels_of_tokens_are_judged_on_texts(tmp_path, few_texts):
    text_models.write_task(tmp_path / "theirs", "AutoModelForTokenClassification", num_labels=3)
    quality = zoo.import_model(tmp_path / "theirs", tmp_path / "ours", int8=True)["quality"]
    assert quality["texts"] == len(few_texts) and 0.5 < quality["agreement"] <= 1


def test_several_labels_of_a_text_are_judged_together():
    exact, int8 = np.float32([[9, -1, -1], [9, 1, -1]]), np.float32([[8, 1, -1], [8, 2, -2]])
    assert default_calibration.quality(exact, int8, 3)["agreement"] == 1
    assert default_calibration.quality(exact, int8, 3, several=True)["agreement"] == 0.5


@pytest.mark.slow
def test_answers_are_judged_by_their_tokens(tmp_path, few_texts):
    source = theirs(tmp_path / "theirs")
    for name in ("modules.json", "model.safetensors"):
        (source / name).unlink()
    transformers.BertForQuestionAnswering(text_models.CONFIGS["bert"]()).save_pretrained(source)
    quality = zoo.import_model(source, tmp_path / "ours", int8=True)["quality"]
    assert quality["texts"] == len(few_texts) and 0.2 < quality["agreement"] <= 1
    assert "largest_change" not in quality


def test_some_rows_have_the_attention_of_short_texts(tmp_path):
    zoo.import_model(theirs(tmp_path / "theirs"), tmp_path / "ours")
    texts = default_calibration.DefaultTexts(zoo.pipeline(tmp_path / "ours", "fp32", "onnxruntime").folder)
    rows = texts.calibration()["attention_mask"]
    counts = rows.sum(axis=1)
    assert (counts[7:39:8] == [2, 3, 4, 8]).all() and (np.delete(counts, np.s_[7::8]) == rows.shape[1]).all()
    assert (rows[:, 1:] <= rows[:, :-1]).all()


@pytest.mark.slow
def test_short_texts_are_within_the_ranges_of_a_trained_model(tmp_path):
    """Their attention has larger results than means of 128 tokens, which int8 in onnxruntime clipped (22.8 dB)."""
    shutil.copytree(zoo.pipeline("software-topics").folder.path, tmp_path / "ours")
    (tmp_path / "ours" / "calibration.json").unlink()
    card = json.loads((tmp_path / "ours" / "card.json").read_text())
    del card["files"]["calibration.json"]
    (tmp_path / "ours" / "card.json").write_text(json.dumps({**card, "name": "again"}))
    exact, int8 = (zoo.pipeline(tmp_path / "ours", precision, "onnxruntime") for precision in ("fp32", "int8"))
    texts = [(" ".join(text.split()[:2]),) for text in sample_texts.evaluation_texts()[:400]]
    outputs = [pipeline.compute(pipeline.tokenize(texts)) for pipeline in (exact, int8)]
    assert np.square(outputs[1] - outputs[0]).sum() < 10**-2.6 * np.square(outputs[0]).sum()


def test_data_of_the_user_replace_the_texts(tmp_path, few_texts):
    zoo.import_model(theirs(tmp_path / "theirs"), tmp_path / "ours", int8=True)
    (tmp_path / "texts").write_text("the cat\nthe zoo\n" * 200)
    zoo.calibrate(tmp_path / "ours", str(tmp_path / "texts"), samples=4)
    assert "quality" not in zoo.build(tmp_path / "ours")


def test_layers_stay_in_float32_where_quality_is_low(tmp_path, few_texts, monkeypatch):
    monkeypatch.setattr(default_calibration, "SHARE", -1.0)
    monkeypatch.setattr(default_calibration, "GOAL", 60.0)
    path, rng = theirs(tmp_path / "theirs") / "model.safetensors", np.random.default_rng(0)
    weights = load_file(path)
    for name, weight in weights.items():
        if "layer.0." in name and weight.ndim == 2:  # a few large weights, which take the range of all
            weights[name] = (weight * np.exp(3 * rng.normal(size=weight.shape))).astype(np.float32)
    save_file(weights, path)
    native = default_calibration._native
    monkeypatch.setattr(
        default_calibration,
        "_native",
        lambda model: lambda batch: {key: value + 0.02 for key, value in native(model)(batch).items()},
    )
    quality = zoo.import_model(tmp_path / "theirs", tmp_path / "ours", int8=True)["quality"]
    assert quality["onnxruntime"]["mean"] > quality["mean"]
    assert quality["float_layers"] and quality["mean"] > quality["int8_alone"]["mean"]
    report = json.loads((tmp_path / "ours" / "quantization.json").read_text())
    int8 = {operator["name"] for operator in report["operators"] if operator["precision"] == "int8"}
    assert int8 and not int8 & set(quality["float_layers"])
