"""What each kind of model answers, `--watch`, and the front under another HTTP server."""

import asyncio
import concurrent.futures
import csv
import gzip
import io
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.serving import CIFAR, MT, SENTENCES, SHOP, TSV, Server, own_folder, wait_until
from PIL import Image

import zoo
from pipelines.core.errors import RequestError
from zoo.serving.handlers import translation
from zoo.serving.workers.channel import Job, JobResult

ROWS = "/v1/models/mine:run"


@pytest.fixture(scope="module")
def both(start: Callable[..., Server]) -> Server:
    return start("multi30k-en-de", "shop-clicks", "--workers", "1")


@pytest.fixture(scope="module")
def opened(home: Path) -> Callable[..., Any]:
    def pipeline(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ZOO_HOME", str(home))
            return zoo.pipeline(*arguments)

    return pipeline


def test_models_of_own_logs_have_no_rows_of_their_own_and_are_served(
    start: Callable[..., Server], opened: Callable[..., Any], tmp_path: Path
) -> None:
    folders = []
    for name, sample in (("shop-clicks", "sample.csv.gz"), ("wide-deep-criteo", "sample.tsv.gz")):
        folders.append(shutil.copytree(opened(name).path, tmp_path / name))
        (folders[-1] / sample).unlink()
        card = json.loads((folders[-1] / "card.json").read_text())
        del card["files"][sample]
        (folders[-1] / "card.json").write_text(json.dumps(card))
    server = start(*folders, "--workers", "1")
    shop, criteo = server.json("/v1/models")["models"]
    (row,) = csv.DictReader(io.StringIO(shop["example"]))
    assert row["user_id"] and row["device"] in ("phone", "tablet", "desktop") and float(row["price, EUR"]) > 0
    assert criteo["example"].count("\t") == 38
    for name, text, kind in (
        ("shop-clicks", shop["example"], "text/csv"),
        ("wide-deep-criteo", criteo["example"], TSV),
    ):
        (result,) = server.json(f"/v1/models/{name}:run", text.encode(), kind)["results"]
        assert 0 < result["probability"] < 1


def test_translations_do_not_depend_on_who_else_is_there(both: Server, opened: Callable[..., Any]) -> None:
    model = opened("multi30k-en-de", "int8", "native")
    expected = {sentence: model([sentence])[0] for sentence in SENTENCES}
    assert len({result["translation"] for result in expected.values()}) == len(SENTENCES)

    def ask(i: int) -> tuple[str, Any]:
        sentence = SENTENCES[i % len(SENTENCES)]
        return sentence, both.json(MT, sentence.encode(), "text/plain")["results"]

    with concurrent.futures.ThreadPoolExecutor(32) as clients:
        for sentence, results in clients.map(ask, range(160)):
            assert [(line["line"], line["translation"]) for line in results] == [(1, expected[sentence]["translation"])]
            assert results[0]["score"] == pytest.approx(expected[sentence]["score"], abs=1e-6)


def test_a_text_is_translated_line_by_line_in_every_form(both: Server, opened: Callable[..., Any]) -> None:
    expected = [result["translation"] for result in opened("multi30k-en-de", "int8", "native")(SENTENCES)]
    text = "\n".join(SENTENCES).encode()
    as_json = both.json(MT, json.dumps({"sentences": SENTENCES}).encode(), "application/json")["results"]
    assert [result["translation"] for result in as_json] == expected
    assert both.ask(MT, text, "text/plain", accept="text/plain")[2].decode().splitlines() == expected
    streamed = both.ask(MT, text, "text/plain", accept="application/x-ndjson")[2].splitlines()
    assert {(line["line"], line["translation"]) for line in map(json.loads, streamed)} == set(enumerate(expected, 1))
    best = both.json(f"{MT}?beam=3&n_best=2", SENTENCES[1].encode(), "text/plain")["results"]
    assert [line["line"] for line in best] == [1, 1] and best[0]["score"] >= best[1]["score"]
    body = {"sentences": SENTENCES[1], "beam": 3, "n_best": 2}
    assert both.json(MT, json.dumps(body).encode(), "application/json")["results"] == best
    options = {"target_prefix": ["Ein Herr", ""], "bad_words": ["Fahrrad"], "repetition_penalty": 1.1}
    results = both.json(MT, json.dumps({"sentences": SENTENCES[:2], **options}).encode(), "application/json")["results"]
    wanted = opened("multi30k-en-de", "int8", "native")(SENTENCES[:2], **options)
    assert [result["translation"] for result in results] == [result["translation"] for result in wanted]
    assert results[0]["translation"].startswith("Ein Herr")
    body = {"sentences": SENTENCES[1], "alignments": True, "word_scores": True}
    (aligned,) = both.json(MT, json.dumps(body).encode(), "application/json")["results"]
    assert aligned["translation"] == expected[1] and "0-0" in aligned["alignment"].split()
    assert len(aligned["word_scores"]) == len(expected[1].split())
    marked = {"sentences": ["<b>Two</b> dogs run.", "See www.example.com now."], "tag_handling": "html"}
    results = both.json(MT, json.dumps(marked).encode(), "application/json")["results"]
    assert results[0]["translation"].startswith("<b>Zwei</b> Hunde") and "www.example.com" in results[1]["translation"]
    options = {"glossary": {"dogs": "Katzen"}, "forced_words": ["\u4f60"]}
    results = both.json(MT, json.dumps({"sentences": ["Two dogs."], **options}).encode(), "application/json")["results"]
    assert "Katzen" in results[0]["translation"] and results[0]["unmet"] == "\u4f60"
    options = {"temperature": 1.3, "top_p": 0.9, "seed": 7, "n_best": 2}
    results = both.json(MT, json.dumps({"sentences": SENTENCES[:2], **options}).encode(), "application/json")["results"]
    wanted = opened("multi30k-en-de", "int8", "native")(SENTENCES[:2], **options)
    assert [result["translation"] for result in results[::2]] == [result["translation"] for result in wanted]
    odd = both.json(MT, "Two dogs.\n\nA \x01 man.\n\u4f60\u597d\n50%".encode(), "text/plain")["results"]
    assert [bool(row["translation"]) for row in odd] == [True, False, True, True, True]
    assert [row.get("untranslated") for row in odd] == [
        None,
        None,
        "U+0001 left out",
        "\u4f60\u597d copied",
        "50% copied",
    ]
    assert [bool(row.get("error")) for row in odd] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (MT, b"", "no sentence"),
        (MT, b"\xff\xfe", "UTF-8"),
        (MT, "\u4f60\u597d".encode(), "script or language"),
        (f"{MT}?beam=0", b"A man.", "found beam 0; expected a whole number from 1"),
        (f"{MT}?beam=99", b"A man.", "found beam 99; expected at most 32"),
        (f"{MT}?beam=2&n_best=3", b"A man.", "beam 2 and n-best 3"),
        (f"{MT}?sentences=maybe", b"A man.", "sentences is 'maybe'"),
        (f"{MT}?output=/tmp/x", b"A man.", "no option 'output'"),
        (f"{MT}?target_language=fr", b"A man.", "none to choose from"),
        (f"{SHOP}?beam=2", b"a,b\n1,2\n", "no option 'beam'"),
        (SHOP, b"a,b\n1,2\n", "lacks the columns"),
        (SHOP, b"\n\n", "empty"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(both: Server, path: str, body: bytes, says: str) -> None:
    status, _, text = both.ask(path, body, "text/plain")
    error = json.loads(text)["error"]
    assert status == 400 and says in error and "\n" not in error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beam": -5}, "found beam -5; expected a whole number from 1 to 256"),
        ({"beam": 2.5}, "found beam 2.5; expected a whole number"),
        ({"beam": [4]}, "found beam [4]; expected a whole number"),
        ({"n_best": 9}, "beam 4 and n-best 9"),
        ({"nbest": 2}, "the body has the key 'nbest'"),
        ({"no_repeat_ngram": -1}, "no-repeat-ngram -1; expected a whole number from 0 to"),
        ({"length_penalty": "long"}, "length-penalty 'long'; expected a number"),
        ({"length_penalty": "nan"}, "length-penalty nan"),
        ({"max_tokens": 0}, "found max-tokens 0"),
        ({"repetition_penalty": 0}, "repetition-penalty 0; expected a number above 0"),
        ({"bad_words": [""]}, "bad-words has an empty text"),
        ({"bad_words": ["\u4f60"]}, "cannot write"),
        ({"target_prefix": ["Ein", "Zwei"]}, "found 2 texts of target-prefix for 1 sentences"),
    ],
    ids=str,
)
def test_options_of_a_translation_body_are_checked(both: Server, options: dict[str, Any], says: str) -> None:
    body = json.dumps({"sentences": ["A man."], **options}).encode()
    status, _, text = both.ask(MT, body, "application/json")
    assert status == 400 and says in json.loads(text)["error"]


