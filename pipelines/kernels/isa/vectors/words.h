// Vectors of int16 (words), the codes of click programs.
#pragma once
#include <cstring>

#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

constexpr int64_t kWords = 2 * kVecLanes;  // int16 of a vector
using HalfWords = Vector<int16_t, kVecLanes>::type;
using QuarterBytes = Vector<uint8_t, kVecLanes>::type;

template <class V, class T>
inline V load_as(const T *address) {
    V v;
    std::memcpy(&v, address, sizeof v);
    return v;
}
template <class V, class T>
inline void store_as(T *address, V v) { std::memcpy(address, &v, sizeof v); }

inline Words broadcast_pair(const int16_t *address) {
    int32_t pair;
    std::memcpy(&pair, address, 4);
    return reinterpret_cast<Words>(pair - IntVec{});
}

inline void store_words(int16_t *address, IntVec v) { store_as(address, __builtin_convertvector(v, HalfWords)); }
// Bytes with zero point 128.
inline void store_signed(uint8_t *address, Vec v) { store_as(address, __builtin_convertvector(round_clipped(v, -128, 127) + 128, QuarterBytes)); }
inline Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }
inline IntVec load_words(const int16_t *address) { return __builtin_convertvector(load_as<HalfWords>(address), IntVec); }

}  // namespace
}  // namespace zoo
