// The image kernels for AVX-512 with VNNI that are not those of ../bytes/.
#pragma once
#include <immintrin.h>

#include "isa/x86/avx512/products.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

// Half of the table at a time, where the CPU has VBMI.
__attribute__((target("avx512vbmi"))) inline void lookup_of_halves(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n) {
    __m512i quarters[4];
    for (int64_t q = 0; q < 4; ++q) quarters[q] = _mm512_loadu_si512(table + 64 * q);
    for (int64_t i = 0; i < n; i += 64) {
        const __mmask64 there = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        const __m512i v = _mm512_maskz_loadu_epi8(there, x + i);
        const __m512i lower = _mm512_permutex2var_epi8(quarters[0], v, quarters[1]), upper = _mm512_permutex2var_epi8(quarters[2], v, quarters[3]);
        _mm512_mask_storeu_epi8(out + i, there, _mm512_mask_blend_epi8(_mm512_movepi8_mask(v), lower, upper));
    }
}

// Sixteen bytes of the table at a time, for the bytes whose upper half names them.
inline void lookup(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n) {
    static const bool halves = __builtin_cpu_supports("avx512vbmi") > 0;
    if (halves) return lookup_of_halves(table, x, out, n);
    __m512i rows[16];
    for (int64_t h = 0; h < 16; ++h) rows[h] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table + 16 * h)));
    const __m512i half = _mm512_set1_epi8(0x0F);
    for (int64_t i = 0; i < n; i += 64) {
        const __mmask64 there = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        const __m512i v = _mm512_maskz_loadu_epi8(there, x + i);
        const __m512i low = _mm512_and_si512(v, half), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), half);
        __m512i result = _mm512_shuffle_epi8(rows[0], low);
        for (int h = 1; h < 16; ++h)
            result = _mm512_mask_shuffle_epi8(result, _mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8(static_cast<char>(h))), rows[h], low);
        _mm512_mask_storeu_epi8(out + i, there, result);
    }
}

}  // namespace
}  // namespace zoo
