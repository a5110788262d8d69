"""No body of up to 1 MB takes a parser more than a second of the CPU, or 256 MB."""

import io
import json
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from pipelines.core.errors import RequestError
from zoo.serving.handlers.base import INFER, RUN, Handler
from zoo.serving.handlers.ranking import RANK
from zoo.serving.protocol import responses
from zoo.serving.protocol.content_encoding import decompress
from zoo.serving.protocol.text_apis import COHERE_EMBED, DECODE, EMBEDDINGS, TOKENIZE
from zoo.serving.workers.channel import Job
from zoo.serving.workers.model_loader import ServedModel

SIZE = 1_000_000
SECONDS, MEGABYTES = 1.0, 256
MAX_BODY = 64 << 20
CRITEO, SHOP, PHOTOS, TEXTS, MT = (
    "wide-deep-criteo",
    "shop-clicks",
    "mobilenet-v1-cifar10",
    "texts-0",
    "multi30k-en-de",
)
TSV, CSV, JSON, ARROW, PARQUET = (
    "text/tab-separated-values",
    "text/csv",
    responses.JSON,
    responses.ARROW,
    "application/vnd.apache.parquet",
)


def packed(*parts: tuple[bytes, int]) -> bytes:
    """A gzip member of parts that repeat, in constant memory."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    out = []
    for part, count in parts:
        many = max(1, (1 << 20) // max(len(part), 1))
        out += [packer.compress(part * min(many, count - begin)) for begin in range(0, count, many)]
    return b"".join([*out, packer.flush()])


def filled(part: bytes, head: bytes = b"", tail: bytes = b"", size: int = SIZE) -> bytes:
    """`head`, the part as often as it fits, `tail`."""
    return head + part * ((size - len(head) - len(tail)) // len(part)) + tail


def both(part: bytes, head: bytes = b"", tail: bytes = b"") -> Iterator[tuple[bytes, str]]:
    """A body of 1 MB, and a compressed one of `MAX_BODY`."""
    yield filled(part, head, tail), ""
    yield packed((head, 1), (part, (MAX_BODY - len(head) - len(tail)) // len(part)), (tail, 1)), "gzip"


def numbered(form: str, head: str = "", tail: str = "", join: str = ",") -> bytes:
    """Texts that differ by a number, up to 1 MB."""
    count = (SIZE - len(head) - len(tail)) // len((form % 1_000_000 + join).encode())
    return (head + join.join(form % i for i in range(count)) + tail).encode()


def stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue()


def parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(table, sink, compression="zstd", **options)
    return sink.getvalue()


def tables(names: list[str]) -> Iterator[pa.Table]:
    """Tables of one column's values in all columns, small on the wire and large in memory."""
    long, many = "x" * 400_000, 30_000_000
    yield pa.table(
        {name: pa.array(["y" * 10_000] * 1000) for name in names[:8]} | dict.fromkeys(names[8:], pa.nulls(1000))
    )
    dictionary = pa.DictionaryArray.from_arrays(pa.array(np.zeros(200_000, np.int8)), pa.array([long]))
    yield pa.table({names[0]: dictionary} | {name: pa.nulls(200_000) for name in names[1:]})
    yield pa.table({name: pa.nulls(many) for name in names})
    yield pa.table({name: pa.array(np.zeros(250_000, bool)) for name in names})
    lists = pa.ListArray.from_arrays(pa.array([0, 200_000], pa.int32()), dictionary)
    yield pa.table({names[0]: lists} | {name: pa.nulls(1) for name in names[1:]})


def image(form: str, mode: str, side: int, **options: Any) -> bytes:
    sink = io.BytesIO()
    Image.new(mode, (side, side)).save(sink, form, **options)
    return sink.getvalue()


def multipart(*files: bytes) -> bytes:
    return b"".join(b"--X\r\nContent-Type: image/png\r\n\r\n" + file + b"\r\n" for file in files) + b"--X--\r\n"


def text_rows() -> Iterator[tuple[str, bytes, str]]:
    for part in (b"\n", b"\t", b",", b"\r\n", b"\0", b'"', b'"\n', b"a\tb\n", b"1\n", b" ", b"\xff\n", b";\n", b"a,"):
        for body, encoding in both(part):
            yield TSV, body, encoding
    for part in (b"\n", b",\n", b'"', b"1,2\n", b"a"):
        for body, encoding in both(part, b"user_id,item_id\n"):
            yield CSV, body, encoding
    row = b"\t".join([b"0"] + [b"1"] * 13 + [b"deadbeef"] * 26) + b"\n"
    for body, encoding in both(row):
        yield TSV, body, encoding
    yield TSV, filled(b"\t" * 39 + b"\n"), ""
    yield TSV, packed((row, 1), (b"\t", 60 << 20)), "gzip"
    yield TSV, packed((row, 1), (b"x\n", 30 << 20)), "gzip"
    yield CSV, numbered("c%d"), ""
    yield CSV, numbered('"c\n%d"', "user_id,"), ""


