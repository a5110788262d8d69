// Steps on tensors of float32, whose pixels have whole 16 channels, those behind the last one 0.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "images/network/network.h"

namespace zoo {
namespace {

// e log 2 + log(1 + m) by a polynomial: FloatLog of images/steps/activation.py.
float natural_log(float x) {
    if (!(x > 0) || x == std::numeric_limits<float>::infinity())
        return x == 0 ? -std::numeric_limits<float>::infinity() : x > 0 ? x : std::numeric_limits<float>::quiet_NaN();
    constexpr float kFactors[] = {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                  -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    int exponent;
    const float mantissa = std::frexp(x, &exponent);
    const bool small = mantissa < 0.70710678f;
    const auto power = static_cast<float>(exponent - small);
    const float m = (small ? mantissa + mantissa : mantissa) - 1.0f, square = m * m;
    float y = kFactors[0];
    for (size_t i = 1; i < std::size(kFactors); ++i) y = y * m + kFactors[i];
    y = y * m * square + power * -2.12194440e-4f - square * 0.5f;
    return m + y + power * 0.693359375f;
}

// Sets what lies behind the channels of n pixels to 0.
void clear_tails(float *x, int64_t channels, int64_t n) {
    const int64_t whole = round_up(channels, 16);
    for (int64_t i = 0; channels < whole && i < n; ++i) std::fill(x + i * whole + channels, x + (i + 1) * whole, 0.0f);
}

// Constants of pixels, [pixels, channels], of which no more are kept than differ: one row, one value of each pixel, or all.
class ConstantRows {
  public:
    static constexpr int64_t kFloats = 1 << 10;  // of repeated constants, which stay in L1

    ConstantRows(const float *x, int64_t pixels, int64_t channels) : channels_(channels), pixel_(round_up(channels, 16)) {
        const auto row = [&](int64_t p) { return x + p * channels; };
        const auto equals_first = [&](int64_t p) { return std::memcmp(row(p), row(0), static_cast<size_t>(channels) * sizeof(float)) == 0; };
        bool alike = true, even = pixel_ <= kFloats;
        for (int64_t p = 1; p < pixels && alike; ++p) alike = equals_first(p);
        for (int64_t p = 0; p < pixels && even; ++p) even = std::all_of(row(p), row(p) + channels, [=](const float &value) { return std::memcmp(&value, row(p), sizeof value) == 0; });
        repeats_ = alike, even_ = even && !alike;
        values_ = even_ ? std::vector<float>(static_cast<size_t>(pixels)) : padded_rows(x, alike ? 1 : pixels, channels);
        for (int64_t p = 0; p < pixels && even_; ++p) values_[static_cast<size_t>(p)] = *row(p);
        const auto size = static_cast<size_t>(pixel_);
        while (alike && values_.size() + size <= kFloats) values_.insert(values_.end(), values_.begin(), values_.begin() + pixel_);
    }
    // Of `count` pixels, as many as kFloats hold, or one.
    const float *of(int64_t first, int64_t count, float *spare) const {
        if (repeats_) return values_.data();
        if (!even_) return values_.data() + first * pixel_;
        for (int64_t p = 0; p < count; ++p) {
            std::fill_n(spare + p * pixel_, channels_, values_[static_cast<size_t>(first + p)]);
            std::fill_n(spare + p * pixel_ + channels_, pixel_ - channels_, 0.0f);
        }
        return spare;
    }

  private:
    int64_t channels_, pixel_;
    bool repeats_, even_;
    std::vector<float> values_;
};

}  // namespace

std::vector<float> padded_rows(const float *x, int64_t rows, int64_t columns, int64_t whole) {
    const int64_t width = round_up(columns, whole);
    std::vector<float> of(static_cast<size_t>(rows * width));
    for (int64_t i = 0; i < rows; ++i) std::copy_n(x + i * columns, columns, of.begin() + i * width);
    return of;
}

void Network::float_step(const std::vector<Operand> &xs, const Operand &to, FloatRow of, ByteRow quantized) {
    const int64_t out = to.tensor, height = written(to).height, width = layout(out).width;
    std::vector<int64_t> reads;
    for (const Operand &x : xs) {
        const bool one = read(x).height == 1 && layout(x.tensor).width == 1;
        require((one || (layout(x.tensor).height == height && layout(x.tensor).width == width)) && layout(x.tensor).pitch >= 16, "a float step");
        reads.push_back(x.tensor);
    }
    const auto repeats = [=](const Operand &x) { return layout(x.tensor).height == 1 && layout(x.tensor).width == 1 && (height > 1 || width > 1); };
    step(out, reads, height, [=](const Sample &s, int64_t begin, int64_t end) {
        constexpr int64_t kFloats = 1 << 12;  // of a tensor that stay in L1 until the next operand of a pixel is computed
        std::vector<Buffer<float>> spare(xs.size());
        std::vector<const float *> values(xs.size());
        bool flows = layout(out).row() == width * layout(out).pitch;  // rows follow each other as if they were one
        int64_t widest = round_up(layout(out).channels, 16);
        for (const Operand &x : xs) {
            flows &= repeats(x) || layout(x.tensor).row() == width * layout(x.tensor).pitch;
            widest = std::max(widest, round_up(layout(x.tensor).channels, 16));
        }
        const int64_t channels = layout(out).channels, line = flows ? (end - begin) * width : width;
        const int64_t eights = kFloats / widest / 8, most = std::min(eights ? 8 * eights : 4, line);  // which functions take together
        Buffer<float> results(to.floats() ? 0 : most * round_up(channels, 16));
        for (size_t i = 0; i < xs.size(); ++i) {
            const Tensor &from = layout(xs[i].tensor);
            const int64_t pixel = round_up(from.channels, 16);
            if (!xs[i].floats() || repeats(xs[i])) spare[i].reserve(most * pixel + 64);
            if (!repeats(xs[i])) continue;  // else its pixel is that of all others
            const uint8_t *one = s.pixel(from, 0, 0);
            if (xs[i].floats()) std::memcpy(spare[i].data(), one, static_cast<size_t>(pixel) * sizeof(float));
            else isa_.images->dequantize(one, xs[i].scale, xs[i].zero, from.pitch, spare[i].data());
            clear_tails(spare[i].data(), from.channels, 1);
            for (int64_t p = 1; p < most; ++p) std::copy_n(spare[i].data(), pixel, spare[i].data() + p * pixel);
            values[i] = spare[i].data();
        }
        for (int64_t first = begin * width; first < end * width;) {
            const int64_t left = line - (first - begin * width) % line, n = std::min(most, left), y = first / width, column = first % width;
            for (size_t i = 0; i < xs.size(); ++i) {
                if (repeats(xs[i])) continue;
                const Tensor &from = layout(xs[i].tensor);
                const uint8_t *pixels = s.pixel(from, y, column);
                values[i] = reinterpret_cast<const float *>(pixels);
                if (xs[i].floats()) continue;
                isa_.images->dequantize(pixels, xs[i].scale, xs[i].zero, n * from.pitch, spare[i].data());
                clear_tails(spare[i].data(), from.channels, n);
                values[i] = spare[i].data();
            }
            uint8_t *bytes = s.pixel(layout(out), y, column);
            float *floats = to.floats() ? reinterpret_cast<float *>(bytes) : results.data();
            if (quantized && !to.floats()) quantized(values.data(), n, bytes);
            else of(values.data(), n, floats, first);
            if (to.floats()) clear_tails(floats, channels, n);
            else if (!quantized) isa_.images->quantize_floats(floats, 1 / to.scale, to.zero, n * round_up(channels, 16), bytes);
            first += n;
        }
    });
    steps_.back().by_row = true;
}

void Network::float_copy(Operand x, Operand out) {
    require(read(x).channels == written(out).channels, "a copy");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) {
        std::memcpy(to, xs[0], static_cast<size_t>(n * pixel) * sizeof(float));
    });
}

