"""Encoder-decoder Transformer (Vaswani et al. 2017), with the variants of other toolkits' models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pipelines.core.errors import RequestError
from pipelines.models.family import RunOption
from pipelines.quantization.recipe import QuantRecipe
from zoo.training.lazy_module import LazyModule
from zoo.training.relative_positions import relative_buckets
from zoo.translation.data.tokens import PAD, POSITIONS
from zoo.translation.family import TranslationFamily
from zoo.translation.models.config import ModelConfig, sinusoids
from zoo.translation.search.options import run_options

if TYPE_CHECKING:
    import torch

    from zoo.translation.models.decoding import DecodingState

ARCHITECTURES = {
    "tiny": ModelConfig(3, 3, 256, 1024, 4),
    "base": ModelConfig(6, 6, 512, 2048, 8),
    "big": ModelConfig(6, 6, 1024, 4096, 16),
    # the decoder runs at every step, the encoder once (Kasai et al. 2021)
    "deep-shallow": ModelConfig(6, 2, 256, 1024, 4),
    # inherits all weights but the decoder's self-attention from a deep-shallow teacher
    "student": ModelConfig(6, 2, 256, 1024, 4, autoregression="ssru"),
}


class Transformer(LazyModule):
    """Encoder-decoder Transformer.

    One table of embeddings, scaled by sqrt(width), serves source, target and, transposed, the output (section 3.4),
    unless the configuration differs.
    """

    architectures: ClassVar[dict[str, ModelConfig]] = ARCHITECTURES
    positions: torch.Tensor

    @classmethod
    def of(
        cls,
        arch: str,
        vocabulary: int,
        *,
        pre_norm: bool = True,
        dropout: float = 0.0,
    ) -> Transformer:
        """Builds an untrained network.

        Args:
            arch: A key of `architectures`.
            vocabulary: Number of pieces.
            pre_norm: Whether layers normalize their input (pre-LN) instead of their sum (post-LN).
            dropout: Dropout probability.

        Returns:
            The network.

        Raises:
            RequestError: `arch` is unknown.
        """
        if arch not in cls.architectures:
            raise RequestError(f"no Transformer {arch!r}; choose one of {', '.join(cls.architectures)}")
        return cls(cls.architectures[arch], vocabulary, pre_norm=pre_norm, dropout=dropout)

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
        import torch
        import torch.nn.functional as F
        from torch import nn

        from zoo.translation.models.layers import Layer, normalization

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
        if config.positions and not config.buckets:
            for name, length in zip(("source_positions", "positions"), config.positions, strict=True):
                self.register_buffer(name, torch.zeros(length, config.width))
        elif not config.buckets:
            self.register_buffer("positions", torch.from_numpy(sinusoids(POSITIONS, config.width)), persistent=False)
        if config.embedding_norm:
            self.source_norm, self.target_norm = (normalization(config) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.project: Callable[..., torch.Tensor] = F.linear  # to the logits
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(config, pre_norm, dropout, cross, first=not i) for i in range(layers))
            for layers, cross in ((config.encoder, False), (config.decoder, True))
        )
        final_norm = pre_norm if config.final_norm is None else config.final_norm
        self.encoder_norm, self.decoder_norm = (
            normalization(config) if final_norm else nn.Identity() for _ in range(2)
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
        """Returns the names of the weights that embed a side: table, and positions and norm in order ("" for none).

        Args:
            side: "source" or "target".
        """
        source = side == "source"
        table = "source_embedding" if source and not self.config.shared_source else "embedding"
        positions = "source_positions" if source and self.config.positions else "positions"
        positions = "" if self.config.buckets else positions
        norm = f"{side}_norm" if self.config.embedding_norm else ""
        return (table, positions, norm) if source or not self.config.target_norm_first else (table, norm, positions)

    def scales(self, side: str) -> bool:
        """Returns whether the embeddings of a side are multiplied by sqrt(width).

        Args:
            side: "source" or "target".
        """
        return self.config.scaled and not (side == "target" and self.config.target_norm_first)

    def embed(self, side: str, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Computes the input of the first layer of a side.

        Args:
            side: "source" or "target".
            tokens: int64 [n, tokens].
            start: Position of the first token.

        Returns:
            float32 [n, tokens, width].
        """
        table, *steps = self.table_of(side)
        x = getattr(self, table)(tokens)
        if self.scales(side):
            x = x * math.sqrt(self.config.width)
        for step in filter(None, steps):
            if step.endswith("_norm"):
                x = getattr(self, step)(x)
            else:
                x = x + getattr(self, step)[start : start + tokens.shape[1]]
        return self.dropout(x)  # type: ignore[no-any-return]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Computes logits.

        Args:
            x: Output of the last decoder layer, float32 [..., width].

        Returns:
            float32 [..., vocabulary].
        """
        weight = self.embedding.weight if self.config.tied_output else self.output_weight
        x = self.decoder_norm(x)
        if self.config.output_scale != 1:
            x = x * self.config.output_scale
        return self.project(x, weight, self.output_bias if self.config.output_bias else None)

    @property
    def most_tokens(self) -> int:
        """Maximum number of target tokens."""
        return self.config.positions[-1] if self.config.positions else POSITIONS

    def relative_biases(self, side: str, queries: torch.Tensor, keys: int) -> list[torch.Tensor | None]:
        """Returns the bias of self-attention by relative position in each layer of a side.

        Args:
            side: "encoder" or "decoder".
            queries: Positions of the queries, int64 [n].
            keys: Number of keys.

        Returns:
            float [heads, n, keys] for each layer; None for networks without such a bias.
        """
        import torch

        config, layers = self.config, getattr(self, side)
        if not config.buckets:
            return [None] * len(layers)
        ahead = torch.arange(keys) - queries[:, None].cpu()
        buckets = relative_buckets(ahead.numpy(), config.buckets, config.bucket_distance, both_sides=side == "encoder")
        rows, biases = torch.from_numpy(buckets).to(queries.device), []
        for i, layer in enumerate(layers):
            if not i or not config.shared_buckets:
                bias = layer.attention.relative(rows).permute(2, 0, 1)
            biases.append(bias)
        return biases

    def _all_biases(self, side: str, tokens: torch.Tensor) -> list[torch.Tensor | None]:
        """Returns `relative_biases` of all positions of tokens [n, t]."""
        import torch

        return self.relative_biases(side, torch.arange(tokens.shape[1], device=tokens.device), tokens.shape[1])

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes sentences.

        Args:
            source: int64 [n, s], padded with `PAD`.

        Returns:
            The result, float [n, s, width], and the mask of tokens that are not padding, bool [n, 1, 1, s].
        """
        mask = (source != PAD)[:, None, None, :]
        x = self.embed("source", source)
        for layer, bias in zip(self.encoder, self._all_biases("encoder", source), strict=True):
            x = layer.encode(x, mask, bias)  # type: ignore[operator]
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
        return self.logits(self._decode(target, *(encoded or self.encode(source)), layers))

    def _decode(
        self, target: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor, layers: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        x = self.embed("target", target)
        for layer, bias in zip(self.decoder, self._all_biases("decoder", target), strict=True):
            x, _ = layer.decode(x, None, layer.cross.keys_values(memory), mask, bias)  # type: ignore[operator, union-attr]
            if layers is not None:
                layers.append(x)
        return x

    def results(self, target: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Computes the input of the vocabulary projection with teacher forcing.

        Args:
            target: See `forward`.
            memory: Result of `encode`.
            mask: Result of `encode`.

        Returns:
            float [n, t, width].
        """
        return self.decoder_norm(self._decode(target, memory, mask))  # type: ignore[no-any-return]

    def begin(self, source: torch.Tensor) -> DecodingState:
        """Encodes sentences for decoding.

        Args:
            source: int64 [n, s], padded with `PAD`.

        Returns:
            Step function for `beam_search`.
        """
        from zoo.translation.models.decoding import DecodingState

        memory, mask = self.encode(source)
        return DecodingState(self, mask, [layer.cross.keys_values(memory) for layer in self.decoder])  # type: ignore[operator, union-attr]


TRANSFORMER_MT = TranslationFamily(  # Vaswani et al. 2017, "Attention Is All You Need"
    name="transformer-mt",
    title="Transformer: translation of sentences, encoder-decoder with beam search",
    build=Transformer,
    # attention products are too small to gain from int8
    recipe=QuantRecipe(correct=False, keep_float=(r".*\.(products|found)",)),
    run_options=(
        *run_options(),
        RunOption("scores", bool, False, "Write the mean log probability of a token before each translation."),
        RunOption("sentences", bool, False, "Translate the sentences of a line one by one."),
        RunOption("target_prefixes", bool, False, "Lines of a source, TAB, and the prefix of its translation."),
        RunOption(
            "draft",
            str,
            None,
            "Speculative decoding with --beam 1: auto (the model's draft, else prompt lookup), off, or the file of a "
            "draft; the results are the same. [default: auto]",
        ),
    ),
)
