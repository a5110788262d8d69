// Floats as every instruction set has them: `Part` is its own vector, `Lanes` are sixteen floats, in one, two or four of these. Included
// into each version's file, where the compiler lowers it. A sum runs over the sixteen lanes (lane l adds elements l, l + 16, ...), then
// over one fixed tree, and every operation is rounded alone: all versions, and rowwise.py, return the same bits.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa/isa.h"
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace zoo {
namespace {

template <class T>
struct Pair {
    T lo, hi;
};
template <class T>
inline Pair<T> operator+(Pair<T> a, Pair<T> b) { return {a.lo + b.lo, a.hi + b.hi}; }
template <class T>
inline Pair<T> operator-(Pair<T> a, Pair<T> b) { return {a.lo - b.lo, a.hi - b.hi}; }
template <class T>
inline Pair<T> operator*(Pair<T> a, Pair<T> b) { return {a.lo * b.lo, a.hi * b.hi}; }

template <class T, int64_t N>
struct Vector {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};
#if defined(__AVX512F__)
constexpr int64_t kPart = 16;
#elif defined(__AVX2__)
constexpr int64_t kPart = 8;
#else
constexpr int64_t kPart = 4;
#endif
constexpr int64_t kLanes = 16;
using Part = Vector<float, kPart>::type;
using Words = Vector<int32_t, kPart>::type;
using Lanes = std::conditional_t<kPart == 16, Part, std::conditional_t<kPart == 8, Pair<Part>, Pair<Pair<Part>>>>;

// All of a vector joined: its upper half to its lower one, until one is left.
template <class T, int64_t N, class Join>
inline T fold(typename Vector<T, N>::type v, Join join) {
    using Half = typename Vector<T, N / 2>::type;
    if constexpr (N == 4)
        return join(join(v[0], v[2]), join(v[1], v[3]));
    else if constexpr (N == 8)
        return fold<T, 4>(join(Half{v[0], v[1], v[2], v[3]}, Half{v[4], v[5], v[6], v[7]}), join);
    else
        return fold<T, 8>(join(Half{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]},
                               Half{v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]}), join);
}
inline float sum(Part v) {
    return fold<float, kPart>(v, [](auto a, auto b) { return a + b; });
}
template <class T>
inline float sum(Pair<T> v) { return sum(v.lo + v.hi); }

template <class T>
inline T most(typename Vector<T, kPart>::type v) {
    return fold<T, kPart>(v, [](auto a, auto b) { return b > a ? b : a; });
}

template <class V>
inline void spread(V &v, float x) { v = x - V{}; }
template <class T>
inline void spread(Pair<T> &v, float x) { spread(v.lo, x), spread(v.hi, x); }
template <class V>
inline V all(float x) {
    V v;
    spread(v, x);
    return v;
}

// A Pair by its halves: gcc 12 copies a whole one through memory.
template <class V>
inline void fetch(V &v, const float *at) { std::memcpy(&v, at, sizeof v); }
template <class T>
inline void fetch(Pair<T> &v, const float *at) { fetch(v.lo, at), fetch(v.hi, at + sizeof(T) / sizeof(float)); }
// Halves as floats, exact; there is no infinity and no NaN among them.
inline void fetch(Part &v, const Half *at) {
#if defined(__AVX512F__)
    v = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
#elif defined(__F16C__)
    v = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
#else
    Vector<Half, kPart>::type halves;
    std::memcpy(&halves, at, sizeof halves);
    const Words bits = __builtin_convertvector(halves, Words);
    const Part magnitude = reinterpret_cast<Part>((bits & 0x7FFF) << 13) * 0x1p112f;  // the exponents' biases differ by 112
    v = reinterpret_cast<Part>(reinterpret_cast<Words>(magnitude) | (bits & 0x8000) << 16);
#endif
}
template <class T>
inline void fetch(Pair<T> &v, const Half *at) { fetch(v.lo, at), fetch(v.hi, at + sizeof(T) / sizeof(float)); }
template <class V, class T>
inline V get(const T *at) {
    V v;
    fetch(v, at);
    return v;
}
template <class V>
inline void put(float *at, V v) { std::memcpy(at, &v, sizeof v); }
template <class T>
inline void put(float *at, Pair<T> v) { put(at, v.lo), put(at + sizeof(T) / sizeof(float), v.hi); }

// A NaN becomes some number: who asks for its keys asks with a NaN, too.
inline void halve(const float *x, Half *out) {
    constexpr float kMost = 65504.0f;
    Part value = get<Part>(x);
    value = value > kMost ? all<Part>(kMost) : value;
    value = value < -kMost ? all<Part>(-kMost) : value;
    const Words bits = reinterpret_cast<Words>(value), magnitude = bits & 0x7FFFFFFF;
    const Words normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
    const Words small = reinterpret_cast<Words>(reinterpret_cast<Part>(magnitude) + 0.5f) - 0x3F000000;  // 0.5's last bit is a half's
    const Words found = (magnitude < 0x38800000 ? small : normal) | ((bits >> 16) & 0x8000);
    const auto halves = __builtin_convertvector(found, Vector<Half, kPart>::type);
    std::memcpy(out, &halves, sizeof halves);
}

constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: added to |x| < 2^22, it leaves rint(x) in the lowest bits
constexpr int32_t kWholeBits = 0x4B400000;

// exp(x) for x <= 0, to 1e-7 relative; 0 below -87. Cephes' polynomial.
template <class V>
inline V exponential(V x) {
    using I = decltype(x > x);
    const V shifted = x * 1.44269504088896341f + kWhole, n = shifted - kWhole;
    const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const V y = (p * (r * r) + r) + 1.0f;
    const I scaled = reinterpret_cast<I>(y) + (reinterpret_cast<I>(shifted) << 23);
    return x >= -87.0f ? reinterpret_cast<V>(scaled) : V{};
}
template <class T>
inline Pair<T> exponential(Pair<T> x) { return {exponential(x.lo), exponential(x.hi)}; }

// The largest float of a multiple of sixteen, at least one sixteen.
inline float largest(const float *x, int64_t count) {
    Part found = get<Part>(x);
    for (int64_t j = kPart; j < count; j += kPart) {
        const Part next = get<Part>(x + j);
        found = next > found ? next : found;
    }
    return most<float>(found);
}

}  // namespace
}  // namespace zoo
