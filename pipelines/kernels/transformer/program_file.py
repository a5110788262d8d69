"""A Transformer's programs as one file, so that who opens it needs neither the graph nor what reads graphs.

    int64, little endian: bytes of the header; the header, JSON; from the next multiple of `PAGE` on every array,
    C-contiguous, at a multiple of `LINE` bytes

The header is {"form": FORM, "programs": [encoder, decoder]}, these as {class: fields}; an array in them is {"array":
[dtype, shape, offset behind the header]}, with "transposed" where it is that array's transpose: what shares memory does
so in the file and when it is read.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import code, replacing
from pipelines.kernels.arrays import Array
from pipelines.kernels.transformer import program
from pipelines.kernels.transformer.program import EncoderProgram, Program

FORM = code(
    *(f"kernels/transformer/{each}.py" for each in ("program_file", "from_graph", "program")), "quantization/scales.py"
)  # what a file holds, and how
SUFFIX = ".zoo"
PAGE, LINE = 4096, 64  # bytes
KNOWN = {
    each: getattr(program, each)
    for each in ("EncoderProgram", "Program", "RowLinear", "Embed", "Norm", "Linear", "Attention")
}
KNOWN |= {each: getattr(program, each) for each in ("SelfAttention", "CrossAttention", "Vocabulary", "Levels")}


def save(path: Path, programs: tuple[EncoderProgram, Program]) -> None:
    """Write both, whole or not at all."""
    places: dict[tuple[int, tuple[int, ...]], int] = {}  # (address, shape) -> offset
    arrays: list[Array] = []
    end = 0

    def put(array: Array) -> dict[str, Any]:
        nonlocal end
        turned = array.ndim == 2 and array.flags.f_contiguous and not array.flags.c_contiguous
        flat = np.ascontiguousarray(array.T if turned else array)
        key = (flat.ctypes.data, flat.shape)
        if key not in places:
            places[key] = end
            arrays.append(flat)  # kept, so that no other array gets its address
            end += -(-flat.nbytes // LINE) * LINE
        return {"array": [flat.dtype.str, flat.shape, places[key]], **({"transposed": True} if turned else {})}

    def said(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return put(value)
        if isinstance(value, list | tuple):
            return [said(each) for each in value]
        if type(value).__name__ in KNOWN:
            return {type(value).__name__: {each.name: said(getattr(value, each.name)) for each in fields(value)}}
        return value

    header = json.dumps({"form": FORM, "programs": said(programs)}).encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(bytes(-file.tell() % PAGE))
        for each in arrays:
            file.write(each.data)
            file.write(bytes(-each.nbytes % LINE))


def load(path: str | Path) -> tuple[EncoderProgram, Program]:
    """What `save` wrote; the arrays are read-only views of the file. Raises RequestError where it is missing or
    damaged.
    """
    try:
        with Path(path).open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = int.from_bytes(content[:8], "little")
        first = -(-(8 + size) // PAGE) * PAGE
        found = json.loads(content[8 : 8 + size])
        if found["form"] != FORM:
            raise ValueError(f"its form is {found['form']}, wanted {FORM}")

        def get(value: Any) -> Any:
            if isinstance(value, list):
                return [get(each) for each in value]
            if not isinstance(value, dict):
                return value
            if "array" in value:
                dtype, shape, offset = value["array"]
                flat = np.ndarray(shape, dtype, content, first + offset)
                return flat.T if value.get("transposed") else flat
            ((name, held),) = value.items()
            return KNOWN[name](**{key: get(each) for key, each in held.items()})

        encoder, decoder = map(get, found["programs"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, and it is made anew") from error
    return encoder, decoder
