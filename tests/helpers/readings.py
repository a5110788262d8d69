"""What readers of logs give, with the native kernels and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import RequestError
from pipelines.kernels import extension
from zoo.recommenders.data import sources
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.row_errors import ErrorLog

ARRAYS = ("ids", "numbers", "scales", "labels", "weights", "times", "index")
Read = Callable[..., Iterable[Rows]]


def outcome(read: Read, source: Any, **options: Any) -> list[Any]:
    """The arrays or the error, and the logged faults, for both ways of treating faults."""
    outcomes: list[Any] = []
    for on_error in ("raise", "skip"):
        errors = ErrorLog(limit=100)
        try:
            rows = Rows.concatenate(list(read(source, on_error=on_error, errors=errors, **options)))
            arrays = [getattr(rows, name) for name in ARRAYS]
            outcomes.append([None if data is None else (data.dtype, data.shape, data.tobytes()) for data in arrays])
        except RequestError as error:
            outcomes.append(str(error))
        outcomes.append((errors.counts, errors.messages))
    return outcomes


def same_without_kernels(read: Read, path: Path, block: int, **options: Any) -> list[Any]:
    """Asserts that a file is read alike with the native kernels and without, in blocks of bytes; returns the outcome."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", block)
        quick = outcome(read, path, **options)
        patch.setattr(extension, "native", lambda: None)
        assert quick == outcome(read, path, **options)
    return quick