void Network::float_sum(Operand a, Operand b, Operand out) {
    for (const Operand &x : {a, b})
        require(read(x).channels == written(out).channels, "a sum");
    if (a.floats() && out.floats() && pixels_in(a.tensor) == pixels_in(out.tensor)) tensors_[static_cast<size_t>(out.tensor)].over = a.tensor;
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({a, b}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) { isa_.images->add_floats(xs[0], xs[1], n * pixel, to); });
}

void Network::float_difference(Operand a, Operand b, Operand out) {
    for (const Operand &x : {a, b})
        require(read(x).channels == written(out).channels, "a difference");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({a, b}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) {
        for (int64_t i = 0; i < n * pixel; ++i) to[i] = xs[0][i] - xs[1][i];
    });
}

void Network::channel_scale(Operand x, Operand out, const float *gain, const float *bias, int64_t pixels, int64_t channels) {
    require(read(x).channels == channels && written(out).channels == channels, "a scale");
    require(pixels == 1 || pixels == pixels_in(out.tensor), "a scale");
    const int64_t pixel = round_up(channels, 16);
    const ConstantRows gains(gain, pixels, channels), biases(bias, pixels, channels);
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *to, int64_t first) {
        float gain_rows[ConstantRows::kFloats], bias_rows[ConstantRows::kFloats];
        const int64_t most = std::max<int64_t>(ConstantRows::kFloats / pixel, 1);
        for (int64_t p = 0; p < n; p += most) {
            const int64_t count = std::min(most, n - p);
            const float *gain_of = gains.of(first + p, count, gain_rows), *bias_of = biases.of(first + p, count, bias_rows);
            isa_.images->scale_floats(xs[0] + p * pixel, gain_of, bias_of, count * pixel, to + p * pixel);
        }
    });
}

