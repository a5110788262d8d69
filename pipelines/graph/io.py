"""Loads, saves, checks and digests ONNX models (onnx_ir)."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import GZIP, copy_file, mapped, replacing, require_place, starts_with, unzipped
from pipelines.graph import large_weights, map_types, query, repairs, tensor_sizes

PRODUCER = "int8-zoo"
PAGE, MAPPED_BYTES = 4096, 1 << 20  # bytes; initializers above `MAPPED_BYTES` lie on pages of their own
OPSET = 13  # the first with per-channel DequantizeLinear
RESIZE_OPSET = 11  # the first in which a Resize says which pixels it reads

OTHER_KINDS = {  # (offset, bytes) at the start of files that hold no ONNX model
    (0, b"version https://git-lfs"): "a pointer of Git LFS; run git lfs pull in its repository",
    **{(0, start): "a page of HTML; download the .onnx file itself" for start in (b"<!", b"<html", b"<?xml")},
    (30, b"plan.json"): "a plan file; give the .onnx file that it was made from (zoo info shows the plan)",
    (0, b"PK\3\4"): "a zip archive or a checkpoint of PyTorch; unzip it, or export the model with torch.onnx.export",
    (0, b"\x80\2"): "a pickle; load it in PyTorch and export the model with torch.onnx.export",
    (0, b"\x89HDF"): "an HDF5 file of Keras; export the model with tf2onnx",
    (4, b"ORTM"): "in ONNX Runtime's own format; give the .onnx file that it was made from",
    (4, b"TFL3"): "a TensorFlow Lite model; export the model as ONNX, with tf2onnx",
    (8, b'{"version"'): "a program of the native engine; give the .onnx file that it was made from",
    (8, b'{"'): "a file of safetensors, weights without a graph; export the model with torch.onnx.export",
}
logger = logging.getLogger(__name__)


def load(path: str | Path) -> ir.Model:
    """Reads and checks an ONNX model with its external data; opsets before 13 are converted to 13.

    Functions of the model are inlined and sparse weights made dense. Meaningless sizes (-1 and 0 of PaddlePaddle, "?"
    and "None") become dynamic. Weights listed as inputs because the file is older than IR version 4 are no inputs.

    Args:
        path: ONNX file, which may be compressed by gzip.

    Returns:
        The model.

    Raises:
        RequestError: The file is missing, truncated or invalid, its weights are missing, or its opset is unknown or
            cannot be converted.
    """
    path = Path(path)
    if not path.is_file():
        raise RequestError(f"no ONNX model at {path}; pass the path of an .onnx file")
    if starts_with(path, GZIP):
        return _load_compressed(path)
    proto, arrays = _read(path)
    try:
        model = _model_of(path, proto, arrays)
    except Exception as error:  # the checker's kind, onnx_ir's, and UnicodeDecodeError for damaged names
        raise RequestError(f"{path} is not a valid ONNX model: {one_line(error)}") from error
    if model.ir_version < 4:  # before, every weight had to be an input too
        model.graph.inputs[:] = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
        model.ir_version = 4
    return model


def _read(path: Path) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A file as `large_weights.split_weights` would give it; without arrays if it cannot be read so."""
    arrays: dict[str, Any] = {}
    try:
        if (apart := large_weights.read(path)) is None:
            proto = onnx.load(path, load_external_data=False)
        else:
            proto, arrays = apart
    except Exception as error:  # protobuf raises its own kinds for every sort of damage
        raise RequestError(unreadable(path, error)) from error
    if not proto.graph.output and (kind := _kind(path)):
        raise RequestError(f"{path} is {kind}")
    if not proto.graph.output:
        raise RequestError(f"{path} is not a readable ONNX model (it has no outputs); download or export it again")
    return proto, arrays


