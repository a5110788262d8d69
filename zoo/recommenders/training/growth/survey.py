"""Counts the ids of a log in the embedding tables of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from zoo.recommenders.data.cell_values import parse_floats
from zoo.recommenders.data.encoding import UNKNOWN, Field
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.hashing import fingerprints
from zoo.recommenders.data.logs import open_logs

MAX_IDS = 10_000_000  # rows up to which a table of row numbers grows
GROWING = ("vocabulary", "hash", "id")


@dataclass
class Occurrences:
    """Ids of a log in one embedding table.

    Attributes:
        counts: {column: occurrences of every row, int64 [rows]}; without the values that have no row.
        unknown: {column: {value without a row: occurrences}}.
        hashes: Fingerprints of the different values in untrained hash buckets, uint64 [n].
    """

    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    unknown: dict[str, Counter[str]] = field(default_factory=dict)
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))

    @property
    def rows(self) -> NDArray[np.int64]:
        """Occurrences of every row in all columns, int64 [rows]."""
        rows: NDArray[np.int64] = np.sum([*self.counts.values()], axis=0)
        return rows

    @property
    def values(self) -> Counter[str]:
        """Occurrences of the values without a row in all columns."""
        return sum(self.unknown.values(), Counter())


def growing(features: Features) -> list[Field]:
    """Returns the fields whose tables can grow: those of logs with a header, except for encodings of imported graphs.

    Args:
        features: Features of a model.
    """
    fields = [
        field
        for field in features.fields
        if field.column.encoding["type"] in GROWING and "unknown" not in field.column.encoding
    ]
    return fields if features.schema.header else []


def survey(features: Features, data: Any, trained: dict[str, NDArray[np.bool_]]) -> dict[str, Occurrences]:
    """Counts the ids of a log. Faulty rows are not reported here.

    Args:
        features: Features of the model.
        data: Log, as in `open_logs`.
        trained: {table: mask of the rows that are not those of unknown values, bool [rows]}.

    Returns:
        {table: its ids}.

    Raises:
        RequestError: A log lacks a column that training reads.
    """
    logs = [features.require(log, labelled=True) for log in open_logs(data)] if features.schema.header else []
    fields = [field for field in growing(features) if field.table in trained]
    tables: dict[str, Occurrences] = {field.table: Occurrences() for field in fields}
    for feature in fields:
        tables[feature.table].counts[feature.name] = np.zeros(feature.rows, np.int64)
        tables[feature.table].unknown[feature.name] = Counter()
    names = [field.name for field in fields]
    for log in logs if names else ():
        for batch in log.batches(names, lambda *_: None, features.schema.forms):
            columns = dict(zip(names, batch.columns, strict=True))
            for feature in fields:
                _count(feature, columns[feature.name], tables[feature.table], trained[feature.table])
    return tables


def _count(field: Field, column: pa.Array, table: Occurrences, trained: NDArray[np.bool_]) -> None:
    """Counts the values of a column."""
    texts = column.drop_null()
    if field.is_list:
        texts, _ = field.split(texts)
        texts = texts.filter(pc.not_equal(texts, ""))
    ids = field.ids(texts)
    is_hash = field.column.encoding["type"] == "hash"
    new = ~trained[ids] if is_hash else ids == UNKNOWN
    table.counts[field.name] += np.bincount(ids if is_hash else ids[~new], minlength=len(trained))
    values = texts.filter(pa.array(new)).value_counts()
    if not is_hash:
        pairs = zip(values.field(0).to_pylist(), values.field(1).to_pylist(), strict=True)
        table.unknown[field.name].update(dict(pairs))
    elif len(values):
        strings = pa.array(values.field(0).to_pylist(), pa.large_string())
        _, offsets, data = strings.buffers()
        starts = np.frombuffer(offsets, np.int64)
        hashes = fingerprints(np.frombuffer(data or b"", np.uint8), starts[:-1], np.diff(starts))
        table.hashes = np.union1d(table.hashes, hashes)


def row_numbers(values: Sequence[str]) -> dict[str, int]:
    """Reads the values that are row numbers of a table that may grow.

    Args:
        values: Texts.

    Returns:
        {text: row number}, below `MAX_IDS`.
    """
    numbers = parse_floats(pa.array(values, pa.string()))
    valid = (numbers >= 0) & (numbers < MAX_IDS) & (numbers == np.floor(numbers))
    return {text: int(number) for text, number, chosen in zip(values, numbers, valid, strict=True) if chosen}
