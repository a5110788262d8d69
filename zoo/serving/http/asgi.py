"""ASGI application of the server, for another HTTP server or Ray Serve.

Models run in threads of the calling process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from pipelines.core.errors import ZooError, error_of_process
from zoo.serving.config import ServerConfig
from zoo.serving.http.http_types import ClientDisconnect, Hold, Response, joined
from zoo.serving.http.router import Router
from zoo.serving.workers.dispatcher import Dispatcher
from zoo.serving.workers.model_loader import ServedModel
from zoo.serving.workers.worker import Worker


class Application:
    """Models as an ASGI 3 application, over HTTP; they are loaded at lifespan startup or at the first request.

    A request raises RequestError or ZooError if a model cannot be loaded; the next request tries again.

    Args:
        models: Models to serve.
        config: Configuration; address, certificates and `watch` are ignored.
    """

    def __init__(self, models: Sequence[ServedModel], config: ServerConfig) -> None:
        self._models, self._config = list(models), config
        self._router: Router | None = None
        self._dispatcher: Dispatcher | None = None
        self._error: ZooError | None = None
        self._starting: asyncio.Lock | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handles a request or lifespan events; see the ASGI specification."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            router = await self.start()
            request = _Request(scope, receive)
            await _send(await router.handle(request), send, head=scope["method"] == "HEAD")

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.start()
                except ZooError as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def start(self) -> Router:
        """Loads the models unless they are loaded.

        Returns:
            The router.

        Raises:
            RequestError: A model cannot be served with this configuration.
            ZooError: A model cannot be loaded.
        """
        if self._router is not None:
            return self._router
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._router is None:
                names, config = [model.name for model in self._models], self._config
                self._error = None  # of an earlier call
                dispatcher = Dispatcher(
                    names, config.workers, config.max_batch, config.queue, self._start_worker, self._load_failed
                )
                try:
                    await dispatcher.start()
                    while not dispatcher.ready and self._error is None:
                        await asyncio.sleep(0.005)
                    if self._error is not None:
                        raise self._error
                except BaseException:  # also CancelledError: loaded models are released
                    dispatcher.close()
                    raise
                self._dispatcher, self._router = dispatcher, Router(config, names, dispatcher)
        return self._router

    async def close(self) -> None:
        """Finishes pending requests, for at most the grace time, and releases the models."""
        if self._dispatcher is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.grace):
                    await self._dispatcher.drained()
            self._dispatcher.close()
        if self._router is not None:
            self._router.access_log.close(1.0)

    def _load_failed(self, message: str, code: int) -> None:
        self._error = error_of_process(message, code)

    def _start_worker(self, worker_end: socket.socket, index: int) -> None:
        channel = worker_end.dup()
        channel.setblocking(True)

        def run() -> None:
            with channel, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                Worker(channel, {model.name: replace(model) for model in self._models}).run()

        threading.Thread(target=run, name=f"zoo-worker-{index}", daemon=True).start()


async def _send(response: Response, send: Any, head: bool) -> None:
    headers = [("content-type", response.content_type), *response.headers]
    if response.chunks is None:
        headers.append(("content-length", str(len(response.body))))
    encoded = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    start = {"type": "http.response.start", "status": response.status, "headers": encoded}
    if response.chunks is None:
        await send(start)
        await send({"type": "http.response.body", "body": b"" if head else response.body})
        return
    async with contextlib.aclosing(response.chunks) as chunks:
        first = await anext(chunks)  # a generator that was started runs its cleanup when it is closed
        await send(start)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class _Request:
    """See `zoo.serving.http.http_types.Request`."""

    def __init__(self, scope: dict[str, Any], receive: Any) -> None:
        self._scope, self._receive = scope, receive
        self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.header, self.unread = self._headers.get, True
        self.method = str(scope["method"])
        self.version = str(scope.get("http_version", ""))

    def values(self, name: str) -> list[str]:
        key = name.encode("latin-1")
        return [value.decode("latin-1") for other, value in self._scope["headers"] if other.lower() == key]

    @property
    def path(self) -> str:
        root = str(self._scope.get("root_path", ""))
        path = str(self._scope["path"])
        return path.removeprefix(root) if root and path.startswith(f"{root}/") else path

    @property
    def query(self) -> str:
        return str(self._scope.get("query_string", b"").decode("latin-1"))

    @property
    def client(self) -> str:
        return ":".join(map(str, self._scope.get("client") or ()))

    async def read(self, max_bytes: int, hold: Hold | None = None) -> bytes:
        self.unread = False
        return await joined(self._parts(), max_bytes, hold)

    async def _parts(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            yield message.get("body", b"")
            more = message.get("more_body", False)

    async def disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
