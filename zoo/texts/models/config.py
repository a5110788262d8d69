"""Description of a text encoder: sizes, embeddings, positions, attention, norms, feed-forward, pooling, and head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from pipelines.core.errors import RequestError

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"  # inputs of the graph, as in transformers
EMBEDDING, SCORES = "embedding", "scores"  # output of a sentence encoder, and of a cross-encoder
LOGITS = "logits"  # output of a head of tokens
IDENTITY, SIGMOID = "identity", "sigmoid"  # activations of a cross-encoder
POOLINGS = ("mean", "cls", "max", "last", "weighted_mean", "mean_sqrt_len")
LATE = "late"  # of classifiers alone: the mean behind the first layer of the head
MAX_LAYERS, MAX_SIZE = 1000, 1 << 24  # upper bounds of a network
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swish")
DENSE_ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid")
BY_WAVELENGTH = ("yarn", "llama3")
SCALINGS = ("", "linear", "ntk", *BY_WAVELENGTH)
STATIC = "static"  # kind of a network without layers
NORMS, PLACES = ("layer", "rms"), ("post", "pre", "sandwich", "repeated")


@dataclass(frozen=True)
class Attention:
    """Self-attention.

    Attributes:
        head_size: Columns of a head; 0: width / heads.
        key_heads: Heads of keys and values, each of which serves several heads of queries; 0: `heads`.
        scale: Divisor of the products of queries and keys; 0: the square root of the head size.
        causal: Whether a token attends only to those before it and to itself.
        local: Layers with sliding-window attention.
        window: Largest distance of tokens that attend to each other in `local` layers.
        norm: Whether queries and keys have a norm of each head before the rotation (Qwen3, Gemma).
        row_norm: Whether queries and keys have a layer normalization of all heads together (Jina v2 of code).
    """

    head_size: int = 0
    key_heads: int = 0
    scale: float = 0.0
    causal: bool = False
    local: tuple[int, ...] = ()
    window: int = 0
    norm: bool = False
    row_norm: bool = False


@dataclass(frozen=True)
class Norm:
    """Norms of a network.

    Attributes:
        kind: "layer" for layer normalization, "rms" for division by the root of the mean square.
        place: "post" for norms of each sum, "pre" for norms before attention and feed-forward, "sandwich" for norms
            before and after them, "repeated" for "post" with a second sum of the attention's input and its norm.
        bias: Whether layer normalization has a bias.
        embedding: Whether embeddings are normalized.
        first: Whether the first layer has a norm before its attention (ModernBERT: no).
        final: Whether the result of the last layer is normalized.
    """

    kind: str = "layer"
    place: str = "post"
    bias: bool = True
    embedding: bool = True
    first: bool = True
    final: bool = False


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021, "RoFormer").

    Attributes:
        theta: Base of the wavelengths.
        size: Columns of a head that are rotated.
        local_theta: Base of the wavelengths in layers with sliding-window attention; 0: `theta`.
        scaling: Scaling of the positions of layers with full attention: "", "linear", "ntk", a higher base, or "yarn"
            and "llama3", which scale long wavelengths alone.
        factor: Factor of the scaling.
        trained: Tokens of the texts that the network was trained on before the scaling, of "yarn" and "llama3".
        slow: Rotations within `trained` tokens up to which wavelengths are scaled.
        fast: Rotations within `trained` tokens from which on wavelengths stay.
        whole: Whether the columns between are bounded by whole numbers ("yarn").
        amplitude: Factor of cosine and sine, the attention factor of "yarn".
    """

    theta: float
    size: int
    local_theta: float = 0.0
    scaling: str = ""
    factor: float = 1.0
    trained: int = 0
    slow: float = 0.0
    fast: float = 0.0
    whole: bool = True
    amplitude: float = 1.0


