// Products of 8-bit codes with packed columns, of attention and of MaxSim. Written once and lowered for each instruction set, of which only
// the product of codes differs: integers are exact in any order.
#pragma once
#include "isa/isa.h"
#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

// An int32 holds kTerms codes. add_products: each lane of `sum` += the products of the codes in x (unsigned) and in that lane of w (signed).
#if defined(__AVX512F__)
constexpr int64_t kTerms = 4;
using Code = int8_t;
inline void add_products(IntVec &sum, IntVec x, IntVec w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));  // as in x86/avx512/products.h
}
constexpr auto kMiddles = static_cast<int32_t>(0x80808080u);
#elif defined(__AVX2__)
constexpr int64_t kTerms = 2;
using Code = int16_t;
inline void add_products(IntVec &sum, IntVec x, IntVec w) {
    sum += reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(w)));
}
constexpr int32_t kMiddles = 0x00800080;
#else
constexpr int64_t kTerms = 1;
using Code = int32_t;
inline void add_products(IntVec &sum, IntVec x, IntVec w) { sum += x * w; }
constexpr int32_t kMiddles = 128;
#endif
inline void add_products(IntVec &sum, int32_t x, IntVec w) { add_products(sum, IntVec{} + x, w); }

constexpr int64_t kQueries = kVecLanes == 16 ? 8 : 4;  // that are computed together: their sums fit the registers
constexpr int32_t kMiddle = 128;  // the zero point of queries, kMiddles: a word of it

inline IntVec load_int(const int32_t *at) {
    IntVec v;
    std::memcpy(&v, at, sizeof v);
    return v;
}
inline void store_int(int32_t *at, IntVec v) { std::memcpy(at, &v, sizeof v); }
inline void store_codes(Code *at, IntVec v) {
    const auto codes = __builtin_convertvector(v, Vector<Code, kVecLanes>::type);
    std::memcpy(at, &codes, sizeof codes);
}
inline int32_t packed(const Code *codes) {
    int32_t terms;
    std::memcpy(&terms, codes, 4);
    return terms;
}

// What takes the zero point of the other factor out of the products with columns of packed words.
inline void zero_offsets(const int32_t *words, int64_t groups, int64_t columns, int32_t *offsets) {
    for (int64_t t = 0; t < columns; t += kVecLanes) {
        IntVec offset{};
        for (int64_t g = 0; g < groups; ++g) add_products(offset, kMiddles, load_int(words + g * columns + t));
        store_int(offsets + t, -offset);
    }
}

// Products of Count rows of codes with Wide vectors of packed columns, from `start` on (null: 0); then(row, part, sums) takes them.
template <int Count, int Wide, class Then>
inline void product_tile(const Code *x, int64_t x_stride, int64_t groups, const int32_t *w, int64_t stride, const int32_t *start, Then then) {
    const IntVec low = start ? load_int(start) : IntVec{}, high = start && Wide > 1 ? load_int(start + kVecLanes) : IntVec{};
    IntVec s00 = low, s01 = high, s10 = low, s11 = high, s20 = low, s21 = high, s30 = low, s31 = high;
    IntVec s40 = low, s41 = high, s50 = low, s51 = high, s60 = low, s61 = high, s70 = low, s71 = high;
    for (int64_t g = 0; g < groups; ++g, x += kTerms, w += stride) {
        const IntVec w0 = load_int(w), w1 = Wide > 1 ? load_int(w + kVecLanes) : w0;
        const auto add = [&](int64_t row, IntVec &a, IntVec &b) {
            const int32_t terms = packed(x + row * x_stride);
            add_products(a, terms, w0);
            if constexpr (Wide > 1) add_products(b, terms, w1);
        };
        add(0, s00, s01);
        if constexpr (Count > 1) add(1, s10, s11);
        if constexpr (Count > 2) add(2, s20, s21), add(3, s30, s31);
        if constexpr (Count > 4) add(4, s40, s41), add(5, s50, s51), add(6, s60, s61), add(7, s70, s71);
    }
    const auto take = [&](int row, IntVec a, IntVec b) {
        then(row, 0, a);
        if constexpr (Wide > 1) then(row, 1, b);
    };
    take(0, s00, s01);
    if constexpr (Count > 1) take(1, s10, s11);
    if constexpr (Count > 2) take(2, s20, s21), take(3, s30, s31);
    if constexpr (Count > 4) take(4, s40, s41), take(5, s50, s51), take(6, s60, s61), take(7, s70, s71);
}

// `product_tile` over `columns`, whole sixteens, of packed rows [groups, stride]; then(row, column, sums).
template <int Count, class Then>
inline void product_rows(const Code *x, int64_t x_stride, int64_t groups, const int32_t *w, int64_t stride, int64_t columns,
                         const int32_t *start, Then then) {
    int64_t at = 0;
    const auto take = [&](int row, int part, IntVec sums) { then(row, at + part * kVecLanes, sums); };
    for (; at + 2 * kVecLanes <= columns; at += 2 * kVecLanes)
        product_tile<Count, 2>(x, x_stride, groups, w + at, stride, start ? start + at : nullptr, take);
    for (; at < columns; at += kVecLanes)
        product_tile<Count, 1>(x, x_stride, groups, w + at, stride, start ? start + at : nullptr, take);
}

}  // namespace
}  // namespace zoo
