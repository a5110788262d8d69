// The kernels for AVX-VNNI, which has the dot products of VNNI for 256 bits.
#include "isa/isa.h"
#include "isa/x86/avx_vnni/linear.h"
#include "isa/x86/bytes/resample.h"
#include "isa/x86/cpu.h"

namespace zoo {
namespace {

bool supported() {
#if defined(ZOO_MODEL)
    return has_avx2();
#elif defined(ZOO_EVEX)
    return has_avx2() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
    return has_avx2() && features().eax >> 4 & 1;
#endif
}

}  // namespace
}  // namespace zoo

#include "isa/table.h"  // behind the kernels

namespace zoo {
#if defined(ZOO_MODEL)
const Isa ZOO_SET::kIsa = table_of("avx_vnni_model", "AVX2, whose instructions compute the dot products of AVX-VNNI: for tests", supported, false);
#elif defined(ZOO_EVEX)
const Isa ZOO_SET::kIsa = table_of("avx_vnni", "AVX512-VNNI and AVX512-VL, with vectors of 256 bits", supported);
#else
const Isa ZOO_SET::kIsa = table_of("avx_vnni", "AVX-VNNI, with vectors of 256 bits", supported);
#endif
}  // namespace zoo
