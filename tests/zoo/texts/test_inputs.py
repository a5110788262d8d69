"""Input of text encoders: texts, names of files, and what is told about them, on tiny random models."""

import itertools
import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the train extra")
pytest.importorskip("transformers", reason="needs the test extra")
from helpers import text_models
from helpers.text_models import TEXTS

import zoo
from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import text_lines
from zoo.serving.handlers.texts import TextHandler
from zoo.serving.workers.channel import Job
from zoo.texts import metrics
from zoo.texts.data.prompts import Prompts


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An encoder and a reranker, built up to int8."""
    place = tmp_path_factory.mktemp("inputs")
    return [text_models.built(place / name, labels) for name, labels in (("encoder", 0), ("reranker", 1))]


@pytest.fixture(scope="module")
def encoder(folders):
    return zoo.pipeline(folders[0])


def vectors(results):
    return np.stack([result["embedding"] for result in results])


def test_a_text_that_names_a_file_is_a_text(folders, encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note").write_text("the cat\nthe zoo\n")
    for texts in (["note"], ["-"], ["/etc/passwd"], ["note", "the cat"], (text for text in ["note", "cat"])):
        listed = list(texts)
        expected = encoder.compute_texts([(text,) for text in listed])
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
    with pytest.raises(RequestError, match=r"text 1 is \('the', 'cat'\); expected text"):
        encoder([("the", "cat")])
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


FEATURES = {"prompts": {"query": "the ", "passage": "a ", "document": ""}, "prompt": "query"}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """An encoder with prompts, in fp32."""
    place = tmp_path_factory.mktemp("prompted")
    (place / "theirs").mkdir()
    text_models.write(place / "theirs")
    text_models.prompted(place / "theirs")
    zoo.import_model(place / "theirs", place / "ours")
    return zoo.pipeline(place / "ours", "fp32", "onnxruntime")


def test_names_of_prompts_are_checked():
    prompts = Prompts(FEATURES)
    resolved = {name: prompts.resolve(name) for name in (None, "query", "passage", "document", "", "my own: ", "x:")}
    assert list(resolved.values()) == ["the ", "the ", "a ", "", "", "my own: ", "x:"]
    for name in ("qurey", "Query", "retrieval.query", "search_query", "s2p-query", 3):
        with pytest.raises(RequestError, match="found (no|the) prompt"):
            prompts.resolve(name)
    with pytest.raises(RequestError, match="found no prompt query; the model has none"):
        Prompts({}).resolve("query")
    assert (prompts.role("query"), prompts.role("document")) == ("the ", "a ")
    assert Prompts({"prompts": {"query": "q: ", "document": ""}}).role("document") == ""
    assert Prompts({}).role("query") == Prompts({"prompts": {"sts": "s: "}}).role("document") == ""
    assert Prompts({"prompts": {"sts": "s: "}, "prompt": "sts"}).role("query") == ""  # not the default


def test_prompts_in_python_and_in_run(prompted, encoder, tmp_path):
    (tmp_path / "texts.txt").write_text("cat\n")
    for prompt, text in ((None, "the cat"), ("passage", "a cat"), ("", "cat"), ("my: ", "my: cat")):
        expected = prompted.compute_texts([(text,)], "")
        assert np.array_equal(vectors(prompted(["cat"], prompt=prompt)), expected), prompt
        prompted.run(tmp_path / "texts.txt", tmp_path / "v.npy", prompt=prompt)
        assert np.array_equal(np.load(tmp_path / "v.npy"), expected)
    assert np.array_equal(prompted.encode_query(["cat"]), prompted.compute_texts([("the cat",)], ""))
    assert np.array_equal(prompted.encode_document(["cat"]), prompted.compute_texts([("a cat",)], ""))
    for call in (lambda: encoder(["cat"], prompt="query"), lambda: prompted(["cat"], prompt="qeury")):
        with pytest.raises(RequestError, match="found no prompt"):
            call()
    with pytest.raises(RequestError, match="found no prompt qeury; the model has query, passage, document"):
        prompted.run(tmp_path / "texts.txt", tmp_path / "w.npy", prompt="qeury")
    assert not (tmp_path / "w.npy").exists()


def test_rankings_are_evaluated_with_the_prompts_of_their_roles(prompted, tmp_path, monkeypatch):
    (tmp_path / "ranked.tsv").write_text("".join(f"{q}\t{d}\t{int(q == d)}\n" for q in TEXTS[:3] for d in TEXTS))
    seen = []
    compute = type(prompted).compute_texts
    monkeypatch.setattr(
        type(prompted), "compute_texts", lambda self, rows, *more: seen.append(rows) or compute(self, rows, *more)
    )
    report = metrics.evaluate({"fp32": prompted, "int8": prompted}, tmp_path / "ranked.tsv")
    assert report["prompts"] == {"query": "the ", "document": "a "}
    assert set(seen[0]) == {(f"the {q}",) for q in TEXTS[:3]} | {(f"a {d}",) for d in TEXTS}
    seen.clear()
    (tmp_path / "sts.tsv").write_text("".join(f"{a}\t{b}\t{i}\n" for i, (a, b) in enumerate(itertools.pairwise(TEXTS))))
    assert "prompts" not in metrics.evaluate({"fp32": prompted, "int8": prompted}, tmp_path / "sts.tsv")
    assert set(seen[0]) == {(f"the {text}",) for text in TEXTS}


def test_truncation_and_invalid_texts_are_told(folders, encoder, tmp_path):
    long = "the cat sat " * 300
    results = encoder(["cat", long])
    assert [result["cut"] for result in results] == [False, True]
    assert [result["cut"] for result in encoder(["the cat sat", "cat"], max_length=4)] == [True, False]
    whole = len(text_models.tokenizer().encode("the cat sat").ids)
    assert [encoder(["the cat sat"], max_length=whole - less)[0]["cut"] for less in (0, 1)] == [False, True]
    assert np.array_equal(vectors(encoder([long], max_length=4)), vectors(encoder(["the cat"])))
    assert np.array_equal(vectors(encoder([long])), vectors(results[1:]))  # the maximum is of one call
    for length in (0, 2, 10**6, "4", 3.0, True):
        with pytest.raises(RequestError, match="found max length .*; expected 3 to"):
            encoder(["cat"], max_length=length)
    (tmp_path / "texts.txt").write_text("the cat sat\ncat\n")
    assert encoder.run(tmp_path / "texts.txt", tmp_path / "v.npy", max_length=4)["cut"] == 1
    results = encoder(["cat", " ", "\ud800", "zoo"], on_error="skip")
    assert [result.get("error") for result in results] == [None, "is empty", "holds half a surrogate pair", None]
    assert np.array_equal(vectors(results)[[0, 3]], vectors(encoder(["cat", "zoo"])))
    assert not vectors(results)[1:3].any()
    with pytest.raises(RequestError, match="found no valid text among 2; text 1 is empty"):
        encoder(["", " "], on_error="skip")
    with pytest.raises(RequestError, match="expected raise or skip"):
        encoder(["cat"], on_error="ignore")
    scores = zoo.pipeline(folders[1])([("cat", "zoo"), ("cat", "")], on_error="skip")
    assert np.isnan(scores[1]["score"]) and scores[1]["error"] == "is empty" and scores[0]["cut"] is False


def test_a_long_list_is_computed_in_windows(encoder, monkeypatch):
    sizes = []
    compute = encoder.compute
    monkeypatch.setattr(encoder, "compute", lambda tokens: sizes.append(len(tokens.lengths)) or compute(tokens))
    texts = [*TEXTS * 300, "the cat sat " * 300]
    results = encoder(text for text in texts)
    assert len(results) == len(texts) and max(sizes) <= 512 and len(sizes) == 3
    monkeypatch.undo()
    assert np.array_equal(vectors(results[: len(TEXTS)]), vectors(encoder(TEXTS)))


def test_blanks_hide_no_text(encoder):
    for blanks, between in ((" " * 30_000, " "), (" \t\n" * 10_000, " "), ("\u200b" * 30_000, "")):
        results = encoder([f"{blanks}the cat sat", f"the cat{blanks}sat"])
        assert np.array_equal(vectors(results), vectors(encoder(["the cat sat", f"the cat{between}sat"]))), blanks[:3]
        assert not any(result["cut"] for result in results)


def ask(pipeline, body, content_type="application/json"):
    """The response of a handler: status and JSON."""
    handler = TextHandler("texts", "1", pipeline)
    (result,) = handler.run([Job(0, "run", content_type, "", {}, -1, body)])
    return result.status, json.loads(result.body)


def test_bodies_of_the_server(prompted, encoder, folders):
    job = Job(1, "run", "text/plain", "", {}, -1, b"\xef\xbb\xbfa b\r\n\r\nc\n")
    assert text_lines(job, 3, "lines") == ["a b", "", "c"]
    assert ask(encoder, b"the cat\r\nzoo\r\n", "text/plain") == ask(encoder, b"the cat\nzoo\n", "text/plain")

    def results(pipeline, **body):
        status, decoded = ask(pipeline, json.dumps(body).encode())
        return (status, decoded["error"]) if status != 200 else decoded["results"]

    (answer,) = results(prompted, texts=["cat"], prompt="passage")
    assert np.allclose(answer["embedding"], prompted.compute_texts([("a cat",)], "")[0], atol=1e-6)
    assert answer["cut"] is False and results(prompted, texts=["the cat sat"], max_length=4)[0]["cut"] is True
    answer = results(encoder, texts=["cat", "", "zoo"], on_error="skip")
    assert [row["row"] for row in answer] == [1, 2, 3] and [row["error"] for row in answer] == [
        None,
        "is empty",
        None,
    ]
    assert np.array_equal(np.float32(answer[2]["embedding"]), encoder(["zoo"])[0]["embedding"])
    pairs = results(zoo.pipeline(folders[1]), texts=[["cat", "zoo"], ["cat"]], on_error="skip")
    assert pairs[1]["score"] is None and pairs[1]["error"] == "is empty or no pair"
    for body, said in (
        ({"texts": ["cat"], "promt": "query"}, "the body has the key 'promt'; expected texts, prompt, max_length"),
        ({"texts": ["cat"], "prompt": "qurey"}, "found no prompt qurey"),
        ({"texts": ["cat"], "prompt": ["query"]}, "found the prompt"),
        ({"texts": ["cat"], "max_length": 10**6}, "found max length 1000000"),
        ({"texts": ["cat"], "on_error": "ignore"}, "expected raise or skip"),
        ({"texts": ["", " "], "on_error": "skip"}, "text 2 is empty"),
        ({"text": ["cat"]}, "the body has the key 'text'"),
        ({"texts": ["cat", ""]}, "text 2 is empty"),
    ):
        status, message = results(prompted, **body)
        assert status == 400 and said in message, message
