// The image kernels for AVX-512 with VNNI.
#pragma once
#include <immintrin.h>

#include "isa/images/kernels.h"
#include "isa/x86/avx512/products.h"

namespace zoo {
namespace {

#define ZOO_INLINE __attribute__((always_inline))
template <int I>
struct Index {
    static constexpr int value = I;
};
// f(Index<0>), f(Index<1>), ...: constant indices, with which gcc keeps arrays of vectors in registers.
template <int Count, int I = 0, class F>
ZOO_INLINE inline void unroll(F f) {
    if constexpr (I < Count) {
        f(Index<I>{});
        unroll<Count, I + 1>(f);
    }
}

// Outputs come in panels of up to four vectors. vpackssdw and vpackuswb join the vectors of a panel 128 bits by 128 bits, so that element
// 4 l + j of its vector i is column 4 V l + 4 i + j of the V vectors' columns: then the bytes come out in order.
struct Panels {
    int64_t count, least, wider;  // `wider` panels have one vector more than `least`
    explicit Panels(int64_t outputs) {
        const int64_t vectors = outputs / 16;
        count = (vectors + 3) / 4, least = vectors / count, wider = vectors % count;
    }
    int64_t vectors(int64_t i) const { return least + (i < wider); }
};
inline int64_t place(int64_t vectors, int64_t column) {  // of a column in its panel
    return column / 4 % vectors * 16 + column / (4 * vectors) * 4 + column % 4;
}

// Panels: weights [inputs / 4][16 V][4], bias int32 [16 V], scale float [16 V].
inline int64_t dense_bytes(int64_t inputs, int64_t outputs) { return (inputs + 8) * outputs; }

inline void pack_dense(const int8_t *weight, const int32_t *bias, const float *scale, int64_t inputs, int64_t outputs, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    const Panels panels(outputs);
    int64_t first = 0;
    for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t vectors = panels.vectors(p), width = 16 * vectors;
        for (int64_t c = 0; c < width; ++c) {
            const int64_t at = place(vectors, c);
            for (int64_t k = 0; k < inputs; ++k) out[(k / 4 * width + at) * 4 + k % 4] = weight[k * outputs + first + c];
            std::memcpy(out + inputs * width + 4 * at, bias + first + c, 4);
            std::memcpy(out + (inputs + 4) * width + 4 * at, scale + first + c, 4);
        }
        out += (inputs + 8) * width, first += width;
    }
}

inline __m512i broadcast_dword(const uint8_t *at) {
    int32_t four;
    std::memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}

// The sums of Rows pixels and one panel.
template <int Rows, int V>
struct DenseSums {
    __m512i at[Rows][V];
    ZOO_INLINE inline const int8_t *run(const Dense &d, const int8_t *w, const uint8_t *const *in) {
        const uint8_t *x[Rows];
        const int8_t *bias = w + 16 * V * d.stretches * d.stretch;
        unroll<Rows>([&](auto r) ZOO_INLINE {
            x[r.value] = in[r.value];
            unroll<V>([&](auto v) ZOO_INLINE { at[r.value][v.value] = load(bias + 64 * v.value); });
        });
        for (int64_t s = 0; s < d.stretches; ++s)
            for (int64_t k = d.offsets[s], end = k + d.stretch; k < end; k += 4, w += 64 * V) {
                __m512i weights[V];
                unroll<V>([&](auto v) ZOO_INLINE { weights[v.value] = load(w + 64 * v.value); });
                unroll<Rows>([&](auto r) ZOO_INLINE {
                    const __m512i four = broadcast_dword(x[r.value] + k);
                    unroll<V>([&](auto v) ZOO_INLINE { dot_u8s8(at[r.value][v.value], four, weights[v.value]); });
                });
            }
        return bias + 64 * V;  // the scales
    }
};

struct BytesOf {
    __m512i zero, low, high;
    bool shifts, clips;
    explicit BytesOf(const Requantization &b)
        : zero(_mm512_set1_epi16(static_cast<int16_t>(b.zero))), low(_mm512_set1_epi8(static_cast<char>(b.low))),
          high(_mm512_set1_epi8(static_cast<char>(b.high))), shifts(b.zero != 0), clips(b.low > 0 || b.high < 255) {}
    // Four vectors of int32 as bytes, 128 bits by 128 bits. vpackssdw saturates, which the zero point does not undo.
    ZOO_INLINE inline __m512i pack(__m512i a, __m512i b, __m512i c, __m512i d) const {
        __m512i first = _mm512_packs_epi32(a, b), second = _mm512_packs_epi32(c, d);
        if (shifts) first = _mm512_adds_epi16(first, zero), second = _mm512_adds_epi16(second, zero);
        const __m512i bytes = _mm512_packus_epi16(first, second);
        return clips ? _mm512_min_epu8(_mm512_max_epu8(bytes, low), high) : bytes;
    }
};

inline __m512i rounded(__m512i sum, __m512 scale) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale)); }

