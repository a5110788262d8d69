"""Invalid request bodies: the answer is a 4xx with one line, and the workers go on."""

import base64
import http.client
import io
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from helpers.serving import JSON, TSV, Server

from pipelines.core.errors import RequestError
from zoo.serving.protocol import open_inference

ROWS, PHOTOS, TEXTS = "wide-deep-criteo", "mobilenet-v1-cifar10", "multi30k-en-de"
BINARY = "application/octet-stream"
LENGTH = "Inference-Header-Content-Length"


class Request(NamedTuple):
    """wrong: surely so; else the body was changed at random, and an answer to it is as good as a fault."""

    kind: str
    path: str
    headers: dict[str, str]
    body: bytes
    wrong: bool = True


class Wrong:
    """Makes requests that are wrong. row: a line of the log. photo: a PNG."""

    def __init__(self, seed: int, row: bytes, photo: bytes) -> None:
        self.random, self.row, self.photo = random.Random(seed), row, photo

    def __iter__(self) -> Iterator[Request]:
        kinds = [
            self.tensors,
            self.binary,
            self.rows,
            self.rows_as_json,
            self.photos,
            self.multipart,
            self.texts,
            self.any,
            self.headers,
        ]
        while True:
            yield self.random.choice(kinds)()

    # ---------------------------------------------------------------------------------------------------- what is right

    def _request(self) -> dict[str, Any]:
        count = self.random.randint(1, 3)
        return {
            "inputs": [
                {"name": "ids", "shape": [count, 26], "datatype": "INT32", "data": [1] * 26 * count},
                {"name": "numbers", "shape": [count, 13], "datatype": "FP32", "data": [0.5] * 13 * count},
            ]
        }

    def _strange(self) -> Any:
        return self.random.choice(
            [
                None,
                True,
                -1,
                1 << 62,
                1e308,
                "",
                "x" * 300,
                "\x00",
                [],
                [[]],
                {},
                {"a": {}},
                [None],
                "é\ud83d\ude00",
                [1, "1"],
            ]
        )

    def _bytes(self, most: int = 2000) -> bytes:
        return self.random.randbytes(self.random.randint(1, most))

    def _flipped(self, body: bytes) -> bytes:
        flipped = bytearray(body)
        for _ in range(self.random.randint(1, 5)):
            position = self.random.randrange(len(flipped))
            match self.random.randint(0, 2):
                case 0:
                    flipped[position] = self.random.randrange(256)
                case 1:
                    del flipped[position : position + self.random.randint(1, 8)]
                case _:
                    flipped[position:position] = self._bytes(8)
            flipped = flipped or bytearray(b"\xff")
        return bytes(flipped)

    # ------------------------------------------------------------------------------------------------------ what is not

    def tensors(self) -> Request:
        path, request = f"/v2/models/{ROWS}/infer", self._request()
        tensor = self.random.choice(request["inputs"])
        way = self.random.randint(0, 9)
        body: bytes | None = None
        if way == 0:
            body = json.dumps(request).encode()
            body = body[: self.random.randrange(len(body))]  # a part of an object is none
        elif way == 1:
            tensor["shape"] = self.random.choice(
                [[], [26], [1, 1, 26], [-1, 26], [1 << 40, 1 << 40], [0, 26], [2.5, 26], "x"]
            )
        elif way == 2:
            tensor["data"] = tensor["data"][:-1] if self.random.random() < 0.5 else [*tensor["data"], 1]
        elif way == 3:
            tensor["datatype"] = self.random.choice(["INT8", "FP64", "int32", "BYTES", "", "BOOL", None, 5])
        elif way == 4:
            tensor["data"][self.random.randrange(len(tensor["data"]))] = self.random.choice(["x", {}, None, [], "\x00"])
        elif way == 5:
            request["inputs"][0]["data"][0] = self.random.choice([-1, 1 << 31, -(1 << 40), 2_000_000_000])
        elif way == 6:
            tensor["name"] = self.random.choice(["", "idz", None, 3, "../ids", "ids\x00"])
        elif way == 7:
            request["inputs"] = self.random.choice(
                [None, [], {}, "ids", [None], request["inputs"][:1], [*request["inputs"], tensor]]
            )
        elif way == 8:
            request["outputs"] = self.random.choice([[{"name": "nothing"}], [{}], [None], "probability", {"a": 1}, 7])
        else:
            body = b"[" * self.random.choice([10, 1000, 100_000])
        return Request("tensors", path, {"Content-Type": JSON}, json.dumps(request).encode() if body is None else body)

    def binary(self) -> Request:
        head: dict[str, Any] = {
            "inputs": [
                {"name": "ids", "shape": [1, 26], "datatype": "INT32", "parameters": {"binary_data_size": 104}},
                {"name": "numbers", "shape": [1, 13], "datatype": "FP32", "parameters": {"binary_data_size": 52}},
            ]
        }
        tail, length = bytes(156), None
        way = self.random.randint(0, 5)
        if way == 0:
            wrong = self.random.choice([0, -1, 103, 105, 1 << 40, -(1 << 63), "104", None, 1.5, True])
            self.random.choice(head["inputs"])["parameters"]["binary_data_size"] = wrong
        elif way == 1:
            tail = tail[: self.random.randrange(156)]
        elif way == 2:
            tail += self._bytes(64)
        elif way == 3:
            self.random.choice(head["inputs"])["shape"] = self.random.choice(
                [[2, 26], [1 << 33, 1 << 33], [-1, 13], [], [0, 0]]
            )
        text = json.dumps(head).encode()
        if way == 4:
            length = self.random.choice(["-1", "", "x", "1e3", "9" * 30, str(1 << 63), "0", str(len(text) + 157), "٣"])
        elif way == 5:
            length = str(self.random.choice([size for size in range(len(text) + 157) if size != len(text)]))
        length = str(len(text)) if length is None else length
        headers = {"Content-Type": BINARY, LENGTH: length.encode().decode("latin-1")}
        return Request("binary", f"/v2/models/{ROWS}/infer", headers, text + tail)

    def rows(self) -> Request:
        fields = self.row.split(b"\t")
        way = self.random.randint(0, 4)
        if way == 0:
            fields = fields[: self.random.choice([1, 2, 20, 38])]
        elif way == 1:
            fields += [b"x"] * self.random.randint(1, 50)
        elif way == 2:
            fields[self.random.randint(1, 13)] = self.random.choice([b"x", b"1e", b"--1", b"0x1", b"1,5", b"\xff"])
        elif way == 3:
            fields = []
        else:
            fields[0] = self.random.choice([b"x", b"1e", b"yes"])
        body = b"\t".join(fields)
        body = body if self.random.random() < 0.5 else self.row + b"\n" + body + b"\n"
        return Request("rows", f"/v1/models/{ROWS}:run", {"Content-Type": TSV}, body, wrong=way not in (3, 4))

    def rows_as_json(self) -> Request:
        body = self.random.choice(
            [
                json.dumps(self._strange()).encode(),
                json.dumps({"rows": self._strange()}).encode(),
                json.dumps({"rows": [self._strange()]}).encode(),
                json.dumps({"rows": [{"nothing": self._strange()}]}).encode(),
                b'{"rows": [' + b'{"I1": ' * self.random.choice([1, 5000]),
                self._bytes(),
            ]
        )
        return Request("rows as JSON", f"/v1/models/{ROWS}:run", {"Content-Type": JSON}, body)

    def photos(self) -> Request:
        magic = self.random.choice(
            [b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\x10\0\0\0WEBP", b"BM", b"", b"<svg>"]
        )
        body = (
            magic + self._bytes()
            if self.random.random() < 0.7
            else self.photo[: self.random.randrange(len(self.photo) // 2)]
        )
        kind = self.random.choice(["image/jpeg", "image/png", "image/x-strange", BINARY])
        return Request("photos", f"/v1/models/{PHOTOS}:run", {"Content-Type": kind}, body)

    def multipart(self) -> Request:
        part = b'--b\r\nContent-Disposition: form-data; name="a"; filename="../../a.png"\r\n\r\n'
        body = self.random.choice(
            [
                self._bytes(),
                part,
                part + self._bytes() + b"\r\n--b--\r\n",
                b"--b--\r\n",
                part * 300,
                part[: self.random.randrange(len(part))],
            ]
        )
        kind = self.random.choice(
            [
                "multipart/form-data; boundary=b",
                "multipart/form-data",
                "multipart/form-data; boundary=",
                "multipart/form-data; boundary=" + "b" * 300,
            ]
        )
        return Request("multipart", f"/v1/models/{PHOTOS}:run", {"Content-Type": kind}, body)

    def texts(self) -> Request:
        body = self.random.choice(
            [
                b"",
                b"\n" * self.random.choice([1, 5000]),
                b"\xff\xfe" + self._bytes(),
                json.dumps({"sentences": self.random.choice([None, 1, {}, [1], [None], [[]], []])}).encode(),
                b'{"sentences": ["a"',
            ]
        )
        kind = JSON if body[:1] == b"{" else "text/plain"
        return Request("texts", f"/v1/models/{TEXTS}:run", {"Content-Type": kind}, body)

    def any(self) -> Request:
        """What is right, changed at random, or under another name."""
        path, kind, body = self.random.choice(
            [
                (f"/v2/models/{ROWS}/infer", JSON, json.dumps(self._request()).encode()),
                (f"/v1/models/{ROWS}:run", TSV, self.row),
                (f"/v1/models/{PHOTOS}:run", "image/png", self.photo),
                (f"/v1/models/{TEXTS}:run", "text/plain", b"A dog runs."),
            ]
        )
        if self.random.random() < 0.3:
            kind = self.random.choice(
                ["application/x-strange", "application/vnd.apache.parquet", "application/vnd.apache.arrow.stream"]
            )
        return Request("changed", path, {"Content-Type": kind}, self._flipped(body), wrong=False)

    def headers(self) -> Request:
        """A right row under a header that is wrong, or is what nobody reads."""
        digits = ["-1", "+1", "1.5", "1e3", " 1 2", "0" * 300 + "1", "9" * 400, "\xb2", "\xbd", "0x10", ""]
        strange = "".join(
            chr(self.random.choice([*range(32, 127), *range(160, 256)])) for _ in range(self.random.randrange(400))
        )
        name, values, wrong = self.random.choice(
            [
                ("timeout-ms", [*digits, "0", "86400001"], True),
                ("content-encoding", ["gzip", "deflate", "br", "gzip, gzip", "\xff"], True),
                (LENGTH, [*digits, "999999999"], False),
                ("accept", ["image/png", "text/csv;q=x", ";;,", "a/b;q=\xff"], False),
                *((header, [], False) for header in ("authorization", "origin", "timing", "x-api-key", "cookie")),
            ]
        )
        value = self.random.choice([*values, *([] if wrong else [strange])])
        # what is no ASCII is no header for the HTTP server
        headers = {"Content-Type": TSV, name: value}
        return Request("headers", f"/v1/models/{ROWS}:run", headers, self.row, wrong and value.isascii())


@pytest.fixture(scope="module")
def served(start: Callable[..., Server]) -> Server:
    return start(ROWS, PHOTOS, TEXTS, "--workers", "1")


@pytest.fixture(scope="module")
def photo() -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").resize((64, 64)).save(data, "PNG")
    return data.getvalue()


def statuses(server: Server, requests: Iterator[Request], count: int) -> Counter[tuple[str, int]]:
    """Of each kind of request; fails at the first that is not answered as it should be."""
    counts: Counter[tuple[str, int]] = Counter()
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    for _ in range(count):
        request = next(requests)
        try:
            connection.request("POST", request.path, request.body, request.headers)
            answer = connection.getresponse()
            body = answer.read()
        except (http.client.HTTPException, OSError) as error:
            raise AssertionError(f"no answer: {error!r} to {_told(request)}") from error
        good = 400 <= answer.status < 500 or (answer.status == 200 and not request.wrong)
        assert good, f"{answer.status} {body[:200]!r} to {_told(request)}"
        if answer.status != 200 and body:
            fault = json.loads(body)["error"]
            assert fault and "\n" not in fault and "Traceback" not in fault, f"{fault} to {_told(request)}"
        counts[request.kind, answer.status] += 1
    return counts


def _told(request: Request) -> str:
    return f"{request.kind} {request.path} {request.headers} {base64.b64encode(request.body[:3000]).decode()}"


def fuzzed(server: Server, row: bytes, photo: bytes, count: int, seed: int) -> None:
    workers = server.workers()
    before = server.json(f"/v1/models/{ROWS}:run", row, TSV)
    counts = statuses(server, iter(Wrong(seed, row, photo)), count)
    assert sum(counts.values()) == count
    assert server.workers() == workers  # none died of it
    assert server.json(f"/v1/models/{ROWS}:run", row, TSV) == before
    assert not any("Traceback" in line for line in server.said)


def parsed(**about: Any) -> open_inference.InferRequest:
    tensor = {"name": "x", "shape": [1], "datatype": "FP32", **about}
    return open_inference.parse_request(json.dumps({"inputs": [tensor]}).encode())


@pytest.mark.parametrize("nest", [lambda data: data, lambda data: [[number] for number in data]])
def test_a_long_text_among_numbers_is_not_given_room_in_each_of_them(nest: Callable[[list[Any]], list[Any]]) -> None:
    data = nest(["x" * 20_000, *[""] * 1_000])
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="must hold numbers"):
            parsed(shape=[1001], data=data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("shape", "data"), [([2, 2], [[1, 2.5], [3, True]]), ([0, 2], []), ([2, 0], [[], []])])
def test_numbers_come_flat_or_in_lists(shape: list[int], data: list[Any]) -> None:
    assert parsed(shape=shape, data=data).inputs["x"].tolist() == data


@pytest.mark.parametrize(
    "about", [{"data": []}, {"data": [], "datatype": "BYTES"}, {"parameters": {"binary_data_size": 0}}]
)
def test_a_shape_beyond_what_numpy_takes_is_refused(about: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="expected sizes with a product below"):
        parsed(shape=[0, *[(1 << 31) - 1] * 3], **about)


def test_wrong_bodies_get_a_line_each(served: Server, lines: list[bytes], photo: bytes) -> None:
    fuzzed(served, lines[0], photo, 200, seed=1)


@pytest.mark.slow
def test_many_wrong_bodies_get_a_line_each(served: Server, lines: list[bytes], photo: bytes) -> None:
    fuzzed(served, lines[0], photo, 20_000, seed=2)
