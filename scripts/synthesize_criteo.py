"""Write synthetic rows in the Criteo format: for load tests, and as sample input that may be shipped.

    python scripts/synthesize_criteo.py -n 2000000 -o rows.tsv

A row is a label, 13 integers and 26 categories of 8 hex digits, tab separated, empty where missing. No value comes from
real rows. Public are the fields, the approximate share of empty values of a field, and the number of values of each
category in the Kaggle data (https://github.com/facebookresearch/dlrm prints them). Categories are skewed by Zipf's law,
numbers are log-logistic.

The label follows a planted logistic model with one weight per category value and one per number's logarithm. The
weights are the same for every seed, so rows of one seed can train a model that is tested on rows of another. The seed
draws the rows alone. Every block of rows has its own counter-based generator, so the first n rows of a seed are the
same bytes for every n.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from pipelines.core.errors import RequestError
from pipelines.core.files import replacing
from pipelines.core.progress import progress

Array = npt.NDArray[Any]

BLOCK = 16384  # rows with one random generator; another size gives other rows
ZIPF = 1.1
NEGATIVE = 0.1  # share of -1 in the second number, the only one with negative values

# Per number: share missing, median, spread of the logarithm, strength in the planted model.
NUMBERS = (
    (0.45, 1, 0.9, 0.20), (0.00, 3, 1.5, 0.05), (0.20, 6, 1.0, -0.10), (0.20, 5, 0.6, 0.10), (0.03, 2500, 1.2, -0.25),
    (0.22, 35, 1.0, -0.25), (0.04, 4, 1.0, 0.25), (0.00, 8, 0.8, 0.05), (0.04, 40, 1.0, 0.05), (0.45, 1, 0.5, 0.20),
    (0.04, 2, 0.6, 0.25), (0.76, 1, 0.8, 0.10), (0.20, 5, 0.8, -0.20),
)  # fmt: skip
# Per category: share missing, number of values, strength in the planted model.
CATEGORIES = (
    (0.00, 1_460, 0.20), (0.00, 583, 0.35), (0.03, 10_131_227, 0.40), (0.03, 2_202_608, 0.30), (0.00, 305, 0.20), (0.12, 24, 0.30),
    (0.00, 12_517, 0.25), (0.00, 633, 0.20), (0.00, 3, 0.35), (0.00, 93_145, 0.30), (0.00, 5_683, 0.30), (0.03, 8_351_593, 0.30),
    (0.00, 3_194, 0.30), (0.00, 27, 0.40), (0.00, 14_992, 0.25), (0.03, 5_461_306, 0.30), (0.00, 10, 0.45), (0.00, 5_652, 0.30),
    (0.44, 2_173, 0.25), (0.44, 4, 0.35), (0.03, 7_046_547, 0.30), (0.76, 18, 0.25), (0.00, 15, 0.40), (0.03, 286_181, 0.25),
    (0.44, 105, 0.35), (0.44, 142_572, 0.25),
)  # fmt: skip

_HEX = np.frombuffer(b"".join(b"%04x" % i for i in range(1 << 16)), "<u4")  # four digits as one word
_CALIBRATION = 2**64 - 1  # the key of the rows that set the click rate, which no seed reaches


def blocks(rows: int, seed: int, *, label: bool = True, click_rate: float = 0.22) -> Iterator[pa.Table]:
    """Yields tables of at most `BLOCK` rows: label (if asked for), 13 integers, 26 strings, null = missing."""
    intercept = _intercept(click_rate)
    for index, begin in enumerate(range(0, rows, BLOCK)):
        columns, logits, uniform = _draw(seed, index)
        if label:
            columns.insert(0, pa.array((uniform < _sigmoid(logits + intercept)).astype(np.int8)))
        yield pa.table(columns, [str(i) for i in range(len(columns))]).slice(0, rows - begin)


def _draw(seed: int, index: int) -> tuple[list[Any], Array, Array]:
    """Draws the columns of a block, its planted logits [BLOCK], and uniform numbers [BLOCK] that decide the labels."""
    random = np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))
    columns: list[Any] = []
    logits = np.zeros(BLOCK)
    for field, (missing, median, spread, strength) in enumerate(NUMBERS):
        absent, uniform = random.random((2, BLOCK))
        absent = absent < missing
        z = np.log(uniform + 2.0**-54) - np.log1p(-uniform)  # logistic
        value = np.minimum(median * np.exp(spread * z), 5e6).astype(np.int64)
        logits += np.where(absent, 0, strength * np.clip(z / 1.8, -2, 2))
        if field == 1:
            value = np.where(random.random(BLOCK) < NEGATIVE, -1, value)
        columns.append(pa.array(value, mask=absent))
    for field, (missing, size, strength) in enumerate(CATEGORIES):
        absent, uniform = random.random((2, BLOCK))
        absent = absent < missing
        # inverse of a continuous Zipf distribution on [1, size + 1)
        rank = ((1 + uniform * ((size + 1.0) ** (1 - ZIPF) - 1)) ** (1 / (1 - ZIPF))).astype(np.uint64)
        code = _mix((np.uint64(field) << np.uint64(32)) + rank)
        weight = (code & np.uint64(0xFFFFFFFF)) / 2.0**31 - 1  # uniform in [-1, 1), independent of the digits below
        logits += np.where(absent, 0, strength * np.sqrt(3) * weight)
        columns.append(_hexadecimal((code >> np.uint64(32)).astype(np.uint32), absent))
    return columns, logits, random.random(BLOCK)


def _mix(value: Array) -> Array:
    """Returns the finalizer of SplitMix64 (Steele, Lea, Flood 2014): a 64-bit hash of 64-bit integers."""
    value = (value + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Array, value ^ (value >> np.uint64(31)))


def _hexadecimal(values: Array, absent: Array) -> Any:
    """Returns uint32 [n] as an Arrow column of 8 hex digits, null where absent."""
    digits = np.stack([_HEX[values >> np.uint32(16)], _HEX[values & np.uint32(0xFFFF)]], axis=1)
    return pa.array(digits.view("S8").ravel(), pa.binary(), mask=absent).cast(pa.string())


def _sigmoid(logits: Array) -> Array:
    return cast(Array, 1 / (1 + np.exp(-logits)))


def _intercept(click_rate: float) -> float:
    """Returns the constant that makes the mean probability `click_rate`, by bisection on rows that are never written."""
    logits = np.concatenate([_draw(_CALIBRATION, index)[1] for index in range(2)])
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _sigmoid(logits + middle).mean() < click_rate else (low, middle)
    return (low + high) / 2


def write(file: BinaryIO, rows: int, seed: int, *, label: bool = True, click_rate: float = 0.22) -> None:
    """Writes `rows` rows to an open binary file, with progress on stderr."""
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with progress("rows", rows) as advance:
        for table in blocks(rows, seed, label=label, click_rate=click_rate):
            text = pa.BufferOutputStream()
            pyarrow.csv.write_csv(table, text, options)
            file.write(text.getvalue())
            advance(len(table))


def main() -> None:
    """Parses the command line and writes the rows."""
    parser = argparse.ArgumentParser(description="Write synthetic rows in the Criteo format.")
    parser.add_argument("-n", "--rows", type=int, required=True, help="how many")
    parser.add_argument("-o", "--output", required=True, help="file; packed if it ends in .gz; - is stdout")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--no-label", action="store_true", help="39 columns instead of 40")
    parser.add_argument("--click-rate", type=float, default=0.22, help="mean of the label (default 0.22)")
    args = parser.parse_args()
    if args.rows < 1 or not 0 <= args.seed < _CALIBRATION or not 0 < args.click_rate < 1:
        parser.error("expected at least 1 row, a seed from 0 to 2^64 - 2 and a click rate between 0 and 1")
    settings: dict[str, Any] = {"label": not args.no_label, "click_rate": args.click_rate}
    try:
        if args.output == "-":
            write(sys.stdout.buffer, args.rows, args.seed, **settings)
            sys.stdout.flush()
            return
        with replacing(args.output) as path, contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(path.open("wb"))
            if args.output.endswith(".gz"):  # neither name nor time inside: same rows, same bytes
                file = stack.enter_context(gzip.GzipFile("", "wb", 3, file, mtime=0))
            write(file, args.rows, args.seed, **settings)
    except RequestError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader has enough; keep the interpreter from flushing again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
