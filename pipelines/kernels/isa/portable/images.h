// The image kernels in plain C++.
#pragma once
#include "isa/images/floats.h"
#include "isa/images/kernels.h"

namespace zoo {
namespace {

// Transposed, [outputs][inputs], then bias and scale.
int64_t dense_bytes(int64_t inputs, int64_t outputs) { return (inputs + 8) * outputs; }

void pack_dense(const int8_t *weight, const int32_t *bias, const float *scale, int64_t inputs, int64_t outputs, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    for (int64_t k = 0; k < inputs; ++k)
        for (int64_t j = 0; j < outputs; ++j) out[j * inputs + k] = weight[k * outputs + j];
    std::memcpy(out + inputs * outputs, bias, static_cast<size_t>(4 * outputs));
    std::memcpy(out + (inputs + 4) * outputs, scale, static_cast<size_t>(4 * outputs));
}

template <class Store>
inline void each_sum(const Dense &d, const uint8_t *const *in, int64_t n, Store store) {
    const int64_t inputs = d.stretches * d.stretch;
    const auto *weight = static_cast<const int8_t *>(d.packed);
    const auto *bias = reinterpret_cast<const int32_t *>(weight + inputs * d.outputs);
    const auto *scale = reinterpret_cast<const float *>(bias + d.outputs);
    for (int64_t p = 0; p < n; ++p)
        for (int64_t j = 0; j < d.outputs; ++j) {
            int32_t sum = bias[j];
            const int8_t *row = weight + j * inputs;
            for (int64_t s = 0; s < d.stretches; ++s, row += d.stretch)
                for (int64_t k = 0; k < d.stretch; ++k) sum += in[p][d.offsets[s] + k] * row[k];
            store(p, j, sum, scale[j]);
        }
}

void dense(const Dense &d, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n) {
    each_sum(d, in, n, [&](int64_t p, int64_t j, int32_t sum, float scale) {
        const int32_t *gain = d.gains ? static_cast<const int32_t *>(d.gains) + j : nullptr;
        uint8_t byte = d.activation ? activated(sum, scale, *d.activation, gain) : requantize(sum, scale, d.bytes);
        if (d.sum) sum_bytes(*d.sum, d.other_first ? others[p] + j : &byte, d.other_first ? &byte : others[p] + j, &byte, 1);
        out[p][j] = byte;
    });
}

void dense_floats(const Dense &d, const uint8_t *const *in, float *const *out, const float *const *added, int64_t n) {
    each_sum(d, in, n, [&](int64_t p, int64_t j, int32_t sum, float scale) {
        const float value = static_cast<float>(sum) * scale;
        out[p][j] = added ? value + added[p][j] : value;
    });
}

// As they are, then bias and scale.
int64_t depthwise_bytes(int64_t groups, int64_t channels) { return (4 * groups + 8) * channels; }

void pack_depthwise(const int8_t *weight, const int32_t *bias, const float *scale, int64_t groups, int64_t channels, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    std::memcpy(out, weight, static_cast<size_t>(4 * groups * channels));
    std::memcpy(out + 4 * groups * channels, bias, static_cast<size_t>(4 * channels));
    std::memcpy(out + (4 * groups + 4) * channels, scale, static_cast<size_t>(4 * channels));
}

void depthwise(const Depthwise &d, const uint8_t *x, uint8_t *out, int64_t rows, int64_t n) {
    for (; rows > 1; --rows, x += d.x_row, out += d.out_row) depthwise(d, x, out, 1, n);
    const auto *weight = static_cast<const int8_t *>(d.packed);
    const auto *bias = reinterpret_cast<const int32_t *>(weight + 4 * d.groups * d.channels);
    const auto *scale = reinterpret_cast<const float *>(bias + d.channels);
    for (int64_t p = 0; p < n; ++p, x += d.x_step, out += d.out_step)
        for (int64_t begin = 0; begin < d.channels; begin += 16) {
            int32_t sums[16];
            std::memcpy(sums, bias + begin, sizeof sums);
            for (int64_t t = 0; t < 4 * d.groups; ++t) {
                const uint8_t *source = x + d.offsets[t] + begin;
                const int8_t *w = weight + t * d.channels + begin;
                for (int j = 0; j < 16; ++j) sums[j] += source[j] * w[j];
            }
            for (int j = 0; j < 16; ++j) out[begin + j] = requantize(sums[j], scale[begin + j], d.bytes);
        }
}

void lookup(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = table[x[i]];
}

constexpr auto lookup_floats = lookup_floats_alone;
constexpr auto add_bytes = sum_bytes;
constexpr auto multiply_bytes = multiply_pixels;

int64_t products(int64_t rounds) {
    int32_t a = 0, b = 0, c = 0, d = 0, x = 3;
    for (int64_t n = 0; n < rounds; ++n) {
        asm volatile("" : "+r"(x));
        a += x * x, b += x * 5, c += x * 7, d += x * 9;
        asm volatile("" ::"r"(a), "r"(b), "r"(c), "r"(d));
    }
    return rounds * 4;
}

}  // namespace
}  // namespace zoo
