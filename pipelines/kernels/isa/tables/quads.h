// Sums of quantized rows, four at a time: their codes are interleaved byte by byte, so that one instruction multiplies four codes of a column with the four
// scales and adds them to the column's int32. A scale is 256 high + low, both int8. Without such products codes are widened to int16, two at a time.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

// Vectors of 16 and 32 bytes, and of 64 where there are any. `transpose` brings the sums of columns 16 L + 4 k + i, i < 4, of 128-bit lane L of vector k into order.
struct Sixteen {
    using V = __m128i;
    static V load(const uint8_t *address) { return _mm_loadu_si128(reinterpret_cast<const V *>(address)); }
    static V low8(V a, V b) { return _mm_unpacklo_epi8(a, b); }
    static V high8(V a, V b) { return _mm_unpackhi_epi8(a, b); }
    static V low16(V a, V b) { return _mm_unpacklo_epi16(a, b); }
    static V high16(V a, V b) { return _mm_unpackhi_epi16(a, b); }
    static V shift(V a, int bits) { return _mm_srli_epi16(a, bits); }
    static V mask(V a, int mask) { return _mm_and_si128(a, _mm_set1_epi8(static_cast<char>(mask))); }
    static V zero() { return _mm_setzero_si128(); }
    static V add(V a, V b) { return _mm_add_epi32(a, b); }
    static V times256(V a) { return _mm_slli_epi32(a, 8); }
    static V all(__m128i parameters, __m128i order) { return _mm_shuffle_epi8(parameters, order); }
    static void transpose(V &, V &, V &, V &) {}
    static void store(float *address, V sums, float unit, float bias, int64_t count) {
        const __m128 value = _mm_add_ps(_mm_mul_ps(_mm_cvtepi32_ps(sums), _mm_set1_ps(unit)), _mm_set1_ps(bias));
        if (count >= 4)
            _mm_storeu_ps(address, value);
        else
            std::memcpy(address, &value, static_cast<size_t>(count) * 4);
    }
};

struct ThirtyTwo {
    using V = __m256i;
    static V load(const uint8_t *address) { return _mm256_loadu_si256(reinterpret_cast<const V *>(address)); }
    static V low8(V a, V b) { return _mm256_unpacklo_epi8(a, b); }
    static V high8(V a, V b) { return _mm256_unpackhi_epi8(a, b); }
    static V low16(V a, V b) { return _mm256_unpacklo_epi16(a, b); }
    static V high16(V a, V b) { return _mm256_unpackhi_epi16(a, b); }
    static V shift(V a, int bits) { return _mm256_srli_epi16(a, bits); }
    static V mask(V a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(mask))); }
    static V zero() { return _mm256_setzero_si256(); }
    static V add(V a, V b) { return _mm256_add_epi32(a, b); }
    static V times256(V a) { return _mm256_slli_epi32(a, 8); }
    static V all(__m128i parameters, __m128i order) { return _mm256_broadcastsi128_si256(_mm_shuffle_epi8(parameters, order)); }
    static void transpose(V &a, V &b, V &c, V &d) {
        const V first = _mm256_permute2x128_si256(a, b, 0x20), second = _mm256_permute2x128_si256(c, d, 0x20);
        const V third = _mm256_permute2x128_si256(a, b, 0x31), fourth = _mm256_permute2x128_si256(c, d, 0x31);
        a = first, b = second, c = third, d = fourth;
    }
    static void store(float *address, V sums, float unit, float bias, int64_t count) {
        const __m256 value = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(unit)), _mm256_set1_ps(bias));
        if (count >= 8)
            _mm256_storeu_ps(address, value);
        else
            std::memcpy(address, &value, static_cast<size_t>(count) * 4);
    }
};

