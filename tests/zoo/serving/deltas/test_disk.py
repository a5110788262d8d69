"""Folders of versions that cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.core.errors import RequestError
from zoo.serving.deltas import updater
from zoo.serving.deltas.versions import Versions, _Slot


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZOO_HOME", str(tmp_path / "file"))
    with pytest.raises(RequestError, match=r"cannot write .*versions: Not a directory; set ZOO_HOME"):
        updater._scratch()


def test_a_full_disk_is_a_message_and_the_version_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    versions = Versions.__new__(Versions)
    state = {"_slots": [_Slot(tmp_path / "first")], "_served": None, "_applied": [], "_read": {}, "_faults": set()}
    vars(versions).update(state, _model=SimpleNamespace(name="m"), _digest="d" * 64)

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(versions, "_bring", fail)
    with caplog.at_level(logging.WARNING):
        assert not versions.prepare()
    assert "m: [Errno 28] No space left on device; version 0-dddddddddddd is served" in caplog.text
    monkeypatch.setattr(versions, "_bring", lambda slot, *_: setattr(slot, "applied", []))
    assert versions.prepare()
