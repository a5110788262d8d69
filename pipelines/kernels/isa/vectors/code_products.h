// Products of 8-bit codes with packed columns, of attention and of MaxSim. Written once and lowered for each instruction set, of which only
// the product of codes differs: integers are exact in any order.
#pragma once
#include "isa/isa.h"
#include "isa/vectors/lanes.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

constexpr int32_t kMiddle = 128;  // a zero point of codes; kMiddles: a word of it
constexpr auto kMiddles = static_cast<int32_t>(kTerms == 4 ? 0x80808080u : kTerms == 2 ? 0x00800080u : 0x80u);

// Codes of queries are signed where the instruction set multiplies signed codes, else they have the zero point kMiddle.
constexpr int32_t kQueryMiddle = kSignedQueries ? 0 : kMiddle, kQueryMiddles = kSignedQueries ? 0 : kMiddles;
template <bool kOfQueries>
inline void add_products_of(IntVec &sum, IntVec x, IntVec w) {
    if constexpr (kOfQueries) add_query_products(sum, x, w);
    else add_products(sum, x, w);
}
inline void add_query_products(IntVec &sum, int32_t x, IntVec w) { add_query_products(sum, IntVec{} + x, w); }

constexpr int64_t kQueries = kVecLanes == 16 ? 8 : 4;  // that are computed together: their sums fit the registers

inline IntVec rounded(Vec x) { return reinterpret_cast<IntVec>(x + kRoundToInt) - 0x4B400000; }  // the bits of kRoundToInt

inline IntVec load_int(const int32_t *address) {
    IntVec v;
    std::memcpy(&v, address, sizeof v);
    return v;
}
inline void store_int(int32_t *address, IntVec v) { std::memcpy(address, &v, sizeof v); }
inline void store_codes(Code *address, IntVec v) {
    const auto codes = __builtin_convertvector(v, Vector<Code, kVecLanes>::type);
    std::memcpy(address, &codes, sizeof codes);
}
constexpr auto kOnes = static_cast<int32_t>(kTerms == 4 ? 0x01010101u : kTerms == 2 ? 0x00010001u : 0x01u);  // a word of codes 1

// Codes rint(x) + kZero of Count vectors, of which nothing is outside of the range of signed or unsigned bytes.
template <int32_t kZero, bool kUnsigned = kZero != 0, int Count>
ZOO_INLINE inline void store_rounded(Code *address, const Vec (&x)[Count]) {
#if defined(__AVX512F__)
    if constexpr (Count == 2 || Count == 4) {
        const auto words = [&](int i) ZOO_INLINE {
            return _mm512_add_epi16(_mm512_packs_epi32(_mm512_cvtps_epi32(x[i]), _mm512_cvtps_epi32(x[i + 1])), _mm512_set1_epi16(kZero));
        };
        const __m512i first = words(0), second = Count == 4 ? words(Count - 2) : first;
        const __m512i codes = kUnsigned ? _mm512_packus_epi16(first, second) : _mm512_packs_epi16(first, second);
        const __m512i ordered = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), codes);
        if constexpr (Count == 4) _mm512_storeu_si512(address, ordered);
        else _mm256_storeu_si256(reinterpret_cast<__m256i *>(address), _mm512_castsi512_si256(ordered));
        return;
    }
#endif
    unroll<Count>([&](auto v) ZOO_INLINE { store_codes(address + v.value * kVecLanes, rounded(x[v.value]) + kZero); });
}

// f(Index<vectors>, column) over `size` columns, four vectors at a time, then two, then one.
template <class F>
ZOO_INLINE inline void of_columns(int64_t size, F f) {
    int64_t j = 0;
    for (; j + 4 * kVecLanes <= size; j += 4 * kVecLanes) f(Index<4>{}, j);
    if (j + 2 * kVecLanes <= size) f(Index<2>{}, j), j += 2 * kVecLanes;
    if (j < size) f(Index<1>{}, j);
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
        for (int64_t g = 0; g < groups; ++g) add_products(offset, IntVec{} + kMiddles, load_int(words + g * columns + t));
        store_int(offsets + t, -offset);
    }
}
inline void query_offsets(const int32_t *words, int64_t groups, int64_t columns, int32_t *offsets) {
    if constexpr (kSignedQueries) std::memset(offsets, 0, static_cast<size_t>(columns) * 4);
    else zero_offsets(words, groups, columns, offsets);
}

