"""HTTP server on granian with worker processes, signal handling and file watching."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipelines.core.errors import RequestError, ZooError
from zoo.serving.config import Settings
from zoo.serving.workers import forkserver
from zoo.serving.workers.channel import packed, taken
from zoo.serving.workers.dispatcher import Dispatcher
from zoo.serving.workers.model_loader import Opening

BACKLOG = 4096
INTERVAL = 0.5  # seconds between two looks at the files that are watched
HEAD_MS = 10_000  # in which a client must send the head of a request
RARELY = 20_000  # objects more than before, after which unreachable cycles are looked for: requests hardly make any

logger = logging.getLogger(__name__)


def serve(settings: Settings, openings: Sequence[Opening]) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        settings: Configuration of the server.
        openings: Models to serve.

    Raises:
        RequestError: The server cannot start with this configuration.
        ZooError: A model cannot be opened.
    """
    settings = replace(settings, port=_free_port(settings.host, settings.port))
    if not settings.local and not settings.api_keys:
        logger.warning("everyone who reaches %s may use it: there is no --api-key-file", settings.url)
    channel = forkserver.start(openings)
    import uvloop  # only now: no thread may run before the keeper is there

    gc.freeze()  # modules and settings: no collection looks at them again
    gc.set_threshold(RARELY)
    with contextlib.closing(channel):
        uvloop.run(_Server(settings, openings, channel).run())


class _Server:
    def __init__(self, settings: Settings, openings: Sequence[Opening], channel: socket.socket) -> None:
        self.settings, self.openings = settings, openings
        self._keeper = channel
        self._loaded: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self._end = asyncio.Event()
        self._problem: ZooError | None = None

    async def run(self) -> None:
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.server.embed import Server

        from zoo.serving.http.router import Front
        from zoo.serving.http.rsgi import Application

        settings, loop = self.settings, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end.set)
        names = [each.name for each in self.openings]
        self.dispatcher = Dispatcher(
            names, settings.workers, settings.max_batch, settings.queue, self._fork, self._failed
        )
        front = Front(settings, names, self.dispatcher)
        http = Server(
            Application(front),
            address=settings.host,
            port=settings.port,
            interface=Interfaces.RSGI,
            http=HTTPModes.auto,
            websockets=False,
            backlog=BACKLOG,
            backpressure=BACKLOG,
            http1_settings=HTTP1Settings(header_read_timeout=HEAD_MS),
            log_enabled=False,
            ssl_cert=settings.certfile,
            ssl_key=settings.keyfile,
        )
        self._keeper.setblocking(False)
        reading = loop.create_task(self._listen())
        opening = loop.create_task(self._open())
        watching = loop.create_task(self._watch())
        serving = loop.create_task(http.serve())
        ending = loop.create_task(self._end.wait())
        try:
            await asyncio.wait([opening, ending, serving], return_when=asyncio.FIRST_COMPLETED)
            if opening.done() and not self._end.is_set():
                await opening
                click.echo(f"zoo: {', '.join(names)} at {settings.url}", err=True)
            await asyncio.wait([ending, serving], return_when=asyncio.FIRST_COMPLETED)
            front.closing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.grace):
                    http.stop()
                    await serving
                    await self.dispatcher.drained()
        finally:
            self.dispatcher.close()
            front.log.close(1.0)
            for task in (reading, opening, watching, ending):
                task.cancel()
        if self._problem is not None:
            raise self._problem

    async def _open(self) -> None:
        what, *more = await self._loaded.get()
        if what == forkserver.FAILED:
            self._failed(*more)
            return
        await self.dispatcher.start()
        while not self.dispatcher.ready:
            await asyncio.sleep(0.005)

    async def _watch(self) -> None:
        """Switch to a model's new int8.onnx, as soon as it has lain there unchanged for a while."""
        if not self.settings.watch:
            return
        places = {each.name: _file(each.model) for each in self.openings}
        known = seen = {name: _stamp(path) for name, path in places.items()}
        while True:
            await asyncio.sleep(INTERVAL)
            now = {name: _stamp(path) for name, path in places.items()}
            fresh = [name for name in now if now[name] is not None and now[name] == seen[name] != known[name]]
            seen = now
            if not fresh or not self.dispatcher.ready:
                continue
            known = now
            self._tell_keeper((forkserver.LOAD, fresh))
            what, *more = await self._loaded.get()
            if what == forkserver.FAILED:
                logger.warning("the new files of %s are not served: %s", ", ".join(fresh), more[0])
            else:
                await self.dispatcher.start()
                logger.warning("the new files of %s are served", ", ".join(fresh))

    def _tell_keeper(self, message: tuple[Any, ...]) -> None:
        self._keeper.sendall(b"\0" + packed(message))

    def _failed(self, text: str, code: int) -> None:
        self._problem = RequestError(text) if code == RequestError.exit_code else ZooError(text)
        self._end.set()

    def _fork(self, theirs: socket.socket, index: int) -> None:
        socket.send_fds(self._keeper, [b"\0"], [theirs.fileno()])
        self._keeper.sendall(packed((forkserver.FORK, _cpus(index, self.settings.threads))))

    async def _listen(self) -> None:
        """What the keeper says."""
        loop, buffer = asyncio.get_running_loop(), bytearray()
        while data := await loop.sock_recv(self._keeper, 1 << 16):
            buffer += data
            for message in taken(buffer):
                self._loaded.put_nowait(message)
        if not self._end.is_set():
            self._failed("the process that opens the models died; see the log of the system", 1)


def _file(model: str) -> Path:
    """The file of a model that is watched."""
    import zoo

    return (Path(model) if Path(model).is_dir() else zoo.hub().folder(model)) / "int8.onnx"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _cpus(index: int, threads: int) -> set[int]:
    """The processors of a worker: so many as it has threads, the workers side by side."""
    have = sorted(os.sched_getaffinity(0))
    if threads >= len(have):
        return set(have)
    return {have[(index * threads + i) % len(have)] for i in range(threads)}


def _free_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises RequestError where another program listens there, or for another host."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise RequestError(
            f"cannot listen at {host} port {port}: {error.strerror or error}; choose another --host or --port"
        ) from error
