// The vectors of AVX2, see ../../vectors/lanes.h: products are of 16 bits.
#pragma once
#include "isa/x86/avx2/lanes.h"

namespace zoo {
namespace {

inline void dot_pairs(IntVec &sum, Words a, Words b) {
    sum += reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}

inline void add_pairs(__m256i &sum, __m256i a, __m256i b) { sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
inline void add_pairs(__m128i &sum, __m128i a, __m128i b) { sum = _mm_add_epi32(sum, _mm_madd_epi16(a, b)); }

constexpr int64_t kTerms = 2;
using Code = int16_t;
inline void add_products(IntVec &sum, IntVec x, IntVec w) { dot_pairs(sum, reinterpret_cast<Words>(x), reinterpret_cast<Words>(w)); }
constexpr bool kSignedQueries = true;
inline void add_query_products(IntVec &sum, IntVec x, IntVec w) { add_products(sum, x, w); }

}  // namespace
}  // namespace zoo
