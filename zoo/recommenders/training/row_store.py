"""Training rows of a recommender in time order, and the frequencies of their categories."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import nn

from pipelines.core.errors import RequestError
from pipelines.core.files import FULL, DiskFull
from pipelines.core.machine import BLOCK_ROWS
from pipelines.core.progress import progress
from zoo.recommenders.data.cell_values import parse_floats
from zoo.recommenders.data.columns import times
from zoo.recommenders.data.encoding import UNKNOWN
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import FEATURES
from zoo.recommenders.models.layers import Embeddings

BATCH = 8192  # rows read at once
TIMES = times.NAMES | {"text": "2024-01-31T12:00:00 or the like"}


class RowStore:
    """Labelled rows in time order, stored as records in an unnamed file next to `folder`, removed with the process.

    Args:
        features: Encoding of the rows.
        data: Labelled log, as in `Features.read`.
        on_error: As in `Features.read`.
        folder: Folder next to which the rows are stored.

    Attributes:
        digest: SHA-256 of all records.
        seen: Names of the columns with a value other than the encoding of a missing value.

    Raises:
        RequestError: The data cannot be used for training.
        ZooError: The disk is full.
    """

    def __init__(self, features: Features, data: Any, on_error: str, folder: Path) -> None:
        width, numbers, lists = features.shape
        self.record = np.dtype(
            [
                ("ids", "i4", (width,)),
                ("numbers", "f4", (numbers,)),
                ("scales", "f4", (lists,)),
                ("label", "f4", (len(names),)) if len(names := features.schema.labels) > 1 else ("label", "f4"),
                ("weight", "f4"),
            ]
        )
        self.errors = ErrorLog()
        parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        try:
            self._file = tempfile.TemporaryFile(dir=parent)  # noqa: SIM115 (open as long as this object)
            when = self._copy(features, data, on_error)
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(f"the rows read to {parent}", error) from error
            raise RequestError(f"cannot write in {parent}: {error.strerror or error}") from error
        if np.isneginf(when).all():  # their order is no time
            (column,) = features.schema.of("timestamp")
            raise RequestError(
                f"found no time in the column {column.name}, expected {TIMES[column.unit]}; give it "
                '"kind": "ignored" in the schema, or leave it out of the log'
            )
        self.order = np.argsort(when, kind="stable")
        self._records = np.memmap(self._file, self.record, "r")

    def _copy(self, features: Features, data: Any, on_error: str) -> NDArray[np.float64]:
        """Writes all rows to the file; returns their times, and sets `digest` and `seen`."""
        digest, moments = hashlib.sha256(), list[NDArray[np.float64]]()
        width, numbers, _ = features.shape
        missing = np.concatenate([np.zeros(0, int), *(np.full(field.width, field.last) for field in features.fields)])
        has_values = np.zeros(width, bool), np.zeros(numbers, bool)
        with progress("reading") as advance:
            for rows in features.read(data, on_error=on_error, errors=self.errors, labelled=True):
                if rows.labels is None:
                    raise RequestError(
                        "found rows without labels, expected a label (0 or 1) in front of every row to train on"
                    )
                records = np.empty(len(rows), self.record)
                for name in ("ids", "numbers", "scales"):
                    records[name] = getattr(rows, name)
                records["label"], records["weight"] = rows.labels, rows.weights
                digest.update(records.view(np.uint8).data)
                self._file.write(records.view(np.uint8).data)
                moments.append(rows.times)
                has_values[0][:] |= (rows.ids != missing).any(axis=0)
                has_values[1][:] |= (rows.numbers != 0).any(axis=0)
                advance(len(rows))
        self._file.flush()
        self.digest = digest.hexdigest()
        self.seen = {
            field.name for field in features.fields if has_values[0][field.start : field.start + field.width].any()
        }
        self.seen |= {number.name for number, filled in zip(features.numbers, has_values[1], strict=False) if filled}
        return np.concatenate(moments)

    def __len__(self) -> int:
        return len(self.order)

    def require_values(self, features: Features, data: Any) -> None:
        """Checks that every feature column has a value in some row.

        Args:
            features: Encoding of the rows.
            data: Log, as in `open_logs`.

        Raises:
            RequestError: Columns have no value; the message lists them.
        """
        if not features.schema.header:
            return
        names = [column.name for column in features.schema.of(*FEATURES) if column.name not in self.seen]
        numbers, filled = {number.name for number in features.schema.of("number")}, set()
        for log in open_logs(data) if names else ():
            for batch in log.batches(names, lambda *_: None, features.schema.forms):
                for name, column in zip(names, batch.columns, strict=True):
                    values = pa.array(parse_floats(column), from_pandas=True) if name in numbers else column
                    if values.null_count < len(values):
                        filled.add(name)
        if empty := [name for name in names if name not in filled]:
            raise RequestError(
                f"found no value in the column{'s' * (len(empty) > 1)} {', '.join(empty)}, expected some to train on; "
                'give what has none "kind": "ignored" in the schema'
            )

    def split(self, held_out: float) -> int:
        """Splits off the last rows of the time order.

        Args:
            held_out: Number of rows, or their share if below 1.

        Returns:
            Number of rows before the held-out rows.

        Raises:
            RequestError: No row or all rows would be held out.
        """
        held = round(held_out if held_out >= 1 else held_out * len(self))
        if not 0 < held < len(self):
            raise RequestError(
                f"found {len(self):,} rows, expected more than the {held:,} to hold out; set held_out to a share such "
                "as 0.1"
            )
        return len(self) - held

    def rows(self, places: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """Reads rows by their positions in the time order.

        Args:
            places: Positions, int64 [n].

        Returns:
            {"ids": int32 [n, columns], "numbers": float32 [n, numbers], "scales": float32 [n, lists], "label": float32
            [n] (several: [n, labels], NaN where missing), "weight": float32 [n]}.
        """
        records = self._records[self.order[places]]
        return {name: torch.from_numpy(np.ascontiguousarray(records[name])) for name in self.record.names or ()}

    def parts(self, start: int, stop: int) -> Iterator[dict[str, torch.Tensor]]:
        """Reads rows in time order.

        Args:
            start: First row.
            stop: One past the last row.

        Returns:
            Batches of `BATCH` rows: {name: tensor}, see `rows`.
        """
        for begin in range(start, stop, BATCH):
            yield self.rows(np.arange(begin, min(begin + BATCH, stop)))


@dataclass(frozen=True)
class EarlierIds:
    """Ids of the model that a training starts from.

    Attributes:
        trained: {table: mask of the rows that are not those of unknown values, bool [rows]}.
        counts: {table: occurrences of the rows in earlier trainings, int64 [rows]}; -1 where they were not counted.
    """

    trained: Mapping[str, NDArray[np.bool_]]
    counts: Mapping[str, NDArray[np.int64]]


class CategoryCounts:
    """Frequencies of ids in the training rows, and the replacement of rare and new ids.

    Args:
        features: Encoding of the rows.
        store: Rows.
        stop: Number of training rows; they are the first rows of the store.
        least: Occurrences below which an id is rare; a column of the schema may have a larger `min_count`.
        earlier: Ids of the model that training starts from. Its trained ids are never rare.

    Attributes:
        counts: Occurrences of every id of every field, int64 [rows of its table] each.
    """

    def __init__(
        self, features: Features, store: RowStore, stop: int, least: int, earlier: EarlierIds | None = None
    ) -> None:
        self.fields = features.fields
        self.counts = [np.zeros(field.rows, np.int64) for field in self.fields]
        for part in store.parts(0, stop):
            ids = part["ids"].numpy()
            for feature, count in zip(self.fields, self.counts, strict=True):
                seen = ids[:, feature.start : feature.start + feature.width].ravel()
                if feature.rows > len(seen):
                    np.add.at(count, seen, 1)
                else:
                    count += np.bincount(seen, minlength=feature.rows)
        tables = [field.table for field in self.fields]
        shared: dict[str, NDArray[np.int64]] = {}
        for name, count in zip(tables, self.counts, strict=True):
            shared[name] = shared[name] + count if name in shared else count
        self.counts = [shared[name] for name in tables]
        fewest = {field.name: max(least, field.column.min_count) for field in self.fields}
        self.trained = [
            torch.from_numpy(_known(name, count, fewest.get(name, least), earlier))
            for name, count in zip(tables, self.counts, strict=True)
        ]
        for feature, mask in zip(self.fields, self.trained, strict=True):
            if feature.is_list or tables.count(feature.table) > 1:
                mask[feature.last] = True
            if not feature.has_unknown:
                mask[:] = True
        starts = np.cumsum([0, *(field.rows for field in self.fields)])
        self._all = torch.cat(self.trained) if self.trained else torch.zeros(0, dtype=torch.bool)
        self._offsets = torch.from_numpy(
            np.concatenate(
                [np.zeros(0, np.int64), *(np.full(f.width, s) for f, s in zip(self.fields, starts, strict=False))]
            )
        )
        # ids that a random unknown may replace: not the places without an item
        padding = [np.full(field.width, field.last if field.is_list else -1) for field in self.fields]
        self._padding = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *padding]))
        replaced = [np.full(field.width, field.has_unknown) for field in self.fields]
        self._replaced = torch.from_numpy(np.concatenate([np.zeros(0, bool), *replaced]))

    def replace_rare(self, ids: torch.Tensor) -> torch.Tensor:
        """Replaces rare and new ids by the unknown category.

        Args:
            ids: Ids, integer [n, columns].

        Returns:
            Ids, [n, columns].
        """
        return torch.where(self._all[ids + self._offsets], ids, UNKNOWN)

    def unseen_shares(self, parts: Iterator[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Computes the share of rare and new ids in every column.

        Args:
            parts: Batches of rows, see `RowStore.parts`.

        Returns:
            Shares, float32 [columns]; equal for all columns of a list.
        """
        counts = torch.zeros(len(self.fields), 2)
        for part in parts:
            for number, (feature, mask) in enumerate(zip(self.fields, self.trained, strict=True)):
                ids = part["ids"][:, feature.start : feature.start + feature.width].long()
                ids = ids[ids != feature.last] if feature.is_list else ids
                counts[number] += torch.tensor([float((~mask[ids]).sum()), ids.numel()])
        shares = counts[:, 0] / counts[:, 1].clamp_min(1)
        return shares.repeat_interleave(torch.tensor([field.width for field in self.fields], dtype=torch.long))

    def mask_random(self, ids: torch.Tensor, shares: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        """Replaces a random share of the ids by the unknown category, in columns that have one.

        Args:
            ids: Ids, integer [n, columns].
            shares: Share of every column, float32 [columns], 0 to 1.
            random: Random generator.

        Returns:
            Ids as from `replace_rare`, with the drawn ids replaced, [n, columns].
        """
        drawn = (torch.rand(ids.shape, generator=random) < shares) & self._replaced
        return torch.where(drawn & (ids != self._padding), UNKNOWN, self.replace_rare(ids))

    @torch.no_grad()
    def copy_unknown(self, model: nn.Module) -> None:
        """Copies the weights of the unknown category to the rows of rare and new ids, in place.

        Args:
            model: Network whose embedding tables are changed.
        """
        for module in model.modules():
            if isinstance(module, Embeddings):
                for number, field in enumerate(module.fields):
                    table, mask = module.table(number), self.trained[self.fields.index(field)]
                    unknown = table[UNKNOWN].clone()
                    for first in range(0, len(table), BLOCK_ROWS):
                        table[first : first + BLOCK_ROWS][~mask[first : first + BLOCK_ROWS]] = unknown
                module.clear()

    def known_rows(self, module: Embeddings) -> torch.Tensor:
        """Returns the rows of tables that are neither rare nor new, or that hold the weights of rare and new ids.

        Args:
            module: Embedding tables.

        Returns:
            bool [rows].
        """
        rows = torch.zeros(len(module.weight), dtype=torch.bool)
        for field, start in zip(module.fields, module.starts, strict=True):
            rows[start : start + field.rows] |= self.trained[self.fields.index(field)]
            rows[start + UNKNOWN] = True
        return rows


def _known(table: str, counts: NDArray[np.int64], least: int, earlier: EarlierIds | None) -> NDArray[np.bool_]:
    """Mask of the rows of a table that are not rare, bool [rows]."""
    if earlier is None:
        return counts >= least
    often = np.maximum(earlier.counts[table], 0) + counts >= least
    mask: NDArray[np.bool_] = often & (counts > 0)
    return mask | earlier.trained[table] if table in earlier.trained else mask
