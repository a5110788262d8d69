"""Positions of the tables in the files of a model. ONNX files are read field by field, without their weights."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.files import mapped
from pipelines.kernels.recommenders.operators import DOMAIN
from pipelines.kernels.recommenders.tables.quantized_rows import row_bytes

MIN_TABLE_BYTES = 1 << 12  # bytes; smaller arrays are no tables
VARINT, LENGTH, SKIPPED = 0, 2, {1: 8, 5: 4}  # wire types of protocol buffers, and sizes of fixed fields
MODEL_GRAPH, GRAPH_NODE, GRAPH_INITIALIZER = 7, 1, 5  # numbers of fields in onnx.proto
NODE_INPUT, NODE_ATTRIBUTE, NODE_DOMAIN, ATTRIBUTE_NAME, ATTRIBUTE_TEXT = 1, 5, 7, 1, 4
TENSOR_DIMS, TENSOR_TYPE, TENSOR_NAME, TENSOR_RAW, TENSOR_EXTERNAL = 1, 2, 8, 9, 13


@dataclass(frozen=True)
class Table:
    """Contiguous rows of equal size in a file.

    Attributes:
        name: Name of the array.
        offset: First byte.
        rows: Number of rows.
        row_bytes: Bytes of a row.
    """

    name: str
    offset: int
    rows: int
    row_bytes: int

    @property
    def end(self) -> int:
        """First byte behind the table."""
        return self.offset + self.rows * self.row_bytes


@dataclass
class _Tensor:
    """An initializer: its shape and where its bytes are."""

    name: str = ""
    dims: tuple[int, ...] = ()
    type: int = 0
    offset: int = -1
    size: int = 0
    outside: bool = False


def tables_of(path: Path) -> list[Table]:
    """Finds the tables of a file.

    Args:
        path: An ONNX file, the file of its large initializers, or another file, which has none.

    Returns:
        The tables in the order of their offsets.
    """
    graph = path.with_name(path.name.removesuffix(".data"))
    if graph.suffix != ".onnx" or not graph.is_file() or not path.is_file() or not path.stat().st_size:
        return []
    with graph.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            tensors, widths = _read(content)
        except (ValueError, LookupError):  # no ONNX model, whatever its name
            return []
    outside = path == mapped(graph)
    tables = [_table(tensor, widths.get(tensor.name, 0)) for tensor in tensors if tensor.outside == outside]
    return sorted((table for table in tables if table is not None), key=lambda table: table.offset)


def _table(tensor: _Tensor, width: int) -> Table | None:
    """Returns the rows of a tensor; None for a small tensor, and for a flat one without a known `width` in bytes."""
    if tensor.offset < 0 or tensor.size < MIN_TABLE_BYTES:
        return None
    if len(tensor.dims) > 1 and tensor.dims[0]:
        width = tensor.size // tensor.dims[0]
    return Table(tensor.name, tensor.offset, tensor.size // width, width) if width else None


def _read(content: mmap.mmap) -> tuple[list[_Tensor], dict[str, int]]:
    """Reads the initializers of a model, and the bytes of a row of flat tables by name."""
    tensors: list[_Tensor] = []
    widths: dict[str, int] = {}
    for number, start, end in _fields(content, 0, len(content)):
        if number != MODEL_GRAPH:
            continue
        for part, first, last in _fields(content, start, end):
            if part == GRAPH_INITIALIZER:
                tensors.append(_tensor(content, first, last))
            elif part == GRAPH_NODE:
                widths |= _flat_widths(content, first, last)
    return tensors, widths


def _tensor(content: mmap.mmap, start: int, end: int) -> _Tensor:
    tensor = _Tensor()
    outside: dict[str, str] = {}
    for number, first, last in _fields(content, start, end):
        if number == TENSOR_DIMS:
            tensor.dims += tuple(_numbers(content, first, last))
        elif number == TENSOR_TYPE:
            tensor.type = first
        elif number == TENSOR_NAME:
            tensor.name = content[first:last].decode()
        elif number == TENSOR_RAW:
            tensor.offset, tensor.size = first, last - first
        elif number == TENSOR_EXTERNAL:
            key, value = (content[a:b].decode() for _, a, b in _fields(content, first, last))
            outside[key] = value
    if outside:
        tensor.outside = True
        tensor.offset, tensor.size = int(outside.get("offset", 0)), int(outside.get("length", 0))
    return tensor


def _numbers(content: mmap.mmap, first: int, last: int) -> Iterator[int]:
    """Yields a repeated number: packed values from `first` to `last`, or the value `first` where `last` is -1."""
    if last < 0:
        yield first
        return
    while first < last:
        value, first = _varint(content, first)
        yield value


def _flat_widths(content: mmap.mmap, start: int, end: int) -> Mapping[str, int]:
    """Returns the bytes of a row of the flat tables of a click program, by the name of the initializer."""
    inputs: list[str] = []
    domain, text = "", b""
    for number, first, last in _fields(content, start, end):
        if number == NODE_INPUT:
            inputs.append(content[first:last].decode())
        elif number == NODE_DOMAIN:
            domain = content[first:last].decode()
        elif number == NODE_ATTRIBUTE:
            parts = {part: content[a:b] for part, a, b in _fields(content, first, last) if b >= 0}
            if parts.get(ATTRIBUTE_NAME) == b"program":
                text = parts.get(ATTRIBUTE_TEXT, b"")
    if domain != DOMAIN or not text:
        return {}
    widths: dict[str, int] = {}
    program = json.loads(text)
    for step in program.get("steps", []):
        table = step.get("table")
        if not isinstance(table, dict) or "array" not in table:
            continue
        width = _row_bytes(step, program.get("slots", []))
        if width:
            widths[inputs[3 + table["array"]]] = width
    return widths


def _row_bytes(step: Mapping[str, Any], slots: Sequence[Any]) -> int:
    """Returns the bytes of a row of a step's flat table, 0 for other steps; `slots` has (kind, width) of buffers."""
    if step["step"] == "Gather":
        return int(step["stride"]) * int(np.dtype(slots[step["out"]][0]).itemsize)
    if step["step"] == "QuantizedGather":
        return row_bytes(step["width"], step["bits"])
    return np.dtype(np.float32).itemsize if step["step"] == "LookupSum" else 0


def _fields(content: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (number, first byte, end) of the fields of a message; (number, value, -1) of an integer.

    Raises:
        ValueError: The message is damaged.
    """
    while position < end:
        key, position = _varint(content, position)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, position = _varint(content, position)
            yield number, value, -1
        elif kind == LENGTH:
            size, position = _varint(content, position)
            yield number, position, position + size
            position += size
        elif kind in SKIPPED:
            position += SKIPPED[kind]
        else:
            raise ValueError(f"found the wire type {kind}")


def _varint(content: mmap.mmap, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
