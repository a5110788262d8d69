"""Large weights of a model apart from its protobuf, so that writing, reading and opening it copies none of them.

A protobuf with embedding tables of gigabytes is copied by every step that it is passed through. The functions here keep
tables as numpy arrays beside a small protobuf, and write or read the same bytes that the whole protobuf has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.batches import Batch
from pipelines.graph import query

Array = NDArray[Any]

LARGE_BYTES = 16 << 20  # bytes of a weight that is kept apart
READ = 1 << 20  # likewise while a file of such weights is read: a protobuf is copied twice
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers of onnx.proto
_KNOWN = {1, 2, 8, _RAW_DATA}  # fields of a tensor that is read apart: dims, data_type, name, raw_data
_TYPES = {onnx.TensorProto.FLOAT, onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT16}


class StackedTensor(ir.LazyTensor):
    """Arrays stacked along the first axis; `write` takes them one by one, so that no joined copy is in memory.

    Args:
        parts: Arrays [rows, ...] of one dtype, which differ in their rows alone.
        name: Name of the tensor.
    """

    def __init__(self, parts: Sequence[Array], name: str) -> None:
        self.parts = [np.ascontiguousarray(part) for part in parts]
        shape = ir.Shape([sum(map(len, self.parts)), *self.parts[0].shape[1:]])
        dtype = ir.DataType.from_numpy(self.parts[0].dtype)
        super().__init__(lambda: ir.Tensor(np.concatenate(self.parts), name=name), dtype, shape, name=name)

    def tofile(self, file: Any) -> None:
        """Writes the elements to a file.

        Args:
            file: Open file.
        """
        for part in self.parts:
            file.write(part.reshape(-1).view(np.uint8).data)


def split_weights(model: ir.Model, names: Collection[str] | None = None) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Converts a model to a protobuf without the data of its large initializers.

    Args:
        model: Model; it does not change.
        names: Initializers that may be kept apart; None: all.

    Returns:
        Protobuf, and {name: array} of the initializers that lack their data there.
    """
    proto, tensors = _without_data(model, names)
    return proto, {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}


def _without_data(
    model: ir.Model, names: Collection[str] | None = None
) -> tuple[onnx.ModelProto, dict[str, ir.TensorProtocol]]:
    """Returns `split_weights` with tensors in place of arrays."""
    values = model.graph.initializers.items()
    large = {name: value for name, value in values if (names is None or name in names) and _is_large(value)}
    tensors = {name: value.const_value for name, value in large.items() if value.const_value is not None}
    try:
        for name, value in large.items():
            value.const_value = ir.Tensor(np.zeros(0, tensors[name].dtype.numpy()), name=name)
        proto: onnx.ModelProto = ir.to_proto(model)
    finally:
        for name, value in large.items():
            value.const_value = tensors[name]
    for tensor in proto.graph.initializer:
        if tensor.name in tensors:
            tensor.ClearField("raw_data")
            tensor.dims[:] = tensors[tensor.name].shape.numpy()
    return proto, tensors


def lookup_tables(graph: ir.Graph) -> set[str]:
    """Returns the names of large initializers that only Gather reads, by rows.

    Args:
        graph: Main graph of a model.
    """
    names = set()
    for name, value in graph.initializers.items():
        uses = value.uses()
        rows = all(use.node.op_type == "Gather" and use.idx == 0 and use.node.graph is graph for use in uses)
        if uses and rows and not value.is_graph_output() and _is_large(value):
            names.add(name)
    return names


def used_rows(model: ir.Model, samples: Iterable[Batch]) -> tuple[ir.Model, Iterable[Batch]]:
    """Copies a model with the rows of its large lookup tables that samples read alone.

    Only tables whose rows are named by a graph input that nothing else reads are cut. On the samples the copy computes
    the same, and a calibration of it fits the model.

    Args:
        model: Model; it does not change.
        samples: Batches, array [samples, ...] for every graph input.

    Returns:
        The copy, and the samples with the numbers of its rows; both arguments if no table can be cut.
    """
    inputs = {str(value.name): names for value in model.graph.inputs if (names := _tables_by(value))}
    if not inputs:
        return model, samples
    batches = [dict(batch) for batch in samples]
    copy = model.clone()
    for name, tables in inputs.items():
        arrays = [batch[name] for batch in batches if name in batch]
        ids = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.zeros(0, np.int64)
        if not len(ids) or ids.min() < 0 or ids.max() >= min(_rows(model, table) for table in tables):
            continue  # an error of the run, which names the sample
        rows = np.unique(ids)
        for table in tables:
            value = copy.graph.initializers[table]
            tensor = value.const_value
            if tensor is not None:
                value.const_value = ir.Tensor(np.ascontiguousarray(tensor.numpy()[rows]), name=table)
                value.shape = ir.Shape(value.const_value.shape)
        for batch in batches:
            if name in batch:
                batch[name] = np.searchsorted(rows, batch[name]).astype(batch[name].dtype)
    return copy, batches


