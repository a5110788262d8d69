"""FBGEMM's table-batched embedding bags of quantized rows on a CPU, and the embeddings of a recommender in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.core.errors import ZooError


def open_bags(shapes: Sequence[tuple[int, int]], bits: int, features: Sequence[int] | None = None) -> Any:
    """Opens bags of tables with rows that are still to be written.

    Args:
        shapes: Rows and columns of every table.
        bits: Bits of a code: 8, 4 or 2.
        features: Table of every feature; None: a feature a table.

    Returns:
        FBGEMM's module, called with (indices of all features, offsets).
    """
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    kind = {8: SparseType.INT8, 4: SparseType.INT4, 2: SparseType.INT2}[bits]
    made = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("", rows, width, kind, EmbeddingLocation.HOST) for rows, width in shapes],
        feature_table_map=None if features is None else list(features),
        device="cpu",
        bounds_check_mode=BoundsCheckMode.NONE,
        output_dtype=SparseType.FP32,
    )
    made.initialize_weights()
    return made


def replace_embeddings(network: Any) -> Any:
    """Replaces the embeddings of a recommender in torch by int8 bags; first-order weights of one column stay.

    Args:
        network: Network of this project, changed in place.

    Returns:
        The network.

    Raises:
        ZooError: A network that the bags do not compute, with the reason.
    """
    import torch

    from zoo.recommenders.models.layers import Embeddings

    class Int8Bags(torch.nn.Module):
        """`Embeddings` in FBGEMM: the bags sum, means are scaled afterwards."""

        def __init__(self, source: Embeddings) -> None:
            super().__init__()
            self.fields = source.fields
            names = list(source.tables)
            shapes = [(rows, source.size) for rows in source.heights]
            self.bags = open_bags(shapes, 8, [names.index(source.owner(field)) for field in source.fields])
            first = 0
            for (rows, _), (stored, _) in zip(
                shapes, self.bags.split_embedding_weights(split_scale_shifts=False), strict=True
            ):
                stored.copy_(_int8_rows(source.weight[first : first + rows].detach()))
                first += rows
            widths = torch.tensor([0, *(field.width for field in source.fields)])
            self.register_buffer("starts", widths.cumsum(0), persistent=False)

        @torch.compiler.disable
        def forward(self, ids: Any, scales: Any) -> Any:
            """See `Embeddings.forward`."""
            count = len(ids)
            indices = torch.cat([ids[:, field.start : field.start + field.width].reshape(-1) for field in self.fields])
            offsets = (self.starts[:-1, None] * count + self.starts.diff()[:, None] * torch.arange(count)).reshape(-1)
            offsets = torch.cat([offsets, self.starts[-1:] * count]).int()
            sums = self.bags(indices.int(), offsets).view(count, len(self.fields), -1)
            for index, field in enumerate(self.fields):
                if field.is_list and field.scale >= 0:
                    sums[:, index] *= scales[:, field.scale, None]
            return sums.view(count, -1)

    sources = [(name, module) for name, module in network.named_modules() if type(module) is Embeddings]
    if not sources:
        raise ZooError("the network has no embeddings that FBGEMM pools")
    for name, source in sources:
        if any(field.is_sequence for field in source.fields):
            raise ZooError("FBGEMM's bags pool lists, and this network reads the items of a sequence")
        if any(field.is_list and field.column.pooling == "max" for field in source.fields):
            raise ZooError("FBGEMM has no bags of maxima")
        if source.size % 4:
            raise ZooError(f"FBGEMM's rows have a multiple of 4 columns, found {source.size}")
        parent, _, own = name.rpartition(".")
        setattr(network.get_submodule(parent), own, Int8Bags(source))
    return network


def _int8_rows(table: Any) -> Any:
    """Returns rows as FBGEMM stores them: scale and bias in float16, then the codes."""
    import torch

    low, high = table.min(1, keepdim=True).values.half(), table.max(1, keepdim=True).values
    scale = ((high - low.float()) / 255).clamp(min=0).half()
    step = torch.where(scale > 0, scale.float(), torch.ones_like(high))
    codes = ((table - low.float()) / step).round().clamp(0, 255).byte()
    return torch.cat([scale.view(torch.uint8), low.view(torch.uint8), codes], 1)
