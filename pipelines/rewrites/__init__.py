"""The shared passes, one a file. `SHARED` are those that need no knowledge of the model, in order."""

from pipelines.rewrites.fold_index_wrap import FoldIndexWrap
from pipelines.rewrites.fuse_linear import FuseLinear

SHARED = (FoldIndexWrap, FuseLinear)
