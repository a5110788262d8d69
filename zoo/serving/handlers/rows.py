"""Recommender handler: rows of click logs, parsed by the native reader."""

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
from zoo.serving.handlers.base import RUN, Parsed, Service, json_of
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Answer, Job

TEXT = ("text/tab-separated-values", "text/csv", "text/plain")
EXAMPLES = 5  # rows that are shown to users
PARQUET = "application/vnd.apache.parquet"


class Rows(Service):
    """Click probabilities of rows: text as `zoo run` takes it, JSON by column names, Parquet or an Arrow stream."""

    kinds: ClassVar[tuple[str, ...]] = (*TEXT, responses.JSON, responses.ARROW, PARQUET)
    pipeline: ClickPipeline

    def parse(self, job: Job) -> tuple[Batch, Any]:
        """The rows of a body, and their positions in it."""
        pipeline = self.pipeline
        parts = list(pipeline.rows(_source(job, self.pipeline.headerless), batch_rows=1 << 30))
        rows = parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)
        return pipeline.encode(rows), rows.index

    def example(self) -> Batch:
        """A batch of one row."""
        return self.pipeline.preprocess(self._some(1))

    def _some(self, count: int) -> list[Any]:
        """Up to `count` raw rows: of the sample that ships, else one that might be."""
        try:
            return self.pipeline.example(count)  # type: ignore[no-any-return]
        except RequestError:
            return [self.pipeline.likely()]

    def text(self) -> str:
        """Some rows: lines as they are, or CSV with a header."""
        found = self._some(EXAMPLES)
        if all(isinstance(each, bytes) for each in found):
            return b"\n".join(found).decode()
        table = pa.Table.from_pylist(found)
        texts = [pa.array([_text(each) for each in column.to_pylist()], pa.string()) for column in table.columns]
        sink = io.BytesIO()
        pa.csv.write_csv(pa.table(texts, table.column_names), sink)
        return sink.getvalue().decode()

    def together(self, jobs: Sequence[Job]) -> list[Answer] | None:
        """The bodies of rows without a header as one text, and the results as one line of JSON, cut again."""
        if not (self.pipeline.headerless and all(job.verb == RUN and job.kind in TEXT and job.body for job in jobs)):
            return None
        if not all(job.accept in ("", "*/*", responses.JSON) and not job.options for job in jobs):
            return None
        begin = time.perf_counter()
        bodies = [job.body if job.body.endswith(b"\n") else job.body + b"\n" for job in jobs]
        counts = [body.count(b"\n") for body in bodies]
        total = sum(counts)
        if total > self.gathers:
            return None
        try:
            (rows,) = self.pipeline.rows(io.BytesIO(b"".join(bodies)), batch_rows=1 << 30)
            if len(rows) != total:
                return None
            batch = self.pipeline.encode(rows)
            parsed = time.perf_counter()
            out = self.pipeline.predict(batch)["probability"].reshape(-1)
        except RequestError:
            return None
        computed = time.perf_counter()
        texts = orjson.dumps(np.ascontiguousarray(out), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
        written, at = [], 0
        for count in counts:
            some = b",".join(b'{"row":%d,"probability":%b}' % each for each in enumerate(texts[at : at + count]))
            written.append(b'{"results":[' + some + b"]}")
            at += count
        split = (parsed - begin, computed - parsed, time.perf_counter() - computed)
        return [
            Answer(job.number, 200, responses.JSON, body, split, count, total)
            for job, body, count in zip(jobs, written, counts, strict=True)
        ]

    def table(self, parsed: Parsed, out: Batch) -> responses.Columns:
        """Columns row and probability, as `zoo run` writes them."""
        return {"row": parsed.about, "probability": out["probability"].reshape(-1)}


def _source(job: Job, headerless: bool) -> Any:
    """What `ClickPipeline.rows` takes, of a body: never a name."""
    if not job.body:
        raise RequestError("the body is empty; wanted at least one row")
    if job.kind in TEXT or job.kind in ("", "application/octet-stream", "application/x-www-form-urlencoded"):
        return io.BytesIO(job.body)
    if job.kind == responses.JSON:
        return _objects(job.body, headerless)
    try:
        if job.kind == responses.ARROW:
            table = pa.ipc.open_stream(job.body).read_all()
            table.validate(full=True)  # or what it says of its buffers would be believed
            return table
        if job.kind == PARQUET:
            import pyarrow.parquet as parquet  # which few ask for

            return parquet.read_table(pa.BufferReader(job.body))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RequestError(f"the body cannot be read as {job.kind}: {one_line(error)}") from error
    raise RequestError(f"Content-Type is {job.kind[:100]!r}; wanted one of {', '.join(Rows.kinds)}")


def _objects(body: bytes, headerless: bool) -> pa.Table | io.BytesIO:
    """JSON rows, [{column: value}, ...] or {"rows": [...]}, as CSV, which is read several times as quickly as a table;
    as one where text has no header, or a header would be read otherwise.
    """
    rows = json_of(body, "rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise RequestError('the body must be {"rows": [{column: value, ...}, ...]} with at least one row')
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    try:
        if not headerless and _header_says(text.getvalue(), tuple(names)):
            writer.writerows([_text(row.get(name)) for name in names] for row in rows)
            return io.BytesIO(text.getvalue().encode())
        return pa.table({name: pa.array([_text(row.get(name)) for row in rows], pa.string()) for name in names})
    except RecursionError:
        raise RequestError("a value is hundreds of lists deep; wanted text, a number or a list of them") from None


@lru_cache(64)  # of requests most have the same columns
def _header_says(line: str, names: tuple[str, ...]) -> bool:
    """Whether the header of a text is read as these names."""
    try:
        log = open_log(io.BytesIO(line.encode()))
    except RequestError:
        return False
    return log.kind == "csv" and log.columns == names and line.count("\n") == 1


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        return LIST.join(text for each in value if (text := _text(each)) is not None) or None
    if isinstance(value, dict):
        raise RequestError("a value is an object; wanted text, a number, a list of them, or null")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return str(int(value))
    return None if value is None else str(int(value)) if isinstance(value, bool) else str(value)
