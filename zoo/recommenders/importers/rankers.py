"""Imports third-party ONNX rankers, with a schema of their log, as model folders.

Exports have one tensor per column (torch-rechub), or one matrix with all columns (DeepCTR-Torch, FuxiCTR).
`zoo.recommenders.importers.canonicalize` rewrites the graph on the inputs of `Features`; its structure determines the
family. Graphs that cannot be rewritten keep their operators, behind new operators that compute their original inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import copy_file, require_free
from pipelines.graph import edit, io, query, reference_session
from pipelines.graph.infer import infer_shapes
from pipelines.models.hub import CardFile
from pipelines.models.npz import write_npz
from pipelines.models.record import SAMPLES
from pipelines.rewrites import driver
from pipelines.rewrites.fold_batch_norm import FoldBatchNorm
from pipelines.rewrites.fold_constants import FoldConstants
from pipelines.rewrites.fuse_linear import FuseLinear
from pipelines.rewrites.remove_dead_branches import RemoveDeadBranches
from zoo.recommenders.data.encoding import Rows
from zoo.recommenders.data.features import Features
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.data.schema import FEATURES, Column, Schema
from zoo.recommenders.data.schema_inference import load_schema
from zoo.recommenders.importers.batch_axis import batch_first
from zoo.recommenders.importers.canonicalize import RUNS, Rewriter
from zoo.recommenders.importers.expert_layers import MergeExperts
from zoo.recommenders.importers.families import GENERIC, family_of
from zoo.recommenders.importers.inputs import Array, InputSource, input_arrays, known_ids, run, without_sizes

RANKER = "ranker.onnx"
PROBABILITY = "probability"  # the output of one label; of several, those of this prefix
CALIBRATION_ROWS = 4096
TOLERANCE = 1e-5  # between probabilities of two orders of float32 sums


@dataclass(frozen=True, eq=False)
class Ranker:
    """An imported ranker.

    Attributes:
        model: Graph on the inputs of `features`.
        features: Encoding of the rows.
        family: Id of the family, or `GENERIC`.
        why: Reason for the family.
        calibration: Encoded rows, without rows that have an empty list with max pooling, whose maximum is undefined.
        difference: Largest difference of probabilities to the original graph on the first rows.
        pools: Pooling of the lists, see `Rewriter`.
    """

    model: ir.Model
    features: Features
    family: str
    why: str
    calibration: dict[str, Array]
    difference: float
    pools: Mapping[str, set[str]] = field(default_factory=dict)


def read(
    path: str | Path,
    data: Any,
    schema: str | Path,
    *,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    on_error: str = "raise",
) -> Ranker:
    """Reads an ONNX export with the schema of its log, and compares both graphs on the first `CALIBRATION_ROWS` rows.

    Args:
        path: ONNX export.
        data: Rows of the log, as in `Features.read`.
        schema: Schema file.
        columns: Columns of the graph's inputs in order, or of its one matrix; None: inputs are found by name, and a
            matrix has the order of the schema.
        output_node: Name of the probability, for graphs with more outputs than the schema has labels; or one name for
            each label, separated by commas, in the order of the labels.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        The rewritten ranker.

    Raises:
        RequestError: Columns, ids or rows do not fit, or the output is not a probability.
    """
    model = io.load(path)
    driver.rewrite(model, [FoldConstants(), RemoveDeadBranches()])
    lists = load_schema(schema, data, on_error)
    outputs = _outputs(model, output_node, lists.labels, path)
    del model.graph.outputs[:]
    model.graph.outputs.extend(outputs)
    used = _used(lists, _chosen(model, lists, columns, path))
    features = Features(replace(used, columns=tuple(_mean(column) for column in used.columns)))
    ranker = _written(model, features, columns, _first_rows(data, features, on_error), path)
    features = ranker.features if len(ranker.features.schema.labels) < len(lists.labels) else features
    pools = {
        name: "max" if ranker.pools.get(name) == {"max"} else "sum" for name in _unread_scales(ranker.model, features)
    }
    if pools:  # lists that are summed, or pooled by operators of the graph's own
        schema_ = features.schema
        pooled = (replace(column, pooling=pools.get(column.name, column.pooling)) for column in schema_.columns)
        features = Features(replace(schema_, columns=tuple(pooled)))
        ranker = _written(model, features, columns, _first_rows(data, features, on_error), path)
    filled = np.ones(len(next(iter(ranker.calibration.values()))), bool)
    for log_field in ranker.features.fields:
        if log_field.column.pooling == "max":
            filled &= ranker.calibration["ids"][:, log_field.start] != log_field.last
    if not filled.any():
        raise RequestError(f"{path}: found no row with items in its lists; max pooling needs at least one item")
    return replace(ranker, calibration={name: x[filled] for name, x in ranker.calibration.items()})


def from_onnx(
    path: str | Path,
    data: Any,
    output: str | Path,
    *,
    schema: str | Path,
    family: str | None = None,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    on_error: str = "raise",
) -> tuple[str, dict[str, Any], tuple[CardFile, ...]]:
    """Creates a model folder from an ONNX export, except for its card.

    Args:
        path: ONNX export.
        data: Rows of the log, as in `Features.read`.
        output: New or empty folder.
        schema: Schema file.
        family: Required family; None: any.
        columns: Columns of the graph's inputs, see `read`.
        output_node: Name of the probability, see `read`.
        on_error: "raise", or "skip" to leave out faulty rows.

    Returns:
        (family, details of the card, files of the card).

    Raises:
        RequestError: The folder is in use, the graph belongs to another family, or `read` fails. Nothing is written.
    """
    output = Path(output)
    require_free(output, "choose another with -o")
    ranker = read(path, data, schema, columns=columns, output_node=output_node, on_error=on_error)
    if family not in (None, GENERIC, ranker.family):
        raise RequestError(
            f"{path} is no {family}, but {ranker.family} by its structure: {ranker.why}; freeze it as that"
        )
    family = family or ranker.family
    output.mkdir(parents=True, exist_ok=True)
    io.save(ranker.model, output / "fp32.onnx")
    copy_file(path, output / RANKER)
    write_npz(output / SAMPLES, ranker.calibration)
    ranker.features.schema.save(output / "schema.json")
    details = {
        "preprocessing": ranker.features.to_json(),
        "weights": {"file": RANKER, "from": Path(path).name},
        "structure": {"family": ranker.family, "why": ranker.why, "difference": ranker.difference},
    }
    made = output / "fp32.onnx"
    return family, details, (CardFile.of(made),)


def _outputs(model: ir.Model, names: str | None, labels: Sequence[str], path: str | Path) -> list[ir.Value]:
    """Returns the outputs with the probabilities of the labels, in the order of the labels."""
    outputs = {str(output.name): output for output in model.graph.outputs}
    chosen = list(outputs) if names is None else [name.strip() for name in names.split(",")]
    if names is None and len(labels) == len(outputs) > 1:
        of_labels = [
            next((name for name in outputs if name in (label, f"{PROBABILITY}_{label}")), "") for label in labels
        ]
        chosen = of_labels if all(of_labels) else chosen  # else they are in the order of the labels
    elif names is None and len(outputs) > 1:
        raise RequestError(
            f"{path}: found {len(outputs)} results, expected one of {', '.join(outputs)}; name it with --output-node, "
            f'or give the schema {len(outputs)} columns of "kind": "label"'
        )
    if lost := [name for name in chosen if name not in outputs]:
        raise RequestError(
            f"{path}: found no result {lost[0]}, expected one of {', '.join(outputs)}; name it with --output-node"
        )
    return [outputs[name] for name in chosen]


def _labels(schema: Schema, outputs: Sequence[ir.Value], count: int, path: str | Path) -> tuple[str, ...]:
    """Returns the labels of `count` probabilities; raises RequestError if the schema has another number."""
    labels = schema.labels
    if count == 1:  # of several labels the one of that name, or the first
        return tuple(label for label in labels if outputs[0].name in (label, f"{PROBABILITY}_{label}")) or labels[:1]
    if count != len(labels):
        shown = f" ({', '.join(labels)})" if labels else ""
        raise RequestError(
            f"{path}: its results have {count} columns, expected a probability a row for each of the {len(labels)} "
            f"labels of the schema{shown}"
        )
    return labels


def _mean(column: Column) -> Column:
    """Returns the list encoding of rankers: unknown values are not items, unless they have a row."""
    if column.kind != "categories" or column.pooling == "none":
        return column
    skips = column.encoding["type"] == "vocabulary" and "unknown" not in column.encoding
    skip = {"skip_unknown": True} if skips else {}
    return replace(column, pooling="mean", encoding={**column.encoding, **skip})


def _used(schema: Schema, names: Iterable[str]) -> Schema:
    """Schema of the ranker's features: other features are ignored, and numbers have no missing-value indicator."""
    expected = set(names)
    columns = []
    for column in schema.columns:
        if column.kind in FEATURES and column.name not in expected:
            column = Column(column.name, "ignored", column.distinct, column.missing, why="the ranker does not read it")
        columns.append(replace(column, missing=0) if column.kind == "number" else column)
    return replace(schema, columns=tuple(columns))


