"""Declaration of a head of a text network: the models that it accepts, its weights, and its layers in the graph."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.files import read_json
from zoo.texts.models.architectures.base import ConfigFile
from zoo.texts.models.config import LOGITS, ModelConfig

if TYPE_CHECKING:
    import onnx_ir as ir

    from pipelines.models.pipeline import Pipeline

CLASS_TOKENS = {"mask_token": ("[MASK]", "<mask>"), "pad_token": ("[PAD]", "<pad>"), "cls_token": ("[CLS]", "<s>")}


@dataclass
class HeadWeights:
    """Weights of a head, taken from those of a network.

    Attributes:
        tensors: Tensors of the network by their names in transformers.
        network: Weights of the network by their names in the graph.
        weights: Taken weights by their names in the graph.
        errors: Missing weights and wrong shapes.
    """

    tensors: Mapping[str, NDArray[Any]]
    network: Mapping[str, NDArray[Any]]
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def take(self, name: str, original: str, *shape: int) -> None:
        """Takes a tensor.

        Args:
            name: Name in the graph.
            original: Name in transformers.
            *shape: Expected shape.
        """
        array = self.tensors.get(original)
        if array is None:
            self.errors.append(f"no {original}")
        elif array.shape != shape:
            self.errors.append(f"{original} {list(array.shape)}, expected {list(shape)}")
        else:
            self.weights[name] = array

    def linear(self, name: str, original: str, outputs: int, inputs: int) -> None:
        """Takes a linear layer, with a bias where there is one.

        Args:
            name: Name in the graph.
            original: Name in transformers.
            outputs: Rows of the weight.
            inputs: Columns of the weight.
        """
        self.take(f"{name}.weight", f"{original}.weight", outputs, inputs)
        if f"{original}.bias" in self.tensors:
            self.take(f"{name}.bias", f"{original}.bias", outputs)

    def norm(self, name: str, original: str, width: int) -> None:
        """Takes a layer normalization, with a bias where there is one.

        Args:
            name: Name in the graph.
            original: Name in transformers.
            width: Size of its weight and bias.
        """
        self.take(f"{name}.weight", f"{original}.weight", width)
        if f"{original}.bias" in self.tensors:
            self.take(f"{name}.bias", f"{original}.bias", width)


class Head(abc.ABC):
    """Output of a text network: a task.

    Attributes:
        FORMAT: Format of `zoo import` that reads such models.
        TITLE: What the models do, for people.
        ENDS: Ends of the names of their architectures in transformers.
        MODEL: Class of transformers that opens such a model.
        OUTPUT: Output of the graph.
        PER_TOKEN: Whether the output has a row a token.
        HAS_LAYERS: Whether the head has weights and layers of its own; otherwise it has those of `ModelConfig.labels`,
            over the first row of a text.
        PAIRS: Whether every input is a pair of texts.
        OPTIONS: Options of `zoo import`.
        DENSE_MODULES: Whether modules Dense of sentence-transformers are layers of the head, "dense.N" of the weights.
        UNATTENDED: Whether rows of tokens that are not attended to are results.
        OWN_LENGTHS: Whether the head limits the tokens of texts, in place of `max_seq_length` of the folder.
    """

    FORMAT: ClassVar[str]
    TITLE: ClassVar[str]
    ENDS: ClassVar[tuple[str, ...]]
    MODEL: ClassVar[str]
    OUTPUT: ClassVar[str]
    PER_TOKEN: ClassVar[bool] = False
    HAS_LAYERS: ClassVar[bool] = True
    PAIRS: ClassVar[bool] = False
    OPTIONS: ClassVar[tuple[str, ...]] = ()
    DENSE_MODULES: ClassVar[bool] = False
    UNATTENDED: ClassVar[bool] = False
    OWN_LENGTHS: ClassVar[bool] = False

    def recognizes(self, path: Path, config: Mapping[str, Any]) -> bool:
        """Returns whether a model has this head.

        Args:
            path: Folder of the model.
            config: Content of its config.json.
        """
        return any(str(name).endswith(self.ENDS) for name in config.get("architectures") or [])

    def accepts(self, path: Path, name: str) -> bool:
        """Returns whether a network can have this head.

        Args:
            path: Folder of the model.
            name: Name of its architecture in transformers.
        """
        return name.endswith(self.ENDS)

    def per_token(self, config: ModelConfig) -> bool:
        """Returns whether the output has a row a token.

        Args:
            config: Configuration of the network.
        """
        return self.PER_TOKEN

    def activation(self, config: Mapping[str, Any]) -> str:
        """Returns the activation of the first layer of the head, `ModelConfig.head_activation`.

        Args:
            config: Content of its config.json.

        Raises:
            RequestError: It is not supported.
        """
        is_modernbert = config.get("model_type") == "modernbert"
        return ConfigFile(config).activation("classifier_activation") if is_modernbert else ""

    @abc.abstractmethod
    def outputs(self, config: Mapping[str, Any]) -> int:
        """Returns the number of outputs of a row.

        Args:
            config: Content of config.json.
        """

    def form(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns fields of `ModelConfig` that the head determines.

        Args:
            path: Folder of the model.
            network: Folder of its network and tokenizer, the same or within it.
            config: Content of its config.json.

        Raises:
            RequestError: A part of the head is not supported.
        """
        return {}

    @abc.abstractmethod
    def features(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the settings of the pipeline from a folder, for the card.

        Args:
            path: Folder of the model.
            network: Folder of its network and tokenizer, the same or within it.
            config: Content of its config.json.

        Returns:
            Features of the card beside those of all text networks.

        Raises:
            RequestError: A part of the head is not supported.
        """

    def tables(self, path: Path, network: Path, features: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
        """Returns arrays beside the weights of the network, which its file of weights has by these names.

        Args:
            path: Folder of the model.
            network: Folder of its network and tokenizer, the same or within it.
            features: Result of `features`.

        Raises:
            RequestError: One is damaged.
        """
        return {}

    @abc.abstractmethod
    def pipeline(self) -> type[Pipeline]:
        """Returns the class that opens such a model."""

    @abc.abstractmethod
    def evaluate(self, pipelines: Mapping[str, Any], data: Any, on_error: str) -> dict[str, Any]:
        """Measures the quality of several precisions, see `Family.evaluate`.

        Args:
            pipelines: {precision: opened pipeline}, fp32 first.
            data: Labelled raw data.
            on_error: "raise", or "skip" to leave out bad input.
        """

    def weights(self, store: HeadWeights, config: ModelConfig) -> None:  # noqa: B027 - without `HAS_LAYERS` none
        """Takes the weights of the head.

        Args:
            store: Where they are taken from, and gathered.
            config: Configuration of the network.
        """

    def export(self, writer: Any, hidden: ir.Value, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """Appends the layers of the head.

        Args:
            writer: Writer of the graph, see `zoo.texts.export.freeze`.
            hidden: Output of the last layer, float32 [batch, tokens, width].
            ids: Token ids, int64 [batch, tokens].
            mask: Attention mask, int64 [batch, tokens].

        Returns:
            The output, named `OUTPUT`.
        """
        raise NotImplementedError


class TokenHead(Head):
    """A linear layer of every token; ModernBERT has a layer with an activation and a norm before it.

    Attributes:
        LAYER: Name of the layer in transformers.
    """

    OUTPUT: ClassVar[str] = LOGITS
    PER_TOKEN: ClassVar[bool] = True
    LAYER: ClassVar[str] = "classifier"

    def weights(self, store: HeadWeights, config: ModelConfig) -> None:
        """See `Head`: "classifier", and before it "dense" and "dense_norm".

        Args:
            store: Where they are taken from, and gathered.
            config: Configuration of the network.
        """
        layer = self.LAYER if f"{self.LAYER}.weight" in store.tensors else "score"  # of decoders
        if config.kind == "modernbert":
            layer = "classifier"
            store.linear("dense", "head.dense", config.width, config.width)
            store.norm("dense_norm", "head.norm", config.width)
        store.linear("classifier", layer, config.labels, config.width)

    def export(self, writer: Any, hidden: ir.Value, ids: ir.Value, mask: ir.Value) -> ir.Value:
        """See `Head`.

        Args:
            writer: Writer of the graph.
            hidden: Output of the last layer.
            ids: Token ids.
            mask: Attention mask.
        """
        x = hidden
        if "dense.weight" in writer.weights:
            x = writer.activate(writer.linear(x, "dense"), "dense", writer.config.head_activation)
            x = writer.norm(x, "dense_norm")
        result: ir.Value = writer.linear(x, "classifier", LOGITS)
        return result


def label_count(config: Mapping[str, Any]) -> int:
    """Returns the number of labels of a network.

    Args:
        config: Content of config.json.
    """
    return len(config.get("id2label") or {}) or int(config.get("num_labels") or config.get("_num_labels") or 2)


def label_names(config: Mapping[str, Any]) -> list[str]:
    """Returns the labels of a network in the order of its outputs, as transformers names them.

    Args:
        config: Content of config.json.

    Raises:
        RequestError: The numbers of the labels are not 0, 1, 2, ...
    """
    names = config.get("id2label")
    if not isinstance(names, dict) or not names:
        return [f"LABEL_{i}" for i in range(label_count(config))]
    numbered = {int(number): str(name) for number, name in names.items()}
    if sorted(numbered) != list(range(len(numbered))):
        raise RequestError(f"its labels have the numbers {sorted(numbered)[:5]}, expected 0 to {len(numbered) - 1}")
    return [numbered[i] for i in range(len(numbered))]


def special_token(path: Path, name: str) -> str:
    """Returns a special token of a tokenizer; "" if its files name none.

    Tokenizers of older files do not name theirs where they are those of their class (`CLASS_TOKENS`).

    Args:
        path: Folder of the network.
        name: Its name in transformers, such as unk_token.
    """
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = read_json(path / file) if (path / file).is_file() else {}
        token = settings.get(name) if isinstance(settings, dict) else None
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text:
            return text
    content = read_json(path / "tokenizer.json") if (path / "tokenizer.json").is_file() else {}
    if not isinstance(content, dict):
        return ""
    if name == "unk_token":
        unknown = (content.get("model") or {}).get("unk_token")
        return unknown if isinstance(unknown, str) else ""
    added = {token.get("content") for token in content.get("added_tokens") or [] if token.get("special")}
    return next((token for token in CLASS_TOKENS.get(name, ()) if token in added), "")
