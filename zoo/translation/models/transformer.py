"""Encoder-decoder Transformer in torch (Vaswani et al. 2017), with the variants of other toolkits' models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from pipelines.core.errors import RequestError
from zoo.translation.data.parallel_text import END, PAD, POSITIONS, START, pad
from zoo.translation.models.config import ARCHITECTURES, ModelConfig, sinusoids
from zoo.translation.models.layers import KeysValues, Layer, LayerState
from zoo.translation.search.beam_search import Hypothesis, beam_search, limit


def build(
    arch: str, vocabulary: int, *, pre_norm: bool = True, dropout: float = 0.0, config: ModelConfig | None = None
) -> Transformer:
    """Builds an untrained network.

    Args:
        arch: A key of `ARCHITECTURES`.
        vocabulary: Number of pieces.
        pre_norm: Whether layers normalize their input (pre-LN) instead of their sum (post-LN).
        dropout: Dropout probability.
        config: Configuration of a pruned network, instead of that of `arch`.

    Returns:
        The network.

    Raises:
        RequestError: `arch` is unknown.
    """
    if arch not in ARCHITECTURES:
        raise RequestError(f"no Transformer {arch!r}; known: {', '.join(ARCHITECTURES)}")
    return Transformer(config or ARCHITECTURES[arch], vocabulary, pre_norm=pre_norm, dropout=dropout)


@contextlib.contextmanager
def capture_attention(model: Transformer | None) -> Iterator[list[torch.Tensor]]:
    """Context manager that collects the cross-attention weights of all decoder layers.

    Args:
        model: The network; None: nothing is collected.

    Yields:
        A list that gets [n, heads, target tokens, source tokens] of each layer.
    """
    found: list[torch.Tensor] = []
    layers = [] if model is None else [layer.cross for layer in model.decoder]
    try:
        for each in layers:
            each.captured = found  # type: ignore[union-attr]
        yield found
    finally:
        for each in layers:
            each.captured = None  # type: ignore[union-attr]


class Transformer(nn.Module):
    """Encoder-decoder Transformer.

    One table of embeddings, scaled by sqrt(width), serves source, target and, transposed, the output (section 3.4),
    unless the configuration differs.
    """

    positions: torch.Tensor

    def __init__(
        self, config: ModelConfig, vocabulary: int, *, pre_norm: bool, dropout: float, source_vocabulary: int = 0
    ) -> None:
        """Builds an untrained network.

        Args:
            config: Its configuration.
            vocabulary: Number of target pieces.
            pre_norm: Whether layers normalize their input (pre-LN) instead of their sum (post-LN).
            dropout: Dropout probability.
            source_vocabulary: Number of source pieces; 0: as many as of the target.
        """
        super().__init__()
        self.config, self.pre_norm = config, pre_norm
        self.embedding = nn.Embedding(vocabulary, config.width)
        if not config.shared_source:
            self.source_embedding = nn.Embedding(source_vocabulary or vocabulary, config.width)
        if not config.tied_output:
            self.output_weight = nn.Parameter(torch.empty(vocabulary, config.width))
            nn.init.xavier_uniform_(self.output_weight)
        if config.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(vocabulary))
        if config.positions:
            for name, length in zip(("source_positions", "positions"), config.positions, strict=True):
                self.register_buffer(name, torch.zeros(length, config.width))
        else:
            self.register_buffer("positions", torch.from_numpy(sinusoids(POSITIONS, config.width)), persistent=False)
        if config.embedding_norm:
            self.source_norm, self.target_norm = (nn.LayerNorm(config.width, config.epsilon) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.project: Callable[..., torch.Tensor] = F.linear  # to the logits
        self.encoder = nn.ModuleList(Layer(config, pre_norm, dropout, cross=False) for _ in range(config.encoder))
        self.decoder = nn.ModuleList(Layer(config, pre_norm, dropout, cross=True) for _ in range(config.decoder))
        final_norm = pre_norm if config.final_norm is None else config.final_norm
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(config.width, config.epsilon) if final_norm else nn.Identity() for _ in range(2)
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=config.width**-0.5)

    def table_of(self, side: str) -> tuple[str, str, str]:
        """Returns the names of the weights that embed a side: table, positions, norm ("" for none).

        Args:
            side: "source" or "target".
        """
        source = side == "source"
        table = "source_embedding" if source and not self.config.shared_source else "embedding"
        positions = "source_positions" if source and self.config.positions else "positions"
        return table, positions, f"{side}_norm" if self.config.embedding_norm else ""

    def _embed(self, side: str, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        table, positions, norm = self.table_of(side)
        x = getattr(self, table)(tokens)
        if self.config.scaled:
            x = x * math.sqrt(self.config.width)
        x = x + getattr(self, positions)[start : start + tokens.shape[1]]
        return self.dropout(getattr(self, norm)(x) if norm else x)  # type: ignore[no-any-return]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.embedding.weight if self.config.tied_output else self.output_weight
        return self.project(self.decoder_norm(x), weight, self.output_bias if self.config.output_bias else None)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes sentences.

        Args:
            source: int64 [n, s], padded with `PAD`.

        Returns:
            The result, float [n, s, width], and the mask of tokens that are not padding, bool [n, 1, 1, s].
        """
        mask = (source != PAD)[:, None, None, :]
        x = self._embed("source", source)
        for layer in self.encoder:
            x = layer.encode(x, mask)  # type: ignore[operator]
        return self.encoder_norm(x), mask

    def forward(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        encoded: tuple[torch.Tensor, torch.Tensor] | None = None,
        layers: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Computes logits with teacher forcing.

        Args:
            source: int64 [n, s], padded with `PAD`.
            target: int64 [n, t], beginning with `START`.
            encoded: Result of `encode`, if it is known.
            layers: A list that gets the result of every decoder layer, float [n, t, width].

        Returns:
            Logits of the next token, float [n, t, vocabulary].
        """
        memory, mask = encoded or self.encode(source)
        x = self._embed("target", target)
        for layer in self.decoder:
            x, _ = layer.decode(x, None, layer.cross.keys_values(memory), mask)  # type: ignore[operator, union-attr]
            if layers is not None:
                layers.append(x)
        return self._logits(x)

    def begin(self, source: torch.Tensor) -> DecodingState:
        """Encodes sentences for decoding.

        Args:
            source: int64 [n, s], padded with `PAD`.

        Returns:
            Step function for `beam_search`.
        """
        memory, mask = self.encode(source)
        return DecodingState(self, mask, [layer.cross.keys_values(memory) for layer in self.decoder])  # type: ignore[operator, union-attr]


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
        self.past = [each and tuple(part[rows] for part in each) for each in self.past]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes the next token's logits.

        Args:
            tokens: The newest token of every row, int64 [n].

        Returns:
            float [n, vocabulary].
        """
        x = self.model._embed("target", tokens[:, None], self.length)
        for i, layer in enumerate(self.model.decoder):
            x, self.past[i] = layer.decode(x, self.past[i], self.memory[i], self.mask)  # type: ignore[operator]
        self.length += 1
        return self.model._logits(x[:, 0])

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
    bf16: bool = False,
) -> list[list[Hypothesis]]:
    """Translates sentences in one batch.

    Args:
        model: The network.
        sources: Tokens of each sentence, int32, `END` last.
        beam: Beam size.
        best: Number of translations of each sentence.
        length_penalty: See `beam_search`.
        bf16: Whether to compute in bfloat16.

    Returns:
        The `best` hypotheses of each sentence.
    """
    model.eval()
    device = model.positions.device
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        decoding = model.begin(torch.from_numpy(pad(sources)).to(device))
        limits = np.array([limit(len(each), len(model.positions)) for each in sources])
        return beam_search(decoding, limits, start=START, end=END, beam=beam, length_penalty=length_penalty, best=best)