// What is done between the products of every `groups` words: it shares the CPU with them.
template <class Do>
struct Meanwhile {
    int64_t groups;
    Do work;
    Meanwhile(int64_t every, Do what) : groups(every), work(what) {}
};

// Products of Count rows of codes, kOfQueries: of queries, with Wide vectors of packed columns, from `start` on (null: 0); then(row, part, sums) takes them.
template <int Count, int Wide, bool kOfQueries, class Then, class Do>
ZOO_INLINE inline void product_tile(const Code *x, int64_t x_stride, int64_t groups, const int32_t *w, int64_t stride, const int32_t *start, Then then,
                                    const Meanwhile<Do> &meanwhile) {
    const IntVec low = start ? load_int(start) : IntVec{}, high = start && Wide > 1 ? load_int(start + kVecLanes) : IntVec{};
    IntVec s00 = low, s01 = high, s10 = low, s11 = high, s20 = low, s21 = high, s30 = low, s31 = high;
    IntVec s40 = low, s41 = high, s50 = low, s51 = high, s60 = low, s61 = high, s70 = low, s71 = high;
    for (int64_t begin = 0, end; begin < groups; begin = end) {
        end = groups - begin < meanwhile.groups ? groups : begin + meanwhile.groups;
        for (int64_t g = begin; g < end; ++g, x += kTerms, w += stride) {
            const IntVec w0 = load_int(w), w1 = Wide > 1 ? load_int(w + kVecLanes) : w0;
            const auto add = [&](int64_t row, IntVec &a, IntVec &b) {
                const IntVec terms = IntVec{} + packed(x + row * x_stride);
                add_products_of<kOfQueries>(a, terms, w0);
                if constexpr (Wide > 1) add_products_of<kOfQueries>(b, terms, w1);
            };
            add(0, s00, s01);
            if constexpr (Count > 1) add(1, s10, s11);
            if constexpr (Count > 2) add(2, s20, s21), add(3, s30, s31);
            if constexpr (Count > 4) add(4, s40, s41), add(5, s50, s51), add(6, s60, s61), add(7, s70, s71);
        }
        meanwhile.work();
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

template <int Count, int Wide, bool kOfQueries, class Then>
inline void product_tile(const Code *x, int64_t x_stride, int64_t groups, const int32_t *w, int64_t stride, const int32_t *start, Then then) {
    product_tile<Count, Wide, kOfQueries>(x, x_stride, groups, w, stride, start, then, Meanwhile{groups, [] {}});
}

// `product_tile` over `columns`, whole sixteens, of packed rows [groups, stride]; then(row, column, sums).
template <int Count, bool kOfQueries, class Then, class... Do>
inline void product_rows(const Code *x, int64_t x_stride, int64_t groups, const int32_t *w, int64_t stride, int64_t columns,
                         const int32_t *start, Then then, const Do &...meanwhile) {
    int64_t column = 0;
    const auto take = [&](int row, int part, IntVec sums) { then(row, column + part * kVecLanes, sums); };
    for (; column + 2 * kVecLanes <= columns; column += 2 * kVecLanes)
        product_tile<Count, 2, kOfQueries>(x, x_stride, groups, w + column, stride, start ? start + column : nullptr, take, meanwhile...);
    for (; column < columns; column += kVecLanes)
        product_tile<Count, 1, kOfQueries>(x, x_stride, groups, w + column, stride, start ? start + column : nullptr, take, meanwhile...);
}

}  // namespace
}  // namespace zoo