// The vectors i of bytes that `BytesOf::pack` made, as floats.
template <int I>
ZOO_INLINE inline __m512 unpacked(__m512i bytes) {
    constexpr int b = 4 * I;
    const __m512i places = _mm512_broadcast_i32x4(_mm_setr_epi8(b, -1, -1, -1, b + 1, -1, -1, -1, b + 2, -1, -1, -1, b + 3, -1, -1, -1));
    return _mm512_cvtepi32_ps(_mm512_shuffle_epi8(bytes, places));
}

struct SumOf {
    BytesOf bytes;
    __m512 a, b, fixed;
    explicit SumOf(const ByteSum &s)
        : bytes(Requantization{0, s.low, s.high}), a(_mm512_set1_ps(s.a_ratio)), b(_mm512_set1_ps(s.b_ratio)), fixed(_mm512_set1_ps(s.fixed)) {}
    ZOO_INLINE inline __m512i operator()(__m512i x, __m512i y) const {
        __m512i sums[4];
        unroll<4>([&](auto i) ZOO_INLINE {
            const __m512 inner = _mm512_fmadd_ps(unpacked<i.value>(y), b, fixed);
            sums[i.value] = _mm512_cvtps_epi32(_mm512_fmadd_ps(unpacked<i.value>(x), a, inner));
        });
        return bytes.pack(sums[0], sums[1], sums[2], sums[3]);
    }
};

// 128 bits by 128 bits of a panel's bytes to bytes in order, and back.
template <int V>
ZOO_INLINE inline void store_panel(uint8_t *out, __m512i bytes) {
    if constexpr (V == 4) {
        _mm512_storeu_si512(out, bytes);
    } else if constexpr (V == 3) {
        const __m512i found = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 0, 0, 0, 0), bytes);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm512_castsi512_si256(found));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out + 32), _mm512_extracti32x4_epi32(found, 2));
    } else if constexpr (V == 2) {
        const __m512i found = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 0, 0, 0), bytes);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), _mm512_castsi512_si256(found));
    } else {
        const __m512i found = _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), bytes);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out), _mm512_castsi512_si128(found));
    }
}
template <int V>
ZOO_INLINE inline __m512i load_panel(const uint8_t *at) {
    if constexpr (V == 4) return load(at);
    if constexpr (V == 3)
        return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 0, 3, 4, 5, 0, 6, 7, 8, 0, 9, 10, 11, 0),
                                        _mm512_inserti32x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at))),
                                                           _mm_loadu_si128(reinterpret_cast<const __m128i *>(at + 32)), 2));
    if constexpr (V == 2)
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 0, 2, 0, 3, 0),
                                        _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at))));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0),
                                    _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at))));
}

template <int Rows, int V>
void dense_tile(const Dense &d, const int8_t *w, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others,
                int64_t column) {
    DenseSums<Rows, V> sums;
    const int8_t *scales = sums.run(d, w, in);
    __m512 scale[4] = {};
    unroll<V>([&](auto v) ZOO_INLINE { scale[v.value] = _mm512_loadu_ps(scales + 64 * v.value); });
    const BytesOf bytes_of(d.bytes);
    const auto finish = [&](auto sum_of) ZOO_INLINE {
        unroll<Rows>([&](auto r) ZOO_INLINE {
            __m512i q[4] = {};
            unroll<V>([&](auto v) ZOO_INLINE { q[v.value] = rounded(sums.at[r.value][v.value], scale[v.value]); });
            store_panel<V>(out[r.value] + column, sum_of(bytes_of.pack(q[0], q[1], q[2], q[3]), r.value));
        });
    };
    if (!d.sum) return finish([](__m512i bytes, int) ZOO_INLINE { return bytes; });
    const SumOf sum_of(*d.sum);
    if (d.other_first)
        finish([&](__m512i bytes, int r) ZOO_INLINE { return sum_of(load_panel<V>(others[r] + column), bytes); });
    else
        finish([&](__m512i bytes, int r) ZOO_INLINE { return sum_of(bytes, load_panel<V>(others[r] + column)); });
}