@dataclass(frozen=True)
class Disentangled:
    """Attention over content and relative position (He et al. 2021, "DeBERTa", section 3.1).

    Attributes:
        distance: Largest distance of two tokens with a row of its own.
        buckets: Rows of either direction; distances above half of them share rows logarithmically. 0: `distance`.
        to_position: Whether the content of queries is multiplied with the positions of keys ("c2p").
        to_content: Whether the positions of queries are multiplied with the content of keys ("p2c").
        shared: Whether the linear layers of queries and keys are those of positions too.
        norm: Whether the rows have layer normalization.
    """

    distance: int
    buckets: int = 0
    to_position: bool = True
    to_content: bool = True
    shared: bool = False
    norm: bool = False

    @property
    def span(self) -> int:
        """Rows of either direction."""
        return self.buckets or self.distance


@dataclass(frozen=True)
class Adapter:
    """Low-rank adapter that is added to the weights (Hu et al. 2022, "LoRA").

    Attributes:
        index: Which of those in the file.
        scale: Factor of the products of its matrices.
    """

    index: int
    scale: float


@dataclass(frozen=True)
class Dense:
    """Linear layer after the pooling, or of every token (`zoo.texts.heads.late_interaction`).

    Attributes:
        outputs: Number of outputs.
        activation: One of `DENSE_ACTIVATIONS`.
        bias: Whether it has a bias.
        residual: Whether its inputs, or a linear layer of them, are added to the outputs.
    """

    outputs: int
    activation: str = "identity"
    bias: bool = True
    residual: bool = False


PARTS = {"attention": Attention, "norm": Norm, "rotary": Rotary, "disentangled": Disentangled, "adapter": Adapter}


