"""Input of text encoders: texts, names of files, and what is told about them, on tiny random models."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers import text_models

import zoo
from pipelines.core.errors import RequestError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An encoder and a reranker, built up to int8."""
    place = tmp_path_factory.mktemp("inputs")
    return [text_models.built(place / name, labels) for name, labels in (("encoder", 0), ("reranker", 1))]


@pytest.fixture(scope="module")
def encoder(folders):
    return zoo.pipeline(folders[0])


def vectors(results):
    return np.stack([each["embedding"] for each in results])


def test_a_text_that_names_a_file_is_a_text(folders, encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note").write_text("the cat\nthe zoo\n")
    for texts in (["note"], ["-"], ["/etc/passwd"], ["note", "the cat"], (each for each in ["note", "cat"])):
        listed = list(texts)
        expected = encoder.compute_texts([(each,) for each in listed])
        assert np.array_equal(vectors(encoder(iter(listed))), expected)
        assert np.array_equal(vectors(encoder(listed)), expected), listed
    assert np.array_equal(vectors(encoder("note")), encoder.compute_texts([("note",)]))
    wanted = encoder.compute_texts([("the cat",), ("the zoo",)])
    for paths in (tmp_path / "note", [tmp_path / "note"]):
        assert np.array_equal(vectors(encoder(paths)), wanted)
    with pytest.raises(RequestError, match="found files and 'hello' in one list"):
        encoder([tmp_path / "note", "hello"])
    with pytest.raises(RequestError, match="found dict; expected"):
        encoder({"text": "the cat"})
    reranker = zoo.pipeline(folders[1])
    (tmp_path / "pair").write_text("the cat\tthe zoo\n")
    for raw in ("pair", ["pair"], ["pair", "pair"]):
        with pytest.raises(RequestError, match="expected"):
            reranker(raw)
    assert reranker([("pair", "note")])[0]["score"] == pytest.approx(reranker(("pair", "note"))[0]["score"])
    assert reranker(tmp_path / "pair")[0]["score"] == pytest.approx(reranker(("the cat", "the zoo"))[0]["score"])


def test_run_names_files(encoder, tmp_path):
    (tmp_path / "note").write_text("the cat\nthe zoo\n")
    for inputs in (str(tmp_path / "note"), [str(tmp_path / "note")], [("the cat",), ("the zoo",)]):
        assert encoder.run(inputs, tmp_path / "v.npy")["texts"] == 2
    with pytest.raises(RequestError, match="found no file the cat"):
        encoder.run(["the cat"], tmp_path / "v.npy")
