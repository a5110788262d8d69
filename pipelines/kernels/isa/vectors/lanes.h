// Float vectors of every instruction set: `Vec` is its native vector, `Vec16` sixteen lanes, in one, two or four of these. Included
// into each version's file, where the compiler lowers it. A reduction runs over the sixteen lanes (lane l adds elements l, l + 16, ...),
// then over one fixed tree, and every operation is rounded alone: all versions and the references in numpy return the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "isa/isa.h"
#include "isa/vectors/unroll.h"

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
template <class T>
inline Pair<T> operator/(Pair<T> a, Pair<T> b) { return {a.lo / b.lo, a.hi / b.hi}; }
template <class T>
inline Pair<T> operator+(Pair<T> a, float b) { return {a.lo + b, a.hi + b}; }
template <class T>
inline Pair<T> operator-(Pair<T> a, float b) { return {a.lo - b, a.hi - b}; }
template <class T>
inline Pair<T> operator*(Pair<T> a, float b) { return {a.lo * b, a.hi * b}; }
template <class T>
inline Pair<T> operator-(Pair<T> a) { return {-a.lo, -a.hi}; }

// Columns of packed weights, panels of `Panel` columns of `words` int32 each, to whole 64 columns of the same; zeros fill them up.
template <int64_t Panel>
inline void gather_panels(const int32_t *from, int64_t words, const int32_t *columns, int64_t count, int32_t *to) {
    for (int64_t first = 0; first < round_up(count, kColumns); first += Panel, to += Panel * words)
        for (int64_t j = 0; j < Panel; ++j) {
            const int64_t column = first + j < count ? columns[first + j] : -1;
            const int32_t *word = from + column / Panel * words * Panel + column % Panel;
            for (int64_t k = 0; k < words; ++k) to[k * Panel + j] = column < 0 ? 0 : word[k * Panel];
        }
}

template <class T, int64_t N>
struct Vector {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};
constexpr float kRoundToInt = 12582912.0f;  // 1.5 * 2^23: added to |x| < 2^22, it leaves rint(x) in the lowest bits

}  // namespace
}  // namespace zoo

#include ZOO_VECTORS  // vectors.h of the instruction set: kVecLanes, vectors and their products

