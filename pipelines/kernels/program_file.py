"""Programs of native kernels as a memory-mapped file, opened without the graph and without a graph library.

    int64, little endian: size of the header; the header, JSON; from the next multiple of `PAGE` on every array,
    C-contiguous, at a multiple of `LINE` bytes

The header is {"version", "programs": [program, ...]}, each program as {class: fields}. An array is {"array": [dtype,
shape, offset behind the header]}, with "transposed" for the array's transpose, and "outside" for an array in another
file at that offset. Arrays that share memory share it in the file and after reading.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
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
HUGE_PAGE = 2**21
Classes = Mapping[str, type]


class MappedFile(mmap.mmap):
    """A file in memory, read-only, which knows its path.

    Attributes:
        path: The file.
    """

    path: Path

    @classmethod
    def opened(cls, path: str | Path, huge_pages: bool = False) -> MappedFile:
        """Maps a file.

        Args:
            path: The file.
            huge_pages: Asks the system for huge pages, for files that fit into memory.
        """
        with Path(path).open("rb") as file:
            made = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        made.path = Path(path)
        if huge_pages and len(made) >= HUGE_PAGE:
            with contextlib.suppress(OSError, AttributeError):  # of systems without them
                made.madvise(mmap.MADV_HUGEPAGE)
        return made

    def offset(self, array: Array) -> int:
        """Returns the place of an array in the file, in bytes.

        Args:
            array: A view of the file.
        """
        return int(array.ctypes.data - np.frombuffer(self, np.uint8).ctypes.data)


def save(
    path: Path,
    programs: Sequence[Any],
    classes: Classes,
    version: int,
    outside: Mapping[tuple[int, int], int] = MappingProxyType({}),
) -> None:
    """Writes programs atomically.

    Args:
        path: File to write.
        programs: Dataclasses of `classes`.
        classes: Dataclass by name.
        version: Version of the programs.
        outside: Offset by (address, bytes) of arrays in another file, which `load` takes; they are not written.
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
            members = [field.name for field in fields(value) if field.init]
            return {type(value).__name__: {name: encoded(getattr(value, name)) for name in members}}
        return value

    header = json.dumps({"version": version, "programs": encoded(programs)}).encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(bytes(-file.tell() % PAGE))
        for array in arrays:
            file.write(array.data)
            file.write(bytes(-array.nbytes % LINE))


def load(
    path: str | Path, classes: Classes, version: int, outside: Path | None = None, *, huge_pages: bool = False
) -> tuple[Any, ...]:
    """Reads programs of `save`; their arrays are read-only views of the file, or of the file `outside`.

    Args:
        path: The file.
        classes: Dataclass by name.
        version: Expected version.
        outside: File with further arrays.
        huge_pages: Asks the system for huge pages for these arrays.

    Returns:
        The programs.

    Raises:
        RequestError: A file is missing, damaged or of another version.
    """
    mapped = functools.cache(MappedFile.opened)
    try:
        content = mapped(path)
        size = int.from_bytes(content[:8], "little")
        first = -(-(8 + size) // PAGE) * PAGE
        header = json.loads(content[8 : 8 + size])
        if header["version"] != version:
            raise ValueError(f"its version is {header['version']}, expected {version}")

        def decoded(value: Any) -> Any:
            if isinstance(value, list):
                return [decoded(item) for item in value]
            if not isinstance(value, dict):
                return value
            if "array" in value:
                dtype, shape, offset = value["array"]
                if value.get("outside"):
                    return _view(mapped(outside, huge_pages), shape, dtype, offset)
                flat = _view(content, shape, dtype, first + offset)
                return flat.T if value.get("transposed") else flat
            ((name, arguments),) = value.items()
            return classes[name](**{key: decoded(item) for key, item in arguments.items()})

        return tuple(map(decoded, header["programs"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, it is rebuilt") from error


def _view(content: mmap.mmap, shape: Sequence[int], dtype: str, offset: int) -> Array:
    """Returns an array that lies in a file.

    Raises:
        ValueError: It does not lie within the file; numpy itself computes its size in 64 bits, which may wrap around.
    """
    if min((offset, *shape)) < 0 or offset + math.prod(shape) * np.dtype(dtype).itemsize > len(content):
        raise ValueError(f"an array of {shape} at {offset} is not within its {len(content):,} bytes")
    return np.ndarray(shape, dtype, content, offset)
