// Tables of 256 bytes in vectors of 256 bits.
#pragma once
#include <immintrin.h>

#include "isa/images/kernels.h"

namespace zoo {
namespace {

constexpr auto lookup_floats = lookup_floats_alone;

// Sixteen bytes of the table at a time, for the bytes whose upper half names them.
inline void lookup(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n) {
    __m256i rows[16];
    for (int64_t h = 0; h < 16; ++h) rows[h] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table + 16 * h)));
    const __m256i half = _mm256_set1_epi8(0x0F);
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(x + i));
        const __m256i low = _mm256_and_si256(v, half), high = _mm256_and_si256(_mm256_srli_epi16(v, 4), half);
        __m256i result = _mm256_shuffle_epi8(rows[0], low);
        for (int h = 1; h < 16; ++h) {
            const __m256i here = _mm256_cmpeq_epi8(high, _mm256_set1_epi8(static_cast<char>(h)));
            result = _mm256_blendv_epi8(result, _mm256_shuffle_epi8(rows[h], low), here);
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), result);
    }
    for (; i < n; ++i) out[i] = table[x[i]];
}

}  // namespace
}  // namespace zoo
