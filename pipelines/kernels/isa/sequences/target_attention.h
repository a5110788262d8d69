// Target attention on the vectors of an instruction set: a lane is a pair of an item and a target, see kernels.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa/sequences/kernels.h"
#include "isa/vectors/words.h"

namespace zoo {
namespace {

inline Vec logistic(Vec z) {
    const Vec e = exponential(z < Vec{} ? z : -z);
    return (z < Vec{} ? e : broadcast<Vec>(1.0f)) / (1.0f + e);
}

#if defined(__AVX512F__)
// Sixteen rows of sixteen floats.
inline void transpose_sixteen(const float *x, int64_t stride, int64_t room, float *out) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_ps(x + r * stride);
#pragma GCC unroll 8
    for (int r = 0; r < 16; r += 2) b[r] = _mm512_unpacklo_ps(a[r], a[r + 1]), b[r + 1] = _mm512_unpackhi_ps(a[r], a[r + 1]);
#pragma GCC unroll 4
    for (int r = 0; r < 16; r += 4) {  // a[r + c]: column c of every four, of four rows
        a[r] = _mm512_shuffle_ps(b[r], b[r + 2], 0x44), a[r + 1] = _mm512_shuffle_ps(b[r], b[r + 2], 0xEE);
        a[r + 2] = _mm512_shuffle_ps(b[r + 1], b[r + 3], 0x44), a[r + 3] = _mm512_shuffle_ps(b[r + 1], b[r + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512 low = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xDD);
        const __m512 next = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88), last = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xDD);
        _mm512_storeu_ps(out + c * room, _mm512_shuffle_f32x4(low, next, 0x88));
        _mm512_storeu_ps(out + (8 + c) * room, _mm512_shuffle_f32x4(low, next, 0xDD));
        _mm512_storeu_ps(out + (4 + c) * room, _mm512_shuffle_f32x4(high, last, 0x88));
        _mm512_storeu_ps(out + (12 + c) * room, _mm512_shuffle_f32x4(high, last, 0xDD));
    }
}
#endif

// Rows p to p + 4 from column `from` on.
inline void transpose_four(const float *x, int64_t stride, int64_t p, int64_t from, int64_t width, int64_t room, float *out) {
    using Four = Vector<float, 4>::type;
    using Index = Vector<int32_t, 4>::type;
    const Index low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, second{2, 3, 6, 7};
    for (int64_t j = from; j < width; j += 4) {
        Four row[4];
        for (int64_t r = 0; r < 4; ++r) std::memcpy(&row[r], x + (p + r) * stride + j, sizeof row[r]);
        const Four a = __builtin_shuffle(row[0], row[1], low), b = __builtin_shuffle(row[0], row[1], high);
        const Four c = __builtin_shuffle(row[2], row[3], low), d = __builtin_shuffle(row[2], row[3], high);
        const Four columns[] = {__builtin_shuffle(a, c, first), __builtin_shuffle(a, c, second), __builtin_shuffle(b, d, first),
                                __builtin_shuffle(b, d, second)};
        for (int64_t r = 0; r < 4; ++r) std::memcpy(out + (j + r) * room + p, &columns[r], sizeof columns[r]);
    }
}

void transpose(const float *x, int64_t stride, int64_t n, int64_t width, int64_t room, float *out) {
    int64_t p = 0;
#if defined(__AVX512F__)
    for (; p + 16 <= n; p += 16) {
        int64_t j = 0;
        for (; j + 16 <= width; j += 16) transpose_sixteen(x + p * stride + j, stride, room, out + j * room + p);
        for (int64_t r = p; r < p + 16; r += 4) transpose_four(x, stride, r, j, width, room, out);
    }
#endif
    for (; p < n; p += 4) transpose_four(x, stride, p, 0, width, room, out);
}

// The transpose of int32, bits alone.
inline void transpose_words(const int32_t *x, int64_t stride, int64_t n, int64_t width, int64_t room, int32_t *out) {
    transpose(reinterpret_cast<const float *>(x), stride, n, width, room, reinterpret_cast<float *>(out));
}

