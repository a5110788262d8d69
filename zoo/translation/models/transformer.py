"""The encoder-decoder Transformer (Vaswani et al. 2017, "Attention Is All You Need"), in torch, in the forms that
translation models of this and of other toolkits have.
"""

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
from zoo.translation.data.parallel_text import END, PAD, POSITIONS, START, padded
from zoo.translation.models.config import FORMS, Form, sinusoids
from zoo.translation.search.beam_search import Hypothesis, beam_search, limit

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [n, heads, tokens, width / heads] each
# What a decoder layer keeps of the tokens so far: keys and values, or of `Recurrence` and `Average` a row a sentence
Past = tuple[torch.Tensor, ...]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


def build(
    arch: str, vocabulary: int, *, pre_norm: bool = True, dropout: float = 0.0, form: Form | None = None
) -> Transformer:
    """The untrained network. arch: a key of `FORMS`. vocabulary: its number of pieces. form: that of a network which
    was cut, in place of the arch's own. Raises RequestError for an unknown `arch`.
    """
    if arch not in FORMS:
        raise RequestError(f"no Transformer {arch!r}; known: {', '.join(FORMS)}")
    return Transformer(form or FORMS[arch], vocabulary, pre_norm=pre_norm, dropout=dropout)


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (section 3.2). size: columns of a head, 0: width / heads."""

    def __init__(self, width: int, heads: int, size: int = 0) -> None:
        super().__init__()
        self.heads, self.size = heads, size or width // heads
        self.seen: list[torch.Tensor] | None = None  # where it is a list, gets the weights of every call
        inner = width if not size else heads * size
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.output = nn.Linear(inner, width)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[n, tokens, heads * size] -> [n, heads, tokens, size]."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def keys_values(self, x: torch.Tensor) -> KeysValues:
        """Keys and values of `x` [n, tokens, width], each [n, heads, tokens, width / heads]."""
        return self._split(self.key(x)), self._split(self.value(x))

    def forward(self, x: torch.Tensor, given: KeysValues, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of x [n, tokens, width] to keys and values `given`, where `mask` is true.

        mask: bool, broadcast to [n, heads, tokens, tokens of `given`].
        """
        query, (keys, values) = self._split(self.query(x)), given
        if x.is_cuda and self.seen is None:
            heads = F.scaled_dot_product_attention(query, keys, values, mask)
        else:  # for sentences, torch's own form takes several times as long on a CPU in its backward pass
            scores = query @ keys.transpose(2, 3) * query.shape[3] ** -0.5
            weights = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(3)
            if self.seen is not None:
                self.seen.append(weights)
            heads = weights.to(values.dtype) @ values
        return self.output(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@contextlib.contextmanager
def watching(model: Transformer | None) -> Iterator[list[torch.Tensor]]:
    """A list that gets where the target's tokens look in the source: of every layer of the decoder the weights of its
    cross-attention, [n, heads, target tokens, source tokens]. None: nothing is seen.
    """
    found: list[torch.Tensor] = []
    layers = [] if model is None else [layer.cross for layer in model.decoder]
    try:
        for each in layers:
            each.seen = found  # type: ignore[union-attr]
        yield found
    finally:
        for each in layers:
            each.seen = None  # type: ignore[union-attr]


class Residual(nn.Module):
    """x + f(norm(x)) before, or norm(x + f(x)) after, with dropout on what f gives."""

    def __init__(self, form: Form, pre_norm: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(form.width, form.epsilon), nn.Dropout(dropout)
        self.pre_norm = pre_norm

    def forward(self, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """x [n, tokens, width] and a sublayer f -> [n, tokens, width]."""
        if self.pre_norm:
            return x + self.dropout(f(self.norm(x)))  # type: ignore[no-any-return]
        return self.norm(x + self.dropout(f(x)))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with ReLU, or another activation, between (section 3.3)."""

    def __init__(self, form: Form, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(form.width, hidden), nn.Linear(hidden, form.width)
        self.activation = form.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, tokens, width] -> [n, tokens, width]."""
        return self.outer(ACTIVATIONS[self.activation](self.inner(x)))  # type: ignore[no-any-return]


class Recurrence(nn.Module):
    """The simpler simple recurrent unit in the place of self-attention (SSRU, Kim et al. 2019, "From Research to
    Production and Back: Ludicrously Fast Neural Machine Translation", section 3.1):

        f_t = sigmoid(W_f x_t + b_f)    c_t = f_t c_(t-1) + (1 - f_t) W x_t    y_t = relu(c_t)
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.forget = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cell: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, tokens, width], the cell before [n, width] or None: zeros -> y [n, tokens, width], the cell after."""
        keep = torch.sigmoid(self.forget(x))
        added = (1 - keep) * self.value(x)
        cell = torch.zeros_like(x[:, 0]) if cell is None else cell
        cells = []
        for kept, new in zip(keep.unbind(1), added.unbind(1), strict=True):
            cell = kept * cell + new
            cells.append(cell)
        return F.relu(torch.stack(cells, 1)), cell


class Average(nn.Module):
    """Average attention in the place of self-attention (Zhang et al. 2018, "Accelerating Neural Transformer via an
    Average Attention Network"):

        a_t = F((x_1 + ... + x_t) / t)    y_t = sigmoid(W_i x_t + b_i) x_t + sigmoid(W_f a_t + b_f) a_t

    with the linear layers and the activation of a feed-forward layer in F.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.inner = nn.Linear(form.width, form.average_hidden or form.hidden)
        self.outer = nn.Linear(self.inner.out_features, form.width)
        self.input, self.forget = nn.Linear(form.width, form.width), nn.Linear(form.width, form.width)
        self.activation = form.average_activation

    def forward(
        self, x: torch.Tensor, total: torch.Tensor | None = None, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [n, tokens, width], the sum of all x before [n, width] and their number [n, 1], or None: no x -> y [n,
        tokens, width], sum and number after.
        """
        totals, counts = x.cumsum(1), torch.arange(1, x.shape[1] + 1, device=x.device).expand(len(x), -1)
        if total is not None and count is not None:
            totals, counts = totals + total[:, None], counts + count
        mean = self.outer(ACTIVATIONS[self.activation](self.inner(totals / counts[..., None])))
        y = torch.sigmoid(self.input(x)) * x + torch.sigmoid(self.forget(mean)) * mean
        return y, totals[:, -1], counts[:, -1:]


class Layer(nn.Module):
    """Self-attention, or in a decoder's layer `Recurrence` or `Average`, cross-attention (`cross`), feed-forward."""

    def __init__(self, form: Form, pre_norm: bool, dropout: float, cross: bool) -> None:
        super().__init__()
        heads = (cross and form.decoder_heads) or form.heads
        self.recurrent = cross and form.autoregression != "attention"
        self.attention: Attention | Recurrence | Average
        if not self.recurrent:
            self.attention = Attention(form.width, heads, form.head_size)
        else:
            self.attention = Recurrence(form.width) if form.autoregression == "ssru" else Average(form)
        self.around_attention = Residual(form, pre_norm, dropout)
        if cross:
            self.cross, self.around_cross = (
                Attention(form.width, heads, form.head_size),
                Residual(form, pre_norm, dropout),
            )
        self.feed = FeedForward(form, (cross and form.decoder_hidden) or form.hidden)
        self.around_feed = Residual(form, pre_norm, dropout)

    def encode(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A layer of the encoder."""
        x, _ = self._over_tokens(x, None, mask)
        return self.around_feed(x, self.feed)  # type: ignore[no-any-return]

    def decode(
        self, x: torch.Tensor, past: Past | None, memory: KeysValues, mask: torch.Tensor
    ) -> tuple[torch.Tensor, Past]:
        """A layer of the decoder; returns its result and what the next token needs of all so far.

        past: of the tokens before, which `x` [n, 1, width] follows; None: `x` [n, tokens, width] has all. memory: keys
        and values of the source, for cross-attention.
        """
        causal = None
        if x.shape[1] > 1 and not self.recurrent:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        x, past = self._over_tokens(x, past, causal)
        x = self.around_cross(x, lambda y: self.cross(y, memory, mask))
        return self.around_feed(x, self.feed), past

    def _over_tokens(self, x: torch.Tensor, past: Past | None, mask: torch.Tensor | None) -> tuple[torch.Tensor, Past]:
        """The sublayer that looks at other tokens of the same sentence."""
        after: Past = ()

        def own(y: torch.Tensor) -> torch.Tensor:
            nonlocal after
            if not isinstance(self.attention, Attention):
                y, *after = self.attention(y, *(past or ()))
                return y
            after = self.attention.keys_values(y)
            if past is not None:
                after = tuple(torch.cat(pair, 2) for pair in zip(past, after, strict=True))
            return self.attention(y, after, mask)  # type: ignore[no-any-return]

        x = self.around_attention(x, own)
        return x, tuple(after)


class Transformer(nn.Module):
    """Source and target tokens, int64 [n, tokens] padded with `PAD`, to logits of the next target token at every
    position.

    One table of embeddings, scaled by sqrt(width), serves source, target and, transposed, the output (section 3.4),
    unless the form says otherwise. vocabulary: pieces of the target. source_vocabulary: of the source, 0: as many.
    """

    positions: torch.Tensor

    def __init__(
        self, form: Form, vocabulary: int, *, pre_norm: bool, dropout: float, source_vocabulary: int = 0
    ) -> None:
        super().__init__()
        self.form, self.pre_norm = form, pre_norm
        self.embedding = nn.Embedding(vocabulary, form.width)
        if not form.shared_source:
            self.source_embedding = nn.Embedding(source_vocabulary or vocabulary, form.width)
        if not form.tied_output:
            self.output_weight = nn.Parameter(torch.empty(vocabulary, form.width))
            nn.init.xavier_uniform_(self.output_weight)
        if form.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(vocabulary))
        if form.positions:
            for name, length in zip(("source_positions", "positions"), form.positions, strict=True):
                self.register_buffer(name, torch.zeros(length, form.width))
        else:
            self.register_buffer("positions", torch.from_numpy(sinusoids(POSITIONS, form.width)), persistent=False)
        if form.embedding_norm:
            self.source_norm, self.target_norm = (nn.LayerNorm(form.width, form.epsilon) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.project: Callable[..., torch.Tensor] = F.linear  # to the logits
        self.encoder = nn.ModuleList(Layer(form, pre_norm, dropout, cross=False) for _ in range(form.encoder))
        self.decoder = nn.ModuleList(Layer(form, pre_norm, dropout, cross=True) for _ in range(form.decoder))
        final_norm = pre_norm if form.final_norm is None else form.final_norm
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(form.width, form.epsilon) if final_norm else nn.Identity() for _ in range(2)
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=form.width**-0.5)

    def table_of(self, side: str) -> tuple[str, str, str]:
        """Names of the weights that embed a "source" or a "target": table, positions, norm ("" for none)."""
        source = side == "source"
        table = "source_embedding" if source and not self.form.shared_source else "embedding"
        positions = "source_positions" if source and self.form.positions else "positions"
        return table, positions, f"{side}_norm" if self.form.embedding_norm else ""

    def _embed(self, side: str, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        table, positions, norm = self.table_of(side)
        x = getattr(self, table)(tokens)
        if self.form.scaled:
            x = x * math.sqrt(self.form.width)
        x = x + getattr(self, positions)[start : start + tokens.shape[1]]
        return self.dropout(getattr(self, norm)(x) if norm else x)  # type: ignore[no-any-return]

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.embedding.weight if self.form.tied_output else self.output_weight
        return self.project(self.decoder_norm(x), weight, self.output_bias if self.form.output_bias else None)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Source tokens int64 [n, s] -> (memory [n, s, width], mask bool [n, 1, 1, s] of what is no padding)."""
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
        """Teacher forcing: source int64 [n, s], target int64 [n, t] beginning with `START` -> logits [n, t,
        vocabulary]. encoded: what `encode` gives, where it is known. layers: a list that gets what every layer of the
        decoder gives, [n, t, width].
        """
        memory, mask = encoded or self.encode(source)
        x = self._embed("target", target)
        for layer in self.decoder:
            x, _ = layer.decode(x, None, layer.cross.keys_values(memory), mask)  # type: ignore[operator, union-attr]
            if layers is not None:
                layers.append(x)
        return self._logits(x)

    def begin(self, source: torch.Tensor) -> Decoding:
        """Encode, and get ready to decode step by step."""
        memory, mask = self.encode(source)
        return Decoding(self, mask, [layer.cross.keys_values(memory) for layer in self.decoder])  # type: ignore[operator, union-attr]


class Decoding:
    """Sentences on their way: keys and values of the source, computed once, and what layers keep of the tokens so far.
    A step for `beam_search`.
    """

    def __init__(self, model: Transformer, mask: torch.Tensor, memory: list[KeysValues]) -> None:
        self.model, self.mask, self.memory = model, mask, memory
        self.past: list[Past | None] = [None] * len(model.decoder)
        self.length = 0

    def select(self, rows: torch.Tensor) -> None:
        """Go on with these rows (int64 [m]) alone, in this order; a row may come more than once."""
        self.mask = self.mask[rows]
        self.memory = [(keys[rows], values[rows]) for keys, values in self.memory]
        self.past = [each and tuple(part[rows] for part in each) for each in self.past]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The newest token of every row, int64 [n] -> logits of the next [n, vocabulary]."""
        x = self.model._embed("target", tokens[:, None], self.length)
        for i, layer in enumerate(self.model.decoder):
            x, self.past[i] = layer.decode(x, self.past[i], self.memory[i], self.mask)  # type: ignore[operator]
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
        limits = np.array([limit(len(each), len(model.positions)) for each in sources])
        return beam_search(decoding, limits, start=START, end=END, beam=beam, length_penalty=length_penalty, best=best)
