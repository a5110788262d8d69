// The kernel of MaxSim, see max_sim.h.
#include "isa/late_interaction/max_sim.h"

namespace zoo {
const LateInteractionKernels kAvx2LateInteraction = kLateInteraction;
}  // namespace zoo
