// Antialiased resize and crop of an RGB image. Arithmetic: images/operators.py (Resize), images/reference.py (the same in numpy).
//
// Both passes are one kernel, Isa::resample: weighted sums of whole rows of uint8. For the pass along the rows, blocks of 64 rows are
// transposed before it and back after it, which also parts the channels.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "isa/arrays.h"
#include "isa/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

using Pixels = nb::ndarray<uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// The weights of outputs [begin, end) of an axis that takes [from, to) of its inputs to `outputs` pixels.
struct Axis {
    Axis(int64_t inputs, float from, float to, int64_t outputs, int64_t begin, int64_t end, bool bicubic, const Isa &isa)
        : count(end - begin), first(static_cast<size_t>(count)), tap_groups(first) {
        const double scale = static_cast<double>(to - from) / static_cast<double>(outputs), wide = std::max(scale, 1.0);
        const double support = (bicubic ? 2.0 : 1.0) * wide, shrink = 1.0 / wide;
        stride = round_up(static_cast<int64_t>(std::ceil(support)) * 2 + 1, 4);
        weights.reserve(count * stride);
        std::vector<double> row(static_cast<size_t>(stride));
        low = inputs, high = 0;
        for (int64_t i = 0; i < count; ++i) {
            const double centre = from + (static_cast<double>(begin + i) + 0.5) * scale;
            const int64_t start = std::max<int64_t>(static_cast<int64_t>(centre - support + 0.5), 0);
            const int64_t taps = std::min<int64_t>(static_cast<int64_t>(centre + support + 0.5), inputs) - start;
            double sum = 0;
            for (int64_t t = 0; t < taps; ++t) {
                const double x = std::abs((static_cast<double>(t + start) - centre + 0.5) * shrink);
                row[t] = bicubic ? cubic(x) : x < 1.0 ? 1.0 - x : 0.0;
                sum += row[t];
            }
            tap_groups[i] = static_cast<int32_t>(round_up(taps, 4) / 4), first[i] = static_cast<int32_t>(start);
            int32_t *weight = weights.data() + i * stride;
            for (int64_t t = 0; t < taps; ++t) {
                const double scaled = row[t] / sum * (1 << kWeightBits);
                weight[t] = static_cast<int32_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
            }
            std::fill(weight + taps, weight + 4 * tap_groups[i], 0);
            for (int64_t t = 0; t < tap_groups[i]; ++t) isa.pack_weights(weight + 4 * t);
            low = std::min(low, start), high = std::max(high, start + taps);
        }
        for (int32_t &input : first) input -= static_cast<int32_t>(low);
    }

    static double cubic(double x) {
        if (x < 1.0) return ((-0.5 + 2.0) * x - (-0.5 + 3.0)) * x * x + 1;
        return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0.0;
    }

    Resampling from(int64_t i) const { return {first.data() + i, tap_groups.data() + i, weights.data() + i * stride, stride}; }

    int64_t count, stride, low, high;  // inputs [low, high) are needed; `first` counts from low
    std::vector<int32_t> first, tap_groups;
    Buffer<int32_t> weights;
};

constexpr int64_t kSquare = 16;

#ifdef __SSE2__
inline void transpose_square(const uint8_t *in, int64_t in_stride, uint8_t *out, int64_t out_stride) {
    __m128i a[kSquare], b[kSquare];
    for (int i = 0; i < kSquare; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i *>(in + i * in_stride));
    const auto shuffle = [](const __m128i *from, __m128i *to) {  // four of these perfect shuffles swap the two halves of a byte's index
#pragma GCC unroll 8
        for (int i = 0; i < kSquare / 2; ++i) {
            to[2 * i] = _mm_unpacklo_epi8(from[i], from[i + kSquare / 2]);
            to[2 * i + 1] = _mm_unpackhi_epi8(from[i], from[i + kSquare / 2]);
        }
    };
    shuffle(a, b), shuffle(b, a), shuffle(a, b), shuffle(b, a);
    for (int i = 0; i < kSquare; ++i) _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i * out_stride), a[i]);
}
#else
inline void transpose_square(const uint8_t *in, int64_t in_stride, uint8_t *out, int64_t out_stride) {
    for (int64_t i = 0; i < kSquare; ++i)
        for (int64_t j = 0; j < kSquare; ++j) out[j * out_stride + i] = in[i * in_stride + j];
}
#endif

