// The kernels of click programs, on int16 codes and float vectors. Written once and lowered for each instruction set (see lanes.h);
// clicks/program.py defines what they compute.
#pragma once
#include <cmath>

#include "isa/isa.h"
#include "isa/lanes.h"

namespace zoo {
namespace {

constexpr int64_t kWords = 2 * kVecLanes;  // int16 of a vector
using Words = Vector<int16_t, kWords>::type;
using HalfWords = Vector<int16_t, kVecLanes>::type;
using Bytes = Vector<uint8_t, kWords>::type;
using QuarterBytes = Vector<uint8_t, kVecLanes>::type;

template <class V, class T>
inline V load_as(const T *at) {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
}
template <class V, class T>
inline void store_as(T *at, V v) { std::memcpy(at, &v, sizeof v); }

// sum += a[0] b[0] + a[1] b[1] in every int32.
inline void dot_pairs(IntVec &sum, Words a, Words b) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVX2__)
    sum += reinterpret_cast<IntVec>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
    const IntVec x = reinterpret_cast<IntVec>(a), y = reinterpret_cast<IntVec>(b);
    sum += (x >> 16) * (y >> 16) + ((x << 16) >> 16) * ((y << 16) >> 16);
#endif
}

inline Words broadcast_pair(const int16_t *at) {
    int32_t pair;
    std::memcpy(&pair, at, 4);
    return reinterpret_cast<Words>(pair - IntVec{});
}

// Clipped to [low, high], NaN low, and rounded to the nearest, ties to even.
inline IntVec round_clipped(Vec value, float low, float high) {
#if defined(__AVX512F__)
    const __m512 clipped = _mm512_min_ps(_mm512_max_ps(value, broadcast<Vec>(low)), broadcast<Vec>(high));
    return reinterpret_cast<IntVec>(_mm512_cvtps_epi32(clipped));
#elif defined(__AVX2__)
    const __m256 clipped = _mm256_min_ps(_mm256_max_ps(value, broadcast<Vec>(low)), broadcast<Vec>(high));
    return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(clipped));
#else
    value = value > low ? value : broadcast<Vec>(low);
    value = value < high ? value : broadcast<Vec>(high);
    return reinterpret_cast<IntVec>(value + kRoundToInt) - reinterpret_cast<IntVec>(broadcast<Vec>(kRoundToInt));
#endif
}

inline void store_words(int16_t *at, IntVec v) { store_as(at, __builtin_convertvector(v, HalfWords)); }
inline Vec to_float(IntVec v) { return __builtin_convertvector(v, Vec); }
inline IntVec load_words(const int16_t *at) { return __builtin_convertvector(load_as<HalfWords>(at), IntVec); }

inline IntVec lane_numbers() {
    IntVec v{};
    for (int64_t l = 0; l < kVecLanes; ++l) v[l] = static_cast<int32_t>(l);
    return v;
}

// The table rows of one sample, W vectors of columns, as int16 sums of signed entries.
inline Words table_words(const uint8_t *at) { return __builtin_convertvector(load_as<Bytes>(at), Words) - 128; }
inline Words table_words(const int16_t *at) { return load_as<Words>(at); }
template <int W, class T>
inline void add_rows(const MixedLinear &m, const T *table, const uint32_t *rows, const uint32_t *next, int64_t begin, int16_t *sums) {
    Words sum[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) sum[w] = Words{};
    for (int64_t f = 0; f < m.fields; ++f) {
        const T *row = table + rows[f] * m.stride + begin, *ahead = table + next[f] * m.stride + begin;
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            sum[w] += table_words(row + w * kWords);
            if (w * kWords * sizeof(T) % 64 == 0) __builtin_prefetch(ahead + w * kWords);
        }
    }
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) store_as(sums + begin + w * kWords, sum[w]);
}

inline void store_columns(const MixedLinear &m, const Columns &to, int64_t first, IntVec sum, int64_t row, int64_t column) {
    const Vec value = to_float(sum) * load_float<Vec>(m.scale + column) + load_float<Vec>(m.bias + column);
    const int64_t at = row * to.stride + column - first;
    if (to.kind == Kind::kBytes)
        store_as(static_cast<uint8_t *>(to.out) + at, __builtin_convertvector(round_clipped(value, 0, 255), QuarterBytes));
    else if (to.kind == Kind::kWords)
        store_words(static_cast<int16_t *>(to.out) + at, round_clipped(value, to.relu ? 0 : -kCodeLimit, kCodeLimit));
    else
        store_float(static_cast<float *>(to.out) + at, value);
}

