// The kernels of sequences, see attention.h.
#include "isa/sequences/attention.h"

namespace zoo {
const SequenceKernels kPortableSequences = kSequences;
}  // namespace zoo
