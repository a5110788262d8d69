// The image kernels that are the same for every instruction set, lowered for each by the compiler; images/steps/ defines them.
#pragma once
#include <cmath>
#include <cstring>

#include "isa/isa.h"
#include "isa/vectors/lanes.h"

namespace zoo {
namespace {

// rint(x) clipped, for any x but NaN.
inline int32_t to_byte(float x, int32_t low, int32_t high) {
    x = x > -1024.0f ? x : -1024.0f;
    x = x < 1024.0f ? x : 1024.0f;
    const auto rounded = static_cast<int32_t>((x + kRoundToInt) - kRoundToInt);
    return rounded < low ? low : rounded > high ? high : rounded;
}

inline uint8_t requantize(int32_t sum, float scale, const Requantization &bytes) {
    const auto rounded = static_cast<int32_t>(std::lrintf(static_cast<float>(sum) * scale)) + bytes.zero;
    return static_cast<uint8_t>(rounded < bytes.low ? bytes.low : rounded > bytes.high ? bytes.high : rounded);
}

inline uint8_t activated(int32_t sum, float scale, const ActivationTable &t, const int32_t *gain) {
    const auto word = [](int64_t x) { return static_cast<int32_t>(x < -32768 ? -32768 : x > 32767 ? 32767 : x); };
    const int32_t x = word(std::lrintf(static_cast<float>(sum) * scale)), size = x < 0 ? -x : x, u = size < t.limit ? size : t.limit;
    const int32_t start = t.starts[u >> t.shift], slope = t.starts[(u >> t.shift) + 1] - start, part = (u << (15 - t.shift)) & 32767;
    int32_t result = word((x > 0 ? x : 0) - (start + ((slope * part + 16384) >> 15)));
    if (gain) result = (result * *gain + 16384) >> 15;
    const int32_t byte = ((result * t.factor + 16384) >> 15) + t.zero;
    return static_cast<uint8_t>(byte < 0 ? 0 : byte > 255 ? 255 : byte);
}

inline void sum_bytes(const ByteSum &s, const uint8_t *a, const uint8_t *b, uint8_t *out, int64_t count) {
    const float a_ratio = s.a_ratio, b_ratio = s.b_ratio, fixed = s.fixed;
    const int32_t low = s.low, high = s.high;
    for (int64_t i = 0; i < count; ++i) {
        const float inner = __builtin_fmaf(static_cast<float>(b[i]), b_ratio, fixed);
        out[i] = static_cast<uint8_t>(to_byte(__builtin_fmaf(static_cast<float>(a[i]), a_ratio, inner), low, high));
    }
}

template <int Width>
inline void max_of(const Window &w, int64_t begin, uint8_t *out) {
    uint8_t most[Width] = {};
    for (int64_t y = 0; y < w.rows; ++y)
        for (int64_t x = 0; x < w.columns; ++x) {
            const uint8_t *source = w.x + y * w.row_pitch + x * w.pixel_pitch + begin;
            for (int j = 0; j < Width; ++j) most[j] = source[j] > most[j] ? source[j] : most[j];
        }
    std::memcpy(out + begin, most, Width);
}

inline void max_pool(const Window &w, uint8_t *out, int64_t count) {
    int64_t begin = 0;
    for (; begin + 64 <= count; begin += 64) max_of<64>(w, begin, out);
    for (; begin < count; begin += 16) max_of<16>(w, begin, out);
}

template <int Width>
inline void mean_of(const Window &w, const Mean &m, int64_t begin, uint8_t *out) {
    float total[Width] = {};
    for (int64_t y = 0; y < w.rows; ++y)
        for (int64_t x = 0; x < w.columns; ++x) {
            const uint8_t *source = w.x + y * w.row_pitch + x * w.pixel_pitch + begin;
            for (int j = 0; j < Width; ++j) total[j] += static_cast<float>(source[j] - m.x_zero) * m.x_scale;
        }
    for (int j = 0; j < Width; ++j) out[begin + j] = static_cast<uint8_t>(to_byte(total[j] / m.count / m.scale + m.zero, 0, 255));
}

inline void mean(const Window &w, const Mean &m, uint8_t *out, int64_t count) {
    int64_t begin = 0;
    for (; begin + 64 <= count; begin += 64) mean_of<64>(w, m, begin, out);
    for (; begin < count; begin += 16) mean_of<16>(w, m, begin, out);
}

// Rows of up to 257 pixels are added as words first.
template <int Width>
inline void global_mean_of(const Window &w, int32_t x_zero, float scale, int32_t zero, uint8_t *out, int64_t begin) {
    constexpr int64_t kWordPixels = 65535 / 255;
    const auto shift = static_cast<int32_t>(w.rows * w.columns) * x_zero;
    int32_t total[Width] = {};
    const int64_t columns = w.columns < kWordPixels ? w.columns : kWordPixels, rows = kWordPixels / columns;  // whose words are added up
    for (int64_t top = 0; top < w.rows; top += rows)
        for (int64_t left = 0; left < w.columns; left += columns) {
            uint16_t part[Width] = {};
            for (int64_t y = top; y < top + rows && y < w.rows; ++y)
                for (int64_t x = left; x < left + columns && x < w.columns; ++x) {
                    const uint8_t *source = w.x + y * w.row_pitch + x * w.pixel_pitch + begin;
                    for (int j = 0; j < Width; ++j) part[j] = static_cast<uint16_t>(part[j] + source[j]);
                }
            for (int j = 0; j < Width; ++j) total[j] += part[j];
        }
    for (int j = 0; j < Width; ++j)
        out[begin + j] = static_cast<uint8_t>(to_byte(static_cast<float>(total[j] - shift) * scale, -zero, 255 - zero) + zero);
}

inline void global_mean(const Window &w, int32_t x_zero, float scale, int32_t zero, uint8_t *out, int64_t count) {
    int64_t begin = 0;
    for (; begin + 64 <= count; begin += 64) global_mean_of<64>(w, x_zero, scale, zero, out, begin);
    for (; begin < count; begin += 16) global_mean_of<16>(w, x_zero, scale, zero, out, begin);
}

inline void interleave(const uint8_t *const *planes, uint8_t fill, int64_t n, uint8_t *out) {
    const uint8_t *a = planes[0], *b = planes[1], *c = planes[2];
    const uint32_t last = static_cast<uint32_t>(fill) << 24;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t pixel = a[i] | static_cast<uint32_t>(b[i]) << 8 | static_cast<uint32_t>(c[i]) << 16 | last;
        std::memcpy(out + 4 * i, &pixel, 4);
    }
}

inline void list_pixels(const void *first, int64_t step, int64_t n, void *addresses) {
    constexpr int64_t kLongs = kVecLanes / 2;
    using Longs = Vector<int64_t, kLongs>::type;
    Longs next{};
    for (int64_t l = 0; l < kLongs; ++l) next[l] = l;
    next = next * step + reinterpret_cast<int64_t>(first);
    for (int64_t i = 0; i < n; i += kLongs, next += kLongs * step) std::memcpy(static_cast<uint8_t *>(addresses) + 8 * i, &next, sizeof next);
}

inline void lookup_floats_alone(const float *table, const PixelRow<const uint8_t> &x, const PixelRow<float> &out, int64_t rows, int64_t n) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < n; ++i) out.data[row * out.pitch + i] = table[x.data[row * x.pitch + i]];
}

}  // namespace
}  // namespace zoo