// The same as floats. A vector of a panel has four channels of each quarter.
template <int Rows, int V>
void dense_tile(const Dense &d, const int8_t *w, const uint8_t *const *in, float *const *out, const uint8_t *const *, int64_t column) {
    DenseSums<Rows, V> sums;
    const int8_t *scales = sums.run(d, w, in);
    unroll<V>([&](auto v) ZOO_INLINE {
        const __m512 scale = _mm512_loadu_ps(scales + 64 * v.value);
        unroll<Rows>([&](auto r) ZOO_INLINE {
            const __m512 found = _mm512_mul_ps(_mm512_cvtepi32_ps(sums.at[r.value][v.value]), scale);
            float *to = out[r.value] + column + 4 * v.value;
            unroll<4>([&](auto quarter) ZOO_INLINE { _mm_storeu_ps(to + 4 * V * quarter.value, _mm512_extractf32x4_ps(found, quarter.value)); });
        });
    });
}

template <int V>
constexpr int kTileRows = V == 4 ? 6 : V == 3 ? 8 : 12;

template <int V, int Rows, class Out>
ZOO_INLINE inline void dense_rows(int64_t rows, const Dense &d, const int8_t *w, const uint8_t *const *in, Out *const *out,
                                  const uint8_t *const *others, int64_t column) {
    if (rows == Rows) return dense_tile<Rows, V>(d, w, in, out, others, column);
    if constexpr (Rows > 1) dense_rows<V, Rows - 1>(rows, d, w, in, out, others, column);
}

template <int V, class Out>
void dense_panel(const Dense &d, const int8_t *w, const uint8_t *const *in, Out *const *out, const uint8_t *const *others, int64_t n,
                 int64_t column) {
    const int64_t tiles = (n + kTileRows<V> - 1) / kTileRows<V>;  // of as equal heights as can be
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
        const int64_t rows = n / tiles + (t < n % tiles);
        dense_rows<V, kTileRows<V>>(rows, d, w, in + first, out + first, others ? others + first : nullptr, column);
        first += rows;
    }
}

template <class Out>
inline void dense_panels(const Dense &d, const uint8_t *const *in, Out *const *out, const uint8_t *const *others, int64_t n) {
    using Panel = decltype(&dense_panel<1, Out>);
    constexpr Panel panel[] = {nullptr, dense_panel<1, Out>, dense_panel<2, Out>, dense_panel<3, Out>, dense_panel<4, Out>};
    const Panels panels(d.outputs);
    const auto *w = static_cast<const int8_t *>(d.packed);
    int64_t column = 0;
    for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t vectors = panels.vectors(p);
        panel[vectors](d, w, in, out, others, n, column);
        w += (d.stretches * d.stretch + 8) * 16 * vectors, column += 16 * vectors;
    }
}

inline void dense(const Dense &d, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n) {
    dense_panels(d, in, out, others, n);
}

inline void dense_floats(const Dense &d, const uint8_t *const *in, float *const *out, int64_t n) { dense_panels(d, in, out, nullptr, n); }

// Blocks of 64 channels: weights [groups][64][4], bias int32 [64], scale float [64], placed as those of a panel of four vectors.
inline int64_t depthwise_bytes(int64_t groups, int64_t channels) { return (4 * groups + 8) * round_up(channels, 64); }

inline void pack_depthwise(const int8_t *weight, const int32_t *bias, const float *scale, int64_t groups, int64_t channels, void *packed) {
    auto *out = static_cast<int8_t *>(packed);
    std::memset(out, 0, static_cast<size_t>(depthwise_bytes(groups, channels)));
    for (int64_t j = 0; j < (channels == 32 ? 64 : channels); ++j) {  // 32 channels twice, for two pixels at once
        const int64_t c = j % channels;
        int8_t *block = out + j / 64 * (4 * groups + 8) * 64;
        const int64_t at = 4 * place(4, j % 64);
        for (int64_t t = 0; t < 4 * groups; ++t) block[t / 4 * 256 + at + t % 4] = weight[t * channels + c];
        std::memcpy(block + 256 * groups + at, bias + c, 4);
        std::memcpy(block + 256 * (groups + 1) + at, scale + c, 4);
    }
}

