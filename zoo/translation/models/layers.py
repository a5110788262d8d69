"""Layers of the encoder-decoder Transformer in torch (Vaswani et al. 2017), with the variants of other toolkits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from zoo.translation.models.config import ModelConfig

KeysValues = tuple[torch.Tensor, torch.Tensor]  # [n, heads, tokens, width / heads] each
# State of a decoder layer: keys and values, or for `Recurrence` and `Average` one row per sentence
LayerState = tuple[torch.Tensor, ...]
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "swish": F.silu,
    "tanh": torch.tanh,
}


class Attention(nn.Module):
    """Multi-head dot-product attention (section 3.2)."""

    def __init__(self, config: ModelConfig, heads: int, buckets: int = 0) -> None:
        """Creates the four projections.

        Args:
            config: Configuration of the network.
            heads: Number of heads.
            buckets: Rows of a bias by relative position; 0: none of its own.
        """
        super().__init__()
        width, size = config.width, config.head_size
        self.heads, self.size = heads, size or width // heads
        self.scale = config.attention_scale or self.size**-0.5
        self.captured: list[torch.Tensor] | None = None  # collects the attention weights if it is a list
        inner = width if not size else heads * size
        self.query, self.key, self.value = (nn.Linear(width, inner, config.linear_bias) for _ in range(3))
        self.output = nn.Linear(inner, width, config.linear_bias)
        if buckets:
            self.relative = nn.Embedding(buckets, heads)

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

    def forward(
        self, x: torch.Tensor, keys_values: KeysValues, mask: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes attention.

        Args:
            x: Input of the queries, float [n, tokens, width].
            keys_values: Keys and values, see `keys_values`.
            mask: bool, broadcast to [n, heads, tokens, keys]: where attention is allowed; None: everywhere.
            bias: Added to the scores, float [heads, tokens, keys]; None: nothing.

        Returns:
            float [n, tokens, width].
        """
        query, (keys, values) = self._split(self.query(x)), keys_values
        if x.is_cuda and self.captured is None and bias is None:
            heads = F.scaled_dot_product_attention(query, keys, values, mask, scale=self.scale)
        else:  # torch's fused attention has a several times slower backward pass on CPUs
            scores = query @ keys.transpose(2, 3) * self.scale
            scores = scores if bias is None else scores + bias
            weights = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(3)
            if self.captured is not None:
                self.captured.append(weights)
            heads = weights.to(values.dtype) @ values
        return self.output(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def normalization(config: ModelConfig) -> nn.Module:
    """Returns a normalization of rows, see `ModelConfig.norm`.

    Args:
        config: Configuration of the network.
    """
    return (nn.RMSNorm if config.norm == "rms" else nn.LayerNorm)(config.width, config.epsilon)


class Residual(nn.Module):
    """Residual connection with dropout: x + f(norm(x)) (pre-LN) or norm(x + f(x)) (post-LN)."""

    def __init__(self, config: ModelConfig, pre_norm: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = normalization(config), nn.Dropout(dropout)
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
    """Two linear layers with an activation between them (section 3.3), gated if configured (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, hidden, config.linear_bias)
        self.outer = nn.Linear(hidden, config.width, config.linear_bias)
        self.activation, self.gated = config.activation, config.gated
        if config.gated:
            self.gate = nn.Linear(config.width, hidden, config.linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the layers.

        Args:
            x: float [n, tokens, width].

        Returns:
            float [n, tokens, width].
        """
        activate, inner = ACTIVATIONS[self.activation], self.inner(x)
        return self.outer(activate(self.gate(x)) * inner if self.gated else activate(inner))  # type: ignore[no-any-return]


class Recurrence(nn.Module):
    """Simpler simple recurrent unit (SSRU) instead of self-attention.

    f_t = sigmoid(W_f x_t + b_f), c_t = f_t c_(t-1) + (1 - f_t) W x_t, y_t = relu(c_t) (Kim et al. 2019, "From Research
    to Production and Back: Ludicrously Fast Neural Machine Translation", section 3.1).
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
    """Average attention instead of self-attention.

    a_t = F((x_1 + ... + x_t) / t), y_t = sigmoid(W_i x_t + b_i) x_t + sigmoid(W_f a_t + b_f) a_t, with a feed-forward
    layer F (Zhang et al. 2018, "Accelerating Neural Transformer via an Average Attention Network").
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, config.average_hidden or config.hidden)
        self.outer = nn.Linear(self.inner.out_features, config.width)
        self.input, self.forget = nn.Linear(config.width, config.width), nn.Linear(config.width, config.width)
        self.activation = config.average_activation

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
    """Encoder or decoder layer: self-attention or a recurrence, cross-attention (decoder), feed-forward."""

    def __init__(self, config: ModelConfig, pre_norm: bool, dropout: float, cross: bool, first: bool = True) -> None:
        super().__init__()
        heads = (cross and config.decoder_heads) or config.heads
        self.recurrent = cross and config.autoregression != "attention"
        self.attention: Attention | Recurrence | Average
        if not self.recurrent:
            self.attention = Attention(config, heads, config.buckets if first or not config.shared_buckets else 0)
        else:
            self.attention = Recurrence(config.width) if config.autoregression == "ssru" else Average(config)
        self.around_attention = Residual(config, pre_norm, dropout)
        if cross:
            self.cross, self.around_cross = Attention(config, heads), Residual(config, pre_norm, dropout)
        self.feed = FeedForward(config, (cross and config.decoder_hidden) or config.hidden)
        self.around_feed = Residual(config, pre_norm, dropout)

    def encode(self, x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Computes an encoder layer.

        Args:
            x: float [n, tokens, width].
            mask: See `Attention.forward`.
            bias: See `Attention.forward`.

        Returns:
            float [n, tokens, width].
        """
        x, _ = self._over_tokens(x, None, mask, bias)
        return self.around_feed(x, self.feed)  # type: ignore[no-any-return]

    def decode(
        self,
        x: torch.Tensor,
        past: LayerState | None,
        memory: KeysValues,
        mask: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LayerState]:
        """Computes a decoder layer.

        Args:
            x: float [n, tokens, width]; one token after `past`.
            past: State of the tokens before; None: `x` has all tokens.
            memory: Keys and values of the source, for cross-attention.
            mask: Of the source, see `Attention.forward`.
            bias: Of self-attention, see `Attention.forward`.

        Returns:
            float [n, tokens, width], and the state after these tokens.
        """
        causal = None
        if x.shape[1] > 1 and not self.recurrent:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        x, past = self._over_tokens(x, past, causal, bias)
        x = self.around_cross(x, lambda y: self.cross(y, memory, mask))
        return self.around_feed(x, self.feed), past

    def _over_tokens(
        self, x: torch.Tensor, past: LayerState | None, mask: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, LayerState]:
        """Computes self-attention, or the recurrence, with its residual."""
        after: LayerState = ()

        def own(y: torch.Tensor) -> torch.Tensor:
            nonlocal after
            if not isinstance(self.attention, Attention):
                y, *after = self.attention(y, *(past or ()))
                return y
            after = self.attention.keys_values(y)
            if past is not None:
                after = tuple(torch.cat(pair, 2) for pair in zip(past, after, strict=True))
            return self.attention(y, after, mask, bias)  # type: ignore[no-any-return]

        x = self.around_attention(x, own)
        return x, tuple(after)
