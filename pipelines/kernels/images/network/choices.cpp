// Steps that choose elements and pixels by values: images/steps/groups.py.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

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

using Lanes = float __attribute__((vector_size(16)));
using Words = int32_t __attribute__((vector_size(16)));

Lanes lanes_of(const float *x) {
    Lanes of;
    std::memcpy(&of, x, sizeof(of));
    return of;
}

// The index of the largest value, as `rank` orders them.
int32_t largest(const float *x, int64_t n, float sign) {
    const Lanes none = Lanes{} - std::numeric_limits<float>::infinity();
    Lanes a = none, b = none, c = none, d = none;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const Lanes e = sign * lanes_of(x + i), f = sign * lanes_of(x + i + 4), g = sign * lanes_of(x + i + 8), h = sign * lanes_of(x + i + 12);
        a = e > a ? e : a, b = f > b ? f : b, c = g > c ? g : c, d = h > d ? h : d;
    }
    a = b > a ? b : a, c = d > c ? d : c, a = c > a ? c : a;
    float most = a[0];
    for (int lane = 1; lane < 4; ++lane) most = a[lane] > most ? a[lane] : most;
    for (; i < n; ++i) most = sign * x[i] > most ? sign * x[i] : most;
    for (i = 0; i + 16 <= n; i += 16) {
        const Words same = (sign * lanes_of(x + i) == most) | (sign * lanes_of(x + i + 4) == most) | (sign * lanes_of(x + i + 8) == most) | (sign * lanes_of(x + i + 12) == most);
        if (same[0] | same[1] | same[2] | same[3]) break;
    }
    for (; i < n; ++i)
        if (sign * x[i] == most) return static_cast<int32_t>(i);
    return 0;  // all NaN
}

struct Box {
    float least_x, least_y, most_x, most_y, area;
};

Box box_of(const float *x, bool centered) {
    const float across = x[2] / 2.0f, down = x[3] / 2.0f;
    Box made = centered ? Box{x[0] - across, x[1] - down, x[0] + across, x[1] + down, 0}
                        : Box{x[3] < x[1] ? x[3] : x[1], x[2] < x[0] ? x[2] : x[0], x[1] < x[3] ? x[3] : x[1], x[0] < x[2] ? x[2] : x[0], 0};
    made.area = (made.most_x - made.least_x) * (made.most_y - made.least_y);
    return made;
}

// The boxes of a class that are chosen; those behind them have no area.
class Chosen {
  public:
    explicit Chosen(int64_t most) : whole_(round_up(most, kLanes)), sides_(static_cast<size_t>(5 * whole_)) {}
    void clear() { std::fill(sides_.begin(), sides_.end(), 0.0f), size_ = 0; }
    int64_t size() const { return size_; }
    void add(const Box &box) {
        int64_t side = 0;
        for (const float value : {box.least_x, box.least_y, box.most_x, box.most_y, box.area}) sides_[static_cast<size_t>(side++ * whole_ + size_)] = value;
        ++size_;
    }
    // Whether one of them overlaps a box by more than a share of their union.
    bool overlap(const Box &b, float share) const {
        const float *least_x = sides_.data(), *least_y = least_x + whole_, *most_x = least_y + whole_, *most_y = most_x + whole_, *area = most_y + whole_;
        for (int64_t first = 0; first < size_; first += kLanes) {
            int32_t overlaps = 0;
            for (int64_t i = first; i < first + kLanes; ++i) {
                const float low_x = b.least_x < least_x[i] ? least_x[i] : b.least_x, high_x = most_x[i] < b.most_x ? most_x[i] : b.most_x;
                const float low_y = b.least_y < least_y[i] ? least_y[i] : b.least_y, high_y = most_y[i] < b.most_y ? most_y[i] : b.most_y;
                const float shared = (high_x - low_x) * (high_y - low_y), all = area[i] + b.area - shared;
                const int32_t apart = (high_x <= low_x) | (high_y <= low_y) | (shared <= 0) | (area[i] <= 0) | (b.area <= 0) | (all <= 0);
                overlaps |= (apart ^ 1) & (shared / all > share);
            }
            if (overlaps) return true;
        }
        return false;
    }

