"""Column optimization: reads a frozen TensorFlow graph of feature columns as hashed lookups and dense layers.

`tf.feature_column` surrounds every lookup of a category by about sixty operators: they find the rows with a value
(NotEqual, Where, GatherNd), fill the others (SparseFillEmptyRows), look up every distinct value once (Unique, GatherV2)
and place the table rows (SparseSegmentMean, Tile, Select, Reshape). If a row has at most one value, all of them equal
one lookup: the table row of the value's hash, or zeros. Mean, sum and sqrtn of one value are equal.

The graph is read from its placeholders on. The rules in `zoo.recommenders.importers.tensorflow.rules` derive the
meaning of a tensor from the operator and the meanings of its inputs, never from names. An operator without a rule
refuses all tensors that depend on it, and all refusals are reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.core.errors import RequestError
from zoo.recommenders.importers.tensorflow import rules
from zoo.recommenders.importers.tensorflow.expressions import Apply, Column, Dense, Row, columns_of, fields_of
from zoo.recommenders.importers.tensorflow.tensors import Feature, Pair, Refused, Source, flat

GraphDef = Any  # tf.compat.v1.GraphDef
ENDS = ("Sigmoid", "Softmax")
ALWAYS = frozenset({"Const", "Placeholder", "NoOp", "Assert"})


@dataclass(frozen=True, eq=False)
class Network:
    """Network of a graph: the logit of a click, computed from hashed categories and numbers.

    Attributes:
        logit: Expression of the logit.
        output: Name of the probability.
        fields: {category: number of hash buckets}.
        numbers: Numeric features.
        nodes: Number of nodes of the graph, of nodes that the probability needs ("used"), and of these without
            constants and inputs ("operators").
    """

    logit: Dense
    output: str
    fields: dict[str, int]
    numbers: dict[str, Feature]
    nodes: dict[str, int]

    @property
    def columns(self) -> list[Column]:
        """Distinct numbers that the network reads."""
        return columns_of(self.logit)


def read_graph(path: str | Path) -> GraphDef:
    """Reads a frozen GraphDef, or the folder of a SavedModel, with variables as constants and functions inlined.

    Args:
        path: File or folder.

    Returns:
        The graph.

    Raises:
        RequestError: The path holds neither.
    """
    import tensorflow as tf

    path = Path(path)
    if not path.exists():
        raise RequestError(
            f"found no {path}; give a frozen GraphDef (.pb) or the folder of a SavedModel with --from-pb"
        )
    if path.is_dir() and not (path / "saved_model.pb").is_file():
        raise RequestError(
            f"found no saved_model.pb in {path}; give a frozen GraphDef (.pb) or the folder of a SavedModel with "
            "--from-pb"
        )
    if path.is_dir():
        return _frozen(path)
    graph = tf.compat.v1.GraphDef()
    try:
        graph.ParseFromString(path.read_bytes())
    except Exception as error:  # google.protobuf's own kinds
        raise RequestError(f"{path} is no GraphDef; give a frozen graph (.pb) or the folder of a SavedModel") from error
    if not graph.node:
        hint = f"; give the folder {path.parent}" if path.name == "saved_model.pb" else ""
        raise RequestError(
            f"{path} holds no node of a graph; give a frozen GraphDef (.pb) or the folder of a SavedModel{hint}"
        )
    return graph


def _frozen(folder: Path) -> GraphDef:
    """The GraphDef of a SavedModel's serving signature, variables as constants, functions inlined."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    try:
        loaded = tf.saved_model.load(str(folder))  # variables exist as long as this object
        signatures = loaded.signatures
        preferred = [name for name in ("serving_default", "predict") if name in signatures] or list(signatures)
        if not preferred:
            raise ValueError("it has no signature")
        concrete = signatures[preferred[0]]
        return convert_variables_to_constants_v2(concrete).graph.as_graph_def()
    except Exception as error:  # dozens of kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RequestError(f"cannot read the SavedModel {folder}: {reason}; save it with a signature") from error


