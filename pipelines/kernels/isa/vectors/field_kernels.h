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

void gate_codes(const int16_t *x, int64_t x_stride, const float *gates, int64_t gates_stride, int64_t width, int64_t n, int16_t *out,
                int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride, gates += gates_stride, out += out_stride)
        for (int64_t j = 0; j < width; j += kVecLanes)
            store_words(out + j, round_clipped(to_float(load_words(x + j)) * sigmoid_of(load_float<Vec>(gates + j)), -kCodeLimit, kCodeLimit));
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

// store(row, lane, sums) for every row 0 .. rows - 1 and every vector of lanes, rows in order; row r begins at w + r * w_row.
template <class Store>
inline void pair_products(const int32_t *w, int64_t rows, int64_t w_row, int64_t w_step, const int32_t *x, int64_t lanes, int64_t pairs,
                          Store store) {
    IntVec sums[4][kMostVectors];
    const int32_t *row[4];
    for (int64_t r = 0; r < rows;) {
        const int64_t count = rows - r >= 4 ? 4 : 1;
        for (int64_t k = 0; k < count; ++k) row[k] = w + (r + k) * w_row;
        for (int64_t l = 0; l < lanes; l += 2 * kVecLanes) {
            auto *to = reinterpret_cast<IntVec(*)[kMostVectors]>(&sums[0][l / kVecLanes]);
            const bool two = l + kVecLanes < lanes;
            if (count == 4)
                two ? pair_tile<4, 2>(row, w_step, x + l, lanes, pairs, to) : pair_tile<4, 1>(row, w_step, x + l, lanes, pairs, to);
            else
                two ? pair_tile<1, 2>(row, w_step, x + l, lanes, pairs, to) : pair_tile<1, 1>(row, w_step, x + l, lanes, pairs, to);
        }
        for (int64_t k = 0; k < count; ++k)
            for (int64_t l = 0; l < lanes; l += kVecLanes) store(r + k, l, sums[k][l / kVecLanes]);
        r += count;
    }
}

inline IntVec paired(IntVec even, IntVec odd) { return (even & 0xFFFF) | (odd << 16); }

void field_attention(const FieldAttention &a, const int16_t *x, int64_t x_stride, int64_t n, int16_t *out, int64_t out_stride) {
    const int64_t fields = a.fields, lanes = round_up(fields, kVecLanes), inputs = (a.inputs + 1) / 2, half = (a.size + 1) / 2;
    const int64_t width = a.heads * a.size, others = (fields + 1) / 2;
    auto *memory = static_cast<char *>(kernel_scratch(lanes * 4 * (inputs + 2 * a.heads * half + 4 * width + fields + others + 1)));
    const auto take = [&](int64_t rows) {
        char *at = memory;
        memory += rows * lanes * 4;
        return at;
    };
    auto *turned = reinterpret_cast<int32_t *>(take(inputs)), *q = reinterpret_cast<int32_t *>(take(a.heads * half)),
         *k = reinterpret_cast<int32_t *>(take(a.heads * half)), *scores = reinterpret_cast<int32_t *>(take(fields)),
         *weights = reinterpret_cast<int32_t *>(take(others));
    auto *floats = reinterpret_cast<float *>(take(3 * width)), *inverse = reinterpret_cast<float *>(take(1));
    auto *v = reinterpret_cast<int16_t *>(take(width));
    std::memset(turned, 0, static_cast<size_t>(inputs * lanes * 4));
    std::memset(q, 0, static_cast<size_t>(2 * a.heads * half * lanes * 4));
    for (int64_t s = 0; s < n; ++s, x += x_stride, out += out_stride) {
        if (a.at) {
            for (int64_t f = 0; f < fields; ++f)
                for (int64_t p = 0; p < inputs; ++p) std::memcpy(turned + p * lanes + f, x + a.at[f] + 2 * p, 4);
            if (a.inputs % 2)
                for (int64_t l = 0; l < lanes; ++l) turned[(inputs - 1) * lanes + l] &= 0xFFFF;
        } else {
            for (int64_t p = 0; p < inputs; ++p)
                for (int64_t l = 0; l < lanes; l += kVecLanes)
                    store_as(turned + p * lanes + l, paired(load_words(x + 2 * p * fields + l),
                                                            2 * p + 1 < a.inputs ? load_words(x + (2 * p + 1) * fields + l) : IntVec{}));
        }
        pair_products(a.weight, a.outputs, inputs, 1, turned, lanes, inputs, [&](int64_t o, int64_t l, IntVec sums) {
            const Vec y = to_float(sums) * a.scale[o] + a.bias[o];
            const int64_t part = o / width, column = o % width;
            if (part == 3) return store_float(floats + 2 * width * lanes + column * lanes + l, y);
            const IntVec codes = round_clipped(y, -kCodeLimit, kCodeLimit);
            if (part == 2) return store_words(v + column * lanes + l, codes);
            int32_t *to = (part ? k : q) + (column / a.size * half + column % a.size / 2) * lanes + l;
            store_as(to, column % a.size % 2 ? load_as<IntVec>(to) | codes << 16 : codes & 0xFFFF);
        });
        const float *residual = a.outputs == 4 * width ? floats + 2 * width * lanes : nullptr;
        for (int64_t h = 0; h < a.heads; ++h) {
            pair_products(k + h * half * lanes, fields, 1, lanes, q + h * half * lanes, lanes, half,
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
            pair_products(reinterpret_cast<const int32_t *>(v) + h * a.size * (lanes / 2), a.size, lanes / 2, 1, weights, lanes, others,
                          [&](int64_t c, int64_t l, IntVec sums) {
                              Vec y = to_float(sums) * load_float<Vec>(inverse + l);
                              if (residual) y += load_float<Vec>(residual + (h * a.size + c) * lanes + l);
                              store_words(out + (h * a.size + c) * fields + l, round_clipped(y, a.relu ? 0 : -kCodeLimit, kCodeLimit));
                          });
        }
    }
}

}  // namespace
}  // namespace zoo
