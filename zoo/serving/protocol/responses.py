"""Response formats of `:run`, selected by Accept: JSON, JSON lines, CSV, Arrow stream, or plain text."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.kernels import extension

Columns = Mapping[str, NDArray[Any] | Sequence[Any]]
JSON, JSON_LINES, CSV, ARROW, TEXT = (
    "application/json",
    "application/x-ndjson",
    "text/csv",
    "application/vnd.apache.arrow.stream",
    "text/plain",
)
BINARY = "application/octet-stream"  # JSON, then binary tensors
TABLE_TYPES = (JSON, JSON_LINES, CSV, ARROW)


def negotiate(accept: str, media_types: Sequence[str] = TABLE_TYPES) -> str:
    """Selects the media type of a response. Of equally weighted types, the first of `media_types` is selected.

    Args:
        accept: Accept header (RFC 9110, 12.5.1).
        media_types: Supported media types.

    Returns:
        The selected media type.

    Raises:
        RequestError: The header accepts none of the types.
    """
    if accept in ("", "*/*", media_types[0]):
        return media_types[0]
    best, best_quality = "", 0.0
    for media_type in media_types:
        quality = _quality(accept, media_type)
        if quality > best_quality:
            best, best_quality = media_type, quality
    if not best:
        raise RequestError(f"Accept is {accept[:100]!r}; expected one of {', '.join(media_types)}")
    return best


def _quality(accept: str, media_type: str) -> float:
    """Quality value of a media type in an Accept header: that of the most specific range (RFC 9110, 12.5.1)."""
    quality, specificity = 0.0, 0
    ranges = {"*/*": 1, f"{media_type.split('/')[0]}/*": 2, media_type: 3}
    for part in accept.lower().split(","):
        name, *parameters = (item.strip() for item in part.split(";"))
        own = ranges.get(name, 0)
        if own <= specificity:
            continue
        value = next((parameter[2:] for parameter in parameters if parameter.startswith("q=")), "1")
        try:
            quality, specificity = min(max(float(value), 0.0), 1.0), own
        except ValueError:
            continue
    return quality


def error_body(message: str) -> bytes:
    """Encodes an error in the form of the Open Inference Protocol.

    Args:
        message: Error message.

    Returns:
        {"error": message} as JSON.
    """
    return orjson.dumps({"error": message.encode("utf-8", "replace").decode()})


def encode(columns: Columns, media_type: str) -> bytes:
    """Encodes a table.

    Args:
        columns: Arrays or lists by column name; None in a list is a missing value.
        media_type: One of `TABLE_TYPES`, or `TEXT` for the values of the first column, one per line.

    Returns:
        The encoded table.
    """
    if media_type == ARROW:
        return _arrow(columns)
    if media_type == CSV:
        return _csv(columns)
    if media_type == TEXT:
        first = next(iter(columns.values()))
        return "".join(f"{value}\n" for value in first).encode()
    rows = _rows(columns)
    if media_type == JSON_LINES:
        return b"".join(
            orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY) for row in rows
        )
    return orjson.dumps({"results": rows}, option=orjson.OPT_SERIALIZE_NUMPY)


def _rows(columns: Columns) -> list[dict[str, Any]]:
    names = tuple(columns)
    values = [_values(column) for column in columns.values()]
    if any(isinstance(column, list) and None in column for column in columns.values()):
        return [
            {name: value for name, value in zip(names, row, strict=True) if value is not None}
            for row in zip(*values, strict=True)
        ]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _values(column: NDArray[Any] | Sequence[Any]) -> Sequence[Any]:
    """Plain values; a float32 as the shortest decimal number that rounds to it."""
    if not isinstance(column, np.ndarray):
        return column
    if column.dtype == np.float32 and np.isfinite(column).all():
        shortest: list[float] = orjson.loads(
            orjson.dumps(np.ascontiguousarray(column), option=orjson.OPT_SERIALIZE_NUMPY)
        )
        return shortest
    plain: list[Any] = column.tolist()
    return plain


def _csv(columns: Columns) -> bytes:
    header = (",".join(columns) + "\n").encode()
    native = extension.native()
    arrays = list(columns.values())
    if native is not None and all(
        isinstance(array, np.ndarray) and array.dtype in (np.int64, np.float32) for array in arrays
    ):
        return header + bytes(native.csv_lines([np.ascontiguousarray(array) for array in arrays]))
    text = io.StringIO()
    rows = zip(*(_values(array) for array in arrays), strict=True)
    csv.writer(text, lineterminator="\n").writerows(rows)
    return header + text.getvalue().encode()


def _arrow(columns: Columns) -> bytes:
    import pyarrow as pa

    batch = pa.record_batch({name: pa.array(column) for name, column in columns.items()})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