@dataclass(frozen=True)
class ModelConfig:
    """Description of a Transformer that reads texts.

    The defaults are those of BERT. Keyword-only fields are left out of cards where they have their defaults.

    Attributes:
        kind: Architecture, the name of one of `zoo.texts.models.architectures.ARCHITECTURES`.
        layers: Number of layers; 0 for static embeddings alone.
        width: Hidden size.
        heads: Number of attention heads.
        hidden: Units between the linear layers of a feed-forward block.
        vocabulary: Rows of the token embedding.
        positions: Rows of the position embedding, or the maximum number of tokens of a text.
        first_position: Row of a text's first token in the position embedding.
        types: Rows of the token type embedding; 0: none.
        activation: Activation of feed-forward blocks, one of `ACTIVATIONS`.
        epsilon: Epsilon of the norms.
        buckets: Buckets of a relative position bias (MPNet, T5); 0: none.
        pooling: Pooling of the last layer to an embedding, one of `POOLINGS`, or several joined by "+", whose results
            are concatenated; or `LATE`.
        normalize: Whether embeddings are L2-normalized.
        labels: Outputs of the head; 0: the network has no head.
        embedding: Columns of the embeddings, before a linear layer to `width` (ELECTRA); 0: `width`.
        attention: Attention.
        norm: Norms.
        rotary: Rotary positions, or None.
        disentangled: Disentangled attention, or None.
        convolution: Tokens of a convolution over the embeddings, which is added to the output of the first layer
            (DeBERTa-v2 XL); 0: none.
        bucket_distance: Distance of two tokens from which on relative positions share a bucket.
        alibi: Whether attention has a bias that falls linearly with the distance (Press et al. 2022, "ALiBi").
        adapter: Low-rank adapter of a task, or None.
        absolute: Whether there is a position embedding.
        gated: Whether feed-forward blocks multiply the activation by a second linear layer (GLU).
        unbiased: Linear layers without a bias, among query, key, value, output, gate, up and down.
        embedding_scale: Factor of the token embeddings.
        distinct_layers: Layers with weights of their own (ALBERT), the layer i has those of the layer
            int(i / (layers / distinct_layers)); 0: all.
        dense: Linear layers after the pooling, in order.
        truncate_dim: Leading components of embeddings that are kept, after L2 normalization (Matryoshka); 0: all.
        head_activation: Activation of the first layer of a head, where it is not that of the architecture; "".
        renormalize: Whether truncated embeddings are L2-normalized once more.
        decoder: Layers of a decoder over the same tokens, after `start_token`, with attention to the output of the
            encoder (BART); 0: none.
        start_token: First token that the decoder reads.
        typed: Whether a head is given the types of tokens; otherwise all tokens have the first type.

    Raises:
        RequestError: A size is out of range, or activation or pooling is unknown.
    """

    kind: str
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    positions: int
    first_position: int = 0
    types: int = 0
    activation: str = "gelu"
    epsilon: float = 1e-12
    buckets: int = 0
    pooling: str = "mean"
    normalize: bool = False
    labels: int = 0
    embedding: int = 0
    _: KW_ONLY
    attention: Attention = Attention()
    norm: Norm = Norm()
    rotary: Rotary | None = None
    disentangled: Disentangled | None = None
    convolution: int = 0
    bucket_distance: int = 128
    alibi: bool = False
    adapter: Adapter | None = None
    absolute: bool = True
    gated: bool = False
    unbiased: tuple[str, ...] = ()
    embedding_scale: float = 1.0
    distinct_layers: int = 0
    dense: tuple[Dense, ...] = ()
    truncate_dim: int = 0
    renormalize: bool = False
    head_activation: str = ""
    decoder: int = 0
    start_token: int = 0
    typed: bool = True

    def __post_init__(self) -> None:
        sizes = {
            key: getattr(self, key)
            for key in ("layers", "width", "heads", "hidden", "vocabulary", "positions", "types")
        }
        for key, size in sizes.items():
            least, most = (
                int(key != "types" and (key, self.kind) != ("layers", STATIC)),
                MAX_LAYERS if key == "layers" else MAX_SIZE,
            )
            if type(size) is not int or not least <= size <= most:
                raise RequestError(f"a network has {key} {size!r}; expected a whole number from {least} to {most:,}")
        counts = {
            key: getattr(self, key)
            for key in (
                "first_position",
                "buckets",
                "bucket_distance",
                "convolution",
                "labels",
                "embedding",
                "distinct_layers",
                "truncate_dim",
                "decoder",
                "start_token",
            )
        } | {key: getattr(self.attention, key) for key in ("head_size", "key_heads", "window")}
        for key, count in counts.items():
            if type(count) is not int or not 0 <= count <= MAX_SIZE:
                raise RequestError(f"a network has {key} {count!r}; expected a whole number")
        if not isinstance(self.epsilon, int | float) or not 0 <= self.epsilon < 1:
            raise RequestError(f"a network has the epsilon {self.epsilon!r}; expected a number from 0 to 1")
        if self.width % self.heads and not self.attention.head_size:
            raise RequestError(f"a network of width {self.width} cannot have {self.heads} heads")
        is_late = self.pooling == LATE and self.labels > 0
        if self.activation not in ACTIVATIONS or not (is_late or set(self.poolings) <= set(POOLINGS)):
            raise RequestError(
                f"a network has the activation {self.activation} and the pooling {self.pooling}; supported: "
                f"{', '.join(ACTIVATIONS)} and {', '.join(POOLINGS)}"
            )
        if not 0 <= self.first_position < self.positions:
            raise RequestError(f"a network has {self.positions} positions, the first token the {self.first_position}th")
        self._require_parts()

    def _require_parts(self) -> None:
        """Raises RequestError for parts that do not fit each other."""
        norm, rotary = self.norm, self.rotary
        if norm.kind not in NORMS or norm.place not in PLACES:
            raise RequestError(
                f"a network has the norm {norm.kind}, {norm.place}; supported: {', '.join(NORMS)} and "
                f"{', '.join(PLACES)}"
            )
        if self.heads % self.key_heads:
            raise RequestError(f"a network of {self.heads} heads cannot share {self.key_heads} heads of keys")
        if rotary and (
            rotary.size % 2
            or not 0 < rotary.size <= self.head_size
            or rotary.scaling not in SCALINGS
            or (rotary.scaling in BY_WAVELENGTH and not (rotary.trained > 0 and 0 < rotary.slow < rotary.fast))
        ):
            raise RequestError(
                f"a network rotates {rotary.size} columns of heads of {self.head_size}, scaled by {rotary.scaling!r}; "
                f"expected an even number of them, and one of {', '.join(map(repr, SCALINGS))} with its settings"
            )
        if (part := self.disentangled) and (
            min(part.distance, part.buckets) < 0 or not (part.to_position or part.to_content) or part.span < 2
        ):
            raise RequestError(
                f"a network has the relative positions {part}; expected 2 rows or more, and a use of them"
            )
        if not all(type(i) is int and 0 <= i < self.layers for i in self.attention.local):
            raise RequestError(f"a network of {self.layers} layers has local ones {self.attention.local}")
        if self.convolution and (self.convolution % 2 == 0 or self.layers < 2):
            raise RequestError(
                f"a network of {self.layers} layers has a convolution over {self.convolution} tokens; expected an odd "
                "number of tokens, and two layers or more"
            )
        if self.distinct_layers > self.layers:
            raise RequestError(f"a network of {self.layers} layers cannot repeat {self.distinct_layers} of them")
        for dense in self.dense:
            if dense.activation not in DENSE_ACTIVATIONS or not 0 < dense.outputs <= MAX_SIZE:
                raise RequestError(
                    f"a network has a Dense layer of {dense.outputs} outputs and the activation {dense.activation}; "
                    f"supported: {', '.join(DENSE_ACTIVATIONS)}"
                )
        if self.truncate_dim > self.pooled_size:
            raise RequestError(
                f"embeddings are truncated to {self.truncate_dim} components; expected at most their {self.pooled_size}"
            )

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a text, special tokens included."""
        return self.positions - self.first_position

    @property
    def head_size(self) -> int:
        """Columns of an attention head."""
        return self.attention.head_size or self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.attention.key_heads or self.heads

    @property
    def poolings(self) -> tuple[str, ...]:
        """Poolings whose results are concatenated."""
        return tuple(self.pooling.split("+"))

    @property
    def pooled_size(self) -> int:
        """Components of an embedding before it is truncated."""
        return self.dense[-1].outputs if self.dense else self.width * len(self.poolings)

    @property
    def unit_length(self) -> bool:
        """Whether embeddings have the length 1."""
        return self.renormalize or (self.normalize and not self.truncate_dim)

    @property
    def output_size(self) -> int:
        """Components of the output: labels of a cross-encoder, or components of embeddings."""
        return self.labels or self.truncate_dim or self.pooled_size

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph's inputs, int64 [batch, tokens] each; only cross-encoders take token types."""
        return (IDS, MASK, TYPES) if self.labels and self.types > 1 and self.typed else (IDS, MASK)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values; `from_json` reads them."""
        values = dataclasses.asdict(self)
        optional = (field.name for field in dataclasses.fields(self) if field.kw_only)
        for name in optional:
            if getattr(self, name) == getattr(type(self), name):
                del values[name]
            elif isinstance(getattr(self, name), tuple):
                values[name] = list(values[name])
        if "attention" in values:
            values["attention"]["local"] = list(self.attention.local)
        return values

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelConfig:
        """Reads the result of `to_json`.

        Args:
            value: JSON object of a card.

        Returns:
            The configuration.

        Raises:
            RequestError: A field is missing, unknown or out of range.
        """
        try:
            values = dict(value)
            for name in values.keys() & PARTS.keys():
                part = {key: tuple(item) if key == "local" else item for key, item in values[name].items()}
                values[name] = PARTS[name](**part)
            for name in values.keys() & {"dense", "unbiased"}:
                values[name] = tuple(Dense(**item) if name == "dense" else item for item in values[name])
            return cls(**values)
        except (AttributeError, TypeError) as error:
            raise RequestError(f"the card does not describe the network ({error}); import the model again") from error
