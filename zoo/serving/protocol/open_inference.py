"""Bodies of the Open Inference Protocol, version 2, over REST: JSON tensors, and the binary tensor extension.

Sources: https://github.com/kserve/open-inference-protocol (inference_rest.md) and the extension for binary tensor data
of Triton Inference Server (docs/protocol/extension_binary_data.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pipelines.core.errors import RequestError

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
BYTES = "BYTES"  # elements of any length, each behind its length in four bytes
_LENGTH = struct.Struct("<I")
MAX_RANK = 8
MAX_SIZE = 2**31  # what every size, and all of a shape together, lie below


@dataclass(frozen=True)
class InferRequest:
    """Tensors by name, and how the answer is wanted.

    outputs: names of those that are wanted and whether in binary; empty: all, `binary` says how.
    """

    identity: str
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, bool]
    binary: bool


def tensor_type(dtype: np.dtype[Any]) -> str:
    """The protocol's name of an array's type."""
    return BYTES if dtype.kind in "OSU" else NAMES[dtype]


def parse(body: bytes, header: int = -1) -> InferRequest:
    """Parses an inference request of the Open Inference Protocol.

    Args:
        body: Request body.
        header: Value of Inference-Header-Content-Length; -1 without this header.

    Returns:
        The request.

    Raises:
        RequestError: The body is no valid request. Sizes are checked before memory is allocated.
    """
    if header > len(body):
        raise RequestError(f"Inference-Header-Content-Length is {header}, and the body has {len(body)} bytes")
    text, rest = (body, memoryview(b"")) if header < 0 else (body[:header], memoryview(body)[header:])
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("inputs"), list):
        raise RequestError('the request must be an object with "inputs", a list of tensors')
    inputs: dict[str, NDArray[Any]] = {}
    at = 0
    for tensor in found["inputs"]:
        name, array, size = _tensor(tensor, rest[at:])
        if name in inputs:
            raise RequestError(f"the input {name!r} stands twice")
        inputs[name] = array
        at += size
    if at != len(rest):
        raise RequestError(f"the body has {len(rest)} bytes of tensors, and the inputs take {at}")
    binary = _parameters(found).get("binary_data_output") is True
    outputs = {}
    for tensor in _listed(found, "outputs"):
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise RequestError('an output must be an object with a "name"')
        outputs[tensor["name"]] = _parameters(tensor).get("binary_data", binary) is True
    identity = found.get("id", "")
    if not isinstance(identity, str):
        raise RequestError('"id" must be text')
    return InferRequest(identity, inputs, outputs, binary)


def encode(request: InferRequest, model: str, version: str, outputs: Mapping[str, NDArray[Any]]) -> tuple[bytes, int]:
    """Encodes an inference response of the Open Inference Protocol.

    Args:
        request: The request.
        model: Public name of the model.
        version: Version of the model.
        outputs: Outputs of the model by name.

    Returns:
        The body, and the length of its JSON header; -1 without binary tensors.

    Raises:
        RequestError: A requested output does not exist.
    """
    wanted = request.outputs or dict.fromkeys(outputs, request.binary)
    if unknown := [name for name in wanted if name not in outputs]:
        raise RequestError(f"there is no output {unknown[0]!r}; the model has {', '.join(outputs)}")
    tensors, blobs = [], []
    for name, binary in wanted.items():
        array = np.ascontiguousarray(outputs[name])
        described: dict[str, Any] = {
            "name": name,
            "datatype": tensor_type(array.dtype),
            "shape": list(array.shape),
        }
        if binary:
            blobs.append(_blob(array))
            described["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            described["data"] = _plain(array)
        tensors.append(described)
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": tensors}
    if request.identity:
        answer["id"] = request.identity
    text = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([text, *blobs]), len(text)) if blobs else (text, -1)


def metadata(
    ports: Mapping[str, tuple[np.dtype[Any], Sequence[int | None]]],
) -> list[dict[str, Any]]:
    """Tensors as the protocol's metadata names them, -1 for an axis of any length."""
    return [
        {"name": name, "datatype": tensor_type(dtype), "shape": [-1 if each is None else each for each in shape]}
        for name, (dtype, shape) in ports.items()
    ]


