"""Freeze Wide & Deep: checkpoint -> pruned TensorFlow inference graph (frozen.pb) -> fp32.onnx; or a graph from
elsewhere -> fp32.onnx.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass, RemoveUnusedOpsetsPass

from pipelines.core.errors import RequestError, ZooError
from pipelines.core.files import read_json, replacing, write_json
from pipelines.graph import io as onnx_graph
from pipelines.graph import query
from pipelines.graph.infer import infer_shapes
from pipelines.models.folder import SAMPLES
from pipelines.models.hub import CARD
from zoo.recommenders.criteo.data import Rows, read_rows
from zoo.recommenders.criteo.features import Features
from zoo.recommenders.criteo.model import build_model
from zoo.recommenders.criteo.train import CALIBRATION_ROWS, STATE, WEIGHTS, TrainConfig
from zoo.recommenders.data.row_errors import ErrorLog
from zoo.recommenders.importers.tensorflow.columns import Network, optimize, read_graph
from zoo.recommenders.importers.tensorflow.expressions import Column, Emitter
from zoo.recommenders.importers.tensorflow.mapped import MappedFeatures, Number, ordered

import keras  # isort: skip  # after zoo.recommenders.criteo.train, which quiets TensorFlow before its first import
import tensorflow as tf  # isort: skip

OUTPUT = "probability"
GRAPH = "graph.pb"  # a frozen graph that came from elsewhere
OPSET = 18
PASS_THROUGH = {
    "Identity",
    "Snapshot",
    "StopGradient",
    "PreventGradient",
    "CheckNumerics",
    "Print",
    "DebugGradientIdentity",
}
EFFECTS = {"NoOp", "Assert", "PrintV2", "ControlTrigger"}
GRADIENT_ATTRIBUTES = {"grad_a", "grad_b"}  # of MatMul: written by new TensorFlows, unknown to older readers

Array = npt.NDArray[Any]
GraphDef = Any  # tf.compat.v1.GraphDef

logger = logging.getLogger(__name__)


def freeze(folder: str | Path) -> dict[str, Any]:
    """Turn the weights in a folder that `zoo.recommenders.criteo.train.train` wrote into frozen.pb, fp32.onnx and
    freeze.json.

    Where `from_graph` wrote the folder, see `freeze_graph`.

    fp32.onnx has the inputs `ids` int32 [batch, categorical] and `numbers` float32 [batch, numeric], the output
    `probability` float32 [batch, 1], and the weights as initializers under their Keras paths (see `build_model`),
    neither transposed nor merged. The same weights give the same bytes. Returns what freeze.json holds: how many nodes
    and attributes were removed, how many nodes are left, operators of fp32.onnx, bytes. Raises RequestError where the
    folder holds no trained model, ZooError where the conversion did not carry every weight over.
    """
    folder = Path(folder)
    if (folder / GRAPH).is_file():
        return freeze_graph(folder)
    model = load_model(folder)
    weights = {variable.path: variable.numpy() for variable in model.weights}
    with _quiet():
        frozen = to_graph(model)
        nodes = len(frozen.node)
        removed = {
            "training_ops": remove_training_ops(frozen, {OUTPUT}),
            "unused_nodes": remove_unused_nodes(frozen, {OUTPUT}),
            "attributes": remove_attributes(frozen),
        }
        converted = to_onnx(frozen, weights)
    with replacing(folder / "frozen.pb") as temporary:
        temporary.write_bytes(frozen.SerializeToString(deterministic=True))
    onnx_graph.save(converted, folder / "fp32.onnx")
    files = (STATE, WEIGHTS, "frozen.pb", "fp32.onnx")
    report = {
        "removed": removed,
        "nodes": {"tensorflow": nodes, "frozen.pb": len(frozen.node), "fp32.onnx": len(converted.graph)},
        "operators": query.op_counts(converted),
        "bytes": {name: (folder / name).stat().st_size for name in files if (folder / name).is_file()},
    }
    write_json(folder / "freeze.json", report)
    return report


def load_model(folder: Path) -> keras.Model:
    """The trained model in a folder. Raises RequestError where a file is missing or fits no model."""
    trained = read_json(folder / "train.json")
    try:
        settings = trained["config"]
        model = build_model(
            Features.from_json(trained["features"]), TrainConfig(**settings | {"hidden": tuple(settings["hidden"])})
        )
        model.load_weights(folder / WEIGHTS)
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise RequestError(
            f"cannot read the model in {folder} ({str(error).splitlines()[0]}); train it again"
        ) from error
    return model


def to_graph(model: keras.Model) -> GraphDef:
    """The inference graph of a Keras model with its variables as constants under their paths, output node
    `probability`.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    signature = [tf.TensorSpec(each.shape, each.dtype, name=each.name) for each in model.inputs]
    function = tf.function(
        lambda *inputs: tf.identity(model(inputs, training=False), name=OUTPUT), input_signature=signature
    )
    concrete = function.get_concrete_function()
    graph = convert_variables_to_constants_v2(concrete).graph.as_graph_def()
    paths = {variable.value.handle.ref(): variable.path for variable in model.weights}
    renamed = {inner.op.name: paths[outer.ref()] for outer, inner in concrete.graph.captures if outer.ref() in paths}
    for node in graph.node:
        node.name = renamed.get(node.name, node.name)
        node.input[:] = [renamed.get(each, each) for each in node.input]
    return graph


