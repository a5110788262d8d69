// Self-attention of an encoder in integers, `QuantizedAttention` of transformer/operations: queries, keys, values and weights are codes of 8 bits.
// Written once and lowered for each instruction set, of which only the product of codes differs: integers are exact in any order.
#pragma once
#include <cmath>

#include "isa/isa.h"
#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

// An int32 holds kTerms codes. add_products: each lane of `sum` += the products of the codes in x (unsigned) and in that lane of w (signed).
#if defined(__AVX512F__)
constexpr int64_t kTerms = 4;
using Code = int8_t;
inline void add_products(IntVec &sum, int32_t x, IntVec w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(IntVec{} + x), "v"(w));  // as in avx512.cpp
}
constexpr auto kMiddles = static_cast<int32_t>(0x80808080u);
#elif defined(__AVX2__)
constexpr int64_t kTerms = 2;
using Code = int16_t;
inline void add_products(IntVec &sum, int32_t x, IntVec w) {
    sum += reinterpret_cast<IntVec>(_mm256_madd_epi16(_mm256_set1_epi32(x), reinterpret_cast<__m256i>(w)));
}
constexpr int32_t kMiddles = 0x00800080;
#else
constexpr int64_t kTerms = 1;
using Code = int32_t;
inline void add_products(IntVec &sum, int32_t x, IntVec w) { sum += x * w; }
constexpr int32_t kMiddles = 128;
#endif

constexpr int32_t kMiddle = 128;  // the zero point of queries, kMiddles: a word of it
constexpr float kLevels = 127, kWeights = 255;
constexpr float kLog2E = 1.44269504f;

inline IntVec load_int(const int32_t *at) {
    IntVec v;
    std::memcpy(&v, at, sizeof v);
    return v;
}
inline void store_int(int32_t *at, IntVec v) { std::memcpy(at, &v, sizeof v); }
inline void store_codes(Code *at, IntVec v) {
    const auto codes = __builtin_convertvector(v, Vector<Code, kVecLanes>::type);
    std::memcpy(at, &codes, sizeof codes);
}
inline int32_t packed(const Code *codes) {
    int32_t terms;
    std::memcpy(&terms, codes, 4);
    return terms;
}
inline IntVec rounded(Vec x) { return reinterpret_cast<IntVec>(x + kRoundToInt) - 0x4B400000; }  // the bits of kRoundToInt
inline IntVec magnitude_bits(Vec x) { return reinterpret_cast<IntVec>(x) & 0x7FFFFFFF; }
inline IntVec larger(IntVec a, IntVec b) { return b > a ? b : a; }

// Scale and its inverse of codes -127 to 127 of what is `magnitude` at most.
inline void scale_of(Vec magnitude, float *scale, float *inverse) {
    const Vec one = broadcast<Vec>(1);
    store_float(scale, magnitude < kSmallestAbsMax ? one : magnitude / kLevels);
    store_float(inverse, magnitude < kSmallestAbsMax ? Vec{} : kLevels / magnitude);
}

// Scales of `size` columns of n rows, each by its own range.
inline void column_scales(const float *x, int64_t stride, int64_t n, int64_t size, float *scale, float *inverse) {
    for (int64_t j = 0; j < size; j += kVecLanes) {
        IntVec largest{};
        for (int64_t t = 0; t < n; ++t) largest = larger(largest, magnitude_bits(load_float<Vec>(x + t * stride + j)));
        scale_of(reinterpret_cast<Vec>(largest), scale + j, inverse + j);
    }
}

// 1 / sqrt(mean of squares + epsilon) of a row whose columns behind `width` are 0 up to whole sixteens.
inline float inverse_rms(const float *x, int64_t width, float epsilon) {
    Vec16 squares = broadcast<Vec16>(0);
    for (int64_t j = 0; j < width; j += kLanes) squares = squares + load_float<Vec16>(x + j) * load_float<Vec16>(x + j);
    return 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(width) + epsilon);
}

