"""Limits of the content of a request body, in proportion to the bytes received.

Parsing a small body must take neither long nor much memory. Plain JSON, CSV and Arrow bodies cannot exceed the limits,
because each value takes a byte or more; compressed bodies, encoded tables and images can.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

from pipelines.core.errors import RequestError


class ContentTooLarge(RequestError):
    """A body holds more than its limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class Limit(NamedTuple):
    """A limit that grows with the body.

    Attributes:
        name: What is counted.
        minimum: Limit of small bodies.
        per_byte: Number allowed for every byte received.
    """

    name: str
    minimum: int
    per_byte: int

    def require(self, amount: float, received: int) -> None:
        """Checks a body.

        Args:
            amount: Number that the body holds.
            received: Size of the body as received, in bytes.

        Raises:
            ContentTooLarge: The number exceeds the limit.
        """
        most = max(self.minimum, self.per_byte * received)
        if amount > most:
            body = f"in a body of {received:,} bytes"
            raise ContentTooLarge(f"found {int(amount):,} {self.name}, expected at most {most:,} {body}")


VALUES = Limit("values", 1 << 21, 2)  # of JSON, or cells of rows
ROWS = Limit("rows", 1 << 18, 1)
ITEMS = Limit("items", 100_000, 0)  # to rank, as rows
TEXT = Limit("bytes of text", 1 << 21, 4)  # to tokenize, or in the cells of a table
UNTRUNCATED = Limit("characters to tokenize without truncation", 1 << 19, 0)
TABLE = Limit("decompressed bytes", 64 << 20, 4)  # of an Arrow or Parquet table
PIXELS = Limit("pixels", 10_000_000, 10)  # of all images, see `decoding_cost`


def require_json(body: bytes, received: int) -> None:
    """Checks the number of values in JSON before it is parsed.

    Args:
        body: The JSON text.
        received: Size of the body as received, in bytes.

    Raises:
        ContentTooLarge: It may hold too many values.
    """
    if len(body) > VALUES.minimum:  # else it holds fewer
        VALUES.require(body.count(b",") + body.count(b"[") + body.count(b"{"), received)