# ----------------------------------------------------------------------------------------------- graphs from elsewhere


def from_graph(
    path: str | Path,
    data: Any,
    output: str | Path,
    *,
    columns: Sequence[str] | None = None,
    output_node: str | None = None,
    on_error: str = "raise",
) -> dict[str, Any]:
    """Make `output` a model folder of a frozen graph, but for its card, whose details are returned: preprocessing and
    weights.

    path: a GraphDef or a SavedModel's folder that `zoo.recommenders.importers.tensorflow.columns` understands. data:
    rows of a
    log, whatever `read_rows` takes; the first `CALIBRATION_ROWS` of them become calibration.npz and give the numbers
    their ranges. columns: names of the columns of a row, see `mapped.ordered`. Raises RequestError for a graph, rows or
    columns that do not fit, before anything is written.
    """
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RequestError(f"found {output} in use, wanted a new or empty folder; choose another with -o")
    with _quiet():
        graph = read_graph(path)
    network = optimize(graph, output_node)
    features = map_features(network, columns)
    rows = _first_rows(data, features, on_error)
    features = features.fitted([rows])
    output.mkdir(parents=True, exist_ok=True)
    with replacing(output / GRAPH) as temporary:
        temporary.write_bytes(graph.SerializeToString(deterministic=True))
    samples: dict[str, Any] = features.encode(rows)
    with replacing(output / SAMPLES) as temporary:
        np.savez(temporary, **samples)
    return {
        "preprocessing": features.to_json(),
        "weights": {"file": GRAPH, "output": network.output, "from": Path(path).name},
    }


def map_features(network: Network, columns: Sequence[str] | None = None) -> MappedFeatures:
    """Which columns of a row are a network's features; entries of a wide numeric feature x are called x_1, x_2, .. ."""
    names = {
        (feature, i): feature if len(each.fill) == 1 else f"{feature}_{i + 1}"
        for feature, each in network.numbers.items()
        for i in range(len(each.fill))
    }
    fills = {name: network.numbers[feature].fill[i] for (feature, i), name in names.items()}
    numeric, categorical = ordered(list(names.values()), list(network.fields), columns)
    position = {key: numeric.index(name) for key, name in names.items()}
    found = sorted(Number(position[each.feature, each.position], each.steps) for each in network.columns)
    fields = tuple(network.fields[name] for name in categorical)
    return MappedFeatures(
        tuple(numeric), tuple(fills[name] for name in numeric), tuple(categorical), fields, tuple(found)
    )


def freeze_graph(folder: Path) -> dict[str, Any]:
    """Turn graph.pb in a folder that `from_graph` began into fp32.onnx and freeze.json, by the features on its card.

    fp32.onnx has the inputs and the output of a model trained here (see `freeze`); an id may be the number of its
    field's buckets, which stands for a missing value. Returns what freeze.json holds: nodes of the graph, of them those
    that the probability needs, and those without constants and inputs; nodes and operators of fp32.onnx; bytes. Raises
    RequestError where the card does not fit the graph.
    """
    card = read_json(folder / CARD)
    features, graph = MappedFeatures.from_json(card.get("preprocessing")), read_graph(folder / GRAPH)
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


