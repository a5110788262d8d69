"""Score Criteo rows with pandas and onnxruntime: the script one writes without this project, to measure `zoo run`
against.

    python scripts/peers/recommenders/pandas_criteo.py ROWS.tsv -o scores.csv [--model DIR] [--factorize] [--onnx FILE]

Reads the rows in chunks, hashes every category with FarmHash, brings the numbers to [0, 1] as the model's card says,
runs the graph in one thread, and writes row and probability. --factorize hashes each distinct value of a column only
once a chunk. --onnx takes another graph than DIR/fp32.onnx, for instance an int8 one. Scores equal those of `zoo run
--precision fp32`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import farmhash  # type: ignore[import-untyped, unused-ignore]
import numpy as np
import onnxruntime as ort
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

Array = np.ndarray[Any, Any]

NUMBERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
CHUNK_ROWS = 50_000
BATCH = 512


def read(path: str) -> Iterator[pd.DataFrame]:
    """Chunks of the file; a label in front is left out."""
    columns = len(pd.read_csv(path, sep="\t", header=None, nrows=1).columns)
    names = [*NUMBERS, *CATEGORIES] if columns == 39 else ["label", *NUMBERS, *CATEGORIES]
    dtypes = {**dict.fromkeys(NUMBERS, np.float64), **dict.fromkeys(CATEGORIES, str)}
    yield from pd.read_csv(
        path,
        sep="\t",
        header=None,
        names=names,
        usecols=list(dtypes),
        dtype=dtypes,
        chunksize=CHUNK_ROWS,
        quoting=csv.QUOTE_NONE,
    )


def hash_one_by_one(column: pd.Series, buckets: int) -> Array:
    """The bucket of every value."""
    hashed = column.map(lambda value: farmhash.fingerprint64(value) % buckets)
    return np.asarray(hashed, np.int32)


def hash_distinct(column: pd.Series, buckets: int) -> Array:
    """The bucket of every value; each distinct one is hashed once."""
    codes, distinct = pd.factorize(column)
    hashed = np.array([farmhash.fingerprint64(value) % buckets for value in distinct], np.int32)
    return np.asarray(hashed[codes])


def main() -> None:
    parser = argparse.ArgumentParser(description="Score Criteo rows with pandas and onnxruntime.")
    parser.add_argument("rows", help="TSV file in the Kaggle format, with or without label")
    parser.add_argument("-o", "--output", required=True, help="CSV file of row and probability")
    parser.add_argument("--model", help="folder with card.json and fp32.onnx (default: that of wide-deep-criteo)")
    parser.add_argument("--factorize", action="store_true", help="hash each distinct value of a column once a chunk")
    parser.add_argument("--onnx", help="the graph (default fp32.onnx of the folder)")
    args = parser.parse_args()
    if args.model:
        folder = Path(args.model)
    else:
        import zoo

        folder = zoo.load("wide-deep-criteo").path
    try:
        score(args.rows, args.output, folder, args.onnx or str(folder / "fp32.onnx"), args.factorize)
    except (OSError, ValueError, KeyError) as error:
        print(f"criteo_obvious: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def score(rows: str, output: str, folder: Path, graph: str, factorize: bool) -> None:
    """Write the probability of every row."""
    hash_column = hash_distinct if factorize else hash_one_by_one
    preprocessing = json.loads((folder / "card.json").read_text())["preprocessing"]
    low, high, fill = (np.array(preprocessing[key]) for key in ("lo", "hi", "fill"))
    span = np.where(high > low, high - low, 1)

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(graph, options)
    except Exception as error:  # onnxruntime raises its own kinds
        raise ValueError(f"cannot load {graph}: {error}") from error

    first = True
    for chunk in read(rows):
        numbers = np.log1p(chunk[NUMBERS].to_numpy().clip(min=0))
        numbers = (numbers.clip(low, high) - low) / span
        numbers = np.where(np.isnan(numbers), fill, numbers).astype(np.float32)
        categories = chunk[CATEGORIES].fillna("")
        ids = np.stack([hash_column(categories[name], preprocessing["buckets"]) for name in CATEGORIES], axis=1)
        scores = [
            session.run(["probability"], {"ids": ids[at : at + BATCH], "numbers": numbers[at : at + BATCH]})[0].ravel()
            for at in range(0, len(chunk), BATCH)
        ]
        result = pd.DataFrame({"row": chunk.index, "probability": np.concatenate(scores)})
        result.to_csv(output, mode="w" if first else "a", header=first, index=False)
        first = False


if __name__ == "__main__":
    main()
