// The kernel of MaxSim, compiled for every instruction set, see max_sim.h.
#include "isa/isa.h"
#include "isa/late_interaction/max_sim.h"

namespace zoo {
const LateInteractionKernels ZOO_SET::kLateInteraction = {.query_words = query_words, .pack_query = pack_query, .max_sim = max_sim};
}  // namespace zoo
