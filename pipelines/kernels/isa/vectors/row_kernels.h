// The kernels of a Transformer that work row by row: quantization, layer normalization, attention, top-k. Written once and lowered for each
// instruction set (see lanes.h); transformer/operations/ defines what they compute. Rows are padded with zeros to whole cache lines.
#pragma once
#include <cmath>
#include <type_traits>

#include "isa/isa.h"
#include "isa/vectors/bytes.h"
#include "isa/vectors/lanes.h"
#include "isa/vectors/quantized_attention.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

inline uint8_t round_to_uint8(float value, int32_t zero) {
    const float shifted = value + kRoundToInt;
    int32_t whole;
    std::memcpy(&whole, &shifted, 4);
    return static_cast<uint8_t>(whole + zero);  // kRoundToInt's own lowest byte is 0
}

// A row to uint8 by static qparams. A row with NaN or infinity gets the scale NaN, and so does whatever is computed from it.
inline void quantize_row_static(const float *x, int64_t stride, const QParams &qparams, uint8_t *quantized, float *scale) {
    const float s = qparams.scale, low = static_cast<float>(-qparams.zero_point), high = static_cast<float>(255 - qparams.zero_point);
    const int32_t zero = qparams.zero_point;
    int32_t largest = 0;
    for (int64_t j = 0; j < stride; ++j) {
        int32_t bits;
        std::memcpy(&bits, x + j, 4);
        bits &= 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
        float value = x[j] / s;
        value = value > low ? value : low;  // also NaN
        value = value < high ? value : high;
        quantized[j] = round_to_uint8(value, zero);
    }
    *scale = largest < 0x7F800000 ? s : NAN;
}

// A row to uint8, by static qparams or by its own range: rint(x / scale) + 128 with scale = max|x| / 127, or, where nothing is negative,
// rint(x / scale) with scale = max / 255.
inline void quantize_row(const float *x, int64_t stride, const QParams &qparams, uint8_t *quantized, float *scale) {
    if (qparams.scale > 0) return quantize_row_static(x, stride, qparams, quantized, scale);
    IntVec largest{};
    for (int64_t j = 0; j < stride; j += kVecLanes) {
        const IntVec bits = reinterpret_cast<IntVec>(load_float<Vec>(x + j)) & 0x7FFFFFFF;  // ordered like the magnitudes, NaN above all
        largest = bits > largest ? bits : largest;
    }
    const int32_t bits = reduce_max<int32_t>(largest);
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    const float levels = qparams.zero_point ? 127.0f : 255.0f;
    const bool nonzero = !(magnitude < kSmallestAbsMax);
    *scale = nonzero ? magnitude / levels : 1.0f;
    const float inverse = nonzero ? levels / magnitude : 0.0f;
    const int32_t zero = qparams.zero_point;
    for (int64_t j = 0; j < stride; ++j) quantized[j] = round_to_uint8(x[j] * inverse, zero);
}

void quantize_rows(const Rows &rows, int64_t stride, const QParams &qparams, int64_t n) {
    for (int64_t r = 0; r < n; ++r)
        quantize_row(rows.values + r * rows.stride, stride, qparams, rows.quantized + r * rows.stride, rows.scale + r);
}

// Whole 64, or a row of the values, if it has fewer.
inline int64_t written_columns(const LayerNorm &norm, const Rows &out) {
    const int64_t whole = round_up(norm.width, kColumns);
    return out.values && out.stride < whole ? out.stride : whole;
}

void rms_norm(const LayerNorm &norm, const float *x, int64_t x_stride, const Rows &out, int64_t n) {
    const int64_t stride = written_columns(norm, out);
    auto *spare = static_cast<float *>(kernel_scratch(stride * 4));
    for (int64_t r = 0; r < n; ++r, x += x_stride) {
        float *y = out.values ? out.values + r * out.stride : spare;
        const Vec16 inverse = broadcast<Vec16>(inverse_rms(x, norm.width, norm.epsilon));
        for (int64_t j = 0; j < stride; j += kLanes) store_float(y + j, (load_float<Vec16>(x + j) * inverse) * load_float<Vec16>(norm.scale + j));
        if (out.quantized) quantize_row(y, stride, norm.qparams, out.quantized + r * out.stride, out.scale + r);
    }
}

