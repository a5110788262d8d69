"""Load, save, check and digest ONNX models (onnx_ir), and the small helpers every pass shares."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line
from pipelines.core.files import mapped, replacing, require_place

PRODUCER = "int8-zoo"
PAGE, MAPPED = 4096, 1 << 20  # bytes; initializers above `MAPPED` lie on pages of their own
MOST = 64  # elements that shape arithmetic has, at most
OPSET = 13  # the first with per-channel DequantizeLinear
OLDEST = 11  # opset that is still read, converted to OPSET
WHOLE = 2**31 - 2**20  # bytes of weights that one protobuf file holds

logger = logging.getLogger(__name__)


def load(path: str | Path) -> ir.Model:
    """Read and check an ONNX model, with what it keeps in files beside it. Opsets 11 and 12 are converted to 13.

    Raises RequestError, in one line, for a missing, truncated or invalid file, weights that are not there, or an opset that is not known.
    """
    path = Path(path)
    if not path.is_file():
        raise RequestError(f"no ONNX model at {path}; pass the path of an .onnx file")
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf raises its own kinds for every sort of damage
        raise RequestError(f"{path} is not a readable ONNX model ({one_line(error)}); download or export it again") from error
    if not proto.graph.output:
        raise RequestError(f"{path} is not a readable ONNX model (it has no outputs); download or export it again")
    try:
        if fault := _dangling(proto.graph):
            raise ValueError(fault)
        opset = _known_opset(proto)
        outside = any(each.HasField("data_location") and each.data_location for each in proto.graph.initializer)
        onnx.checker.check_model(str(path) if outside else proto)
        if opset < OPSET:
            proto = onnx.version_converter.convert_version(onnx.load(path), OPSET)
            logger.warning("%s has opset %d; it is read as opset %d (onnx.version_converter)", path, opset, OPSET)
            onnx.checker.check_model(proto)
        model = ir.from_proto(proto)
        if outside and opset >= OPSET:
            ir.external_data.set_base_dir(model.graph, path.parent)
            ir.external_data.load_to_model(model)
    except Exception as error:  # the checker's kind, onnx_ir's, and UnicodeDecodeError for damaged names
        raise RequestError(f"{path} is not a valid ONNX model: {one_line(error)}") from error
    model.ir_version = max(model.ir_version, 4)  # before, every weight had to be an input too
    return model


def _known_opset(proto: onnx.ModelProto) -> int:
    """The model's opset. Raises ValueError for one that is too old or too new to be read."""
    opset, newest = (
        next((each.version for each in proto.opset_import if each.domain in ("", "ai.onnx")), OPSET),
        onnx.defs.onnx_opset_version(),
    )
    if opset > newest:
        raise ValueError(f"it has opset {opset}, onnx {onnx.__version__} knows up to {newest}; update onnx or export an older one")
    if opset < OLDEST:
        raise ValueError(f"it has opset {opset}, wanted is {OLDEST} or newer; export it again")
    return opset


def _dangling(main: onnx.GraphProto) -> str:
    """What is wrong with a graph in which a node can never run, "" where nothing is."""
    given = {each.name for each in (*main.input, *main.initializer)} | {each.values.name for each in main.sparse_initializer} | {""}
    made = {name for node in main.node for name in node.output}
    for node in main.node:
        if lost := [name for name in node.input if name not in given and name not in made]:
            return f"{node.op_type} {node.name or node.output[0]} reads {lost[0]}, which is no input, no initializer, and computed nowhere"
    waiting = list(main.node)
    while waiting:
        blocked = []
        for node in waiting:
            if given.issuperset(node.input):
                given.update(node.output)
            else:
                blocked.append(node)
        if len(blocked) == len(waiting):
            return f"its nodes read each other's results in a circle: {', '.join(each.name or each.output[0] for each in blocked[:5])}"
        waiting = blocked
    return ""


def save(model: ir.Model, path: str | Path) -> Path:
    """Write `model` to `path`, whole or not at all. The same model gives the same bytes.

    Weights that one protobuf file cannot hold (2 GB) go to PATH.data beside it.
    """
    if sum(each.const_value.nbytes for each in model.graph.initializers.values() if each.const_value is not None) > WHOLE:
        return save_mapped(model, path)
    model.producer_name = PRODUCER
    model.producer_version = None
    model.doc_string = None
    content = serialized(model)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def save_mapped(model: ir.Model, path: str | Path, least: int = MAPPED) -> Path:
    """`save`, but initializers of more than `least` bytes go to PATH.data beside it, as they lie in memory, for `load_mapped`.

    Large ones begin on pages of their own.
    """
    path = Path(path)
    require_place(mapped(path))
    model.producer_name, model.producer_version, model.doc_string = PRODUCER, None, None
    with replacing(path) as temporary:
        ir.save(model, temporary, format="protobuf", external_data=mapped(path).name, size_threshold_bytes=least, alignment=PAGE)
    return path


