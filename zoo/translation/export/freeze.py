"""Exports a Transformer from its checkpoint to fp32.onnx, without caches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from torch import nn

from pipelines.graph import edit, io, query
from pipelines.graph.builder import MASKED
from pipelines.graph.infer import infer_shapes
from zoo.training.onnx_builder import OPSET, Writer
from zoo.training.relative_positions import relative_buckets
from zoo.translation.data.parallel_text import VOCABULARY
from zoo.translation.data.tokens import LOGITS, MEMORY, PAD, SOURCE, TARGET
from zoo.translation.models.checkpoints import MODEL, STATE, load_model
from zoo.translation.models.layers import Attention, Average, FeedForward, Layer, Recurrence, Residual

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer


def freeze(folder: str | Path, build: type[Transformer]) -> dict[str, Any]:
    """Writes fp32.onnx of a trained model folder; the same weights give the same bytes.

    Args:
        folder: Folder that `zoo.translation.training.train.train` wrote.
        build: Class of the network.

    Returns:
        {"parameters", "operators": {type: count}, "bytes": {file: size}}.

    Raises:
        RequestError: The folder holds no trained model.
    """
    folder = Path(folder)
    model, _ = load_model(folder, build)
    exported = export(model)
    path = io.save(exported, folder / "fp32.onnx")
    files = (folder / STATE, folder / MODEL, folder / VOCABULARY, path)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "operators": query.op_counts(exported),
        "bytes": {path.name: path.stat().st_size for path in files if path.is_file()},
    }


def export(model: Transformer) -> ir.Model:
    """Exports a network as an ONNX graph without KV caches.

    Inputs: source int64 [batch, source_length] and target int64 [batch, target_length], both padded. Output: logits
    float32 [batch, vocabulary] of the token after the last one of each target that is not padding. The value `memory`,
    float32 [batch, source_length, width], is the output of the encoder, where
    `zoo.translation.search.sessions.split_sessions` splits the graph; `zoo.translation.search.kv_cache` derives the
    decoding step. Initializers have the names of the state dict; weights of linear layers are transposed.

    Args:
        model: The network.

    Returns:
        The graph, opset 18.
    """
    config = model.config
    writer = _Writer(model)
    source, target = (writer.tokens(name) for name in (SOURCE, TARGET))
    padding = writer.padding(source)
    x = writer.embed("source", source)
    masks = writer.position_masks("encoder", source, padding)
    for i, (layer, mask) in enumerate(zip(model.encoder, masks, strict=True)):
        assert isinstance(layer, Layer) and isinstance(layer.attention, Attention) and mask is not None
        path = f"encoder.{i}"
        x = writer.attend(x, layer.around_attention, layer.attention, path, "attention", None, mask)
        x = writer.feed(x, layer, path)
    memory = writer.norm(x, model.encoder_norm, "encoder_norm")
    memory.name = MEMORY
    x = writer.embed("target", target)
    back = writer.back(target) if config.autoregression == "attention" and not config.buckets else None
    masks = writer.position_masks("decoder", target, back)
    for i, (layer, mask) in enumerate(zip(model.decoder, masks, strict=True)):
        assert isinstance(layer, Layer)
        path = f"decoder.{i}"
        if isinstance(layer.attention, Recurrence):
            x = writer.recur(x, layer.around_attention, path, target)
        elif isinstance(layer.attention, Average):
            x = writer.average(x, layer, path, target)
        else:
            assert mask is not None
            x = writer.attend(x, layer.around_attention, layer.attention, path, "attention", None, mask)
        x = writer.attend(x, layer.around_cross, layer.cross, path, "cross", memory, padding)
        x = writer.feed(x, layer, path)
    x = writer.last(writer.norm(x, model.decoder_norm, "decoder_norm", config.output_scale), target)
    logits = writer.output(x)
    logits.shape = ir.Shape(["batch", model.embedding.num_embeddings])
    writer.main.outputs.append(logits)
    exported = ir.Model(writer.main, ir_version=9)
    infer_shapes(exported)
    memory.shape = ir.Shape(["batch", f"{SOURCE}_length", config.width])
    return exported


class _Writer(Writer):
    """Appends the layers of a network to a graph."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(ir.Graph([], [], nodes=[], name="transformer", opset_imports={"": OPSET}))
        self.model = model
        self.weights = {name: tensor.detach().cpu().numpy() for name, tensor in model.state_dict().items()}

    def tokens(self, name: str) -> ir.Value:
        """Adds an input of tokens."""
        self.taken.add(name)
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", f"{name}_length"]))
        self.main.inputs.append(value)
        return value

    def state(self, name: str, transposed: bool = False) -> ir.Value:
        """Returns a weight of the network."""
        array = self.weights[name]
        return self.constant(name, np.ascontiguousarray(array.T) if transposed else array)

    def padding(self, tokens: ir.Value) -> ir.Value:
        """Appends the padding mask, float32 [batch, 1, 1, tokens]: `MASKED` at padding, else 0."""
        empty = self.add(
            "Equal", [tokens, self.constant("padding", np.array(PAD))], f"{tokens.name}.empty", dtype=ir.DataType.BOOL
        )
        scores = self.add("Cast", [empty], f"{tokens.name}.empty_score", to=int(ir.DataType.FLOAT))
        scores = self.add("Mul", [scores, self.constant("nowhere", MASKED)], f"{tokens.name}.score")
        return self.add("Unsqueeze", [scores, self.constant("heads_queries", [1, 2])], f"{tokens.name}.mask")

    def _length(self, tokens: ir.Value) -> ir.Value:
        return self.add("Shape", [tokens], f"{tokens.name}.length", dtype=ir.DataType.INT64, start=1, end=2)

    def back(self, tokens: ir.Value) -> ir.Value:
        """Appends the causal mask, float32 [tokens, tokens]: `MASKED` right of the diagonal, else 0."""
        length = self._length(tokens)
        square = self.add("Concat", [length, length], f"{tokens.name}.square", dtype=ir.DataType.INT64, axis=0)
        full = self.add("Expand", [self.constant("nowhere", MASKED), square], f"{tokens.name}.nowhere")
        return self.add("Trilu", [full, self.constant("one", np.array(1))], f"{tokens.name}.mask", upper=1)

    def position_masks(self, side: str, tokens: ir.Value, mask: ir.Value | None) -> list[ir.Value | None]:
        """Appends the bias of the self-attention scores in each layer of a side.

        Args:
            side: "encoder" or "decoder".
            tokens: The tokens.
            mask: Added to all scores of a side, or None.

        Returns:
            `mask` for every layer; plus the layer's bias by relative position, `MASKED` at later keys of a decoder,
            float32 [batch or 1, heads, tokens, tokens], in networks with such a bias.
        """
        config, masks = self.model.config, list[ir.Value | None]()
        if not config.buckets:
            return [mask] * len(getattr(self.model, side))
        most = config.positions[side == "decoder"]
        ahead = np.arange(1 - most, most)
        rows = relative_buckets(ahead, config.buckets, config.bucket_distance, both_sides=side == "encoder")
        index = self.distances(self._length(tokens), most - 1, f"{tokens.name}.")
        bias: ir.Value | None = None
        for i in range(len(getattr(self.model, side))):
            if bias is None or not config.shared_buckets:
                table = self.weights[f"{side}.{i}.attention.relative.weight"][rows]
                if side == "decoder":
                    table = table + np.where(ahead > 0, np.float32(MASKED), np.float32(0))[:, None]
                path = f"{side}.{i}.attention.relative"
                bias = self.add("Gather", [self.constant(path, table), index], f"{path}.gathered")
                bias = self.add("Transpose", [bias], f"{path}.heads", perm=[2, 0, 1])
                bias = bias if mask is None else self.add("Add", [mask, bias], f"{path}.mask")
            masks.append(bias)
        return masks

    def embed(self, side: str, tokens: ir.Value) -> ir.Value:
        """Appends token embeddings, scaled if configured, plus positions: float32 [batch, tokens, width]."""
        table, *steps = self.model.table_of(side)
        rows = self.add("Gather", [self.state(f"{table}.weight"), tokens], f"{tokens.name}.rows")
        if self.model.scales(side):
            scale = self.constant("embedding.scale", math.sqrt(self.model.config.width))
            rows = self.add("Mul", [rows, scale], f"{tokens.name}.scaled")
        for step in filter(None, steps):
            if step.endswith("_norm"):
                rows = self.norm(rows, getattr(self.model, step), step)
                continue
            table_of_positions = self.constant(step, getattr(self.model, step).cpu().numpy())
            first = self.add(
                "Slice",
                [table_of_positions, self.constant("first", [0]), self._length(tokens)],
                f"{tokens.name}.positions",
            )
            rows = self.add("Add", [rows, first], f"{tokens.name}.embedded")
        return rows

    def output(self, x: ir.Value) -> ir.Value:
        """Appends the logits of a row."""
        config = self.model.config
        table = self.state("embedding.weight" if config.tied_output else "output_weight")
        table = self.add("Transpose", [table], "output.weight", perm=[1, 0])
        if not config.output_bias:
            return self.add("MatMul", [x, table], LOGITS)
        return self.add("Add", [self.add("MatMul", [x, table], "output"), self.state("output_bias")], LOGITS)

    def linear(self, x: ir.Value, path: str) -> ir.Value:
        """Appends a linear layer over the last axis, with its bias if it has one."""
        y = self.add("MatMul", [x, self.state(f"{path}.weight", transposed=True)], path)
        return (
            self.add("Add", [y, self.state(f"{path}.bias")], f"{path}.biased") if f"{path}.bias" in self.weights else y
        )

    def norm(self, x: ir.Value, module: nn.Module, path: str, scale: float = 1.0) -> ir.Value:
        """Appends layer or RMS normalization, whose result is multiplied by `scale`; other modules are the identity."""
        if isinstance(module, nn.RMSNorm):
            weight = self.weights[f"{path}.weight"] * np.float32(scale)
            return self.rms_norm(x, path, (f"{path}.weight", weight), float(module.eps or 0))
        assert scale == 1
        if not isinstance(module, nn.LayerNorm):
            return x
        return self.add(
            "LayerNormalization",
            [x, self.state(f"{path}.weight"), self.state(f"{path}.bias")],
            path,
            axis=-1,
            epsilon=module.eps,
        )

    def attend(
        self,
        x: ir.Value,
        around: Residual,
        attention: Attention,
        path: str,
        name: str,
        memory: ir.Value | None,
        mask: ir.Value,
    ) -> ir.Value:
        """Appends self-attention, or cross-attention to `memory`, with its residual."""
        norm, path = f"{path}.around_{name}.norm", f"{path}.{name}"
        y = self.norm(x, around.norm, norm) if around.pre_norm else x
        keys_input = y if memory is None else memory
        other = "" if attention.heads == self.model.config.heads else f".{attention.heads}"
        heads = self.constant(f"heads{other}", [0, 0, attention.heads, -1])

        def split(x: ir.Value, kind: str, order: list[int]) -> ir.Value:
            parts = self.add("Reshape", [self.linear(x, f"{path}.{kind}"), heads], f"{path}.{kind}.heads")
            return self.add("Transpose", [parts], f"{path}.{kind}.split", perm=order)

        queries, keys, values = (
            split(y, "query", [0, 2, 1, 3]),
            split(keys_input, "key", [0, 2, 3, 1]),
            split(keys_input, "value", [0, 2, 1, 3]),
        )
        scores = self.add("MatMul", [queries, keys], f"{path}.products")
        scale = self.model.config.attention_scale
        if not scale:
            divisor = self.constant(f"attention.scale{other}", math.sqrt(attention.size))
            scores = self.add("Div", [scores, divisor], f"{path}.scaled")
        elif scale != 1:
            scores = self.add("Mul", [scores, self.constant("attention.factor", scale)], f"{path}.scaled")
        scores = self.add("Add", [scores, mask], f"{path}.masked")
        weights = self.add("Softmax", [scores], f"{path}.weights", axis=-1)
        context = self.add(
            "Transpose",
            [self.add("MatMul", [weights, values], f"{path}.found")],
            f"{path}.found.split",
            perm=[0, 2, 1, 3],
        )
        joined = self.constant(f"joined{other}", [0, 0, attention.output.in_features])
        context = self.add("Reshape", [context, joined], f"{path}.joined")
        y = self.add("Add", [x, self.linear(context, f"{path}.output")], f"{path}.sum")
        return y if around.pre_norm else self.norm(y, around.norm, norm)

    def feed(self, x: ir.Value, layer: Layer, path: str) -> ir.Value:
        """Appends a feed-forward block with its residual."""
        assert isinstance(layer.feed, FeedForward)
        norm, around = f"{path}.around_feed.norm", layer.around_feed
        y = self.norm(x, around.norm, norm) if around.pre_norm else x
        y = self.fed(y, f"{path}.feed", layer.feed.activation, layer.feed.gated)
        y = self.add("Add", [x, y], f"{path}.feed.sum")
        return y if around.pre_norm else self.norm(y, around.norm, norm)

    def fed(self, x: ir.Value, path: str, activation: str, gated: bool = False) -> ir.Value:
        """Appends two linear layers with an activation between them, which a third one is multiplied by if gated."""
        first = self.linear(x, f"{path}.gate" if gated else f"{path}.inner")
        inner = self.activation(first, path, activation, "one.float")
        if gated:
            inner = self.add("Mul", [inner, self.linear(x, f"{path}.inner")], f"{path}.gated")
        return self.linear(inner, f"{path}.outer")

    def recur(self, x: ir.Value, around: Residual, path: str, tokens: ir.Value) -> ir.Value:
        """Appends a `Recurrence` with its residual."""
        norm, name = f"{path}.around_attention.norm", f"{path}.attention"
        y = self.norm(x, around.norm, norm) if around.pre_norm else x
        one = self.constant("one.float", 1.0)
        keep = self.add("Sigmoid", [self.linear(y, f"{name}.forget")], f"{name}.keep")
        added = self.add("Sub", [one, keep], f"{name}.take")
        added = self.add("Mul", [added, self.linear(y, f"{name}.value")], f"{name}.added")
        cells = self.cells(keep, added, name, tokens)
        y = self.add("Add", [x, self.add("Relu", [cells], f"{name}.relu")], f"{name}.sum")
        return y if around.pre_norm else self.norm(y, around.norm, norm)

    def average(self, x: ir.Value, layer: Layer, path: str, tokens: ir.Value) -> ir.Value:
        """Appends an `Average`: mean_t = (t - 1) / t mean_(t-1) + 1 / t row_t."""
        assert isinstance(layer.attention, Average)
        around, norm, name = layer.around_attention, f"{path}.around_attention.norm", f"{path}.attention"
        y = self.norm(x, around.norm, norm) if around.pre_norm else x
        taken = (1 / np.arange(1, len(self.model.get_buffer("positions")) + 1, dtype=np.float32))[:, None]
        keep, take = (
            self.add(
                "Slice",
                [self.constant(f"average.{part}", array), self.constant("first", [0]), self._length(tokens)],
                f"{name}.{part}",
            )
            for part, array in (("old", 1 - taken), ("new", taken))
        )
        nothing = self.add("Mul", [y, self.constant("zero", 0.0)], f"{name}.nothing")
        keep = self.add("Add", [nothing, keep], f"{name}.keep")
        mean = self.cells(keep, self.add("Mul", [y, take], f"{name}.added"), name, tokens)
        mean = self.fed(mean, name, layer.attention.activation)
        parts = []
        for part, gate, value in (("own", "input", y), ("past", "forget", mean)):
            opened = self.add("Sigmoid", [self.linear(value, f"{name}.{gate}")], f"{name}.{gate}.gate")
            parts.append(self.add("Mul", [opened, value], f"{name}.{part}"))
        y = self.add("Add", [x, self.add("Add", parts, f"{name}.both")], f"{name}.sum")
        return y if around.pre_norm else self.norm(y, around.norm, norm)

    def cells(self, keep: ir.Value, added: ir.Value, name: str, tokens: ir.Value) -> ir.Value:
        """Appends c_t = keep_t c_(t-1) + added_t, c_0 = 0, as a Scan; float32 [batch, tokens, width]."""
        width = self.model.config.width
        batch = self.add("Shape", [tokens], f"{name}.batch", dtype=ir.DataType.INT64, start=0, end=1)
        shape = [batch, self.constant("width", [width])]
        shape = [
            self.constant("zero", 0.0),
            self.add("Concat", shape, f"{name}.shape", dtype=ir.DataType.INT64, axis=0),
        ]
        start = self.add("Expand", shape, f"{name}.start")
        body, inner = ir.Graph([], [], nodes=[], name=f"{name}.cell", opset_imports={"": OPSET}), set[str]()
        for part in ("cell", "keep", "added"):
            body.inputs.append(
                ir.Value(
                    name=f"{name}.{part}.now", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", width])
                )
            )
        kept = edit.node("Mul", [*body.inputs[:2]], f"{name}.kept.now", dtype=ir.DataType.FLOAT, taken=inner)
        after = edit.node(
            "Add", [kept.outputs[0], body.inputs[2]], f"{name}.cell.after", dtype=ir.DataType.FLOAT, taken=inner
        )
        copy = edit.node("Identity", [*after.outputs], f"{name}.cell.kept", dtype=ir.DataType.FLOAT, taken=inner)
        body.extend([kept, after, copy])
        body.outputs.extend([after.outputs[0], copy.outputs[0]])
        axes = {"scan_input_axes": [1, 1], "scan_output_axes": [1]}
        attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", 2)]
        attributes += [ir.AttrInt64s(key, value) for key, value in axes.items()]
        scan = ir.Node("", "Scan", [start, keep, added], attributes, num_outputs=2, name=f"{name}.cells")
        for output, label in zip(scan.outputs, (f"{name}.last", f"{name}.cells"), strict=True):
            output.name, output.type = label, ir.TensorType(ir.DataType.FLOAT)
            self.taken.add(label)
        self.main.append(scan)
        return scan.outputs[1]

    def last(self, x: ir.Value, tokens: ir.Value) -> ir.Value:
        """Appends the row of each sentence's last token, [batch, tokens, width] -> [batch, width]."""
        # PAD is 0, so that a token is True as a Boolean
        is_token = self.add("Cast", [tokens], f"{tokens.name}.given", dtype=ir.DataType.BOOL, to=int(ir.DataType.BOOL))
        counted = self.add(
            "Cast", [is_token], f"{tokens.name}.counted", dtype=ir.DataType.INT64, to=int(ir.DataType.INT64)
        )
        count = self.add(
            "ReduceSum",
            [counted, self.constant("axis", [1])],
            f"{tokens.name}.count",
            dtype=ir.DataType.INT64,
            keepdims=1,
        )
        index = self.add(
            "Sub", [count, self.constant("one", np.array(1))], f"{tokens.name}.last", dtype=ir.DataType.INT64
        )
        return self.add("GatherND", [x, index], "last", batch_dims=1)
