// The kernels of exact retrieval, compiled for every instruction set, see products.h.
#include "isa/isa.h"
#include "isa/retrieval/products.h"

namespace zoo {
const RetrievalKernels ZOO_SET::kRetrieval = {.dots = dots, .above = above};
}  // namespace zoo
