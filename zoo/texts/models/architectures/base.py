"""Declaration of an architecture: the reader of its config.json, and the names of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from zoo.texts.models.config import SCALINGS, Adapter, ModelConfig, Rotary

Floats = NDArray[np.float32]
TRAINED = "original_max_position_embeddings"
GLOBAL, LOCAL = "full_attention", "sliding_attention"  # kinds of layers in config.json
ACTIVATIONS = {  # by the names in config.json
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "swish",
    "swish": "swish",
}
NATIVE_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "swish": "silu"}
SCORE = "score"  # a classifier without a bias
KEPT = ("id2label", "label2id", "problem_type", "classifier_dropout", "hidden_dropout_prob", "pad_token_id")


class ConfigFile:
    """Content of a config.json, read by key with the defaults of an architecture.

    Attributes:
        values: The content.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, *keys: str, default: Any = None) -> Any:
        """Returns the value of the first key that has one.

        Args:
            *keys: Names of one setting.
            default: Value where none of them is set.
        """
        return next((self.values[key] for key in keys if self.values.get(key) is not None), default)

    def activation(self, *keys: str, default: str = "gelu") -> str:
        """Returns an activation, one of `zoo.texts.models.config.ACTIVATIONS`.

        Args:
            *keys: Names of the setting.
            default: Activation in config.json's words where none of them is set.

        Raises:
            RequestError: It is not supported.
        """
        name = str(self.get(*keys, default=default))
        if name not in ACTIVATIONS:
            raise RequestError(f"its activation is {name}; supported: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def require(self, key: str, *expected: Any) -> None:
        """Raises RequestError for another value of a setting than the supported ones; a missing one is supported.

        Args:
            key: Name of the setting.
            *expected: Supported values.
        """
        if (value := self.values.get(key)) is not None and value not in expected:
            choices = " or ".join(dict.fromkeys(map(repr, expected or (None,))))
            raise RequestError(f"its {key} is {value!r:.60}; expected {choices}")

    def adapter(self) -> Adapter | None:
        """Returns the low-rank adapter of the task that was chosen for the import; None for no task.

        Raises:
            RequestError: The model has no such task.
        """
        task, tasks = self.get("task"), self.get("lora_adaptations", default=[])
        if task is None:
            return None
        if task not in tasks:
            raise RequestError(f"its tasks are {', '.join(map(str, tasks)) or 'none'}; found --task {task}")
        return Adapter(tasks.index(task), self.get("lora_alpha", default=1) / self.get("lora_rank", default=4))

    def rotary(self, size: int, theta: float, local_theta: float = 0.0) -> Rotary:
        """Returns the rotary positions, from the keys of transformers 5 (`rope_parameters`) or of earlier versions.

        Args:
            size: Columns of a head.
            theta: Base of the wavelengths where none is given.
            local_theta: The same of layers with sliding-window attention; 0: there are no such layers.

        Raises:
            RequestError: The scaling is not supported, or only a part of the columns is rotated.
        """
        parameters: Mapping[str, Any] = self.get("rope_parameters", default={})
        local: Mapping[str, Any] = {}
        if local_theta:
            parameters, local = parameters.get(GLOBAL) or {}, parameters.get(LOCAL) or {}
        scaling = {**parameters, **self.get("rope_scaling", default={})}
        if _scaling(local):
            raise RequestError(f"its local rotary positions are {local!r:.80}; expected none of local layers scaled")
        for values in (self, ConfigFile(scaling)):  # which transformers ignores
            values.require("partial_rotary_factor", 1)
        return Rotary(
            theta=float(parameters.get("rope_theta") or self.get("rope_theta", default=theta)),
            size=size,
            local_theta=float(local.get("rope_theta") or local_theta),
            **self._scaling(scaling),
        )

    def _scaling(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of `Rotary` about the scaling, as `transformers.modeling_rope_utils` reads them."""
        kind, values = _scaling(parameters), ConfigFile(parameters)
        if not kind:
            return {}
        positions = self.get("max_position_embeddings", default=0)
        trained = self.get("original_max_position_embeddings") or values.get(TRAINED, default=positions)
        numbers = {"factor": values.get("factor")}
        if kind == "yarn":
            numbers["factor"] = values.get("factor", default=positions / (trained or 1))
            numbers |= {"slow": values.get("beta_slow") or 1, "fast": values.get("beta_fast") or 32}
        elif kind == "llama3":
            numbers |= {"slow": values.get("low_freq_factor"), "fast": values.get("high_freq_factor")}
        valid = all(isinstance(number, int | float) and number > 0 for number in numbers.values())
        if not valid or ("fast" in numbers and not (trained > 0 and numbers["slow"] < numbers["fast"])):
            expected = ", ".join(numbers) + (f" and {TRAINED}" if "fast" in numbers else "")
            raise RequestError(f"its rotary positions are {dict(parameters)!r:.80}; expected numbers: {expected}")
        if kind == "yarn":
            numbers["amplitude"] = _amplitude(values, numbers["factor"])
        fields: dict[str, Any] = {name: float(number) for name, number in numbers.items()}
        if "fast" in numbers:
            fields |= {"trained": int(trained), "whole": bool(values.get("truncate", default=True))}
        return {"scaling": kind, **fields}


def _amplitude(parameters: ConfigFile, factor: float) -> float:
    """Returns the attention factor of YaRN (Peng et al. 2023, equation 22)."""
    if (attention := parameters.get("attention_factor")) is not None:
        return float(attention)
    scales = parameters.get("mscale") or 0, parameters.get("mscale_all_dim") or 0

    def amplitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    return amplitude(scales[0]) / amplitude(scales[1]) if all(scales) else amplitude(1)


def _scaling(parameters: Mapping[str, Any]) -> str:
    """Returns the scaling of rotary positions; a dynamic one begins beyond the network's positions."""
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind in ("default", "dynamic"):
        return ""
    if kind not in SCALINGS:
        names = ", ".join(filter(None, (*SCALINGS, "dynamic")))
        raise RequestError(f"its rotary positions are scaled by {kind}; supported: {names}")
    return kind


def native_config(
    kind: str, unbiased: tuple[str, ...], config: ModelConfig, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the config.json of a network of transformers with rotary positions, for one that has custom code.

    Args:
        kind: Its model_type.
        unbiased: Linear layers without a bias in that network.
        config: Configuration of the network.
        content: Content of its config.json.

    Raises:
        RequestError: The network has parts that the one of transformers lacks.
    """
    rotary = config.rotary
    lacking = {
        "other biases": set(config.unbiased) != set(unbiased),
        "no rotary positions of whole heads": not rotary or rotary.size != config.head_size,
        "adapters": bool(content.get("lora_adaptations")),
        "scaled positions": bool(rotary and rotary.scaling not in ("", "linear", "ntk")),
    }
    if extra := [name for name, lacks in lacking.items() if lacks]:
        raise RequestError(f"a network {config.kind} with {extra[0]} cannot be fine-tuned; expected that of {kind}")
    assert rotary is not None
    positions: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.theta}
    if rotary.scaling:
        is_ntk = rotary.scaling == "ntk"  # a linear scaling of another base, see `rotary_angles`
        positions = {"rope_type": "linear", "factor": rotary.factor ** (2 / rotary.size) if is_ntk else rotary.factor}
        positions["rope_theta"] = rotary.theta * (rotary.factor if is_ntk else 1)
    return {
        "model_type": kind,
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.hidden,
        "hidden_act": NATIVE_ACTIVATIONS[config.activation],
        "max_position_embeddings": config.positions,
        "type_vocab_size": config.types,
        "layer_norm_eps": config.epsilon,
        "rope_parameters": positions,
        **{key: content[key] for key in KEPT if content.get(key) is not None},
    }


@dataclass(frozen=True)
class Rows:
    """One of several layers that a file stores as one, below each other.

    Attributes:
        name: Name in the file.
        index: Position of the layer.
        count: Number of layers, all of one size.
        by_head: Whether that holds for the rows of each attention head, and the heads are below each other.
    """

    name: str
    index: int
    count: int
    by_head: bool = False

    def taken_from(self, array: Floats, heads: int) -> Floats:
        """Returns the rows of the layer.

        Args:
            array: Weight or bias of all layers.
            heads: Number of attention heads.
        """
        groups = array.reshape(heads if self.by_head else 1, self.count, -1, *array.shape[1:])
        rows: Floats = groups[:, self.index].reshape(-1, *array.shape[1:])
        return rows


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers.

    Attributes:
        name: Name, `ModelConfig.kind`.
        model_types: Values of `model_type` in config.json.
        read: Describes the network of a config.json; pooling, labels and what follows are the importer's.
        names: Name in the file by shared name (see `zoo.texts.models.weights`), of what is outside the layers.
        layer: Prefix of a layer's names, a format string of its index.
        parts: Name within a layer by shared name.
        head: Name of a cross-encoder's layers by shared name; "{prefix}" is that of the network. Empty: not supported.
        head_activation: Activation between the two layers of the head, "tanh", "relu" or "gelu".
        head_pooling: Pooling before the head, where config.json names none.
        trainable: Whether transformers has the network, so that it can be fine-tuned.
        native: Returns the config.json of transformers' own network, given the configuration and the content of the
            file, where public models have custom code; raises RequestError for settings that it lacks. None: the file.
        encoder: Class of transformers that opens the network without a head.
        adapt: Changes the weights in place, given the configuration, the tensors of the file, and the prefix of their
            names; returns errors.
        matches: Whether a config.json of one of the model types is of this architecture; the first one of the list is
            taken.
        renamed: Parts of names in the file by those that other versions of the architecture have.
        decoder: Prefix of the names of a decoder's layer, as `layer`.
        decoded: Ends of the names of networks whose head reads the output of a decoder that `read` leaves out.
    """

    name: str
    model_types: tuple[str, ...]
    read: Callable[[ConfigFile], ModelConfig]
    names: Mapping[str, str]
    layer: str
    parts: Mapping[str, str | Rows]
    head: Mapping[str, str] = field(default_factory=dict)
    head_activation: str = "tanh"
    head_pooling: str = "cls"
    trainable: bool = True
    native: Callable[[ModelConfig, Mapping[str, Any]], dict[str, Any]] | None = None
    encoder: str = "AutoModel"
    adapt: Callable[[ModelConfig, dict[str, Floats], Mapping[str, Floats], str], list[str]] = (
        lambda config, weights, tensors, prefix: []
    )
    matches: Callable[[Mapping[str, Any]], bool] = lambda config: True
    renamed: Mapping[str, str] = field(default_factory=dict)
    decoder: str = ""
    decoded: tuple[str, ...] = ()