// Which pairs of inputs are not zero in all of these rows, in order; returns how many. `pairs`: room for kVecLanes more.
inline int64_t active_pairs(const int16_t *x, int64_t x_stride, int64_t rows, int64_t count, int32_t *pairs) {
    int64_t found = 0;
    for (int64_t p = 0; p < count; p += kVecLanes) {
        IntVec any{};
        for (int64_t r = 0; r < rows; ++r) any |= load_as<IntVec>(x + r * x_stride + 2 * p);
        const IntVec number = lane_numbers() + static_cast<int32_t>(p);
#if defined(__AVX512F__)
        const __m512i last = _mm512_set1_epi32(static_cast<int32_t>(count));
        const __mmask16 kept = _mm512_test_epi32_mask(reinterpret_cast<__m512i>(any), reinterpret_cast<__m512i>(any)) &
                               _mm512_cmplt_epi32_mask(reinterpret_cast<__m512i>(number), last);
        _mm512_storeu_si512(pairs + found, _mm512_maskz_compress_epi32(kept, reinterpret_cast<__m512i>(number)));
        found += __builtin_popcount(kept);
#else
        for (int64_t l = 0; l < kVecLanes; ++l) {
            pairs[found] = number[l];
            found += any[l] != 0 && number[l] < count;
        }
#endif
    }
    return found;
}

