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
JSON, LINES, CSV, ARROW, TEXT = (
    "application/json",
    "application/x-ndjson",
    "text/csv",
    "application/vnd.apache.arrow.stream",
    "text/plain",
)
BINARY = "application/octet-stream"  # JSON, then tensors in binary
KINDS = (JSON, LINES, CSV, ARROW)


def chosen(accept: str, kinds: Sequence[str] = KINDS) -> str:
    """Selects the media type of a response. Of equally weighted types, the first of `kinds` is selected.

    Args:
        accept: Accept header (RFC 9110, 12.5.1).
        kinds: Supported media types.

    Raises:
        RequestError: The header accepts none of the types.
    """
    if accept in ("", "*/*", kinds[0]):
        return kinds[0]
    best, most = "", 0.0
    for kind in kinds:
        weight = _weight(accept, kind)
        if weight > most:
            best, most = kind, weight
    if not best:
        raise RequestError(f"Accept is {accept[:100]!r}; wanted one of {', '.join(kinds)}")
    return best


def _weight(accept: str, kind: str) -> float:
    """How much an Accept header likes a kind, by its most specific part (RFC 9110, 12.5.1)."""
    found, rank = 0.0, 0
    for part in accept.lower().split(","):
        name, *parameters = (each.strip() for each in part.split(";"))
        specific = 3 if name == kind else 2 if name == kind.split("/")[0] + "/*" else 1 if name == "*/*" else 0
        if specific <= rank:
            continue
        quality = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        try:
            found, rank = min(max(float(quality), 0.0), 1.0), specific
        except ValueError:
            continue
    return found


def fault(text: str) -> bytes:
    """What is wrong, in the protocol's form."""
    return orjson.dumps({"error": text.encode("utf-8", "replace").decode()})


def encoded(columns: Columns, kind: str) -> bytes:
    """Encodes a table.

    Args:
        columns: Arrays or lists by column name; None in a list is a missing value.
        kind: Media type of the result.

    Returns:
        The encoded table.
    """
    if kind == ARROW:
        return _arrow(columns)
    if kind == CSV:
        return _csv(columns)
    if kind == TEXT:
        first = next(iter(columns.values()))
        return "".join(f"{each}\n" for each in first).encode()
    rows = _rows(columns)
    if kind == LINES:
        return b"".join(
            orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY) for row in rows
        )
    return orjson.dumps({"results": rows}, option=orjson.OPT_SERIALIZE_NUMPY)


def _rows(columns: Columns) -> list[dict[str, Any]]:
    names = tuple(columns)
    values = [_values(each) for each in columns.values()]
    if any(isinstance(each, list) and None in each for each in columns.values()):
        return [
            {name: value for name, value in zip(names, row, strict=True) if value is not None}
            for row in zip(*values, strict=True)
        ]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _values(column: NDArray[Any] | Sequence[Any]) -> Sequence[Any]:
    """Plain values; a float32 as the shortest number that means it."""
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
        isinstance(each, np.ndarray) and each.dtype in (np.int64, np.float32) for each in arrays
    ):
        return header + bytes(native.csv_lines([np.ascontiguousarray(each) for each in arrays]))
    text = io.StringIO()
    rows = zip(*(_values(each) for each in arrays), strict=True)
    csv.writer(text, lineterminator="\n").writerows(rows)
    return header + text.getvalue().encode()


def _arrow(columns: Columns) -> bytes:
    import pyarrow as pa

    batch = pa.record_batch({name: pa.array(column) for name, column in columns.items()})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
