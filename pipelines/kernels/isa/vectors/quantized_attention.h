// Self-attention of an encoder in integers, `QuantizedAttention` of transformer/operations: queries, keys, values and weights are codes of 8 bits.
#pragma once
#include <algorithm>
#include <cmath>

#include "isa/isa.h"
#include "isa/vectors/code_products.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

constexpr float kLevels = 127, kWeights = 255;

inline IntVec rounded(Vec x) { return reinterpret_cast<IntVec>(x + kRoundToInt) - 0x4B400000; }  // the bits of kRoundToInt
inline IntVec magnitude_bits(Vec x) { return reinterpret_cast<IntVec>(x) & 0x7FFFFFFF; }
inline IntVec larger(IntVec a, IntVec b) { return b > a ? b : a; }

// Scale and its inverse of codes -127 to 127 of what is `magnitude` at most.
inline void scale_of(Vec magnitude, float *scale, float *inverse) {
    const Vec one = broadcast<Vec>(1);
    store_float(scale, magnitude < kSmallestAbsMax ? one : magnitude / kLevels);
    store_float(inverse, magnitude < kSmallestAbsMax ? Vec{} : kLevels / magnitude);
}

// The first `count` floats, as many as a vector has at most, and zeros.
inline Vec load_first(const float *x, int64_t count) {
    if (count >= kVecLanes) return load_float<Vec>(x);
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << count) - 1), x);
#else
    float first[kVecLanes] = {};
    for (int64_t i = 0; i < count; ++i) first[i] = x[i];
    return load_float<Vec>(first);
#endif
}

// Elements from `begin` to `end`, and -inf outside of them.
inline Vec within(Vec x, int64_t begin, int64_t end) {
    const auto limit = [](int64_t place) { return static_cast<int32_t>(std::clamp<int64_t>(place, 0, kVecLanes)); };
    const IntVec lanes = lane_numbers();
    return (lanes >= limit(begin)) & (lanes < limit(end)) ? x : broadcast<Vec>(-INFINITY);
}

// Brings a row of `size` columns, some rows ahead, into the cache: rows of a head lie far from each other.
constexpr int64_t kAhead = 8;
inline void fetch(const float *row, int64_t size) {
    for (int64_t j = 0; j < size; j += 16) __builtin_prefetch(row + j);
}

