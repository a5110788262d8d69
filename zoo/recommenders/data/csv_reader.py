"""Native readers of CSV and of Python rows: parse and encode in one pass, as `zoo.recommenders.data.features` does.

Input that the native parser declines is read by pyarrow, which reports the faults.
"""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from pipelines.kernels import extension
from zoo.recommenders.data import logs
from zoo.recommenders.data.cell_values import RAW_MISSING, formed
from zoo.recommenders.data.columns import times
from zoo.recommenders.data.encoding import Encoding, Field
from zoo.recommenders.data.logs import Log, OnBadRow, csv_batches

PAD = 64  # bytes that the parser may read behind the data
PIECE_BYTES = 1 << 19  # bytes parsed at once: they and their arrays stay in the cache
MAX_ROWS = 1 << 16  # rows that are parsed into one array
LOWEST, HIGHEST = -16, 16384  # whole numbers whose encoding is looked up
UNPARSED = ("id", "value", "gaps", "per-element")  # encodings that the parser does not know
MAX_PARSERS = 16  # that are kept for one model, of logs with different columns
CACHED_HEADER = 1 << 14  # bytes of a header whose names are cached
BOM, _FEED = b"\xef\xbb\xbf", ord("\n")


class ParsedRows(NamedTuple):
    """Parsed rows without faults, see `zoo.recommenders.data.encoding.Rows`; None for an absent column."""

    ids: NDArray[np.int32]
    numbers: NDArray[np.float32]
    scales: NDArray[np.float32]
    labels: NDArray[np.float32] | None
    weights: NDArray[np.float32] | None
    times: NDArray[np.float64] | None


# numbers that the parser does not scale: flat places int64 [m], columns int64 [m], values float64 [m]
PendingNumbers = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


class RowBatcher:
    """Joins the rows of the parser to batches.

    The parser writes into a scratch buffer that fits the cache; the rows are copied from there.

    Args:
        rows: Rows of a batch, at most `MAX_ROWS`.
        shape: Columns of ids, numbers and scales.
        finish: Called with every batch and the numbers that the parser did not scale.
    """

    def __init__(
        self, rows: int, shape: tuple[int, int, int], finish: Callable[[ParsedRows, PendingNumbers], None]
    ) -> None:
        self.rows, self.shape, self.finish = min(rows, MAX_ROWS), shape, finish
        self._scratch = self._new(0)
        self._begin()

    def _new(self, rows: int) -> list[NDArray[Any]]:
        kinds = zip((np.int32, np.float32, np.float32), self.shape, strict=True)
        return [np.empty((rows, width), kind) for kind, width in kinds]

    def _begin(self) -> None:
        self._arrays: list[NDArray[Any]] = []
        self.count = 0
        self._others: list[tuple[Any, ...]] = []  # labels, weights and times of each piece
        self._left: list[PendingNumbers] = []

    def scratch(self, rows: int) -> list[NDArray[Any]]:
        """Returns the scratch buffers of the parser.

        Args:
            rows: Number of rows; the buffers have at most `MAX_ROWS` rows.

        Returns:
            ids int32, numbers float32 and scales float32, [rows, columns] each; valid until `add`.
        """
        rows = min(rows, MAX_ROWS)
        if len(self._scratch[0]) < rows:
            self._scratch = self._new(rows)
        return self._scratch

    def add(self, arrays: Any) -> Iterator[ParsedRows]:
        """Adds the rows that the parser wrote into `scratch`.

        Args:
            arrays: Result of the parser.

        Returns:
            Full batches.
        """
        count, ids, numbers, scales, *others, places, columns, values = arrays
        encoded = self._scratch if ids is None else [ids, numbers, scales]  # or in memory of their own
        begin, width = 0, self.shape[1]
        while begin < count:
            self._arrays = self._arrays or self._new(self.rows)
            end = min(count, begin + self.rows - self.count)
            for array, source in zip(self._arrays, encoded, strict=True):
                array[self.count : self.count + end - begin] = source[begin:end]
            self._others.append(tuple(None if other is None else other[begin:end] for other in others))
            if len(places):
                here = (places >= begin * width) & (places < end * width)
                self._left.append((places[here] + (self.count - begin) * width, columns[here], values[here]))
            self.count, begin = self.count + end - begin, end
            if self.count == self.rows:
                yield from self.flush()

    def flush(self) -> Iterator[ParsedRows]:
        """Yields the remaining rows, if any."""
        if self.count:
            others = [None if cuts[0] is None else np.concatenate(cuts) for cuts in zip(*self._others, strict=True)]
            parsed = ParsedRows(*(array[: self.count] for array in self._arrays), *others)
            none = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)
            left: Any = tuple(map(np.concatenate, zip(*self._left, strict=True))) if self._left else none
            self.finish(parsed, left)
            self._begin()
            yield parsed


