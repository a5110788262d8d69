"""Horizontal fusion: layers that read the same input become one layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.graph import edit, query
from pipelines.rewrites.driver import Rewrite

GEOMETRY = ("auto_pad", "dilations", "kernel_shape", "pads", "strides")


class MergeSiblings(Rewrite):
    """Horizontal fusion of layers with one input: Concat(x W_1, x W_2) = x [W_1 W_2], or a Split of it.

    Biases, and an activation that all share, are merged too. For Gemm and MatMul with constant weights of equal depth,
    and for ungrouped Conv of equal geometry. The fusion always pays if no Split remains, because the results are joined
    anyway. Measured against separate layers with a Split (one thread, both engines, float and int8), Q, K, V of
    attention ran at .95-1.07 of the speed, 8 to 26 layers of 16 or 32 outputs at 1.0-1.26 with a batch but .76-1.15
    without, and the two 1x1 convolutions that start a ResNet's stage at .59-1.07, because the Split stands between a
    Conv and the Relu or the residual Add that engines fuse into it.

    Args:
        split: Also merge layers whose results need a Split, for a model on which that was timed.
    """

    def __init__(self, split: bool = False) -> None:
        super().__init__()
        self.split = split

    def rewrite(self, model: ir.Model) -> int:
        """Merges the layers of each input that have the same geometry."""
        groups: dict[tuple[Hashable, ...], list[_Branch]] = {}
        for node in model.graph:
            if (branch := _Branch.of(node)) is not None:
                groups.setdefault((node.inputs[0], *branch.kind), []).append(branch)
        return sum(self._merge(model.graph, branches) for branches in groups.values() if len(branches) > 1)

    def _merge(self, main: ir.Graph, branches: list[_Branch]) -> int:
        count = 0
        for concat, start, run in _joined(branches):
            merged = _together(main, run)
            inputs = [*concat.inputs[:start], merged, *concat.inputs[start + len(run) :]]
            edit.substitute([concat], ir.node("Concat", inputs, concat.attributes, name=concat.name))
            for member in run:
                main.remove(list(member.nodes)[::-1], safe=True)
                branches.remove(member)
            count += 1
        if len(branches) < 2:
            return count
        first = branches[0].nodes[0]
        if not self.split:
            self.refuse(
                first,
                f"it has {len(branches) - 1} siblings; a split of their joint result costs what one call saves",
            )
            return count
        merged = _together(main, branches)
        widths = edit.initializer(main, f"{merged.name}.widths", np.array([b.width for b in branches], np.int64))
        split = ir.node(
            "Split",
            [merged, widths],
            {"axis": 1 if first.op_type == "Conv" else -1},
            num_outputs=len(branches),
            name=f"{merged.name}.split",
        )
        main.insert_before(first, split)
        for branch, part in zip(branches, split.outputs, strict=True):
            old = branch.result
            part.name, part.type, part.shape = old.name, old.type, old.shape
            old.replace_all_uses_with(part, replace_graph_outputs=True)
            main.remove(list(branch.nodes)[::-1], safe=True)
        return count + 1


@dataclass(frozen=True, eq=False)
class _Branch:
    """A layer with bias Add and activation, constant weights (outputs on `axis`), and bias [width] or None."""

    nodes: tuple[ir.Node, ...]
    weight: NDArray[Any]
    bias: NDArray[Any] | None
    axis: int
    clamped: bool
    kind: tuple[Hashable, ...]

    @property
    def width(self) -> int:
        """Number of output channels."""
        return int(self.weight.shape[self.axis])

    @property
    def result(self) -> ir.Value:
        """Output of the last node."""
        return self.nodes[-1].outputs[0]

    @classmethod
    def of(cls, node: ir.Node) -> _Branch | None:
        """Returns the branch that starts at `node`, or None."""
        if not query.is_op(node, "Gemm", "MatMul", "Conv") or query.constant(node.inputs[0]) is not None:
            return None
        weight, nodes = query.constant(node.inputs[1]), [node]
        bias_value = node.inputs[2] if len(node.inputs) > 2 else None
        bias = query.constant(bias_value)
        if weight is None or weight.dtype.kind != "f" or (bias_value is not None and bias is None):
            return None
        axis = 0 if node.op_type == "Conv" or query.is_transposed(node) else 1
        if (
            node.op_type == "MatMul"
            and (add := query.sole_user(node.outputs[0])) is not None
            and query.is_op(add, "Add")
        ):
            addend = next((array for value in add.inputs if (array := query.constant(value)) is not None), None)
            if addend is not None and addend.ndim == 1:
                bias, nodes = addend, [node, add]
        plain = node.op_type == "Conv" or (
            weight.ndim == 2
            and node.attributes.get_int("transA", 0) == 0
            and all(node.attributes.get_float(key, 1.0) == 1.0 for key in ("alpha", "beta"))
        )
        bias = None if bias is None else bias.ravel()
        if (
            not plain
            or node.attributes.get_int("group", 1) != 1
            or (bias is not None and bias.size != weight.shape[axis])
        ):
            return None
        clamp: tuple[Hashable, ...] = ()
        following = query.sole_user(nodes[-1].outputs[0])
        if following is not None and query.is_op(following, "Relu", "Clip"):
            bounds = [None if value is None else query.scalar(value) for value in following.inputs[1:]]
            if None not in [
                bound for value, bound in zip(following.inputs[1:], bounds, strict=True) if value is not None
            ]:
                nodes.append(following)
                clamp = (following.op_type, *bounds)
        depth = tuple(size for index, size in enumerate(weight.shape) if index != axis)
        geometry = [str(node.attributes[key].value) if key in node.attributes else "" for key in GEOMETRY]
        return cls(
            tuple(nodes),
            weight,
            bias,
            axis,
            bool(clamp),
            (node.op_type, axis, depth, weight.dtype.str, bias is None, clamp, *geometry),
        )


def _joined(branches: list[_Branch]) -> list[tuple[ir.Node, int, list[_Branch]]]:
    """Returns (Concat, position, branches) of the longest run of adjacent inputs from `branches`, per Concat."""
    longest: list[tuple[ir.Node, int, list[_Branch]]] = []
    by_result = {branch.result: branch for branch in branches}
    concats = dict.fromkeys(
        reader for branch in branches if query.is_op(reader := query.sole_user(branch.result), "Concat")
    )
    for concat in concats:
        assert concat is not None
        rank = query.rank(concat.outputs[0])
        axis = concat.attributes.get_int("axis", 0)
        channels = 1 if branches[0].nodes[0].op_type == "Conv" else None if rank is None else rank - 1
        if axis != channels and (rank is None or axis + rank != channels):
            continue
        run: list[_Branch] = []
        runs = []
        for index, part in enumerate((*concat.inputs, None)):
            branch = by_result.get(part) if part is not None else None
            if branch is not None:
                run.append(branch)
            elif run:
                runs.append((concat, index - len(run), run))
                run = []
        longest += [max(runs, key=lambda entry: len(entry[2]))] if runs else []  # one a round: positions change
    return [entry for entry in longest if len(entry[2]) > 1]


def _together(main: ir.Graph, branches: list[_Branch]) -> ir.Value:
    """Inserts one layer that computes the results of all branches side by side."""
    first, taken = branches[0], query.used_names(main)
    layer, stem, dtype = first.nodes[0], f"{branches[0].result.name}.merged", branches[0].result.dtype
    arrays = np.concatenate([branch.weight for branch in branches], axis=first.axis)
    inputs = [layer.inputs[0], edit.initializer(main, f"{stem}.weight", arrays, taken)]
    biases = [branch.bias for branch in branches if branch.bias is not None]
    bias = edit.initializer(main, f"{stem}.bias", np.concatenate(biases), taken) if biases else None
    if bias is not None and layer.op_type != "MatMul":
        inputs.append(bias)
    made = [ir.Node("", layer.op_type, inputs, layer.attributes.values(), num_outputs=1, name=edit.unique(stem, taken))]
    if bias is not None and layer.op_type == "MatMul":
        made.append(ir.node("Add", [made[0].outputs[0], bias], name=edit.unique(f"{stem}.biased", taken)))
    if first.clamped:
        clamp = first.nodes[-1]
        made.append(
            ir.node(clamp.op_type, [made[-1].outputs[0], *clamp.inputs[1:]], name=edit.unique(f"{stem}.clamped", taken))
        )
    shape = first.result.shape
    for node in made:
        node.outputs[0].name, node.outputs[0].type = node.name, None if dtype is None else ir.TensorType(dtype)
        if shape is not None:
            channel = 1 if layer.op_type == "Conv" else len(shape) - 1
            width = sum(branch.width for branch in branches)
            node.outputs[0].shape = ir.Shape([width if index == channel else size for index, size in enumerate(shape)])
    main.insert_before(layer, made)
    return made[-1].outputs[0]