  private:
    static constexpr int64_t kLanes = 16;
    int64_t whole_, size_ = 0;
    std::vector<float> sides_;  // of all boxes the least x, then the least y, the most x, the most y and the area
};

struct Candidate {
    float score;
    int32_t box;
    // Of a heap, whose first one comes before all others.
    bool operator<(const Candidate &other) const { return before(other.score, other.box, score, box); }
};

}  // namespace

void Network::top_k(Operand x, int64_t out, int64_t count, bool largest_ones) {
    const int64_t channels = read(x).channels;
    require(count >= 1 && count <= channels && layout(checked(out, false, true)).channels == 2 * count, "a choice of the largest");
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
    const bool floats = layout(existing(x, true)).floats();
    const Tensor &from = layout(checked(x, true, floats)), &to = layout(checked(out, false, floats)), &places = layout(checked(indices, true, true));
    require(from.channels == to.channels && pixels_in(out) == pixels_in(indices) * places.channels && from.pitch == to.pitch, "a choice of pixels");
    step(out, {x, indices}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t columns = layout(out).width, width = layout(x).width, channels = layout(indices).channels, across = layout(indices).width;
        const auto last = static_cast<float>(pixels_in(x) - 1);
        for (int64_t p = begin * columns; p < end * columns; ++p) {
            const int64_t place = p / channels;
            const float index = reinterpret_cast<const float *>(s.pixel(layout(indices), place / across, place % across))[p % channels];
            const auto pixel = static_cast<int64_t>(index > 0 ? std::min(index, last) : 0.0f);
            std::memcpy(s.pixel(layout(out), p / columns, p % columns), s.pixel(layout(x), pixel / width, pixel % width),
                        static_cast<size_t>(layout(out).pitch));
        }
    });
}

void Network::suppression(int64_t boxes, int64_t scores, int64_t out, int64_t most, float overlap, float least, bool centered) {
    const Tensor &corners = layout(checked(boxes, true, true)), &values = layout(checked(scores, true, true)), &to = layout(checked(out, false, true));
    const int64_t count = pixels_in(scores), classes = values.channels;
    require(corners.channels == 4 && pixels_in(boxes) == count && most >= 1 && most <= count && count <= 1 << 28, "a suppression");
    require(to.height == 1 + classes * most && to.width == 1 && to.channels == 3, "a suppression");
    step(out, {boxes, scores}, 1, [=](const Sample &s, int64_t, int64_t) {
        const auto pixel = [&](int64_t tensor, int64_t p) {
            return reinterpret_cast<const float *>(s.pixel(layout(tensor), p / layout(tensor).width, p % layout(tensor).width));
        };
        std::vector<std::vector<Candidate>> candidates(static_cast<size_t>(classes));
        std::vector<Box> sides(static_cast<size_t>(count));
        for (int64_t p = 0; p < count; ++p) {
            const float *x = pixel(scores, p);
            sides[static_cast<size_t>(p)] = box_of(pixel(boxes, p), centered);
            for (int64_t c = 0; c < classes; ++c)
                if (least != least || x[c] > least) candidates[static_cast<size_t>(c)].push_back({x[c], static_cast<int32_t>(p)});
        }
        int64_t row = 0;
        const auto write = [&](float first, float second, float third) {
            auto *target = reinterpret_cast<float *>(s.pixel(layout(out), row++, 0));
            std::fill_n(target, 16, 0.0f);
            target[0] = first, target[1] = second, target[2] = third;
        };
        write(0, 0, 0);
        Chosen chosen(most);
        for (int64_t c = 0; c < classes; ++c) {
            std::vector<Candidate> &own = candidates[static_cast<size_t>(c)];
            std::make_heap(own.begin(), own.end());
            chosen.clear();
            for (; !own.empty() && chosen.size() < most; own.pop_back()) {
                std::pop_heap(own.begin(), own.end());
                const Box &box = sides[static_cast<size_t>(own.back().box)];
                if (chosen.overlap(box, overlap)) continue;
                chosen.add(box);
                write(0, static_cast<float>(c), static_cast<float>(own.back().box));
            }
        }
        reinterpret_cast<float *>(s.pixel(layout(out), 0, 0))[0] = static_cast<float>(row - 1);
        while (row < layout(out).height) write(0, 0, 0);
    });
}

}  // namespace zoo