void Network::float_clip(Operand x, Operand out, float low, float high) {
    require(read(x).channels == written(out).channels && low <= high, "a clip");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) {
        for (int64_t i = 0; i < n * pixel; ++i) {
            const float least = xs[0][i] < low ? low : xs[0][i];
            to[i] = least > high ? high : least;
        }
    });
}

void Network::float_lookup(int64_t x, int64_t out, const float *table) {
    const Tensor &from = layout(checked(x, true)), &to = layout(checked(out, false, true));
    require(from.height == to.height && from.width == to.width && from.channels == to.channels && from.pitch >= 16, "a lookup");
    step(out, {x}, to.height, [=, of = std::vector<float>(table, table + 256)](const Sample &s, int64_t begin, int64_t end) {
        for (int64_t y = begin; y < end; ++y) {
            for (int64_t column = 0; column < layout(out).width; ++column) {
                const uint8_t *bytes = s.pixel(layout(x), y, column);
                auto *floats = reinterpret_cast<float *>(s.pixel(layout(out), y, column));
                for (int64_t c = 0; c < layout(out).channels; ++c) floats[c] = of[bytes[c]];
            }
            clear_tails(reinterpret_cast<float *>(s.pixel(layout(out), y, 0)), layout(out).channels, layout(out).width);
        }
    });
}

void Network::softmax(Operand x, Operand out, int64_t first, int64_t size) {
    const int64_t channels = written(out).channels, from = round_up(read(x).channels, 16), to = round_up(channels, 16);
    require(first >= 0 && size >= 1 && channels % size == 0 && first + channels <= layout(x.tensor).channels, "a softmax");
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *result, int64_t) {
        isa_.images->softmax(xs[0] + first, from, channels / size, size, n, result, to);
    });
}

