"""Rows of new ids that start from the mean of the rows of similar ids: those with the same values in their columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipelines.models.protocols import NoRow
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features
from zoo.recommenders.models.layers import Embeddings

CONSTANT = 0.99  # minimum share of an id's rows with one value, for a column that describes the id


def similar_ids(
    features: Features, data: Any, new: Mapping[str, NDArray[np.bool_]], trained: Mapping[str, NDArray[np.bool_]]
) -> dict[str, tuple[list[str], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """Finds the trained ids of a log that have the same values as new ones in the columns that belong to the id.

    These columns are the categories and pooled lists of the id's tower whose value is the same in the rows of an id.

    Args:
        features: Features with the new ids.
        data: New log, as in `open_logs`.
        new: {table: mask of the rows of new ids, bool [rows]}.
        trained: {table: mask of the rows that are not those of unknown values, bool [rows]}.

    Returns:
        {table: (names of the columns, new ids int64 [n], their groups int64 [n], groups of trained ids int64 [rows], -1
        where there is none)}; tables without similar ids are absent.
    """
    owners = {field.table: field for field in features.fields if field.table == field.name and not field.is_list}
    tables = {name: _Sides(owners[name], features) for name, mask in new.items() if name in owners and mask.any()}
    tables = {name: sides for name, sides in tables.items() if sides.columns}
    try:
        for rows in features.read(data, on_error="skip") if tables else ():
            for table in tables.values():
                table.add(rows.ids)
    except NoRow:
        return {}
    similar = {}
    for name, table in tables.items():
        names, groups = table.groups()
        fresh = np.flatnonzero(new[name] & (groups >= 0))
        old_groups = np.where(trained[name] & ~new[name], groups, -1)
        fresh = fresh[np.isin(groups[fresh], old_groups)]
        if names and len(fresh):
            similar[name] = names, fresh, groups[fresh], old_groups
    return similar


class _Sides:
    """First values of the columns of every id of a table.

    Args:
        key: Category whose ids they are.
        features: Features of the log.
    """

    def __init__(self, key: Field, features: Features) -> None:
        others = [
            field for field in features.fields if field.column.tower == key.column.tower and field.table != key.table
        ]
        self.key, self.columns = key, [field for field in others if field.column.tower and not field.is_sequence]
        self.places = [np.arange(field.start, field.start + field.width) for field in self.columns]
        self.first = [np.full((key.rows, field.width), -1, np.int32) for field in self.columns]
        self.again, self.same = 0, np.zeros(len(self.columns), np.int64)

    def add(self, ids: NDArray[np.int32]) -> None:
        """Adds rows, int32 [n, columns]."""
        own = ids[:, self.key.start]
        values, firsts = np.unique(own, return_index=True)
        repeated = np.ones(len(own), bool)
        if self.columns:
            repeated[firsts[self.first[0][values, 0] < 0]] = False
        self.again += int(repeated.sum())
        for number, (places, first) in enumerate(zip(self.places, self.first, strict=True)):
            begun = first[values, 0] < 0
            first[values[begun]] = ids[firsts[begun]][:, places]
            self.same[number] += int((ids[repeated][:, places] == first[own[repeated]]).all(axis=1).sum())

    def groups(self) -> tuple[list[str], NDArray[np.int64]]:
        """Returns the columns of the ids, and the group of ids with equal values of every id, -1 for absent ones."""
        chosen = [column for column in range(len(self.columns)) if self.same[column] >= CONSTANT * self.again]
        groups = np.full(self.key.rows, -1, np.int64)
        seen = self.first[0][:, 0] >= 0
        if chosen and seen.any():
            sides = np.concatenate([self.first[column][seen] for column in chosen], axis=1)
            groups[seen] = np.unique(sides, axis=0, return_inverse=True)[1].ravel()
        return [self.columns[column].name for column in chosen], groups


@torch.no_grad()
def start_from_means(
    network: nn.Module,
    state: Mapping[str, torch.Tensor],
    table: str,
    new: NDArray[np.int64],
    groups: NDArray[np.int64],
    old_groups: NDArray[np.int64],
) -> None:
    """Sets rows of new ids to the means of the rows of their groups, in all tables of a column, in place.

    Args:
        network: Network of the grown features.
        state: Its weights.
        table: Column that the tables belong to.
        new: New ids, int64 [n].
        groups: Group of every new id, int64 [n].
        old_groups: Group of every trained id, int64 [rows]; -1 where it has none.
    """
    rows = np.flatnonzero(old_groups >= 0)
    distinct, places = np.unique(groups, return_inverse=True)
    rows = rows[np.isin(old_groups[rows], distinct)]
    group = torch.from_numpy(np.searchsorted(distinct, old_groups[rows]))
    counts = torch.bincount(group, minlength=len(distinct))[:, None]
    for path, module in network.named_modules():
        if isinstance(module, Embeddings):
            for field, start in zip(module.fields, module.starts, strict=True):
                if field.name == table:
                    weight = state[f"{path}.weight"]
                    sums = torch.zeros(len(distinct), weight.shape[1]).index_add_(0, group, weight[rows + start])
                    weight[new + start] = (sums / counts)[places]
