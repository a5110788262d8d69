"""Export of the weights of a BERT-shaped network to fp32.onnx, as a naive graph that the rewrites optimize."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pipelines.core.files import read_json
from pipelines.graph import io, query
from pipelines.graph.infer import infer_shapes
from pipelines.models.hub import CARD
from zoo.texts.models.config import EMBEDDING, IDS, MASK, SCORES, TYPES, Form
from zoo.texts.models.weights import FILE, KINDS, Floats, parameters, read, shared_names
from zoo.training.onnx_builder import OPSET, Writer

HIDDEN = "hidden"
NOWHERE = -1e9  # added to a score, it leaves no weight
SHORTEST = 1e-12  # length of a vector that is normalized, at least
FURTHEST = 128  # tokens beyond which MPNet's relative positions are one


def freeze(folder: str | Path) -> dict[str, Any]:
    """Write fp32.onnx (see `export`) of a folder with a card, or train.json, and weights. Returns its parameters,
    operators and bytes.

    The same weights give the same bytes. Raises RequestError where the weights are missing, broken, or not of the form
    that the card tells.
    """
    folder = Path(folder)
    about = read_json(folder / CARD)
    form = Form.from_json(about["preprocessing"]["form"])
    weights = folder / about.get("weights", {}).get("file", FILE)
    state = shared_names(form, read(weights), weights)
    exported = export(form, state)
    path = io.save(exported, folder / "fp32.onnx")
    return {
        "parameters": parameters(state),
        "operators": query.op_counts(exported),
        "bytes": {each.name: each.stat().st_size for each in (weights, path)},
    }


def export(form: Form, state: Mapping[str, Floats]) -> ir.Model:
    """The network as one graph over padded texts: input_ids and attention_mask (1 for a token, 0 for padding), int64
    [batch, tokens], -> embedding, float32 [batch, width], or scores, float32 [batch, labels].

    A head that scores pairs of texts takes token_type_ids too, where the network has types; all are 0 in an encoder of
    one text. The value `hidden`, float32 [batch, tokens, width], is the last layer's. state: see
    `zoo.texts.models.weights.shared_names`; linear layers are transposed.
    """
    main = ir.Graph([], [], nodes=[], name="texts", opset_imports={"": OPSET})
    writer = _Writer(main, form, state)
    names = (IDS, MASK, *([TYPES] if form.labels and form.types > 1 else []))
    ids, mask, *types = (writer.tokens(name) for name in names)
    x = writer.embed(ids, types[0] if types else None)
    bias = writer.bias(ids, mask)
    for i in range(form.layers):
        x = writer.layer_of(x, bias, f"layers.{i}", last=i == form.layers - 1)
    result = writer.head(x) if form.labels else writer.pool(x, mask)
    result.shape = ir.Shape(["batch", form.labels or form.width])
    main.outputs.append(result)
    exported = ir.Model(main, ir_version=9)
    infer_shapes(exported)
    return exported


class _Writer(Writer):
    """Appends the parts of a network to a graph."""

    def __init__(self, main: ir.Graph, form: Form, state: Mapping[str, Floats]) -> None:
        super().__init__(main)
        self.form, self.state = form, state

    def tokens(self, name: str) -> ir.Value:
        """An input, one number a token."""
        self.taken.add(name)
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "tokens"]))
        self.main.inputs.append(value)
        return value

    def constant(self, name: str, value: NDArray[Any] | list[int] | float) -> ir.Value:
        """An initializer, made at its first use."""
        return self.weight(name, np.array(value, np.float32) if isinstance(value, float) else np.asarray(value))

    def parameter(self, name: str, transposed: bool = False) -> ir.Value:
        """A weight of the network."""
        array = self.state[name]
        return self.weight(name, np.ascontiguousarray(array.T) if transposed else array)

    def linear(self, x: ir.Value, path: str, result: str = "") -> ir.Value:
        """x W + b over the last axis."""
        y = self.add("MatMul", [x, self.parameter(f"{path}.weight", transposed=True)], path)
        return self.add("Add", [y, self.parameter(f"{path}.bias")], result or f"{path}.biased")

    def norm(self, x: ir.Value, path: str, result: str = "") -> ir.Value:
        """Layer normalization over the last axis."""
        weights = [self.parameter(f"{path}.{key}") for key in ("weight", "bias")]
        return self.add("LayerNormalization", [x, *weights], result or path, axis=-1, epsilon=self.form.epsilon)

    def _length(self, ids: ir.Value) -> ir.Value:
        return self.add("Shape", [ids], "length", dtype=ir.DataType.INT64, start=1, end=2)

    def embed(self, ids: ir.Value, types: ir.Value | None) -> ir.Value:
        """Token + (position + type) embedding, normalized: float32 [batch, tokens, width]."""
        rows = self.add("Gather", [self.parameter("token.weight"), ids], "tokens")
        first = self.form.first_position
        table = self.state["position.weight"][first:]
        if self.form.types and types is None:
            table = table + self.state["type.weight"][0]
        others = self.add(
            "Slice",
            [self.weight("positions", table), self.constant("first", [0]), self._length(ids)],
            "positions.sliced",
        )
        if types is not None:
            kinds = self.add("Gather", [self.parameter("type.weight"), types], "types")
            others = self.add("Add", [kinds, others], "places")
        return self.norm(self.add("Add", [rows, others], "embedded"), "embedding_norm")

    def bias(self, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """What is added to attention's scores, float32 [batch, 1 or heads, 1 or tokens, tokens]: `NOWHERE` at padding,
        and MPNet's relative positions.
        """
        given = self.add("Cast", [mask], "given", to=int(ir.DataType.FLOAT))
        missing = self.add("Sub", [self.constant("one", 1.0), given], "missing")
        scores = self.add("Mul", [missing, self.constant("nowhere", NOWHERE)], "padding")
        scores = self.add("Unsqueeze", [scores, self.constant("heads_queries", [1, 2])], "mask")
        if not self.form.buckets:
            return scores
        count = self.add("Squeeze", [self._length(ids)], "count", dtype=ir.DataType.INT64)
        bounds = [self.constant("zero.int", np.array(0)), count, self.constant("one.int", np.array(1))]
        places = self.add("Range", bounds, "places", dtype=ir.DataType.INT64)
        rows = self.add("Unsqueeze", [places, self.constant("columns", [1])], "place", dtype=ir.DataType.INT64)
        ahead = self.add("Sub", [places, rows], "ahead", dtype=ir.DataType.INT64)
        offset = self.constant("furthest", np.array(self.form.longest - 1))
        index = self.add("Add", [ahead, offset], "distance", dtype=ir.DataType.INT64)
        table = self.weight("relative", relative_rows(self.form, self.state["relative.weight"]))
        found = self.add("Gather", [table, index], "relative.gathered")
        found = self.add("Transpose", [found], "relative.heads", perm=[2, 0, 1])
        return self.add("Add", [scores, found], "relative.mask")

    def layer_of(self, x: ir.Value, bias: ir.Value, path: str, last: bool) -> ir.Value:
        """One layer: attention, then feed-forward, each with its residual and normalization after it."""
        form = self.form
        heads = self.constant("heads", [0, 0, form.heads, -1])

        def split(kind: str, order: list[int]) -> ir.Value:
            parts = self.add("Reshape", [self.linear(x, f"{path}.{kind}"), heads], f"{path}.{kind}.heads")
            return self.add("Transpose", [parts], f"{path}.{kind}.split", perm=order)

        queries, keys, values = (
            split(kind, order)
            for kind, order in (("query", [0, 2, 1, 3]), ("key", [0, 2, 3, 1]), ("value", [0, 2, 1, 3]))
        )
        scores = self.add("MatMul", [queries, keys], f"{path}.products")
        scale = math.sqrt(form.width // form.heads)
        scores = self.add("Div", [scores, self.constant("attention.scale", scale)], f"{path}.scaled")
        scores = self.add("Add", [scores, bias], f"{path}.masked")
        weights = self.add("Softmax", [scores], f"{path}.weights", axis=-1)
        found = self.add("MatMul", [weights, values], f"{path}.found")
        found = self.add("Transpose", [found], f"{path}.found.split", perm=[0, 2, 1, 3])
        found = self.add("Reshape", [found, self.constant("joined", [0, 0, form.width])], f"{path}.joined")
        x = self.add("Add", [x, self.linear(found, f"{path}.output")], f"{path}.sum")
        x = self.norm(x, f"{path}.attention_norm")
        y = self.activate(self.linear(x, f"{path}.up"), path)
        y = self.add("Add", [x, self.linear(y, f"{path}.down")], f"{path}.feed.sum")
        return self.norm(y, f"{path}.norm", HIDDEN if last else "")

    def activate(self, x: ir.Value, path: str) -> ir.Value:
        """The activation between the layers of feed-forward."""
        kind, one, half = self.form.activation, self.constant("one", 1.0), self.constant("half", 0.5)
        if kind == "relu":
            return self.add("Relu", [x], f"{path}.relu")
        if kind == "swish":
            return self.add("Mul", [x, self.add("Sigmoid", [x], f"{path}.sigmoid")], f"{path}.swish")
        if kind == "gelu":
            inner = self.add("Div", [x, self.constant("sqrt2", math.sqrt(2))], f"{path}.deviations")
            share = self.add("Erf", [inner], f"{path}.erf")
        else:  # x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
            cube = self.add("Pow", [x, self.constant("three", 3.0)], f"{path}.cube")
            cube = self.add("Mul", [cube, self.constant("cubic", 0.044715)], f"{path}.cubic")
            inner = self.add("Add", [x, cube], f"{path}.inner")
            inner = self.add("Mul", [inner, self.constant("slope", math.sqrt(2 / math.pi))], f"{path}.slope")
            share = self.add("Tanh", [inner], f"{path}.tanh")
        product = self.add("Mul", [x, self.add("Add", [share, one], f"{path}.share")], f"{path}.twice")
        return self.add("Mul", [product, half], f"{path}.gelu")

    def pool(self, x: ir.Value, mask: ir.Value) -> ir.Value:
        """The rows of each text as one, [batch, width], of length 1 where the form says so."""
        result = "pooled" if self.form.normalize else EMBEDDING
        if self.form.pooling == "cls":
            pooled = self.add("Gather", [x, self.constant("zero.int", np.array(0))], result, axis=1)
        else:
            tokens = self.constant("token_axis", [1])
            given = self.add("Cast", [mask], "counted", to=int(ir.DataType.FLOAT))
            given = self.add("Unsqueeze", [given, self.constant("last_axis", [2])], "weights")
            if self.form.pooling == "mean":
                total = self.add("ReduceSum", [self.add("Mul", [x, given], "chosen"), tokens], "total", keepdims=0)
                pooled = self.add("Div", [total, self.add("ReduceSum", [given, tokens], "number", keepdims=0)], result)
            else:
                missing = self.add("Sub", [self.constant("one", 1.0), given], "left_out")
                low = self.add("Mul", [missing, self.constant("nowhere", NOWHERE)], "lowered")
                pooled = self.add("ReduceMax", [self.add("Add", [x, low], "chosen"), tokens], result, keepdims=0)
        if not self.form.normalize:
            return pooled
        length = self.add("ReduceL2", [pooled, self.constant("row_axis", [1])], "size", keepdims=1)
        length = self.add("Max", [length, self.constant("shortest", SHORTEST)], "size.clipped")
        return self.add("Div", [pooled, length], EMBEDDING)

    def head(self, x: ir.Value) -> ir.Value:
        """The scores of the first row of each text, [batch, labels]."""
        row = self.add("Gather", [x, self.constant("zero.int", np.array(0))], "first_row", axis=1)
        row = self.linear(row, "dense")
        row = self.add("Tanh" if KINDS[self.form.kind].activation == "tanh" else "Relu", [row], "dense.activated")
        return self.linear(row, "classifier", SCORES)


def relative_rows(form: Form, table: Floats) -> Floats:
    """MPNet's relative position biases [2 longest - 1, heads] by the distance of a key behind its query, from the table
    [buckets, heads].

    Half of the buckets are of keys before the query, half of those behind it; of each half one half is exact, the
    other grows logarithmically up to `FURTHEST` (Raffel et al. 2020, T5).
    """
    ahead = np.arange(-(form.longest - 1), form.longest)
    half = form.buckets // 2
    exact = half // 2
    distance = np.abs(ahead)
    large = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / math.log(FURTHEST / exact)
    large = np.minimum(exact + (large * (half - exact)).astype(np.int64), half - 1)
    rows: Floats = table[np.where(ahead > 0, half, 0) + np.where(distance < exact, distance, large)]
    return rows
