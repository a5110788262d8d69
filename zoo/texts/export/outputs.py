"""Outputs of text encoders as operators of an ONNX graph: embeddings, and scores of a cross-encoder."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pipelines.graph.builder import MASKED
from pipelines.kernels.transformer.text.program import SHORTEST
from zoo.texts.export.network import FLOAT, HIDDEN, INT64, NetworkWriter
from zoo.texts.models.architectures import ARCHITECTURES
from zoo.texts.models.config import EMBEDDING, LATE, SCORES


class OutputWriter(NetworkWriter):
    """Appends a network and its output to a graph."""

    def embedding(self, x: ir.Value, mask: ir.Value) -> ir.Value:
        """Appends pooling, Dense layers, L2 normalization and truncation: float32 [batch, components].

        Args:
            x: Output of the last layer.
            mask: Attention mask.

        Returns:
            Value `EMBEDDING`.
        """
        config = self.config
        steps = ["pool", *(f"dense.{i}" for i in range(len(config.dense)))]
        steps += ["normalize"] * config.normalize + ["truncate"] * bool(config.truncate_dim)
        steps += ["renormalize"] * config.renormalize
        for step in steps:
            result = EMBEDDING if step == steps[-1] else ""
            if step == "pool":
                x = self.pool(x, mask, result or "pooled")
            elif step == "truncate":
                x = self.slice(x, result or "truncated", 0, config.truncate_dim)
            elif step in ("normalize", "renormalize"):
                x = self.normalize(x, result or step)
            else:
                kind = config.dense[int(step.partition(".")[2])].activation
                x = self.linear(x, step, result if kind == "identity" else "")
                x = self.dense_activation(x, step, kind, result)
        return x

    def normalize(self, x: ir.Value, result: str, axis: int = 1) -> ir.Value:
        """Appends L2 normalization.

        Args:
            x: Embeddings, or vectors of tokens.
            result: Name of the output.
            axis: Axis of their components.

        Returns:
            Output, of the shape of the input.
        """
        norm = self.add("ReduceL2", [x, self.constant("row_axis", [axis])], "size", keepdims=1)
        norm = self.add("Max", [norm, self.constant("shortest", SHORTEST)], "size.clipped")
        return self.add("Div", [x, norm], result)

    def dense_activation(self, x: ir.Value, path: str, kind: str, result: str = "") -> ir.Value:
        """Appends the activation of a Dense layer.

        Args:
            x: Output of the layer.
            path: Prefix of the names.
            kind: One of `DENSE_ACTIVATIONS`.
            result: Name of the output; default: from `path`.

        Returns:
            Output, of the shape of the input.
        """
        if kind == "identity":
            return x
        if kind == "gelu":
            x = self.activate(x, path, kind)
            return self.add("Identity", [x], result) if result else x
        return self.add(kind.capitalize(), [x], result or f"{path}.activated")

    def pool(self, x: ir.Value, mask: ir.Value, result: str) -> ir.Value:
        """Appends pooling.

        Args:
            x: Output of the last layer.
            mask: Attention mask.
            result: Name of the output.

        Returns:
            float32 [batch, width of each pooling].
        """
        modes = self.config.poolings
        if len(modes) == 1:
            return self._pool(x, mask, modes[0], result)
        parts = [self._pool(x, mask, mode, f"pooled.{mode}") for mode in modes]
        return self.add("Concat", parts, result, axis=-1)

    def _pool(self, x: ir.Value, mask: ir.Value, mode: str, result: str) -> ir.Value:
        """Appends one pooling. Padding may be on either side, except for "cls", the first column."""
        if mode == "cls":
            return self.add("Gather", [x, self.constant("zero.int", np.array(0))], result, axis=1)
        tokens = self.constant("token_axis", [1])
        if mode == "last":
            number = self._numbers(mask)
            last = self.add("ArgMax", [number], "last_token", dtype=INT64, axis=1, keepdims=1)
            return self.add("GatherND", [x, last], result, batch_dims=1)
        numbers = self._numbers(mask) if mode == "weighted_mean" else mask
        is_token = self.add("Cast", [numbers], "counted", to=int(FLOAT))
        is_token = self.add("Unsqueeze", [is_token, self.constant("last_axis", [2])], "weights")
        if mode == "max":
            missing = self.add("Sub", [self.constant("one", 1.0), is_token], "left_out")
            low = self.add("Mul", [missing, self.constant("nowhere", MASKED)], "lowered")
            return self.add("ReduceMax", [self.add("Add", [x, low], "chosen"), tokens], result, keepdims=0)
        total = self.add("ReduceSum", [self.add("Mul", [x, is_token], "chosen"), tokens], "total", keepdims=0)
        count = self.add("ReduceSum", [is_token, tokens], "number", keepdims=0)
        if mode == "mean_sqrt_len":
            count = self.add("Sqrt", [count], "number.root")
        return self.add("Div", [total, count], result)

    def _numbers(self, mask: ir.Value) -> ir.Value:
        """Appends the number of each token from 1, and 0 at padding: int64 [batch, tokens]."""
        if "numbers" not in self.cached:
            counted = self.add("CumSum", [mask, self.constant("one.int", np.array(1))], "numbered", dtype=INT64)
            self.cached["numbers"] = self.add("Mul", [counted, mask], "numbers", dtype=INT64)
        return self.cached["numbers"]

    def head(self, x: ir.Value, mask: ir.Value) -> ir.Value:
        """Appends the classification head over the first or last token, or the mean of them: float32 [batch, labels].

        Args:
            x: Output of the last layer.
            mask: Attention mask.

        Returns:
            Value `SCORES`.
        """
        is_late = self.config.pooling == LATE
        row = x if is_late else self.pool(x, mask, "first_row" if self.config.pooling == "cls" else "pooled")
        if "dense.weight" not in self.weights:
            return self.linear(row, "classifier", SCORES)
        row = self.linear(row, "dense")
        kind = self.config.head_activation or ARCHITECTURES[self.config.kind].head_activation
        if kind in ("tanh", "relu"):
            row = self.add("Tanh" if kind == "tanh" else "Relu", [row], "dense.activated")
        else:
            row = self.activate(row, "dense", kind)
        if "dense_norm.weight" in self.weights:
            row = self.norm(row, "dense_norm")
        if is_late:  # the mean of all tokens' logits, as the classifier is linear
            x.name, row.name = "last_layer", HIDDEN
            row = self._pool(row, mask, "mean", "pooled")
        return self.linear(row, "classifier", SCORES)
