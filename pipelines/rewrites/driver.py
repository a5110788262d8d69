"""Run rewrites to a fixed point and count what fired."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from pipelines.core.errors import ZooError
from pipelines.graph import edit, query
from pipelines.graph.infer import infer_shapes

LIMIT = 20  # rounds; a pass that still fires after so many undoes another one's work


class Rewrite(ir.passes.InPlacePass):
    """One graph rewrite. A subclass implements `rewrite` and holds the algebra in its docstring.

    fired: how often it changed something. refused: node name -> why a near match was left alone.
    """

    def __init__(self) -> None:
        self.fired = 0
        self.refused: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Its class name, as reports show it."""
        return type(self).__name__

    @abc.abstractmethod
    def rewrite(self, model: ir.Model) -> int:
        """Change `model` in place and return how often the rewrite fired; note near misses with `refuse`."""

    def refuse(self, node: ir.Node | ir.Value, why: str) -> None:
        """Note why a near match was left alone."""
        self.refused[query.label(node)] = why

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run once (onnx_ir's pass protocol)."""
        self.refused.clear()
        count = self.rewrite(model)
        self.fired += count
        return ir.passes.PassResult(model, modified=count > 0)


class CleanUp(Rewrite):
    """Lift constants to initializers, widen float16 weights, remove identities, common and dead subexpressions.

    Shapes are inferred then.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Clean up the main graph; returns by how many nodes it shrank."""
        before = len(model.graph)
        ir.passes.Sequential(
            common.RemoveInitializersFromInputsPass(),  # old files list every weight as an input
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        )(model)
        edit.expand_fp16(model)
        for each in list(model.graph):
            if query.is_op(each, "Identity"):
                _drop_identity(each)
        ir.passes.Sequential(common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass())(model)
        infer_shapes(model)
        model.graph.sort()
        return before - len(model.graph)


def _drop_identity(node: ir.Node) -> None:
    """onnx_ir's own pass also goes into subgraphs, and fails on a branch that returns an outer value."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or (y.is_graph_output() and (x.is_graph_output() or x.is_graph_input() or x.is_initializer())):
        return
    with contextlib.suppress(ValueError):  # shapes that contradict each other
        x.merge_shapes(y.shape)
    x.type = x.type or y.type
    leaves = y.is_graph_output()
    y.replace_all_uses_with(x, replace_graph_outputs=True)
    if leaves:
        x.name = y.name
    assert node.graph is not None
    node.graph.remove(node, safe=True)


@dataclass(frozen=True)
class RewriteReport:
    """What the passes did: per pass how often it fired and what it refused; operator counts before and after."""

    passes: tuple[tuple[str, int, dict[str, str]], ...]
    before: dict[str, int]
    after: dict[str, int]

    def fired(self, name: str) -> int:
        """How often the pass called `name` fired."""
        return sum(count for each, count, _ in self.passes if each == name)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "passes": [{"name": name, "fired": fired, "refused": refused} for name, fired, refused in self.passes],
            "nodes": {"before": sum(self.before.values()), "after": sum(self.after.values())},
            "operators": {"before": self.before, "after": self.after},
        }


def rewrite(model: ir.Model, passes: Sequence[Rewrite]) -> RewriteReport:
    """Apply `passes` in order, in place, with a clean-up between rounds, until none fires. Raises ZooError where they
    never settle.
    """
    before = query.op_counts(model)
    clean = CleanUp()
    clean(model)
    for _ in range(LIMIT):
        if not any([each(model).modified for each in passes]):
            break
        clean(model)
    else:
        raise ZooError(f"rewrites do not settle after {LIMIT} rounds: {', '.join(each.name for each in passes)}")
    ran = (*passes, clean)
    return RewriteReport(
        tuple((each.name, each.fired, dict(each.refused)) for each in ran), before, query.op_counts(model)
    )
