"""Files of Marian: model.npz, and the .bin of Bergamot and Firefox, whose matrices may be int8.

A .bin (marian-dev, src/common/binary.cpp) is, little-endian: uint64 version 1; uint64 n; n times uint64 length of the
name, type, dimensions, bytes; the names, each with a zero at its end; the dimensions, int32; uint64 c and c bytes of
padding; the bytes of every tensor. A quantized one (intgemm8, intgemm16) holds the integers of the transposed matrix
row by row, of a table of embeddings those of the table itself, then float32 m: a weight is an integer / m. The float32
NAME_QuantMultA, if present, is the m of the activations that the matrix NAME is multiplied with.
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError

CONFIG = "special:model.yml"  # the tensor that holds the options
VERSION = struct.pack("<Q", 1)  # first bytes of a .bin
PLAIN = {0x101: "<i1", 0x402: "<f2", 0x404: "<f4", 0x408: "<f8"}
QUANTIZED = {0x4101: "<i1", 0x10001: "<i1", 0x4102: "<i2", 0x10002: "<i2"}  # of browsermt's and of Marian's own


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model file.

    Attributes:
        values: float32; dequantized if quantized.
        multiplier: Multiplier of a quantized tensor.
    """

    values: NDArray[np.float32]
    multiplier: float = 0.0


def tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Reads the tensors and options of a model.

    Args:
        path: A .npz or .bin file.

    Returns:
        Tensor by name, and the options in YAML.

    Raises:
        RequestError: The file is damaged or no model.
    """
    try:
        return _of_npz(path) if path.suffix == ".npz" else _of_bin(path.read_bytes())
    except OSError as error:
        raise RequestError(f"cannot read {path.name}: {error.strerror or error}") from error
    except (ValueError, KeyError, EOFError, struct.error, zipfile.BadZipFile) as error:
        raise RequestError(f"{path.name} is damaged ({error})") from error


def _of_npz(path: Path) -> tuple[dict[str, Tensor], str]:
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    options = arrays.pop(CONFIG, np.zeros(0, np.int8)).tobytes()
    if other := [name for name, array in arrays.items() if array.dtype.kind != "f"]:
        raise ValueError(f"{other[0]} has the type {arrays[other[0]].dtype}")
    return {name: Tensor(array.astype(np.float32)) for name, array in arrays.items()}, _text(options)


def _text(options: bytes) -> str:
    return options.rstrip(b"\0").decode("utf-8")


def _of_bin(content: bytes) -> tuple[dict[str, Tensor], str]:
    """Reads a .bin file, see the module."""
    offset = 0

    def take(count: int) -> bytes:
        nonlocal offset
        if not 0 <= count <= len(content) - offset:
            raise ValueError(f"it ends after {len(content):,} bytes, which is too early")
        offset += count
        return content[offset - count : offset]

    def whole() -> int:
        return int.from_bytes(take(8), "little")

    if take(8) != VERSION:
        raise ValueError("it is no .bin of Marian, version 1")
    headers = list(struct.iter_unpack("<4Q", take(32 * whole())))
    names = [take(length)[:-1].decode("utf-8") for length, *_ in headers]
    shapes = [struct.unpack(f"<{count}i", take(4 * count)) for _, _, count, _ in headers]
    take(whole())
    tensors, options = {}, ""
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        part, elements = take(size), prod(shape)
        dtype = PLAIN.get(kind) or QUANTIZED.get(kind)
        if name == CONFIG:
            options = _text(part)
            continue
        if dtype is None or (dtype == "<i1" and kind in PLAIN):
            raise ValueError(
                f"{name} has the type {kind:#x}: expected float32, or what marian-conv --gemm-type intgemm8 writes"
            )
        if min(shape, default=1) < 1 or len(part) < elements * int(dtype[2]) + 4 * (kind in QUANTIZED):
            raise ValueError(f"{name} has {len(part)} bytes for {' x '.join(map(str, shape))}")
        values = np.frombuffer(part, dtype, elements)
        if kind in PLAIN:
            tensors[name] = Tensor(values.reshape(shape).astype(np.float32))
            continue
        (multiplier,) = struct.unpack_from("<f", part, values.nbytes)
        if not 0 < multiplier < float("inf"):
            raise ValueError(f"{name} has the multiplier {multiplier}")
        rows = shape[-1]
        table = values.reshape(shape) if "Wemb" in name else values.reshape(rows, -1).T
        tensors[name] = Tensor(table.astype(np.float32) / np.float32(multiplier), multiplier)
    return tensors, options


def candidates(path: Path) -> list[Path]:
    """Lists the files that may be models.

    Args:
        path: A folder, or a file, which is returned as it is.

    Returns:
        The .npz and .bin files of the folder.
    """
    if path.is_file():
        return [path]
    return sorted(file for file in path.glob("*") if file.suffix in (".npz", ".bin") and ".optimizer." not in file.name)


def is_model(path: Path) -> bool:
    """Returns whether a file is a model of Marian.

    Args:
        path: A .npz file, checked by the names of its arrays, or a .bin file, checked by its first bytes.
    """
    if path.suffix == ".npz":
        try:
            with zipfile.ZipFile(path) as archive:
                return f"{CONFIG}.npy" in archive.namelist() or any("Wemb" in name for name in archive.namelist())
        except (OSError, zipfile.BadZipFile):
            return False
    try:
        with path.open("rb") as file:
            return file.read(8) == VERSION
    except OSError:
        return False
