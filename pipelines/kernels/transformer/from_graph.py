"""A Transformer's frozen graph as programs for the native encoder and decoder.

Matched by structure: pre- or post-LN, any number of layers, heads and widths, float weights or int8 ones behind
DequantizeLinear. What a linear layer takes is quantized as the Q/DQ pair before it says, or each row by itself where
there is none; other pairs on activations are looked through. With a pair a decoder's biases count in steps of the
product, as in a graph of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.graph import edit, query, reference_session
from pipelines.kernels.transformer.program import (
    LANES,
    MEMORY,
    Attention,
    CrossAttention,
    Embed,
    EncoderProgram,
    Levels,
    Linear,
    Norm,
    Program,
    RowLinear,
    SelfAttention,
    Step,
    Vocabulary,
)
from pipelines.quantization.scales import weight_qparams

Array = NDArray[Any]
Floats = NDArray[np.float32]
HIDDEN = -1e4  # what a mask adds at least, where attention must not look
PROBE = 5  # tokens that masks are tried on


def program(
    model: ir.Model, source: str = "source", target: str = "target", memory: str = "memory", logits: str = "logits"
) -> Program:
    """The decoder of a graph: from tokens `source` and `target` (all so far) to the `logits` of the next, the encoder's
    result `memory`.

    All four are values by name; a graph that was cut at `memory` does as well. Float weights become int8 by the house's
    rule (max|W| / 127, per output channel). Raises RequestError, naming the operator and the reason, for what is no
    such decoder.
    """
    return _Mapper(model, (source, target), memory).decoder(logits)


def encoder_program(model: ir.Model, source: str = "source", memory: str = "memory") -> EncoderProgram:
    """The encoder of a graph, from tokens `source` to `memory`; as `program`. What hides padding is left out, for there
    will be none.
    """
    return _Mapper(model, (source,), "").encoder(memory)


def programs(model: ir.Model) -> tuple[EncoderProgram, Program]:
    """Both. Embeddings that are the same integers, by tokens, are one array; those of the vocabulary's weights are
    these, transposed.
    """
    encoder, decoder = encoder_program(model), program(model)
    table = decoder.vocabulary.layer.weight.T
    if not np.array_equal(table, decoder.embedding.table):
        table = decoder.embedding.table
    decoder = changed(decoder, steps=[changed(decoder.embedding, table=table), *decoder.steps[1:]])
    if np.array_equal(table, encoder.embedding.table):
        encoder = changed(encoder, steps=[changed(encoder.embedding, table=table), *encoder.steps[1:]])
    return encoder, decoder


@dataclass(frozen=True)
class _Dense:
    """x W + b for the value x, quantized by `levels`: integers int8 [K, N], scale and shift float32 [N]."""

    x: ir.Value
    integers: Array
    scale: Floats
    shift: Floats
    levels: Levels | None

    def columns(self, first: int, last: int) -> _Dense:
        return changed(
            self, integers=self.integers[:, first:last], scale=self.scale[first:last], shift=self.shift[first:last]
        )

    def layer(self) -> RowLinear:
        return RowLinear(np.ascontiguousarray(self.integers), self.scale, self.shift, self.levels)


@dataclass(frozen=True)
class _Rows:
    """Embeddings: integers int8 [words, width], scale float32 [words]."""

    integers: Array
    scale: Floats


@dataclass(frozen=True)
class _Heads:
    """The columns of heads: `size` of each count, `room` with what pads them."""

    count: int
    size: int

    @property
    def room(self) -> int:
        return -(-self.size // LANES) * LANES

    def spread(self, array: Array) -> Array:
        """[..., count * size] -> [..., count * room], zeros in between."""
        if self.room == self.size:
            return array
        parts = array.reshape(*array.shape[:-1], self.count, self.size)
        wide = [(0, 0)] * (parts.ndim - 1) + [(0, self.room - self.size)]
        return np.pad(parts, wide).reshape(*array.shape[:-1], self.count * self.room)

    def dense(self, dense: _Dense, times: float = 1.0) -> _Dense:
        scale, shift = (each * np.float32(times) for each in (dense.scale, dense.shift))
        return changed(dense, integers=self.spread(dense.integers), scale=self.spread(scale), shift=self.spread(shift))


class _Mapper:
    def __init__(self, model: ir.Model, names: tuple[str, ...], memory: str) -> None:
        self.model, self.names, self.memory = (
            model,
            names,
            memory,
        )  # names: inputs of tokens, the last are those embedded
        self.what = "decoder" if memory else "encoder"
        self.steps: list[Step] = []
        self.registers: dict[ir.Value, int] = {}
        self.heads: dict[int, _Heads] = {}  # of a register that is padded
        self.width = 0  # of the memory

    def decoder(self, logits: str) -> Program:
        last = self.value(logits)
        dense = self.dense(last)
        if dense is None:
            self.refuse(last, "wanted a matrix product with constant weights, the vocabulary")
        self.steps.append(Vocabulary(self.register(dense.x), self.padded(dense).layer()))
        if not isinstance(self.steps[0], Embed):
            self.refuse(last, "found no embedding of the target tokens before it")
        if not self.width:
            self.refuse(last, f"nothing before it looks at the encoder's result, the value {self.memory}")
        return Program(_reused(_agreed(self.steps)), self.width)

    def encoder(self, memory: str) -> EncoderProgram:
        last = self.value(memory)
        self.plain(last, last)
        if not isinstance(self.steps[0], Embed):
            self.refuse(last, "found no embedding of the source tokens before it")
        return EncoderProgram(_reused(_agreed(self.steps)))

    def value(self, name: str) -> ir.Value:
        """An output of the graph, or any value of it."""
        found = (
            each for each in (*self.model.graph.outputs, *(one for node in self.model.graph for one in node.outputs))
        )
        if (value := next((each for each in found if each.name == name), None)) is None:
            raise RequestError(f"the graph {self.model.graph.name} has no value {name}")
        return value

    def refuse(self, value: ir.Value, why: str) -> NoReturn:
        node = value.producer()
        what = f"the input {value.name}" if node is None else f"{node.op_type} {query.label(node)}"
        raise RequestError(f"the native decoder cannot map {what}: {why}; use another engine")

    # ---------------------------------------------------------------------------------------------------------- values

    def real(self, value: ir.Value | None) -> ir.Value:
        """The value before Q/DQ pairs, casts and the like."""
        assert value is not None
        while (node := value.producer()) is not None and value.name != self.memory:
            through = query.standard(node, "QuantizeLinear", "DequantizeLinear", "Identity", "Cast")
            if not through or node.inputs[0] is None or self.constant(node.inputs[0]) is not None:
                break
            value = node.inputs[0]
        return value

    def constant(self, value: ir.Value | None) -> Array | None:
        """The array behind a DequantizeLinear, Transpose, Identity or a Cast to float32, or as it is."""
        node = value.producer() if value is not None else None
        if (array := query.constant(value)) is not None or node is None:
            return array
        if (found := query.dequantized(value)) is not None:
            integers, scale, zero = found
            axis = node.attributes.get_int("axis", 1)
            shape = [-1 if i == axis % integers.ndim else 1 for i in range(integers.ndim)] if scale.size > 1 else []
            offset = 0 if zero is None else zero.astype(np.int32).reshape(shape if zero.size > 1 else [])
            return np.asarray((integers.astype(np.int32) - offset) * scale.reshape(shape), np.float32)
        if (
            query.standard(node, "Identity", "Transpose", "Cast")
            and (array := self.constant(node.inputs[0])) is not None
        ):
            if node.op_type == "Cast":
                return array.astype(np.float32) if node.attributes.get_int("to", 0) == ir.DataType.FLOAT else None
            return (
                array.transpose(node.attributes.get_ints("perm", range(array.ndim)[::-1]))
                if node.op_type == "Transpose"
                else array
            )
        return None

    def scalar(self, value: ir.Value | None) -> float | None:
        array = self.constant(value)
        return float(array.item()) if array is not None and array.size == 1 else None

    def weights(self, value: ir.Value | None, transposed: bool) -> tuple[Array, Floats] | None:
        """(int8 [K, N], scale [N]) of a constant matrix."""
        found = query.dequantized(value)
        if (
            found is not None
            and found[0].dtype == np.int8
            and found[0].ndim == 2
            and (found[2] is None or not found[2].any())
        ):
            integers, scale, _ = found
            node = value.producer() if value is not None else None
            assert node is not None
            if scale.size == 1 or node.attributes.get_int("axis", 1) % 2 != transposed:
                integers = integers.T if transposed else integers
                return integers, np.broadcast_to(scale.astype(np.float32).ravel(), integers.shape[1])
        array = self.constant(value)
        if array is None or array.ndim != 2 or array.dtype.kind != "f":
            return None
        scale, integers = weight_qparams((array.T if transposed else array).astype(np.float32), 1)
        return integers, scale

    def dense(self, value: ir.Value) -> _Dense | None:
        """The linear layer that computes `value`, with its bias, or some of its columns; None for anything else."""
        node = value.producer()
        if node is None:
            return None
        if query.standard(node, "Split"):
            return self.split(value, node)
        if query.standard(node, "Add"):
            for at, other in ((0, 1), (1, 0)):
                bias, found = self.constant(node.inputs[at]), self.dense(self.real(node.inputs[other]))
                if bias is not None and found is not None and bias.size in (1, len(found.scale)):
                    return changed(found, shift=found.shift + bias.astype(np.float32).ravel())
            return None
        gemm = query.standard(node, "Gemm")
        if not gemm and not query.standard(node, "MatMul"):
            return None
        weights = self.weights(node.inputs[1], gemm and node.attributes.get_int("transB", 0) != 0)
        if weights is None:
            return None
        shift = np.zeros(weights[0].shape[1], np.float32)
        if gemm:
            if (
                any(node.attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
                or node.attributes.get_int("transA", 0) != 0
            ):
                self.refuse(value, "a Gemm with alpha, beta or transA")
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                bias = self.constant(node.inputs[2])
                if bias is None or bias.size not in (1, len(shift)):
                    self.refuse(value, "its bias is no constant vector")
                shift = shift + bias.astype(np.float32).ravel()
        return _Dense(self.real(node.inputs[0]), *weights, shift, self.levels(node.inputs[0]))

    def levels(self, value: ir.Value | None) -> Levels | None:
        """How the Q/DQ pair before a linear layer quantizes its input; None where there is none, or none with one uint8
        zero point.
        """
        pair: list[list[Any]] = []
        while value is not None and (node := value.producer()) is not None:
            if query.standard(node, "DequantizeLinear" if not pair else "QuantizeLinear"):
                pair.append([query.constant(each) for each in (*node.inputs[1:], None)[:2]])
                if len(pair) == 2:
                    break
            elif not query.standard(node, "Identity", *(("Transpose", "Reshape", "GatherND") if pair else ("Cast",))):
                return None
            value = node.inputs[0]
        if len(pair) < 2 or any(
            each is None or each.size != 1 or not np.array_equal(each, pair[1][i]) for i, each in enumerate(pair[0])
        ):
            return None
        scale, zero = pair[0]
        return Levels(float(np.float32(scale.item())), int(zero.item())) if zero.dtype == np.uint8 else None

    def split(self, value: ir.Value, node: ir.Node) -> _Dense | None:
        """Columns of a merged layer."""
        whole = self.dense(self.real(node.inputs[0]))
        if whole is None:
            return None
        count, at = len(node.outputs), list(node.outputs).index(value)
        sizes = query.integers(node, "split", 1) or [len(whole.scale) // count] * count
        axis = node.attributes.get_int("axis", 0)
        if sum(sizes) != len(whole.scale) or axis not in (-1, (query.rank(node.inputs[0]) or 0) - 1):
            self.refuse(value, "it splits a linear layer otherwise than by columns")
        return whole.columns(sum(sizes[:at]), sum(sizes[: at + 1]))

    def padded(self, dense: _Dense) -> _Dense:
        """The layer for the columns that its input has as a register."""
        heads = self.heads.get(self.register(dense.x))
        return dense if heads is None else changed(dense, integers=heads.spread(dense.integers.T).T)

    # ----------------------------------------------------------------------------------------------------------- steps

    def register(self, value: ir.Value) -> int:
        """The register that holds `value`; what computes it is appended to the steps, once."""
        value = self.real(value)
        if value not in self.registers:
            self.registers[value] = self.append(value)
        return self.registers[value]

    def add(self, made: type[Any], *arguments: Any, **more: Any) -> int:
        out = len(self.steps)
        self.steps.append(made(*arguments, out=out, **more))
        return out

    def append(self, value: ir.Value) -> int:
        node = value.producer()
        if node is None or value.name == self.memory:
            self.refuse(value, "it is read otherwise than by the keys and values of attention")
        if query.standard(node, "LayerNormalization"):
            return self.norm(value, node)
        if query.standard(node, "Relu"):
            dense = self.dense(self.real(node.inputs[0]))
            if dense is None:
                self.refuse(value, "a ReLU after something else than a linear layer")
            return self.linear(dense, relu=True)
        if (dense := self.dense(value)) is not None:
            return self.linear(dense)
        if query.standard(node, "Add"):
            return self.sum(value, node)
        if self.memory and query.standard(node, "GatherND", "Gather"):
            return self.newest(value, node)
        if query.standard(node, "Reshape"):
            return self.attention(value, node)
        self.refuse(value, f"no step of the {self.what} computes this")

    def norm(self, value: ir.Value, node: ir.Node) -> int:
        scale = self.constant(node.inputs[1])
        bias = self.constant(node.inputs[2]) if len(node.inputs) > 2 else None
        rank = query.rank(node.inputs[0])
        if scale is None or scale.ndim != 1 or (len(node.inputs) > 2 and bias is None):
            self.refuse(value, "its scale and bias are no constant vectors")
        if node.attributes.get_int("axis", -1) not in (-1, (rank or 0) - 1):
            self.refuse(value, "it normalizes over more than the last axis")
        at = self.plain(value, node.inputs[0])
        scale = scale.astype(np.float32)
        bias = np.zeros_like(scale) if bias is None else bias.astype(np.float32)
        return self.add(Norm, at, scale, bias, float(np.float32(node.attributes.get_float("epsilon", 1e-5))))

    def plain(self, value: ir.Value, given: ir.Value | None) -> int:
        """A register whose columns are not padded."""
        assert given is not None
        at = self.register(given)
        if at in self.heads:
            self.refuse(
                value, f"it reads heads of attention of {self.heads[at].size} columns, wanted a multiple of {LANES}"
            )
        return at

    def linear(self, dense: _Dense, relu: bool = False, residual: int | None = None) -> int:
        if (
            dense.levels is not None and self.memory
        ):  # as in the graph of a step, see `FuseQuantizedLinear`: the same bytes follow
            steps = np.float32(dense.levels.scale) * dense.scale  # 0 in columns that pad heads
            count = np.rint(np.divide(dense.shift, steps, out=np.zeros_like(steps, np.float64), where=steps > 0))
            dense = changed(dense, shift=count.astype(np.float32) * steps)
        layer = self.padded(dense).layer()
        return self.add(Linear, self.register(dense.x), layer, relu=relu, residual=residual)

    def sum(self, value: ir.Value, node: ir.Node) -> int:
        inputs = [self.real(each) for each in node.inputs]
        for one, other in (inputs, inputs[::-1]):
            if (rows := self.lookup(one)) is not None:
                return self.embed(value, rows, other)
        for one, other in (inputs, inputs[::-1]):
            before = one.producer()
            relu = before is not None and query.standard(before, "Relu")
            dense = self.dense(self.real(before.inputs[0]) if relu and before is not None else one)
            if dense is not None:
                return self.linear(dense, relu, self.plain(value, other))
        self.refuse(value, "a sum of which no part is a linear layer or an embedding")

    def newest(self, value: ir.Value, node: ir.Node) -> int:
        """Of all rows the last, the one that a step computes."""
        at = self.real(node.inputs[0])
        found = self.tried(value, node.inputs[1])
        if (
            node.op_type != "GatherND"
            or node.attributes.get_int("batch_dims", 0) != 1
            or not np.array_equal(found.ravel(), [PROBE - 1])
        ):
            self.refuse(value, "it picks other rows than that of the last token")
        return self.register(at)

    def lookup(self, value: ir.Value) -> _Rows | None:
        """The embeddings' rows, where `value` is a Gather of them by tokens, maybe multiplied by a number."""
        times = 1.0
        while (node := value.producer()) is not None and query.standard(node, "Mul", "Div"):
            factor = self.scalar(node.inputs[1])
            given = node.inputs[0]
            if factor is None and node.op_type == "Mul":
                factor, given = self.scalar(node.inputs[0]), node.inputs[1]
            if factor is None or given is None:
                return self.scaled(node, times)
            times, value = (times * factor if node.op_type == "Mul" else times / factor), self.real(given)
        if (table := self.table(value)) is None:
            return None
        if table.dtype.kind != "f":  # bytes, with one scale behind the Gather
            step = next((use.node for use in value.uses() if use.node.op_type == "DequantizeLinear"), None)
            one, zero = (
                (None, None) if step is None else (query.constant(each) for each in (*step.inputs[1:], None)[:2])
            )
            if one is None or one.size != 1:
                self.refuse(value, "its table has no single scale")
            table = (table.astype(np.int32) - (0 if zero is None else int(zero.item()))) * one.astype(np.float32)
        scale, integers = weight_qparams(table.astype(np.float32), 0)
        return _Rows(integers, scale * np.float32(times))

    def scaled(self, node: ir.Node, times: float) -> _Rows | None:
        """Rows of bytes multiplied by a scale each."""
        found = [self.table(self.real(each)) for each in node.inputs]
        for integers, scale in (found, found[::-1]):
            if (
                integers is not None
                and scale is not None
                and integers.dtype == np.int8
                and scale.shape == (len(integers), 1)
            ):
                return _Rows(integers, scale.ravel().astype(np.float32) * np.float32(times))
        return None

    def table(self, value: ir.Value) -> Array | None:
        """The matrix of which a Gather takes rows by tokens."""
        node = value.producer()
        if node is None or not query.standard(node, "Gather") or node.attributes.get_int("axis", 0) != 0:
            return None
        indices = self.real(node.inputs[1])
        if indices.producer() is not None or indices.name != self.names[-1]:
            return None
        table = self.constant(node.inputs[0])
        if table is None or table.ndim != 2:
            self.refuse(value, "its table is no constant matrix")
        return table

    def embed(self, value: ir.Value, rows: _Rows, positions: ir.Value) -> int:
        width = rows.integers.shape[1]
        node = positions.producer()
        constants = [] if node is None else [self.constant(each) for each in node.inputs]
        most = max(
            (len(each) for each in constants if each is not None and each.ndim in (2, 3) and each.shape[-1] == width),
            default=0,
        )
        if not most:
            self.refuse(value, "what is added to the embeddings is no slice of a constant table of positions")
        found = self.tried(value, positions, most)
        if found.size != most * width or not np.array_equal(found, self.tried(value, positions, most, 1)):
            self.refuse(value, "what is added to the embeddings is more than a position's row")
        return self.add(Embed, rows.integers, rows.scale, np.ascontiguousarray(found.reshape(most, -1), np.float32))

    def tried(self, value: ir.Value, wanted: ir.Value | None, length: int = PROBE, token: int = 0) -> Array:
        """`wanted` of one sentence of `length` tokens, the same for source and target, computed; it depends on nothing
        else.
        """
        assert wanted is not None
        if (known := self.constant(wanted)) is not None:
            return known
        inputs = {each.name: each for each in self.model.graph.inputs}
        try:
            part = edit.part(self.model, [name for name in self.names if name in inputs], [str(wanted.name)])
        except RequestError:
            self.refuse(value, f"{wanted.name} depends on more than the tokens")
        tokens = np.full((1, length), token + 1, np.int64)
        feed = {str(each.name): tokens.astype(ir.DataType(each.dtype or 7).numpy()) for each in part.graph.inputs}
        return reference_session.run(reference_session.session(part, "mapping it needs"), feed)[0]

    # ------------------------------------------------------------------------------------------------------- attention

    def attention(self, value: ir.Value, node: ir.Node) -> int:
        joined = self.real(node.inputs[0])
        product = self.transposed(value, joined, [0, 2, 1, 3]).producer()
        soft = (
            None
            if product is None or not query.standard(product, "MatMul")
            else self.real(product.inputs[0]).producer()
        )
        if (
            product is None
            or soft is None
            or not query.standard(soft, "Softmax")
            or soft.attributes.get_int("axis", -1) not in (-1, 3)
        ):
            self.refuse(
                value,
                f"no step of the {self.what} reshapes, but attention that joins heads: Softmax, MatMul, Transpose, "
                "Reshape",
            )
        times, masks, scores = 1.0, [], self.real(soft.inputs[0])
        while (each := scores.producer()) is not None and query.standard(each, "Div", "Mul", "Add"):
            factor = self.scalar(each.inputs[1])
            if each.op_type == "Add":
                at = next(
                    (
                        i
                        for i in (0, 1)
                        if (one := self.real(each.inputs[i]).producer()) is not None and self.product(one)
                    ),
                    None,
                )
                if at is None:
                    self.refuse(scores, "a sum in attention of which no part is the products")
                masks.append(each.inputs[1 - at])
                scores = self.real(each.inputs[at])
                continue
            if not factor:
                self.refuse(scores, "products of attention scaled by more than one number")
            times = times / factor if each.op_type == "Div" else times * factor
            scores = self.real(each.inputs[0])
        if each is None or not query.standard(each, "MatMul"):
            self.refuse(scores, "wanted the products of queries and keys before a Softmax")
        queries, heads, more = self.part(each.inputs[0], [0, 2, 1, 3])
        keys, key_heads, most = self.part(each.inputs[1], [0, 2, 3, 1])
        values, value_heads, factor = self.part(product.inputs[1], [0, 2, 1, 3])
        if not heads == key_heads == value_heads or factor != 1:
            self.refuse(value, "queries, keys and values have other heads than each other")
        queries, keys, values = heads.dense(queries, times * more * most), heads.dense(keys), heads.dense(values)
        own = keys.x is values.x and keys.x is queries.x
        self.check(value, masks, own and bool(self.memory))
        if own:
            out = self.add(
                SelfAttention if self.memory else Attention, self.linear(_merged(queries, keys, values)), heads.count
            )
        elif keys.x is values.x and self.memory and keys.x.name == self.memory:
            layer = _merged(keys, values).layer()
            if self.width not in (0, layer.inputs):
                self.refuse(value, f"it takes a memory of width {layer.inputs}, others {self.width}")
            self.width = layer.inputs
            out = self.add(CrossAttention, self.linear(queries), layer, heads.count)
        else:
            self.refuse(
                value, f"its keys and values come neither from its queries' input nor from {self.memory or 'elsewhere'}"
            )
        if heads.room != heads.size:
            self.heads[out] = heads
        return out

    def product(self, node: ir.Node) -> bool:
        """Whether products of queries and keys come out of this, scaled or masked."""
        while query.standard(node, "Div", "Mul", "Add"):
            before = [self.real(each).producer() for each in node.inputs]
            found = next((each for each in before if each is not None and self.product(each)), None)
            if found is None:
                return False
            node = found
        return query.standard(node, "MatMul") and all(self.constant(each) is None for each in node.inputs)

    def transposed(self, value: ir.Value, given: ir.Value, perm: list[int]) -> ir.Value:
        node = given.producer()
        if node is None or not query.standard(node, "Transpose") or list(node.attributes.get_ints("perm", [])) != perm:
            self.refuse(value, f"wanted a Transpose {perm} of the heads before it")
        return self.real(node.inputs[0])

    def part(self, given: ir.Value | None, perm: list[int]) -> tuple[_Dense, _Heads, float]:
        """The linear layer behind queries, keys or values, their heads, and what they are multiplied by."""
        value, times = self.real(given), 1.0
        while (node := value.producer()) is not None and query.standard(node, "Mul", "Div"):
            if not (factor := self.scalar(node.inputs[1])):
                self.refuse(value, "heads of attention scaled by more than one number")
            times, value = (times * factor if node.op_type == "Mul" else times / factor), self.real(node.inputs[0])
        if (
            node is not None
            and query.standard(node, "Transpose")
            and list(node.attributes.get_ints("perm", [])) == [0, 1, 3, 2]
        ):
            value, perm = self.real(node.inputs[0]), [0, 2, 1, 3]
        split = self.transposed(value, value, perm)
        reshape = split.producer()
        shape = (
            query.elements(reshape.inputs[1]) if reshape is not None and query.standard(reshape, "Reshape") else None
        )
        dense = (
            self.dense(self.real(reshape.inputs[0]))
            if reshape is not None and shape is not None and len(shape) == 4
            else None
        )
        if shape is None or dense is None:
            self.refuse(split, "wanted a Reshape of a linear layer into heads")
        width = len(dense.scale)
        count, size = shape[2], shape[3]
        if isinstance(size, int) and size > 0 and (not isinstance(count, int) or count < 1):
            count = width // size
        if (
            not isinstance(count, int)
            or count < 1
            or width % count
            or (isinstance(size, int) and size not in (-1, width // count))
        ):
            self.refuse(split, f"it shapes {width} columns into heads {shape[2:]}")
        return dense, _Heads(count, width // count), times

    def check(self, value: ir.Value, masks: list[ir.Value | None], own: bool) -> None:
        """A decoder looks at no later token of its own; all is looked at else."""
        total: Array = np.zeros((PROBE, PROBE), np.float32)
        for each in masks:
            total = total + self.tried(value, each).reshape(-1, PROBE)
        seen = np.tril(np.ones((PROBE, PROBE), bool)) if own else np.ones((PROBE, PROBE), bool)
        if (total[seen] != 0).any() or (total[~seen] > HIDDEN).any():
            self.refuse(
                value, "its mask lets it look at later tokens" if own else "its mask hides tokens of the source"
            )


def _merged(*parts: _Dense) -> _Dense:
    """Layers of the same value as one."""
    integers, scale, shift = (
        np.concatenate([getattr(each, name) for each in parts], -1) for name in ("integers", "scale", "shift")
    )
    levels = parts[0].levels if len({each.levels for each in parts}) == 1 else None
    return _Dense(parts[0].x, integers, scale, shift, levels)


def _agreed(steps: list[Step]) -> list[Step]:
    """The same steps, each register still written once: where layers take the same rows by other levels, each row goes
    by its own range.
    """
    known: dict[int, set[Levels | None]] = {}

    def among(step: Linear | CrossAttention | Vocabulary) -> set[Levels | None]:
        return known.setdefault(MEMORY if isinstance(step, CrossAttention) else step.input, set())

    for step in steps:
        if isinstance(step, Linear | CrossAttention | Vocabulary):
            among(step).add(step.layer.levels)
    return [
        changed(step, layer=changed(step.layer, levels=None))
        if isinstance(step, Linear | CrossAttention | Vocabulary) and len(among(step)) > 1
        else step
        for step in steps
    ]


def _reused(steps: list[Step]) -> list[Step]:
    """The same steps with as few registers as will do: one whose last reader has gone is written again."""
    last = {
        at: i
        for i, step in enumerate(steps)
        for at in (getattr(step, "input", None), getattr(step, "residual", None))
        if at is not None
    }
    place: dict[int, int] = {}
    free: list[int] = []
    found: list[Step] = []
    for i, step in enumerate(steps):
        change = {name: place[at] for name in ("input", "residual") if (at := getattr(step, name, None)) is not None}
        done = [at for at in set(_read(step)) if last[at] == i]
        residual = getattr(step, "residual", None)
        if residual in done and residual != getattr(step, "input", None):  # each element is read before it is written
            done.remove(residual)
            free.append(place[residual])
        if not isinstance(step, Vocabulary):
            out = free.pop() if free else len(set(place.values()))
            place[step.out] = change["out"] = out
        free.extend(place[at] for at in done)
        found.append(changed(step, **change))  # type: ignore[arg-type]
    return found


def _read(step: Step) -> list[int]:
    """The registers that a step reads."""
    return [at for name in ("input", "residual") if (at := getattr(step, name, None)) is not None]
