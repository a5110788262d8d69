"""Pushes the Transposes that exporters leave between layouts until they cancel."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

UNARY = (
    *(
        "Abs",
        "Cast",
        "Ceil",
        "Clip",
        "Elu",
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Log",
        "Mish",
    ),
    *("Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Sqrt", "Tanh"),
)
BINARY = ("Add", "Div", "Max", "Min", "Mul", "Pow", "PRelu", "Sub")
DEPTH = 6  # operators that a Transpose passes before one pays
REDUCE = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")


class PushTransposes(Rewrite):
    """Pushes Transposes down through elementwise operators, Concat, Pad and reductions until they cancel or merge.

    f(T x) = T f(x) for elementwise f, T x + c = T (x + T^-1 c), T x + T y = T (x + y), T T' = T''. A Transpose goes
    down only if it then meets another one (T^-1 T = identity, or two that merge at an Add or Concat) or a reduction
    absorbs it, so every move removes a Transpose. Pools and convolutions are never passed: ONNX has them in one layout
    only, and the Transposes around them are needed. Does not fire if the transposed value has another reader.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Merges or pushes every Transpose of the main graph."""
        count, pending = 0, [node for node in model.graph if query.is_op(node, "Transpose")]
        while pending:
            node = pending.pop(0)
            if node.graph is None:
                continue
            made = self._merge(node) or self._push(node)
            if made is not None:
                count += 1
                pending = made + pending
        return count

    def _merge(self, node: ir.Node) -> list[ir.Node] | None:
        """Merges T T' = T'' and removes identities; returns the next Transposes, None if nothing changed."""
        perm, x = permutation(node), node.inputs[0]
        if perm is None or x is None:
            return None
        before = x.producer()
        if (
            before is not None
            and (first := permutation(before)) is not None
            and (source := before.inputs[0]) is not None
        ):
            new = ir.node("Transpose", [source], {"perm": [first[axis] for axis in perm]}, name=node.name)
            edit.substitute([node], new)
            _drop(before)
            if permutation(new) == sorted(perm):
                edit.bypass(new, source)
            return [user for user in (before, *source.consumers()) if permutation(user) is not None]
        if perm == sorted(perm):
            edit.bypass(node, x)
            return []
        return None

    def _push(self, node: ir.Node) -> list[ir.Node] | None:
        """Swaps a Transpose with its reader if that pays; returns the next Transposes, None if nothing changed."""
        perm, reader = permutation(node), query.sole_user(node.outputs[0])
        if perm is None or reader is None:
            if perm is not None and any(_after(user, perm) is not None for user in node.outputs[0].consumers()):
                self.refuse(node, "its result has several readers")
            return None
        after = _after(reader, perm)
        if after is None or not _pays(reader, perm):
            return None
        main, result = node.graph, reader.outputs[0]
        assert isinstance(main, ir.Graph) and node.inputs[0] is not None
        transposes = [
            producer
            for value in reader.inputs
            if value is not None and (producer := value.producer()) is not None and permutation(producer)
        ]
        inner = moved(reader, perm, main)
        inner.outputs[0].type = result.type
        inner.outputs[0].name = edit.unique(f"{result.name}.untransposed", query.used_names(main))
        if result.shape is not None:
            inner.outputs[0].shape = ir.Shape([result.shape[after.index(axis)] for axis in range(len(after))])
        last = ir.node("Transpose", [inner.outputs[0]], {"perm": after}, name=f"{result.name}.transposed")
        last.outputs[0].type, last.outputs[0].shape = result.type, result.shape
        ir.convenience.replace_nodes_and_values(main, reader, [reader], [inner, last], [result], last.outputs)
        for transpose in transposes:
            _drop(transpose)
        return [last, *(user for user in last.outputs[0].consumers() if permutation(user) is not None)]


def permutation(node: ir.Node | None) -> list[int] | None:
    """Returns the permutation of a Transpose; the default reverses the axes.

    Args:
        node: An operator.

    Returns:
        The permutation; None for another operator, or an unknown rank.
    """
    if node is None or not query.is_op(node, "Transpose"):
        return None
    perm, rank = list(node.attributes.get_ints("perm", ())), query.rank(node.outputs[0]) or query.rank(node.inputs[0])
    return perm or (list(range(rank))[::-1] if rank else None)


def _drop(node: ir.Node) -> None:
    """Removes a Transpose without readers."""
    if node.graph is not None and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
        node.graph.remove(node, safe=True)


def _coming(value: ir.Value | None) -> list[int] | None:
    """Returns the permutation of the Transpose that computes a value, maybe before functions that it will pass."""
    node = query.producer(value)
    while node is not None and query.is_op(node, *UNARY) and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return permutation(node)


