"""What front and workers tell each other over a socket pair: tuples of plain values, marshalled behind their length.

Both ends are processes of one server (a front, its keeper and the workers forked from that). Jobs and answers go as
plain tuples: those with names take several times as long.
"""

from __future__ import annotations

import marshal
import socket
import struct
from typing import Any, NamedTuple

LENGTH = struct.Struct("<Q")
PIECE = 1 << 20  # bytes received at once


class Job(NamedTuple):
    """A request as a worker sees it.

    number: the front's own. verb: "run" or "infer". kind, accept: Content-Type, with its parameters
    where it is multipart, and Accept. options: of the query.
    header: length of the JSON in front of binary tensors, -1 for none. body: its bytes, unread.
    """

    number: int
    verb: str
    kind: str
    accept: str
    options: dict[str, str]
    header: int
    body: bytes


class Answer(NamedTuple):
    """What a worker answers: a whole response, or a piece of one where `last` is False.

    split: seconds in "parse", "model" and "write". samples: of this request; together: of all that were computed at
    once.
    """

    number: int
    status: int
    kind: str
    body: bytes
    split: tuple[float, float, float] = (0.0, 0.0, 0.0)
    samples: int = 0
    together: int = 0
    header: int = -1  # length of the JSON in front of binary tensors
    last: bool = True


def packed(message: Any) -> bytes:
    """A message as bytes."""
    data = marshal.dumps(message)
    return LENGTH.pack(len(data)) + data


def taken(buffer: bytearray) -> list[Any]:
    """The whole messages at the front of `buffer`, which are taken out of it."""
    found, at = [], 0
    while len(buffer) - at >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer, at)
        end = at + LENGTH.size + length
        if len(buffer) < end:
            break
        found.append(marshal.loads(memoryview(buffer)[at + LENGTH.size : end]))
        at = end
    if at:
        del buffer[:at]
    return found


def receive(channel: socket.socket) -> Any:
    """The next message of a blocking socket; None where the other end is gone."""
    head = _exactly(channel, LENGTH.size)
    if head is None:
        return None
    data = _exactly(channel, LENGTH.unpack(head)[0])
    return None if data is None else marshal.loads(data)


def _exactly(channel: socket.socket, count: int) -> bytes | None:
    first = _some(channel, count)
    if len(first) == count or not first:
        return first or (b"" if count == 0 else None)
    parts, left = [first], count - len(first)
    while left:
        part = _some(channel, left)
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _some(channel: socket.socket, most: int) -> bytes:
    try:
        return channel.recv(min(most, PIECE))
    except ConnectionResetError:
        return b""
