// `ActivationTable` of words in vectors of 256 bits.
#pragma once
#include "isa/isa.h"
#include "isa/x86/avx2/memory.h"

namespace zoo {
namespace {

struct ActivatedWords {
    const int16_t *starts;
    __m256i limit, factor, zero;
    __m128i shift, left_shift;
    explicit ActivatedWords(const ActivationTable &t)
        : starts(t.starts), limit(_mm256_set1_epi16(static_cast<int16_t>(t.limit))),
          factor(_mm256_set1_epi16(static_cast<int16_t>(t.factor))), zero(_mm256_set1_epi16(static_cast<int16_t>(t.zero))), shift(_mm_cvtsi32_si128(t.shift)),
          left_shift(_mm_cvtsi32_si128(15 - t.shift)) {}
    __m256i of(__m256i x) const { return bytes(result(x)); }
    __m256i of(__m256i x, __m256i gain) const { return bytes(_mm256_mulhrs_epi16(result(x), gain)); }

  private:
    __m256i result(__m256i x) const {
        const __m256i u = _mm256_min_epu16(_mm256_abs_epi16(x), limit), segment = _mm256_srl_epi16(u, shift);
        // The start of a segment and that of the next one, of the even words and of the odd ones.
        const auto pairs = [&](__m256i segments) { return _mm256_i32gather_epi32(reinterpret_cast<const int *>(starts), segments, 2); };
        const __m256i even = pairs(_mm256_and_si256(segment, _mm256_set1_epi32(0xFFFF))), odd = pairs(_mm256_srli_epi32(segment, 16));
        const __m256i start = _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
        const __m256i next = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xAA);
        const __m256i part = _mm256_and_si256(_mm256_sll_epi16(u, left_shift), _mm256_set1_epi16(32767));
        const __m256i remainder = _mm256_add_epi16(start, _mm256_mulhrs_epi16(_mm256_sub_epi16(next, start), part));
        return _mm256_subs_epi16(_mm256_max_epi16(x, _mm256_setzero_si256()), remainder);
    }
    __m256i bytes(__m256i result) const { return _mm256_add_epi16(_mm256_mulhrs_epi16(result, factor), zero); }
};

}  // namespace
}  // namespace zoo