// Four taps of 64 channels, the taps of a channel side by side, placed as the weights are.
struct Quads {
    __m512i at[4];
    ZOO_INLINE inline Quads(__m512i a, __m512i b, __m512i c, __m512i d) {
        const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
        const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
        at[0] = _mm512_unpacklo_epi16(ab, cd), at[1] = _mm512_unpackhi_epi16(ab, cd);
        at[2] = _mm512_unpacklo_epi16(AB, CD), at[3] = _mm512_unpackhi_epi16(AB, CD);
    }
};

// One block of channels of n pixels; Reused: how many columns of a 3 x 3 window the next one reads again (-1: windows of any taps).
template <int Reused, class Store>
ZOO_INLINE inline void depthwise_block(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t n, Store store) {
    const int8_t *bias = w + 256 * d.groups, *scales = bias + 256;
    const BytesOf bytes_of(d.bytes);
    const __m512 scale[4] = {_mm512_loadu_ps(scales), _mm512_loadu_ps(scales + 64), _mm512_loadu_ps(scales + 128), _mm512_loadu_ps(scales + 192)};
    const auto finish = [&](const __m512i(&sums)[4]) ZOO_INLINE {
        store(out, bytes_of.pack(rounded(sums[0], scale[0]), rounded(sums[1], scale[1]), rounded(sums[2], scale[2]), rounded(sums[3], scale[3])));
        out += d.out_step;
    };
    __m512i sums[4];
    const auto begin = [&]() ZOO_INLINE { unroll<4>([&](auto i) ZOO_INLINE { sums[i.value] = load(bias + 64 * i.value); }); };
    const auto add = [&](const Quads &quads, const int8_t *weights) ZOO_INLINE {
        unroll<4>([&](auto i) ZOO_INLINE { dot_u8s8(sums[i.value], quads.at[i.value], load(weights + 64 * i.value)); });
    };
    if constexpr (Reused < 0) {
        for (int64_t p = 0; p < n; ++p, x += d.x_step) {
            begin();
            for (int64_t g = 0; g < d.groups; ++g) {
                const int64_t *at = d.offsets + 4 * g;
                add(Quads(load(x + at[0]), load(x + at[1]), load(x + at[2]), load(x + at[3])), w + 256 * g);
            }
            finish(sums);
        }
        return;
    }
    const uint8_t *top = x + d.offsets[0], *middle = x + d.offsets[1], *bottom = x + d.offsets[2];
    const int64_t step = d.offsets[4] - d.offsets[0];
    const auto column = [&](int64_t k) ZOO_INLINE {
        const __m512i last = load(bottom + k * step);
        return Quads(load(top + k * step), load(middle + k * step), last, last);
    };
    const auto advance = [&]() ZOO_INLINE { top += d.x_step, middle += d.x_step, bottom += d.x_step; };
    Quads first = column(0);
    if constexpr (Reused == 2) {
        Quads second = column(1);
        for (int64_t p = 0; p < n; ++p, advance()) {
            const Quads third = column(2);
            begin(), add(first, w), add(second, w + 256), add(third, w + 512);
            finish(sums);
            first = second, second = third;
        }
    } else {
        for (int64_t p = 0; p < n; ++p, advance()) {
            const Quads second = column(1), third = column(2);
            begin(), add(first, w), add(second, w + 256), add(third, w + 512);
            finish(sums);
            first = third;
        }
    }
}

template <class Store>
void depthwise_with(const Depthwise &d, const int8_t *w, const uint8_t *x, uint8_t *out, int64_t n, Store store) {
    const int64_t step = d.columns ? d.offsets[4] - d.offsets[0] : 0;
    if (d.columns && d.x_step == step) return depthwise_block<2>(d, w, x, out, n, store);
    if (d.columns && d.x_step == 2 * step) return depthwise_block<1>(d, w, x, out, n, store);
    depthwise_block<-1>(d, w, x, out, n, store);
}

