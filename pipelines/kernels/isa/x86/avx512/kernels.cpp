// The kernels for AVX-512 with VNNI.
#include "isa/isa.h"
#include "isa/x86/avx512/linear.h"
#include "isa/x86/bytes/resample.h"

namespace zoo {
namespace {

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace
}  // namespace zoo

#include "isa/table.h"  // behind the kernels

namespace zoo {
const Isa ZOO_SET::kIsa = table_of("avx512", "AVX512-VNNI, with vectors of 512 bits", supported);
}  // namespace zoo
