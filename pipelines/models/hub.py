"""Models by name: finds, downloads, verifies and caches the files that their cards list.

`pipelines` knows no model by name. `pipelines.core.settings` describes ZOO_HOME, ZOO_OFFLINE and ZOO_MIRROR.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.core import files as disk
from pipelines.core.errors import RequestError, ZooError, nearest
from pipelines.core.settings import endpoint, home, mirror, offline
from pipelines.models.transfer import Refused, download, ensure, fault_of, one_line

CARD = "card.json"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # flat, visible, needs no quoting in a URL
_DIGEST = re.compile(r"[0-9a-f]{8}|[0-9a-f]{64}")
_URL = re.compile(r"https?://\S+")
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+)@([\w.-]+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CardFile:
    """One file of a model.

    Attributes:
        name: Name of the file.
        size: Size in bytes, None if unknown.
        sha256: 64 lower-case hexadecimal digits, or the first 8 that torch.hub puts into a file's name; None if
            unknown.
        url: Public http(s) address, None if there is none.
        hub: Repository of the Hugging Face Hub that has the file under its name, hf://ORG/NAME@REVISION; None if there
            is none.

    Raises:
        RequestError: A value is invalid, or a URL has no digest.
    """

    name: str
    size: int | None
    sha256: str | None
    url: str | None
    hub: str | None = None

    def __post_init__(self) -> None:
        require_plain("file name", self.name)
        if self.name == CARD:
            raise RequestError(f"{CARD} must not be in the list of files of the card")
        if self.size is not None and (type(self.size) is not int or self.size < 0):
            raise RequestError(f"{self.name}: size is {self.size!r}; give its bytes as a whole number, or null")
        if self.sha256 is not None and not _matches(_DIGEST, self.sha256):
            raise RequestError(
                f"{self.name}: sha256 is {self.sha256!r}; give 64 lower-case hex digits (or their first 8), or null"
            )
        if self.url is not None and not _matches(_URL, self.url):
            raise RequestError(f"{self.name}: url is {self.url!r}; give an http:// or https:// address, or null")
        if self.hub is not None and not _matches(_HUB, self.hub):
            raise RequestError(f"{self.name}: hub is {self.hub!r}; give hf://ORG/NAME@REVISION, or leave it out")
        if self.addresses and self.sha256 is None:
            raise RequestError(f"{self.name}: has a url but no sha256; a download must be checked, so add the digest")

    @property
    def addresses(self) -> list[str]:
        """Public addresses of the file, in the order in which they are tried: the hub, then the origin."""
        repository = _HUB.fullmatch(self.hub or "")
        on_hub = [f"{endpoint()}/{repository[1]}/resolve/{repository[2]}/{self.name}"] if repository else []
        return [*on_hub, *([self.url] if self.url else [])]

    @classmethod
    def of(cls, path: Path) -> CardFile:
        """Returns the entry of an existing file that has no public address.

        Args:
            path: The file.
        """
        return cls(path.name, path.stat().st_size, disk.sha256(path), None)

    def fault(self, path: Path) -> str | None:
        """Returns how a file differs from `size` and `sha256`, or None.

        Args:
            path: Path of the file.
        """
        return fault_of(path, self.size, self.sha256)


_OPEN: weakref.WeakValueDictionary[str, Card] = weakref.WeakValueDictionary()  # by path


@dataclass(frozen=True)
class Card:
    """A model's card.json.

    Attributes:
        name: Name of the model.
        entry: Name of the family that runs it.
        description: Description of the model.
        files: Files of the model.
        details: All other keys of the card.

    Raises:
        RequestError: A part is missing or invalid.
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
            raise RequestError(f"card of {self.name}: found a file name twice in {', '.join(names)}")
        if taken := {"name", "entry", "description", "files"} & set(self.details):
            raise RequestError(
                f"card of {self.name}: details may not hold {', '.join(sorted(taken))}; these are fields of the card"
            )

    def file(self, name: str) -> CardFile | None:
        """Returns the entry of a file; None if the card lists none.

        Args:
            name: Name of the file.
        """
        return next((file for file in self.files if file.name == name), None)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Card:
        """Reads a card.json.

        Args:
            path: The file.

        Returns:
            The card.

        Raises:
            RequestError: The file is missing or invalid; the message names it.
        """
        value = disk.read_json(path)
        try:
            if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
                raise RequestError(
                    "a card is a JSON object with name, entry, description and files (an object: file name -> size, "
                    "sha256, url)"
                )
            details = dict(value)
            name, entry, description = (details.pop(key, None) for key in ("name", "entry", "description"))
            card = cls(
                name, entry, description, tuple(_card_file(*item) for item in details.pop("files").items()), details
            )
            _OPEN[os.path.realpath(path)] = card
            return card
        except RequestError as error:
            raise RequestError(f"{path}: {error}") from error

    @classmethod
    def shared(cls, path: str | os.PathLike[str], preprocessing: Any) -> Any:
        """Returns the preprocessing of a card that is in memory if it is equal: vocabularies may take 100 MB and more.

        Args:
            path: The card's file; it is not read.
            preprocessing: Preprocessing of a model, as JSON values.

        Returns:
            The equal values of the card, else `preprocessing`.
        """
        card = _OPEN.get(os.path.realpath(path))
        opened = None if card is None else card.details.get("preprocessing")
        return opened if opened == preprocessing else preprocessing

    def to_json(self) -> dict[str, Any]:
        """Returns the card as in card.json; `details` follow the four other keys in their order."""
        files = {
            file.name: {"size": file.size, "sha256": file.sha256, "url": file.url}
            | ({"hub": file.hub} if file.hub else {})
            for file in self.files
        }
        return {"name": self.name, "entry": self.entry, "description": self.description, "files": files, **self.details}

    def digest(self) -> str:
        """Hex SHA-256 of the canonical JSON (sorted keys, no blanks), independent of the layout of the file."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Hub:
    """Models in folders with one subfolder per model: NAME/card.json and the files that ship with the package.

    If several folders have a name, the first one counts.

    Args:
        *folders: Folders of models.
    """

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        self.folders = tuple(map(Path, folders))

    def names(self) -> list[str]:
        """Returns the names of all models, sorted."""
        return sorted({path.parent.name for folder in self.folders for path in folder.glob(f"*/{CARD}")})

    def shipped(self, name: str) -> Path:
        """Returns the folder of a known model in its package.

        Args:
            name: Name of the model.
        """
        return next(folder / name for folder in self.folders if (folder / name / CARD).is_file())

    def card(self, name: str) -> Card:
        """Reads the card of a model.

        Args:
            name: Name of the model.

        Returns:
            The card.

        Raises:
            RequestError: The name is unknown; the message suggests the nearest and lists all.
        """
        if name not in self.names():
            raise self.unknown(name)
        path = self.shipped(name) / CARD
        card = Card.read(path)
        if card.name != name:
            raise RequestError(f"{path} is named {card.name!r}; rename the card or its folder, they must agree")
        return card

    def unknown(self, name: str) -> RequestError:
        """Returns the error for a name that no model has: the nearest name and all others, or what files are for.

        Args:
            name: The name, or the path of a file.
        """
        names = self.names()
        all_names = ", ".join(names) or "none"
        if not os.path.isfile(name):  # noqa: PTH113 (pathlib's raises for a name too long)
            return RequestError(f"no model {name!r}; {nearest(name, names)}choose one of: {all_names}")
        message = f"found the file {name}, expected a model folder, or one of: {all_names}"
        if disk.is_onnx(name):
            message += "; an ONNX file goes to zoo run, serve, quantize, tune, benchmark, plan, info"
        elif name.endswith(".plan"):
            message += "; zoo.open_plan opens a plan, and zoo info shows its timings"
        return RequestError(message)

    def folder(self, name: str) -> Path:
        """Returns the working folder of a model, home()/models/NAME/<12 digits of the card's digest>.

        Args:
            name: Name of the model.

        Returns:
            Path of the folder, which `fetch` fills.
        """
        return home() / "models" / name / self.card(name).digest()[:12]

    def fetch(self, name: str, files: Iterable[str] | None = None, later: Iterable[str] = ()) -> Path:
        """Fetches files of a model into its working folder.

        Size and SHA-256 are checked at every call: a file that does not match is deleted, logged and fetched again. A
        file comes from the first source that has it: the folder itself, the folders of models (of packages), the source
        tree that the package was installed from, ZOO_MIRROR (its subfolder NAME, or flat in it), the repository of the
        Hugging Face Hub in the card, the card's URL. Other files in the folder are kept.

        Args:
            name: Name of the model.
            files: Names of files; None: all files of the card.
            later: Files that are only taken if they are on this machine.

        Returns:
            The working folder with card.json.

        Raises:
            RequestError: The model or file is unknown, no source has it, ZOO_OFFLINE forbids the network, or the disk
                refuses to write.
            ZooError: The network failed or sent another file, or the disk is full.
        """
        card = self.card(name)
        by_name = {file.name: file for file in card.files}
        selected = list(dict.fromkeys(by_name if files is None else files))
        if strange := [file for file in selected if file not in by_name]:
            raise RequestError(f"{name} has no file {strange[0]!r}; its card lists: {', '.join(by_name) or 'none'}")
        folder = self.folder(name)
        _ship(self.shipped(name) / CARD, folder / CARD)
        for file in (by_name[key] for key in selected):
            if file.name in later and not (folder / file.name).is_file() and not self._here(card, file):
                continue
            ensure(folder / file.name, file.size, file.sha256, functools.partial(self._obtain, card, file))
        return folder

    def _packaged(self, card: Card, file: CardFile) -> list[Path]:
        """Returns the paths of a file in the folders of models and in the source tree that they were installed from.

        The folder with the card comes first; another package may hold files of the model alone.
        """
        place, tree = self.shipped(card.name), source_tree()
        others = [other for folder in self.folders if (other := folder / card.name / file.name).is_file()]
        own = tree.joinpath(*place.parts[-3:], file.name) if tree else None
        return list(dict.fromkeys([place / file.name, *others, *([own] if own and own.is_file() else [])]))

    def _here(self, card: Card, file: CardFile) -> bool:
        """Returns whether the package, its source tree or a local mirror has a file."""
        base = mirror()
        places = [*self._packaged(card, file), *(_mirrored(base, card, file) if base else [])]
        return any(isinstance(path, Path) and path.is_file() and not file.fault(path) for path in places)

    def _obtain(self, card: Card, file: CardFile, target: Path) -> None:
        """Copies or downloads a file from the first source that has a correct one."""
        base = mirror()
        mirrored = _mirrored(base, card, file) if base else []
        sources: list[Path | str] = [*self._packaged(card, file), *mirrored, *file.addresses]
        problems: list[str] = []  # errors of earlier sources
        for source in sources:
            try:
                if isinstance(source, Path):
                    if not _copy(source, target, file):
                        continue
                elif offline():
                    continue
                else:
                    download(source, target, file.size, file.sha256)
                if problems:
                    logger.warning(
                        "%s of %s came from %s, because: %s", file.name, card.name, source, "; ".join(problems)
                    )
                return
            except disk.DiskFull:
                raise  # other sources would fail, too
            except ZooError as error:
                if not (isinstance(error, Refused) and source in mirrored[:-1]):  # a mirror may have no subfolders
                    problems.append(str(error))
        remote = any(isinstance(source, str) for source in sources)
        what = f"{file.name} of {card.name}"
        if remote and offline():
            remark = f" ({'; '.join(problems)})" if problems else ""
            raise RequestError(
                f"{what} is not on this machine{remark} and ZOO_OFFLINE forbids the network: "
                f"run `zoo download {card.name}` without ZOO_OFFLINE, or set ZOO_MIRROR to a folder that holds the file"
            )
        if file.addresses:
            raise ZooError(
                f"cannot fetch {what}: {'; '.join(problems)}; ZOO_MIRROR may name a folder or address that holds it"
            )
        why = "; ".join(problems) or f"not in the package{f', not in ZOO_MIRROR={base}' if base else ''}"
        raise RequestError(
            f"cannot find {what}: {why}, and its card has no url; set ZOO_MIRROR to a folder or http(s) address that "
            "holds it"
        )


@functools.cache
def source_tree() -> Path | None:
    """Returns the local source tree that pip installed the package from (PEP 610), or None."""
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
    """Returns the places of a file in a mirror: the subfolder of the model, and the mirror itself."""
    if _matches(_URL, base):
        return [f"{base.rstrip('/')}/{part}{file.name}" for part in (f"{card.name}/", "")]
    folder = Path(base).expanduser()
    own = folder / card.name / file.name
    return [own if own.is_file() else folder / file.name]


def _copy(source: Path, target: Path, file: CardFile) -> bool:
    """Copies a file if it exists, and returns whether it does; raises ZooError if it does not match the card."""
    if not source.parent.is_dir():
        raise ZooError(f"there is no folder {source.parent} (ZOO_MIRROR)")
    if not source.is_file():
        return False
    if fault := fault_of(source, file.size, file.sha256):
        raise ZooError(f"{source} does not match: {fault}")
    disk.copy_file(source, target)
    return True


def _ship(source: Path, target: Path) -> None:
    """Copies `source` to `target` if they differ."""
    with one_line(target):
        content = source.read_bytes()
        if not target.is_file() or target.read_bytes() != content:
            disk.write_bytes(target, content)


def _card_file(name: str, value: Any) -> CardFile:
    """Reads an item of the card's `files`; raises RequestError if it is no object or has other keys."""
    if not isinstance(value, dict) or not set(value) <= {"size", "sha256", "url", "hub"}:
        raise RequestError(f"{name}: found {value!r}; give an object with the keys size, sha256, url and hub")
    return CardFile(name, value.get("size"), value.get("sha256"), value.get("url"), value.get("hub"))


def require_plain(subject: str, value: object) -> None:
    """Checks a name of a file or folder.

    Args:
        subject: What is named, for the error message.
        value: The name.

    Raises:
        RequestError: The value is not a plain name.
    """
    if not _matches(_PLAIN, value):
        raise RequestError(
            f"found the {subject} {value!r}, expected letters, digits, '.', '_' and '-', with a letter or digit first"
        )


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
