"""Files of a model folder that build.json does not list, such as copied ones; no stage overwrites them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core import files
from pipelines.core.errors import RequestError
from pipelines.models.record import MAKING, NATIVE, RECORD

if TYPE_CHECKING:
    from pipelines.models.folder import ModelFolder

INT8, TABLE = "int8.onnx", "calibration.json"

logger = logging.getLogger(__name__)


def digest(path: Path, record: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a file, from the record of a stage if size and time are unchanged.

    Args:
        path: File.
        record: Record of a stage.
    """
    if (was := record.get("files", {}).get(path.name)) is not None:
        now = path.stat()
        if (now.st_size, now.st_mtime_ns) == (was["bytes"], was["modified"]):
            return str(was["sha256"])
    return files.digest(path)


def is_replaced(folder: ModelFolder, stage: str) -> bool:
    """Returns whether another file stands where build.json lists the result of a stage.

    Args:
        folder: Model folder.
        stage: File of the stage.
    """
    path, record = folder.path / stage, folder.record.get(stage)
    if folder.is_listed(stage) or stage == NATIVE or record is None or record.get(MAKING) or not path.is_file():
        return False
    return bool(digest(path, record) != record.get("sha256"))


def use_replaced(folder: ModelFolder, stage: str) -> bool:
    """Decides about a file that stands where build.json lists another one; see `is_replaced`.

    int8.onnx is used as it is. Other files would have to be rebuilt, and stages after them.

    Args:
        folder: Model folder.
        stage: File of the stage.

    Returns:
        Whether the file is used as it is; False for a damaged file of an earlier stage, which can be rebuilt.

    Raises:
        RequestError: The file is valid and of an earlier stage, or int8.onnx is damaged.
    """
    path = folder.path / stage
    fault = _fault(path, path.stat().st_mtime_ns, path.stat().st_size)
    again = f"to rebuild it: zoo build {folder.path} --force"
    if stage == INT8:
        if fault:
            raise RequestError(f"{path} is damaged ({fault}); copy it again, or {again}")
        logger.warning("%s is another file than %s lists and is used as it is; %s", path, RECORD, again)
        return True
    if fault:
        logger.warning("%s is damaged and is rebuilt", path)
        return False
    raise RequestError(f"{path} is another file than {RECORD} lists; move it away, or {again}")


@contextlib.contextmanager
def kept(folder: ModelFolder, stage: str, *, replace: bool = False) -> Iterator[None]:
    """Context that writes a stage, and keeps a file that was there and that build.json does not list.

    A table, and with `replace` any file, is kept beside the new one as NAME.found.SUFFIX.

    Args:
        folder: Model folder.
        stage: File of the stage.
        replace: Whether the user asked for the new file.

    Raises:
        RequestError: The new file differs from the one that was there, which stays.
    """
    path, record = folder.path / stage, folder.record.get(stage)
    if stage == NATIVE or not path.is_file() or (record is not None and digest(path, record) == record.get("sha256")):
        yield
        return
    copy = _copied(path)
    try:
        yield
        if files.sha256(path) == files.sha256(copy):
            return
        if fault := _fault(copy, copy.stat().st_mtime_ns, copy.stat().st_size):
            logger.warning("%s was damaged (%s) and is rebuilt", path, fault.replace(str(copy), str(path)))
        elif replace or stage == TABLE:
            message = "%s does not list %s, which was rebuilt; the previous file is kept as %s"
            kept_as = copy.rename(_free(path))
            logger.warning(message, folder.path / RECORD, stage, kept_as)
        else:
            copy.replace(path)
            raise RequestError(
                f"found {path}, which {RECORD} does not list and which differs from what this folder's files give; "
                f"move it away, or to rebuild it: zoo build {folder.path} --force"
            )
    finally:
        copy.unlink(missing_ok=True)


def _copied(path: Path) -> Path:
    """Links a file under a hidden name, or copies it."""
    copy = path.with_name(f".{path.stem}.found{path.suffix}")
    copy.unlink(missing_ok=True)
    try:
        copy.hardlink_to(path)
    except OSError:  # the file system has no links
        shutil.copy2(path, copy)
    return copy


def _free(path: Path) -> Path:
    """Returns NAME.found.SUFFIX, numbered if there is one already."""
    names = (f".found{number or ''}{path.suffix}" for number in itertools.count())
    return next(candidate for name in names if not (candidate := path.with_suffix(name)).exists())


@functools.lru_cache(maxsize=64)
def _fault(path: Path, _modified: int, _size: int) -> str:
    """Returns why a file is not readable, or ""."""
    try:
        if path.suffix == ".json":
            from pipelines.quantization.calibration.table import CalibrationTable

            CalibrationTable.load(path)
        else:
            from pipelines.graph import io

            io.load(path)
    except RequestError as error:
        return str(error)
    return ""
