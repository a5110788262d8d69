"""Adapter of the router to granian's Rust Server Gateway Interface."""

from __future__ import annotations

import contextlib
from typing import Any

from granian.rsgi import ProtocolClosed, ProtocolError

from zoo.serving.http.http_types import Gone
from zoo.serving.http.router import Front


class Application:
    """A front as an RSGI application."""

    def __init__(self, front: Front) -> None:
        self._answer = front.answer

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        """Answer a request."""
        if scope.proto != "http":
            return
        response = await self._answer(_Request(scope, protocol))
        headers = [("content-type", response.kind), *response.headers]
        with contextlib.suppress(ProtocolClosed, ProtocolError):  # the client has left
            if response.pieces is None:
                protocol.response_bytes(response.status, headers, response.body)
                return
            async with contextlib.aclosing(response.pieces) as pieces:
                first = await anext(pieces)  # begun, it ends rightly even where the client has left already
                stream = protocol.response_stream(response.status, headers)
                await stream.send_bytes(first)
                async for piece in pieces:
                    await stream.send_bytes(piece)


class _Request:
    """See `zoo.serving.http.http_types.Request`."""

    __slots__ = ("_protocol", "_scope", "header", "method", "path", "unread")

    def __init__(self, scope: Any, protocol: Any) -> None:
        self._scope, self._protocol = scope, protocol
        self.header, self.unread = scope.headers.get, True
        self.method, self.path = scope.method, scope.path

    @property
    def query(self) -> str:
        return str(self._scope.query_string)

    @property
    def client(self) -> str:
        return str(self._scope.client)

    async def read(self, most: int) -> bytes:
        self.unread = False
        try:
            return bytes(await self._protocol())  # no more than its Content-Length says
        except (ProtocolClosed, ProtocolError):
            raise Gone from None

    async def gone(self) -> None:
        await self._protocol.client_disconnect()
