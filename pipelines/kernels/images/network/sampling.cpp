// Steps that read pixels of float32 at places of a grid, repeat pixels of bytes, or sum pixels: images/steps/sampling.py, images/steps/layouts.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "images/network/network.h"

namespace zoo {
namespace {

constexpr float kFarthest = 1 << 22;  // pixels outside that are reflected

enum class Outside { kZeros, kBorder, kReflection };

// A coordinate from [-1, 1] in pixels (or NaN), bounded where pixels further outside are the same, or by kFarthest.
float coordinate(float g, int64_t size, int64_t taps, Outside outside, bool align) {
    const auto count = static_cast<float>(size);
    const float x = align ? (g + 1.0f) / 2.0f * (count - 1.0f) : ((g + 1.0f) * count - 1.0f) / 2.0f;
    const bool at_border = outside == Outside::kBorder && taps <= 2;
    float low = at_border ? 0.0f : -3.0f, high = at_border ? count - 1.0f : count + 2.0f;
    if (outside == Outside::kReflection) low = -kFarthest, high = kFarthest;
    return x < low ? low : x > high ? high : x;
}

// The place of a floor or of a rounded coordinate; outside for NaN.
int64_t place(float x) { return x == x ? static_cast<int64_t>(x) : -3; }

// A place reflected at the borders of an axis: at the centres of the outer pixels if `align`.
int64_t reflected(int64_t x, int64_t size, bool align) {
    const int64_t period = std::max<int64_t>(2 * (size - align), 1), within = (x % period + period) % period;
    return std::min(within, period - 1 + align - within);
}

// The weights of the pixels around a place at a part of the distance between two of them.
void weigh(float part, int64_t taps, float *weights) {
    if (taps == 2) {
        weights[0] = 1.0f - part, weights[1] = part;
        return;
    }
    constexpr float a = -0.75f;
    const auto far = [](float x) { return ((a * x - 5.0f * a) * x + 8.0f * a) * x - 4.0f * a; };
    const auto near = [](float x) { return ((a + 2.0f) * x - (a + 3.0f)) * x * x + 1.0f; };
    weights[0] = far(part + 1.0f), weights[1] = near(part), weights[2] = near(1.0f - part), weights[3] = far(2.0f - part);
}

// Sums of floats times their weights, in order.
void add_weighed(const float *weights, const float *const *xs, int64_t taps, int64_t n, float *to) {
    if (taps == 2) {
        for (int64_t k = 0; k < n; ++k) to[k] = weights[0] * xs[0][k] + weights[1] * xs[1][k];
        return;
    }
    for (int64_t k = 0; k < n; ++k) to[k] = weights[0] * xs[0][k] + weights[1] * xs[1][k] + weights[2] * xs[2][k] + weights[3] * xs[3][k];
}

}  // namespace

void Network::resampling(int64_t x, int64_t out, const std::vector<int64_t> &rows, const std::vector<int64_t> &columns) {
    require(layout(checked(x, true)).channels == layout(checked(out, false)).channels, "a resampling");
    for (const auto &[places, from, to] : {std::tuple(&rows, layout(x).height, layout(out).height), std::tuple(&columns, layout(x).width, layout(out).width)}) {
        require(static_cast<int64_t>(places->size()) == to, "a resampling");
        for (int64_t place : *places) require(place >= 0 && place < from, "a resampling");
    }
    step(out, {x}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        const auto bytes = static_cast<size_t>(layout(out).pitch);
        for (int64_t y = begin; y < end; ++y) {
            const int64_t row = rows[static_cast<size_t>(y)];
            if (y > begin && row == rows[static_cast<size_t>(y - 1)]) {
                std::memcpy(s.pixel(layout(out), y, 0), s.pixel(layout(out), y - 1, 0), bytes * columns.size());
                continue;
            }
            uint8_t *to = s.pixel(layout(out), y, 0);
            for (int64_t column : columns) to = std::copy_n(s.pixel(layout(x), row, column), bytes, to);
        }
    });
}