void Network::group_linear(Operand x, Operand out, const float *weight, const float *bias, int64_t inputs, int64_t outputs) {
    const int64_t channels = read(x).channels, groups = inputs >= 1 ? channels / inputs : 0;
    require(groups >= 1 && channels == groups * inputs && outputs >= 1 && written(out).channels == groups * outputs, "a linear layer");
    const std::vector<float> weights(weight, weight + inputs * outputs), biases(bias, bias + outputs);
    const int64_t from = round_up(channels, 16), pixel = round_up(groups * outputs, 16);
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) {
        isa_.images->group_linear({groups, inputs, outputs, weights.data(), biases.data()}, {xs[0], from}, {to, pixel}, n);
    });
}

void Network::activation(Operand x, Operand out, Activation kind) {
    require(read(x).channels == written(out).channels, "an activation");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) { isa_.rows->activate(kind, xs[0], n * pixel, to); });
}

void Network::layer_norm(Operand x, Operand out, const float *gain, const float *bias, int64_t channels, float epsilon) {
    require(read(x).channels == channels && written(out).channels == channels, "a norm");
    require(epsilon >= 0, "a norm");
    const std::vector<float> gains = padded_rows(gain, 1, channels, kColumns), biases = bias ? padded_rows(bias, 1, channels, kColumns) : std::vector<float>{};
    const int64_t pixel = round_up(channels, 16);
    const auto norm = [=] { return LayerNorm{channels, gains.data(), biases.empty() ? nullptr : biases.data(), epsilon, {}}; };
    const auto of = [=](const float *const *xs, int64_t n, float *to, int64_t) { isa_.rows->layer_norm(norm(), xs[0], pixel, {to, nullptr, nullptr, pixel}, n); };
    if (biases.empty()) return float_step({x}, out, of);
    float_step({x}, out, of, [=](const float *const *xs, int64_t n, uint8_t *to) {
        isa_.rows->layer_norm_bytes(norm(), xs[0], pixel, {to, pixel, 1 / out.scale, out.zero}, n);
    });
}

void Network::group_norm(Operand x, Operand out, const float *gain, const float *bias, int64_t channels, int64_t groups, float epsilon) {
    const int64_t b = out.tensor, height = written(out).height, width = layout(b).width, pixel = round_up(channels, 16);
    require(read(x).height == height && layout(x.tensor).width == width && layout(x.tensor).pitch >= 16, "a norm");
    require(layout(x.tensor).channels == channels && layout(b).channels == channels && groups >= 1 && channels % groups == 0 && epsilon >= 0, "a norm");
    const std::vector<float> gains = padded_rows(gain, 1, channels), biases = padded_rows(bias, 1, channels);
    step(b, {x.tensor}, 1, [=](const Sample &s, int64_t, int64_t) {
        const int64_t size = channels / groups;
        Buffer<float> spare(x.floats() ? 0 : width * pixel), normalized(out.floats() ? 0 : width * pixel);
        std::vector<float> sums(static_cast<size_t>(pixel)), mean(static_cast<size_t>(pixel)), factor(static_cast<size_t>(pixel));
        const auto row = [&](int64_t y) {
            const uint8_t *from = s.pixel(layout(x.tensor), y, 0);
            if (x.floats()) return reinterpret_cast<const float *>(from);
            isa_.images->dequantize(from, x.scale, x.zero, width * pixel, spare.data());
            return static_cast<const float *>(spare.data());
        };
        const auto count = static_cast<float>(height * width * size);
        const auto of_groups = [&](auto of, std::vector<float> &to) {  // each channel gets the value of its group's sum
            for (int64_t g = 0; g < groups; ++g) {
                float total = sums[static_cast<size_t>(g * size)];
                for (int64_t c = 1; c < size; ++c) total = total + sums[static_cast<size_t>(g * size + c)];
                std::fill_n(to.begin() + g * size, size, of(total / count));
            }
        };
        for (int64_t y = 0; y < height; ++y) {
            const float *values = row(y);
            for (int64_t column = 0; column < width; ++column) isa_.images->add_floats(sums.data(), values + column * pixel, pixel, sums.data());
        }
        of_groups([](float average) { return average; }, mean);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t y = 0; y < height; ++y) {
            const float *values = row(y);
            for (int64_t column = 0; column < width; ++column) isa_.images->add_squares(values + column * pixel, mean.data(), pixel, sums.data());
        }
        of_groups([=](float average) { return 1.0f / std::sqrt(average + epsilon); }, factor);
        for (int64_t c = 0; c < channels; ++c) {
            const auto i = static_cast<size_t>(c);
            factor[i] = factor[i] * gains[i], mean[i] = biases[i] - mean[i] * factor[i];
        }
        for (int64_t y = 0; y < height; ++y) {
            const float *from = row(y);
            uint8_t *to = s.pixel(layout(b), y, 0);
            float *floats = out.floats() ? reinterpret_cast<float *>(to) : normalized.data();
            for (int64_t offset = 0; offset < width * pixel; offset += pixel)
                isa_.images->scale_floats(from + offset, factor.data(), mean.data(), pixel, floats + offset);
            if (out.floats()) clear_tails(floats, channels, width);
            else isa_.images->quantize_floats(floats, 1 / out.scale, out.zero, width * pixel, to);
        }
    });
}

