// The dot products of AVX-VNNI, 256 bits. ZOO_EVEX: in the encoding of AVX512-VNNI and AVX512-VL, with the same sixteen registers; ZOO_MODEL: their
// definition in instructions of AVX2, for tests on any CPU.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD and VPDPWSSD.
#pragma once
#include <immintrin.h>

#include <cstring>

namespace zoo {
namespace {

// Inline assembly on vectors of any type, 128 or 256 bits, so that nothing else is compiled for these instruction sets and gcc 12 moves no accumulators about; on copies of
// sums, which are else kept in memory.
#if defined(ZOO_MODEL)
// sum + f(a, b).
template <class V, class F>
inline V modelled(V sum, V a, V b, F f) {
    __m256i wide[3] = {};
    const V parts[] = {sum, a, b};
    for (int i = 0; i < 3; ++i) std::memcpy(&wide[i], &parts[i], sizeof(V));
    wide[0] = _mm256_add_epi32(wide[0], f(wide[1], wide[2]));
    std::memcpy(&sum, &wide[0], sizeof(V));
    return sum;
}
// The four products of the bytes in every int32, whose second factors are signed; Signed: the first ones, too.
template <bool Signed>
inline __m256i four_products(__m256i x, __m256i w) {
    const auto low = [](__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); };
    const __m256i even = Signed ? low(x) : _mm256_and_si256(x, _mm256_set1_epi16(0xFF)), odd = Signed ? _mm256_srai_epi16(x, 8) : _mm256_srli_epi16(x, 8);
    return _mm256_add_epi32(_mm256_madd_epi16(even, low(w)), _mm256_madd_epi16(odd, _mm256_srai_epi16(w, 8)));
}
template <class V>
inline void dot_u8s8(V &sum, V u8, V s8) { sum = modelled(sum, u8, s8, four_products<false>); }
template <class Sum, class V>
inline void dot_s16s16(Sum &sum, V a, V b) {
    sum = modelled(sum, reinterpret_cast<Sum>(a), reinterpret_cast<Sum>(b), [](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); });
}
#else
#if defined(ZOO_EVEX)
#define ZOO_ENCODING "%{evex%} "
#else
#define ZOO_ENCODING "%{vex%} "
#endif
template <class V>
inline void dot_u8s8(V &sum, V u8, V s8) {
    V copy = sum;
    asm(ZOO_ENCODING "vpdpbusd %2, %1, %0" : "+x"(copy) : "x"(u8), "xm"(s8));
    sum = copy;
}
template <class Sum, class V>
inline void dot_s16s16(Sum &sum, V a, V b) {
    Sum copy = sum;
    asm(ZOO_ENCODING "vpdpwssd %2, %1, %0" : "+x"(copy) : "x"(a), "xm"(b));
    sum = copy;
}
#undef ZOO_ENCODING
#endif

}  // namespace
}  // namespace zoo
