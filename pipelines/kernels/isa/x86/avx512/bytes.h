// Operations of 512 bits for the kernels of ../bytes/.
#pragma once
#include "isa/x86/avx512/products.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

using Ints = __m512i;
using Floats = __m512;
constexpr int64_t kInts = 16;     // int32 of a vector
constexpr int kPanelVectors = 4;  // the most of a panel
template <int V>
constexpr int kTileRows = V == 4 ? 6 : V == 3 ? 8 : 12;

inline void store(void *address, Ints v) { _mm512_storeu_si512(address, v); }
inline Floats load_floats(const void *address) { return _mm512_loadu_ps(address); }
inline void store_floats(float *address, Floats v) { _mm512_storeu_ps(address, v); }
inline Ints same(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints same_words(int16_t x) { return _mm512_set1_epi16(x); }
inline Ints same_bytes(int8_t x) { return _mm512_set1_epi8(x); }
inline Floats same_floats(float x) { return _mm512_set1_ps(x); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints times256(Ints a) { return _mm512_slli_epi32(a, 8); }
template <int Bits>
inline Ints shift_right(Ints a) { return _mm512_srai_epi32(a, Bits); }
inline Ints low_bytes(Ints a, Ints b) { return _mm512_unpacklo_epi8(a, b); }
inline Ints high_bytes(Ints a, Ints b) { return _mm512_unpackhi_epi8(a, b); }
inline Ints low_words(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
inline Ints high_words(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }
inline Ints to_words(Ints a, Ints b) { return _mm512_packs_epi32(a, b); }
inline Ints to_bytes(Ints a, Ints b) { return _mm512_packus_epi16(a, b); }
inline Ints add_words(Ints a, Ints b) { return _mm512_adds_epi16(a, b); }
inline Ints clip_bytes(Ints v, Ints low, Ints high) { return _mm512_min_epu8(_mm512_max_epu8(v, low), high); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Ints to_ints(Floats v) { return _mm512_cvtps_epi32(v); }
inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats sum_of(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Ints choose_bytes(Ints v, __m128i places) { return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(places)); }
inline int32_t sum_of(Ints v) { return _mm512_reduce_add_epi32(v); }
// The first `count` bytes, fewer than a vector's, and zeros.
inline Ints load_bytes(const uint8_t *address, int64_t count) { return _mm512_maskz_loadu_epi8((1ULL << count) - 1, address); }

// `ActivationTable` of words.
struct ActivatedWords {
    Ints starts[2], slopes[2], limit, factor, zero;
    __m128i shift, left_shift;
    explicit ActivatedWords(const ActivationTable &t)
        : limit(same_words(static_cast<int16_t>(t.limit))), factor(same_words(static_cast<int16_t>(t.factor))),
          zero(same_words(static_cast<int16_t>(t.zero))), shift(_mm_cvtsi32_si128(t.shift)), left_shift(_mm_cvtsi32_si128(15 - t.shift)) {
        for (int half = 0; half < 2; ++half) {
            starts[half] = load(t.starts + 32 * half);
            slopes[half] = _mm512_sub_epi16(load(t.starts + 32 * half + 1), starts[half]);
        }
    }
    ZOO_INLINE inline Ints of(Ints x) const { return bytes(result(x)); }
    ZOO_INLINE inline Ints of(Ints x, Ints gain) const { return bytes(_mm512_mulhrs_epi16(result(x), gain)); }

  private:
    ZOO_INLINE inline Ints result(Ints x) const {
        const Ints u = _mm512_min_epu16(_mm512_abs_epi16(x), limit), segment = _mm512_srl_epi16(u, shift);
        const Ints part = _mm512_and_si512(_mm512_sll_epi16(u, left_shift), _mm512_set1_epi16(32767));
        const Ints rise = _mm512_mulhrs_epi16(_mm512_permutex2var_epi16(slopes[0], segment, slopes[1]), part);
        const Ints remainder = _mm512_add_epi16(_mm512_permutex2var_epi16(starts[0], segment, starts[1]), rise);
        return _mm512_subs_epi16(_mm512_max_epi16(x, _mm512_setzero_si512()), remainder);
    }
    ZOO_INLINE inline Ints bytes(Ints result) const { return _mm512_add_epi16(_mm512_mulhrs_epi16(result, factor), zero); }
};

// 128 bits by 128 bits of a panel's bytes to bytes in order, and back.
template <int V>
ZOO_INLINE inline void store_panel(uint8_t *out, Ints bytes) {
    if constexpr (V == 4) {
        _mm512_storeu_si512(out, bytes);
    } else if constexpr (V == 3) {
        const __m512i joined = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0), bytes);
        _mm512_mask_storeu_epi32(out, 0x0FFF, joined);
    } else if constexpr (V == 2) {
        const __m512i joined = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 0, 0, 0), bytes);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm512_castsi512_si256(joined));
    } else {
        const __m512i joined = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), bytes);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm512_castsi512_si128(joined));
    }
}
template <int V>
ZOO_INLINE inline Ints load_panel(const uint8_t *address) {
    if constexpr (V == 4) return load(address);
    if constexpr (V == 3)
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0),
                                        _mm512_inserti32x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(address))),
                                                           _mm_loadu_si128(reinterpret_cast<const __m128i *>(address + 32)), 2));
    if constexpr (V == 2)
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 0, 2, 0, 3, 0),
                                        _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(address))));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0),
                                    _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(address))));
}
// The same of the rows of `pixels` that fill a vector, at `column`.
template <int V>
ZOO_INLINE inline void store_rows(uint8_t *const *out, const int64_t *pixels, int64_t column, Ints bytes) {
    const auto to = [&](int r) ZOO_INLINE { return out[pixels[r]] + column; };
    if constexpr (V == 1) {
        const __m512i rows = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
        unroll<4>([&](auto r) ZOO_INLINE { _mm_storeu_si128(reinterpret_cast<__m128i *>(to(r.value)), _mm512_extracti32x4_epi32(rows, r.value)); });
    } else if constexpr (V == 2) {
        const __m512i rows = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes);
        unroll<2>([&](auto r) ZOO_INLINE { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to(r.value)), _mm512_extracti64x4_epi64(rows, r.value)); });
    } else {
        store_panel<V>(to(0), bytes);
    }
}
template <int V>
ZOO_INLINE inline Ints load_rows(const uint8_t *const *from, const int64_t *pixels, int64_t column) {
    const auto at = [&](int r) ZOO_INLINE { return from[pixels[r]] + column; };
    if constexpr (V == 1) {
        __m512i rows = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at(0))));
        unroll<3>([&](auto r) ZOO_INLINE { rows = _mm512_inserti32x4(rows, _mm_loadu_si128(reinterpret_cast<const __m128i *>(at(r.value + 1))), r.value + 1); });
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), rows);
    } else if constexpr (V == 2) {
        const auto half = [&](int r) ZOO_INLINE { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at(r))); };
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(1), 1));
    } else {
        return load_panel<V>(at(0));
    }
}
// The floats of a panel in order.
inline void order_panel(const Floats (&q)[4], Floats (&out)[4]) {
    const Floats a = _mm512_shuffle_f32x4(q[0], q[1], 0x88), b = _mm512_shuffle_f32x4(q[2], q[3], 0x88);
    const Floats c = _mm512_shuffle_f32x4(q[0], q[1], 0xDD), d = _mm512_shuffle_f32x4(q[2], q[3], 0xDD);
    out[0] = _mm512_shuffle_f32x4(a, b, 0x88), out[1] = _mm512_shuffle_f32x4(c, d, 0x88);
    out[2] = _mm512_shuffle_f32x4(a, b, 0xDD), out[3] = _mm512_shuffle_f32x4(c, d, 0xDD);
}
// Eights of bytes of a and b (8 and up), with eights of c where there is a mask.
inline Floats eights(Floats a, Floats b, __m512i places, __mmask8 third = 0, Floats c = Floats{}, __m512i of_third = __m512i{}) {
    const __m512d two = _mm512_permutex2var_pd(_mm512_castps_pd(a), places, _mm512_castps_pd(b));
    return _mm512_castpd_ps(third ? _mm512_mask_permutexvar_pd(two, third, of_third, _mm512_castps_pd(c)) : two);
}
inline void order_panel(const Floats (&q)[3], Floats (&out)[3]) {
    out[0] = eights(q[0], q[1], _mm512_setr_epi64(0, 1, 8, 9, 0, 0, 2, 3), 0x30, q[2], _mm512_setr_epi64(0, 0, 0, 0, 0, 1, 0, 0));
    out[1] = eights(q[0], q[1], _mm512_setr_epi64(10, 11, 0, 0, 4, 5, 12, 13), 0x0C, q[2], _mm512_setr_epi64(0, 0, 2, 3, 0, 0, 0, 0));
    out[2] = eights(q[0], q[1], _mm512_setr_epi64(0, 0, 6, 7, 14, 15, 0, 0), 0xC3, q[2], _mm512_setr_epi64(4, 5, 0, 0, 0, 0, 6, 7));
}
inline void order_panel(const Floats (&q)[2], Floats (&out)[2]) {
    out[0] = eights(q[0], q[1], _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11));
    out[1] = eights(q[0], q[1], _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15));
}
inline void order_panel(const Floats (&q)[1], Floats (&out)[1]) { out[0] = q[0]; }

