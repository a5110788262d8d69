"""Weights of text encoders in safetensors files, under names that all architectures share.

    token, position, type, embedding_norm; projection: of embeddings with fewer columns (ELECTRA)
    layers.N: query, key, value, output, up, gate (of a gated feed-forward), down; query_norm, key_norm: of each head,
        or of all heads together
    layers.N: attention_norm, norm: after attention and feed-forward ("post") or before them; attention_out_norm,
        out_norm: after them too ("sandwich"); attention_out_norm: of the second sum ("repeated")
    layers.N: position_key, position_query: of relative positions (DeBERTa)
    decoder_position, decoder_embedding_norm; decoder.N: the same as of layers.N, and of the attention to the encoder:
        cross.query, cross.key, cross.value, cross.output, cross_norm (BART)
    convolution: of the embeddings, [outputs, inputs, tokens]; convolution_norm: of the first layer's output and it
    final_norm; relative: bias of relative positions (MPNet, T5), or their rows with relative_norm (DeBERTa)
    dense, classifier: head of a cross-encoder; dense.N: layers after the pooling

Each is a linear layer (`.weight` [outputs, inputs], `.bias`), a norm or an embedding (`.weight`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures import ARCHITECTURES
from zoo.texts.models.architectures.base import SCORE, Floats, Rows
from zoo.texts.models.config import ModelConfig
from zoo.texts.models.head import Head, HeadWeights
from zoo.texts.models.tensor_file import DTYPES, TensorFile

logger = logging.getLogger(__name__)

FILE = "model.safetensors"
PARAMETERS = (".weight", ".bias")  # ends of names; others are buffers


def shapes(config: ModelConfig, head: Head | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of a network by shared name, without those that its head takes by itself.

    Args:
        config: Description of the network.
        head: Head of the network; None: that of a cross-encoder, if `config` has labels.
    """
    columns, width, norm = config.embedding or config.width, config.width, config.norm
    queries, keys = config.heads * config.head_size, config.key_heads * config.head_size
    linear = {"query": (queries, width), "key": (keys, width), "value": (keys, width), "output": (width, queries)}
    linear |= {"gate": (config.hidden, width)} if config.gated else {}
    linear |= {"up": (config.hidden, width), "down": (width, config.hidden)}
    disentangled = config.disentangled
    if disentangled and not disentangled.shared:
        linear |= {"position_key": (queries, width)} if disentangled.to_position else {}
        linear |= {"position_query": (queries, width)} if disentangled.to_content else {}
    more_norms = {"sandwich": ("attention_out_norm", "out_norm"), "repeated": ("attention_out_norm",)}
    norms = ["attention_norm", "norm", *more_norms.get(norm.place, ())]
    size = config.head_size if config.attention.norm else 0
    inner_norms = {"query_norm": size or queries, "key_norm": size or keys} if size or config.attention.row_norm else {}

    def parts() -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """Yields name, shape and whether there is a bias."""
        tables = {"token": config.vocabulary, "position": config.positions * config.absolute, "type": config.types}
        yield from ((name, (rows, columns), False) for name, rows in tables.items() if rows)
        has_bias = norm.bias and norm.kind == "layer"
        if norm.embedding:
            yield "embedding_norm", (columns,), has_bias
        if config.embedding:
            yield "projection", (width, columns), True
        for i in range(config.distinct_layers or config.layers):
            for name, shape in linear.items():
                yield f"layers.{i}.{name}", shape, name not in config.unbiased
            for name in norms:
                if i or norm.first or name != "attention_norm":
                    yield f"layers.{i}.{name}", (width,), has_bias
            yield from ((f"layers.{i}.{name}", (span,), not size) for name, span in inner_norms.items())
        if config.convolution:
            yield "convolution_norm", (width,), has_bias
            yield "convolution", (width, width, config.convolution), True
        if config.decoder:
            yield "decoder_position", (config.positions, columns), False
            yield "decoder_embedding_norm", (columns,), has_bias
        for i in range(config.decoder):
            across = {f"cross.{name}": linear[name] for name in ("query", "key", "value", "output")}
            yield from ((f"decoder.{i}.{name}", shape, True) for name, shape in (linear | across).items())
            yield from ((f"decoder.{i}.{name}", (width,), has_bias) for name in (*norms, "cross_norm"))
        if norm.final:
            yield "final_norm", (width,), has_bias
        if config.buckets:
            yield "relative", (config.buckets, config.heads), False
        if disentangled:
            yield "relative", (2 * disentangled.span, width), False
            if disentangled.norm:
                yield "relative_norm", (width,), True
        if config.labels and not (head and head.HAS_LAYERS):
            layers = ARCHITECTURES[config.kind].head
            if "dense" in layers:
                yield "dense", (width, width), "dense" not in config.unbiased
            if "dense_norm" in layers:
                yield "dense_norm", (width,), has_bias
            yield "classifier", (config.labels, width), layers["classifier"] != SCORE
        inputs = width * len(config.poolings)
        for i, dense in enumerate(() if head and head.HAS_LAYERS else config.dense):
            yield f"dense.{i}", (dense.outputs, inputs), dense.bias
            inputs = dense.outputs

    result: dict[str, tuple[int, ...]] = {}
    for name, shape, bias in parts():
        result[f"{name}.weight"] = shape
        if bias:
            result[f"{name}.bias"] = shape[:1]
    return result


