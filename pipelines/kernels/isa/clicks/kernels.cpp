// The kernels of click programs, compiled for every instruction set, see vectors/click_kernels.h.
#include "isa/vectors/click_kernels.h"

namespace zoo {
const ClickKernels ZOO_SET::kClicks = kClickKernels;
}  // namespace zoo
