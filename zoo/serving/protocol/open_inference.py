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
from zoo.serving.protocol import limits

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
BYTES = "BYTES"  # byte strings; in binary, each behind its length (4 bytes, little endian)
_LENGTH = struct.Struct("<I")
MAX_RANK = 8
MAX_SIZE = 2**31  # exclusive bound of every dimension and of their product


@dataclass(frozen=True)
class InferRequest:
    """Inference request of the Open Inference Protocol.

    Attributes:
        request_id: Value of "id"; "" without one.
        inputs: Tensors by name.
        outputs: Requested outputs, and whether they are returned in binary; empty for all outputs.
        binary: Whether all outputs are returned in binary if `outputs` is empty.
    """

    request_id: str
    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, bool]
    binary: bool


def parse_request(body: bytes, json_length: int = -1, received: int = 0) -> InferRequest:
    """Parses an inference request of the Open Inference Protocol.

    Args:
        body: Request body.
        json_length: Value of Inference-Header-Content-Length, in bytes; -1 without this header.
        received: Size of the body as received, in bytes; 0 if it was not compressed.

    Returns:
        The request.

    Raises:
        ContentTooLarge: The body holds too many values.
        RequestError: The body is no valid request. Sizes are checked before memory is allocated.
    """
    if json_length > len(body):
        raise RequestError(f"Inference-Header-Content-Length is {json_length}, and the body has {len(body)} bytes")
    text, tail = (body, memoryview(b"")) if json_length < 0 else (body[:json_length], memoryview(body)[json_length:])
    received = received or len(body)
    limits.require_json(text, received)
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request is no JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("inputs"), list):
        raise RequestError('the request must be an object with "inputs", a list of tensors')
    inputs: dict[str, NDArray[Any]] = {}
    offset = 0
    for tensor in content["inputs"]:
        name, array, size = _parse_tensor(tensor, tail[offset:], received)
        if name in inputs:
            raise RequestError(f"the input {name!r} is given twice")
        inputs[name] = array
        offset += size
    if offset != len(tail):
        raise RequestError(f"the body has {len(tail)} bytes of tensors, and the inputs take {offset}")
    parameters = _parameters(content)
    if any(name.startswith("sequence_") for name in parameters):
        raise RequestError("found a sequence, expected a request by itself: the models keep no state")
    binary = _flag(parameters, "binary_data_output", False)
    outputs: dict[str, bool] = {}
    for tensor in _optional_list(content, "outputs"):
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise RequestError('an output must be an object with a "name"')
        if (name := str(tensor["name"])) in outputs:
            raise RequestError(f"the output {name!r} is requested twice")
        parameters = _parameters(tensor, f"the output {name!r}", ("binary_data",))
        outputs[name] = _flag(parameters, "binary_data", binary)
    request_id = content.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise RequestError('"id" must be text')
    return InferRequest(request_id or "", inputs, outputs, binary)


def encode_response(
    request: InferRequest, model: str, version: str, outputs: Mapping[str, NDArray[Any]]
) -> tuple[bytes, int]:
    """Encodes an inference response of the Open Inference Protocol.

    Args:
        request: The request.
        model: Public name of the model.
        version: Version of the model.
        outputs: Outputs of the model: {name: array, first axis = samples}.

    Returns:
        The body, and the length of its JSON header in bytes; -1 without binary tensors.

    Raises:
        RequestError: A requested output does not exist, or JSON cannot represent one of its values.
    """
    requested = request.outputs or dict.fromkeys(outputs, request.binary)
    if unknown := [name for name in requested if name not in outputs]:
        raise RequestError(f"there is no output {unknown[0]!r}; the model has {', '.join(outputs)}")
    tensors, buffers = [], []
    for name, binary in requested.items():
        array = np.ascontiguousarray(outputs[name])
        tensor: dict[str, Any] = {"name": name, "datatype": tensor_type(array.dtype), "shape": list(array.shape)}
        if binary:
            buffers.append(_to_bytes(array))
            tensor["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            tensor["data"] = _to_json(array)
        tensors.append(tensor)
    response: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": tensors}
    if request.request_id:
        response["id"] = request.request_id
    text = orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([text, *buffers]), len(text)) if buffers else (text, -1)


