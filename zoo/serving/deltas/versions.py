"""Versions of a served model, prepared in two folders in turn.

One folder is served, while deltas are applied to the other, in place where the layout of a file stays. So every delta
is applied to both folders in order. A request reads the folder of its worker only.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import zoo
from pipelines.core.errors import ZooError, one_line
from pipelines.deltas.application import apply_in_place, require_parent
from pipelines.deltas.delta import NATIVE_FILES, STOCK_FILES, Delta, model_digest, open_delta
from pipelines.deltas.transport import Transport
from pipelines.engines.catalog import base_engine, chosen_form
from pipelines.models.hub import CARD
from pipelines.models.record import NATIVE
from zoo.serving.workers.model_loader import ServedModel

logger = logging.getLogger(__name__)


class Applied(NamedTuple):
    """A delta of a version.

    Attributes:
        name: Its name at the place of deltas.
        digest: Digest of the model behind it.
    """

    name: str
    digest: str


@dataclass(frozen=True)
class Version:
    """A version that is ready to be served.

    Attributes:
        model: Public name of the model.
        place: Folder of the version; None for the model itself.
        engine: Inference engine; all versions run in the form of the model itself.
        version: Number of deltas, and the beginning of the model's digest.
        changes: Message about the deltas that were applied, or taken back.
    """

    model: str
    place: Path | None
    engine: str
    version: str
    changes: str = ""


class _Slot:
    """A folder of a version.

    Args:
        path: The folder.

    Attributes:
        applied: Deltas that were applied; None if the folder has to be copied from the model.
        maps: Maps of its files by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.applied: list[Applied] | None = None
        self.maps: dict[str, Any] = {}


