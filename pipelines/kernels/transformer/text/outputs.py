"""Maps the outputs of a text encoder: pooling of the rows of the last layer, layers of a head, normalization."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from pipelines.graph import edit, query, reference_session
from pipelines.kernels.transformer.mapping.from_graph import GraphMapper
from pipelines.kernels.transformer.text import reference
from pipelines.kernels.transformer.text.program import (
    POOLINGS,
    TOKENS,
    Dense,
    HeadStep,
    L2Norm,
    RowNorm,
    Truncation,
)

HIDDEN, MASK = "hidden", "attention_mask"
ALIKE = 0.05  # largest difference of a pooled row from a recognized pooling, of quantization's rounding
WIDEST = (
    1024  # columns of float layers of a token's result; wider ones, and int8 ones, are linear layers of the encoder
)
SIMPLE = {"Tanh": "tanh", "Relu": "relu", "Sigmoid": "sigmoid"}


class OutputMapper:
    """Maps the output of a graph, step by step from its end to the rows of the last layer.

    Attributes:
        rows: The value whose rows, one a token, the encoder computes.
        pooling: See `TextProgram.pooling`.
        head: See `TextProgram.head`.
        logits: Value of the layer of `TextProgram.vocabulary`, or None.
    """

    def __init__(self, mapper: GraphMapper, result: ir.Value) -> None:
        """Maps an output.

        Args:
            mapper: The values of the graph.
            result: The output.

        Raises:
            RequestError: The output is not computed by pooling and layers that have native kernels.
        """
        self.mapper = mapper
        self.head: list[HeadStep] = []
        value = mapper.skip_qdq(result)
        by_token = (query.rank(result) or 2) == 3
        names = {output.name for node in mapper.model.graph for output in node.outputs}
        is_last = by_token and HIDDEN not in names  # a graph that ends with its last layer has the name of the output
        self.rows = value if is_last else mapper.value(HIDDEN)
        while value is not self.rows and (pair := self._step(value, by_token)) is not None:
            step, value = pair
            self.head.insert(0, step)
        self.pooling, self.logits = TOKENS, self._logits(value)
        if by_token:
            self.rows = value
        elif self.logits is None:
            self.pooling = self._pooling(value)

    def _step(self, value: ir.Value, by_token: bool) -> tuple[HeadStep, ir.Value] | None:
        """Returns the step that computes `value` and the value before it; None where none does."""
        node = value.producer()
        if node is None:
            return None
        if query.is_op(node, "Div"):
            x = self.mapper.skip_qdq(node.inputs[0])
            return (L2Norm(), x) if self._is_length(node.inputs[1], x) else None
        if query.is_op(node, "Slice"):
            return self._truncation(node)
        if query.is_op(node, "LayerNormalization"):
            parts = [self.mapper.constant(parameter) for parameter in node.inputs[1:]]
            if any(part is None or part.ndim != 1 for part in parts):
                return None
            scale, bias = (np.asarray(part, np.float32) for part in (*parts, np.zeros_like(parts[0]))[:2])
            epsilon = float(np.float32(node.attributes.get_float("epsilon", 1e-5)))
            return RowNorm(scale, bias, epsilon), self.mapper.skip_qdq(node.inputs[0])
        return self._dense(value, by_token)

    def _is_length(self, value: ir.Value | None, x: ir.Value) -> bool:
        """Returns whether `value` is the L2 norm of x, or `SHORTEST` at least."""
        while value is not None and (node := self.mapper.skip_qdq(value).producer()) is not None:
            if query.is_op(node, "ReduceL2"):
                return self.mapper.skip_qdq(node.inputs[0]) is x
            if not query.is_op(node, "Max", "Clip", "Expand"):
                return False
            value = node.inputs[0]
        return False

    def _truncation(self, node: ir.Node) -> tuple[HeadStep, ir.Value] | None:
        """Matches the first columns of a value."""
        start, end, axes, step = ([*map(self.mapper.constant, node.inputs[1:]), None, None])[:4]
        last = (query.rank(node.inputs[0]) or 0) - 1
        if start is None or end is None or axes is None or start.size != 1 or start.item() != 0:
            return None
        if axes.item() not in (-1, last) or (step is not None and step.item() != 1) or end.item() < 1:
            return None
        return Truncation(int(end.item())), self.mapper.skip_qdq(node.inputs[0])

    def _dense(self, value: ir.Value, by_token: bool) -> tuple[HeadStep, ir.Value] | None:
        """Matches a linear layer, optionally with an activation behind it or smoothing before it."""
        activation, node = "", value.producer()
        if node is not None and node.op_type in SIMPLE:
            activation, value = SIMPLE[node.op_type], self.mapper.skip_qdq(node.inputs[0])
        elif query.is_op(node, "Mul"):
            sources = self.mapper.activation_sources(value)
            if len(sources) != 1:
                return None
            (x,) = sources
            activation, value = self.mapper.activation_kind(value, x), x
        node, bias = value.producer(), None
        if node is not None and query.is_op(node, "Add"):
            for added, product in (node.inputs, node.inputs[::-1]):
                bias, node = self.mapper.constant(added), self.mapper.skip_qdq(product).producer()
                if bias is not None:
                    break
            else:
                return None
        weight = (
            self.mapper.constant(node.inputs[1]) if node is not None and query.is_op(node, "MatMul", "Gemm") else None
        )
        if node is None or weight is None or weight.ndim != 2:
            return None
        if not query.is_transposed(node):
            weight = weight.T
        if by_token and (len(weight) > WIDEST or query.dequantized(node.inputs[1]) is not None):
            return None
        if query.is_op(node, "Gemm") and len(node.inputs) > 2:
            bias = self.mapper.constant(node.inputs[2])
        offset = np.zeros(len(weight), np.float32) if bias is None else np.asarray(bias, np.float32).ravel()
        before = self.mapper.skip_qdq(node.inputs[0])
        smoothing = before.producer()
        if smoothing is not None and before is not self.rows and query.is_op(smoothing, "Mul"):  # by a constant row
            factors = self.mapper.constant(smoothing.inputs[1])
            if factors is not None and factors.shape == weight.shape[1:]:
                weight, before = weight * factors, self.mapper.skip_qdq(smoothing.inputs[0])
        return Dense(np.ascontiguousarray(weight, np.float32), offset, activation), before

    def _logits(self, value: ir.Value) -> ir.Value | None:
        """Returns y where `value` is log(1 + relu(y)) of the largest y of all tokens, with a mask added; else None."""
        for kind in ("Log", "Add", "Relu", "ReduceMax"):
            node = value.producer()
            if node is None or not query.is_op(node, kind):
                return None
            constants = [self.mapper.constant(operand) for operand in node.inputs]
            one = next((constant for constant in constants if constant is not None), None)
            if kind == "Add" and (one is None or one.size != 1 or one.item() != 1):
                return None
            if kind == "ReduceMax" and (one is None or one.tolist() not in ([1], [-2]) or _keeps(node)):
                return None
            value = self.mapper.skip_qdq(node.inputs[int(constants[0] is not None)])
        node = query.producer(value, "Add")
        if node is None:
            return None
        summands = [self.mapper.skip_qdq(summand) for summand in node.inputs]
        masks = [self._reads_mask(summand) for summand in summands]
        return summands[masks.index(False)] if sorted(masks) == [False, True] else None

    def _pooling(self, pooled: ir.Value) -> str:
        """Identifies the pooling, or several that are concatenated, by the results for random rows."""
        hidden = self.rows
        width = (query.dimensions(hidden) or [None])[-1]
        if width is None:
            self.mapper.refuse(hidden, "its width is not known")
        rows = np.random.default_rng(0).standard_normal((1, 7, width)).astype(np.float32)
        inputs = [HIDDEN, *([MASK] if self._reads_mask(pooled) else [])]
        part = edit.extract(self.mapper.model, inputs, [str(pooled.name)])
        feed: dict[str, Any] = {HIDDEN: rows, MASK: np.ones((1, 7), np.int64)}
        session = reference_session.session(part, "mapping it needs")
        (output,) = reference_session.run(session, {str(x.name): feed[str(x.name)] for x in part.graph.inputs})
        if output.ndim != 2 or len(output) != 1 or output.shape[1] % width:
            self.mapper.refuse(
                pooled, f"it has the shape {list(output.shape)}, expected [1, {width}]: a row of those before it"
            )
        kinds = {kind: reference.pool(kind, rows[0]) for kind in POOLINGS}
        chosen: list[str] = []
        for row in output.reshape(-1, width):
            errors = {kind: float(np.abs(row - pool).max() / np.abs(pool).max()) for kind, pool in kinds.items()}
            best = min(errors, key=errors.__getitem__)
            if not errors[best] < ALIKE:
                self.mapper.refuse(pooled, f"it is neither of {', '.join(POOLINGS)} of the rows before it")
            chosen.append(best)
        return "+".join(chosen)

    def _reads_mask(self, result: ir.Value) -> bool:
        """Returns whether `result` depends on the mask."""
        waiting, seen = [result], set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value in seen or value.name == HIDDEN:
                continue
            seen.add(value)
            if value.name == MASK:
                return True
            if (node := value.producer()) is not None:
                waiting += [operand for operand in node.inputs if operand is not None]
        return False


def _keeps(node: ir.Node) -> bool:
    """Returns whether a reduction keeps its axes."""
    return node.attributes.get_int("keepdims", 1) != 0