def _chosen(model: ir.Model, schema: Schema, columns: Sequence[str] | None, path: str | Path) -> list[str]:
    """Returns the columns that the inputs read, in order; raises RequestError if the schema lacks one."""
    usable = {column.name: column for column in schema.of("number", "category", "categories")}
    inputs = [str(source.name) for source in model.graph.inputs]
    names = list(columns) if columns else list(usable) if _is_matrix(model) else inputs
    lost = [name for name in names if name not in usable]
    if lost or len(set(names)) < len(names):
        hint = "; name those of its inputs in order with --columns" if not columns else ""
        what = f"no column {', '.join(lost)}" if lost else "a column twice"
        raise RequestError(f"{path} reads {', '.join(names)}: found {what}, expected some of {', '.join(usable)}{hint}")
    if not _is_matrix(model) and len(names) != len(inputs):
        raise RequestError(
            f"{path} has {len(inputs)} inputs ({', '.join(inputs)}), found {len(names)} columns for them"
        )
    return names


def _is_matrix(model: ir.Model) -> bool:
    """Whether the graph has one input with all columns."""
    if len(model.graph.inputs) != 1:
        return False
    shape = query.dimensions(model.graph.inputs[0])
    return shape is not None and len(shape) == 2 and (shape[1] or 0) > 1


