// The kernels for AVX-512 with VNNI.
#include "isa/isa.h"
#include "isa/vectors/click_kernels.h"
#include "isa/vectors/row_kernels.h"
#include "isa/x86/avx512/images.h"
#include "isa/x86/avx512/linear.h"
#include "isa/x86/bytes/depthwise.h"
#include "isa/x86/bytes/resample.h"

#include "isa/images/table.h"  // behind the kernels

namespace zoo {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

const Isa ZOO_SET::kIsa = {
    .name = "avx512",
    .needs = "AVX512-VNNI, with vectors of 512 bits",
    .vnni = true,
    .vector_bits = 512,
    .supported = supported,
    .packed_bytes = packed_bytes,
    .pack_linear = pack_linear,
    .unpack_column = unpack_column,
    .gather_columns = gather_columns,
    .linear = linear,
    .pack_weights = pack_weights,
    .resample = resample,
    .rows = &kRowKernels,
    .clicks = &kClickKernels,
    .images = &kImageKernels,
    .tables = &ZOO_SET::kTables,
    .sequences = &ZOO_SET::kSequences,
    .late_interaction = &ZOO_SET::kLateInteraction,
    .retrieval = &ZOO_SET::kRetrieval,
};

}  // namespace zoo
