// Convolutions of float32 pixels of every instruction set; images/steps/convolution.py defines them. Each sum begins with its
// bias and takes products in the order of the window, each by a fused multiply-add, which rounds once: all versions return the same bits.
#pragma once
#include "isa/images/floats.h"

namespace zoo {
namespace {

constexpr int64_t kFloatPanel = 16;  // outputs whose weights lie together, [inputs, kFloatPanel]
constexpr int64_t kFetched = 32;     // inputs whose weights are fetched from memory ahead; of int8 as many bytes

inline Vec weights_of(const float *weight, Vec) { return load_float<Vec>(weight); }
inline Vec weights_of(const int8_t *weight, Vec scale) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(weight)))) * scale;
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(weight)))) * scale;
#else
    Vec values;
    for (int64_t lane = 0; lane < kVecLanes; ++lane) values[lane] = static_cast<float>(weight[lane]);
    return values * scale;
#endif
}

// `Count` pixels of `Parts` vectors of outputs, from vector `first` on.
template <class Weight, int Count, int Parts>
inline void convolution_tile(const FloatConvolution &c, const float *const *in, float *const *out, const float *const *added, int64_t first) {
    constexpr int64_t kVectors = kFloatPanel / kVecLanes;  // vectors of a panel
    Vec sums[Count][Parts];
    const float *windows[Count];
    const Weight *weights[Parts];
    Vec scales[Parts] = {};
    unroll<Count>([&](auto i) ZOO_INLINE { windows[i.value] = in[i.value]; });
    unroll<Parts>([&](auto part) ZOO_INLINE {
        const int64_t vector = first + part.value;
        weights[part.value] = static_cast<const Weight *>(c.weight) + vector / kVectors * kFloatPanel * c.inputs + vector % kVectors * kVecLanes;
        if constexpr (sizeof(Weight) == 1) scales[part.value] = load_float<Vec>(c.scale + vector * kVecLanes);
        const Vec bias = load_float<Vec>(c.bias + vector * kVecLanes);
        unroll<Count>([&](auto i) ZOO_INLINE { sums[i.value][part.value] = bias; });
    });
    for (int64_t k = 0; k < c.inputs; ++k) {
        const int64_t offset = c.offsets[k];
        Vec factors[Parts];
        unroll<Parts>([&](auto part) ZOO_INLINE {
            const Weight *weight = weights[part.value] + k * kFloatPanel;
            factors[part.value] = weights_of(weight, scales[part.value]);
            if constexpr (Count <= 2) __builtin_prefetch(weight + kFetched * kFloatPanel * 4 / static_cast<int64_t>(sizeof(Weight)));  // few pixels wait for weights
        });
        unroll<Count>([&](auto i) ZOO_INLINE {
            const Vec x = broadcast<Vec>(windows[i.value][offset]);
            unroll<Parts>([&](auto part) ZOO_INLINE { sums[i.value][part.value] = multiply_add(x, factors[part.value], sums[i.value][part.value]); });
        });
    }
    unroll<Count>([&](auto i) ZOO_INLINE {
        unroll<Parts>([&](auto part) ZOO_INLINE {
            const int64_t column = (first + part.value) * kVecLanes;
            Vec value = sums[i.value][part.value];
            if (added) value = value + load_float<Vec>(added[i.value] + column);
            value = value < c.low ? broadcast<Vec>(c.low) : value;
            store_float(out[i.value] + column, value > c.high ? broadcast<Vec>(c.high) : value);
        });
    });
}

template <class Weight, int Most>
inline void convolution_tiles(const FloatConvolution &c, const float *const *in, float *const *out, const float *const *added, int64_t n) {
    even_tiles<kVecLanes == 8 ? 2 : 4>(c.outputs / kVecLanes, [&](auto parts, int64_t first) {
        even_tiles<Most>(n, [&](auto count, int64_t pixel) {
            convolution_tile<Weight, decltype(count)::value, decltype(parts)::value>(c, in + pixel, out + pixel, added ? added + pixel : nullptr, first);
        });
    });
}

void float_convolution(const FloatConvolution &c, const float *const *in, float *const *out, const float *const *added, int64_t n) {
    if (c.scale) convolution_tiles<int8_t, 1>(c, in, out, added, n);
    else convolution_tiles<float, kVecLanes == 4 ? 2 : 6>(c, in, out, added, n);
}

}  // namespace
}  // namespace zoo
