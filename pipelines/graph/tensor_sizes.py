"""Checks that the bytes of the tensors of an ONNX file are as many as their shapes say; lists and reads its files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from pipelines.graph import repairs

MAX_PROTOBUF_BYTES = 2**31 - 2**20  # bytes of weights that one protobuf file holds
MAX_DENSE = 1 << 34  # bytes of a sparse tensor that is made dense


def fault(model: onnx.ModelProto, folder: Path) -> str:
    """Returns the fault of the first tensor whose number of bytes does not fit its shape, or "".

    Args:
        model: Model whose external data is not loaded.
        folder: Folder of its external data.

    Returns:
        The fault in one line; "" for sound tensors.

    Raises:
        ValueError: Offset or length of external data is no number.
    """
    for nodes in (model.graph, *model.functions):
        for tensor in _tensors(nodes):
            if text := _fault(tensor, folder):
                return f"the tensor {tensor.name or 'of a constant'} {text}"
    for sparse in model.graph.sparse_initializer:
        if (size := math.prod(sparse.dims) * 8) > MAX_DENSE:
            return f"the sparse tensor {sparse.values.name} would take {size:,} bytes"
    return ""


def external_files(path: Path) -> list[str]:
    """Lists the files with weights of an ONNX file.

    Args:
        path: Checked ONNX file.

    Returns:
        Paths relative to its folder, sorted.
    """
    return _locations(onnx.load(path, load_external_data=False))


def missing(model: onnx.ModelProto, folder: Path) -> str:
    """Names a file of external data that does not exist.

    Args:
        model: Model whose external data is not loaded.
        folder: Folder of its external data.

    Returns:
        What is missing; "" for nothing.
    """
    name = next((name for name in _locations(model) if not (folder / name).exists()), "")
    return f"its weights are in {folder / name}, which does not exist; copy that file beside it" if name else ""


def is_linked(model: onnx.ModelProto, folder: Path) -> bool:
    """Whether a file of external data is a symbolic link or has several hard links, which onnx refuses.

    Caches of the Hugging Face Hub have the former, copies of folders by `cp -al` the latter.

    Args:
        model: Model whose external data is not loaded.
        folder: Folder of its external data.

    Raises:
        ValueError: A file lies outside the folder.
    """
    paths = [(name, folder / name) for name in _locations(model)]
    linked = any(path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1) for _, path in paths)
    if linked and (outside := [name for name, _ in paths if Path(name).is_absolute() or ".." in Path(name).parts]):
        raise ValueError(f"its weights are in {outside[0]}, expected a file in its folder")
    return linked


def without_links(path: Path) -> bytes | None:
    """Serializes a model with the external data of files that are linked, which OpenVINO refuses.

    Args:
        path: ONNX file.

    Returns:
        The model with its data; None where this is not linked, damaged, or too large.
    """
    try:
        model = onnx.load(path, load_external_data=False)
        if (
            not is_linked(model, path.parent)
            or fault(model, path.parent)
            or _bytes(model, path.parent) > MAX_PROTOBUF_BYTES
        ):
            return None
    except Exception:  # protobuf raises its own kinds; the engine names the damage
        return None
    embed(model, path.parent)
    return bytes(model.SerializeToString())


def embed(model: onnx.ModelProto, folder: Path) -> None:
    """Reads the external data of a model into it.

    Args:
        model: Model whose sizes were checked; it changes.
        folder: Folder of its external data.
    """
    for tensor in _external(model):
        info = onnx.external_data_helper.ExternalDataInfo(tensor)
        with (folder / info.location).open("rb") as file:
            file.seek(info.offset or 0)
            tensor.raw_data = file.read(info.length if info.length is not None else -1)
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")


def _bytes(model: onnx.ModelProto, folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in _locations(model))


def _locations(model: onnx.ModelProto) -> list[str]:
    entries = (entry for tensor in _external(model) for entry in tensor.external_data)
    return sorted({entry.value for entry in entries if entry.key == "location"})


def _external(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    tensors = (tensor for nodes in (model.graph, *model.functions) for tensor in _tensors(nodes))
    return (tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)


def _tensors(nodes: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """The tensors of a graph or function, and of the graphs in its attributes."""
    if isinstance(nodes, onnx.GraphProto):
        yield from nodes.initializer
    for attribute in (attribute for node in nodes.node for attribute in node.attribute):
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
    for body in repairs.bodies(nodes):
        yield from _tensors(body)


def _fault(tensor: onnx.TensorProto, folder: Path) -> str:
    if tensor.data_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING) or tensor.HasField("segment"):
        return ""
    if any(size < 0 for size in tensor.dims):
        return f"has the shape {list(tensor.dims)}"
    expected = math.ceil(math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth / 8)
    shape = f"{expected:,} bytes for its shape {list(tensor.dims)}"
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        if tensor.HasField("raw_data") and len(tensor.raw_data) != expected:
            return f"has {len(tensor.raw_data):,} bytes, expected {shape}"
        return ""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset, path = int(entries.get("offset") or 0), folder / entries.get("location", "")
    size = path.stat().st_size
    length = int(entries["length"]) if entries.get("length") else size - offset
    if length != expected:
        return f"has {length:,} bytes of {path.name}, expected {shape}"
    if not 0 <= offset <= size - length:
        return f"lies at byte {offset:,} of {path.name}, which has {size:,} bytes, expected {length:,} bytes there"
    return ""
