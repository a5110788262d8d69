"""Files: atomic writes, checked reads, digests and temporary files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gzip
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.settings import home

logger = logging.getLogger(__name__)

GZIP = b"\x1f\x8b"  # the first bytes of a gzip member (RFC 1952)
DATA = ".data"  # suffix of a file with large initializers of an ONNX file
LOCK_NOTICE_SECONDS = 2.0  # seconds until the wait for a lock is logged
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY: set[tuple[int, str]] = set()  # process and path of temporary files
CUT_SHORT = re.compile(r"\d+ requested and \d+ written")  # message of numpy, which has no errno


class DiskFull(ZooError):
    """The disk has no room for a file."""

    def __init__(self, target: str | os.PathLike[str], error: OSError) -> None:
        fault = os.strerror(error.errno or errno.ENOSPC)
        super().__init__(f"cannot write {target}: {fault}; free space, or choose another place")


def require_place(path: str | os.PathLike[str]) -> None:
    """Checks that `replacing` can write a path, before the work begins; creates nothing.

    Args:
        path: Output path.

    Raises:
        RequestError: The path cannot be written.
    """
    _require_no_folder(target := Path(path))
    folder = next(parent for parent in target.absolute().parents if os.path.exists(parent))  # noqa: PTH110
    if not os.path.isdir(folder):  # noqa: PTH112
        fault = errno.ENOTDIR
    elif not os.access(folder, os.W_OK | os.X_OK):
        fault = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    else:
        return
    raise RequestError(f"cannot write {path}: {folder}: {os.strerror(fault)}; choose another output path")


def require_free(path: Path, advice: str = "choose another") -> None:
    """Checks that a folder of new files is free.

    Args:
        path: The folder.
        advice: What to do otherwise.

    Raises:
        RequestError: It is a file, or holds files.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RequestError(
            f"found {'' if path.is_dir() else 'the file '}{path} in use, expected a new or empty folder; {advice}"
        )


