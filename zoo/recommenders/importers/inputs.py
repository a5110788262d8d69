"""What a ranker's own inputs hold of the rows of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import reference_session
from zoo.recommenders.data.encoding import Field
from zoo.recommenders.data.features import Features

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Fed:
    """What an old input holds, for each of its entries a sample: a column of the ids (`ids` is True) or of the numbers.

    columns: int64 [*shape], ids: bool [*shape], dtype: the input's.
    """

    columns: Array
    ids: Array
    dtype: np.dtype[Any]


def known_ids(field: Field) -> Array:
    """The ranker's id of each id of a field, int64 [rows, 1]: the same, but 0 for a missing value."""
    rows = np.arange(field.rows)
    rows[field.last] = 0
    return rows[:, None]


def feeds(fed: Mapping[str, Fed], batch: Mapping[str, Array], features: Features) -> dict[str, Array]:
    """The old inputs of rows as the features encode them."""
    found = {}
    codes = {each.start + at: known_ids(each)[:, 0] for each in features.fields for at in range(each.width)}
    for name, each in fed.items():
        out = np.zeros((len(next(iter(batch.values()))), *each.columns.shape), each.dtype)
        for place in np.ndindex(each.columns.shape):
            column = int(each.columns[place])
            values = codes[column][batch["ids"][:, column]] if each.ids[place] else batch["numbers"][:, column]
            out[(slice(None), *place)] = values
        found[name] = out
    return found


def run(model: ir.Model, batch: Mapping[str, Array]) -> dict[str, Array]:
    """All values of a graph, by name."""
    watched = model.clone()
    known = {value.name for value in watched.graph.outputs}
    for node in watched.graph:
        watched.graph.outputs.extend(each for each in node.outputs if each.name and each.name not in known)
    names = [str(each.name) for each in watched.graph.outputs]
    opened = reference_session.session(watched, "reading it needs")
    return dict(zip(names, reference_session.run(opened, dict(batch), "rows"), strict=True))
