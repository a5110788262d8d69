"""The layers of a click model as native objects."""

from __future__ import annotations

from typing import Any

from pipelines.kernels.arrays import contiguous
from pipelines.kernels.clicks.operators import EmbeddingLayer, LinearLayer
from pipelines.kernels.extension import required


def parallel_embedding(layer: EmbeddingLayer, isa: str = "") -> Any:
    """`EmbeddingLayer` as a native object: `(ids int32 or int64 [n, columns], numbers float32 [n, M] or None) ->
    (hidden, wide)`.

    All arrays C-contiguous and aligned; any n, also 0. The table is used where it lies, all else is copied. Raises,
    when called, IndexError for an id that is no row of its field, before the table is touched, and TypeError or
    ValueError for other arrays. RequestError without kernels.
    """
    arrays = (
        layer.table,
        layer.columns,
        layer.offsets,
        layer.rows,
        layer.weight,
        layer.scale,
        layer.bias,
        layer.number_scale,
    )
    arguments = [contiguous(array) for array in arrays]
    wide = None if layer.wide is None else contiguous(layer.wide)
    return required().ParallelEmbedding(*arguments, layer.shift, wide, isa)


def linear(layer: LinearLayer, isa: str = "") -> Any:
    """`LinearLayer` as a native object, its weights packed: `(x uint8 [n, K], C-contiguous) -> uint8 or float32 [n,
    N]`.
    """
    return required().Linear(
        contiguous(layer.weight), contiguous(layer.bias), contiguous(layer.scale), layer.zero_point, layer.low, isa
    )


def click_network(embedding: Any, layers: list[Any], sigmoid: bool) -> Any:
    """`parallel_embedding`, then `linear` layers of which the last gives one float, plus the wide sum, through a
    sigmoid if asked.

    Called like the embedding; returns float32 [n, 1]. Activations stay in the cache, nothing of Python runs in between.
    """
    return required().ClickNetwork(embedding, tuple(layers), sigmoid)  # a tuple keeps its layers alive
