// The kernels of quantized tables, compiled for every instruction set, see pooling.h.
#include "isa/isa.h"
#include "isa/tables/pooling.h"

namespace zoo {
const TableKernels ZOO_SET::kTables = {.pool = pool, .pool_codes = pool_codes};
}  // namespace zoo
