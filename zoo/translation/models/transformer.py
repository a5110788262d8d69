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
from zoo.translation.data.parallel_text import END, PAD, POSITIONS, START, padded
from zoo.translation.models.config import ARCHITECTURES, ModelConfig, sinusoids
from zoo.translation.search.beam_search import Hypothesis, beam_search, limit

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [n, heads, tokens, width / heads] each
# What a decoder layer keeps of the tokens so far: keys and values, or of `Recurrence` and `Average` a row a sentence
Past = tuple[torch.Tensor, ...]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}


def build(
    arch: str, vocabulary: int, *, pre_norm: bool = True, dropout: float = 0.0, form: ModelConfig | None = None
) -> Transformer:
    """Builds an untrained network.

    Args:
        arch: A key of `CONFIGS`.
        vocabulary: Number of pieces.
        pre_norm: Whether layers normalize their input (pre-LN) instead of their sum (post-LN).
        dropout: Dropout probability.
        form: Configuration of a pruned network, instead of that of `arch`.

    Returns:
        The network.

    Raises:
        RequestError: `arch` is unknown.
    """
    if arch not in ARCHITECTURES:
        raise RequestError(f"no Transformer {arch!r}; known: {', '.join(ARCHITECTURES)}")
    return Transformer(form or ARCHITECTURES[arch], vocabulary, pre_norm=pre_norm, dropout=dropout)


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (section 3.2)."""

    def __init__(self, width: int, heads: int, size: int = 0) -> None:
        """Creates the four projections.

        Args:
            width: Width of the model.
            heads: Number of heads.
            size: Columns of a head; 0: width / heads.
        """
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
        """Projects keys and values.

        Args:
            x: float [n, tokens, width].

        Returns:
            Keys and values, each [n, heads, tokens, size].
        """
        return self._split(self.key(x)), self._split(self.value(x))

    def forward(self, x: torch.Tensor, given: KeysValues, mask: torch.Tensor | None) -> torch.Tensor:
        """Computes attention.

        Args:
            x: Input of the queries, float [n, tokens, width].
            given: Keys and values, see `keys_values`.
            mask: bool, broadcast to [n, heads, tokens, keys]: where attention is allowed; None: everywhere.

        Returns:
            float [n, tokens, width].
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
            each.seen = found  # type: ignore[union-attr]
        yield found
    finally:
        for each in layers:
            each.seen = None  # type: ignore[union-attr]