def tensor_type(dtype: np.dtype[Any]) -> str:
    """Returns the protocol's name of a data type.

    Args:
        dtype: Data type of an array; objects and strings are BYTES.
    """
    return BYTES if dtype.kind in "OSU" else NAMES[dtype]


def tensor_metadata(ports: Mapping[str, tuple[np.dtype[Any], Sequence[int | None]]]) -> list[dict[str, Any]]:
    """Describes tensors as in the protocol's model metadata.

    Args:
        ports: Data type and shape by name; None is a dynamic dimension.

    Returns:
        {"name", "datatype", "shape"} of every tensor, with -1 for a dynamic dimension.
    """
    return [
        {"name": name, "datatype": tensor_type(dtype), "shape": [-1 if size is None else size for size in shape]}
        for name, (dtype, shape) in ports.items()
    ]


def require_finite(inputs: Mapping[str, NDArray[Any]]) -> None:
    """Checks that inputs hold numbers; int8 models would compute a result for NaN.

    Args:
        inputs: Tensors by name.

    Raises:
        RequestError: A value is NaN or infinite.
    """
    for name, array in inputs.items():
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            place = np.argwhere(~finite)[0].tolist()
            raise RequestError(f"the input {name!r} holds {array[tuple(place)]} at {place}, expected finite numbers")


def _optional_list(content: Mapping[str, Any], name: str) -> list[Any]:
    value = content.get(name)
    if value is not None and not isinstance(value, list):
        raise RequestError(f'"{name}" must be a list')
    return value or []


def _parameters(content: Mapping[str, Any], of: str = "", allowed: Sequence[str] = ()) -> Mapping[str, Any]:
    """The parameters of a request or of a tensor, whose names must be known."""
    value = content.get("parameters")
    if value is not None and not isinstance(value, dict):
        raise RequestError('"parameters" must be an object')
    if allowed and (unknown := [name for name in value or () if name not in allowed]):
        raise RequestError(f"{of} has the parameter {unknown[0][:40]!r}, expected {' or '.join(allowed)}")
    return value or {}


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"the parameter {name!r} is {str(value)[:40]!r}, expected true or false")
    return default if value is None else value


def _parse_tensor(tensor: Any, tail: memoryview, received: int) -> tuple[str, NDArray[Any], int]:
    """Name and array of an input, and the number of bytes of `tail` that it takes."""
    if not isinstance(tensor, dict) or not isinstance(name := tensor.get("name"), str):
        raise RequestError('an input must be an object with a "name"')
    shape, datatype = tensor.get("shape"), tensor.get("datatype")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_RANK
        or not all(type(size) is int and 0 <= size < MAX_SIZE for size in shape)
    ):
        raise RequestError(f"the shape of the input {name!r} must be a list of up to {MAX_RANK} whole numbers")
    if math.prod(size or 1 for size in shape) >= MAX_SIZE:  # numpy refuses such shapes, even if a dimension is 0
        message = f"expected sizes with a product below {MAX_SIZE:,}"
        raise RequestError(f"the input {name!r} has the shape {shape}; {message}")
    if not isinstance(datatype, str) or (datatype not in DATATYPES and datatype != BYTES):
        types = ", ".join(DATATYPES)
        raise RequestError(f"the input {name!r} has the datatype {datatype!r}; expected {types} or {BYTES}")
    count = math.prod(shape)
    # a content_type is a hint for other servers
    size = _parameters(tensor, f"the input {name!r}", ("binary_data_size", "content_type")).get("binary_data_size")
    if datatype == BYTES:
        limits.VALUES.require(count, received)
    if size is None:
        return name, _from_json(name, tensor.get("data"), shape, count, datatype), 0
    if tensor.get("data") is not None:
        raise RequestError(f'the input {name!r} has "data" and "binary_data_size", expected one of them')
    if type(size) is not int or not 0 <= size <= len(tail):
        raise RequestError(f"the input {name!r} claims {size!r} bytes, of which the body has {len(tail)}")
    if datatype == BYTES:
        return name, _parse_strings(name, bytes(tail[:size]), count).reshape(shape), size
    dtype = DATATYPES[datatype]
    if size != count * dtype.itemsize:
        raise RequestError(f"the input {name!r} has {size} bytes; its shape needs {count * dtype.itemsize}")
    array = np.frombuffer(bytes(tail[:size]), dtype).reshape(shape)  # a copy, for alignment
    return name, array, size


