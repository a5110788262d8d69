"""Scores a log with pandas and onnxruntime: the script one writes without this project, to compare `zoo run` with.

    python pandas_script.py LOG -o scores.csv --model DIR [--factorize] [--onnx FILE] [-n ROWS]

Reads the log in chunks, encodes its columns as the model's card says, runs the graph in one thread, and writes row and
probability. A model with a schema reads a CSV with a header (vocabularies, numbers, lists); one without reads Criteo's
rows and hashes their categories with FarmHash. --factorize encodes each distinct value of a column only once a chunk.
--onnx takes another graph than DIR/fp32.onnx. Scores equal those of `zoo run --precision fp32`.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

Array = np.ndarray[Any, Any]

NUMBERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
CHUNK_ROWS = 50_000
BATCH = 512


def once_each(column: pd.Series, read: Callable[[pd.Series], Any]) -> Any:
    """Applies `read` to the distinct values alone."""
    codes, distinct = pd.factorize(column, use_na_sentinel=False)
    results = read(pd.Series(distinct))
    return tuple(part[codes] for part in results) if isinstance(results, tuple) else results[codes]


# -------------------------------------------------------------------------------------------------------- Criteo's rows


class CriteoRows:
    """Rows without a header: 13 numbers and 26 categories, after a label or not."""

    def __init__(self, preprocessing: dict[str, Any], factorize: bool) -> None:
        self.preprocessing, self.factorize = preprocessing, factorize

    def chunks(self, log: str, rows: int | None) -> Iterator[pd.DataFrame]:
        """Yields chunks of the file without its label."""
        columns = len(pd.read_csv(log, sep="\t", header=None, nrows=1).columns)
        names = [*NUMBERS, *CATEGORIES] if columns == 39 else ["label", *NUMBERS, *CATEGORIES]
        dtypes = {**dict.fromkeys(NUMBERS, np.float64), **dict.fromkeys(CATEGORIES, str)}
        form = {"sep": "\t", "header": None, "names": names, "quoting": csv.QUOTE_NONE}
        return iter(pd.read_csv(log, usecols=list(dtypes), dtype=dtypes, chunksize=CHUNK_ROWS, nrows=rows, **form))

    def hashed(self, column: pd.Series) -> Array:
        """Returns the bucket of every value."""
        import farmhash  # type: ignore[import-untyped, unused-ignore]

        buckets = self.preprocessing["buckets"]
        return np.array([farmhash.fingerprint64(value) % buckets for value in column], np.int32)

    def encode(self, chunk: pd.DataFrame) -> dict[str, Array]:
        """Returns the inputs of the graph."""
        low, high, fill = (np.array(self.preprocessing[key]) for key in ("lo", "hi", "fill"))
        numbers = np.log1p(chunk[NUMBERS].to_numpy().clip(min=0))
        numbers = (numbers.clip(low, high) - low) / np.where(high > low, high - low, 1)
        categories = chunk[CATEGORIES].fillna("")
        columns = (categories[name] for name in CATEGORIES)
        ids = [once_each(column, self.hashed) if self.factorize else self.hashed(column) for column in columns]
        return {
            "ids": np.stack(ids, axis=1),
            "numbers": np.where(np.isnan(numbers), fill, numbers).astype(np.float32),
        }


# -------------------------------------------------------------------------------------------------- columns of a schema


def look_up(column: pd.Series, vocabulary: dict[str, int]) -> Array:
    """Returns the id of every value: from 1 in the vocabulary, 0 if unknown, len(vocabulary) + 1 if missing."""
    ids = column.map(vocabulary)
    return np.asarray(ids.mask(column.isna(), len(vocabulary) + 1).fillna(0), np.int32)


def look_up_lists(column: pd.Series, vocabulary: dict[str, int], length: int, separator: str) -> tuple[Array, Array]:
    """Returns ids of the last items of every list, [n, length], and 1 / items."""
    ids, scales = np.full((len(column), length), len(vocabulary) + 1, np.int32), np.zeros(len(column), np.float32)
    for row, text in enumerate(column.fillna("")):
        items = [vocabulary.get(item.strip(), 0) for item in text.split(separator) if item.strip()][-length:]
        if items:
            ids[row, : len(items)], scales[row] = items, 1 / len(items)
    return ids, scales


def scale(x: Array, encoding: dict[str, Any]) -> Array:
    """Scales numbers as the schema says."""
    if encoding["type"] == "standard":
        return np.asarray(np.clip((x - encoding["mean"]) / encoding["deviation"], -8, 8))
    low, high = encoding["minimum"], encoding["maximum"]
    if encoding["type"] == "log1p":
        return np.asarray(np.clip(np.log1p(np.maximum(x - low, 0)) / np.log1p(high - low), 0, 1))
    if encoding["type"] == "min-max":
        return np.asarray(np.clip((x - low) / (high - low), 0, 1))
    raise ValueError(f"numbers encoded by {encoding['type']}; this script knows log1p, standard and min-max")


class SchemaColumns:
    """A CSV with the columns of a schema."""

    def __init__(self, preprocessing: dict[str, Any], factorize: bool) -> None:
        kinds = ("number", "category", "categories")
        self.columns = [column for column in preprocessing["schema"]["columns"] if column["kind"] in kinds]
        self.factorize = factorize

    def chunks(self, log: str, rows: int | None) -> Iterator[pd.DataFrame]:
        """Yields chunks of the file."""
        dtypes = {column["name"]: np.float64 if column["kind"] == "number" else str for column in self.columns}
        return iter(pd.read_csv(log, usecols=list(dtypes), dtype=dtypes, chunksize=CHUNK_ROWS, nrows=rows))

    def reader(self, column: dict[str, Any]) -> Callable[[pd.Series], Any]:
        """Returns the function from a column's texts to ids."""
        vocabulary = {value: index for index, value in enumerate(column["encoding"]["values"], 1)}
        if column["kind"] == "category":
            return lambda texts: look_up(texts, vocabulary)
        return lambda texts: look_up_lists(texts, vocabulary, column["length"], column["separator"])

    def encode(self, chunk: pd.DataFrame) -> dict[str, Array]:
        """Returns the inputs of the graph."""
        ids, numbers, missing, scales = [], [], [], []
        for column in self.columns:
            values = chunk[column["name"]]
            if column["kind"] == "number":
                x = values.to_numpy()
                numbers.append(np.nan_to_num(scale(x, column["encoding"])))
                missing += [np.isnan(x)] if column["missing"] else []
                continue
            read = self.reader(column)
            result = once_each(values, read) if self.factorize else read(values)
            if column["kind"] == "category":
                ids.append(result[:, None])
            else:
                ids.append(result[0])
                scales += [result[1]] if column["pooling"] == "mean" else []
        return {
            "ids": np.concatenate(ids, axis=1),
            "numbers": np.stack([*numbers, *missing], axis=1).astype(np.float32),
            "scales": np.stack(scales, axis=1),
        }


