// Pooling of quantized rows on the vectors of an instruction set, see kernels.h. Codes of a group of 16 bytes stand in planes: byte j holds entry j in its
// lowest bits, entry 16 + j in the next. The last group may have 8 or 4 bytes. Sums are integers, so that their order is of no account.
#pragma once
#include <cstring>

#include "isa/tables/kernels.h"
#include "isa/vectors/words.h"
#if defined(__AVX2__)
#include "isa/tables/quads.h"
#endif

namespace zoo {
namespace {

constexpr int64_t kGroup = 16;     // bytes
constexpr int kPass = 4;           // vectors of a row that are summed together
constexpr int64_t kTogether = 64;  // rows whose passes follow each other: they are in L1

// A vector of integers from as many bytes: `Width` bytes, repeated where they are fewer. gcc 12 converts vectors of bytes piece by piece.
template <int64_t Width>
inline IntVec spread(const uint8_t *address) {
#if defined(__AVX512F__) || defined(__AVX2__)
    __m128i bytes;
    if constexpr (Width >= 16) {
        bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(address));
    } else if constexpr (Width == 8) {
        int64_t eight;
        std::memcpy(&eight, address, 8);
        bytes = _mm_set1_epi64x(eight);
    } else {
        int32_t four;
        std::memcpy(&four, address, 4);
        bytes = _mm_set1_epi32(four);
    }
#if defined(__AVX512F__)
    return reinterpret_cast<IntVec>(_mm512_cvtepu8_epi32(bytes));
#else
    return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(bytes));
#endif
#else
    IntVec v{};
    for (int64_t l = 0; l < kVecLanes; ++l) v[l] = address[l % Width];
    return v;
#endif
}

// Where the codes of a region of whole groups of `Width` bytes begin: the first entry, and the byte.
struct Region {
    int64_t entry, end, byte;
};

// A vector of codes of a row: where it lies, and how far its bits are shifted.
struct Place {
    int64_t offset;
    int32_t shift;
};

template <int Bits, int Width>
struct Codes {
    static constexpr int64_t kEntries = Width * 8 / Bits;  // of a group
    static Place place(const Region &region, int64_t entry) {
        entry -= region.entry;
        if (Bits == 8) return {region.byte + entry, 0};
        const int64_t local = entry % kEntries;
        return {region.byte + entry / kEntries * Width + (Width < kVecLanes ? 0 : local % Width), static_cast<int32_t>(Bits * (local / Width))};
    }
    static IntVec load(const uint8_t *row, Place place) {
        const IntVec bytes = spread<(Width < kVecLanes ? Width : kVecLanes)>(row + place.offset);
        if constexpr (Bits == 8) return bytes;
        if constexpr (Width >= kVecLanes) return (bytes >> place.shift) & ((1 << Bits) - 1);
        IntVec shift{};
        for (int64_t l = 0; l < kVecLanes; ++l) shift[l] = static_cast<int32_t>(Bits * (l / Width));
        return (bytes >> (shift + place.shift)) & ((1 << Bits) - 1);
    }
};

inline void store(float *to, int64_t first, int64_t width, Vec value) {
    if (first + kVecLanes <= width)
        store_float(to + first, value);
    else if (first < width)
        std::memcpy(to + first, &value, static_cast<size_t>(width - first) * 4);
}

inline void store(int16_t *to, int64_t first, int64_t, Vec value) { store_words(to + first, round_clipped(value, -kCodeLimit, kCodeLimit)); }

struct Parameters {
    int16_t scale, bias;
};
inline Parameters parameters(const QuantizedRows &r, uint32_t row) {
    Parameters p;
    std::memcpy(&p, r.table + row * r.stride + r.stride - 4, 4);
    return p;
}

struct Samples {
    const uint32_t *rows;
    const float *factors;
    int64_t begin, end;
    bool fetch;
};

// Units of a sample: its factor is multiplied into them first.
struct Units {
    float scale, bias;
    Units(const QuantizedRows &r, const Samples &samples, int64_t s)
        : scale(samples.factors ? r.scale_unit * samples.factors[s] : r.scale_unit), bias(samples.factors ? r.bias_unit * samples.factors[s] : r.bias_unit) {}
};

inline void fetch(const QuantizedRows &r, uint32_t row) {
    const uint8_t *row_bytes = r.table + row * r.stride;
    constexpr int kIntoL2 = 2;
    __builtin_prefetch(row_bytes, 0, kIntoL2), __builtin_prefetch(row_bytes + r.stride - 1, 0, kIntoL2);
    for (int64_t line = 64; line < r.stride - 1; line += 64) __builtin_prefetch(row_bytes + line, 0, kIntoL2);
}

