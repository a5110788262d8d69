"""Weights of BERT-shaped networks in safetensors files, under names that all architectures share.

    token, position, type, embedding_norm; projection: of ELECTRA's embeddings
    layers.N: query, key, value, output, attention_norm, up, down, norm
    relative: MPNet's relative position bias; dense, classifier: head of a cross-encoder

Each is a linear layer (`.weight` [outputs, inputs], `.bias`), a layer normalization or an embedding (`.weight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line, requires
from zoo.texts.models.config import ModelConfig

Floats = NDArray[np.float32]
FILE = "model.safetensors"
_EMBEDDINGS = {
    "token": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "type": "embeddings.token_type_embeddings",
    "embedding_norm": "embeddings.LayerNorm",
}
_BERT = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}


@dataclass(frozen=True)
class Architecture:
    """Parameter names of an architecture in transformers.

    Attributes:
        layer: Prefix of a layer's parameters, a format string of its index.
        parts: Name within a layer by shared name.
        head: Full name of the head's layers by shared name.
        activation: Activation between the two layers of the head, "tanh", "relu" or "gelu".
    """

    layer: str
    parts: Mapping[str, str]
    head: Mapping[str, str]
    activation: str = "tanh"


_ROBERTA_HEAD = {"dense": "classifier.dense", "classifier": "classifier.out_proj"}
ARCHITECTURES = {
    "bert": Architecture("encoder.layer.{}", _BERT, {"dense": "bert.pooler.dense", "classifier": "classifier"}),
    "roberta": Architecture("encoder.layer.{}", _BERT, _ROBERTA_HEAD),
    "electra": Architecture("encoder.layer.{}", _BERT, _ROBERTA_HEAD, "gelu"),
    "ernie": Architecture("encoder.layer.{}", _BERT, {"dense": "ernie.pooler.dense", "classifier": "classifier"}),
    "distilbert": Architecture(
        "transformer.layer.{}",
        {
            "query": "attention.q_lin",
            "key": "attention.k_lin",
            "value": "attention.v_lin",
            "output": "attention.out_lin",
            "attention_norm": "sa_layer_norm",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
            "norm": "output_layer_norm",
        },
        {"dense": "pre_classifier", "classifier": "classifier"},
        "relu",
    ),
    "mpnet": Architecture(
        "encoder.layer.{}",
        {
            **_BERT,
            "query": "attention.attn.q",
            "key": "attention.attn.k",
            "value": "attention.attn.v",
            "output": "attention.attn.o",
            "attention_norm": "attention.LayerNorm",
        },
        _ROBERTA_HEAD,
    ),
}
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_TOKEN_WEIGHT = f"{_EMBEDDINGS['token']}.weight"


def read_safetensors(path: Path) -> dict[str, Floats]:
    """Reads the floating point tensors of a safetensors file.

    Args:
        path: File with float64, float32, float16 or bfloat16 tensors; tensors of other dtypes are ignored.

    Returns:
        Float32 tensor by name.

    Raises:
        RequestError: The file is damaged or of another format.
    """
    with requires(path.name, "int8-zoo[texts]"):
        from safetensors import deserialize
    try:
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        return {name: _float32(tensor) for name, tensor in tensors if tensor["dtype"] in (*_DTYPES, "BF16")}
    except Exception as error:  # the library's own class, OSError, or ValueError for a truncated tensor
        raise RequestError(
            f"cannot read the weights in {path} ({one_line(error)}); copy or download it again"
        ) from error


def _float32(tensor: Mapping[str, Any]) -> Floats:
    """Converts a tensor to float32; numpy has no bfloat16, which is the upper half of a float32."""
    if tensor["dtype"] == "BF16":
        array = (np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        array = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).astype(np.float32)
    return array.reshape(tensor["shape"])


def load_weights(config: ModelConfig, path: Path, source: Path | None = None) -> dict[str, Floats]:
    """Reads the weights of a network under the shared names.

    Old parameter names (gamma, beta) are translated; tensors that the network does not use are ignored.

    Args:
        config: Configuration of the network.
        path: Safetensors file.
        source: File or folder named in errors; default: `path`.

    Returns:
        Float32 array by shared name.

    Raises:
        RequestError: The file is unreadable, or weights are missing or have other shapes.
    """
    architecture = ARCHITECTURES[config.kind]
    tensors = {
        name.replace(".gamma", ".weight").replace(".beta", ".bias"): tensor
        for name, tensor in read_safetensors(path).items()
    }
    prefix = next((name.removesuffix(_TOKEN_WEIGHT) for name in tensors if name.endswith(_TOKEN_WEIGHT)), "")
    weights: dict[str, Floats] = {}
    errors: list[str] = []

    def take(shared: str, original: str, *shape: int) -> None:
        array = tensors.get(original)
        if array is None:
            errors.append(f"no {original}")
        elif array.shape != shape:
            errors.append(f"{original} {list(array.shape)}, expected {list(shape)}")
        else:
            weights[shared] = array

    def layer(shared: str, original: str, outputs: int, inputs: int = 0) -> None:
        take(f"{shared}.weight", f"{original}.weight", *((outputs, inputs) if inputs else (outputs,)))
        take(f"{shared}.bias", f"{original}.bias", outputs)

    for name, rows in (("token", config.vocabulary), ("position", config.positions), ("type", config.types)):
        if rows:
            take(f"{name}.weight", f"{prefix}{_EMBEDDINGS[name]}.weight", rows, config.embedding or config.width)
    layer("embedding_norm", prefix + _EMBEDDINGS["embedding_norm"], config.embedding or config.width)
    if config.embedding:
        layer("projection", f"{prefix}embeddings_project", config.width, config.embedding)
    if config.kind == "ernie" and "position.weight" in weights:  # all texts have the first task
        task = tensors.get(f"{prefix}embeddings.task_type_embeddings.weight")
        if task is None or task.shape[1:] != (config.width,):
            errors.append(f"no {prefix}embeddings.task_type_embeddings.weight of {config.width} columns")
        else:
            weights["position.weight"] = weights["position.weight"] + task[0]
    feed_forward = {"up": (config.hidden, config.width), "down": (config.width, config.hidden)}
    for i in range(config.layers):
        for shared, original in architecture.parts.items():
            square = (config.width, config.width)
            sizes = (config.width,) if shared.endswith("norm") else feed_forward.get(shared, square)
            layer(f"layers.{i}.{shared}", f"{prefix}{architecture.layer.format(i)}.{original}", *sizes)
    if config.buckets:
        take("relative.weight", f"{prefix}encoder.relative_attention_bias.weight", config.buckets, config.heads)
    if config.labels:
        pooler = architecture.head["dense"]
        if config.kind == "bert" and prefix:  # ERNIE without tasks is a BERT of another name
            pooler = pooler.replace("bert.", prefix, 1)
        layer("dense", pooler, config.width, config.width)
        layer("classifier", architecture.head["classifier"], config.labels, config.width)
    if errors:
        more = f", and {len(errors) - 3} more" if len(errors) > 3 else ""
        raise RequestError(
            f"{source or path} does not match its configuration: {'; '.join(errors[:3])}{more}; copy both from one "
            "model"
        )
    return weights
