"""Pipeline of recommenders: rows of a click log to click probabilities."""

from __future__ import annotations

import abc
import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core import machine
from pipelines.core.batches import Batch, cut, joined
from pipelines.core.errors import RequestError
from pipelines.core.files import refuse_names
from pipelines.core.ordered_map import ordered_map
from pipelines.core.progress import progress
from pipelines.data.tables import writing
from pipelines.data.text import TextForm
from pipelines.engines.quickest import QuickestSession
from pipelines.engines.session import Session
from pipelines.models.pipeline import GraphPipeline
from pipelines.models.protocols import NoRow
from zoo.recommenders.data.row_errors import ErrorLog, timed

if TYPE_CHECKING:
    from pipelines.kernels.recommenders.native import SharedInputs
    from zoo.recommenders.data.logs import Log

# rows of a step of `run`: enough to make the overhead of a step small, few enough for the cache
ROWS_IN_FLIGHT = 4096
PROBABILITY = "probability"  # the output of a model of one label


class ClickPipeline(GraphPipeline):
    """Scores rows of a click log; see `zoo.pipeline`. Subclasses read and encode the rows.

    Attributes:
        with_label: Whether rows begin with a label; None: decided by the first row.
        grouped_by: Column whose values group rows for GAUC; "": none.
        outputs: {output of the model with the probability of a label: the label}.
    """

    PARTS: ClassVar[str] = "rows"
    with_label: bool | None = None
    grouped_by: str = ""
    outputs: Mapping[str, str] = MappingProxyType({PROBABILITY: "click"})

    @property
    def columns(self) -> dict[str, Any]:
        """Columns that `run` writes: {name: dtype}."""
        return {"row": np.int64, **dict.fromkeys(self.outputs, np.float32)}

    def read_columns(self, names: Sequence[str]) -> None:
        """Chooses the column of the users, by which `evaluate` groups rows for GAUC.

        Args:
            names: The column.

        Raises:
            RequestError: There are several.
        """
        if len(names) != 1:
            raise RequestError(f"found the columns {', '.join(names)}, expected one: that of the users, for GAUC")
        self.grouped_by = names[0]

    @abc.abstractmethod
    def typical_row(self) -> Any:
        """Returns a raw row with common values; the user's own rows are not stored with a model."""

    @abc.abstractmethod
    def rows(
        self,
        inputs: Any,
        on_error: str = "raise",
        errors: ErrorLog | None = None,
        batch_rows: int = 65536,
        seconds: defaultdict[str, float] | None = None,
        labelled: bool = False,
        keep: Sequence[str] = (),
    ) -> Iterator[Any]:
        """Reads and encodes rows as a stream in constant memory.

        Args:
            inputs: Source of the rows.
            on_error: "raise", or "skip" to leave out faulty rows.
            errors: Counts the rows left out.
            batch_rows: Rows of a batch; the last batch may have fewer.
            seconds: "read" is increased by the seconds that the sources took.
            labelled: Whether labels are required; rows without a label 0 or 1 are then faulty.
            keep: Columns of the log whose texts are read as well.

        Returns:
            Batches with a length, slicing and concatenation, and with labels, float32 [n] or None, index, int64 [n],
            the 0-based positions in the input, and kept, object [n, columns of `keep`] or None.
        """

    @abc.abstractmethod
    def encode(self, rows: Any) -> dict[str, NDArray[Any]]:
        """Encodes rows as the graph's inputs.

        Args:
            rows: Batch from `rows`, n rows.

        Returns:
            {input name: array [n, ...]}.
        """

    def weighted(self, data: Any) -> bool | None:
        """Tells whether labelled rows have the sample weights that the model was trained with.

        Args:
            data: Source of the rows.

        Returns:
            Whether they do; None for a model without a weight column.
        """
        return None

    @abc.abstractmethod
    def text_form(self, stream: Any) -> TextForm:
        """Returns how a text holds rows.

        Args:
            stream: Bytes of the text, read from their start.

        Returns:
            Form of the text: header and delimiter.
        """

    def log_of_first_row(self, stream: Any) -> Log | None:
        """Returns the log of a text whose first row has all columns.

        Args:
            stream: Bytes of the text, read from their start.

        Returns:
            The log with its columns; None where the columns are known otherwise.
        """
        return None

    def label_in(self, lines: Iterable[bytes] = (), columns: Sequence[str] = ()) -> bool | None:
        """Tells whether rows begin with a label. Give either lines or column names.

        Args:
            lines: Lines of a text file.
            columns: Column names of a table.

        Returns:
            Whether there is a label; None if this is unknown, or if the model decides it for every row.
        """
        return None

    def columns_of(self, names: Sequence[str]) -> list[str]:
        """Chooses the columns of a table that the model reads.

        Args:
            names: Names of all columns.

        Returns:
            Names of the columns to read.

        Raises:
            RequestError: Columns are missing.
        """
        return list(names)

    @property
    def headerless(self) -> bool:
        """Whether texts are rows alone, without a line that names their columns."""
        return False

    @property
    def parsed_columns(self) -> Sequence[str]:
        """Columns of rows of Python that are parsed natively; none where text is parsed faster."""
        return ()

    @property
    def separators(self) -> Mapping[str, str]:
        """Separators of the items of lists, by column."""
        return {}

    def files(self, source: str) -> list[str]:
        """See `ShardableRows`."""
        from zoo.recommenders.data import sources

        return [path for path, _ in sources.expand(source)]

    def part_of_log(self, path: Path, delimiter: str, columns: Sequence[str]) -> Log:
        """See `ShardableRows`."""
        from zoo.recommenders.data import logs, sources

        log = logs.Log(path, "csv" if delimiter else "jsonl", delimiter, tuple(columns), header=not delimiter)
        return logs.partitioned(log, sources.partition(str(path)))

    def write_no_rows(self, output: Path, left_out: int, *, keep: Any = None, **others: Any) -> dict[str, Any]:
        """See `ShardableRows`."""
        if others:
            raise NoRow(f"found no row to use with {', '.join(others)}", left_out)
        with writing(output, self.columns | dict.fromkeys(self._names(keep), str)):
            pass
        return {"rows": 0, "clicks": 0, "expected_clicks": 0.0, "skipped": left_out, "seconds": 0.0}

    def _names(self, keep: str | Sequence[str] | None) -> list[str]:
        """Names of columns to keep. Raises RequestError for a name of `columns`, or one that is given twice."""
        names = [name.strip() for name in keep.split(",")] if isinstance(keep, str) else list(keep or ())
        if wrong := [name for index, name in enumerate(names) if not name or name in (*self.columns, *names[:index])]:
            raise RequestError(
                f"found the column {wrong[0]!r} to keep; expected names that differ, also from "
                f"{' and '.join(self.columns)}"
            )
        return names

    def count_rows(self, inputs: Any, **options: Any) -> int:
        """Counts the rows of an input, including rows that would be left out.

        Args:
            inputs: Source of the rows.
            **options: Not used.

        Returns:
            Number of rows.
        """
        errors = ErrorLog()
        try:
            return sum(len(rows) for rows in self.rows(inputs, "skip", errors)) + errors.total
        except NoRow as error:
            return error.left_out

    @property
    @abc.abstractmethod
    def last_ids(self) -> NDArray[Any]:
        """The largest id of each column of `ids`."""

    def preprocess(self, raw: Any) -> dict[str, NDArray[Any]]:
        """Encodes rows, all in memory at once; `run` streams. Labels in the rows are ignored.

        Args:
            raw: Source of the rows, as in `rows`, but only a `Path` names a file.

        Returns:
            {"ids": int32 [n, columns], "numbers": float32 [n, numbers], ...}.

        Raises:
            RequestError: A row is faulty, or a text is no row.
        """
        rows = list(raw) if isinstance(raw, list | tuple | np.ndarray) else [raw]
        if rows and not (self.headerless and isinstance(rows[0], str) and "\t" in rows[0]):
            refuse_names(rows, "rows")
        parts = list(self.rows(raw))
        return self.encode(type(parts[0]).concatenate(parts))

    def predict(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Computes click probabilities.

        In int8, numbers outside their training range are clipped to it. Results for NaN, which no row produces, differ
        between engines.

        Args:
            batch: {"ids": int32 [n, columns], ...}, see `preprocess`.

        Returns:
            {"probability": float32 [n, 1], ...}; of several labels {"probability_LABEL": float32 [n, 1], ...}.

        Raises:
            RequestError: An id exceeds its table.
        """
        if self.engine != "native":
            self._check_ids(batch)
            return super().predict(batch)
        try:
            return super().predict(batch)
        except RequestError:  # the kernels check ids themselves, and count rows within a part of the batch
            self._check_ids(batch)
            raise

    def predict_shared(self, batch: Batch, shared: SharedInputs) -> dict[str, NDArray[Any]]:
        """Computes click probabilities of rows that have some inputs in common, as those of one user.

        Args:
            batch: See `predict`.
            shared: The inputs that are the same in all rows.

        Returns:
            As `predict`, bit for bit.
        """
        count = self.check(batch)
        if self.engine != "native":
            self._check_ids(batch)
        if count <= self.batch_size:
            return self.session.run_shared(batch, shared)
        return joined([self.session.run_shared(part, shared) for part in cut(batch, self.batch_size)])

    def _check_ids(self, batch: Batch) -> None:
        ids, last = batch.get("ids"), self.last_ids
        if (
            isinstance(ids, np.ndarray)
            and ids.dtype.kind in "iu"
            and ids.ndim == 2
            and ids.size
            and ids.shape[1] == len(last)
            and ((ids < 0) | (ids > last)).any()
        ):
            row, column = np.argwhere((ids < 0) | (ids > last))[0].tolist()
            raise RequestError(
                f"found id {ids[row, column]} in row {row}, column {column}; expected 0 to {last[column]}"
            )

    def postprocess(self, out: dict[str, NDArray[Any]]) -> list[dict[str, Any]]:
        """Converts outputs to results.

        Args:
            out: {"probability": float32 [n, 1], ...} from `predict`.

        Returns:
            [{"probability": float, "click": whether it is at least 0.5}, ...], one per row; of several labels
            {"probability_LABEL": float, "LABEL": whether it is at least 0.5, ...}.
        """
        columns: dict[str, list[Any]] = {}
        for name, label in self.outputs.items():
            columns[name] = out[name].ravel().tolist()
            columns[label] = [p >= 0.5 for p in columns[name]]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def probabilities(self, batch: Batch) -> NDArray[np.float32]:
        """Computes the probabilities of encoded rows.

        Args:
            batch: Inputs of the model, n rows.

        Returns:
            float32 [n]; of several labels [n, labels].
        """
        out = self.predict(batch)
        columns = [out[name].reshape(-1) for name in self.outputs]
        return np.asarray(columns[0]) if len(columns) == 1 else np.stack(columns, 1)

    def score(self, rows: Any) -> NDArray[np.float32]:
        """Computes the probabilities of every row.

        Args:
            rows: Batch from `rows`, n rows.

        Returns:
            See `probabilities`.
        """
        return self.probabilities(self.encode(rows))

    def run(
        self, inputs: Any, output: str | Path, on_error: str = "raise", *, keep: str | Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Scores any number of rows in constant memory.

        Writes the columns row (0-based position in the input), probability (probability_LABEL of every label, if there
        are several) and those of `keep`, in input order.
        `threads` threads score, each with a single-threaded session, while the calling thread reads, parses and writes.
        On a single CPU the calling thread does everything.

        Args:
            inputs: Source of the rows.
            output: File to write.
            on_error: "raise", or "skip" to leave out faulty rows.
            keep: Columns of the log that are written, too: names, or a text of names separated by commas. Missing
                values are empty.

        Returns:
            {"rows", "clicks" (rows with probability >= 0.5), "expected_clicks" (sum of the probabilities; both of the
            first label, and "labels" has those of every label, if there are several), "skipped",
            "seconds", "rows_per_second", "model_samples_per_second", "split_us", "engine", "precision"}; and
            "out_of_range", the ids that are no row of their table by column, if there are any. split_us has the
            microseconds per row spent to "read" (bytes or tables), "parse" (split, hash, normalize), in the "model"
            (per thread), to "write", and of the "wall" clock. The parts overlap, so their sum exceeds the wall clock
            time.

        Raises:
            RequestError: A row is faulty with "raise", the input has no usable row, or lacks a column.
        """
        errors, names = ErrorLog(), self._names(keep)
        count, clicks, expected = 0, np.zeros(len(self.outputs), np.int64), np.zeros(len(self.outputs))
        seconds: defaultdict[str, float] = defaultdict(float)
        size = self.batch_size * max(1, ROWS_IN_FLIGHT // self.batch_size)
        # freed at once; glibc then keeps freed blocks of up to this size for the next rows
        np.empty(16 << 20, np.uint8)
        with (
            writing(output, self.columns | dict.fromkeys(names, str)) as write,
            progress("scoring rows") as advance,
        ):
            start = time.perf_counter()
            batches = self.rows(inputs, on_error, errors, size, seconds, keep=names)
            encoded = timed(((rows, self.encode(rows)) for rows in batches), seconds, "parse")
            first = next(encoded)
            before = time.perf_counter()
            scorers = self._scorers({name: array[: self.batch_size] for name, array in first[1].items()})
            start += time.perf_counter() - before  # opening the model and choosing an engine is not scoring
            with closing(_scored(scorers, itertools.chain([first], encoded))) as scored:
                for rows, out, took in scored:
                    before, index = time.perf_counter(), rows.index
                    kept = {} if rows.kept is None else dict(zip(names, rows.kept.T.tolist(), strict=True))
                    probability = {name: out[name].reshape(-1) for name in self.outputs}
                    write({"row": index + self.first_row, **probability, **kept})
                    seconds["write"] += time.perf_counter() - before
                    seconds["model"] += took
                    count += len(index)
                    clicks += [int((p >= 0.5).sum()) for p in probability.values()]
                    expected += [p.sum(dtype=np.float64) for p in probability.values()]
                    advance(len(index))
        seconds["wall"] = time.perf_counter() - start
        seconds["parse"] -= seconds["read"]
        errors.warn()
        totals = zip(clicks.tolist(), expected.tolist(), strict=True)
        counted = [{"clicks": rows, "expected_clicks": round(total, 2)} for rows, total in totals]
        return {
            "rows": count,
            **counted[0],
            **({"labels": dict(zip(self.outputs.values(), counted, strict=True))} if len(counted) > 1 else {}),
            "skipped": errors.total,
            **({"out_of_range": dict(errors.outside)} if errors.outside else {}),
            "seconds": round(seconds["wall"], 3),
            "rows_per_second": round(count / seconds["wall"], 1),
            "model_samples_per_second": round(count * len(scorers) / seconds["model"], 1),
            "split_us": {
                name: round(1e6 * seconds[name] / count, 3) for name in ("read", "parse", "model", "write", "wall")
            },
            "engine": scorers[0].engine,
            "precision": self.precision,
        }

    def _scorers(self, batch: Batch) -> list[ClickPipeline]:
        """Returns one warmed-up pipeline per thread, each with a separate single-threaded session."""
        scorers = [self]
        if self.threads > 1:
            first = self._single_threaded()
            first.predict(batch)  # "auto" decides once for all
            others = [self._single_threaded(first.session) for _ in range(self.threads - 1)]
            scorers = [first, *others]
        for scorer in scorers:
            scorer.predict(batch)
        return scorers

    def _single_threaded(self, like: Session | None = None) -> ClickPipeline:
        """This pipeline with a single-threaded session; `like`: session whose choice of engines is reused."""
        scorer = copy.copy(self)
        scorer.threads = 1
        if isinstance(like, QuickestSession):
            scorer._session = like.sibling()
        else:
            scorer._open(self.requested, None)
        return scorer

    def calibration(self, data: Any, count: int, on_error: str = "raise") -> dict[str, NDArray[Any]]:
        """Reads the inputs for calibration.

        Args:
            data: Source of the rows.
            count: Number of rows; the first rows are used.
            on_error: "raise", or "skip" to leave out faulty rows.

        Returns:
            {input name: array [count, ...]}.
        """
        if self.grouped_by:
            raise RequestError("--column has no effect: the schema has the columns of calibration; leave it out")
        errors = ErrorLog()
        parts: list[Any] = []
        for rows in self.rows(data, on_error, errors):
            parts.append(rows[: count - sum(map(len, parts))])
            if sum(map(len, parts)) >= count:
                break
        errors.warn()
        return self.encode(type(parts[0]).concatenate(parts))


def _scored(
    scorers: Sequence[ClickPipeline], batches: Iterable[tuple[Any, Batch]]
) -> Generator[tuple[Any, Batch, float], None, None]:
    """Yields the rows of batches, their outputs and the seconds of the model, in order; idle scorers take batches."""
    idle: SimpleQueue[ClickPipeline] = SimpleQueue()
    for scorer in scorers:
        idle.put(scorer)

    def score(rows: tuple[Any, Batch]) -> tuple[Any, Batch, float]:
        scorer = idle.get()
        try:
            begin = time.perf_counter()
            out = scorer.predict(rows[1])
            return rows[0], out, time.perf_counter() - begin
        finally:
            idle.put(scorer)

    workers = 0 if len(scorers) == machine.cores() == 1 else len(scorers)
    with closing(ordered_map(score, batches, workers)) as scored:
        yield from scored
