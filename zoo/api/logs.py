"""The verb that looks at a click log: schema."""

from __future__ import annotations

from typing import Any

from pipelines.core.errors import RequestError
from zoo.api.paths import Model, spare


def schema(
    log: Model,
    output: Model | None = None,
    *,
    label: str | None = None,
    delimiter: str | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """The schema of a click log, inferred from all its rows; written to `output` as JSON where one is given.

    log: CSV or TSV with a header, JSON lines (plain or .gz) or Parquet. label: the column of 0 and 1 that is predicted;
    None: one called label, click, clicked, target or y. on_error: "skip" passes over rows that training with it leaves
    out. Returns {"schema": see `zoo.recommenders.data.schema.JSON_SCHEMA`,
    "table": rows of text under `zoo.recommenders.data.schema.COLUMNS`, "path": of the file or None}. Raises
    RequestError for a log
    that cannot be read, or has no such label.
    """
    from zoo.recommenders.data.logs import open_log
    from zoo.recommenders.data.schema_inference import infer

    if delimiter is not None and len(delimiter) != 1:
        raise RequestError(f"found the delimiter {delimiter!r}, wanted one character")
    spare(output, log)
    found = infer(open_log(log, delimiter), label, on_error)
    path = None if output is None else str(found.save(output))
    return {"schema": found.to_json(), "table": found.table(), "path": path}
