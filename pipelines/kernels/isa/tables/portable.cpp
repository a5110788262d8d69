// The kernels of quantized tables, see pooling.h.
#include "isa/tables/pooling.h"

namespace zoo {
const TableKernels kPortableTables = kTables;
}  // namespace zoo