void Network::sampling(int64_t x, int64_t grid, int64_t out, int64_t groups, int64_t taps, const std::string &outside, bool align,
                       const std::optional<std::array<int64_t, 3>> &plane) {
    require(outside == "zeros" || outside == "border" || outside == "reflection", "a sampling");
    const Outside beyond = outside == "zeros" ? Outside::kZeros : outside == "border" ? Outside::kBorder : Outside::kReflection;
    require(taps == 1 || taps == 2 || taps == 4, "a sampling");
    const Tensor &from = layout(checked(x, true, true)), &places = layout(checked(grid, true, true)), &to = layout(checked(out, false, true));
    require(groups >= 1 && to.height % groups == 0 && from.channels == to.channels * (plane ? groups : 1), "a sampling");
    require(plane ? to.channels % 16 == 0 && from.borders == Sides{} : from.height % groups == 0, "a sampling");
    require(places.height == to.height && places.width == to.width && places.channels == 2, "a sampling");
    const bool within = plane.has_value();
    const int64_t first = within ? (*plane)[0] : 0, height = within ? (*plane)[1] : from.height / groups, width = within ? (*plane)[2] : from.width;
    require(std::min({first, height - 1, width - 1}) >= 0 && std::max({first, height, width}) <= pixels_in(x), "a sampling");
    require(!within || first + height * width <= pixels_in(x), "a sampling");
    if (within) tensors_[static_cast<size_t>(x)].joined = true;
    const int64_t rows = to.height / groups, pixel = round_up(to.channels, 16);
    const std::vector<float> zeros(static_cast<size_t>(pixel));
    step(out, {x, grid}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        Buffer<float> sums(taps * pixel);
        for (int64_t y = begin; y < end; ++y) {
            const int64_t group = y / rows, pitch = layout(x).pitch, row_pitch = within ? width * pitch : layout(x).row();
            const uint8_t *image = within ? s.pixel(layout(x), 0, 0) + first * pitch + group * pixel * 4 : s.pixel(layout(x), group * height, 0);
            const auto read = [&](int64_t row, int64_t column) {
                if (beyond == Outside::kReflection) row = reflected(row, height, align), column = reflected(column, width, align);
                const bool is_outside = row < 0 || row >= height || column < 0 || column >= width;
                if (is_outside && beyond == Outside::kZeros) return zeros.data();
                row = std::clamp<int64_t>(row, 0, height - 1), column = std::clamp<int64_t>(column, 0, width - 1);
                return reinterpret_cast<const float *>(image + row * row_pitch + column * pitch);
            };
            for (int64_t column = 0; column < layout(out).width; ++column) {
                const auto *g = reinterpret_cast<const float *>(s.pixel(layout(grid), y, column));
                auto *target = reinterpret_cast<float *>(s.pixel(layout(out), y, column));
                const float across = coordinate(g[0], width, taps, beyond, align), down = coordinate(g[1], height, taps, beyond, align);
                if (taps == 1) {
                    std::copy_n(read(place(std::nearbyint(down)), place(std::nearbyint(across))), pixel, target);
                    continue;
                }
                const float left = std::floor(across), upper = std::floor(down);
                const int64_t i = place(upper) - taps / 2 + 1, j = place(left) - taps / 2 + 1;
                float row_weights[4], column_weights[4];
                weigh(across - left, taps, row_weights), weigh(down - upper, taps, column_weights);
                const float *xs[4], *rows_of[4];
                for (int64_t tap = 0; tap < taps; ++tap) {
                    for (int64_t k = 0; k < taps; ++k) xs[k] = read(i + tap, j + k);
                    rows_of[tap] = sums.data() + tap * pixel;
                    add_weighed(row_weights, xs, taps, pixel, sums.data() + tap * pixel);
                }
                add_weighed(column_weights, rows_of, taps, pixel, target);
            }
        }
    });
}

void Network::pixel_sums(int64_t x, int64_t out, const std::vector<int64_t> &places) {
    const Tensor &from = layout(checked(x, true, true)), &to = layout(checked(out, false, true));
    const int64_t pixels = to.height * to.width, count = static_cast<int64_t>(places.size()) / pixels, pixel = round_up(to.channels, 16);
    require(count >= 1 && count * pixels == static_cast<int64_t>(places.size()) && from.channels == to.channels, "sums of pixels");
    for (int64_t place : places) require(place >= 0 && place < from.height * from.width, "sums of pixels");
    step(out, {x}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        const auto read = [&](int64_t index) {
            const int64_t place = places[static_cast<size_t>(index)];
            return reinterpret_cast<const float *>(s.pixel(layout(x), place / layout(x).width, place % layout(x).width));
        };
        for (int64_t p = begin * layout(out).width; p < end * layout(out).width; ++p) {
            auto *total = reinterpret_cast<float *>(s.pixel(layout(out), p / layout(out).width, p % layout(out).width));
            std::copy_n(read(p * count), pixel, total);
            for (int64_t k = 1; k < count; ++k) isa_.images->add_floats(total, read(p * count + k), pixel, total);
        }
    });
}

}  // namespace zoo
