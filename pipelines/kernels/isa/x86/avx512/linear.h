// Layers of bytes for AVX-512 with VNNI.
#pragma once
#include <cstring>

#include "isa/isa.h"
#include "isa/x86/avx512/bytes.h"
#include "isa/x86/bytes/linear.h"

namespace zoo {
namespace {

// Epilogue of a tile's `Count` rows and sixteen columns from `j` on; sums of a row each, in registers.
template <int Count>
[[gnu::always_inline]] inline void finish(const Linear &l, const RowEpilogue &epilogue, int64_t first, int64_t j, void *out, int64_t out_stride,
                                          __m512i s0, __m512i s1, __m512i s2, __m512i s3, __m512i s4, __m512i s5) {
    const int64_t left = l.outputs - j;
    if (left <= 0) return;
    const __m512i sums[6] = {s0, s1, s2, s3, s4, s5};
    const __mmask16 mask = left >= 16 ? 0xFFFF : static_cast<__mmask16>((1 << left) - 1);
    const __m512i bias = load(l.bias + j);
    const __m512 scale = _mm512_loadu_ps(l.scale + j);
    if (epilogue.scale) {
        const __m512 row_bias = _mm512_loadu_ps(epilogue.bias + j), zero = _mm512_setzero_ps();
#pragma GCC unroll 6
        for (int r = 0; r < Count; ++r) {
            const int64_t row = first + r;
            __m512 value = _mm512_cvtepi32_ps(_mm512_add_epi32(sums[r], bias));
            value = _mm512_mul_ps(value, _mm512_mul_ps(_mm512_set1_ps(epilogue.scale[row]), scale));
            value = _mm512_add_ps(value, row_bias);
            if (epilogue.relu) value = _mm512_max_ps(zero, value);  // in this order NaN stays
            if (epilogue.residual)
                value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, epilogue.residual + row * epilogue.residual_stride + j));
            _mm512_mask_storeu_ps(static_cast<float *>(out) + row * out_stride + j, mask, value);
        }
        return;
    }
    const __m512i zero_point = _mm512_set1_epi32(l.zero_point), lowest = _mm512_set1_epi32(l.low);
#pragma GCC unroll 6
    for (int r = 0; r < Count; ++r) {
        const int64_t offset = (first + r) * out_stride + j;
        const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(sums[r], bias)), scale);
        if (l.float_output) {
            _mm512_mask_storeu_ps(static_cast<float *>(out) + offset, mask, value);
        } else {
            const __m512i rounded = _mm512_max_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(value), zero_point), lowest);
            _mm512_mask_cvtusepi32_storeu_epi8(static_cast<uint8_t *>(out) + offset, mask, rounded);
        }
    }
}

inline __m512i broadcast_four(const uint8_t *address) {
    int32_t four;
    std::memcpy(&four, address, 4);
    return _mm512_set1_epi32(four);
}

// Indices of the groups of four inputs that are not zero in all of these rows, in order; returns how many. What comes out of a ReLU is
// mostly zeros, and zeros in all rows of a tile need no product.
inline int64_t active_groups(const uint8_t *x, int64_t x_stride, int64_t rows, int64_t groups, int32_t *indices) {
    int64_t count = 0;
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t k = 0; k < groups; k += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
        const __mmask16 mask = groups - k >= 16 ? 0xFFFF : static_cast<__mmask16>((1 << (groups - k)) - 1);
        __m512i any = _mm512_setzero_si512();
        for (int64_t r = 0; r < rows; ++r) any = _mm512_or_si512(any, _mm512_maskz_loadu_epi32(mask, x + r * x_stride + 4 * k));
        const __mmask16 nonzero = _mm512_test_epi32_mask(any, any);
        _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi32(nonzero, index));
        count += __builtin_popcount(nonzero);
    }
    return count;
}

