// Dot products of int8 vectors: with dot products of bytes by rows, else as the compiler lowers a loop.
#pragma once
#include <cstring>

#include "isa/retrieval/kernels.h"
#include "isa/vectors/code_products.h"
#include "isa/vectors/words.h"

namespace zoo {
namespace {

inline void dots_of_words(const int8_t *__restrict query, const int8_t *__restrict rows, int64_t count, int64_t size, int32_t *__restrict out) {
    for (int64_t i = 0; i < count; ++i) {
        const int8_t *row = rows + i * size;
        int32_t sum = 0;
        for (int64_t j = 0; j < size; ++j) sum += static_cast<int32_t>(static_cast<int16_t>(query[j])) * static_cast<int16_t>(row[j]);
        out[i] = sum;
    }
}

constexpr int64_t kBytesTogether = 4 * kVecLanes;  // of a vector

// The last bytes of a row, fewer than a vector's, and zeros.
inline IntVec load_tail(const int8_t *at, int64_t count) {
    IntVec v{};
    std::memcpy(&v, at, static_cast<size_t>(count));
    return v;
}

// Sums of products of a row, + kQueryMiddle a value, with the query, in the lanes of a vector. `last`: of the query.
inline IntVec lanes_of(const int8_t *query, const int8_t *row, int64_t whole, int64_t tail, IntVec last) {
    IntVec sum{};
    for (int64_t j = 0; j < whole; j += kBytesTogether) add_query_products(sum, load_as<IntVec>(row + j) ^ kQueryMiddles, load_as<IntVec>(query + j));
    if (tail) add_query_products(sum, load_tail(row + whole, tail) ^ kQueryMiddles, last);
    return sum;
}

inline Vector<int32_t, 4>::type to_four(IntVec v) {
    using Four = Vector<int32_t, 4>::type;
    Four parts[kVecLanes / 4], sum{};
    std::memcpy(parts, &v, sizeof v);
    for (const Four part : parts) sum += part;
    return sum;
}

// The sums of the lanes of four vectors.
inline Vector<int32_t, 4>::type sums_of(IntVec a, IntVec b, IntVec c, IntVec d) {
    using Four = Vector<int32_t, 4>::type;
    const Four p = to_four(a), q = to_four(b), r = to_four(c), s = to_four(d), low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, second{2, 3, 6, 7};
    const Four pq = __builtin_shuffle(p, q, low) + __builtin_shuffle(p, q, high), rs = __builtin_shuffle(r, s, low) + __builtin_shuffle(r, s, high);
    return __builtin_shuffle(pq, rs, first) + __builtin_shuffle(pq, rs, second);
}

void dots(const int8_t *query, const int8_t *rows, int64_t count, int64_t size, int32_t *out) {
    if constexpr (kTerms < 4) return dots_of_words(query, rows, count, size, out);
    const int64_t whole = size / kBytesTogether * kBytesTogether, tail = size - whole;
    const IntVec last = load_tail(query + whole, tail);
    int32_t shifted = 0;  // what kQueryMiddle in every value of a row adds
    for (int64_t j = 0; j < size; ++j) shifted += kQueryMiddle * query[j];
    int64_t i = 0;
    for (; i + 4 <= count; i += 4, rows += 4 * size)
        store_as(out + i, sums_of(lanes_of(query, rows, whole, tail, last), lanes_of(query, rows + size, whole, tail, last),
                                  lanes_of(query, rows + 2 * size, whole, tail, last), lanes_of(query, rows + 3 * size, whole, tail, last)) - shifted);
    for (; i < count; ++i, rows += size) {
        const auto four = to_four(lanes_of(query, rows, whole, tail, last));
        out[i] = four[0] + four[1] + four[2] + four[3] - shifted;
    }
}

int64_t above(const int32_t *products, int64_t count, int32_t limit, int32_t *positions) {
    int64_t found = 0, i = 0;
#if defined(__AVX512F__)
    __m512i position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= count; i += 16, position = _mm512_add_epi32(position, _mm512_set1_epi32(16))) {
        const __mmask16 mask = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(products + i), _mm512_set1_epi32(limit));
        if (!mask) continue;
        _mm512_mask_compressstoreu_epi32(positions + found, mask, position);
        found += __builtin_popcount(mask);
    }
#else
    for (; i + kVecLanes <= count; i += kVecLanes) {
        const IntVec larger = load_as<IntVec>(products + i) > limit;
        if (!reduce<int32_t, kVecLanes>(larger, [](auto a, auto b) { return a | b; })) continue;
        for (int64_t l = i; l < i + kVecLanes; ++l) {
            positions[found] = static_cast<int32_t>(l);
            found += products[l] > limit;
        }
    }
#endif
    for (; i < count; ++i) {
        positions[found] = static_cast<int32_t>(i);
        found += products[i] > limit;
    }
    return found;
}

}  // namespace
}  // namespace zoo
