// Convolutions of float32 pixels of every instruction set; images/steps/convolution.py defines them. Each sum begins with its
// bias and takes products in the order of the window, each by a fused multiply-add, which rounds once: all versions return the same bits.
#pragma once
#include "isa/images/floats.h"

namespace zoo {
namespace {

constexpr int64_t kFloatPanel = 16;  // outputs whose weights lie together, [inputs, kFloatPanel]
constexpr int64_t kFetched = 32;     // inputs whose weights are fetched from memory ahead

inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    for (int64_t lane = 0; lane < kVecLanes; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
}

// `Count` pixels of `Parts` vectors of outputs, from vector `first` on.
template <int Count, int Parts>
inline void convolution_tile(const FloatConvolution &c, const float *const *in, float *const *out, const float *const *added, int64_t first) {
    constexpr int64_t kVectors = kFloatPanel / kVecLanes;  // vectors of a panel
    Vec sums[Count][Parts];
    const float *windows[Count], *weights[Parts];
    unroll<Count>([&](auto i) ZOO_INLINE { windows[i.value] = in[i.value]; });
    unroll<Parts>([&](auto part) ZOO_INLINE {
        const int64_t vector = first + part.value;
        weights[part.value] = c.weight + vector / kVectors * kFloatPanel * c.inputs + vector % kVectors * kVecLanes;
        const Vec bias = load_float<Vec>(c.bias + vector * kVecLanes);
        unroll<Count>([&](auto i) ZOO_INLINE { sums[i.value][part.value] = bias; });
    });
    for (int64_t k = 0; k < c.inputs; ++k) {
        const int64_t offset = c.offsets[k];
        Vec factors[Parts];
        unroll<Parts>([&](auto part) ZOO_INLINE {
            const float *weight = weights[part.value] + k * kFloatPanel;
            factors[part.value] = load_float<Vec>(weight);
            if constexpr (Count <= 2) __builtin_prefetch(weight + kFetched * kFloatPanel);  // few pixels wait for weights
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

void float_convolution(const FloatConvolution &c, const float *const *in, float *const *out, const float *const *added, int64_t n) {
    constexpr int kParts = kVecLanes == 8 ? 2 : 4, kCount = kVecLanes == 4 ? 2 : 6;
    even_tiles<kParts>(c.outputs / kVecLanes, [&](auto parts, int64_t first) {
        even_tiles<kCount>(n, [&](auto count, int64_t pixel) {
            convolution_tile<decltype(count)::value, decltype(parts)::value>(c, in + pixel, out + pixel, added ? added + pixel : nullptr, first);
        });
    });
}

}  // namespace
}  // namespace zoo
