"""Files of embeddings: .npy, .parquet or .jsonl, as floats or quantized."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import replacing

FORMATS = (".npy", ".parquet", ".jsonl")
DTYPES = ("float32", "float16", "int8", "binary")
PRECISIONS = ("float", "int8", "uint8", "binary", "ubinary")  # of embeddings over HTTP, as Cohere and Voyage name them
Array = NDArray[Any]
Write = Callable[[Array, NDArray[np.int64]], None]


def require_dtype(dtype: str) -> str:
    """Checks a dtype of embeddings.

    Args:
        dtype: One of `DTYPES`.

    Returns:
        The dtype.

    Raises:
        RequestError: The dtype is unknown.
    """
    if dtype not in DTYPES:
        raise RequestError(f"unknown dtype of the output {dtype!r}; choose {', '.join(DTYPES)}")
    return dtype


def convert(vectors: NDArray[np.float32], dtype: str) -> Array:
    """Converts vectors to another dtype.

    int8: rint(127 x / max |x|) per vector, which preserves cosine similarity up to rounding, but not the norm. binary:
    one bit per component, 1 if positive, most significant bit first (numpy.packbits), for Hamming distances.

    Args:
        vectors: float32 [n, w].
        dtype: "float32", "float16", "int8" or "binary".

    Returns:
        [n, w] of the dtype; uint8 [n, ceil(w / 8)] for "binary".
    """
    if dtype == "float32":
        return vectors
    if dtype == "float16":
        return vectors.astype(np.float16)
    if dtype == "binary":
        bits: Array = np.packbits(vectors > 0, axis=1)
        return bits
    largest = np.abs(vectors).max(axis=1, keepdims=True, initial=0)
    factor = np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0)
    rounded: Array = np.rint(vectors * factor).astype(np.int8)
    return rounded


def quantize(vectors: NDArray[np.float32], precision: str) -> Array:
    """Converts vectors to a precision of the embedding APIs.

    int8 and ubinary are those of `convert`; uint8 is int8 + 128, binary is ubinary - 128 as int8.

    Args:
        vectors: float32 [n, w].
        precision: One of `PRECISIONS`.

    Returns:
        float32, int8 or uint8 [n, w]; int8 or uint8 [n, ceil(w / 8)] for "binary" and "ubinary".
    """
    if precision == "float":
        return vectors
    if precision == "int8":
        return convert(vectors, "int8")
    if precision == "uint8":
        return convert(vectors, "int8").view(np.uint8) ^ np.uint8(128)
    bits = convert(vectors, "binary")
    return bits if precision == "ubinary" else (bits ^ np.uint8(128)).view(np.int8)


def normalize(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divides vectors by their L2 norm; zeros stay.

    Args:
        vectors: float32 [n, w].

    Returns:
        float32 [n, w], contiguous.
    """
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    normalized: NDArray[np.float32] = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return normalized


def similarities(vectors: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Computes all pairwise similarities of vectors converted to a dtype (see `convert`).

    Args:
        vectors: float32 [n, w].
        dtype: "float32", "float16", "int8" or "binary".

    Returns:
        Cosine similarities, or shares of equal bits for "binary", float32 [n, n].
    """
    values = convert(vectors, dtype)
    if dtype == "binary":
        signs = np.where(vectors > 0, np.float32(1), np.float32(-1))
        shares = (signs @ signs.T) / np.float32(2 * vectors.shape[1]) + np.float32(0.5)
        return np.asarray(shares, np.float32)
    rows: NDArray[np.float32] = values.astype(np.float32)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.float32(1e-12))
    return rows @ rows.T


@contextlib.contextmanager
def vector_writer(output: str | Path, width: int, dtype: str) -> Iterator[Write]:
    """Context manager that writes a file of vectors, which appears if the block ends without an error.

    .npy holds one row per input row, in order; .parquet and .jsonl have the columns row (from 1) and embedding.

    Args:
        output: .npy, .parquet or .jsonl file; "-" for JSON lines on stdout.
        width: Number of components.
        dtype: Dtype of the vectors (see `convert`).

    Yields:
        `write(vectors, rows)`, which appends converted vectors with the numbers of their input rows.

    Raises:
        RequestError: The format is unknown.
    """
    name = str(output).lower()
    sample = convert(np.zeros((1, width), np.float32), dtype)
    if str(output) == "-":
        yield lambda vectors, rows: print("".join(_json(vectors, rows)), end="", file=sys.stdout)
        return
    if not name.endswith(FORMATS):
        raise RequestError(
            f"cannot tell the format of {output}; name it {', '.join(FORMATS)}, or - for JSON lines on stdout"
        )
    with replacing(output) as temporary:
        if name.endswith(".npy"):
            with temporary.open("wb") as file:
                count = 0

                def write(vectors: Array, rows: NDArray[np.int64]) -> None:
                    nonlocal count
                    count += len(vectors)
                    file.write(np.ascontiguousarray(vectors).data)

                _header(file, sample, 0)
                yield write
                file.seek(0)
                _header(file, sample, count)  # of the same length: numpy reserves space for the count
        elif name.endswith(".jsonl"):
            with temporary.open("w", encoding="utf-8") as lines:
                yield lambda vectors, rows: lines.writelines(_json(vectors, rows))
        else:
            import pyarrow as pa
            import pyarrow.parquet as parquet

            kind = pa.list_(pa.from_numpy_dtype(sample.dtype), sample.shape[1])
            schema = pa.schema([("row", pa.int64()), ("embedding", kind)])
            with parquet.ParquetWriter(temporary, schema) as writer:

                def append(vectors: Array, rows: NDArray[np.int64]) -> None:
                    flat = pa.array(np.ascontiguousarray(vectors).ravel())
                    columns = [pa.array(rows), pa.FixedSizeListArray.from_arrays(flat, type=kind)]
                    writer.write_batch(pa.record_batch(columns, schema=schema))

                yield append


def _header(file: Any, sample: Array, count: int) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(sample.dtype),
        "fortran_order": False,
        "shape": (count, sample.shape[1]),
    }
    np.lib.format.write_array_header_1_0(file, header)


def _json(vectors: Array, rows: NDArray[np.int64]) -> Iterator[str]:
    for row, vector in zip(rows.tolist(), vectors, strict=True):
        values = (
            vector.astype(str).astype(np.float64) if vector.dtype.kind == "f" else vector
        )  # shortest decimal of a float32
        yield json.dumps({"row": row, "embedding": values.tolist()}) + "\n"