def test_null_is_an_option_that_is_not_set(both: Server) -> None:
    plain = {"sentences": ["A man."]}
    bodies = [json.dumps(body).encode() for body in (plain, {**plain, "beam": None, "source_language": None})]
    first, second = (both.json(MT, body, "application/json") for body in bodies)
    assert first == second


def test_an_option_that_is_given_twice_is_refused(both: Server) -> None:
    status, _, text = both.ask(f"{MT}?beam=2&beam=3", b"A man.", "text/plain")
    assert status == 400 and json.loads(text)["error"] == "an option is given twice; expected each once"


def test_rows_of_a_log_with_names_are_answered_as_the_model_does(both: Server, opened: Callable[..., Any]) -> None:
    sample = gzip.decompress((zoo.SHIPPED / "shop-clicks" / "sample.csv.gz").read_bytes()).splitlines(keepends=True)
    text = b"".join(sample[:21])
    model = opened("shop-clicks", "int8", "native")
    expected = [result["probability"] for result in model(io.BytesIO(text))]
    results = both.json(SHOP, text, "text/csv")["results"]
    assert [result["probability"] for result in results] == pytest.approx(expected, abs=1e-7)
    rows = list(csv.DictReader(io.StringIO(text.decode())))
    alone = [both.json(SHOP, json.dumps([row]).encode(), "application/json")["results"][0] for row in rows]
    assert [result["probability"] for result in alone] == [result["probability"] for result in results]


