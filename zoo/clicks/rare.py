"""Rows of embedding tables that training data seldom ask for, taken out: their values become unknown ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.clicks.features import UNKNOWN, Features
from zoo.clicks.model import Embeddings
from zoo.clicks.schema import Column
from zoo.clicks.units import rebuilt

if TYPE_CHECKING:
    from torch import Tensor, nn

Ids = NDArray[np.int64]


def without(
    network: nn.Module, features: Features, config: Any, counts: Sequence[Ids], least: int
) -> tuple[Features, nn.Module]:
    """The features and the network, in evaluation, without the values of vocabularies seen fewer than `least` times; of
    each vocabulary the most frequent one stays.

    counts: of the ids of every field, int64 [rows]. What stood for unknown values begins as the mean of all that it
    stands for now, weighted by their counts; where none of it was seen, it is as it was. Hashed columns, and those that
    hold row numbers, keep all rows: theirs are of no value alone. Raises RequestError where no row goes.
    """
    kept = {
        field.name: _kept(count, least)
        for field, count in zip(features.fields, counts, strict=True)
        if field.column.encoding["type"] == "vocabulary"
    }
    if not kept:
        kinds = ", ".join(f"{each.name} ({each.column.encoding['type']})" for each in features.fields) or "none"
        raise RequestError(f"found no column with a vocabulary whose rows could go, only {kinds}; leave rows out")
    columns = tuple(
        _fewer(each, kept[each.name], least) if each.name in kept else each for each in features.schema.columns
    )
    fewer = Features(replace(features.schema, columns=columns))
    if sizes(fewer) == sizes(features):
        raise RequestError(
            f"found every value {least} times or more in the rows to train on; ask for more, or leave rows out"
        )
    found = dict(zip((each.name for each in features.fields), counts, strict=True))

    def part(module: Any, path: str, weight: Tensor) -> Tensor:
        if not isinstance(module, Embeddings):
            return weight
        import torch

        fields = enumerate(module.fields)
        return torch.cat([_table(module.table(i).detach(), kept.get(f.name), found[f.name]) for i, f in fields])

    return fewer, rebuilt(network, fewer, config, part)


def sizes(features: Features) -> dict[str, int]:
    """{category: rows of its table}."""
    return {each.name: each.rows for each in features.fields}


def fixed(features: Features) -> list[str]:
    """The categories whose rows stay, whatever is seen of them."""
    return [each.name for each in features.fields if each.column.encoding["type"] != "vocabulary"]


def _kept(count: Ids, least: int) -> Ids:
    """The ids of a vocabulary's values that stay, in order."""
    values = count[UNKNOWN + 1 : -1]
    stay = np.flatnonzero(values >= least)
    return (stay if len(stay) else np.array([np.argmax(values)])) + UNKNOWN + 1


def _fewer(column: Column, kept: Ids, least: int) -> Column:
    values = [column.encoding["values"][place] for place in (kept - UNKNOWN - 1).tolist()]
    if len(values) == len(column.encoding["values"]):
        return column
    why = "; ".join(filter(None, (column.why, f"the {len(values):,} seen {least:,} times or more")))
    return replace(column, encoding={**column.encoding, "values": values}, why=why)


def _table(table: Tensor, kept: Ids | None, count: Ids) -> Tensor:
    """The rows that stay of a table [rows, size], the first one for all that goes."""
    import torch

    if kept is None or len(kept) == len(table) - 2:
        return table
    gone = np.setdiff1d(np.arange(len(table) - 1), kept)
    shares = torch.from_numpy(count[gone].astype(np.float64))
    unknown = table[UNKNOWN] if not shares.sum() else (shares @ table[gone].double() / shares.sum()).to(table.dtype)
    return torch.cat([unknown[None], table[kept], table[-1:]])
