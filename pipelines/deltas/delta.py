"""Deltas as files: a zip of manifest.json and, for every changed file, its new bytes and integers.

The manifest has the digests of both models. A digest covers only the files that a server runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipelines.core import files
from pipelines.core.errors import RequestError, one_line
from pipelines.deltas.pieces import Bytes, FileDelta, Piece, Rows, difference
from pipelines.models.hub import CARD
from pipelines.models.record import NATIVE, read_record
from pipelines.models.unlisted import digest as recorded_digest

FORMAT, VERSION = "int8-zoo delta", 1
MANIFEST = "manifest.json"
SUFFIX = ".zoo"
NATIVE_FILES = (CARD, NATIVE, f"{NATIVE}.data")  # files that the native engine reads
STOCK_FILES = (CARD, "rewritten.onnx", "calibration.json", "int8.onnx")  # files of stock engines
SERVED = (*STOCK_FILES, NATIVE, f"{NATIVE}.data")
# Pictures, and files that are derived from others at first use
LEFT_OUT = ("*.png", "*.log", "*.clicks-*", "*.chosen-*")


@dataclass(frozen=True)
class Changed:
    """A file of the newer model.

    Attributes:
        name: Name of the file.
        size: Bytes of the newer file.
        sha256: Digest of the newer file.
        old_size: Bytes of the older file; -1 if there is none.
        old_sha256: Digest of the older file.
        pieces: Pieces of the newer file; none if the files are equal.
    """

    name: str
    size: int
    sha256: str
    old_size: int
    old_sha256: str
    pieces: tuple[Piece, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether both models have this file."""
        return self.sha256 == self.old_sha256


