// The first layer of a click program (`MixedLinear`): sums of int8 or int16 table rows and an int16 matrix product. Written once and lowered
// for each instruction set (see lanes.h); `Mixed` in recommenders/steps/layers.py defines what it computes.
#pragma once
#include "isa/isa.h"
#include "isa/vectors/words.h"

namespace zoo {
namespace {

// Sums of one sample's table rows as int16, `Chunks` times kChunk columns from `begin` on; `ahead`: rows that come into L2 meanwhile.
constexpr int64_t kChunk = 4 * kVecLanes;  // columns of a tile
#if defined(__AVX512F__)
#define ZOO_ZIP_LOW 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47
#define ZOO_ZIP_HIGH 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63
#elif defined(__AVX2__)
#define ZOO_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZOO_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#else
#define ZOO_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZOO_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#endif

// Bytes are added two by two as words: `all` holds even + 256 odd columns, `odd` the odd ones alone, both modulo 2^16, which is exact since
// the sums of signed entries fit int16.
template <int Chunks>
inline void add_rows(const MixedLinear &m, const uint8_t *const *rows, const uint8_t *const *ahead, int64_t begin, int16_t *sums) {
    using Unsigned = Vector<uint16_t, kWords>::type;
    Unsigned all[Chunks], odd[Chunks];
#pragma GCC unroll 4
    for (int c = 0; c < Chunks; ++c) all[c] = odd[c] = Unsigned{};
    for (int64_t f = 0; f < m.fields; ++f) {
        const uint8_t *row = rows[f] + begin, *next = ahead[f] + begin;
#pragma GCC unroll 4
        for (int c = 0; c < Chunks; ++c) {
            const Unsigned entries = load_as<Unsigned>(row + c * kChunk);
            if (c * kChunk % 64 == 0) __builtin_prefetch(next + c * kChunk, 0, 2);
            all[c] += entries;
            odd[c] += entries >> 8;
        }
    }
    const auto shift = static_cast<uint16_t>(128 * m.fields);
    for (int c = 0; c < Chunks; ++c) {
        const Words odds = reinterpret_cast<Words>(odd[c] - shift), evens = reinterpret_cast<Words>(all[c] - (odd[c] << 8) - shift);
        store_as(sums + c * kChunk, __builtin_shufflevector(evens, odds, ZOO_ZIP_LOW));
        store_as(sums + c * kChunk + kWords, __builtin_shufflevector(evens, odds, ZOO_ZIP_HIGH));
    }
}
#undef ZOO_ZIP_LOW
#undef ZOO_ZIP_HIGH
template <int Chunks>
inline void add_rows(const MixedLinear &m, const int16_t *const *rows, const int16_t *const *ahead, int64_t begin, int16_t *sums) {
    Words sum[2 * Chunks];
#pragma GCC unroll 8
    for (int w = 0; w < 2 * Chunks; ++w) sum[w] = Words{};
    for (int64_t f = 0; f < m.fields; ++f) {
        const int16_t *row = rows[f] + begin, *next = ahead[f] + begin;
#pragma GCC unroll 8
        for (int w = 0; w < 2 * Chunks; ++w) {
            sum[w] += load_as<Words>(row + w * kWords);
            if (w * kWords % 32 == 0) __builtin_prefetch(next + w * kWords, 0, 2);
        }
    }
#pragma GCC unroll 8
    for (int w = 0; w < 2 * Chunks; ++w) store_as(sums + w * kWords, sum[w]);
}

inline Vec result(const MixedLinear &m, IntVec sum, int64_t row, int64_t column) {
    const Vec value = to_float(sum) * load_float<Vec>(m.scale + column) + load_float<Vec>(m.bias + column);
    return m.added ? value + load_float<Vec>(m.added + row * m.stride + column) : value;
}

inline void store_columns(const MixedLinear &m, const Columns &to, int64_t first, IntVec sum, int64_t row, int64_t column) {
    const int64_t offset = row * to.stride + column - first;
    if (to.kind == Kind::kSums) return store_as(static_cast<int32_t *>(to.out) + offset, sum);
    const Vec value = result(m, sum, row, column);
    if (to.kind == Kind::kBytes)
        store_as(static_cast<uint8_t *>(to.out) + offset, __builtin_convertvector(round_clipped(value, 0, 255), QuarterBytes));
    else if (to.kind == Kind::kWords)
        store_words(static_cast<int16_t *>(to.out) + offset, round_clipped(value, to.relu ? 0 : -kCodeLimit, kCodeLimit));
    else
        store_float(static_cast<float *>(to.out) + offset, value);
}

// Four vectors of columns as bytes, from `column` on.
inline void store_bytes(const MixedLinear &m, int64_t row, int64_t column, uint8_t *out, IntVec a, IntVec b, IntVec c, IntVec d) {
    const auto rounded = [&](IntVec sum, int64_t vector) {
        return round_clipped(result(m, sum, row, column + vector * kVecLanes), 0, 255);
    };
    a = rounded(a, 0), b = rounded(b, 1), c = rounded(c, 2), d = rounded(d, 3);
#if defined(__AVX512F__)
    const __m512i halves = _mm512_packus_epi16(_mm512_packs_epi32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)),
                                               _mm512_packs_epi32(reinterpret_cast<__m512i>(c), reinterpret_cast<__m512i>(d)));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, halves));
