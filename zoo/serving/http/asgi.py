"""The front as an ASGI application, to mount under another HTTP server or in Ray Serve: the process that calls
computes, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipelines.core.errors import RequestError, ZooError
from zoo.serving.config import Settings
from zoo.serving.http.http_types import Gone, Response, TooLarge
from zoo.serving.http.router import Front
from zoo.serving.workers.dispatcher import Dispatcher
from zoo.serving.workers.model_loader import Opening
from zoo.serving.workers.worker import Worker


class Application:
    """Models as an ASGI 3 application, over HTTP. Models are opened at the first request, or by lifespan events.

    Raises RequestError or ZooError, then, for a model that cannot be opened; the next request tries again.
    """

    def __init__(self, openings: Sequence[Opening], settings: Settings) -> None:
        self._openings, self._settings = list(openings), settings
        self._front: Front | None = None
        self._dispatcher: Dispatcher | None = None
        self._problem: ZooError | None = None
        self._starting: asyncio.Lock | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            front = await self.opened()
            request = _Request(scope, receive)
            await _send(await front.answer(request), send, head=scope["method"] == "HEAD")

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.opened()
                except ZooError as error:
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def close(self) -> None:
        """Answer what is on its way, and let go of the models."""
        if self._dispatcher is not None:
            await self._dispatcher.drained()
            self._dispatcher.close()
        if self._front is not None:
            self._front.log.close(1.0)

    async def opened(self) -> Front:
        """What answers, its models open. Raises RequestError or ZooError for one that cannot be."""
        if self._front is not None:
            return self._front
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._front is None:
                names = [each.name for each in self._openings]
                settings = self._settings
                self._problem = None  # that of an earlier call may be over
                dispatcher = Dispatcher(
                    names, settings.workers, settings.max_batch, settings.queue, self._thread, self._failed
                )
                try:
                    await dispatcher.start()
                    while not dispatcher.ready and self._problem is None:
                        await asyncio.sleep(0.005)
                    if self._problem is not None:
                        raise self._problem
                except BaseException:  # a call may be cancelled, too; what some workers opened is let go
                    dispatcher.close()
                    raise
                self._dispatcher, self._front = dispatcher, Front(settings, names, dispatcher)
        return self._front

    def _failed(self, text: str, code: int) -> None:
        self._problem = RequestError(text) if code == RequestError.exit_code else ZooError(text)

    def _thread(self, theirs: socket.socket, index: int) -> None:
        own = theirs.dup()
        own.setblocking(True)

        def run() -> None:
            with own, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                Worker(own, {each.name: replace(each) for each in self._openings}).run()

        threading.Thread(target=run, name=f"zoo-worker-{index}", daemon=True).start()


async def _send(response: Response, send: Any, head: bool) -> None:
    headers = [("content-type", response.kind), *response.headers]
    if response.pieces is None:
        headers.append(("content-length", str(len(response.body))))
    plain = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    start = {"type": "http.response.start", "status": response.status, "headers": plain}
    if response.pieces is None:
        await send(start)
        await send({"type": "http.response.body", "body": b"" if head else response.body})
        return
    async with contextlib.aclosing(response.pieces) as pieces:
        first = await anext(pieces)  # begun, it ends rightly even where the client has left already
        await send(start)
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class _Request:
    """See `zoo.serving.http.http_types.Request`."""

    def __init__(self, scope: dict[str, Any], receive: Any) -> None:
        self._scope, self._receive = scope, receive
        self._headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.header, self.unread = self._headers.get, True
        self.method = str(scope["method"])

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

    async def read(self, most: int) -> bytes:
        self.unread = False
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > most:
                raise TooLarge
            parts.append(part)
        return b"".join(parts)

    async def gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
