"""Prunes low-frequency embedding rows: their values share the row of unknown values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.recommenders.data.encoding import UNKNOWN, Field
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.hashing import hash_buckets
from zoo.recommenders.data.logs import open_logs
from zoo.recommenders.data.schema import Column
from zoo.recommenders.models.layers import Embeddings
from zoo.recommenders.training.pruning_groups import rebuilt

if TYPE_CHECKING:
    from torch import Tensor, nn

Ids = NDArray[np.int64]
MAX_VALUES = 100_000  # values of a hashed column that become a vocabulary, at most


def with_vocabularies(features: Features, data: Any, counts: Sequence[Ids], min_count: int) -> Features:
    """Replaces hashed categories by vocabularies of their frequent values.

    A column stays hashed if it has no frequent value, more than `MAX_VALUES`, or at least as many as buckets.

    Args:
        features: Features of the model.
        data: Log, as in `open_logs`.
        counts: Occurrences of every id of every field, int64 [rows of the table] each.
        min_count: Occurrences from which a value is frequent.

    Returns:
        Features with the vocabularies.
    """
    seen = {
        field.name: count
        for field, count in zip(features.fields, counts, strict=True)
        if field.column.encoding["type"] == "hash"
    }
    if not seen or not features.schema.header:
        return features
    fields = {field.name: field for field in features.fields}
    occurrences: dict[str, Counter[str]] = {name: Counter() for name in seen}
    for log in open_logs(data):
        for batch in log.batches(list(seen), lambda *_: None, features.schema.forms):
            for name, column in zip(seen, batch.columns, strict=True):
                texts = column.drop_null()
                if fields[name].is_list:
                    texts, _ = fields[name].split(texts)
                values = texts.value_counts()
                # values of other buckets cannot have `min_count` occurrences
                often = seen[name][_buckets(values.field(0), fields[name])] >= min_count
                kept = values.filter(pa.array(often))
                occurrences[name].update(dict(zip(kept.field(0).to_pylist(), kept.field(1).to_pylist(), strict=True)))

    def by_name(column: Column) -> Column:
        values = [text for text, count in occurrences.get(column.name, {}).items() if count >= min_count and text]
        if not 0 < len(values) <= min(MAX_VALUES, column.encoding.get("buckets", 0) - 1):
            return column
        ordered = sorted(values, key=lambda text: (-occurrences[column.name][text], text))
        return replace(column, encoding={"type": "vocabulary", "values": ordered})

    return Features(replace(features.schema, columns=tuple(by_name(column) for column in features.schema.columns)))


def prune(
    network: nn.Module,
    features: Features,
    config: Any,
    counts: Sequence[Ids],
    min_count: int,
    names: Features | None = None,
    named: Sequence[Ids] | None = None,
) -> tuple[Features, nn.Module]:
    """Removes values with fewer than `min_count` occurrences from features and network.

    The most frequent value of a vocabulary is always kept. A value that was hashed gets the row of its bucket. The row
    of unknown values becomes the mean of all rows that it now represents, weighted by their occurrences; it is
    unchanged if none of them occurred.

    Args:
        network: Network to prune. It is not changed.
        features: Features of the network.
        config: Settings of the network.
        counts: Occurrences of every id of every field, int64 [rows of the table] each.
        min_count: Occurrences from which a value is kept.
        names: Features from `with_vocabularies`; None: hashed columns keep all rows, as do columns of row numbers.
        named: Occurrences in the encoding of `names`.

    Returns:
        Pruned features, and the pruned network in evaluation mode.

    Raises:
        RequestError: No row can be removed.
    """
    names, named = names or features, counts if named is None else named
    kept = {
        field.name: _frequent_ids(count, min_count)
        for field, count in zip(names.fields, named, strict=True)
        if field.column.encoding["type"] == "vocabulary"
    }
    if not kept:
        kinds = ", ".join(f"{field.name} ({field.column.encoding['type']})" for field in features.fields) or "none"
        raise RequestError(f"found no column whose rows can be pruned, only {kinds}; leave rows=N out of --prune")
    before = {column.name: column for column in features.schema.columns}
    columns = tuple(
        _prune_vocabulary(before[column.name], column, kept[column.name], min_count) if column.name in kept else column
        for column in names.schema.columns
    )
    fewer = Features(replace(features.schema, columns=columns))
    if table_rows(fewer) == table_rows(features):
        raise RequestError(
            f"found no value with fewer than {min_count} occurrences in the training rows; raise rows={min_count} of "
            "--prune, or leave it out"
        )
    places = {field.name: index for index, field in enumerate(features.fields)}

    def table(field: Field, rows: Tensor) -> Tensor:
        index = places[field.name]
        if field.column.encoding["type"] != names.fields[index].column.encoding["type"]:
            rows = _vocabulary_table(rows, field, names.fields[index], counts[index], named[index])
        return _prune_table(rows, kept.get(field.name), named[index])

    def part(module: Any, path: str, weight: Tensor) -> Tensor:
        if not isinstance(module, Embeddings):
            return weight
        import torch

        return torch.cat([table(field, module.table(i).detach()) for i, field in enumerate(module.fields)])

    return fewer, rebuilt(network, fewer, config, part)


def table_rows(features: Features) -> dict[str, int]:
    """Returns the number of rows of every embedding table.

    Args:
        features: Encoding of the log.

    Returns:
        {category: rows}.
    """
    return {field.name: field.rows for field in features.fields}


def without_vocabulary(features: Features) -> list[str]:
    """Returns the names of the categories without a vocabulary, which keep all rows.

    Args:
        features: Encoding of the log.

    Returns:
        Names in the order of the schema.
    """
    return [field.name for field in features.fields if field.column.encoding["type"] != "vocabulary"]


def _frequent_ids(count: Ids, least: int) -> Ids:
    """Returns the ids of the frequent values of a vocabulary, in order; at least one."""
    values = count[UNKNOWN + 1 : -1]
    stay = np.flatnonzero(values >= least)
    return (stay if len(stay) else np.array([np.argmax(values)])) + UNKNOWN + 1


def _prune_vocabulary(before: Column, column: Column, kept: Ids, least: int) -> Column:
    """Returns the column with the frequent values only, which needs as many occurrences of new ones."""
    values = [column.encoding["values"][place] for place in (kept - UNKNOWN - 1).tolist()]
    if values == before.encoding.get("values"):
        return before
    why = "; ".join(filter(None, (before.why, f"the {len(values):,} seen {least:,} times or more")))
    fewest = 0 if column.shares else max(least, column.min_count)  # fine-tuning brings no rare value back
    return replace(column, encoding={**column.encoding, "values": values}, min_count=fewest, why=why)


def _buckets(texts: pa.Array, field: Field) -> Ids:
    """Returns the ids of hashed texts."""
    return hash_buckets(texts, int(field.column.encoding["buckets"])).astype(np.int64) + 1


def _vocabulary_table(table: Tensor, field: Field, named: Field, count: Ids, of_named: Ids) -> Tensor:
    """Converts the table of a hashed field to a row for each value of a vocabulary, that of its bucket.

    `count` and `of_named` are the occurrences of the ids of the hashed field and of the vocabulary.
    """
    import torch

    buckets = _buckets(pa.array(named.column.encoding["values"], pa.string()), field)
    others = count.copy()  # of each bucket, what has no name
    np.subtract.at(others, buckets, of_named[UNKNOWN + 1 : -1])
    return torch.cat([_weighted_mean(table[:-1], others[:-1])[None], table[buckets], table[-1:]])


def _weighted_mean(rows: Tensor, count: Ids) -> Tensor:
    """Returns the mean of rows weighted by their occurrences; the first row if none occurred."""
    import torch

    shares = torch.from_numpy(count.astype(np.float64))
    return rows[0] if not shares.sum() else (shares @ rows.double() / shares.sum()).to(rows.dtype)


def _prune_table(table: Tensor, kept: Ids | None, count: Ids) -> Tensor:
    """Returns the kept rows of a table [rows, size], with the mean of the removed rows as its first row."""
    import torch

    if kept is None or len(kept) == len(table) - 2:
        return table
    gone = np.setdiff1d(np.arange(len(table) - 1), kept)
    return torch.cat([_weighted_mean(table[gone], count[gone])[None], table[kept], table[-1:]])