#else
    store_as(out, __builtin_convertvector(a, QuarterBytes)), store_as(out + kVecLanes, __builtin_convertvector(b, QuarterBytes));
    store_as(out + 2 * kVecLanes, __builtin_convertvector(c, QuarterBytes));
    store_as(out + 3 * kVecLanes, __builtin_convertvector(d, QuarterBytes));
#endif
}

// Which pairs of inputs are not zero in all of these rows, in order; returns how many. `pairs`: room for kVecLanes more.
inline int64_t active_pairs(const int16_t *x, int64_t x_stride, int64_t rows, int64_t count, int32_t *pairs) {
    int64_t active = 0;
    for (int64_t p = 0; p < count; p += kVecLanes) {
        IntVec any{};
        for (int64_t r = 0; r < rows; ++r) any |= load_as<IntVec>(x + r * x_stride + 2 * p);
        const IntVec number = lane_numbers() + static_cast<int32_t>(p);
#if defined(__AVX512F__)
        const __m512i last = _mm512_set1_epi32(static_cast<int32_t>(count));
        const __mmask16 kept = _mm512_test_epi32_mask(reinterpret_cast<__m512i>(any), reinterpret_cast<__m512i>(any)) &
                               _mm512_cmplt_epi32_mask(reinterpret_cast<__m512i>(number), last);
        _mm512_storeu_si512(pairs + active, _mm512_maskz_compress_epi32(kept, reinterpret_cast<__m512i>(number)));
        active += __builtin_popcount(kept);
#else
        for (int64_t l = 0; l < kVecLanes; ++l) {
            pairs[active] = number[l];
            active += any[l] != 0 && number[l] < count;
        }
#endif
    }
    return active;
}

