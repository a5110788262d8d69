"""Occurrences of the ids of a model over all its trainings, in a Parquet file of the model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.core.files import replacing
from zoo.recommenders.data.features import Features

ID_COUNTS = "id_counts.parquet"
Counts = NDArray[np.int64]


@dataclass
class TableCounts:
    """Occurrences of the ids of one embedding table.

    Attributes:
        counts: Occurrences of every row in all trainings, int64 [rows]; -1 where they were not counted.
        last: Number of the last training with the row, from 1 on, int64 [rows]; 0 if there is none.
        pending: {value without a row, as it occurs too seldom: (occurrences, last training)}.
    """

    counts: Counts
    last: Counts
    pending: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class IdCounts:
    """Occurrences of ids.

    Attributes:
        trainings: Number of trainings of the model.
        tables: {column that a table belongs to: its counts}.
    """

    trainings: int
    tables: dict[str, TableCounts]

    @classmethod
    def load(cls, folder: Path, features: Features) -> IdCounts:
        """Reads the counts of a model.

        Args:
            folder: Model folder.
            features: Features of the model.

        Returns:
            The counts; of a model without them, such as one of version 0.2.0, -1 for every row after one training.
        """
        heights = {field.table: field.rows for field in features.fields}
        tables = {name: TableCounts(np.full(rows, -1), np.ones(rows, np.int64)) for name, rows in heights.items()}
        if not (folder / ID_COUNTS).is_file():
            return cls(1, tables)
        read = pq.read_table(folder / ID_COUNTS)
        trainings = int((read.schema.metadata or {}).get(b"trainings", b"1"))
        names = read["column"].to_numpy(zero_copy_only=False)
        for name, table in tables.items():
            part = read.filter(pa.array(names == name))
            placed = part.filter(part["row"].is_valid())
            rows = placed["row"].to_numpy()
            if len(rows) != len(table.counts) or (rows != np.arange(len(rows))).any():
                continue  # of other rows, as after pruning: not counted
            table.counts, table.last = placed["count"].to_numpy().copy(), placed["last_training"].to_numpy().copy()
            waiting = part.filter(part["row"].is_null())
            columns = (waiting[key].to_pylist() for key in ("value", "count", "last_training"))
            table.pending = {value: (count, last) for value, count, last in zip(*columns, strict=True)}
        return cls(trainings, tables)

    def save(self, folder: Path, features: Features) -> None:
        """Writes the counts.

        Args:
            folder: Model folder.
            features: Features of the model, which name the values of the rows.
        """
        values = {field.name: field.column.encoding.get("values") for field in features.fields}
        parts = []
        for name, table in self.tables.items():
            rows, waiting = len(table.counts), len(table.pending)
            vocabulary = values.get(name)
            texts = [None, *vocabulary, None] if vocabulary else [None] * rows
            pending = [*table.pending.items()]
            columns = {
                "column": pa.array([name] * (rows + waiting), pa.string()),
                "row": pa.array([*range(rows), *[None] * waiting], pa.int64()),
                "value": pa.array([*texts, *(value for value, _ in pending)], pa.string()),
                "count": pa.array([*table.counts.tolist(), *(count for _, (count, _) in pending)], pa.int64()),
                "last_training": pa.array([*table.last.tolist(), *(last for _, (_, last) in pending)], pa.int64()),
            }
            parts.append(pa.table(columns))
        if parts:
            joined = pa.concat_tables(parts).replace_schema_metadata({"trainings": str(self.trainings)})
            with replacing(folder / ID_COUNTS) as temporary:
                pq.write_table(joined, temporary, compression="zstd")


def counted(
    features: Features, counts: Sequence[Counts], before: IdCounts | None, pending: Mapping[str, Mapping[str, int]]
) -> IdCounts:
    """Adds the occurrences of a training.

    Args:
        features: Features of the model.
        counts: Occurrences of every id of every field, int64 [rows of its table] each; fields of one table have the
            same.
        before: Counts before the training, in the rows of `features`; None for a new model.
        pending: {table: {value without a row: occurrences in this training}}.

    Returns:
        The counts after the training.
    """
    number = 1 if before is None else before.trainings + 1
    tables: dict[str, TableCounts] = {}
    for feature, count in zip(features.fields, counts, strict=True):
        earlier = None if before is None else before.tables[feature.table]
        total, last = count.copy(), np.where(count > 0, number, 0)
        waiting: dict[str, tuple[int, int]] = {}
        if earlier is not None:
            total = np.where(earlier.counts < 0, -1, earlier.counts + count)
            last = np.maximum(last, earlier.last)
            waiting = dict(earlier.pending)
        for value, times in pending.get(feature.table, {}).items():
            waiting[value] = (waiting.get(value, (0, 0))[0] + times, number)
        tables[feature.table] = TableCounts(total, last, waiting)
    return IdCounts(number, tables)
