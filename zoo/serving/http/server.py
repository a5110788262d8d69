"""HTTP server on granian with worker processes, signal handling and file watching."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipelines.core import machine
from pipelines.core.errors import RequestError, ZooError, error_of_process
from pipelines.core.files import is_onnx
from pipelines.models.pipeline import PRECISIONS
from zoo.registry import hub
from zoo.serving.config import ServerConfig
from zoo.serving.deltas import updater
from zoo.serving.workers import forkserver
from zoo.serving.workers.channel import pack, unpack
from zoo.serving.workers.dispatcher import Dispatcher
from zoo.serving.workers.model_loader import ServedModel

if TYPE_CHECKING:
    from zoo.serving.http.router import Router

BACKLOG, TLS_BACKLOG = 4096, 512  # clients that wait for a free connection
MAX_CONNECTIONS = 16_384
MIN_CONNECTIONS = 8
FEW_CONNECTIONS = 1000  # below it, idle connections are closed sooner
SPARE_FILES = 20  # open files of the server beside connections and workers
WATCH_SECONDS = 0.5  # interval at which `--watch` checks the files, and at which a TLS server checks for a free file
# for receiving the headers of a request, from accept or from the response before: also closes idle connections
HEADER_TIMEOUT_MS, SHORT_HEADER_TIMEOUT_MS = 10_000, 4_000
HANDSHAKE_SECONDS = 10.0  # after which granian ends a TLS handshake
RESCUE_FILES = 2 * TLS_BACKLOG  # open files that a TLS server keeps free
QUIET_SECONDS = 0.1  # without a request, after which a server that ends closes its connections
LAST_REQUESTS_SECONDS = 2.0  # at most, in which it answers requests of connections that were accepted
ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux
RETURN_NOTHING = (6, 0, 0, 0)  # an instruction of a filter (BPF): drop the packet
GC_THRESHOLD = 20_000  # allocations between two garbage collections; requests create hardly any reference cycles

logger = logging.getLogger(__name__)


def serve(config: ServerConfig, models: Sequence[ServedModel]) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        config: Configuration of the server.
        models: Models to serve.

    Raises:
        RequestError: The server cannot start with this configuration.
        ZooError: A model cannot be loaded.
    """
    host, port = _address(config.host, config.port)
    config = replace(config, host=host, port=port)
    connections = _max_connections(config.workers, config.certfile is not None)
    if not config.is_local and not config.api_keys:
        logger.warning("%s accepts requests without authentication; restrict it with --api-key-file", config.url)
    channel, pid = forkserver.start(models)
    updates, updater_pid = updater.start(models, config.deltas) if config.deltas else (None, 0)
    import uvloop  # after the fork: no thread may run before it

    gc.freeze()  # objects that exist now are not collected
    gc.set_threshold(GC_THRESHOLD)
    try:
        with contextlib.closing(channel), contextlib.closing(updates) if updates else contextlib.nullcontext():
            uvloop.run(_Server(config, models, channel, updates, connections).run())
    finally:  # requests that the grace time did not suffice for end with their workers
        forkserver.end(pid)
        if updater_pid:
            forkserver.end(updater_pid)


