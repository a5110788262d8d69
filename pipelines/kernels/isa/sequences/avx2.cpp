// The kernels of sequences, see attention.h.
#include "isa/sequences/attention.h"

namespace zoo {
const SequenceKernels kAvx2Sequences = kSequences;
}  // namespace zoo