#if defined(__AVX512F__)
struct SixtyFour {
    using V = __m512i;
    static V load(const uint8_t *address) { return _mm512_loadu_si512(address); }
    static V low8(V a, V b) { return _mm512_unpacklo_epi8(a, b); }
    static V high8(V a, V b) { return _mm512_unpackhi_epi8(a, b); }
    static V low16(V a, V b) { return _mm512_unpacklo_epi16(a, b); }
    static V high16(V a, V b) { return _mm512_unpackhi_epi16(a, b); }
    static V shift(V a, int bits) { return _mm512_srli_epi16(a, static_cast<unsigned>(bits)); }
    static V mask(V a, int mask) { return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(mask))); }
    static V zero() { return _mm512_setzero_si512(); }
    static V add(V a, V b) { return _mm512_add_epi32(a, b); }
    static V times256(V a) { return _mm512_slli_epi32(a, 8); }
    static V all(__m128i parameters, __m128i order) { return _mm512_broadcast_i32x4(_mm_shuffle_epi8(parameters, order)); }
    static void transpose(V &a, V &b, V &c, V &d) {
        const V ab = _mm512_shuffle_i32x4(a, b, 0x44), cd = _mm512_shuffle_i32x4(c, d, 0x44);
        const V ef = _mm512_shuffle_i32x4(a, b, 0xee), gh = _mm512_shuffle_i32x4(c, d, 0xee);
        a = _mm512_shuffle_i32x4(ab, cd, 0x88), b = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        c = _mm512_shuffle_i32x4(ef, gh, 0x88), d = _mm512_shuffle_i32x4(ef, gh, 0xdd);
    }
    static void store(float *address, V sums, float unit, float bias, int64_t count) {
        const __m512 value = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(unit)), _mm512_set1_ps(bias));
        if (count >= 16)
            _mm512_storeu_ps(address, value);
        else
            _mm512_mask_storeu_ps(address, static_cast<__mmask16>((1 << count) - 1), value);
    }
};
#endif

// Sums of bytes take two registers each, which are too many of sixteen: then codes are widened to words.
constexpr bool kQuadsOfBytes = kTerms == 4 && kVecLanes == 16;

// The scales of four rows as every dword of a vector, for `sum_columns`, from [scale, bias] int16 of each.
template <class B>
struct Scales {
    typename B::V low, high;
    explicit Scales(__m128i p) {
        if constexpr (kQuadsOfBytes) {
            const __m128i first = _mm_set1_epi32(0x0c080400), second = _mm_set1_epi32(0x0d090501);
            low = B::all(p, first), high = B::all(_mm_add_epi32(p, _mm_set1_epi32(128)), second);
        } else {
            low = B::all(p, _mm_set1_epi32(0x05040100)), high = B::all(p, _mm_set1_epi32(0x0d0c0908));  // of two rows each, int16
        }
    }
};

// Sums of four columns a 128-bit lane.
template <class B>
struct Sum {
    typename B::V low = B::zero(), high = B::zero();
    void take(const Scales<B> &scales, typename B::V four) { dot_u8s8(low, four, scales.low), dot_u8s8(high, four, scales.high); }  // bytes of four rows
    void take(const Scales<B> &scales, typename B::V ab, typename B::V cd) {  // int16 of two rows each
        add_pairs(low, ab, scales.low), add_pairs(low, cd, scales.high);
    }
    typename B::V total() const {
        return kQuadsOfBytes ? B::add(B::times256(high), low) : low;
    }
};

// One plane of the bytes of four rows: (byte >> Shift) & Mask, added to the sums of its columns.
template <class B, int Shift, int Mask>
inline void sum_columns(const Scales<B> &scales, typename B::V ab_low, typename B::V ab_high, typename B::V cd_low, typename B::V cd_high,
                        Sum<B> &s0, Sum<B> &s1, Sum<B> &s2, Sum<B> &s3) {
    const auto plane = [](typename B::V v) {
        if constexpr (Shift > 0) v = B::shift(v, Shift);
        if constexpr (Mask < 255) v = B::mask(v, Mask);
        return v;
    };
    if constexpr (kQuadsOfBytes) {
        s0.take(scales, plane(B::low16(ab_low, cd_low))), s1.take(scales, plane(B::high16(ab_low, cd_low)));
        s2.take(scales, plane(B::low16(ab_high, cd_high))), s3.take(scales, plane(B::high16(ab_high, cd_high)));
    } else {
        const typename B::V zero = B::zero();
        ab_low = plane(ab_low), ab_high = plane(ab_high), cd_low = plane(cd_low), cd_high = plane(cd_high);
        s0.take(scales, B::low8(ab_low, zero), B::low8(cd_low, zero)), s1.take(scales, B::high8(ab_low, zero), B::high8(cd_low, zero));
        s2.take(scales, B::low8(ab_high, zero), B::low8(cd_high, zero)), s3.take(scales, B::high8(ab_high, zero), B::high8(cd_high, zero));
    }
}

}  // namespace
}  // namespace zoo
