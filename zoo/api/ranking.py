"""Command that ranks items for one user: rank."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core.errors import RequestError
from pipelines.data.tables import writing
from pipelines.models.ranking import RanksItems
from zoo.api.paths import Model, files_of, require_distinct

TOP = 10
COLUMNS = {"rank": np.int64, "item": str, "row": np.int64, "probability": np.float32}


def rank(
    model: Model,
    user: Any,
    items: Any,
    output: Model = "-",
    *,
    top: int | None = TOP,
    exclude: Iterable[str] = (),
    precision: str = "int8",
    engine: str = "auto",
    threads: int = 1,
) -> dict[str, Any]:
    """Ranks items for one user and writes the best of them; see docs/rank-candidates.md.

    The user's columns are read and computed once. Columns: rank, item (its id, if the model has a column of ids), row
    (0-based position among the items) and probability.

    Args:
        model: Name of a pretrained ranker, or path of its folder.
        user: {column: value}, or a file with one JSON object or one row.
        items: Log with the items' columns, one row an item.
        output: Output file, see `zoo.run`; "-" for stdout.
        top: Number of items to write; None for all.
        exclude: Ids of items to leave out.
        precision: "int8" or "fp32".
        engine: Inference engine; "auto" for the fastest on this machine.
        threads: Number of intra-op threads.

    Returns:
        {"model", "items": number of items that were read, "ranked": number of rows written, "seconds", "engine",
        "precision"}.

    Raises:
        RequestError: The model ranks no items, or a column is missing.
    """
    if not issubclass(zoo.entry_of(model).pipeline(), RanksItems):
        raise RequestError(f"{model} ranks no items; expected a recommender with columns of items")
    pipeline: Any = zoo.pipeline(model, precision, engine, threads)
    sources = [each for each in (user, items) if isinstance(each, str | Path)]
    require_distinct(output, *files_of(pipeline.folder), *sources)
    start = time.perf_counter()
    catalogue = pipeline.catalogue(_place(items), distinct=False)
    columns = pipeline.rank_columns(_user(user), catalogue, top, exclude=tuple(exclude))
    count = len(columns["row"])
    with writing(output, COLUMNS, brief=tuple(COLUMNS)) as write:
        write({"rank": np.arange(1, count + 1), "item": [None] * count, **columns})
    return {
        "model": pipeline.folder.card.name,
        "items": len(catalogue),
        "ranked": count,
        "seconds": round(time.perf_counter() - start, 3),
        "engine": pipeline.engine,
        "precision": pipeline.precision,
    }


def _place(source: Any) -> Any:
    """A name of a file as its path; other sources are themselves."""
    return Path(source) if isinstance(source, str) and source != "-" and "://" not in source else source


def _user(user: Any) -> Any:
    """The user's values: a file with one JSON object, over any number of lines, is that object."""
    place = _place(user)
    if isinstance(user, Mapping) or not isinstance(place, Path) or not place.is_file():
        return place
    try:
        value = json.loads(place.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        return place
    return value if isinstance(value, dict) else place
