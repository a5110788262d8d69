"""Decompression of request bodies (Content-Encoding)."""

from __future__ import annotations

import zlib

ENCODINGS = ("gzip", "deflate")
TAKEN = (*ENCODINGS, "x-gzip")  # gzip's old name: RFC 9110, 8.4.1.3
LEAST = 1 << 10  # bytes, the first that are read of a member


def expanded(body: bytes, most: int) -> bytes:
    """Decompresses a gzip or deflate body.

    Args:
        body: Compressed body.
        most: Maximum size of the result, in bytes.

    Returns:
        The content; only its first `most` + 1 bytes if it is larger.

    Raises:
        ValueError: The body is damaged, truncated, or followed by other bytes.
    """
    members = body.startswith(b"\x1f\x8b")  # gzip's, of which there may be several: RFC 1952, 2.2
    found, at, size = bytearray(), 0, LEAST
    inflating = zlib.decompressobj(32 + zlib.MAX_WBITS)  # either, by its header
    while at < len(body) and len(found) <= most and (members or not inflating.eof):
        if inflating.eof:
            inflating, size = zlib.decompressobj(16 + zlib.MAX_WBITS), LEAST
        piece = body[at : at + size]
        try:
            found += inflating.decompress(piece, most + 1 - len(found))
        except zlib.error as error:
            raise ValueError("it is none, or not to its end") from error
        at += len(piece) - len(inflating.unused_data)
        size *= 2  # a piece is about as long as its member so far, and what is read again no longer than that
    if len(found) <= most and (at < len(body) or not inflating.eof):
        raise ValueError("it ends before or after its content")
    return bytes(found)
