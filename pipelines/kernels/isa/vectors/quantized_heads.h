// Codes of a head of quantized attention, with their scales: queries, keys and values.
#pragma once
#include <algorithm>
#include <cmath>

#include "isa/isa.h"
#include "isa/vectors/code_products.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

constexpr float kLevels = 127;

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

// Scales of `size` columns of n rows, each by its own range.
inline void column_scales(const float *x, int64_t stride, int64_t n, int64_t size, float *scale, float *inverse) {
    of_columns(size, [&](auto vectors, int64_t j) {
        constexpr int kVectors = decltype(vectors)::value;
        IntVec largest[kVectors] = {};
        for (int64_t t = 0; t < n; ++t) {
            const float *row = x + t * stride + j;
            fetch(row + kAhead * stride, kVectors * kVecLanes);
            unroll<kVectors>([&](auto v) ZOO_INLINE { largest[v.value] = larger(largest[v.value], magnitude_bits(load_float<Vec>(row + v.value * kVecLanes))); });
        }
        unroll<kVectors>([&](auto v) ZOO_INLINE { scale_of(reinterpret_cast<Vec>(largest[v.value]), scale + j + v.value * kVecLanes, inverse + j + v.value * kVecLanes); });
    });
}

// Middles of the ranges of `size` columns of n rows, and the scales of distances to them.
inline void centered_scales(const float *x, int64_t stride, int64_t n, int64_t size, float *middle, float *scale, float *inverse) {
    of_columns(size, [&](auto vectors, int64_t j) {
        constexpr int kVectors = decltype(vectors)::value;
        Vec low[kVectors], high[kVectors];
        IntVec largest[kVectors] = {};
        unroll<kVectors>([&](auto v) ZOO_INLINE { low[v.value] = broadcast<Vec>(INFINITY), high[v.value] = broadcast<Vec>(-INFINITY); });
        for (int64_t t = 0; t < n; ++t) {
            const float *from = x + t * stride + j;
            fetch(from + kAhead * stride, kVectors * kVecLanes);
            unroll<kVectors>([&](auto v) ZOO_INLINE {
                const Vec row = load_float<Vec>(from + v.value * kVecLanes);
                low[v.value] = row < low[v.value] ? row : low[v.value], high[v.value] = row > high[v.value] ? row : high[v.value];
                largest[v.value] = larger(largest[v.value], magnitude_bits(row));
            });
        }
        unroll<kVectors>([&](auto v) ZOO_INLINE {
            const Vec center = low[v.value] * 0.5f + high[v.value] * 0.5f, above = high[v.value] - center, below = center - low[v.value];
            const Vec most = reinterpret_cast<Vec>(largest[v.value]);
            const int64_t k = j + v.value * kVecLanes;
            store_float(middle + k, center);
            scale_of((above > below ? above : below) + (most - most), scale + k, inverse + k);  // NaN of what is not finite
        });
    });
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
    Code *row;                                 // [16, size]
    float *factor;                             // [kQueries]: of a query's products, to exponents of 2
    int32_t *offsets;                          // [room]: what takes the zero point of queries out of a key's products
    Code *queries;                             // [kQueries, size]
    int32_t *keys, *values;                    // words of codes, [size / kTerms, room] and [room / kTerms, size]
    float *scores;                             // [kQueries, room]
    Code *weights;                             // [2, kQueries, room]
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

// The same of sixteen rows, where a vector has as many words.
inline void transpose_sixteen(const Code *rows, int64_t size, int32_t *to, int64_t columns) {
    if constexpr (kVecLanes != 16)
        for (int64_t i = 0; i < 16; i += 4) transpose_words(rows + i * size, size, to + i, columns);
#if defined(__AVX512F__)
    for (int64_t j = 0; j < size; j += 4 * kTerms, to += 4 * columns) {
        __m512i four[4];  // rows i, i + 4, i + 8 and i + 12
        unroll<4>([&](auto i) ZOO_INLINE {
            const auto words = [&](int row) ZOO_INLINE { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows + (i.value + row) * size + j)); };
            const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(words(0)), words(4), 1);
            four[i.value] = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi256_si512(low), words(8), 2), words(12), 3);
        });
        const __m512i ab = _mm512_unpacklo_epi32(four[0], four[1]), AB = _mm512_unpackhi_epi32(four[0], four[1]);
        const __m512i cd = _mm512_unpacklo_epi32(four[2], four[3]), CD = _mm512_unpackhi_epi32(four[2], four[3]);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi64(ab, cd)), _mm512_storeu_si512(to + columns, _mm512_unpackhi_epi64(ab, cd));
        _mm512_storeu_si512(to + 2 * columns, _mm512_unpacklo_epi64(AB, CD)), _mm512_storeu_si512(to + 3 * columns, _mm512_unpackhi_epi64(AB, CD));
    }