def json_rows(names: list[str]) -> Iterator[tuple[str, bytes, str]]:
    wide = json.dumps(dict.fromkeys(names, 1)).encode()
    for part, head, tail in [
        (b"{},", b"[", b"{}]"),
        (b"[],", b"[", b"[]]"),
        (b"[[],[]],", b'[{"a":[', b"[]]}]"),
        (b'{"a":1},', b"[", b"{}]"),
        (b"1,", b'[{"%b":[' % names[0].encode(), b"1]}]"),
        (b"x", b'[{"%b":"' % names[0].encode(), b'"}]'),
        (b"[", b"", b""),
        (b"\\u0000", b'[{"%b":"' % names[0].encode(), b'"}]'),
        (wide + b",", b"[", wide + b"]"),
        (b"{},", b"[" + wide + b",", b"{}]"),
        (b" ", b"[", b"{}]"),
        (b'"a":1,', b"[{", b'"b":1}]'),
    ]:
        for body, encoding in both(part, head, tail):
            yield JSON, body, encoding
    yield JSON, numbered('"k%d":1', "[{", "}]"), ""
    yield JSON, numbered('{"k%d":1}', "[", "]"), ""
    first = json.dumps(dict.fromkeys(names, 1))
    yield JSON, numbered('{"k%d":1}', f"[{first},", "]"), ""
    yield JSON, numbered('"K%d":1', f"[{first[:-1]},", "}]"), ""


def rows(names: list[str]) -> Iterator[tuple[str, bytes, str]]:
    yield from text_rows()
    yield from json_rows(names)
    for table in tables(names):
        yield ARROW, stream(table), ""
        yield ARROW, stream(table, "zstd"), ""
        yield PARQUET, parquet(table), ""
    yield ARROW, numbered("%d"), ""
    view = struct.pack("<i4sii", 300_000, b"zzzz", 0, 0)  # 20,000 of them see one text
    buffers = [None, pa.py_buffer(view * 20_000), pa.py_buffer(b"z" * 300_000)]
    views = pa.Array.from_buffers(pa.string_view(), 20_000, buffers)
    yield ARROW, stream(pa.table({names[0]: views} | {name: pa.nulls(20_000) for name in names[1:]})), ""
    yield ARROW, stream(pa.table({f"c{i}": [1] for i in range(3000)})), ""
    yield PARQUET, parquet(pa.table({f"c{i}": [1] for i in range(2000)})), ""
    yield PARQUET, parquet(pa.table({name: ["1"] * 3000 for name in names[:4]}), row_group_size=1), ""


def rankings(user: str, item: str) -> Iterator[tuple[str, bytes, str]]:
    """Bodies of `:rank`; `user` and `item` are valid JSON objects."""
    for part, head, tail in [
        (b"%b," % item.encode(), b'{"user":%b,"items":[' % user.encode(), b"%b]}" % item.encode()),
        (b"{},", b'{"user":%b,"items":[' % user.encode(), b"%b]}" % item.encode()),
        (b"1,", b'{"user":%b,"items":[' % user.encode(), b"1]}"),
        (b"1,", b'{"user":%b,"exclude":[' % user.encode(), b"1]}"),
        (b"[", b'{"user":%b,"items":' % user.encode(), b""),
        (b"[[],[]],", b'{"user":{"age":[', b"1]}}"),
    ]:
        for body, encoding in both(part, head, tail):
            yield JSON, body, encoding
    yield JSON, numbered('{"k%d":1}', f'{{"user":{user},"items":[{item},', f",{item}]}}"), ""
    yield JSON, numbered('"k%d":1', f'{{"user":{user},"items":[{item[:-1]},', "}]}"), ""
    yield JSON, numbered('"k%d":1', f'{{"user":{user[:-1]},', "}}"), ""
    yield JSON, numbered('"k%d"', f'{{"user":{user},"items":[', "]}"), ""
    yield JSON, numbered('"k%d"', f'{{"user":{user},"exclude":[', "]}"), ""