def network_to_onnx(network: Network, features: MappedFeatures) -> ir.Model:
    """A network as the ONNX model of rows that `features` encodes. Raises RequestError where they are another
    network's.
    """
    known = {(each.column, each.steps): each for each in features.numbers}
    wanted: dict[Column, Number] = {}
    wide = {feature: len(each.fill) for feature, each in network.numbers.items()}
    for column in network.columns:
        name = column.feature if wide[column.feature] == 1 else f"{column.feature}_{column.position + 1}"
        key = (features.numeric_columns.index(name) if name in features.numeric_columns else -1, column.steps)
        if key in known:
            wanted[column] = known[key]
    same = dict(zip(features.categorical_columns, features.buckets, strict=True)) == network.fields
    if len(wanted) != len(network.columns) or len(wanted) != len(features.numbers) or not same:
        raise RequestError(f"the columns on the card are not those of {GRAPH}; freeze the graph again with --from-pb")
    order = sorted(wanted, key=lambda column: features.numbers.index(wanted[column]))
    return Emitter(features.categorical_columns, {column: wanted[column] for column in order}).model(network.logit)


def _first_rows(data: Any, features: MappedFeatures, on_error: str) -> Rows:
    """Up to `CALIBRATION_ROWS` rows."""
    errors, parts, count = ErrorLog(), list[Rows](), 0
    try:
        for rows in read_rows(data, on_error=on_error, errors=errors, batch_rows=CALIBRATION_ROWS, **features.counts):
            parts.append(rows[: CALIBRATION_ROWS - count])
            count += len(parts[-1])
            if count >= CALIBRATION_ROWS:
                break
    except RequestError as error:
        wanted = f"the graph reads {features.numeric} numbers and {features.categorical} categories, in this order: "
        names = ", ".join((*features.numeric_columns, *features.categorical_columns))
        raise RequestError(f"{error}; {wanted}{names if len(names) < 400 else names[:400] + ' ...'}") from error
    if errors.total:
        logger.warning("%s", errors)
    return Rows.concatenate(parts)


# ------------------------------------------------------------------------------------------ pruning a TensorFlow graph


def remove_training_ops(graph: GraphDef, keep: Collection[str]) -> int:
    """Remove what only training or debugging needs, except nodes named in `keep`; returns how many nodes went. In
    place.

    f(x) = x for the operators of `PASS_THROUGH`: their readers read x. The operators of `EFFECTS` have no result.
    Control edges order effects, of which a frozen graph has none left.
    """
    gone = {node.name: node for node in graph.node if node.op in PASS_THROUGH | EFFECTS and node.name not in keep}

    def source(name: str) -> str:
        while (node := gone.get(name.removesuffix(":0"))) is not None:
            name = node.input[0]
        return name

    for node in graph.node:
        if node.name not in gone:
            node.input[:] = [source(name) for name in node.input if not name.startswith("^")]
    return _keep_nodes(graph, {node.name for node in graph.node} - gone.keys())


def remove_unused_nodes(graph: GraphDef, outputs: Collection[str]) -> int:
    """Remove the nodes that the nodes named in `outputs` do not depend on; returns how many. In place.

    Placeholders stay: they are the graph's signature.
    """
    inputs = {node.name: [name.removeprefix("^").split(":")[0] for name in node.input] for node in graph.node}
    used: set[str] = {node.name for node in graph.node if node.op == "Placeholder"}
    waiting = list(outputs)
    while waiting:
        name = waiting.pop()
        if name not in used:
            used.add(name)
            waiting.extend(inputs[name])
    return _keep_nodes(graph, used)


def remove_attributes(graph: GraphDef) -> int:
    """Remove attributes that no inference engine needs; returns how many. In place.

    A leading underscore marks what is no part of an operator's definition (`_output_shapes`, `_class`,
    `_XlaMustCompile`, ...).
    """
    removed = 0
    for node in graph.node:
        for name in [name for name in node.attr if name.startswith("_") or name in GRADIENT_ATTRIBUTES]:
            del node.attr[name]
            removed += 1
    return removed


