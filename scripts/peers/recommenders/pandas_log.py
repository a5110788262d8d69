"""Score a click log with pandas and onnxruntime: the script one writes without this project, to measure `zoo run`
against.

    python scripts/peers/recommenders/pandas_log.py log.csv -o scores.csv [--model DIR] [--factorize] [--onnx FILE] [-n ROWS]

Reads a CSV in chunks, encodes its columns as the schema in the model's card says (vocabularies, numbers, lists), runs
the graph in one thread, and writes row and probability. --factorize looks up each distinct value of a column, a list's
text among them, only once a chunk. --onnx takes another graph than DIR/fp32.onnx, for instance int8.onnx. Scores equal
those of `zoo run --precision fp32`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

Array = np.ndarray[Any, Any]

CHUNK_ROWS = 50_000
BATCH = 512


def look_up(column: pd.Series, known: dict[str, int]) -> Array:
    """The id of every value: from 1 on in the vocabulary, 0 of others, the one behind it where the value is missing."""
    found = column.map(known)
    return np.asarray(found.mask(column.isna(), len(known) + 1).fillna(0), np.int32)


def look_up_lists(column: pd.Series, known: dict[str, int], length: int, separator: str) -> tuple[Array, Array]:
    """Ids of the last items of every list, [n, length], and 1 / items."""
    ids, scales = np.full((len(column), length), len(known) + 1, np.int32), np.zeros(len(column), np.float32)
    for at, text in enumerate(column.fillna("")):
        items = [known.get(item.strip(), 0) for item in text.split(separator) if item.strip()][-length:]
        if items:
            ids[at, : len(items)], scales[at] = items, 1 / len(items)
    return ids, scales


def once_each(column: pd.Series, read: Callable[[pd.Series], Any]) -> Any:
    """`read` of the distinct values alone."""
    codes, distinct = pd.factorize(column, use_na_sentinel=False)
    found = read(pd.Series(distinct))
    return tuple(each[codes] for each in found) if isinstance(found, tuple) else found[codes]


def scale(x: Array, encoding: dict[str, Any]) -> Array:
    """Numbers as the schema says."""
    if encoding["type"] == "standard":
        return np.asarray(np.clip((x - encoding["mean"]) / encoding["deviation"], -8, 8))
    low, high = encoding["minimum"], encoding["maximum"]
    if encoding["type"] == "log1p":
        return np.asarray(np.clip(np.log1p(np.maximum(x - low, 0)) / np.log1p(high - low), 0, 1))
    if encoding["type"] == "min-max":
        return np.asarray(np.clip((x - low) / (high - low), 0, 1))
    raise ValueError(f"numbers encoded by {encoding['type']}; this script knows log1p, standard and min-max")


def encode(chunk: pd.DataFrame, columns: list[dict[str, Any]], factorize: bool) -> dict[str, Array]:
    """The graph's inputs."""
    ids, numbers, missing, scales = [], [], [], []
    for each in columns:
        values, encoding = chunk[each["name"]], each["encoding"]
        if each["kind"] == "number":
            x = values.to_numpy()
            numbers.append(np.nan_to_num(scale(x, encoding)))
            missing += [np.isnan(x)] if each["missing"] else []
            continue
        known = {value: at for at, value in enumerate(encoding["values"], 1)}
        if each["kind"] == "category":

            def read(some: pd.Series, known: dict[str, int] = known) -> Any:
                return look_up(some, known)
        else:
            shape = each["length"], each["separator"]

            def read(some: pd.Series, known: dict[str, int] = known, shape: tuple[int, str] = shape) -> Any:
                return look_up_lists(some, known, *shape)

        found = once_each(values, read) if factorize else read(values)
        if each["kind"] == "category":
            ids.append(found[:, None])
        else:
            ids.append(found[0])
            scales += [found[1]] if each["pooling"] == "mean" else []
    return {
        "ids": np.concatenate(ids, axis=1),
        "numbers": np.stack([*numbers, *missing], axis=1).astype(np.float32),
        "scales": np.stack(scales, axis=1),
    }


def score(log: str, output: str, folder: Path, graph: str, factorize: bool, rows: int | None) -> None:
    """Write the probability of every row."""
    schema = json.loads((folder / "card.json").read_text())["preprocessing"]["schema"]
    columns = [each for each in schema["columns"] if each["kind"] in ("number", "category", "categories")]
    dtypes = {each["name"]: np.float64 if each["kind"] == "number" else str for each in columns}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(graph, options)
    except Exception as error:  # onnxruntime raises its own kinds
        raise ValueError(f"cannot load {graph}: {error}") from error
    names = [each.name for each in session.get_inputs()]
    first = True
    for chunk in pd.read_csv(log, usecols=list(dtypes), dtype=dtypes, chunksize=CHUNK_ROWS, nrows=rows):
        feeds = encode(chunk, columns, factorize)
        scores = [
            session.run(["probability"], {name: feeds[name][at : at + BATCH] for name in names})[0].ravel()
            for at in range(0, len(chunk), BATCH)
        ]
        result = pd.DataFrame({"row": chunk.index, "probability": np.concatenate(scores)})
        result.to_csv(output, mode="w" if first else "a", header=first, index=False)
        first = False


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a click log with pandas and onnxruntime.")
    parser.add_argument("log", help="CSV with the schema's columns")
    parser.add_argument("-o", "--output", required=True, help="CSV file of row and probability")
    parser.add_argument("--model", required=True, help="folder with card.json and fp32.onnx")
    parser.add_argument("--factorize", action="store_true", help="look up each distinct value once a chunk")
    parser.add_argument("--onnx", help="the graph (default fp32.onnx of the folder)")
    parser.add_argument("-n", "--rows", type=int, help="only so many rows")
    args = parser.parse_args()
    folder = Path(args.model)
    try:
        graph = args.onnx or str(folder / "fp32.onnx")
        score(args.log, args.output, folder, graph, args.factorize, args.rows)
    except (OSError, ValueError, KeyError) as error:
        print(f"log_obvious: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
