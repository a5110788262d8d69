// The image kernels for AVX-512 with VNNI that are not those of ../bytes/.
#pragma once
#include <immintrin.h>

#include "isa/images/kernels.h"
#include "isa/x86/avx512/bytes.h"
#include "isa/x86/bytes/depthwise.h"
#include "isa/x86/bytes/product.h"
#include "isa/x86/bytes/products.h"

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

// The bytes of floats by the tables of each, and joined: 128 bits by 128 bits, for which x has its fours in the order of their columns.
__attribute__((target("avx512vbmi"))) inline void lookup_floats_of_planes(const float *table, const PixelRow<const uint8_t> &x,
                                                                          const PixelRow<float> &out, int64_t rows, int64_t n) {
    __m512i planes[4][4];  // of a byte, quarters of its table
    for (int byte = 0; byte < 4; ++byte)
        for (int q = 0; q < 4; ++q) {
            const auto sixteen = [&](int part) __attribute__((target("avx512vbmi"))) {
                return _mm512_cvtepi32_epi8(_mm512_srl_epi32(_mm512_loadu_si512(table + 64 * q + 16 * part), _mm_cvtsi32_si128(8 * byte)));
            };
            const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(0)), sixteen(1), 1);
            const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(2)), sixteen(3), 1);
            planes[byte][q] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
    const __m512i columns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < n; i += 64) {
            const __mmask64 there = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
            const __m512i v = _mm512_permutexvar_epi32(columns, _mm512_maskz_loadu_epi8(there, x.data + row * x.pitch + i));
            const __mmask64 above = _mm512_movepi8_mask(v);
            __m512i bytes[4];
            for (int b = 0; b < 4; ++b)
                bytes[b] = _mm512_mask_blend_epi8(above, _mm512_permutex2var_epi8(planes[b][0], v, planes[b][1]),
                                                  _mm512_permutex2var_epi8(planes[b][2], v, planes[b][3]));
            const __m512i low = _mm512_unpacklo_epi8(bytes[0], bytes[1]), high = _mm512_unpackhi_epi8(bytes[0], bytes[1]);
            const __m512i upper_low = _mm512_unpacklo_epi8(bytes[2], bytes[3]), upper_high = _mm512_unpackhi_epi8(bytes[2], bytes[3]);
            const __m512i floats[4] = {_mm512_unpacklo_epi16(low, upper_low), _mm512_unpackhi_epi16(low, upper_low),
                                       _mm512_unpacklo_epi16(high, upper_high), _mm512_unpackhi_epi16(high, upper_high)};
            for (int part = 0; part < 4 && i + 16 * part < n; ++part) _mm512_storeu_si512(out.data + row * out.pitch + i + 16 * part, floats[part]);
        }
}

inline void lookup_floats(const float *table, const PixelRow<const uint8_t> &x, const PixelRow<float> &out, int64_t rows, int64_t n) {
    static const bool planes = __builtin_cpu_supports("avx512vbmi") > 0;
    (planes ? lookup_floats_of_planes : lookup_floats_alone)(table, x, out, rows, n);
}

}  // namespace
}  // namespace zoo
