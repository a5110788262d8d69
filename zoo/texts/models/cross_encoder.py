"""Pairs of texts to scores."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.data.tables import writing
from zoo.texts.importers.huggingface import SIGMOID
from zoo.texts.inference import TextPipeline
from zoo.texts.models.config import SCORES


class RankingPipeline(TextPipeline):
    """Pairs of texts to scores; see `zoo.pipeline`."""

    RESULT: ClassVar[str] = SCORES
    COUNT: ClassVar[int] = 2
    NOTHING: ClassVar[float] = float("nan")
    raw: bool = False

    @property
    def names(self) -> list[str]:
        """What the scores are of: "score" where there is one."""
        if self.form.labels == 1:
            return ["score"]
        told = self.folder.preprocessing.get("names", [])
        return told if len(set(told)) == self.form.labels else [f"score_{i}" for i in range(self.form.labels)]

    def activated(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits [n, labels] as scores: their sigmoid where the model's card says so."""
        if self.raw or self.folder.preprocessing.get("activation") != SIGMOID:
            return logits
        with np.errstate(over="ignore"):
            return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """[{name of a score: its value}, ...], one a pair."""
        found = self.activated(out[SCORES]).tolist()
        return [dict(zip(self.names, each, strict=True)) for each in found]

    def run(
        self,
        inputs: Any,
        output: str | Path,
        on_error: str = "skip",
        *,
        column: str | None = None,
        raw: bool = False,
    ) -> dict[str, Any]:
        """Scores for every pair of texts, in constant memory and input order: a table with the columns row (from 1) and
        score, or a score for each label.

        inputs: text files, two texts a line with a TAB between, tables with the columns `column` ("query,text"), "-"
        for stdin, or a list of pairs. output: .csv, .csv.gz, .jsonl or .parquet, "-" for CSV on stdout. The rest is as
        in `zoo.texts.models.sentence_encoder.SentencePipeline.run`; a row that is no pair has no scores (NaN).
        """
        columns = self.columns_of(column)
        chosen = copy.copy(self)  # for `raw` holds for this call alone
        chosen.raw = raw
        return chosen._run(inputs, output, on_error, columns)

    @contextlib.contextmanager
    def _writing(self, output: str | Path) -> Iterator[Any]:
        kinds = {"row": np.int64, **dict.fromkeys(self.names, np.float32)}
        with writing(output, kinds) as table:

            def write(logits: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
                found = self.activated(logits)
                columns = {name: np.ascontiguousarray(found[:, i]) for i, name in enumerate(self.names)}
                table({"row": rows, **columns})

            yield write