def photos() -> Iterator[tuple[str, bytes, str]]:
    for side in (3100, 9000):
        yield "image/png", image("PNG", "RGB", side), ""
        yield "image/png", image("PNG", "I;16", side), ""
        yield "image/jpeg", image("JPEG", "RGB", side), ""
        yield "image/jpeg", image("JPEG", "CMYK", side), ""
        yield "image/gif", image("GIF", "P", side), ""
        yield "image/webp", image("WEBP", "RGB", side, lossless=True, quality=0, method=0), ""
    yield "image/jpeg", image("JPEG", "RGB", 4400, progressive=True), ""
    yield "image/tiff", image("TIFF", "RGB", 9000, compression="tiff_adobe_deflate"), ""
    kind = "multipart/form-data; boundary=X"
    yield kind, multipart(*[image("PNG", "RGB", 3000)] * 20), ""
    yield kind, multipart(*[image("PNG", "RGB", 2)] * 5000), ""
    yield kind, filled(b"--X\r\n"), ""
    yield kind, filled(b"\r\n", b"--X\r\n"), ""
    yield kind, filled(b"a: b\r\n", b"--X\r\n"), ""
    yield kind, filled(b"--X\r\ncontent-type: multipart/mixed; boundary=X\r\n\r\n"), ""
    nested = b"".join(
        b"--b%d\r\nContent-Type: multipart/mixed; boundary=b%d\r\n\r\n" % (i, i + 1) for i in range(18_000)
    )
    yield "multipart/form-data; boundary=b0", nested[:SIZE], ""
    for body, encoding in both(b"\n"):
        yield "image/png", body, encoding


def texts(key: str) -> Iterator[tuple[str, bytes, str]]:
    for part in (
        "\n",
        "a",
        " ",
        "a ",
        "Some words are here. ",
        "ﷺ",
        "é",
        "\t",
        "a\n",
        "x" * 250 + "\n",
        "a b c d e f g h i j k l\n",
        "A man. ",
        "\u96ea ",
        "\u96ea",
        "a%b ",
        "\ue000a",
        "a\u2060",
    ):
        for body, encoding in both(part.encode()):
            yield responses.TEXT, body, encoding
    for form in ("%d%%", "%x@", "{%d}", "[%d", "\u96ea%d", "a \u96ea%d", "A%d\u00a7", "\u96ea%da\u0301", "%d\u200d"):
        for join in (" ", ". ", ". A", "\n"):  # words, or sentences, that all differ
            yield responses.TEXT, numbered(form, join=join), ""
            yield JSON, numbered(form, f'{{"{key}":["', '"]}', '","' if join == "\n" else join), ""
    for part, head, tail in [
        (b'"a",', b'{"%b":[' % key.encode(), b'"a"]}'),
        (b"[],", b'{"%b":[' % key.encode(), b"[]]}"),
        (b"a ", b'{"%b":["' % key.encode(), b'"]}'),
        (b"[", b"", b""),
    ]:
        for body, encoding in both(part, head, tail):
            yield JSON, body, encoding


def tensors() -> Iterator[tuple[str, bytes, str]]:
    form = b'{"inputs":[{"name":"ids","shape":[%b],"datatype":"%b","data":['
    for shape, kind, part in [
        (b"500000", b"INT32", b"1,"),
        (b"2147483647", b"BYTES", b'"a",'),
        (b"250000", b"BYTES", b'"",'),
        (b"1,1", b"FP32", b"[],"),
        (b"1,1", b"FP32", b"[1],"),
        (b"1,1", b"FP32", b"1e300,"),
        (b"1,1", b"BYTES", b"[],"),
    ]:
        for body, encoding in both(part, form % (shape, kind), b"1]}]}"):
            yield JSON, body, encoding
    yield JSON, filled(b'{"name":"a"},', b'{"inputs":[],"outputs":[', b'{"name":"b"}]}'), ""
    yield JSON, numbered('{"name":"a%d","shape":[0],"datatype":"INT8","data":[]}', '{"inputs":[', "]}"), ""


BODIES: dict[str, Callable[[list[str]], Iterator[tuple[str, bytes, str]]]] = {
    CRITEO: rows,
    SHOP: rows,
    PHOTOS: lambda _: photos(),
    TEXTS: lambda _: texts("texts"),
    MT: lambda _: texts("sentences"),
}


def encoder(folder: Path) -> Path:
    """A tiny sentence encoder of random weights."""
    pytest.importorskip("torch", reason="needs the train extra")
    pytest.importorskip("transformers", reason="needs the test extra")
    from helpers.text_models import built

    return built(folder, 0)


@pytest.fixture(scope="module")
def handlers(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Handler]:
    made: dict[str, Handler] = {}

    def handler(name: str) -> Handler:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ZOO_HOME", str(home))
                model = name if name != TEXTS else str(encoder(tmp_path_factory.mktemp("texts")))
                made[name] = ServedModel(name, model, engine="native").handler()
        return made[name]

    return handler


