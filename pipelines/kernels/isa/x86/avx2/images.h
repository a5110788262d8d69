// The image kernels for AVX2: bytes and weights are widened to 16 bits for vpmaddwd, for vpmaddubsw saturates.
#pragma once
#include <immintrin.h>

#include <type_traits>

#include "isa/images/floats.h"
#include "isa/images/kernels.h"
#include "isa/x86/avx2/activation.h"
#include "isa/x86/avx2/lookup.h"

namespace zoo {
namespace {

// Panels of 16 columns: weights, bias int32 [16], scale float [16], form int16 [16]. Where no two weights side by side are so large that
// vpmaddubsw saturates (those of a reduced range never are), the form is 1 and they are int8 [inputs / 4][16][4], else int16
// [inputs / 2][16][2].
int64_t dense_bytes(int64_t inputs, int64_t outputs) { return (2 * inputs + 10) * outputs; }
constexpr int64_t panel_size(int64_t inputs) { return (inputs + 5) * 16; }  // words

void pack_dense(const int8_t *weight, const int32_t *bias, const float *scale, int64_t inputs, int64_t outputs, void *packed) {
    auto *panel = static_cast<int16_t *>(packed);
    for (int64_t first = 0; first < outputs; first += 16, panel += panel_size(inputs)) {
        const auto weight_at = [&](int64_t k, int64_t j) -> int { return weight[k * outputs + first + j]; };
        bool narrow = inputs % 4 == 0;
        for (int64_t k = 0; k < inputs; k += 2)
            for (int64_t j = 0; j < 16; ++j) {
                const int a = weight_at(k, j), b = weight_at(k + 1, j);
                narrow &= 255 * ((a > 0 ? a : 0) + (b > 0 ? b : 0)) <= 32767 && 255 * ((a < 0 ? a : 0) + (b < 0 ? b : 0)) >= -32768;
            }
        auto *bytes = reinterpret_cast<int8_t *>(panel);
        for (int64_t k = 0; k < inputs; ++k)
            for (int64_t j = 0; j < 16; ++j)
                if (narrow) bytes[k / 4 * 64 + 4 * j + k % 4] = static_cast<int8_t>(weight_at(k, j));
                else panel[k / 2 * 32 + 2 * j + k % 2] = static_cast<int16_t>(weight_at(k, j));
        std::memcpy(panel + 16 * inputs, bias + first, 64);
        std::memcpy(panel + 16 * (inputs + 2), scale + first, 64);
        for (int64_t j = 0; j < 16; ++j) panel[16 * (inputs + 4) + j] = narrow;
    }
}

// Sixteen numbers, clipped, as bytes.
inline __m128i to_bytes(__m256i first, __m256i second, int32_t low, int32_t high) {
    const auto clip = [&](__m256i q) { return _mm256_min_epi32(_mm256_max_epi32(q, _mm256_set1_epi32(low)), _mm256_set1_epi32(high)); };
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(clip(first), clip(second)), 0xD8);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// Eight sums, scaled and rounded.
inline __m256i rounded(__m256i sum, const float *scale) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(scale)));
}

// Sixteen sums as bytes.
inline __m128i bytes_of(__m256i low, __m256i high, const float *scale, const Requantization &b) {
    const __m256i zero = _mm256_set1_epi32(b.zero);
    return to_bytes(_mm256_add_epi32(rounded(low, scale), zero), _mm256_add_epi32(rounded(high, scale + 8), zero), b.low, b.high);
}

// Sixteen sums as the bytes of their activation.
inline __m128i activated_bytes(__m256i low, __m256i high, const float *scale, const ActivationTable &t, const int16_t *gains) {
    const auto words_of = [](__m256i a, __m256i b) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8); };
    const __m256i words = words_of(rounded(low, scale), rounded(high, scale + 8));
    const ActivatedWords activated(t);
    const __m256i values = gains ? activated.of(words, words_of(load(gains), load(gains + 16))) : activated.of(words);
    return _mm_packus_epi16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
}