def load_weights(
    config: ModelConfig, path: Path, source: Path | None = None, head: Head | None = None
) -> dict[str, Floats]:
    """Reads the weights of a network under the shared names.

    Tensors that the network does not use are not read.

    Args:
        config: Description of the network.
        path: Safetensors file.
        source: File or folder named in errors; default: `path`.
        head: See `shapes`.

    Returns:
        Float32 array by shared name.

    Raises:
        RequestError: The file is unreadable, or weights are missing, have other shapes or are not finite.
    """
    architecture = ARCHITECTURES[config.kind]
    tensors = TensorFile(path, architecture.renamed, config.adapter)
    token = f"{architecture.names['token']}.weight"
    prefix = next((name.removesuffix(token) for name in tensors if name.endswith(token)), "")
    weights: dict[str, Floats] = {}
    errors: list[str] = []
    used: set[str] = set()

    def original(shared: str) -> Rows:
        """Returns the name in the file, and which of how many layers below each other it is."""
        if shared in architecture.head:
            return Rows(architecture.head[shared].format(prefix=prefix), 0, 1)
        if shared in architecture.names:
            return Rows(prefix + architecture.names[shared], 0, 1)
        group, i, name = (*shared.split(".", 2), "", "")[:3]
        layer = {"layers": architecture.layer, "decoder": architecture.decoder}.get(group)
        if layer is None:
            return Rows(shared, 0, 1)  # of modules after the pooling
        rows = architecture.parts[name]
        rows = rows if isinstance(rows, Rows) else Rows(rows, 0, 1)
        return replace(rows, name=f"{prefix}{layer.format(i)}.{rows.name}")

    for shared, shape in shapes(config, head).items():
        base, _, suffix = shared.rpartition(".")
        rows = original(base)
        name = f"{rows.name}.{suffix}"
        used.add(name)
        expected = (rows.count * shape[0], *shape[1:])
        array = tensors.get(name)
        if array is None:
            dtype = tensors.others.get(name)
            errors.append(f"{name} is {dtype}, expected {', '.join(DTYPES)}" if dtype else f"no {name}")
        elif array.shape != expected:
            errors.append(f"{name} {list(array.shape)}, expected {list(expected)}")
        elif not np.isfinite(array).all():
            raise RequestError(f"{source or path} has {name} with NaN or infinity, expected finite weights")
        else:
            weights[shared] = rows.taken_from(array, config.heads)
    if head and head.HAS_LAYERS:
        head_weights = HeadWeights(tensors, weights)
        head.weights(head_weights, config)
        weights |= head_weights.weights
        errors += head_weights.errors
    after = architecture.layer.format(config.layers)
    if source and after != architecture.layer and any(name.startswith(f"{prefix}{after}.") for name in tensors):
        logger.warning("%s has weights of more layers than the %d of its configuration", source, config.layers)
    layers = tuple(f"{prefix}{architecture.layer.format(i)}." for i in range(config.distinct_layers or config.layers))
    others = [name for name in tensors if name.startswith(layers) and name.endswith(PARAMETERS) and name not in used]
    if source and others:  # a norm that is left out changes all results
        errors += [f"{name}, expected no such norm" for name in others if "norm" in name.lower()]
        logger.warning("%s has %d weights that a network %s lacks: %s", source, len(others), config.kind, others[0])
    errors = list(dict.fromkeys(errors)) or architecture.adapt(config, weights, tensors, prefix)
    if errors:
        more = f", and {len(errors) - 3} more" if len(errors) > 3 else ""
        raise RequestError(
            f"{source or path} does not match its configuration: {'; '.join(errors[:3])}{more}; copy both from one "
            "model"
        )
    return weights
