// Convolutions of float32 tensors: images/steps/convolution.py.
#include <algorithm>
#include <limits>
#include <numeric>

#include "images/network/network.h"

namespace zoo {
namespace {

constexpr int64_t kPixels = 240;  // pixels per list of windows
constexpr int64_t kPanel = 16;    // outputs whose weights lie together

// Weights of every group as [outputs / 16, inputs, 16], zeros behind its last output.
template <class T>
std::vector<T> panels(const FloatConvolutionShape &c, const T *weight) {
    const int64_t outputs = c.weight[0] / c.groups, inputs = c.weight[1] * c.weight[2] * c.weight[3], whole = round_up(outputs, kPanel);
    std::vector<T> packed(static_cast<size_t>(c.groups * whole * inputs));
    for (int64_t o = 0; o < c.weight[0]; ++o) {
        const int64_t row = o / outputs * whole + o % outputs;
        T *to = packed.data() + row / kPanel * kPanel * inputs + row % kPanel;
        for (int64_t k = 0; k < inputs; ++k) to[k * kPanel] = weight[o * inputs + k];
    }
    return packed;
}

}  // namespace

void Network::float_convolution(int64_t x, Operand out, const FloatConvolutionShape &shape, const void *weight, const float *scale, const float *bias,
                                int64_t residual, float low, float high) {
    const FloatConvolutionShape c = shape;
    const int64_t outputs = c.weight[0], rows = c.weight[1], columns = c.weight[2], inputs = c.weight[3];
    const int64_t to = out.tensor, height = written(out).height, width = layout(to).width, channels = layout(checked(x, true, true)).channels;
    require(std::min({outputs, rows, columns, inputs, c.groups}) >= 1 && outputs % c.groups == 0 && low <= high, "a convolution");
    require(channels == inputs * c.groups && layout(to).channels == outputs, "a convolution");
    pad(x, {rows, columns}, c.strides, c.dilations, c.pads, 0, height, width);
    std::vector<int64_t> reads{x};
    if (residual >= 0) {
        const Tensor &added = layout(checked(residual, true, true));
        require(added.height == height && added.width == width && added.channels == outputs, "a sum");
        reads.push_back(residual);
    }
    const int64_t own = outputs / c.groups, whole = round_up(own, kPanel), window = rows * columns * inputs, pixel = round_up(outputs, kPanel);
    const std::vector<float> reals = scale ? std::vector<float>{} : panels(c, static_cast<const float *>(weight));
    const std::vector<int8_t> codes = scale ? panels(c, static_cast<const int8_t *>(weight)) : std::vector<int8_t>{};
    const std::vector<float> biases = padded_rows(bias, c.groups, own), scales = scale ? padded_rows(scale, c.groups, own) : std::vector<float>{};
    const bool apart = c.groups > 1 && own != whole, bytes = !out.floats();  // groups whose results do not end at whole 16
    step(to, reads, height, [=](const Sample &s, int64_t begin, int64_t end) {
        const Tensor &from = layout(x), &target = layout(to);
        std::vector<int64_t> offsets;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j)
                for (int64_t k = 0; k < inputs; ++k) offsets.push_back((i * c.dilations[0] * from.row() + j * c.dilations[1] * from.pitch) / 4 + k);
        Buffer<float> results(bytes ? kPixels * pixel : 0), group(apart ? kPixels * whole : 0), addends(apart && residual >= 0 ? kPixels * whole : 0);
        const float *in[kPixels], *added[kPixels];
        float *floats[kPixels], *made[kPixels];
        for (int64_t p = begin * width; p < end * width; p += kPixels) {
            const int64_t n = std::min(kPixels, end * width - p);
            for (int64_t i = 0; i < n; ++i) {
                const int64_t y = (p + i) / width, column = (p + i) % width;
                in[i] = reinterpret_cast<const float *>(s.pixel(from, y * c.strides[0] - c.pads[0], column * c.strides[1] - c.pads[1]));
                floats[i] = bytes ? results.data() + i * pixel : reinterpret_cast<float *>(s.pixel(target, y, column));
                if (residual >= 0) added[i] = reinterpret_cast<const float *>(s.pixel(layout(residual), y, column));
            }
            for (int64_t g = 0; g < c.groups; ++g) {
                const int64_t first = g * whole * window;
                const void *weights = scales.empty() ? static_cast<const void *>(reals.data() + first) : codes.data() + first;
                const FloatConvolution layer{window, whole, offsets.data(), weights, biases.data() + g * whole, low, high,
                                             scales.empty() ? nullptr : scales.data() + g * whole};
                for (int64_t i = 0; i < n; ++i) {
                    made[i] = apart ? group.data() + i * whole : floats[i] + g * own;
                    if (g) in[i] += inputs;
                    if (residual < 0) continue;
                    if (g) added[i] += own;
                    if (apart) std::copy_n(added[i], own, addends.data() + i * whole);
                }
                if (apart && residual >= 0) {
                    const float *copied[kPixels];
                    for (int64_t i = 0; i < n; ++i) copied[i] = addends.data() + i * whole;
                    isa_.images->float_convolution(layer, in, made, copied, n);
                } else {
                    isa_.images->float_convolution(layer, in, made, residual >= 0 ? added : nullptr, n);
                }
                for (int64_t i = 0; i < n && apart; ++i) std::copy_n(made[i], own, floats[i] + g * own);
            }
            for (int64_t i = 0; i < n; ++i) {
                std::fill(floats[i] + outputs, floats[i] + pixel, 0.0f);
                if (bytes) isa_.images->quantize_floats(floats[i], 1 / out.scale, out.zero, pixel, s.pixel(target, (p + i) / width, (p + i) % width));
            }
        }
    });
    steps_.back().by_row = c.weight[1] == 1 && c.strides[0] == 1 && height == layout(x).height;
}

