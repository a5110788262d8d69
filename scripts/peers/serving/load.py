"""Requests at a rate, by clients or one by one; as a script the same work in a process, without a server.

python scripts/peers/serving/load.py run|alone|texts MODEL FILE
"""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import zoo

CONNECTIONS = 32  # of requests at a rate


class Request(NamedTuple):
    """A POST request.

    Attributes:
        path: Path.
        kind: Content type of the body.
        body: Body.
        accept: Content type of the response.
    """

    path: str
    kind: str
    body: bytes
    accept: str = "*/*"

    def message(self, *headers: str, length: int | None = None) -> bytes:
        """Returns the bytes of the request; `length` is stated in place of the body's."""
        size = len(self.body) if length is None else length
        lines = [f"POST {self.path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {self.kind}"]
        lines += [f"Accept: {self.accept}", *headers, f"Content-Length: {size}", "", ""]
        return "\r\n".join(lines).encode() + self.body


def ask(port: int, request: Request) -> tuple[int, bytes]:
    """Returns status and body of the response to one request.

    Raises:
        OSError: There is no response.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", request.path, request.body, {"content-type": request.kind})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(str(error)) from error
    finally:
        connection.close()


def repeat(port: int, request: Request, count: int) -> None:
    """Sends a request again and again on one connection.

    Raises:
        ConnectionError: The status of a response is not 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        for _ in range(count):
            connection.request("POST", request.path, request.body, {"content-type": request.kind})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise ConnectionError(f"found status {answer.status}, expected 200: {content[:200]!r}")
    finally:
        connection.close()


def status(port: int, request: Request) -> int:
    """Returns the status of the response to one request, 0 where there is none."""
    try:
        return ask(port, request)[0]
    except OSError:
        return 0


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    """Sends a request; returns status and body of the response."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    start = head.index(b"content-length:") + 15
    return int(head[9:12]), await reader.readexactly(int(head[start : head.index(b"\r\n", start)]))


async def _request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    status, _ = await exchange(reader, writer, request)
    if status != 200:
        raise ConnectionError(f"found status {status}, expected 200")


def _percentiles(seconds: list[float], took: float) -> dict[str, float]:
    p50, p99 = np.percentile(seconds, [50, 99]).tolist()
    return {"rate": len(seconds) / took, "p50": 1e3 * p50, "p99": 1e3 * p99}


def at_rate(port: int, request: Request, rate: float, seconds: float, core: int, even: bool = True) -> dict[str, float]:
    """Sends requests by the clock, whether earlier ones are answered or not.

    Args:
        port: Port of the server.
        request: The request.
        rate: Requests/s.
        seconds: Duration.
        core: Core of the clients.
        even: Requests start at equal distances; else at those of a Poisson process.

    Returns:
        {"rate", "p50", "p99"}: responses/s, and milliseconds from the time when each request was due.
    """
    count = int(rate * seconds)
    apart = np.full(count, 1 / rate) if even else np.random.default_rng(1).exponential(1 / rate, count)
    starts = np.cumsum(apart).tolist()
    message, latencies = request.message(), []

    async def client(queue: asyncio.Queue[float], begin: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (due := await queue.get()) >= 0:
            await _request(reader, writer, message)
            latencies.append(time.perf_counter() - begin - due)
        writer.close()

    async def main() -> float:
        queue: asyncio.Queue[float] = asyncio.Queue()
        begin = time.perf_counter() + 0.1
        clients = [asyncio.create_task(client(queue, begin)) for _ in range(CONNECTIONS)]
        for due in starts:
            if (wait := begin + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            queue.put_nowait(due)
        for _ in clients:
            queue.put_nowait(-1.0)
        await asyncio.gather(*clients)
        return time.perf_counter() - begin

    os.sched_setaffinity(0, {core})
    took = asyncio.run(main())
    return _percentiles(latencies, took)


def clients(port: int, requests: Sequence[Request], count: int, seconds: float, core: int) -> dict[str, float]:
    """Runs `count` clients that each send the next request as soon as the last is answered.

    Args:
        port: Port of the server.
        requests: The requests; client i begins with the i-th and takes every `count`-th.
        count: Number of clients.
        seconds: Duration.
        core: Core of the clients.

    Returns:
        {"rate", "p50", "p99"}: responses/s, and milliseconds.
    """
    messages, latencies = [request.message() for request in requests], []

    async def client(first: int, end: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        index = first
        while (begin := time.perf_counter()) < end:
            await _request(reader, writer, messages[index % len(messages)])
            latencies.append(time.perf_counter() - begin)
            index += count
        writer.close()

    async def main() -> float:
        begin = time.perf_counter()
        await asyncio.gather(*(client(first, begin + seconds) for first in range(count)))
        return time.perf_counter() - begin

    os.sched_setaffinity(0, {core})
    took = asyncio.run(main())
    return _percentiles(latencies, took)


def alone(port: int, request: Request, seconds: float, core: int) -> float:
    """Returns the median milliseconds of requests one after the other on one connection."""
    os.sched_setaffinity(0, {core})
    message, latencies, end = request.message(), [], time.perf_counter() + seconds
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (begin := time.perf_counter()) < end:
            connection.sendall(message)
            got = connection.recv(65536)
            while not _whole(got):
                got += connection.recv(65536)
            latencies.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(latencies))


def _whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    lower = head.lower()
    if b"content-length:" not in lower:
        return False
    return len(body) >= int(lower.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])


def photo() -> bytes:
    """Returns a JPEG of 299 x 299 pixels: smooth colours with noise."""
    import io

    from PIL import Image

    noise = np.random.default_rng(5).integers(0, 256, (20, 20, 3), np.uint8)
    image, data = Image.fromarray(noise).resize((299, 299), Image.Resampling.BICUBIC), io.BytesIO()
    image.save(data, "JPEG", quality=90)
    return data.getvalue()


# ------------------------------------------------------------------------------------------------------- in a process


def _median_ms(call: Any, count: int = 300) -> float:
    for _ in range(20):
        call()
    latencies = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        latencies.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(latencies))


def main() -> None:
    """Measures what the arguments name, and prints the figures."""
    verb, name, file = sys.argv[1:]
    engine = "native" if name != "mobilenet-v2-imagenet" else "auto"
    model = zoo.pipeline(name, engine=engine, threads=1)
    if verb == "run":
        with tempfile.TemporaryDirectory() as scratch:
            model.run(file, Path(scratch) / "warm.csv")
            print(model.run(file, Path(scratch) / "out.csv")["rows_per_second"])
    elif verb == "alone":
        body = Path(file).read_bytes()
        raw: Any = [body.rstrip(b"\n")] if name == "wide-deep-criteo" else body
        print(_median_ms(lambda: model(raw)))
    else:
        texts = Path(file).read_text().splitlines()
        model(texts[:64])
        begin = time.perf_counter()
        model(texts)
        rate = len(texts) / (time.perf_counter() - begin)
        print(rate, _median_ms(lambda: model(texts[:1]), 100))


if __name__ == "__main__":
    main()