def load_mapped(path: str | Path) -> ir.Model:
    """Read what `save_mapped` wrote; large initializers are read-only views of the file, whose pages all processes share.

    Raises RequestError where either file is missing or damaged.
    """
    path = Path(path)
    try:
        model = ir.load(path, format="protobuf")
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                value.const_value.numpy()  # maps, and so finds what is missing
    except Exception as error:  # protobuf, onnx_ir, OSError
        raise RequestError(f"{path} is not readable ({one_line(error)}); remove it, and it is made anew") from error
    return model


def digest(model: ir.Model) -> str:
    """SHA-256 of what the graph computes: opsets, inputs, outputs, nodes with attributes, weights. Producer and notes do not count."""
    sha = hashlib.sha256(repr(sorted(model.opset_imports.items())).encode())
    _digest(sha, model.graph)
    return sha.hexdigest()


def _digest(sha: Any, graph: ir.Graph) -> None:
    def add(*parts: object) -> None:
        sha.update("\x1f".join(map(str, parts)).encode() + b"\x1e")

    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            add(kind, value.name, value.dtype, value.shape)
    for name in sorted(graph.initializers):
        array = graph.initializers[name].const_value
        if array is not None:
            add("initializer", name, array.dtype, array.shape)
            sha.update(array.tobytes())
    for node in graph:
        add(node.domain, node.op_type, [v.name if v else "" for v in node.inputs], [v.name for v in node.outputs])
        for key in sorted(node.attributes):
            attribute = node.attributes[key]
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                add(key, "tensor", tensor.dtype, tensor.shape, hashlib.sha256(tensor.tobytes()).hexdigest())
            elif attribute.type == ir.AttributeType.GRAPH:
                add(key, "graph")
                _digest(sha, attribute.as_graph())
            elif attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS):
                add(key, attribute.type, np.asarray(attribute.value, np.float32).tolist())  # as a file keeps them
            else:
                add(key, attribute.type, attribute.value)


