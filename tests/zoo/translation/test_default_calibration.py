"""Imported translation models without data: int8 is calibrated on texts that ship, and its folder keeps int8 alone."""

import shutil

import pytest

import zoo
from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.models.record import read_record
from zoo import api
from zoo.serving.handlers.translation import TranslationHandler
from zoo.translation import default_calibration
from zoo.translation.data.vocabularies import in_languages
from zoo.translation.importers.huggingface_vocabulary import VocabularyFolder

torch = pytest.importorskip("torch", reason="importing needs the train extra")
pytest.importorskip("transformers", reason="the originals are its models")

from helpers import huggingface_folders as folders  # noqa: E402

FLOAT = ("model.pt", "fp32.onnx", "rewritten.onnx")
TEXTS = ["The man runs.", "A red house near the beach."]


@pytest.fixture(scope="module")
def few():
    """Fewer texts, since the models are random."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_calibration, "CALIBRATING", 8)
        patch.setattr(default_calibration, "JUDGING", 8)
        patch.setattr(default_calibration, "LENGTH", 24)
        yield


@pytest.fixture(scope="module")
def imported(few, tmp_path_factory):
    """(folder of transformers, imported folder, report)."""
    path = tmp_path_factory.mktemp("imported")
    folders.make("marian", path / "theirs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default_calibration, "AGREEMENT", 0.0)  # no layers in float
        report = zoo.import_model(path / "theirs", path / "ours", int8=True)
    return path / "theirs", path / "ours", report


def floats(folder):
    return [name for name in FLOAT if (folder / name).exists()]


def test_an_import_needs_no_data_and_keeps_int8_alone(imported):
    theirs, ours, report = imported
    assert report["quality"]["texts"] > 0 and 0 <= report["quality"]["agreement"] <= 1
    assert read_record(ours)["calibration.json"]["quality"] == report["quality"]
    assert not floats(ours)
    assert zoo.load(ours).card.details["source"]["model"] == str(theirs)


def test_what_needs_the_weights_makes_them_again(imported, tmp_path, caplog):
    theirs, ours, _ = imported
    kept = tmp_path / "kept"
    zoo.import_model(theirs, kept, keep_float=True)
    assert (kept / "model.pt").is_file() and "source" not in zoo.load(kept).card.details
    wanted = zoo.pipeline(kept, "fp32")(TEXTS)
    assert zoo.pipeline(ours, "fp32")(TEXTS) == wanted
    assert f"rebuilding model.pt from {theirs}" in caplog.text and not (ours / "model.pt").exists()
    api.export(ours, "huggingface", tmp_path / "exported")
    assert not floats(ours)
    zoo.import_model(tmp_path / "exported", tmp_path / "again")
    assert zoo.pipeline(tmp_path / "again", "fp32")(TEXTS) == wanted


def test_a_missing_or_other_source_is_one_line_and_int8_runs(imported, tmp_path):
    theirs, ours, _ = imported
    moved, copy = tmp_path / "moved", tmp_path / "copy"
    shutil.copytree(ours, copy)
    theirs.rename(moved)
    try:
        with pytest.raises(
            RequestError, match=f"rebuilt from {theirs}, which is gone.*zoo import MODEL.*--keep-float"
        ) as caught:
            zoo.pipeline(copy, "fp32")
        assert "\n" not in str(caught.value)
        model, _ = folders.make("marian", theirs)
        with torch.no_grad():
            model.model.shared.weight += 0.01
        model.save_pretrained(theirs)
        with pytest.raises(RequestError, match=f"{theirs} is not the model that .*copy was imported from"):
            api.export(copy, "huggingface", tmp_path / "exported")
        assert not floats(copy) and not (tmp_path / "exported").exists()
        assert not [path for path in copy.iterdir() if path.name.startswith(".restored")]
        assert zoo.pipeline(copy)(TEXTS)
    finally:
        shutil.rmtree(theirs, ignore_errors=True)
        moved.rename(theirs)


def test_a_source_that_cannot_be_read_is_named(imported, tmp_path, monkeypatch):
    theirs, ours, _ = imported
    shutil.copytree(ours, tmp_path / "copy")

    def broken(reader):
        raise PermissionError(13, "Permission denied", str(reader.path / "vocab.json"))

    monkeypatch.setattr(VocabularyFolder, "_vocabulary", broken)
    for run in (lambda: zoo.pipeline(tmp_path / "copy", "fp32"), lambda: zoo.import_model(theirs, tmp_path / "new")):
        with pytest.raises(
            RequestError, match=f"cannot import {theirs}: cannot read {theirs}/vocab.json .Permission denied"
        ):
            run()


def test_an_option_that_is_the_name_of_a_file_stays_as_it_is(tmp_path, monkeypatch):
    folders.make("marian languages", tmp_path / "theirs")
    (tmp_path / "de").write_text("")
    monkeypatch.chdir(tmp_path)
    zoo.import_model(tmp_path / "theirs", tmp_path / "ours", target_language="de")
    assert zoo.load(tmp_path / "ours").card.details["source"]["options"] == {"target_language": "de"}


def test_a_source_of_another_form_is_no_reason_to_remove_weights(imported, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(imported[1], folder)
    card = zoo.load(folder).card
    assert zoo.load(folder).restorable
    files.write_json(folder / "card.json", {**card.to_json(), "source": "https://example.com/model"})
    assert not zoo.load(folder).restorable


@pytest.mark.slow
def test_outliers_of_the_feed_forward_layer_stay_float(few, tmp_path):
    """Channels of its input that are 1,000 times as large as others take the levels of all others."""
    model, _ = folders.make("t5", tmp_path / "theirs")
    with torch.no_grad():
        for stack in (model.encoder, model.decoder):
            for block in stack.block:
                feed = block.layer[-1].DenseReluDense
                feed.wi.weight[:2] *= 1000.0
                feed.wo.weight[:, :2] /= 1000.0
    model.save_pretrained(tmp_path / "theirs")
    quality = zoo.import_model(tmp_path / "theirs", tmp_path / "ours", int8=True)["quality"]
    outer = [f"{side}.{i}.feed.outer" for side in ("decoder", "encoder") for i in range(2)]
    assert quality["float_layers"] == outer
    assert quality["agreement"] > 0.8 > 0.5 > quality["int8_alone"]["agreement"]
    pipeline = zoo.pipeline(tmp_path / "ours", engine="native")  # whose results are held to ONNX Runtime's
    assert len(pipeline(TEXTS)) == 2


def test_a_model_without_a_target_language_is_calibrated_in_several(few, tmp_path, monkeypatch):
    monkeypatch.setattr(default_calibration, "AGREEMENT", 0.0)
    folders.make("nllb", tmp_path / "theirs")
    report = zoo.import_model(tmp_path / "theirs", tmp_path / "ours", int8=True)
    assert report["quality"]["texts"] == 8
    assert {"pieces.json", "sentencepiece.bpe.model"} <= {*zoo.load(tmp_path / "ours").entry.files}  # of a delta, too
    pipeline = zoo.pipeline(tmp_path / "ours")
    chosen = [vocabulary.framing.target_language for vocabulary in in_languages(pipeline.vocabulary, 8)]
    assert len(chosen) > 1 and len({*chosen}) == len(chosen)
    assert len(pipeline(TEXTS, target_language="deu_Latn")) == 2
    handler = TranslationHandler("ours", "1", pipeline)
    handler.warm_up()
    assert handler.pipeline is pipeline and not pipeline.vocabulary.framing.target_language
    (stream,) = {handler._stream(pipeline.with_options(target_language=name)) for name in chosen}
    stream.close()
    with pytest.raises(RequestError, match="found the target language de; did you mean deu_Latn. choose it with"):
        pipeline(TEXTS, target_language="de")


def test_missing_data_is_named_before_the_weights_are_made_again(imported):
    with pytest.raises(RequestError, match="found no file nothing.tsv; expected a file, a folder"):
        zoo.evaluate(imported[1], "nothing.tsv")
    assert not floats(imported[1])


def test_a_folder_of_transformers_names_its_import(imported):
    with pytest.raises(RequestError, match="is no model folder .*; make one of it with: zoo import .* -o NEW, or zoo"):
        zoo.load(imported[0])