@lru_cache(64)
def _names(line: bytes, delimiter: str) -> tuple[str, ...]:
    """Returns the columns that pyarrow finds in a header; cached, because that takes longer than parsing a row."""
    options = pa.csv.ParseOptions(delimiter=delimiter)
    return tuple(pa.csv.read_csv(io.BytesIO(line), parse_options=options).column_names)


def parser_of(
    features: Encoding, columns: tuple[str, ...], names: Sequence[str], delimiter: str, form: str, isa: str = ""
) -> Any:
    """Returns the native parser of logs of these columns; parsers are kept with the encoding.

    Args:
        features: Encoding of the columns.
        columns: Columns of the log.
        names: Those to read.
        delimiter: Delimiter of the columns, ASCII.
        form: "quoted" or "unquoted".
        isa: Instruction set of the kernels, one of `pipelines.kernels.extension.isas`; "" for the fastest.

    Returns:
        `LogParser`. None without native code, for separators outside ASCII, and for schemas with the encodings "id",
        "value", "gaps" or "per-element" or with lists that skip unknown values.
    """
    key = (columns, tuple(names), delimiter, form, isa)
    try:
        return features.csv_parsers[key]
    except KeyError:
        parser = _new_parser(features, *key)
    if len(features.csv_parsers) >= MAX_PARSERS:
        features.csv_parsers.clear()
    features.csv_parsers[key] = parser
    return parser


def _new_parser(
    features: Encoding, columns: tuple[str, ...], names: tuple[str, ...], delimiter: str, form: str, isa: str
) -> Any:
    """See `parser_of`."""
    native = extension.native()
    encodings = [column.encoding for column in features.schema.columns]
    if any(encoding.get("type") in UNPARSED or encoding.get("skip_unknown") for encoding in encodings):
        return None
    if native is None or not all(column.separator.isascii() for column in features.schema.of("categories")):
        return None
    options = RAW_MISSING, *features.shape, isa, features.schema.canonical
    parser = native.LogParser(len(columns), delimiter, form, *options)
    supported = add_columns(parser, features, {name: index for index, name in enumerate(columns) if name in names})
    return parser if supported else None


@dataclass(frozen=True, eq=False)
class RowReader:
    """Native reader of rows of Python, {column: value} each.

    Attributes:
        features: Encoding of the columns.
        rows: The rows.
        parser: Native parser of the feature columns.
    """

    features: Encoding
    rows: list[dict[str, Any]]
    parser: Any

    @classmethod
    def of(cls, features: Encoding, rows: Any, isa: str = "") -> RowReader | None:
        """Creates the native reader of rows, if they and their schema are supported.

        Args:
            features: Encoding of the columns.
            rows: The rows.
            isa: See `parser_of`.

        Returns:
            The reader. None for sources other than a list of rows of which the first has all feature columns, and where
            `parser_of` has no parser.
        """
        if not isinstance(rows, list) or not rows or type(rows[0]) is not dict:
            return None
        names = features.schema.feature_names
        if not all(map(rows[0].__contains__, names)):
            return None
        parser = parser_of(features, names, names, ",", "quoted", isa) if names else None
        return None if parser is None else cls(features, rows, parser)

    def batches(self, size: int) -> Iterator[ParsedRows | list[dict[str, Any]]]:
        """Reads all rows in order.

        Args:
            size: Rows of a batch.

        Returns:
            Parsed batches; the rows themselves where a value is neither text, number, boolean, None nor a list of
            them, or may have a canonical form that the parser does not know.
        """
        for begin in range(0, len(self.rows), size):
            part = self.rows[begin : begin + size]
            widths = zip((np.int32, np.float32, np.float32), self.features.shape, strict=True)
            ids, numbers, scales = (np.empty((len(part), width), kind) for kind, width in widths)
            arrays = self.parser.parse_rows(part, self.features.schema.feature_names, ids, numbers, scales)
            if arrays is None:
                yield part
                continue
            parsed = ParsedRows(ids, numbers, scales, None, None, None)
            scale_pending(self.features, parsed, arrays[-3:])
            yield parsed


