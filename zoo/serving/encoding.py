"""Bodies that were made smaller for their way: Content-Encoding."""

from __future__ import annotations

import zlib

ENCODINGS = ("gzip", "deflate")


def expanded(body: bytes, most: int) -> bytes:
    """What a gzip or deflate body holds, or its first `most` + 1 bytes where that is more.

    Raises ValueError for another body, and one that ends before or after its content.
    """
    inflating = zlib.decompressobj(32 + zlib.MAX_WBITS)  # either, by its header
    try:
        found = inflating.decompress(body, most + 1)
    except zlib.error as error:
        raise ValueError("it is none") from error
    if len(found) <= most and (not inflating.eof or inflating.unused_data):
        raise ValueError("it ends before or after its content")
    return found