class Residual(nn.Module):
    """Residual connection with layer normalization: x + f(norm(x)) (pre-LN) or norm(x + f(x)) (post-LN), dropout after
    f.
    """

    def __init__(self, form: ModelConfig, pre_norm: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(form.width, form.epsilon), nn.Dropout(dropout)
        self.pre_norm = pre_norm

    def forward(self, x: torch.Tensor, f: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Computes a sublayer with its residual.

        Args:
            x: float [n, tokens, width].
            f: The sublayer.

        Returns:
            float [n, tokens, width].
        """
        if self.pre_norm:
            return x + self.dropout(f(self.norm(x)))  # type: ignore[no-any-return]
        return self.norm(x + self.dropout(f(x)))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two linear layers with an activation between them (section 3.3)."""

    def __init__(self, form: ModelConfig, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(form.width, hidden), nn.Linear(hidden, form.width)
        self.activation = form.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes float [n, tokens, width] -> [n, tokens, width]."""
        return self.outer(ACTIVATIONS[self.activation](self.inner(x)))  # type: ignore[no-any-return]


class Recurrence(nn.Module):
    """Simpler simple recurrent unit instead of self-attention (SSRU, Kim et al. 2019, "From Research to Production and
    Back: Ludicrously Fast Neural Machine Translation", section 3.1):

        f_t = sigmoid(W_f x_t + b_f)    c_t = f_t c_(t-1) + (1 - f_t) W x_t    y_t = relu(c_t)
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.forget = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cell: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes all tokens of x.

        Args:
            x: float [n, tokens, width].
            cell: Cell before, float [n, width]; None: zeros.

        Returns:
            y, float [n, tokens, width], and the cell after, float [n, width].
        """
        keep = torch.sigmoid(self.forget(x))
        added = (1 - keep) * self.value(x)
        cell = torch.zeros_like(x[:, 0]) if cell is None else cell
        cells = []
        for kept, new in zip(keep.unbind(1), added.unbind(1), strict=True):
            cell = kept * cell + new
            cells.append(cell)
        return F.relu(torch.stack(cells, 1)), cell


class Average(nn.Module):
    """Average attention instead of self-attention (Zhang et al. 2018, "Accelerating Neural Transformer via an Average
    Attention Network"), F a feed-forward layer:

        a_t = F((x_1 + ... + x_t) / t)    y_t = sigmoid(W_i x_t + b_i) x_t + sigmoid(W_f a_t + b_f) a_t
    """

    def __init__(self, form: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(form.width, form.average_hidden or form.hidden)
        self.outer = nn.Linear(self.inner.out_features, form.width)
        self.input, self.forget = nn.Linear(form.width, form.width), nn.Linear(form.width, form.width)
        self.activation = form.average_activation

    def forward(
        self, x: torch.Tensor, total: torch.Tensor | None = None, count: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Computes all tokens of x.

        Args:
            x: float [n, tokens, width].
            total: Sum of all x before, float [n, width]; None: no tokens before.
            count: Number of tokens before, [n, 1]; None: no tokens before.

        Returns:
            y, float [n, tokens, width], and sum and number after.
        """
        totals, counts = x.cumsum(1), torch.arange(1, x.shape[1] + 1, device=x.device).expand(len(x), -1)
        if total is not None and count is not None:
            totals, counts = totals + total[:, None], counts + count
        mean = self.outer(ACTIVATIONS[self.activation](self.inner(totals / counts[..., None])))
        y = torch.sigmoid(self.input(x)) * x + torch.sigmoid(self.forget(mean)) * mean
        return y, totals[:, -1], counts[:, -1:]


class Layer(nn.Module):
    """A layer of the encoder or decoder: self-attention or a recurrence, cross-attention (decoder), feed-forward."""

    def __init__(self, form: ModelConfig, pre_norm: bool, dropout: float, cross: bool) -> None:
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
        """Computes an encoder layer.

        Args:
            x: float [n, tokens, width].
            mask: See `Attention.forward`.

        Returns:
            float [n, tokens, width].
        """
        x, _ = self._over_tokens(x, None, mask)
        return self.around_feed(x, self.feed)  # type: ignore[no-any-return]

    def decode(
        self, x: torch.Tensor, past: Past | None, memory: KeysValues, mask: torch.Tensor
    ) -> tuple[torch.Tensor, Past]:
        """Computes a decoder layer.

        Args:
            x: float [n, tokens, width]; one token after `past`.
            past: State of the tokens before; None: `x` has all tokens.
            memory: Keys and values of the source, for cross-attention.
            mask: Of the source, see `Attention.forward`.

        Returns:
            float [n, tokens, width], and the state after these tokens.
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
    """Encoder-decoder Transformer.

    One table of embeddings, scaled by sqrt(width), serves source, target and, transposed, the output (section 3.4),
    unless the configuration differs.
    """

    positions: torch.Tensor

    def __init__(
        self, form: ModelConfig, vocabulary: int, *, pre_norm: bool, dropout: float, source_vocabulary: int = 0
    ) -> None:
        """Builds an untrained network.

        Args:
            form: Its configuration.
            vocabulary: Number of target pieces.
            pre_norm: Whether layers normalize their input (pre-LN) instead of their sum (post-LN).
            dropout: Dropout probability.
            source_vocabulary: Number of source pieces; 0: as many as of the target.
        """
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
        """Returns the names of the weights that embed a side: table, positions, norm ("" for none).

        Args:
            side: "source" or "target".
        """
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

    def begin(self, source: torch.Tensor) -> Decoding:
        """Encodes sentences and returns the step function of their translation, for `beam_search`."""
        memory, mask = self.encode(source)
        return Decoding(self, mask, [layer.cross.keys_values(memory) for layer in self.decoder])  # type: ignore[operator, union-attr]


class Decoding:
    """Decoding state of a batch, a step function for `beam_search`: keys and values of the source, and the state of
    each layer.
    """

    def __init__(self, model: Transformer, mask: torch.Tensor, memory: list[KeysValues]) -> None:
        self.model, self.mask, self.memory = model, mask, memory
        self.past: list[Past | None] = [None] * len(model.decoder)
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
        decoding = model.begin(torch.from_numpy(padded(sources)).to(device))
        limits = np.array([limit(len(each), len(model.positions)) for each in sources])
        return beam_search(decoding, limits, start=START, end=END, beam=beam, length_penalty=length_penalty, best=best)