// A tile of Count rows, from `first` on, and 64 columns of the result, all sums in registers: named ones, since gcc 12 keeps arrays of
// them in memory. A row or two alternate between two sets of sums, for the latency of vpdpbusd. They wait for weights from memory, of which
// the CPU's own prefetching takes half the rate: with Lines they fetch those of the next group. More rows bring `Lines` cache lines a group
// from `ahead` on into L2.
template <int Count, int Lines>
void tile(const Linear &l, const RowEpilogue &epilogue, const int8_t *weight, const char *ahead, int64_t first, int64_t column,
          const uint8_t *x, int64_t x_stride, const int32_t *groups, int64_t count, void *out, int64_t out_stride) {
#define SUMS(r) __m512i s##r##0 = _mm512_setzero_si512(), s##r##1 = s##r##0, s##r##2 = s##r##0, s##r##3 = s##r##0;
    SUMS(0) SUMS(1) SUMS(2) SUMS(3) SUMS(4) SUMS(5)
#undef SUMS
#define LOAD(i)                                         \
    const int64_t group = groups[i];                    \
    const uint8_t *source = x + 4 * group;                  \
    const int8_t *w = weight + 256 * group;             \
    const __m512i w0 = load(w), w1 = load(w + 64), w2 = load(w + 128), w3 = load(w + 192);
#define FETCH(i)                                     \
    for (int64_t line = 0; line < Lines; ++line)     \
        _mm_prefetch(reinterpret_cast<const char *>(weight) + 256 * groups[i] + 64 * line, _MM_HINT_T0);
#define ROW(r, set)                                          \
    if constexpr (Count > r) {                                \
        const __m512i four = broadcast_four(source + r * x_stride);   \
        dot_u8s8(s##set##0, four, w0);                       \
        dot_u8s8(s##set##1, four, w1);                       \
        dot_u8s8(s##set##2, four, w2);                       \
        dot_u8s8(s##set##3, four, w3);                       \
    }
    if constexpr (Count <= 2) {
        int64_t i = 0;
        for (; i + 2 <= count; i += 2) {
            { LOAD(i) ROW(0, 0) ROW(1, 1) FETCH(i + 1) }
            { LOAD(i + 1) ROW(0, 2) ROW(1, 3) FETCH(i + 2) }
        }
        if (i < count) { LOAD(i) ROW(0, 0) ROW(1, 1) FETCH(i + 1) }
        s00 = _mm512_add_epi32(s00, s20), s01 = _mm512_add_epi32(s01, s21), s02 = _mm512_add_epi32(s02, s22),
        s03 = _mm512_add_epi32(s03, s23);
        s10 = _mm512_add_epi32(s10, s30), s11 = _mm512_add_epi32(s11, s31), s12 = _mm512_add_epi32(s12, s32),
        s13 = _mm512_add_epi32(s13, s33);
    } else {
        for (int64_t i = 0; i < count; ++i) {
            for (int64_t line = 0; line < Lines; ++line) _mm_prefetch(ahead + 64 * (Lines * i + line), _MM_HINT_T1);
            LOAD(i) ROW(0, 0) ROW(1, 1) ROW(2, 2) ROW(3, 3) ROW(4, 4) ROW(5, 5)
        }
    }
#undef ROW
#undef FETCH
#undef LOAD
    finish<Count>(l, epilogue, first, column, out, out_stride, s00, s10, s20, s30, s40, s50);
    finish<Count>(l, epilogue, first, column + 16, out, out_stride, s01, s11, s21, s31, s41, s51);
    finish<Count>(l, epilogue, first, column + 32, out, out_stride, s02, s12, s22, s32, s42, s52);
    finish<Count>(l, epilogue, first, column + 48, out, out_stride, s03, s13, s23, s33, s43, s53);
}

inline void linear(const Linear &l, const RowEpilogue &epilogue, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride) {
    if (l.outputs <= kNarrow) return narrow(l, epilogue, x, x_stride, n, out, out_stride);
    constexpr int64_t kTile = 6, kRows = 240;  // rows whose active inputs are kept in a list at a time
    constexpr int64_t kCached = 1 << 16;       // bytes of weights that the caches next to the core often have
    using Tile = decltype(&tile<1, 0>);
    constexpr Tile tiles[][7] = {{nullptr, tile<1, 0>, tile<2, 0>, tile<3, 0>, tile<4, 0>, tile<5, 0>, tile<6, 0>},
                                 {nullptr, nullptr, nullptr, tile<3, 1>, tile<4, 1>, tile<5, 1>, tile<6, 1>},
                                 {nullptr, nullptr, nullptr, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>},
                                 {nullptr, tile<1, 4>, tile<2, 4>}};
    const int64_t groups = round_up(l.inputs, 4) / 4, room = round_up(groups, 16) + 16;
    auto *lists = static_cast<int32_t *>(kernel_scratch(kRows / kTile * room * 4));
    int64_t counts[kRows / kTile];
    for (int64_t first = 0; first < n; first += kRows) {
        const int64_t rows = n - first < kRows ? n - first : kRows, blocks = (rows + kTile - 1) / kTile;
        const int64_t height = blocks == 1 ? rows : rows / blocks, higher = rows - height * blocks;  // as equal heights as can be
        counts[0] = active_groups(x + first * x_stride, x_stride, height + (higher > 0), groups, lists);
        const bool whole = counts[0] == groups;  // rows without zeros: all blocks take the list of the first one
        for (int64_t b = 1, row = first + height + (higher > 0); b < blocks; row += height + (b < higher), ++b)
            counts[b] = whole ? groups : active_groups(x + row * x_stride, x_stride, height + (b < higher), groups, lists + b * room);
        // The blocks share in bringing the next 64 columns' weights, or what lies behind them, often the next layer's: the first block would
        // wait for memory else, and all others find them in L2. One block of several rows waits for memory anyway.
        const int64_t lines = blocks > 3 ? 1 : blocks > 1 ? 2 : 0;
        const bool fetches = rows < 3 && 4 * groups * l.outputs > kCached;
        if (fetches) lists[counts[0]] = static_cast<int32_t>(groups + (counts[0] ? lists[0] : 0));  // the first that the next columns read
        const Tile *const of = tiles[fetches ? 3 : lines];
        const auto *weight = static_cast<const int8_t *>(l.weight);
        for (int64_t column = 0; column < l.outputs; column += 64, weight += 256 * groups)
            for (int64_t b = 0, row = first; b < blocks; row += height + (b < higher), ++b)
                of[height + (b < higher)](l, epilogue, weight, reinterpret_cast<const char *>(weight) + (256 + 64 * (lines * b % 4)) * groups, row,
                                          column, x + row * x_stride, x_stride, lists + (whole ? 0 : b * room), counts[b], out, out_stride);
    }
}

}  // namespace
}  // namespace zoo
