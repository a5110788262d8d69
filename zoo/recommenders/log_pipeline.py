"""Rows of any click log to click probabilities, by the schema that the model was trained with."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.data.text import TextForm
from pipelines.models.stages import ModelFolder
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import Log, open_log
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.inference import ClickPipeline

SAMPLE = "sample.csv.gz"  # rows that ship with a model


class LogPipeline(ClickPipeline):
    """Scores rows of a log; see `zoo.pipeline`. Raw rows: whatever `data.logs.open_log` takes, or several."""

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        super().__init__(folder, *arguments, **options)
        self.features = Features.from_json(folder.preprocessing)

    def likely(self) -> dict[str, str]:
        """A row of the commonest values, see `Schema.likely`."""
        return self.features.schema.likely()

    def rows(
        self,
        inputs: Any,
        on_error: str = "raise",
        errors: ErrorLog | None = None,
        batch_rows: int = 65536,
        seconds: defaultdict[str, float] | None = None,
        labelled: bool = False,
    ) -> Iterator[Rows]:
        """Rows as this model wants them, see `Features.read`."""
        return self.features.read(
            inputs, on_error=on_error, errors=errors, batch_rows=batch_rows, seconds=seconds, labelled=labelled
        )

    def encode(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """The graph's inputs, see `Features`."""
        return self.features.encode(rows)

    def text_form(self, stream: Any) -> TextForm:
        """CSV by its header; objects of JSON, or Criteo's rows, by lines."""
        log = open_log(io.BytesIO(stream.readline()))
        return (
            TextForm(header=log.header, delimiter=log.delimiter, blank=False)
            if log.header and log.kind == "csv"
            else TextForm(blank=False)
        )

    def told_by_first(self, stream: Any) -> Log | None:
        """JSON's first object names the columns: others are passed over. Criteo's first row says whether all have a
        label.
        """
        log = open_log(io.BytesIO(stream.readline()))
        return log if log.kind == "jsonl" or not log.header else None

    @property
    def last_ids(self) -> NDArray[Any]:
        """The largest id of each column of `ids`, int64 [columns]."""
        return self.features.last_ids

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """dtype and shape of the inputs, as the features have them."""
        return dict(self.features.inputs)

    def example(self, count: int, data: str | Path | None = None) -> list[dict[str, Any]]:
        """`count` raw rows ({column: text}) for a benchmark, of a log or the sample that ships, repeated if need be.

        Raises RequestError where there is none.
        """
        if data is None and not (self.path / SAMPLE).is_file():
            raise RequestError(f"{self.path} holds no {SAMPLE}; name your rows with --data FILE")
        batch = next(open_log(data or self.path / SAMPLE).batches(), None)
        if batch is None or not batch.num_rows:
            raise RequestError(f"{data} holds no row; name a log with some")
        some: list[dict[str, Any]] = batch.slice(0, count).to_pylist()
        return [some[at % len(some)] for at in range(count)]
