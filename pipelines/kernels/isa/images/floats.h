// Kernels of image networks on float32 pixels of whole 16 channels, written once and lowered for each instruction set (see lanes.h);
// images/steps/floats.py defines them.
#pragma once
#include "isa/isa.h"
#include "isa/vectors/bytes.h"
#include "isa/vectors/lanes.h"
#include "isa/vectors/unroll.h"

namespace zoo {
namespace {

void dequantize_bytes(const uint8_t *x, float scale, int32_t zero, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] - zero) * scale;
}

inline Vec load_bytes(const uint8_t *address) {
    ByteVec bytes;
    std::memcpy(&bytes, address, sizeof bytes);
    const auto words = __builtin_convertvector(bytes, Vector<uint16_t, kVecLanes>::type);  // gcc 12 widens by one step at a time
    return __builtin_convertvector(__builtin_convertvector(words, IntVec), Vec);
}

// Bounded: by a Relu or Clip. Products of two bytes are exact in float32.
template <bool Bounded>
inline void multiply_rows(const ByteProduct &p, const PixelRow<const uint8_t> &x, const PixelRow<const uint8_t> &gate,
                          const PixelRow<uint8_t> &out, int64_t pixels, int64_t channels) {
    const auto x_zero = static_cast<float>(p.x_zero), gate_zero = static_cast<float>(p.gate_zero), zero = static_cast<float>(p.zero);
    const float ratio = (p.x_scale * p.gate_scale) / p.scale;
    const auto low = static_cast<float>(p.low - p.zero), high = static_cast<float>(p.high - p.zero);
    for (int64_t begin = 0; begin < channels; begin += kVecLanes) {
        Vec factor{};
        for (int64_t pixel = 0; pixel < pixels; ++pixel) {
            if (pixel == 0 || gate.pitch != 0) factor = load_bytes(gate.data + pixel * gate.pitch + begin) - gate_zero;
            const Vec value = load_bytes(x.data + pixel * x.pitch + begin) - x_zero;
            uint8_t *result = out.data + pixel * out.pitch + begin;
            if constexpr (Bounded) store_bytes(result, (value * p.x_scale) * (factor * p.gate_scale) / p.scale, low, high, p.zero);
            else store_bytes(result, (value * factor) * ratio + zero, 0.0f, 255.0f, 0);
        }
    }
}

inline void multiply_pixels(const ByteProduct &p, const PixelRow<const uint8_t> &x, const PixelRow<const uint8_t> &gate,
                            const PixelRow<uint8_t> &out, int64_t pixels, int64_t channels) {
    (p.low != 0 || p.high != 255 ? multiply_rows<true> : multiply_rows<false>)(p, x, gate, out, pixels, channels);
}

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

// clip(rint(scaled(x)) + zero, 0, 255), NaN as 0. Ahead: floats that come into the cache meanwhile.
template <int64_t Ahead = 0, class Scaled>
inline void quantize_vectors(const float *x, int64_t n, uint8_t *out, const ByteStore &bytes, Scaled scaled) {
    int64_t i = 0;
    for (; i + 4 * kVecLanes <= n; i += 4 * kVecLanes) {
        Vec four[4];
        if constexpr (Ahead > 0) unroll<4>([&](auto v) ZOO_INLINE { __builtin_prefetch(x + i + Ahead + v.value * kVecLanes); });
        unroll<4>([&](auto v) ZOO_INLINE { four[v.value] = scaled(load_float<Vec>(x + i + v.value * kVecLanes)); });
        bytes.store(out + i, four);
    }
    for (; i + kVecLanes <= n; i += kVecLanes) bytes.store(out + i, scaled(load_float<Vec>(x + i)));
    if (i == n) return;
    float tail[kVecLanes] = {};
    uint8_t tail_bytes[kVecLanes];
    std::memcpy(tail, x + i, static_cast<size_t>(n - i) * sizeof(float));
    bytes.store(tail_bytes, scaled(load_float<Vec>(tail)));
    std::memcpy(out + i, tail_bytes, static_cast<size_t>(n - i));
}

// Pixels of images, whose rows are too short for the processor to fetch them ahead by itself.
constexpr int64_t kFetchedAhead = 1024;

void quantize_bytes(const float *x, float scale, int32_t zero, int64_t n, uint8_t *out) {
#if defined(__FMA__)
    if (scale > 0x1p-60f && scale < 0x1p60f) {  // no quotient that matters is denormal
        const Vec divisor = broadcast<Vec>(scale), inverse = broadcast<Vec>(1.0f / scale);
        quantize_vectors<kFetchedAhead>(x, n, out, ByteStore(zero), [=](Vec value) ZOO_INLINE {
            const Vec rough = value * inverse;  // its remainder corrects it to the rounded quotient (Markstein 1990), faster than a division
            const Vec quotient = multiply_add(multiply_add(-rough, divisor, value), inverse, rough);
            return rough < 65536.0f && rough > -65536.0f ? quotient : rough;  // beyond, and infinite: a limit of the bytes
        });
        return;
    }
#endif
    quantize_vectors<kFetchedAhead>(x, n, out, ByteStore(zero), [=](Vec value) ZOO_INLINE { return value / scale; });
}