// `Count` rows at a time, which wait for their sums together. store(row, j, vectors): kWide x 16 results from column j on.
template <int Count, class Store>
inline void layer_norm_rows(const LayerNorm &norm, const float *x, int64_t x_stride, int64_t stride, Store store) {
    const int64_t width = norm.width, whole = width / kLanes * kLanes;
    const float count = static_cast<float>(width);
    float tail[kLanes];  // 1 for the columns of the last sixteen, 0 for what pads them
    for (int64_t l = 0; l < kLanes; ++l) tail[l] = whole + l < width ? 1.0f : 0.0f;
    Vec16 sums[Count], mean[Count];
    const auto rows = [&](auto function) ZOO_INLINE { unroll<Count>(function); };
    rows([&](auto r) ZOO_INLINE { sums[r.value] = broadcast<Vec16>(0); });
    for (int64_t j = 0; j < width; j += kLanes)
        rows([&](auto r) ZOO_INLINE { sums[r.value] = sums[r.value] + load_float<Vec16>(x + r.value * x_stride + j); });
    rows([&](auto r) ZOO_INLINE { mean[r.value] = broadcast<Vec16>(reduce_add(sums[r.value]) / count), sums[r.value] = broadcast<Vec16>(0); });
    for (int64_t j = 0; j < whole; j += kLanes)
        rows([&](auto r) ZOO_INLINE {
            const Vec16 deviation = load_float<Vec16>(x + r.value * x_stride + j) - mean[r.value];
            sums[r.value] = sums[r.value] + deviation * deviation;
        });
    if (whole < width)
        rows([&](auto r) ZOO_INLINE {
            const Vec16 deviation = (load_float<Vec16>(x + r.value * x_stride + whole) - mean[r.value]) * load_float<Vec16>(tail);
            sums[r.value] = sums[r.value] + deviation * deviation;
        });
    rows([&](auto r) ZOO_INLINE { sums[r.value] = broadcast<Vec16>(1.0f / std::sqrt(reduce_add(sums[r.value]) / count + norm.epsilon)); });
    const float *const scales = norm.scale, *const biases = norm.bias;  // not read again behind stores of floats, which may change anything
    const auto columns = [&](auto wide, int64_t j) ZOO_INLINE {
        constexpr int kWide = decltype(wide)::value;
        rows([&](auto r) ZOO_INLINE {
            Vec16 y[kWide];
            unroll<kWide>([&](auto v) ZOO_INLINE {
                const int64_t k = j + v.value * kLanes;
                y[v.value] = ((load_float<Vec16>(x + r.value * x_stride + k) - mean[r.value]) * sums[r.value]) * load_float<Vec16>(scales + k) + load_float<Vec16>(biases + k);
            });
            store(r.value, j, y);
        });
    };
    int64_t j = 0;
    for (; j + 4 * kLanes <= stride; j += 4 * kLanes) columns(Index<4>{}, j);
    for (; j < stride; j += kLanes) columns(Index<1>{}, j);
}

void layer_norm(const LayerNorm &norm, const float *x, int64_t x_stride, const Rows &out, int64_t n) {
    if (!norm.bias) return rms_norm(norm, x, x_stride, out, n);
    constexpr int64_t kRows = 4;
    const int64_t stride = written_columns(norm, out), y_stride = out.values ? out.stride : stride;
    auto *spare = static_cast<float *>(kernel_scratch(kRows * stride * 4));
    for (int64_t r = 0; r < n; r += kRows, x += kRows * x_stride) {
        float *y = out.values ? out.values + r * out.stride : spare;
        const int64_t count = n - r < kRows ? n - r : kRows;
        const auto normalize = [&](auto rows, int64_t first) {
            layer_norm_rows<decltype(rows)::value>(norm, x + first * x_stride, x_stride, stride, [&](int64_t row, int64_t j, const auto &values) ZOO_INLINE {
                float *to = y + (first + row) * y_stride + j;
                for (const Vec16 &value : values) store_float(to, value), to += kLanes;
            });
        };
        if (count == kRows) normalize(Index<kRows>{}, 0);
        for (int64_t i = 0; i < count; ++i) {
            if (count < kRows) normalize(Index<1>{}, i);
            if (out.quantized) quantize_row(y + i * y_stride, stride, norm.qparams, out.quantized + (r + i) * out.stride, out.scale + r + i);
        }
    }
}

