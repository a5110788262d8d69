// The kernels for AVX-VNNI, which has the dot products of VNNI for 256 bits.
#include <cpuid.h>

#include "isa/isa.h"
#include "isa/vectors/click_kernels.h"
#include "isa/vectors/row_kernels.h"
#include "isa/x86/avx2/lookup.h"
#include "isa/x86/avx_vnni/linear.h"
#include "isa/x86/bytes/depthwise.h"
#include "isa/x86/bytes/resample.h"

namespace zoo {
namespace {

int64_t products(int64_t rounds) {
    constexpr int kSums = 12;  // more than the latency of a product
    Ints sums[kSums];
    unroll<kSums>([&](auto i) ZOO_INLINE { sums[i.value] = same(0); });
    const Ints x = same(0x01020304), w = same(0x7F81FF01);
    for (int64_t n = 0; n < rounds; ++n) {
        unroll<kSums>([&](auto i) ZOO_INLINE { dot_u8s8(sums[i.value], x, w); });
        asm volatile("" ::: "memory");
    }
    unroll<kSums>([&](auto i) ZOO_INLINE { asm volatile("" ::"x"(sums[i.value])); });
    return rounds * kSums * 32;
}

bool supported() {
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return false;
#if defined(ZOO_MODEL)
    return true;
#elif defined(ZOO_EVEX)
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
#endif
}

}  // namespace
}  // namespace zoo

#include "isa/images/table.h"  // behind the kernels

namespace zoo {

const Isa ZOO_SET::kIsa = {
#if defined(ZOO_MODEL)
    .name = "avx_vnni_model",
    .needs = "AVX2, whose instructions compute the dot products of AVX-VNNI: for tests",
#elif defined(ZOO_EVEX)
    .name = "avx_vnni",
    .needs = "AVX512-VNNI and AVX512-VL, with vectors of 256 bits",
#else
    .name = "avx_vnni",
    .needs = "AVX-VNNI, with vectors of 256 bits",
#endif
    .vnni = true,
    .vector_bits = 256,
#if defined(ZOO_MODEL)
    .listed = false,
#endif
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