def _tables_by(x: ir.Value) -> list[str]:
    """Names of the tables that a graph input alone names the rows of; [] if something else reads the input's values."""
    names: dict[str, None] = {}
    for use in x.uses():
        table = use.node.inputs[0] if query.is_op(use.node, "Gather") and use.idx == 1 else None
        if table is not None and not use.node.attributes.get_int("axis", 0) and table.is_initializer():
            if not _is_large(table) or table.is_graph_output() or len(table.uses()) > 1 or table.graph is not x.graph:
                return []
            names[str(table.name)] = None
        elif not query.is_op(use.node, "Shape"):
            return []
    return [] if x.is_graph_output() else list(names)


def _rows(model: ir.Model, table: str) -> int:
    tensor = model.graph.initializers[table].const_value
    return int(tensor.shape.numpy()[0]) if tensor is not None else 0


def _is_large(value: ir.Value) -> bool:
    tensor = value.const_value
    return (
        tensor is not None
        and not isinstance(tensor, ir.ExternalTensor)
        and int(tensor.dtype) in _TYPES
        and tensor.nbytes >= LARGE_BYTES
        and not tensor.doc_string
        and not tensor.metadata_props
        and (not isinstance(tensor, ir.TensorProtoTensor) or tensor.raw.HasField("raw_data"))
    )


def join_weights(proto: onnx.ModelProto, arrays: dict[str, Array]) -> ir.Model:
    """Converts a protobuf from `split_weights` or `read` to a model that uses the arrays.

    Args:
        proto: Protobuf.
        arrays: Data of the initializers that lack it.

    Returns:
        The model.
    """
    if not arrays:
        return ir.from_proto(proto)
    model = ir.from_proto(emptied(proto, arrays))
    for name, array in arrays.items():
        value = model.graph.initializers[name]
        value.const_value = ir.Tensor(array, name=name)
        value.shape = ir.Shape(array.shape)
    return model