void layer_norm_bytes(const LayerNorm &norm, const float *x, int64_t x_stride, const ByteRows &out, int64_t n) {
    const ByteStore bytes(out.zero);
    const float factor = out.factor;
    const auto normalize = [&](auto rows, int64_t first) {
        layer_norm_rows<decltype(rows)::value>(norm, x + first * x_stride, x_stride, out.stride, [&](int64_t row, int64_t j, const auto &values) ZOO_INLINE {
            uint8_t *to = out.data + (first + row) * out.stride + j;
            if constexpr (kVecLanes == kLanes && std::extent_v<std::remove_reference_t<decltype(values)>> == 4) {
                const Vec scaled[] = {values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor};
                bytes.store(to, scaled);
            } else {
                for (const Vec16 &value : values) each_vector(value * factor, 0, [&](int64_t lane, Vec scaled) ZOO_INLINE { bytes.store(to + lane, scaled); }), to += kLanes;
            }
        });
    };
    int64_t r = 0;
    if constexpr (kVecLanes == 16)  // with enough registers for the sums of eight rows
        for (; r + 8 <= n; r += 8) normalize(Index<8>{}, r);
    for (; r + 4 <= n; r += 4) normalize(Index<4>{}, r);
    for (; r < n; ++r) normalize(Index<1>{}, r);
}

void to_float16(const float *x, int64_t count, Float16 *out) {
    for (int64_t j = 0; j < count; j += kVecLanes) to_float16(x + j, out + j);
}

// Attention scores of `Count` keys: q . k in each head, [heads, room]. Meanwhile `next` keys and values come into L2, if there are any.
template <int Count>
inline void attention_scores(const float *q, const Float16 *const *keys, const Float16 *const *next, int64_t heads, int64_t size, int64_t room,
                             float *scores) {
    constexpr int64_t kLine = 64 / sizeof(Float16);
    for (int64_t h = 0; h < heads; ++h, scores += room) {
        for (int64_t i = 0; next && i < Count; ++i)
            for (int64_t j = h * size; j < (h + 1) * size; j += kLine) {
                __builtin_prefetch(next[i] + j, 0, 2);
                __builtin_prefetch(next[i] + heads * size + j, 0, 2);
            }
        Vec16 a = broadcast<Vec16>(0), b = a, c = a, d = a;
        for (int64_t j = h * size; j < (h + 1) * size; j += kLanes) {
            const Vec16 query = load_float<Vec16>(q + j);
            a = a + query * load_float<Vec16>(keys[0] + j);
            if constexpr (Count > 1) b = b + query * load_float<Vec16>(keys[1] + j);
            if constexpr (Count > 1) c = c + query * load_float<Vec16>(keys[2] + j);
            if constexpr (Count > 1) d = d + query * load_float<Vec16>(keys[3] + j);
        }
        scores[0] = reduce_add(a);
        if constexpr (Count > 1) scores[1] = reduce_add(b), scores[2] = reduce_add(c), scores[3] = reduce_add(d);
    }
}

// out += weight * value of `Count` positions, one after the other, in each head.
template <int Count>
inline void add_weighted_values(const float *weights, int64_t room, const Float16 *const *keys, int64_t heads, int64_t size, float *out) {
    const int64_t width = heads * size;
    for (int64_t h = 0; h < heads; ++h, weights += room)
        for (int64_t j = h * size; j < (h + 1) * size; j += kLanes) {
            Vec16 total = load_float<Vec16>(out + j);
            for (int i = 0; i < Count; ++i) total = total + broadcast<Vec16>(weights[i]) * load_float<Vec16>(keys[i] + width + j);
            store_float(out + j, total);
        }
}

