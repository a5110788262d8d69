// Products of bytes, and loads, of 512 bits.
#pragma once
#include <immintrin.h>

namespace zoo {
namespace {

// Inline assembly, for gcc 12 moves the accumulators of the intrinsics about.
inline void dot_u8s8(__m512i &sum, __m512i u8, __m512i s8) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8)); }
inline void dot_u8s8(__m256i &sum, __m256i u8, __m256i s8) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8)); }
inline void dot_u8s8(__m128i &sum, __m128i u8, __m128i s8) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8)); }

inline __m512i load(const void *at) { return _mm512_loadu_si512(at); }

}  // namespace
}  // namespace zoo
