"""Applies deltas: to a copy of the older model folder, or to its files in place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.deltas import pieces
from pipelines.deltas.delta import SERVED, Changed, Delta, model_digest
from pipelines.models.record import RECORD


def require_parent(delta: Delta, digest: str, model: str) -> None:
    """Checks that a delta follows a model.

    Args:
        delta: The delta.
        digest: Digest of the model.
        model: Name of the model, for the message.

    Raises:
        RequestError: It was made from another model.
    """
    if delta.parent != digest:
        raise RequestError(
            f"{delta.name} changes the model {delta.parent[:12]}, found {digest[:12]} ({model}); expected the model "
            "that it was made from, or the delta between them"
        )


def apply(delta: Delta, old: Path, target: Path) -> None:
    """Writes the newer model folder, and checks the digest of every file.

    Args:
        delta: The delta.
        old: Folder of the older model.
        target: Folder of the newer model; it must not exist.

    Raises:
        RequestError: The delta was made from another model, is damaged, or has only the served files.
    """
    require_parent(delta, model_digest(old), str(old))
    if not delta.whole:
        raise RequestError(
            f"{delta.name} has only the files that a server runs, expected all files of the model; make it with: zoo "
            "delta OLD NEW -o FILE --all"
        )
    target.mkdir()
    for name, changed in delta.files.items():
        if changed.old_size >= 0 and (not (old / name).is_file() or files.digest(old / name) != changed.old_sha256):
            if name == RECORD:
                continue
            raise RequestError(f"{old / name} is another file than {delta.name} was made from; copy the model again")
        _write(delta, changed, old / name, target / name)
        if files.sha256(target / name) != changed.sha256:
            raise RequestError(f"{delta.name} does not give the {name} that it lists; copy it again")
    record = target / RECORD
    if record.is_file():
        _adopt(record)


def apply_in_place(
    delta: Delta, folder: Path, names: Iterable[str] = SERVED, maps: MutableMapping[str, Any] | None = None
) -> int:
    """Changes the files of a folder to the newer model's; a file with another layout is rewritten.

    A page of a file is slow to write for the first time in a map, so that a map is kept for the next delta.

    Args:
        delta: The delta; its parent must be the model in the folder.
        folder: The folder.
        names: Files to change; other files of the delta are left out.
        maps: Maps of the files of the folder by name; new maps are added.

    Returns:
        Number of table rows written in place.

    Raises:
        RequestError: The delta has not all of these files.
    """
    rows, maps = 0, {} if maps is None else maps
    for name in names:
        changed, path = delta.files.get(name), folder / name
        if changed is None:
            if path.is_file() and name not in delta.removed:
                raise RequestError(f"{delta.name} has no {name}; make it with: zoo delta OLD NEW -o FILE --all")
            path.unlink(missing_ok=True)
            maps.pop(name, None)
        elif changed.is_same:
            continue
        elif path.is_file() and path.stat().st_size and pieces.keeps_places(changed.pieces, changed.old_size):
            if name not in maps:
                maps[name] = np.memmap(path, np.uint8, "r+")
            with _fitting(delta, path):
                rows += pieces.change(changed.pieces, maps[name], *delta.content(name))
        else:
            maps.pop(name, None)
            with files.replacing(path) as temporary:
                _write(delta, changed, path, temporary)
    return rows


def _write(delta: Delta, changed: Changed, old: Path, target: Path) -> None:
    if changed.is_same:
        files.copy_file(old, target)
        return
    data, indices = delta.content(changed.name)
    with target.open("wb") as file:
        file.truncate(changed.size)
    if not changed.size:
        return
    new: Any = np.memmap(target, np.uint8, "r+")
    before: Any = np.memmap(old, np.uint8, "r") if changed.old_size > 0 else np.zeros(0, np.uint8)
    with _fitting(delta, old):
        pieces.write(changed.pieces, before, new, data, indices)
    new.flush()


@contextlib.contextmanager
def _fitting(delta: Delta, old: Path) -> Iterator[None]:
    """Converts the exceptions of pieces that do not fit the older file to RequestError."""
    try:
        yield
    except (ValueError, IndexError) as error:
        raise RequestError(f"{delta.name} does not fit {old.name}; copy it again") from error


def _adopt(record: Path) -> None:
    """Replaces the times of a build record by the times of the folder's files, after their digests were checked."""
    content: Any = files.read_json(record)
    for stage in content.values():
        for name, identity in stage.get("files", {}).items() if isinstance(stage, dict) else ():
            path = record.with_name(name)
            if path.is_file() and path.stat().st_size == identity["bytes"]:
                identity["modified"] = path.stat().st_mtime_ns
    files.write_json(record, content)