def _model_of(path: Path, proto: onnx.ModelProto, arrays: dict[str, Any]) -> ir.Model:
    """The model in a protobuf of `_read`: checked, with its external data, and in opset `OPSET` or newer."""
    if fault := _dangling(proto.graph) or tensor_sizes.missing(proto, path.parent):
        raise ValueError(fault)
    opset = _known_opset(proto)
    if arrays and (opset < OPSET or any(tensor.external_data for tensor in proto.graph.initializer)):
        proto, arrays = onnx.load(path, load_external_data=False), {}
    arrays, repaired = _checked(path, proto, arrays, opset)
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto, convert_version=True)
    elif not arrays and opset >= OPSET:
        arrays = large_weights.take_external(proto, path.parent)
    onnx.load_external_data_for_model(proto, str(path.parent))
    if repaired and not arrays and proto.ByteSize() < tensor_sizes.MAX_PROTOBUF_BYTES:
        onnx.checker.check_model(repairs.with_ranks(proto))
    repairs.make_dense(proto.graph)
    repairs.name_nodes_apart(proto.graph)
    if opset < OPSET:
        proto = _converted(proto, opset)
        logger.warning("%s has opset %d; it is read as opset %d (onnx.version_converter)", path, opset, OPSET)
    _open_sizes(proto.graph)
    map_types.clear(proto.graph)
    return large_weights.join_weights(proto, arrays)


def _checked(path: Path, proto: onnx.ModelProto, arrays: dict[str, Any], opset: int) -> tuple[dict[str, Any], int]:
    """Runs the checker of onnx, but for a repaired graph without arrays, which is checked with its external data.

    Returns:
        The arrays, with those of linked files, which the checker would refuse; and the number of repairs.
    """
    is_linked = not arrays and tensor_sizes.is_linked(proto, path.parent)
    if is_linked:
        if fault := tensor_sizes.fault(proto, path.parent):
            raise ValueError(fault)
        if not proto.functions and opset >= OPSET:
            arrays = large_weights.take_external(proto, path.parent)
        tensor_sizes.embed(proto, path.parent)
    repaired = repairs.name_graphs(proto.graph) + repairs.mark_fused_norms(proto.graph, opset)
    if arrays:
        onnx.checker.check_model(repairs.with_ranks(large_weights.emptied(proto, arrays)))
    elif not repaired:
        ranked = repairs.with_ranks(proto)  # by its path otherwise, since files beside it are checked, too
        onnx.checker.check_model(str(path) if ranked is proto and not is_linked else ranked)
    if not arrays and (fault := tensor_sizes.fault(proto, path.parent)):
        raise ValueError(fault)
    return arrays, repaired


def unreadable(path: Path, error: Exception) -> str:
    """Returns the message for a file that protobuf cannot read, with its kind if that is known.

    Args:
        path: The file.
        error: Exception of protobuf.
    """
    if kind := _kind(path):
        return f"{path} is {kind}"
    return f"{path} is not a readable ONNX model ({one_line(error)}); download or export it again"


def _kind(path: Path) -> str:
    """The kind of a file that is no ONNX model, by its first bytes; "" if it is unknown."""
    with path.open("rb") as file:
        head = file.read(64)
    return next((kind for magic, kind in OTHER_KINDS.items() if head[magic[0] :].lstrip().startswith(magic[1])), "")


