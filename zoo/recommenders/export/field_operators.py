"""ONNX operators of the layers of `zoo.recommenders.models.field_layers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from zoo.training.onnx_builder import Writer

FIELD_LAYERS = ("NumberVectors", "SplitFields", "JoinFields", "FieldAttention", "ConstantGates", "BilinearHeads")


class FieldWriter(Writer):
    """Writes layers on the fields of a log as vectors."""

    def field_layer(self, x: ir.Value, path: str, module: Any) -> ir.Value:
        """Appends a layer.

        Args:
            x: Input of the layer.
            path: Path of the module in the network, the prefix of its names.
            module: One of `FIELD_LAYERS`.

        Returns:
            Result of the layer.
        """
        match type(module).__name__:
            case "NumberVectors":
                column = self.add("Unsqueeze", [x, self.constant("axis2", [2])], f"{path}.columns")
                weight = self.weight(f"{path}.weight", module.weight.detach().numpy())
                vectors = self.add("Mul", [column, weight], f"{path}.vectors")
                return self._reshape(vectors, path, module.count * module.size)
            case "SplitFields":
                return self._reshape(x, path, module.size)
            case "JoinFields":
                return self._reshape(x, path, module.fields * module.size)
            case "FieldAttention":
                return self._attention(x, path, module)
            case "ConstantGates":
                gates = self.weight(f"{path}.gates", module.gates().detach().numpy())
                return self.add("Mul", [x, gates], path)
        matrix = self.weight(f"{path}.matrix", module.matrix().detach().numpy())
        return self.add("Gemm", [x, matrix], path)

    def _attention(self, x: ir.Value, path: str, module: Any) -> ir.Value:
        """Appends queries, keys, values and residuals [n * fields, heads * size] each, and the attention."""
        width = module.heads * module.size
        parts = []
        for number, name in enumerate(("query", "key", "value", "residual")):
            ends = [self.constant(f"at{bound * width}", [bound * width]) for bound in (number, number + 1)]
            part = self.add("Slice", [x, *ends, self.constant("axis1", [1])], f"{path}.{name}")
            if name != "residual":
                shape = self.constant(f"{path}.heads", [-1, module.fields, module.heads, module.size])
                apart = self.add("Reshape", [part, shape], f"{path}.{name}.heads")
                perm = [0, 2, 3, 1] if name == "key" else [0, 2, 1, 3]
                part = self.add("Transpose", [apart], f"{path}.{name}.turned", perm=perm)
            parts.append(part)
        query, key, value, residual = parts
        weights = self.add("Softmax", [self.add("MatMul", [query, key], f"{path}.scores")], f"{path}.softmax", axis=-1)
        heads = self.add("MatMul", [weights, value], f"{path}.heads.attended")
        rows = self.add("Transpose", [heads], f"{path}.heads.rows", perm=[0, 2, 1, 3])
        return self.add("Add", [self._reshape(rows, f"{path}.attended", width), residual], path)

    def _reshape(self, x: ir.Value, path: str, width: int) -> ir.Value:
        return self.add("Reshape", [x, self.weight(f"{path}.shape", np.array([-1, width]))], path)