void quantize_floats(const float *x, float factor, int32_t zero, int64_t n, uint8_t *out) {
    quantize_vectors(x, n, out, ByteStore(zero), [=](Vec value) ZOO_INLINE { return value * factor; });
}

void add_floats(const float *a, const float *b, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

void scale_floats(const float *x, const float *gain, const float *bias, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * gain[i] + bias[i];
}

void multiply_floats(const float *a, const float *b, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

void weigh_floats(const float *const *xs, const float *weights, int64_t rows, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i += kVecLanes) {
        Vec sum = load_float<Vec>(xs[0] + i) * broadcast<Vec>(weights[0]);
        for (int64_t row = 1; row < rows; ++row) sum = sum + load_float<Vec>(xs[row] + i) * broadcast<Vec>(weights[row]);
        store_float(out + i, sum);
    }
}

void add_squares(const float *x, const float *mean, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] + (x[i] - mean[i]) * (x[i] - mean[i]);
}

// Eight runs of sixteen floats at a time: single ones would wait for their own sums.
inline void softmax_eight(const float *x, float *out) {
    Vec weights[8];
    float largest[8], sums[8];
    unroll<8>([&](auto i) ZOO_INLINE { weights[i.value] = load_float<Vec>(x + 16 * i.value); });
    largest_of_each<float, 8>(weights, largest);
    unroll<8>([&](auto i) ZOO_INLINE { weights[i.value] = exponential(weights[i.value] - broadcast<Vec>(largest[i.value])); });
    reduce_each<float, 8>(weights, sums, [](auto a, auto b) ZOO_INLINE { return a + b; });
    unroll<8>([&](auto i) ZOO_INLINE { sums[i.value] = 1.0f / sums[i.value]; });
    unroll<8>([&](auto i) ZOO_INLINE { store_float(out + 16 * i.value, weights[i.value] * sums[i.value]); });
}

void softmax_groups(const float *x, int64_t x_pitch, int64_t groups, int64_t size, int64_t n, float *out, int64_t out_pitch) {
    if (kVecLanes == 16 && size == 16 && x_pitch == 16 * groups && out_pitch == x_pitch) {  // all runs follow each other
        const int64_t eights = n * groups / 8;
        for (int64_t i = 0; i < eights; ++i) softmax_eight(x + 128 * i, out + 128 * i);
        x += 128 * eights, out += 128 * eights, n = n * groups - 8 * eights, groups = 1, x_pitch = out_pitch = 16;
    }
    auto *spare = static_cast<float *>(kernel_scratch(round_up(size, kLanes) * static_cast<int64_t>(sizeof(float))));
    for (int64_t i = 0; i < n; ++i, x += x_pitch, out += out_pitch)
        for (int64_t g = 0; g < groups; ++g) {
            const auto bytes = static_cast<size_t>(size) * sizeof(float);
            float *result = size % kLanes == 0 ? out + g * size : spare;
            std::memcpy(result, x + g * size, bytes);
            const float inverse = softmax(result, size);
            for (int64_t k = 0; k < size; ++k) result[k] *= inverse;
            if (result == spare) std::memcpy(out + g * size, spare, bytes);
        }
}

// The sum of products in sixteen lanes, then over their tree: sum_lanes of transformer/reference/rows.py.
inline float dot(const float *x, const float *weight, int64_t n) {
    Vec16 sums = broadcast<Vec16>(0);
    int64_t k = 0;
    for (; k + kLanes <= n; k += kLanes) sums = sums + load_float<Vec16>(x + k) * load_float<Vec16>(weight + k);
    if (k == n) return reduce_add(sums);
    float last[kLanes] = {}, last_weights[kLanes] = {};
    std::memcpy(last, x + k, static_cast<size_t>(n - k) * sizeof(float));
    std::memcpy(last_weights, weight + k, static_cast<size_t>(n - k) * sizeof(float));
    return reduce_add(sums + load_float<Vec16>(last) * load_float<Vec16>(last_weights));
}

void group_linear(const GroupLinear &l, const PixelRow<const float> &x, const PixelRow<float> &out, int64_t n) {
    int64_t pixel = 0, g = 0;  // of the next run
    const auto finish = [&](int64_t o, float sum) ZOO_INLINE { out.data[pixel * out.pitch + g * l.outputs + o] = sum + l.bias[o]; };
    const auto next = [&]() ZOO_INLINE { if (++g == l.groups) g = 0, ++pixel; };
    if (kVecLanes == 16 && l.inputs == 16 && l.outputs == 1 && x.pitch == 16 * l.groups) {  // all runs follow each other: eight at a time
        const Vec weight = load_float<Vec>(l.weight);
        for (int64_t first = 0; first + 8 <= n * l.groups; first += 8) {
            Vec products[8];
            float sums[8];
            unroll<8>([&](auto i) ZOO_INLINE { products[i.value] = load_float<Vec>(x.data + 16 * (first + i.value)) * weight; });
            reduce_each<float, 8>(products, sums, [](auto a, auto b) ZOO_INLINE { return a + b; });
            for (float sum : sums) finish(0, sum), next();
        }
    }
    for (; pixel < n; next())
        for (int64_t o = 0; o < l.outputs; ++o) finish(o, dot(x.data + pixel * x.pitch + g * l.inputs, l.weight + o * l.inputs, l.inputs));
}

