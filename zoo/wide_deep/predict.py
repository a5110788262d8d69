"""Raw Criteo rows to click probabilities."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.build import ModelFolder
from pipelines.engine import Batch
from pipelines.errors import RequestError
from pipelines.evaluate import compare_clicks
from pipelines.pipeline import Pipeline
from pipelines.progress import progress
from pipelines.tables import writing
from zoo.wide_deep import sources
from zoo.wide_deep.data import ErrorLog, Features, Rows, read_rows

SAMPLE = "sample.tsv.gz"  # synthetic rows that ship with the model

logger = logging.getLogger(__name__)


class ClickPipeline(Pipeline):
    """Scores rows in the Kaggle format; see `zoo.pipeline`."""

    def __init__(self, folder: ModelFolder, precision: str = "int8", engine: str = "auto", threads: int = 1, batch_size: int = 512) -> None:
        super().__init__(folder, precision, engine, threads, batch_size)
        self.features = Features.from_json(folder.preprocessing)

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Rows -> {"ids": int32 [n, fields] hash buckets, "numbers": float32 [n, numeric] in [0, 1]}; a label in the rows is left out.

        raw: whatever `zoo.wide_deep.data.read_rows` takes: a path, or a list of tab separated lines or of sequences of values. All of it in
        memory at once; `score` streams.
        """
        return self.features.encode(Rows.concatenate(list(read_rows(raw, **self.features.counts))))

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """See `Pipeline.predict`; the output is {"probability": float32 [n, 1]}. Raises RequestError for an id that is no bucket."""
        ids = batch.get("ids")
        if ids is not None and ids.size and not (ids.min() >= 0 and ids.max() < self.features.buckets):
            raise RequestError(f"ids are in [{ids.min()}, {ids.max()}]; wanted bucket numbers from 0 to {self.features.buckets - 1}")
        return super().predict(batch)

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """[{"probability": of a click, "click": whether that is at least 0.5}, ...], one per row."""
        return [{"probability": p, "click": p >= 0.5} for p in out["probability"].ravel().tolist()]

    def rows(self, inputs: Any, on_error: str = "raise", errors: ErrorLog | None = None) -> Iterator[Rows]:
        """Read rows as this model wants them, in constant memory; see `read_rows`."""
        return read_rows(inputs, on_error=on_error, errors=errors, **self.features.counts)

    def score(self, rows: Rows) -> NDArray[np.float32]:
        """Click probability of each row, float32 [n]."""
        return np.asarray(self.predict(self.features.encode(rows))["probability"].reshape(-1))

    @property
    def input_ports(self) -> dict[str, tuple[np.dtype[Any], Sequence[int | None]]]:
        """See `Pipeline.input_ports`."""
        return {
            "ids": (np.dtype(np.int32), (None, self.features.categorical)),
            "numbers": (np.dtype(np.float32), (None, self.features.numeric)),
        }

    def run(self, inputs: Any, output: str | Path, on_error: str = "raise") -> dict[str, Any]:
        """Score rows of any number in constant memory; writes columns row (0-based position in the input) and probability, in input order.

        Returns {"rows", "clicks" (rows with probability >= 0.5), "expected_clicks" (sum of the probabilities), "skipped", "seconds",
        "rows_per_second", "model_samples_per_second", "engine", "precision"}.
        """
        errors = ErrorLog()
        count = clicks = 0
        expected = model_seconds = 0.0
        with writing(output, {"row": np.int64, "probability": np.float32}) as write, progress("scoring rows") as advance:
            start = time.perf_counter()
            for rows in self.rows(inputs, on_error, errors):
                batch = self.features.encode(rows)
                before = time.perf_counter()
                if count == 0:  # opening the model and choosing an engine is not scoring
                    self.session({name: array[: self.batch_size] for name, array in batch.items()})
                    start += time.perf_counter() - before
                    before = time.perf_counter()
                probability = self.predict(batch)["probability"].reshape(-1)
                model_seconds += time.perf_counter() - before
                write({"row": rows.index, "probability": probability})
                count += len(rows)
                clicks += int((probability >= 0.5).sum())
                expected += float(probability.sum(dtype=np.float64))
                advance(len(rows))
        seconds = time.perf_counter() - start
        if errors.total:
            logger.warning("%s", errors)
        return {
            "rows": count,
            "clicks": clicks,
            "expected_clicks": round(expected, 2),
            "skipped": errors.total,
            "seconds": round(seconds, 3),
            "rows_per_second": round(count / seconds, 1),
            "model_samples_per_second": round(count / model_seconds, 1) if model_seconds else 0.0,
            "engine": self.engine,
            "precision": self.precision,
        }

    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """The first `count` rows of `data` as model inputs, to calibrate on."""
        errors = ErrorLog()
        parts: list[Rows] = []
        for rows in self.rows(data, on_error, errors):
            parts.append(rows[: count - sum(map(len, parts))])
            if sum(map(len, parts)) >= count:
                break
        if errors.total:
            logger.warning("%s", errors)
        return self.features.encode(Rows.concatenate(parts))

    def example(self, count: int, data: str | Path | None = None) -> list[bytes]:
        """`count` raw rows (tab separated lines) for a benchmark, from a text file or the sample that ships, repeated if need be.

        Raises RequestError where there is no such file, or where it is no text.
        """
        if data is None and not (self.path / SAMPLE).is_file():
            raise RequestError(f"{self.path} holds no {SAMPLE}; name your rows with --data FILE")
        name, kind, place = sources.find(data or self.path / SAMPLE)
        if kind != "text":
            raise RequestError(f"a benchmark takes its raw rows from text, {name} is none; name a TSV file, plain or .gz, with --data")
        lines = (line for block in sources.blocks(name, place) for line in block.removesuffix(b"\n").split(b"\n"))
        some = list(itertools.islice(lines, count))
        return list(itertools.islice(itertools.cycle(some), count))


def evaluate(pipelines: Mapping[str, ClickPipeline], data: Any, on_error: str = "raise") -> dict[str, Any]:
    """Both precisions on the same labelled rows; see `pipelines.evaluate.compare_clicks`. Keys samples, clicks and skipped are added."""
    errors = ErrorLog()
    labels: list[NDArray[np.float32]] = []
    scores: dict[str, list[NDArray[np.float32]]] = {name: [] for name in pipelines}
    with progress("evaluating rows") as advance:
        for rows in next(iter(pipelines.values())).rows(data, on_error, errors):
            if rows.labels is None:
                raise RequestError("the rows have no label (39 columns); evaluation needs 40, the first of them 0 or 1")
            labels.append(rows.labels)
            for name, each in pipelines.items():
                scores[name].append(each.score(rows))
            advance(len(rows))
    if errors.total:
        logger.warning("%s", errors)
    truth = np.concatenate(labels) if labels else np.zeros(0, np.float32)
    compared = compare_clicks(truth, {name: np.concatenate(parts) for name, parts in scores.items()} if labels else {})
    return {"samples": len(truth), "clicks": int(truth.sum()), "skipped": errors.total, **compared}
