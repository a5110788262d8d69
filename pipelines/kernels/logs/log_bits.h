// Which of 64 bytes of a log are these, and where: SSE2 or plain, and AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "recommenders/arrays.h"

namespace clicks::logs {

// A bit for each of 64 bytes: is it this one?
struct Bits {
    static ALWAYS_INLINE uint64_t equal(const uint8_t *p, uint8_t byte) {
        return of(p, [byte](const uint8_t *q) {
#if defined(__SSE2__)
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q));
            return _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(static_cast<char>(byte))));
#else
            int bits = 0;
            for (int i = 0; i < 16; ++i)
                bits |= (q[i] == byte) << i;
            return bits;
#endif
        });
    }
    // Is it beyond ASCII?
    static ALWAYS_INLINE uint64_t high(const uint8_t *p) {
        return of(p, [](const uint8_t *q) {
#if defined(__SSE2__)
            return _mm_movemask_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(q)));
#else
            int bits = 0;
            for (int i = 0; i < 16; ++i)
                bits |= (q[i] >> 7) << i;
            return bits;
#endif
        });
    }
    // Writes `offset` + the places of the bits, and more; returns their end.
    static ALWAYS_INLINE uint32_t *places(uint64_t bits, uint32_t offset, uint32_t *to) {
        const int count = __builtin_popcountll(bits);
        for (int done = 0; done < count; done += 8) // eight at a time, more than there may be: few branches surprise the CPU
            for (int i = 0; i < 8; ++i) {
                to[done + i] = offset + __builtin_ctzll(bits | uint64_t{1} << 63);
                bits &= bits - 1;
            }
        return to + count;
    }

  private:
    template <class Sixteen> static ALWAYS_INLINE uint64_t of(const uint8_t *p, const Sixteen &sixteen) {
        uint64_t bits = 0;
        for (int i = 0; i < 4; ++i)
            bits |= uint64_t{static_cast<uint16_t>(sixteen(p + 16 * i))} << 16 * i;
        return bits;
    }
};

#if defined(__x86_64__)
// The same in registers of 64 bytes.
struct Bits512 {
    AVX512 static inline uint64_t equal(const uint8_t *p, uint8_t byte) {
        return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(byte)));
    }
    AVX512 static inline uint64_t high(const uint8_t *p) { return _mm512_movepi8_mask(_mm512_loadu_si512(p)); }
    AVX512 static inline uint32_t *places(uint64_t bits, uint32_t offset, uint32_t *to) {
        const __m512i first = _mm512_add_epi32(
            _mm512_set1_epi32(static_cast<int>(offset)), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        for (int i = 0; i < 4; ++i) {
            const auto mask = static_cast<__mmask16>(bits >> 16 * i);
            _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(mask, _mm512_add_epi32(first, _mm512_set1_epi32(16 * i))));
            to += __builtin_popcount(mask);
        }
        return to;
    }
};
#endif

} // namespace clicks::logs
