"""`zoo serve` as users run it."""

import concurrent.futures
import contextlib
import csv
import gzip
import io
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from helpers.serving import INFER, JSON, RUN, TSV, Server, figure, stopped, talk, wait_until

import zoo
from zoo.serving.protocol import open_inference
from zoo.serving.protocol.content_encoding import decompress


@pytest.fixture(scope="module")
def model(home: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_HOME", str(home))
        return zoo.pipeline("wide-deep-criteo", engine="native")


@pytest.fixture(scope="module")
def probabilities(server: Server, model: Any, lines: list[bytes]) -> list[float]:
    """Of the first rows, one by one, by the model alone."""
    return [float(str(model.predict(model.preprocess([line]))["probability"][0, 0])) for line in lines[:64]]


def test_clients_at_once_each_get_what_the_model_alone_gives(
    server: Server, lines: list[bytes], probabilities: list[float]
) -> None:
    def ask(i: int) -> Any:
        return server.json(RUN, lines[i], TSV)["results"]

    with concurrent.futures.ThreadPoolExecutor(64) as clients, stopped(server):
        asked = [clients.submit(ask, i) for i in [*range(64)] * 4]
        wait_until(lambda: figure(server, "zoo_queue_requests") > 50)
        for pid in server.workers():
            os.kill(pid, signal.SIGCONT)
        answers = [future.result() for future in asked]
    assert answers == [[{"row": 0, "probability": probability}] for probability in probabilities * 4]
    name = 'zoo_batch_size_{}{{engine="native",model="wide-deep-criteo",verb="run"}}'
    assert figure(server, name.format("sum")) > 1.5 * figure(server, name.format("count"))  # some went together


def test_rows_are_answered_in_every_form(server: Server, lines: list[bytes], probabilities: list[float]) -> None:
    body, expected = b"\n".join(lines[:40]), [(i, probability) for i, probability in enumerate(probabilities[:40])]
    forms = {
        "application/json": lambda data: [(row["row"], row["probability"]) for row in json.loads(data)["results"]],
        "application/x-ndjson": lambda data: [tuple(json.loads(line).values()) for line in data.splitlines()],
        "text/csv": lambda data: [(int(a), float(b)) for a, b in list(csv.reader(io.StringIO(data.decode())))[1:]],
        "application/vnd.apache.arrow.stream": lambda data: [
            (row["row"], float(str(np.float32(row["probability"]))))
            for row in pa.ipc.open_stream(data).read_all().to_pylist()
        ],
    }
    for kind, read in forms.items():
        status, headers, answer = server.ask(RUN, body, TSV, accept=kind)
        assert (status, headers["content-type"]) == (200, kind)
        assert read(answer) == expected
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    rows = [dict(zip(names, line.decode().split("\t"), strict=True)) for line in lines[:40]]
    as_json = server.json(RUN, json.dumps({"rows": rows}).encode(), JSON)["results"]
    assert [(row["row"], row["probability"]) for row in as_json] == expected
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    as_arrow = server.json(RUN, sink.getvalue(), "application/vnd.apache.arrow.stream")["results"]
    assert [(row["row"], row["probability"]) for row in as_arrow] == expected


def test_a_client_of_the_protocol_works_as_it_is(server: Server, model: Any, lines: list[bytes]) -> None:
    client_of = pytest.importorskip("tritonclient.http", reason="the client is no part of this installation")
    client = client_of.InferenceServerClient(server.url.removeprefix("http://"))
    name = "wide-deep-criteo"
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(name)
    assert client.is_model_ready(name, "1") and not client.is_model_ready(name, "7")
    assert server.json(f"/v2/models/{name}/ready") == {"name": name, "ready": True}
    assert server.ask(f"/v2/models/{name}/versions//ready")[0] == 404
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata(name)
    assert {tensor["name"]: tensor["datatype"] for tensor in about["inputs"]} == {"ids": "INT32", "numbers": "FP32"}
    assert client.get_model_repository_index()[0]["state"] == "READY"
    batch = model.preprocess(lines[:5])
    expected = model.predict(batch)["probability"]
    for binary in (True, False):
        inputs = []
        for key, array in batch.items():
            inputs.append(client_of.InferInput(key, list(array.shape), "INT32" if key == "ids" else "FP32"))
            inputs[-1].set_data_from_numpy(array, binary_data=binary)
        output = client_of.InferRequestedOutput("probability", binary_data=binary)
        for outputs in ([output], None):
            for coding in (None, "gzip", "deflate"):
                result = client.infer(
                    name, inputs, outputs=outputs, request_id="mine", request_compression_algorithm=coding
                )
                np.testing.assert_array_equal(result.as_numpy("probability"), expected)
                assert result.get_response()["id"] == "mine"
    with pytest.raises(client_of.InferenceServerException, match="expected int32"):
        client.infer(name, [*inputs[1:], _wrong(client_of)])
    client.close()


def _wrong(client_of: Any) -> Any:
    tensor = client_of.InferInput("ids", [5, 26], "FP32")
    tensor.set_data_from_numpy(np.zeros((5, 26), np.float32))
    return tensor


NAMES = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def arrow(*replaced: bytes) -> bytes:
    """Rows as an Arrow stream, with some bytes of it replaced by others."""
    sink = io.BytesIO()
    table = pa.table({**{name: ["1", "1"] for name in NAMES}, "C1": ["x" * 7, "y" * 9]})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert sink.getvalue().count(replaced[0]) == 1
    return sink.getvalue().replace(*replaced)


BEYOND = arrow(struct.pack("<3i", 0, 7, 16), struct.pack("<3i", 0, 7, 1 << 30))  # where a text ends
DEEP = json.dumps([dict.fromkeys(NAMES, 1)]).replace('"C26": 1', '"C26": ' + "[" * 500 + "]" * 500).encode()
TWO_MEMBERS = gzip.compress(b"a\t", mtime=0) + gzip.compress(b"b", mtime=0)
GOOD = (
    b'{"inputs":[{"name":"ids","shape":[1,26],"datatype":"INT32","data":[%s]},{"name":"numbers","shape":[1,13],'
    b'"datatype":"FP32","data":[%s]}]}'
)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "says"),
    [
        (RUN, b"", {}, 400, "at least one row"),
        (RUN, b"a\tb", {}, 400, "found 2 columns, expected 40"),
        (RUN, b"\xff\x00\n\n", {}, 400, "found 1 column"),
        (RUN, b"[1]", {"content_type": JSON}, 400, "must be"),
        (RUN, b"{", {"content_type": JSON}, 400, "no JSON"),
        (RUN, b'["/etc/passwd"]', {"content_type": JSON}, 400, "must be"),
        (RUN, b"ARROW1", {"content_type": "application/vnd.apache.arrow.stream"}, 400, "cannot be read"),
        (RUN, BEYOND, {"content_type": "application/vnd.apache.arrow.stream"}, 400, "cannot be read"),
        (RUN, DEEP, {"content_type": JSON}, 400, "lists deep"),
        (RUN, b"PAR1", {"content_type": "application/vnd.apache.parquet"}, 400, "cannot be read"),
        (RUN, b"x", {"content_type": "video/mp4"}, 400, "Content-Type"),
        (RUN, b"x", {"content_encoding": "br"}, 415, "expected one of gzip, deflate"),
        (RUN, b"x", {"content_encoding": "gzip"}, 400, "cannot be read as gzip"),
        (
            RUN,
            gzip.compress(b"a\tb", mtime=0)[:-1],
            {"content_encoding": "gzip"},
            400,
            "are truncated, or other bytes follow",
        ),
        (RUN, gzip.compress(b"a\tb", mtime=0), {"content_encoding": "gzip"}, 400, "found 2 columns"),
        (RUN, TWO_MEMBERS, {"content_encoding": "gzip"}, 400, "found 2 columns"),
        (RUN, TWO_MEMBERS, {"content_encoding": "x-gzip"}, 400, "found 2 columns"),
        (RUN, TWO_MEMBERS + b"and more", {"content_encoding": "gzip"}, 400, "cannot be read as gzip"),
        (
            RUN,
            gzip.compress(b"x" * 1_000_001, mtime=0),
            {"content_encoding": "gzip"},
            413,
            "expected at most 1,000,000",
        ),
        (RUN, b"x", {"accept": "image/png"}, 400, "Accept"),
        (RUN, b"x", {"timeout_ms": "soon"}, 400, "timeout-ms"),
        (INFER, b"[]", {}, 400, "inputs"),
        (INFER, GOOD % (b"0", b"0"), {}, 400, "its shape needs 26"),
        (INFER, GOOD % (b",".join([b"99999"] * 26), b",".join([b"0"] * 13)), {}, 400, "found id 99999"),
        (INFER, b"{}", {"inference_header_content_length": "99"}, 400, "the body has 2 bytes"),
        (INFER, b"{}", {"inference_header_content_length": "-1"}, 400, "Inference-Header-Content-Length"),
        (INFER.replace("infer", "versions/2/infer"), b"{}", {}, 404, "the models are wide-deep-criteo"),
        ("/v2/models/..%2f..%2fetc/infer", b"{}", {}, 404, "nothing at"),
        ("/v1/models", b"{}", {}, 405, "expected GET"),
        (RUN, b"x" * 1_000_001, {}, 413, "expected at most 1,000,000"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    server: Server, path: str, body: bytes, headers: dict[str, str], status: int, says: str
) -> None:
    code, about, text = server.ask(path, body, **{"content_type": "text/plain", **headers})
    assert (code, about["content-type"]) == (status, JSON), text
    error = json.loads(text)["error"]
    assert says in error and "\n" not in error and "Traceback" not in error and "--" not in error


@pytest.mark.parametrize(("own", "binary"), [({}, True), ({"binary_data": False}, False)])
def test_outputs_are_binary_as_all_are_unless_they_say_otherwise(own: dict[str, bool], binary: bool) -> None:
    asked = {"inputs": [], "outputs": [{"name": "y", "parameters": own}], "parameters": {"binary_data_output": True}}
    assert open_inference.parse_request(json.dumps(asked).encode()).outputs == {"y": binary}


@pytest.mark.parametrize("most", [0, 5, 299_999, 300_000])
def test_a_gzip_body_of_many_members_is_all_of_them_up_to_the_limit(most: int) -> None:
    content = random.Random(0).randbytes(300_000)
    body = b"".join(gzip.compress(content[i : i + 3_000]) for i in range(0, len(content), 3_000))
    assert decompress(body, most) == content[: most + 1]


@pytest.mark.parametrize("level", [0, 1, 9])
def test_deflate_may_lack_the_header_of_zlib(level: int) -> None:
    content = b"a row of a log\n" * 1000
    raw = zlib.compress(content, level, wbits=-zlib.MAX_WBITS)
    assert decompress(raw, len(content), "deflate") == content == decompress(zlib.compress(content), 10**6, "deflate")
    for encoding, body in [("gzip", raw), ("deflate", raw[:-1]), ("deflate", raw + b"x"), ("deflate", b"")]:
        with pytest.raises(ValueError, match="the compressed data are"):
            decompress(body, 10**6, encoding)


@pytest.mark.parametrize(("path", "header"), [(RUN, "timeout-ms: soon"), ("/nothing", "x: y"), ("/v1/models", "x: y")])
def test_a_refused_request_leaves_its_connection_to_the_next(server: Server, path: str, header: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\n{header}\r\ncontent-length: 3\r\n\r\n".encode())
        time.sleep(0.1)  # its body comes after what is wrong was seen
        client.sendall(b"abcGET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        client.settimeout(10)
        parts = []
        while part := client.recv(1 << 16):
            parts.append(part)
    assert b"".join(parts).count(b"HTTP/1.1 4") == b"".join(parts).count(b'{"live":true}') == 1


def test_deadlines_full_queues_and_clients_that_leave(server: Server, lines: list[bytes]) -> None:
    with stopped(server), concurrent.futures.ThreadPoolExecutor(300) as clients:
        begin = time.monotonic()
        status, _, text = server.ask(RUN, lines[0], TSV, timeout_ms="200")
        assert (status, json.loads(text)["error"]) == (504, "the deadline passed") and time.monotonic() - begin < 5
        server.ask(RUN, lines[0], TSV, timeout_ms="200")  # the other worker's
        head = f"POST {RUN} HTTP/1.1\r\nhost: x\r\ncontent-type: {TSV}\r\ncontent-length: {len(lines[0])}\r\n\r\n"
        waiting = figure(server, "zoo_queue_requests")
        assert talk(server, head.encode() + lines[0], 0.5) == b""
        wait_until(lambda: figure(server, "zoo_queue_requests") == waiting)  # it has left, and so has its request
        asked = [clients.submit(server.ask, RUN, lines[0], TSV) for _ in range(258)]
        wait_until(lambda: any(future.done() for future in asked))
        refused = next(future.result() for future in asked if future.done())
        assert refused[0] == 429 and refused[1]["retry-after"] == "1" and b"256 requests wait" in refused[2]
        for pid in server.workers():
            os.kill(pid, signal.SIGCONT)
        assert {future.result()[0] for future in asked} == {200, 429}


def test_a_worker_that_dies_is_replaced_and_its_requests_are_tried_again(
    server: Server, lines: list[bytes], probabilities: list[float]
) -> None:
    before = figure(server, "zoo_worker_restarts_total")
    with stopped(server) as workers, concurrent.futures.ThreadPoolExecutor(20) as clients:
        asked = [clients.submit(server.json, RUN, lines[i], TSV) for i in range(20)]
        wait_until(lambda: figure(server, "zoo_queue_requests") == 18)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        answers = [future.result()["results"][0]["probability"] for future in asked]
    assert answers == probabilities[:20]
    assert figure(server, "zoo_worker_restarts_total") == before + 2
    assert not set(server.workers()) & set(workers)


def test_the_split_of_time_and_the_pages_are_told(server: Server, lines: list[bytes]) -> None:
    _, headers, _ = server.ask(RUN, lines[0], TSV, timing="1")
    split = dict(entry.split(";dur=") for entry in headers["server-timing"].split(", "))
    assert list(split) == ["read", "wait", "parse", "model", "write"] and all(
        float(duration) >= 0 for duration in split.values()
    )
    paths = server.json("/openapi.json")["paths"]
    for path, about in paths.items():
        if "get" in about:
            assert server.ask(path.replace("{version}", "1"))[0] == 200, path
        else:
            assert server.ask(path.replace("{version}", "1"))[0] == 405, path
    assert {RUN, INFER, INFER.replace("/infer", "/versions/{version}/infer"), "/v2/repository/index"} <= paths.keys()
    assert {"404", "405", "429", "503"} <= paths[RUN]["post"]["responses"].keys()
    for page in ("/", "/docs"):
        status, headers, _ = server.ask(page)
        assert status == 200 and headers["content-type"].startswith("text/html")
    shown = server.ask("/docs")[2].decode()
    assert (
        all(path in shown for path in paths) and 'data-name="request"' in shown
    )  # cells that a phone stacks are named
    (about,) = server.json("/v1/models")["models"]
    assert (about["name"], about["engine"], about["precision"]) == ("wide-deep-criteo", "native", "int8")
    text = server.ask("/metrics")[2].decode()
    assert (
        'zoo_stage_seconds_bucket{engine="native",le="0.001",model="wide-deep-criteo",stage="model",verb="run"}' in text
    )
    assert 'zoo_model_info{engine="native",family="wide-deep",model="wide-deep-criteo"' in text
    assert 'verb="rank"' in text


def test_sigterm_loses_no_request(start: Callable[..., Server], lines: list[bytes]) -> None:
    server = start("wide-deep-criteo", "--workers", "1")
    with stopped(server) as workers, concurrent.futures.ThreadPoolExecutor(20) as clients:
        asked = [clients.submit(server.ask, RUN, line, TSV) for line in lines[:20]]
        wait_until(lambda: figure(server, "zoo_queue_requests") == 19)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        os.kill(workers[0], signal.SIGCONT)
        assert [future.result()[0] for future in asked] == [200] * 20
    assert server.process.wait(20) == 0
    wait_until(lambda: not Path(f"/proc/{workers[0]}").exists())


def test_grace_ends_and_slow_senders_are_cut(start: Callable[..., Server], lines: list[bytes]) -> None:
    server = start("wide-deep-criteo", "--workers", "1", "--grace", "0.5s", "--read-timeout", "0.3s")
    slow = talk(server, f"POST {RUN} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc".encode())
    assert slow.startswith(b"HTTP/1.1 408") and b"within 0.3 seconds" in slow
    assert talk(server, f"POST {RUN} HTTP/1.1\r\nhost: x\r\n\r\n".encode()).startswith(b"HTTP/1.1 411")
    assert talk(server, b"NO HTTP\r\n\r\n").startswith(b"HTTP/1.1 400")
    with stopped(server), concurrent.futures.ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.ask, RUN, lines[0], TSV)
        wait_until(lambda: figure(server, "zoo_working_requests") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        with contextlib.suppress(OSError):  # not answered in time
            asked.result()


def test_keys_tls_and_origins(
    start: Callable[..., Server], tmp_path: Path, certificate: tuple[str, str], lines: list[bytes]
) -> None:
    import ssl
    import urllib.error
    import urllib.request

    keys, (cert, key) = tmp_path / "keys", certificate
    keys.write_text("# two\nfirst-key-of-the-tests\nsecond-key-of-the-tests\n")
    server = start(
        "wide-deep-criteo", "--workers", "1", "--api-key-file", keys, "--certfile", cert, "--keyfile", key,
        "--cors-origin", "https://page.example", "--access-log",
    )  # fmt: skip
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=cert)

    def ask(path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
        request = urllib.request.Request(
            server.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()}, method=method
        )
        try:
            with urllib.request.urlopen(request, context=context) as response:
                return response.status, response.headers
        except urllib.error.HTTPError as error:
            return error.code, error.headers

    assert ask("/v2/health/live")[0] == ask("/docs")[0] == 200
    assert ask("/v1/models")[0] == ask("/metrics")[0] == ask("/v1/models", x_api_key="first-key")[0] == 401
    assert ask("/v1/models", x_api_key="first-key-of-the-tests")[0] == 200
    status, headers = ask("/v1/models", authorization="Bearer second-key-of-the-tests", origin="https://page.example")
    assert status == 200 and headers["access-control-allow-origin"] == "https://page.example"
    headers = ask("/v2", origin="https://other.example")[1]  # a cache must not give it to pages that may ask
    assert "access-control-allow-origin" not in headers and headers["vary"] == ask("/v2")[1]["vary"] == "origin"
    asking = {"access_control_request_method": "POST", "access_control_request_headers": "authorization,timing"}
    status, headers = ask(RUN, "OPTIONS", origin="https://page.example", **asking)  # a browser asks without the key
    assert status == 204 and headers["access-control-allow-origin"] == "https://page.example"
    assert "POST" in headers["access-control-allow-methods"]
    assert "retry-after" in headers["access-control-expose-headers"].split(", ")
    assert {"authorization", "content-type", "timing"} <= set(headers["access-control-allow-headers"].split(", "))
    assert "access-control-allow-origin" not in ask(RUN, "OPTIONS", origin="https://other.example", **asking)[1]
    asking["access_control_request_headers"] = "authorization,x-stainless-os"  # of OpenAI's client
    _, headers = ask("/v1/embeddings", "OPTIONS", origin="https://page.example", **asking)
    assert headers["access-control-allow-headers"].endswith("x-stainless-os")
    assert server.end() == 0
    logged = [json.loads(line) for line in server.process.stdout.read().splitlines()]
    assert [entry["status"] for entry in logged[:3]] == [200, 200, 401] and logged[0]["path"] == "/v2/health/live"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-model"], "no-such-model"),
        (["wide-deep-criteo", "--port", "70000"], "port 70000"),
        (["wide-deep-criteo", "--certfile", "none.pem"], "both --certfile and --keyfile"),
        (["wide-deep-criteo", "--certfile", "none.pem", "--keyfile", "none.pem"], "no file none.pem"),
        (["wide-deep-criteo", "--api-key-file", "none"], "cannot read the keys in none"),
        (["wide-deep-criteo", "--workers", "0"], "workers must be 1 or more"),
        (["wide-deep-criteo", "--threads", "0"], "threads must be 1 or more"),
        (["wide-deep-criteo", "--precision", "int4"], "int4"),
        (["wide-deep-criteo", "wide-deep-criteo"], "both named wide-deep-criteo"),
        (["wide-deep-criteo", "--host", "256.1.1.1"], "cannot listen at 256.1.1.1"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    from zoo.cli import app as cli

    with pytest.raises(SystemExit) as end:
        cli.call(["serve", *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2 and says in error and error.count("\n") == 1


@pytest.mark.parametrize(("host", "keys", "warned"), [("0.0.0.0", 0, 1), ("0.0.0.0", 1, 0), ("127.0.0.1", 0, 0)])
def test_a_server_for_everyone_without_keys_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, host: str, keys: int, warned: int
) -> None:
    from zoo.serving.config import ServerConfig, key_digest
    from zoo.serving.http import server as serving
    from zoo.serving.workers import forkserver

    class Started(Exception):
        pass

    def started(openings: Any) -> None:
        raise Started

    monkeypatch.setattr(forkserver, "start", started)  # nothing listens
    with pytest.raises(Started):
        serving.serve(
            ServerConfig(host=host, port=0, api_keys=frozenset([key_digest("a key of the tests")][:keys])), []
        )
    assert sum("without authentication" in record.message for record in caplog.records) == warned


def test_a_port_that_is_taken_is_said(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "zoo.cli.app", "serve", "wide-deep-criteo", "--port", port]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and f"cannot listen at 127.0.0.1 port {port}" in process.stderr