void Network::float_product(Operand a, Operand b, Operand out) {
    const bool one = read(b).channels == 1;  // factor of all channels
    require(read(a).channels == written(out).channels && (one || layout(b.tensor).channels == layout(a.tensor).channels), "a product");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({a, b}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) {
        if (!one) return isa_.images->multiply_floats(xs[0], xs[1], n * pixel, to);
        for (int64_t i = 0; i < n; ++i)
            for (int64_t c = 0; c < pixel; ++c) to[i * pixel + c] = xs[0][i * pixel + c] * xs[1][i * 16];
    });
}

void Network::float_quotient(Operand a, Operand b, Operand out) {
    const bool one = read(b).channels == 1;  // divisor of all channels
    require(read(a).channels == written(out).channels && (one || layout(b.tensor).channels == layout(a.tensor).channels), "a quotient");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16), own = one ? 16 : pixel;
    float_step({a, b}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) {
        for (int64_t i = 0; i < n; ++i)
            for (int64_t c = 0; c < pixel; ++c) to[i * pixel + c] = xs[0][i * pixel + c] / xs[1][i * own + (one ? 0 : c)];
    });
}

void Network::float_log(Operand x, Operand out) {
    require(read(x).channels == written(out).channels, "a logarithm");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) { std::transform(xs[0], xs[0] + n * pixel, to, natural_log); });
}

void Network::float_floor(Operand x, Operand out, float divisor) {
    require(read(x).channels == written(out).channels && divisor != 0, "a floor");
    const int64_t pixel = round_up(layout(out.tensor).channels, 16);
    float_step({x}, out, [=](const float *const *xs, int64_t n, float *to, int64_t) {
        for (int64_t i = 0; i < n * pixel; ++i) to[i] = std::floor(xs[0][i] / divisor);
    });
}

