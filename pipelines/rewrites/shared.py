"""`SHARED`: the passes that need no knowledge of the model, in order; `file_passes`: those for users' own files."""

from pipelines.rewrites.affine_to_depthwise import AffineToDepthwise
from pipelines.rewrites.blocks_to_image import BlocksToImage
from pipelines.rewrites.dft_to_einsum import DftToEinsum
from pipelines.rewrites.driver import Rewrite
from pipelines.rewrites.drop_neutral import DropNeutral
from pipelines.rewrites.einsum_to_matmul import EinsumToMatMul
from pipelines.rewrites.expand_fused import ExpandFused
from pipelines.rewrites.flatten_linear import FlattenLinear
from pipelines.rewrites.fold_batch_norm import FoldBatchNorm
from pipelines.rewrites.fold_constants import FoldConstants
from pipelines.rewrites.fold_index_wrap import FoldIndexWrap
from pipelines.rewrites.fold_pad import FoldPad
from pipelines.rewrites.fold_scale import FoldScale
from pipelines.rewrites.fold_space_to_depth import FoldSpaceToDepth
from pipelines.rewrites.fuse_activations import FuseActivations
from pipelines.rewrites.fuse_linear import FuseLinear
from pipelines.rewrites.fuse_normalization import FuseNormalization
from pipelines.rewrites.gather_to_reshape import GatherToReshape
from pipelines.rewrites.hoist_linear import HoistLinear
from pipelines.rewrites.hoist_transposes import HoistTransposes
from pipelines.rewrites.lift_rows import LiftRows
from pipelines.rewrites.merge_siblings import MergeSiblings
from pipelines.rewrites.mix_channels import MixChannels
from pipelines.rewrites.normalize_rows import NormalizeRows
from pipelines.rewrites.one_hot_to_gather import OneHotToGather
from pipelines.rewrites.pool_to_matmul import PoolToMatMul
from pipelines.rewrites.push_transposes import PushTransposes
from pipelines.rewrites.remove_dead_branches import RemoveDeadBranches
from pipelines.rewrites.reshape_chains import ReshapeChains
from pipelines.rewrites.simplify_concat import SimplifyConcat
from pipelines.rewrites.subpixel_convolution import SubpixelConvolution
from pipelines.rewrites.sum_to_add import SumToAdd
from pipelines.rewrites.tabulate_rows import TabulateRows
from pipelines.rewrites.tile_to_expand import TileToExpand
from pipelines.rewrites.whole_max_pool import WholeMaxPool
from pipelines.rewrites.widen_half import WidenHalf

# First what makes constants and lays layers side by side, then what fuses them; MergeSiblings last, for it joins
# finished layers.
SHARED = (
    *(ExpandFused, WidenHalf, RemoveDeadBranches, FoldConstants, FoldIndexWrap, GatherToReshape, ReshapeChains),
    *(PushTransposes, HoistTransposes, SimplifyConcat, FuseActivations, FoldPad, FoldBatchNorm, AffineToDepthwise),
    *(FuseLinear, MergeSiblings),
)


def file_passes() -> list[Rewrite]:
    """Returns the passes of an .onnx file that is not of this project: `SHARED`, and those that change its layers."""
    first = [shared() for shared in SHARED if shared is not MergeSiblings]
    last = [FoldScale(factors=True), SubpixelConvolution(), FoldSpaceToDepth(), MergeSiblings(), FlattenLinear()]
    kinds = (
        *(DropNeutral, OneHotToGather, TabulateRows, PoolToMatMul, DftToEinsum, EinsumToMatMul, SumToAdd),
        *(TileToExpand, BlocksToImage, WholeMaxPool, MixChannels, LiftRows, NormalizeRows),
    )
    return [*(kind() for kind in kinds), *first, FuseNormalization(), HoistLinear(), *last]