def _input_sources(
    model: ir.Model, features: Features, names: Sequence[str], path: str | Path
) -> dict[str, InputSource]:
    """Source of every input. Raises RequestError if it does not fit the shape or type of the input."""
    fields = {field.name: field for field in features.fields}
    numbers = {number.name: index for index, number in enumerate(features.numbers)}
    spans = [
        (list(range(fields[name].start, fields[name].start + fields[name].width)), True)
        if name in fields
        else ([numbers[name]], False)
        for name in names
    ]
    if _is_matrix(model):
        spans = [([column for columns, _ in spans for column in columns], None)]  # type: ignore[list-item]
        flags = [
            np.concatenate([np.full(fields[name].width if name in fields else 1, name in fields) for name in names])
        ]
    else:
        flags = [np.full(len(columns), is_id) for columns, is_id in spans]
    input_sources = {}
    for value, (columns, _), ids in zip(model.graph.inputs, spans, flags, strict=True):
        shape, dtype = query.dimensions(value), value.dtype
        if shape is None or dtype is None or not 1 <= len(shape) <= 2 or dtype.numpy().kind not in "if":
            raise RequestError(
                f"{path}: the input {value.name} is no matrix of numbers, expected [rows] or [rows, columns]"
            )
        width = shape[1] if len(shape) == 2 else 1
        if len(columns) != (width or len(columns)):
            raise RequestError(
                f"{path}: the input {value.name} has {width} columns, found {len(columns)} in the schema "
                f"({', '.join(names)}; a list has as many as its length)"
            )
        if not ids.all() and dtype.numpy() != np.float32:
            raise RequestError(
                f"{path}: the input {value.name} is {dtype.name.lower()}, expected float, as its column is a "
                'number in the schema; give an integer input the kind "category"'
            )
        own = (len(columns),) if len(shape) == 2 else ()
        input_sources[str(value.name)] = InputSource(np.array(columns).reshape(own), ids.reshape(own), dtype.numpy())
    return input_sources


def _first_rows(data: Any, features: Features, on_error: str) -> dict[str, Array]:
    parts: list[Rows] = []
    for rows in features.read(data, on_error=on_error, errors=ErrorLog()):
        parts.append(rows[: CALIBRATION_ROWS - sum(map(len, parts))])
        if sum(map(len, parts)) >= CALIBRATION_ROWS:
            break
    return features.encode(Rows.concatenate(parts))