def _converted(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in opset `OPSET`. Raises ValueError with the converter's reason where it cannot."""
    try:
        converted = onnx.version_converter.convert_version(proto, OPSET)
        onnx.checker.check_model(converted)
    except Exception as error:  # the converter's kinds and the checker's
        raise ValueError(
            f"it has opset {opset}, which onnx.version_converter cannot bring to {OPSET} ({one_line(error)}); export "
            f"it again with opset {OPSET} or newer"
        ) from error
    converted.ir_version = proto.ir_version
    if opset < RESIZE_OPSET:
        for graph in repairs.graphs(converted.graph):
            _resize_as_before(graph)
    return converted


def _resize_as_before(graph: onnx.GraphProto) -> None:
    """Writes the semantics of Resize before opset 11 as attributes, which the converter leaves to the new defaults.

    Pixel x of the result is at x / scale of the input; the nearest is the next one below, for a smaller result the next
    one above (onnxruntime's UpsampleBase). Raises ValueError for a Resize that does both.
    """
    arrays = {tensor.name: tensor for tensor in graph.initializer}
    arrays |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    for node in graph.node:
        if node.op_type != "Resize":
            continue
        node.attribute.append(onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        if any(attribute.name == "mode" and attribute.s != b"nearest" for attribute in node.attribute):
            continue
        tensor = arrays.get(node.input[2])  # else computed, as in pyramids of features, which grow
        scales = np.ones(1) if tensor is None else onnx.numpy_helper.to_array(tensor)
        if scales.min() < 1 < scales.max():
            raise ValueError(f"Resize {node.name or node.output[0]} of opset 10 grows one axis and shrinks another")
        mode = "ceil" if scales.min() < 1 else "floor"
        node.attribute.append(onnx.helper.make_attribute("nearest_mode", mode))


def _open_sizes(graph: onnx.GraphProto) -> None:
    """Make sizes that say nothing dynamic: below 1, and names that exporters give to any unknown size alike."""
    for value in (value for part in repairs.graphs(graph) for value in (*part.input, *part.output, *part.value_info)):
        for size in value.type.tensor_type.shape.dim:
            anonymous = size.HasField("dim_param") and (
                size.dim_param == "None" or not any(letter.isalpha() for letter in size.dim_param)
            )
            if anonymous or (size.HasField("dim_value") and size.dim_value < 1):
                size.Clear()


def _known_opset(proto: onnx.ModelProto) -> int:
    """The model's opset. Raises ValueError for one that is too new to be read."""
    opset, newest = (
        next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), OPSET),
        onnx.defs.onnx_opset_version(),
    )
    if opset > newest:
        raise ValueError(
            f"it has opset {opset}, onnx {onnx.__version__} knows up to {newest}; update onnx or export an older one"
        )
    return opset


def _dangling(main: onnx.GraphProto) -> str:
    """The fault of a graph in which a node can never run, or ""."""
    available = {"", *(value.name for value in (*main.input, *main.initializer))}
    available |= {tensor.values.name for tensor in main.sparse_initializer}
    computed = {name for node in main.node for name in node.output}
    for node in main.node:
        if lost := [name for name in node.input if name not in available and name not in computed]:
            what = f"{node.op_type} {node.name or node.output[0]} reads {lost[0]}"
            return f"{what}, which is no input, no initializer, and computed nowhere"
    waiting = list(main.node)
    while waiting:
        blocked = []
        for node in waiting:
            if available.issuperset(node.input):
                available.update(node.output)
            else:
                blocked.append(node)
        if len(blocked) == len(waiting):
            circle = ", ".join(node.name or node.output[0] for node in blocked[:5])
            return f"its nodes read each other's results in a circle: {circle}"
        waiting = blocked
    return ""


def save(model: ir.Model, path: str | Path) -> Path:
    """Writes a model atomically; the same model gives the same bytes.

    Weights beyond protobuf's limit of 2 GB go to PATH.data.

    Args:
        model: Model to write.
        path: ONNX file.

    Returns:
        The path.
    """
    if query.weight_bytes(model) > tensor_sizes.MAX_PROTOBUF_BYTES:
        return save_mapped(model, path)
    model.producer_name = PRODUCER
    model.producer_version = None
    model.doc_string = None
    with replacing(path) as temporary, temporary.open("wb") as file:
        large_weights.write(file, model, map_types.restore)
    return Path(path)


def save_mapped(model: ir.Model, path: str | Path, least: int = MAPPED_BYTES) -> Path:
    """Writes a model with large initializers in PATH.data, for `load_mapped`.

    They have their in-memory layout; large ones begin on a page boundary.

    Args:
        model: Model to write.
        path: ONNX file.
        least: Size in bytes above which an initializer goes to PATH.data.

    Returns:
        The path.
    """
    path = Path(path)
    require_place(mapped(path))
    model.producer_name, model.producer_version, model.doc_string = PRODUCER, None, None
    with replacing(path) as temporary:
        ir.save(
            model,
            temporary,
            format="protobuf",
            external_data=mapped(path).name,
            size_threshold_bytes=least,
            alignment=PAGE,
        )
    return path