// A query or key of a head at a position: normalized by `norm`, if there is one, then turned. Returns x itself where nothing changes it.
inline const float *positioned(const QuantizedAttention &a, const float *x, const float *norm, int64_t position, float *out) {
    if (!norm && !a.cos) return x;
    if (norm) {
        const float inverse = inverse_rms(x, a.size, a.epsilon);
        for (int64_t j = 0; j < a.size; ++j) out[j] = (x[j] * inverse) * norm[j];
    } else {
        std::memcpy(out, x, static_cast<size_t>(a.size) * 4);
    }
    if (!a.cos) return out;
    const float *cos = a.cos + position * a.turned, *sin = a.sin + position * a.turned;
    for (int64_t j = 0; j < a.turned; ++j) {
        const float low = out[j], high = out[a.turned + j];
        out[j] = low * cos[j] - high * sin[j], out[a.turned + j] = high * cos[j] + low * sin[j];
    }
    return out;
}

// What a head of keys needs of one text; pointers into scratch memory.
struct Head {
    int64_t n, size, room;                     // room: n rounded up to whole sixteens
    float *key_scale, *value_scale, *inverse;  // [size]
    Code *row;                                 // [size]
    float *factor;                             // [4]: of a query's products, to exponents of 2
    int32_t *offsets;                          // [room]: what takes the zero point of queries out of a key's products
    Code *queries;                             // [4, size]
    int32_t *keys, *values;                    // words of codes, [size / kTerms, room] and [room / kTerms, size]
    float *scores;                             // [4, room]
    Code *weights;                             // [4, room]
    float *positioned;                         // keys, [n, size]; later queries, [4, size]
};

inline void pack_head(const QuantizedAttention &a, const float *key, const float *value, int64_t stride, const Head &head) {
    const int64_t n = head.n, size = head.size, room = head.room, groups = size / kTerms;
    int64_t key_stride = stride;
    if (a.key_norm || a.cos) {
        for (int64_t t = 0; t < n; ++t) positioned(a, key + t * stride, a.key_norm, t, head.positioned + t * size);
        key = head.positioned, key_stride = size;
    }
    column_scales(key, key_stride, n, size, head.key_scale, head.inverse);
    for (int64_t t = 0; t < room; ++t) {
        if (t < n)
            for (int64_t j = 0; j < size; j += kVecLanes)
                store_codes(head.row + j, rounded(load_float<Vec>(key + t * key_stride + j) * load_float<Vec>(head.inverse + j)));
        for (int64_t g = 0; g < groups; ++g) head.keys[g * room + t] = t < n ? packed(head.row + g * kTerms) : 0;
    }
    for (int64_t t = 0; t < room; t += kVecLanes) {
        IntVec offset{};
        for (int64_t g = 0; g < groups; ++g) add_products(offset, kMiddles, load_int(head.keys + g * room + t));
        store_int(head.offsets + t, -offset);
    }
    column_scales(value, stride, n, size, head.value_scale, head.inverse);
    for (int64_t t = 0; t < room; t += kTerms)
        for (int64_t j = 0; j < size; j += kVecLanes) {
            IntVec codes{};
            for (int64_t i = 0; i < kTerms && t + i < n; ++i) {
                const IntVec code = rounded(load_float<Vec>(value + (t + i) * stride + j) * load_float<Vec>(head.inverse + j));
                codes |= kTerms == 1 ? code : (code & (kTerms == 4 ? 0xFF : 0xFFFF)) << static_cast<int32_t>(i * (32 / kTerms));
            }
            store_int(head.values + t / kTerms * size + j, codes);
        }
}

// Codes and factor of the query of row `i` among the queries that are computed together.
inline void pack_query(const float *query, int64_t i, const Head &head) {
    const int64_t size = head.size;
    IntVec largest{};
    for (int64_t j = 0; j < size; j += kVecLanes)
        largest = larger(largest, magnitude_bits(load_float<Vec>(query + j) * load_float<Vec>(head.key_scale + j)));
    const int32_t bits = reduce_max<int32_t>(largest);
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    const bool zero = magnitude < kSmallestAbsMax;
    head.factor[i] = (zero ? 1.0f : magnitude / kLevels) * kLog2E;
    const float inverse = zero ? 0.0f : kLevels / magnitude;
    for (int64_t j = 0; j < size; j += kVecLanes)
        store_codes(head.queries + i * size + j, rounded((load_float<Vec>(query + j) * load_float<Vec>(head.key_scale + j)) * inverse) + kMiddle);
}

