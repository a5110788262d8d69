"""Divides a quantized graph with unsupported operators into `ImageProgram`s and parts for ONNX Runtime.

Operators that cannot be mapped are foreign. Every operator has a rank above those of its inputs: even for native
operators, odd for foreign ones. Connected native operators of one rank form a region; all foreign operators of one rank
form a part. Parts run in the order of their ranks and exchange float32 values. A value that is quantized at a border is
quantized again behind the border, to the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pipelines.core.errors import RequestError, ZooError
from pipelines.graph import edit, io, query, reference_session
from pipelines.graph.infer import infer_shapes
from pipelines.kernels.images.mapping.orders.views import ORDERS
from pipelines.kernels.images.mapping.qdq import data_input
from pipelines.kernels.images.parts.program import Part, Partition
from pipelines.kernels.images.parts.region import FailedError, Region, Shapes, is_data
from pipelines.kernels.images.program import ImageProgram

ROUNDS = 50  # of mapping, with more foreign operators each time
SAMPLES = 3  # of a batch that finds shapes
PRODUCTS = 128  # of a native region for each float32 value at its borders, at least
SAVED = 512  # products of the last layers of a region for each value fewer at its border, at least
SHARE = 0.1  # of the products of all int8 layers that native regions compute, at least
LAYERS = ("Conv", "Gemm", "MatMul")
MOVES = (  # bytes
    *("Concat", "Expand", "Flatten", "Gather", "Identity", "MaxPool", "Pad", "Reshape"),
    *("Resize", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
)


def partition(model: ir.Model, reason: RequestError) -> Partition[ImageProgram]:
    """Divides a graph into native regions and parts for ONNX Runtime.

    Args:
        model: QDQ model of fixed sizes, see `fix_sizes`; its shapes are inferred in place.
        reason: Why it has no whole native form.

    Returns:
        The parts.

    Raises:
        RequestError: `reason`, or the operator without a native form, if no regions of enough work can be mapped.
    """
    inputs = []
    for value in model.graph.inputs:
        shape = query.dimensions(value)
        if not shape or None in shape[1:] or value.dtype is None:
            raise reason
        inputs.append((str(value.name), value.dtype.numpy().name, tuple(size or 0 for size in shape[1:])))
    images = [shape for _, _, shape in inputs if len(shape) == 3]
    if not images and not all(dtype in ("float32", "uint8") for _, dtype, _ in inputs):
        raise reason
    division = _Division(model, reason)
    if not (parts := division.parts()):
        raise reason if images else division.refused or reason  # `reason` may only be that it reads no image
    batch = (query.dimensions(model.graph.inputs[0]) or [None])[0]
    outputs = tuple(str(value.name) for value in model.graph.outputs)
    return Partition(tuple(inputs), outputs, batch or 0, tuple(parts), str(reason))


class _Division:
    """The division of a graph.

    Args:
        model: QDQ model.
        reason: Why it has no whole native form.
    """

    def __init__(self, model: ir.Model, reason: RequestError) -> None:
        self._model, self._main, self._reason = model, model.graph, reason
        _open_bytes(model)
        infer_shapes(model)
        self._shapes = sample_shapes(model)
        _state_reshapes(model, self._shapes)
        self._image = next((str(value.name) for value in self._main.inputs if len(self._shape(value)) == 3), "")
        self._nodes = query.downstream(self._main, *self._main.inputs)
        self._made = {value: node for node in self._nodes for value in node.outputs}
        self._readers: dict[ir.Node, list[ir.Node]] = {node: [] for node in self._nodes}
        for node in self._nodes:  # those with a subgraph that reads a value, too
            for producer in {self._made[value] for value in query.values_read(node) if value in self._made}:
                self._readers[producer].append(node)
        self._foreign = {node for node in self._nodes if not all(map(is_data, node.outputs))}
        self.refused: RequestError | None = None  # why the first operator without a native form has none
        self._regions: dict[tuple[object, ...], tuple[ImageProgram, dict[str, tuple[int, ...]]]] = {}
        self._graph_order = set[str]()  # values that writer and readers store with different orders of axes

    def _shape(self, value: ir.Value) -> tuple[int, ...]:
        return self._shapes.get(str(value.name), ())

    def parts(self) -> list[Part[ImageProgram]]:
        """Returns the parts, in order."""
        try:
            failed = Region(self._model, self._shapes, self._image).failures()
        except RequestError:
            return []
        self._add_foreign(failed)
        self.refused = next(iter(failed.values()), None)
        for _ in range(ROUNDS):
            ranks = self._ranks()
            regions = self._natives(ranks)
            poor = [region for region in regions if not self._pays(region)]
            for region in poor:
                self._foreign |= region
            if poor or self._trim(regions):
                continue
            if not regions or not self._is_worth_it(regions):
                return []
            if (parts := self._mapped(ranks, regions)) is not None:
                return parts
        return []

    def _add_foreign(self, names: Iterable[str]) -> None:
        by_name = {str(node.outputs[0].name): node for node in self._nodes}
        self._foreign |= {by_name[name] for name in names if name in by_name}

    def _sources(self, node: ir.Node) -> Iterable[ir.Value]:
        """The values that a node depends on; a foreign one quantizes its inputs itself."""
        for value in query.values_read(node):
            if value not in self._made:
                continue
            if node not in self._foreign and not is_data(value):
                continue  # shape arithmetic, which the mapping resolved
            yield self._before(value) if node in self._foreign else value

    def _before(self, value: ir.Value) -> ir.Value:
        """The real value that is quantized to this one, or quantized and dequantized; else the value itself."""
        producer = self._made.get(value)
        if query.is_op(producer, "DequantizeLinear"):
            producer = self._made.get(data_input(producer))  # type: ignore[arg-type]
        return data_input(producer) if producer is not None and producer.op_type == "QuantizeLinear" else value

    def _ranks(self) -> dict[ir.Node, int]:
        """The rank of each operator: even for natives, odd for foreign ones."""
        ranks: dict[ir.Node, int] = {}
        for node in self._nodes:
            odd = node in self._foreign
            least = -1 if odd else 0
            for value in self._sources(node):
                if (producer := self._made.get(value)) is not None:
                    below = ranks[producer]
                    least = max(least, below + ((below % 2 == 1) != odd))
            ranks[node] = least
        earliest = dict(ranks)
        for node in reversed(self._nodes):
            readers = self._readers[node]
            if readers and self._passes_before(node) and not any(reader in self._foreign for reader in readers):
                ranks[node] = min(ranks[reader] for reader in readers)
        for node in self._nodes:  # arithmetic moves with the layer before it, which reads bytes
            if node.op_type not in ORDERS and ranks[node] != earliest[node]:
                made = [self._made[value] for value in node.inputs if value in self._made and is_data(value)]
                if not all(parent.op_type == "DequantizeLinear" or ranks[parent] == ranks[node] for parent in made):
                    ranks[node] = earliest[node]
        return ranks

    def _passes_before(self, node: ir.Node) -> bool:
        """Whether what a native operator reads passes a border rather than its results, which only later regions read.

        The results are other orders of the same elements, or not fewer: layers of one value in several regions.
        """
        ends = any(value.is_graph_output() or value.dtype != ir.DataType.FLOAT for value in node.outputs)
        if node in self._foreign or ends or node.op_type in ORDERS:
            return node not in self._foreign and not ends
        read = [value for value in node.inputs if value in self._made and is_data(value)]
        sizes = [math.prod(self._shape(value)) for value in (*read, *node.outputs) if value is not None]
        return 0 < sum(sizes[: len(read)]) <= sum(sizes[len(read) :])

    def _natives(self, ranks: Mapping[ir.Node, int]) -> list[set[ir.Node]]:
        """The native operators in regions, by rank."""
        parents: dict[object, object] = {}

        def root(key: object) -> object:
            while parents.setdefault(key, key) is not key:
                key = parents[key]
            return key

        natives = [node for node in self._nodes if node not in self._foreign]
        for node in natives:
            for value in node.inputs:
                if value is None or not (value in self._made or value in self._main.inputs) or not is_data(value):
                    continue
                producer = self._made.get(value)
                same = producer is not None and ranks[producer] == ranks[node]
                key = producer if same else (ranks[node], self._before(value).name)
                parents[root(node)] = root(key)
        regions: dict[object, set[ir.Node]] = {}
        for node in natives:
            regions.setdefault(root(node), set()).add(node)
        return sorted(regions.values(), key=lambda region: ranks[next(iter(region))])

    def _feeds(self, nodes: Collection[ir.Node]) -> dict[str, str]:
        """The inputs of a part: name of the input, and name of the value that it is fed."""
        feeds: dict[str, str] = {}
        for node in nodes:
            for value in query.values_read(node):
                if self._made.get(value) in nodes:
                    continue
                if value in self._main.inputs:
                    feeds[str(value.name)] = str(value.name)
                elif value in self._made and (is_data(value) or node in self._foreign):
                    before = self._before(value)
                    producer = self._made.get(before)
                    if producer in nodes:
                        continue
                    native = producer is not None and producer not in self._foreign
                    if not native or self._made[value].op_type == "QuantizeLinear":
                        feeds[str(before.name)] = str(before.name)
                    elif before is value or not self._is_requantized(value, nodes):
                        feeds[str(value.name)] = str(value.name)
                    else:
                        feeds.setdefault(str(before.name), str(value.name))
        return feeds

    def _is_requantized(self, value: ir.Value, nodes: Collection[ir.Node]) -> bool:
        """Whether a part quantizes a value again: native regions do, others for their int8 layers."""
        readers = [use.node for use in value.uses() if use.node in nodes]
        return any(node not in self._foreign or node.op_type in LAYERS for node in readers)

    def _products(self, nodes: Collection[ir.Node]) -> int:
        """Products of int8 layers, a sample."""
        total = 0
        for node in nodes:
            if node.op_type in LAYERS and len(node.inputs) > 1:
                weight, shape = query.dequantized(node.inputs[1]), self._shape(node.outputs[0])
                pixels = math.prod(shape[1:] if node.op_type == "Conv" else shape[:-1]) if shape else 0
                total += pixels * weight[0].size if weight is not None else 0
        return total

    def _pays(self, region: set[ir.Node]) -> bool:
        """Whether a region has enough work for the values at its borders."""
        edge = {str(value.name) for value in (*self._main.inputs, *self._main.outputs)}
        read = {name for name in self._feeds(region).values() if name not in edge}
        made = {
            str(value.name)
            for node in region
            for value in node.outputs
            if is_data(value) and any(use.node not in region for use in value.uses())
        }
        count = sum(math.prod(self._shapes.get(name, ())) for name in read | made)
        products = self._products(region)
        return products > 0 and products >= PRODUCTS * count

    def _trim(self, regions: Sequence[set[ir.Node]]) -> bool:
        """Makes the last layers of regions foreign that have more results at the border than inputs, and little work.

        Returns whether there were any.
        """
        trimmed: set[ir.Node] = set()
        for region in regions:
            last: dict[ir.Value, list[tuple[set[ir.Node], int]]] = {}  # by input: operators of a layer, its results
            for node in self._nodes:
                if node in region and node.op_type in LAYERS:
                    behind, results = self._behind(node, region)
                    if not any(operator.op_type in LAYERS for operator in behind):
                        last.setdefault(data_input(node), []).append(({node} | behind, results))
            for value, layers in last.items():
                nodes = set[ir.Node]().union(*(operators for operators, _ in layers))
                saved = sum(results for _, results in layers) - math.prod(self._shape(value))
                if saved > 0 and self._products(nodes) < SAVED * saved and self._products(region - nodes) != 0:
                    trimmed |= nodes
        self._foreign |= trimmed
        return bool(trimmed)

    def _behind(self, node: ir.Node, region: Collection[ir.Node]) -> tuple[set[ir.Node], int]:
        """The operators of a region behind one of them, and the number of their results that foreign ones read."""
        behind: set[ir.Node] = set()
        waiting, leaving = [node], 0
        while waiting:
            for value in waiting.pop().outputs:
                readers = [use.node for use in value.uses()]
                new = [reader for reader in readers if reader in region and reader not in behind]
                behind.update(new)
                waiting += new
                outside = any(reader in self._foreign for reader in readers)
                leaving += math.prod(self._shape(value)) if outside else 0
        return behind, leaving

    def _is_worth_it(self, regions: Sequence[set[ir.Node]]) -> bool:
        natives = sum(self._products(region) for region in regions)
        return natives >= SHARE * self._products(self._nodes)

    def _mapped(self, ranks: Mapping[ir.Node, int], regions: Sequence[set[ir.Node]]) -> list[Part[ImageProgram]] | None:
        """The parts; None if a region cannot be mapped, whose operators are foreign then."""
        stock: dict[int, set[ir.Node]] = {}
        for node in self._foreign:
            stock.setdefault(ranks[node], set()).add(node)
        groups = sorted(
            [(ranks[next(iter(region))], region) for region in regions] + list(stock.items()),
            key=lambda group: group[0],
        )
        feeds = [self._feeds(nodes) for _, nodes in groups]
        ends = {str(value.name) for value in (*self._main.inputs, *self._main.outputs)}
        read = {name for fed in feeds for name in fed.values()} | ends
        others = {name for (rank, _), fed in zip(groups, feeds, strict=True) if rank % 2 for name in fed.values()}
        stock_made = {str(value.name) for node in self._foreign for value in node.outputs}
        stored = read - ends - others - stock_made - self._graph_order  # that only natives hand each other
        orders: dict[str, tuple[int, ...]] = {}
        parts: list[Part[ImageProgram]] = []
        failed = False
        for (rank, nodes), fed in zip(groups, feeds, strict=True):
            made = [value for node in self._nodes if node in nodes for value in node.outputs]
            outputs = tuple(str(value.name) for value in made if value.name in read)
            if not outputs:
                continue
            try:
                if rank % 2:
                    stock_part = self._extracted(fed, outputs)
                    _join_bytes(stock_part)
                    serialized = np.frombuffer(io.serialized(stock_part), np.uint8)
                    parts.append(Part(tuple(fed.items()), None, serialized))
                else:
                    program, own = self._program(nodes, fed, outputs, stored)
                    orders |= {name: own[name] for name in outputs if name in own}
                    read_in = {value: own[name] for name, value in fed.items() if name in own}
                    self._graph_order |= {
                        value for value, order in read_in.items() if order != orders.get(value, order)
                    }
                    failed |= not self._graph_order.isdisjoint(stored)
                    parts.append(Part(tuple(fed.items()), program, np.zeros(0, np.uint8)))
            except FailedError as error:
                self._add_foreign(error.nodes)
                failed = True
            except RequestError:
                if rank % 2:
                    raise
                self._foreign |= nodes
                failed = True
        return None if failed else parts

    def _program(
        self, nodes: Collection[ir.Node], feeds: Mapping[str, str], outputs: Sequence[str], stored: Collection[str]
    ) -> tuple[ImageProgram, dict[str, tuple[int, ...]]]:
        """Maps a region; returns its program and the orders of its stored inputs and outputs."""
        own = {name for name, value in feeds.items() if value in stored} | {name for name in outputs if name in stored}
        key = (frozenset(nodes), tuple(feeds), tuple(outputs), frozenset(own))
        if key not in self._regions:
            region = self._extracted(feeds, outputs)
            image = self._image if self._image in feeds else ""
            mapping = Region(region, self._shapes, image, own)
            self._regions[key] = mapping.program(), mapping.orders
        return self._regions[key]

    def _extracted(self, feeds: Mapping[str, str], outputs: Sequence[str]) -> ir.Model:
        part = edit.extract(self._model, list(feeds), list(outputs))
        batch = (query.symbolic_shape(self._main.inputs[0]) or ["n"])[0] or "n"
        for value in part.graph.inputs:
            if (shape := self._shapes.get(str(value.name))) is not None:
                value.type, value.shape = value.type or ir.TensorType(ir.DataType.FLOAT), ir.Shape([batch, *shape])
        return part


def sample_shapes(model: ir.Model) -> dict[str, tuple[int, ...]]:
    """Finds the shapes of a sample of the float and 8-bit values whose first axis is that of the samples.

    Values whose shapes cannot be inferred are computed by ONNX Runtime once, for zeros.

    Args:
        model: Model with inferred shapes.

    Returns:
        Shape without the first axis, by name.
    """
    batch = (query.symbolic_shape(model.graph.inputs[0]) or [None])[0]
    shapes: dict[str, tuple[int, ...]] = {}
    unknown = []
    for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
        shape = query.symbolic_shape(value)
        if shape == []:
            continue
        first, *own = shape or [None]
        sizes = tuple(size for size in own if isinstance(size, int))
        whole = shape is not None and len(sizes) == len(own)
        if whole and first == batch:
            shapes[str(value.name)] = sizes
        elif value.dtype == ir.DataType.FLOAT and not (whole and isinstance(first, int)):
            unknown.append(str(value.name))  # also where a Reshape's first axis has a name of its own
    if unknown:
        shapes |= _computed_shapes(model, unknown, batch if isinstance(batch, int) else SAMPLES)
    return shapes


def _computed_shapes(model: ir.Model, names: Sequence[str], batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes of values as ONNX Runtime computes them; no value is kept longer than other operators need it."""
    copy = model.clone()
    wanted, taken = set(names), query.used_names(copy.graph)
    values = [value for node in copy.graph for value in node.outputs if value.name in wanted]
    read = [value for value in values if not isinstance(value.type, ir.SequenceType)]
    copy.graph.outputs.clear()
    for value in read:
        shape_node = ir.node("Shape", [value])
        output = shape_node.outputs[0]
        output.name, output.type = edit.unique(f"{value.name}.shape", taken), ir.TensorType(ir.DataType.INT64)
        copy.graph.append(shape_node)
        copy.graph.outputs.append(output)
    feeds = {}
    for value in model.graph.inputs:
        shape = query.dimensions(value)
        if not shape or None in shape[1:] or value.dtype is None:
            return {}
        feeds[str(value.name)] = np.zeros([batch, *(size or 0 for size in shape[1:])], value.dtype.numpy())
    try:
        opened = reference_session.session(copy, "dividing it needs", reference_session.options(shapes_first=True))
        shapes = reference_session.run(opened, feeds)
    except ZooError:
        return {}
    return {
        str(value.name): tuple(sizes[1:].tolist())
        for value, sizes in zip(read, shapes, strict=True)
        if sizes[:1].tolist() == [batch]
    }


