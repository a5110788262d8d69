"""Values of a Transformer's frozen graph: constants, linear layers, and the operands of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session
from pipelines.kernels.transformer.mapping.layers import Array, Floats, Heads, LinearLayer
from pipelines.kernels.transformer.operations import LANES, StaticQParams
from pipelines.quantization.qdq.scales import weight_qparams

PROBE = 5  # length of the sentence on which masks are evaluated


class GraphValues:
    """Identifies values of a graph by the operators that compute them."""

    def __init__(self, model: ir.Model, names: tuple[str, ...], memory: str, for_kernels: bool = True) -> None:
        """Wraps a graph.

        Args:
            model: The frozen graph.
            names: Inputs of tokens.
            memory: Name of the encoder's result; "" for an encoder.
            for_kernels: Whether the weights of a graph without int8 layers become int8 and heads are padded to `LANES`
                columns, as the native kernels need. Otherwise weights are read in their own precision, and heads are
                not padded.
        """
        self.model, self.names, self.memory, self.for_kernels = model, names, memory, for_kernels
        self.what = "decoder" if memory else "encoder"
        # layers of an int8 graph that are float lose by int8
        self.keeps_float = not for_kernels or any(_has_int8_weights(node) for node in model.graph)

    def value(self, name: str) -> ir.Value:
        """Finds a value by name.

        Args:
            name: Name of a graph output or of an operator's result.

        Returns:
            The value.

        Raises:
            RequestError: There is no such value.
        """
        for value in (*self.model.graph.outputs, *(output for node in self.model.graph for output in node.outputs)):
            if value.name == name:
                return value
        raise RequestError(f"the graph {self.model.graph.name} has no value {name}")

    def refuse(self, value: ir.Value, why: str) -> NoReturn:
        """Raises an error that names the operator of a value.

        Args:
            value: The value.
            why: The reason.

        Raises:
            RequestError: Always.
        """
        node = value.producer()
        what = f"the input {value.name}" if node is None else f"{node.op_type} {query.label(node)}"
        if self.for_kernels:
            raise RequestError(f"the native kernels cannot map {what}: {why}; use another engine")
        raise RequestError(f"no decoding step can be derived from {what}: {why}")

    def skip_qdq(self, value: ir.Value | None) -> ir.Value:
        """Skips Q/DQ pairs, Cast and Identity.

        Args:
            value: The value after them.

        Returns:
            The value before them.
        """
        assert value is not None
        while (node := value.producer()) is not None and value.name != self.memory:
            through = query.is_op(node, "QuantizeLinear", "DequantizeLinear", "Identity", "Cast")
            if not through or node.inputs[0] is None or self.constant(node.inputs[0]) is not None:
                break
            value = node.inputs[0]
        return value

    def constant(self, value: ir.Value | None) -> Array | None:
        """Evaluates a constant, also after DequantizeLinear, Transpose, Identity or a Cast to float32.

        Args:
            value: The value.

        Returns:
            The array; None if the value is not constant.
        """
        node = query.producer(value)
        if (array := query.constant(value)) is not None or node is None:
            return array
        if (quantized := query.dequantized(value)) is not None:
            integers, scale, zero_point = quantized
            axis = node.attributes.get_int("axis", 1)
            shape = [-1 if i == axis % integers.ndim else 1 for i in range(integers.ndim)] if scale.size > 1 else []
            offset = (
                0 if zero_point is None else zero_point.astype(np.int32).reshape(shape if zero_point.size > 1 else [])
            )
            return np.asarray((integers.astype(np.int32) - offset) * scale.reshape(shape), np.float32)
        if query.is_op(node, "Identity", "Transpose", "Cast") and (array := self.constant(node.inputs[0])) is not None:
            if node.op_type == "Cast":
                return array.astype(np.float32) if node.attributes.get_int("to", 0) == ir.DataType.FLOAT else None
            return (
                array.transpose(node.attributes.get_ints("perm", range(array.ndim)[::-1]))
                if node.op_type == "Transpose"
                else array
            )
        return None

    def scalar(self, value: ir.Value | None) -> float | None:
        """Evaluates a constant of one element.

        Args:
            value: The value.

        Returns:
            The number; None for another value.
        """
        array = self.constant(value)
        return float(array.item()) if array is not None and array.size == 1 else None

    def weight(self, value: ir.Value | None, transposed: bool) -> tuple[Array, Floats] | None:
        """Reads a constant matrix.

        Args:
            value: The matrix, float or behind DequantizeLinear.
            transposed: Whether it is [N, K].

        Returns:
            Weights [K, N] and their scale float32 [N]: int8 as the graph has them, or quantized here from float where
            the graph has no int8 layers. Other float weights stay float32 with a scale of 1. None for anything else.
        """
        integers, scale, zero_point = query.dequantized(value) or (None, None, None)
        symmetric = zero_point is None or not zero_point.any()
        if (
            integers is not None
            and scale is not None
            and integers.dtype == np.int8
            and integers.ndim == 2
            and symmetric
        ):
            node = query.producer(value)
            assert node is not None
            if scale.size == 1 or node.attributes.get_int("axis", 1) % 2 != transposed:
                integers = integers.T if transposed else integers
                return integers, np.broadcast_to(scale.astype(np.float32).ravel(), integers.shape[1])
        array = self.constant(value)
        if array is None or array.ndim != 2 or array.dtype.kind != "f":
            return None
        floats = (array.T if transposed else array).astype(np.float32, copy=False)
        if self.keeps_float:
            return floats, np.ones(floats.shape[1], np.float32)
        scale, integers = weight_qparams(floats, 1)
        return integers, scale

    def _linear_layer(self, value: ir.Value) -> LinearLayer | None:
        """Returns the linear layer that computes `value`, or columns of it, with its bias; None for anything else."""
        node = value.producer()
        if node is None:
            return None
        if query.is_op(node, "Split"):
            return self._split_columns(value, node)
        if query.is_op(node, "Add"):
            for index, other in ((0, 1), (1, 0)):
                added, layer = self.constant(node.inputs[index]), self._linear_layer(self.skip_qdq(node.inputs[other]))
                if added is not None and layer is not None and added.size in (1, len(layer.scale)):
                    return replace(layer, bias=layer.bias + added.astype(np.float32).ravel())
            return None
        gemm = query.is_op(node, "Gemm")
        if not gemm and not query.is_op(node, "MatMul"):
            return None
        weights = self.weight(node.inputs[1], gemm and query.is_transposed(node))
        if weights is None:
            return None
        bias = np.zeros(weights[0].shape[1], np.float32)
        if gemm:
            if (
                any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
                or node.attributes.get_int("transA", 0) != 0
            ):
                self.refuse(value, "a Gemm with alpha, beta or transA")
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                added = self.constant(node.inputs[2])
                if added is None or added.size not in (1, len(bias)):
                    self.refuse(value, "its bias is no constant vector")
                bias = bias + added.astype(np.float32).ravel()
        return LinearLayer(self.skip_qdq(node.inputs[0]), *weights, bias, self._input_qparams(node.inputs[0]))

    def _input_qparams(self, value: ir.Value | None) -> StaticQParams | None:
        """Returns the parameters of the per-tensor uint8 Q/DQ pair before a linear layer; None where there is none."""
        pair: list[list[Any]] = []
        while value is not None and (node := value.producer()) is not None:
            if query.is_op(node, "DequantizeLinear" if not pair else "QuantizeLinear"):
                pair.append([query.constant(qparam) for qparam in (*node.inputs[1:], None)[:2]])
                if len(pair) == 2:
                    break
            elif not query.is_op(node, "Identity", *(("Transpose", "Reshape", "GatherND") if pair else ("Cast",))):
                return None
            value = node.inputs[0]
        if len(pair) < 2:
            return None
        for one, other in zip(*pair, strict=True):
            if one is None or one.size != 1 or not np.array_equal(one, other):
                return None
        scale, zero_point = pair[0]
        if zero_point.dtype != np.uint8:
            return None
        return StaticQParams(float(np.float32(scale.item())), int(zero_point.item()))

    def _split_columns(self, value: ir.Value, node: ir.Node) -> LinearLayer | None:
        """Returns the columns that a Split takes of a merged linear layer, such as QKV."""
        whole = self._linear_layer(self.skip_qdq(node.inputs[0]))
        if whole is None:
            return None
        count, index = len(node.outputs), list(node.outputs).index(value)
        sizes = query.integers(node, "split", 1) or [len(whole.scale) // count] * count
        axis = node.attributes.get_int("axis", 0)
        if sum(sizes) != len(whole.scale) or axis not in (-1, (query.rank(node.inputs[0]) or 0) - 1):
            self.refuse(value, "it splits a linear layer otherwise than by columns")
        return whole.columns(sum(sizes[:index]), sum(sizes[: index + 1]))

    def _depends_on_tokens_alone(self, value: ir.Value) -> bool:
        """Returns whether `_evaluate` can compute `value`."""
        reached, seen = [value], {value}
        while reached:
            node = (one := reached.pop()).producer()
            if node is None and not one.is_initializer() and one.name not in self.names:
                return False
            read = set(query.values_read(node)) - seen if node is not None else set()
            seen |= read
            reached += read
        return True

    def _evaluate(self, value: ir.Value, result: ir.Value | None, length: int = PROBE, token: int = 0) -> Array:
        """Computes a value for one sentence that repeats a token, in source and target alike.

        Args:
            value: The value that is mapped; refused where `result` depends on more than the tokens.
            result: The value to compute.
            length: Number of tokens.
            token: Selects the token.

        Returns:
            The array.
        """
        assert result is not None
        if (array := self.constant(result)) is not None:
            return array
        inputs = {value.name for value in self.model.graph.inputs}
        try:
            part = edit.extract(self.model, [name for name in self.names if name in inputs], [str(result.name)])
        except RequestError:
            self.refuse(value, f"{result.name} depends on more than the tokens")
        feed = {
            str(x.name): self._probe(str(x.name), length, token).astype(ir.DataType(x.dtype or 7).numpy())
            for x in part.graph.inputs
        }
        return self._run(part, feed)

    def _float_part(self, inputs: list[str], output: ir.Value) -> ir.Model:
        """Returns the graph from some values to another, without the rounding of Q/DQ pairs between them."""
        part = edit.extract(self.model, inputs, [str(output.name)])
        for node in list(part.graph):
            before = node.inputs[0].producer() if query.is_op(node, "DequantizeLinear") and node.inputs[0] else None
            if before is not None and query.is_op(before, "QuantizeLinear") and before.inputs[0] is not None:
                node.outputs[0].replace_all_uses_with(before.inputs[0])
        return part

    def _run(self, part: ir.Model, feed: dict[str, Array]) -> Array:
        """Computes the only output of a part of the graph."""
        return reference_session.run(reference_session.session(part, "mapping it needs"), feed)[0]

    def _probe(self, name: str, length: int, token: int) -> Array:
        """Returns the tokens that `_evaluate` feeds to the input `name`, int64 [1, length]."""
        return np.full((1, length), token + 1, np.int64)

    def _scores(self, softmax: ir.Node) -> tuple[ir.Node, float, list[ir.Value | None]]:
        """Returns the MatMul of queries and keys before a Softmax, its scale, and its additive masks."""
        scale, masks, value = 1.0, [], self.skip_qdq(softmax.inputs[0])
        while (node := query.producer(value, "Div", "Mul", "Add")) is not None:
            factor = self.scalar(node.inputs[1])
            if node.op_type == "Add":
                producers = [self.skip_qdq(x).producer() for x in node.inputs]
                index = next((i for i, x in enumerate(producers) if x is not None and self._computes_scores(x)), None)
                if index is None:
                    self.refuse(value, "a sum in attention of which no part is the products")
                masks.append(node.inputs[1 - index])
                value = self.skip_qdq(node.inputs[index])
                continue
            if not factor:
                self.refuse(value, "products of attention scaled by more than one number")
            scale = scale / factor if node.op_type == "Div" else scale * factor
            value = self.skip_qdq(node.inputs[0])
        node = query.producer(value, "MatMul")
        if node is None:
            self.refuse(value, "expected the products of queries and keys before a Softmax")
        return node, scale, masks

    def _computes_scores(self, node: ir.Node) -> bool:
        """Returns whether an operator computes attention scores: products of queries and keys, scaled or masked."""
        if query.is_op(node, "Div", "Mul", "Add"):
            producers = [self.skip_qdq(x).producer() for x in node.inputs]
            return any(producer is not None and self._computes_scores(producer) for producer in producers)
        return query.is_op(node, "MatMul") and all(self.constant(x) is None for x in node.inputs)

    def _before_transpose(self, reader: ir.Value, value: ir.Value, perm: list[int]) -> ir.Value:
        """Returns the input of the Transpose `perm` that computes `value`; refuses `reader` for anything else."""
        node = query.producer(value, "Transpose")
        if node is None or list(node.attributes.get_ints("perm", [])) != perm:
            self.refuse(reader, f"expected a Transpose {perm} of the heads before it")
        return self.skip_qdq(node.inputs[0])

    def projection(self, heads: ir.Value | None, perm: list[int]) -> tuple[LinearLayer, Heads, float]:
        """Matches linear layer -> Reshape into heads -> Transpose.

        Args:
            heads: Queries, keys or values, in heads.
            perm: Permutation of the Transpose; [0, 2, 3, 1] may be two Transposes.

        Returns:
            The linear layer, its heads, and the scalar that multiplies it.
        """
        value, scale = self.skip_qdq(heads), 1.0
        while (node := query.producer(value, "Mul", "Div")) is not None:
            if not (factor := self.scalar(node.inputs[1])):
                self.refuse(value, "heads of attention scaled by more than one number")
            scale, value = (scale * factor if node.op_type == "Mul" else scale / factor), self.skip_qdq(node.inputs[0])
        node = query.producer(value, "Transpose")
        if node is not None and list(node.attributes.get_ints("perm", [])) == [0, 1, 3, 2]:
            value, perm = self.skip_qdq(node.inputs[0]), [0, 2, 1, 3]
        return *self.heads_of(self._before_transpose(value, value, perm)), scale

    def heads_of(self, reshaped: ir.Value, source: ir.Value | None = None) -> tuple[LinearLayer, Heads]:
        """Matches linear layer -> Reshape into heads.

        Args:
            reshaped: The result, [batch, tokens, heads, size].
            source: Result of the layer; None: what the Reshape reads.

        Returns:
            The linear layer and its heads.
        """
        reshape, shape, layer = reshaped.producer(), None, None
        if reshape is not None and query.is_op(reshape, "Reshape"):
            shape = query.shape_elements(reshape.inputs[1])
        if reshape is not None and shape is not None and len(shape) == 4:
            layer = self._linear_layer(self.skip_qdq(source or reshape.inputs[0]))
        if shape is None or layer is None:
            self.refuse(reshaped, "expected a Reshape of a linear layer into heads")
        width = len(layer.scale)
        count, size = shape[2], shape[3]
        if isinstance(size, int) and size > 0 and (not isinstance(count, int) or count < 1):
            count = width // size
        if (
            not isinstance(count, int)
            or count < 1
            or width % count
            or (isinstance(size, int) and size not in (-1, width // count))
        ):
            self.refuse(reshaped, f"it shapes {width} columns into heads {shape[2:]}")
        return layer, Heads(count, width // count, LANES if self.for_kernels else 1)


def _has_int8_weights(node: ir.Node) -> bool:
    """Returns whether an operator is a linear layer whose constant weights are int8."""
    parts = query.dequantized(node.inputs[1]) if query.is_op(node, "MatMul", "Gemm") else None
    return parts is not None and parts[0].dtype == np.int8
