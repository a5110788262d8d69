"""Decoding by a translation network in torch, and its attention weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from zoo.translation.data.tokens import END, START, pad
from zoo.translation.models.layers import KeysValues, LayerState
from zoo.translation.search.beam_search import Hypothesis, beam_search
from zoo.translation.search.config import DEFAULT_SEARCH, SearchConfig

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer


@contextlib.contextmanager
def capture_attention(model: Transformer | None) -> Iterator[list[torch.Tensor]]:
    """Context manager that collects the cross-attention weights of all decoder layers.

    Args:
        model: The network; None: nothing is collected.

    Yields:
        A list that gets [n, heads, target tokens, source tokens] of each layer.
    """
    captured: list[torch.Tensor] = []
    layers = [] if model is None else [layer.cross for layer in model.decoder]
    try:
        for attention in layers:
            attention.captured = captured  # type: ignore[union-attr]
        yield captured
    finally:
        for attention in layers:
            attention.captured = None  # type: ignore[union-attr]


class DecodingState:
    """Decoding state of a batch: keys and values of the source, and layer states; a step function for `beam_search`."""

    def __init__(self, model: Transformer, mask: torch.Tensor, memory: list[KeysValues]) -> None:
        self.model, self.mask, self.memory = model, mask, memory
        self.past: list[LayerState | None] = [None] * len(model.decoder)
        self.length = 0

    def select(self, rows: torch.Tensor) -> None:
        """Continues with these rows, in this order.

        Args:
            rows: int64 [m]; a row may occur more than once.
        """
        self.mask = self.mask[rows]
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        self.past = [state and tuple(part[rows] for part in state) for state in self.past]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes the next token's logits.

        Args:
            tokens: The newest token of every row, int64 [n].

        Returns:
            float [n, vocabulary].
        """
        x = self.model.embed("target", tokens[:, None], self.length)
        newest = torch.tensor([self.length], device=tokens.device)
        biases = self.model.relative_biases("decoder", newest, self.length + 1)
        for i, (layer, bias) in enumerate(zip(self.model.decoder, biases, strict=True)):
            x, self.past[i] = layer.decode(x, self.past[i], self.memory[i], self.mask, bias)  # type: ignore[operator]
        self.length += 1
        return self.model.logits(x[:, 0])

    def __call__(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns logits [n, vocabulary] after `tokens` [n], each of which continues the row `parents[i]`."""
        device = self.mask.device
        if len(parents) != len(self.mask) or (parents != np.arange(len(parents))).any():
            self.select(torch.from_numpy(parents).to(device))
        return self.step(torch.from_numpy(tokens).to(device)).float().cpu().numpy()


@torch.inference_mode()
def translate(
    model: Transformer,
    sources: Sequence[NDArray[np.int32]],
    *,
    beam: int = 1,
    best: int = 1,
    length_penalty: float = 1.0,
    rules: SearchConfig = DEFAULT_SEARCH,
    bf16: bool = False,
) -> list[list[Hypothesis]]:
    """Translates sentences in one batch.

    Args:
        model: The network.
        sources: Tokens of each sentence, int32, `END` last.
        beam: Beam size.
        best: Number of translations of each sentence.
        length_penalty: See `beam_search`.
        rules: Search options of the model.
        bf16: Whether to compute in bfloat16.

    Returns:
        The `best` hypotheses of each sentence.
    """
    model.eval()
    device = model.embedding.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        decoding = model.begin(torch.from_numpy(pad(sources)).to(device))
        limits = np.array([rules.limit(len(source), model.most_tokens) for source in sources])
        options = {"beam": beam, "length_penalty": length_penalty, "best": best, "rules": rules}
        return beam_search(decoding, limits, start=START, end=END, **options)  # type: ignore[arg-type]
