"""Messages between the processes of a server: marshalled tuples of plain values, each behind its length.

The processes are the HTTP server, the fork server and the workers forked by the fork server. Jobs and results are sent
as plain tuples: marshalling named tuples takes several times as long.
"""

from __future__ import annotations

import marshal
import socket
import struct
from typing import Any, NamedTuple

LENGTH = struct.Struct("<Q")
RECEIVE_BYTES = 1 << 20  # maximum of one recv


class Job(NamedTuple):
    """A request as a worker sees it.

    Attributes:
        job_id: Number of the request within the server.
        verb: "run", "infer", "rank", or a verb of `zoo.serving.protocol.text_apis`.
        content_type: Content-Type in lower case without parameters; multipart types keep their parameters.
        accept: Accept header.
        options: Query parameters.
        json_length: Length of the JSON header in front of binary tensors, in bytes; -1 without one.
        body: Request body, decompressed.
        received: Size of a compressed body as received, in bytes; 0 for other bodies.
    """

    job_id: int
    verb: str
    content_type: str
    accept: str
    options: dict[str, str]
    json_length: int
    body: bytes
    received: int = 0

    @property
    def received_bytes(self) -> int:
        """Size of the body as received, in bytes."""
        return self.received or len(self.body)


class JobResult(NamedTuple):
    """Response of a worker to a job, or a chunk of a streamed response.

    Attributes:
        job_id: Number of the job.
        status: HTTP status.
        content_type: Content-Type of the body.
        body: Response body, or a chunk of it.
        stage_seconds: Seconds of the stages "parse", "model" and "write".
        samples: Number of samples in the request.
        batch_size: Number of samples computed together with the request.
        json_length: Length of the JSON header in front of binary tensors, in bytes; -1 without one.
        last: Whether this is the last chunk.
    """

    job_id: int
    status: int
    content_type: str
    body: bytes
    stage_seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    samples: int = 0
    batch_size: int = 0
    json_length: int = -1
    last: bool = True


def pack(message: Any) -> bytes:
    """Serializes a message.

    Args:
        message: Tuple of plain values that `marshal` supports.

    Returns:
        The length (8 bytes, little endian) and the marshalled message.
    """
    data = marshal.dumps(message)
    return LENGTH.pack(len(data)) + data


def unpack(buffer: bytearray) -> list[Any]:
    """Removes all complete messages from the beginning of a buffer.

    Args:
        buffer: Received bytes; an incomplete message at the end stays in it.

    Returns:
        The messages in order.
    """
    messages, offset = [], 0
    while len(buffer) - offset >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer, offset)
        end = offset + LENGTH.size + length
        if len(buffer) < end:
            break
        messages.append(marshal.loads(memoryview(buffer)[offset + LENGTH.size : end]))
        offset = end
    if offset:
        del buffer[:offset]
    return messages


def receive(channel: socket.socket) -> Any:
    """Receives the next message.

    Args:
        channel: Blocking socket.

    Returns:
        The message; None if the other end is closed.
    """
    head = _receive_exactly(channel, LENGTH.size)
    if head is None:
        return None
    data = _receive_exactly(channel, LENGTH.unpack(head)[0])
    return None if data is None else marshal.loads(data)


def _receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    first = _receive_some(channel, count)
    if len(first) == count or not first:
        return first or (b"" if count == 0 else None)
    parts, missing = [first], count - len(first)
    while missing:
        part = _receive_some(channel, missing)
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _receive_some(channel: socket.socket, count: int) -> bytes:
    try:
        return channel.recv(min(count, RECEIVE_BYTES))
    except ConnectionResetError:
        return b""
