"""Reference implementation of the native Transformer in numpy, bit for bit the same."""

from pipelines.kernels.transformer.reference.attention import (
    attention,
    positioned,
    quantized_attention,
    self_attention,
)
from pipelines.kernels.transformer.reference.program import Decoding, Registers, encode
from pipelines.kernels.transformer.reference.rows import (
    Floats,
    activate,
    embedding,
    exponential,
    layer_norm,
    linear,
    part_norms,
    quantize_rows,
    recurrence,
    reduce_lanes,
    rms_norm,
    sigmoid,
    sum_lanes,
    to_float16,
    top_k,
)

__all__ = [
    "Decoding",
    "Floats",
    "Registers",
    "activate",
    "attention",
    "embedding",
    "encode",
    "exponential",
    "layer_norm",
    "linear",
    "part_norms",
    "positioned",
    "quantize_rows",
    "quantized_attention",
    "recurrence",
    "reduce_lanes",
    "rms_norm",
    "self_attention",
    "sigmoid",
    "sum_lanes",
    "to_float16",
    "top_k",
]
