"""Vectors of the tokens of documents in 8 bits, and MaxSim (Khattab and Zaharia 2020, "ColBERT", section 3.3).

A vector v becomes codes by its own range: c_j = rint(v_j / s), s = max_j |v_j| / 127. With the codes q_i of a query's
vectors and their scales t_i

    score = sum_i t_i max_j s_j sum_k q_i[k] c_j[k]

Sums of codes are exact; floats are rounded one operation at a time, and summed in the order of `sum_lanes`.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import replacing
from pipelines.kernels import extension
from pipelines.kernels.transformer.reference import Floats, sum_lanes
from pipelines.kernels.transformer.reference.rows import SMALLEST_ABS_MAX

ZERO_POINT, LEVELS = 128, np.float32(127)
UNIT = 16  # components are padded with zeros to a multiple
MAX_FLOAT_WIDTH = 1024  # components up to which float32 holds the sums of codes
SUFFIX = ".npz"
VERSION = 1
LOCAL_HEADER = 30  # bytes before the name of a file in a zip archive


def quantize(vectors: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Quantizes vectors, each by its own range.

    Args:
        vectors: Finite float32 [n, components].

    Returns:
        Codes, int8 [n, components rounded up to `UNIT`], and scales, float32 [n].

    Raises:
        RequestError: A value is not finite.
    """
    largest = np.abs(vectors).max(axis=1, initial=0)
    if not np.isfinite(largest).all():
        raise RequestError("found NaN or infinity in the vectors, expected finite values")
    is_zero = largest < SMALLEST_ABS_MAX
    scale = np.where(is_zero, np.float32(1), largest / LEVELS).astype(np.float32)
    codes = np.zeros((len(vectors), -(-vectors.shape[1] // UNIT) * UNIT), np.int8)
    codes[:, : vectors.shape[1]] = np.rint(np.where(is_zero, 0, vectors.T / scale).T)
    return codes, scale


@dataclass(frozen=True, eq=False)
class TokenVectors:
    """Vectors of the tokens of documents.

    Attributes:
        codes: uint8 [tokens, components rounded up to `UNIT`], with the zero point `ZERO_POINT`.
        scale: float32 [tokens].
        first: Where each document begins, and the end, int64 [documents + 1].
        components: Components of a vector.
    """

    codes: NDArray[np.uint8]
    scale: Floats
    first: NDArray[np.int64]
    components: int

    @classmethod
    def of(cls, documents: Sequence[Floats]) -> Self:
        """Quantizes the vectors of documents.

        Args:
            documents: float32 [tokens, components] each, at least one token.

        Raises:
            RequestError: There are no documents, one has no vectors, or vectors differ in their components.
        """
        if not documents or len({document.shape[1:] for document in documents}) > 1 or not all(map(len, documents)):
            raise RequestError(f"found {len(documents)} documents; expected one or more, with vectors of one size")
        vectors = np.concatenate(documents)
        codes, scale = quantize(vectors)
        first = np.cumsum([0, *map(len, documents)], dtype=np.int64)
        return cls((codes.view(np.uint8) ^ np.uint8(ZERO_POINT)), scale, first, vectors.shape[1])

    @classmethod
    def joined(cls, parts: Sequence[TokenVectors]) -> Self:
        """Joins several groups of documents.

        Args:
            parts: The groups, at least one, of vectors of one size.

        Returns:
            All documents in order.

        Raises:
            RequestError: The sizes differ.
        """
        if len({part.components for part in parts}) != 1:
            raise RequestError(f"found {len(parts)} groups of documents; expected some, with vectors of one size")
        ends = np.cumsum([0, *(len(part.codes) for part in parts)])
        first = [part.first[:-1] + end for part, end in zip(parts, ends, strict=False)]
        codes, scale = (np.concatenate([getattr(part, name) for part in parts]) for name in ("codes", "scale"))
        return cls(codes, scale, np.concatenate([*first, ends[-1:]]), parts[0].components)

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def vectors(self) -> list[Floats]:
        """The vectors of every document, float32 [tokens, components]."""
        codes = self.codes[:, : self.components].astype(np.float32) - np.float32(ZERO_POINT)
        return np.split(codes * self.scale[:, None], self.first[1:-1])

    def scores(
        self, query: Floats, chosen: NDArray[np.int64] | None = None, *, threads: int = 1, isa: str = ""
    ) -> Floats:
        """Computes MaxSim of a query and documents, in native code where it is built.

        Args:
            query: Vectors of the query, float32 [tokens, components].
            chosen: Numbers of the documents, int64 [n]; None for all.
            threads: Number of threads.
            isa: Instruction set, one of `extension.isas()`; "" for the fastest.

        Returns:
            float32 [n].

        Raises:
            RequestError: The query has other components, or there is no such document.
        """
        machine.require_threads(threads)
        if query.ndim != 2 or not len(query) or query.shape[1] != self.components:
            raise RequestError(f"found a query of shape {list(query.shape)}; expected [tokens, {self.components}]")
        codes, scale = quantize(query)
        rows = None if chosen is None else np.ascontiguousarray(chosen, np.int64)
        if rows is not None and rows.size and not 0 <= rows.min() <= rows.max() < len(self):
            raise RequestError(f"found the documents {rows.min()} to {rows.max()}; expected 0 to {len(self) - 1}")
        if (module := extension.native()) is None:
            return reference(self, codes, scale, rows)
        arrays = (codes, scale, self.codes, self.scale, self.first)
        similarity: Floats = module.max_sim(*arrays, rows, threads, isa)[:, 0]
        return similarity

    def save(self, path: str | Path) -> None:
        """Writes one file.

        Args:
            path: The file, .npz.
        """
        arrays: dict[str, Any] = {"codes": self.codes, "scale": self.scale, "first": self.first}
        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            np.savez(file, version=VERSION, components=self.components, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file of `save`; codes are mapped, so that an index may be larger than the memory.

        Args:
            path: The file.

        Returns:
            The documents.

        Raises:
            RequestError: The file is missing, damaged, or of another kind.
        """
        try:
            with np.load(Path(path), allow_pickle=False) as file:
                codes = _mapped(Path(path), "codes")
                codes = file["codes"] if codes is None else codes
                vectors = cls(codes, file["scale"], file["first"], int(file["components"]))
                is_known = int(file["version"]) == VERSION
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RequestError(f"cannot read vectors of tokens in {path} ({one_line(error)})") from error
        vectors._require(str(path), is_known)
        return vectors

    def _require(self, path: str, is_known: bool) -> None:
        """Raises RequestError for arrays that do not fit each other."""
        tokens, width = self.codes.shape if self.codes.ndim == 2 else (0, 0)
        dtypes = self.codes.dtype == np.uint8 and self.scale.dtype == np.float32 and self.first.dtype == np.int64
        fit = dtypes and self.scale.shape == (tokens,) and width == -(-self.components // UNIT) * UNIT > 0
        first = self.first
        ordered = first.ndim == 1 and len(first) > 1 and first[0] == 0 and first[-1] == tokens
        if not (is_known and fit and ordered and (np.diff(first) > 0).all() and np.isfinite(self.scale).all()):
            raise RequestError(f"the vectors of tokens in {path} are damaged or of another version; write them again")


def _mapped(path: Path, name: str) -> NDArray[np.uint8] | None:
    """Maps an array of bytes in an .npz; None for a compressed one.

    Raises ValueError, OSError or KeyError for a damaged file.
    """
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type != zipfile.ZIP_STORED:
            return None
        file.seek(info.header_offset + LOCAL_HEADER - 4)  # lengths of the name and of the extra field
        start = info.header_offset + LOCAL_HEADER + sum(struct.unpack("<HH", file.read(4)))
        file.seek(start)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(file)]
        shape, by_columns, dtype = read(file)
        if dtype != np.uint8 or by_columns or file.tell() - start + math.prod(shape) != info.file_size:
            raise ValueError(f"{name} has the dtype {dtype} and the shape {list(shape)}")
        return np.asarray(np.memmap(path, np.uint8, "r", file.tell(), shape))


def reference(
    documents: TokenVectors, codes: NDArray[np.int8], scale: Floats, chosen: NDArray[np.int64] | None = None
) -> Floats:
    """Computes MaxSim in numpy, bit for bit as the native kernels.

    Args:
        documents: The documents.
        codes: Codes of the query, int8 [n, width].
        scale: Their scales, float32 [n].
        chosen: Numbers of the documents, int64 [n]; None for all.

    Returns:
        float32 [n].
    """
    dtype: Any = np.float32 if documents.codes.shape[1] <= MAX_FLOAT_WIDTH else np.float64
    query: NDArray[Any] = codes.astype(dtype).T
    rows = range(len(documents)) if chosen is None else chosen
    factors = np.zeros(-(-len(scale) // UNIT) * UNIT, np.float32)
    factors[: len(scale)] = scale
    scores = np.zeros(len(rows), np.float32)
    for i, row in enumerate(rows):
        part = slice(documents.first[row], documents.first[row + 1])
        sums = ((documents.codes[part].astype(dtype) - ZERO_POINT) @ query).astype(np.float32)
        best = np.zeros_like(factors)
        best[: len(scale)] = (sums * documents.scale[part, None]).max(axis=0)
        scores[i] = sum_lanes(best * factors)
    return scores