def _listed(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    if value is not None and not isinstance(value, list):
        raise RequestError(f'"{name}" must be a list')
    return value or []


def _parameters(found: Mapping[str, Any]) -> Mapping[str, Any]:
    value = found.get("parameters")
    if value is not None and not isinstance(value, dict):
        raise RequestError('"parameters" must be an object')
    return value or {}


def _tensor(tensor: Any, rest: memoryview) -> tuple[str, NDArray[Any], int]:
    """Name and array of an input, and how many bytes of `rest` it takes."""
    if not isinstance(tensor, dict) or not isinstance(name := tensor.get("name"), str):
        raise RequestError('an input must be an object with a "name"')
    shape, datatype = tensor.get("shape"), tensor.get("datatype")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_RANK
        or not all(type(each) is int and 0 <= each < MAX_SIZE for each in shape)
    ):
        raise RequestError(f"the shape of the input {name!r} must be a list of up to {MAX_RANK} whole numbers")
    if math.prod(each or 1 for each in shape) >= MAX_SIZE:  # numpy refuses such, even where a size is 0
        raise RequestError(f"the input {name!r} has the shape {shape}; wanted sizes with a product below {MAX_SIZE:,}")
    if not isinstance(datatype, str) or (datatype not in DATATYPES and datatype != BYTES):
        raise RequestError(f"the input {name!r} has the datatype {datatype!r}; wanted {', '.join(DATATYPES)} or BYTES")
    count = math.prod(shape)
    size = _parameters(tensor).get("binary_data_size")
    if size is None:
        return name, _from_json(name, tensor.get("data"), shape, count, datatype), 0
    if type(size) is not int or not 0 <= size <= len(rest):
        raise RequestError(f"the input {name!r} claims {size!r} bytes, of which the body has {len(rest)}")
    if datatype == BYTES:
        return name, _strings(name, bytes(rest[:size]), count).reshape(shape), size
    dtype = DATATYPES[datatype]
    if size != count * dtype.itemsize:
        raise RequestError(f"the input {name!r} has {size} bytes; its shape wants {count * dtype.itemsize}")
    array = np.frombuffer(bytes(rest[:size]), dtype).reshape(shape)  # a copy: it must lie where its type wants
    return name, array, size


def _from_json(name: str, data: Any, shape: list[int], count: int, datatype: str) -> NDArray[Any]:
    if not isinstance(data, list):
        raise RequestError(f'the input {name!r} has no "data", a list')
    if datatype == BYTES:
        flat = _flat(data)
        if len(flat) != count or not all(isinstance(each, str) for each in flat):
            raise RequestError(f"the input {name!r} must hold {count} texts")
        strings = np.empty(count, object)
        strings[:] = [each.encode() for each in flat]
        return strings.reshape(shape)
    dtype = DATATYPES[datatype]
    _require_numbers(name, data)
    try:
        found = np.array(data)
        if found.size != count:
            raise RequestError(f"the input {name!r} holds {found.size} numbers; its shape wants {count}")
        kinds = {"b": "b", "u": "biu", "i": "biu"}.get(dtype.kind, "biuf")
        if found.size and found.dtype.kind not in kinds:
            raise RequestError(f"the input {name!r} must hold numbers of the type {datatype}")
        if dtype.kind in "iu" and found.size:
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            if int(found.min()) < low or int(found.max()) > high:
                raise RequestError(f"the input {name!r} holds a number beyond {datatype}")
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(found.astype(dtype).reshape(shape))
    except (ValueError, OverflowError, TypeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the input {name!r} must hold numbers, flat or in lists of equal lengths") from error


def _require_numbers(name: str, data: list[Any]) -> None:
    """Raise RequestError for a list, of lists or not, with what is no number: for one text numpy would give every
    element of the array as many bytes as that has.
    """
    while (kinds := set(map(type, data))) == {list}:
        data = list(chain.from_iterable(data))
    if not kinds <= {int, float, bool}:
        raise RequestError(f"the input {name!r} must hold numbers, flat or in lists of equal lengths")


def _flat(data: list[Any]) -> list[Any]:
    found: list[Any] = []
    waiting = data[::-1]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each[::-1]
        else:
            found.append(each)
    return found


def _strings(name: str, data: bytes, count: int) -> NDArray[Any]:
    if len(data) < count * _LENGTH.size:
        raise RequestError(f"the input {name!r} has {len(data)} bytes, too few for {count} elements")
    strings, at = np.empty(count, object), 0
    for i in range(count):
        if at + _LENGTH.size > len(data):
            raise RequestError(f"the input {name!r} ends inside its element {i}")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise RequestError(f"the input {name!r} ends inside its element {i}")
        strings[i] = data[at : at + length]
        at += length
    if at != len(data):
        raise RequestError(f"the input {name!r} has {len(data) - at} bytes behind its last element")
    return strings


def _blob(array: NDArray[Any]) -> bytes:
    if array.dtype.kind not in "OSU":
        return array.tobytes()
    parts = []
    for each in array.ravel().tolist():
        data = each if isinstance(each, bytes) else str(each).encode()
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def _plain(array: NDArray[Any]) -> Any:
    flat = array.ravel()
    if array.dtype.kind in "OSU":
        return [each.decode("utf-8", "replace") if isinstance(each, bytes) else str(each) for each in flat.tolist()]
    if array.dtype.kind == "f" and not np.isfinite(flat).all():
        raise RequestError("a result is no finite number, which JSON does not hold; ask for binary data")
    return flat.astype(np.float64).tolist() if array.dtype == np.float16 else flat
