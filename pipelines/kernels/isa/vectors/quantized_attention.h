// Self-attention of an encoder in integers, `QuantizedAttention` of transformer/operations: queries, keys, values and weights are codes of 8 bits.
#pragma once
#include <algorithm>
#include <cmath>

#include "isa/isa.h"
#include "isa/vectors/quantized_heads.h"

namespace zoo {
namespace {

constexpr float kWeights = 255;

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

// 255 2^x for x <= 0, to .03, and what is rounded to 0 from -16 down.
template <class V>
inline V weight_of(V x) {
    x = at_least(x, -16);
    const V shifted = x + kRoundToInt, f = x - (shifted - kRoundToInt);
    const V p = ((f * 14.027278f + 61.763796f) * f + 176.78715f) * f + kWeights;
    return times_power(p, shifted);
}

// The codes of the weights of a few keys by their scores, of which `base` is the largest, and their sums. Returns how many of `count` keys.
ZOO_INLINE inline int64_t weigh(const float *scores, float base, int64_t count, Code *codes, IntVec &total) {
    constexpr int64_t kFour = sizeof(Four) / sizeof(float), kWord = kVecLanes * kTerms;
    if (count < kFour) {
        const IntVec code = rounded(weight_of(load_float<Vec>(scores) - base)) & 0xFF;
        total += code;
        store_codes(codes, code);
        return kVecLanes;
    }
    const Four weights = weight_of(load_float<Four>(scores) - base);
    const Vec four[] = {weights.lo.lo, weights.lo.hi, weights.hi.lo, weights.hi.hi};
    store_rounded<0, true>(codes, four);
    for (int64_t i = 0; i < kFour; i += kWord) {
        IntVec words;
        std::memcpy(&words, codes + i, sizeof words);
        add_products(total, words, IntVec{} + kOnes);
    }
    return kFour;
}

// The same of Count queries, rows [Count, room] of scores and codes, a few keys at a time.
template <int Count>
struct Weighing {
    const float *const scores;
    Code *const codes;
    const int64_t room, columns;  // columns: keys of a row
    float base[Count];
    IntVec totals[Count];
    int64_t row = 0, key = 0;
    Weighing(const float *from, Code *to, int64_t room_of, int64_t count) : scores(from), codes(to), room(room_of), columns(count) {}