def memory(field: str) -> float:
    """Memory of this process in MB: VmRSS, or VmHWM, the most of it."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) / 1e3


def measured(handler: Handler, job: Job, encoding: str) -> tuple[float, float, str]:
    """Seconds of the CPU and MB that parsing takes beyond the body itself, and what is said."""
    said = "parsed"
    body = decompress(job.body, MAX_BODY) if encoding else job.body
    before, begin = memory("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")
    job = job._replace(body=body, received=len(job.body) if encoding else 0)
    try:
        if job.verb == RANK:
            (answer,) = handler.run([job])
            assert answer.status in (200, 400, 413), answer.body
            said = "ranked" if answer.status == 200 else answer.body.decode()
        elif hasattr(handler, "_parse_request") and job.verb == RUN:
            handler._parse_request(job)
        else:
            parsed = handler._parse(job)
            if parsed.error is not None:
                assert parsed.error.status in (400, 413, 422), parsed.error.body
                said = parsed.error.body.decode()
    except RequestError as error:
        said = str(error)
    return time.process_time() - begin, memory("VmHWM") - before, said


def held(handler: Handler, verb: str, kind: str, body: bytes, encoding: str) -> str:
    """What is said of a body, which keeps the budget."""
    if len(body) > SIZE:  # it is not small
        return ""
    seconds, megabytes, said = measured(handler, Job(1, verb, kind, "", {}, -1, body), encoding)
    about = f"{kind} {body[:60]!r} {encoding} ({len(body):,} bytes): {seconds:.2f} s, {megabytes:.0f} MB, {said[:120]}"
    print(about)
    return "" if seconds < SECONDS and megabytes < MEGABYTES and len(said) < 1000 else about


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_small_bodies_keep_the_budget(handlers: Callable[[str], Handler], name: str) -> None:
    handler = handlers(name)
    names: list[str] = []
    if BODIES[name] is rows:
        features = handler.pipeline.features  # type: ignore[attr-defined]
        names = [column.name for column in features.schema.columns if column.kind not in ("label", "weight")]
    bodies = ((RUN, *body) for body in BODIES[name](names))
    wrong = [about for body in bodies if (about := held(handler, *body))]
    assert not wrong, "\n".join(wrong)


def text_apis() -> Iterator[tuple[str, str, bytes, str]]:
    """Bodies of OpenAI's, text-embeddings-inference's and Cohere's APIs."""
    for verb, head, tail in (
        (EMBEDDINGS, b'{"input": "', b'"}'),
        (EMBEDDINGS, b'{"chunk": 80, "stride": 40, "input": "', b'"}'),
        (EMBEDDINGS, b'{"input": ["a", "b"], "prompt": "', b'"}'),
        (TOKENIZE, b'{"inputs": "', b'"}'),
    ):
        for part in (b"a", b"a ", "\u96ea".encode()):
            yield from ((verb, JSON, *body) for body in both(part, head, tail))
    for verb, head, part, tail in (
        (EMBEDDINGS, b'{"input": [', b'"a b c",', b'"a"]}'),
        (EMBEDDINGS, b'{"prompt": "' + b"a " * 200_000 + b'", "input": [', b'"a",', b'"a"]}'),
        (EMBEDDINGS, b'{"chunk": 20, "stride": 17, "input": [', b'"' + b"a b c " * 800 + b'",', b'"a"]}'),
        (EMBEDDINGS, b'{"input": [', b"[2, 5, 3],", b"[2, 5, 3]]}"),
        (TOKENIZE, b'{"inputs": [', b'"' + b"a b " * 4000 + b'",', b'"a"]}'),
        (TOKENIZE, b'{"inputs": [', b'"a",', b'"a"]}'),
        (DECODE, b'{"ids": [', b"5,", b"5]}"),
        (DECODE, b'{"ids": [', b"[5],", b"[5]]}"),
        (COHERE_EMBED, b'{"texts": [', b'"a b c",', b'"a"]}'),
    ):
        yield from ((verb, JSON, *body) for body in both(part, head, tail))


@pytest.mark.slow
def test_small_bodies_of_text_apis_keep_the_budget(handlers: Callable[[str], Handler]) -> None:
    wrong = [about for body in text_apis() if (about := held(handlers(TEXTS), *body))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_small_rankings_keep_the_budget(handlers: Callable[[str], Handler], tmp_path: Path) -> None:
    pipeline: Any = handlers(SHOP).pipeline
    row = pipeline.example(1)[0]
    sides = [
        json.dumps({column.name: row[column.name] for column in side.features.schema.columns})
        for side in (pipeline.sides.user, pipeline.sides.item)
    ]
    items = tmp_path / "items.jsonl"
    items.write_text(sides[1] + "\n")
    handler = ServedModel(SHOP, SHOP, engine="native", items=items).handler()
    wrong = [about for body in rankings(*sides) if (about := held(handler, RANK, *body))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_small_tensors_keep_the_budget(handlers: Callable[[str], Handler]) -> None:
    wrong = [about for body in tensors() if (about := held(handlers(CRITEO), INFER, *body))]
    assert not wrong, "\n".join(wrong)