// `sum_bytes` of sixteen.
inline __m128i summed(const ByteSum &s, __m128i a, __m128i b) {
    const auto half = [&](__m128i x, __m128i y) {
        const auto floats = [](__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); };
        const __m256 inner = _mm256_fmadd_ps(floats(y), _mm256_set1_ps(s.b_ratio), _mm256_set1_ps(s.fixed));
        const __m256 sum = _mm256_fmadd_ps(floats(x), _mm256_set1_ps(s.a_ratio), inner);
        return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(sum, _mm256_set1_ps(-1024)), _mm256_set1_ps(1024)));
    };
    return to_bytes(half(a, b), half(_mm_srli_si128(a, 8), _mm_srli_si128(b, 8)), s.low, s.high);
}

// Products of a pixel's inputs, as many as four bytes hold, and 16 columns, added to their sums.
inline void add_products(const int16_t *words, const int16_t *panel, __m256i (&sums)[2]) {
    int32_t pair;
    std::memcpy(&pair, words, 4);
    for (int half = 0; half < 2; ++half)
        sums[half] = _mm256_add_epi32(sums[half], _mm256_madd_epi16(_mm256_set1_epi32(pair), load(panel + 16 * half)));
}

inline void add_products(const uint8_t *bytes, const int16_t *panel, __m256i (&sums)[2]) {
    int32_t four;
    std::memcpy(&four, bytes, 4);
    for (int half = 0; half < 2; ++half) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(four), load(panel + 16 * half));
        sums[half] = _mm256_add_epi32(sums[half], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
}

// store(pixel, column, sums, sums, scale) of all pixels and the panels of one form, which takes inputs as Input. So many inputs at a time
// that a panel's weights of them stay in L1 while the pixels pass, and so many pixels that their inputs and sums stay in L2.
template <class Input, class Store>
inline void each_tile_of(const Dense &d, const uint8_t *const *in, int64_t n, Store store) {
    constexpr int64_t kInputs = 512, kPixels = 64, kStep = 4 / sizeof(Input), kPanel = 16 * sizeof(Input) / 2;  // words an input
    const int64_t inputs = d.stretches * d.stretch, most = inputs < kInputs ? inputs : kInputs, pixels = n < kPixels ? n : kPixels;
    const int64_t width = inputs > most ? d.outputs : 0;  // sums of a pixel that wait for more inputs
    auto *waiting = static_cast<int32_t *>(kernel_scratch(pixels * (most * static_cast<int64_t>(sizeof(Input)) + width * 4) + 64));
    auto *line = reinterpret_cast<Input *>(waiting + pixels * width);
    for (int64_t begin = 0; begin < n; begin += pixels) {
        const int64_t count = n - begin < pixels ? n - begin : pixels;
        for (int64_t first = 0, input_count; first < inputs; first += input_count) {
            input_count = inputs - first < most ? inputs - first : most;
            for (int64_t p = 0; p < count; ++p)
                for (int64_t k = 0, stretch; k < input_count; k += stretch) {
                    const int64_t within = (first + k) % d.stretch;
                    const uint8_t *source = in[begin + p] + d.offsets[(first + k) / d.stretch] + within;
                    stretch = d.stretch - within < input_count - k ? d.stretch - within : input_count - k;
                    for (int64_t i = 0; i < stretch; ++i) line[p * input_count + k + i] = source[i];
                }
            const auto *panel = static_cast<const int16_t *>(d.packed);
            for (int64_t column = 0; column < d.outputs; column += 16, panel += panel_size(inputs)) {
                const int16_t *bias = panel + 16 * inputs, *scale = bias + 32;
                if ((scale[32] != 0) != (sizeof(Input) == 1)) continue;
                const auto tile = [&](int64_t p, auto how_many) {
                    constexpr int kCount = decltype(how_many)::value;
                    __m256i sums[kCount][2];
                    int32_t *kept = waiting + p * width + column;
                    for (int r = 0; r < kCount; ++r)
                        for (int half = 0; half < 2; ++half)
                            sums[r][half] = first ? load(kept + r * width + 8 * half) : load(bias + 16 * half);
                    const int16_t *weight = panel + first * kPanel;
                    for (int64_t k = 0; k < input_count; k += kStep, weight += 32)
                        for (int r = 0; r < kCount; ++r) add_products(line + (p + r) * input_count + k, weight, sums[r]);
                    for (int r = 0; r < kCount; ++r) {
                        if (first + input_count == inputs) {
                            store(begin + p + r, column, sums[r][0], sums[r][1], reinterpret_cast<const float *>(scale));
                        } else {
                            for (int half = 0; half < 2; ++half) zoo::store(kept + r * width + 8 * half, sums[r][half]);
                        }
                    }
                };
                int64_t p = 0;
                for (; p + 4 <= count; p += 4) tile(p, std::integral_constant<int, 4>());
                for (; p + 2 <= count; p += 2) tile(p, std::integral_constant<int, 2>());
                if (p < count) tile(p, std::integral_constant<int, 1>());
            }
        }
    }
}