// Count rows from `row` on and up to four vectors of columns, sums in named variables (see x86/avx512/linear.h); base: int16 sums of these rows'
// table rows, kBlock columns apart, or null.
constexpr int64_t kBlock = 256;
template <int Count, int Vectors>
void mixed_tile(const MixedLinear &m, const int16_t *base, const int16_t *x, int64_t x_stride, int64_t row, int64_t column,
                const Columns &to, int64_t first, const int32_t *pairs, int64_t count) {
    const int16_t *weights = m.weight + column * 2 * m.pairs;
#define SUMS(r) IntVec s##r##0{}, s##r##1{}, s##r##2{}, s##r##3{};
    SUMS(0) SUMS(1) SUMS(2) SUMS(3)
#undef SUMS
#define ROW(r)                                                     \
    if constexpr (Count > r) {                                     \
        const Words pair = broadcast_pair(x + r * x_stride + 2 * p);  \
        dot_pairs(s##r##0, pair, w0);                              \
        if constexpr (Vectors > 1) dot_pairs(s##r##1, pair, w1);   \
        if constexpr (Vectors > 2) dot_pairs(s##r##2, pair, w2), dot_pairs(s##r##3, pair, w3); \
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t p = pairs[i];
        const int16_t *weight = weights + p * 4 * kWords;
        const Words w0 = load_as<Words>(weight), w1 = load_as<Words>(weight + kWords), w2 = load_as<Words>(weight + 2 * kWords),
                    w3 = load_as<Words>(weight + 3 * kWords);
        ROW(0) ROW(1) ROW(2) ROW(3)
    }
#undef ROW
    const auto whole = [&](IntVec sum, int64_t r, int64_t vector) {
        if (m.shared) sum += load_as<IntVec>(m.shared + column + vector * kVecLanes);
        if (m.own) sum += load_as<IntVec>(m.own[row + r] + column + vector * kVecLanes);
        return base ? sum + (load_words(base + r * kBlock + vector * kVecLanes) << m.shift) : sum;
    };
    const auto store = [&](IntVec sum, int64_t r, int64_t vector) {
        store_columns(m, to, first, whole(sum, r, vector), row + r, column + vector * kVecLanes);
    };
    if constexpr (Vectors > 2) {
        if (to.kind == Kind::kBytes) {
            auto *out = static_cast<uint8_t *>(to.out) + row * to.stride + column - first;
            const auto four = [&](int64_t r, IntVec a, IntVec b, IntVec c, IntVec d) {
                store_bytes(m, row + r, column, out + r * to.stride, whole(a, r, 0), whole(b, r, 1), whole(c, r, 2), whole(d, r, 3));
            };
            four(0, s00, s01, s02, s03);
            if constexpr (Count > 1) four(1, s10, s11, s12, s13);
            if constexpr (Count > 2) four(2, s20, s21, s22, s23);
            if constexpr (Count > 3) four(3, s30, s31, s32, s33);
            return;
        }
    }
#define STORE(r)                                                                  \
    if constexpr (Count > r) {                                                    \
        store(s##r##0, r, 0);                                                     \
        if constexpr (Vectors > 1) store(s##r##1, r, 1);                          \
        if constexpr (Vectors > 2) store(s##r##2, r, 2), store(s##r##3, r, 3);    \
    }
    STORE(0) STORE(1) STORE(2) STORE(3)
#undef STORE
}

// Count samples from `row` on: by blocks of columns the sums of their table rows, then the products. The rows of the samples after these
// are fetched meanwhile, so that memory and products are busy at the same time.
template <int Count, class T>
void mixed_rows(const MixedLinear &m, const T *table, const T *const *rows, const T *const *ahead, int16_t *base, const int16_t *x,
                int64_t x_stride, int64_t row, const Columns *to, const int32_t *pairs, int64_t count) {
    for (int64_t first = 0; first < m.stride; first = to->end, ++to)
        for (int64_t begin = first, end = first + to->width; begin < end; begin += kBlock) {
            const int64_t stop = begin + kBlock < end ? begin + kBlock : end;
            for (int64_t s = 0; table && s < Count; ++s) {
                int16_t *sums = base + s * kBlock;
                const T *const *own = rows + s * m.fields, *const *next = ahead + s * m.fields;
                int64_t column = begin;
                for (; column + 3 * kChunk < stop; column += 4 * kChunk) add_rows<4>(m, own, next, column, sums + column - begin);
                for (; column < stop; column += kChunk) add_rows<1>(m, own, next, column, sums + column - begin);
            }
            for (int64_t column = begin; column < stop; column += kChunk) {
                const int64_t left = end - column;
                const int16_t *sums = table ? base + column - begin : nullptr;
                if (left > 2 * kVecLanes) mixed_tile<Count, 4>(m, sums, x, x_stride, row, column, *to, first, pairs, count);
                else if (left > kVecLanes) mixed_tile<Count, 2>(m, sums, x, x_stride, row, column, *to, first, pairs, count);
                else mixed_tile<Count, 1>(m, sums, x, x_stride, row, column, *to, first, pairs, count);
            }
        }
}

template <class T>
void mixed_of(const MixedLinear &m, const T *table, const uint32_t *ids, const int16_t *x, int64_t x_stride, int64_t n, const Columns *columns) {
    constexpr int64_t kRows = 4;  // samples that share the loads of weights
    const int64_t room = round_up(m.pairs + 2 * kVecLanes, 16) * 4, pointers = kRows * m.fields, blocks = m.ahead + 1;
    auto *memory = static_cast<uint8_t *>(kernel_scratch(room + blocks * pointers * 8 + kRows * kBlock * 2));
    auto *pairs = reinterpret_cast<int32_t *>(memory);
    auto **row_pointers = reinterpret_cast<const T **>(memory + room);  // of `blocks` times kRows samples, in turn
    auto *base = reinterpret_cast<int16_t *>(row_pointers + blocks * pointers);
    const auto find = [&](int64_t first) {
        const T **rows = row_pointers + first / kRows % blocks * pointers;
        for (int64_t s = 0; s < (n - first < kRows ? n - first : kRows); ++s)
            for (int64_t f = 0; f < m.fields; ++f)
                rows[s * m.fields + f] = table + int64_t{ids[(first + s) * m.fields + f]} * m.stride;
        return rows;
    };
    int64_t active = m.chosen ? m.chosen_count : m.pairs;
    for (int64_t i = 0; i < active; ++i) pairs[i] = m.chosen ? m.chosen[i] : static_cast<int32_t>(i);
    for (int64_t first = 0; first < m.ahead * kRows && first < n; first += kRows) {
        const T **rows = find(first);
        const int64_t pointer_count = (n - first < kRows ? n - first : kRows) * m.fields;
        for (int64_t f = 0; f < (first ? pointer_count : m.fields); ++f)  // nobody has fetched the first sample's rows
            for (int64_t begin = 0; begin < m.stride * static_cast<int64_t>(sizeof(T)); begin += 64)
                __builtin_prefetch(reinterpret_cast<const char *>(rows[f]) + begin, 0, 2);
    }
    for (int64_t row = 0; row < n; row += kRows) {
        const int64_t count = n - row < kRows ? n - row : kRows;
        const int16_t *from = x + row * x_stride;
        if (m.sparse) active = active_pairs(from, x_stride, count, m.pairs, pairs);
        const int64_t later = row + m.ahead * kRows;
        const T **rows = row_pointers + row / kRows % blocks * pointers, **ahead = later < n ? find(later) : rows;
        const T **next = n - later >= count ? ahead : rows;  // of fewer samples than these none is fetched
        if (count == 4) mixed_rows<4>(m, table, rows, next, base, from, x_stride, row, columns, pairs, active);
        else if (count == 3) mixed_rows<3>(m, table, rows, next, base, from, x_stride, row, columns, pairs, active);
        else if (count == 2) mixed_rows<2>(m, table, rows, next, base, from, x_stride, row, columns, pairs, active);
        else mixed_rows<1>(m, table, rows, next, base, from, x_stride, row, columns, pairs, active);
    }
}

void mixed(const MixedLinear &m, const uint32_t *rows, const int16_t *x, int64_t x_stride, int64_t n, const Columns *columns) {
    if (m.wide_table) mixed_of(m, m.wide_table, rows, x, x_stride, n, columns);
    else mixed_of(m, m.table, rows, x, x_stride, n, columns);
}

}  // namespace
}  // namespace zoo
