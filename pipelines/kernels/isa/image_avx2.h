// The image kernels for AVX2: bytes and weights are widened to 16 bits for vpmaddwd, for vpmaddubsw saturates.
#pragma once
#include <immintrin.h>

#include "isa/image_kernels.h"

namespace zoo {
namespace {

// int16 panels of 16 columns: weights [inputs / 2][16][2], bias int32 [16], scale float [16].
int64_t dense_bytes(int64_t inputs, int64_t outputs) { return (2 * inputs + 8) * outputs; }

void pack_dense(const int8_t *weight, const int32_t *bias, const float *scale, int64_t inputs, int64_t outputs, void *packed) {
    auto *panel = static_cast<int16_t *>(packed);
    for (int64_t first = 0; first < outputs; first += 16, panel += (inputs + 4) * 16) {
        for (int64_t k = 0; k < inputs; ++k)
            for (int64_t j = 0; j < 16; ++j) panel[k / 2 * 32 + 2 * j + k % 2] = weight[k * outputs + first + j];
        std::memcpy(panel + 16 * inputs, bias + first, 64);
        std::memcpy(panel + 16 * (inputs + 2), scale + first, 64);
    }
}

// Sixteen sums as bytes.
inline __m128i bytes_of(__m256i low, __m256i high, const float *scale, const Requantization &b) {
    const auto rounded = [&](__m256i sum, const float *by) {
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(by)));
        return _mm256_min_epi32(_mm256_max_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(b.zero)), _mm256_set1_epi32(b.low)),
                                _mm256_set1_epi32(b.high));
    };
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(rounded(low, scale), rounded(high, scale + 8)), 0xD8);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// The sums of Count pixels, widened to words [Count][inputs], and 16 columns.
template <int Count, class Store>
inline void dense_tile(const int16_t *panel, const int16_t *words, int64_t inputs, Store store) {
    const int16_t *bias = panel + 16 * inputs;
    const auto *scale = reinterpret_cast<const float *>(bias + 32);
    const __m256i low = load(bias), high = load(bias + 16);
    __m256i a0 = low, a1 = high, b0 = low, b1 = high, c0 = low, c1 = high, d0 = low, d1 = high;
    for (int64_t k = 0; k < inputs; k += 2, panel += 32) {
        const __m256i w0 = load(panel), w1 = load(panel + 16);
        const auto add = [&](int64_t row, __m256i &first, __m256i &second) {
            int32_t pair;
            std::memcpy(&pair, words + row * inputs + k, 4);
            const __m256i x = _mm256_set1_epi32(pair);
            first = _mm256_add_epi32(first, _mm256_madd_epi16(x, w0));
            second = _mm256_add_epi32(second, _mm256_madd_epi16(x, w1));
        };
        add(0, a0, a1);
        if constexpr (Count > 1) add(1, b0, b1), add(2, c0, c1), add(3, d0, d1);
    }
    store(0, a0, a1, scale);
    if constexpr (Count > 1) store(1, b0, b1, scale), store(2, c0, c1, scale), store(3, d0, d1, scale);
}

// store(pixel, column, sums, sums, scale) of all pixels and sixteen columns each.
template <class Store>
inline void each_tile(const Dense &d, const uint8_t *const *in, int64_t n, Store store) {
    const int64_t inputs = d.stretches * d.stretch;
    const int64_t room = (1 << 16) / (2 * inputs) / 4 * 4, most = room < 4 ? 4 : room > 64 ? 64 : room;  // pixels widened at a time
    auto *words = static_cast<int16_t *>(kernel_scratch(most * inputs * 2 + 64));
    for (int64_t first = 0; first < n; first += most) {
        const int64_t count = n - first < most ? n - first : most;
        for (int64_t p = 0; p < count; ++p)
            for (int64_t s = 0; s < d.stretches; ++s) {
                const uint8_t *at = in[first + p] + d.offsets[s];
                int16_t *to = words + p * inputs + s * d.stretch;
                for (int64_t k = 0; k < d.stretch; ++k) to[k] = at[k];
            }
        const auto *panel = static_cast<const int16_t *>(d.packed);
        for (int64_t column = 0; column < d.outputs; column += 16, panel += (inputs + 4) * 16) {
            int64_t p = 0;
            const auto to = [&](int r, __m256i low, __m256i high, const float *scale) { store(first + p + r, column, low, high, scale); };
            for (; p + 4 <= count; p += 4) dense_tile<4>(panel, words + p * inputs, inputs, to);
            for (; p < count; ++p) dense_tile<1>(panel, words + p * inputs, inputs, to);
        }
    }
}

void dense(const Dense &d, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n) {
    each_tile(d, in, n, [&](int64_t p, int64_t column, __m256i low, __m256i high, const float *scale) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out[p] + column), bytes_of(low, high, scale, d.bytes));
        if (d.sum && d.other_first) sum_bytes(*d.sum, others[p] + column, out[p] + column, out[p] + column, 16);
        if (d.sum && !d.other_first) sum_bytes(*d.sum, out[p] + column, others[p] + column, out[p] + column, 16);
    });
}