// Products of Count rows of codes with Wide vectors of packed columns, from `start` on (null: 0); then(row, part, sums) takes them.
template <int Count, int Wide, class Then>
inline void product_tile(const Code *x, int64_t x_stride, int64_t groups, const int32_t *w, int64_t stride, const int32_t *start, Then then) {
    const IntVec low = start ? load_int(start) : IntVec{}, high = start && Wide > 1 ? load_int(start + kVecLanes) : IntVec{};
    IntVec s00 = low, s01 = high, s10 = low, s11 = high, s20 = low, s21 = high, s30 = low, s31 = high;
    for (int64_t g = 0; g < groups; ++g, x += kTerms, w += stride) {
        const IntVec w0 = load_int(w), w1 = Wide > 1 ? load_int(w + kVecLanes) : w0;
        const auto add = [&](int64_t row, IntVec &a, IntVec &b) {
            const int32_t terms = packed(x + row * x_stride);
            add_products(a, terms, w0);
            if constexpr (Wide > 1) add_products(b, terms, w1);
        };
        add(0, s00, s01);
        if constexpr (Count > 1) add(1, s10, s11);
        if constexpr (Count > 2) add(2, s20, s21), add(3, s30, s31);
    }
    then(0, 0, s00);
    if constexpr (Wide > 1) then(0, 1, s01);
    if constexpr (Count > 1) then(1, 0, s10);
    if constexpr (Count > 1 && Wide > 1) then(1, 1, s11);
    if constexpr (Count > 2) then(2, 0, s20), then(3, 0, s30);
    if constexpr (Count > 2 && Wide > 1) then(2, 1, s21), then(3, 1, s31);
}

// `product_tile` over `columns`, whole sixteens, of packed rows [groups, stride]; then(row, column, sums).
template <int Count, class Then>
inline void product_rows(const Code *x, int64_t x_stride, int64_t groups, const int32_t *w, int64_t stride, int64_t columns,
                         const int32_t *start, Then then) {
    int64_t at = 0;
    const auto take = [&](int row, int part, IntVec sums) { then(row, at + part * kVecLanes, sums); };
    for (; at + 2 * kVecLanes <= columns; at += 2 * kVecLanes)
        product_tile<Count, 2>(x, x_stride, groups, w + at, stride, start ? start + at : nullptr, take);
    for (; at < columns; at += kVecLanes)
        product_tile<Count, 1>(x, x_stride, groups, w + at, stride, start ? start + at : nullptr, take);
}

// rint(255 2^x) for x <= 0, to .03 before it is rounded, 0 from -16 down.
inline IntVec weight_code(Vec x) {
    const Vec low = broadcast<Vec>(-16);
    x = x > low ? x : low;
    const Vec shifted = x + kRoundToInt, f = x - (shifted - kRoundToInt);
    const Vec p = ((f * 14.027278f + 61.763796f) * f + 176.78715f) * f + kWeights;
    const Vec y = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(p) + (reinterpret_cast<IntVec>(shifted) << 23));
    return reinterpret_cast<IntVec>(y + kRoundToInt) & 0xFF;
}

// The codes of the weights of n keys by their scores, which are written up to `room`; returns their sum.
inline float weight_codes(float *scores, int64_t n, int64_t room, Code *codes) {
    for (int64_t t = n; t < room; ++t) scores[t] = -INFINITY;
    const Vec base = broadcast<Vec>(max_of(scores, room));
    IntVec total{};
    for (int64_t t = 0; t < room; t += kVecLanes) {
        const IntVec code = weight_code(load_float<Vec>(scores + t) - base);
        total += code;
        store_codes(codes + t, code);
    }
    return static_cast<float>(reduce<int32_t, kVecLanes>(total, [](auto a, auto b) { return a + b; }));
}

