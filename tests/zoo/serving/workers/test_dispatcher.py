"""Who gets a request, and what becomes of it: workers here are the ends of their channels, which tests speak for."""

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipelines.core.errors import ZooError
from zoo.serving.config import ServerConfig
from zoo.serving.http import asgi
from zoo.serving.http.http_types import Response
from zoo.serving.http.request_context import RequestContext
from zoo.serving.workers import dispatcher, worker, worker_connection
from zoo.serving.workers.channel import Job, JobResult, pack, unpack
from zoo.serving.workers.dispatcher import Dispatcher
from zoo.serving.workers.model_loader import ServedModel

ROWS, TEXTS = "rows", "texts"
MODELS = [
    {"name": ROWS, "version": "1", "streams": False, "gathers": 64},
    {"name": TEXTS, "version": "1", "streams": True, "gathers": 1},
]


class Ends:
    """The workers' ends of the channels."""

    def __init__(self) -> None:
        self.channels: list[socket.socket] = []
        self.failed: list[str] = []

    def fork(self, theirs: socket.socket, index: int) -> None:
        self.channels.append(theirs.dup())
        self.channels[-1].setblocking(False)

    def say(self, i: int, what: str, *message: Any) -> None:
        plain = [
            [tuple(part) for part in field] if isinstance(field, list) and what == worker.RESULTS else field
            for field in message
        ]
        self.channels[i].sendall(pack((what, *plain)))

    def told(self, i: int) -> list[Any]:
        """The messages that a worker has got since."""
        buffer = bytearray()
        with contextlib.suppress(BlockingIOError):
            while data := self.channels[i].recv(1 << 16):
                buffer += data
        return unpack(buffer)

    def numbers(self, i: int) -> list[int]:
        """The requests that it has got since."""
        return [job[0] for what, *more in self.told(i) if what == worker.JOBS for job in more[1]]


@contextlib.asynccontextmanager
async def dispatched(workers: int = 1, max_batch: int = 2) -> AsyncIterator[tuple[Dispatcher, Ends]]:
    """Workers that are ready."""
    ends = Ends()
    pool = Dispatcher([ROWS, TEXTS], workers, max_batch, 64, ends.fork, lambda text, code: ends.failed.append(text))
    await pool.start()
    for i in range(workers):
        ends.say(i, worker.READY, 100 + i, MODELS)
    await settled()
    yield pool, ends
    pool.close()
    await settled()
    for channel in ends.channels:
        channel.close()


async def settled() -> None:
    """What was written has come, and was answered."""
    for _ in range(10):
        await asyncio.sleep(0.001)


def job() -> Job:
    return Job(0, "run", "text/plain", "", {}, -1, b"x")


def nothing(answer: JobResult) -> None:
    """Takes an answer."""