@dataclass(frozen=True)
class Delta:
    """An open delta.

    Attributes:
        name: Name of its file, for messages.
        parent: Digest of the older model.
        digest: Digest of the newer model.
        family: Family of both models.
        files: Files of the newer model by name.
        removed: Files that the newer model lacks.
        whole: Whether it has all files of the model, not only the served files.
        columns: Of every column of ids, {"new", "changed", "evicted", "rows"}.
    """

    name: str
    parent: str
    digest: str
    family: str
    files: Mapping[str, Changed]
    removed: tuple[str, ...] = ()
    whole: bool = True
    columns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    _archive: zipfile.ZipFile | None = field(default=None, repr=False, compare=False)
    _loaded: dict[str, tuple[Bytes, Rows]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rows(self) -> int:
        """Number of rows that are new or changed."""
        return sum(counts["new"] + counts["changed"] for counts in self.columns.values())

    def content(self, name: str) -> tuple[Bytes, Rows]:
        """Reads the part of the delta that belongs to a file; it is kept, and available after the delta is closed.

        Args:
            name: Name of the file.

        Returns:
            Its bytes, and its whole numbers.

        Raises:
            RequestError: The delta is damaged.
        """
        if name not in self._loaded:
            assert self._archive is not None
            with _readable(self.name):
                data = np.frombuffer(self._archive.read(f"{name}/data"), np.uint8)
                rows = np.frombuffer(self._archive.read(f"{name}/rows"), "<i8").astype(np.int64, copy=False)
            self._loaded[name] = data, rows
        return self._loaded[name]


def model_digest(folder: Path) -> str:
    """Returns the digest of a model: that of the files that a server runs.

    Args:
        folder: Model folder.
    """
    text = "".join(f"{name} {_sha256(folder, name)}\n" for name in SERVED if (folder / name).is_file())
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256(folder: Path, name: str) -> str:
    """Returns the SHA-256 of a file; that of the build record if the file is as it was."""
    for stage, record in read_record(folder).items():
        if stage == name or name in record.get("files", {}):
            return recorded_digest(folder / name, record)
    return files.digest(folder / name)


def _listed(folder: Path) -> list[str]:
    """Returns the files that a delta compares; pictures, hidden files, and derived files are left out."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".") and not any(path.match(pattern) for pattern in LEFT_OUT)
    )


def served_files(folder: Path) -> tuple[str, ...]:
    """Returns the files of a built model that servers of int8 run; native kernels need no float graph.

    Args:
        folder: Model folder.
    """
    return (*NATIVE_FILES, "int8.onnx") if (folder / NATIVE).is_file() else STOCK_FILES


def write_delta(
    old: Path,
    new: Path,
    output: Path,
    family: str,
    columns: Mapping[str, Mapping[str, int]] | None = None,
    names: Collection[str] | None = None,
) -> Delta:
    """Writes the difference of two model folders.

    Args:
        old: Folder of the older model, built.
        new: Folder of the newer model, built.
        output: File to write.
        family: Family of both models.
        columns: Counts of ids by column, for the manifest.
        names: Files of the delta; None for all.

    Returns:
        The delta, closed.
    """
    before, after = ([name for name in _listed(folder) if names is None or name in names] for folder in (old, new))
    listed: dict[str, Changed] = {}
    with files.replacing(output) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name in after:
            own = _sha256(new, name)
            size, former = (old / name).stat().st_size if name in before else -1, ""
            if name in before:
                former = _sha256(old, name)
            made = FileDelta([], [], []) if own == former else difference(old / name, new / name)
            newer = (new / name).stat().st_size
            listed[name] = Changed(name, newer, own, size, former, tuple(made.pieces))
            if own != former:
                _store(archive, name, made)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "family": family,
            "parent": model_digest(old),
            "digest": model_digest(new),
            "whole": names is None,
            "columns": columns or {},
            "removed": sorted({*before} - {*after}),
            "files": {name: _to_json(file) for name, file in listed.items()},
        }
        archive.writestr(MANIFEST, json.dumps(manifest, indent=1), zipfile.ZIP_DEFLATED)
    return _of_manifest(output.name, manifest, None)


def _store(archive: zipfile.ZipFile, name: str, made: FileDelta) -> None:
    """Adds the bytes of a file. Text is compressed; rows of weights would not get smaller."""
    kind = zipfile.ZIP_DEFLATED if Path(name).suffix in (".json", ".csv", ".tsv", ".txt") else zipfile.ZIP_STORED
    for part, arrays in (("data", made.data), ("rows", made.indices)):
        info = zipfile.ZipInfo(f"{name}/{part}")
        info.compress_type = kind
        with archive.open(info, "w", force_zip64=True) as stream:
            for array in arrays:
                stream.write(np.ascontiguousarray(array).data)


def _to_json(file: Changed) -> dict[str, Any]:
    fields = {"size": file.size, "sha256": file.sha256, "old_size": file.old_size, "old_sha256": file.old_sha256}
    return fields | {"pieces": [piece.to_json() for piece in file.pieces]}


@contextlib.contextmanager
def open_delta(source: Path | bytes | BinaryIO, name: str = "") -> Iterator[Delta]:
    """Opens a delta.

    Args:
        source: File, content or stream.
        name: Name for messages; None for that of the file.

    Yields:
        The delta.

    Raises:
        RequestError: It is truncated, damaged, or no delta.
    """
    name = name or (str(source) if isinstance(source, Path) else "the delta")
    with _readable(name):
        archive = zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source)
    with archive:
        with _readable(name):
            manifest = json.loads(archive.read(MANIFEST))
            if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
                raise ValueError("its manifest is of another format")
            if manifest.get("version") != VERSION:
                raise ValueError(f"its version is {manifest.get('version')}, expected {VERSION}")
            delta = _of_manifest(name, manifest, archive)
        yield delta


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Converts the exceptions of a damaged file to RequestError."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"cannot read {name}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, EOFError, NotImplementedError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"{name} is no whole delta ({one_line(error)}); copy it again, or make it with: zoo delta OLD NEW -o FILE"
        ) from error


def _of_manifest(name: str, manifest: Mapping[str, Any], archive: zipfile.ZipFile | None) -> Delta:
    listed = {
        file: Changed(
            file,
            int(entry["size"]),
            str(entry["sha256"]),
            int(entry["old_size"]),
            str(entry["old_sha256"]),
            tuple(Piece(**piece) for piece in entry["pieces"]),
        )
        for file, entry in manifest["files"].items()
    }
    if any(Path(file).name != file or file.startswith(".") for file in (*listed, *manifest["removed"])):
        raise ValueError("it names files outside a model folder")
    return Delta(
        name,
        str(manifest["parent"]),
        str(manifest["digest"]),
        str(manifest["family"]),
        listed,
        tuple(map(str, manifest["removed"])),
        bool(manifest["whole"]),
        manifest["columns"],
        archive,
    )
