// MaxSim of a query and documents in integers, see transformer/token_vectors.py.
#pragma once
#include <algorithm>
#include <cmath>

#include "isa/late_interaction/kernels.h"
#include "isa/vectors/code_products.h"

namespace zoo {
namespace {

constexpr int64_t kTokens = kQueries;  // of a document that are multiplied together

// Codes of a query [n, size] as words of columns, [size / kTerms, stride], behind them [stride] that take the zero point out.
int64_t query_words(int64_t size, int64_t stride) { return (size / kTerms + 1) * stride; }

void pack_query(const int8_t *codes, int64_t n, int64_t size, int64_t stride, int32_t *words) {
    const int64_t groups = size / kTerms;
    for (int64_t g = 0; g < groups; ++g)
        for (int64_t i = 0; i < stride; ++i) {
            Code terms[kTerms] = {};
            for (int64_t k = 0; i < n && k < kTerms; ++k) terms[k] = static_cast<Code>(codes[i * size + g * kTerms + k]);
            words[g * stride + i] = packed(terms);
        }
    zero_offsets(words, groups, stride, words + groups * stride);
}

// The largest of the products of Count tokens with Wide vectors of the query, each times the token's scale, and of best.
template <int Count, int Wide>
inline void best_products(const Code *codes, const float *scale, int64_t size, const int32_t *words, int64_t stride, const int32_t *start, float *best) {
    Vec low = load_float<Vec>(best), high = Wide > 1 ? load_float<Vec>(best + kVecLanes) : low;
    product_tile<Count, Wide, false>(codes, size, size / kTerms, words, stride, start, [&](int row, int part, IntVec sums) {
        const Vec x = __builtin_convertvector(sums, Vec) * scale[row];
        if (part)
            high = x > high ? x : high;
        else
            low = x > low ? x : low;
    });
    store_float(best, low);
    if constexpr (Wide > 1) store_float(best + kVecLanes, high);
}

template <int Count>
inline void best_of_tokens(const uint8_t *tokens, const float *scale, int64_t size, const int32_t *words, int64_t stride, Code *wide, float *best) {
    const Code *codes;
    if constexpr (sizeof(Code) == 1) {
        codes = reinterpret_cast<const Code *>(tokens);
    } else {
        for (int64_t j = 0; j < Count * size; ++j) wide[j] = static_cast<Code>(tokens[j]);
        codes = wide;
    }
    const int32_t *start = words + size / kTerms * stride;
    int64_t column = 0;
    for (; column + 2 * kVecLanes <= stride; column += 2 * kVecLanes)
        best_products<Count, 2>(codes, scale, size, words + column, stride, start + column, best + column);
    for (; column < stride; column += kVecLanes) best_products<Count, 1>(codes, scale, size, words + column, stride, start + column, best + column);
}

float max_sim(const int32_t *words, const float *query_scale, int64_t stride, int64_t size, const uint8_t *tokens, const float *scale, int64_t n) {
    auto *best = static_cast<float *>(kernel_scratch((stride + kTokens * size) * 4));
    auto *wide = reinterpret_cast<Code *>(best + stride);
    std::fill_n(best, stride, -INFINITY);
    const auto run = [&](auto function, int64_t t) { function(tokens + t * size, scale + t, size, words, stride, wide, best); };
    int64_t t = 0;
    if constexpr (kTokens > 4)
        for (; t + 8 <= n; t += 8) run(best_of_tokens<8>, t);
    for (; t + 4 <= n; t += 4) run(best_of_tokens<4>, t);
    for (; t + 2 <= n; t += 2) run(best_of_tokens<2>, t);
    if (t < n) run(best_of_tokens<1>, t);
    Vec16 sums = broadcast<Vec16>(0);
    for (int64_t i = 0; i < stride; i += kLanes) sums = sums + load_float<Vec16>(best + i) * load_float<Vec16>(query_scale + i);
    return reduce_add(sums);
}

}  // namespace
}  // namespace zoo