def test_an_answered_request_is_freed_without_garbage_collection() -> None:
    async def run() -> None:
        async with dispatched() as (pool, ends):
            context = RequestContext(pool, cast(Any, None), 60, 60)
            pending = pool.submit(TEXTS, job(), context.deliver)
            ends.say(0, worker.RESULTS, [JobResult(1, 200, "text/plain", b"y")])
            assert (await context.result(pending)).body == b"y"
            context.close()
            del context, pending
            assert not any(isinstance(item, RequestContext) for item in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_what_nobody_waits_for_leaves_its_place_to_others() -> None:
    async def run() -> None:
        async with dispatched() as (pool, ends):
            first = [pool.submit(TEXTS, job(), nothing) for _ in range(3)]
            await settled()
            assert ends.numbers(0) == [1, 2]
            pool.cancel(first[0])
            await settled()
            assert ends.told(0) == [(worker.CANCEL, 1), (worker.JOBS, TEXTS, [first[2].job])]
            for pending in first[1:]:
                pool.cancel(pending)
            assert pool.state()["working"] == 0
            await asyncio.wait_for(pool.drained(), 1)

    asyncio.run(run())


def test_a_worker_that_still_computes_a_dropped_job_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(worker_connection, "DROPPED_SECONDS", 0.05)
    monkeypatch.setattr(worker_connection, "kill", killed.append)

    async def run() -> None:
        async with dispatched(workers=3) as (pool, ends):
            jobs = [pool.submit(name, job(), nothing) for name in (ROWS, TEXTS, ROWS)]
            await settled()
            for pending in jobs:
                pool.cancel(pending)
            ends.say(1, worker.CANCELED, 2)  # the others say nothing
            await asyncio.sleep(0.1)
            assert sorted(killed) == [100, 102]

    asyncio.run(run())


def test_an_old_worker_ends_when_the_last_client_of_its_stream_has_left() -> None:
    async def run() -> None:
        async with dispatched() as (pool, ends):
            pending = pool.submit(TEXTS, job(), nothing)
            await pool.start()
            ends.say(1, worker.READY, 200, MODELS)
            await settled()
            assert len(pool.workers) == 2
            pool.cancel(pending)
            await settled()
            assert [process.pid for process in pool.workers] == [200]

    asyncio.run(run())


def test_an_old_worker_that_dies_is_not_replaced_where_newer_ones_open() -> None:
    async def run() -> None:
        async with dispatched(workers=2) as (pool, ends):
            assert not pool.replaces  # workers that replace others start at a low priority
            await pool.start()
            assert pool.replaces
            ends.channels[0].close()
            await settled()
            for i in (2, 3):
                ends.say(i, worker.READY, 200 + i, MODELS)
            await settled()
            assert sorted(process.pid for process in pool.workers) == [202, 203] and len(ends.channels) == 4

    asyncio.run(run())


def test_rows_do_not_wait_for_streams_but_for_rows() -> None:
    async def run() -> None:
        async with dispatched() as (pool, ends):
            for _ in range(4):
                pool.submit(TEXTS, job(), nothing)
            rows = [pool.submit(ROWS, job(), nothing) for _ in range(3)]
            await settled()
            assert ends.numbers(0) == [1, 2, 5]  # the first row at once, beside a full stream
            ends.say(0, worker.RESULTS, [JobResult(5, 200, "", b"")])
            await settled()
            assert rows[0].done and ends.numbers(0) == [6, 7]  # what gathered meanwhile, together
            ends.say(0, worker.RESULTS, [JobResult(1, 200, "", b"")])
            await settled()
            assert pool.submit(TEXTS, job(), nothing).connection is None
            assert ends.numbers(0) == [3]  # what waits goes before who comes

    asyncio.run(run())


def test_streams_are_shared_out_among_the_workers() -> None:
    async def run() -> None:
        async with dispatched(workers=2, max_batch=64) as (pool, ends):
            for _ in range(4):
                pool.submit(TEXTS, job(), nothing)
            await settled()
            assert (ends.numbers(0), ends.numbers(1)) == ([1, 3], [2, 4])

    asyncio.run(run())


def test_a_request_whose_workers_died_twice_or_amid_its_answer_is_told() -> None:
    async def run() -> None:
        async with dispatched() as (pool, ends):
            answers: dict[str, list[JobResult]] = {"row": [], "text": []}
            pool.submit(ROWS, job(), answers["row"].append)
            pool.submit(TEXTS, job(), answers["text"].append)
            ends.say(0, worker.RESULTS, [JobResult(2, 200, "", b"a line\n", last=False)])
            await settled()
            ends.channels[0].close()
            await settled()
            assert [answer.status for answer in answers["text"]] == [200, 503] and answers["text"][1].last
            ends.say(1, worker.READY, 300, MODELS)
            await settled()
            assert ends.numbers(1) == [1] and not answers["row"]
            ends.channels[1].close()
            await settled()
            assert [answer.status for answer in answers["row"]] == [503]
            assert pool.state()["working"] == 0

    asyncio.run(run())


def test_workers_that_die_while_they_open_are_replaced_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "RESTART_SECONDS", 0.02)

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not true():
                await asyncio.sleep(0.001)

    async def run() -> None:
        ends, loop, times = Ends(), asyncio.get_running_loop(), []
        pool = Dispatcher([ROWS], 1, 2, 64, ends.fork, lambda text, code: ends.failed.append(text))
        await pool.start()
        for i in range(dispatcher.MAX_START_FAILURES):
            await until(lambda i=i: len(ends.channels) > i)
            times.append(loop.time())
            ends.channels[i].close()
        await until(lambda: bool(ends.failed))
        assert "5 workers in a row died" in ends.failed[0]
        assert times[-1] - times[-2] > 2 * (times[2] - times[1]) > 0.02
        await asyncio.sleep(0.1)
        assert len(ends.channels) == dispatcher.MAX_START_FAILURES  # given up
        pool.close()

    asyncio.run(run())


