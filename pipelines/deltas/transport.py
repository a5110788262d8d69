"""Where deltas are published: a folder, a URL that fsspec supports, or a list in Redis.

Names of files order the deltas of a folder; files with names that begin with . or _ are left out. In Redis, the names
are a list at KEY and the contents a hash at KEY:content, for redis://HOST:PORT/DB#KEY; the key is "deltas" by default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from pipelines.core import files
from pipelines.core.errors import RequestError, ZooError, one_line, requires
from pipelines.deltas.delta import SUFFIX, open_delta

REDIS = ("redis://", "rediss://", "unix://")
KEY = "deltas"
DIGITS = 6  # of the numbers that `publish` names deltas by


class Transport(Protocol):
    """A place of deltas."""

    def names(self) -> list[str]:
        """Returns the names of the deltas in order. Raises ZooError if the place cannot be read."""

    def read(self, name: str) -> Path | bytes:
        """Returns a delta as a local file or its content. Raises ZooError if it cannot be read.

        Args:
            name: Name of the delta.
        """

    def local(self, name: str) -> Path | None:
        """Returns the local file of a delta, or None.

        Args:
            name: Name of the delta.
        """

    def write(self, name: str, content: bytes) -> None:
        """Adds a delta atomically.

        Args:
            name: Name of the delta.
            content: Its content.
        """


class Folder:
    """A local folder.

    Args:
        path: The folder; it may be missing until a delta is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        """See `Transport`."""
        with _read(str(self.path)):
            return _visible([path.name for path in self.path.iterdir()]) if self.path.is_dir() else []

    def read(self, name: str) -> Path:
        """See `Transport`."""
        return self.path / name

    def local(self, name: str) -> Path:
        """See `Transport`."""
        return self.path / name

    def write(self, name: str, content: bytes) -> None:
        """See `Transport`."""
        files.write_bytes(self.path / name, content)


class Remote:
    """A folder behind a URL, by fsspec.

    Args:
        url: URL of the folder.

    Raises:
        RequestError: fsspec or the library of the protocol is not installed.
    """

    def __init__(self, url: str) -> None:
        with requires(f"reading {url}", "int8-zoo[remote]"):
            import fsspec
        self.url = url
        try:
            with _read(url):
                self._system, self._path = fsspec.core.url_to_fs(url)
        except ZooError as error:
            raise RequestError(f"{error}; expected a folder, a URL that fsspec supports, or redis://") from error

    def names(self) -> list[str]:
        """See `Transport`."""
        with _read(self.url):
            self._system.invalidate_cache(self._path)
            if not self._system.exists(self._path):
                return []
            return _visible([str(path).rsplit("/", 1)[-1] for path in self._system.ls(self._path, detail=False)])

    def read(self, name: str) -> bytes:
        """See `Transport`."""
        with _read(f"{self.url}/{name}"):
            return bytes(self._system.cat_file(f"{self._path}/{name}"))

    def local(self, name: str) -> None:
        """See `Transport`."""

    def write(self, name: str, content: bytes) -> None:
        """See `Transport`."""
        with _read(self.url):
            self._system.makedirs(self._path, exist_ok=True)
            hidden = f"{self._path}/.{name}"
            self._system.pipe_file(hidden, content)
            self._system.mv(hidden, f"{self._path}/{name}")


class Redis:
    """A list and a hash of Redis.

    Args:
        url: URL of the server, with the key behind #.

    Raises:
        RequestError: The client is not installed, or the URL is invalid.
    """

    def __init__(self, url: str) -> None:
        with requires(f"reading {url}", "int8-zoo[redis]"):
            import redis
        self.url, _, key = url.partition("#")
        self._key = key or KEY
        with _read(self.url):
            self._client: Any = redis.Redis.from_url(self.url)

    def names(self) -> list[str]:
        """See `Transport`."""
        with _read(self.url):
            return [name.decode() for name in self._client.lrange(self._key, 0, -1)]

    def read(self, name: str) -> bytes:
        """See `Transport`."""
        with _read(self.url):
            content = self._client.hget(f"{self._key}:content", name)
        if content is None:
            raise RequestError(f"{self.url} lists {name} at {self._key}, but has no content of it; publish it again")
        return bytes(content)

    def local(self, name: str) -> None:
        """See `Transport`."""

    def write(self, name: str, content: bytes) -> None:
        """See `Transport`."""
        with _read(self.url):
            transaction = self._client.pipeline(transaction=True)
            transaction.hset(f"{self._key}:content", name, content).rpush(self._key, name).execute()


def open_transport(place: str | Path) -> Transport:
    """Opens a place of deltas.

    Args:
        place: Folder, URL that fsspec supports, or redis://HOST:PORT/DB#KEY.

    Returns:
        The transport.

    Raises:
        RequestError: A library is missing, or the place is a file.
    """
    text = str(place)
    if text.startswith(REDIS):
        return Redis(text)
    if "://" in text:
        return Remote(text)
    if Path(place).exists() and not Path(place).is_dir():
        raise RequestError(f"found the file {place}, expected a folder of deltas or a URL")
    return Folder(Path(place))


def is_place(output: str | Path) -> bool:
    """Returns whether an output is a place of deltas, not a file.

    Args:
        output: Path or URL.
    """
    return "://" in str(output) or str(output).endswith("/") or Path(output).is_dir()


def publish(delta: Path, place: str | Path) -> str:
    """Adds a delta behind the others of a place.

    Args:
        delta: The delta.
        place: See `open_transport`.

    Returns:
        Its name there, the next number.

    Raises:
        RequestError: The last delta of the place leads to another model than the one that this delta changes.
    """
    transport = open_transport(place)
    names, number = transport.names(), 1
    if names:
        with open_delta(transport.read(names[-1]), f"{place}/{names[-1]}") as last, open_delta(delta) as own:
            if last.digest != own.parent:
                raise RequestError(
                    f"the delta changes the model {own.parent[:12]}, found {last.digest[:12]} after {names[-1]} of "
                    f"{place}; make it from the newest model"
                )
        digits = names[-1].removesuffix(SUFFIX)
        number = int(digits) + 1 if digits.isdecimal() else len(names) + 1
    name = f"{number:0{DIGITS}d}{SUFFIX}"
    transport.write(name, delta.read_bytes())
    return name


def _visible(names: list[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(SUFFIX) and not name.startswith((".", "_")))


@contextlib.contextmanager
def _read(place: str) -> Iterator[None]:
    """Converts the exceptions of file systems and clients, which have many types, to ZooError."""
    try:
        yield
    except ZooError:
        raise
    except Exception as error:
        raise ZooError(f"cannot read the deltas of {place}: {one_line(error)}") from error