// Adds the bias [reach] of one head to the scores of `count` positions, see `RowKernels::self_attention`.
inline void add_bias(const float *bias, int64_t reach, int64_t count, float *scores) {
    const int64_t first = count - reach, far = first > 0 ? first : 0;
    const float furthest = bias[0];
    for (int64_t t = 0; t < far; ++t) scores[t] = scores[t] + furthest;
    for (int64_t t = far; t < count; ++t) scores[t] = scores[t] + bias[t - first];
}

// Decoder self-attention of one query, softmax_t(q . k_t + bias) v_t in each head, over a float16 KV cache. q: [heads * size]; keys[t]: the
// key of position t, as many columns, its value behind it. Four positions at a time, all their heads: memory is read in order.
void self_attention(const float *q, const Float16 *const *keys, int64_t count, const Float16 *const *next, int64_t next_count, int64_t heads,
                    int64_t size, const float *bias, int64_t reach, float *out) {
    const int64_t room = round_up(count, kLanes), fours = count / 4 * 4;
    auto *scores = static_cast<float *>(kernel_scratch((heads * room + heads) * 4)), *inverse_sums = scores + heads * room;
    const auto ahead = [&](int64_t t, int64_t number) { return t + number <= next_count ? next + t : nullptr; };
    for (int64_t t = 0; t < fours; t += 4) attention_scores<4>(q, keys + t, ahead(t, 4), heads, size, room, scores + t);
    for (int64_t t = fours; t < count; ++t) attention_scores<1>(q, keys + t, ahead(t, 1), heads, size, room, scores + t);
    for (int64_t h = 0; bias && h < heads; ++h) add_bias(bias + h * reach, reach, count, scores + h * room);
    for (int64_t h = 0; h < heads; ++h) inverse_sums[h] = softmax(scores + h * room, count);
    for (int64_t j = 0; j < heads * size; j += kLanes) store_float(out + j, broadcast<Vec16>(0));
    for (int64_t t = 0; t < fours; t += 4) add_weighted_values<4>(scores + t, room, keys + t, heads, size, out);
    for (int64_t t = fours; t < count; ++t) add_weighted_values<1>(scores + t, room, keys + t, heads, size, out);
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = h * size; j < (h + 1) * size; j += kLanes)
            store_float(out + j, load_float<Vec16>(out + j) * broadcast<Vec16>(inverse_sums[h]));
}

// Matrix product out = row_scale * (a x), summed over i in order: a tile of Count rows and Wide vectors of columns. Meanwhile as much as it
// reads of a float16 x comes into L2 from `ahead` on.
template <int Count, int Wide, class T>
inline void matmul_tile(const float *a, int64_t a_stride, int64_t count, const T *x, int64_t stride, const float *row_scale, float *out,
                        int64_t out_stride, const T *ahead) {
    Vec s00 = broadcast<Vec>(0), s01 = s00, s10 = s00, s11 = s00, s20 = s00, s21 = s00, s30 = s00, s31 = s00;
    for (int64_t i = 0; i < count; ++i, ++a, x += stride) {
        const Vec low = load_float<Vec>(x), high = load_float<Vec>(x + (Wide > 1 ? kVecLanes : 0));
        if constexpr (std::is_same_v<T, Float16>) __builtin_prefetch(ahead + i * Wide * kVecLanes, 0, 2);
        s00 = s00 + low * a[0];
        if constexpr (Count > 1) s10 = s10 + low * a[a_stride];
        if constexpr (Count > 2) s20 = s20 + low * a[2 * a_stride], s30 = s30 + low * a[3 * a_stride];
        if constexpr (Wide > 1) s01 = s01 + high * a[0];
        if constexpr (Wide > 1 && Count > 1) s11 = s11 + high * a[a_stride];
        if constexpr (Wide > 1 && Count > 2) s21 = s21 + high * a[2 * a_stride], s31 = s31 + high * a[3 * a_stride];
    }
    const Vec sums[4][2] = {{s00, s01}, {s10, s11}, {s20, s21}, {s30, s31}};
    for (int row = 0; row < Count; ++row)
        for (int part = 0; part < Wide; ++part) store_float(out + row * out_stride + part * kVecLanes, sums[row][part] * row_scale[row]);
}

