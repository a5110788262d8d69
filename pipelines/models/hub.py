"""Find, download, verify and cache the files of a model, as its card lists them; `pipelines` knows no model by name.

The settings ZOO_HOME, ZOO_OFFLINE and ZOO_MIRROR: see `pipelines.core.settings`.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.core import files as disk
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.core.settings import home, mirror, offline

ATTEMPTS = 5  # failed requests in a row, none of which brought the file further, before a download is given up
PATIENCE = 40.0  # seconds in which they may begin
BACKOFF = 0.5  # seconds before the second attempt; doubles with every further one
CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 20.0  # seconds without a byte
CHUNK = 1 << 16  # bytes; what a broken connection may lose

CARD = "card.json"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # flat, visible, needs no quoting in a URL
FULL_DIGEST = 64  # digits
_DIGEST = re.compile(r"[0-9a-f]{8}|[0-9a-f]{64}")
_URL = re.compile(r"https?://\S+")
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CardFile:
    """One file of a model: `size` in bytes, `sha256` as 64 lower-case hex digits (or the first 8, which torch.hub
    gives in a file's name, where nobody told the others), `url` its public http(s) address; None where unknown.

    Raises RequestError on creation for anything else, and for a URL without a digest to check the download against.
    """

    name: str
    size: int | None
    sha256: str | None
    url: str | None

    def __post_init__(self) -> None:
        require_plain("file name", self.name)
        if self.name == CARD:
            raise RequestError(f"{CARD} is the card itself; take it out of its list of files")
        if self.size is not None and (type(self.size) is not int or self.size < 0):
            raise RequestError(f"{self.name}: size is {self.size!r}; give its bytes as a whole number, or null")
        if self.sha256 is not None and not _matches(_DIGEST, self.sha256):
            raise RequestError(
                f"{self.name}: sha256 is {self.sha256!r}; give 64 lower-case hex digits (or their first 8), or null"
            )
        if self.url is not None and not _matches(_URL, self.url):
            raise RequestError(f"{self.name}: url is {self.url!r}; give an http:// or https:// address, or null")
        if self.url is not None and self.sha256 is None:
            raise RequestError(f"{self.name}: has a url but no sha256; a download must be checked, so add the digest")

    def fault(self, path: Path) -> str | None:
        """What of the file at `path` differs from `size` and `sha256`, in words; None where nothing does."""
        return _fault(path, self.size, self.sha256)


@dataclass(frozen=True)
class Card:
    """A model's card.json: its name, the entry that runs it, what it is, its files, and `details`, every other key as
    it stood.

    Raises RequestError on creation where a part is missing or wrong.
    """

    name: str
    entry: str
    description: str
    files: tuple[CardFile, ...]
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        require_plain("model name", self.name)
        for key, value in (("entry", self.entry), ("description", self.description)):
            if not isinstance(value, str) or not value.strip():
                raise RequestError(f"card of {self.name}: {key} is {value!r}; give a text")
        names = [file.name for file in self.files]
        if len(set(names)) < len(names):
            raise RequestError(f"card of {self.name}: a file is listed twice among {', '.join(names)}")
        if taken := {"name", "entry", "description", "files"} & set(self.details):
            raise RequestError(
                f"card of {self.name}: details may not hold {', '.join(sorted(taken))}; these are fields of the card"
            )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Card:
        """Read a card.json. Raises RequestError, naming the file, where it is missing, broken or wrong."""
        value = disk.read_json(path)
        try:
            if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
                raise RequestError(
                    "a card is a JSON object with name, entry, description and files (an object: file name -> size, "
                    "sha256, url)"
                )
            details = dict(value)
            name, entry, description = (details.pop(key, None) for key in ("name", "entry", "description"))
            return cls(
                name, entry, description, tuple(_card_file(*item) for item in details.pop("files").items()), details
            )
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The card as card.json holds it; `details` follow the four fields in their own order."""
        files = {file.name: {"size": file.size, "sha256": file.sha256, "url": file.url} for file in self.files}
        return {"name": self.name, "entry": self.entry, "description": self.description, "files": files, **self.details}

    def digest(self) -> str:
        """Hex SHA-256 of the canonical JSON (keys sorted, no blanks): one card, one digest, however the file was laid
        out.
        """
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Hub:
    """The models in folders with one sub-folder a model: NAME/card.json and the files that ship with the package.

    Of a name that several folders have, the first one's counts.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        self.folders = tuple(map(Path, folders))

    def names(self) -> list[str]:
        """The names of all models, sorted."""
        return sorted({path.parent.name for folder in self.folders for path in folder.glob(f"*/{CARD}")})

    def shipped(self, name: str) -> Path:
        """The folder of a known model as its package ships it."""
        return next(folder / name for folder in self.folders if (folder / name / CARD).is_file())

    def card(self, name: str) -> Card:
        """The card of a model. Raises RequestError for an unknown name, with the nearest one and all known ones."""
        known = self.names()
        if name not in known:
            if os.path.isfile(name):  # noqa: PTH113 (pathlib's raises for a name too long)
                raise RequestError(
                    f"found the file {name}, wanted a model folder, or one of: {', '.join(known) or 'none'}"
                )
            near = difflib.get_close_matches(name, known, n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise RequestError(f"no model {name!r}; {guess}known: {', '.join(known) or 'none'}")
        path = self.shipped(name) / CARD
        card = Card.read(path)
        if card.name != name:
            raise RequestError(f"{path} is named {card.name!r}; rename the card or its folder, they must agree")
        return card

    def folder(self, name: str) -> Path:
        """The model's working folder, which `fetch` fills: home()/models/NAME/<12 digits of the card's digest>."""
        return home() / "models" / name / self.card(name).digest()[:12]

    def fetch(self, name: str, files: Iterable[str] | None = None, later: Iterable[str] = ()) -> Path:
        """The model's working folder with card.json and all files of the card, or those named; of `later` those alone
        that are on this machine.

        Size and SHA-256 are checked at every call: a file that does not match is deleted, named in the log and fetched
        anew. A file comes from the first source that has it right: the folder itself, the package, the source tree that
        it was installed from, ZOO_MIRROR (its sub-folder NAME, or flat in it), the card's URL. Others in the folder
        stay. Raises RequestError for an unknown model or file, one that no source has or that ZOO_OFFLINE keeps away,
        and a disk that refuses to write; ZooError where the network failed or brought something else, or the disk is
        full.
        """
        card = self.card(name)
        known = {file.name: file for file in card.files}
        wanted = list(dict.fromkeys(known if files is None else files))
        if strange := [file for file in wanted if file not in known]:
            raise RequestError(f"{name} has no file {strange[0]!r}; its card lists: {', '.join(known) or 'none'}")
        folder = self.folder(name)
        _ship(self.shipped(name) / CARD, folder / CARD)
        for file in (known[key] for key in wanted):
            if file.name in later and not (folder / file.name).is_file() and not self._here(card, file):
                continue
            _ensure(folder / file.name, file.size, file.sha256, functools.partial(self._obtain, card, file))
        return folder

    def _packaged(self, card: Card, file: CardFile) -> list[Path]:
        """Where the package has a file, and the source tree that it was installed from."""
        place, tree = self.shipped(card.name), source_tree()
        own = tree.joinpath(*place.parts[-3:], file.name) if tree else None
        return [place / file.name, *([own] if own and own.is_file() else [])]

    def _here(self, card: Card, file: CardFile) -> bool:
        """Whether the package has a file, its source tree, or a mirror that is a folder."""
        base = mirror()
        places = [*self._packaged(card, file), *(_mirrored(base, card, file) if base else [])]
        return any(isinstance(each, Path) and each.is_file() and not file.fault(each) for each in places)

    def _obtain(self, card: Card, file: CardFile, target: Path) -> None:
        """Put `file` at `target` from the first source that has it right."""
        base = mirror()
        mirrored = _mirrored(base, card, file) if base else []
        public = [file.url] if file.url else []
        sources: list[Path | str] = [*self._packaged(card, file), *mirrored, *public]
        found: list[str] = []  # what was wrong with the sources that had something
        for source in sources:
            try:
                if isinstance(source, Path):
                    if not _copy(source, target, file):
                        continue
                elif offline():
                    continue
                else:
                    _transfer(source, target, file.size, file.sha256)
                if found:
                    logger.warning("%s of %s came from %s, because: %s", file.name, card.name, source, "; ".join(found))
                return
            except disk.DiskFull:
                raise  # no fault of the source
            except ZooError as error:
                if not (isinstance(error, _Refused) and source in mirrored[:-1]):  # its files may lie flat
                    found.append(str(error))
        remote = any(isinstance(source, str) for source in sources)
        what = f"{file.name} of {card.name}"
        if remote and offline():
            remark = f" ({'; '.join(found)})" if found else ""
            raise RequestError(
                f"{what} is not on this machine{remark} and ZOO_OFFLINE forbids the network: "
                f"run `zoo download {card.name}` without ZOO_OFFLINE, or set ZOO_MIRROR to a folder that holds the file"
            )
        if file.url:
            raise ZooError(
                f"cannot fetch {what}: {'; '.join(found)}; ZOO_MIRROR may name a folder or address that holds it"
            )
        why = "; ".join(found) or f"not in the package{f', not in ZOO_MIRROR={base}' if base else ''}"
        raise RequestError(
            f"cannot find {what}: {why}, and its card has no url; set ZOO_MIRROR to a folder or http(s) address that "
            "holds it"
        )


def download(url: str, path: str | os.PathLike[str], *, size: int | None = None, sha256: str | None = None) -> Path:
    """Download `url` to `path` unless what is there has the wanted `size` (bytes) and `sha256` (hex; None: not checked)
    already.

    The body goes to a hidden partial file beside `path` and becomes visible after its check only. Connection errors,
    time-outs, 429, 5xx and short bodies are tried again; a partial file left by an earlier call is continued (RFC 9110,
    14: Range, and 13.1.5: If-Range) where a digest or the server's strong ETag can tell that it still belongs to the
    file. Of two processes at once, one downloads. Raises ZooError where the server fails, has no such file or sends
    another (which is deleted), or the disk is full; RequestError where ZOO_OFFLINE forbids the network or the disk
    refuses to write.
    """

    def obtain(target: Path) -> None:
        if offline():
            raise RequestError(
                f"{target} is missing and ZOO_OFFLINE forbids the network; run it without ZOO_OFFLINE to get it from "
                f"{url}"
            )
        _transfer(url, target, size, sha256)

    _ensure(Path(path), size, sha256, obtain)
    return Path(path)


class _Transient(Exception):
    """The server failed in a way that another attempt may mend."""


class _Refused(ZooError):
    """The server answered, and does not give the file."""


class _Partial:
    """The beginning of a download beside its target, kept between calls together with the server's validator for it."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f".{target.name}.partial")
        self._note = target.with_name(f".{target.name}.etag")

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def etag(self, url: str) -> str | None:
        """The strong ETag under which `url` gave these bytes."""
        origin, _, etag = self._note.read_text("latin-1").partition("\n") if self._note.exists() else ("", "", "")
        return etag or None if origin == url else None

    def remember(self, url: str, etag: str | None) -> None:
        if etag and etag.startswith('"'):  # a weak one (W/"...") does not promise equal bytes
            self._note.write_text(f"{url}\n{etag}", "latin-1", "replace")  # as headers are
        else:
            self._note.unlink(missing_ok=True)

    def drop(self) -> None:
        self._note.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def _transfer(url: str, target: Path, size: int | None, sha256: str | None) -> None:
    """Bring `url` to `target`, checked."""
    partial = _Partial(target)
    for _ in range(2):
        resumed = _fill(url, partial, size, sha256)
        fault = _fault(partial.path, size, sha256)
        if fault is None:
            partial.path.replace(target)
        partial.drop()
        if fault is None:
            return
        if not resumed:
            break
        logger.info("%s: the parts do not make the file (%s); once more, from nothing", url, fault)
    raise ZooError(f"what came from {url} does not match and was deleted: {fault}")


def _fill(url: str, partial: _Partial, size: int | None, sha256: str | None) -> bool:
    """Request `url` until `partial` is complete. Returns whether it was put together from more than one answer."""
    import requests  # nothing else needs the network, and these take 10 MB
    import urllib3

    again = (_Transient, requests.ConnectionError, requests.Timeout, urllib3.exceptions.HTTPError)
    failures, longest, begun = 0, partial.size(), time.monotonic()
    while True:
        try:
            return _receive(url, partial, size, sha256)
        except again as error:
            failures += 1
            if partial.size() > longest:  # whatever brings the file further starts the count anew
                failures, longest, begun = 1, partial.size(), time.monotonic()
            if failures >= ATTEMPTS or time.monotonic() - begun > PATIENCE:
                raise ZooError(
                    f"cannot download {url}: {_why(error)} ({failures} attempts); run it again to go on"
                ) from error
            pause = BACKOFF * 2 ** (failures - 1)
            logger.info("%s: %s; next attempt in %g s", url, _why(error), pause)
            time.sleep(pause)
        except requests.RequestException as error:
            raise ZooError(f"cannot download {url}: {_why(error)}") from error


def _receive(url: str, partial: _Partial, size: int | None, sha256: str | None) -> bool:
    """Make one request and write its body, after the bytes there are where the server allows it. Returns whether it
    did.
    """
    import requests

    start, etag = partial.size(), partial.etag(url)
    if (sha256 is None and etag is None) or (size is not None and start > size):
        start = 0  # nothing would tell whether the two parts belong together, or they do not
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
        given = response.headers.get("ETag")
        if status == 206:
            span = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
            fits = span is not None and int(span[1]) == start and (etag is None or given in (None, etag))
            length = span[2] if span else "*"
        else:
            fits = status == 200
            length = response.headers.get("Content-Length", "*")
        if start and (status == 416 or (status == 206 and not fits)):
            partial.drop()
            raise _Transient(f"{answer} to a request for bytes from {start}")
        if not fits:
            raise _Refused(f"{url} {answer}")
        resumed = status == 206 and start > 0
        done = start if resumed else 0
        total = int(length) if length.isdigit() else size
        with (
            partial.path.open("ab" if resumed else "wb") as file,
            progress(f"{partial.path.name[1:].removesuffix('.partial')} (MB)", total and total / 1e6) as advance,
        ):
            if not resumed:
                partial.remember(url, given)  # now that the old bytes are gone
            advance(done / 1e6)
            # raw: the bytes as they lie on the server, whatever Content-Encoding it adds
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                done += len(chunk)
                if size is not None and done > size:
                    partial.drop()
                    found = length if length.isdigit() else f"over {size}"
                    raise ZooError(
                        f"what came from {url} does not match and was deleted: size {found}, expected {size}"
                    )
                file.write(chunk)
                advance(len(chunk) / 1e6)
    if total is not None and done < total:
        raise _Transient(f"the body ended after {done} of {total} bytes")
    return resumed


@functools.cache
def source_tree() -> Path | None:
    """The source tree on this machine that pip installed the package from (PEP 610), None for another origin."""
    import importlib.metadata  # only where a file is missing
    from urllib.parse import unquote, urlsplit

    try:
        url = json.loads(importlib.metadata.distribution("int8-zoo").read_text("direct_url.json") or "{}").get(
            "url", ""
        )
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    path = Path(unquote(urlsplit(url).path))
    return path if url.startswith("file://") and path.is_dir() else None


def _mirrored(base: str, card: Card, file: CardFile) -> list[Path | str]:
    """Where a mirror may have a file: in the model's own sub-folder, or flat in it; of a folder the one that is."""
    if _matches(_URL, base):
        return [f"{base.rstrip('/')}/{part}{file.name}" for part in (f"{card.name}/", "")]
    folder = Path(base).expanduser()
    own = folder / card.name / file.name
    return [own if own.is_file() else folder / file.name]


def _copy(source: Path, target: Path, file: CardFile) -> bool:
    """Copy `source` to `target` where it exists. Raises ZooError where it is not the file that the card means."""
    if not source.parent.is_dir():
        raise ZooError(
            f"there is no folder {source.parent} (ZOO_MIRROR)"
        )  # the package's own is there: it holds the card
    if not source.is_file():
        return False
    if fault := _fault(source, file.size, file.sha256):
        raise ZooError(f"{source} does not match: {fault}")
    with disk.replacing(target) as temporary:
        shutil.copyfile(source, temporary)
    return True


def _ship(source: Path, target: Path) -> None:
    """Copy `source` to `target` where it differs."""
    with _one_line(target):
        wanted = source.read_bytes()
        if not target.is_file() or target.read_bytes() != wanted:
            with disk.replacing(target) as temporary:
                temporary.write_bytes(wanted)


def _ensure(target: Path, size: int | None, sha256: str | None, obtain: Callable[[Path], None]) -> None:
    """Call `obtain`, in one process at a time, unless `target` is there and right; a wrong one is deleted first."""
    with _one_line(target):
        if target.is_file() and _fault(target, size, sha256) is None:
            return  # before the lock: a cache that is filled may be read-only
        with _locked(target):
            if target.is_file():
                fault = _fault(target, size, sha256)
                if fault is None:
                    return  # another process was faster
                logger.warning("%s does not match (%s); deleted", target, fault)
                target.unlink()
            obtain(target)
            if sha256 is not None and len(sha256) < FULL_DIGEST:
                logger.warning("%s is checked by the first %d digits of its SHA-256 alone", target, len(sha256))


def _fault(path: Path, size: int | None, sha256: str | None) -> str | None:
    """What of `path` differs from the wanted, in words; None where nothing does."""
    checks: list[tuple[str, object, object]] = []
    if size is not None:
        checks.append(("size", path.stat().st_size, size))
    if sha256 is not None:
        checks.append(("sha256", disk.sha256(path)[: len(sha256)], sha256.lower()))
    return "; ".join(f"{key} {found}, expected {wanted}" for key, found, wanted in checks if found != wanted) or None


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock beside `target`, so that one process at a time writes it."""
    with disk.locked(target.with_name(f".{target.name}.lock"), f"another process fetches {target}"):
        yield


@contextlib.contextmanager
def _one_line(target: Path) -> Iterator[None]:
    """Turn what the disk refuses (space, rights) into one line."""
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
    """The innermost reason of a network error, in one line: `requests` wraps it three times."""
    while inner := error.__cause__ or next((arg for arg in error.args if isinstance(arg, BaseException)), None):
        error = inner
    return " ".join(str(error).split()) or type(error).__name__


def _card_file(name: str, value: Any) -> CardFile:
    """One item of a card's `files`. Raises RequestError where it is no object or has other keys."""
    if not isinstance(value, dict) or not set(value) <= {"size", "sha256", "url"}:
        raise RequestError(f"{name}: found {value!r}; give an object with the keys size, sha256 and url")
    return CardFile(name, value.get("size"), value.get("sha256"), value.get("url"))


def require_plain(what: str, value: object) -> None:
    """Raise RequestError unless `value` may be the name of a file or folder of its own."""
    if not _matches(_PLAIN, value):
        raise RequestError(
            f"{what} {value!r} is not plain; use letters, digits, '.', '_' and '-', with a letter or digit first"
        )


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
