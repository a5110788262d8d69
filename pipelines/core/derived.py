"""Files derived from other files on the user's machine, such as another form of a graph."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from pipelines.core import files, settings
from pipelines.core.errors import RequestError, ZooError

_SCRATCH: ContextVar[Path | None] = ContextVar("scratch", default=None)


@contextlib.contextmanager
def temporary_derived(folder: Path) -> Iterator[None]:
    """Context that removes the derived files it creates when it ends; existing files are used and kept.

    Args:
        folder: Folder to put them in; the system's folder of temporary files if it is not writable.
    """
    with contextlib.ExitStack() as stack:
        try:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".derived-", dir=folder))
        except OSError:
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
        token = _SCRATCH.set(Path(scratch))
        stack.callback(_SCRATCH.reset, token)
        yield


def existing(
    origin: Path, places: Sequence[Path], kind: str, form: int | str, suffix: str, holds: Callable[[Path], bool]
) -> Path | None:
    """Returns the path of a derived file that is intact and current; None if there is none.

    Args:
        origin: See `derived`, as the others.
        places: Folders to try.
        kind: Kind of the derived file.
        form: Version.
        suffix: Suffix of the derived file.
        holds: Whether a whole derived file is still used.
    """
    _, paths = _paths(origin, places, kind, form, suffix)
    return next((path for path in paths if _is_intact(path) and holds(path)), None)


def derived(
    origin: Path,
    places: Sequence[Path],
    kind: str,
    form: int | str,
    make: Callable[[Path, Path], object],
    suffix: str = ".onnx",
    holds: Callable[[Path], bool] = Path.is_file,
) -> Path:
    """Returns the path of a derived file, which is made if it is missing or stale.

    The file is in the first writable folder of `places`, or else in the cache, as ORIGIN.KIND-DIGEST and the suffix. A
    record of the derived file is kept next to it; a file that changed since is rebuilt. Outside the cache, files of
    older origins are removed.

    Args:
        origin: Source file.
        places: Folders to try.
        kind: Kind of the derived file, part of its name.
        form: Version of `make`.
        make: Writes the result; takes the paths of source and result.
        suffix: Suffix of the derived file.
        holds: Whether a whole derived file is still used; otherwise it is made again.

    Returns:
        The path.

    Raises:
        RequestError: No place is writable; errors of `make` are raised too.
    """
    if cached := existing(origin, places, kind, form, suffix, holds):
        return cached
    stem, paths = _paths(origin, places, kind, form, suffix)
    for path in paths:
        place = path.parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            # no process writes a file that another process has mapped
            with files.locked(place / ".derived.lock", f"another process writes into {place}"):
                if not (_is_intact(path) and holds(path)):
                    make(origin, path)
                    parts = [part for part in (path, files.mapped(path)) if part.is_file()]
                    files.write_json(_identities(path), {part.name: files.identity(part) for part in parts})
        except OSError as error:
            fault = error.strerror or str(error)
            continue
        if path is not paths[-1]:
            for old in place.glob(f"{stem}*{suffix}"):
                if old != path:
                    for outdated in (old, files.mapped(old), _identities(old)):
                        outdated.unlink(missing_ok=True)
        return path
    raise RequestError(f"cannot write {paths[-1].parent}: {fault}; set ZOO_HOME to a folder you may write")


def _paths(origin: Path, places: Sequence[Path], kind: str, form: int | str, suffix: str) -> tuple[str, list[Path]]:
    """Returns the names' common part of all versions of a derived file, and its path in every place."""
    digest = hashlib.sha256(f"{files.digest(origin)} {form}".encode()).hexdigest()[:12]
    stem = f"{origin.stem}.{kind}-"
    scratch = _SCRATCH.get()
    places = [*([scratch] if scratch else []), *places, settings.home() / "derived"]
    return stem, [place / f"{stem}{digest}{suffix}" for place in places]


def _identities(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_intact(path: Path) -> bool:
    """Returns whether a derived file and the file of its large initializers match their record."""
    if not (path.is_file() and _identities(path).is_file()):
        return False
    try:
        made = files.read_json(_identities(path))
        return path.name in made and all(files.same(path.with_name(name), was) for name, was in made.items())
    except (AttributeError, LookupError, OSError, TypeError, ZooError):  # damaged, or a part is missing
        return False
