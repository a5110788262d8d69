"""Imports frozen graphs, SavedModels and Keras models of feature columns as Wide & Deep model folders."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json, write_bytes, write_json
from pipelines.graph import io as onnx_graph
from pipelines.graph import query
from pipelines.models.hub import CARD
from pipelines.models.npz import write_npz
from pipelines.models.record import SAMPLES
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.line_reader import read_lines
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import Column as LogColumn
from zoo.recommenders.importers.tensorflow.columns import Network, optimize, read_graph
from zoo.recommenders.importers.tensorflow.expressions import Column, Emitter
from zoo.recommenders.importers.tensorflow.feature_schema import fitted, map_features
from zoo.recommenders.training.train import CALIBRATION_ROWS

GRAPH = "graph.pb"  # of a model folder: the graph that it was made of

logger = logging.getLogger(__name__)


def from_graph(
    path: str | Path,
    data: Any,
    output: str | Path,
    *,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Creates a model folder from a TensorFlow graph, except for its card.

    Args:
        path: Frozen GraphDef, or folder of a SavedModel, of feature columns.
        data: Rows of a log, see `zoo.recommenders.data.line_reader.read_lines`; the first `CALIBRATION_ROWS` become
            calibration.npz and determine the ranges of the numbers.
        output: New or empty folder.
        columns: Names of the columns of a row, see `mapped.ordered`.
        output_node: Node of the probability; None: the only one.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        Details of the card: preprocessing and weights.

    Raises:
        RequestError: The graph, the rows or the columns do not fit; nothing was written.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(f"found {output} in use, expected a new or empty folder; choose another with -o")
    with _quiet():
        graph = read_graph(path)
    network = optimize(graph, output_node)
    features = map_features(network, columns)
    rows = _first_rows(data, features, on_error)
    features = fitted(features, rows)
    output.mkdir(parents=True, exist_ok=True)
    write_bytes(output / GRAPH, graph.SerializeToString(deterministic=True))
    samples: dict[str, Any] = features.encode(next(features.encode_raw([rows])))
    write_npz(output / SAMPLES, samples)
    return {
        "preprocessing": features.to_json(),
        "weights": {"file": GRAPH, "output": network.output, "from": Path(path).name},
    }


def freeze_graph(folder: Path) -> dict[str, Any]:
    """Converts graph.pb of a folder from `from_graph` to fp32.onnx, and writes freeze.json.

    fp32.onnx has the inputs `ids`, int32 [batch, categories], and, if the graph reads numbers, `numbers`, float32
    [batch, numbers], and the output `probability`, float32 [batch, 1]. The id of a missing category is its number of
    buckets.

    Args:
        folder: Model folder with graph.pb and the card.

    Returns:
        Content of freeze.json: {"nodes": of the graph, used by the probability, and used without constants and inputs,
        "operators": of fp32.onnx, "bytes"}.

    Raises:
        RequestError: The card does not fit the graph.
    """
    card = read_json(folder / CARD)
    features, graph = Features.from_json(card.get("preprocessing")), read_graph(folder / GRAPH)
    network = optimize(graph, card.get("weights", {}).get("output"))
    converted = network_to_onnx(network, features)
    onnx_graph.save(converted, folder / "fp32.onnx")
    report = {
        "nodes": {**network.nodes, "fp32.onnx": len(converted.graph)},
        "operators": query.op_counts(converted),
        "bytes": {name: (folder / name).stat().st_size for name in (GRAPH, "fp32.onnx")},
    }
    write_json(folder / "freeze.json", report)
    return report


def network_to_onnx(network: Network, features: Features) -> ir.Model:
    """Converts a network to an ONNX model on encoded rows.

    Args:
        network: Network read by `columns.optimize`.
        features: Encoding of the rows.

    Returns:
        ONNX model.

    Raises:
        RequestError: The features belong to another network.
    """
    columns = {(number.log_name, _steps(number)): number for number in features.numbers}
    numbers: dict[Column, LogColumn] = {}
    wide = {feature: len(number.fill) for feature, number in network.numbers.items()}
    for column in network.columns:
        name = column.feature if wide[column.feature] == 1 else f"{column.feature}_{column.position + 1}"
        if (name, column.steps) in columns:
            numbers[column] = columns[name, column.steps]
    same = {field.name: field.column.encoding["buckets"] for field in features.fields} == network.fields
    if len(numbers) != len(network.columns) or len(numbers) != len(features.numbers) or not same:
        raise RequestError(f"the columns on the card are not those of {GRAPH}; freeze the graph again with --from-pb")
    order = sorted(numbers, key=lambda column: features.numbers.index(numbers[column]))
    bounds = {column: (numbers[column].encoding["minimum"], numbers[column].encoding["maximum"]) for column in order}
    return Emitter([field.name for field in features.fields], bounds).model(network.logit)


def _steps(column: LogColumn) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, column.encoding["steps"]))


def _first_rows(data: Any, features: Features, on_error: str) -> Rows:
    """Up to `CALIBRATION_ROWS` rows of `features.raw`."""
    errors = ErrorLog() if on_error == "skip" else None
    try:
        rows = next(read_lines(features.raw, data, errors=errors, batch_rows=CALIBRATION_ROWS))
    except RequestError as error:
        names = [column.name for column in features.raw.schema.columns if column.kind != "label"]
        fields = len(features.fields)
        expected = f"the graph reads {len(names) - fields} numbers and {fields} categories, in this order: "
        listed = ", ".join(names)
        raise RequestError(f"{error}; {expected}{listed if len(listed) < 400 else listed[:400] + ' ...'}") from error
    if errors is not None and errors.total:
        logger.warning("%s", errors)
    return rows


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses deprecation and progress messages of TensorFlow on stderr, from Python loggers and from C++."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("tensorflow", "tf2onnx"))}
    stderr = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        for logger, level in loggers.items():
            logger.setLevel(level)
