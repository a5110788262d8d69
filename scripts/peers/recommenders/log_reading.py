"""Time the reader of click logs, file to arrays, in turn on one core with the readers it stands beside: of the Criteo
format this project's own reader of that format alone; of a log with columns of its own pandas with a hash a column.

    python scripts/peers/recommenders/log_reading.py [-n 400000] [--rounds 9] [-o FILE]

Rows come from scripts/synthesize_criteo.py and scripts/synthesize_log.py (200,000 users, 50,000 items, two lists). What
is timed is all of a file in one process; peak memory is that of a process of its own that reads the file, or its first
quarter.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from pipelines.core import files, machine
from pipelines.core.errors import RequestError
from pipelines.core.progress import progress
from scripts.peers import harness
from zoo.recommenders.criteo.data import BUCKETS, read_rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.logs import open_log
from zoo.recommenders.data.schema import Schema
from zoo.recommenders.data.schema_inference import infer

SCRIPTS = Path(__file__).resolve().parents[2]
CHUNK_ROWS = 50_000
READER = "a schema's reader"


def with_pandas(log: Path, schema: Schema) -> Iterator[dict[str, Any]]:
    """The obvious code: chunks of columns, hashed by pandas, lists split and hashed item by item, numbers scaled."""
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]

    numbers = {each.name: each for each in schema.of("number")}
    others = [each for each in schema.of("category", "categories")]
    kinds = {**dict.fromkeys(numbers, np.float64), **dict.fromkeys((each.name for each in others), str)}
    for chunk in pd.read_csv(log, usecols=list(kinds), dtype=kinds, chunksize=CHUNK_ROWS):
        ids = []
        for each in others:
            encoding = each.encoding
            buckets = int(encoding.get("buckets", 0)) or len(encoding["values"])
            texts = chunk[each.name].fillna("")
            if each.kind == "categories":
                items = texts.str.split(each.separator).str[-each.length :]
                lengths = items.str.len().to_numpy()
                flat = pd.util.hash_array(np.concatenate(items.to_numpy()).astype(object)) % buckets
                rows = np.repeat(np.arange(len(chunk)), lengths)
                place = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                found = np.zeros((len(chunk), each.length), np.int32)
                found[rows, place] = 1 + flat
            else:
                found = (1 + pd.util.hash_array(texts.to_numpy(object)) % buckets).astype(np.int32)[:, None]
            ids.append(found)
        x = chunk[list(numbers)].to_numpy()
        low, high = np.nanmin(x, axis=0), np.nanmax(x, axis=0)
        scaled = np.nan_to_num((x - low) / np.maximum(high - low, 1e-9))
        yield {
            "ids": np.concatenate(ids, axis=1),
            "numbers": np.concatenate([scaled, np.isnan(x)], axis=1).astype(np.float32),
        }


def ways(shape: str, log: Path, schema: Path) -> dict[str, Callable[[], int]]:
    """What reads a file of this shape, by name; each returns how many rows there were."""
    features = Features(Schema.load(schema))
    ours = {READER: lambda: sum(map(len, features.read(str(log))))}
    if shape == "criteo":
        return {"read_rows": lambda: sum(map(len, read_rows(str(log)))), **ours}
    return {"pandas": lambda: sum(len(each["ids"]) for each in with_pandas(log, features.schema)), **ours}


def compare(count: int, rounds: int) -> dict[str, Any]:
    """Both shapes. Returns {"rows", "shapes": [{"shape", "megabytes", "results": [{"way", "seconds", "spread",
    "rows_per_second"}], "over": median of the ratios within the rounds, "peak_memory_mb": [of a quarter, of all]}],
    "environment"}. Raises RequestError for fewer than four rows or one round.
    """
    if count < 4 or rounds < 1:
        raise RequestError(f"found {count} rows and {rounds} rounds, wanted 4 and 1 or more")
    shapes = []
    with tempfile.TemporaryDirectory() as name, progress("runs", 4 * rounds) as advance:
        scratch = Path(name)
        for shape, made in (
            ("criteo", ["synthesize_criteo.py", "-n", count, "-o", scratch / "criteo.tsv"]),
            ("own", ["synthesize_log.py", scratch / "own.csv", "-n", count, "--users", 200_000, "--items", 50_000]),
        ):
            subprocess.run([sys.executable, SCRIPTS / str(made[0]), *map(str, made[1:])], check=True)
            (log,) = scratch.glob(f"{shape}.?sv")
            found = infer(open_log(log))
            if shape == "criteo":  # its categories are hashed, each into as many buckets
                hashed = {"type": "hash", "buckets": BUCKETS}
                columns = (
                    replace(each, encoding=hashed) if each.kind == "category" else each for each in found.columns
                )
                found = replace(found, columns=tuple(columns))
            schema = found.save(scratch / f"{shape}.json")
            seconds: dict[str, list[float]] = {}
            opened = ways(shape, log, schema)  # once, as a model is
            for _ in range(rounds + 1):
                for way, read in opened.items():
                    start = time.perf_counter()
                    assert read() == count
                    seconds.setdefault(way, []).append(time.perf_counter() - start)
                advance(2)
            timed = {way: np.array(each[1:]) for way, each in seconds.items()}  # the first fills caches
            other = next(iter(timed))
            with log.open("rb") as whole, (quarter := log.with_stem("quarter")).open("wb") as part:
                part.write(whole.read(log.stat().st_size // 4).rpartition(b"\n")[0] + b"\n")
            run = [sys.executable, __file__, "--read", str(schema)]
            shapes.append(
                {
                    "shape": shape,
                    "megabytes": round(log.stat().st_size / 1e6, 1),
                    "results": [
                        {
                            "way": way,
                            "seconds": round(float(np.median(each)), 3),
                            "spread": [round(float(each.min()), 3), round(float(each.max()), 3)],
                            "rows_per_second": round(count / float(np.median(each))),
                        }
                        for way, each in timed.items()
                    ],
                    "over": {other: round(float(np.median(timed[other] / timed[READER])), 2)},
                    "peak_memory_mb": [round(harness.timed([*run, str(each)])[2], 1) for each in (quarter, log)],
                }
            )
    where = machine.environment(threads=1, rounds=rounds, peers=harness.versions("pandas"))
    return {"rows": count, "shapes": shapes, "environment": where}


def table(report: dict[str, Any]) -> str:
    """The results as text."""
    lines = []
    for each in report["shapes"]:
        lines += [
            f"{each['shape']:8} {way['way']:18} {way['seconds']:8.3f} s {way['rows_per_second']:12,} rows/s"
            for way in each["results"]
        ]
        lines.append(f"{each['shape']:8} {READER} over {each['over']}, peak MB {each['peak_memory_mb']}")
    return "\n".join(lines)


def main() -> None:
    parser = harness.Parser(__doc__)
    parser.add_argument("-n", "--rows", default="400000", help="how many rows of each shape (default 400000)")
    parser.add_argument("--rounds", default="9", help="turns of each way (default 9)")
    parser.add_argument("--read", nargs=2, metavar=("SCHEMA", "LOG"), help="read one log and end, to measure memory")
    with harness.one_line("log_reading"):
        args = parser.parse_args()
        if args.read:
            schema, log = args.read
            sum(map(len, Features(Schema.load(schema)).read(log)))
            return
        (count, *_), (rounds, *_) = harness.numbers("rows", args.rows), harness.numbers("rounds", args.rounds)
        report = compare(count, rounds)
        if args.output:
            files.write_json(args.output, report)
        harness.show(report, table, args.json)


if __name__ == "__main__":
    main()