template <class Store>
inline void each_tile(const Dense &d, const uint8_t *const *in, int64_t n, Store store) {
    const int64_t inputs = d.stretches * d.stretch;
    bool has_panels[2] = {};  // panels in words, in bytes
    for (int64_t i = 0; i < d.outputs / 16; ++i) has_panels[static_cast<const int16_t *>(d.packed)[i * panel_size(inputs) + 16 * (inputs + 4)] != 0] = true;
    if (has_panels[0]) each_tile_of<int16_t>(d, in, n, store);
    if (has_panels[1]) each_tile_of<uint8_t>(d, in, n, store);
}

void dense(const Dense &d, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n) {
    each_tile(d, in, n, [&](int64_t p, int64_t column, __m256i low, __m256i high, const float *scale) {
        const int16_t *gains = d.gains ? static_cast<const int16_t *>(d.gains) + column / 16 * panel_size(0) : nullptr;
        __m128i bytes = d.activation ? activated_bytes(low, high, scale, *d.activation, gains) : bytes_of(low, high, scale, d.bytes);
        if (d.sum) {
            const __m128i other = _mm_loadu_si128(reinterpret_cast<const __m128i *>(others[p] + column));
            bytes = d.other_first ? summed(*d.sum, other, bytes) : summed(*d.sum, bytes, other);
        }
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out[p] + column), bytes);
    });
}

void dense_floats(const Dense &d, const uint8_t *const *in, float *const *out, const float *const *added, int64_t n) {
    each_tile(d, in, n, [&](int64_t p, int64_t column, __m256i low, __m256i high, const float *scale) {
        const auto finish = [&](__m256i sums, int64_t half) {
            __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_loadu_ps(scale + half));
            if (added) value = _mm256_add_ps(value, _mm256_loadu_ps(added[p] + column + half));
            _mm256_storeu_ps(out[p] + column + half, value);
        };
        finish(low, 0), finish(high, 8);
    });
}

// Blocks of 16 channels: weights int16 [taps / 2][16][2], bias int32 [16], scale float [16]. vpunpck joins 128 bits by 128 bits: the
// first of two vectors are channels 0 to 3 and 8 to 11 of a block.
int64_t depthwise_bytes(int64_t groups, int64_t channels) { return (8 * groups + 8) * channels; }

void pack_depthwise(const int8_t *weight, const int32_t *bias, const float *scale, int64_t groups, int64_t channels, void *packed) {
    auto *block = static_cast<int16_t *>(packed);
    for (int64_t first = 0; first < channels; first += 16, block += (4 * groups + 4) * 16)
        for (int64_t j = 0; j < 16; ++j) {
            const int64_t place = j / 4 % 2 * 8 + j / 8 * 4 + j % 4;
            for (int64_t t = 0; t < 4 * groups; ++t) block[t / 2 * 32 + 2 * place + t % 2] = weight[t * channels + first + j];
            std::memcpy(block + 64 * groups + 2 * place, bias + first + j, 4);
            std::memcpy(block + 64 * groups + 32 + 2 * place, scale + first + j, 4);
        }
}

void depthwise(const Depthwise &d, const uint8_t *x, uint8_t *out, int64_t rows, int64_t n) {
    for (; rows > 1; --rows, x += d.x_row, out += d.out_row) depthwise(d, x, out, 1, n);
    const auto wide = [](const uint8_t *address) { return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(address))); };
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
            const __m256i words = _mm256_adds_epi16(_mm256_packs_epi32(rounded(low, scale), rounded(high, scale + 8)),
                                                    _mm256_set1_epi16(static_cast<int16_t>(d.bytes.zero)));
            const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            const __m128i least = _mm_set1_epi8(static_cast<char>(d.bytes.low)), most = _mm_set1_epi8(static_cast<char>(d.bytes.high));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm_min_epu8(_mm_max_epu8(bytes, least), most));
        }
    }
}

constexpr auto add_bytes = sum_bytes;
constexpr auto multiply_bytes = multiply_pixels;

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

}  // namespace
}  // namespace zoo
