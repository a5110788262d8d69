// Operations of 256 bits for the kernels of ../bytes/.
#pragma once
#include <cstring>

#include "isa/x86/avx2/activation.h"
#include "isa/x86/avx_vnni/products.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

using Ints = __m256i;
using Floats = __m256;
constexpr int64_t kInts = 8;      // int32 of a vector
constexpr int kPanelVectors = 2;  // the most of a panel: with six rows their sums, weights and a row's inputs fill sixteen registers
template <int V>
constexpr int kTileRows = V == 2 ? 6 : 12;

inline Floats load_floats(const void *address) { return _mm256_loadu_ps(static_cast<const float *>(address)); }
inline void store_floats(float *address, Floats v) { _mm256_storeu_ps(address, v); }
inline Ints same(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints same_words(int16_t x) { return _mm256_set1_epi16(x); }
inline Ints same_bytes(int8_t x) { return _mm256_set1_epi8(x); }
inline Floats same_floats(float x) { return _mm256_set1_ps(x); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints times256(Ints a) { return _mm256_slli_epi32(a, 8); }
template <int Bits>
inline Ints shift_right(Ints a) { return _mm256_srai_epi32(a, Bits); }
inline Ints low_bytes(Ints a, Ints b) { return _mm256_unpacklo_epi8(a, b); }
inline Ints high_bytes(Ints a, Ints b) { return _mm256_unpackhi_epi8(a, b); }
inline Ints low_words(Ints a, Ints b) { return _mm256_unpacklo_epi16(a, b); }
inline Ints high_words(Ints a, Ints b) { return _mm256_unpackhi_epi16(a, b); }
inline Ints to_words(Ints a, Ints b) { return _mm256_packs_epi32(a, b); }
inline Ints to_bytes(Ints a, Ints b) { return _mm256_packus_epi16(a, b); }
inline Ints add_words(Ints a, Ints b) { return _mm256_adds_epi16(a, b); }
inline Ints clip_bytes(Ints v, Ints low, Ints high) { return _mm256_min_epu8(_mm256_max_epu8(v, low), high); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Ints to_ints(Floats v) { return _mm256_cvtps_epi32(v); }
inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats sum_of(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Ints choose_bytes(Ints v, __m128i places) { return _mm256_shuffle_epi8(v, _mm256_broadcastsi128_si256(places)); }
inline int32_t sum_of(Ints v) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
}
// The first `count` bytes, fewer than a vector's, and zeros.
inline Ints load_bytes(const uint8_t *address, int64_t count) {
    alignas(32) uint8_t bytes[32] = {};
    std::memcpy(bytes, address, static_cast<size_t>(count));
    return load(bytes);
}

// The bytes of two rows of a panel of two vectors of int32, 128 bits by 128 bits, to bytes in order, and back.
template <int V>
ZOO_INLINE inline void store_rows(uint8_t *const *out, const int64_t *pixels, int64_t column, Ints bytes) {
    static_assert(V == 2, "outputs come in whole sixteens");
    const __m256i rows = _mm256_permute4x64_epi64(bytes, 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out[pixels[0]] + column), _mm256_castsi256_si128(rows));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out[pixels[1]] + column), _mm256_extracti128_si256(rows, 1));
}
template <int V>
ZOO_INLINE inline Ints load_rows(const uint8_t *const *from, const int64_t *pixels, int64_t column) {
    const auto row = [&](int r) ZOO_INLINE { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from[pixels[r]] + column)); };
    return _mm256_permute4x64_epi64(_mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1), 0xD8);
}
// The floats of a panel in order.
inline void order_panel(const Floats (&q)[2], Floats (&out)[2]) {
    out[0] = _mm256_permute2f128_ps(q[0], q[1], 0x20), out[1] = _mm256_permute2f128_ps(q[0], q[1], 0x31);
}
// The first sixteen channels of a vector of bytes.
template <int Count>
inline void store_channels(uint8_t *address, Ints bytes) {
    static_assert(Count == 16, "a vector holds 32");
    _mm_storeu_si128(reinterpret_cast<__m128i *>(address), _mm256_castsi256_si128(bytes));
}

template <int64_t Offset>
ZOO_INLINE inline void dot_weights(Ints &sum, Ints u8, const int8_t *weights) { dot_u8s8(sum, u8, load(weights + Offset)); }

// Count bytes of an address and of the one `steps` behind it, side by side in a vector.
template <int Count>
ZOO_INLINE inline Ints load_parts(const uint8_t *address, const int64_t (&steps)[3]) {
    if constexpr (Count == 32) return load(address);
    const auto *a = reinterpret_cast<const __m128i *>(address), *b = reinterpret_cast<const __m128i *>(address + steps[0]);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(a)), _mm_loadu_si128(b), 1);
}
template <int Count>
ZOO_INLINE inline void store_parts(uint8_t *address, const int64_t (&steps)[3], Ints bytes) {
    if constexpr (Count == 32) return store(address, bytes);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(address), _mm256_castsi256_si128(bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(address + steps[0]), _mm256_extracti128_si256(bytes, 1));
}

}  // namespace
}  // namespace zoo