class Versions:
    """Versions of one model.

    Args:
        model: The served model.
        transport: Place of its deltas.
        scratch: Folder for the versions.

    Attributes:
        engine: Engine of all versions; with the form that the model itself runs in, which a later choice may differ
            from.

    Raises:
        ZooError: The model cannot be loaded.
    """

    def __init__(self, model: ServedModel, transport: Transport, scratch: Path) -> None:
        self._model, self._transport = model, transport
        opened = replace(model, _handler=None)
        opened.prepare()
        folder = zoo.load(model.model)
        self._base, self._family = folder.path, folder.entry
        self.engine = model.engine
        native = opened.is_native and (self._base / NATIVE).is_file()
        if native and base_engine(model.engine) == model.engine:
            self.engine = chosen_form(self._base / NATIVE)
        stock = (CARD, "int8.onnx") if model.precision == "int8" and model.engine != "auto" else STOCK_FILES
        self._names = (*(NATIVE_FILES if native else stock), *self._family.files)
        self._digest = model_digest(self._base)
        self._slots = [_Slot(scratch / name) for name in ("first", "second")]
        self._served: _Slot | None = None
        self._pending = self._slots[0]
        self._applied: list[Applied] = []
        self._before: set[str] = set()  # deltas that lead to the model itself
        self._faults: set[tuple[str, str, str]] = set()  # see `_fault`
        self._read: dict[str, Delta] = {}  # deltas that one of the folders may lack

    def first(self) -> Version:
        """Returns the version to start with: the model with all deltas that follow it."""
        try:
            self._before = self._deltas_before(self._transport.names())
        except ZooError as error:
            self._report(str(error))
        return self.next() or self._as_version(None, self._applied)

    def next(self) -> Version | None:
        """Prepares the version of the deltas that are listed now.

        Returns:
            The version; None if it is served, or if no further delta can be applied. Faults are logged once.
        """
        try:
            names = [name for name in self._transport.names() if name not in self._before]
        except ZooError as error:
            self._report(str(error))
            return None
        kept = list(self._applied)
        while kept and kept[-1].name not in names:
            self._read.pop(kept.pop().name, None)
        following = names[names.index(kept[-1].name) + 1 :] if kept else names
        back = len(self._applied) - len(kept)
        if not back and (not following or self._fault(following[0], kept) in self._faults):
            return None
        slot = next(slot for slot in self._slots if slot is not self._served)
        try:
            rows = self._bring(slot, kept, following)
        except (OSError, ZooError) as error:
            slot.applied = None
            self._report(one_line(error), following[0] if following else "", kept)
            return None
        if slot.applied == self._applied:
            return None
        assert slot.applied is not None
        new, self._pending = len(slot.applied) - len(kept), slot
        count = new or back
        deltas = f"{count} delta{'s' * (count > 1)}"
        changes = f"{deltas} with {rows:,} rows applied" if new else f"{deltas} taken back"
        return self._as_version(slot.path, slot.applied, changes)

    def served(self, fault: str = "") -> None:
        """Notes the outcome of the version that `next` prepared; no request reads the version before any more.

        Args:
            fault: Why the version is not served.
        """
        slot = self._pending
        if fault:
            new = [delta.name for delta in slot.applied or [] if delta not in self._applied]
            slot.applied = None
            self._report(fault, new[0] if new else "")
            return
        self._served, self._applied = slot, list(slot.applied or [])

    @property
    def spare(self) -> Path:
        """Folder that is not served."""
        return next(slot for slot in self._slots if slot is not self._served).path

    def prepare(self) -> bool:
        """Brings the folder that is not served to the served version, so that the next delta finds it ready.

        Returns:
            Whether it did.
        """
        for slot in self._slots:
            if slot is not self._served:
                try:
                    self._bring(slot, self._applied, [])
                except (OSError, ZooError) as error:
                    slot.applied = None
                    self._report(one_line(error))
        self._read.clear()
        return all(slot.applied is not None for slot in self._slots if slot is not self._served)

    def _as_version(self, place: Path | None, applied: list[Applied], changes: str = "") -> Version:
        return Version(self._model.name, place, self.engine, self._version(applied), changes)

    def _version(self, applied: list[Applied] | None = None) -> str:
        applied = self._applied if applied is None else applied
        return f"{len(applied)}-{(applied[-1].digest if applied else self._digest)[:12]}"

    def _deltas_before(self, names: list[str]) -> set[str]:
        """Returns the deltas up to the one that leads to the model itself, if there is one."""
        for number, name in reversed([*enumerate(names)]):
            try:
                with open_delta(self._transport.read(name), name) as delta:
                    if delta.digest == self._digest:
                        return set(names[: number + 1])
                    if delta.parent == self._digest:
                        return set(names[:number])
            except ZooError:  # reported where it is applied
                continue
        return set()

    def _bring(self, slot: _Slot, kept: list[Applied], following: list[str]) -> int:
        """Applies deltas to a slot that it lacks; returns the number of rows of those that follow."""
        if slot.applied is None or slot.applied != kept[: len(slot.applied)]:
            self._copy(slot)
        assert slot.applied is not None
        for delta in kept[len(slot.applied) :]:
            self._apply(slot, delta.name)
        rows = 0
        for name in following:
            if self._fault(name, slot.applied) in self._faults:
                break
            before = slot.applied
            try:
                rows += self._apply(slot, name)
            except ZooError as error:
                self._report(one_line(error), name, before)
                if slot.applied is None:
                    return self._bring(slot, kept, following)  # without the fault
                break
        return rows

    def _copy(self, slot: _Slot) -> None:
        """Makes a slot a copy of the model."""
        slot.applied = None
        slot.maps.clear()
        shutil.rmtree(slot.path, ignore_errors=True)
        slot.path.mkdir(parents=True)
        for name in self._names:
            if (self._base / name).is_file():
                shutil.copyfile(self._base / name, slot.path / name)
        slot.applied = []

    def _apply(self, slot: _Slot, name: str) -> int:
        """Applies a delta to a slot; returns its number of rows."""
        with contextlib.ExitStack() as stack:
            if (delta := self._read.get(name)) is None:
                delta = stack.enter_context(open_delta(self._transport.read(name), name))
            assert slot.applied is not None
            applied = slot.applied
            require_parent(delta, applied[-1].digest if applied else self._digest, self._model.name)
            slot.applied = None  # until the files are whole
            apply_in_place(delta, slot.path, self._names, slot.maps)
            slot.applied = [*applied, Applied(name, delta.digest)]
            self._read[name] = delta
            return delta.rows

    def _fault(self, name: str, applied: list[Applied] | None) -> tuple[str, str, str]:
        """Returns the key of a fault of a delta; it changes with the file and with the model before it."""
        path = self._transport.local(name)
        stamp = ""
        if path is not None and path.is_file():  # which may be copied while it is read
            stamp = f"{path.stat().st_size} {path.stat().st_mtime_ns}"
        return name, stamp, self._version(applied)

    def _report(self, message: str, name: str = "", applied: list[Applied] | None = None) -> None:
        """Logs a fault once, of a delta behind those that were applied."""
        key = self._fault(name, applied) if name else (message, "", "")
        if key not in self._faults:
            self._faults.add(key)
            logger.warning("%s: %s; version %s is served", self._model.name, message, self._version())


def changed(versions: Mapping[str, Versions]) -> list[Version]:
    """Prepares the versions of all models that have new deltas.

    Args:
        versions: Versions by public name.
    """
    return [version for series in versions.values() if (version := series.next()) is not None]
