"""HTTP downloads, atomic and verified: retries, resumed partial files, one process at a time."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.core import files as disk
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress

ATTEMPTS = 5  # maximum number of consecutive failed requests without progress
RETRY_SECONDS = 40.0  # seconds after which no further attempt starts
BACKOFF = 0.5  # seconds before the second attempt; doubles with every further one
CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 20.0  # seconds without a byte
CHUNK = 1 << 16  # bytes per read
FULL_DIGEST = 64  # digits
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")

logger = logging.getLogger(__name__)


class _Transient(Exception):
    """The server failed in a way that a retry may fix."""


class Refused(ZooError):
    """The server refuses the file."""


class _Partial:
    """A partial download in the folder of its target, kept between calls with the ETag of the server."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f".{target.name}.partial")
        self._note = target.with_name(f".{target.name}.etag")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def etag(self, url: str) -> str | None:
        """Returns the strong ETag of these bytes at a URL, or None."""
        origin, _, etag = self._note.read_text("latin-1").partition("\n") if self._note.exists() else ("", "", "")
        return etag or None if origin == url else None

    def remember(self, url: str, etag: str | None) -> None:
        if etag and etag.startswith('"'):  # a weak ETag (W/"...") does not guarantee equal bytes
            self._note.write_text(f"{url}\n{etag}", "latin-1", "replace")  # as headers are
        else:
            self._note.unlink(missing_ok=True)

    def drop(self) -> None:
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def download(url: str, target: Path, size: int | None, sha256: str | None) -> None:
    """Downloads and verifies a file.

    The body goes to a hidden partial file beside `target`, which is renamed after its check. Connection errors,
    time-outs, 429, 5xx and short bodies are retried. A partial file of an earlier call is resumed (RFC 9110, 14: Range,
    and 13.1.5: If-Range) if a digest or the server's strong ETag proves that it belongs to the file.

    Args:
        url: http(s) address.
        target: File to write.
        size: Expected size in bytes; None: not checked.
        sha256: Expected digest in hexadecimal; None: not checked.

    Raises:
        ZooError: The server fails, or the file does not match.
    """
    partial = _Partial(target)
    for _ in range(2):
        resumed = _fill(url, partial, size, sha256)
        fault = fault_of(partial.path, size, sha256)
        if fault is None:
            partial.path.replace(target)
        partial.drop()
        if fault is None:
            return
        if not resumed:
            break
        logger.info("%s: the resumed file does not match (%s); downloading it again", url, fault)
    raise ZooError(f"the file from {url} does not match and was deleted: {fault}")


def _fill(url: str, partial: _Partial, size: int | None, sha256: str | None) -> bool:
    """Requests a URL until the partial file is complete; returns whether it has parts of several responses."""
    import requests  # imported here to save 10 MB
    import urllib3

    again = (_Transient, requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError)
    failures, longest, begun = 0, partial.size(), time.monotonic()
    while True:
        try:
            return _receive(url, partial, size, sha256)
        except again as error:
            failures += 1
            if partial.size() > longest:  # progress resets the count
                failures, longest, begun = 1, partial.size(), time.monotonic()
            if failures >= ATTEMPTS or time.monotonic() - begun > RETRY_SECONDS:
                raise ZooError(
                    f"cannot download {url}: {_why(error)} ({failures} attempts); run it again to resume"
                ) from error
            pause = BACKOFF * 2 ** (failures - 1)
            logger.info("%s: %s; next attempt in %g s", url, _why(error), pause)
            time.sleep(pause)
        except requests.RequestException as error:
            raise ZooError(f"cannot download {url}: {_why(error)}") from error