enum class Pooling { kLone, kSum, kMax };

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// `Count` vectors of the pooled rows of some samples; sums in named variables, since gcc 12 keeps arrays of them in memory. The product of a lone row fits a float.
template <int Bits, int Width, int Count, Pooling P, class T>
void pass(const QuantizedRows &r, const Samples &samples, int64_t first, const Region &region, T *out, int64_t out_stride) {
    using C = Codes<Bits, Width>;
    const Place p0 = C::place(region, first), p1 = C::place(region, first + kVecLanes), p2 = C::place(region, first + 2 * kVecLanes),
                p3 = C::place(region, first + 3 * kVecLanes);
    const uint32_t *row_of = samples.rows + samples.begin * r.count;
    for (int64_t s = samples.begin; s < samples.end; ++s) {
        Vec a{}, b{}, c{}, d{};
        int32_t bias = 0;
        T *to = out + s * out_stride;
        const int64_t end = region.end;
        const Units units(r, samples, s);
        if constexpr (P == Pooling::kMax) {
            for (int64_t l = 0; l < r.count; ++l, ++row_of) {
                if (samples.fetch) fetch(r, row_of[kRowsAhead]);
                const uint8_t *row = r.table + *row_of * r.stride;
                const Parameters p = parameters(r, *row_of);
                const float scale = p.scale, shift = static_cast<float>(p.bias) * units.bias;
                const auto value = [&](Place place) { return to_float(C::load(row, place)) * scale * units.scale + shift; };
                a = l ? larger(a, value(p0)) : value(p0);
                if constexpr (Count > 1) b = l ? larger(b, value(p1)) : value(p1);
                if constexpr (Count > 2) c = l ? larger(c, value(p2)) : value(p2);
                if constexpr (Count > 3) d = l ? larger(d, value(p3)) : value(p3);
            }
            store(to, first, end, a);
            if constexpr (Count > 1) store(to, first + kVecLanes, end, b);
            if constexpr (Count > 2) store(to, first + 2 * kVecLanes, end, c);
            if constexpr (Count > 3) store(to, first + 3 * kVecLanes, end, d);
            continue;
        } else if constexpr (P == Pooling::kLone) {
            if (samples.fetch) fetch(r, row_of[kRowsAhead]);
            const uint8_t *row = r.table + *row_of * r.stride;
            const Parameters p = parameters(r, *row_of++);
            const float scale = p.scale;
            bias = p.bias;
            a = to_float(C::load(row, p0)) * scale;
            if constexpr (Count > 1) b = to_float(C::load(row, p1)) * scale;
            if constexpr (Count > 2) c = to_float(C::load(row, p2)) * scale;
            if constexpr (Count > 3) d = to_float(C::load(row, p3)) * scale;
        } else {
            IntVec i{}, j{}, k{}, m{};
            for (int64_t l = 0; l < r.count; ++l, ++row_of) {
                if (samples.fetch) fetch(r, row_of[kRowsAhead]);
                const uint8_t *row = r.table + *row_of * r.stride;
                const Parameters p = parameters(r, *row_of);
                const int32_t scale = p.scale;
                bias += p.bias;
                i += C::load(row, p0) * scale;
                if constexpr (Count > 1) j += C::load(row, p1) * scale;
                if constexpr (Count > 2) k += C::load(row, p2) * scale;
                if constexpr (Count > 3) m += C::load(row, p3) * scale;
            }
            a = to_float(i), b = to_float(j), c = to_float(k), d = to_float(m);
        }
        const float shift = static_cast<float>(bias) * units.bias;
        store(to, first, end, a * units.scale + shift);
        if constexpr (Count > 1) store(to, first + kVecLanes, end, b * units.scale + shift);
        if constexpr (Count > 2) store(to, first + 2 * kVecLanes, end, c * units.scale + shift);
        if constexpr (Count > 3) store(to, first + 3 * kVecLanes, end, d * units.scale + shift);
    }
}