def _state_reshapes(model: ir.Model, shapes: Shapes) -> None:
    """Writes the known shapes of Reshapes into them, so that parts need no shape arithmetic of others."""
    batch = (query.symbolic_shape(model.graph.inputs[0]) or [None])[0]
    taken = query.used_names(model.graph)
    for node in model.graph:
        shape = shapes.get(str(node.outputs[0].name)) if node.op_type == "Reshape" else None
        if shape is not None and query.constant(node.inputs[1]) is None:
            sizes = np.array([batch if isinstance(batch, int) else -1, *shape], np.int64)
            node.replace_input_with(1, edit.initializer(model.graph, edit.unique("sizes", taken), sizes))


def _open_bytes(model: ir.Model) -> None:
    """Dequantizes bytes that operators read as they are, and quantizes them again, since parts exchange real values."""
    taken = query.used_names(model.graph)
    for node in list(model.graph):
        if node.op_type == "DequantizeLinear":
            continue
        for position, value in enumerate(node.inputs):
            producer = query.producer(value)
            qparams = None if value is None else _qparams(value)
            if value is None or producer is None or qparams is None:
                continue
            inputs = [value, *qparams]
            for op_type in ("DequantizeLinear", "QuantizeLinear"):
                made = ir.node(op_type, inputs)
                made.name = made.outputs[0].name = edit.unique(f"{value.name}.{op_type.lower()}", taken)
                made.outputs[0].type = ir.TensorType(ir.DataType.FLOAT) if op_type[0] == "D" else value.type
                model.graph.insert_before(node, made)
                inputs = [made.outputs[0], *qparams]
            node.replace_input_with(position, inputs[0])


def _join_bytes(model: ir.Model) -> None:
    """Undoes `_open_bytes` within a part."""
    for node in list(model.graph):
        before = data_input(node).producer() if node.op_type == "QuantizeLinear" else None
        if before is not None and before.op_type == "DequantizeLinear" and before.inputs[1:] == node.inputs[1:]:
            edit.bypass(node, data_input(before))
    RemoveUnusedNodesPass()(model)


def _qparams(value: ir.Value) -> list[ir.Value | None] | None:
    """The scale and zero point of bytes; None for other values."""
    node = value.producer()
    while node is not None and node.op_type in MOVES:
        node = query.producer(node.inputs[0])
    return list(node.inputs[1:3]) if node is not None and node.op_type == "QuantizeLinear" else None