def part(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """The model that computes the values `outputs` from the values `inputs`, all by name, with the weights that takes; a copy.

    Raises RequestError where a value is missing, or where `inputs` are not enough.
    """
    try:
        found = ir.convenience.extract(model.graph, inputs, outputs)
    except ValueError as error:
        raise RequestError(f"the graph {model.graph.name} has no part from {', '.join(inputs)} to {', '.join(outputs)}: {error}") from error
    return ir.Model(found, ir_version=model.ir_version)


def serialized(model: ir.Model) -> bytes:
    """The bytes of an ONNX file; the same model gives the same."""
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def require_opset(model: ir.Model) -> None:
    """Raise RequestError unless int8 per channel can be written in the model's opset."""
    opset = model.opset_imports.get("", 0)
    if opset < OPSET:
        raise RequestError(f"the model has opset {opset}, int8 per channel needs {OPSET} or newer; convert it with onnx.version_converter")


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The array behind an initializer or a Constant node, else None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def names(graph: ir.Graph) -> set[str]:
    """The names of all nodes and values, those of subgraphs too."""
    values = [*graph.inputs, *graph.initializers.values()]
    found = {each.name for each in values}
    for each in ir.traversal.RecursiveGraphIterator(graph):
        found |= {each.name, *(value.name for value in (*each.inputs, *each.outputs) if value is not None)}
    return {name for name in found if name}


def unique(name: str, taken: set[str]) -> str:
    """`name`, or `name_1`, ... where that is taken; it is, from then on."""
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def initializer(graph: ir.Graph, name: str, array: NDArray[Any], taken: set[str] | None = None) -> ir.Value:
    """Add `array` to the graph's initializers under `name`, or under `name_1`, ... where a node or value has it.

    taken: `names(graph)`, kept up to date here; who adds many gathers them once.
    """
    free = unique(name, names(graph) if taken is None else taken)
    tensor = ir.tensor(array, name=free)
    value = ir.Value(name=free, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    graph.register_initializer(value)
    return value


def node(
    op: str,
    inputs: list[ir.Value | None],
    name: str,
    *,
    dtype: ir.DataType | None = None,
    taken: set[str] | None = None,
    **attributes: Any,
) -> ir.Node:
    """A node with one output; node and output are both called `name`, or `name_1`, ... where `taken` (see `initializer`) holds that.

    Without `taken` the name is used as it is, for a node that takes another one's place.
    """
    name = name if taken is None else unique(name, taken)
    made = ir.node(op, inputs, attributes=attributes or None, name=name, num_outputs=1)
    made.outputs[0].name = name
    if dtype is not None:
        made.outputs[0].type = ir.TensorType(dtype)
    return made


def operators(model: ir.Model) -> dict[str, int]:
    """How many nodes of each operator type the main graph has, most first."""
    counts: dict[str, int] = {}
    for each in model.graph:
        counts[each.op_type] = counts.get(each.op_type, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def dequantized(value: ir.Value | None) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None] | None:
    """(integers, scale, zero point or None for 0) of a constant behind a DequantizeLinear; None for anything else."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "DequantizeLinear":
        return None
    integers, scale, zero = (constant(each) for each in (*producer.inputs, None)[:3])
    return None if integers is None or scale is None else (integers, scale, zero)


def sole_user(value: ir.Value) -> ir.Node | None:
    """The one node of its graph that reads `value`; None where there is another one, or where it leaves the graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() and uses[0].node.graph is value.graph else None


def substitute(nodes: list[ir.Node], new: ir.Node) -> None:
    """Put `new` where the last of `nodes` stands: it takes over that one's result, with name, type and shape, and all of `nodes` go."""
    last = nodes[-1]
    main, result = last.graph, last.outputs[0]
    assert isinstance(main, ir.Graph)
    new.outputs[0].type, new.outputs[0].shape = result.type, result.shape
    ir.convenience.replace_nodes_and_values(main, last, nodes, [new], [result], new.outputs)


def bypass(node: ir.Node, value: ir.Value) -> None:
    """Let the readers of `node`'s first result read `value`, which equals it. A result that leaves the graph keeps its name."""
    if node.outputs[0].is_graph_output():
        substitute([node], ir.node("Identity", [value], name=node.name))
        return
    node.outputs[0].replace_all_uses_with(value)
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape, where all of it is known."""
    known = dimensions(value)
    return None if known is None or None in known else tuple(each for each in known if each is not None)


def dimensions(value: ir.Value | None) -> list[int | None] | None:
    """Every dimension, None for one that is not known; None where not even their number is."""
    if value is None or value.shape is None:
        return None
    return [each if isinstance(each, int) else None for each in value.shape]


def symbols(value: ir.Value | None) -> list[int | str | None] | None:
    """`dimensions`, with the name of one that is not static but has one: equal names are equal sizes."""
    if value is None or value.shape is None:
        return None
    return [each if isinstance(each, int) else each.value for each in value.shape]


def scalar(value: ir.Value | None) -> float | None:
    """The one number in a constant of one element, else None."""
    array = constant(value)
    return float(array.item()) if array is not None and array.size == 1 and array.dtype.kind in "fiu" else None


def integers(node: ir.Node, key: str, position: int) -> list[int] | None:
    """What is an attribute in old opsets and a constant input in newer ones (axes, split, ...). None where absent or computed."""
    if (attribute := node.attributes.get(key)) is not None:
        return [int(each) for each in attribute.as_ints()]
    array = constant(node.inputs[position]) if len(node.inputs) > position else None
    return None if array is None else [int(each) for each in array.ravel()]


def elements(value: ir.Value | None) -> list[int | str | None] | None:
    """The integers in a scalar or 1-D tensor of shape arithmetic, dynamic dimensions as in `symbols`; None for another tensor.

    Follows Shape, Gather, Slice, Concat, Cast, Squeeze and Unsqueeze.
    """
    if value is None or (rank(value) or 0) > 1:
        return None
    if (array := constant(value)) is not None:
        return [int(each) for each in array.ravel()] if array.dtype.kind in "iu" and array.size <= MOST else None
    node = value.producer()
    if node is None or not standard(node, "Shape", "Gather", "Slice", "Concat", "Cast", "Squeeze", "Unsqueeze"):
        return None
    if node.op_type == "Shape":
        known = symbols(node.inputs[0])
        return None if known is None else known[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(known))]
    if node.op_type == "Cast" and value.dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    parts = [elements(each) for each in (node.inputs if node.op_type == "Concat" else node.inputs[:1])]
    if any(each is None for each in parts):
        return None
    found = [one for each in parts for one in each or ()]
    if node.op_type == "Gather":
        picks = elements(node.inputs[1])
        if picks is None or any(not isinstance(each, int) or not -len(found) <= each < len(found) for each in picks):
            return None
        return [found[each] for each in picks if isinstance(each, int)]
    if node.op_type == "Slice":
        bounds = [[1] if index == 4 and len(node.inputs) < 5 else elements(node.inputs[index]) for index in (1, 2, 4)]
        numbers = [each[0] for each in bounds if each is not None and len(each) == 1 and isinstance(each[0], int)]
        return found[slice(*numbers)] if len(numbers) == 3 else None
    return found


def label(node: ir.Node | ir.Value) -> str:
    """What reports call it: its name, or that of its result where it has none (ONNX asks for none)."""
    return node.name or (isinstance(node, ir.Node) and node.outputs and node.outputs[0].name) or "?"


def standard(node: ir.Node | None, *types: str) -> bool:
    """Whether `node` is one of ONNX's own operators called so (a custom domain may use the same names)."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in types


def rank(value: ir.Value | None) -> int | None:
    """Number of dimensions, where known."""
    return None if value is None or value.shape is None else len(value.shape)


def _half_casts(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    for each in list(model.graph):
        source = each.inputs[0] if each.inputs else None
        if each.op_type != "Cast" or each.attributes.get_int("to", 0) != ir.DataType.FLOAT:
            continue
        if each.outputs[0].is_graph_output():
            continue
        if source is not None and source.is_initializer() and source.dtype == ir.DataType.FLOAT16:
            yield each, source


def compress_fp16(model: ir.Model, minimum: int = 64) -> None:
    """Store float32 weights of `minimum` or more elements as float16, each behind a Cast to float32: half the size, still stock ONNX.

    In place. Weights are rounded to the nearest float16; raises RequestError where one does not fit its range.
    """
    graph, taken = model.graph, names(model.graph)
    for name, value in list(graph.initializers.items()):
        array = constant(value)
        if array is None or array.dtype != np.float32 or array.size < minimum:
            continue
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.isfinite(half).all():
            raise RequestError(f"weight {name} does not fit float16 (largest magnitude {np.abs(array).max():g}); ship it as float32")
        stored = initializer(graph, f"{name}.fp16", half, taken)
        cast = node("Cast", [stored], f"{name}.fp32", dtype=ir.DataType.FLOAT, taken=taken, to=int(ir.DataType.FLOAT))
        value.replace_all_uses_with(cast.outputs[0])
        del graph.initializers[name]
        graph.insert_before(graph[0], cast)


def expand_fp16(model: ir.Model) -> None:
    """Undo `compress_fp16`, or what an exporter did alike: float32 weights under their own names, holding float16 values. In place."""
    graph = model.graph
    for cast, stored in _half_casts(model):
        array = constant(stored)
        assert array is not None and stored.name is not None
        value = initializer(graph, stored.name.removesuffix(".fp16"), array.astype(np.float32))
        cast.outputs[0].replace_all_uses_with(value)
        graph.remove(cast, safe=True)
        if not stored.uses():
            del graph.initializers[stored.name]


@dataclass(frozen=True)
class Lookup:
    """Rows of a constant 2-D table: Gather(table, indices) on axis 0, seen through reshapes that only move its leading axes."""

    gather: ir.Node
    table: ir.Value
    indices: ir.Value


def table_lookup(value: ir.Value | None) -> Lookup | None:
    """The table lookup that computes `value`, with no other reader on the way; None where there is none."""
    width = value.shape[-1] if value is not None and value.shape else None
    while value is not None and (producer := value.producer()) is not None and sole_user(value) is not None:
        if producer.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"):
            value = producer.inputs[0]
            continue
        table, indices = producer.inputs[0], producer.inputs[1] if len(producer.inputs) > 1 else None
        if producer.op_type != "Gather" or producer.attributes.get_int("axis", 0) != 0 or table is None or indices is None:
            return None
        array = constant(table)
        matches = array is not None and array.dtype == np.float32 and array.ndim == 2 and array.shape[1] == width
        return Lookup(producer, table, indices) if matches else None
    return None