// `matmul_tile` over `width` columns, whole sixteens.
template <int Count, class T>
inline void matmul_rows(const float *a, int64_t a_stride, int64_t count, const T *x, int64_t stride, int64_t width,
                        const float *row_scale, float *out, int64_t out_stride, const T *ahead = nullptr) {
    const T *from = ahead ? ahead : x;
    int64_t j = 0;
    for (; j + 2 * kVecLanes <= width; j += 2 * kVecLanes)
        matmul_tile<Count, 2>(a, a_stride, count, x + j, stride, row_scale, out + j, out_stride, from + j * count);
    for (; j < width; j += kVecLanes)
        matmul_tile<Count, 1>(a, a_stride, count, x + j, stride, row_scale, out + j, out_stride, from + j * count);
}

void float_linear(const FloatLinear &l, const RowEpilogue &epilogue, const float *x, int64_t x_stride, int64_t n, float *out, int64_t out_stride) {
    constexpr float ones[] = {1, 1, 1, 1};
    float sums[4 * kColumns];
    const auto panel = [&](auto function, int64_t first, int64_t count, int64_t column) {
        function(x + first * x_stride, x_stride, l.inputs, l.weight + column * l.inputs, kColumns, kColumns, ones, sums, kColumns, nullptr);
        for (int64_t r = 0; r < count; ++r)
            for (int64_t j = 0; j < kColumns; j += kVecLanes) {
                Vec y = load_float<Vec>(sums + r * kColumns + j) * load_float<Vec>(l.scale + column + j) + load_float<Vec>(l.bias + column + j);
                if (epilogue.relu) y = y < 0 ? Vec{} : y;
                if (epilogue.residual) y = y + load_float<Vec>(epilogue.residual + (first + r) * epilogue.residual_stride + column + j);
                store_float(out + (first + r) * out_stride + column + j, y);
            }
    };
    for (int64_t column = 0; column < l.outputs; column += kColumns) {
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) panel(matmul_rows<4, float>, i, 4, column);
        for (; i + 2 <= n; i += 2) panel(matmul_rows<2, float>, i, 2, column);
        if (i < n) panel(matmul_rows<1, float>, i, 1, column);
    }
}

// Attention of Count queries, all heads.
template <int Count, class T>
void attention_tile(const float *q, int64_t q_stride, const KeysValues<T> &kv, int64_t heads, int64_t size, float *out,
                    int64_t out_stride) {
    const int64_t room = round_up(kv.count, kLanes);
    auto *scores = static_cast<float *>(kernel_scratch(Count * room * 4));
    constexpr float ones[] = {1, 1, 1, 1};
    const T *ahead = kv.ahead ? kv.ahead : kv.keys;
    for (int64_t h = 0; h < heads; ++h, ahead += size * (room + kv.count)) {
        matmul_rows<Count>(q + h * size, q_stride, size, kv.keys + h * size * room, room, room, ones, scores, room, ahead);
        float inverse_sums[Count];
        for (int row = 0; row < Count; ++row) inverse_sums[row] = softmax(scores + row * room, kv.count);
        matmul_rows<Count>(scores, room, kv.count, kv.values + h * kv.next, kv.stride, size, inverse_sums, out + h * size, out_stride,
                           ahead + size * room);
    }
}

// Attention of n queries over the same keys and values; unlike in `self_attention`, q . k is summed from its first column to its last.
template <class T>
void attention(const float *q, int64_t q_stride, int64_t n, const KeysValues<T> &kv, int64_t heads, int64_t size, float *out,
               int64_t out_stride) {
    const auto run = [&](auto function, int64_t count) {
        function(q, q_stride, kv, heads, size, out, out_stride);
        q += count * q_stride, out += count * out_stride, n -= count;
    };
    while (n >= 4) run(attention_tile<4, T>, 4);
    if (n >= 2) run(attention_tile<2, T>, 2);
    if (n >= 1) run(attention_tile<1, T>, 1);
}

