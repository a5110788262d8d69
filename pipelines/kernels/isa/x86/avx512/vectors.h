// The vectors of AVX-512 with VNNI, see ../../vectors/lanes.h.
#pragma once
#include "isa/x86/avx512/products.h"

namespace zoo {
namespace {

constexpr int64_t kVecLanes = 16;
using Vec = Vector<float, kVecLanes>::type;
using IntVec = Vector<int32_t, kVecLanes>::type;
using Words = Vector<int16_t, 2 * kVecLanes>::type;

inline Vec from_float16(const Float16 *address) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(address))); }

inline IntVec round_clipped(Vec value, float low, float high) {
    return reinterpret_cast<IntVec>(_mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(value, _mm512_set1_ps(low)), _mm512_set1_ps(high))));
}

inline Vec entries(const float *table, IntVec segment) {
    return _mm512_permutex2var_ps(_mm512_loadu_ps(table), reinterpret_cast<__m512i>(segment), _mm512_loadu_ps(table + 16));
}

inline void dot_pairs(IntVec &sum, Words a, Words b) { dot_s16s16(sum, a, b); }

constexpr int64_t kTerms = 4;
using Code = int8_t;
inline void add_products(IntVec &sum, IntVec x, IntVec w) { dot_u8s8(sum, x, w); }
constexpr bool kSignedQueries = false;
inline void add_query_products(IntVec &sum, IntVec x, IntVec w) { add_products(sum, x, w); }

}  // namespace
}  // namespace zoo
