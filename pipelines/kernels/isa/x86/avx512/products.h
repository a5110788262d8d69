// Products of bytes, and loads, of 512 bits.
#pragma once
#include <immintrin.h>

namespace zoo {
namespace {

// Inline assembly, for gcc 12 moves the accumulators of the intrinsics about; on a copy of the sum, which is else kept in memory.
template <class V>
inline void dot_u8s8(V &sum, V u8, V s8) {
    V copy = sum;
    asm("vpdpbusd %2, %1, %0" : "+v"(copy) : "v"(u8), "v"(s8));
    sum = copy;
}
template <class Sum, class V>
inline void dot_s16s16(Sum &sum, V a, V b) {
    Sum copy = sum;
    asm("vpdpwssd %2, %1, %0" : "+v"(copy) : "v"(a), "v"(b));
    sum = copy;
}

inline __m512i load(const void *address) { return _mm512_loadu_si512(address); }

}  // namespace
}  // namespace zoo
