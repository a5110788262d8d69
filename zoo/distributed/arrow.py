"""Rows in Arrow batches to scores, for engines that bring their own distribution: Spark's `mapInArrow`, Ray Data's
`map_batches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import zoo
from pipelines.core.errors import RequestError
from pipelines.models.sharding import ShardableRows


class ArrowScorer:
    """Adds the column `probability` (float32) to Arrow tables of a click log's rows.

    Pickled without the model, which each process opens at its first rows. A table or record batch becomes one table;
    an iterator of record batches, as `mapInArrow` gives it, an iterator of such. `ArrowScorer` is a class for
    `ray.data.Dataset.map_batches(..., batch_format="pyarrow")`, too.
    """

    def __init__(self, model: str | Path, precision: str = "int8", engine: str = "auto", threads: int = 1) -> None:
        self.arguments = (str(model), precision, engine, threads)
        self._pipeline: ShardableRows | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"arguments": self.arguments, "_pipeline": None}

    @property
    def pipeline(self) -> ShardableRows:
        """The open model. Raises RequestError for one that scores no rows."""
        if self._pipeline is None:
            model, precision, engine, threads = self.arguments
            opened = zoo.pipeline(model, precision, engine, threads)
            if not isinstance(opened, ShardableRows):
                raise RequestError(f"{model} scores no rows of a log; wanted a click model")
            self._pipeline = opened
        return self._pipeline

    def __call__(self, rows: Any) -> Any:
        """Rows with their probabilities; see the class."""
        if isinstance(rows, pa.RecordBatch):
            return self._table(pa.Table.from_batches([rows]))
        return self._table(rows) if isinstance(rows, pa.Table) else self._batches(rows)

    def _batches(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from self(batch).to_batches()

    def _table(self, table: pa.Table) -> pa.Table:
        if not len(table):
            return table.append_column("probability", pa.array([], pa.float32()))
        parts = [self.pipeline.score(rows) for rows in self.pipeline.rows(table)]
        return table.append_column("probability", pa.chunked_array([pa.array(each) for each in parts]))


def arrow_scorer(model: str | Path, precision: str = "int8", engine: str = "auto", threads: int = 1) -> ArrowScorer:
    """Returns a scorer of Arrow data; see `ArrowScorer`.

    The scorer takes a table, a record batch or an iterator of record batches, and returns the same with a column
    `probability`.

    Args:
        model: Name of a pretrained model, or path of a model folder.
        precision: "int8", "fp32" or "bf16".
        engine: Inference engine.
        threads: Number of intra-op threads.
    """
    return ArrowScorer(model, precision, engine, threads)
