"""Labelled rows as training reads them: parsed once, kept on disk as records, shuffled into batches by a thread, in
constant memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.core import ordered_map
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import FULL, DiskFull
from pipelines.core.progress import progress
from zoo.recommenders.criteo.data import Counts, Rows, read_rows
from zoo.recommenders.criteo.features import Features
from zoo.recommenders.data.number_parsing import Floats
from zoo.recommenders.data.row_errors import ErrorLog

Batch = tuple[npt.NDArray[np.int32], Floats, Floats]  # ids [n, categorical], numbers [n, numeric], labels [n]

BLOCK_ROWS = 1 << 18  # rows shuffled at once; at most four blocks are in memory
CHUNK_ROWS = 1024  # rows that lie together on disk and are read together: a block holds chunks from all over the rows


class RowStore:
    """Labelled rows in their order, as records in a file without a name beside `folder`, which goes with the process
    whatever ends it.

    A record is a label, the raw numbers and the ids, 105 bytes for the published sizes. digest: SHA-256 of all records.
    Raises RequestError for data that cannot be trained on, ZooError where the disk is full.
    """

    def __init__(self, data: Any, counts: Counts, on_error: str, folder: Path) -> None:
        ids = np.min_scalar_type(int(np.max(counts["buckets"])) - 1)
        self.record = np.dtype(
            [("label", "u1"), ("numbers", "f4", (counts["numeric"],)), ("ids", ids, (counts["categorical"],))]
        )
        self.rows, self.errors, digest = 0, ErrorLog(), hashlib.sha256()
        parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        try:
            self.file = tempfile.TemporaryFile(dir=parent, buffering=0)  # noqa: SIM115 (open as long as this object)
        except OSError as error:
            raise RequestError(
                f"cannot write in {parent}: {error.strerror or error}; choose another output folder"
            ) from error
        with progress("reading") as advance:
            for rows in read_rows(data, on_error=on_error, errors=self.errors, **counts):
                if rows.labels is None:
                    raise RequestError(
                        "found rows without labels, wanted a label (0 or 1) in front of every row to train on"
                    )
                records = np.empty(len(rows), self.record)
                records["label"], records["numbers"], records["ids"] = rows.labels, rows.numbers, rows.ids
                content = records.view(np.uint8).data
                digest.update(content)
                self._write(content, parent)
                self.rows += len(rows)
                advance(len(rows))
        if not self.rows:
            raise RequestError(f"found no rows to train on: {self.errors}")
        self.digest = digest.hexdigest()

    def _write(self, content: memoryview, parent: Path) -> None:
        try:
            while content:
                content = content[self.file.write(content) :]
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(f"the rows read to {parent}", error) from error
            raise

    def _records(self, starts: Sequence[int], stops: Sequence[int]) -> npt.NDArray[Any]:
        """The records of some ranges of rows, one range after the other."""
        records = np.empty(sum(stops) - sum(starts), self.record)
        content, position = records.view(np.uint8), 0
        for start, stop in zip(starts, stops, strict=True):
            size = (stop - start) * self.record.itemsize
            if (
                os.preadv(self.file.fileno(), [content[position : position + size].data], start * self.record.itemsize)
                < size
            ):
                raise ZooError("cannot read back the rows that were kept on disk; train again")
            position += size
        return records

    def part(self, start: int, stop: int) -> Iterator[Rows]:
        """Rows [start, stop) in their order, in blocks of up to `BLOCK_ROWS`."""
        for begin in range(start, stop, BLOCK_ROWS):
            end = min(begin + BLOCK_ROWS, stop)
            yield _rows(self._records([begin], [end]), begin)

    def batches(
        self,
        stop: int,
        features: Features,
        size: int,
        seed: Sequence[int],
        *,
        skip: int = 0,
        rank: int = 0,
        processes: int = 1,
    ) -> Generator[tuple[Batch, int], None, None]:
        """The first `stop` rows once, shuffled by `seed`: process `rank`'s share of every batch of `size` rows, and the
        rows of the batch.

        The first `skip` batches are left out. Up to one block of rows is shuffled as a whole; of more rows, chunks are
        drawn from all over the rows, a block at a time, and the rows of a block shuffled. A thread makes the next block
        while this one is used.
        """
        random = np.random.default_rng(seed)
        chunk = size * -(-CHUNK_ROWS // size)  # whole batches, so that only the last one of all is shorter
        starts = np.arange(0, stop, chunk)
        together = max(1, BLOCK_ROWS // chunk)  # chunks
        if len(starts) > together:
            whole = stop // chunk
            starts[:whole] = random.permutation(starts[:whole])

        def blocks() -> Iterator[tuple[list[int], list[int], npt.NDArray[np.int64], int]]:
            left = skip
            for first in range(0, len(starts), together):
                begins = starts[first : first + together].tolist()
                ends = [min(begin + chunk, stop) for begin in begins]
                order = random.permutation(sum(ends) - sum(begins))
                if left * size < len(order):
                    yield begins, ends, order, left
                left = max(0, left - -(-len(order) // size))

        def load(block: tuple[list[int], list[int], npt.NDArray[np.int64], int]) -> tuple[Batch, list[int], list[int]]:
            begins, ends, order, left = block
            counts = [min(size, len(order) - begin) for begin in range(left * size, len(order), size)]
            shares = [(count * rank // processes, count * (rank + 1) // processes) for count in counts]
            mine = [order[(left + i) * size :][begin:end] for i, (begin, end) in enumerate(shares)]
            rows = _rows(self._records(begins, ends)[np.concatenate(mine)])
            return arrays(rows, features), np.cumsum([0, *map(len, mine)]).tolist(), counts

        for (ids, numbers, labels), cuts, counts in ordered_map.ordered_map(load, blocks(), 1):
            for begin, end, count in zip(cuts[:-1], cuts[1:], counts, strict=True):
                yield (ids[begin:end], numbers[begin:end], labels[begin:end]), count


def _rows(records: npt.NDArray[Any], start: int = 0) -> Rows:
    """Records as `Rows`; the first one's index is `start`."""
    numbers, ids = np.ascontiguousarray(records["numbers"], np.float32), np.ascontiguousarray(records["ids"], np.int32)
    return Rows(numbers, ids, records["label"].astype(np.float32), np.arange(start, start + len(records)))


def arrays(rows: Rows, features: Features) -> Batch:
    """What a training step takes."""
    inputs = features.encode(rows)
    assert rows.labels is not None
    return inputs["ids"], inputs["numbers"], rows.labels
