"""Float graph rewrites, one pass per file, and the driver that applies them to a fixed point.

The package imports `core` and `graph`. Its public names are loaded at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.rewrites.affine_to_depthwise import AffineToDepthwise
    from pipelines.rewrites.blocks_to_image import BlocksToImage
    from pipelines.rewrites.driver import CleanUp, Rewrite, RewriteReport, rewrite
    from pipelines.rewrites.equalize_concat import EqualizeConcat
    from pipelines.rewrites.expand_fused import ExpandFused
    from pipelines.rewrites.flatten_linear import FlattenLinear
    from pipelines.rewrites.fold_batch_norm import FoldBatchNorm
    from pipelines.rewrites.fold_constants import FoldConstants
    from pipelines.rewrites.fold_index_wrap import FoldIndexWrap
    from pipelines.rewrites.fold_input_normalization import FoldInputNormalization
    from pipelines.rewrites.fold_pad import FoldPad
    from pipelines.rewrites.fold_scale import FoldScale
    from pipelines.rewrites.fuse_activations import FuseActivations
    from pipelines.rewrites.fuse_linear import FuseLinear
    from pipelines.rewrites.gather_to_reshape import GatherToReshape
    from pipelines.rewrites.lift_rows import LiftRows
    from pipelines.rewrites.merge_siblings import MergeSiblings
    from pipelines.rewrites.normalize_rows import NormalizeRows
    from pipelines.rewrites.push_transposes import PushTransposes
    from pipelines.rewrites.remove_dead_branches import RemoveDeadBranches
    from pipelines.rewrites.reshape_chains import ReshapeChains
    from pipelines.rewrites.share_weights import ShareWeights
    from pipelines.rewrites.shared import SHARED, file_passes
    from pipelines.rewrites.simplify_concat import SimplifyConcat
    from pipelines.rewrites.tile_to_expand import TileToExpand
    from pipelines.rewrites.whole_max_pool import WholeMaxPool
    from pipelines.rewrites.widen_half import WidenHalf

__all__ = [
    "SHARED",
    "AffineToDepthwise",
    "BlocksToImage",
    "CleanUp",
    "EqualizeConcat",
    "ExpandFused",
    "FlattenLinear",
    "FoldBatchNorm",
    "FoldConstants",
    "FoldIndexWrap",
    "FoldInputNormalization",
    "FoldPad",
    "FoldScale",
    "FuseActivations",
    "FuseLinear",
    "GatherToReshape",
    "LiftRows",
    "MergeSiblings",
    "NormalizeRows",
    "PushTransposes",
    "RemoveDeadBranches",
    "ReshapeChains",
    "Rewrite",
    "RewriteReport",
    "ShareWeights",
    "SimplifyConcat",
    "TileToExpand",
    "WholeMaxPool",
    "WidenHalf",
    "file_passes",
    "rewrite",
]

_MODULES = {
    "AffineToDepthwise": "affine_to_depthwise",
    "BlocksToImage": "blocks_to_image",
    "CleanUp": "driver",
    "Rewrite": "driver",
    "RewriteReport": "driver",
    "rewrite": "driver",
    "EqualizeConcat": "equalize_concat",
    "ExpandFused": "expand_fused",
    "FlattenLinear": "flatten_linear",
    "FoldBatchNorm": "fold_batch_norm",
    "FoldConstants": "fold_constants",
    "FoldIndexWrap": "fold_index_wrap",
    "FoldInputNormalization": "fold_input_normalization",
    "FoldPad": "fold_pad",
    "FoldScale": "fold_scale",
    "FuseActivations": "fuse_activations",
    "FuseLinear": "fuse_linear",
    "GatherToReshape": "gather_to_reshape",
    "LiftRows": "lift_rows",
    "MergeSiblings": "merge_siblings",
    "NormalizeRows": "normalize_rows",
    "PushTransposes": "push_transposes",
    "RemoveDeadBranches": "remove_dead_branches",
    "ReshapeChains": "reshape_chains",
    "ShareWeights": "share_weights",
    "SHARED": "shared",
    "file_passes": "shared",
    "SimplifyConcat": "simplify_concat",
    "TileToExpand": "tile_to_expand",
    "WholeMaxPool": "whole_max_pool",
    "WidenHalf": "widen_half",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
