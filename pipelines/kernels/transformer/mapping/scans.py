"""Recurrences over the target tokens in a Transformer's frozen graph: Scans and gates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.kernels.transformer.mapping.layers import Array, LinearLayer
from pipelines.kernels.transformer.mapping.values import PROBE, GraphValues

RECURRENCE = "expected a Scan of cell keep + (1 - keep) value over the tokens, from zeros on"
RUNNING_MEAN = "expected a Scan of cell (t - 1) / t + value / t over the tokens, from zeros on"


class GraphScans(GraphValues):
    """Finds the inputs of recurrent decoder layers."""

    def _scan_inputs(self, value: ir.Value, scan: ir.Node, cells: ir.Value, expected: str) -> tuple[ir.Value, ir.Value]:
        """Matches a Scan of cell_t = keep_t cell_(t-1) + added_t over the tokens, from zeros on.

        Args:
            value: The value that is mapped; refused for another Scan.
            scan: The operator.
            cells: Its output with all cells.
            expected: What the message says was expected.

        Returns:
            keep and added.
        """
        body, outputs = scan.attributes["body"].as_graph(), list(scan.outputs)
        axes = [scan.attributes.get_ints(f"scan_{side}_axes", [0]) for side in ("input", "output")]
        backward = [scan.attributes.get_ints(f"scan_{side}_directions", []) for side in ("input", "output")]
        if len(scan.inputs) != 3 or cells is not outputs[-1] or len(outputs) != 2 or {1} != {*axes[0], *axes[1]}:
            self.refuse(value, expected)
        if any(map(any, backward)) or self._evaluate(value, scan.inputs[0]).any():
            self.refuse(value, expected)
        cell, *scanned = body.inputs
        after = [self.skip_qdq(output) for output in body.outputs]
        orders = [
            (kept, added)
            for kept, added in ((0, 1), (1, 0))
            if after[0] is after[1] and _is_sum_of_product(after[0], cell, scanned[kept], scanned[added])
        ]
        if len(orders) != 1:
            self.refuse(value, expected)
        keep, added = (self.skip_qdq(scan.inputs[1 + index]) for index in orders[0])
        return keep, added

    def _recurrence_parts(self, value: ir.Value) -> tuple[LinearLayer, LinearLayer] | None:
        """Matches a `Recurrence`.

        Args:
            value: The value that it computes.

        Returns:
            The layers of the forget gate and of the value; None where something else computes `value`.
        """
        relu = query.producer(value, "Relu")
        if relu is None:
            return None
        cells = self.skip_qdq(relu.inputs[0])
        scan = query.producer(cells, "Scan")
        if scan is None:
            return None
        keep, product = self._scan_inputs(value, scan, cells, RECURRENCE)
        sigmoid, mul = keep.producer(), product.producer()
        if sigmoid is None or mul is None or not query.is_op(sigmoid, "Sigmoid") or not query.is_op(mul, "Mul"):
            self.refuse(value, RECURRENCE)
        forget = self._linear_layer(self.skip_qdq(sigmoid.inputs[0]))
        for taken, update in (mul.inputs, mul.inputs[::-1]):
            sub = self.skip_qdq(taken).producer()
            layer = self._linear_layer(self.skip_qdq(update))
            if sub is None or not query.is_op(sub, "Sub") or layer is None or forget is None:
                continue
            if self.scalar(sub.inputs[0]) == 1 and self.skip_qdq(sub.inputs[1]) is keep and layer.x is forget.x:
                return forget, layer
        self.refuse(value, RECURRENCE)

    def _mean_source(self, value: ir.Value, scan: ir.Node) -> ir.Value:
        """Matches a `RunningMean`: keep_t is (t - 1) / t, as 0 times a value plus a constant row a position.

        Args:
            value: The value that it computes; refused where something else does.
            scan: The Scan that computes it.

        Returns:
            The value whose mean it is.
        """
        keep, added = self._scan_inputs(value, scan, value, RUNNING_MEAN)
        counts = np.arange(1, PROBE + 1, dtype=np.float32)
        total, product = keep.producer(), added.producer()
        if total is None or product is None or not query.is_op(total, "Add") or not query.is_op(product, "Mul"):
            self.refuse(value, RUNNING_MEAN)
        for zeros, row in (total.inputs, total.inputs[::-1]):
            mul = self.skip_qdq(zeros).producer()
            if (
                mul is not None
                and query.is_op(mul, "Mul")
                and 0 in map(self.scalar, mul.inputs)
                and self._is_by_position(row, (counts - 1) / counts)
            ):
                for source, factor in (product.inputs, product.inputs[::-1]):
                    if self._is_by_position(factor, 1 / counts):
                        return self.skip_qdq(source)
        self.refuse(value, RUNNING_MEAN)

    def _is_by_position(self, value: ir.Value | None, expected: Array) -> bool:
        """Whether `value` has these numbers for the first `PROBE` positions, a row of one column each."""
        rows = None if value is None or not self._depends_on_tokens_alone(value) else self._evaluate(value, value)
        return rows is not None and rows.size == PROBE and np.allclose(rows.ravel(), expected, rtol=1e-6)

    def _gate_parts(self, value: ir.Value) -> tuple[ir.Value, LinearLayer] | None:
        """Matches a `Gate`.

        Args:
            value: The value that it computes.

        Returns:
            The gated value and the layer of the gate; None where something else computes `value`.
        """
        node = query.producer(value, "Mul")
        if node is None:
            return None
        factors: Sequence[ir.Value] = [self.skip_qdq(factor) for factor in node.inputs]
        for gated, factor in (factors, factors[::-1]):
            sigmoid = query.producer(factor, "Sigmoid")
            if sigmoid is None:
                continue
            before = self.skip_qdq(sigmoid.inputs[0])
            layer = self._linear_layer(before)
            if layer is not None and before is not gated:
                return gated, layer
        return None


def _is_sum_of_product(value: ir.Value, a: ir.Value, b: ir.Value, c: ir.Value) -> bool:
    """Whether value = a b + c."""
    total = query.producer(value, "Add")
    if total is None or c not in total.inputs:
        return False
    (other,) = [summand for summand in total.inputs if summand is not c] or [None]
    product = query.producer(other)
    return product is not None and query.is_op(product, "Mul") and {*product.inputs} == {a, b}