class _Server:
    def __init__(
        self,
        config: ServerConfig,
        models: Sequence[ServedModel],
        channel: socket.socket,
        updates: socket.socket | None,
        connections: int,
    ) -> None:
        self.config, self.models = config, models
        self._cpus = machine.processors().order  # read once: workers are forked on the event loop
        self._forkserver, self._connections = channel, connections
        self._updates = updates
        self._messages: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()  # of the fork server
        self._versions: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()  # of the updater; None at its end
        self._end = asyncio.Event()
        self._error: ZooError | None = None

    async def run(self) -> None:
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.server.embed import Server

        from zoo.serving.http.router import Router
        from zoo.serving.http.rsgi import Application

        config, loop = self.config, asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end.set)
        names = [model.name for model in self.models]
        self.dispatcher = Dispatcher(names, config.workers, config.max_batch, config.queue, self._fork, self._fail)
        router = Router(config, names, self.dispatcher)
        http = Server(
            Application(router),
            address=config.host,
            port=config.port,
            interface=Interfaces.RSGI,
            http=HTTPModes.http1,  # HTTP/2 connections have no idle timeout, nor has the detection of the version
            websockets=False,
            backlog=BACKLOG if config.certfile is None else TLS_BACKLOG,
            backpressure=self._connections,
            http1_settings=HTTP1Settings(
                header_read_timeout=(
                    HEADER_TIMEOUT_MS if self._connections >= FEW_CONNECTIONS else SHORT_HEADER_TIMEOUT_MS
                )
            ),
            log_enabled=False,
            ssl_cert=config.certfile,
            ssl_key=config.keyfile,
        )
        for channel in (self._forkserver, self._updates):
            if channel is not None:
                channel.setblocking(False)
        receiving = loop.create_task(self._receive())
        loading = loop.create_task(self._load())
        watching = loop.create_task(self._watch())
        updating = loop.create_task(self._update(loading))
        versions = loop.create_task(self._receive_versions())
        rescuing = loop.create_task(self._rescue_handshakes())
        serving = loop.create_task(http.serve())
        ending = loop.create_task(self._end.wait())
        try:
            await asyncio.wait([loading, ending, serving], return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not self._end.is_set():
                await loading
                click.echo(f"zoo: {', '.join(names)} at {config.url}", err=True)
            await asyncio.wait([ending, serving], return_when=asyncio.FIRST_COMPLETED)
            router.closing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.grace):
                    await self._answer_last_requests(router)
                    http.stop()
                    await serving
                    await self.dispatcher.drained()
        finally:
            self.dispatcher.close()
            router.access_log.close(1.0)
            for task in (receiving, loading, watching, updating, versions, rescuing, ending):
                task.cancel()
        if self._error is not None:
            raise self._error

    async def _answer_last_requests(self, router: Router) -> None:
        """Accepts no more connections, and waits until the open ones send no more requests.

        Granian stops by closing the connections of which it has not yet read a request, sent or not. Responses close
        their connections meanwhile.
        """
        _stop_accepting(self.config.port)
        for _ in range(round(LAST_REQUESTS_SECONDS / QUIET_SECONDS)):
            before = router.requests
            await asyncio.sleep(QUIET_SECONDS)
            if router.requests == before:
                return

    async def _load(self) -> None:
        kind, *content = await self._messages.get()
        if kind == forkserver.FAILED:
            self._fail(*content)
            return
        for _ in self.config.deltas:
            if (version := await self._next_version()) is None:
                return
            await self._report(await self._load_version(*version[:4]))
        await self.dispatcher.start()
        while not self.dispatcher.ready:
            await asyncio.sleep(0.005)

    async def _watch(self) -> None:
        """Reloads models when their graph has changed and was the same in two checks."""
        if not self.config.watch:
            return
        files = {model.name: _watched_files(model) for model in self.models}
        started: dict[int, str] = {}  # names of the models of generations that were started and were not ready yet
        loaded = seen = {name: _file_versions(paths) for name, paths in files.items()}
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for generation in [number for number in started if number <= self.dispatcher.ready_generation]:
                logger.warning("the new files of %s are served", started.pop(generation))
            now = {name: _file_versions(paths) for name, paths in files.items()}
            changed = [name for name in now if now[name] is not None and now[name] == seen[name] != loaded[name]]
            seen = now
            if not changed or not self.dispatcher.ready:
                continue
            loaded = now
            self._forkserver.sendall(b"\0" + pack((forkserver.LOAD, changed)))
            kind, *content = await self._messages.get()
            if kind == forkserver.FAILED:
                logger.warning("the new files of %s are not served: %s", ", ".join(changed), content[0])
            else:
                started[await self.dispatcher.start()] = ", ".join(changed)

    async def _update(self, loading: asyncio.Task[None]) -> None:
        """Serves the versions of the updater, see `zoo.serving.deltas`."""
        await asyncio.wait([loading])
        while self._updates is not None and (version := await self._next_version()) is not None:
            fault = await self._load_version(*version[:4])
            if not fault:
                await self.dispatcher.retired(await self.dispatcher.start())
                logger.warning("%s: version %s is served; %s", version[0], *version[3:])
            await self._report(fault)

    async def _next_version(self) -> tuple[str, str, str, str, str] | None:
        """Returns (name, folder, engine, version, changes) of the next version of a model; None at the end."""
        assert self._updates is not None
        if (message := await self._versions.get()) is None:
            if not self._end.is_set():
                logger.warning("the process that applies deltas died; see the log of the system")
            return None
        kind, *content = message
        if kind == updater.FAILED:
            self._fail(*content)
            return None
        name, place, engine, version, changes = content
        return name, place, engine, version, changes

    async def _load_version(self, name: str, place: str, engine: str, version: str) -> str:
        """Loads a version in the fork server; returns why it cannot be loaded, or ""."""
        self._forkserver.sendall(b"\0" + pack((forkserver.VERSION, name, place, engine, version)))
        kind, *content = await self._messages.get()
        return str(content[0]) if kind == forkserver.FAILED else ""

    async def _report(self, fault: str) -> None:
        """Reports to the updater that a version is served, or why it is not."""
        assert self._updates is not None
        await asyncio.get_running_loop().sock_sendall(self._updates, pack((updater.SERVED, fault)))

    async def _rescue_handshakes(self) -> None:
        """Raises the limit of open files of a TLS server for a while when it is reached.

        Granian bounds connections, but not TLS handshakes; while `accept` fails it does not end those that time out.
        """
        while self.config.certfile is not None:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                os.close(os.dup(0))
            except OSError as error:
                if error.errno != errno.EMFILE:
                    continue
                soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft + RESCUE_FILES, hard))
                await asyncio.sleep(HANDSHAKE_SECONDS + 1)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _fail(self, message: str, code: int) -> None:
        self._error = error_of_process(message, code)
        self._end.set()

    def _fork(self, worker_end: socket.socket, index: int) -> None:
        socket.send_fds(self._forkserver, [b"\0"], [worker_end.fileno()])
        cpus = _worker_cpus(self._cpus, index, self.config.threads)
        self._forkserver.sendall(pack((forkserver.FORK, cpus, self.dispatcher.replaces)))

    async def _receive(self) -> None:
        """Receives the messages of the fork server."""
        await _received(self._forkserver, self._messages)
        if not self._end.is_set():
            self._fail("the process that loads the models died; see the log of the system", 1)

    async def _receive_versions(self) -> None:
        """Receives the messages of the updater, None at its end."""
        if self._updates is not None:
            await _received(self._updates, self._versions)
            self._versions.put_nowait(None)