namespace zoo {
namespace {

constexpr int64_t kLanes = 16;
using Four = Pair<Pair<Vec>>;  // functions of one vector wait for their own results: four at a time wait for them together
using Vec16 = std::conditional_t<kVecLanes == 16, Vec, std::conditional_t<kVecLanes == 8, Pair<Vec>, Pair<Pair<Vec>>>>;

inline IntVec lane_numbers() {
    IntVec v{};
    for (int64_t l = 0; l < kVecLanes; ++l) v[l] = static_cast<int32_t>(l);
    return v;
}

// Horizontal reduction of a vector: its upper half joined to its lower one, until one lane is left.
template <class T, int64_t N, class Join>
inline T reduce(typename Vector<T, N>::type v, Join join) {
    using Half = typename Vector<T, N / 2>::type;
    if constexpr (N == 4) {  // in vectors, whose single elements would pass through other registers
        const auto two = join(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
        return join(two, __builtin_shufflevector(two, two, 1, 0, 3, 2))[0];
    } else if constexpr (N == 8)
        return reduce<T, 4>(join(Half{v[0], v[1], v[2], v[3]}, Half{v[4], v[5], v[6], v[7]}), join);
    else
        return reduce<T, 8>(join(Half{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]},
                                 Half{v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]}), join);
}
inline float reduce_add(Vec v) {
    return reduce<float, kVecLanes>(v, [](auto a, auto b) { return a + b; });
}
template <class T>
inline float reduce_add(Pair<T> v) { return reduce_add(v.lo + v.hi); }

template <class T>
inline T reduce_max(typename Vector<T, kVecLanes>::type v) {
    return reduce<T, kVecLanes>(v, [](auto a, auto b) { return b > a ? b : a; });
}

// The same of Count vectors, with the same bits.
template <class T, int Count, class V, class Join>
ZOO_INLINE inline void reduce_each(const V *vectors, T *out, Join join) {
    if constexpr (Count == 8 && kVecLanes == 16) {  // halves of two vectors at a time, then quarters of four, and so on
        const auto halves = [&](V x, V y) ZOO_INLINE {
            return join(__builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                        __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
        };
        const auto quarters = [&](V x, V y) ZOO_INLINE {
            return join(__builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                        __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
        };
        const V x = quarters(halves(vectors[0], vectors[4]), halves(vectors[2], vectors[6]));
        const V y = quarters(halves(vectors[1], vectors[5]), halves(vectors[3], vectors[7]));
        const V pairs = join(__builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                             __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
        const auto result = join(__builtin_shufflevector(pairs, pairs, 0, 8, 4, 12, 2, 10, 6, 14), __builtin_shufflevector(pairs, pairs, 1, 9, 5, 13, 3, 11, 7, 15));
        std::memcpy(out, &result, sizeof result);
    } else {
        for (int i = 0; i < Count; ++i) out[i] = reduce<T, kVecLanes>(vectors[i], join);
    }
}
template <class T, int Count, class V>
ZOO_INLINE inline void largest_of_each(const V *vectors, T *out) {
    reduce_each<T, Count>(vectors, out, [](auto a, auto b) ZOO_INLINE { return b > a ? b : a; });
}

template <class V>
inline void broadcast_into(V &v, float x) { v = x - V{}; }
template <class T>
inline void broadcast_into(Pair<T> &v, float x) { broadcast_into(v.lo, x), broadcast_into(v.hi, x); }
template <class V>
inline V broadcast(float x) {
    V v;
    broadcast_into(v, x);
    return v;
}

// A Pair by its two vectors: gcc 12 copies a whole one through memory.
template <class V>
inline void load_float_into(V &v, const float *address) { std::memcpy(&v, address, sizeof v); }
template <class T>
inline void load_float_into(Pair<T> &v, const float *address) {
    load_float_into(v.lo, address), load_float_into(v.hi, address + sizeof(T) / sizeof(float));
}
// float16 to float32, exact; infinities and NaN do not occur.
inline void load_float_into(Vec &v, const Float16 *address) { v = from_float16(address); }
template <class T>
inline void load_float_into(Pair<T> &v, const Float16 *address) {
    load_float_into(v.lo, address), load_float_into(v.hi, address + sizeof(T) / sizeof(float));
}
template <class V, class T>
inline V load_float(const T *address) {
    V v;
    load_float_into(v, address);
    return v;
}
template <class V>
inline void store_float(float *address, V v) { std::memcpy(address, &v, sizeof v); }
template <class T>
inline void store_float(float *address, Pair<T> v) { store_float(address, v.lo), store_float(address + sizeof(T) / sizeof(float), v.hi); }

// float32 to float16: to the nearest, ties to even, clipped to the largest. NaN becomes a number: a query that meets it is NaN, too.
inline void to_float16(const float *x, Float16 *out) {
    constexpr float kFloat16Max = 65504.0f;
    Vec value = load_float<Vec>(x);
    value = value > kFloat16Max ? broadcast<Vec>(kFloat16Max) : value;
    value = value < -kFloat16Max ? broadcast<Vec>(-kFloat16Max) : value;
    const IntVec bits = reinterpret_cast<IntVec>(value), magnitude = bits & 0x7FFFFFFF;
    const IntVec normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112 << 10);
    const IntVec small = reinterpret_cast<IntVec>(reinterpret_cast<Vec>(magnitude) + 0.5f) -
                         0x3F000000;  // the last bit of 0.5 is that of a float16 subnormal
    const IntVec result = (magnitude < 0x38800000 ? small : normal) | ((bits >> 16) & 0x8000);
    const auto packed = __builtin_convertvector(result, Vector<Float16, kVecLanes>::type);
    std::memcpy(out, &packed, sizeof packed);
}

// then(offset, vector) of each native vector.
template <class V, class Then>
inline void each_vector(V v, int64_t offset, Then then) { then(offset, v); }
template <class T, class Then>
inline void each_vector(Pair<T> v, int64_t offset, Then then) {
    each_vector(v.lo, offset, then), each_vector(v.hi, offset + static_cast<int64_t>(sizeof(T) / sizeof(float)), then);
}

// x > low ? x : low, and x < high ? x : high; NaN becomes the limit.
template <class V>
inline V at_least(V x, float low) {
    const V limit = broadcast<V>(low);
#if defined(__AVX512F__)
    return _mm512_max_ps(x, limit);
#else
    return x > limit ? x : limit;
#endif
}
template <class T>
inline Pair<T> at_least(Pair<T> x, float low) { return {at_least(x.lo, low), at_least(x.hi, low)}; }
template <class V>
inline V at_most(V x, float high) {
    const V limit = broadcast<V>(high);
#if defined(__AVX512F__)
    return _mm512_min_ps(x, limit);
#else
    return x < limit ? x : limit;
#endif
}
template <class T>
inline Pair<T> at_most(Pair<T> x, float high) { return {at_most(x.lo, high), at_most(x.hi, high)}; }

// x < 0 ? a : b
template <class V>
inline V where_negative(V x, V a, V b) { return x < 0 ? a : b; }
template <class T>
inline Pair<T> where_negative(Pair<T> x, Pair<T> a, Pair<T> b) { return {where_negative(x.lo, a.lo, b.lo), where_negative(x.hi, a.hi, b.hi)}; }

template <class V>
inline V magnitude_of(V x) { return reinterpret_cast<V>(reinterpret_cast<IntVec>(x) & 0x7FFFFFFF); }
template <class T>
inline Pair<T> magnitude_of(Pair<T> x) { return {magnitude_of(x.lo), magnitude_of(x.hi)}; }

// y 2^n, shifted: n + kRoundToInt
template <class V>
inline V times_power(V y, V shifted) {
    typedef uint32_t U __attribute__((vector_size(sizeof(V))));  // wraps around where the result is not taken
    return reinterpret_cast<V>(reinterpret_cast<U>(y) + (reinterpret_cast<U>(shifted) << 23));
}
template <class T>
inline Pair<T> times_power(Pair<T> y, Pair<T> shifted) { return {times_power(y.lo, shifted.lo), times_power(y.hi, shifted.hi)}; }

template <class V>
inline V zero_below(V x, float low, V y) { return x >= low ? y : V{}; }
template <class T>
inline Pair<T> zero_below(Pair<T> x, float low, Pair<T> y) { return {zero_below(x.lo, low, y.lo), zero_below(x.hi, low, y.hi)}; }

// exp(x) for x <= 0, to 1e-7 relative; 0 below -87. Cephes' polynomial.
template <class V>
inline V exponential(V x) {
    const V shifted = x * 1.44269504088896341f + kRoundToInt, n = shifted - kRoundToInt;
    const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return zero_below(x, -87.0f, times_power((p * (r * r) + r) + 1.0f, shifted));
}

// The largest of `count` floats, a multiple of sixteen and at least one.
inline float max_of(const float *x, int64_t count) {
    Vec largest = load_float<Vec>(x);
    for (int64_t j = kVecLanes; j < count; j += kVecLanes) {
        const Vec next = load_float<Vec>(x + j);
        largest = next > largest ? next : largest;
    }
    return reduce_max<float>(largest);
}

// Softmax of `count` scores in place, not yet normalized: returns 1 / sum. There is room for whole sixteens.
inline float softmax(float *weights, int64_t count) {
    const int64_t room = round_up(count, kLanes);
    for (int64_t t = count; t < room; ++t) weights[t] = -INFINITY;
    const Vec16 base = broadcast<Vec16>(max_of(weights, room));
    Vec16 total = broadcast<Vec16>(0);
    for (int64_t t = 0; t < room; t += kLanes) {
        const Vec16 weight = exponential(load_float<Vec16>(weights + t) - base);
        store_float(weights + t, weight);
        total = total + weight;
    }
    return 1.0f / reduce_add(total);
}

}  // namespace
}  // namespace zoo