def optimize(graph: GraphDef, output: str | None = None) -> Network:
    """Reads a frozen graph of feature columns as a network.

    Args:
        graph: Frozen graph.
        output: Node of the probability; None: the only Sigmoid or Softmax at the end.

    Returns:
        The network.

    Raises:
        RequestError: There is no such output node or several, or the graph has unsupported parts; the message lists all
            of them.
    """
    reading = _Reading({node.name: node for node in graph.node})
    ends = _ends(graph) if output is None else [output]
    if output is not None and output not in reading.nodes:
        raise RequestError(
            f"found no node {output} in the graph; it may end in {', '.join(_ends(graph)) or 'no Sigmoid or Softmax'}"
        )
    if not ends:
        raise RequestError(
            f"found no Sigmoid or Softmax at the end of the graph, which ends in {_tail(graph)}; expected a click's "
            "probability"
        )
    values = {end: reading.value(f"{end}:0") for end in ends}
    refused = [reason for value in values.values() if isinstance(value, Refused) for reason in value.reasons]
    if refused:
        faults = dict.fromkeys(refused)
        raise RequestError(f"cannot map {len(faults)} part{'s' * (len(faults) > 1)} of the graph: {'; '.join(faults)}")
    logits = {end: logit(value) for end, value in values.items()}
    if wrong := [end for end, output in logits.items() if output is None]:
        raise RequestError(
            f"{', '.join(wrong)} is not one probability a row; expected the sigmoid of a sum, or the softmax of two "
            "classes"
        )
    if len({id(output) for output in logits.values()}) > 1:
        raise RequestError(
            f"the graph has several probabilities: {', '.join(ends)}; choose one with --output-node NAME"
        )
    end, result = next(iter(logits.items()))
    assert result is not None
    used = list(reading.above(f"{end}:0"))
    numbers = {
        name: reading.source.numbers[name] for name in dict.fromkeys(column.feature for column in columns_of(result))
    }
    fields = {name: reading.source.buckets[name] for name in reading.source.buckets if name in fields_of(result)}
    if not fields:
        raise RequestError(
            "found no lookup of a hashed category in the graph; expected columns made with "
            "categorical_column_with_hash_bucket"
        )
    operators = sum(node.op not in ("Const", "Placeholder") for node in used)
    return Network(result, end, fields, numbers, {"graph": len(graph.node), "used": len(used), "operators": operators})


def logit(value: Any) -> Dense | None:
    """Returns the operand of the sigmoid of a probability.

    Args:
        value: Meaning of the tensor.

    Returns:
        The logit; None unless the value is a probability of one column.
    """
    value = flat(value)
    if isinstance(value, Pair):
        return value.logit
    if isinstance(value, Row) or not isinstance(value, Apply) or value.op != "Sigmoid" or value.width != 1:
        return None
    layer: Dense = value.inputs[0]
    return layer


@dataclass
class _Reading:
    """Meanings of tensors by name, evaluated on demand."""

    nodes: Mapping[str, Any]
    values: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    source: Source = field(default_factory=Source)

    def value(self, tensor: str) -> Any:
        """Returns the meaning of a tensor, or why it has none."""
        for node in self.above(tensor):
            if node.name not in self.values:
                self.values[node.name] = self._evaluate(node)
        name, index = _split(tensor)
        outputs = self.values[name]
        return outputs[index] if index < len(outputs) else Refused((f"{name} has no output {index}",))

    def above(self, tensor: str) -> Iterator[Any]:
        """Yields the nodes that a tensor depends on, each after its inputs."""
        done: set[str] = set()
        open_: set[str] = set()
        waiting = [_split(tensor)[0]]
        while waiting:
            name = waiting[-1]
            if name not in self.nodes:
                raise RequestError(f"the graph lacks the node {name}, which another reads; freeze it again")
            inputs = [_split(source)[0] for source in self.nodes[name].input if not source.startswith("^")]
            if name not in open_:
                open_.add(name)
                waiting += [source for source in reversed(inputs) if source not in done and source not in open_]
                continue
            waiting.pop()
            if name not in done:
                done.add(name)
                yield self.nodes[name]

    def _evaluate(self, node: Any) -> tuple[Any, ...]:
        inputs = []
        for source in node.input:
            if not source.startswith("^"):
                name, index = _split(source)
                outputs = self.values.get(name)
                if outputs is None:
                    return (Refused((f"{node.name} ({node.op}): it is part of a loop",)),) * 8
                inputs.append(outputs[index] if index < len(outputs) else Refused((f"{name} has no output {index}",)))
        return rules.evaluate(node, inputs, self.source)


def _split(tensor: str) -> tuple[str, int]:
    """Node and output index of a tensor's name."""
    name, _, index = tensor.partition(":")
    return name, int(index) if index.isdigit() else 0


def _ends(graph: GraphDef) -> list[str]:
    """The nodes of `ENDS` that no other one and no layer depends on."""
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for source in node.input:
            readers.setdefault(_split(source.removeprefix("^"))[0], []).append(node)

    def last(node: Any) -> bool:
        seen, waiting = set(), list(readers.get(node.name, ()))
        while waiting:
            reader = waiting.pop()
            if reader.op in (*ENDS, "MatMul"):
                return False
            if reader.name not in seen:
                seen.add(reader.name)
                waiting += readers.get(reader.name, ())
        return True

    return [node.name for node in graph.node if node.op in ENDS and last(node)]


def _tail(graph: GraphDef) -> str:
    """The nodes that nothing reads, in words."""
    read = {_split(source.removeprefix("^"))[0] for node in graph.node for source in node.input}
    unread = [f"{node.name} ({node.op})" for node in graph.node if node.name not in read and node.op not in ALWAYS]
    return ", ".join(unread[:5]) or "nothing"