    // Pieces of all rows.
    int64_t pieces() const { return Count * (columns / (4 * kVecLanes) + columns % (4 * kVecLanes) / kVecLanes); }
    ZOO_INLINE inline void advance() {
        if (row == Count) return;
        IntVec total = key ? totals[row] : IntVec{};
        key += weigh(scores + row * room + key, base[row], columns - key, codes + row * room + key, total);
        totals[row] = total;
        if (key == columns) key = 0, ++row;
    }
    // 1 / sum of the weights of each query; NaN of those whose factor is not finite.
    ZOO_INLINE inline void finish(const float *factor, float *share) {
        while (row < Count) advance();
        Vec sums[Count];
        for (int i = 0; i < Count; ++i) sums[i] = __builtin_convertvector(totals[i], Vec);
        reduce_each<float, Count>(sums, share, [](auto a, auto b) ZOO_INLINE { return a + b; });  // exact: less than 2^24
        for (int i = 0; i < Count; ++i) share[i] = 1.0f / share[i] + (factor[i] - factor[i]);
    }
};

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

// Packs Count queries from `first` on, rows of x.
template <int Count>
inline void pack_queries(const QuantizedAttention &a, const Head &head, int64_t h, const float *x, int64_t stride, int64_t first) {
    const int64_t size = head.size;
    const float *queries[Count];
    for (int row = 0; row < Count; ++row) {
        fetch(x + (row + Count) * stride, size);
        queries[row] = positioned(a, x + row * stride, a.query_norm, first + row, head.positioned + row * size);
    }
    pack_rows<kQueryMiddle, Count>(queries, head.key_scale, size, head.queries, head.factor);
    if (a.to_position.codes) pack_rows<kQueryMiddle, Count>(queries, a.to_position.scale + h * size, size, head.position_queries, head.position_factor);
}

// The sums of values by weights, rows [Count, room] of codes.
template <int Count, class... Do>
inline void weigh_values(const Head &head, const Code *weights, int64_t begin, int64_t end, const float *share, float *out, int64_t out_stride, const Do &...meanwhile) {
    const int64_t size = head.size;
    const float *const value_scale = head.value_scale;
    product_rows<Count, false>(weights, head.room, round_up(end - begin, kTerms) / kTerms, head.values + begin / kTerms * size, size, size, nullptr,
                               [&](int row, int64_t column, IntVec sums) {
        store_float(out + row * out_stride + column, (__builtin_convertvector(sums, Vec) * share[row]) * load_float<Vec>(value_scale + column));
    }, meanwhile...);
}

// Count queries from `first` on over the keys that any of them attends to; each has one or more. bias: of the text's first query, or null.
template <int Count>
void attend(const QuantizedAttention &a, const Head &head, int64_t h, const float *x, int64_t stride, int64_t first, const float *bias, float *out,
            int64_t out_stride) {
    const int64_t begin = first > a.before ? (first - a.before) / kLanes * kLanes : 0;
    const int64_t end = head.n - first - Count > a.after ? first + Count + a.after : head.n;
    pack_queries<Count>(a, head, h, x, stride, first);
    Weighing<Count> weighing{head.scores, head.weights, head.room, round_up(end - begin, kLanes)};
    if (head.added) full_scores<Count>(head, first, weighing.base);
    else banded_scores<Count>(a, head, first, begin, end, bias, weighing.base);
    float share[Count];
    weighing.finish(head.factor, share);
    weigh_values<Count>(head, head.weights, begin, end, share, out, out_stride);
}

// Blocks of Count queries, the first ones, all of which attend to all keys. The next ones' weights are computed between the products with values, which
// need other parts of the CPU.
template <int Count>
void attend_blocks(const QuantizedAttention &a, const Head &head, int64_t h, const float *x, int64_t stride, int64_t blocks, float *out, int64_t out_stride) {
    float shares[2][Count];
    const int64_t words = round_up(head.n, kTerms) / kTerms * ((head.size + 2 * kVecLanes - 1) / (2 * kVecLanes));
    for (int64_t block = 0; block <= blocks; ++block) {
        const int64_t side = block % 2;
        const auto weights = [&](int64_t of) { return head.weights + of * Count * head.room; };
        Weighing<Count> weighing{head.scores, weights(side), head.room, head.room};
        if (block < blocks) {
            pack_queries<Count>(a, head, h, x + block * Count * stride, stride, block * Count);
            full_scores<Count>(head, block * Count, weighing.base);
        } else weighing.row = Count;
        if (block > 0)
            weigh_values<Count>(head, weights(1 - side), 0, head.n, shares[1 - side], out + (block - 1) * Count * out_stride, out_stride,
                                Meanwhile{words / weighing.pieces() + 1, [&]() ZOO_INLINE { weighing.advance(); }});
        if (block < blocks) weighing.finish(head.factor, shares[side]);
    }
}

void quantized_attention(const QuantizedAttention &a, const float *x, int64_t stride, int64_t tokens, int64_t n, float *out, int64_t out_stride) {
    const int64_t size = a.size, room = round_up(n, kLanes), group = a.heads / a.key_heads;
    const int64_t queries = tokens - n > a.before ? n + a.before : tokens;  // those behind have no key within reach
    const int64_t span = a.rows ? round_up(tokens + room, kLanes) : 0, there = a.rows ? 1 : 0, words = size / kTerms;
    const int64_t parts[] = {size, size, size, 16 * size, kLanes, room, kQueries * size, size * room, size * room, kQueries * room, 2 * kQueries * room,
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
        if (head.added && kQueries > 4) {
            attend_blocks<kQueries>(a, head, h, x + h * size, stride, queries / kQueries, out + h * size, out_stride);
            i = queries / kQueries * kQueries;
        }
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
