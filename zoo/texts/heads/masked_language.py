"""The layers that predict tokens from rows of a masked language model, by the names of several architectures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from pipelines.core.errors import RequestError
from zoo.texts.models.architectures import architecture_of
from zoo.texts.models.architectures.base import ConfigFile
from zoo.texts.models.config import ModelConfig
from zoo.texts.models.head import Head, HeadWeights

if TYPE_CHECKING:
    import onnx_ir as ir


OF_LAYERS = (  # networks whose head has the activation of layers
    "bert",
    "ernie",
    "distilbert",
    "nomic_bert",
    "new",
    "albert",
    "deberta",
    "deberta-v2",
    "roformer",
)
BARE = ("eurobert",)  # networks whose head is the decoder alone
UNBIASED = ("nomic_bert", "eurobert", "ultrabert")  # networks whose decoder may have no bias


class Names(NamedTuple):
    """Names of the layers in transformers: a linear layer, its norm, the decoder to the vocabulary, its bias."""

    dense: str
    norm: str
    decoder: str
    bias: str


def _within(prefix: str, transform: str, norm: str) -> Names:
    """Returns the names of a head whose layers are all within `prefix`."""
    return Names(f"{prefix}.{transform}dense", f"{prefix}.{transform}{norm}", f"{prefix}.decoder", f"{prefix}.bias")


NAMES = (
    _within("cls.predictions", "transform.", "LayerNorm"),  # BERT, ERNIE, RoFormer, DeBERTa
    _within("cls.predictions", "transform.", "layer_norm"),  # Nomic-BERT
    _within("lm_head", "", "layer_norm"),  # RoBERTa, MPNet, GTE of transformers
    _within("lm_head", "", "norm"),  # GTE of custom code
    _within("predictions", "", "LayerNorm"),  # ALBERT
    _within("lm_predictions.lm_head", "", "LayerNorm"),  # DeBERTa that is not "legacy"
    Names("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"),  # DistilBERT
    Names(  # ELECTRA
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", "generator_lm_head.bias"
    ),
    Names("head.dense", "head.norm", "decoder", "decoder.bias"),  # ModernBERT
)
DECODER = Names("", "", "lm_head", "lm_head.bias")  # EuroBERT
TWO_LAYERS = "ultrabert"  # a network whose head has a second layer in place of the norm
SECOND = Names("head.linear1", "head.linear2", "head.decoder", "head.decoder.bias")


class MaskedLanguageHead(Head):
    """A linear layer, an activation and a norm of every token, before a decoder to the vocabulary."""

    ENDS: ClassVar[tuple[str, ...]] = ("ForMaskedLM",)
    MODEL: ClassVar[str] = "AutoModelForMaskedLM"

    def form(self, path: Path, network: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `Head`."""
        if config.get("token_dropout"):
            raise RequestError(
                "masks change the embeddings of all tokens of a text (token_dropout in config.json); expected another "
                "network, or --format sentence-transformers --pooling mean for its embeddings"
            )
        return {}

    def activation(self, config: Mapping[str, Any]) -> str:
        """See `Head`: gelu, or that of BERT's layers."""
        if config["model_type"] == TWO_LAYERS:
            return "gelu_tanh"
        if config["model_type"] in OF_LAYERS:
            return architecture_of(config).read(ConfigFile(config)).activation
        return super().activation(config) or ConfigFile(config).activation()

    def weights(self, store: HeadWeights, config: ModelConfig) -> None:
        """See `Head`: "transform" and "transform_norm" or "second", which `BARE` networks lack, and "decoder".

        Args:
            store: Where they are taken from, and gathered.
            config: Configuration of the network.
        """
        width = config.embedding or config.width
        if config.kind in BARE:
            names: Names | None = DECODER
        elif config.kind == TWO_LAYERS:
            names = SECOND
        else:
            names = next((names for names in NAMES if f"{names.norm}.weight" in store.tensors), None)
        if names is None:
            store.errors.append(f"no head of a masked language model, such as {NAMES[0].norm}.weight")
            return
        if config.kind == TWO_LAYERS:
            between = len(store.tensors.get(f"{names.dense}.weight", ()))
            store.linear("transform", names.dense, between, config.width)
            store.linear("second", names.norm, width, between)
        elif names.dense:
            store.linear("transform", names.dense, width, config.width)
            store.norm("transform_norm", names.norm, width)
        if f"{names.decoder}.weight" in store.tensors:
            store.take("decoder.weight", f"{names.decoder}.weight", config.vocabulary, width)
        elif "token.weight" in store.network:  # tied to the embedding; without it, the network has errors of its own
            store.weights["decoder.weight"] = store.network["token.weight"]
        bias = names.bias if names.bias in store.tensors else f"{names.decoder}.bias"
        if bias in store.tensors or config.kind not in UNBIASED:
            store.take("decoder.bias", bias, config.vocabulary)
        else:
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
        if "transform.weight" not in writer.weights:
            return writer.add("Identity", [hidden], result) if result else hidden
        kind = writer.config.head_activation
        x = writer.activate(writer.linear(hidden, "transform"), "transform", kind)
        if "second.weight" in writer.weights:
            x = writer.activate(writer.linear(x, "second"), "second", kind)
            rows: ir.Value = writer.add("Identity", [x], result) if result else x
        else:
            rows = writer.norm(x, "transform_norm", result)
        return rows
