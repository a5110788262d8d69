// The table of an instruction set: its kernels.cpp includes this behind its kernels.
#pragma once
#include "isa/isa.h"
#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

constexpr Isa table_of(const char *name, const char *needs, bool (*supported)(), bool listed = true) {
    return {
        .name = name,
        .needs = needs,
        .vnni = kTerms == 4,
        .vector_bits = 32 * kVecLanes,
        .listed = listed,
        .supported = supported,
        .packed_bytes = packed_bytes,
        .pack_linear = pack_linear,
        .unpack_column = unpack_column,
        .gather_columns = gather_columns,
        .linear = linear,
        .pack_weights = pack_weights,
        .resample = resample,
        .rows = &ZOO_SET::kRows,
        .clicks = &ZOO_SET::kClicks,
        .images = &ZOO_SET::kImages,
        .tables = &ZOO_SET::kTables,
        .sequences = &ZOO_SET::kSequences,
        .late_interaction = &ZOO_SET::kLateInteraction,
        .retrieval = &ZOO_SET::kRetrieval,
    };
}

}  // namespace
}  // namespace zoo