def _require_no_folder(target: Path) -> None:
    if os.path.exists(target) and not os.path.isfile(target):  # noqa: PTH110, PTH113 (pathlib's raise for a name too long)
        raise RequestError(f"cannot write {target}: it is a folder or a device; choose another output path")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Context with a temporary path that replaces `path` on success and is deleted on failure or Ctrl-C.

    The suffix is kept, because libraries choose a format by it. Leftovers of killed processes are deleted first;
    temporary files of running processes are locked.

    Args:
        path: Output path.

    Yields:
        The temporary path.

    Raises:
        RequestError: The folder cannot be made or written, or `path` is no regular file (such as /dev/null).
        DiskFull: The disk has no room.
    """
    _require_no_folder(target := Path(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = _temporary(target)
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(target, error) from error
        raise _unwritable(target, error) from error
    temporary, own = Path(name), (os.getpid(), name)
    mark_temporary(name)
    _sweep(target)
    try:
        yield temporary
        temporary.chmod(0o666 & ~umask())  # mkstemp made it private
        temporary.replace(target)
    except OSError as error:  # a write knows no file name, and the temporary one says nothing to a person
        if error.errno in FULL or CUT_SHORT.search(str(error)):
            raise DiskFull(target, error) from error
        if str(error.filename) == name:
            raise _unwritable(target, error) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
        _TEMPORARY.discard(own)
        os.close(handle)


def _unwritable(target: Path, error: OSError) -> RequestError:
    advice = "choose another output path"
    with contextlib.suppress(RequestError):
        if target.absolute().is_relative_to(home().absolute()):
            advice = "set ZOO_HOME to a folder you may write"
    return RequestError(f"cannot write {target}: {error.strerror or error}; {advice}")


@contextlib.contextmanager
def making_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary path for a folder, which becomes `target` if no exception is raised.

    Args:
        target: The folder; it must not exist, or be empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        yield made
        if target.exists():
            target.rmdir()
        made.rename(target)


def mark_temporary(path: str) -> None:
    """Adds a file to those that `discard_temporary` deletes.

    Args:
        path: Path of the file.
    """
    _TEMPORARY.add((os.getpid(), path))


def discard_temporary() -> None:
    """Deletes the temporary files of this process, when a signal or an error ends it.

    An engine that is interrupted while it computes can crash before the contexts are left.
    """
    for pid, name in list(_TEMPORARY):
        if pid == os.getpid():
            Path(name).unlink(missing_ok=True)


def umask() -> int:
    """Returns the file mode creation mask of the process."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _temporary(target: Path) -> tuple[int, str]:
    """Makes and locks a temporary file in the folder of `target`; returns its handle and path."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
        with contextlib.suppress(OSError):  # where there are no locks, nothing is swept either
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.exists(name):  # noqa: PTH110 (another process may have swept it before it was locked)
            return handle, name
        os.close(handle)


def _sweep(target: Path) -> None:
    """Deletes the temporary files of `target` that no process holds."""
    ours = re.compile(rf"\.{re.escape(target.stem)}-[a-z0-9_]{{8}}{re.escape(target.suffix)}")
    for path in target.parent.iterdir():
        if not ours.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError), path.open("rb") as file:  # another process may hold it, or be quicker
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], message: str) -> Iterator[None]:
    """Context that holds a lock file, for one process at a time.

    Args:
        path: Lock file.
        message: Message that is logged while waiting.

    Raises:
        OSError: The file is not writable.
    """
    import filelock  # slow to import, and an answer from caches needs none

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=LOCK_NOTICE_SECONDS)
    except filelock.Timeout:
        logger.warning("waiting: %s", message)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_bytes(path: str | os.PathLike[str], content: bytes | memoryview) -> Path:
    """Writes a file atomically.

    Args:
        path: Output path.
        content: Content of the file.

    Returns:
        The path.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def link_or_copy(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Makes `path` a hard link of a file, or a copy if that is another file system, or the file of another user.

    A file that is written in place changes behind both names; the digests of a card find that. Weights of an ONNX file
    (.data) are copied: onnx refuses those with several links.

    Args:
        source: File.
        path: New name; an existing file is replaced.
    """
    real, target = Path(source).resolve(), Path(path)
    if real.stat().st_uid == os.getuid() and target.suffix != DATA:
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to(real)
            return
        except OSError:
            pass
    copy_file(real, target)


def copy_file(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Copies the content of a file atomically.

    Args:
        source: File to copy.
        path: Output path.

    Returns:
        The path.
    """
    with replacing(path) as temporary:
        shutil.copyfile(source, temporary)
    return Path(path)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes UTF-8 text atomically.

    Args:
        path: Output path.
        text: Text to write.

    Returns:
        The path.
    """
    return write_bytes(path, text.encode())


def write_first(path: Path, text: str) -> bool:
    """Writes UTF-8 text atomically, unless another process has written the file.

    Args:
        path: Output path.
        text: Text to write.

    Returns:
        Whether this process was the first.
    """
    own = write_text(path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}"), text)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)
    return True


def write_json(path: str | os.PathLike[str], value: Any) -> Path:
    """Writes indented JSON with a final newline atomically.

    Keys keep their order; numbers that are not finite become null.

    Args:
        path: Output path.
        value: JSON value.

    Returns:
        The path.
    """
    return write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(member) for name, member in value.items()}
    return [_finite(member) for member in value] if isinstance(value, list | tuple) else value


def unzipped(content: bytes) -> bytes:
    """Returns the content of a file, decompressed if it is a gzip file.

    Args:
        content: Bytes of the file.

    Raises:
        OSError, EOFError, zlib.error: The gzip data are damaged.
    """
    return gzip.decompress(content) if content.startswith(GZIP) else content


def unzipped_size(path: str | os.PathLike[str]) -> int:
    """Returns the decompressed size of a file in bytes, without reading a gzip file to its end.

    Args:
        path: File of less than 4 GB, with one gzip member.
    """
    content = Path(path).read_bytes()
    return int.from_bytes(content[-4:], "little") if content.startswith(GZIP) else len(content)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file, which may be compressed by gzip.

    Args:
        path: JSON file.

    Returns:
        The value.

    Raises:
        RequestError: The file is missing or invalid.
    """
    if Path(path).is_fifo() and Path(path).absolute().parts[1] not in ("dev", "proc"):  # reading may never end
        raise RequestError(f"cannot read {path}: it is a FIFO, expected a file")
    try:
        return json.loads(unzipped(Path(path).read_bytes()).decode())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RequestError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # nested deeper than any of ours
        raise RequestError(f"{path} is not valid JSON: {error}") from error


def sha256(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file, in hexadecimal.

    Args:
        path: File.
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(path: Path) -> str:
    """Returns `sha256`, cached in the process while size and time of the file do not change.

    Args:
        path: File.
    """
    now = path.stat()
    return _digest(path.resolve(), now.st_ino, now.st_size, now.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _digest(path: Path, _inode: int, _size: int, _modified: int) -> str:
    return sha256(path)


def identity(path: Path) -> dict[str, Any]:
    """Returns {"bytes", "modified" (ns), "sha256"} of a file, for `same`.

    Args:
        path: File.
    """
    return {"bytes": path.stat().st_size, "modified": path.stat().st_mtime_ns, "sha256": digest(path)}


def same(path: Path, was: Mapping[str, Any]) -> bool:
    """Returns whether a file has an identity; it is read only if its size or time differs.

    Args:
        path: File.
        was: Result of `identity`.
    """
    now = path.stat()
    return bool(now.st_size == was["bytes"] and (now.st_mtime_ns == was["modified"] or digest(path) == was["sha256"]))


def starts_with(path: Path, magic: bytes) -> bool:
    """Returns whether a file starts with the bytes that name a format.

    Args:
        path: File.
        magic: First bytes of the format.
    """
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def is_onnx(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path, or any other name of a model, is that of an .onnx file, which need not exist.

    Args:
        path: Path or name.
    """
    return Path(path).suffix == ".onnx"


def visible_files(folder: Path, hidden: str = ".") -> Iterator[Path]:
    """Yields the files below a folder in sorted order, without hidden ones; symbolic links are followed.

    Args:
        folder: The folder.
        hidden: First characters of the names of hidden files and folders.

    Raises:
        RequestError: A folder cannot be read.
    """
    yield from _visible_files(folder, hidden, ())


def _visible_files(folder: Path, hidden: str, parents: tuple[str, ...]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in parents:  # a link to a folder that holds it
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise RequestError(f"cannot read the folder {folder}: {error.strerror or error}") from error
    for entry in entries:
        if entry.name[0] in hidden:
            continue
        path = folder / entry.name
        target = path if entry.is_symlink() else entry  # pathlib takes a broken link for no file
        if target.is_dir():
            yield from _visible_files(path, hidden, (*parents, real))
        elif target.is_file():
            yield path


def mapped(path: Path) -> Path:
    """Returns the path of the file with the large initializers of an ONNX file.

    Args:
        path: ONNX file of `save_mapped`.
    """
    return path.with_name(f"{path.name}{DATA}")


def refuse_names(raw: Any, expected: str) -> None:
    """Refuses text where only a path names a file, so that text of a client never opens one.

    Args:
        raw: A value, or a list of values.
        expected: Expected values, for the message.

    Raises:
        RequestError: A value is text.
    """
    for value in raw if isinstance(raw, list | tuple) else [raw]:
        if isinstance(value, str) and not isinstance(value, os.PathLike):
            raise RequestError(f"found the text {value!r:.100}; expected {expected}, or pathlib.Path(...) for a file")