// Attention of Count queries, all heads, from `first` on, each to the keys from its own on.
template <int Count>
void causal_tile(const float *q, int64_t q_stride, const KeysValues<float> &kv, int64_t first, int64_t heads, int64_t size, float *out,
                 int64_t out_stride) {
    const int64_t room = round_up(kv.count, kLanes), base = first / kLanes * kLanes;
    auto *scores = static_cast<float *>(kernel_scratch(Count * room * 4));
    constexpr float ones[] = {1, 1, 1, 1};
    for (int64_t h = 0; h < heads; ++h) {
        matmul_rows<Count>(q + h * size, q_stride, size, kv.keys + h * size * room + base, room, room - base, ones, scores + base, room);
        float inverse_sums[Count];
        for (int row = 0; row < Count; ++row) {
            float *own = scores + row * room;
            for (int64_t t = base; t < first + row; ++t) own[t] = -INFINITY;
            inverse_sums[row] = softmax(own + base, kv.count - base);
        }
        matmul_rows<Count>(scores + first, room, kv.count - first, kv.values + h * kv.next + first * kv.stride, kv.stride, size, inverse_sums,
                           out + h * size, out_stride);
    }
}

// Self-attention of a sequence, its newest item first: a query attends to its own key and to those behind it. q . k is summed as in
// `attention`.
void causal_attention(const float *q, int64_t q_stride, int64_t n, const KeysValues<float> &kv, int64_t heads, int64_t size, float *out,
                      int64_t out_stride) {
    int64_t first = 0;
    const auto run = [&](auto function, int64_t count) {
        function(q + first * q_stride, q_stride, kv, first, heads, size, out + first * out_stride, out_stride);
        first += count;
    };
    while (n - first >= 4) run(causal_tile<4>, 4);
    if (n - first >= 2) run(causal_tile<2>, 2);
    if (n - first >= 1) run(causal_tile<1>, 1);
}

// Running top-k and online softmax over logits [n, stride] of tokens [first, first + count), padded with -infinity to whole 64.
void top_k(const float *logits, int64_t stride, int64_t first, int64_t count, const TopK &top, int64_t n) {
    const int64_t last = top.k - 1;
    for (int64_t r = 0; r < n; ++r, logits += stride) {
        float *values = top.values + r * top.k, largest = top.maxima[r];
        int32_t *tokens = top.tokens + r * top.k;
        Vec16 total = load_float<Vec16>(top.exp_sums + r * kLanes);
        for (int64_t panel = 0; panel < count; panel += kColumns) {
            const float *panel_logits = logits + panel, panel_max = max_of(panel_logits, kColumns);
            if (panel_max > largest) {
                total = total * exponential(broadcast<Vec16>(largest - panel_max));
                largest = panel_max;
            }
            const Vec16 base = broadcast<Vec16>(largest);
            for (int64_t j = 0; j < kColumns; j += kLanes) total = total + exponential(load_float<Vec16>(panel_logits + j) - base);
            if (!(panel_max > values[last])) continue;
            for (int64_t j = 0; j < kColumns && panel + j < count; ++j) {
                if (!(panel_logits[j] > values[last])) continue;  // of ties the first stays
                int64_t place = last;
                for (; place > 0 && panel_logits[j] > values[place - 1]; --place)
                    values[place] = values[place - 1], tokens[place] = tokens[place - 1];
                values[place] = panel_logits[j], tokens[place] = static_cast<int32_t>(first + panel + j);
            }
        }
        store_float(top.exp_sums + r * kLanes, total);
        top.maxima[r] = largest;
    }
}

float sum_lanes(const float *sums) { return reduce_add(load_float<Vec16>(sums)); }