def test_a_server_that_was_ready_waits_until_its_files_can_be_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "RESTART_SECONDS", 0.0001)

    async def run() -> None:
        async with dispatched() as (pool, ends):
            for i in range(dispatcher.MAX_START_FAILURES + 2):
                ends.channels[i].close()
                async with asyncio.timeout(5):
                    while len(ends.channels) < i + 2:
                        await asyncio.sleep(0.001)
            assert not ends.failed and not pool.ready
            ends.say(len(ends.channels) - 1, worker.READY, 400, MODELS)
            await settled()
            assert pool.ready

    asyncio.run(run())


def test_a_worker_that_cannot_open_what_others_could_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "RESTART_SECONDS", 0.001)

    async def run() -> None:
        async with dispatched(workers=2) as (pool, ends):
            ends.channels[0].close()
            await settled()
            ends.say(2, worker.LOAD_FAILED, "no memory", 1)
            ends.channels[2].close()
            await settled()
            assert len(ends.channels) == 4 and not ends.failed
            ends.say(3, worker.READY, 400, MODELS)
            await settled()
            assert pool.state()["workers"] == 2

    asyncio.run(run())


@dataclass
class Shaky:
    """A model that cannot be opened by the worker that takes one of `faults`; the others open it once `may_open`."""

    name: str
    faults: list[ZooError]
    may_open: threading.Event

    def handler(self) -> Any:
        if self.faults:
            raise self.faults.pop()
        self.may_open.wait()
        return SimpleNamespace(describe=lambda: MODELS[0], connect=lambda handlers: None)


def test_an_application_that_could_not_open_its_models_opens_them_later_and_leaves_no_worker_behind() -> None:
    def workers() -> int:
        return sum(thread.name.startswith("zoo-worker") for thread in threading.enumerate())

    async def until(count: int) -> None:
        async with asyncio.timeout(5):
            while workers() != count:
                await asyncio.sleep(0.001)

    async def run() -> None:
        model = Shaky(ROWS, [ZooError("no network")], threading.Event())
        application = asgi.Application([cast(ServedModel, model)], ServerConfig(workers=2))
        with pytest.raises(ZooError, match="no network"):
            await application.start()
        model.may_open.set()
        await until(0)  # the other worker, which opens it now, ends
        assert await application.start() is await application.start()
        await until(2)
        await application.close()
        await until(0)

    asyncio.run(run())


def test_a_stream_ends_where_its_client_left_before_it_began() -> None:
    from granian.rsgi import ProtocolClosed

    from zoo.serving.http import rsgi

    ended: list[str] = []

    async def pieces(server: str) -> AsyncIterator[bytes]:
        try:
            yield b"a line"
            yield b"another"
        finally:
            ended.append(server)

    class Left:
        """A router's response, and a client that is gone."""

        proto, method, path = "http", "POST", "/"
        headers = SimpleNamespace(get=lambda name: None, get_all=lambda name: [])

        async def handle(self, request: Any) -> Response:
            return Response(200, "application/x-ndjson", b"", (), pieces("rsgi"))

        def response_stream(self, status: int, headers: Any) -> Any:
            raise ProtocolClosed

    async def send(message: Any) -> None:
        raise OSError("the client left")

    async def run() -> None:
        left = Left()
        await rsgi.Application(left).__rsgi__(left, left)
        with contextlib.suppress(OSError):
            await asgi._send(Response(200, "application/x-ndjson", b"", (), pieces("asgi")), send, head=False)

    asyncio.run(run())
    assert ended == ["rsgi", "asgi"]
