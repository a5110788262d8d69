// The kernels of quantized tables, see pooling.h.
#include "isa/tables/pooling.h"

namespace zoo {
const TableKernels kAvx2Tables = kTables;
}  // namespace zoo
