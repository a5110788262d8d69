"""Infers the schema of a click log in one pass over its rows and in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from pipelines.core.progress import progress
from zoo.recommenders.data.cell_values import LIST, canonical
from zoo.recommenders.data.columns import names
from zoo.recommenders.data.columns.gaps import with_gaps
from zoo.recommenders.data.columns.kinds import column_of, label_of
from zoo.recommenders.data.columns.label_values import binary
from zoo.recommenders.data.columns.labels import LABELS, Leaks, label_rules, labels_among
from zoo.recommenders.data.columns.sequences import with_shared_tables
from zoo.recommenders.data.columns.statistics import ColumnStatistics
from zoo.recommenders.data.logs import Log, open_logs
from zoo.recommenders.data.schema import ENCODINGS, FEATURES, KINDS, OF_A_LIST, OF_KINDS, OF_ROWS, Column, Schema

LISTED = ("category", "categories")  # kinds that the texts of lists may look like


def infer(
    log: Log | Sequence[Log],
    label: str | Sequence[str] | None = None,
    on_error: str = "raise",
    kinds: Mapping[str, str] | None = None,
    sequences: bool = False,
) -> Schema:
    """Infers the kind and encoding of every column, with the reason, in one pass over all rows.

    Args:
        log: Log to read, or several: their rows are those of one log. A column that some of them lack is ignored.
        label: Columns to predict, one or several, also with the values that are 1 (see `label_rules`); None: a column
            named in `LABELS` that holds 0 and 1.
        on_error: "skip" ignores the rows that training leaves out: rows with another number of columns, and labels
            other than 0 and 1. "raise" raises at the first such row.
        kinds: {column: "category", "number", "vector" or "ignored"} of the columns whose kind is not inferred.
        sequences: Whether lists of the values of another column, whose table they have, become sequences, for a model
            that reads them.

    Returns:
        The schema.

    Raises:
        RequestError: The log has no row, no such label column or no feature column, has a faulty row with "raise", or a
            column of `kinds` is absent or cannot be of its kind.
    """
    skip, kinds = on_error == "skip", dict(kinds or {})
    logs = [part.having() for part in ([log] if isinstance(log, Log) else log)]
    path = f"{logs[0].path}" + (f" and {len(logs) - 1} more" if len(logs) > 1 else "")
    ignored = [name for name, kind in kinds.items() if kind == "ignored"]
    rules = label_rules(label, {name for log in logs for name in log.columns})
    requested = tuple(rules)
    seen, lacking, leaks, rows = _survey(logs, skip, rules, ignored=ignored)
    unread = {name: kind for log in logs for name, kind in log.unread if name not in seen}
    if unknown := [name for name in kinds if name not in seen and name not in unread]:
        raise RequestError(f"{path} has no column {', '.join(map(repr, unknown))}; its columns are {', '.join(seen)}")
    if not rows:
        raise RequestError(f"{path} holds no row below its header; expected a click log")
    usable = {name: figures for name, figures in seen.items() if name not in lacking and name}
    labels = [name for name in lacking if (name in requested if requested else name.lower() in LABELS)]
    if labels and (requested or not any(name.lower() in LABELS for name in usable)):
        raise RequestError(f"{lacking[labels[0]]} lacks the column {labels[0]}, which is the label")
    chosen = labels_among(path, usable, requested, skip)
    for name in (name for name in chosen if name in kinds):
        raise RequestError(f"{name} is the label, found it as {kinds[name]}, too; name another label with --label")
    columns = []
    lists = {name for log in logs for name in log.lists}
    others = [name for name in usable if name not in kinds]
    leaking = {name: why for target in reversed(chosen) for name, why in leaks.reasons(target, others).items()}
    for name, statistics in seen.items():
        counts = int(statistics.distinct), statistics.missing
        if name in chosen:
            columns.append(label_of(statistics, len(chosen) > 1, rules.get(name)))
        elif name in lacking and kinds.get(name) != "ignored":
            if name in kinds:
                raise RequestError(f"{lacking[name]} lacks the column {name}, expected it as {kinds[name]}")
            columns.append(Column(name, "ignored", *counts, why=f"{lacking[name]} lacks it"))
        elif not name:  # as pandas writes an index without a name; it has no name to be read by
            columns.append(Column("Unnamed: 0", "ignored", *counts, why="a column without a name"))
        else:
            column = column_of(statistics, kinds.get(name, ""))
            if name in lists and name not in kinds and column.kind in LISTED and column.separator != LIST:
                column = column_of(statistics, "categories", {"separator": LIST}, why="lists in the log")
            if name in leaking and column.kind in FEATURES:
                why = f"{leaking[name]}: left out, as it may not be known before; to use it, say its kind"
                column = Column(name, "ignored", *counts, why=why)
            columns.append(column)
    for name, kind in unread.items():
        if kinds.get(name, "ignored") != "ignored":
            raise RequestError(f"{path} has the column {name} ({kind[:60]}), expected texts, numbers or lists")
        why = f"{kind[:60]}: not read, write its values as columns of texts or numbers"
        columns.append(Column(name, "ignored", why=why))
    columns = _only("timestamp", columns, lambda c: (names.is_time(c.name), c.distinct))
    columns = _only("weight", columns, lambda c: len(c.name))  # sample_weight may stand beside the goods' weight
    columns = with_shared_tables(columns, seen, sequences)
    columns = with_gaps(columns, {name: figures for name, figures in seen.items() if name not in {*chosen, *kinds}})
    schema = Schema(with_labels(columns, chosen), rows)
    if not schema.of(*FEATURES):
        reasons = ", ".join(f"{column.name}: {column.why}" for column in schema.columns if column.kind != "label")
        raise RequestError(f"{path} has nothing to predict {', '.join(chosen)} from ({reasons or 'no other column'})")
    return schema


def load_schema(path: str | Path, data: Any, on_error: str = "raise") -> Schema:
    """Reads a schema file in which kinds may have been edited alone.

    Columns whose encoding is that of another kind, or absent, get one from their values in the data.

    Args:
        path: JSON file.
        data: Log of the schema, see `open_logs`.
        on_error: As in `infer`.

    Returns:
        The schema; files of vectors are relative to the working directory.

    Raises:
        RequestError: The file is missing or not a valid schema, or the values of a column cannot be of its kind.
    """
    value = read_json(Path(path))
    columns = value.get("columns") if isinstance(value, dict) else None
    if not isinstance(columns, list) or value.get("header") is False:
        return _with_paths(Schema.from_json(value, str(path)), path)
    incomplete_names = [str(column["name"]) for column in columns if _incomplete(column)]
    seen: dict[str, ColumnStatistics] = {}
    if incomplete_names:
        logs = [log.having(incomplete_names) for log in open_logs(data)]
        for log in logs:
            if absent := [name for name in incomplete_names if name not in log.columns]:
                raise RequestError(f"{log.path} lacks the column {', '.join(absent)}, whose encoding the schema lacks")
        seen = _survey(logs, on_error == "skip", {}, incomplete_names)[0]

    def completed(column: Any) -> Any:
        if not (isinstance(column, dict) and column.get("name") in seen):
            return _without_foreign_fields(column)
        inferred = column_of(seen[column["name"]], column["kind"], _without_foreign_fields(column))
        return inferred.to_json()

    completed_value = {**value, "columns": [completed(column) for column in columns]}
    return _with_paths(Schema.from_json(completed_value, str(path)), path)


def _incomplete(column: Any) -> bool:
    """Whether JSON of the form `JSON_SCHEMA` lacks the encoding of its kind, as after an edit of the kind alone."""
    if not isinstance(column, dict) or not isinstance(column.get("name"), str) or column.get("kind") not in KINDS:
        return False
    kind, encoding = column["kind"], column.get("encoding", {})
    if kind == "timestamp":
        return not column.get("unit")
    if kind not in FEATURES or not isinstance(encoding, dict):
        return False
    if column.get("gaps_of"):
        return not all(column.get(name) for name in ("separator", "unit", "encoding"))
    if column.get("shares") and not encoding:
        return not all(column.get(name) for name in OF_A_LIST)
    foreign = encoding.get("type", next(iter(ENCODINGS))) in ENCODINGS and encoding.get("type") not in OF_KINDS[kind]
    return foreign or (kind == "categories" and not any(column.get(name) for name in OF_A_LIST))


def _without_foreign_fields(column: Any) -> Any:
    """JSON of a column of a schema file without the fields of other kinds."""
    if not isinstance(column, dict) or column.get("kind") not in KINDS:
        return column
    kind = column["kind"]
    foreign = {*OF_A_LIST, "shares", "gaps_of"} if kind != "categories" else set()
    foreign |= {"min_count", "table"} if kind not in OF_ROWS else set()
    foreign |= {"encoding"} if kind not in FEATURES else set()
    foreign |= {"unit"} if kind != "timestamp" and not column.get("gaps_of") else set()
    foreign |= {"tower"} if kind not in FEATURES else set()
    foreign |= {"where", "positive"} if kind != "label" else set()
    return {name: value for name, value in column.items() if name not in foreign}


def _with_paths(schema: Schema, path: str | Path) -> Schema:
    """Resolves the files of vectors, which are relative to that of the schema."""
    tables = (str(Path(path).parent / column.table) if column.table else "" for column in schema.columns)
    columns = zip(schema.columns, tables, strict=True)
    return replace(schema, columns=tuple(replace(column, table=table) for column, table in columns))


def with_labels(columns: Sequence[Column], labels: Sequence[str]) -> tuple[Column, ...]:
    """Makes columns the labels of a schema, in this order; other labels are ignored.

    Args:
        columns: Columns of a schema.
        labels: Names of columns.

    Returns:
        The columns; labels stand in the places of labels in the order of `labels`.
    """
    named = {column.name: column for column in columns}
    made = iter(
        column if column.kind == "label" else Column(name, "label", column.distinct, column.missing)
        for name in labels
        for column in [named[name]]
    )

    def chosen(column: Column) -> Column:
        if column.name in labels:
            return next(made)
        return replace(column, kind="ignored", encoding={}, where="") if column.kind == "label" else column

    return tuple(map(chosen, columns))


def _survey(
    logs: Sequence[Log],
    skip: bool,
    labels: Mapping[str, Mapping[str, Any]],
    chosen: Sequence[str] | None = None,
    ignored: Sequence[str] = (),
) -> tuple[dict[str, ColumnStatistics], dict[str, str | Path], Leaks, int]:
    """Reads all rows once.

    Args:
        logs: The logs.
        skip: Whether rows with another number of columns are left out.
        labels: {column to predict: its values that are 1}, see `label_rules`; {} if they are not known.
        chosen: Columns to read; None: all.
        ignored: Columns of these that are not read.

    Returns:
        Statistics by column, {column: a log that lacks it}, comparisons with the label, and the number of rows.
    """
    seen = {name: ColumnStatistics(name) for log in logs for name in log.columns if chosen is None or name in chosen}
    lacking: dict[str, str | Path] = {}
    leaks, rows = Leaks(tuple(labels)), 0
    with progress("reading", None) as advance:
        for log in logs:
            lacking.update({name: log.path for name in seen if name not in log.columns})
            read = [name for name in log.columns if name in seen and name not in ignored]
            for batch in log.batches(read, on_bad_row=(lambda *_: None) if skip else None):
                rows += batch.num_rows
                columns = dict(zip(read, batch.columns, strict=True))
                columns |= {name: binary(canonical(columns[name]), rule) for name, rule in labels.items() if rule}
                for name, column in columns.items():
                    seen[name].add(column)
                if chosen is None:
                    leaks.add(columns)
                advance(batch.num_rows)
    return seen, lacking, leaks, rows


def _only(kind: str, columns: Sequence[Column], score: Callable[[Column], Any]) -> list[Column]:
    """Keeps the best column of a kind that may occur once in a schema; the others are ignored."""
    candidates = [column for column in columns if column.kind == kind]
    if len(candidates) < 2:
        return list(columns)
    kept = max(candidates, key=score)
    why = f"{kept.name} is taken as the {kind}, of which a row has one"
    return [
        replace(column, kind="ignored", unit="", why=f"{column.why}; {why}")
        if column.kind == kind and column != kept
        else column
        for column in columns
    ]
