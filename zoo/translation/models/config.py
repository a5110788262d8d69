"""Configurations of translation networks; without torch, which reading a model folder does not need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.plain import from_plain, to_plain

EXCLUDED_LOGIT = -1e9  # logit of tokens that are never chosen, such as padding


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of an encoder-decoder Transformer.

    Attributes:
        encoder: Number of encoder layers.
        decoder: Number of decoder layers.
        width: Width of the model.
        hidden: Units of a feed-forward layer.
        heads: Number of attention heads.
        decoder_hidden: Units of a decoder's feed-forward layer; 0: as the encoder's.
        decoder_heads: Number of attention heads of a decoder; 0: as the encoder's.
        activation: Of feed-forward layers, a key of `zoo.translation.models.layers.ACTIVATIONS`.
        autoregression: How decoder layers read the tokens so far: "attention", "ssru" (`Recurrence`) or "average"
            (`Average`).
        scaled: Whether embeddings are multiplied by sqrt(width).
        embedding_norm: Whether embeddings are normalized.
        target_norm_first: Whether embeddings of targets are not scaled and normalized before positions are added.
        final_norm: Whether the result of the last layer is normalized; None: in pre-LN networks.
        shared_source: Whether source and target share a table of embeddings.
        tied_output: Whether the target's table, transposed, makes the logits.
        output_bias: Whether the logits have a bias.
        positions: Maximum tokens of a source and of a target, whose position embeddings are weights; (): sinusoids.
        epsilon: Of layer normalization.
        average_hidden: Units of the feed-forward layer in `Average`; 0: `hidden`.
        average_activation: Activation of the feed-forward layer in `Average`.
        head_size: Columns of a head; 0: width / heads.
        norm: Kind of normalization: "layer", or "rms", without a bias.
        attention_scale: Multiplier of the products of queries and keys; 0: 1 / sqrt(columns of a head).
        buckets: Buckets of a bias of self-attention by relative position (T5), in place of position embeddings;
            `positions` are then limits alone. 0: none.
        bucket_distance: Distance from which on relative positions share a bucket.
        shared_buckets: Whether all layers of a side have the bias of its first one; else each its own (UMT5).
        gated: Whether feed-forward layers are gated: activation(gate) inner.
        linear_bias: Whether linear layers have a bias.
        output_scale: Multiplier of the decoder's result before the logits.
    """

    encoder: int
    decoder: int
    width: int
    hidden: int
    heads: int
    decoder_hidden: int = 0
    decoder_heads: int = 0
    activation: str = "relu"
    autoregression: str = "attention"
    scaled: bool = True
    embedding_norm: bool = False
    target_norm_first: bool = False
    final_norm: bool | None = None
    shared_source: bool = True
    tied_output: bool = True
    output_bias: bool = False
    positions: tuple[int, ...] = ()
    epsilon: float = 1e-5
    average_hidden: int = 0
    average_activation: str = "swish"
    head_size: int = 0
    norm: str = "layer"
    attention_scale: float = 0.0
    buckets: int = 0
    bucket_distance: int = 128
    shared_buckets: bool = True
    gated: bool = False
    linear_bias: bool = True
    output_scale: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Returns the five sizes and the values that differ from the defaults, as plain values."""
        return to_plain(self, changed=True)

    @staticmethod
    def from_json(values: dict[str, Any]) -> ModelConfig:
        """Reads the result of `to_json`.

        Args:
            values: Plain values.

        Returns:
            The configuration.

        Raises:
            RequestError: A key is unknown or missing.
        """
        try:
            return ModelConfig(**from_plain(values))
        except TypeError as error:
            raise RequestError(
                f"card.json has the model configuration {values}, expected that of zoo train or zoo import; train or "
                "import the model again"
            ) from error


def sinusoids(length: int, width: int) -> NDArray[np.float32]:
    """Computes sinusoidal position encodings (Vaswani et al. 2017, section 3.5) in tensor2tensor's order.

    Args:
        length: Number of positions.
        width: Number of columns, even.

    Returns:
        float32 [length, width]: sines in the first half of the columns, cosines in the second; wave lengths from 2 pi
        to 20,000 pi.
    """
    rates = np.exp(np.arange(width // 2) * -(math.log(10_000) / (width // 2 - 1)))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