// in [rows, columns] -> out [columns, rows]
void transpose(const uint8_t *in, int64_t in_stride, int64_t rows, int64_t columns, uint8_t *out, int64_t out_stride) {
    if (rows < kSquare || columns < kSquare) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j) out[j * out_stride + i] = in[i * in_stride + j];
        return;
    }
    for (int64_t i = 0; i < rows; i += kSquare) {
        i = std::min(i, rows - kSquare);  // the last squares overlap those before
        for (int64_t j = 0; j < columns; j += kSquare) {
            j = std::min(j, columns - kSquare);
            transpose_square(in + i * in_stride + j, in_stride, out + j * out_stride + i, out_stride);
        }
    }
}

struct Scratch {
    Buffer<uint8_t> block, resampled, rows, strip;  // transposed input and output of the pass along the rows; all its rows; results
};
thread_local Scratch scratch;

void resize(const Array &image, std::array<int64_t, 2> size, std::array<int64_t, 4> crop, bool bicubic,
            std::optional<std::array<float, 4>> box, const Pixels &out, const std::string &name) {
    const Isa &isa = choose_isa(name);
    const auto *pixels = data_of<uint8_t>(image, "image", 3);
    const auto height = static_cast<int64_t>(image.shape(0)), width = static_cast<int64_t>(image.shape(1));
    const auto [left, top, right, bottom] = crop;
    const int64_t columns = right - left, rows = bottom - top;
    // 2^24: so far floats are whole, as the box must be that is the image
    const auto fits = [](int64_t inputs, float from, float to, int64_t begin, int64_t end, int64_t outputs) {
        return inputs <= 1 << 24 && 0 <= from && from < to && to <= static_cast<float>(inputs) && 0 <= begin && begin < end &&
               end <= outputs && outputs <= INT32_MAX;
    };
    const auto [x0, y0, x1, y1] = box.value_or(std::array<float, 4>{0, 0, static_cast<float>(width), static_cast<float>(height)});
    if (image.shape(2) != 3 || !fits(width, x0, x1, left, right, size[0]) || !fits(height, y0, y1, top, bottom, size[1]))
        throw nb::value_error(
            "expected an image [height, width, 3], at most 2^24 a side, a box within it, and a crop within the size, none of them empty");
    if (out.shape(0) != 3 || static_cast<int64_t>(out.shape(1)) != rows || static_cast<int64_t>(out.shape(2)) != columns)
        throw nb::value_error("the output has another shape than [3, bottom - top, right - left]");
    nb::gil_scoped_release unlocked;
    const Axis across(width, x0, x1, size[0], left, right, bicubic, isa), down(height, y0, y1, size[1], top, bottom, bicubic, isa);
    constexpr int64_t kRows = 64, kStrip = 8, kTail = 3;  // rows of zero weight that a group of four reads
    const int64_t needed = down.high - down.low, used = 3 * (across.high - across.low), stride = round_up(3 * columns, kColumns);
    scratch.block.reserve((used + 3 * kTail) * kRows + kColumns), scratch.resampled.reserve(3 * kRows * columns);
    scratch.rows.reserve((needed + kTail) * stride), scratch.strip.reserve(kStrip * stride);
    for (int64_t begin = 0; begin < needed; begin += kRows) {
        int64_t n = std::min(kRows, needed - begin);
        if (n < kSquare && needed >= kSquare) n = kSquare, begin = needed - n;  // squares are quicker, even if some rows are done again
        const int64_t block = round_up(3 * n, kColumns);
        transpose(pixels + ((down.low + begin) * width + across.low) * 3, 3 * width, n, used, scratch.block.data(), n);
        isa.resample(across.from(0), columns, scratch.block.data(), 3 * n, block, scratch.resampled.data(), block);
        for (int64_t c = 0; c < 3; ++c)
            transpose(scratch.resampled.data() + c * n, block, columns, n, scratch.rows.data() + begin * stride + c * columns, stride);
    }
    for (int64_t begin = 0; begin < rows; begin += kStrip) {
        const int64_t n = std::min(kStrip, rows - begin);
        isa.resample(down.from(begin), n, scratch.rows.data(), stride, stride, scratch.strip.data(), stride);
        for (int64_t c = 0; c < 3; ++c)
            for (int64_t i = 0; i < n; ++i)
                std::memcpy(out.data() + (c * rows + begin + i) * columns, scratch.strip.data() + i * stride + c * columns,
                            static_cast<size_t>(columns));
    }
}

}  // namespace
}  // namespace zoo

void bind_resize(nb::module_ &module) {
    module.def("resize", &zoo::resize, "image"_a, "size"_a, "crop"_a, "bicubic"_a, "box"_a.none(), "out"_a.noconvert(), "isa"_a);
}
