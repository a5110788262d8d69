"""Local files, and files behind URLs (s3://, gs://, hdfs://, memory://, ...) by fsspec."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, one_line, requires

CHUNK = 4 << 20  # bytes copied at once
STATED = ("ETag", "etag", "md5Hash", "crc32c", "LastModified", "mtime", "created", "updated")  # what tells versions


def is_url(place: str) -> bool:
    """Whether a name is a URL, not a path."""
    return "://" in place


def absolute(place: str) -> str:
    """A place as every process on this machine names it."""
    return place if is_url(place) else os.path.abspath(place)  # noqa: PTH100 (links stay as they are)


def expand(inputs: Sequence[str]) -> list[str]:
    """The files that paths, patterns (*, ?, [...], **), folders and URLs of such name, each once, sorted within each.

    Hidden files and those that begin with _ (marks of other engines) are left out of folders. Raises RequestError where
    one names nothing.
    """
    found: dict[str, None] = {}
    for each in inputs:
        some = _remote(each) if is_url(each) else _local(each)
        if not some:
            raise RequestError(f"found no file {each}; wanted a path, a pattern, a folder or a URL of files")
        found |= dict.fromkeys(some)
    return list(found)


def _local(place: str) -> list[str]:
    if Path(place).is_dir():
        return [str(each) for each in sorted(Path(place).rglob("*")) if each.is_file() and _shown(each, Path(place))]
    if Path(place).is_file():
        return [place]
    return sorted(each for each in glob.glob(place, recursive=True) if Path(each).is_file())  # noqa: PTH207


def _shown(path: Path, folder: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def _remote(place: str) -> list[str]:
    system, path = file_system(place)
    with _telling(place):
        if glob.has_magic(path):
            some = [each for each in system.glob(path) if system.isfile(each)]
        elif system.isdir(path):
            some = [each for each in system.find(path) if not Path(each).name.startswith((".", "_"))]
        else:
            some = [path] if system.exists(path) else []
        return [str(system.unstrip_protocol(each)) for each in sorted(some)]


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there. Raises RequestError where there is none."""
    with requires(f"reading {url}", "int8-zoo[remote]"):
        import fsspec
    with _telling(url):
        system, path = fsspec.core.url_to_fs(url)
        return system, str(path)


@contextmanager
def _telling(place: str) -> Iterator[None]:
    """Makes one line of what a file system raises: dozens of types."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"cannot read {place}: {one_line(error)}") from error


@contextmanager
def opened(place: str) -> Iterator[Any]:
    """A file for reading bytes, as a seekable stream."""
    with _telling(place):
        system, path = file_system(place) if is_url(place) else (None, place)
        stream = Path(place).open("rb") if system is None else system.open(path, "rb")  # noqa: SIM115 (a file is told of as such)
    with stream:
        yield stream


def content(place: str) -> bytes:
    """The bytes of a file. Raises RequestError where it cannot be read."""
    with opened(place) as stream, _telling(place):
        return bytes(stream.read())


def identity(place: str) -> dict[str, Any]:
    """What tells whether a file is still the same: {"bytes", "version" (time or tag)}."""
    if not is_url(place):
        found = Path(place).stat()
        return {"bytes": found.st_size, "version": str(found.st_mtime_ns)}
    system, path = file_system(place)
    with _telling(place):
        about = system.info(path)
    return {"bytes": about.get("size"), "version": str(next((about[key] for key in STATED if key in about), ""))}


def copy(place: str, target: Path, head: int = 0, begin: int = 0, end: int | None = None) -> Path:
    """Copies the first bytes of a file and a range of bytes to a local file.

    Args:
        place: Path or URL of the source.
        target: Local file to write.
        head: Number of bytes to copy from the beginning.
        begin: Start of the range, in bytes.
        end: End of the range, in bytes, exclusive.
    """
    with opened(place) as stream, target.open("wb") as file:
        file.write(stream.read(head))
        stream.seek(begin)
        if end is None:
            shutil.copyfileobj(stream, file, CHUNK)
            return target
        while begin < end and (chunk := stream.read(min(CHUNK, end - begin))):
            file.write(chunk)
            begin += len(chunk)
    return target
