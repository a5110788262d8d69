// Steps that read pixels of float32 at places of a grid, or sum pixels: images/steps/sampling.py.
#include <algorithm>
#include <cmath>

#include "images/network/network.h"

namespace zoo {
namespace {

// A coordinate from [-1, 1] in pixels, within two of the tensor (or NaN), or at its border.
float coordinate(float g, int64_t size, bool border, bool align) {
    const auto count = static_cast<float>(size);
    const float x = align ? (g + 1.0f) / 2.0f * (count - 1.0f) : ((g + 1.0f) * count - 1.0f) / 2.0f;
    const float low = border ? 0.0f : -2.0f, high = border ? count - 1.0f : count + 1.0f;
    return x < low ? low : x > high ? high : x;
}

// The place of a floor or of a rounded coordinate; outside for NaN.
int64_t place(float x) { return x == x ? static_cast<int64_t>(x) : -2; }

}  // namespace

void Network::sampling(int64_t x, int64_t grid, int64_t out, int64_t groups, bool linear, bool border, bool align) {
    const Tensor &from = at(known(x, true, true)), &places = at(known(grid, true, true)), &to = at(known(out, false, true));
    require(groups >= 1 && from.height % groups == 0 && to.height % groups == 0 && from.channels == to.channels, "a sampling");
    require(places.height == to.height && places.width == to.width && places.channels == 2, "a sampling");
    const int64_t height = from.height / groups, rows = to.height / groups, pixel = round_up(to.channels, 16);
    const std::vector<float> zeros(static_cast<size_t>(pixel));
    step(out, {x, grid}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        for (int64_t y = begin; y < end; ++y) {
            const int64_t top = y / rows * height, width = at(x).width;
            const auto read = [&](int64_t row, int64_t column) {
                const bool outside = row < 0 || row >= height || column < 0 || column >= width;
                if (outside && !border) return zeros.data();
                row = std::clamp<int64_t>(row, 0, height - 1), column = std::clamp<int64_t>(column, 0, width - 1);
                return reinterpret_cast<const float *>(s.pixel(at(x), top + row, column));
            };
            for (int64_t column = 0; column < at(out).width; ++column) {
                const auto *g = reinterpret_cast<const float *>(s.pixel(at(grid), y, column));
                auto *target = reinterpret_cast<float *>(s.pixel(at(out), y, column));
                const float across = coordinate(g[0], width, border, align), down = coordinate(g[1], height, border, align);
                if (!linear) {
                    std::copy_n(read(place(std::nearbyint(down)), place(std::nearbyint(across))), pixel, target);
                    continue;
                }
                const float left = std::floor(across), upper = std::floor(down);
                const float right_part = across - left, left_part = 1.0f - right_part, lower_part = down - upper, upper_part = 1.0f - lower_part;
                const int64_t i = place(upper), j = place(left);
                const float *a = read(i, j), *b = read(i, j + 1), *c = read(i + 1, j), *d = read(i + 1, j + 1);
                for (int64_t k = 0; k < pixel; ++k)
                    target[k] = upper_part * (left_part * a[k] + right_part * b[k]) + lower_part * (left_part * c[k] + right_part * d[k]);
            }
        }
    });
}

void Network::pixel_sums(int64_t x, int64_t out, const std::vector<int64_t> &places) {
    const Tensor &from = at(known(x, true, true)), &to = at(known(out, false, true));
    const int64_t pixels = to.height * to.width, count = static_cast<int64_t>(places.size()) / pixels, pixel = round_up(to.channels, 16);
    require(count >= 1 && count * pixels == static_cast<int64_t>(places.size()) && from.channels == to.channels, "sums of pixels");
    for (int64_t each : places) require(each >= 0 && each < from.height * from.width, "sums of pixels");
    step(out, {x}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        const auto read = [&](int64_t at_place) {
            const int64_t each = places[static_cast<size_t>(at_place)];
            return reinterpret_cast<const float *>(s.pixel(at(x), each / at(x).width, each % at(x).width));
        };
        for (int64_t p = begin * at(out).width; p < end * at(out).width; ++p) {
            auto *total = reinterpret_cast<float *>(s.pixel(at(out), p / at(out).width, p % at(out).width));
            std::copy_n(read(p * count), pixel, total);
            for (int64_t k = 1; k < count; ++k) isa_.images->add_floats(total, read(p * count + k), pixel, total);
        }
    });
}

}  // namespace zoo
