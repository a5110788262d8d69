// The kernels of sequences, compiled for every instruction set, see attention.h and target_attention.h.
#include "isa/isa.h"
#include "isa/sequences/attention.h"

namespace zoo {
const SequenceKernels ZOO_SET::kSequences = {
    .attend = attend,
    .score = score,
    .attend_scores = attend_scores,
    .activate = activate,
    .layer = layer,
    .attend_heads = attend_heads,
    .add = add,
    .transpose = transpose,
};
}  // namespace zoo