template <int Bits, int Width, Pooling P, class T>
void vectors_of(const QuantizedRows &r, Samples &samples, const Region &region, T *out, int64_t out_stride) {
    for (int64_t first = region.entry; first < region.end; first += kPass * kVecLanes, samples.fetch = false) {
        const int64_t vectors = (region.end - first + kVecLanes - 1) / kVecLanes;
        switch (vectors < kPass ? vectors : kPass) {
            case 1: pass<Bits, Width, 1, P>(r, samples, first, region, out, out_stride); break;
            case 2: pass<Bits, Width, 2, P>(r, samples, first, region, out, out_stride); break;
            case 3: pass<Bits, Width, 3, P>(r, samples, first, region, out, out_stride); break;
            default: pass<Bits, Width, 4, P>(r, samples, first, region, out, out_stride);
        }
    }
}

#if defined(__AVX2__)
// Two planes of the columns of up to sizeof(V) bytes of the pooled rows, from byte `offset` of a row on; they are the entries from `entry` on, in groups of `Width`.
template <class B, int Bits, int Width, int Shift>
void quads(const QuantizedRows &r, const Samples &samples, int64_t offset, int64_t entry, int64_t end, float *out, int64_t out_stride) {
    constexpr int kMask = Bits == 8 ? 255 : (1 << Bits) - 1;
    const uint32_t *row_of = samples.rows + samples.begin * r.count;
    const int64_t parameters = r.stride - 4;
    for (int64_t s = samples.begin; s < samples.end; ++s) {
        Sum<B> a, b, c, d, e, f, g, h;
        __m128i biases = _mm_setzero_si128();
        for (int64_t l = 0; l < r.count; l += 4, row_of += 4) {
            const int64_t rows = r.count - l;
            const uint8_t *p0 = r.table + row_of[0] * r.stride, *p1 = p0, *p2 = p0, *p3 = p0;
            int32_t x0, x1 = 0, x2 = 0, x3 = 0;
            std::memcpy(&x0, p0 + parameters, 4);
            if (rows > 1) p1 = r.table + row_of[1] * r.stride, std::memcpy(&x1, p1 + parameters, 4);
            if (rows > 2) p2 = r.table + row_of[2] * r.stride, std::memcpy(&x2, p2 + parameters, 4);
            if (rows > 3) p3 = r.table + row_of[3] * r.stride, std::memcpy(&x3, p3 + parameters, 4);
            if (samples.fetch)
                for (int64_t i = 0; i < 4 && i < rows; ++i) fetch(r, row_of[kRowsAhead + i]);
            const __m128i four = _mm_setr_epi32(x0, x1, x2, x3);
            biases = _mm_add_epi32(biases, _mm_srai_epi32(four, 16));
            const Scales<B> scales(four);
            const auto v0 = B::load(p0 + offset), v1 = B::load(p1 + offset), v2 = B::load(p2 + offset), v3 = B::load(p3 + offset);
            const auto ab_low = B::low8(v0, v1), ab_high = B::high8(v0, v1), cd_low = B::low8(v2, v3), cd_high = B::high8(v2, v3);
            sum_columns<B, Shift, kMask>(scales, ab_low, ab_high, cd_low, cd_high, a, b, c, d);
            if constexpr (Bits < 8) sum_columns<B, Shift + Bits, kMask>(scales, ab_low, ab_high, cd_low, cd_high, e, f, g, h);
            if (rows < 4) row_of += rows - 4;
        }
        const Units units(r, samples, s);
        biases = _mm_add_epi32(biases, _mm_shuffle_epi32(biases, 0x4e));
        biases = _mm_add_epi32(biases, _mm_shuffle_epi32(biases, 0xb1));
        const float shift = static_cast<float>(_mm_cvtsi128_si32(biases)) * units.bias;
        float *to = out + s * out_stride;
        const auto finish = [&](const Sum<B> &s0, const Sum<B> &s1, const Sum<B> &s2, const Sum<B> &s3, int plane) {
            auto t0 = s0.total(), t1 = s1.total(), t2 = s2.total(), t3 = s3.total();
            B::transpose(t0, t1, t2, t3);
            constexpr int64_t kLanesOf = sizeof(t0) / 4;
            const auto put = [&](int64_t column, const auto &sums) {
                const int64_t first = Bits == 8 ? entry + column : entry + column / Width * (Width * 8 / Bits) + plane * Width + column % Width;
                const bool inside = Width == kGroup || column < Width;
                if (inside && first < end) B::store(to + first, sums, units.scale, shift, end - first);
            };
            put(0, t0), put(kLanesOf, t1), put(2 * kLanesOf, t2), put(3 * kLanesOf, t3);
        };
        finish(a, b, c, d, Shift / Bits);
        if constexpr (Bits < 8) finish(e, f, g, h, Shift / Bits + 1);
    }
}

