// The kernels of rows of floats and codes (transformers), compiled for every instruction set, see vectors/row_kernels.h.
#include "isa/vectors/row_kernels.h"

namespace zoo {
const RowKernels ZOO_SET::kRows = kRowKernels;
}  // namespace zoo