// Count rows from `row` on and up to four vectors of columns, sums in named variables (see avx512.cpp); base: int16 sums of table rows or
// null.
template <int Count, int Vectors>
void mixed_tile(const MixedLinear &m, const int16_t *base, const int16_t *x, int64_t x_stride, int64_t row, int64_t column,
                const Columns &to, int64_t first, const int32_t *pairs, int64_t count) {
    const int16_t *weights = m.weight + column * 2 * m.pairs;
#define SUMS(r) IntVec s##r##0{}, s##r##1{}, s##r##2{}, s##r##3{};
    SUMS(0) SUMS(1) SUMS(2) SUMS(3)
#undef SUMS
#define ROW(r)                                                     \
    if constexpr (Count > r) {                                     \
        const Words pair = broadcast_pair(x + r * x_stride + 2 * p);  \
        dot_pairs(s##r##0, pair, w0);                              \
        if constexpr (Vectors > 1) dot_pairs(s##r##1, pair, w1);   \
        if constexpr (Vectors > 2) dot_pairs(s##r##2, pair, w2), dot_pairs(s##r##3, pair, w3); \
    }
    for (int64_t i = 0; i < count; ++i) {
        const int64_t p = pairs[i];
        const int16_t *weight = weights + p * 4 * kWords;
        const Words w0 = load_as<Words>(weight), w1 = load_as<Words>(weight + kWords), w2 = load_as<Words>(weight + 2 * kWords),
                    w3 = load_as<Words>(weight + 3 * kWords);
        ROW(0) ROW(1) ROW(2) ROW(3)
    }
#undef ROW
    const auto store = [&](IntVec sum, int64_t r, int64_t vector) {
        const int64_t at = column + vector * kVecLanes;
        if (base) sum += load_words(base + r * m.stride + at) << m.shift;
        store_columns(m, to, first, sum, row + r, at);
    };
#define STORE(r)                                                                  \
    if constexpr (Count > r) {                                                    \
        store(s##r##0, r, 0);                                                     \
        if constexpr (Vectors > 1) store(s##r##1, r, 1);                          \
        if constexpr (Vectors > 2) store(s##r##2, r, 2), store(s##r##3, r, 3);    \
    }
    STORE(0) STORE(1) STORE(2) STORE(3)
#undef STORE
}

template <int Count>
void mixed_rows(const MixedLinear &m, const int16_t *base, const int16_t *x, int64_t x_stride, int64_t row, const Columns *to,
                const int32_t *pairs, int64_t count) {
    for (int64_t first = 0; first < m.stride; first = to->end, ++to)
        for (int64_t column = first; column < first + to->width; column += 4 * kVecLanes) {
            const int64_t left = first + to->width - column;
            if (left > 2 * kVecLanes) mixed_tile<Count, 4>(m, base, x, x_stride, row, column, *to, first, pairs, count);
            else if (left > kVecLanes) mixed_tile<Count, 2>(m, base, x, x_stride, row, column, *to, first, pairs, count);
            else mixed_tile<Count, 1>(m, base, x, x_stride, row, column, *to, first, pairs, count);
        }
}

void mixed(const MixedLinear &m, const uint32_t *rows, const int16_t *x, int64_t x_stride, int64_t n, const Columns *columns) {
    auto *pairs = static_cast<int32_t *>(kernel_scratch((m.pairs + 2 * kVecLanes) * 4 + 4 * m.stride * 2));
    auto *base = m.fields > 0 ? reinterpret_cast<int16_t *>(pairs + round_up(m.pairs, kVecLanes) + kVecLanes) : nullptr;
    int64_t active = m.pairs;
    for (int64_t p = 0; p < m.pairs; ++p) pairs[p] = static_cast<int32_t>(p);
    for (int64_t row = 0; row < n; row += 4) {
        const int64_t count = n - row < 4 ? n - row : 4;
        for (int64_t s = row; base && s < row + count; ++s) {
            const uint32_t *next = rows + (s + 1 < n ? s + 1 : s) * m.fields;
            int16_t *sums = base + (s - row) * m.stride;
            const auto add = [&](const auto *table) {
                const Columns *to = columns;
                for (int64_t first = 0; first < m.stride; first = to->end, ++to) {
                    int64_t begin = first;
                    const int64_t end = first + to->width;
                    for (; begin + 2 * kWords < end && begin + 4 * kWords <= to->end; begin += 4 * kWords) add_rows<4>(m, table, rows + s * m.fields, next, begin, sums);
                    for (; begin < end; begin += kWords) add_rows<1>(m, table, rows + s * m.fields, next, begin, sums);
                }
            };
            if (m.table) add(m.table);
            else add(m.wide_table);
        }
        const int16_t *from = x + row * x_stride;
        if (m.sparse) active = active_pairs(from, x_stride, count, m.pairs, pairs);
        if (count == 4) mixed_rows<4>(m, base, from, x_stride, row, columns, pairs, active);
        else if (count == 3) mixed_rows<3>(m, base, from, x_stride, row, columns, pairs, active);
        else if (count == 2) mixed_rows<2>(m, base, from, x_stride, row, columns, pairs, active);
        else mixed_rows<1>(m, base, from, x_stride, row, columns, pairs, active);
    }
}

void gather(const WordRows &r, const uint32_t *ids, int64_t ids_stride, const float *means, int64_t means_stride, int64_t n, int16_t *out,
            int64_t out_stride) {
    constexpr int64_t kAhead = 4, kFitting = 8;  // so many codes fit an int16 sum
    for (int64_t s = 0; s < n; ++s, ids += ids_stride, out += out_stride) {
        if (r.far && s + kAhead < n)
            for (int64_t l = 0; l < r.count; ++l) {
                const int16_t *ahead = r.table + ids[kAhead * ids_stride + l] * r.stride;
                for (int64_t j = 0; j < r.width; j += 32) __builtin_prefetch(ahead + j);
            }
        if (r.pool == Pool::kNone) {
            const int16_t *row = r.table + ids[0] * r.stride;
            for (int64_t j = 0; j < r.width; j += kWords) store_as(out + j, load_as<Words>(row + j));
        } else if (r.pool == Pool::kMax) {
            for (int64_t j = 0; j < r.width; j += kWords) {
                Words largest = load_as<Words>(r.table + ids[0] * r.stride + j);
                for (int64_t l = 1; l < r.count; ++l) {
                    const Words row = load_as<Words>(r.table + ids[l] * r.stride + j);
                    largest = row > largest ? row : largest;
                }
                store_as(out + j, largest);
            }
        } else {
            float factor = r.pool == Pool::kMean ? means[s * means_stride] * r.factor : r.factor;
            if (!(factor - factor == 0)) factor = 0;  // infinite, or NaN
            int64_t j = 0;
            for (; j + kVecLanes < r.width; j += kWords) {
                IntVec low{}, high{};
                for (int64_t l = 0; l < r.count;) {
                    Words sum{};
                    for (const int64_t end = r.count - l < kFitting ? r.count : l + kFitting; l < end; ++l)
                        sum += load_as<Words>(r.table + ids[l] * r.stride + j);
                    HalfWords half[2];
                    std::memcpy(half, &sum, sizeof sum);
                    low += __builtin_convertvector(half[0], IntVec), high += __builtin_convertvector(half[1], IntVec);
                }
                store_words(out + j, round_clipped(to_float(low) * factor, -kCodeLimit, kCodeLimit));
                store_words(out + j + kVecLanes, round_clipped(to_float(high) * factor, -kCodeLimit, kCodeLimit));
            }
            if (j < r.width) {
                IntVec sum{};
                for (int64_t l = 0; l < r.count; ++l) sum += load_words(r.table + ids[l] * r.stride + j);
                store_words(out + j, round_clipped(to_float(sum) * factor, -kCodeLimit, kCodeLimit));
            }
        }
    }
}

void numbers(const float *x, int64_t x_stride, const int32_t *columns, const float *scale, int64_t width, int64_t n, int16_t *out,
             int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride, out += out_stride)
        for (int64_t k = 0; k < width; k += kVecLanes) {
            Vec value;
            for (int64_t l = 0; l < kVecLanes; ++l) value[l] = x[columns[k + l]];
            value *= load_float<Vec>(scale + k);
            store_words(out + k, round_clipped(value == value ? value : Vec{}, -kCodeLimit, kCodeLimit));
        }
}

void quantize(const float *x, int64_t x_stride, float factor, float low, int64_t width, int64_t n, int16_t *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s)
        for (int64_t j = 0; j < width; j += kVecLanes)
            store_words(out + s * out_stride + j,
                        round_clipped(load_float<Vec>(x + s * x_stride + j) * factor, low, kCodeLimit));
}

// Sixteen lanes as vectors of this instruction set.
constexpr int64_t kParts = kLanes / kVecLanes;
struct Lanes {
    Vec part[kParts];
};
inline float reduce_lanes(const Lanes &lanes) {
    float sums[kLanes];
    std::memcpy(sums, &lanes, sizeof sums);
    return reduce_add(load_float<Vec16>(sums));
}

void factorization(const int16_t *x, int64_t x_stride, const int32_t *at, int64_t fields, int64_t width, float scale, int64_t n, float *out,
                   int64_t out_stride) {
    const IntVec lane = lane_numbers();
    for (int64_t s = 0; s < n; ++s, x += x_stride) {
        Lanes total{};
        for (int64_t j = 0; j < width; j += kVecLanes) {
            IntVec sum{}, squares{};
            for (int64_t f = 0; f < fields; ++f) {
                const IntVec k = load_words(x + at[f] + j);
                sum += k, squares += k * k;
            }
            const Vec value = to_float(sum) * to_float(sum) - to_float(squares);
            Vec &part = total.part[j / kVecLanes % kParts];
            part += lane + static_cast<int32_t>(j) < static_cast<int32_t>(width) ? value : Vec{};
        }
        out[s * out_stride] = reduce_lanes(total) * scale;
    }
}

void cross(const Cross &c, const int16_t *x, int64_t x_stride, const float *u, float *g, int64_t stride, int64_t n, int16_t *out,
           int64_t out_stride, float *total, int64_t total_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride, u += stride, g += stride) {
        Lanes sums{};
        for (int64_t j = 0; j < c.width; j += kVecLanes) {
            const Vec grown = (c.first ? broadcast<Vec>(1.0f) : load_float<Vec>(g + j)) + load_float<Vec>(u + j);
            const Vec value = to_float(load_words(x + j)) * grown;
            store_float(g + j, grown);
            if (out) store_words(out + s * out_stride + j, round_clipped(value * c.factor, -kCodeLimit, kCodeLimit));
            if (c.weight) {
                const Vec weight = load_float<Vec>(c.weight + j);
                sums.part[j / kVecLanes % kParts] += weight == Vec{} ? Vec{} : value * weight;
            }
        }
        if (c.weight) total[s * total_stride] = reduce_lanes(sums);
    }
}

// The vectors stand as columns, so that a vector's dots with all others come out side by side.
void dots(const int16_t *x, int64_t x_stride, const int32_t *at, int64_t vectors, int64_t width, const float *factor, int64_t n, int16_t *out,
          int64_t out_stride) {
    const int64_t pairs = (width + 1) / 2, columns = round_up(vectors, kLanes);
    auto *turned = static_cast<int32_t *>(kernel_scratch(pairs * columns * 4));
    std::memset(turned, 0, static_cast<size_t>(pairs * columns * 4));
    for (int64_t s = 0; s < n; ++s, x += x_stride, out += out_stride) {
        for (int64_t v = 0; v < vectors; ++v) {
            const int16_t *from = x + at[v];
            for (int64_t p = 0; p < pairs; ++p) std::memcpy(turned + p * columns + v, from + 2 * p, 4);
        }
        if (width % 2)
            for (int64_t v = 0; v < vectors; ++v) turned[(pairs - 1) * columns + v] &= 0xFFFF;
        int16_t *to = out;
        const float *by = factor;
        for (int64_t i = 1; i < vectors; by += i, ++i) {
            for (int64_t j = 0; j < i; j += kVecLanes) {
                IntVec even{}, odd{};
                int64_t p = 0;
                for (; p + 2 <= pairs; p += 2) {
                    dot_pairs(even, reinterpret_cast<Words>(turned[p * columns + i] - IntVec{}), load_as<Words>(turned + p * columns + j));
                    dot_pairs(odd, reinterpret_cast<Words>(turned[(p + 1) * columns + i] - IntVec{}),
                              load_as<Words>(turned + (p + 1) * columns + j));
                }
                if (p < pairs)
                    dot_pairs(even, reinterpret_cast<Words>(turned[p * columns + i] - IntVec{}), load_as<Words>(turned + p * columns + j));
                store_words(to + j, round_clipped(to_float(even + odd) * load_float<Vec>(by + j), -kCodeLimit, kCodeLimit));
            }
            to += i;
        }
    }
}

// sum x y over sixteen lanes, then the tree.
inline float dot_floats(const float *x, const float *y, int64_t width) {
    const IntVec lane = lane_numbers();
    Lanes sums{};
    for (int64_t j = 0; j < width; j += kVecLanes) {
        const Vec value = load_float<Vec>(x + j) * load_float<Vec>(y + j);
        sums.part[j / kVecLanes % kParts] += lane + static_cast<int32_t>(j) < static_cast<int32_t>(width) ? value : Vec{};
    }
    return reduce_lanes(sums);
}

void weighted(const int16_t *x, int64_t x_stride, const float *weight, int64_t width, int64_t n, float *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += x_stride) {
        Lanes sums{};
        for (int64_t j = 0; j < width; j += kLanes)  // weights are padded with zeros
            for (int64_t p = 0; p < kParts; ++p)
                sums.part[p] += to_float(load_words(x + j + p * kVecLanes)) * load_float<Vec>(weight + j + p * kVecLanes);
        out[s * out_stride] = reduce_lanes(sums);
    }
}

void normalize(const float *x, int64_t stride, int64_t width, float epsilon, float least, bool relu, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride) {
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec value = load_float<Vec>(x + j);
            store_float(out + j, relu ? (value < Vec{} ? Vec{} : value) : value);
        }
        const float squares = dot_floats(out, out, width) + epsilon;
        const float norm = __builtin_sqrtf(squares > least ? squares : least);
        for (int64_t j = 0; j < width; j += kVecLanes) store_float(out + j, load_float<Vec>(out + j) / norm);
    }
}

