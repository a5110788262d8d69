"""Applies rewrites to a fixed point and counts how often each fires."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir
from onnx_ir.passes import common

from pipelines.core.errors import ZooError
from pipelines.graph import edit, query
from pipelines.graph.infer import infer_shapes

LIMIT = 20  # maximum rounds; passes that fire beyond undo each other


class Rewrite(ir.passes.InPlacePass):
    """One graph rewrite; a subclass implements `rewrite` and states the algebra in its docstring.

    Attributes:
        fired: Number of changes.
        refused: Reason by name of near matches that were left alone.
    """

    def __init__(self) -> None:
        self.fired = 0
        self.refused: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Class name, for reports."""
        return type(self).__name__

    @abc.abstractmethod
    def rewrite(self, model: ir.Model) -> int:
        """Changes a model in place; near misses are noted with `refuse`.

        Args:
            model: Model to change.

        Returns:
            How often the rewrite fired.
        """

    def refuse(self, node: ir.Node | ir.Value, why: str) -> None:
        """Notes why a near match was left alone.

        Args:
            node: Node or value of the near match.
            why: The reason.
        """
        self.refused[query.label(node)] = why

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs once (the pass protocol of onnx_ir)."""
        self.refused.clear()
        count = self.rewrite(model)
        self.fired += count
        return ir.passes.PassResult(model, modified=count > 0)


class OperatorRewrite(Rewrite):
    """A rewrite of single operators; a subclass names their types and implements `replace`."""

    OPERATORS: ClassVar[tuple[str, ...]]

    def rewrite(self, model: ir.Model) -> int:
        """See `Rewrite`: replaces every operator of `OPERATORS` in the main graph."""
        return sum(self.replace(node) for node in list(model.graph) if query.is_op(node, *self.OPERATORS))

    @abc.abstractmethod
    def replace(self, node: ir.Node) -> int:
        """Replaces an operator in place.

        Args:
            node: Operator of a type of `OPERATORS`.

        Returns:
            1, or 0 if the rewrite does not fire.
        """


class CleanUp(Rewrite):
    """Lifts constants to initializers, widens float16 weights, removes identities, common and dead subexpressions.

    Shapes are inferred afterwards.
    """

    def rewrite(self, model: ir.Model) -> int:
        """Cleans up the main graph.

        Args:
            model: Model to change.

        Returns:
            Number of removed nodes.
        """
        before = len(model.graph)
        ir.passes.Sequential(
            common.RemoveInitializersFromInputsPass(),  # old files list every weight as an input
            common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        )(model)
        edit.expand_fp16(model)
        for node in list(model.graph):
            if query.is_op(node, "Identity"):
                _drop_identity(node)
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
    """Result of the passes: changes and refusals per pass, operator counts before and after."""

    passes: tuple[tuple[str, int, dict[str, str]], ...]
    before: dict[str, int]
    after: dict[str, int]

    def fired(self, name: str) -> int:
        """Returns how often the pass called `name` fired.

        Args:
            name: Name of a pass.
        """
        return sum(count for pass_name, count, _ in self.passes if pass_name == name)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return {
            "passes": [{"name": name, "fired": fired, "refused": refused} for name, fired, refused in self.passes],
            "nodes": {"before": sum(self.before.values()), "after": sum(self.after.values())},
            "operators": {"before": self.before, "after": self.after},
        }


def rewrite(model: ir.Model, passes: Sequence[Rewrite]) -> RewriteReport:
    """Applies passes in order, in place, with a clean-up between rounds, until none fires.

    Args:
        model: Model to change.
        passes: Passes in order.

    Returns:
        The report.

    Raises:
        ZooError: The passes reach no fixed point.
    """
    before = query.op_counts(model)
    clean = CleanUp()
    clean(model)
    for _ in range(LIMIT):
        if not any([pass_(model).modified for pass_ in passes]):
            break
        clean(model)
    else:
        raise ZooError(f"rewrites do not settle after {LIMIT} rounds: {', '.join(pass_.name for pass_ in passes)}")
    ran = (*passes, clean)
    return RewriteReport(
        tuple((pass_.name, pass_.fired, dict(pass_.refused)) for pass_ in ran), before, query.op_counts(model)
    )