def _from_json(name: str, data: Any, shape: list[int], count: int, datatype: str) -> NDArray[Any]:
    if not isinstance(data, list):
        raise RequestError(f'the input {name!r} has no "data", a list')
    if datatype == BYTES:
        flat = _flat(data)
        if len(flat) != count or not all(isinstance(item, str) for item in flat):
            raise RequestError(f"the input {name!r} must hold {count} texts")
        strings = np.empty(count, object)
        strings[:] = [item.encode() for item in flat]
        return strings.reshape(shape)
    dtype = DATATYPES[datatype]
    _require_numbers(name, data)
    try:
        array = np.array(data)
        if array.size != count:
            raise RequestError(f"the input {name!r} holds {array.size} numbers; its shape needs {count}")
        kinds = {"b": "b", "u": "biu", "i": "biu"}.get(dtype.kind, "biuf")
        if array.size and array.dtype.kind not in kinds:
            raise RequestError(f"the input {name!r} must hold numbers of the type {datatype}")
        if dtype.kind in "iu" and array.size:
            low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
            if int(array.min()) < low or int(array.max()) > high:
                raise RequestError(f"the input {name!r} holds a number out of the range of {datatype}")
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array.astype(dtype).reshape(shape))
    except (ValueError, OverflowError, TypeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the input {name!r} must hold numbers, flat or in lists of equal lengths") from error


def _require_numbers(name: str, data: list[Any]) -> None:
    """Raises RequestError for a nested list with other elements than numbers.

    With one string in the list, numpy would allocate the length of that string for every element.
    """
    while (kinds := set(map(type, data))) == {list}:
        data = list(chain.from_iterable(data))
    if not kinds <= {int, float, bool}:
        raise RequestError(f"the input {name!r} must hold numbers, flat or in lists of equal lengths")


def _flat(data: list[Any]) -> list[Any]:
    elements: list[Any] = []
    stack = data[::-1]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item[::-1]
        else:
            elements.append(item)
    return elements


def _parse_strings(name: str, data: bytes, count: int) -> NDArray[Any]:
    if len(data) < count * _LENGTH.size:
        raise RequestError(f"the input {name!r} has {len(data)} bytes, too few for {count} elements")
    strings, offset = np.empty(count, object), 0
    for i in range(count):
        if offset + _LENGTH.size > len(data):
            raise RequestError(f"the input {name!r} ends inside its element {i}")
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size
        if offset + length > len(data):
            raise RequestError(f"the input {name!r} ends inside its element {i}")
        strings[i] = data[offset : offset + length]
        offset += length
    if offset != len(data):
        raise RequestError(f"the input {name!r} has {len(data) - offset} bytes behind its last element")
    return strings


def _to_bytes(array: NDArray[Any]) -> bytes:
    if array.dtype.kind not in "OSU":
        return array.tobytes()
    parts = []
    for item in array.ravel().tolist():
        data = item if isinstance(item, bytes) else str(item).encode()
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def _to_json(array: NDArray[Any]) -> Any:
    flat = array.ravel()
    if array.dtype.kind in "OSU":
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in flat.tolist()]
    if array.dtype.kind == "f" and not np.isfinite(flat).all():
        raise RequestError("a result is no finite number, which JSON cannot represent; request binary data")
    return flat.astype(np.float64).tolist() if array.dtype == np.float16 else flat
