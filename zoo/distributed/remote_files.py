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
from pipelines.core.files import visible_files

CHUNK = 4 << 20  # bytes copied at once
# keys of fsspec's file information that change with the file
VERSION_KEYS = ("ETag", "etag", "md5Hash", "crc32c", "LastModified", "mtime", "created", "updated")


def is_url(path: str) -> bool:
    """Returns whether a file name is a URL.

    Args:
        path: Path or URL.
    """
    return "://" in path


def absolute(path: str) -> str:
    """Returns a name that is valid in every process of this machine.

    Args:
        path: Path or URL.

    Returns:
        The URL, or the absolute path; links are not resolved.
    """
    return path if is_url(path) else os.path.abspath(path)  # noqa: PTH100 (keeps links)


def expand(inputs: Sequence[str]) -> list[str]:
    """Lists the files of inputs, each file once.

    Args:
        inputs: Paths, glob patterns (*, ?, [...], **), folders, or URLs of these. Hidden files and files that begin
            with _ (markers of other tools) are skipped in folders.

    Returns:
        Paths and URLs, in the order of the inputs, sorted within each.

    Raises:
        RequestError: An input has no file.
    """
    files: dict[str, None] = {}
    for name in inputs:
        matches = _remote(name) if is_url(name) else _local(name)
        if not matches:
            raise RequestError(f"found no file {name}; expected a path, a pattern, a folder or a URL of files")
        files |= dict.fromkeys(matches)
    return list(files)


def _local(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        return [str(file) for file in visible_files(path, hidden="._")]
    if path.is_file():
        return [name]
    return sorted(file for file in glob.glob(name, recursive=True) if Path(file).is_file())  # noqa: PTH207


def _remote(url: str) -> list[str]:
    system, path = file_system(url)
    with _one_line_errors(url):
        if glob.has_magic(path):
            files = [file for file in system.glob(path) if system.isfile(file)]
        elif system.isdir(path):
            files = [file for file in system.find(path) if not Path(file).name.startswith((".", "_"))]
        else:
            files = [path] if system.exists(path) else []
        return [str(system.unstrip_protocol(file)) for file in sorted(files)]


def file_system(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL.

    Args:
        url: URL of a protocol that fsspec supports.

    Returns:
        The fsspec file system, and the path in it.

    Raises:
        RequestError: fsspec or the library of the protocol is not installed, or there is no such file system.
    """
    with requires(f"reading {url}", "int8-zoo[remote]"):
        import fsspec
    with _one_line_errors(url):
        system, path = fsspec.core.url_to_fs(url)
        return system, str(path)


@contextmanager
def _one_line_errors(path: str) -> Iterator[None]:
    """Converts the exceptions of file systems, which have many types, to RequestError."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(f"cannot read {path}: {one_line(error)}") from error


@contextmanager
def open_file(path: str) -> Iterator[Any]:
    """Opens a file for reading.

    Args:
        path: Path or URL.

    Yields:
        A seekable binary stream.

    Raises:
        RequestError: The file cannot be opened.
    """
    with _one_line_errors(path):
        system, name = file_system(path) if is_url(path) else (None, path)
        stream = Path(path).open("rb") if system is None else system.open(name, "rb")  # noqa: SIM115 (closed below)
    with stream:
        yield stream


def read_bytes(path: str) -> bytes:
    """Reads a file.

    Args:
        path: Path or URL.

    Returns:
        Its content.

    Raises:
        RequestError: The file cannot be read.
    """
    with open_file(path) as stream, _one_line_errors(path):
        return bytes(stream.read())


def file_version(path: str) -> dict[str, Any]:
    """Returns values that change with the content of a file.

    Args:
        path: Path or URL.

    Returns:
        "bytes", the size, and "version", the modification time or entity tag.

    Raises:
        RequestError: The URL cannot be read.
        OSError: The local file does not exist.
    """
    if not is_url(path):
        status = Path(path).stat()
        return {"bytes": status.st_size, "version": str(status.st_mtime_ns)}
    system, name = file_system(path)
    with _one_line_errors(path):
        info = system.info(name)
    return {"bytes": info.get("size"), "version": str(next((info[key] for key in VERSION_KEYS if key in info), ""))}


def copy(path: str, target: Path, head: int = 0, begin: int = 0, end: int | None = None) -> Path:
    """Copies the first bytes of a file and a range of bytes to a local file.

    Args:
        path: Path or URL of the source.
        target: Local file to write.
        head: Number of bytes to copy from the beginning.
        begin: Start of the range, in bytes.
        end: End of the range, in bytes, exclusive; None for the end of the file.

    Returns:
        The local file.

    Raises:
        RequestError: The source cannot be opened.
    """
    with open_file(path) as stream, target.open("wb") as file:
        file.write(stream.read(head))
        stream.seek(begin)
        if end is None:
            shutil.copyfileobj(stream, file, CHUNK)
            return target
        while begin < end and (chunk := stream.read(min(CHUNK, end - begin))):
            file.write(chunk)
            begin += len(chunk)
    return target
