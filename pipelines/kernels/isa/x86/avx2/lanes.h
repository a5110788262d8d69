// Vectors of 256 bits without their dot products, see ../../vectors/lanes.h.
#pragma once
#include <immintrin.h>

namespace zoo {
namespace {

constexpr int64_t kVecLanes = 8;
using Vec = Vector<float, kVecLanes>::type;
using IntVec = Vector<int32_t, kVecLanes>::type;
using Words = Vector<int16_t, 2 * kVecLanes>::type;

inline Vec from_float16(const Float16 *address) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(address))); }

inline IntVec round_clipped(Vec value, float low, float high) {
    return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(value, _mm256_set1_ps(low)), _mm256_set1_ps(high))));
}

inline Vec entries(const float *table, IntVec segment) { return _mm256_i32gather_ps(table, reinterpret_cast<__m256i>(segment), 4); }

}  // namespace
}  // namespace zoo