inline void depthwise(const Depthwise &d, const uint8_t *x, uint8_t *out, int64_t n) {
    const auto *w = static_cast<const int8_t *>(d.packed);
    const auto whole = [](uint8_t *at, __m512i bytes) ZOO_INLINE { _mm512_storeu_si512(at, bytes); };
    if (d.channels == 32 && d.columns && d.x_step == 32 && d.out_step == 32 && d.offsets[4] - d.offsets[0] == 32 && n > 1) {
        Depthwise pairs = d;  // of pixels, side by side as 64 channels are: the last column of one pair is the first of the next
        pairs.x_step = pairs.out_step = 64;
        depthwise_block<1>(pairs, w, x, out, n / 2, whole);
        x += n / 2 * 64, out += n / 2 * 64, n %= 2;
    }
    for (int64_t c = 0; c < d.channels && n; c += 64, w += 256 * (d.groups + 2)) {
        const int64_t left = d.channels - c;
        const auto to_half = [](uint8_t *at, __m512i bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_castsi512_si256(bytes)); };
        const auto to_end = [](uint8_t *at, __m128i bytes) { _mm_storeu_si128(reinterpret_cast<__m128i *>(at), bytes); };
        if (left >= 64)
            depthwise_with(d, w, x + c, out + c, n, whole);
        else if (left == 48)
            depthwise_with(d, w, x + c, out + c, n, [=](uint8_t *at, __m512i bytes) ZOO_INLINE {
                to_half(at, bytes), to_end(at + 32, _mm512_extracti32x4_epi32(bytes, 2));
            });
        else if (left == 32)
            depthwise_with(d, w, x + c, out + c, n, [=](uint8_t *at, __m512i bytes) ZOO_INLINE { to_half(at, bytes); });
        else
            depthwise_with(d, w, x + c, out + c, n, [=](uint8_t *at, __m512i bytes) ZOO_INLINE { to_end(at, _mm512_castsi512_si128(bytes)); });
    }
}

// Half of the table at a time, where the CPU has VBMI.
__attribute__((target("avx512vbmi"))) inline void lookup_of_halves(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n) {
    __m512i quarters[4];
    for (int64_t q = 0; q < 4; ++q) quarters[q] = _mm512_loadu_si512(table + 64 * q);
    for (int64_t i = 0; i < n; i += 64) {
        const __mmask64 there = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        const __m512i v = _mm512_maskz_loadu_epi8(there, x + i);
        const __m512i lower = _mm512_permutex2var_epi8(quarters[0], v, quarters[1]), upper = _mm512_permutex2var_epi8(quarters[2], v, quarters[3]);
        _mm512_mask_storeu_epi8(out + i, there, _mm512_mask_blend_epi8(_mm512_movepi8_mask(v), lower, upper));
    }
}

// Sixteen bytes of the table at a time, for the bytes whose upper half names them.
inline void lookup(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n) {
    static const bool halves = __builtin_cpu_supports("avx512vbmi") > 0;
    if (halves) return lookup_of_halves(table, x, out, n);
    __m512i rows[16];
    for (int64_t h = 0; h < 16; ++h) rows[h] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table + 16 * h)));
    const __m512i half = _mm512_set1_epi8(0x0F);
    for (int64_t i = 0; i < n; i += 64) {
        const __mmask64 there = n - i >= 64 ? ~0ull : (1ull << (n - i)) - 1;
        const __m512i v = _mm512_maskz_loadu_epi8(there, x + i);
        const __m512i low = _mm512_and_si512(v, half), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), half);
        __m512i found = _mm512_shuffle_epi8(rows[0], low);
        for (int h = 1; h < 16; ++h)
            found = _mm512_mask_shuffle_epi8(found, _mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8(static_cast<char>(h))), rows[h], low);
        _mm512_mask_storeu_epi8(out + i, there, found);
    }
}

inline int64_t products(int64_t rounds) {
    constexpr int kSums = 12;  // more than the latency of a product
    __m512i sums[kSums];
    unroll<kSums>([&](auto i) ZOO_INLINE { sums[i.value] = _mm512_setzero_si512(); });
    const __m512i x = _mm512_set1_epi32(0x01020304), w = _mm512_set1_epi32(0x7F81FF01);
    for (int64_t n = 0; n < rounds; ++n) {
        unroll<kSums>([&](auto i) ZOO_INLINE { dot_u8s8(sums[i.value], x, w); });
        asm volatile("" ::: "memory");
    }
    unroll<kSums>([&](auto i) ZOO_INLINE { asm volatile("" ::"v"(sums[i.value])); });
    return rounds * kSums * 64;
}

}  // namespace
}  // namespace zoo