def _written(
    model: ir.Model,
    features: Features,
    columns: Sequence[str] | None,
    rows: dict[str, Array],
    path: str | Path,
) -> Ranker:
    """Rewrites the graph in the form of a family, or wraps it unchanged; compares the result with the export."""
    sources = _input_sources(model, features, _chosen(model, features.schema, columns, path), path)
    outputs = list(model.graph.outputs)
    try:
        results = reference_session.run(
            reference_session.session(model, "reading it needs"), input_arrays(sources, rows, features), "ids"
        )
    except RequestError as error:
        raise RequestError(f"{path} cannot score the rows, as the schema encodes them: {one_line(error)}") from error
    count = len(next(iter(rows.values())))
    for output, result in zip(outputs, results, strict=True):
        if result.size % count or (len(features.schema.labels) < 2 and result.size != count):
            raise RequestError(
                f"{path}: its result {output.name} is {list(result.shape)}, expected a probability a row"
            )
    truth = np.concatenate([result.reshape(count, -1) for result in results], axis=1)
    if len(outputs) == 1 and len(features.schema.labels) == 2 and _is_esmm(truth):
        outputs, truth = [_without_conditional(model)], truth[:, 1:]
    labels = _labels(features.schema, outputs, truth.shape[1], path)
    names = [PROBABILITY] if truth.shape[1] == 1 else [f"{PROBABILITY}_{label}" for label in labels]
    if labels != features.schema.labels:
        chosen = tuple(column for column in features.schema.columns if column.kind != "label" or column.name in labels)
        features = Features(replace(features.schema, columns=chosen))
    finite = truth[np.isfinite(truth)]
    if not finite.size or finite.min() < 0 or finite.max() > 1:
        reach = f"from {finite.min():.3g} to {finite.max():.3g}" if finite.size else "not finite"
        raise RequestError(f"{path}: its results are {reach}, expected probabilities; export it with its sigmoid")
    few = {name: np.resize(x, (max(RUNS), x.shape[1])) for name, x in rows.items()}
    why = ""
    try:
        batches = [input_arrays(sources, {name: x[:n] for name, x in few.items()}, features) for n in RUNS]
        runs = [run(model, batch) for batch in batches]
        first = batch_first(without_sizes(model, runs), runs, RUNS)
        runs = [run(first, batch) for batch in batches]
        rewriter = Rewriter(first, features, sources, runs)
        made = rewriter.rewrite(list(first.graph.outputs), names)
        driver.rewrite(made, [FoldConstants(), FoldBatchNorm(), FuseLinear(), MergeExperts()])
        difference = _difference(made, rows, truth)
        if difference > TOLERANCE:
            why = f"written again it differs by {difference:.1e}"
    except RequestError as error:
        if "but its table" in str(error):
            raise RequestError(f"{path}: {error}") from error
        why = str(error)
    if why:
        made = _wrapped(model, features, sources, names)
        difference = _difference(made, rows, truth)
        return Ranker(made, features, GENERIC, f"mapped as any graph: {why}", rows, difference)
    family, reason, features = family_of(made, features)
    return Ranker(made, features, family, reason, rows, difference, rewriter.pools)


def _is_esmm(probabilities: Array) -> bool:
    """Whether columns are those of ESMM in torch-rechub: of a conversion after a click, of a click, and of both."""
    if probabilities.shape[1] != 3:
        return False
    after_click, click, both = probabilities.T
    return bool(np.allclose(after_click * click, both, rtol=1e-5, atol=0))


def _without_conditional(model: ir.Model) -> ir.Value:
    """Leaves the first column out of the only result of a graph, and returns the rest."""
    (output,) = model.graph.outputs
    columns = edit.initializer(model.graph, "probability.columns", np.array([1, 2]), query.used_names(model.graph))
    node = edit.node("Gather", [output, columns], f"{output.name}.labels", axis=1, dtype=ir.DataType.FLOAT)
    model.graph.append(node)
    model.graph.outputs[:] = node.outputs
    return node.outputs[0]


def _difference(model: ir.Model, rows: dict[str, Array], truth: Array) -> float:
    expected = {str(source.name) for source in model.graph.inputs}
    opened = reference_session.session(model, "reading it needs")
    columns = reference_session.run(opened, {name: x for name, x in rows.items() if name in expected})
    probabilities = np.concatenate([column.reshape(len(truth), -1) for column in columns], axis=1)
    return float(np.nanmax(np.abs(probabilities - truth)))


def _unread_scales(model: ir.Model, features: Features) -> set[str]:
    """Lists with a column of `scales` that the graph does not read."""
    read = set()
    for value in model.graph.inputs:
        if value.name == "scales":
            for use in value.uses():
                start = query.constant(use.node.inputs[1])
                read.add(int(start.item()) if start is not None and start.size == 1 else -1)
    return {field.name for field in features.fields if field.scale >= 0 and field.scale not in read}


