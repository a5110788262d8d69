// The kernels for AVX-VNNI-INT8: those of AVX-VNNI, and where both factors are signed, products without a zero point of 128.
#include "isa/isa.h"
#include "isa/x86/cpu.h"

namespace zoo {
namespace ZOO_BASE {
extern const Isa kIsa;
}
namespace {

bool supported() {
#if !defined(ZOO_MODEL)
    if (!(features().edx >> 4 & 1)) return false;
#endif
    return ZOO_BASE::kIsa.supported();
}

Isa isa() {
    Isa isa = ZOO_BASE::kIsa;
#if defined(ZOO_MODEL)
    isa.name = "avx_vnni_int8_model", isa.needs = "AVX2, whose instructions compute the dot products of AVX-VNNI-INT8: for tests";
#else
    isa.name = "avx_vnni_int8", isa.needs = "AVX-VNNI and AVX-VNNI-INT8, with vectors of 256 bits";
#endif
    isa.supported = supported, isa.rows = &ZOO_SET::kRows, isa.retrieval = &ZOO_SET::kRetrieval;
    return isa;
}

}  // namespace

const Isa ZOO_SET::kIsa = isa();

}  // namespace zoo
