"""The encoder-decoder Transformer (Vaswani et al. 2017, "Attention Is All You Need"), in torch, with one vocabulary for
both languages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from pipelines.core.errors import RequestError
from zoo.transformer_mt.data import END, PAD, POSITIONS, START, padded
from zoo.transformer_mt.decode import Hypothesis, beam_search, limit

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [n, heads, tokens, width / heads] each


@dataclass(frozen=True)
class Form:
    """Layers of the encoder and the decoder, width of the model, units of a feed-forward layer, attention heads."""

    encoder: int
    decoder: int
    width: int
    hidden: int
    heads: int


FORMS = {
    "tiny": Form(3, 3, 256, 1024, 4),
    "base": Form(6, 6, 512, 2048, 8),
    "big": Form(6, 6, 1024, 4096, 16),
    "deep-shallow": Form(
        6, 2, 256, 1024, 4
    ),  # a sentence passes the encoder once, the decoder once a word (Kasai et al. 2021)
}


def build(arch: str, vocabulary: int, *, pre_norm: bool = True, dropout: float = 0.0) -> Transformer:
    """The untrained network. arch: a key of `FORMS`. vocabulary: its number of pieces. Raises RequestError for an
    unknown `arch`.
    """
    if arch not in FORMS:
        raise RequestError(f"no Transformer {arch!r}; known: {', '.join(FORMS)}")
    return Transformer(FORMS[arch], vocabulary, pre_norm=pre_norm, dropout=dropout)


def sinusoids(length: int, width: int) -> NDArray[np.float32]:
    """Position encodings float32 [length, width]: sines in the first half of the columns, cosines in the second
    (tensor2tensor's order).

    The wave lengths run from 2 pi to 20,000 pi as in Vaswani et al. 2017, section 3.5.
    """
    rates = np.exp(np.arange(width // 2) * -(math.log(10_000) / (width // 2 - 1)))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (section 3.2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[n, tokens, width] -> [n, heads, tokens, width / heads]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def keys_values(self, x: torch.Tensor) -> KeysValues:
        """Keys and values of `x` [n, tokens, width], each [n, heads, tokens, width / heads]."""
        return self._split(self.key(x)), self._split(self.value(x))

    def forward(self, x: torch.Tensor, given: KeysValues, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of x [n, tokens, width] to keys and values `given`, where `mask` is true.

        mask: bool, broadcast to [n, heads, tokens, tokens of `given`].
        """
        query, (keys, values) = self._split(self.query(x)), given
        if x.is_cuda:
            heads = F.scaled_dot_product_attention(query, keys, values, mask)
        else:  # for sentences, torch's own form takes several times as long on a CPU in its backward pass
            scores = query @ keys.transpose(2, 3) * query.shape[3] ** -0.5
            weights = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(3)
            heads = weights.to(values.dtype) @ values
        return self.output(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """x + f(norm(x)) before, or norm(x + f(x)) after, with dropout on what f gives."""

    def __init__(self, width: int, pre_norm: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout, self.pre_norm = nn.LayerNorm(width), nn.Dropout(dropout), pre_norm

    def forward(self, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """x [n, tokens, width] and a sublayer f -> [n, tokens, width]."""
        if self.pre_norm:
            return x + self.dropout(f(self.norm(x)))  # type: ignore[no-any-return]
        return self.norm(x + self.dropout(f(x)))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with ReLU between (section 3.3)."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(form.width, form.hidden), nn.Linear(form.hidden, form.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, tokens, width] -> [n, tokens, width]."""
        return self.outer(F.relu(self.inner(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Self-attention, cross-attention in a decoder's layer (`cross`), feed-forward."""

    def __init__(self, form: Form, pre_norm: bool, dropout: float, cross: bool) -> None:
        super().__init__()
        self.attention, self.around_attention = (
            Attention(form.width, form.heads),
            Residual(form.width, pre_norm, dropout),
        )
        if cross:
            self.cross, self.around_cross = Attention(form.width, form.heads), Residual(form.width, pre_norm, dropout)
        self.feed, self.around_feed = FeedForward(form), Residual(form.width, pre_norm, dropout)

    def encode(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A layer of the encoder."""
        x = self.around_attention(x, lambda y: self.attention(y, self.attention.keys_values(y), mask))
        return self.around_feed(x, self.feed)  # type: ignore[no-any-return]

    def decode(
        self, x: torch.Tensor, own: Callable[[KeysValues], KeysValues], memory: KeysValues, mask: torch.Tensor
    ) -> torch.Tensor:
        """A layer of the decoder.

        own: from keys and values of `x` to those of all tokens so far, for self-attention (a KV cache). memory: keys
        and values of the source, for cross-attention.
        """
        causal = (
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if x.shape[1] > 1 else None
        )
        x = self.around_attention(x, lambda y: self.attention(y, own(self.attention.keys_values(y)), causal))
        x = self.around_cross(x, lambda y: self.cross(y, memory, mask))
        return self.around_feed(x, self.feed)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Source and target tokens, int64 [n, tokens] padded with `PAD`, to logits of the next target token at every
    position.

    One table of embeddings, scaled by sqrt(width), serves source, target and, transposed, the output (section 3.4).
    """

    positions: torch.Tensor

    def __init__(self, form: Form, vocabulary: int, *, pre_norm: bool, dropout: float) -> None:
        super().__init__()
        self.form, self.pre_norm = form, pre_norm
        self.embedding = nn.Embedding(vocabulary, form.width)
        self.register_buffer("positions", torch.from_numpy(sinusoids(POSITIONS, form.width)), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(Layer(form, pre_norm, dropout, cross=False) for _ in range(form.encoder))
        self.decoder = nn.ModuleList(Layer(form, pre_norm, dropout, cross=True) for _ in range(form.decoder))
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(form.width) if pre_norm else nn.Identity() for _ in range(2)
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=form.width**-0.5)

    def _embed(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        x = self.embedding(tokens) * math.sqrt(self.form.width) + self.positions[start : start + tokens.shape[1]]
        return self.dropout(x)  # type: ignore[no-any-return]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.decoder_norm(x), self.embedding.weight)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Source tokens int64 [n, s] -> (memory [n, s, width], mask bool [n, 1, 1, s] of what is no padding)."""
        mask = (source != PAD)[:, None, None, :]
        x = self._embed(source)
        for layer in self.encoder:
            x = layer.encode(x, mask)  # type: ignore[operator]
        return self.encoder_norm(x), mask

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Teacher forcing: source int64 [n, s], target int64 [n, t] beginning with `START` -> logits [n, t,
        vocabulary].
        """
        memory, mask = self.encode(source)
        x = self._embed(target)
        for layer in self.decoder:
            x = layer.decode(x, lambda own: own, layer.cross.keys_values(memory), mask)  # type: ignore[operator, union-attr]
        return self._logits(x)

    def begin(self, source: torch.Tensor) -> Decoding:
        """Encode, and get ready to decode step by step."""
        memory, mask = self.encode(source)
        return Decoding(self, mask, [layer.cross.keys_values(memory) for layer in self.decoder])  # type: ignore[operator, union-attr]


class Decoding:
    """Sentences on their way: keys and values of the source, computed once, and of the tokens so far. A step for
    `beam_search`.
    """

    def __init__(self, model: Transformer, mask: torch.Tensor, memory: list[KeysValues]) -> None:
        self.model, self.mask, self.memory = model, mask, memory
        self.own: list[KeysValues] = []
        self.length = 0

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows (int64 [m]) alone, in this order; a row may come more than once."""
        self.mask = self.mask[rows]
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        self.own = [(keys[rows], values[rows]) for keys, values in self.own]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The newest token of every row, int64 [n] -> logits of the next [n, vocabulary]."""
        x = self.model._embed(tokens[:, None], self.length)
        grown: list[KeysValues] = []
        for i, layer in enumerate(self.model.decoder):

            def own(new: KeysValues, i: int = i) -> KeysValues:
                old = self.own[i] if self.own else None
                grown.append(new if old is None else (torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)))
                return grown[-1]

            x = layer.decode(x, own, self.memory[i], self.mask)  # type: ignore[operator]
        self.own = grown
        self.length += 1
        return self.model._logits(x[:, 0])

    def __call__(self, tokens: NDArray[np.int64], parents: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits [n, vocabulary] after `tokens` [n], each following the hypothesis `parents[i]`."""
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
    """The `best` translations of every sentence (tokens, `END` last), as `beam_search` gives them; all sentences go in
    one batch.
    """
    model.eval()
    device = model.positions.device
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        decoding = model.begin(torch.from_numpy(padded(sources)).to(device))
        limits = np.array([limit(len(each), POSITIONS) for each in sources])
        return beam_search(decoding, limits, start=START, end=END, beam=beam, length_penalty=length_penalty, best=best)