// (a b + 2^14) >> 15 of every code.
inline Words rounded_products(Words a, Words b) {
#if defined(__AVX512F__)
    return reinterpret_cast<Words>(_mm512_mulhrs_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<Words>(_mm256_mulhrs_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
    const IntVec x = reinterpret_cast<IntVec>(a), y = reinterpret_cast<IntVec>(b);
    const IntVec high = ((x >> 16) * (y >> 16) + 0x4000) >> 15, low = (((x << 16) >> 16) * ((y << 16) >> 16) + 0x4000) >> 15;
    return reinterpret_cast<Words>((high << 16) | (low & 0xFFFF));
#endif
}

inline Vec curve_of(const Curves &c, int64_t unit, IntVec x) {
    const Vec t = to_float(x) * c.scale[unit] + c.shift[unit];
    constexpr auto kLast = static_cast<float>(kSegments - 1);
    Vec clipped = t > 0.0f ? t : Vec{};
    clipped = clipped < kLast ? clipped : broadcast<Vec>(kLast);
    const IntVec segment = __builtin_convertvector(clipped, IntVec);
    const float *table = c.coefficients + unit * 3 * kSegments;
    return entries(table, segment) + t * (entries(table + kSegments, segment) + t * entries(table + 2 * kSegments, segment));
}

inline IntVec word_pairs(IntVec low, IntVec high) { return (low & 0xFFFF) | (high << 16); }
inline Words same_words(const int32_t *address) { return reinterpret_cast<Words>(*address - IntVec{}); }

#if defined(__AVX512F__)
constexpr int64_t kGroup = 4;  // vectors of pairs that share the loads of weights
#else
constexpr int64_t kGroup = 2;
#endif
constexpr int64_t kRoom = 64;  // pairs that pass the network together

// Four units for up to kGroup vectors of pairs; sums in named variables, see x86/avx512/linear.h. x: [count, kRoom] words of two codes.
template <int Vectors>
inline void multiply_units(const int32_t *x, const int32_t *weight, int64_t count, IntVec (&sums)[4][kGroup]) {
#define UNIT(u) IntVec s##u##0 = sums[u][0], s##u##1 = sums[u][1], s##u##2 = sums[u][kGroup - 2], s##u##3 = sums[u][kGroup - 1];
    UNIT(0) UNIT(1) UNIT(2) UNIT(3)
#undef UNIT
    for (int64_t k = 0; k < count; ++k, x += kRoom, weight += 4) {
        const Words x0 = load_as<Words>(x), x1 = Vectors > 1 ? load_as<Words>(x + kVecLanes) : Words{};
        const Words x2 = Vectors > 2 ? load_as<Words>(x + 2 * kVecLanes) : Words{}, x3 = Vectors > 2 ? load_as<Words>(x + 3 * kVecLanes) : Words{};
#define UNIT(u)                                                   \
    {                                                             \
        const Words w = same_words(weight + u);                   \
        dot_pairs(s##u##0, x0, w);                                \
        if constexpr (Vectors > 1) dot_pairs(s##u##1, x1, w);     \
        if constexpr (Vectors > 2) dot_pairs(s##u##2, x2, w), dot_pairs(s##u##3, x3, w); \
    }
        UNIT(0) UNIT(1) UNIT(2) UNIT(3)
#undef UNIT
    }
#define UNIT(u)                                                             \
    sums[u][0] = s##u##0;                                                   \
    if constexpr (Vectors > 1) sums[u][1] = s##u##1;                        \
    if constexpr (Vectors > 2) sums[u][2] = s##u##2, sums[u][3] = s##u##3;
    UNIT(0) UNIT(1) UNIT(2) UNIT(3)
#undef UNIT
}

// Scores of Vectors vectors of pairs. products: [pairs, kRoom] words; start: keys and queries [units, kRoom]; hidden: scratch [units / 2, kRoom].
template <int Vectors>
void score_pairs(const TargetAttention &t, const int32_t *products, const int32_t *start, int32_t *hidden, float *scores) {
    IntVec sums[4][kGroup]{};
    for (int64_t j = 0; j < t.units; j += 4) {
        for (int64_t u = 0; u < 4; ++u)
            for (int64_t v = 0; v < Vectors; ++v) sums[u][v] = load_as<IntVec>(start + (j + u) * kRoom + v * kVecLanes);
        multiply_units<Vectors>(products, t.product + j * t.pairs, t.pairs, sums);
        for (int64_t u = 0; u < 4; u += 2)
            for (int64_t v = 0; v < Vectors; ++v) {
                const IntVec low = round_clipped(curve_of(t.one, j + u, sums[u][v]), -kHiddenLimit, kHiddenLimit);
                const IntVec high = round_clipped(curve_of(t.one, j + u + 1, sums[u + 1][v]), -kHiddenLimit, kHiddenLimit);
                store_as(hidden + (j + u) / 2 * kRoom + v * kVecLanes, word_pairs(low, high));
            }
    }
    Vec totals[kGroup];
    for (int64_t v = 0; v < Vectors; ++v) totals[v] = broadcast<Vec>(t.score_bias);
    for (int64_t j = 0; j < t.second; j += 4) {
        for (int64_t u = 0; u < 4; ++u)
            for (int64_t v = 0; v < Vectors; ++v) sums[u][v] = t.bias[j + u] - IntVec{};
        multiply_units<Vectors>(hidden, t.hidden + j * (t.units / 2), t.units / 2, sums);
        for (int64_t u = 0; u < 4; ++u)
            for (int64_t v = 0; v < Vectors; ++v) totals[v] += curve_of(t.two, j + u, sums[u][v]);
    }
    for (int64_t v = 0; v < Vectors; ++v) store_float(scores + v * kVecLanes, totals[v]);
}

// Scores of the first `count` of kRoom pairs.
inline void score_all(const TargetAttention &t, const int32_t *products, const int32_t *start, int64_t count, int32_t *hidden, float *scores) {
    int64_t pair = 0;
    for (; count - pair > (kGroup - kGroup / 2) * kVecLanes && pair + kGroup * kVecLanes <= kRoom; pair += kGroup * kVecLanes)
        score_pairs<kGroup>(t, products + pair, start + pair, hidden, scores + pair);
    for (; pair < count; pair += kVecLanes) score_pairs<1>(t, products + pair, start + pair, hidden, scores + pair);
}

// The sum of items, and of their time gaps, with weights, in their order.
template <bool kGaps>
inline void weighted_sum(const TargetAttention &t, const uint32_t *ids, const uint32_t *gaps, const float *weights, int64_t count, float *out) {
    const int64_t size = t.size;
    const auto item = [&](int64_t p, int64_t j) {
        const Vec16 own = load_float<Vec16>(t.items + int64_t{ids[p]} * size + j);
        if constexpr (kGaps) return own + load_float<Vec16>(t.gap_items + int64_t{gaps[p]} * size + j);
        return own;
    };
    int64_t j = 0;
    for (; j + 2 * kLanes <= size; j += 2 * kLanes) {
        Vec16 low = broadcast<Vec16>(0.0f), high = low;
        for (int64_t p = 0; p < count; ++p) {
            const Vec16 weight = broadcast<Vec16>(weights[p]);
            low = low + item(p, j) * weight, high = high + item(p, j + kLanes) * weight;
        }
        store_float(out + j, low), store_float(out + j + kLanes, high);
    }
    if (j < size) {
        Vec16 sum = broadcast<Vec16>(0.0f);
        for (int64_t p = 0; p < count; ++p) sum = sum + item(p, j) * broadcast<Vec16>(weights[p]);
        store_float(out + j, sum);
    }
}

// Items of a sequence that are no padding, and their time gaps; returns their number.
inline int64_t known_items(const TargetAttention &t, const uint32_t *row, uint32_t *items, uint32_t *gaps) {
    int64_t count = 0;
    for (int64_t p = 0; p < t.count; ++p) {
        const uint32_t id = row[t.begin + p];
        items[count] = id;
        if (t.gap_begin >= 0) gaps[count] = row[t.gap_begin + p];
        count += id != t.padding;
    }
    return count;
}

// Scores to weights, in place, and the sum of their items; there is room for whole sixteens.
inline void attend_items(const TargetAttention &t, const uint32_t *ids, const uint32_t *gaps, float *weights, int64_t count, float *out) {
    for (int64_t p = 0; t.gap_begin >= 0 && p < count; ++p) weights[p] += t.gap_scores[gaps[p]];
    if (t.softmax && count) {
        const float inverse = softmax(weights, count);
        for (int64_t p = 0; p < count; p += kVecLanes) store_float(weights + p, load_float<Vec>(weights + p) * inverse);
    } else if (!t.raw) {
        for (int64_t p = 0; p < count; p += kVecLanes) store_float(weights + p, logistic(load_float<Vec>(weights + p)));
    }
    (t.gap_begin >= 0 ? weighted_sum<true> : weighted_sum<false>)(t, ids, gaps, weights, count, out);
}

// Pairs of all samples, one after the other.
void attend_all(const TargetAttention &t, const uint32_t *ids, int64_t ids_stride, int64_t n, float *out, int64_t out_stride) {
    const int64_t words = t.depth / 2, places = round_up(t.count, kLanes), most = n * places;
    auto *memory = static_cast<uint8_t *>(
        kernel_scratch(4 * (kRoom * (2 * words + 2 * t.first + t.units / 2) + 5 * (most + kRoom) + 2 * kLanes)));
    auto *rows = reinterpret_cast<int32_t *>(memory), *products = rows + kRoom * std::max(words, t.first), *start = products + kRoom * words;
    auto *hidden = start + kRoom * t.first;
    auto *scores = reinterpret_cast<float *>(hidden + kRoom * (t.units / 2)), *weights = scores + most + kRoom;
    auto *items = reinterpret_cast<uint32_t *>(weights + places), *targets = items + most + kRoom, *gaps = targets + most + kRoom;
    int64_t total = 0;
    for (int64_t s = 0; s < n; ++s) {
        const int64_t count = known_items(t, ids + s * ids_stride, items + total, gaps + total);
        std::fill_n(targets + total, count, ids[s * ids_stride + t.column]);
        total += count;
    }
    for (int64_t begin = 0; begin < total; begin += kRoom) {
        const int64_t count = std::min(kRoom, total - begin), fours = round_up(count, 4);
        for (int64_t i = count; i < fours; ++i) items[begin + i] = items[begin], targets[begin + i] = targets[begin];
        for (int64_t i = 0; i < fours; ++i) {
            const int16_t *item = t.codes + int64_t{items[begin + i]} * t.depth, *target = t.codes + int64_t{targets[begin + i]} * t.depth;
            for (int64_t k = 0; k < words; k += kVecLanes)
                store_as(rows + i * words + k, rounded_products(load_as<Words>(item + 2 * k), load_as<Words>(target + 2 * k)));
        }
        transpose_words(rows, words, fours, round_up(t.pairs, 4), kRoom, products);
        for (int64_t i = 0; i < fours; ++i) {
            const int32_t *key = t.keys + int64_t{items[begin + i]} * t.first, *query = t.queries + int64_t{targets[begin + i]} * t.first;
            for (int64_t j = 0; j < t.first; j += kVecLanes)
                store_as(rows + i * t.first + j, load_as<IntVec>(key + j) + load_as<IntVec>(query + j));
        }
        transpose_words(rows, t.first, fours, t.units, kRoom, start);
        score_all(t, products, start, count, hidden, scores + begin);
    }
    int64_t begin = 0;
    for (int64_t s = 0; s < n; ++s) {
        int64_t count = 0;
        for (int64_t p = 0; p < t.count; ++p) count += ids[s * ids_stride + t.begin + p] != t.padding;
        std::copy_n(scores + begin, count, weights);
        attend_items(t, items + begin, gaps + begin, weights, count, out + s * out_stride);
        begin += count;
    }
}

// The position of every id of a list among the different ones, which are written in order; returns how many there are.
inline int64_t different(const uint32_t *ids, int64_t stride, int64_t count, int32_t *position, uint32_t *out) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t id = ids[i * stride];
        out[total] = id;
        int64_t place = 0;
        while (out[place] != id) ++place;
        position[i] = static_cast<int32_t>(place), total += place == total;
    }
    return total;
}

// Words of memory that `score_targets` takes.
inline int64_t score_room(const TargetAttention &t) {
    const int64_t words = t.depth / 2;
    return kRoom * (std::max(words, t.first) + 2 * words + 2 * t.first + t.units / 2);
}

// A lane is a target: scores [count, stride] of items and up to kRoom targets, readable up to the next four.
void score_targets(const TargetAttention &t, int32_t *rows, const uint32_t *items, int64_t count, const uint32_t *targets, int64_t n, float *scores,
                   int64_t stride) {
    const int64_t words = t.depth / 2, fours = round_up(n, 4), wide = round_up(n, kVecLanes);
    auto *codes = rows + kRoom * std::max(words, t.first), *products = codes + kRoom * words, *queries = products + kRoom * words;
    auto *start = queries + kRoom * t.first, *hidden = start + kRoom * t.first;
    for (int64_t i = 0; i < fours; ++i) std::memcpy(rows + i * words, t.codes + int64_t{targets[i]} * t.depth, static_cast<size_t>(words) * 4);
    transpose_words(rows, words, fours, round_up(t.pairs, 4), kRoom, codes);
    for (int64_t i = 0; i < fours; ++i)
        std::memcpy(rows + i * t.first, t.queries + int64_t{targets[i]} * t.first, static_cast<size_t>(t.first) * 4);
    transpose_words(rows, t.first, fours, t.units, kRoom, queries);
    for (int64_t i = 0; i < count; ++i) {
        const int16_t *item = t.codes + int64_t{items[i]} * t.depth;
        const int32_t *key = t.keys + int64_t{items[i]} * t.first;
        for (int64_t k = 0; k < t.pairs; ++k)
            for (int64_t v = 0; v < wide; v += kVecLanes)
                store_as(products + k * kRoom + v, rounded_products(load_as<Words>(codes + k * kRoom + v), broadcast_pair(item + 2 * k)));
        for (int64_t j = 0; j < t.units; ++j)
            for (int64_t v = 0; v < wide; v += kVecLanes)
                store_as(start + j * kRoom + v, load_as<IntVec>(queries + j * kRoom + v) + key[j]);
        score_all(t, products, start, n, hidden, scores + i * stride);
    }
}

void score(const TargetAttention &t, const uint32_t *items, int64_t count, const uint32_t *targets, int64_t n, float *scores, int64_t stride) {
    constexpr int64_t kItems = 32;
    auto *memory = static_cast<int32_t *>(kernel_scratch(4 * (score_room(t) + (kItems + 1) * kRoom + 4)));
    auto *target_scores = reinterpret_cast<float *>(memory + score_room(t));
    auto *padded = reinterpret_cast<uint32_t *>(target_scores + kItems * kRoom);
    for (int64_t first = 0; first < n; first += kRoom) {
        const int64_t width = std::min(kRoom, n - first);
        std::copy_n(targets + first, width, padded), std::fill_n(padded + width, 4, targets[first]);
        for (int64_t i = 0; i < count; i += kItems) {
            const int64_t together = std::min(kItems, count - i);
            score_targets(t, memory, items + i, together, padded, width, target_scores, kRoom);
            for (int64_t r = 0; r < together; ++r) std::copy_n(target_scores + r * kRoom, width, scores + (i + r) * stride + first);
        }
    }
}

void attend_scores(const TargetAttention &t, const uint32_t *items, const uint32_t *gaps, int64_t count, float *scores, int64_t stride, int64_t n,
                   float *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s) attend_items(t, items, gaps, scores + s * stride, count, out + s * out_stride);
}

// All samples have the sequence of the first: repeated items and targets are computed once.
void attend_one(const TargetAttention &t, const uint32_t *ids, int64_t ids_stride, int64_t n, float *out, int64_t out_stride) {
    const int64_t places = round_up(t.count, kLanes);
    auto *memory = static_cast<int32_t *>(kernel_scratch(4 * (score_room(t) + kRoom * places + 5 * places + 3 * kRoom + 4 * kLanes)));
    auto *scores = reinterpret_cast<float *>(memory + score_room(t)), *weights = scores + kRoom * places;
    auto *items = reinterpret_cast<uint32_t *>(weights + places), *gaps = items + places, *single = gaps + places, *targets = single + places;
    auto *item_at = reinterpret_cast<int32_t *>(targets + kRoom + 4), *target_at = item_at + places;
    const int64_t count = known_items(t, ids, items, gaps);
    const int64_t distinct = different(items, 1, count, item_at, single);
    const int64_t candidates = different(ids + t.column, ids_stride, n, target_at, targets);
    std::fill_n(targets + candidates, 4, targets[0]);
    score_targets(t, memory, single, distinct, targets, candidates, scores, kRoom);
    for (int64_t s = 0, seen = 0; s < n; ++s) {
        const int64_t target = target_at[s];
        if (target < seen) {
            int64_t before = 0;
            while (target_at[before] != target) ++before;
            std::copy_n(out + before * out_stride, t.size, out + s * out_stride);
            continue;
        }
        ++seen;
        for (int64_t p = 0; p < count; ++p) weights[p] = scores[item_at[p] * kRoom + target];
        attend_items(t, items, gaps, weights, count, out + s * out_stride);
    }
}

// Scores are looked up.
void attend_scored(const TargetAttention &t, const uint32_t *ids, int64_t ids_stride, int64_t n, float *out, int64_t out_stride) {
    const int64_t places = round_up(t.count, kLanes);
    auto *weights = static_cast<float *>(kernel_scratch(12 * places));
    auto *items = reinterpret_cast<uint32_t *>(weights + places), *gaps = items + places;
    for (int64_t s = 0; s < n; ++s, ids += ids_stride, out += out_stride) {
        const float *scores = t.scores + int64_t{ids[t.column]} * t.rows;
        const int64_t count = known_items(t, ids, items, gaps);
        for (int64_t p = 0; p < count; ++p) weights[p] = scores[items[p]];
        attend_items(t, items, gaps, weights, count, out);
    }
}

void attend(const TargetAttention &t, const uint32_t *ids, int64_t ids_stride, int64_t n, float *out, int64_t out_stride) {
    (t.scores ? attend_scored : t.one_history && n > 1 ? attend_one : attend_all)(t, ids, ids_stride, n, out, out_stride);
}

}  // namespace
}  // namespace zoo