template <class B, int Bits, int Width>
void planes(const QuantizedRows &r, Samples &samples, int64_t offset, int64_t entry, int64_t end, float *out, int64_t out_stride) {
    quads<B, Bits, Width, 0>(r, samples, offset, entry, end, out, out_stride);
    samples.fetch = false;
    if constexpr (Bits == 2) quads<B, Bits, Width, 4>(r, samples, offset, entry, end, out, out_stride);
}
#endif

template <int Bits, int Width, class T>
void pool_region(const QuantizedRows &r, Samples &samples, const Region &region, T *out, int64_t out_stride) {
    if (sizeof(T) == 2 && r.maximum) return vectors_of<Bits, Width, Pooling::kMax>(r, samples, region, out, out_stride);
    if (sizeof(T) == 2 || r.count == 1) return vectors_of<Bits, Width, Pooling::kLone>(r, samples, region, out, out_stride);
    if constexpr (sizeof(T) == 4) {
#if defined(__AVX2__)
        int64_t entry = region.entry, byte = region.byte;
        while (entry < region.end) {
            const int64_t left = (region.end - entry) * Bits / 8;
            int64_t bytes = kGroup;
            if constexpr (Width < kGroup) {
                planes<Sixteen, Bits, Width>(r, samples, byte, entry, region.end, out, out_stride);
#if defined(__AVX512F__)
            } else if (left > 32) {
                bytes = 64;
                planes<SixtyFour, Bits, Width>(r, samples, byte, entry, region.end, out, out_stride);
#endif
            } else if (left > 16) {
                bytes = 32;
                planes<ThirtyTwo, Bits, Width>(r, samples, byte, entry, region.end, out, out_stride);
            } else {
                planes<Sixteen, Bits, Width>(r, samples, byte, entry, region.end, out, out_stride);
            }
            entry += bytes * 8 / Bits, byte += bytes;
        }
#else
        vectors_of<Bits, Width, Pooling::kSum>(r, samples, region, out, out_stride);
#endif
    }
}

template <int Bits, class T>
void pool_bits(const QuantizedRows &r, Samples &samples, T *out, int64_t out_stride) {
    constexpr int64_t kEntries = kGroup * 8 / Bits;
    const int64_t remainder = Bits == 8 ? 0 : r.width % kEntries, short_width = (remainder + kGroup - 1) / kGroup * kGroup * Bits / 8;
    const int64_t tail = Bits < 8 && (short_width == 8 || short_width == 4) ? remainder : 0;
    const Region whole{0, r.width - tail, 0}, end{whole.end, r.width, whole.end * Bits / 8};
    if (whole.end) pool_region<Bits, kGroup>(r, samples, whole, out, out_stride);
    if constexpr (Bits < 8)
        if (tail && short_width == 8) pool_region<Bits, 8>(r, samples, end, out, out_stride);
    if constexpr (Bits == 2)
        if (tail && short_width == 4) pool_region<Bits, 4>(r, samples, end, out, out_stride);
}

template <class T>
void pool_rows(const QuantizedRows &r, const uint32_t *rows, const float *factors, int64_t n, T *out, int64_t out_stride) {
    const int64_t block = r.count >= kTogether ? 1 : kTogether / r.count;
    for (int64_t first = 0; first < n; first += block) {
        Samples samples{rows, factors, first, first + block < n ? first + block : n, r.far};
        switch (r.bits) {
            case 8: pool_bits<8>(r, samples, out, out_stride); break;
            case 4: pool_bits<4>(r, samples, out, out_stride); break;
            default: pool_bits<2>(r, samples, out, out_stride);
        }
    }
}

void pool(const QuantizedRows &r, const uint32_t *rows, const float *factors, int64_t n, float *out, int64_t out_stride) {
    pool_rows(r, rows, factors, n, out, out_stride);
}

void pool_codes(const QuantizedRows &r, const uint32_t *rows, const float *factors, int64_t n, int16_t *out, int64_t out_stride) {
    if (r.count == 1 || r.maximum) return pool_rows(r, rows, factors, n, out, out_stride);
    const int64_t stride = round_up(r.width, kLanes);
    auto *values = static_cast<float *>(kernel_scratch(n * stride * 4));
    pool(r, rows, factors, n, values, stride);
    for (int64_t s = 0; s < n; ++s)
        for (int64_t j = 0; j < r.width; j += kVecLanes)
            store_words(out + s * out_stride + j, round_clipped(load_float<Vec>(values + s * stride + j), -kCodeLimit, kCodeLimit));
}

}  // namespace
}  // namespace zoo