#endif
}

// Codes of `Count` queries or keys whose columns are multiplied by `scale`, each by its own range, plus kZero, and the factors of their products.
template <int32_t kZero, int Count>
inline void pack_rows(const float *const *x, const float *scale, int64_t size, Code *codes, float *factor) {
    IntVec largest[Count];
    int32_t bits[Count];
    float magnitude[Count], inverse[Count];
    unroll<Count>([&](auto row) ZOO_INLINE {
        IntVec most{};
        for (int64_t j = 0; j < size; j += kVecLanes) most = larger(most, magnitude_bits(load_float<Vec>(x[row.value] + j) * load_float<Vec>(scale + j)));
        largest[row.value] = most;
    });
    largest_of_each<int32_t, Count>(largest, bits);
    std::memcpy(magnitude, bits, sizeof magnitude);
    for (int row = 0; row < Count; ++row) {
        const bool none = magnitude[row] < kSmallestAbsMax;
        inverse[row] = none ? 0.0f : kLevels / magnitude[row];
        factor[row] = (none ? 1.0f : magnitude[row] / kLevels) * kLog2E;
    }
    for (int row = 0; row < Count; ++row)
        of_columns(size, [&](auto vectors, int64_t j) ZOO_INLINE {
            Vec values[decltype(vectors)::value];
            unroll<decltype(vectors)::value>([&](auto v) ZOO_INLINE {
                const int64_t k = j + v.value * kVecLanes;
                values[v.value] = (load_float<Vec>(x[row] + k) * load_float<Vec>(scale + k)) * inverse[row];
            });
            store_rounded<kZero>(codes + row * size + j, values);
        });
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
        if (t < head.n) pack_rows<0, 1>(&row, a.to_content.scale + h * head.size, head.size, head.row, head.content_factor + t);
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

// Words of the codes of kTerms vectors.
ZOO_INLINE inline IntVec words_of(const Vec (&terms)[kTerms]) {
#if defined(__AVX512F__)
    const __m512i first = _mm512_packs_epi32(_mm512_cvtps_epi32(terms[0]), _mm512_cvtps_epi32(terms[1]));
    const __m512i second = _mm512_packs_epi32(_mm512_cvtps_epi32(terms[2]), _mm512_cvtps_epi32(terms[3]));
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return reinterpret_cast<IntVec>(_mm512_shuffle_epi8(_mm512_packs_epi16(first, second), _mm512_broadcast_i32x4(order)));
#else
    IntVec words{};
    for (int64_t i = 0; i < kTerms; ++i) {
        const IntVec code = rounded(terms[i]);
        words |= kTerms == 1 ? code : (code & (kTerms == 4 ? 0xFF : 0xFFFF)) << static_cast<int32_t>(i * (32 / kTerms));
    }
    return words;
#endif
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
    for (int64_t t = 0; t < room; t += 16) {
        const int64_t count = n - t < 16 ? n - t : 16;
        for (int64_t i = 0; i < count; ++i)
            of_columns(size, [&](auto vectors, int64_t j) ZOO_INLINE {
                Vec values[decltype(vectors)::value];
                unroll<decltype(vectors)::value>([&](auto v) ZOO_INLINE {
                    const int64_t k = j + v.value * kVecLanes;
                    values[v.value] = (load_float<Vec>(key + (t + i) * key_stride + k) - load_float<Vec>(middle + k)) * load_float<Vec>(inverse + k);
                });
                store_rounded<0>(rows + i * size + j, values);
            });
        std::fill(rows + count * size, rows + 16 * size, Code{0});
        transpose_sixteen(rows, size, head.keys + t, room);
    }
    query_offsets(head.keys, groups, room, head.offsets);
    if (a.rows) pack_disentangled(a, h, key, key_stride, head);
    column_scales(value, stride, n, size, head.value_scale, head.inverse);
    int32_t *const values = head.values;
    for (int64_t t = 0; t < room; t += kTerms)
        for (int64_t j = 0; j < size; j += kVecLanes) {
            Vec terms[kTerms] = {};
            for (int64_t i = 0; i < kTerms && t + i < n; ++i) terms[i] = load_float<Vec>(value + (t + i) * stride + j) * load_float<Vec>(inverse + j);
            store_int(values + t / kTerms * size + j, words_of(terms));
        }
}

}  // namespace
}  // namespace zoo
