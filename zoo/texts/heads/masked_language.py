"""The layers that predict tokens from rows of a masked language model, by the names of several architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from zoo.texts.models.architectures import architecture_of
from zoo.texts.models.architectures.base import ConfigFile
from zoo.texts.models.config import ModelConfig
from zoo.texts.models.head import Head, HeadWeights

if TYPE_CHECKING:
    import onnx_ir as ir


OF_LAYERS = ("bert", "ernie", "distilbert", "nomic_bert", "new")  # networks whose head has the activation of layers


class Names(NamedTuple):
    """Names of the layers in transformers: a linear layer, its norm, the decoder to the vocabulary, its bias."""

    dense: str
    norm: str
    decoder: str
    bias: str


NAMES = (
    Names(  # BERT, ERNIE
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    ),
    Names(  # Nomic-BERT
        "cls.predictions.transform.dense",
        "cls.predictions.transform.layer_norm",
        "cls.predictions.decoder",
        "cls.predictions.bias",
    ),
    Names("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"),  # RoBERTa, MPNet
    Names("lm_head.dense", "lm_head.norm", "lm_head.decoder", "lm_head.decoder.bias"),  # GTE
    Names("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),  # DistilBERT
    Names(  # ELECTRA
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", "generator_lm_head.bias"
    ),
    Names("head.dense", "head.norm", "decoder", "decoder.bias"),  # ModernBERT
)


class MaskedLanguageHead(Head):
    """A linear layer, an activation and a norm of every token, before a decoder to the vocabulary."""

    ENDS: ClassVar[tuple[str, ...]] = ("ForMaskedLM",)
    MODEL: ClassVar[str] = "AutoModelForMaskedLM"

    def activation(self, config: Mapping[str, Any]) -> str:
        """See `Head`: gelu, or that of BERT's layers."""
        if config["model_type"] in OF_LAYERS:
            return architecture_of(config).read(ConfigFile(config)).activation
        return super().activation(config) or ConfigFile(config).activation()

    def weights(self, store: HeadWeights, config: ModelConfig) -> None:
        """See `Head`: "transform", "transform_norm" and "decoder".

        Args:
            store: Where they are taken from, and gathered.
            config: Configuration of the network.
        """
        names = next((names for names in NAMES if f"{names.norm}.weight" in store.tensors), NAMES[0])
        width = config.embedding or config.width
        store.linear("transform", names.dense, width, config.width)
        store.norm("transform_norm", names.norm, width)
        if f"{names.decoder}.weight" in store.tensors:
            store.take("decoder.weight", f"{names.decoder}.weight", config.vocabulary, width)
        else:  # tied to the embedding
            store.weights["decoder.weight"] = store.network["token.weight"]
        bias = names.bias if names.bias in store.tensors else f"{names.decoder}.bias"
        if bias in store.tensors or config.kind != "nomic_bert":
            store.take("decoder.bias", bias, config.vocabulary)
        else:  # its custom code has none
            store.weights["decoder.bias"] = np.zeros(config.vocabulary, np.float32)

    def transform(self, writer: Any, hidden: ir.Value, result: str = "") -> ir.Value:
        """Appends the layers before the decoder.

        Args:
            writer: Writer of the graph, see `zoo.texts.export.freeze`.
            hidden: Output of the last layer, float32 [batch, tokens, width].
            result: Name of the output; default: from the norm.

        Returns:
            float32 [batch, tokens, columns of the decoder].
        """
        x = writer.activate(writer.linear(hidden, "transform"), "transform", writer.config.head_activation)
        rows: ir.Value = writer.norm(x, "transform_norm", result)
        return rows
