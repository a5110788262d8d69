"""Folders that sentence-transformers opens on the native kernels."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from click.testing import CliRunner
from helpers.text_models import PAIRS, TEXTS, built

import zoo
from pipelines.core.errors import RequestError
from zoo import api
from zoo.cli.app import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("texts"), 0)


def test_a_folder_has_one_module_and_what_it_runs_from(folder: Path, tmp_path: Path) -> None:
    report = api.export(folder, "sentence-transformers", tmp_path / "st")
    assert sorted(report["files"]) == [
        *(f"0_NativeEncoder/{name}" for name in ("card.json", "int8.onnx", "native_encoder.json", "tokenizer.json")),
        "config_sentence_transformers.json",
        "modules.json",
    ]
    (module,) = json.loads((tmp_path / "st" / "modules.json").read_text())
    assert module["type"] == "zoo.texts.export.native_encoder.NativeEncoder"
    copied = zoo.pipeline(tmp_path / "st" / module["path"], engine="native")
    assert np.array_equal(copied.encode(TEXTS), zoo.pipeline(folder, engine="native").encode(TEXTS))
    with pytest.raises(RequestError, match="choose a new folder"):
        api.export(folder, "sentence-transformers", tmp_path / "st")
    result = CliRunner().invoke(
        cli,
        ["export", str(folder), "--to", "sentence-transformers", "-o", str(tmp_path / "two"), "--precision", "fp32"],
    )
    assert result.exit_code == 0 and "6 files" in result.output
    assert (tmp_path / "two" / "0_NativeEncoder" / "rewritten.onnx").is_file()


def test_other_models_are_refused(tmp_path: Path) -> None:
    for model in (built(tmp_path, 3), "wide-deep-criteo"):
        with pytest.raises(RequestError, match="embeds no texts"):
            api.export(model, "sentence-transformers", tmp_path / "st")
    assert not (tmp_path / "st").exists()


def test_rankers_are_exported_for_cross_encoder(tmp_path: Path) -> None:
    folder = built(tmp_path, 1)
    report = api.export(folder, "sentence-transformers", tmp_path / "st")
    assert "0_NativeRanker/int8.onnx" in report["files"]
    settings = json.loads((tmp_path / "st" / "config_sentence_transformers.json").read_text())
    assert settings["model_type"] == "CrossEncoder" and settings["activation_fn"].endswith("Sigmoid")
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    pipeline, documents = zoo.pipeline(folder, engine="native"), [pair[0] for pair in PAIRS]
    model = library.CrossEncoder(str(tmp_path / "st"), trust_remote_code=True)
    expected = pipeline.rank("the cat", documents)
    ranking = model.rank("the cat", documents)
    assert [row["corpus_id"] for row in ranking] == [row["corpus_id"] for row in expected]
    assert np.allclose([row["score"] for row in ranking], [row["score"] for row in expected], atol=1e-6)
    assert np.allclose(model.predict(PAIRS), [row["score"] for row in pipeline(map(tuple, PAIRS))], atol=1e-6)


def test_sentence_transformers_runs_the_native_kernels(folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    api.export(folder, "sentence-transformers", tmp_path / "st")
    model = library.SentenceTransformer(str(tmp_path / "st"), trust_remote_code=True)
    pipeline = zoo.pipeline(folder, engine="native")
    assert np.array_equal(model.encode(TEXTS), pipeline.encode(TEXTS))
    assert np.array_equal(model.encode(TEXTS, prompt="a "), pipeline.encode(TEXTS, prompt="a "))
    assert model.get_embedding_dimension() == 32 and model.max_seq_length == 80
    model.max_seq_length = 8
    assert np.array_equal(model.encode(["a b " * 40]), pipeline.compute(pipeline.tokenize([("a b " * 40,)], "", 8)))
    model.save(str(tmp_path / "saved"))
    again = library.SentenceTransformer(str(tmp_path / "saved"), trust_remote_code=True)
    assert np.array_equal(again.encode(TEXTS), pipeline.encode(TEXTS))
