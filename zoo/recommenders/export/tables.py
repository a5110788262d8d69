"""Embedding tables of a recommender for other programs: .npz of numpy, or .safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.errors import RequestError, requires
from pipelines.core.files import replacing
from pipelines.core.machine import BLOCK_ROWS
from pipelines.graph import edit, io, query
from pipelines.models.folder import ModelFolder
from pipelines.models.npz import write_npz
from zoo.recommenders.data.columns.names import listed
from zoo.recommenders.data.encoding import UNKNOWN
from zoo.recommenders.data.encoding import Field as IdField
from zoo.recommenders.data.features import Features
from zoo.recommenders.lowering.graph_reader import GraphReader

METADATA = "metadata"  # array of an .npz that holds the metadata as JSON text


def export_tables(folder: ModelFolder, to: str, output: Path) -> dict[str, Any]:
    """Writes the embedding tables of every column, float32 and int8, with the mapping of values to rows.

    Arrays are named COLUMN/PART, where PART is the path of the tables in the network: float32 [rows, size];
    COLUMN/PART.int8: int8 of the same shape, and COLUMN/PART.scale: float32 [rows], max|row| / 127, so that a row is
    int8 * scale. Tables without the names of a network, as those of an imported graph, are found by the columns that
    look their rows up; PART is then their name in the graph without that of the column. Of an .npz, COLUMN/values is
    the vocabulary: value i has row i + 1. The metadata, JSON text (the array "metadata" of an .npz, or the entry
    "metadata" of a .safetensors file's header), have for every column its schema, and the rows of unknown and of
    missing values.

    Args:
        folder: Model folder.
        to: "npz" or "safetensors".
        output: File to write.

    Returns:
        {"model", "to", "path", "columns": {column: rows}, "bytes"}.

    Raises:
        RequestError: No table is looked up by the ids of a column.
    """
    arrays: dict[str, NDArray[Any]] = {}
    columns: dict[str, Any] = {}
    for field, tables in _tables(folder):
        missing = None if field.column.encoding["type"] == "id" else field.last
        columns[field.name] = {
            **field.column.to_json(),
            "encoding": dict(field.column.encoding),
            "rows": field.rows,
            "unknown_row": 0 if field.has_unknown else None,
            "missing_row": missing,
            "tables": [f"{field.table}/{part}" for part in tables],
        }
        if field.table != field.name:
            continue
        if (size := sum(weight.nbytes for weight in tables.values())) > machine.table_memory():
            raise RequestError(
                f"found tables of {size // 10**6:,} MB for {field.name}, expected at most the memory for tables, "
                f"{machine.table_memory() // 10**6:,} MB; set ZOO_TABLE_MEMORY where there is more, or read fp32.onnx"
            )
        for part, weight in tables.items():
            table = np.ascontiguousarray(weight, np.float32)
            scale = np.abs(table).max(axis=1) / np.float32(127)
            divisor = np.where(scale > 0, scale, 1)[:, None]
            arrays[f"{field.name}/{part}"] = table
            arrays[f"{field.name}/{part}.int8"] = np.clip(np.rint(table / divisor), -127, 127).astype(np.int8)
            arrays[f"{field.name}/{part}.scale"] = scale.astype(np.float32)
    if not columns:
        raise RequestError(f"{folder.card.name} has no embedding tables by column; models of zoo train have some")
    text = json.dumps({"model": folder.card.name, "family": folder.entry.name, "columns": columns}, ensure_ascii=False)
    if to == "safetensors":
        with requires("the format safetensors", "int8-zoo[train]"):
            from safetensors.numpy import save_file
        with replacing(output) as temporary:
            save_file(arrays, temporary, metadata={METADATA: text})
    else:
        values = {
            f"{name}/values": np.array(column["encoding"]["values"], np.str_)
            for name, column in columns.items()
            if "values" in column["encoding"]
        }
        write_npz(output, {**arrays, **values, METADATA: np.array(text)})
    rows = {name: column["rows"] for name, column in columns.items()}
    return {"model": folder.card.name, "to": to, "path": str(output), "columns": rows, "bytes": output.stat().st_size}


def changed_rows(old: ModelFolder, new: ModelFolder) -> dict[str, dict[str, int]]:
    """Counts the ids whose vectors differ, see `pipelines.models.family.HasTables`.

    Ids of a vocabulary are compared by their values; other encodings by their rows.

    Args:
        old: Folder of a model.
        new: Folder of a newer one.

    Returns:
        {column: {"new", "changed", "evicted", "rows"}}.

    Raises:
        RequestError: The models read other columns, so that neither was fine-tuned from the other.
    """
    read = [Features.from_json(folder.preprocessing).schema.feature_names for folder in (old, new)]
    if set(read[0]) != set(read[1]):
        raise RequestError(
            f"found models of other columns: {old.path} reads {listed(read[0])[:200]}, {new.path} "
            f"{listed(read[1])[:200]}; expected a model and one that zoo finetune made of it"
        )
    before = {field.name: (field, tables) for field, tables in _tables(old)}
    counts: dict[str, dict[str, int]] = {}
    for field, tables in _tables(new):
        if field.table != field.name:  # counted there
            continue
        former, former_tables = before.get(field.name, (field, {}))
        here, there = _rows_of_ids(former, field)
        changed = np.zeros(len(here), bool)
        for part, table in tables.items():
            other = former_tables.get(part)
            if other is None or other.shape[1:] != table.shape[1:]:
                changed[:] = True
                continue
            for first in range(0, len(here), BLOCK_ROWS):
                rows = slice(first, first + BLOCK_ROWS)
                changed[rows] |= (other[here[rows]] != table[there[rows]]).any(1)
        counts[field.name] = {
            "new": field.rows - len(there),
            "changed": int(np.count_nonzero(changed)),
            "evicted": former.rows - len(here),
            "rows": field.rows,
        }
    return counts


def _rows_of_ids(old: IdField, new: IdField) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the same ids in the table of an older model and in that of a newer."""
    if old.column.encoding["type"] != "vocabulary" or new.column.encoding["type"] != "vocabulary":
        common = np.arange(min(old.rows, new.rows))
        return common, common
    rows = {value: row for row, value in enumerate(old.column.encoding["values"], 1)}
    pairs = [(UNKNOWN, UNKNOWN), (old.last, new.last)]
    pairs += [(rows[value], row) for row, value in enumerate(new.column.encoding["values"], 1) if value in rows]
    here, there = np.array(pairs, np.int64).T
    return here, there


def _tables(folder: ModelFolder) -> Iterator[tuple[IdField, dict[str, NDArray[Any]]]]:
    """Yields every column of ids that has tables, with its tables by their part of the network."""
    features = Features.from_json(folder.preprocessing)
    graph = io.load(folder.ensure("fp32.onnx"))
    edit.expand_fp16(graph)
    weights = {
        str(name): value.const_value.numpy() for name, value in graph.graph.initializers.items() if value.const_value
    }
    lookups = _lookups(graph)
    for field in features.fields:
        ending = f".{field.table}.table"
        tables = {name.removesuffix(ending): weights[name] for name in sorted(weights) if name.endswith(ending)}
        if not tables:
            tables = {_part(name, field.name): table for name, table in lookups.get(field.start, {}).items()}
            tables = {part: table[: field.rows] for part, table in tables.items() if len(table) >= field.rows}
        if tables:
            yield field, tables


def _lookups(graph: ir.Model) -> dict[int, dict[str, NDArray[Any]]]:
    """Tables whose rows a column of the ids chooses, from the column's first row on: {column: {name: table}}."""
    lookups: dict[int, dict[str, NDArray[Any]]] = {}
    for node in graph.graph:
        table = query.constant(node.inputs[0]) if node.op_type == "Gather" else None
        if table is None or table.ndim != 2 or table.dtype.kind != "f" or node.attributes.get_int("axis", 0) != 0:
            continue
        try:
            chosen = GraphReader().columns(node.inputs[1])
        except RequestError:  # indices that are not ids, or go through other operators
            continue
        for column, start in chosen:
            lookups.setdefault(column, {})[str(node.inputs[0] and node.inputs[0].name)] = table[start:]
    return lookups


def _part(name: str, column: str) -> str:
    """Name of a table without that of its column: "deep/C1/embeddings" is "deep.embeddings"."""
    return ".".join(word for word in re.split("[/.]", name) if word not in ("", column)) or "table"
