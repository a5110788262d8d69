"""The sizes of translation's networks, and in what those of other toolkits differ; without torch, which nobody needs to
look at a folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.core.errors import RequestError
from pipelines.core.plain import from_plain, to_plain

BARRED = -1e9  # the logit of what is no word, such as padding


@dataclass(frozen=True)
class Form:
    """Layers of the encoder and the decoder, width of the model, units of a feed-forward layer, attention heads; and,
    after these, in what translation models differ.

    decoder_hidden, decoder_heads: those of the decoder, 0: as the encoder's. head_size: columns of a head, 0: width /
    heads. activation: of feed-forward layers, a key of `model.ACTIVATIONS`. autoregression: how the decoder sees the
    tokens so far, "attention", "ssru" (see `model.Recurrence`) or "average" (see `model.Average`, with average_hidden
    units and average_activation). scaled: embeddings are multiplied by sqrt(width). embedding_norm: they are
    normalized. final_norm: so is what the last layers give; None: where layers normalize before. shared_source: one
    table of embeddings for both languages. tied_output: the target's table, transposed, makes the logits. output_bias:
    which have a bias. positions: tokens of a source and of a target at most, and the weights have a table of position
    encodings for each; (): `sinusoids` of `POSITIONS`. epsilon: of layer normalization.
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
    final_norm: bool | None = None
    shared_source: bool = True
    tied_output: bool = True
    output_bias: bool = False
    positions: tuple[int, ...] = ()
    epsilon: float = 1e-5
    average_hidden: int = 0
    average_activation: str = "swish"
    head_size: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values: the five sizes, and what differs from the defaults."""
        return to_plain(self, changed=True)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Form:
        """The form that `to_json` made plain. Raises RequestError for another."""
        try:
            return Form(**from_plain(values))
        except TypeError as error:
            raise RequestError(f"found the form {values}, wanted what zoo train and zoo import write") from error


FORMS = {
    "tiny": Form(3, 3, 256, 1024, 4),
    "base": Form(6, 6, 512, 2048, 8),
    "big": Form(6, 6, 1024, 4096, 16),
    "deep-shallow": Form(
        6, 2, 256, 1024, 4
    ),  # a sentence passes the encoder once, the decoder once a word (Kasai et al. 2021)
    "student": Form(6, 2, 256, 1024, 4, autoregression="ssru"),  # of a deep-shallow teacher it inherits all but this
}


def sinusoids(length: int, width: int) -> NDArray[np.float32]:
    """Position encodings float32 [length, width]: sines in the first half of the columns, cosines in the second
    (tensor2tensor's order).

    The wave lengths run from 2 pi to 20,000 pi as in Vaswani et al. 2017, section 3.5.
    """
    rates = np.exp(np.arange(width // 2) * -(math.log(10_000) / (width // 2 - 1)))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
