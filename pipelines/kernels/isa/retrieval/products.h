// Dot products of int8 vectors: with dot products of bytes by rows, else as the compiler lowers a loop.
#pragma once
#include <cstring>
#include <utility>

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
inline IntVec load_tail(const int8_t *address, int64_t count) {
    IntVec v{};
    std::memcpy(&v, address, static_cast<size_t>(count));
    return v;
}

// The sum of the two halves of a vector.
template <class V, size_t... kLanes> inline auto halved(V v, std::index_sequence<kLanes...>) {
    return __builtin_shufflevector(v, v, kLanes...) + __builtin_shufflevector(v, v, (kLanes + sizeof...(kLanes))...);
}

template <size_t kCount = kVecLanes, class V> inline Vector<int32_t, 4>::type to_four(V v) {
    if constexpr (kCount == 4) return v;
    else return to_four<kCount / 2>(halved(v, std::make_index_sequence<kCount / 2>()));
}

// Sums of pairs of lanes of two vectors, in every 128 bits those of a and of b in turn.
inline IntVec joined(IntVec a, IntVec b) {
    IntVec low{}, high{};
    for (int32_t l = 0; l < kVecLanes; ++l) low[l] = l / 4 * 4 + l % 4 / 2 + l % 2 * static_cast<int32_t>(kVecLanes), high[l] = low[l] + 2;
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// The sums of the lanes of four vectors.
inline Vector<int32_t, 4>::type sums_of(IntVec a, IntVec b, IntVec c, IntVec d) {
    const IntVec ab = joined(a, b), cd = joined(c, d);  // a, b, a, b of every 128 bits
    IntVec low{}, high{};
    for (int32_t l = 0; l < kVecLanes; ++l) low[l] = l / 4 * 4 + l % 2 + l % 4 / 2 * static_cast<int32_t>(kVecLanes), high[l] = low[l] + 2;
    return to_four(__builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high));
}

// Adds the products of vectors of four rows, + kQueryMiddle a value, with that of the query.
template <class Load>
inline void add_four(IntVec &a, IntVec &b, IntVec &c, IntVec &d, const int8_t *row, int64_t size, IntVec query, Load load) {
    add_query_products(a, load(row) ^ kQueryMiddles, query);
    add_query_products(b, load(row + size) ^ kQueryMiddles, query);
    add_query_products(c, load(row + 2 * size) ^ kQueryMiddles, query);
    add_query_products(d, load(row + 3 * size) ^ kQueryMiddles, query);
}

void dots(const int8_t *query, const int8_t *rows, int64_t count, int64_t size, int32_t *out) {
    if constexpr (kTerms < 4) return dots_of_words(query, rows, count, size, out);
    const int64_t whole = size / kBytesTogether * kBytesTogether, tail = size - whole;
    const IntVec last = load_tail(query + whole, tail);
    const int8_t *const end = rows + count * size;
    const auto load_whole = [](const int8_t *address) { return load_as<IntVec>(address); };
    const auto load_last = [tail](const int8_t *address) { return load_tail(address, tail); };
    int32_t shifted = 0;  // what kQueryMiddle in every value of a row adds
    for (int64_t j = 0; j < size; ++j) shifted += kQueryMiddle * query[j];
    int64_t i = 0;
    for (; i + 4 <= count; i += 4, rows += 4 * size) {
        IntVec a{}, b{}, c{}, d{};
        for (int64_t j = 0; j < whole; j += kBytesTogether) add_four(a, b, c, d, rows + j, size, load_as<IntVec>(query + j), load_whole);
        if (tail && rows + 3 * size + whole + kBytesTogether <= end)
            add_four(a, b, c, d, rows + whole, size, last, load_whole);  // what lies behind a row is multiplied by zeros
        else if (tail)
            add_four(a, b, c, d, rows + whole, size, last, load_last);
        store_as(out + i, sums_of(a, b, c, d) - shifted);
    }
    for (; i < count; ++i, rows += size) {
        IntVec sum{};
        for (int64_t j = 0; j < whole; j += kBytesTogether) add_query_products(sum, load_as<IntVec>(rows + j) ^ kQueryMiddles, load_as<IntVec>(query + j));
        add_query_products(sum, load_tail(rows + whole, tail) ^ kQueryMiddles, last);
        const auto four = to_four(sum);
        out[i] = four[0] + four[1] + four[2] + four[3] - shifted;
    }
}

int64_t above(const int32_t *products, int64_t count, int32_t limit, int32_t *positions) {
    int64_t matches = 0, i = 0;
#if defined(__AVX512F__)
    __m512i position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 16 <= count; i += 16, position = _mm512_add_epi32(position, _mm512_set1_epi32(16))) {
        const __mmask16 mask = _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(products + i), _mm512_set1_epi32(limit));
        if (!mask) continue;
        _mm512_mask_compressstoreu_epi32(positions + matches, mask, position);
        matches += __builtin_popcount(mask);
    }
#else
    for (; i + kVecLanes <= count; i += kVecLanes) {
        const IntVec larger = load_as<IntVec>(products + i) > limit;
        if (!reduce<int32_t, kVecLanes>(larger, [](auto a, auto b) { return a | b; })) continue;
        for (int64_t l = i; l < i + kVecLanes; ++l) {
            positions[matches] = static_cast<int32_t>(l);
            matches += products[l] > limit;
        }
    }
#endif
    for (; i < count; ++i) {
        positions[matches] = static_cast<int32_t>(i);
        matches += products[i] > limit;
    }
    return matches;
}

}  // namespace
}  // namespace zoo
