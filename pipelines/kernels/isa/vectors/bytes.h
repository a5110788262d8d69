// Floats to bytes, for every instruction set.
#pragma once
#include "isa/vectors/lanes.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

using ByteVec = Vector<uint8_t, kVecLanes>::type;

// Stores clip(rint(x), low, high) + zero.
inline void store_bytes(uint8_t *address, Vec x, float low, float high, int32_t zero) {
    x = at_most(at_least(x, low), high);
    const IntVec codes = reinterpret_cast<IntVec>(x + kRoundToInt) + (zero - 0x4B400000);  // the bits of kRoundToInt
    const auto bytes = __builtin_convertvector(codes, ByteVec);
    std::memcpy(address, &bytes, sizeof bytes);
}

// Stores clip(rint(x) + zero, 0, 255), NaN as 0.
class ByteStore {
  public:
    explicit ByteStore(int32_t zero) : zero_(zero), low_(static_cast<float>(-zero)), high_(static_cast<float>(255 - zero)) {}
    ZOO_INLINE inline void store(uint8_t *address, Vec x) const { store_bytes(address, x == x ? x : Vec{}, low_, high_, zero_); }
    ZOO_INLINE inline void store(uint8_t *address, const Vec (&x)[4]) const {
#if defined(__AVX512F__)
        __m512i whole[4];  // saturated before the zero point is added: what is not a number is 0
        unroll<4>([&](auto i) ZOO_INLINE {
            const __mmask16 ordered = _mm512_cmp_ps_mask(x[i.value], x[i.value], _CMP_ORD_Q);
            whole[i.value] = _mm512_cvtps_epi32(_mm512_maskz_min_ps(ordered, x[i.value], _mm512_set1_ps(65536.0f)));
        });
        const __m512i zero = _mm512_set1_epi16(static_cast<int16_t>(zero_));
        const __m512i bytes = _mm512_packus_epi16(_mm512_adds_epi16(_mm512_packs_epi32(whole[0], whole[1]), zero),
                                                  _mm512_adds_epi16(_mm512_packs_epi32(whole[2], whole[3]), zero));
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        _mm512_storeu_si512(address, _mm512_permutexvar_epi32(order, bytes));
#else
        unroll<4>([&](auto i) ZOO_INLINE { store(address + i.value * kVecLanes, x[i.value]); });
#endif
    }

  private:
    int32_t zero_;
    float low_, high_;
};

}  // namespace
}  // namespace zoo
