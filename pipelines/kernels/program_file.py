"""Programs of native kernels as one memory-mapped file: opening it needs neither the graph nor what reads graphs.

    int64, little endian: size of the header; the header, JSON; from the next multiple of `PAGE` on every array,
    C-contiguous, at a multiple of `LINE` bytes

The header is {"version", "programs": [program, ...]}, these as {class: fields}; an array in them is {"array": [dtype,
shape, offset behind the header]}, with "transposed" where it is that array's transpose, and "outside" where it lies in
another file, at that offset of it: arrays that share memory do so in the file and when it is read.
"""

from __future__ import annotations

import functools
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import replacing
from pipelines.kernels.arrays import Array

PAGE, LINE = 4096, 64  # bytes
Classes = Mapping[str, type]


def save(
    path: Path,
    programs: Sequence[Any],
    classes: Classes,
    version: int,
    outside: Mapping[tuple[int, int], int] = MappingProxyType({}),
) -> None:
    """Write programs, dataclasses of `classes`, to `path`, whole or not at all.

    outside: {(address, bytes) of an array that lies in another file, which `load` is given: its offset there}; such
    arrays are not written.
    """
    offsets: dict[tuple[int, tuple[int, ...]], int] = {}  # (address, shape) -> offset
    arrays: list[Array] = []
    end = 0

    def put(array: Array) -> dict[str, Any]:
        nonlocal end
        if array.flags.c_contiguous and (offset := outside.get((array.ctypes.data, array.nbytes))) is not None:
            return {"array": [array.dtype.str, array.shape, offset], "outside": True}
        transposed = array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous
        flat = np.ascontiguousarray(array.T if transposed else array)
        key = (flat.ctypes.data, flat.shape)
        if key not in offsets:
            offsets[key] = end
            arrays.append(flat)  # kept, so that no other array gets its address
            end += -(-flat.nbytes // LINE) * LINE
        return {"array": [flat.dtype.str, flat.shape, offsets[key]], **({"transposed": True} if transposed else {})}

    def encoded(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return put(value)
        if isinstance(value, list | tuple):
            return [encoded(item) for item in value]
        if type(value).__name__ in classes:
            return {type(value).__name__: {field.name: encoded(getattr(value, field.name)) for field in fields(value)}}
        return value

    header = json.dumps({"version": version, "programs": encoded(programs)}).encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(bytes(-file.tell() % PAGE))
        for array in arrays:
            file.write(array.data)
            file.write(bytes(-array.nbytes % LINE))


def load(path: str | Path, classes: Classes, version: int, outside: Path | None = None) -> tuple[Any, ...]:
    """The programs in a file that `save` wrote, a tuple, their arrays read-only views of it, or of the file `outside`.

    Raises RequestError where a file is missing, damaged or of another version.
    """

    @functools.cache
    def mapped(path: str | Path) -> mmap.mmap:
        with Path(path).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    try:
        content = mapped(path)
        size = int.from_bytes(content[:8], "little")
        first = -(-(8 + size) // PAGE) * PAGE
        header = json.loads(content[8 : 8 + size])
        if header["version"] != version:
            raise ValueError(f"its version is {header['version']}, wanted {version}")

        def decoded(value: Any) -> Any:
            if isinstance(value, list):
                return [decoded(item) for item in value]
            if not isinstance(value, dict):
                return value
            if "array" in value:
                dtype, shape, offset = value["array"]
                if value.get("outside"):
                    return np.ndarray(shape, dtype, mapped(outside), offset)
                flat = np.ndarray(shape, dtype, content, first + offset)
                return flat.T if value.get("transposed") else flat
            ((name, arguments),) = value.items()
            return classes[name](**{key: decoded(item) for key, item in arguments.items()})

        return tuple(map(decoded, header["programs"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, and it is made anew") from error
