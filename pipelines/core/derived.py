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
def removed_after(folder: Path) -> Iterator[None]:
    """Context whose derived files are removed at its end; those that exist already are used, and stay.

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


def derived(
    origin: Path,
    places: Sequence[Path],
    kind: str,
    form: int | str,
    make: Callable[[Path, Path], object],
    suffix: str = ".onnx",
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

    Returns:
        The path.

    Raises:
        RequestError: No place is writable; errors of `make` are raised too.
    """
    digest = hashlib.sha256(f"{files.digest(origin)} {form}".encode()).hexdigest()[:12]
    stem = f"{origin.stem}.{kind}-"
    scratch = _SCRATCH.get()
    places = [*([scratch] if scratch else []), *places, settings.home() / "derived"]
    if existing := next((path for place in places if _is_whole(path := place / f"{stem}{digest}{suffix}")), None):
        return existing
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            path = place / f"{stem}{digest}{suffix}"
            # no process writes a file that another process has mapped
            with files.locked(place / ".derived.lock", f"another process writes into {place}"):
                if not _is_whole(path):
                    make(origin, path)
                    parts = [each for each in (path, files.mapped(path)) if each.is_file()]
                    files.write_json(_identities(path), {each.name: files.identity(each) for each in parts})
        except OSError as error:
            fault = error.strerror or str(error)
            continue
        if place is not places[-1]:
            for old in place.glob(f"{stem}*{suffix}"):
                if old != path:
                    for outdated in (old, files.mapped(old), _identities(old)):
                        outdated.unlink(missing_ok=True)
        return path
    raise RequestError(f"cannot write {places[-1]}: {fault}; set ZOO_HOME to a folder you may write")


def _identities(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_whole(path: Path) -> bool:
    """Returns whether a derived file and the file of its large initializers match their record."""
    if not (path.is_file() and _identities(path).is_file()):
        return False
    try:
        made = files.read_json(_identities(path))
        return path.name in made and all(files.same(path.with_name(name), was) for name, was in made.items())
    except (AttributeError, LookupError, OSError, TypeError, ZooError):  # damaged, or a part is missing
        return False
