// Kernels of click programs on the fields of a sample: gates, and attention between fields. Lanes are the fields that ask; sums over the
// fields that answer are sums of integers. Written once and lowered for each instruction set (see lanes.h); steps/fields.py defines them.
#pragma once
#include "isa/isa.h"
#include "isa/vectors/words.h"

namespace zoo {
namespace {

inline Vec sigmoid_of(Vec x) {
    const Vec e = exponential(x < Vec{} ? x : -x);
    return (x < Vec{} ? e : broadcast<Vec>(1.0f)) / (1.0f + e);
}

void sigmoid_product(const float *x, const float *gates, int64_t stride, int64_t width, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, gates += stride, out += stride)
        for (int64_t j = 0; j < width; j += kVecLanes)
            store_float(out + j, load_float<Vec>(x + j) * sigmoid_of(load_float<Vec>(gates + j)));
}

// The sigmoid, quadratic in |x| times `scale` between integers; curve: c0, c1 and c2 of 32 segments, of which the last is from 31 on.
inline Vec sigmoid_by(const float *curve, float scale, Vec x) {
    const Vec t = (x < Vec{} ? -x : x) * scale;
    const Vec clipped = t < 31.0f ? t : broadcast<Vec>(31.0f);
    const IntVec segment = __builtin_convertvector(clipped, IntVec);
    const Vec y = entries(curve, segment) + clipped * (entries(curve + 32, segment) + clipped * entries(curve + 64, segment));
    return x < Vec{} ? 1.0f - y : y;
}

void gate_codes(const int16_t *x, int64_t x_stride, const float *gates, int64_t gates_stride, const float *curve, float scale,
                const float *factors, int64_t width, int64_t n, int16_t *out, int64_t out_stride, uint8_t *bytes, int64_t bytes_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride, gates += gates_stride)
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec gated = to_float(load_words(x + j)) * sigmoid_by(curve, scale, load_float<Vec>(gates + j));
            if (out) store_words(out + s * out_stride + j, round_clipped(gated, -kCodeLimit, kCodeLimit));
            if (bytes) store_signed(bytes + s * bytes_stride + j, gated * load_float<Vec>(factors + j));
        }
}

constexpr int64_t kMostVectors = 128 / kVecLanes;  // of the lanes of all fields

// Dots of `Rows` rows of pairs, each pair of a row `w_step` behind the one before, with one or two vectors of lanes of x.
template <int Rows, int Vectors>
inline void pair_tile(const int32_t *const *w, int64_t w_step, const int32_t *x, int64_t x_step, int64_t pairs, IntVec (*sums)[kMostVectors]) {
    IntVec a0{}, a1{}, b0{}, b1{}, c0{}, c1{}, d0{}, d1{};
    for (int64_t p = 0; p < pairs; ++p) {
        const Words x0 = load_as<Words>(x + p * x_step), x1 = Vectors > 1 ? load_as<Words>(x + p * x_step + kVecLanes) : Words{};
#define ROW(r, s0, s1)                                                                  \
    if constexpr (Rows > r) {                                                           \
        const Words pair = reinterpret_cast<Words>(w[r][p * w_step] - IntVec{});        \
        dot_pairs(s0, pair, x0);                                                        \
        if constexpr (Vectors > 1) dot_pairs(s1, pair, x1);                             \
    }
        ROW(0, a0, a1) ROW(1, b0, b1) ROW(2, c0, c1) ROW(3, d0, d1)
#undef ROW
    }
    sums[0][0] = a0;
    if constexpr (Vectors > 1) sums[0][1] = a1;
    if constexpr (Rows > 1) sums[1][0] = b0, sums[2][0] = c0, sums[3][0] = d0;
    if constexpr (Rows > 1 && Vectors > 1) sums[1][1] = b1, sums[2][1] = c1, sums[3][1] = d1;
}