void dense_floats(const Dense &d, const uint8_t *const *in, float *const *out, int64_t n) {
    each_tile(d, in, n, [&](int64_t p, int64_t column, __m256i low, __m256i high, const float *scale) {
        _mm256_storeu_ps(out[p] + column, _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_loadu_ps(scale)));
        _mm256_storeu_ps(out[p] + column + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(high), _mm256_loadu_ps(scale + 8)));
    });
}

// Blocks of 16 channels: weights int16 [taps / 2][16][2], bias int32 [16], scale float [16]. vpunpck joins 128 bits by 128 bits: the
// first of two vectors are channels 0 to 3 and 8 to 11 of a block.
int64_t depthwise_bytes(int64_t groups, int64_t channels) { return (8 * groups + 8) * channels; }

void pack_depthwise(const int8_t *weight, const int32_t *bias, const float *scale, int64_t groups, int64_t channels, void *packed) {
    auto *block = static_cast<int16_t *>(packed);
    for (int64_t first = 0; first < channels; first += 16, block += (4 * groups + 4) * 16)
        for (int64_t j = 0; j < 16; ++j) {
            const int64_t at = j / 4 % 2 * 8 + j / 8 * 4 + j % 4;
            for (int64_t t = 0; t < 4 * groups; ++t) block[t / 2 * 32 + 2 * at + t % 2] = weight[t * channels + first + j];
            std::memcpy(block + 64 * groups + 2 * at, bias + first + j, 4);
            std::memcpy(block + 64 * groups + 32 + 2 * at, scale + first + j, 4);
        }
}

void depthwise(const Depthwise &d, const uint8_t *x, uint8_t *out, int64_t n) {
    const auto wide = [](const uint8_t *at) { return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))); };
    const auto *block = static_cast<const int16_t *>(d.packed);
    for (int64_t c = 0; c < d.channels; c += 16, block += (4 * d.groups + 4) * 16) {
        const int16_t *bias = block + 64 * d.groups;
        const auto *scale = reinterpret_cast<const float *>(bias + 32);
        const uint8_t *from = x + c;
        uint8_t *to = out + c;
        for (int64_t p = 0; p < n; ++p, from += d.x_step, to += d.out_step) {
            __m256i low = load(bias), high = load(bias + 16);
            const int16_t *w = block;
            for (int64_t t = 0; t < 4 * d.groups; t += 2, w += 32) {
                const __m256i a = wide(from + d.offsets[t]), b = wide(from + d.offsets[t + 1]);
                low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), load(w)));
                high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), load(w + 16)));
            }
            const auto rounded = [&](__m256i sum, const float *by) {
                return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(by)));
            };
            const __m256i words = _mm256_adds_epi16(_mm256_packs_epi32(rounded(low, scale), rounded(high, scale + 8)),
                                                    _mm256_set1_epi16(static_cast<int16_t>(d.bytes.zero)));
            const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            const __m128i least = _mm_set1_epi8(static_cast<char>(d.bytes.low)), most = _mm_set1_epi8(static_cast<char>(d.bytes.high));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm_min_epu8(_mm_max_epu8(bytes, least), most));
        }
    }
}

// Sixteen bytes of the table at a time, for the bytes whose upper half names them.
void lookup(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n) {
    __m256i rows[16];
    for (int64_t h = 0; h < 16; ++h) rows[h] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table + 16 * h)));
    const __m256i half = _mm256_set1_epi8(0x0F);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i));
        const __m256i low = _mm256_and_si256(v, half), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), half);
        __m256i found = _mm256_shuffle_epi8(rows[0], low);
        for (int h = 1; h < 16; ++h) {
            const __m256i here = _mm256_cmpeq_epi8(high, _mm256_set1_epi8(static_cast<char>(h)));
            found = _mm256_blendv_epi8(found, _mm256_shuffle_epi8(rows[h], low), here);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), found);
    }
    for (; i < n; ++i) out[i] = table[x[i]];
}

int64_t products(int64_t rounds) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a, e = a, f = a, g = a, h = a;
    __m256i x = _mm256_set1_epi32(0x00020003);
    const __m256i w = _mm256_set1_epi32(0x007F0081);
    for (int64_t n = 0; n < rounds; ++n) {
        const auto add = [&](__m256i &sum) {
            asm volatile("" : "+x"(x));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, w));
        };
        add(a), add(b), add(c), add(d), add(e), add(f), add(g), add(h);
    }
    asm volatile("" ::"x"(a), "x"(b), "x"(c), "x"(d), "x"(e), "x"(f), "x"(g), "x"(h));
    return rounds * 8 * 16;
}

constexpr ImageKernels kImageKernels = {dense_bytes,    pack_dense, dense,     dense_floats, depthwise_bytes,
                                        pack_depthwise, depthwise,  sum_bytes, multiply_bytes, max_pool, mean,
                                        global_mean,    quantize_bytes, interleave, lookup,       products};

}  // namespace
}  // namespace zoo
