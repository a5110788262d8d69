"""Grows the embedding tables of a trained recommender by the ids of a new log, and evicts old ones.

A new id of a vocabulary gets a row at the end of the values, which starts from the row of unknown values, or from the
mean of similar ids. A hash table
doubles its buckets when its values fill more than half of them. As h mod 2b is h mod b or that plus b, both rows of a
bucket start from the old one, and no known id changes its vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pipelines.core.console import print_line
from zoo.recommenders.data.encoding import UNKNOWN, Field
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.schema import MOST_BUCKETS, Column
from zoo.recommenders.models.checkpoints import Build, weights_of
from zoo.recommenders.models.layers import Embeddings, empty_tables
from zoo.recommenders.train_config import FINETUNE_RATE
from zoo.recommenders.training.growth.id_counts import IdCounts, TableCounts
from zoo.recommenders.training.growth.similar_ids import similar_ids, start_from_means
from zoo.recommenders.training.growth.survey import Occurrences, row_numbers, survey
from zoo.recommenders.training.row_store import EarlierIds
from zoo.training.runs import is_first

Masks = dict[str, NDArray[np.bool_]]


@dataclass
class Grown:
    """A model with the tables for a new log.

    Attributes:
        features: Features with the new ids.
        state: Weights of the network of `features`.
        trained: {table: mask of the rows that are not those of unknown values, bool [rows]}.
        counts: Occurrences of the ids before this log.
        pending: {table: {value without a row: occurrences in this log}}.
        report: {column: {"values", "unknown_before", "unknown_after", "added", "evicted", "rows"}}.
    """

    features: Features
    state: dict[str, torch.Tensor]
    trained: Masks
    counts: IdCounts
    pending: dict[str, dict[str, int]] = field(default_factory=dict)
    report: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def earlier(self) -> EarlierIds:
        """Ids that training knows."""
        return EarlierIds(self.trained, {name: table.counts for name, table in self.counts.tables.items()})


def grown(build: Build, features: Features, config: Any, start: Path, data: Any) -> Grown:
    """Adapts a model to the ids of a log: admission of new ids and eviction of old ones.

    A model keeps its tables without `config.grow`, and where `build` reads its network from an imported graph.

    Args:
        build: Creates a network.
        features: Features of the model.
        config: Training settings.
        start: Folder of the model.
        data: New log, as in `open_logs`.

    Returns:
        The model.
    """
    with empty_tables():
        network = build(features, config)
    state = weights_of(network, start / "fp32.onnx")
    trained, counts = _trained(network, state), IdCounts.load(start, features)
    if not config.grow or not isinstance(build, type):
        return Grown(features, state, trained, counts)
    seen = survey(features, data, trained)
    owners = {field.table: field for field in features.fields if field.table == field.name}
    plans = {name: _Plan(owners[name], table, trained[name], counts, config) for name, table in seen.items()}
    columns = tuple(
        plans[table].encoded(column) if (table := column.shares or column.name) in plans else column
        for column in features.schema.columns
    )
    larger = Features(replace(features.schema, columns=columns))
    moved = {name: plan.rows for name, plan in plans.items()}
    network_of_all = build(larger, config)
    made = Grown(larger, _moved(network_of_all, network, state, moved), dict(trained), counts)
    made.trained |= {name: plan.trained() for name, plan in plans.items()}
    new = {name: plan.new for name, plan in plans.items()} if config.new_ids == "similar" else {}
    similar = similar_ids(larger, data, new, made.trained)
    for name, (_, ids, groups, old_groups) in similar.items():
        start_from_means(network_of_all, made.state, name, ids, groups, old_groups)
    for name, plan in plans.items():
        counts.tables[name] = plan.counts()
        made.pending[name] = plan.pending
        for column in seen[name].counts:
            made.report[column] = plan.report(column)
            if is_first():
                print_line(_line(column, plan, made.report[column], *similar.get(name, ((), ()))[:2]))
    return made


def new_row_rates(model: nn.Module, start: Grown) -> tuple[float, dict[int, torch.Tensor]]:
    """Returns the learning rates with which the rows of new ids learn as in a training from random weights.

    The rows of old ids keep the rate of fine-tuning: at a larger one they would forget the rows of earlier logs.

    Args:
        model: Network of the grown features.
        start: The grown model.

    Returns:
        Factor of the rate of tables, and {id of a table: factor of that of its rows, float32 [rows, 1]}.
    """
    rates = {}
    for module in model.modules():
        if isinstance(module, Embeddings):
            rate = torch.ones(len(module.weight), 1)
            for field, first in zip(module.fields, module.starts, strict=True):
                old = torch.from_numpy(start.trained[field.table])
                rate[first : first + field.rows][old] = FINETUNE_RATE
            rates[id(module.weight)] = rate
    return 1 / FINETUNE_RATE, rates


class _Plan:
    """Rows of a table after admission and eviction.

    Args:
        owner: Field that the table belongs to.
        seen: Its ids in the new log.
        trained_before: Mask of its trained rows.
        counts: Occurrences before the log.
        config: Training settings.

    Attributes:
        rows: Row of the old table that every new row starts from, int64 [rows].
        new: Mask of the rows that start from the row of unknown values, bool [rows].
        admitted: New values with a row of their own.
        pending: {value that occurs too seldom: occurrences in the log}.
        evicted: Rows that were evicted.
    """

    def __init__(
        self, owner: Field, seen: Occurrences, trained_before: NDArray[np.bool_], counts: IdCounts, config: Any
    ) -> None:
        self.owner, self.seen, self.trained_before, self.before = owner, seen, trained_before, counts.tables[owner.name]
        self.encoding = dict(owner.column.encoding)
        self.least = max(config.min_count, owner.column.min_count)
        number, today = counts.trainings + 1, seen.rows
        last = np.where(today > 0, number, self.before.last)
        self.total = np.where(self.before.counts < 0, -1, self.before.counts + today)
        gone = np.zeros(owner.rows, bool)
        if config.evict_after:
            gone |= number - last >= config.evict_after
        if config.evict_below:
            gone |= (self.total >= 0) & (self.total < config.evict_below)
        gone[[UNKNOWN, owner.rows - 1] if self.encoding["type"] != "id" else [UNKNOWN]] = False
        gone &= trained_before | (self.encoding["type"] == "vocabulary")
        waiting, values = self.before.pending, seen.values
        often = {value for value, count in values.items() if count + waiting.get(value, (0, 0))[0] >= self.least}
        self.evicted, self.admitted = gone, sorted(often, key=lambda value: (-values[value], value))
        getattr(self, f"_plan_{self.encoding['type']}")(gone)
        admitted = set(self.admitted)
        self.pending = {value: count for value, count in values.items() if value not in admitted}

    def _plan_vocabulary(self, gone: NDArray[np.bool_]) -> None:
        values, last = self.encoding["values"], self.owner.rows - 1
        if not self.admitted and gone[1:last].all():
            gone[1 + int(np.argmax(self.total[1:last]))] = False  # a vocabulary has a value
        kept = np.flatnonzero(~gone[1:last])
        self.encoding["values"] = [*(values[place] for place in kept.tolist()), *self.admitted]
        added = np.full(len(self.admitted), UNKNOWN)
        self.rows = np.concatenate([[UNKNOWN], 1 + kept, added, [last]])
        self.new = np.zeros(len(self.rows), bool)
        self.new[1 + len(kept) : -1] = True

    def _plan_hash(self, gone: NDArray[np.bool_]) -> None:
        before = buckets = int(self.encoding["buckets"])
        used = min(int(np.count_nonzero(self.trained_before[1:-1])) / buckets, 1 - 1 / buckets)
        values = self.owner.column.distinct or -buckets * np.log1p(-used)  # linear counting (Whang et al. 1990)
        self.values = int(values + min(len(self.seen.hashes) / (1 - used), 2.0 * buckets))
        while 2 * self.values > buckets and 2 * buckets <= MOST_BUCKETS:
            buckets *= 2
        self.encoding["buckets"] = buckets
        self.rows = np.concatenate([[UNKNOWN], 1 + np.arange(buckets) % before, [before + 1]])
        self.new = gone[self.rows]
        self.rows[self.new] = UNKNOWN

    def _plan_id(self, gone: NDArray[np.bool_]) -> None:
        numbers = row_numbers(self.admitted)
        self.admitted = [value for value in self.admitted if value in numbers]
        rows = max([self.owner.rows, *(1 + number for number in numbers.values())])
        self.encoding["rows"] = rows
        self.rows = np.arange(rows)
        self.new = self.rows >= self.owner.rows
        self.new[: self.owner.rows] = gone
        self.rows[self.new] = UNKNOWN

    def encoded(self, column: Column) -> Column:
        """Returns a column of the table with its encoding.

        Args:
            column: Column before.
        """
        distinct = self.values if self.encoding["type"] == "hash" else column.distinct + len(self.admitted)
        return replace(column, encoding=self.encoding, distinct=distinct)

    def trained(self) -> NDArray[np.bool_]:
        """Mask of the rows that are not those of unknown values, bool [rows]."""
        trained: NDArray[np.bool_] = self.trained_before[self.rows] & ~self.new
        return trained

    def counts(self) -> TableCounts:
        """Occurrences of the rows before the log."""
        counts, last = self.before.counts[self.rows], self.before.last[self.rows]
        counts[self.new] = last[self.new] = 0
        if self.encoding["type"] == "vocabulary" and self.admitted:
            waiting = [self.before.pending.get(value, (0, 0)) for value in self.admitted]
            fresh = slice(len(counts) - 1 - len(self.admitted), -1)
            counts[fresh], last[fresh] = np.transpose(waiting)
        admitted = set(self.admitted)
        return TableCounts(counts, last, {k: count for k, count in self.before.pending.items() if k not in admitted})

    def report(self, column: str) -> dict[str, int]:
        """Counts the values of a column.

        Args:
            column: Name of the column.

        Returns:
            {"values", "unknown_before", "unknown_after", "added", "evicted", "rows"}.
        """
        counts, unknown = self.seen.counts[column], self.seen.unknown[column]
        admitted = set(self.admitted)
        seldom = ~self.trained_before & (np.maximum(self.total, 0) < self.least) | self.evicted
        after = int(counts[seldom].sum()) + sum(count for value, count in unknown.items() if value not in admitted)
        hashed = len(self.seen.hashes) if self.encoding["type"] == "hash" else 0
        return {
            "values": int(counts.sum()) + unknown.total(),
            "unknown_before": int(counts[~self.trained_before].sum()) + unknown.total(),
            "unknown_after": after,
            "added": hashed or len(self.admitted),
            "evicted": int(np.count_nonzero(self.evicted)),
            "rows": len(self.rows),
        }


def _line(column: str, plan: _Plan, report: Mapping[str, int], sides: Sequence[str], similar: Sized) -> str:
    """Describes what became of the table of a column.

    Args:
        column: Name of the column.
        plan: Rows of its table.
        report: Numbers of its values.
        sides: Columns in which similar ids have the same values.
        similar: New ids that start from the mean of similar ones.

    Returns:
        A line.
    """
    text = f"{column}: {report['unknown_before']:,} of {report['values']:,} values unknown before, "
    text += f"{report['unknown_after']:,} after"
    if report["added"]:
        text += f"; {report['added']:,} new ids start from the row of unknown values"
        text += f", but {len(similar):,} from the mean of ids with the same {' and '.join(sides)}" if sides else ""
    if report["evicted"]:
        text += f"; {report['evicted']:,} ids evicted"
    if len(plan.rows) != plan.owner.rows:
        text += f"; table of {plan.owner.rows:,} rows -> {len(plan.rows):,}"
        if plan.encoding["type"] == "hash":
            text += ", where every id keeps its vector"
    return text


def _trained(network: nn.Module, state: Mapping[str, torch.Tensor]) -> Masks:
    """Finds the rows that differ from that of unknown values, by table."""
    masks: Masks = {}
    for path, module in network.named_modules():
        if isinstance(module, Embeddings):
            for field, start in zip(module.fields, module.starts, strict=True):
                table = state[f"{path}.weight"][start : start + field.rows]
                mask = (table != table[UNKNOWN]).any(1).numpy()
                masks[field.table] = masks[field.table] | mask if field.table in masks else mask
    return masks


def _moved(
    larger: nn.Module,
    network: nn.Module,
    state: Mapping[str, torch.Tensor],
    rows: Mapping[str, NDArray[np.int64]],
) -> dict[str, torch.Tensor]:
    """Returns the weights of the larger network.

    Args:
        larger: Network of the new features.
        network: Network of the old features.
        state: Weights of `network`.
        rows: {table: old row of every new row}.
    """
    own = larger.state_dict()
    moved = {name: weight if weight.shape == own[name].shape else own[name] for name, weight in state.items()}
    for path, module in network.named_modules():
        if isinstance(module, Embeddings):
            fields = {module.owner(f): (f, start) for f, start in zip(module.fields, module.starts, strict=True)}
            parts = []
            for name in module.tables:
                field, start = fields[name]
                table = state[f"{path}.weight"][start : start + field.rows]
                parts.append(table[torch.from_numpy(rows[field.table])] if field.table in rows else table)
            moved[f"{path}.weight"] = torch.cat(parts)
    return moved