// store(row, lane, sums) for every row 0 .. rows - 1 and every vector of lanes, rows in order; row r begins at w + r * w_row, the lanes of a
// pair of x `x_step` behind those of the one before.
template <class Store>
inline void pair_products(const int32_t *w, int64_t rows, int64_t w_row, int64_t w_step, const int32_t *x, int64_t x_step, int64_t lanes,
                          int64_t pairs, Store store) {
    IntVec sums[4][kMostVectors];
    const int32_t *row[4];
    for (int64_t r = 0; r < rows;) {
        const int64_t count = rows - r >= 4 ? 4 : 1;
        for (int64_t k = 0; k < count; ++k) row[k] = w + (r + k) * w_row;
        for (int64_t l = 0; l < lanes; l += 2 * kVecLanes) {
            auto *to = reinterpret_cast<IntVec(*)[kMostVectors]>(&sums[0][l / kVecLanes]);
            const bool two = l + kVecLanes < lanes;
            if (count == 4)
                two ? pair_tile<4, 2>(row, w_step, x + l, x_step, pairs, to) : pair_tile<4, 1>(row, w_step, x + l, x_step, pairs, to);
            else
                two ? pair_tile<1, 2>(row, w_step, x + l, x_step, pairs, to) : pair_tile<1, 1>(row, w_step, x + l, x_step, pairs, to);
        }
        for (int64_t k = 0; k < count; ++k)
            for (int64_t l = 0; l < lanes; l += kVecLanes) store(r + k, l, sums[k][l / kVecLanes]);
        r += count;
    }
}

inline IntVec paired(IntVec even, IntVec odd) { return (even & 0xFFFF) | (odd << 16); }

constexpr int64_t kLanesTogether = 96;  // fields of several samples that pass the layers together: their vectors are full

// Attention of one sample. q, k, residual: its lanes among those of all samples, `stride` a row; v: of its own, [width, room].
inline void attend_fields(const FieldAttention &a, const int32_t *q, const int32_t *k, const int16_t *v, int64_t room, const float *residual,
                          int64_t stride, int32_t *scores, int32_t *weights, float *inverse, int16_t *out) {
    const int64_t fields = a.fields, lanes = round_up(fields, kVecLanes), half = (a.size + 1) / 2, others = (fields + 1) / 2;
    for (int64_t h = 0; h < a.heads; ++h) {
        pair_products(k + h * half * stride, fields, 1, stride, q + h * half * stride, stride, lanes, half,
                      [&](int64_t j, int64_t l, IntVec sums) { store_as(scores + j * lanes + l, sums); });
        for (int64_t l = 0; l < lanes; l += kVecLanes) {
            IntVec most = load_as<IntVec>(scores + l), sum{};
            for (int64_t j = 1; j < fields; ++j) {
                const IntVec next = load_as<IntVec>(scores + j * lanes + l);
                most = next > most ? next : most;
            }
            for (int64_t j = 0; j < fields; j += 2) {
                IntVec e[2]{};
                for (int64_t o = 0; o < 2 && j + o < fields; ++o) {
                    const Vec below = to_float(load_as<IntVec>(scores + (j + o) * lanes + l) - most) * a.score;
                    e[o] = round_clipped(exponential(below) * a.most, 0, a.most);
                    sum += e[o];
                }
                store_as(weights + j / 2 * lanes + l, paired(e[0], e[1]));
            }
            store_float(inverse + l, a.value / to_float(sum));
        }
        pair_products(reinterpret_cast<const int32_t *>(v) + h * a.size * (room / 2), a.size, room / 2, 1, weights, lanes, lanes, others,
                      [&](int64_t c, int64_t l, IntVec sums) {
                          Vec y = to_float(sums) * load_float<Vec>(inverse + l);
                          if (residual) y += load_float<Vec>(residual + (h * a.size + c) * stride + l);
                          store_words(out + (h * a.size + c) * fields + l, round_clipped(y, a.relu ? 0 : -kCodeLimit, kCodeLimit));
                      });
    }
}

