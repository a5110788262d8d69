"""Adapter of the router to granian's Rust Server Gateway Interface."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from granian.rsgi import ProtocolClosed, ProtocolError

from zoo.serving.http.http_types import ClientDisconnect, Hold, joined
from zoo.serving.http.router import Router


class Application:
    """RSGI application of a router.

    Args:
        router: The router.
    """

    def __init__(self, router: Router) -> None:
        self._handle = router.handle

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        """Handles a request; see the RSGI specification."""
        if scope.proto != "http":
            return
        response = await self._handle(_Request(scope, protocol))
        headers = [("content-type", response.content_type), *response.headers]
        with contextlib.suppress(ProtocolClosed, ProtocolError):  # the client has disconnected
            if response.chunks is None:
                protocol.response_bytes(response.status, headers, response.body)
                return
            async with contextlib.aclosing(response.chunks) as chunks:
                first = await anext(chunks)  # a generator that was started runs its cleanup when it is closed
                stream = protocol.response_stream(response.status, headers)
                await stream.send_bytes(first)
                async for chunk in chunks:
                    await stream.send_bytes(chunk)


class _Request:
    """See `zoo.serving.http.http_types.Request`."""

    __slots__ = ("_protocol", "_scope", "header", "method", "path", "unread", "values")

    def __init__(self, scope: Any, protocol: Any) -> None:
        self._scope, self._protocol = scope, protocol
        self.header, self.unread = scope.headers.get, True
        self.method, self.path, self.values = scope.method, scope.path, scope.headers.get_all

    @property
    def version(self) -> str:
        return str(self._scope.http_version)

    @property
    def query(self) -> str:
        return str(self._scope.query_string)

    @property
    def client(self) -> str:
        return str(self._scope.client)

    async def read(self, max_bytes: int, hold: Hold | None = None) -> bytes:
        self.unread = False
        try:
            if hold is None:
                return bytes(await self._protocol())  # no more than Content-Length, which the router checks
            return await joined(self._parts(), max_bytes, hold)
        except (ProtocolClosed, ProtocolError):
            raise ClientDisconnect from None

    async def _parts(self) -> AsyncIterator[bytes]:
        """The parts of a chunked body; granian ends them with an empty one, and a body that ends early with two."""
        empty_parts = 0
        async for part in self._protocol:
            empty_parts += not part
            yield bytes(part)
        if empty_parts > 1 and self.header("trailer") is None:  # trailers are an empty part, too
            raise ClientDisconnect

    async def disconnected(self) -> None:
        await self._protocol.client_disconnect()
