// Steps that choose elements and pixels by values: images/steps/groups.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "images/network/network.h"

namespace zoo {
namespace {

// Whether one value comes before another: the larger first, of equal ones the first, NaN last.
bool before(float a, int32_t i, float b, int32_t j) {
    if (a > b || a < b) return a > b;
    const bool a_odd = a != a, b_odd = b != b;
    return a_odd == b_odd ? i < j : b_odd;
}

// Orders the first `count` indices of n values; of `sign` 1 the largest, of -1 the smallest come first.
void rank(const float *x, int64_t n, int64_t count, float sign, std::vector<int32_t> &order) {
    order.resize(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    const auto less = [=](int32_t i, int32_t j) { return before(sign * x[i], i, sign * x[j], j); };
    if (count < n) std::nth_element(order.begin(), order.begin() + count, order.end(), less);
    std::sort(order.begin(), order.begin() + count, less);
}

// The index of the largest value, as `rank` orders them.
int32_t largest(const float *x, int64_t n, float sign) {
    constexpr int64_t kLanes = 16;
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, -std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = sign * x[i + lane] > lanes[lane] ? sign * x[i + lane] : lanes[lane];
    for (; i < n; ++i) lanes[0] = sign * x[i] > lanes[0] ? sign * x[i] : lanes[0];
    const float most = *std::max_element(lanes, lanes + kLanes);
    for (int64_t k = 0; k < n; ++k)
        if (sign * x[k] == most) return static_cast<int32_t>(k);
    return 0;  // all NaN
}

struct Box {
    float least_x, least_y, most_x, most_y;
    float area() const { return (most_x - least_x) * (most_y - least_y); }
};

Box box_of(const float *x, bool centered) {
    if (!centered) return {x[3] < x[1] ? x[3] : x[1], x[2] < x[0] ? x[2] : x[0], x[1] < x[3] ? x[3] : x[1], x[0] < x[2] ? x[2] : x[0]};
    const float across = x[2] / 2.0f, down = x[3] / 2.0f;
    return {x[0] - across, x[1] - down, x[0] + across, x[1] + down};
}

bool overlaps(const Box &a, const Box &b, float most) {
    const float low_x = b.least_x < a.least_x ? a.least_x : b.least_x, high_x = a.most_x < b.most_x ? a.most_x : b.most_x;
    const float low_y = b.least_y < a.least_y ? a.least_y : b.least_y, high_y = a.most_y < b.most_y ? a.most_y : b.most_y;
    if (high_x <= low_x || high_y <= low_y) return false;
    const float shared = (high_x - low_x) * (high_y - low_y), own = a.area(), other = b.area(), whole = own + other - shared;
    if (shared <= 0 || own <= 0 || other <= 0 || whole <= 0) return false;
    return shared / whole > most;
}

}  // namespace

void Network::top_k(Operand x, int64_t out, int64_t count, bool largest_ones) {
    const int64_t channels = read(x).channels;
    require(count >= 1 && count <= channels && at(known(out, false, true)).channels == 2 * count, "a choice of the largest");
    const int64_t from = round_up(channels, 16), to = round_up(2 * count, 16);
    const float sign = largest_ones ? 1.0f : -1.0f;
    float_step({x}, {out, 0, 0}, [=](const float *const *xs, int64_t n, float *made, int64_t) {
        std::vector<int32_t> order(1);
        for (int64_t p = 0; p < n; ++p) {
            const float *row = xs[0] + p * from;
            float *target = made + p * to;
            if (count == 1) order[0] = largest(row, channels, sign);
            else rank(row, channels, count, sign, order);
            for (int64_t k = 0; k < count; ++k) {
                const int32_t index = order[static_cast<size_t>(k)];
                target[k] = row[index], target[count + k] = static_cast<float>(index);
            }
        }
    });
}

void Network::choice(int64_t x, int64_t indices, int64_t out) {
    const bool floats = at(existing(x, true)).floats();
    const Tensor &from = at(known(x, true, floats)), &to = at(known(out, false, floats)), &places = at(known(indices, true, true));
    require(from.channels == to.channels && pixels_in(out) == pixels_in(indices) * places.channels && from.pitch == to.pitch, "a choice of pixels");
    step(out, {x, indices}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t columns = at(out).width, width = at(x).width, channels = at(indices).channels, across = at(indices).width;
        const auto last = static_cast<float>(pixels_in(x) - 1);
        for (int64_t p = begin * columns; p < end * columns; ++p) {
            const int64_t place = p / channels;
            const float index = reinterpret_cast<const float *>(s.pixel(at(indices), place / across, place % across))[p % channels];
            const auto pixel = static_cast<int64_t>(index > 0 ? std::min(index, last) : 0.0f);
            std::memcpy(s.pixel(at(out), p / columns, p % columns), s.pixel(at(x), pixel / width, pixel % width), static_cast<size_t>(at(out).pitch));
        }
    });
}

void Network::suppression(int64_t boxes, int64_t scores, int64_t out, int64_t most, float overlap, float least, bool centered) {
    const Tensor &corners = at(known(boxes, true, true)), &values = at(known(scores, true, true)), &to = at(known(out, false, true));
    const int64_t count = pixels_in(scores), classes = values.channels;
    require(corners.channels == 4 && pixels_in(boxes) == count && most >= 1 && most <= count && count <= 1 << 28, "a suppression");
    require(to.height == 1 + classes * most && to.width == 1 && to.channels == 3, "a suppression");
    step(out, {boxes, scores}, 1, [=](const Sample &s, int64_t, int64_t) {
        const auto pixel = [&](int64_t tensor, int64_t p) {
            return reinterpret_cast<const float *>(s.pixel(at(tensor), p / at(tensor).width, p % at(tensor).width));
        };
        std::vector<std::vector<int32_t>> found(static_cast<size_t>(classes));
        for (int64_t p = 0; p < count; ++p) {
            const float *x = pixel(scores, p);
            for (int64_t c = 0; c < classes; ++c)
                if (least != least || x[c] > least) found[static_cast<size_t>(c)].push_back(static_cast<int32_t>(p));
        }
        int64_t row = 0;
        const auto write = [&](float first, float second, float third) {
            auto *target = reinterpret_cast<float *>(s.pixel(at(out), row++, 0));
            std::fill_n(target, 16, 0.0f);
            target[0] = first, target[1] = second, target[2] = third;
        };
        write(0, 0, 0);
        std::vector<Box> chosen;
        for (int64_t c = 0; c < classes; ++c) {
            std::vector<int32_t> &own = found[static_cast<size_t>(c)];
            std::sort(own.begin(), own.end(), [&](int32_t i, int32_t j) { return before(pixel(scores, i)[c], i, pixel(scores, j)[c], j); });
            chosen.clear();
            for (const int32_t p : own) {
                if (static_cast<int64_t>(chosen.size()) == most) break;
                const Box box = box_of(pixel(boxes, p), centered);
                if (std::any_of(chosen.begin(), chosen.end(), [&](const Box &other) { return overlaps(other, box, overlap); })) continue;
                chosen.push_back(box);
                write(0, static_cast<float>(c), static_cast<float>(p));
            }
        }
        reinterpret_cast<float *>(s.pixel(at(out), 0, 0))[0] = static_cast<float>(row - 1);
        while (row < at(out).height) write(0, 0, 0);
    });
}

}  // namespace zoo