// Count queries from `first` on, rows of x, over the keys that any of them attends to. bias: that of the first query's own key, or null.
template <int Count>
void attend(const QuantizedAttention &a, const Head &head, const float *x, int64_t stride, int64_t first, const float *bias, float *out,
            int64_t out_stride) {
    const int64_t n = head.n, room = head.room, size = head.size;
    const int64_t begin = first > a.before ? (first - a.before) / kLanes * kLanes : 0;
    const int64_t end = n - first - Count > a.after ? first + Count + a.after : n, columns = round_up(end - begin, kLanes);
    for (int row = 0; row < Count; ++row)
        pack_query(positioned(a, x + row * stride, a.query_norm, first + row, head.positioned + row * size), row, head);
    product_rows<Count>(head.queries, size, size / kTerms, head.keys + begin, room, columns, head.offsets + begin, [&](int row, int64_t at, IntVec sums) {
        store_float(head.scores + row * room + at, __builtin_convertvector(sums, Vec) * head.factor[row]);
    });
    float share[Count];
    for (int row = 0; row < Count; ++row) {
        float *scores = head.scores + row * room - begin, factor = head.factor[row];
        const int64_t own = first + row;
        for (int64_t t = begin; bias && t < end; ++t) scores[t] = scores[t] + bias[t - own] * kLog2E;
        for (int64_t t = begin; t < own - a.before; ++t) scores[t] = -INFINITY;
        const int64_t last = end - own > a.after ? own + a.after + 1 : end;
        share[row] = 1.0f / weight_codes(scores + begin, last - begin, columns, head.weights + row * room) + (factor - factor);  // NaN of what is not finite
    }
    product_rows<Count>(head.weights, room, round_up(end - begin, kTerms) / kTerms, head.values + begin / kTerms * size, size, size, nullptr,
                        [&](int row, int64_t at, IntVec sums) {
        store_float(out + row * out_stride + at, (__builtin_convertvector(sums, Vec) * share[row]) * load_float<Vec>(head.value_scale + at));
    });
}

void quantized_attention(const QuantizedAttention &a, const float *x, int64_t stride, int64_t n, float *out, int64_t out_stride) {
    const int64_t size = a.size, room = round_up(n, kLanes), group = a.heads / a.key_heads;
    const int64_t parts[] = {size, size, size, size, kLanes, room, 4 * size, size * room, size * room, 4 * room, 4 * room,
                             a.key_norm || a.cos ? size * (n < 4 ? 4 : n) : 0};
    constexpr int kParts = sizeof(parts) / sizeof(parts[0]);
    int64_t all = 0;
    for (const int64_t each : parts) all += each;
    auto *memory = static_cast<int32_t *>(kernel_scratch(all * 4));
    int32_t *at[kParts];
    for (int i = 0; i < kParts; ++i) at[i] = memory, memory += parts[i];
    const auto floats = [&](int i) { return reinterpret_cast<float *>(at[i]); };
    const auto codes = [&](int i) { return reinterpret_cast<Code *>(at[i]); };
    const Head head{n, size, room, floats(0), floats(1), floats(2), codes(3), floats(4), at[5], codes(6), at[7], at[8], floats(9), codes(10), floats(11)};
    for (int64_t h = 0; h < a.heads; ++h) {
        if (h % group == 0) {
            const float *key = x + (a.heads + h / group) * size;
            pack_head(a, key, key + a.key_heads * size, stride, head);
        }
        const float *bias = a.bias ? a.bias + h * a.bias_stride + a.bias_stride / 2 : nullptr;
        const auto run = [&](auto function, int64_t i) {
            function(a, head, x + i * stride + h * size, stride, i, bias, out + i * out_stride + h * size, out_stride);
        };
        int64_t i = 0;
        for (; i + 4 <= n; i += 4) run(attend<4>, i);
        for (; i + 2 <= n; i += 2) run(attend<2>, i);
        if (i < n) run(attend<1>, i);
    }
}

}  // namespace
}  // namespace zoo