def _after(node: ir.Node, perm: list[int], coming: bool = False) -> list[int] | None:
    """Returns the permutation after `node` that equals `perm` on all its computed inputs, or None.

    coming: Whether Transposes count that will reach the node.
    """
    values = [value for value in node.inputs if value is not None]
    constants = [value for value in values if query.constant(value) is not None]
    data = [value for value in values if value not in constants]
    perms = [_coming(value) if coming else permutation(value.producer()) for value in data]
    if not data or any(other != perm for other in perms) or len(node.outputs) != 1:
        return None
    if query.is_op(node, *UNARY, "Pad", *REDUCE):
        if len(data) > 1 or data[0] is not node.inputs[0]:
            return None
        if node.op_type == "Pad" and (
            query.integers(node, "pads", 1) is None or (len(node.inputs) > 3 and node.inputs[3] is not None)
        ):
            return None
    elif query.is_op(node, *BINARY):
        if any((query.rank(value) or 0) > len(perm) for value in constants):
            return None
    elif not query.is_op(node, "Concat") or constants:
        return None
    if not query.is_op(node, *REDUCE):
        return perm
    axes = query.integers(node, "axes", 1)
    if not axes:  # of none is of all
        return None
    if node.attributes.get_int("keepdims", 1):
        return perm
    reduced = {axis % len(perm) for axis in axes}
    left = [axis for index, axis in enumerate(perm) if index not in reduced]
    return [sorted(left).index(axis) for axis in left]


def _pays(node: ir.Node, perm: list[int], depth: int = DEPTH) -> bool:
    """Whether a Transpose goes if it is pushed below `node`."""
    after, result = _after(node, perm, coming=depth < DEPTH), node.outputs[0]
    if after is None or depth == 0:
        return False
    if sum(_coming(value) is not None for value in set(node.inputs)) > 1 or after == sorted(after):
        return True
    readers = result.consumers()
    if any(permutation(reader) is not None for reader in readers):
        return True
    return (
        bool(readers)
        and not result.is_graph_output()
        and all(_pays_through(reader, result, after, depth - 1) for reader in readers)
    )


def _pays_through(node: ir.Node, x: ir.Value, perm: list[int], depth: int) -> bool:
    """Returns `_pays` of a node with a transposed input `x`."""
    probe = ir.node("Transpose", [ir.Value(name="probe", shape=ir.Shape([None] * len(perm)))], {"perm": perm})
    probe.outputs[0].shape, probe.outputs[0].type = x.shape, x.type
    index = next((position for position, value in enumerate(node.inputs) if value is x), None)
    if index is None:  # a subgraph reads it
        return False
    node.replace_input_with(index, probe.outputs[0])
    try:
        return _pays(node, perm, depth)
    finally:
        node.replace_input_with(index, x)


def moved(node: ir.Node, perm: list[int], main: ir.Graph) -> ir.Node:
    """Makes an operator of values before a permutation: f(T x) = T f'(x).

    Args:
        node: Operator f, one that Transposes pass.
        perm: Permutation of T.
        main: Graph that gets the constants of f'.

    Returns:
        Operator f', which reads the inputs of the Transposes before f; it is not in the graph yet.
    """
    inverse = [perm.index(axis) for axis in range(len(perm))]
    attributes = dict(node.attributes)
    inputs: list[ir.Value | None] = []
    for index, value in enumerate(node.inputs):
        producer = query.producer(value)
        array = query.constant(value)
        if producer is not None and permutation(producer) == perm:
            value = producer.inputs[0]
        elif node.op_type in BINARY and array is not None and array.size > 1:
            full = array.reshape([1] * (len(perm) - array.ndim) + list(array.shape))
            value = edit.initializer(
                main, f"{node.outputs[0].name}.{index}.transposed", np.ascontiguousarray(full.transpose(inverse))
            )
        elif node.op_type == "Pad" and index == 1 and array is not None:
            both = array.reshape(2, -1)[:, inverse].ravel()
            value = edit.initializer(main, f"{node.outputs[0].name}.pads", both)
        elif node.op_type in REDUCE and index == 1 and array is not None:
            value = edit.initializer(
                main, f"{node.outputs[0].name}.axes", np.array([perm[axis] for axis in array.ravel()], np.int64)
            )
        inputs.append(value)
    if node.op_type == "Concat":
        attributes["axis"] = ir.AttrInt64("axis", perm[node.attributes.get_int("axis", 0)])
    elif "axes" in attributes:
        attributes["axes"] = ir.AttrInt64s("axes", [perm[axis] for axis in attributes["axes"].as_ints()])
    return ir.Node(node.domain, node.op_type, inputs, attributes.values(), num_outputs=1, name=node.name)
