"""Pre-trained vectors of a column's values, from which its rows of an embedding table start ("table" in the schema)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line
from zoo.recommenders.data.cell_values import LIST, canonical
from zoo.recommenders.data.encoding import UNKNOWN, Field

Floats = NDArray[np.float32]
EXPECTED = "a .npy, or an .npz with the arrays key and value"


def read_vectors(field: Field, path: Path) -> tuple[NDArray[np.int64], Floats]:
    """Reads the vectors of a field.

    A .npy is a matrix, float [values, width]; a text file of the same name with the suffix .txt has the value of every
    row, one a line. Without it the rows are those of the vocabulary in order, or of the encoding id, the row numbers.
    An .npz has the arrays key, the values, and value, their vectors, as FuxiCTR takes them.

    Args:
        field: Field of the column.
        path: File.

    Returns:
        Rows of the table, int64 [n], and their vectors, float32 [n, width]; values that have no row are left out.

    Raises:
        RequestError: The file is missing, has another form, or a vector holds NaN or infinity.
    """
    where = f"column {field.name}: {path}"
    keys, vectors = _read(path, where)
    if vectors.ndim != 2 or not vectors.size or vectors.dtype.kind not in "fiu":
        raise RequestError(f"{where} has the shape {list(vectors.shape)} of {vectors.dtype}, expected [values, width]")
    if keys is None:
        encoding = field.column.encoding
        kind, first = encoding["type"], 0 if encoding["type"] == "id" else 1
        if kind not in ("vocabulary", "id"):
            raise RequestError(
                f"{where} has no values, expected one a line in {path.with_suffix('.txt')}, as the column is {kind}"
            )
        rows = np.arange(len(vectors)) + first
        expected = field.rows - (0 if kind == "id" else 2)
        if len(vectors) != expected:
            raise RequestError(
                f"{where} has {len(vectors):,} vectors, expected {expected:,}, those of the column's "
                f"{'row numbers' if kind == 'id' else 'vocabulary in its order'}; or name the value of each, one a "
                f"line, in {path.with_suffix('.txt')}"
            )
    else:
        if len(keys) != len(vectors):
            raise RequestError(f"{where} has {len(vectors):,} vectors for {len(keys):,} values, expected as many")
        texts = pa.array(keys, pa.string())
        separator = field.column.separator or LIST
        texts = pc.coalesce(canonical(texts, separator), texts) if field.canonical else texts
        rows = field.ids(texts).astype(np.int64)
    if not np.isfinite(vectors).all():
        bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise RequestError(f"{where} has NaN or infinity in row {bad}, expected finite vectors")
    usable = (rows != UNKNOWN) | (field.column.encoding["type"] == "id") & (keys is None)
    rows, places = np.unique(rows[usable], return_index=True)
    return rows, vectors[usable][places].astype(np.float32)


def fitted(vectors: Floats, size: int) -> Floats:
    """Fits vectors to the width of a table: the first principal components, or zeros at their end.

    Args:
        vectors: float32 [n, width].
        size: Width of the table.

    Returns:
        float32 [n, size].
    """
    width = vectors.shape[1]
    if width > size:
        centred = vectors.astype(np.float64) - vectors.mean(axis=0, dtype=np.float64)
        _, _, axes = np.linalg.svd(centred, full_matrices=False)
        axes *= np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[
            :, None
        ]  # of either sign: the positive
        vectors = (centred @ axes[:size].T).astype(np.float32)
        width = vectors.shape[1]
    return np.pad(vectors, ((0, 0), (0, size - width)))


def _read(path: Path, where: str) -> tuple[list[str] | None, NDArray[Any]]:
    """Reads keys, if there are some, and vectors."""
    try:
        read = np.load(path, allow_pickle=False)
        if isinstance(read, np.ndarray):
            names = path.with_suffix(".txt")
            return (names.read_text("utf-8").splitlines() if names.is_file() else None), read
        with read:
            arrays: Mapping[str, Any] = {name: read[name] for name in read.files}
    except FileNotFoundError as error:
        raise RequestError(f"{where} does not exist, expected {EXPECTED}") from error
    except Exception as error:  # numpy, zipfile and codecs raise their own kinds for every sort of damage
        raise RequestError(f"cannot read {where} ({one_line(error)}), expected {EXPECTED}") from error
    if missing := [name for name in ("key", "value") if name not in arrays]:
        raise RequestError(f"{where} lacks the array {missing[0]}, expected {EXPECTED}")
    keys = arrays["key"]
    return [key.decode() if isinstance(key, bytes) else str(key) for key in keys.tolist()], arrays["value"]
