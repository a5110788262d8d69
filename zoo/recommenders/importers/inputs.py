"""Maps the inputs of an imported ranker to the encoded rows of a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, reference_session
from pipelines.rewrites import driver
from pipelines.rewrites.remove_dead_branches import RemoveDeadBranches
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features

Array = NDArray[Any]
SUBGRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclass(frozen=True, eq=False)
class InputSource:
    """Source of the entries of one input of the imported graph: a column of the ids or of the numbers.

    Attributes:
        columns: Column of every entry, int64 [*shape].
        ids: Whether the column belongs to the ids, bool [*shape]; else to the numbers.
        dtype: Type of the input.
    """

    columns: Array
    ids: Array
    dtype: np.dtype[Any]


def known_ids(field: Field) -> Array:
    """Returns the ranker's id for every id of a field.

    It is the same id. Missing values, and places of a list without an item, are row 0. With `unknown` in the encoding
    that is the row of unknown values, and of a category's missing values too (FuxiCTR: `__OOV__`, the last row).

    Args:
        field: The field.

    Returns:
        Ids, int64 [rows, 1].
    """
    rows = np.arange(field.rows)
    rows[field.last] = 0
    if field.column.encoding["type"] == "vocabulary":
        rows[[0] if field.is_list else [0, field.last]] = field.column.encoding.get("unknown", 0)
    return rows[:, None]


def input_arrays(
    sources: Mapping[str, InputSource], batch: Mapping[str, Array], features: Features
) -> dict[str, Array]:
    """Computes the inputs of the imported graph from encoded rows.

    Args:
        sources: {input name: source of its entries}.
        batch: Encoded rows: {"ids": int32 [n, columns], "numbers": float32 [n, numbers]}.
        features: Encoding of the rows.

    Returns:
        {input name: array [n, *shape]}.
    """
    arrays = {}
    codes = {field.start + index: known_ids(field)[:, 0] for field in features.fields for index in range(field.width)}
    for name, source in sources.items():
        out = np.zeros((len(next(iter(batch.values()))), *source.columns.shape), source.dtype)
        for place in np.ndindex(source.columns.shape):
            column = int(source.columns[place])
            values = codes[column][batch["ids"][:, column]] if source.ids[place] else batch["numbers"][:, column]
            out[(slice(None), *place)] = values
        arrays[name] = out
    return arrays


def without_sizes(model: ir.Model, runs: Sequence[Mapping[str, Array]]) -> ir.Model:
    """Makes constants of values that follow from the sizes of the inputs alone and are the same in all batches.

    Args:
        model: Graph; it is not changed.
        runs: Values of the graph for batches of several sizes, {name: array} each.

    Returns:
        A graph with the same results, for lists of the length of the runs.
    """
    made = model.clone()
    of_rows = set(made.graph.inputs)
    for node in list(made.graph):
        captures = any(attribute.type in SUBGRAPHS for attribute in node.attributes.values())
        if captures or (node.op_type not in ("Shape", "Size") and not of_rows.isdisjoint(node.inputs)):
            of_rows.update(node.outputs)
            continue
        for value in node.outputs:
            arrays = [run.get(str(value.name)) for run in runs]
            if value.is_graph_output() or any(x is None or not np.array_equal(x, arrays[0]) for x in arrays):  # type: ignore[arg-type]
                continue
            value.replace_all_uses_with(edit.initializer(made.graph, f"{value.name}.constant", np.array(arrays[0])))
    driver.rewrite(made, [RemoveDeadBranches()])
    return made


def run(model: ir.Model, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Runs a graph in the reference session and returns all its values.

    Args:
        model: Graph; it is not changed.
        batch: {input name: array}.

    Returns:
        {value name: array}.
    """
    watched = model.clone()
    outputs = {value.name for value in watched.graph.outputs}
    for node in watched.graph:
        watched.graph.outputs.extend(output for output in node.outputs if output.name and output.name not in outputs)
    names = [str(output.name) for output in watched.graph.outputs]
    opened = reference_session.session(watched, "reading it needs")
    return dict(zip(names, reference_session.run(opened, dict(batch), "rows"), strict=True))
