"""Request and response types shared by the router and the HTTP servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from zoo.serving.protocol.responses import JSON, fault


class Request(Protocol):
    """A request as an HTTP server has it. `header` takes names in lower case. unread: nobody has asked for its body."""

    unread: bool

    @property
    def method(self) -> str:
        """In upper case."""

    @property
    def path(self) -> str:
        """Of the URL, escapes and all."""

    @property
    def query(self) -> str:
        """Of the URL, without the question mark."""

    @property
    def client(self) -> str:
        """Where it comes from."""

    def header(self, name: str) -> str | None:
        """The value of a header."""

    async def read(self, most: int) -> bytes:
        """The body. Raises TooLarge where it is longer than `most`, Gone where it ends before its length."""

    async def gone(self) -> None:
        """Returns when the client has left."""


class Response(NamedTuple):
    """What is answered: a body, or pieces of one as they come."""

    status: int
    kind: str
    body: bytes
    headers: Sequence[tuple[str, str]] = ()
    pieces: AsyncGenerator[bytes, None] | None = None


class TooLarge(Exception):
    """A body has more bytes than may be."""


class Gone(Exception):
    """The client has left."""


class Refused(Exception):
    """A request that is answered at once with what is wrong."""

    def __init__(self, status: int, text: str, *headers: tuple[str, str]) -> None:
        super().__init__(text)
        self.response = Response(status, JSON, fault(text), list(headers))