// Horizontal reductions of Count vectors, `join` being exact in any order.
template <class T, int Count, class V, class Join>
ZOO_INLINE inline void reduce_each(const V *vectors, T *out, Join join) {
    if constexpr (Count == 8 && kVecLanes == 16) {  // halves of two vectors at a time, then quarters of four, and so on
        const auto halves = [&](V x, V y) ZOO_INLINE {
            return join(__builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                        __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
        };
        const auto quarters = [&](V x, V y) ZOO_INLINE {
            return join(__builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                        __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
        };
        const V x = quarters(halves(vectors[0], vectors[4]), halves(vectors[2], vectors[6]));
        const V y = quarters(halves(vectors[1], vectors[5]), halves(vectors[3], vectors[7]));
        const V pairs = join(__builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                             __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
        const auto result = join(__builtin_shufflevector(pairs, pairs, 0, 8, 4, 12, 2, 10, 6, 14), __builtin_shufflevector(pairs, pairs, 1, 9, 5, 13, 3, 11, 7, 15));
        std::memcpy(out, &result, sizeof result);
    } else {
        for (int i = 0; i < Count; ++i) out[i] = reduce<T, kVecLanes>(vectors[i], join);
    }
}
template <class T, int Count, class V>
ZOO_INLINE inline void largest_of_each(const V *vectors, T *out) {
    reduce_each<T, Count>(vectors, out, [](auto a, auto b) ZOO_INLINE { return b > a ? b : a; });
}

// Scales of `size` columns of n rows, each by its own range.
inline void column_scales(const float *x, int64_t stride, int64_t n, int64_t size, float *scale, float *inverse) {
    const auto columns = [&](auto vectors, int64_t j) {
        constexpr int kVectors = decltype(vectors)::value;
        IntVec largest[kVectors] = {};
        for (int64_t t = 0; t < n; ++t) {
            const float *row = x + t * stride + j;
            fetch(row + kAhead * stride, kVectors * kVecLanes);
            unroll<kVectors>([&](auto v) ZOO_INLINE { largest[v.value] = larger(largest[v.value], magnitude_bits(load_float<Vec>(row + v.value * kVecLanes))); });
        }
        unroll<kVectors>([&](auto v) ZOO_INLINE { scale_of(reinterpret_cast<Vec>(largest[v.value]), scale + j + v.value * kVecLanes, inverse + j + v.value * kVecLanes); });
    };
    int64_t j = 0;
    for (; j + 4 * kVecLanes <= size; j += 4 * kVecLanes) columns(Index<4>{}, j);
    for (; j + 2 * kVecLanes <= size; j += 2 * kVecLanes) columns(Index<2>{}, j);
    for (; j < size; j += kVecLanes) columns(Index<1>{}, j);
}

// Middles of the ranges of `size` columns of n rows, and the scales of distances to them.
inline void centered_scales(const float *x, int64_t stride, int64_t n, int64_t size, float *middle, float *scale, float *inverse) {
    for (int64_t j = 0; j < size; j += kVecLanes) {
        Vec low = broadcast<Vec>(INFINITY), high = broadcast<Vec>(-INFINITY);
        IntVec largest{};
        for (int64_t t = 0; t < n; ++t) {
            const Vec row = load_float<Vec>(x + t * stride + j);
            low = row < low ? row : low, high = row > high ? row : high;
            largest = larger(largest, magnitude_bits(row));
        }
        const Vec center = low * 0.5f + high * 0.5f, above = high - center, below = center - low, most = reinterpret_cast<Vec>(largest);
        store_float(middle + j, center);
        scale_of((above > below ? above : below) + (most - most), scale + j, inverse + j);  // NaN of what is not finite
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
        x = out;
    }
    if (!a.cos) return out;
    const float *cos = a.cos + position * a.turned, *sin = a.sin + position * a.turned;
    const auto turn = [&](auto zero, int64_t j) {
        using V = decltype(zero);
        V low, high, c, s;
        std::memcpy(&low, x + j, sizeof(V)), std::memcpy(&high, x + a.turned + j, sizeof(V));
        std::memcpy(&c, cos + j, sizeof(V)), std::memcpy(&s, sin + j, sizeof(V));
        const V first = low * c - high * s, second = high * c + low * s;
        std::memcpy(out + j, &first, sizeof(V)), std::memcpy(out + a.turned + j, &second, sizeof(V));
    };
    int64_t j = 0;
    for (; j + kVecLanes <= a.turned; j += kVecLanes) turn(Vec{}, j);
    for (; j < a.turned; ++j) turn(0.0f, j);
    for (j = 2 * a.turned; x != out && j < a.size; ++j) out[j] = x[j];
    return out;
}

// What a head of keys needs of one text; pointers into scratch memory.
struct Head {
    int64_t tokens, n, size, room;             // n: keys, the first of the tokens; room: n rounded up to whole sixteens
    float *key_scale, *value_scale, *inverse;  // [size]
    Code *row;                                 // [4, size]
    float *factor;                             // [kQueries]: of a query's products, to exponents of 2
    int32_t *offsets;                          // [room]: what takes the zero point of queries out of a key's products
    Code *queries;                             // [kQueries, size]
    int32_t *keys, *values;                    // words of codes, [size / kTerms, room] and [room / kTerms, size]
    float *scores;                             // [kQueries, room]
    Code *weights;                             // [kQueries, room]
    const float *added;                        // to the scores of all queries, rows `added_row` apart, where all attend to all keys; or null
    int64_t added_row;
    // Of relative positions, where there are any: `span` distances, that of the last token to the first one first.
    int64_t span;
    int32_t *to_position, *to_content;         // words of codes [size / kTerms, span]; those of to_content have the zero point added
    int32_t *position_offsets, *key_offsets;   // [span], [room]: what takes the zero point out
    int32_t *content_keys;                     // words of codes of keys, [size / kTerms, room]
    float *content_factor, *position_factor;   // [room], [kQueries]: of products, to exponents of 2
    Code *position_queries;                    // [kQueries, size]
    // In long texts, distances before `near_begin` share a row of codes, and so do those from `near_end` on: their products are computed once.
    bool is_long;
    int64_t near_begin, near_end;
    int32_t *far_position, *far_content;       // of both, in order: [kQueries, 2, kVecLanes] (equal lanes), [2, room]
    float *positioned;                         // keys, [n, size]; later queries, [kQueries, size]
    float *middle;                             // [size], see QuantizedAttention::centered
};

// Words of four rows of codes, whole fours in a row: from `to` on four columns of [words, columns].
inline void transpose_words(const Code *rows, int64_t size, int32_t *to, int64_t columns) {
    using Words4 = Vector<int32_t, 4>::type;
    const auto words = [&](const Code *row) {
        Words4 v;
        std::memcpy(&v, row, sizeof v);
        return v;
    };
    for (int64_t j = 0; j < size; j += 4 * kTerms, to += 4 * columns) {
        const Words4 a = words(rows + j), b = words(rows + size + j), c = words(rows + 2 * size + j), d = words(rows + 3 * size + j);
        const Words4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), AB = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        const Words4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
        const Words4 four[] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                               __builtin_shufflevector(AB, CD, 0, 1, 4, 5), __builtin_shufflevector(AB, CD, 2, 3, 6, 7)};
        for (int64_t i = 0; i < 4; ++i) std::memcpy(to + i * columns, four + i, sizeof(Words4));
    }
}

// Codes of `Count` queries or keys whose columns are multiplied by `scale`, each by its own range, plus `zero`, and the factors of their products.
template <int Count>
inline void pack_rows(const float *const *x, const float *scale, int64_t size, int32_t zero, Code *codes, float *factor) {
    IntVec largest[Count] = {};
    int32_t bits[Count];
    float magnitude[Count], inverse[Count];
    for (int row = 0; row < Count; ++row)
        for (int64_t j = 0; j < size; j += kVecLanes) largest[row] = larger(largest[row], magnitude_bits(load_float<Vec>(x[row] + j) * load_float<Vec>(scale + j)));
    largest_of_each<int32_t, Count>(largest, bits);
    std::memcpy(magnitude, bits, sizeof magnitude);
    for (int row = 0; row < Count; ++row) {
        const bool none = magnitude[row] < kSmallestAbsMax;
        inverse[row] = none ? 0.0f : kLevels / magnitude[row];
        factor[row] = (none ? 1.0f : magnitude[row] / kLevels) * kLog2E;
    }
    for (int row = 0; row < Count; ++row)
        for (int64_t j = 0; j < size; j += kVecLanes)
            store_codes(codes + row * size + j, rounded((load_float<Vec>(x[row] + j) * load_float<Vec>(scale + j)) * inverse[row]) + zero);
}

// Words of the codes of head h by distance, plus `zero`.
inline void pack_positions(const QuantizedAttention &a, const QuantizedAttention::Positions &table, int64_t h, int32_t zero, const Head &head, int32_t *words) {
    const int64_t groups = head.size / kTerms, most = head.tokens - 1;
    for (int64_t x = 0; x < head.span; ++x) {
        const int8_t *codes = table.codes + (h * a.row_count + (x <= 2 * most ? a.rows[x - most] : 0)) * head.size;
        for (int64_t j = 0; j < head.size; ++j) head.row[j] = static_cast<Code>(codes[j] + zero);
        for (int64_t g = 0; g < groups; ++g) words[g * head.span + x] = packed(head.row + g * kTerms);
    }
}

// What relative positions need of a head h of keys, rows [n, stride].
inline void pack_disentangled(const QuantizedAttention &a, int64_t h, const float *key, int64_t stride, const Head &head) {
    const int64_t groups = head.size / kTerms;
    if (a.to_position.codes) {
        pack_positions(a, a.to_position, h, 0, head, head.to_position);
        query_offsets(head.to_position, groups, head.span, head.position_offsets);
    }
    if (!a.to_content.codes) return;
    pack_positions(a, a.to_content, h, kQueryMiddle, head, head.to_content);
    for (int64_t t = 0; t < head.room; ++t) {
        const float *row = key + t * stride;
        if (t < head.n) pack_rows<1>(&row, a.to_content.scale + h * head.size, head.size, 0, head.row, head.content_factor + t);
        for (int64_t g = 0; g < groups; ++g) head.content_keys[g * head.room + t] = t < head.n ? packed(head.row + g * kTerms) : 0;
    }
    query_offsets(head.content_keys, groups, head.room, head.key_offsets);
    for (int64_t far = 0; head.is_long && far < 2; ++far)
        for (int64_t t = 0; t < head.room; t += kVecLanes) {
            IntVec sums = load_int(head.key_offsets + t);
            const int32_t *words = head.to_content + (far ? head.near_end : 0);
            for (int64_t g = 0; g < groups; ++g) add_query_products(sums, words[g * head.span], load_int(head.content_keys + g * head.room + t));
            store_int(head.far_content + far * head.room + t, sums);
        }
}

inline void pack_head(const QuantizedAttention &a, int64_t h, const float *key, const float *value, int64_t stride, const Head &head) {
    const int64_t n = head.n, size = head.size, room = head.room, groups = size / kTerms;
    int64_t key_stride = stride;
    if (a.key_norm || a.cos) {
        for (int64_t t = 0; t < n; ++t) fetch(key + (t + kAhead) * stride, size), positioned(a, key + t * stride, a.key_norm, t, head.positioned + t * size);
        key = head.positioned, key_stride = size;
    }
    if (a.centered) centered_scales(key, key_stride, n, size, head.middle, head.key_scale, head.inverse);
    else column_scales(key, key_stride, n, size, head.key_scale, head.inverse), std::fill_n(head.middle, size, 0.0f);
    Code *const rows = head.row;
    const float *const inverse = head.inverse, *const middle = head.middle;
    for (int64_t t = 0; t < room; t += 4) {
        for (int64_t i = 0; i < 4; ++i)
            for (int64_t j = 0; j < size; j += kVecLanes)
                store_codes(rows + i * size + j, t + i < n ? rounded((load_float<Vec>(key + (t + i) * key_stride + j) - load_float<Vec>(middle + j)) * load_float<Vec>(inverse + j)) : IntVec{});
        transpose_words(rows, size, head.keys + t, room);
    }
    query_offsets(head.keys, groups, room, head.offsets);
    if (a.rows) pack_disentangled(a, h, key, key_stride, head);
    column_scales(value, stride, n, size, head.value_scale, head.inverse);
    int32_t *const values = head.values;
    for (int64_t t = 0; t < room; t += kTerms)
        for (int64_t j = 0; j < size; j += kVecLanes) {
            IntVec codes{};
            for (int64_t i = 0; i < kTerms && t + i < n; ++i) {
                const IntVec code = rounded(load_float<Vec>(value + (t + i) * stride + j) * load_float<Vec>(inverse + j));
                codes |= kTerms == 1 ? code : (code & (kTerms == 4 ? 0xFF : 0xFFFF)) << static_cast<int32_t>(i * (32 / kTerms));
            }
            store_int(values + t / kTerms * size + j, codes);
        }
}

// Adds the products of content and relative position of query `row`, the text's token `own`, with keys from `begin` on; scores [room].
template <int Wide>
inline void add_position_scores(const QuantizedAttention &a, const Head &head, int64_t row, int64_t own, int64_t t, float *scores) {
    const int64_t groups = head.size / kTerms, span = head.span, room = head.room, x = head.tokens - 1 - own + t;
    constexpr int64_t kNext = Wide > 1 ? kVecLanes : 0;
    const auto add = [&](int64_t key, IntVec sums, Vec factor) {
        store_float(scores + key, load_float<Vec>(scores + key) + __builtin_convertvector(sums, Vec) * factor);
    };
    if (head.is_long && (x + Wide * kVecLanes <= head.near_begin || x >= head.near_end)) {
        const int64_t far = x >= head.near_end;
        for (int64_t key = t; key < t + Wide * kVecLanes; key += kVecLanes) {
            if (a.to_position.codes) add(key, load_int(head.far_position + (row * 2 + far) * kVecLanes), broadcast<Vec>(head.position_factor[row]));
            if (a.to_content.codes) add(key, load_int(head.far_content + far * room + key), load_float<Vec>(head.content_factor + key));
        }
        return;
    }
    if (a.to_position.codes) {
        IntVec low = load_int(head.position_offsets + x), high = load_int(head.position_offsets + x + kNext);
        const Code *query = head.position_queries + row * head.size;
        for (int64_t g = 0; g < groups; ++g) {
            const int32_t terms = packed(query + g * kTerms), *words = head.to_position + g * span + x;
            add_query_products(low, terms, load_int(words));
            if constexpr (Wide > 1) add_query_products(high, terms, load_int(words + kNext));
        }
        const Vec factor = broadcast<Vec>(head.position_factor[row]);
        add(t, low, factor);
        if constexpr (Wide > 1) add(t + kNext, high, factor);
    }
    if (a.to_content.codes) {
        IntVec low = load_int(head.key_offsets + t), high = load_int(head.key_offsets + t + kNext);
        for (int64_t g = 0; g < groups; ++g) {
            const int32_t *words = head.to_content + g * span + x, *keys = head.content_keys + g * room + t;
            add_query_products(low, load_int(words), load_int(keys));
            if constexpr (Wide > 1) add_query_products(high, load_int(words + kNext), load_int(keys + kNext));
        }
        add(t, low, load_float<Vec>(head.content_factor + t));
        if constexpr (Wide > 1) add(t + kNext, high, load_float<Vec>(head.content_factor + t + kNext));
    }
}

// rint(255 2^x) for x <= 0, to .03 before it is rounded, 0 from -16 down: in the lowest bytes.
template <class V>
inline V weight_code(V x) {
    x = at_least(x, -16);
    const V shifted = x + kRoundToInt, f = x - (shifted - kRoundToInt);
    const V p = ((f * 14.027278f + 61.763796f) * f + 176.78715f) * f + kWeights;
    return times_power(p, shifted) + kRoundToInt;
}

// The codes of the weights of `room` keys by their scores, of which `base` is the largest; returns their sums, to be added up.
inline Vec weight_codes(const float *scores, float base, int64_t room, Code *codes) {
    IntVec total{};
    const auto take = [&](int64_t key, Vec shifted) {
        const IntVec code = reinterpret_cast<IntVec>(shifted) & 0xFF;
        total += code;
        store_codes(codes + key, code);
    };
    constexpr int64_t kFour = sizeof(Four) / sizeof(float);
    int64_t t = 0;
    for (; t + kFour <= room; t += kFour) each_vector(weight_code(load_float<Four>(scores + t) - base), t, take);
    for (; t < room; t += kVecLanes) take(t, weight_code(load_float<Vec>(scores + t) - base));
    return __builtin_convertvector(total, Vec);
}

// Scores of Count queries from `first` on, all of which attend to all keys; base: the largest of each.
template <int Count>
inline void full_scores(const Head &head, int64_t first, float *base) {
    Vec largest[Count];
    for (int row = 0; row < Count; ++row) largest[row] = broadcast<Vec>(-INFINITY);
    const int64_t size = head.size, room = head.room, added_row = head.added_row;  // not read again behind stores of floats, which may change anything
    const float *const added = head.added + first * added_row, *const factor = head.factor;
    float *const scores = head.scores;
    product_rows<Count, true>(head.queries, size, size / kTerms, head.keys, room, room, head.offsets, [&](int row, int64_t key, IntVec sums) {
        const Vec score = __builtin_convertvector(sums, Vec) * factor[row] + load_float<Vec>(added + row * added_row + key);
        store_float(scores + row * room + key, score);
        largest[row] = score > largest[row] ? score : largest[row];
    });
    largest_of_each<float, Count>(largest, base);
}

// The same over keys from `begin` to `end`, of which not all queries attend to all; of keys far from a query by their distance. bias: of the text's first query, or null.
template <int Count>
void banded_scores(const QuantizedAttention &a, const Head &head, int64_t first, int64_t begin, int64_t end, const float *bias, float *base) {
    const int64_t room = head.room, size = head.size, columns = round_up(end - begin, kLanes);
    for (int64_t far = 0; a.to_position.codes && head.is_long && far < 2; ++far)
        for (int row = 0; row < Count; ++row) {
            const int64_t distance = far ? head.near_end : 0;
            IntVec sums = IntVec{} + head.position_offsets[distance];
            for (int64_t g = 0; g < size / kTerms; ++g)
                add_query_products(sums, packed(head.position_queries + row * size + g * kTerms), IntVec{} + head.to_position[g * head.span + distance]);
            store_int(head.far_position + (row * 2 + far) * kVecLanes, sums);
        }
    product_rows<Count, true>(head.queries, size, size / kTerms, head.keys + begin, room, columns, head.offsets + begin,
                            [&](int row, int64_t key, IntVec sums) {
        store_float(head.scores + row * room + key, __builtin_convertvector(sums, Vec) * head.factor[row]);
    });
    for (int row = 0; row < Count; ++row) {
        float *scores = head.scores + row * room - begin;
        const int64_t own = first + row, lowest = own - a.before, last = end - own > a.after ? own + a.after + 1 : end;
        int64_t key = begin;
        for (; a.rows && key + 2 * kVecLanes <= begin + columns; key += 2 * kVecLanes) add_position_scores<2>(a, head, row, own, key, scores);
        for (; a.rows && key < begin + columns; key += kVecLanes) add_position_scores<1>(a, head, row, own, key, scores);
        Vec largest = broadcast<Vec>(-INFINITY);
        for (int64_t t = begin; t < begin + columns; t += kVecLanes) {
            Vec score = load_float<Vec>(scores + t);
            if (bias) score = score + load_first(bias - own + t, end - t) * kLog2E;
            if (t < lowest || t + kVecLanes > last) score = within(score, lowest - t, last - t);
            store_float(scores + t, score);
            largest = score > largest ? score : largest;
        }
        base[row] = reduce_max<float>(largest);
    }
}

// Count queries from `first` on, rows of x, over the keys that any of them attends to; each has one or more. bias: of the text's first query, or null.
template <int Count>
void attend(const QuantizedAttention &a, const Head &head, int64_t h, const float *x, int64_t stride, int64_t first, const float *bias, float *out,
            int64_t out_stride) {
    const int64_t n = head.n, room = head.room, size = head.size;
    const int64_t begin = first > a.before ? (first - a.before) / kLanes * kLanes : 0;
    const int64_t end = n - first - Count > a.after ? first + Count + a.after : n, columns = round_up(end - begin, kLanes);
    const float *queries[Count];
    for (int row = 0; row < Count; ++row) {
        fetch(x + (row + Count) * stride, size);
        queries[row] = positioned(a, x + row * stride, a.query_norm, first + row, head.positioned + row * size);
    }
    pack_rows<Count>(queries, head.key_scale, size, kQueryMiddle, head.queries, head.factor);
    if (a.to_position.codes) pack_rows<Count>(queries, a.to_position.scale + h * size, size, kQueryMiddle, head.position_queries, head.position_factor);
    float share[Count], base[Count];
    if (head.added) full_scores<Count>(head, first, base);
    else banded_scores<Count>(a, head, first, begin, end, bias, base);
    Vec totals[Count];
    for (int row = 0; row < Count; ++row) totals[row] = weight_codes(head.scores + row * room, base[row], columns, head.weights + row * room);
    reduce_each<float, Count>(totals, share, [](auto a, auto b) ZOO_INLINE { return a + b; });  // exact: less than 2^24
    for (int row = 0; row < Count; ++row) share[row] = 1.0f / share[row] + (head.factor[row] - head.factor[row]);  // NaN of what is not finite
    const float *const value_scale = head.value_scale;
    product_rows<Count, false>(head.weights, room, round_up(end - begin, kTerms) / kTerms, head.values + begin / kTerms * size, size, size, nullptr,
                        [&](int row, int64_t column, IntVec sums) {
        store_float(out + row * out_stride + column, (__builtin_convertvector(sums, Vec) * share[row]) * load_float<Vec>(value_scale + column));
    });
}

void quantized_attention(const QuantizedAttention &a, const float *x, int64_t stride, int64_t tokens, int64_t n, float *out, int64_t out_stride) {
    const int64_t size = a.size, room = round_up(n, kLanes), group = a.heads / a.key_heads;
    const int64_t queries = tokens - n > a.before ? n + a.before : tokens;  // those behind have no key within reach
    const int64_t span = a.rows ? round_up(tokens + room, kLanes) : 0, there = a.rows ? 1 : 0, words = size / kTerms;
    const int64_t parts[] = {size, size, size, 4 * size, kLanes, room, kQueries * size, size * room, size * room, kQueries * room, kQueries * room,
                             a.key_norm || a.cos ? size * (n < kQueries ? kQueries : n) : 0,
                             words * span, words * span, span, there * room, there * words * room, there * room, there * kLanes,
                             there * kQueries * size, kQueries * 2 * kVecLanes, there * 2 * room, room, size};
    constexpr int kParts = sizeof(parts) / sizeof(parts[0]);
    int64_t all = 0;
    for (const int64_t part : parts) all += part;
    auto *memory = static_cast<int32_t *>(kernel_scratch(all * 4));
    int32_t *buffers[kParts];
    for (int i = 0; i < kParts; ++i) buffers[i] = memory, memory += parts[i];
    const auto floats = [&](int i) { return reinterpret_cast<float *>(buffers[i]); };
    const auto codes = [&](int i) { return reinterpret_cast<Code *>(buffers[i]); };
    const int64_t most = tokens - 1, last = 2 * most;  // distances by place: 0 is that of the last token to the first one
    int64_t near_begin = 0, near_end = last;
    while (a.rows && near_begin <= last && a.rows[near_begin - most] == a.rows[-most]) ++near_begin;
    while (a.rows && near_end > 0 && a.rows[near_end - 1 - most] == a.rows[most]) --near_end;
    const bool is_long = near_begin >= kQueries * kVecLanes || last - near_end >= kQueries * kVecLanes;
    const bool full = !a.rows && !a.bias && a.before >= tokens - 1 && a.after >= n - 1;
    float *edge = floats(22);
    for (int64_t t = 0; t < room; ++t) edge[t] = t < n ? 0.0f : -INFINITY;
    const Head head{tokens, n, size, room, floats(0), floats(1), floats(2), codes(3), floats(4), buffers[5], codes(6), buffers[7],
                    buffers[8], floats(9), codes(10), a.added ? a.added : full ? edge : nullptr, a.added ? room : 0,
                    span, buffers[12], buffers[13], buffers[14], buffers[15], buffers[16], floats(17), floats(18), codes(19),
                    is_long, near_begin, near_end, buffers[20], buffers[21], floats(11), floats(23)};
    for (int64_t h = 0; h < a.heads; ++h) {
        if (h % group == 0) {
            const float *key = (a.keys ? a.keys : x + a.heads * size) + h / group * size;
            pack_head(a, h / group, key, key + a.key_heads * size, a.keys ? a.key_stride : stride, head);
        }
        const float *bias = a.bias ? a.bias + h * a.bias_stride + a.bias_stride / 2 : nullptr;
        const auto run = [&](auto function, int64_t i) {
            function(a, head, h, x + i * stride + h * size, stride, i, bias, out + i * out_stride + h * size, out_stride);
        };
        int64_t i = 0;
        if constexpr (kQueries > 4)
            for (; i + 8 <= queries; i += 8) run(attend<8>, i);
        for (; i + 4 <= queries; i += 4) run(attend<4>, i);
        for (; i + 2 <= queries; i += 2) run(attend<2>, i);
        if (i < queries) run(attend<1>, i);
    }
    for (int64_t i = queries; i < tokens; ++i) std::fill_n(out + i * out_stride, a.heads * size, 0.0f);
}

}  // namespace
}  // namespace zoo
