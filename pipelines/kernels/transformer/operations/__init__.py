"""Operations of a Transformer's encoder and decoder over numbered registers.

A register holds float32 activations: a row for each token of the sources, or for each beam. A linear layer quantizes
its input to uint8: statically, by the scale and the zero point of the graph's QuantizeLinear, or else dynamically, each
row by its own range:

    u_k = clip(rint(x_k / s) + zero, 0, 255)                           `StaticQParams`; where there are none,
    s   = max_k |x_k| / 127,  u_k = rint(x_k (127 / max)) + 128   0 <= u_k <= 255; where nothing is negative,
    s   = max_k x_k / 255,    u_k = rint(x_k (255 / max))              and s = 1 for a row of zeros (all |x_k| < 1e-30)
    y_j = float32(sum_k (u_k - zero) weight[k, j]) (s scale_j) + bias_j,   then ReLU and residual, where asked for

A layer with float weights takes float32 rows: y_j = (sum_k x_k weight[k, j]) scale_j + bias_j, summed from k = 0 on.

The KV caches of a decoder are float16 (`reference.to_float16`), which halves the bytes that a decoding step reads.
Everything else is float32. Every operation is rounded by itself, and sums have the order of `reference.sum_lanes`, so
that all instruction sets and the numpy `reference` return the same bits.
"""

from pipelines.kernels.transformer.operations.attention import (
    Attention,
    CrossAttention,
    Disentangled,
    HeadNorm,
    Neighbours,
    QuantizedAttention,
    Rotary,
    SelfAttention,
)
from pipelines.kernels.transformer.operations.base import (
    ACTIVATIONS,
    COLUMNS,
    GRAPH_ACTIVATIONS,
    LANES,
    MAX_WIDTH,
    MEMORY,
    Checked,
    RowLinear,
    StaticQParams,
)
from pipelines.kernels.transformer.operations.rows import (
    Activation,
    Embedding,
    Gate,
    GatedActivation,
    LayerNorm,
    Linear,
    PartNorms,
    Recurrence,
    RMSNorm,
    RunningMean,
    Scale,
    Sum,
    Vocabulary,
)

Operation = (
    Embedding
    | LayerNorm
    | PartNorms
    | RMSNorm
    | Linear
    | Activation
    | GatedActivation
    | Scale
    | Attention
    | Neighbours
    | QuantizedAttention
    | SelfAttention
    | Recurrence
    | RunningMean
    | Gate
    | Sum
    | CrossAttention
    | Vocabulary
)

__all__ = [
    "ACTIVATIONS",
    "COLUMNS",
    "GRAPH_ACTIVATIONS",
    "LANES",
    "MAX_WIDTH",
    "MEMORY",
    "Activation",
    "Attention",
    "Checked",
    "CrossAttention",
    "Disentangled",
    "Embedding",
    "Gate",
    "GatedActivation",
    "HeadNorm",
    "LayerNorm",
    "Linear",
    "Neighbours",
    "Operation",
    "PartNorms",
    "QuantizedAttention",
    "RMSNorm",
    "Recurrence",
    "Rotary",
    "RowLinear",
    "RunningMean",
    "Scale",
    "SelfAttention",
    "StaticQParams",
    "Sum",
    "Vocabulary",
]
