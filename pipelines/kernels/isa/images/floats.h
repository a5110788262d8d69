// Kernels of image networks on float32 pixels of whole 16 channels, written once and lowered for each instruction set (see lanes.h);
// images/steps/floats.py defines them.
#pragma once
#include "isa/isa.h"
#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

void dequantize_bytes(const uint8_t *x, float scale, int32_t zero, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] - zero) * scale;
}

void add_floats(const float *a, const float *b, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

void scale_floats(const float *x, const float *gain, const float *bias, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * gain[i] + bias[i];
}

void multiply_floats(const float *a, const float *b, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

void weigh_floats(const float *const *xs, const float *weights, int64_t rows, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i += kVecLanes) {
        Vec sum = load_float<Vec>(xs[0] + i) * broadcast<Vec>(weights[0]);
        for (int64_t row = 1; row < rows; ++row) sum = sum + load_float<Vec>(xs[row] + i) * broadcast<Vec>(weights[row]);
        store_float(out + i, sum);
    }
}

void add_squares(const float *x, const float *mean, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] + (x[i] - mean[i]) * (x[i] - mean[i]);
}

// `Count` pixels of `Parts` vectors of channels, tap after tap.
template <int Count, int Parts>
inline void depthwise_tile(const FloatDepthwise &d, const float *x, const float *weight, const float *bias, float *out) {
    Vec sums[Count][Parts];
    for (int i = 0; i < Count; ++i)
        for (int part = 0; part < Parts; ++part) sums[i][part] = load_float<Vec>(bias + part * kVecLanes);
    for (int64_t row = 0; row < d.kernel_rows; ++row) {
        const float *at = x + row * d.tap_row;
        for (int64_t column = 0; column < d.kernel_columns; ++column, at += d.tap_column, weight += d.channels)
            for (int part = 0; part < Parts; ++part) {
                const Vec factor = load_float<Vec>(weight + part * kVecLanes);
                for (int i = 0; i < Count; ++i) sums[i][part] = sums[i][part] + load_float<Vec>(at + i * d.x_step + part * kVecLanes) * factor;
            }
    }
    for (int i = 0; i < Count; ++i)
        for (int part = 0; part < Parts; ++part) store_float(out + i * d.channels + part * kVecLanes, sums[i][part]);
}

// Sixteen channels after the other, so that the rows of a window stay in the cache.
void float_depthwise(const FloatDepthwise &d, const float *x, float *out, int64_t rows, int64_t width) {
    constexpr int kParts = 16 / kVecLanes > 2 ? 2 : 16 / kVecLanes, kCount = 8 / kParts;
    for (int64_t c = 0; c < d.channels; c += kParts * kVecLanes)
        for (int64_t y = 0; y < rows; ++y) {
            const float *from = x + y * d.x_row + c;
            float *to = out + y * d.out_row + c;
            int64_t at = 0;
            for (; at + kCount <= width; at += kCount) depthwise_tile<kCount, kParts>(d, from + at * d.x_step, d.weight + c, d.bias + c, to + at * d.channels);
            for (; at < width; ++at) depthwise_tile<1, kParts>(d, from + at * d.x_step, d.weight + c, d.bias + c, to + at * d.channels);
        }
}

}  // namespace
}  // namespace zoo
