"""Raw Criteo rows to click probabilities."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.data.text import TextForm
from pipelines.models.folder import ModelFolder
from zoo.recommenders.criteo.data import Rows, read_rows
from zoo.recommenders.data import sources
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.importers.tensorflow.mapped import features_of, inputs_of, last_ids
from zoo.recommenders.inference import ClickPipeline

SAMPLE = "sample.tsv.gz"  # synthetic rows that ship with the model


class CriteoPipeline(ClickPipeline):
    """Scores rows in the Kaggle format; see `zoo.pipeline`.

    Raw rows are whatever `zoo.recommenders.criteo.data.read_rows` takes: a path, or a list of tab separated lines or of
    sequences
    of values. They become {"ids": int32 [n, fields] hash buckets, "numbers": float32 [n, numeric] in [0, 1]}.
    """

    def __init__(self, folder: ModelFolder, *arguments: Any, **options: Any) -> None:
        super().__init__(folder, *arguments, **options)
        self.features = features_of(folder.preprocessing)

    def likely(self) -> bytes:
        """A line of zeros, without a label."""
        counts = self.features.counts
        return b"\t".join([b"0"] * (counts["numeric"] + counts["categorical"]))

    def rows(
        self,
        inputs: Any,
        on_error: str = "raise",
        errors: ErrorLog | None = None,
        batch_rows: int = 65536,
        seconds: defaultdict[str, float] | None = None,
        labelled: bool = False,
    ) -> Iterator[Rows]:
        """Rows as this model wants them, see `read_rows`, which holds all rows to what the first one has."""
        counts = self.features.counts
        return read_rows(
            inputs,
            on_error=on_error,
            errors=errors,
            batch_rows=batch_rows,
            seconds=seconds,
            with_label=self.with_label,
            **counts,
        )

    def encode(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """Hashed ids, and numbers scaled to [0, 1]."""
        return self.features.encode(rows)

    def text_form(self, stream: Any) -> TextForm:
        """Every line is a row, an empty one a faulty one. Raises RequestError where there is none."""
        if not stream.read(1):
            raise RequestError("found it empty, wanted at least one row")
        return TextForm()

    def label_in(self, lines: Iterable[bytes] = (), columns: Sequence[str] = ()) -> bool | None:
        """By the first line that has as many columns as a row may have, as `read_rows` tells; or by the names."""
        numeric, categorical = (self.features.counts[each] for each in ("numeric", "categorical"))
        if columns:
            kinds = sources.criteo_columns(numeric, categorical)
            return sources.choose_columns("the table", list(columns), kinds)[1]
        fields = numeric + categorical
        widths = (line.count(b"\t") + 1 for line in lines)
        return next((width > fields for width in widths if width in (fields, fields + 1)), None)

    @property
    def last_ids(self) -> NDArray[Any]:
        """The last bucket of each category, int64 [fields]."""
        return last_ids(self.features)

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """dtype and shape of the hashed ids and of the numbers, as the features have them."""
        return dict(inputs_of(self.features))

    def example(self, count: int, data: str | Path | None = None) -> list[bytes]:
        """`count` raw rows (tab separated lines) for a benchmark, from a text file or the sample that ships, repeated
        if need be.

        Raises RequestError where there is no such file, or where it is no text.
        """
        if data is None and not (self.path / SAMPLE).is_file():
            raise RequestError(f"{self.path} holds no {SAMPLE}; name your rows with --data FILE")
        name, kind, place = sources.find(data or self.path / SAMPLE)
        if kind != "text":
            raise RequestError(
                f"a benchmark takes its raw rows from text, {name} is none; name a TSV file, plain or .gz, with --data"
            )
        lines = (line for block in sources.blocks(name, place) for line in block.removesuffix(b"\n").split(b"\n"))
        some = list(itertools.islice(lines, count))
        return list(itertools.islice(itertools.cycle(some), count))
