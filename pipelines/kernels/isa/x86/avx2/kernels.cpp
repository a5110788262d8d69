// The kernels for AVX2. There is no exact u8 x s8 product here (vpmaddubsw saturates), so both are widened to 16 bits for vpmaddwd.
#include <cstring>

#include "isa/isa.h"
#include "isa/vectors/lanes.h"
#include "isa/x86/avx2/epilogue.h"
#include "isa/x86/cpu.h"

namespace zoo {
namespace {

// int16 panels of 16 columns: [outputs / 16][inputs / 2][16][2].
int64_t packed_bytes(int64_t inputs, int64_t outputs) { return round_up(outputs, 16) * round_up(inputs, 2) * 2; }

void pack_linear(const int8_t *weight, int64_t inputs, int64_t outputs, void *packed) {
    auto *out = static_cast<int16_t *>(packed);
    std::memset(out, 0, static_cast<size_t>(packed_bytes(inputs, outputs)));
    for (int64_t k = 0; k < inputs; ++k)
        for (int64_t j = 0; j < outputs; ++j)
            out[((j / 16) * (round_up(inputs, 2) / 2) + k / 2) * 32 + (j % 16) * 2 + k % 2] = weight[k * outputs + j];
}

void unpack_column(const void *packed, int64_t inputs, int64_t column, int8_t *weight) {
    const auto *from = static_cast<const int16_t *>(packed) + column / 16 * round_up(inputs, 2) * 16 + column % 16 * 2;
    for (int64_t k = 0; k < inputs; ++k) weight[k] = static_cast<int8_t>(from[k / 2 * 32 + k % 2]);
}

void gather_columns(const void *packed, int64_t inputs, const int32_t *columns, int64_t count, void *gathered) {
    gather_panels<16>(static_cast<const int32_t *>(packed), round_up(inputs, 2) / 2, columns, count, static_cast<int32_t *>(gathered));
}

// A tile of Count rows, from `first` on, and 16 columns of the result; pairs: the rows' inputs, widened to int16.
template <int Count>
void tile(const Linear &l, const RowEpilogue &epilogue, const int16_t *weight, int64_t first, int64_t column, const int16_t *pairs,
          void *out, int64_t out_stride) {
    const int64_t width = round_up(l.inputs, 2);
    __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0, c0 = a0, c1 = a0, d0 = a0, d1 = a0;  // two of each row
    for (int64_t k = 0; k < width; k += 2, weight += 32) {
        const __m256i w0 = load(weight), w1 = load(weight + 16);
        const auto add = [&](int64_t row, __m256i &low, __m256i &high) {
            int32_t pair;
            std::memcpy(&pair, pairs + row * width + k, 4);
            const __m256i x = _mm256_set1_epi32(pair);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(x, w0));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(x, w1));
        };
        add(0, a0, a1);
        if constexpr (Count > 1) add(1, b0, b1), add(2, c0, c1), add(3, d0, d1);
    }
    const __m256i sums[4][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {d0, d1}};
    for (int r = 0; r < Count; ++r) finish(l, epilogue, sums[r][0], sums[r][1], first + r, column, out, out_stride);
}

void linear(const Linear &l, const RowEpilogue &epilogue, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride) {
    const int64_t width = round_up(l.inputs, 2);
    constexpr int64_t kRows = 64;  // widened at a time
    auto *words = static_cast<int16_t *>(kernel_scratch(kRows * width * 2));
    for (int64_t first = 0; first < n; first += kRows) {
        const int64_t count = n - first < kRows ? n - first : kRows;
        for (int64_t r = 0; r < count; ++r) {
            for (int64_t k = 0; k < l.inputs; ++k) words[r * width + k] = x[(first + r) * x_stride + k];
            if (width > l.inputs) words[r * width + l.inputs] = 0;
        }
        const auto *weight = static_cast<const int16_t *>(l.weight);
        for (int64_t column = 0; column < l.outputs; column += 16, weight += 16 * width) {
            int64_t r = 0;
            const auto run = [&](auto function, int64_t count_of_tile) {
                function(l, epilogue, weight, first + r, column, words + r * width, out, out_stride);
                r += count_of_tile;
            };
            while (r + 4 <= count) run(tile<4>, 4);
            while (r < count) run(tile<1>, 1);
        }
    }
}

// A weight is 2^12 high + low; one dword holds the high or the low parts of two weights.
void pack_weights(int32_t *four) {
    int16_t parts[8];
    for (int i = 0; i < 4; ++i) {
        parts[i / 2 * 4 + i % 2] = static_cast<int16_t>(four[i] >> 12);
        parts[i / 2 * 4 + 2 + i % 2] = static_cast<int16_t>(four[i] & 0xFFF);
    }
    std::memcpy(four, parts, sizeof parts);
}

void resample(const Resampling &r, int64_t outputs, const uint8_t *in, int64_t in_stride, int64_t width, uint8_t *out, int64_t out_stride) {
    const __m256i rounding = _mm256_set1_epi32(1 << (kWeightBits - 1)), zero = _mm256_setzero_si256();
    for (int64_t i = 0; i < outputs; ++i, out += out_stride)
        for (int64_t begin = 0; begin < width; begin += 32) {
            const uint8_t *row = in + r.first[i] * in_stride + begin;
            const int32_t *weight = r.weights + i * r.stride;
            __m256i h0 = zero, h1 = zero, h2 = zero, h3 = zero, l0 = rounding, l1 = rounding, l2 = rounding, l3 = rounding;
            for (int64_t t = 0; t < 2 * r.tap_groups[i]; ++t, row += 2 * in_stride, weight += 2) {
                const __m256i a = load(row), b = load(row + in_stride);
                const __m256i high = _mm256_set1_epi32(weight[0]), low = _mm256_set1_epi32(weight[1]);
                const __m256i ab = _mm256_unpacklo_epi8(a, b),
                              cd = _mm256_unpackhi_epi8(a, b);  // pairs of pixels, columns as packs wants them
                const auto add = [&](__m256i pair, __m256i &h, __m256i &l) {
                    h = _mm256_add_epi32(h, _mm256_madd_epi16(pair, high));
                    l = _mm256_add_epi32(l, _mm256_madd_epi16(pair, low));
                };
                add(_mm256_unpacklo_epi8(ab, zero), h0, l0);
                add(_mm256_unpackhi_epi8(ab, zero), h1, l1);
                add(_mm256_unpacklo_epi8(cd, zero), h2, l2);
                add(_mm256_unpackhi_epi8(cd, zero), h3, l3);
            }
            const auto result = [](__m256i h, __m256i l) {
                return _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(h, 12), l), kWeightBits);
            };
            const __m256i first = _mm256_packs_epi32(result(h0, l0), result(h1, l1)),
                          second = _mm256_packs_epi32(result(h2, l2), result(h3, l3));
            _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + begin), _mm256_packus_epi16(first, second));
        }
}

}  // namespace
}  // namespace zoo

#include "isa/table.h"  // behind the kernels

namespace zoo {
const Isa ZOO_SET::kIsa = table_of("avx2", "AVX2, FMA and F16C, without dot products of bytes", has_avx2);
}  // namespace zoo