def _keep_nodes(graph: GraphDef, names: Collection[str]) -> int:
    remaining = [node for node in graph.node if node.name in names]
    removed = len(graph.node) - len(remaining)
    if removed:
        copies = [type(node).FromString(node.SerializeToString()) for node in remaining]
        del graph.node[:]
        graph.node.extend(copies)
    return removed


# ------------------------------------------------------------------------------------------------------------- to ONNX


def to_onnx(graph: GraphDef, weights: Mapping[str, Array]) -> ir.Model:
    """Convert with tf2onnx; `weights` are the constants to carry over, by node name. Names and order come out
    independent of tf2onnx's.

    tf2onnx drops zero biases and merges equal constants. What it does must not hang on values that training
    left by chance, so it converts random stand-ins, by which the weights are then found again and put in.
    Raises ZooError where one was not found exactly once, as it was.
    """
    import tf2onnx

    random = np.random.default_rng(0)
    stand_ins = {name: random.standard_normal(array.shape, np.float32) for name, array in weights.items()}
    stood_in = type(graph).FromString(graph.SerializeToString())
    for node in stood_in.node:
        if node.name in stand_ins:
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(stand_ins[node.name]))
    inputs = [f"{node.name}:0" for node in graph.node if node.op == "Placeholder"]
    proto, _ = tf2onnx.convert.from_graph_def(stood_in, "wide_deep", inputs, [f"{OUTPUT}:0"], opset=OPSET)
    model = ir.from_proto(proto)

    names = {(array.shape, array.tobytes()): name for name, array in stand_ins.items()}
    counts: Counter[str] = Counter()
    for value in model.graph.initializers.values():
        array = query.constant(value)
        assert array is not None
        name = names.get((array.shape, array.tobytes()))
        if name is not None:
            counts[name] += 1
            value.const_value = ir.tensor(weights[name], name=name)
            value.metadata_props["weight"] = name
    if wrong := [name for name in weights if counts[name] != 1]:
        raise ZooError(
            f"tf2onnx changed the weights {', '.join(wrong)}; freeze with the tf2onnx version that pyproject.toml names"
        )
    return _tidied(model)


def _tidied(model: ir.Model) -> ir.Model:
    """Nodes in the order the output needs them, named after their weight or by operator and number; the free axis is
    `batch`.
    """
    graph, order = model.graph, dict[ir.Node, None]()

    def visit(value: ir.Value | None) -> None:
        node = value.producer() if value is not None else None
        if node is not None and node not in order:
            for each in node.inputs:
                visit(each)
            order[node] = None

    for value in (*graph.inputs, *graph.outputs):
        assert value.name is not None and value.shape is not None
        value.name = value.name.removesuffix(":0")
        value.shape = ir.Shape(["batch", *list(value.shape)[1:]])
        visit(value)
    graph.remove(list(graph))
    graph.extend(order)

    initializers: dict[ir.Value, None] = {}
    taken: Counter[str] = Counter()
    for node in graph:
        constants = [value for value in node.inputs if value is not None and value.is_initializer()]
        weight = next((value.metadata_props["weight"] for value in constants if "weight" in value.metadata_props), None)
        name = f"{weight.rpartition('/')[0]}/{node.op_type}" if weight else node.op_type
        taken[name] += 1
        node.name = name if weight and taken[name] == 1 else f"{name}_{taken[name] - 1}"
        for i, value in enumerate(constants):
            if value not in initializers:
                value.name = value.metadata_props.pop("weight", f"{node.name}/constant_{i}")
                initializers[value] = None
        for i, value in enumerate(node.outputs):
            if not value.is_graph_output():
                value.name, value.shape = f"{node.name}:{i}", None
    graph.initializers.clear()
    for value in initializers:
        graph.register_initializer(value)
    graph.name = "wide_deep"
    ir.passes.Sequential(ClearMetadataAndDocStringPass(), RemoveUnusedOpsetsPass())(model)
    infer_shapes(model)
    for node in graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape(dim if isinstance(dim, int) else "batch" for dim in value.shape)
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep notes on deprecations and progress off stderr: those of Python's loggers, and those that C++ writes to the
    file.
    """
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
