"""Samples in .npz files: one array per graph input, first axis samples."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelines.core.batches import Batch, cut, length
from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import replacing
from pipelines.models.protocols import ShipsSamples
from pipelines.models.record import SAMPLES, SCALES

if TYPE_CHECKING:
    from pipelines.models.folder import ModelFolder


def write_npz(path: str | Path, arrays: Mapping[str, Any], *, compressed: bool = False) -> None:
    """Writes arrays to an .npz atomically.

    Args:
        path: Output path, ending in .npz.
        arrays: {name: array}.
        compressed: Whether to compress the arrays.
    """
    with replacing(path) as temporary:
        (np.savez_compressed if compressed else np.savez)(temporary, **arrays)


def read_npz(path: str | Path, batch_size: int = 256) -> tuple[Iterator[Batch], int]:
    """Reads samples from an .npz.

    Args:
        path: The file, one array per graph input.
        batch_size: Samples of a batch.

    Returns:
        Batches, and the number of samples.

    Raises:
        RequestError: The file is invalid, or its arrays differ in length.
    """
    arrays = read_arrays(path)
    return cut(arrays, batch_size), require_samples(path, arrays)


def read_arrays(path: str | Path) -> dict[str, Any]:
    """Reads the arrays of an .npz.

    Args:
        path: The file.

    Returns:
        {name: array}.

    Raises:
        RequestError: The file is invalid.
    """
    try:
        with Path(path).open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no archive of numpy.savez")
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.asarray(archive[name]) for name in archive.files}
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or one_line(error)}") from error
    except Exception as error:  # numpy, zipfile and zlib raise many types for damaged files
        raise RequestError(
            f"cannot read {path} as .npz: {one_line(error)}; it must hold one array per graph input"
        ) from error


def require_samples(path: str | Path, arrays: Batch) -> int:
    """Checks that all arrays have the same number of samples, at least 1.

    Args:
        path: The file, for the error message.
        arrays: Arrays [samples, ...].

    Returns:
        The number of samples.

    Raises:
        RequestError: The numbers differ, or are 0.
    """
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if not counts or len(set(counts.values())) > 1 or 0 in counts.values():
        raise RequestError(
            f"{path} holds arrays of {counts or 'nothing'} samples; expected one array per graph input, all with the "
            "same number of samples"
        )
    return next(iter(counts.values()))


def own_samples(folder: ModelFolder) -> tuple[list[Batch], int]:
    """Returns the calibration samples of a model: those of its training, or else of the package.

    Args:
        folder: Model folder.

    Returns:
        Batches, and the number of samples.

    Raises:
        RequestError: There are none.
    """
    path = folder.path / SAMPLES
    if not path.is_file() and isinstance(folder.entry, ShipsSamples):
        batch = folder.entry.samples(folder)
        return [batch], length(batch)
    if not path.is_file():
        raise RequestError(
            f"{folder.path} holds no {SAMPLES}; calibrate on your data with: zoo calibrate {folder.path} --data FILE "
            "(or run it in float, which needs no calibration, with --precision fp32)"
        )
    samples, total = read_npz(path)
    return list(samples), total


def rows_of(folder: ModelFolder) -> Batch | None:
    """Returns calibration samples of a model folder, None if it has none.

    Args:
        folder: Model folder.
    """
    return own_samples(folder)[0][0] if (folder.path / SAMPLES).is_file() else None


def scales_of(folder: ModelFolder) -> dict[str, Any]:
    """Returns the scales of an earlier model that the native form keeps, {} for its own.

    Args:
        folder: Model folder.
    """
    return read_arrays(folder.path / SCALES) if (folder.path / SCALES).is_file() else {}