# --------------------------------------------------------------------------------------------------------------- scores


def open_session(graph: str | Path) -> ort.InferenceSession:
    """Opens a graph in one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        return ort.InferenceSession(str(graph), options)
    except Exception as error:  # onnxruntime raises its own kinds
        raise ValueError(f"cannot load {graph}: {error}") from error


def probabilities(session: ort.InferenceSession, inputs: dict[str, Array]) -> Array:
    """Returns the probabilities of a chunk of rows, in batches of `BATCH`."""
    names, count = [value.name for value in session.get_inputs()], len(inputs["ids"])
    batches = ({name: inputs[name][start : start + BATCH] for name in names} for start in range(0, count, BATCH))
    return np.concatenate([session.run(["probability"], batch)[0].ravel() for batch in batches])


def score(log: str, output: str, folder: Path, graph: str, factorize: bool, rows: int | None) -> None:
    """Writes the probability of every row."""
    preprocessing = json.loads((folder / "card.json").read_text())["preprocessing"]
    form = (SchemaColumns if "schema" in preprocessing else CriteoRows)(preprocessing, factorize)
    session = open_session(graph)
    for number, chunk in enumerate(form.chunks(log, rows)):
        scores = pd.DataFrame({"row": chunk.index, "probability": probabilities(session, form.encode(chunk))})
        scores.to_csv(output, mode="a" if number else "w", header=not number, index=False)


def main() -> None:
    """Parses the command line and scores the log."""
    parser = argparse.ArgumentParser(description="Scores a log with pandas and onnxruntime.")
    parser.add_argument("log", help="CSV with the schema's columns, or TSV in Criteo's format, with or without label")
    parser.add_argument("-o", "--output", required=True, help="CSV file of row and probability")
    parser.add_argument("--model", required=True, help="folder with card.json and fp32.onnx")
    parser.add_argument("--factorize", action="store_true", help="encode each distinct value once a chunk")
    parser.add_argument("--onnx", help="the graph (default fp32.onnx of the folder)")
    parser.add_argument("-n", "--rows", type=int, help="number of rows (default all)")
    args = parser.parse_args()
    folder = Path(args.model)
    try:
        graph = args.onnx or str(folder / "fp32.onnx")
        score(args.log, args.output, folder, graph, args.factorize, args.rows)
    except (OSError, ValueError, KeyError) as error:
        print(f"pandas_script: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
