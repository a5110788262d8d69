// Target attention, Dice, and layers of float32 on the vectors of an instruction set, see kernels.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa/sequences/kernels.h"
#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

constexpr int64_t kTogether = 4;  // items that pass a layer together

inline Vec logistic(Vec z) {
    const Vec e = exponential(z < Vec{} ? z : -z);
    return (z < Vec{} ? e : broadcast<Vec>(1.0f)) / (1.0f + e);
}

inline Vec activated(const Unit &u, Vec x, int64_t j) {
    const Vec slope = load_float<Vec>(u.slope + j);
    if (!u.scale) {
        const Vec scaled = x * slope;
        return x < Vec{} ? scaled : x;
    }
    const Vec share = logistic(x * load_float<Vec>(u.scale + j) + load_float<Vec>(u.shift + j));
    return x * (share * load_float<Vec>(u.rise + j) + slope);
}

void activate(const Unit &unit, const float *x, int64_t stride, int64_t width, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride)
        for (int64_t j = 0; j < width; j += kVecLanes) store_float(out + j, activated(unit, load_float<Vec>(x + j), j));
}

// y += x W for four rows: x [4, x_stride], weight [inputs, outputs], y [4, outputs]; inputs one after the other.
inline void multiply(const float *x, int64_t x_stride, const float *weight, int64_t inputs, int64_t outputs, float *y) {
    const float *x0 = x, *x1 = x + x_stride, *x2 = x1 + x_stride, *x3 = x2 + x_stride;
    for (int64_t j = 0; j < outputs; j += kVecLanes) {
        Vec a = load_float<Vec>(y + j), b = load_float<Vec>(y + outputs + j), c = load_float<Vec>(y + 2 * outputs + j),
            d = load_float<Vec>(y + 3 * outputs + j);
        for (int64_t k = 0; k < inputs; ++k) {
            const Vec w = load_float<Vec>(weight + k * outputs + j);
            a += w * x0[k], b += w * x1[k], c += w * x2[k], d += w * x3[k];
        }
        store_float(y + j, a), store_float(y + outputs + j, b), store_float(y + 2 * outputs + j, c), store_float(y + 3 * outputs + j, d);
    }
}

void attend(const TargetAttention &t, const uint32_t *ids, int64_t ids_stride, int64_t n, float *out, int64_t out_stride) {
    const int64_t places = round_up(t.count, kLanes), wide = t.size + t.first + t.second;
    auto *memory = static_cast<float *>(kernel_scratch((kTogether * wide + 2 * places) * 4));
    float *products = memory, *first = products + kTogether * t.size, *second = first + kTogether * t.first;
    float *weights = second + kTogether * t.second;
    auto *found = reinterpret_cast<uint32_t *>(weights + places);
    for (int64_t s = 0; s < n; ++s, ids += ids_stride, out += out_stride) {
        const uint32_t target = ids[t.column];
        const float *own = t.items + target * t.size, *query = t.queries + target * t.first;
        int64_t items = 0;
        for (int64_t p = 0; p < t.count; ++p)
            if (ids[t.begin + p] != t.padding) found[items++] = ids[t.begin + p];
        for (int64_t i = 0; i < items; i += kTogether) {
            for (int64_t r = 0; r < kTogether; ++r) {
                const uint32_t id = found[std::min(i + r, items - 1)];
                const float *item = t.items + id * t.size, *key = t.keys + id * t.first;
                for (int64_t j = 0; j < t.size; j += kVecLanes)
                    store_float(products + r * t.size + j, load_float<Vec>(item + j) * load_float<Vec>(own + j));
                for (int64_t j = 0; j < t.first; j += kVecLanes)
                    store_float(first + r * t.first + j, load_float<Vec>(key + j) + load_float<Vec>(query + j));
                std::memcpy(second + r * t.second, t.bias, static_cast<size_t>(t.second) * 4);
            }
            multiply(products, t.size, t.product, t.size_inputs, t.first, first);
            activate(t.one, first, t.first, t.first, kTogether, first);
            multiply(first, t.first, t.hidden, t.first_inputs, t.second, second);
            activate(t.two, second, t.second, t.second, kTogether, second);
            for (int64_t r = 0; r < kTogether && i + r < items; ++r) {
                Vec16 sums = broadcast<Vec16>(0.0f);
                for (int64_t j = 0; j < t.second; j += kLanes)
                    sums = sums + load_float<Vec16>(second + r * t.second + j) * load_float<Vec16>(t.score + j);
                weights[i + r] = reduce_add(sums) + t.score_bias;
            }
        }
        if (t.softmax && items) {
            float most = weights[0], sum = 0;
            for (int64_t p = 1; p < items; ++p) most = weights[p] > most ? weights[p] : most;
            for (int64_t p = 0; p < items; ++p) sum += weights[p] = exponential(broadcast<Vec>(weights[p] - most))[0];
            for (int64_t p = 0; p < items; ++p) weights[p] /= sum;
        } else
            for (int64_t p = 0; p < items; p += kVecLanes) store_float(weights + p, logistic(load_float<Vec>(weights + p)));
        for (int64_t j = 0; j < t.size; j += kVecLanes) {
            Vec total{};
            for (int64_t p = 0; p < items; ++p) total += load_float<Vec>(t.items + found[p] * t.size + j) * weights[p];
            store_float(out + j, total);
        }
    }
}

void layer(const FloatLayer &l, const float *x, int64_t stride, int64_t n, const float *residual, float *out) {
    for (int64_t s = 0; s < n; s += kTogether, x += kTogether * stride, out += kTogether * stride)
        for (int64_t j = 0; j < l.outputs; j += kVecLanes) {
            Vec a = load_float<Vec>(l.bias + j), b = a, c = a, d = a;
            for (int64_t k = 0; k < l.inputs; ++k) {
                const Vec w = load_float<Vec>(l.weight + k * l.outputs + j);
                a += w * x[k], b += w * x[stride + k], c += w * x[2 * stride + k], d += w * x[3 * stride + k];
            }
            const Vec sums[] = {a, b, c, d};
            for (int64_t r = 0; r < kTogether; ++r)
                store_float(out + r * stride + j, residual ? sums[r] + load_float<Vec>(residual + (s + r) * stride + j) : sums[r]);
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

void transpose(const float *x, int64_t stride, int64_t n, int64_t width, int64_t room, float *out) {
    using Four = Vector<float, 4>::type;
    using Index = Vector<int32_t, 4>::type;
    const Index low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, second{2, 3, 6, 7};
    for (int64_t p = 0; p < n; p += 4)
        for (int64_t j = 0; j < width; j += 4) {
            Four row[4];
            for (int64_t r = 0; r < 4; ++r) std::memcpy(&row[r], x + (p + r) * stride + j, sizeof row[r]);
            const Four a = __builtin_shuffle(row[0], row[1], low), b = __builtin_shuffle(row[0], row[1], high);
            const Four c = __builtin_shuffle(row[2], row[3], low), d = __builtin_shuffle(row[2], row[3], high);
            const Four columns[] = {__builtin_shuffle(a, c, first), __builtin_shuffle(a, c, second), __builtin_shuffle(b, d, first),
                                    __builtin_shuffle(b, d, second)};
            for (int64_t r = 0; r < 4; ++r) std::memcpy(out + (j + r) * room + p, &columns[r], sizeof columns[r]);
        }
}

constexpr SequenceKernels kSequences = {.attend = attend, .activate = activate, .layer = layer, .attend_heads = attend_heads, .add = add, .transpose = transpose};

}  // namespace
}  // namespace zoo