def test_photos_come_as_bytes_or_as_a_form(start: Callable[..., Server], opened: Callable[..., Any]) -> None:
    server = start("mobilenet-v1-cifar10", "--engine", "onnxruntime", "--workers", "1")
    rng = np.random.default_rng(0)
    photos = []
    for _ in range(3):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(file, "PNG")
        photos.append(file.getvalue())
    model = opened("mobilenet-v1-cifar10", "int8", "onnxruntime")
    expected = [model(photo)[0] for photo in photos]
    for photo, wanted in zip(photos, expected, strict=True):
        (answer,) = server.json(CIFAR, photo, "image/png")["results"]
        assert (answer["label"], answer["probability"]) == (wanted["label"], pytest.approx(wanted["probability"]))
    body = b"".join(
        b'--cut\r\nContent-Disposition: form-data; name="file"; filename="%d.png"\r\n\r\n%b\r\n' % pair
        for pair in enumerate(photos)
    )
    answer = server.json(CIFAR, body + b"--cut--\r\n", "multipart/form-data; boundary=cut")["results"]
    assert [(result["file"], result["label"]) for result in answer] == [
        (f"{i}.png", e["label"]) for i, e in enumerate(expected)
    ]
    for body, kind in (
        (b"no image", "image/png"),
        (b"--cut--", "multipart/form-data; boundary=cut"),
        (b"", "image/png"),
    ):
        status, _, text = server.ask(CIFAR, body, kind)
        assert status == 400 and "\n" not in json.loads(text)["error"]
    body = b'--cut\r\nContent-Disposition: form-data; name="model"\r\n\r\nmobilenet\r\n--cut--'
    status, _, text = server.ask(CIFAR, body, "multipart/form-data; boundary=cut")
    assert status == 400 and json.loads(text)["error"].startswith("the form field 'model' is no image")


