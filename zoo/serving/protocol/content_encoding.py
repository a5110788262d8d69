"""Decompression of request bodies (Content-Encoding)."""

from __future__ import annotations

import zlib

ENCODINGS = ("gzip", "deflate")
ACCEPTED = (*ENCODINGS, "x-gzip")  # the former name of gzip: RFC 9110, 8.4.1.3
FIRST_PIECE = 1 << 10  # bytes of a gzip member that are decompressed first


def decompress(body: bytes, max_bytes: int, encoding: str = "gzip") -> bytes:
    """Decompresses a gzip or deflate body.

    Args:
        body: Compressed body.
        max_bytes: Maximum size of the result.
        encoding: Its Content-Encoding. Some clients send deflate without its zlib header (RFC 9110, 8.4.1.2).

    Returns:
        The content; only its first `max_bytes` + 1 bytes if it is larger.

    Raises:
        ValueError: The body is damaged, truncated, or followed by other bytes.
    """
    is_gzip = body.startswith(b"\x1f\x8b")  # gzip may have several members: RFC 1952, 2.2
    content, offset, size = bytearray(), 0, FIRST_PIECE
    is_raw = encoding == "deflate" and not is_gzip and body[:1] != b"" and body[0] & 15 != zlib.DEFLATED
    member = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else 32 + zlib.MAX_WBITS)  # 32: gzip or zlib, by its header
    while offset < len(body) and len(content) <= max_bytes and (is_gzip or not member.eof):
        if member.eof:
            member, size = zlib.decompressobj(16 + zlib.MAX_WBITS), FIRST_PIECE
        piece = body[offset : offset + size]
        try:
            content += member.decompress(piece, max_bytes + 1 - len(content))
        except zlib.error as error:
            raise ValueError("the compressed data are damaged") from error
        offset += len(piece) - len(member.unused_data)
        size *= 2  # bytes behind a member are read twice; doubling keeps them no longer than the member
    if len(content) <= max_bytes and (offset < len(body) or not member.eof):
        raise ValueError("the compressed data are truncated, or other bytes follow")
    return bytes(content)
