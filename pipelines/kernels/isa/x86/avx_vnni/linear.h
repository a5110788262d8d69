// Layers of bytes for AVX-VNNI: tiles whose sums, weights and inputs fill sixteen registers.
#pragma once
#include <cstring>

#include "isa/isa.h"
#include "isa/x86/avx2/epilogue.h"
#include "isa/x86/avx_vnni/bytes.h"
#include "isa/x86/bytes/linear.h"

namespace zoo {
namespace {

constexpr int kTile = 6;  // rows

inline Ints broadcast_four(const uint8_t *address) {
    int32_t four;
    std::memcpy(&four, address, 4);
    return same(four);
}

// The places of the bits of a mask of eight, in order.
struct BitPlaces {
    uint64_t of[256];
    constexpr BitPlaces() : of() {
        for (int mask = 0; mask < 256; ++mask)
            for (int bit = 0, count = 0; bit < 8; ++bit)
                if (mask >> bit & 1) of[mask] |= static_cast<uint64_t>(bit) << 8 * count++;
    }
};
constexpr BitPlaces kBitPlaces;

// Indices of the groups of four inputs that are not zero in all of these rows, in order; returns how many, see ../avx512/linear.h. `indices`: room for eight more.
inline int64_t active_groups(const uint8_t *x, int64_t x_stride, int64_t rows, int64_t groups, int32_t *indices) {
    int64_t count = 0;
    for (int64_t k = 0; k < groups; k += kInts) {
        const int64_t left = groups - k;
        Ints any = same(0);
        for (int64_t r = 0; r < rows; ++r) {
            const uint8_t *source = x + r * x_stride + 4 * k;
            any = _mm256_or_si256(any, left >= kInts ? load(source) : load_bytes(source, 4 * left));
        }
        const int mask = ~_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(any, same(0)))) & 0xFF;
        const __m256i places = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kBitPlaces.of[mask])));
        store(indices + count, add(places, same(static_cast<int32_t>(k))));
        count += __builtin_popcount(static_cast<unsigned>(mask));
    }
    return count;
}

// A tile of Rows rows, from `first` on, and `Panels` panels of the result.
template <int Rows, int Panels>
void tile(const Linear &l, const RowEpilogue &epilogue, const int8_t *weight, int64_t first, int64_t column, const uint8_t *x, int64_t x_stride,
          const int32_t *groups, int64_t count, void *out, int64_t out_stride) {
    const int64_t next = round_up(l.inputs, 4) * kPanel;  // panel
    Ints sums[Rows][2 * Panels];
    unroll<Rows>([&](auto r) ZOO_INLINE { unroll<2 * Panels>([&](auto v) ZOO_INLINE { sums[r.value][v.value] = same(0); }); });
    for (int64_t i = 0; i < count; ++i) {
        const int64_t group = groups[i];
        const uint8_t *source = x + 4 * group;
        const int8_t *w = weight + 4 * kPanel * group;
        if constexpr (Panels == 1) {
            const Ints low = load(w), high = load(w + 32);
            unroll<Rows>([&](auto r) ZOO_INLINE {
                const Ints four = broadcast_four(source + r.value * x_stride);
                dot_u8s8(sums[r.value][0], four, low), dot_u8s8(sums[r.value][1], four, high);
            });
        } else {
            Ints fours[Rows];
            unroll<Rows>([&](auto r) ZOO_INLINE { fours[r.value] = broadcast_four(source + r.value * x_stride); });
            unroll<2 * Panels>([&](auto v) ZOO_INLINE {
                const Ints weights = load(w + v.value / 2 * next + v.value % 2 * 32);
                unroll<Rows>([&](auto r) ZOO_INLINE { dot_u8s8(sums[r.value][v.value], fours[r.value], weights); });
            });
        }
    }
    unroll<Panels>([&](auto p) ZOO_INLINE {
        unroll<Rows>([&](auto r) ZOO_INLINE {
            finish(l, epilogue, sums[r.value][2 * p.value], sums[r.value][2 * p.value + 1], first + r.value, column + p.value * kPanel, out, out_stride);
        });
    });
}

inline void linear(const Linear &l, const RowEpilogue &epilogue, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride) {
    if (l.outputs <= kNarrow) return narrow(l, epilogue, x, x_stride, n, out, out_stride);
    constexpr int64_t kRows = 40 * kTile;  // whose active inputs are kept in a list at a time
    using Tile = decltype(&tile<1, 1>);
    constexpr Tile tiles[] = {nullptr, tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>, tile<5, 1>, tile<6, 1>};
    constexpr Tile wide_tiles[] = {nullptr, tile<1, 4>, tile<2, 2>, tile<3, 2>};
    constexpr int64_t wide_panels[] = {1, 4, 2, 2, 1, 1, 1};
    const int64_t groups = round_up(l.inputs, 4) / 4, room = round_up(groups, 16) + 16, panels = (l.outputs + kPanel - 1) / kPanel;
    auto *lists = static_cast<int32_t *>(kernel_scratch(kRows / kTile * room * 4));
    int64_t counts[kRows / kTile];
    for (int64_t first = 0; first < n; first += kRows) {
        const int64_t rows = n - first < kRows ? n - first : kRows, blocks = (rows + kTile - 1) / kTile;  // of as equal heights as can be
        const int64_t height = rows / blocks, higher = rows % blocks;
        const auto begin = [&](int64_t block) { return first + block * height + (block < higher ? block : higher); };
        for (int64_t b = 0; b < blocks; ++b)
            counts[b] = active_groups(x + begin(b) * x_stride, x_stride, height + (b < higher), groups, lists + b * room);
        const auto *weight = static_cast<const int8_t *>(l.weight);
        const int64_t together = higher ? 1 : wide_panels[height];
        for (int64_t p = 0, panel_count; p < panels; p += panel_count, weight += 4 * kPanel * groups * panel_count) {
            panel_count = panels - p >= together ? together : 1;
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t row = begin(b), high = height + (b < higher);
                (panel_count > 1 ? wide_tiles : tiles)[high](l, epilogue, weight, row, p * kPanel, x + row * x_stride, x_stride,
                                                                           lists + b * room, counts[b], out,
                                                      out_stride);
            }
        }
    }
}

}  // namespace
}  // namespace zoo
