"""Data frames of pandas and polars, and tables of Arrow, as input and output of every pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import zoo
from pipelines.core.errors import RequestError
from pipelines.models.pipeline import Pipeline


def annotate(
    model: str | Path | Pipeline,
    frame: Any,
    column: str | Sequence[str] | None = None,
    *,
    prefix: str = "",
    **options: Any,
) -> Any:
    """Runs a model on the rows of a data frame and adds the results as columns.

    Recommenders read their columns from the frame. Other models read `column`: texts or sentences; file names, bytes or
    pixels of images. The results have the names of the keys of the pipeline's results: "probability" and "click",
    "translation" and "score", "label" and "score", "embedding", ...; lists, as of entities, are one column, "results".

    Args:
        model: Pipeline, or MODEL of `zoo.pipeline`.
        frame: Data frame of pandas or polars, or table of Arrow.
        column: Column that is read, or two for pairs of texts; None for recommenders, and for a frame of one column.
        prefix: Beginning of the names of the new columns.
        **options: Options of the call of the pipeline.

    Returns:
        Frame of the same kind with the same rows and index, and the new columns.

    Raises:
        RequestError: The frame has no such column, or has a column with the name of a result.
    """
    pipeline = model if isinstance(model, Pipeline) else zoo.pipeline(model)
    names = [*(frame.column_names if isinstance(frame, pa.Table) else getattr(frame, "columns", ()))]
    if not names:
        raise RequestError(
            f"found {type(frame).__name__}, expected a data frame of pandas or polars, or a table of Arrow"
        )
    values = frame if pipeline.PARTS == "rows" else _values(pipeline, frame, names, column)
    results = pipeline(values, **options) if len(frame) else []
    added = {prefix + name: cells for name, cells in _by_name(results).items()}
    if taken := [name for name in added if name in names]:
        raise RequestError(
            f"found the column {taken[0]!r} in the frame, expected none with the name of a result; give a prefix"
        )
    return _with_columns(frame, added)


def _values(pipeline: Pipeline, frame: Any, names: Sequence[Any], column: str | Sequence[str] | None) -> list[Any]:
    """Returns the values that a pipeline reads, one a row."""
    if column is None and len(names) > 1:
        raise RequestError(f"found the columns {', '.join(map(str, names))}; say which one is read: column=NAME")
    chosen = names if column is None else [*column] if isinstance(column, list | tuple) else [column]
    if absent := [name for name in chosen if name not in names]:
        raise RequestError(f"found no column {absent[0]!r}; the columns are {', '.join(map(str, names))}")
    cells = [frame[name].to_pylist() if isinstance(frame, pa.Table) else list(frame[name]) for name in chosen]
    values = cells[0] if len(cells) == 1 else [*zip(*cells, strict=True)]
    return (
        [Path(value) if isinstance(value, str) else value for value in values] if pipeline.PARTS == "files" else values
    )


def _by_name(results: Sequence[Any]) -> dict[str, list[Any]]:
    """Returns the columns of results; None where a result lacks one."""
    if not all(isinstance(result, dict) for result in results):
        return {"results": list(results)}
    names = dict.fromkeys(name for result in results for name in result)
    return {name: [_cell(result.get(name)) for result in results] for name in names}


def _cell(value: Any) -> Any:
    """A list of pairs (label, probability) as a list of structs, and a matrix as a list of rows: columns have these."""
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return list(value)
    if isinstance(value, list) and value and all(isinstance(pair, tuple) for pair in value):
        return [{"label": label, "probability": probability} for label, probability in value]
    return value


def _with_columns(frame: Any, columns: dict[str, list[Any]]) -> Any:
    if isinstance(frame, pa.Table):
        for name, cells in columns.items():
            frame = frame.append_column(name, pa.array(cells))
        return frame
    if hasattr(frame, "hstack"):  # polars
        import polars

        return frame.hstack([polars.Series(name, cells, strict=False) for name, cells in columns.items()])
    import pandas

    return frame.assign(**{name: pandas.Series(cells, index=frame.index) for name, cells in columns.items()})
