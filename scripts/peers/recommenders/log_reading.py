"""The reader of logs, file to arrays, in turn on one core with the readers it is compared with.

Criteo's format: this project's own reader of that format alone. A log with columns of its own: pandas with a hash a
column. Rows come from scripts/synthesize_criteo.py and scripts/synthesize_log.py (200,000 users, 50,000 items, two
lists). All of a file is read in one process; peak memory is that of a process of its own that reads the file, or its
first quarter.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import zoo
from pipelines.core.progress import progress
from scripts.peers import harness, processes
from scripts.peers.recommenders.runs import synthesize
from zoo.recommenders.criteo import BUCKETS
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_log
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.data.schema_inference import infer

CHUNK_ROWS = 50_000
READER = "a schema's reader"


def with_pandas(log: Path, schema: Schema) -> Iterator[dict[str, Any]]:
    """Yields chunks of columns, hashed by pandas, lists split and hashed item by item, numbers scaled."""
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]

    numbers = {column.name: column for column in schema.of("number")}
    categories = list(schema.of("category", "categories"))
    kinds = {**dict.fromkeys(numbers, np.float64), **dict.fromkeys((column.name for column in categories), str)}
    for chunk in pd.read_csv(log, usecols=list(kinds), dtype=kinds, chunksize=CHUNK_ROWS):
        ids = []
        for category in categories:
            buckets = int(category.encoding.get("buckets", 0)) or len(category.encoding["values"])
            texts = chunk[category.name].fillna("")
            if category.kind == "categories":
                items = texts.str.split(category.separator).str[-category.length :]
                lengths = items.str.len().to_numpy()
                flat = pd.util.hash_array(np.concatenate(items.to_numpy()).astype(object)) % buckets
                rows = np.repeat(np.arange(len(chunk)), lengths)
                place = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                column_ids = np.zeros((len(chunk), category.length), np.int32)
                column_ids[rows, place] = 1 + flat
            else:
                column_ids = (1 + pd.util.hash_array(texts.to_numpy(object)) % buckets).astype(np.int32)[:, None]
            ids.append(column_ids)
        x = chunk[list(numbers)].to_numpy()
        low, high = np.nanmin(x, axis=0), np.nanmax(x, axis=0)
        scaled = np.nan_to_num((x - low) / np.maximum(high - low, 1e-9))
        yield {
            "ids": np.concatenate(ids, axis=1),
            "numbers": np.concatenate([scaled, np.isnan(x)], axis=1).astype(np.float32),
        }


def readers(shape: str, log: Path, schema: Path) -> dict[str, Callable[[], int]]:
    """Returns readers of a file of this shape by name, the peer first; a reader returns its number of rows."""
    features = Features(Schema.load(schema))
    own = {READER: lambda: sum(map(len, features.read(str(log))))}
    if shape == "criteo":
        lines = Features.from_json(zoo.load("wide-deep-criteo").preprocessing)
        return {"read_rows": lambda: sum(map(len, lines.read(str(log)))), **own}
    return {"pandas": lambda: sum(len(chunk["ids"]) for chunk in with_pandas(log, features.schema)), **own}


def prepare(shape: str, folder: Path, count: int) -> tuple[Path, Path]:
    """Writes a log of this shape and its schema; Criteo's categories are hashed."""
    if shape == "criteo":
        log = folder / "criteo.tsv"
        synthesize("criteo", log, count)
    else:
        log = folder / "own.csv"
        synthesize("log", log, count, "--users", 200_000, "--items", 50_000)
    schema = infer(open_log(log))
    if shape == "criteo":
        hashed = {"type": "hash", "buckets": BUCKETS}
        columns = (replace(field, encoding=hashed) if field.kind == "category" else field for field in schema.columns)
        schema = replace(schema, columns=tuple(columns))
    return log, schema.save(folder / f"{shape}.json")


def compare(shape: str, folder: Path, count: int, rounds: int, advance: harness.Advance) -> dict[str, Any]:
    """Compares the readers on one shape; see `measure`."""
    log, schema = prepare(shape, folder, count)
    seconds: dict[str, list[float]] = {}
    opened = readers(shape, log, schema)  # once, as a model is
    for number in range(rounds + 1):
        for way, read in opened.items():
            start = time.perf_counter()
            assert read() == count
            if number:  # the first fills caches
                seconds.setdefault(way, []).append(time.perf_counter() - start)
        advance(2)
    other = next(iter(seconds))
    with log.open("rb") as whole, (quarter := log.with_stem("quarter")).open("wb") as part:
        part.write(whole.read(log.stat().st_size // 4).rpartition(b"\n")[0] + b"\n")
    run = [sys.executable, harness.ROOT / "scripts" / "peers", "log-reading", "--read", schema]
    times = {way: harness.median(taken) for way, taken in seconds.items()}
    return {
        "shape": shape,
        "megabytes": round(log.stat().st_size / 1e6, 1),
        "results": [
            {
                "way": way,
                "seconds": times[way]["median"],
                "spread": times[way]["spread"],
                "rows_per_second": round(count / float(np.median(taken))),
            }
            for way, taken in seconds.items()
        ],
        "over": {other: harness.ratio(seconds[other], seconds[READER], 2)},
        "peak_memory_mb": [round(processes.run([*run, path]).peak_mb, 1) for path in (quarter, log)],
    }


def options(parser: harness.Parser) -> None:
    """Adds the options."""
    parser.count("--rows", 400_000, "rows of each shape", least=4)
    parser.count("--rounds", 9, "turns of each reader")
    parser.add_argument("--read", nargs=2, metavar=("SCHEMA", "LOG"), help="read one log and end, to measure memory")


def measure(args: Any) -> dict[str, Any] | None:
    """Compares the readers.

    Returns:
        {"rows", "shapes": [{"shape", "megabytes", "results": [{"way", "seconds", "spread", "rows_per_second"}], "over":
        median of the ratios within the rounds, "peak_memory_mb": [of a quarter, of all]}], "environment"}.
    """
    if args.read:
        schema, log = args.read
        sum(map(len, Features(Schema.load(schema)).read(log)))
        return None
    shapes, facts = ("criteo", "own"), harness.environment("pandas", rounds=args.rounds)
    with tempfile.TemporaryDirectory() as name, progress("runs", 4 * args.rounds) as advance:
        results = [compare(shape, Path(name), args.rows, args.rounds, advance) for shape in shapes]
    return {"rows": args.rows, "shapes": results, "environment": facts}