@pytest.mark.slow
def test_new_files_are_switched_to_without_a_lost_request(
    start: Callable[..., Server], home: Path, tmp_path: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_HOME", str(home))
    folder = own_folder(tmp_path / "mine", lines)
    server = start(folder, "--workers", "2", "--watch")
    answers: list[tuple[int, Any]] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            status, _, text = server.ask(ROWS, lines[0], TSV)
            answers.append((status, json.loads(text)["results"][0]["probability"]))
            ended.wait(0.01)  # the exchange needs the cores, too

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    wait_until(lambda: answers)
    before = server.workers()
    zoo.quantize(folder, keep_float=["deep.*"])
    expected = zoo.pipeline(folder, engine="native")([lines[0]])[0]["probability"]
    wait_until(lambda: server.json("/v1/models/mine")["version"] == "2")
    wait_until(lambda: len(server.workers()) == 2 and not set(server.workers()) & set(before))
    ended.set()
    for thread in asking:
        thread.join()
    assert {status for status, _ in answers} == {200} and len({probability for _, probability in answers}) == 2
    assert server.json(ROWS, lines[0], TSV)["results"][0]["probability"] == pytest.approx(expected, abs=1e-7)
    (folder / "card.json").write_text("{")
    (folder / "int8.onnx").touch()  # what cannot be opened is not switched to
    wait_until(lambda: any("are not served" in message for message in server.said))
    assert server.ask(ROWS, lines[0], TSV)[0] == 200 and server.end() == 0


def test_the_server_is_an_asgi_application(home: Path, lines: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.serving import app

    monkeypatch.setenv("ZOO_HOME", str(home))
    with pytest.raises(RequestError, match="no-such-model"):
        app(["no-such-model"])
    application = app("wide-deep-criteo", max_body=10_000)

    async def ask(path: str, *parts: bytes) -> tuple[int, bytes]:
        scope = {"type": "http", "method": "POST" if parts else "GET", "path": f"/zoo{path}", "root_path": "/zoo"}
        length = str(sum(map(len, parts))).encode()
        headers = [(b"Content-Type", TSV.encode()), (b"content-length", length)]
        waiting = [{"type": "http.request", "body": part, "more_body": part is not parts[-1]} for part in parts]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if waiting:
                return waiting.pop(0)
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await application({**scope, "query_string": b"", "headers": headers, "client": ("x", 1)}, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    async def check() -> None:
        assert (await ask("/v2/health/ready"))[0] == 200
        status, body = await ask("/v1/models/wide-deep-criteo:run", lines[0][:20], lines[0][20:])
        expected = zoo.pipeline("wide-deep-criteo", engine="native")([lines[0]])[0]["probability"]
        assert status == 200 and json.loads(body)["results"][0]["probability"] == pytest.approx(expected, abs=1e-7)
        assert (await ask("/v1/models/wide-deep-criteo:run", b"x" * 10_001))[0] == 413
        assert (await ask("/nothing"))[0] == 404

    async def run() -> None:
        events = iter(["startup", "shutdown"])
        said: list[str] = []

        async def receive() -> dict[str, Any]:
            event = next(events)
            if event == "shutdown":
                await check()
            return {"type": f"lifespan.{event}"}

        async def send(message: dict[str, Any]) -> None:
            said.append(message["type"])

        await application({"type": "lifespan"}, receive, send)
        assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    asyncio.run(run())
    wait_until(lambda: not any(thread.name.startswith("zoo-worker") for thread in threading.enumerate()))


def test_too_many_sets_of_options_at_once_are_load_and_no_wrong_request(opened: Callable[..., Any]) -> None:
    handler = translation.TranslationHandler("mt", "1", opened("multi30k-en-de", "int8", "native"))
    busy: Any = SimpleNamespace(busy=True)
    handler._streams = dict.fromkeys([(i,) for i in range(translation.MAX_STREAMS)], busy)
    results: list[JobResult] = []
    handler.submit([Job(1, "run", "text/plain", "", {"beam": "3"}, -1, b"A man.")], results.extend)
    (result,) = results
    assert (result.status, "try again" in json.loads(result.body)["error"]) == (503, True)


def test_a_form_is_no_text(both: Server) -> None:
    status, _, text = both.ask(MT, b"--cut--", "multipart/form-data; boundary=cut")
    assert status == 400 and "Content-Type is 'multipart/form-data; boundary=cut'; expected one of" in text.decode()