void field_attention(const FieldAttention &a, const int16_t *x, int64_t x_stride, int64_t n, int16_t *out, int64_t out_stride) {
    const int64_t fields = a.fields, own = round_up(fields, kVecLanes), inputs = (a.inputs + 1) / 2, half = (a.size + 1) / 2;
    const int64_t width = a.heads * a.size, together = fields < kLanesTogether ? kLanesTogether / fields : 1;
    const int64_t stride = round_up(together * fields, kVecLanes) + kVecLanes;  // the lanes of a sample may be read up to whole vectors
    const int64_t sizes[] = {inputs * stride, a.heads * half * stride, a.heads * half * stride, fields * own, (fields + 1) / 2 * own,
                             width * stride, own, width * stride / 2, width * own / 2};
    constexpr int kParts = sizeof(sizes) / sizeof(sizes[0]);
    int64_t all = 0;
    for (const int64_t length : sizes) all += round_up(length, kVecLanes);
    auto *memory = static_cast<int32_t *>(kernel_scratch(all * 4));
    int32_t *parts[kParts];
    for (int i = 0; i < kParts; ++i) parts[i] = memory, memory += round_up(sizes[i], kVecLanes);
    int32_t *turned = parts[0], *q = parts[1], *k = parts[2], *scores = parts[3], *weights = parts[4];
    auto *residual = reinterpret_cast<float *>(parts[5]), *inverse = reinterpret_cast<float *>(parts[6]);
    auto *v = reinterpret_cast<int16_t *>(parts[7]), *values = reinterpret_cast<int16_t *>(parts[8]);
    std::memset(parts[0], 0, static_cast<size_t>(all) * 4);
    for (int64_t first = 0; first < n; first += together) {
        const int64_t count = n - first < together ? n - first : together, lanes = round_up(count * fields, kVecLanes);
        for (int64_t s = 0; s < count; ++s) {
            const int16_t *row = x + (first + s) * x_stride;
            int32_t *to = turned + s * fields;
            for (int64_t p = 0; p < inputs; ++p)
                if (a.begins)
                    for (int64_t f = 0; f < fields; ++f) std::memcpy(to + p * stride + f, row + a.begins[f] + 2 * p, 4);
                else
                    for (int64_t l = 0; l < fields; l += kVecLanes)
                        store_as(to + p * stride + l, paired(load_words(row + 2 * p * fields + l),
                                                             2 * p + 1 < a.inputs ? load_words(row + (2 * p + 1) * fields + l) : IntVec{}));
        }
        if (a.begins && a.inputs % 2)
            for (int64_t l = 0; l < lanes; ++l) turned[(inputs - 1) * stride + l] &= 0xFFFF;
        // y of the columns from `from` on, a part or a head of one
        const auto project = [&](int64_t from, int64_t columns, auto store) {
            pair_products(a.weight + from * inputs, columns, inputs, 1, turned, stride, lanes, inputs, [&](int64_t c, int64_t l, IntVec sums) {
                store(c, l, to_float(sums) * a.scale[from + c] + a.bias[from + c]);
            });
        };
        const auto codes = [](Vec y) { return round_clipped(y, -kCodeLimit, kCodeLimit); };
        for (int64_t head = 0; head < 2 * a.heads; ++head) {
            int32_t *part = (head < a.heads ? q : k) + head % a.heads * half * stride;
            project(head * a.size, a.size, [&](int64_t c, int64_t l, Vec y) {
                int32_t *to = part + c / 2 * stride + l;
                store_as(to, c % 2 ? load_as<IntVec>(to) | codes(y) << 16 : codes(y) & 0xFFFF);
            });
        }
        project(2 * width, width, [&](int64_t c, int64_t l, Vec y) { store_words(v + c * stride + l, codes(y)); });
        if (a.outputs == 4 * width)
            project(3 * width, width, [&](int64_t c, int64_t l, Vec y) { store_float(residual + c * stride + l, y); });
        for (int64_t s = 0; s < count; ++s) {
            const int64_t begin = s * fields;
            for (int64_t c = 0; c < width; ++c)
                for (int64_t l = 0; l < own; l += kVecLanes) store_as(values + c * own + l, load_as<HalfWords>(v + c * stride + begin + l));
            attend_fields(a, q + begin, k + begin, values, own, a.outputs == 4 * width ? residual + begin : nullptr, stride, scores, weights,
                          inverse, out + (first + s) * out_stride);
        }
    }
}

}  // namespace
}  // namespace zoo