template <class V>
inline V sigmoid(V x) {
    const V e = exponential(-magnitude_of(x)), one = broadcast<V>(1);
    return where_negative(x, e, one) / (one + e);
}

void recurrence(const float *gates, int64_t width, const float *before, const float *residual, float *after, float *out) {
    const Vec zero = broadcast<Vec>(0);
    for (int64_t j = 0; j < width; j += kVecLanes) {
        const Vec keep = sigmoid(load_float<Vec>(gates + j));
        const Vec cell = load_float<Vec>(before + j) * keep + (1.0f - keep) * load_float<Vec>(gates + width + j);
        store_float(after + j, cell);
        const Vec y = cell > 0 ? cell : zero;
        store_float(out + j, residual ? y + load_float<Vec>(residual + j) : y);
    }
}

// x (1 + erf(x / sqrt(2))) / 2, to 6e-5 and 3e-6 of x: an odd polynomial up to 4.2, fitted to the error of the product.
template <class V>
inline V gelu(V x) {
    const V t = at_most(at_least(x, -4.2f), 4.2f), z = t * t;
    V p = z * 1.7281269e-10f + -1.551985e-8f;
    p = p * z + 6.1151377e-7f;
    p = p * z + -1.4108793e-5f;
    p = p * z + 2.1648454e-4f;
    p = p * z + -2.3977514e-3f;
    p = p * z + 2.0246882e-2f;
    p = p * z + -0.13371626f;
    p = p * z + 0.79840469f;
    return (x * 0.5f) * (p * t + 1.0f);
}

template <class V>
inline V tanh(V x) {
    const V e = exponential(magnitude_of(x) * -2.0f), one = broadcast<V>(1), y = (one - e) / (one + e);
    return where_negative(x, -y, y);
}

// x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class V>
inline V gelu_tanh(V x) { return x * sigmoid(x * ((x * x) * 0.07135481f + 1.5957691f)); }

// then(j, activation of the vector of x from j on); count: whole vectors
template <class Then>
inline void activated(Activation kind, const float *x, int64_t count, Then then) {
    constexpr int64_t kFour = sizeof(Four) / sizeof(float);
    const auto apply = [&](auto function) {
        int64_t j = 0;
        for (; j + kFour <= count; j += kFour) each_vector(function(load_float<Four>(x + j)), j, then);
        for (; j < count; j += kVecLanes) then(j, function(load_float<Vec>(x + j)));
    };
    switch (kind) {
        case Activation::kSwish: return apply([](auto v) { return v * sigmoid(v); });
        case Activation::kGelu: return apply([](auto v) { return gelu(v); });
        case Activation::kGeluTanh: return apply([](auto v) { return gelu_tanh(v); });
        case Activation::kTanh: return apply([](auto v) { return tanh(v); });
        case Activation::kSigmoid: return apply([](auto v) { return sigmoid(v); });
        case Activation::kRelu: return apply([](auto v) { return where_negative(v, broadcast<decltype(v)>(0), v); });
        case Activation::kNone: return apply([](auto v) { return v; });
    }
}

void activate(Activation kind, const float *x, int64_t count, float *out) {
    activated(kind, x, count, [&](int64_t j, Vec y) { store_float(out + j, y); });
}

void activate_gate(Activation kind, const float *gate, const float *up, int64_t count, float *out) {
    activated(kind, gate, count, [&](int64_t j, Vec y) { store_float(out + j, y * load_float<Vec>(up + j)); });
}

constexpr RowKernels kRowKernels = {
    .quantize_rows = quantize_rows,
    .layer_norm = layer_norm,
    .layer_norm_bytes = layer_norm_bytes,
    .float_linear = float_linear,
    .to_float16 = to_float16,
    .self_attention = self_attention,
    .attention = attention<float>,
    .attention_float16 = attention<Float16>,
    .causal_attention = causal_attention,
    .quantized_attention = quantized_attention,
    .top_k = top_k,
    .sum_lanes = sum_lanes,
    .recurrence = recurrence,
    .activate = activate,
    .activate_gate = activate_gate,
};

}  // namespace
}  // namespace zoo