// `Count` pixels of `Parts` vectors of channels, tap after tap.
template <int Count, int Parts>
inline void depthwise_tile(const FloatDepthwise &d, const float *x, const float *weight, const float *bias, float *out) {
    Vec sums[Count][Parts];
    for (int i = 0; i < Count; ++i)
        for (int part = 0; part < Parts; ++part) sums[i][part] = load_float<Vec>(bias + part * kVecLanes);
    for (int64_t row = 0; row < d.kernel_rows; ++row) {
        const float *taps = x + row * d.tap_row;
        for (int64_t column = 0; column < d.kernel_columns; ++column, taps += d.tap_column, weight += d.channels)
            for (int part = 0; part < Parts; ++part) {
                const Vec factor = load_float<Vec>(weight + part * kVecLanes);
                for (int i = 0; i < Count; ++i) sums[i][part] = sums[i][part] + load_float<Vec>(taps + i * d.x_step + part * kVecLanes) * factor;
            }
    }
    for (int i = 0; i < Count; ++i)
        for (int part = 0; part < Parts; ++part) store_float(out + i * d.channels + part * kVecLanes, sums[i][part]);
}

// `Count` pixels of a vector of channels whose windows, `Columns` wide, lie one tap apart: a row reads each pixel of x once.
template <int Count, int Columns>
inline void depthwise_slide(const FloatDepthwise &d, const float *x, const float *weight, const float *bias, float *out) {
    Vec sums[Count], factors[Columns];
    unroll<Count>([&](auto i) ZOO_INLINE { sums[i.value] = load_float<Vec>(bias); });
    for (int64_t row = 0; row < d.kernel_rows; ++row, x += d.tap_row, weight += Columns * d.channels) {
        unroll<Columns>([&](auto tap) ZOO_INLINE { factors[tap.value] = load_float<Vec>(weight + tap.value * d.channels); });
        unroll<Count + Columns - 1>([&](auto column) ZOO_INLINE {
            const Vec value = load_float<Vec>(x + column.value * d.x_step);
            unroll<Count>([&](auto i) ZOO_INLINE {
                constexpr int tap = decltype(column)::value - decltype(i)::value;
                if constexpr (tap >= 0 && tap < Columns) sums[i.value] = sums[i.value] + value * factors[tap];
            });
        });
    }
    unroll<Count>([&](auto i) ZOO_INLINE { store_float(out + i.value * d.channels, sums[i.value]); });
}

// tile(Index<count>, first) of `width` pixels in tiles of as equal widths as can be, up to `Most`.
template <int Most, class Tile>
inline void even_tiles(int64_t width, Tile tile) {
    const int64_t tiles = (width + Most - 1) / Most;
    for (int64_t t = 0, first = 0; t < tiles; ++t) {
        const int64_t count = width / tiles + (t < width % tiles);
        unroll<Most>([&](auto less) ZOO_INLINE {
            if (count == less.value + 1) tile(Index<less.value + 1>{}, first);
        });
        first += count;
    }
}

// Rows whose windows stay in L2 at a time, and of these sixteen channels after the other, whose windows stay in L1.
void float_depthwise(const FloatDepthwise &d, const float *x, float *out, int64_t rows, int64_t width) {
    constexpr int kParts = 16 / kVecLanes > 2 ? 2 : 16 / kVecLanes, kCount = 8 / kParts;
    constexpr int64_t kFloats = 1 << 17;
    if (const int64_t most = kFloats / d.x_row - d.kernel_rows, block_rows = most > 1 ? most : 1; rows > block_rows) {
        for (int64_t y = 0; y < rows; y += block_rows)
            float_depthwise(d, x + y * d.x_row, out + y * d.out_row, rows - y < block_rows ? rows - y : block_rows, width);
        return;
    }
    const bool slides = kVecLanes == 16 && d.tap_column == d.x_step;  // with enough registers for a row of weights
    for (int64_t c = 0; c < d.channels; c += kParts * kVecLanes)
        for (int64_t y = 0; y < rows; ++y) {
            const float *from = x + y * d.x_row + c;
            float *to = out + y * d.out_row + c;
            even_tiles<kCount>(width, [&](auto count, int64_t first_column) {
                const auto tile = [&](auto function) { function(d, from + first_column * d.x_step, d.weight + c, d.bias + c, to + first_column * d.channels); };
                if constexpr (kVecLanes == 16) {
                    if (slides && d.kernel_columns == 7) return tile(depthwise_slide<count.value, 7>);
                    if (slides && d.kernel_columns == 5) return tile(depthwise_slide<count.value, 5>);
                    if (slides && d.kernel_columns == 3) return tile(depthwise_slide<count.value, 3>);
                }
                tile(depthwise_tile<count.value, kParts>);
            });
        }
}

}  // namespace
}  // namespace zoo
