"""Request and response types shared by the router and the HTTP servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from typing import NamedTuple, Protocol

from zoo.serving.protocol.responses import JSON, error_body

Hold = Callable[[int], None]  # counts bytes as held in memory


class Request(Protocol):
    """A request of an HTTP server.

    Attributes:
        unread: Whether the body was not read yet.
    """

    unread: bool

    @property
    def method(self) -> str:
        """Method in upper case."""

    @property
    def path(self) -> str:
        """Path of the URL; some HTTP servers decode its escapes."""

    @property
    def query(self) -> str:
        """Query of the URL, without the question mark."""

    @property
    def client(self) -> str:
        """Address of the client."""

    def header(self, name: str) -> str | None:
        """Returns the value of a header.

        Args:
            name: Name of the header, in lower case.

        Returns:
            The value; None without this header.
        """

    @property
    def version(self) -> str:
        """Version of HTTP, such as "1.1"."""

    def values(self, name: str) -> list[str]:
        """Returns the values of all headers with a name.

        Args:
            name: Name of the headers, in lower case.

        Returns:
            The values in order.
        """

    async def read(self, max_bytes: int, hold: Hold | None = None) -> bytes:
        """Reads the body.

        Args:
            max_bytes: Maximum size.
            hold: Called with the size of every part of a body without Content-Length (chunked); it may raise.

        Returns:
            The body.

        Raises:
            BodyTooLarge: The body is larger than `max_bytes`.
            ClientDisconnect: The body ends before its length.
        """

    async def disconnected(self) -> None:
        """Returns when the client has disconnected."""


class Response(NamedTuple):
    """A response: a body, or its chunks.

    Attributes:
        status: HTTP status.
        content_type: Content-Type of the body.
        body: The body; empty if there are chunks.
        headers: Other headers.
        chunks: Chunks of a streamed body, or None.
    """

    status: int
    content_type: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()
    chunks: AsyncGenerator[bytes, None] | None = None


class BodyTooLarge(Exception):
    """The request body is larger than the limit."""


async def joined(parts: AsyncIterable[bytes], max_bytes: int, hold: Hold | None) -> bytes:
    """Joins the parts of a body.

    Args:
        parts: The parts.
        max_bytes: See `Request.read`.
        hold: See `Request.read`.

    Returns:
        The body.

    Raises:
        BodyTooLarge: The body is larger than `max_bytes`.
    """
    received: list[bytes] = []
    size = 0
    async for part in parts:
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge
        if hold is not None:
            hold(len(part))
        received.append(part)
    return b"".join(received)


class ClientDisconnect(Exception):
    """The client has disconnected."""


class HTTPException(Exception):
    """Ends a request with an error response.

    Args:
        status: HTTP status.
        message: Error message.
        *headers: Headers of the response.
    """

    def __init__(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.response = Response(status, JSON, error_body(message), list(headers))