@dataclass(frozen=True, eq=False)
class CsvReader:
    """Native reader of one log.

    Attributes:
        features: Encoding of the columns.
        log: The log.
        names: Columns to read.
        parser: Native parser.
    """

    features: Encoding
    log: Log
    names: Sequence[str]
    parser: Any

    @classmethod
    def of(cls, features: Encoding, log: Log, names: Sequence[str], isa: str = "") -> CsvReader | None:
        """Creates the native reader of a log, if the log and its schema are supported.

        Args:
            features: Encoding of the columns.
            log: Log to read.
            names: Columns to read; all of them are in the log.
            isa: Instruction set of the kernels, one of `pipelines.kernels.extension.isas`; "" for the fastest.

        Returns:
            The reader. None without native code, for logs that are not CSV or have columns of a partition, for
            separators outside ASCII, for several labels, for a label with values other than 0 and 1, and where
            `parser_of` returns None.
        """
        if log.kind != "csv" or log.partition or not log.delimiter.isascii() or log.delimiter in '"\r\n':
            return None
        labels = [column for column in features.schema.of("label") if column.name in names]
        if len(labels) > 1 or any(column.positive for column in labels):
            return None
        form = "quoted" if log.header else "unquoted"
        parser = parser_of(features, log.columns, names, log.delimiter, form, isa)
        return None if parser is None else cls(features, log, names, parser)

    def batches(
        self, on_bad_row: OnBadRow | None, seconds: defaultdict[str, float], rows: int
    ) -> Iterator[ParsedRows | pa.RecordBatch]:
        """Reads all rows in order.

        Args:
            on_bad_row: Called with every row that is left out, see `Log.batches`; None: the first such row raises.
            seconds: "read" is increased by the seconds that reading the bytes of the file took.
            rows: Rows of a parsed batch; some batches have fewer.

        Returns:
            Parsed batches; for blocks that may have a fault, text columns as from `Log.batches`.

        Raises:
            RequestError: The log cannot be read to its end, or a row has another number of columns and `on_bad_row` is
                None.
        """
        most = len(self.log.place) + 1 if isinstance(self.log.place, bytes) else PIECE_BYTES

        def read(front: int) -> tuple[NDArray[np.uint8], int]:
            """Reads a piece of the file behind `front` free bytes; returns the buffer and the end of the data."""
            begin = time.perf_counter()
            step = min(PIECE_BYTES, logs.BLOCK, most)
            if len(buffers[0]) < front + step + PAD + 1:
                buffers[0] = np.zeros(front + step + PAD + 1, np.uint8)
            buffer = buffers.pop(0)
            buffers.append(buffer)
            end = front + int(stream.readinto(buffer[front : front + step].data))
            seconds["read"] += time.perf_counter() - begin
            return buffer, end

        buffers, batcher = [np.empty(0, np.uint8)] * 2, RowBatcher(rows, self.features.shape, self._finish)
        with self.log.reading():
            stream = self.log.stream()
            buffer, end = read(0)
            start = self._start(buffer[:end].tobytes())
            if start is None:
                yield from self.log.batches(self.names, on_bad_row, self.features.schema.forms)
                return
            begin, records, kept = start, int(self.log.header), 0
            while begin < end:
                left = end - begin
                following, following_end = read(left)
                last = following_end == left
                stop = end + (last and buffer[end - 1] != _FEED)  # a row may end with the file
                buffer[end:stop] = _FEED
                free = batcher.scratch((stop - begin) // len(self.log.columns) + 1)
                taken, met, arrays = self.parser.parse(buffer[begin:], stop - begin, *free)
                if last and taken < stop - begin:  # a quote that nothing closes
                    taken, arrays = left, None
                elif not taken and left >= 3 * logs.BLOCK:  # a quote inside a value, or a row that is longer
                    yield from batcher.flush()
                    yield from self._again(on_bad_row, records - self.log.header, kept)
                    return
                taken = min(taken, left)
                if arrays is None:
                    yield from batcher.flush()
                    text = b"\n" + buffer[begin : begin + taken].tobytes()  # the empty line keeps a BOM from being one
                    for batch in csv_batches(self.log, text, self.names, on_bad_row, records):
                        kept += batch.num_rows
                        yield formed(batch, self.features.schema.forms)
                elif arrays[0]:
                    kept += arrays[0]
                    yield from batcher.add(arrays)
                records += met
                tail = buffer[begin + taken : end]
                buffer, begin, end = following, left - len(tail), following_end
                buffer[begin:left] = tail
            yield from batcher.flush()

    def _again(self, bad: OnBadRow | None, rows: int, kept: int) -> Iterator[pa.RecordBatch]:
        """Reads the remaining rows with `Log.batches`, after its first `rows` rows, of which `kept` were returned."""

        def later(row: int, kind: str, message: str) -> None:
            assert bad is not None
            if row >= rows:
                bad(row, kind, message)

        for batch in self.log.batches(self.names, None if bad is None else later, self.features.schema.forms):
            yield batch[min(kept, batch.num_rows) :]
            kept -= min(kept, batch.num_rows)

    def _start(self, block: bytes) -> int | None:
        """Returns the offset of the first row; None for a header that pyarrow may read differently from `open_log`."""
        start = len(BOM) if block.startswith(BOM) else 0
        if not self.log.header:
            return start
        end = block.find(b"\n") + 1
        line = block[start:end]
        if not end or b"\r" in line.removesuffix(b"\n").removesuffix(b"\r") or line.count(b'"') % 2:
            return None
        names = _names if end <= CACHED_HEADER else _names.__wrapped__
        return end if names(line, self.log.delimiter) == self.log.columns else None

    def _finish(self, parsed: ParsedRows, left: PendingNumbers) -> None:
        """Scales the numbers that the parser did not scale, and fills columns that are not read with missing values."""
        scale_pending(self.features, parsed, left)
        for column in self.features.schema.of("timestamp"):
            if parsed.times is not None and native_unit(column.unit) != column.unit:
                seconds = times.seconds(parsed.times, column.unit)
                parsed.times[:] = np.where(np.isnan(seconds), -np.inf, seconds)
        features = self.features
        fields, numbers = self._unread
        for field in fields:
            parsed.ids[:, field.start : field.start + field.width] = field.last
            if field.scale >= 0:
                parsed.scales[:, field.scale] = 0
        for number in numbers:
            parsed.numbers[:, number] = features.fills[number]
            if number in features.indicators:
                parsed.numbers[:, len(features.numbers) + features.indicators.index(number)] = 1

    @cached_property
    def _unread(self) -> tuple[list[Field], list[int]]:
        """Fields and indices of numbers that are not read."""
        fields = [field for field in self.features.fields if field.name not in self.names]
        numbers = [number for number, column in enumerate(self.features.numbers) if column.name not in self.names]
        return fields, numbers


def native_unit(unit: str) -> str:
    """Returns the unit in which the native parser reads a timestamp; others it reads as plain numbers, in seconds.

    Args:
        unit: Unit of the schema; "" for other columns.

    Returns:
        The unit; "" for other columns.
    """
    return unit if unit in ("", "s", "ms", "text") else "s"


def add_columns(parser: Any, encoding: Encoding, places: Mapping[str, int]) -> bool:
    """Adds columns to a native parser.

    Args:
        parser: `LogParser` whose outputs have the shape of `encoding`.
        encoding: Encoding of the columns; the encoding "id" is not supported.
        places: {column: 0-based position in a row} of the columns to read.

    Returns:
        False if the parser cannot read them, because a scale exceeds float64.
    """
    for field in encoding.fields:
        if field.name not in places:
            continue
        place, how = places[field.name], field.column.encoding
        of_list: tuple[Any, ...] = ()
        if field.is_list:
            of_list = (field.width, field.column.separator, field.column.pooling == "max", field.scale)
            of_list += (True,) * field.is_sequence
        match how["type"]:
            case "hash":
                add = parser.hashed_list if field.is_list else parser.hashed
                add(place, field.start, how["buckets"], *of_list)
            case "hash-bucket":
                parser.hash_bucket(place, field.start, how["buckets"], field.last)
            case _:
                add = parser.vocabulary_list if field.is_list else parser.vocabulary
                add(place, field.start, field.values.to_pylist(), *of_list)
    tables = encoding.scaled_whole(LOWEST, HIGHEST)
    for index, column in enumerate(encoding.numbers):
        if column.name not in places:
            continue
        if np.isnan(tables[index]).any():
            return False
        gap = len(encoding.numbers) + encoding.indicators.index(index) if index in encoding.indicators else -1
        scaling, scale, fill = column.encoding["type"], _linear(column.encoding), float(encoding.fills[index])
        parser.number(places[column.name], index, gap, scaling, *scale, fill, tables[index])
    for column in encoding.schema.of("label", "weight", "timestamp"):
        if column.name in places:
            parser.real(places[column.name], native_unit(column.unit) or column.kind)
    return True


def scale_pending(encoding: Encoding, parsed: ParsedRows, pending: PendingNumbers) -> None:
    """Scales the numbers that the parser did not scale, in place.

    Args:
        encoding: Encoding of the rows.
        parsed: The rows.
        pending: Flat positions in their numbers, int64 [m], columns, int64 [m], and values, float64 [m].
    """
    places, columns, values = pending
    if len(places):
        scaled = encoding.scaled_mixed(columns, values).astype(np.float32)
        parsed.numbers.reshape(-1)[places] = np.where(np.isnan(scaled), encoding.fills[columns], scaled)


def _linear(encoding: Any) -> tuple[float, float]:
    """Returns offset and divisor of linear encodings; 0 and 1 for other encodings."""
    if encoding["type"] == "standard":
        return encoding["mean"], encoding["deviation"]
    if encoding["type"] == "min-max":
        return encoding["minimum"], encoding["maximum"] - encoding["minimum"]
    return 0.0, 1.0
