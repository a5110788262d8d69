// Vectors of int16 (words), the codes of click programs.
#pragma once
#include <cstring>

#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

constexpr int64_t kWords = 2 * kVecLanes;  // int16 of a vector
using Words = Vector<int16_t, kWords>::type;
using HalfWords = Vector<int16_t, kVecLanes>::type;
using QuarterBytes = Vector<uint8_t, kVecLanes>::type;

template <class V, class T>
inline V load_as(const T *at) {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
}
template <class V, class T>
inline void store_as(T *at, V v) { std::memcpy(at, &v, sizeof v); }

// sum += a[0] b[0] + a[1] b[1] in every int32.
inline void dot_pairs(IntVec &sum, Words a, Words b) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVX2__)
    sum += reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
    const IntVec x = reinterpret_cast<IntVec>(a), y = reinterpret_cast<IntVec>(b);
    sum += (x >> 16) * (y >> 16) + ((x << 16) >> 16) * ((y << 16) >> 16);
#endif
}

inline Words broadcast_pair(const int16_t *at) {
    int32_t pair;
    std::memcpy(&pair, at, 4);
    return reinterpret_cast<Words>(pair - IntVec{});
}

// Clipped to [low, high], NaN low, and rounded to the nearest, ties to even.
inline IntVec round_clipped(Vec value, float low, float high) {
#if defined(__AVX512F__)
    const __m512 clipped = _mm512_min_ps(_mm512_max_ps(value, broadcast<Vec>(low)), broadcast<Vec>(high));
    return reinterpret_cast<IntVec>(_mm512_cvtps_epi32(clipped));
#elif defined(__AVX2__)
    const __m256 clipped = _mm256_min_ps(_mm256_max_ps(value, broadcast<Vec>(low)), broadcast<Vec>(high));
    return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(clipped));
#else
    value = value > low ? value : broadcast<Vec>(low);
    value = value < high ? value : broadcast<Vec>(high);
    return reinterpret_cast<IntVec>(value + kRoundToInt) - reinterpret_cast<IntVec>(broadcast<Vec>(kRoundToInt));
#endif
}

inline void store_words(int16_t *at, IntVec v) { store_as(at, __builtin_convertvector(v, HalfWords)); }
// Bytes with zero point 128.
inline void store_signed(uint8_t *at, Vec v) { store_as(at, __builtin_convertvector(round_clipped(v, -128, 127) + 128, QuarterBytes)); }
inline Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }
inline IntVec load_words(const int16_t *at) { return __builtin_convertvector(load_as<HalfWords>(at), IntVec); }

inline IntVec lane_numbers() {
    IntVec v{};
    for (int64_t l = 0; l < kVecLanes; ++l) v[l] = static_cast<int32_t>(l);
    return v;
}

// The entry of a segment in every lane, of 32 floats.
inline Vec entries(const float *table, IntVec segment) {
#if defined(__AVX512F__)
    return _mm512_permutex2var_ps(_mm512_loadu_ps(table), reinterpret_cast<__m512i>(segment), _mm512_loadu_ps(table + 16));
#elif defined(__AVX2__)
    return _mm256_i32gather_ps(table, reinterpret_cast<__m256i>(segment), 4);
#else
    Vec v;
    for (int64_t l = 0; l < kVecLanes; ++l) v[l] = table[segment[l]];
    return v;
#endif
}

}  // namespace
}  // namespace zoo
