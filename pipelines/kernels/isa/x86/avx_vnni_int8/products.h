// The dot product of signed bytes of AVX-VNNI-INT8, 256 bits, see ../avx_vnni/products.h.
#pragma once
#include "isa/x86/avx_vnni/products.h"

namespace zoo {
namespace {

template <class V>
inline void dot_s8s8(V &sum, V a, V b) {
#if defined(ZOO_MODEL)
    sum = modelled(sum, a, b, four_products<true>);
#else
    V copy = sum;
    asm("vpdpbssd %2, %1, %0" : "+x"(copy) : "x"(a), "xm"(b));
    sum = copy;
#endif
}

}  // namespace
}  // namespace zoo
