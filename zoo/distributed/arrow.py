"""Scorer of rows in Arrow batches, for Spark's `mapInArrow` and Ray Data's `map_batches`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import zoo
from pipelines.core.errors import RequestError, ZooError
from pipelines.models.protocols import ShardableRows
from zoo.distributed.shards import shared_engine


class ArrowScorer:
    """Adds the column `probability` (float32; of several labels probability_LABEL) to Arrow data with rows of a log.

    The model is not pickled: each process loads it at its first rows, in the engine and native form of the process that
    pickled the scorer. The class can be passed to
    `ray.data.Dataset.map_batches(..., batch_format="pyarrow")`.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        precision: "int8", "fp32" or "bf16".
        engine: Inference engine.
        threads: Number of intra-op threads.
    """

    def __init__(self, model: str | Path, precision: str = "int8", engine: str = "auto", threads: int = 1) -> None:
        self.arguments = (str(model), precision, engine, threads)
        self._pipeline: ShardableRows | None = None

    def __getstate__(self) -> dict[str, Any]:
        model, precision, engine, threads = self.arguments
        with contextlib.suppress(ZooError):  # the workers alone have the model
            engine = shared_engine(zoo.load(model), precision, engine)
        return {"arguments": (model, precision, engine, threads), "_pipeline": None}

    @property
    def pipeline(self) -> ShardableRows:
        """Pipeline of the model, loaded at first use.

        Raises:
            RequestError: The model is no recommender.
        """
        if self._pipeline is None:
            model, precision, engine, threads = self.arguments
            pipeline = zoo.pipeline(model, precision, engine, threads)
            if not isinstance(pipeline, ShardableRows):
                raise RequestError(f"{model} scores no rows of a log; expected a recommender")
            self._pipeline = pipeline
        return self._pipeline

    def __call__(self, rows: Any) -> Any:
        """Scores rows.

        Args:
            rows: A table, a record batch, or an iterator of record batches.

        Returns:
            A table; for an iterator, an iterator of record batches.
        """
        if isinstance(rows, pa.RecordBatch):
            return self._table(pa.Table.from_batches([rows]))
        return self._table(rows) if isinstance(rows, pa.Table) else self._batches(rows)

    def _batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from self(batch).to_batches()

    def _table(self, table: pa.Table) -> pa.Table:
        batches = self.pipeline.rows(table) if len(table) else ()
        parts = [self.pipeline.score(rows).reshape(len(rows), -1) for rows in batches]
        for column, name in enumerate(self.pipeline.outputs):
            chunks = [pa.array(np.ascontiguousarray(part[:, column])) for part in parts]
            table = table.append_column(name, pa.chunked_array(chunks, pa.float32()))
        return table


def arrow_scorer(model: str | Path, precision: str = "int8", engine: str = "auto", threads: int = 1) -> ArrowScorer:
    """Returns a scorer that adds the column `probability` to Arrow data; see `ArrowScorer`.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        precision: "int8", "fp32" or "bf16".
        engine: Inference engine.
        threads: Number of intra-op threads.

    Returns:
        The scorer, a picklable callable on tables, record batches and iterators of record batches.
    """
    return ArrowScorer(model, precision, engine, threads)