def _load_compressed(path: Path) -> ir.Model:
    with tempfile.NamedTemporaryFile(suffix=".onnx") as plain:
        try:
            plain.write(unzipped(path.read_bytes()))
        except (EOFError, OSError, zlib.error) as error:
            raise RequestError(f"{path} is damaged ({one_line(error)}); download or export it again") from error
        plain.flush()
        return load(plain.name)


def load_mapped(path: str | Path) -> ir.Model:
    """Reads a model of `save_mapped`; large initializers are read-only memory maps, which processes share.

    Args:
        path: ONNX file.

    Returns:
        The model.

    Raises:
        RequestError: A file is missing or damaged.
    """
    path = Path(path)
    try:
        if (data := mapped(path)).is_symlink() or (data.is_file() and data.stat().st_nlink > 1):
            copy_file(data, data)  # onnx_ir refuses a file with several links
        model = ir.load(path, format="protobuf")
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                value.const_value.numpy()  # maps the file, which fails if data are missing
    except Exception as error:  # protobuf, onnx_ir, OSError
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, it is rebuilt") from error
    return model


def digest(model: ir.Model) -> str:
    """Returns the SHA-256 of the computation: opsets, inputs, outputs, nodes with attributes, weights.

    Producer and doc strings do not count.

    Args:
        model: The model.
    """
    sha = hashlib.sha256(repr(sorted(model.opset_imports.items())).encode())
    _digest(sha, model.graph)
    return sha.hexdigest()


def _digest(sha: Any, graph: ir.Graph) -> None:
    def add(*parts: object) -> None:
        sha.update("\x1f".join(map(str, parts)).encode() + b"\x1e")

    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            add(kind, value.name, value.dtype, value.shape)
    for name in sorted(graph.initializers):
        array = graph.initializers[name].const_value
        if array is not None:
            add("initializer", name, array.dtype, array.shape)
            sha.update(_content(array))
    for node in graph:
        add(node.domain, node.op_type, [v.name if v else "" for v in node.inputs], [v.name for v in node.outputs])
        for key in sorted(node.attributes):
            attribute = node.attributes[key]
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                add(key, "tensor", tensor.dtype, tensor.shape, hashlib.sha256(_content(tensor)).hexdigest())
            elif attribute.type == ir.AttributeType.GRAPH:
                add(key, "graph")
                _digest(sha, attribute.as_graph())
            elif attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
                add(key, attribute.type, np.asarray(attribute.value, np.float32).tolist())  # as a file keeps them
            else:
                add(key, attribute.type, attribute.value)


def _content(tensor: ir.TensorProtocol) -> bytes | memoryview:
    """The elements of a tensor as bytes; strings, such as the classes of a classifier, with their sizes."""
    if isinstance(tensor, ir.StringTensor):
        return b"".join(b"%d:%s" % (len(text), text) for text in tensor.string_data())
    return large_weights.data_of(tensor)


def serialized(model: ir.Model) -> bytes:
    """Returns the bytes of an ONNX file; the same model gives the same bytes.

    Args:
        model: The model.
    """
    proto = ir.to_proto(model)
    map_types.restore(proto.graph)
    return bytes(proto.SerializeToString(deterministic=True))


def require_opset(model: ir.Model) -> None:
    """Checks that the model's opset has per-channel int8.

    Args:
        model: The model.

    Raises:
        RequestError: The opset is older than 13.
    """
    opset = model.opset_imports.get("", 0)
    if opset < OPSET:
        raise RequestError(
            f"the model has opset {opset}, int8 per channel needs {OPSET} or newer; convert it with "
            "onnx.version_converter"
        )