void leaky(const float *x, int64_t stride, const float *slope, int64_t width, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride)
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec value = load_float<Vec>(x + j), scaled = value * load_float<Vec>(slope + j);
            store_float(out + j, value < Vec{} ? scaled : value);
        }
}

// (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x.
void hyperbolic(const float *x, int64_t stride, int64_t width, int64_t n, float *out) {
    for (int64_t s = 0; s < n; ++s, x += stride, out += stride)
        for (int64_t j = 0; j < width; j += kVecLanes) {
            const Vec value = load_float<Vec>(x + j), down = value < Vec{} ? value : -value;
            const Vec e = exponential(down * 2.0f), size = (1.0f - e) / (1.0f + e);
            store_float(out + j, value < Vec{} ? -size : size);
        }
}

// Slice e of x times softmax(gates)_e, sums from the first on.
void mixture(const float *x, int64_t stride, const float *gates, int64_t gates_stride, int64_t experts, int64_t width, int64_t n,
             float *out) {
    auto *weights = static_cast<float *>(kernel_scratch(experts * 4));
    for (int64_t s = 0; s < n; ++s, x += stride, gates += gates_stride, out += stride) {
        float most = gates[0], sum = 0;
        for (int64_t e = 1; e < experts; ++e) most = gates[e] > most ? gates[e] : most;
        for (int64_t e = 0; e < experts; ++e) sum += weights[e] = exponential(broadcast<Vec>(gates[e] - most))[0];
        for (int64_t e = 0; e < experts; ++e)
            for (int64_t j = 0; j < width; ++j) out[e * width + j] = x[e * width + j] * (weights[e] / sum);
    }
}

void product(const float *x, const float *y, int64_t stride, int64_t width, int64_t n, float *out, int64_t out_stride) {
    for (int64_t s = 0; s < n; ++s, x += stride, y += stride) out[s * out_stride] = dot_floats(x, y, width);
}

constexpr ClickKernels kClickKernels = {kVecLanes, mixed, gather, numbers, quantize, factorization, cross, dots, weighted, normalize, leaky, hyperbolic, mixture, product};

}  // namespace
}  // namespace zoo
