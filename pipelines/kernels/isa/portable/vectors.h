// The vectors of plain C++, of 128 bits, see ../vectors/lanes.h.
#pragma once

namespace zoo {
namespace {

constexpr int64_t kVecLanes = 4;
using Vec = Vector<float, kVecLanes>::type;
using IntVec = Vector<int32_t, kVecLanes>::type;
using Words = Vector<int16_t, 2 * kVecLanes>::type;

inline Vec from_float16(const Float16 *address) {
    Vector<Float16, kVecLanes>::type packed;
    std::memcpy(&packed, address, sizeof packed);
    const IntVec bits = __builtin_convertvector(packed, IntVec);
    const Vec magnitude = reinterpret_cast<Vec>((bits & 0x7FFF) << 13) * 0x1p112f;  // the exponents' biases differ by 112
    return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(magnitude) | (bits & 0x8000) << 16);
}

inline IntVec round_clipped(Vec value, float low, float high) {
    value = value > low ? value : Vec{} + low;
    value = value < high ? value : Vec{} + high;
    return reinterpret_cast<IntVec>(value + kRoundToInt) - reinterpret_cast<IntVec>(Vec{} + kRoundToInt);
}

inline Vec entries(const float *table, IntVec segment) {
    Vec v;
    for (int64_t l = 0; l < kVecLanes; ++l) v[l] = table[segment[l]];
    return v;
}

inline void dot_pairs(IntVec &sum, Words a, Words b) {
    const IntVec x = reinterpret_cast<IntVec>(a), y = reinterpret_cast<IntVec>(b);
    sum += (x >> 16) * (y >> 16) + ((x << 16) >> 16) * ((y << 16) >> 16);
}

constexpr int64_t kTerms = 1;
using Code = int32_t;
inline void add_products(IntVec &sum, IntVec x, IntVec w) { sum += x * w; }
constexpr bool kSignedQueries = true;
inline void add_query_products(IntVec &sum, IntVec x, IntVec w) { add_products(sum, x, w); }

}  // namespace
}  // namespace zoo