async def _received(channel: socket.socket, messages: asyncio.Queue[Any]) -> None:
    """Receives the messages of a channel until it is closed."""
    loop, buffer = asyncio.get_running_loop(), bytearray()
    while data := await loop.sock_recv(channel, 1 << 16):
        buffer += data
        for message in unpack(buffer):
            messages.put_nowait(message)


def _stop_accepting(port: int) -> None:
    """Drops the packets to the sockets that listen on a port: what connects waits, and is refused once they are closed.

    A socket that no longer listens would reset the connections in its queue. Where the kernel has no such filters, or
    the process no file left to open, connections are accepted further.
    """
    program = ctypes.create_string_buffer(struct.pack("HBBI", *RETURN_NOTHING))
    links: list[Path] = []
    with contextlib.suppress(OSError):
        links = list(Path("/proc/self/fd").iterdir())
    for link in links:
        with contextlib.suppress(OSError), socket.fromfd(int(link.name), socket.AF_INET, socket.SOCK_STREAM) as handle:
            if handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and handle.getsockname()[1] == port:
                handle.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _watched_files(served: ServedModel) -> list[Path]:
    path = Path(served.model)
    if not is_onnx(path):
        path = (path if path.is_dir() else hub().folder(served.model)) / PRECISIONS[served.precision]
    return [path, *([] if served.items is None else [served.items])]


def _file_versions(paths: Sequence[Path]) -> list[tuple[int, int, int]] | None:
    """Inode, size in bytes and modification time in nanoseconds of each file; None if one does not exist."""
    try:
        return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in (path.stat() for path in paths)]
    except OSError:
        return None


def _worker_cpus(cpus: Sequence[int], index: int, threads: int) -> set[int]:
    """Returns the CPUs of a worker, as many as its threads; consecutive workers get consecutive ones of `cpus`."""
    if threads >= len(cpus):
        return set(cpus)
    return {cpus[(index * threads + i) % len(cpus)] for i in range(threads)}


def _max_connections(workers: int, tls: bool) -> int:
    """Raises the soft limit of open files, and returns how many connections it allows. May raise RequestError.

    With TLS, `RESCUE_FILES` more are kept free, see `_Server._rescue_handshakes`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    used = opened + 2 * workers + SPARE_FILES  # a reload has two generations of workers
    reserve = RESCUE_FILES * tls
    wanted = used + MAX_CONNECTIONS
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard - reserve)
    if limit < used + MIN_CONNECTIONS:
        fault = f"found a limit of {hard} open files, expected at least {used + MIN_CONNECTIONS + reserve}"
        raise RequestError(f"{fault}; raise it by ulimit -n" + ", or serve without TLS" * tls)
    if soft != resource.RLIM_INFINITY and (soft < limit or tls):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit - used


def _address(host: str, port: int) -> tuple[str, int]:
    """The first IP address of a host that is free, and the port, or a free one for 0. Raises RequestError for none."""
    fault: OSError | None = None
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        places, fault = [], error
    for family, _, _, _, place in places:  # localhost may be ::1 first, where IPv6 is off
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
                return str(place[0]), int(probe.getsockname()[1])
        except OSError as error:
            fault = error
    reason = getattr(fault, "strerror", None) or fault
    raise RequestError(f"cannot listen at {host} port {port}: {reason}; choose another --host or --port") from fault