def emptied(proto: onnx.ModelProto, arrays: dict[str, Array]) -> onnx.ModelProto:
    """Returns a copy of a protobuf whose initializers without data have no elements, which makes it valid.

    Args:
        proto: Protobuf.
        arrays: Data of the initializers that lack it.

    Returns:
        The copy.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in copy.graph.initializer:
        if tensor.name in arrays:
            tensor.dims[:] = [0] * len(tensor.dims)
            tensor.raw_data = b""
    return copy


def data_of(tensor: ir.TensorProtocol) -> bytes | memoryview:
    """Returns the bytes of a tensor, without a copy where it is large.

    Args:
        tensor: Tensor.
    """
    if int(tensor.dtype) not in _TYPES or tensor.nbytes < LARGE_BYTES:
        return tensor.tobytes()
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def write(file: BinaryIO, model: ir.Model, complete: Callable[[onnx.GraphProto], object]) -> None:
    """Writes a model as one protobuf, deterministically.

    Args:
        file: Open file.
        model: Model; it does not change.
        complete: Called with the protobuf of the main graph, which lacks the data of large initializers.
    """
    proto, tensors = _without_data(model)
    complete(proto.graph)
    chunks: list[bytes | memoryview] = []
    for tensor in proto.graph.initializer:
        parts: list[bytes | memoryview] = [_bytes(tensor)]
        if (data := tensors.get(tensor.name)) is not None:
            arrays = data.parts if isinstance(data, StackedTensor) else [np.ascontiguousarray(data.numpy())]
            parts += [_head(_RAW_DATA, data.nbytes), *(array.reshape(-1).view(np.uint8).data for array in arrays)]
        chunks += [_head(_INITIALIZER, sum(map(len, parts))), *parts]
    before, behind = _split(proto.graph, _INITIALIZER)
    chunks = [before, *chunks, behind]
    start, end = _split(proto, _GRAPH)
    for chunk in (start, _head(_GRAPH, sum(map(len, chunks))), *chunks, end):
        file.write(chunk)


def read(path: Path) -> tuple[onnx.ModelProto, dict[str, Array]] | None:
    """Reads a file as `split_weights` would give it.

    Args:
        path: ONNX file.

    Returns:
        Protobuf and arrays; None for a file without large initializers, and for one that is damaged or has what only
        onnx reads.
    """
    if path.stat().st_size < LARGE_BYTES:
        return None
    try:
        with path.open("rb") as file:
            return _read(file, path.stat().st_size)
    except (ValueError, EOFError, IndexError):
        return None


def take_external(proto: onnx.ModelProto, folder: Path) -> dict[str, Array]:
    """Removes the references of large initializers to files, and maps the files instead.

    Args:
        proto: Protobuf of a model whose files and sizes were checked; it changes.
        folder: Folder of the files.

    Returns:
        {name: read-only array} of the initializers that lack their data, for `join_weights`.
    """
    arrays = {}
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL or tensor.data_type not in _TYPES:
            continue
        external = onnx.external_data_helper.ExternalDataInfo(tensor)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        offset, shape = int(external.offset or 0), tuple(tensor.dims)
        if math.prod(shape) * dtype.itemsize < LARGE_BYTES or offset % dtype.itemsize:
            continue
        arrays[tensor.name] = np.asarray(np.memmap(folder / external.location, dtype, "r", offset, shape))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
    return arrays


def _read(file: BinaryIO, size: int) -> tuple[onnx.ModelProto, dict[str, Array]] | None:
    arrays: dict[str, Array] = {}
    model, graph = bytearray(), bytearray()
    for number, kind, start, end in _fields(file, 0, size):
        if number != _GRAPH:
            model += _field(file, number, kind, start, end)
            continue
        for inner, wire, begin, stop in _fields(file, start, end):
            if (
                inner == _INITIALIZER
                and stop - begin >= min(LARGE_BYTES, READ)
                and (pair := _tensor(file, begin, stop))
            ):
                tensor, array = pair
                content = _bytes(tensor)
                graph += _head(_INITIALIZER, len(content)) + content
                arrays[tensor.name] = array
            else:
                graph += _field(file, inner, wire, begin, stop)
    if not arrays:
        return None
    proto = onnx.ModelProto()
    proto.ParseFromString(bytes(model))
    proto.graph.ParseFromString(bytes(graph))
    plain = not proto.functions and len({data.name for data in proto.graph.initializer}) == len(proto.graph.initializer)
    return (proto, arrays) if plain else None


def _tensor(file: BinaryIO, start: int, end: int) -> tuple[onnx.TensorProto, Array] | None:
    """A tensor without its data, and the data; None for one with other fields."""
    content, raw = b"", None
    for number, kind, begin, stop in _fields(file, start, end):
        if number not in _KNOWN or (number == _RAW_DATA and raw is not None):
            return None
        if number == _RAW_DATA:
            raw = begin, stop
        else:
            content += _field(file, number, kind, begin, stop)
    tensor = onnx.TensorProto()
    tensor.ParseFromString(content)
    if raw is None or tensor.data_type not in _TYPES:
        return None
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    if min(shape, default=1) < 0 or int(np.prod(shape, dtype=object)) * dtype.itemsize != raw[1] - raw[0]:
        return None
    file.seek(raw[0])
    array = np.fromfile(file, dtype, (raw[1] - raw[0]) // dtype.itemsize)
    return tensor, array.reshape(shape)


def _fields(file: BinaryIO, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (number, wire type, start and end of the content) of the fields of a message."""
    position = start
    while position < end:
        file.seek(position)
        ahead = file.read(min(20, end - position))
        tag, used = _varint(ahead, 0)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, used_ = _varint(ahead, used)
            begin, stop = position + used, position + used_
        elif kind == 2:
            size, used = _varint(ahead, used)
            begin, stop = position + used, position + used + size
        elif kind in (1, 5):
            begin, stop = position + used, position + used + (8 if kind == 1 else 4)
        else:
            raise ValueError("found groups")
        if stop > end:
            raise EOFError
        yield number, kind, begin, stop
        position = stop


def _field(file: BinaryIO, number: int, kind: int, start: int, end: int) -> bytes:
    file.seek(start)
    content = file.read(end - start)
    return (_head(number, len(content)) if kind == 2 else _number(number << 3 | kind)) + content


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("found a number of more than 64 bits")


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _head(number: int, size: int) -> bytes:
    """Tag and size of a field of bytes."""
    return _number(number << 3 | 2) + _number(size)


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _split(message: Any, index: int) -> tuple[bytes, bytes]:
    """Bytes of the fields in front of a field, and behind it."""
    parts = []
    for low, high in ((0, index), (index + 1, 1 << 30)):
        part = type(message)()
        for field, value in message.ListFields():
            if low <= field.number < high:
                if field.is_repeated:
                    getattr(part, field.name).MergeFrom(value)
                elif field.type == field.TYPE_MESSAGE:
                    getattr(part, field.name).CopyFrom(value)
                else:
                    setattr(part, field.name, value)
        parts.append(_bytes(part))
    return parts[0], parts[1]
