"""Recommender handler: click probabilities of rows, parsed by the native reader."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError, one_line
from zoo.recommenders.data.logs import LIST, open_log
from zoo.recommenders.inference import ClickPipeline
from zoo.serving.handlers.base import RUN, Handler, ParsedJob, json_value
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job, JobResult

TEXT = ("text/tab-separated-values", "text/csv", "text/plain")
UNTYPED = ("", "application/octet-stream", "application/x-www-form-urlencoded")  # defaults of HTTP clients: text
EXAMPLE_ROWS = 5
PARQUET = "application/vnd.apache.parquet"


class RowHandler(Handler):
    """Computes click probabilities of rows: text as for `zoo run`, JSON by column names, Parquet or an Arrow stream."""

    content_types: ClassVar[tuple[str, ...]] = (*TEXT, responses.JSON, responses.ARROW, PARQUET)
    pipeline: ClickPipeline

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """Encodes the rows of a body.

        Args:
            job: The job.

        Returns:
            Model inputs, and the positions of the rows in the body.

        Raises:
            RequestError: The body is invalid.
        """
        pipeline = self.pipeline
        parts = list(pipeline.rows(_row_source(job, pipeline.headerless), batch_rows=1 << 30))
        rows = parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)
        return pipeline.encode(rows), rows.index

    def sample_batch(self) -> Batch:
        """Returns model inputs of one row."""
        return self.pipeline.preprocess(self._example_rows(1))

    def _example_rows(self, count: int) -> list[Any]:
        """Up to `count` raw rows of the shipped sample, or one synthetic row."""
        try:
            return self.pipeline.example(count)  # type: ignore[no-any-return]
        except RequestError:
            return [self.pipeline.typical_row()]

    def example_text(self) -> str:
        """Returns example rows: lines of the log, or CSV with a header."""
        rows = self._example_rows(EXAMPLE_ROWS)
        if all(isinstance(row, bytes) for row in rows):
            return b"\n".join(rows).decode()
        table = pa.Table.from_pylist(rows)
        texts = [pa.array([_text(value) for value in column.to_pylist()], pa.string()) for column in table.columns]
        sink = io.BytesIO()
        pa.csv.write_csv(pa.table(texts, table.column_names), sink)
        return sink.getvalue().decode()

    def run_joined(self, jobs: Sequence[Job]) -> list[JobResult] | None:
        """Joins text bodies of rows without a header, and splits the JSON of the probabilities.

        Args:
            jobs: The jobs, more than one.

        Returns:
            The results; None if the jobs must be parsed one by one.
        """
        if not self.pipeline.headerless:
            return None
        if not all(job.verb == RUN and job.content_type in TEXT and job.body for job in jobs):
            return None
        if not all(job.accept in ("", "*/*", responses.JSON) and not job.options for job in jobs):
            return None
        begin = time.perf_counter()
        bodies = [job.body if job.body.endswith(b"\n") else job.body + b"\n" for job in jobs]
        counts = [body.count(b"\n") for body in bodies]
        total = sum(counts)
        if total > self.max_batch_samples:
            return None
        try:
            (rows,) = self.pipeline.rows(io.BytesIO(b"".join(bodies)), batch_rows=1 << 30)
            if len(rows) != total:
                return None
            batch = self.pipeline.encode(rows)
            parsed = time.perf_counter()
            probabilities = self.pipeline.predict(batch)["probability"].reshape(-1)
        except RequestError:
            return None
        computed = time.perf_counter()
        numbers = orjson.dumps(np.ascontiguousarray(probabilities), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
        contents, offset = [], 0
        for count in counts:
            rows_json = (b'{"row":%d,"probability":%b}' % row for row in enumerate(numbers[offset : offset + count]))
            contents.append(b'{"results":[' + b",".join(rows_json) + b"]}")
            offset += count
        stage_seconds = (parsed - begin, computed - parsed, time.perf_counter() - computed)
        return [
            JobResult(job.job_id, 200, responses.JSON, content, stage_seconds, count, total)
            for job, content, count in zip(jobs, contents, counts, strict=True)
        ]

    def table(self, parsed: ParsedJob, outputs: Batch) -> responses.Columns:
        """Returns the columns of `zoo run`: row and probability.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns.
        """
        return {"row": parsed.context, "probability": outputs["probability"].reshape(-1)}


def _row_source(job: Job, headerless: bool) -> Any:
    """Converts a body to an argument of `ClickPipeline.rows`; never a path."""
    if not job.body:
        raise RequestError("the body is empty; expected at least one row")
    if job.content_type in (*TEXT, *UNTYPED):
        return io.BytesIO(job.body)
    if job.content_type == responses.JSON:
        return _json_rows(job.body, headerless)
    try:
        if job.content_type == responses.ARROW:
            table = pa.ipc.open_stream(job.body).read_all()
            table.validate(full=True)  # offsets in the body are not trusted
            return table
        if job.content_type == PARQUET:
            import pyarrow.parquet as parquet  # rarely needed

            return parquet.read_table(pa.BufferReader(job.body))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RequestError(f"the body cannot be read as {job.content_type}: {one_line(error)}") from error
    types = ", ".join(RowHandler.content_types)
    raise RequestError(f"Content-Type is {job.content_type[:100]!r}; expected one of {types}")


def _json_rows(body: bytes, headerless: bool) -> pa.Table | io.BytesIO:
    """Converts JSON rows, [{column: value}, ...] or {"rows": [...]}, to CSV.

    CSV is parsed several times as fast as a table. Models of rows without a header, and names that a CSV header cannot
    represent, need a table.
    """
    rows = json_value(body, "rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise RequestError('the body must be {"rows": [{column: value, ...}, ...]} with at least one row')
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    try:
        if not headerless and _header_has_names(text.getvalue(), tuple(names)):
            writer.writerows([_text(row.get(name)) for name in names] for row in rows)
            return io.BytesIO(text.getvalue().encode())
        return pa.table({name: pa.array([_text(row.get(name)) for row in rows], pa.string()) for name in names})
    except RecursionError:
        raise RequestError("a value is hundreds of lists deep; expected text, a number or a list of them") from None


@lru_cache(64)  # most requests have the same columns
def _header_has_names(line: str, names: tuple[str, ...]) -> bool:
    """Whether the CSV header is parsed as these names."""
    try:
        log = open_log(io.BytesIO(line.encode()))
    except RequestError:
        return False
    return log.kind == "csv" and log.columns == names and line.count("\n") == 1


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        return LIST.join(text for item in value if (text := _text(item)) is not None) or None
    if isinstance(value, dict):
        raise RequestError("a value is an object; expected text, a number, a list of them, or null")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return str(int(value))
    return None if value is None else str(int(value)) if isinstance(value, bool) else str(value)