void Network::interpolation(Operand x, Operand out, const Taps &rows, const Taps &columns) {
    const Tensor &from = read(x), &to = written(out);
    require(from.channels == to.channels && from.pitch >= 16, "an interpolation");
    for (const auto &[taps, size, outputs] : {std::tuple(&rows, from.height, to.height), std::tuple(&columns, from.width, to.width)}) {
        require(taps->count >= 1 && static_cast<int64_t>(taps->places.size()) == taps->count * outputs, "an interpolation");
        require(taps->weights.size() == taps->places.size(), "an interpolation");
        for (int64_t place : taps->places) require(place >= 0 && place < size, "an interpolation");
    }
    const int64_t pixel = round_up(to.channels, 16), a = x.tensor, b = out.tensor;
    step(b, {a}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t width = layout(b).width, across = layout(a).width * pixel;
        std::vector<Buffer<float>> spare(static_cast<size_t>(x.floats() ? 0 : rows.count));
        for (Buffer<float> &buffer : spare) buffer.reserve(across);
        std::vector<int64_t> held(spare.size(), -1);  // rows of x in `spare`
        std::vector<const float *> xs(static_cast<size_t>(std::max(rows.count, columns.count)));
        Buffer<float> mixed(across), resized(out.floats() ? 0 : width * pixel);
        for (int64_t y = begin; y < end; ++y) {
            for (int64_t tap = 0; tap < rows.count; ++tap) {
                const auto i = static_cast<size_t>(tap);
                const int64_t place = rows.places[static_cast<size_t>(y * rows.count + tap)];
                const uint8_t *row = s.pixel(layout(a), place, 0);
                xs[i] = reinterpret_cast<const float *>(row);
                if (x.floats()) continue;
                if (held[i] != place) isa_.images->dequantize(row, x.scale, x.zero, across, spare[i].data()), held[i] = place;
                xs[i] = spare[i].data();
            }
            isa_.images->weigh_floats(xs.data(), rows.weights.data() + y * rows.count, rows.count, across, mixed.data());
            uint8_t *row = s.pixel(layout(b), y, 0);
            float *floats = out.floats() ? reinterpret_cast<float *>(row) : resized.data();
            for (int64_t column = 0; column < width; ++column) {
                const int64_t first = column * columns.count;
                for (int64_t tap = 0; tap < columns.count; ++tap)
                    xs[static_cast<size_t>(tap)] = mixed.data() + columns.places[static_cast<size_t>(first + tap)] * pixel;
                isa_.images->weigh_floats(xs.data(), columns.weights.data() + first, columns.count, pixel, floats + column * pixel);
            }
            if (out.floats()) clear_tails(floats, layout(b).channels, width);
            else isa_.images->quantize_floats(floats, 1 / out.scale, out.zero, width * pixel, row);
        }
    });
}

void Network::gathering(Operand x, Operand out, const std::vector<int64_t> &places, const float *added) {
    const Tensor &from = read(x), &to = written(out);
    const int64_t count = static_cast<int64_t>(places.size()), parts = count / (to.height * to.width);
    require(parts >= 1 && count == parts * to.height * to.width && to.channels % parts == 0, "a gathering");
    const int64_t part = to.channels / parts, parts_per_pixel = from.channels / part;  // parts of a pixel of x
    require(from.channels % part == 0, "a gathering");
    struct Place {
        uint16_t y, x;
        int32_t byte;  // in the pixel, or -1: zeros
    };
    std::vector<Place> sources;
    const int64_t bytes_of_part = part * (x.floats() ? 4 : 1);
    for (int64_t place : places) {
        require(place >= -1 && place < from.height * from.width * parts_per_pixel, "a gathering");
        const int64_t p = place / parts_per_pixel, byte = place < 0 ? -1 : place % parts_per_pixel * bytes_of_part;
        sources.push_back({static_cast<uint16_t>(p / from.width), static_cast<uint16_t>(p % from.width), static_cast<int32_t>(byte)});
    }
    const int64_t pixel = round_up(to.channels, 16), a = x.tensor, b = out.tensor;
    const std::vector<float> adds = added ? padded_rows(added, to.height * to.width, to.channels) : std::vector<float>{};
    const bool copies = !added && x.scale == out.scale && x.zero == out.zero;
    step(b, {a}, to.height, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t width = layout(b).width, size = x.floats() ? 4 : 1, row_bytes = layout(a).row(), pitch = layout(a).pitch;
        const uint8_t *first = s.pixel(layout(a), 0, 0);
        Buffer<uint8_t> bytes(copies || x.floats() ? 0 : width * pixel);
        Buffer<float> float_row(copies || out.floats() ? 0 : width * pixel);
        for (int64_t y = begin; y < end; ++y) {
            uint8_t *row = s.pixel(layout(b), y, 0);
            float *floats = out.floats() ? reinterpret_cast<float *>(row) : float_row.data();
            uint8_t *gathered = copies ? row : x.floats() ? reinterpret_cast<uint8_t *>(floats) : bytes.data();
            const auto gather = [&](auto part_bytes) {  // constant, where copies are short
                const auto length = static_cast<size_t>(part_bytes);
                const int64_t count = parts, step = pixel * size;  // copies, which stores of bytes cannot change
                const int fill = x.floats() ? 0 : x.zero;
                const Place *place = sources.data() + y * width * count;
                for (int64_t column = 0; column < width; ++column) {
                    uint8_t *target = gathered + column * step;
                    for (int64_t i = 0; i < count; ++i, ++place, target += length)
                        if (place->byte < 0) std::memset(target, fill, length);
                        else std::memcpy(target, first + place->y * row_bytes + place->x * pitch + place->byte, length);
                }
            };
            if (bytes_of_part == 4) gather(std::integral_constant<int64_t, 4>());
            else gather(bytes_of_part);
            if (!x.floats() && !copies) isa_.images->dequantize(gathered, x.scale, x.zero, width * pixel, floats);
            if (added) isa_.images->add_floats(floats, adds.data() + y * width * pixel, width * pixel, floats);
            if (out.floats()) clear_tails(floats, layout(b).channels, width);
            else if (!copies) isa_.images->quantize_floats(floats, 1 / out.scale, out.zero, width * pixel, row);
        }
    });
}