def _wrapped(model: ir.Model, features: Features, sources: dict[str, InputSource], names: Sequence[str]) -> ir.Model:
    """Returns the original graph, with operators that compute its inputs from those of the features.

    Its outputs, or their columns, become outputs of these names.
    """
    made = model.clone()
    main, taken = made.graph, query.used_names(made.graph)
    old = list(main.inputs)
    for value in (*(output for node in main for output in node.outputs), *main.initializers.values()):
        if value.name in ("ids", "numbers", "scales", *names):
            value.name = edit.unique(f"{value.name}.old", taken)
    for value in old:
        value.name = edit.unique(f"{value.name}.old", taken)
    new = {}
    for name, (dtype, shape) in features.inputs.items():
        new[name] = ir.Value(
            name=name, type=ir.TensorType(ir.DataType.from_numpy(dtype)), shape=ir.Shape(["batch", *shape[1:]])
        )
    nodes = []
    for value, origin in zip(old, sources.values(), strict=True):
        column, computed = _input_of_columns(main, new, features, origin, taken)
        value.replace_all_uses_with(column)
        nodes += computed
    main.insert_before(main[0], nodes)
    main.inputs[:] = list(new.values())
    _name_results(main, names, taken)
    infer_shapes(made)
    return made


def _input_of_columns(
    main: ir.Graph, inputs: Mapping[str, ir.Value], features: Features, origin: InputSource, taken: set[str]
) -> tuple[ir.Value, list[ir.Node]]:
    """An input of the original graph as columns of the features' inputs, and the operators that compute it."""
    nodes: list[ir.Node] = []

    def node(op: str, operands: list[ir.Value | None], dtype: ir.DataType, **more: Any) -> ir.Value:
        nodes.append(edit.node(op, operands, f"columns.{op.lower()}", dtype=dtype, taken=taken, **more))
        return nodes[-1].outputs[0]

    kind, parts, known = ir.DataType.from_numpy(origin.dtype), [], dict[int, ir.Value]()
    for is_id, column in zip(origin.ids.ravel(), origin.columns.ravel(), strict=True):
        index = edit.initializer(main, "columns.at", np.array([column]), taken)
        source = inputs["ids" if is_id else "numbers"]
        part = node("Gather", [source, index], source.dtype or kind, axis=1)
        field = next((e for e in features.fields if is_id and e.start <= column < e.start + e.width), None)
        if field is not None and field.last:  # the ranker knows no missing values
            if field.start not in known:  # one for all items of a list
                known[field.start] = edit.initializer(main, "columns.known", known_ids(field)[:, 0], taken)
            part = node("Gather", [known[field.start], part], ir.DataType.INT64)
        parts.append(node("Cast", [part], kind, to=int(kind)))
    joined = parts[0] if len(parts) == 1 else node("Concat", list(parts), kind, axis=1)
    if not origin.columns.shape:
        joined = node("Reshape", [joined, edit.initializer(main, "columns.shape", np.array([-1]), taken)], kind)
    return joined, nodes


def _name_results(main: ir.Graph, names: Sequence[str], taken: set[str]) -> None:
    """Makes the outputs of a graph, or the columns of its only one, outputs [n, 1] of these names."""
    column = edit.initializer(main, "probability.shape", np.array([-1, 1]), taken)
    results: list[ir.Value | None] = list(main.outputs)
    if len(results) < len(names):  # one result of several columns
        flat = edit.initializer(main, "probability.columns", np.array([-1, len(names)]), taken)
        options: dict[str, Any] = {"dtype": ir.DataType.FLOAT, "taken": taken}
        matrix = edit.node("Reshape", [results[0], flat], "probability.matrix", **options)
        columns = [edit.initializer(main, "probability.column", np.array([i]), taken) for i in range(len(names))]
        picked = [edit.node("Gather", [matrix.outputs[0], x], "probability.part", axis=1, **options) for x in columns]
        main.extend([matrix, *picked])
        results = [gather.outputs[0] for gather in picked]
    last = [
        edit.node("Reshape", [result, column], name, dtype=ir.DataType.FLOAT)
        for result, name in zip(results, names, strict=True)
    ]
    for reshape in last:
        reshape.outputs[0].shape = ir.Shape(["batch", 1])
    main.extend(last)
    main.outputs[:] = [final.outputs[0] for final in last]