// The first 16, 32 or 48 channels of a vector of bytes.
template <int Count>
inline void store_channels(uint8_t *address, Ints bytes) {
    if constexpr (Count >= 32) _mm256_storeu_si256(reinterpret_cast<__m256i *>(address), _mm512_castsi512_si256(bytes));
    if constexpr (Count == 48) _mm_storeu_si128(reinterpret_cast<__m128i *>(address + 32), _mm512_extracti32x4_epi32(bytes, 2));
    if constexpr (Count == 16) _mm_storeu_si128(reinterpret_cast<__m128i *>(address), _mm512_castsi512_si128(bytes));
}

// sum += products with the weights `Offset` bytes behind an address: gcc 12 would load them ahead and keep them on the stack.
template <int64_t Offset>
ZOO_INLINE inline void dot_weights(Ints &sum, Ints u8, const int8_t *weights) {
    Ints copy = sum;
    asm("vpdpbusd %c3(%2), %1, %0" : "+v"(copy) : "v"(u8), "r"(weights), "i"(Offset));
    sum = copy;
}

// Count bytes of an address and of those `steps` behind it, side by side in a vector; of 48 alone.
template <int Count>
ZOO_INLINE inline Ints load_parts(const uint8_t *address, const int64_t (&steps)[3]) {
    const auto sixteen = [](const uint8_t *a) ZOO_INLINE { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(a)); };
    const auto both = [](__m256i a, __m256i b) ZOO_INLINE { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); };
    if constexpr (Count == 16) {
        const __m256i first = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(address)), sixteen(address + steps[0]), 1);
        return both(first, _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen(address + steps[1])), sixteen(address + steps[2]), 1));
    } else if constexpr (Count == 32) {
        const auto *a = reinterpret_cast<const __m256i *>(address), *b = reinterpret_cast<const __m256i *>(address + steps[0]);
        return both(_mm256_loadu_si256(a), _mm256_loadu_si256(b));
    } else {
        return load(address);
    }
}
template <int Count>
ZOO_INLINE inline void store_parts(uint8_t *address, const int64_t (&steps)[3], Ints bytes) {
    const auto sixteen = [](uint8_t *a, __m128i v) ZOO_INLINE { _mm_storeu_si128(reinterpret_cast<__m128i *>(a), v); };
    if constexpr (Count == 16) {
        sixteen(address, _mm512_castsi512_si128(bytes));
        sixteen(address + steps[0], _mm512_extracti32x4_epi32(bytes, 1));
        sixteen(address + steps[1], _mm512_extracti32x4_epi32(bytes, 2));
        sixteen(address + steps[2], _mm512_extracti32x4_epi32(bytes, 3));
    } else if constexpr (Count == 32) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(address), _mm512_castsi512_si256(bytes));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(address + steps[0]), _mm512_extracti64x4_epi64(bytes, 1));
    } else if constexpr (Count == 48) {
        store_channels<48>(address, bytes);
    } else {
        store(address, bytes);
    }
}

}  // namespace
}  // namespace zoo
