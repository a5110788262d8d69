"""Values of labels: one label per row, or several with missing values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from zoo.recommenders.data.cell_values import parse_floats
from zoo.recommenders.data.schema import Schema

Floats = NDArray[np.float32]


def label_values(schema: Schema, columns: Mapping[str, pa.Array]) -> Floats:
    """Reads the labels of rows.

    Of several labels, a missing one is NaN, and so is one whose `where` is not 1. Text that is no number is infinite.

    Args:
        schema: Schema with at least one label.
        columns: {column: text array [n]}, null where missing.

    Returns:
        float32 [n] for one label, NaN where it is no number; float32 [n, labels] for several.
    """
    zero = 0.0 if schema.canonical else -0.0  # added, it makes -0 that is canonical 0
    rules = {column.name: column.positive for column in schema.of("label")}
    columns = {name: binary(columns[name], rule) for name, rule in rules.items()}
    values = [(parse_floats(columns[name]) + zero).astype(np.float32) for name in schema.labels]
    if len(values) == 1:
        return values[0]
    labels = np.stack(values, axis=1)
    for index, column in enumerate(schema.of("label")):
        missing = pc.equal(columns[column.name], "").fill_null(True).to_numpy(zero_copy_only=False)
        labels[np.isnan(labels[:, index]) & ~missing, index] = np.inf
    original = labels.copy()
    for index, column in enumerate(schema.of("label")):
        if column.where:
            defined = original[:, schema.labels.index(column.where)] == 1
            labels[~defined & ~np.isinf(original[:, index]), index] = np.nan
    return labels


def binary(texts: pa.Array, positive: Mapping[str, Any]) -> pa.Array:
    """Writes the values of a label as 0 and 1.

    Args:
        texts: Text array [n] in canonical form, null where missing.
        positive: Values that are 1, see `Column`; empty: the texts stay as they are.

    Returns:
        Text array [n] of "1" and "0". Missing values stay missing, and with "at_least" a text that is no number stays.
    """
    if not positive:
        return texts
    if "values" in positive:
        one, known = pc.is_in(texts, value_set=pa.array(positive["values"], texts.type)), pc.not_equal(texts, "")
    else:
        numbers = parse_floats(texts)
        one, known = pa.array(numbers >= positive["at_least"]), pa.array(~np.isnan(numbers))
    return pc.if_else(known.fill_null(False), pc.if_else(one, "1", "0"), texts)


def faulty_labels(labels: Floats) -> NDArray[np.bool_]:
    """Tells which labels are wrong: other than 0 and 1 or, of several labels, other than 0, 1 and missing.

    Args:
        labels: Result of `label_values`.

    Returns:
        bool [n] or [n, labels].
    """
    wrong: NDArray[np.bool_] = (labels != 0) & (labels != 1)
    return wrong if labels.ndim == 1 else np.logical_and(wrong, ~np.isnan(labels))
