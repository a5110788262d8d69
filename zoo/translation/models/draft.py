"""Drafts of speculative decoding: small recurrent decoders whose proposals a larger one verifies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from pipelines.kernels.transformer.draft import EPSILON, HEAD
from zoo.translation.models.layers import KeysValues

if TYPE_CHECKING:
    from zoo.translation.models.transformer import Transformer


class DraftLayer(nn.Module):
    """SSRU (see `zoo.translation.models.layers.Recurrence`), cross-attention and feed-forward, pre-LN."""

    def __init__(self, width: int, hidden: int, memory: int) -> None:
        super().__init__()
        self.cell_norm, self.cross_norm, self.feed_norm = (nn.LayerNorm(width, EPSILON) for _ in range(3))
        self.forget, self.value = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.query, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.keys, self.values = nn.Linear(memory, width), nn.Linear(memory, width)
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def keys_values(self, memory: torch.Tensor) -> KeysValues:
        """Returns keys and values of the encoder's result, each [n, heads, tokens, HEAD]."""
        return self._split(self.keys(memory)), self._split(self.values(memory))

    def forward(
        self, x: torch.Tensor, cell: torch.Tensor, memory: KeysValues, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes one token of every row.

        Args:
            x: float [n, t, width]; each of the t is a row of its own.
            cell: The cells before, float [n, t, width].
            memory: Result of `keys_values`.
            mask: bool [n, 1, 1, tokens] of the source, true where it has no padding.

        Returns:
            float [n, t, width], and the cells after.
        """
        y = self.cell_norm(x)
        keep = torch.sigmoid(self.forget(y))
        cell = keep * cell + (1 - keep) * self.value(y)
        x = x + F.relu(cell)
        heads = F.scaled_dot_product_attention(self._split(self.query(self.cross_norm(x))), *memory, mask)
        x = x + self.output(heads.transpose(1, 2).flatten(2))
        return x + self.outer(F.relu(self.inner(self.feed_norm(x)))), cell

    @staticmethod
    def _split(x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, HEAD).transpose(1, 2)


class DraftNetwork(nn.Module):
    """A draft of a translation network.

    Its cells begin with a matrix times the network's newest result (Cheng et al. 2024, "Recurrent Drafter"). Embeddings
    and vocabulary projection are those of the network, times matrices; `free` is added to the latter.
    """

    def __init__(self, teacher: Transformer, width: int, hidden: int, layers: int, ahead: int) -> None:
        """Builds an untrained draft.

        Args:
            teacher: The network that verifies; its weights are not trained.
            width: Width of the draft, a multiple of `HEAD`.
            hidden: Units of a feed-forward layer.
            layers: Number of layers.
            ahead: Number of tokens that it is trained to propose.
        """
        super().__init__()
        weight = teacher.embedding.weight.detach()
        words, model = weight.shape
        self.ahead = ahead
        self.register_buffer("table", weight * (math.sqrt(model) if teacher.config.scaled else 1), persistent=False)
        tied = teacher.config.tied_output
        self.register_buffer("words", weight if tied else teacher.output_weight.detach(), persistent=False)
        self.embed, self.cell = nn.Linear(model, width, bias=False), nn.Linear(model, layers * width)
        self.positions = nn.Parameter(torch.zeros(ahead, width))
        self.layers = nn.ModuleList(DraftLayer(width, hidden, model) for _ in range(layers))
        self.norm = nn.LayerNorm(width, EPSILON)
        self.project, self.bias = nn.Linear(width, model, bias=False), nn.Parameter(torch.zeros(words))
        self.free = nn.Linear(width, words, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.zeros_(self.free.weight)

    def forward(
        self, results: torch.Tensor, labels: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor
    ) -> list[torch.Tensor]:
        """Computes the proposals after every token of translations, with teacher forcing.

        Args:
            results: The network's results before its vocabulary projection, float [n, t, width]; that of position i
                predicts labels[:, i].
            labels: Translations, int64 [n, t].
            memory: The encoder's result, float [n, s, width].
            mask: See `DraftLayer.forward`.

        Returns:
            For each j < `ahead` and t > j + 1 the logits of the token j + 1 after the newest, float [n, t - j - 1,
            vocabulary]: those of position i predict labels[:, i + j + 1].
        """
        keys_values = [layer.keys_values(memory) for layer in self.layers]  # type: ignore[operator]
        weight = self.words @ self.project.weight + self.free.weight  # type: ignore[operator]
        cells = list(self.cell(results).chunk(len(self.layers), 2))
        logits = []
        for j in range(min(self.ahead, labels.shape[1] - 1)):
            left = labels.shape[1] - j - 1
            x = self.embed(self.table[labels[:, j : j + left]]) + self.positions[j]  # type: ignore[index]
            for i, layer in enumerate(self.layers):
                x, cells[i] = layer(x, cells[i][:, :left], keys_values[i], mask)
            logits.append(F.linear(self.norm(x), weight, self.bias))
        return logits
