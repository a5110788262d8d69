"""Identifies activations in a Transformer's frozen graph by their results."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph import query
from pipelines.kernels.transformer import reference
from pipelines.kernels.transformer.mapping.scans import GraphScans
from pipelines.kernels.transformer.operations import ACTIVATIONS, GRAPH_ACTIVATIONS

ELEMENTWISE = ("Mul", "Div", "Add", "Sub", "Sigmoid", "Erf", "Tanh", "Pow")  # of which activations are made
ALIKE = 0.02  # largest difference from a recognized activation on -8 to 8, of quantization's rounding


class GraphActivations(GraphScans):
    """Finds the input of an activation, and which one it is."""

    def activation_sources(self, value: ir.Value) -> set[ir.Value]:
        """Returns the values from which elementwise operators compute `value`.

        Args:
            value: The value.
        """
        sources: set[ir.Value] = set()
        waiting = [value]
        while waiting:
            part = self.skip_qdq(waiting.pop())
            node = part.producer()
            if self.constant(part) is not None:
                continue
            if node is not None and query.is_op(node, *ELEMENTWISE) and self._linear_layer(part) is None:
                waiting += [x for x in node.inputs if x is not None]
            else:
                sources.add(part)
        return sources

    def activation_kind(self, value: ir.Value, x: ir.Value) -> str:
        """Returns the activation that computes a value.

        Args:
            value: The value; refused where no activation computes it.
            x: The value before it.
        """
        width = (query.dimensions(x) or [None])[-1]
        if width is None:
            self.refuse(value, f"no step of the {self.what} computes this")
        points = np.linspace(-8, 8, width, dtype=np.float32)
        real = [node.outputs[0] for node in x.consumers() if query.is_op(node, "DequantizeLinear")]  # of bytes
        row = points.reshape([1] * ((query.rank(x) or 1) - 1) + [width])
        feed = {str(tensor.name): row for tensor in real or [x]}
        results = self._run(self._float_part([*feed], value), feed)
        kinds = ACTIVATIONS if self.for_kernels else GRAPH_ACTIVATIONS
        errors = {kind: np.abs(results.ravel() - reference.activate(kind, points)).max() for kind in kinds}
        kind = min(errors, key=errors.__getitem__)
        if not errors[kind] < ALIKE:
            self.refuse(value, f"it is neither {' nor '.join(kinds)}")
        return kind
