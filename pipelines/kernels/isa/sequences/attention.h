// Dice, and layers of float32 on the vectors of an instruction set, see kernels.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa/sequences/kernels.h"
#include "isa/sequences/target_attention.h"

namespace zoo {
namespace {

constexpr int64_t kTogether = 4;  // items that pass a layer together

inline Vec gated(const Unit &u, Vec x, Vec standard, int64_t j) {
    const Vec share = logistic(standard * load_float<Vec>(u.scale + j) + load_float<Vec>(u.shift + j));
    return x * (share * load_float<Vec>(u.rise + j) + load_float<Vec>(u.slope + j));
}

inline Vec activated(const Unit &u, Vec x, int64_t j) {
    if (u.scale) return gated(u, x, x, j);
    const Vec scaled = x * load_float<Vec>(u.slope + j);
    return x < Vec{} ? scaled : x;
}

// One row, whose sigmoid reads normalized values; the sums are those of layer_norm of vectors/row_kernels.h.
inline void activate_normalized(const Unit &u, const float *x, int64_t width, float *out) {
    const int64_t whole = u.units / kLanes * kLanes;
    const float count = static_cast<float>(u.units);
    float tail[kLanes];  // of the last sixteen: 1 for columns, 0 for what pads them
    for (int64_t l = 0; l < kLanes; ++l) tail[l] = whole + l < u.units ? 1.0f : 0.0f;
    Vec16 total = broadcast<Vec16>(0), squares = total;
    for (int64_t j = 0; j < whole; j += kLanes) total = total + load_float<Vec16>(x + j);
    float remainder[kLanes] = {};
    std::copy_n(x + whole, u.units - whole, remainder);
    if (whole < u.units) total = total + load_float<Vec16>(remainder);
    const float mean = reduce_add(total) / count;
    for (int64_t j = 0; j < u.units; j += kLanes) {
        Vec16 deviation = (j == whole ? load_float<Vec16>(remainder) : load_float<Vec16>(x + j)) - broadcast<Vec16>(mean);
        if (j == whole) deviation = deviation * load_float<Vec16>(tail);
        squares = squares + deviation * deviation;
    }
    const float inverse = 1.0f / std::sqrt(reduce_add(squares) / count + u.epsilon);
    for (int64_t j = 0; j < width; j += kVecLanes) {
        const Vec values = load_float<Vec>(x + j);
        store_float(out + j, gated(u, values, (values - mean) * inverse, j));
    }
}

void activate(const Unit &unit, const float *x, int64_t stride, int64_t width, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride) {
        if (unit.epsilon > 0) {
            activate_normalized(unit, x, width, out);
            continue;
        }
        for (int64_t j = 0; j < width; j += kVecLanes) store_float(out + j, activated(unit, load_float<Vec>(x + j), j));
    }
}

void layer(const FloatLayer &l, const float *x, int64_t stride, int64_t n, const float *residual, float *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; s += kTogether, x += kTogether * stride, out += kTogether * out_stride)
        for (int64_t j = 0; j < l.outputs; j += kVecLanes) {
            Vec a = load_float<Vec>(l.bias + j), b = a, c = a, d = a;
            for (int64_t k = 0; k < l.inputs; ++k) {
                const Vec w = load_float<Vec>(l.weight + k * l.outputs + j);
                a += w * x[k], b += w * x[stride + k], c += w * x[2 * stride + k], d += w * x[3 * stride + k];
            }
            const Vec sums[] = {a, b, c, d};
            for (int64_t r = 0; r < kTogether; ++r)
                store_float(out + r * out_stride + j, residual ? sums[r] + load_float<Vec>(residual + (s + r) * out_stride + j) : sums[r]);
        }
}

void attend_heads(const float *q, const float *keys, const float *values, int64_t count, int64_t heads, int64_t size, float *scores, float *out) {
    const int64_t room = round_up(count, kLanes);
    for (int64_t h = 0; h < heads; ++h, q += size, keys += size * room, values += size * room, out += size) {
        for (int64_t t = 0; t < room; t += kVecLanes) {
            Vec sum{};
            for (int64_t d = 0; d < size; ++d) sum += load_float<Vec>(keys + d * room + t) * q[d];
            store_float(scores + t, sum);
        }
        const float inverse = softmax(scores, count);
        for (int64_t d = 0; d < size; ++d) {
            Vec16 sum = broadcast<Vec16>(0);
            for (int64_t t = 0; t < room; t += kLanes) sum = sum + load_float<Vec16>(scores + t) * load_float<Vec16>(values + d * room + t);
            out[d] = reduce_add(sum) * inverse;
        }
    }
}

void add(const float *x, const float *y, int64_t count, float *out) {
    for (int64_t j = 0; j < count; j += kVecLanes) store_float(out + j, load_float<Vec>(x + j) + load_float<Vec>(y + j));
}

}  // namespace
}  // namespace zoo
