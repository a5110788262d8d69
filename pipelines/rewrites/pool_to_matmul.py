"""Writes poolings over uneven windows as the linear layer over pixels that they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session
from pipelines.rewrites.driver import Rewrite

PARTS = ("Add", "Div", "Gather", "GatherND", "Mul", "ReduceMean", "ReduceSum", "Transpose", "Where")
MAX_OPERATORS = 256  # of a pooling
MAX_PIXELS = 2048  # of its input
TOLERANCE = 1e-5  # largest difference of results for numbers of variance 1


class PoolToMatMul(Rewrite):
    """pool(x) = Reshape(MatMul(Reshape(x, [n, c, h w]), M), [n, c, r, s]) for an x of known height and width.

    torch's exporter gathers the pixels of every window of an adaptive average pooling whose sizes do not divide those
    of its input (PSPNet, UperNet) and sums them one by one. The operators behind the GatherND are evaluated for every
    pixel alone, which makes M, and for random numbers. Does not fire if they compute another function, or if others
    read their values.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Replaces every such pooling of the main graph."""
        return sum(self._replace(model, node) for node in list(model.graph) if query.is_op(node, "GatherND"))

    def _replace(self, model: ir.Model, node: ir.Node) -> int:
        transpose = query.producer(node.inputs[0], "Transpose")
        if transpose is None or list(transpose.attributes.get_ints("perm", [])) != [2, 3, 0, 1]:
            return 0
        x = transpose.inputs[0]
        sizes = query.dimensions(x)
        if x is None or sizes is None or None in sizes[2:] or (sizes[2] or 0) * (sizes[3] or 0) > MAX_PIXELS:
            return 0
        nodes = _pooling(node)
        shape = query.dimensions(nodes[-1].outputs[0]) if nodes else None
        if shape is None or shape[:2] != sizes[:2]:
            self.refuse(node, "its pixels are no windows of a pooling")
            return 0
        matrix = _matrix(model, x, nodes[-1].outputs[0], (sizes[2] or 0, sizes[3] or 0))
        if matrix is None:
            self.refuse(node, "the operators behind it are no linear function of pixels")
            return 0
        self._write(nodes, x, matrix, shape[2:])
        return 1

    def _write(self, nodes: list[ir.Node], x: ir.Value, matrix: NDArray[Any], sizes: list[int | None]) -> None:
        graph, name = nodes[-1].graph, str(nodes[-1].outputs[0].name)
        assert isinstance(graph, ir.Graph)
        taken = query.used_names(graph)

        def constant(label: str, array: NDArray[Any]) -> ir.Value:
            return edit.initializer(graph, f"{name}.{label}", array, taken)

        flat = edit.node("Reshape", [x, constant("flat", np.array([0, 0, -1]))], f"{name}.pixels", taken=taken)
        layer = edit.node("MatMul", [flat.outputs[0], constant("windows", matrix)], f"{name}.sums", taken=taken)
        for made in (flat, layer):
            made.outputs[0].type = x.type
            graph.insert_before(nodes[-1], made)
        shape = constant("shape", np.array([0, 0, *(size or 0 for size in sizes)]))
        edit.substitute([nodes[-1]], ir.node("Reshape", [layer.outputs[0], shape], name=nodes[-1].name))


def _pooling(gather: ir.Node) -> list[ir.Node]:
    """The operators from the gathered pixels to a value [n, c, r, s] that others read; [] for none."""
    computed, order, waiting = set(gather.outputs), [gather], list(gather.outputs[0].consumers())
    while waiting and len(order) < MAX_OPERATORS:
        ready = next((node for node in waiting if _fits(node, computed)), None)
        if ready is None:
            break
        waiting.remove(ready)
        order.append(ready)
        computed.add(ready.outputs[0])
        waiting += [reader for reader in ready.outputs[0].consumers() if reader not in waiting]
    for count in range(len(order), 1, -1):
        nodes, last = order[:count], order[count - 1]
        read = {reader for node in nodes[:-1] for reader in node.outputs[0].consumers()}
        ends = any(node.outputs[0].is_graph_output() for node in nodes[:-1])
        if read <= set(nodes) and not ends and query.rank(last.outputs[0]) == 4:
            return nodes
    return []


def _fits(node: ir.Node, computed: set[ir.Value]) -> bool:
    values = [value for value in node.inputs if value is not None]
    return query.is_op(node, *PARTS) and all(value in computed or query.constant(value) is not None for value in values)


def _matrix(model: ir.Model, x: ir.Value, y: ir.Value, sizes: tuple[int, int]) -> NDArray[np.float32] | None:
    """The weights [h w, r s] of sums of pixels that operators compute; None if they compute anything else."""
    count = sizes[0] * sizes[1]
    part = edit.extract(model, [str(x.name)], [str(y.name)])
    for value in (value for node in part.graph for value in node.outputs):
        value.shape = None
    part.graph.inputs[0].type, part.graph.inputs[0].shape = (
        ir.TensorType(ir.DataType.FLOAT),
        ir.Shape((1, count, *sizes)),
    )
    random = np.random.default_rng(0).normal(0, 1, (count, count)).astype(np.float32)
    try:
        opened = reference_session.session(part, "recognizing a pooling needs", reference_session.options(quick=True))
        matrix, sums = (
            reference_session.run(opened, {str(x.name): rows.reshape(1, count, *sizes)})[0].reshape(count, -1)
            for rows in (np.eye(count, dtype=np.float32), random)
        )
    except (RequestError, ValueError):
        return None
    return matrix if np.abs(sums - random @ matrix).max() <= TOLERANCE else None