def _receive(url: str, partial: _Partial, size: int | None, sha256: str | None) -> bool:
    """Makes one request and appends its body to the partial file where the server allows it.

    Returns whether the file is complete.
    """
    import requests

    start, etag = partial.size(), partial.etag(url)
    if (sha256 is None and etag is None) or (size is not None and start > size):
        start = 0  # the partial file cannot be verified, or is too long
    if start and start == size:
        return True
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-"} | ({"If-Range": etag} if etag else {})
    with requests.get(url, headers=headers, stream=True, timeout=(CONNECT_TIMEOUT, READ_TIMEOUT)) as response:
        status = response.status_code
        answer = f"answered {status} {response.reason or ''}".rstrip()
        if status in (408, 429) or status >= 500:
            raise _Transient(answer)
        tag = response.headers.get("ETag")
        if status == 206:
            span = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            fits = span is not None and int(span[1]) == start and (etag is None or tag in (None, etag))
            length = span[2] if span else "*"
        else:
            fits = status == 200
            length = response.headers.get("Content-Length", "*")
        if start and (status == 416 or (status == 206 and not fits)):
            partial.drop()
            raise _Transient(f"{answer} to a request for bytes from {start}")
        if not fits:
            raise Refused(f"{url} {answer}")
        resumed = status == 206 and start > 0
        done = start if resumed else 0
        total = int(length) if length.isdigit() else size
        with (
            partial.path.open("ab" if resumed else "wb") as file,
            progress(f"{partial.path.name[1:].removesuffix('.partial')} (MB)", total and total / 1e6) as advance,
        ):
            if not resumed:
                partial.remember(url, tag)  # the old bytes are truncated
            advance(done / 1e6)
            # raw: the bytes of the file, whatever Content-Encoding the server adds
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                done += len(chunk)
                if size is not None and done > size:
                    partial.drop()
                    sent = length if length.isdigit() else f"over {size}"
                    raise ZooError(f"the file from {url} does not match and was deleted: size {sent}, expected {size}")
                file.write(chunk)
                advance(len(chunk) / 1e6)
    if total is not None and done < total:
        raise _Transient(f"the body ended after {done} of {total} bytes")
    return resumed


def ensure(target: Path, size: int | None, sha256: str | None, obtain: Callable[[Path], None]) -> None:
    """Calls `obtain`, in one process at a time, unless the file is there and correct.

    An incorrect file is deleted first.

    Args:
        target: The file.
        size: Expected size in bytes; None: not checked.
        sha256: Expected digest in hexadecimal; None: not checked.
        obtain: Writes the file.
    """
    with one_line(target):
        if target.is_file() and fault_of(target, size, sha256) is None:
            return  # without the lock: a complete cache may be read-only
        with _locked(target):
            if target.is_file():
                fault = fault_of(target, size, sha256)
                if fault is None:
                    return  # another process was faster
                logger.warning("%s does not match (%s); deleted", target, fault)
                target.unlink()
            obtain(target)
            if sha256 is not None and len(sha256) < FULL_DIGEST:
                logger.warning("%s is only checked by the first %d digits of its SHA-256", target, len(sha256))


def fault_of(path: Path, size: int | None, sha256: str | None) -> str | None:
    """Returns how a file differs from the expected one, or None.

    Args:
        path: The file.
        size: Expected size in bytes; None: not checked.
        sha256: Expected digest in hexadecimal; None: not checked.

    Returns:
        The difference in one line, or None.
    """
    checks: list[tuple[str, object, object]] = []
    if size is not None:
        checks.append(("size", path.stat().st_size, size))
    if sha256 is not None:
        checks.append(("sha256", disk.sha256(path)[: len(sha256)], sha256.lower()))
    return "; ".join(f"{key} {actual}, expected {value}" for key, actual, value in checks if actual != value) or None


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Holds the lock of a file, so that one process at a time writes it."""
    with disk.locked(target.with_name(f".{target.name}.lock"), f"another process fetches {target}"):
        yield


@contextlib.contextmanager
def one_line(target: Path) -> Iterator[None]:
    """Context that turns disk errors (space, permissions) into one-line errors.

    Args:
        target: File that is written, for the message.

    Raises:
        DiskFull: The disk has no room.
        RequestError: The disk refuses to read or write.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        yield
    except OSError as error:
        if error.errno in disk.FULL:
            raise disk.DiskFull(target, error) from error
        where = error.filename or target
        raise RequestError(
            f"cannot read or write {where}: {error.strerror or error}; set ZOO_HOME to another folder"
        ) from error


def _why(error: BaseException) -> str:
    """Returns the innermost cause of a network error in one line; `requests` wraps it three times."""
    while inner := error.__cause__ or next((arg for arg in error.args if isinstance(arg, BaseException)), None):
        error = inner
    return " ".join(str(error).split()) or type(error).__name__
