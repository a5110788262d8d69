"""Recommender handler: click probabilities of rows, parsed by the native reader."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv

from pipelines.core.batches import Batch
from pipelines.core.errors import RequestError
from pipelines.models.protocols import RanksItems
from zoo.recommenders.inference import PROBABILITY, ClickPipeline
from zoo.serving.handlers.base import RUN, Handler, ParsedJob
from zoo.serving.handlers.ranking import RANK, ItemRanker
from zoo.serving.handlers.row_bodies import CONTENT_TYPES, TEXT, row_source, text_of
from zoo.serving.protocol import responses
from zoo.serving.workers.channel import Job, JobResult

EXAMPLE_ROWS = 5


class RowHandler(Handler):
    """Computes click probabilities of rows: text as for `zoo run`, JSON by column names, Parquet or an Arrow stream."""

    content_types: ClassVar[tuple[str, ...]] = CONTENT_TYPES
    pipeline: ClickPipeline
    _ranker: ItemRanker | None = None

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
        options = pipeline.headerless, pipeline.columns_of, pipeline.separators, pipeline.parsed_columns
        source = row_source(job, *options)
        parts = list(pipeline.rows(source, batch_rows=1 << 30))
        rows = parts[0] if len(parts) == 1 else type(parts[0]).concatenate(parts)
        return pipeline.encode(rows), rows.index

    def load_items(self, items: Path | None) -> None:
        """See `Handler.load_items`."""
        if isinstance(self.pipeline, RanksItems):
            self._ranker = ItemRanker(self.name, self.pipeline, items)
        else:
            super().load_items(items)

    def connect(self, handlers: Mapping[str, Handler]) -> None:
        """See `Handler.connect`; rankers take candidates of the models that retrieve items."""
        if self._ranker is not None:
            rankers = {name: handler._ranker for name, handler in handlers.items() if isinstance(handler, RowHandler)}
            self._ranker.retrievers = {
                name: ranker for name, ranker in rankers.items() if ranker is not None and ranker.retrieves
            }

    def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """Runs jobs, see `Handler.run`; rankings run one by one.

        Args:
            jobs: The jobs.

        Returns:
            The results, in any order.
        """
        if self._ranker is None:
            return super().run(jobs)
        ranked = [self._ranker.run(job) for job in jobs if job.verb == RANK]
        others = [job for job in jobs if job.verb != RANK]
        return [*ranked, *(super().run(others) if others else [])]

    def extra_description(self) -> dict[str, Any]:
        """Returns the size of the catalogue as "items", 0 without one; {} for a model that does not rank items."""
        if self._ranker is None:
            return {}
        return {"items": 0 if self._ranker.catalogue is None else len(self._ranker.catalogue)}

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
        texts = [pa.array([text_of(value) for value in column.to_pylist()], pa.string()) for column in table.columns]
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
        if not self.pipeline.headerless or len(self.pipeline.outputs) > 1:
            return None
        if not all(job.verb == RUN and job.content_type in TEXT and job.body for job in jobs):
            return None
        if not all(job.accept in ("", "*/*", responses.JSON) and not job.options and not job.received for job in jobs):
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
            out = self.pipeline.predict(batch)
        except RequestError:
            return None
        computed = time.perf_counter()
        probabilities = np.ascontiguousarray(out[PROBABILITY].reshape(-1))
        numbers = orjson.dumps(probabilities, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
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
        """Returns the columns of `zoo run`: row and probability, or probability_LABEL of several labels.

        Args:
            parsed: The parsed job.
            outputs: Outputs of the model.

        Returns:
            The columns.
        """
        return {"row": parsed.context, **{name: outputs[name].reshape(-1) for name in self.pipeline.outputs}}
