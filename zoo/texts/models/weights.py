"""The weights of a BERT-shaped network in a file of safetensors, under names that all kinds share.

    token, position, type, embedding_norm; of each layer: query, key, value, output, attention_norm, up, down, norm
    relative: of MPNet; of the head of a cross-encoder: dense, classifier

each a linear layer (`.weight` [outputs, inputs], `.bias`), a layer normalization or a table (`.weight`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError, one_line, requires
from zoo.texts.models.config import Form

Floats = NDArray[np.float32]
FILE = "model.safetensors"
_TABLES = {
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
class Kind:
    """The names that one kind of network gives its weights.

    layer: of the layers, a number in it; parts: {shared name: name in a layer}; head: {shared name: name}, outside the
    network itself; activation: of the head, between its two layers.
    """

    layer: str
    parts: Mapping[str, str]
    head: Mapping[str, str]
    activation: str = "tanh"


_ROBERTA_HEAD = {"dense": "classifier.dense", "classifier": "classifier.out_proj"}
KINDS = {
    "bert": Kind("encoder.layer.{}", _BERT, {"dense": "bert.pooler.dense", "classifier": "classifier"}),
    "roberta": Kind("encoder.layer.{}", _BERT, _ROBERTA_HEAD),
    "distilbert": Kind(
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
    "mpnet": Kind(
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
_TOKENS = f"{_TABLES['token']}.weight"


def read(path: Path) -> dict[str, Floats]:
    """The tensors of numbers in a file as float32. Raises RequestError where it is none."""
    with requires(path.name, "int8-zoo[texts]"):
        from safetensors import deserialize
    try:
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        return {name: _float32(each) for name, each in tensors if each["dtype"] in (*_DTYPES, "BF16")}
    except Exception as error:  # the library's own kind, OSError, ValueError for a tensor that is not whole
        raise RequestError(
            f"cannot read the weights in {path} ({one_line(error)}); copy or download it again"
        ) from error


def _float32(tensor: Mapping[str, Any]) -> Floats:
    """A tensor's bytes as float32; numpy has no bfloat16, whose bits are a float32's upper half."""
    if tensor["dtype"] == "BF16":
        array = (np.frombuffer(tensor["data"], "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        array = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).astype(np.float32)
    return array.reshape(tensor["shape"])


def shared_names(form: Form, tensors: Mapping[str, Floats], source: Path) -> dict[str, Floats]:
    """The weights of `form` under the shared names. Raises RequestError with all that are missing or of another shape.

    Names as old files have them (gamma, beta) are known; tensors that the network does not use are left out.
    """
    kind = KINDS[form.kind]
    tensors = {name.replace(".gamma", ".weight").replace(".beta", ".bias"): each for name, each in tensors.items()}
    prefix = next((name.removesuffix(_TOKENS) for name in tensors if name.endswith(_TOKENS)), "")
    found: dict[str, Floats] = {}
    faults: list[str] = []

    def take(ours: str, theirs: str, *shape: int) -> None:
        array = tensors.get(theirs)
        if array is None:
            faults.append(f"no {theirs}")
        elif array.shape != shape:
            faults.append(f"{theirs} {list(array.shape)}, expected {list(shape)}")
        else:
            found[ours] = array

    def layer(ours: str, theirs: str, outputs: int, inputs: int = 0) -> None:
        take(f"{ours}.weight", f"{theirs}.weight", *((outputs, inputs) if inputs else (outputs,)))
        take(f"{ours}.bias", f"{theirs}.bias", outputs)

    for name, rows in (("token", form.vocabulary), ("position", form.positions), ("type", form.types)):
        if rows:
            take(f"{name}.weight", f"{prefix}{_TABLES[name]}.weight", rows, form.width)
    layer("embedding_norm", prefix + _TABLES["embedding_norm"], form.width)
    inner = {"up": (form.hidden, form.width), "down": (form.width, form.hidden)}
    for i in range(form.layers):
        for ours, theirs in kind.parts.items():
            sizes = (form.width,) if ours.endswith("norm") else inner.get(ours, (form.width, form.width))
            layer(f"layers.{i}.{ours}", f"{prefix}{kind.layer.format(i)}.{theirs}", *sizes)
    if form.buckets:
        take("relative.weight", f"{prefix}encoder.relative_attention_bias.weight", form.buckets, form.heads)
    if form.labels:
        layer("dense", kind.head["dense"], form.width, form.width)
        layer("classifier", kind.head["classifier"], form.labels, form.width)
    if faults:
        others = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise RequestError(
            f"{source} is not of the network that its configuration tells: {'; '.join(faults[:3])}{others}; copy both "
            "from one model"
        )
    return found


def parameters(state: Mapping[str, Floats]) -> int:
    """How many numbers the weights are."""
    return sum(each.size for each in state.values())