void Network::matrix_product(int64_t a, int64_t b, int64_t out, int64_t groups) {
    const Tensor &from = layout(checked(a, true, true)), &factors = layout(checked(b, true, true)), &to = layout(checked(out, false, true));
    const int64_t inputs = from.channels, pixel = round_up(to.channels, kPanel);
    require(groups >= 1 && pixels_in(a) % groups == 0 && pixels_in(b) == groups * inputs && factors.channels == to.channels, "a product");
    require(to.height == from.height && to.width == from.width, "a product");
    for (const int64_t tensor : {a, b, out}) {
        require(layout(tensor).borders == Sides{}, "a product");
        tensors_[static_cast<size_t>(tensor)].joined = true;
    }
    const int64_t rows = pixels_in(a) / groups;
    step(out, {a, b}, groups, [=](const Sample &s, int64_t begin, int64_t end) {
        const auto floats = [&](int64_t tensor) { return reinterpret_cast<float *>(s.pixel(layout(tensor), 0, 0)); };
        constexpr float kLimit = std::numeric_limits<float>::infinity();
        std::vector<int64_t> offsets(static_cast<size_t>(inputs));
        std::iota(offsets.begin(), offsets.end(), 0);
        const std::vector<float> zeros(static_cast<size_t>(pixel));
        Buffer<float> weights(inputs * pixel);
        const FloatConvolution layer{inputs, pixel, offsets.data(), weights.data(), zeros.data(), -kLimit, kLimit};
        const int64_t pitch = layout(a).pitch / 4, channels = layout(out).channels;
        for (int64_t g = begin; g < end; ++g) {
            const float *first = floats(b) + g * inputs * pixel;
            for (int64_t k = 0; k < inputs; ++k)
                for (int64_t panel = 0; panel < pixel; panel += kPanel)
                    std::copy_n(first + k * pixel + panel, kPanel, weights.data() + panel * inputs + k * kPanel);
            const float *in[kPixels];
            float *made[kPixels];
            for (int64_t p = g * rows; p < (g + 1) * rows; p += kPixels) {
                const int64_t n = std::min(kPixels, (g + 1) * rows - p);
                for (int64_t i = 0; i < n; ++i) in[i] = floats(a) + (p + i) * pitch, made[i] = floats(out) + (p + i) * pixel;
                isa_.images->float_convolution(layer, in, made, nullptr, n);
                for (int64_t i = 0; i < n; ++i) std::fill(made[i] + channels, made[i] + pixel, 0.0f);
            }
        }
    });
}

void Network::float_depthwise(int64_t x, int64_t out, const float *weight, const float *bias, Pair kernel, int64_t channels, Pair strides,
                              Sides pads, Pair dilations) {
    require(layout(checked(x, true, true)).channels == channels && layout(checked(out, false, true)).channels == channels, "a convolution");
    require(layout(out).height >= 1 && std::min(kernel[0], kernel[1]) >= 1, "a convolution");
    pad(x, kernel, strides, dilations, pads, 0, layout(out).height, layout(out).width);
    const int64_t pixel = round_up(channels, 16);
    const std::vector<float> weights = padded_rows(weight, kernel[0] * kernel[1], channels), biases = padded_rows(bias, 1, channels);
    step(out, {x}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        const Tensor &from = layout(x), &to = layout(out);
        const int64_t row = from.row() / 4;
        const FloatDepthwise layer{pixel,          kernel[0],           kernel[1],         weights.data(),     biases.data(), dilations[0] * row,
                                   dilations[1] * pixel, strides[0] * row, strides[1] * pixel, to.row() / 4};
        isa_.images->float_depthwise(layer, reinterpret_cast<const float *>(s.pixel(from, begin * strides[0] - pads[0], -pads[1])),
                                     reinterpret_cast<float *>(s.pixel(to, begin, 0)), end - begin, to.width);
    });
}

}  // namespace zoo
