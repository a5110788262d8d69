"""Tables larger than memory: lookups a second beside a plain mapping of the same file and beside lmdb.

Random int8 rows lie in one file, and in lmdb under the number of their table and row. Every engine runs in its own
process with a memory limit (--memory, by cgroups of version 1 or 2, which needs root; 0: no limit). Engines look up
batches in turn; times are wall times. Ids are uniform, or follow rank^-1.05 with ranks in random order; no batch occurs
twice. The native kernels read rows from the file, past the page cache, and cache frequent rows (--rows-memory). The
mapping and lmdb have no read-ahead; the time of lmdb includes the copy of its rows into one array. The native results
must have the same bits with both, and the rows of lmdb the bytes of the file.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.analysis import markdown
from pipelines.core.errors import RequestError, ZooError
from pipelines.core.progress import progress
from pipelines.kernels.program_file import MappedFile
from pipelines.kernels.recommenders import native
from pipelines.kernels.recommenders.program import ClickProgram
from pipelines.kernels.recommenders.steps import QuantizedGather, Weighted
from pipelines.kernels.recommenders.steps.base import unread_tables
from pipelines.kernels.recommenders.tables.cached_tables import cached_tables
from pipelines.kernels.recommenders.tables.quantized_rows import SLACK, row_bytes
from scripts.peers import harness, processes
from scripts.peers.recommenders.tables import KINDS, ZIPF

TABLES, DATABASE = "tables.bin", "lmdb"
BITS, UNIT = 8, 1e-4
WRITTEN = 2**16  # rows at a time
OURS = "zoo"


@dataclass(frozen=True)
class Case:
    """Tables in a file, one after the other.

    Attributes:
        folder: Folder of the files.
        features: Number of tables.
        rows: Rows of each.
        width: Columns of each.
        size: Samples of a batch; each looks up a row of every table.
        kind: Kind of ids.
    """

    folder: Path
    features: int
    rows: int
    width: int
    size: int
    kind: str

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return row_bytes(self.width, BITS)

    @property
    def table_bytes(self) -> int:
        """Bytes of a table."""
        return self.rows * self.stride + SLACK

    def batches(self) -> Iterator[NDArray[np.int32]]:
        """Draws batches of ids without end, int32 [size, features]."""
        random, shape = np.random.default_rng(1), (self.size, self.features)
        if self.kind == "uniform":
            while True:
                yield random.integers(0, self.rows, shape, dtype=np.int32)
        cumulated = np.cumsum(np.arange(1, self.rows + 1) ** -ZIPF)
        places = random.permutation(self.rows).astype(np.int32)  # of a rank
        while True:
            yield places[np.searchsorted(cumulated, random.random(shape) * cumulated[-1], side="right")]

    def mapped_rows(self) -> list[NDArray[np.uint8]]:
        """Maps the tables, each uint8 [table_bytes]."""
        file = MappedFile.opened(self.folder / TABLES)
        file.madvise(mmap.MADV_RANDOM)
        return [
            np.ndarray((self.table_bytes,), np.uint8, file, index * self.table_bytes)  # type: ignore[call-overload]
            for index in range(self.features)
        ]

    def program(self) -> ClickProgram:
        """Returns lookups in all tables, and one weighted sum of their codes as result."""
        with unread_tables():
            gathers = [
                QuantizedGather(0, index * self.width, table, self.rows, self.width, BITS, UNIT, UNIT, index)
                for index, table in enumerate(self.mapped_rows())
            ]
            codes = self.features * self.width
            weights = np.random.default_rng(2).standard_normal(codes).astype(np.float32)
            steps = (*gathers, Weighted(0, 0, weights, 1))
            rows = np.full(self.features, self.rows, np.int32)
            return ClickProgram(rows, 0, 0, (("i2", codes), ("f4", 1)), steps, (1,))


def write_tables(case: Case) -> None:
    """Writes the file of the tables."""
    random = np.random.default_rng(0)
    with (case.folder / TABLES).open("wb") as file, progress("writing tables", case.features) as advance:
        for _ in range(case.features):
            for first in range(0, case.rows, WRITTEN):
                rows = random.integers(0, 256, (min(WRITTEN, case.rows - first), case.stride), np.uint8)
                rows[:, -4:] = random.integers(0, 2**14, (len(rows), 2), np.int16).view(np.uint8)
                file.write(rows.data)
            file.write(bytes(SLACK))
            advance(1)


def write_database(case: Case) -> None:
    """Writes the rows into lmdb, in the order of their keys."""
    import lmdb  # type: ignore[import-not-found]

    size = case.features * case.rows * (case.stride + 64) + 2**28
    with lmdb.open(str(case.folder / DATABASE), map_size=size, sync=False, writemap=True) as database:
        with progress("writing lmdb", case.features) as advance:
            for number, table in enumerate(case.mapped_rows()):
                rows = table[: case.rows * case.stride].reshape(case.rows, case.stride)
                keys = _keys(number, np.arange(case.rows))
                for first in range(0, case.rows, WRITTEN):
                    chosen = slice(first, first + WRITTEN)
                    pairs = zip(keys[chosen], map(bytes, rows[chosen]), strict=True)
                    with database.begin(write=True) as transaction, transaction.cursor() as cursor:
                        cursor.putmulti(pairs, append=True)
                advance(1)
        database.sync(True)


def _keys(number: int, rows: NDArray[Any]) -> list[bytes]:
    """Returns the keys of rows of a table, 8 bytes each."""
    data = (np.int64(number) << 32 | rows.astype(np.int64)).astype(">i8").tobytes()
    return [data[offset : offset + 8] for offset in range(0, len(data), 8)]


def _drop_pages(folder: Path) -> None:
    """Removes the files from the page cache, so that no engine reads pages that another process has paid for."""
    for path in (folder / TABLES, folder / DATABASE / "data.mdb"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


Look = Callable[[NDArray[np.int32]], Any]


def ours(case: Case, rows_memory: int) -> Look:
    """Opens lookups with a cache of frequently used rows."""
    program = case.program()
    made = native.click_program(program, cached=cached_tables(program, 0, rows_memory))
    return lambda ids: made(ids, None, None)


def mapping(case: Case, _: int) -> Look:
    """Opens the same lookups in the mapped file."""
    made = native.click_program(case.program())
    return lambda ids: made(ids, None, None)


def lmdb_rows(case: Case, _: int) -> Look:
    """Opens lmdb."""
    import lmdb

    database = lmdb.open(str(case.folder / DATABASE), readonly=True, lock=False, readahead=False)
    transaction = database.begin(buffers=True)
    numbers = np.arange(case.features, dtype=np.int64)

    def look(ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        data = (numbers << 32 | ids).astype(">i8").tobytes()
        rows = [transaction.get(data[offset : offset + 8]) for offset in range(0, len(data), 8)]
        return np.frombuffer(b"".join(rows), np.uint8).reshape(*ids.shape, case.stride)

    return look


ENGINES: dict[str, Callable[[Case, int], Look]] = {OURS: ours, "mapping": mapping, "lmdb": lmdb_rows}


class Engine:
    """An engine in a process of its own, under a limit of memory."""

    def __init__(self, name: str, case: Case, memory: int, rows_memory: int) -> None:
        self.name, self.case, self.memory, self.rows_memory = name, case, memory, rows_memory
        self.batches = case.batches()
        self.look: Look
        self.group: Path | None = None

    def open(self) -> None:
        """Limits the memory, and opens the tables."""
        if self.memory:
            self.group = processes.limit_memory(self.memory, f"{os.getppid()}-{self.name}")
        self.look = ENGINES[self.name](self.case, self.rows_memory)

    def begin(self, seconds: float) -> Any:
        """Looks the first batch up, and further ones for a time so that caches fill; returns the result of the first.

        Raises:
            ZooError: Rows are not those of the file.
        """
        ids = next(self.batches)
        first = np.array(self.look(ids))
        if first.ndim == 3:  # rows of bytes
            tables = self.case.mapped_rows()
            for index, table in enumerate(tables):
                rows = table[: self.case.rows * self.case.stride].reshape(self.case.rows, -1)
                if not np.array_equal(rows[ids[:8, index]], first[:8, index]):
                    raise ZooError("it returns other rows than the file has")
            first = np.zeros(0)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.look(next(self.batches))
        return first

    def turn(self) -> float:
        """Returns the lookups per second of one turn, by wall time; ids are drawn outside it."""
        count, seconds = 0, 0.0
        while seconds < harness.TURN_SECONDS or not count:
            ids = next(self.batches)
            start = time.perf_counter()
            self.look(ids)
            seconds += time.perf_counter() - start
            count += ids.size
        return count / seconds

    def peak(self) -> float:
        """Returns the largest memory of the process with its page cache, in MB; 0 without a limit."""
        return processes.peak_mb(self.group) if self.group else 0.0


def compare(case: Case, engines: list[str], memory: int, rows_memory: int, warm: int, rounds: int) -> dict[str, Any]:
    """Measures the engines on one kind of ids.

    Args:
        case: The tables.
        engines: Names of `ENGINES`.
        memory: Limit of every engine's memory, in 10^6 bytes; 0: none.
        rows_memory: Bytes for the rows that the native kernels keep.
        warm: Seconds of lookups before the first turn of each engine.
        rounds: Turns of each engine.

    Returns:
        {"ids", "lookups_per_second": median by engine, "ratios": over each other engine, "peak_mb", "left_out"}.

    Raises:
        ZooError: The native results differ.
    """
    _drop_pages(case.folder)
    with processes.Workers(case.folder) as workers, progress("rounds", rounds) as advance:
        for name in engines:
            workers.open(name, partial(Engine, name, case, memory, rows_memory))
        first = workers.ask_all("begin", warm)
        if OURS in first and "mapping" in first and first[OURS].tobytes() != first["mapping"].tobytes():
            raise ZooError("the native kernels give other results from the file than from its mapping")
        rates: dict[str, list[float]] = {name: [] for name in first}
        for _ in range(rounds):
            for name, rate in workers.ask_all("turn").items():
                rates[name].append(rate)
            advance(1)
        peaks = workers.ask_all("peak")
        rates = {name: rates[name] for name in peaks}
        left_out = workers.left_out
    processes.remove_limits(str(os.getpid()))
    return {
        "ids": case.kind,
        "lookups_per_second": {name: harness.median(rate, 0) for name, rate in rates.items()},
        "ratios": {
            name: harness.ratio(rates[OURS], rate) for name, rate in rates.items() if OURS in rates and name != OURS
        },
        "peak_mb": peaks,
        "left_out": left_out,
    }


def rendered(report: Mapping[str, Any], source: str) -> str:
    """Returns a report as a part of a page.

    Args:
        report: Content of the report.
        source: Machine and link of the report.
    """
    facts, rows = report["environment"], []
    for lookups in report["lookups"]:
        for name, rate in lookups["lookups_per_second"].items():
            ratio = lookups["ratios"].get(name)
            over = "" if ratio is None else f"{ratio:.1f}x"
            rows.append([lookups["ids"], name, f"{rate['median']:,.0f}", over, f"{lookups['peak_mb'][name]:,.0f}"])
    return (
        f"Lookups in {facts['table_gb']} GB of int8 tables on disk by `scripts/peers/recommenders/beyond_memory.py` "
        f"({source}): {facts['tables']} tables, batch size {facts['batch_size']}, wall time; an engine and its page "
        f"cache may take {facts['memory_mb']} MB. zoo caches {facts['rows_memory_mb']} MB of frequently "
        "used rows; mapping: the same file and kernels, memory-mapped. zipf: ids of Zipf's law with exponent "
        f"{facts['zipf']}.\n\n" + markdown.table(["ids", "engine", "lookups/s", "zoo over it", "peak MB"], rows)
    )


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.count("--features", 26, "tables")
    parser.count("--width", 64, "columns of a table")
    parser.count("--gigabytes", 3, "10^9 bytes of all tables")
    parser.count("--memory", 400, "10^6 bytes that an engine may take; 0: no limit", least=0)
    parser.count("--rows-memory", 230, "10^6 bytes for the rows that the native kernels keep")
    parser.count("--batch-size", 512, "samples of a batch")
    parser.count("--warm", 30, "seconds of lookups before the first turn of each engine")
    parser.names("--ids", "kind of ids", KINDS, ["zipf"])
    parser.names("--engines", "engine", ENGINES)
    parser.count("--rounds", 9, "turns of each engine")
    parser.work()


def measure(args: Any) -> dict[str, Any]:
    """Returns {"lookups": [`compare`], "environment"}."""
    rows = args.gigabytes * 10**9 // (args.features * row_bytes(args.width, BITS))
    if rows < WRITTEN:
        raise RequestError(f"found {rows} rows a table, expected {WRITTEN} or more: fewer --features, or more bytes")
    facts = harness.environment(
        "lmdb",
        rounds=args.rounds,
        batch_size=args.batch_size,
        table_gb=args.gigabytes,
        tables=args.features,
        memory_mb=args.memory,
        rows_memory_mb=args.rows_memory,
        zipf=ZIPF,
        clock="wall time",
    )
    with harness.folder(args.work) as folder:
        case = Case(folder, args.features, rows, args.width, args.batch_size, args.ids[0])
        if not (folder / TABLES).is_file():
            write_tables(case)
        if (folder / TABLES).stat().st_size != case.features * case.table_bytes:
            raise RequestError(f"found other tables in {folder}; name another folder with --work")
        left_out: dict[str, str] = {}
        if "lmdb" in args.engines and not (folder / DATABASE).is_dir():
            with harness.leave_out("lmdb", left_out):
                write_database(case)
        engines = [name for name in args.engines if name not in left_out]

        def one(kind: str) -> dict[str, Any]:
            variant = Case(folder, args.features, rows, args.width, args.batch_size, kind)
            result = compare(variant, engines, args.memory, args.rows_memory * 10**6, args.warm, args.rounds)
            return {**result, "left_out": left_out | result["left_out"]}

        return harness.gather("lookups", args.ids, one, args.output, facts)