// A value for each channel from all pixels: add(pixel, total) of each in order, then finish(total).
template <class Add, class Finish>
void Network::reduce_pixels(Operand x, Operand out, Add add, Finish finish) {
    const int64_t to = out.tensor;
    require(layout(checked(to, false, true)).height == 1 && layout(to).width == 1 && read(x).channels == layout(to).channels, "a mean");
    require(out.floats() && layout(x.tensor).pitch >= 16, "a mean");
    step(to, {x.tensor}, 1, [=](const Sample &s, int64_t, int64_t) {
        const Tensor &from = layout(x.tensor);
        const int64_t pixel = round_up(from.channels, 16);
        Buffer<float> spare(x.floats() ? 0 : pixel);
        auto *total = reinterpret_cast<float *>(s.pixel(layout(to), 0, 0));
        std::fill_n(total, pixel, 0.0f);
        for (int64_t y = 0; y < from.height; ++y)
            for (int64_t column = 0; column < from.width; ++column) {
                const uint8_t *source = s.pixel(from, y, column);
                if (!x.floats()) isa_.images->dequantize(source, x.scale, x.zero, pixel, spare.data());
                add(x.floats() ? reinterpret_cast<const float *>(source) : spare.data(), pixel, total);
            }
        finish(total, from.height * from.width, from.channels);
        clear_tails(total, from.channels, 1);
    });
}

void Network::float_mean(Operand x, Operand out) {
    const auto add = [this](const float *of, int64_t pixel, float *total) { isa_.images->add_floats(total, of, pixel, total); };
    reduce_pixels(x, out, add, [](float *total, int64_t pixels, int64_t channels) {
        for (int64_t c = 0; c < channels; ++c) total[c] = total[c] / static_cast<float>(pixels);
    });
}

void Network::response_gate(Operand x, Operand out, float epsilon) {
    const std::vector<float> zeros(static_cast<size_t>(round_up(read(x).channels, 16)));
    const auto add = [this, zeros](const float *of, int64_t pixel, float *total) { isa_.images->add_squares(of, zeros.data(), pixel, total); };
    reduce_pixels(x, out, add, [=](float *total, int64_t, int64_t channels) {
        float sum = 0;
        for (int64_t c = 0; c < channels; ++c) total[c] = std::sqrt(total[c]), sum = sum + total[c];
        const float mean = sum / static_cast<float>(channels) + epsilon;
        for (int64_t c = 0; c < channels; ++c) total[c] = total[c] / mean;
    });
}

}  // namespace zoo
