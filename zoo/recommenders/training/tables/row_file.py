"""A file with the trained rows of a table, which returns to its last checkpoint after a process was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import FULL, DiskFull

Ints = NDArray[np.int64]
Records = NDArray[np.void]

BLOCK = 1 << 16  # records that are read or written at once
MIN_RECORDS = 1 << 14  # records that a new file has room for
GROWTH = 1.25


class RowFile:
    """Records of the rows of a table that occurred in training, in the order in which they first occurred.

    Rows that occur often were met early, and share the pages of the file that stay in memory. The file is mapped. The
    system writes its changed pages and drops pages that were not used for long, so it may be larger than the memory.

    The first change of a record after a checkpoint appends the former record to a journal. `restore` writes
    these records back and so returns to the checkpoint.

    Args:
        path: The file; journals have its name and a number.
        rows: Rows of the table.
        fields: Fields of a record besides "row", the number of the row.

    Attributes:
        count: Number of records.
    """

    def __init__(self, path: Path, rows: int, fields: list[Any]) -> None:
        self.path, self.dtype = path, np.dtype([("row", "<i8"), *fields])
        self._entry = np.dtype([("place", "<i8"), ("record", self.dtype)])
        self._places = np.zeros(rows, np.int32)  # record of every row, from 1 on; 0: none
        self.count, self._number = 0, 0
        self._journaled = np.zeros(0, bool)  # by record of the checkpoint
        self._journal: Any = None
        self._records: Records = np.zeros(0, self.dtype)

    def create(self) -> None:
        """Creates an empty file.

        Raises:
            ZooError: The disk is full, or the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.remove()
        self._grow(MIN_RECORDS)

    def read(self, rows: Ints) -> tuple[NDArray[np.bool_], Records]:
        """Reads the records of rows.

        Args:
            rows: Numbers of rows, int64 [n].

        Returns:
            Which rows have a record, bool [n], and the records of all, undefined for rows without one, [n].
        """
        places = self._places[rows]
        return places > 0, self._records[np.maximum(places, 1) - 1]

    def write(self, records: Records) -> None:
        """Writes the records of different rows.

        Args:
            records: The records, [n].

        Raises:
            ZooError: The disk is full.
        """
        places = self._places[records["row"]]
        new = np.flatnonzero(places == 0)
        if len(new):
            if self.count + len(new) > len(self._records):
                self._grow(max(int(len(self._records) * GROWTH), self.count + len(new)))
            places[new] = np.arange(self.count + 1, self.count + len(new) + 1)
            self._places[records["row"][new]] = places[new]
            self.count += len(new)
        self._keep(places.astype(np.int64) - 1)
        self._records[places - 1] = records

    def blocks(self) -> Iterator[Records]:
        """Yields copies of all records in blocks, which `write` may change before the next block."""
        for first in range(0, self.count, BLOCK):
            yield self._records[first : min(first + BLOCK, self.count)].copy()

    def checkpoint(self) -> dict[str, int]:
        """Starts a new journal.

        Returns:
            State of the file for `restore`. The former state can be restored until the next `write`.
        """
        if self._journal is not None:
            self._journal.close()
        self._number, self._journal = self._number + 1, None
        self._journaled = np.zeros(self.count, bool)
        return {"count": self.count, "journal": self._number}

    def restore(self, state: dict[str, int]) -> None:
        """Returns to a checkpoint.

        Args:
            state: Result of `checkpoint`.

        Raises:
            RequestError: The file is missing or damaged.
        """
        self._number, count = state["journal"], state["count"]
        size = self.path.stat().st_size // self.dtype.itemsize if self.path.is_file() else 0
        if size < max(count, 1):
            raise RequestError(
                f"found no {self.path} with {count:,} records, which the checkpoint needs; train into an empty folder"
            )
        self._map(size)
        journal = self._journal_path(self._number)
        if journal.is_file():
            entries = np.memmap(journal, self._entry, "r", shape=(journal.stat().st_size // self._entry.itemsize,))
            for first in range(0, len(entries), BLOCK):
                block = entries[first : first + BLOCK]
                self._records[block["place"]] = block["record"]
        self.count = count
        self._places[:] = 0
        for first in range(0, count, BLOCK):
            rows = self._records[first : min(first + BLOCK, count)]["row"]
            self._places[rows] = np.arange(first + 1, first + len(rows) + 1)
        self._remove_journals(but=self._number)
        self._journaled = np.zeros(count, bool)
        if journal.is_file():  # its rows are written back
            os.truncate(journal, 0)

    def copy(self, path: Path) -> None:
        """Copies the records to another file.

        Args:
            path: File to write.

        Raises:
            ZooError: The disk is full.
        """
        target = RowFile(path, 0, [])
        target.dtype = self.dtype
        target.create()
        target._grow(max(self.count, 1))
        for first in range(0, self.count, BLOCK):
            last = min(first + BLOCK, self.count)
            target._records[first:last] = self._records[first:last]

    def remove(self) -> None:
        """Deletes the file and its journals."""
        self._records = np.zeros(0, self.dtype)
        self.path.unlink(missing_ok=True)
        self._remove_journals()

    def _grow(self, size: int) -> None:
        try:
            with self.path.open("ab") as file:  # space is taken now: a full disk would kill the process at a page later
                os.posix_fallocate(file.fileno(), 0, size * self.dtype.itemsize)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(self.path, error) from error
            raise RequestError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._map(size)

    def _map(self, size: int) -> None:
        self._records = np.asarray(np.memmap(self.path, self.dtype, "r+", shape=(size,)))

    def _keep(self, places: Ints) -> None:
        """Appends the records at these places to the journal, unless it has them."""
        places = places[places < len(self._journaled)]
        places = places[~self._journaled[places]]
        if self._journal is None:
            if not self._number:  # before the first checkpoint
                return
            self._remove_journals(but=self._number)
            self._journal = self._journal_path(self._number).open("ab", buffering=0)
        if not len(places):
            return
        entries = np.empty(len(places), self._entry)
        entries["place"], entries["record"] = places, self._records[places]
        try:
            if self._journal.write(entries.data) != entries.nbytes:
                raise OSError(FULL[0], os.strerror(FULL[0]))
        except OSError as error:
            raise DiskFull(self.path, error) from error
        self._journaled[places] = True

    def _journal_path(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _remove_journals(self, but: int = 0) -> None:
        for journal in self.path.parent.glob(f"{self.path.name}.*"):
            if journal != self._journal_path(but):
                journal.unlink()
