#include "images/network/network.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace zoo {
namespace {

constexpr int64_t kPixels = 240;     // pixels per list of windows
constexpr int64_t kListed = kPixels + 8;  // of which whole eights are written
constexpr int64_t kTable = 256;      // bytes of a table
constexpr int64_t kFresh = 1 << 15;  // bytes of results that are still in L1 when a table is applied to them

// The same bytes of each of n pixels; some counts are constants, without a call of memcpy and a loop for each pixel.
template <class Bytes>
void copy_pixels_of(const PixelRow<const uint8_t> &x, const PixelRow<uint8_t> &out, Bytes bytes, int64_t n) {
    const uint8_t *from = x.data;
    uint8_t *to = out.data;
    for (int64_t p = 0; p < n; ++p, from += x.pitch, to += out.pitch) std::memcpy(to, from, static_cast<size_t>(bytes));
}
void copy_pixels(const PixelRow<const uint8_t> &x, const PixelRow<uint8_t> &out, int64_t bytes, int64_t n) {
    switch (bytes) {
        case 8: return copy_pixels_of(x, out, std::integral_constant<int64_t, 8>(), n);
        case 16: return copy_pixels_of(x, out, std::integral_constant<int64_t, 16>(), n);
        case 32: return copy_pixels_of(x, out, std::integral_constant<int64_t, 32>(), n);
        case 64: return copy_pixels_of(x, out, std::integral_constant<int64_t, 64>(), n);
        case 128: return copy_pixels_of(x, out, std::integral_constant<int64_t, 128>(), n);
        default: return copy_pixels_of(x, out, bytes, n);
    }
}

// The bytes of sixteen channels of n pixels by the table of each channel, eight of them at a time: single ones would be loaded and stored alone.
void look_up_channels(const uint8_t *tables, const PixelRow<const uint8_t> &x, const PixelRow<uint8_t> &out, int64_t n) {
    const uint8_t *from = x.data;
    uint8_t *to = out.data;
    for (int64_t p = 0; p < n; ++p, from += x.pitch, to += out.pitch)
        for (int64_t half = 0; half < 16; half += 8) {
            uint64_t bytes, results = 0;
            std::memcpy(&bytes, from + half, 8);
            for (int64_t i = 0; i < 8; ++i) results |= static_cast<uint64_t>(tables[kTable * (half + i) + (bytes >> 8 * i & 255)]) << 8 * i;
            std::memcpy(to + half, &results, 8);
        }
}

}  // namespace

Pair ConvolutionShape::tap(int64_t t) const {
    if (side() == 3) return t % 4 < 3 ? Pair{t % 4, t / 4} : Pair{-1, 0};
    if (side() == 5 && t < 20) return {t % 4, t / 4};
    return t < rows * columns ? Pair{t / columns, t % columns} : Pair{-1, 0};
}

int64_t ConvolutionShape::joined() const {
    const int64_t group_outputs = outputs / groups;
    return std::min(groups, 16 / std::gcd(group_outputs, int64_t{16}));
}

int64_t ConvolutionShape::width(int64_t block) const {
    return round_up(std::min(joined(), groups - block * joined()) * (outputs / groups), 16);
}

bool ConvolutionShape::whole_rows() const { return groups == 1 && !dilated && round_up(inputs, 4) == pitch; }

int64_t ConvolutionShape::packed_bytes(const Isa &isa) const {
    if (depthwise()) return isa.images->depthwise_bytes(tap_groups(), round_up(outputs, 16));
    int64_t bytes = 0;
    for (int64_t b = 0; b < blocks(); ++b) bytes += round_up(isa.images->dense_bytes(stretches() * stretch(), width(b)), 64);
    return bytes;
}

void ConvolutionShape::pack(const Isa &isa, const int8_t *weight, const int32_t *bias, const float *scale, uint8_t *packed) const {
    const auto weight_at = [&](int64_t o, int64_t i, int64_t j, int64_t k) { return weight[((o * rows + i) * columns + j) * inputs + k]; };
    const int64_t group_outputs = outputs / groups, depth = depthwise() ? 4 * tap_groups() : stretches() * stretch();
    for (int64_t b = 0; b < (depthwise() ? 1 : blocks()); ++b) {
        const int64_t first = depthwise() ? 0 : b * joined() * group_outputs;
        const int64_t wide = depthwise() ? round_up(outputs, 16) : width(b), count = std::min(wide, outputs - first);
        std::vector<int8_t> dense(static_cast<size_t>(depth * wide));
        std::vector<int32_t> biases(static_cast<size_t>(wide));
        std::vector<float> scales(static_cast<size_t>(wide));
        std::copy_n(bias + first, count, biases.begin());
        std::copy_n(scale + first, count, scales.begin());
        for (int64_t c = 0; c < count; ++c) {
            const int64_t o = first + c, group = depthwise() ? 0 : o / group_outputs - b * joined();
            if (depthwise()) {
                for (int64_t t = 0; t < depth; ++t)
                    if (const auto [i, j] = tap(t); i >= 0) dense[static_cast<size_t>(t * wide + c)] = weight_at(o, i, j, 0);
                continue;
            }
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < columns; ++j)
                    for (int64_t k = 0; k < inputs; ++k) {
                        const int64_t line = whole_rows() ? i * stretch() + j * pitch + k : (i * columns + j) * stretch() + group * inputs + k;
                        dense[static_cast<size_t>(line * wide + c)] = weight_at(o, i, j, k);
                    }
        }
        if (depthwise()) return isa.images->pack_depthwise(dense.data(), biases.data(), scales.data(), tap_groups(), wide, packed);
        isa.images->pack_dense(dense.data(), biases.data(), scales.data(), depth, wide, packed);
        packed += round_up(isa.images->dense_bytes(depth, wide), 64);
    }
}

int64_t Network::tensor(int64_t height, int64_t width, int64_t channels, int64_t pitch) {
    constexpr int64_t kMost = 1 << 16;
    const int64_t whole = round_up(channels, 16);
    const bool sized = std::min({height, width, channels}) >= 1 && std::max({height, width, channels}) <= kMost;
    require(sized && height * width * channels <= 1 << 28 && (pitch == 4 ? channels <= 4 : pitch == whole || pitch == 4 * whole), "a tensor");
    tensors_.push_back({height, width, channels, pitch});
    return static_cast<int64_t>(tensors_.size()) - 1;
}

void Network::require(bool fits, const char *what) {
    if (!fits) throw std::invalid_argument(std::string("the sizes of ") + what + " do not fit its tensors");
}

int64_t Network::existing(int64_t tensor, bool written) const {
    require(tensor >= 0 && tensor < static_cast<int64_t>(tensors_.size()) && (layout(tensor).first >= 0) == written, "a step");
    return tensor;
}

int64_t Network::checked(int64_t tensor, bool written, bool floats) const {
    require(layout(existing(tensor, written)).floats() == floats, "a step");
    return tensor;
}

void Network::step(int64_t out, const std::vector<int64_t> &reads, int64_t rows,
                   std::function<void(const Sample &, int64_t, int64_t)> compute) {
    step_of_samples(out, reads, rows, 0, [compute = std::move(compute)](const Sample *samples, int64_t n, int64_t begin, int64_t end) {
        for (int64_t i = 0; i < n; ++i) compute(samples[i], begin, end);
    });
}

void Network::step_of_samples(int64_t out, const std::vector<int64_t> &reads, int64_t rows, int64_t weights, Compute compute) {
    const auto index = static_cast<int64_t>(steps_.size());
    require(!finished_ && (index > 0 || reads.empty()) && result_count_ == 0, "a step");
    for (int64_t x : reads) tensors_[static_cast<size_t>(existing(x, true))].last = index;
    if (out >= 0) {
        auto &written = tensors_[static_cast<size_t>(existing(out, false))];
        require(layout(out).pitch >= 16 || index == 0, "a step");
        written.first = written.last = index;
    }
    int64_t bytes = out < 0 ? 0 : layout(out).bytes();
    for (int64_t x : reads) bytes += layout(x).bytes();
    const bool together = weights ? weights > 2 * bytes : !steps_.empty() && steps_.back().together;
    steps_.push_back({rows, out, weights, together, std::move(compute)});
}

// Gives x the padding that height x width windows of this kernel need.
void Network::pad(int64_t x, Pair kernel, Pair strides, Pair dilations, Sides pads, int32_t fill, int64_t height, int64_t width) {
    constexpr int64_t kMost = 1 << 16;
    auto &t = tensors_[static_cast<size_t>(existing(x, true))];
    const Pair sizes{t.height, t.width}, counts{height, width};
    for (size_t axis = 0; axis < 2; ++axis) {
        require(std::min({kernel[axis], strides[axis], dilations[axis]}) >= 1 && std::min(pads[axis], pads[axis + 2]) >= 0, "windows");
        require(std::max({kernel[axis], strides[axis], dilations[axis], pads[axis], pads[axis + 2]}) <= kMost, "windows");
        const int64_t reach = (kernel[axis] - 1) * dilations[axis] + 1, room = sizes[axis] + pads[axis] + pads[axis + 2] - reach;
        require(room >= 0 && room / strides[axis] + 1 == counts[axis], "windows");
    }
    for (size_t side = 0; side < 4; ++side) t.borders[side] = std::max(t.borders[side], pads[side]);
    if (pads == Sides{}) return;
    require(!t.joined, "padding");
    require(fill >= 0 && fill <= 255 && (t.fill < 0 || t.fill == fill), "padding");
    t.fill = fill;
}

void Network::convolution(int64_t x, int64_t out, const ConvolutionShape &shape, const uint8_t *packed, int64_t bytes, Pair strides,
                          Sides pads, Pair dilations, int32_t fill, Requantization of, const SumArguments *sum, int64_t residual,
                          const ActivationTable *activation, const int16_t *gains, const uint8_t *table) {
    const ConvolutionShape &c = shape;
    require(std::min({c.outputs, c.rows, c.columns, c.inputs, c.groups}) >= 1 && c.outputs % c.groups == 0, "a convolution");
    require(layout(checked(x, true)).channels == c.inputs * c.groups && layout(x).pitch == c.pitch, "a convolution");
    require(bytes == c.packed_bytes(isa_) && c.dilated == (dilations[1] > 1 && c.columns > 1), "a convolution's weights");
    const auto count = [&](size_t axis, int64_t size, int64_t kernel) {
        return (size + pads[axis] + pads[axis + 2] - (kernel - 1) * dilations[axis] - 1) / std::max<int64_t>(strides[axis], 1) + 1;
    };
    const int64_t height = out < 0 ? count(0, layout(x).height, c.rows) : layout(existing(out, false)).height;
    const int64_t width = out < 0 ? count(1, layout(x).width, c.columns) : layout(out).width;
    pad(x, {c.rows, c.columns}, strides, dilations, pads, fill, height, width);
    require(out < 0 || layout(out).channels == c.outputs, "a convolution");
    std::vector<int64_t> reads{x};
    if (sum) {
        require(!c.depthwise() && out >= 0 && !layout(out).floats() && layout(checked(sum->other, true)).height == height, "a sum");
        require(layout(sum->other).width == width && layout(sum->other).channels == c.outputs && layout(sum->other).pitch >= 16, "a sum");
        reads.push_back(sum->other);
    }
    const SumArguments adds = sum ? *sum : SumArguments{};
    const bool summed = sum != nullptr;
    const auto window = [=](const Sample &s, int64_t y, int64_t column) {
        return s.pixel(layout(x), y * strides[0] - pads[0], column * strides[1] - pads[1]);
    };
    const bool real = out < 0 || layout(out).floats(), activates = activation != nullptr;
    require((!activates || (!sum && !c.depthwise())) && (!(activates || table) || !real), "an activation");
    const ActivationTable curve = activates ? *activation : ActivationTable{};
    require(!gains || (activates && c.groups == 1), "an activation");
    std::vector<uint8_t> packed_gains;
    if (gains) {
        const int64_t whole = round_up(c.outputs, 16);
        std::vector<int32_t> wide(static_cast<size_t>(whole));
        std::copy_n(gains, c.outputs, wide.begin());
        packed_gains.resize(static_cast<size_t>(isa_.images->dense_bytes(0, whole)));
        isa_.images->pack_dense(nullptr, wide.data(), std::vector<float>(static_cast<size_t>(whole)).data(), 0, whole, packed_gains.data());
    }
    const std::vector<uint8_t> of_bytes(table, table ? table + kTable : table);
    const auto look_up = [=](uint8_t *pixels, int64_t count) {  // of a row
        if (!of_bytes.empty()) isa_.images->lookup(of_bytes.data(), pixels, pixels, count * layout(out).pitch);
    };
    if (residual >= 0) {
        require(out >= 0 && layout(out).floats() && layout(checked(residual, true, true)).height == height, "a sum");
        require(layout(residual).width == width && layout(residual).channels == c.outputs, "a sum");
        reads.push_back(residual);
        tensors_[static_cast<size_t>(out)].over = residual;
    }
    if (c.depthwise() && !real) {
        step(out, reads, height, [=](const Sample &s, int64_t begin, int64_t end) {
            const Tensor &from = layout(x), &to = layout(out);
            std::vector<int64_t> offsets(static_cast<size_t>(4 * c.tap_groups()));
            for (size_t t = 0; t < offsets.size(); ++t) {
                const auto [i, j] = c.tap(static_cast<int64_t>(t));
                offsets[t] = i < 0 ? offsets[t - 1] : i * dilations[0] * from.row() + j * dilations[1] * from.pitch;
            }
            const Depthwise layer{round_up(c.outputs, 16),  c.tap_groups(), offsets.data(), strides[1] * from.pitch, to.pitch,
                                  strides[0] * from.row(), to.row(),       c.side(),       packed,                  of};
            constexpr int64_t kBytes = 1 << 17;  // of x that stay in L2 while blocks of channels pass over them
            const int64_t most = std::max<int64_t>(kBytes / layer.x_row, 1);
            for (int64_t y = begin, rows; y < end; y += rows) {
                rows = std::min(most, end - y);
                isa_.images->depthwise(layer, window(s, y, 0), s.pixel(to, y, 0), rows, width);
                for (int64_t row = y; row < y + rows; ++row) look_up(s.pixel(to, row, 0), width);
            }
        });
        return;
    }
    require(!c.depthwise(), "a result");
    result_count_ = out < 0 ? height * width * c.outputs : 0;
    const int64_t results = result_count_;
    result_count_ = 0;
    step_of_samples(out, reads, height, bytes, [=](const Sample *samples, int64_t count, int64_t begin, int64_t end) {
        const Tensor &from = layout(x);
        std::vector<int64_t> offsets(static_cast<size_t>(c.stretches()));
        for (int64_t k = 0; k < c.stretches(); ++k)
            offsets[static_cast<size_t>(k)] = c.whole_rows() ? k * dilations[0] * from.row()
                                                            : k / c.columns * dilations[0] * from.row() + k % c.columns * dilations[1] * from.pitch;
        const uint8_t *in[kListed], *other[kListed], *moved[kListed];
        uint8_t *to[kListed], *shifted[kListed];
        float *floats[kListed];
        const float *added[kListed];
        const int64_t whole = round_up(c.outputs, 16);
        Buffer<float> results(out < 0 ? kPixels * whole : 0);
        const int64_t sample_pixels = (end - begin) * width;  // pixels of a sample
        const int64_t most = of_bytes.empty() ? kPixels : std::clamp(kFresh / whole, kPixels / 5, kPixels);
        int64_t y = begin, column = 0;
        const Sample *of_pixels = samples;
        for (int64_t p = 0; p < count * sample_pixels;) {
            const int64_t n = std::min(most, count * sample_pixels - p);
            for (int64_t i = 0; i < n;) {
                const Sample &s = *of_pixels;
                const int64_t end_of_row = std::min(n, i + width - column);
                const auto list = [&](auto &of, const uint8_t *first, int64_t step) { isa_.images->list_pixels(first, step, end_of_row - i, of + i); };
                list(in, window(s, y, column), strides[1] * from.pitch);
                if (out >= 0) list(to, s.pixel(layout(out), y, column), layout(out).pitch);
                if (residual >= 0) list(added, s.pixel(layout(residual), y, column), layout(residual).pitch);
                if (summed) list(other, s.pixel(layout(adds.other), y, column), layout(adds.other).pitch);
                column += end_of_row - i, i = end_of_row;
                if (column == width) column = 0, ++y;
                if (y == end) y = begin, ++of_pixels;
            }
            const uint8_t *weights = packed;
            for (int64_t b = 0; b < c.blocks(); ++b) {
                const int64_t first = b * c.joined() * (c.outputs / c.groups), skip = b * c.joined() * c.inputs, wide = c.width(b);
                const Dense layer{c.stretches(), c.stretch(), wide, offsets.data(), weights, of, summed ? &adds.sum : nullptr, adds.other_first,
                                  activates ? &curve : nullptr, packed_gains.empty() ? nullptr : packed_gains.data()};
                for (int64_t i = 0; i < n && skip; ++i) moved[i] = in[i] + skip;
                const uint8_t *const *windows = skip ? moved : in;
                if (real) {
                    for (int64_t i = 0; i < n; ++i)
                        floats[i] = out < 0 ? results.data() + i * wide : reinterpret_cast<float *>(to[i]) + first;
                    for (int64_t i = 0; i < n && residual >= 0 && b; ++i) added[i] += c.width(b - 1);
                    isa_.images->dense_floats(layer, windows, floats, residual >= 0 ? added : nullptr, n);
                    for (int64_t i = 0; i < n && out < 0; ++i)
                        std::copy_n(floats[i], std::min(wide, c.outputs - first),
                                    samples[(p + i) / sample_pixels].out + (begin * width + (p + i) % sample_pixels) * c.outputs + first);
                } else {
                    for (int64_t i = 0; i < n && first; ++i) shifted[i] = to[i] + first;
                    for (int64_t i = 0; i < n && first && summed; ++i) other[i] += c.width(b - 1);
                    isa_.images->dense(layer, windows, first ? shifted : to, summed ? other : nullptr, n);
                }
                weights += round_up(isa_.images->dense_bytes(c.stretches() * c.stretch(), wide), 64);
            }
            for (int64_t i = 0, run; i < n && out >= 0 && !of_bytes.empty(); i += run) {
                run = std::min(n - i, width - (p + i) % width);
                look_up(to[i], run);
            }
            p += n;
        }
    });
    steps_.back().by_row = out >= 0 && c.rows == 1 && strides[0] == 1 && height == layout(x).height;
    result_count_ = results;
}

void Network::addition(int64_t a, int64_t b, int64_t out, const ByteSum &sum) {
    for (int64_t x : {a, b}) {
        checked(x, true);
        require(layout(x).height == layout(checked(out, false)).height && layout(x).width == layout(out).width &&
                layout(x).channels == layout(out).channels, "a sum");
    }
    step(out, {a, b}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        const bool joined = layout(a).pitch == layout(out).pitch && layout(b).pitch == layout(out).pitch;
        for (int64_t y = begin; y < end; ++y)
            for (int64_t x = 0; x < (joined ? 1 : layout(out).width); ++x)
                isa_.images->sum(sum, s.pixel(layout(a), y, x), s.pixel(layout(b), y, x), s.pixel(layout(out), y, x),
                                 joined ? layout(out).width * layout(out).pitch : layout(out).channels);
    });
}

void Network::product(int64_t x, int64_t gate, int64_t out, const ByteProduct &product) {
    require(layout(checked(x, true)).height == layout(checked(out, false)).height && layout(x).width == layout(out).width, "a product");
    require(layout(x).channels == layout(out).channels && layout(checked(gate, true)).channels == layout(x).channels, "a product");
    const bool pixel = layout(gate).height == 1 && layout(gate).width == 1;
    require(pixel || (layout(gate).height == layout(x).height && layout(gate).width == layout(x).width), "a product");
    step(out, {x, gate}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t pixels = layout(out).width * layout(out).pitch;
        const bool follow = pixel && layout(x).row() == pixels && layout(out).row() == pixels;
        const int64_t rows = follow ? end - begin : 1;
        for (int64_t y = begin; y < end; y += rows)
            isa_.images->product(product, {s.pixel(layout(x), y, 0), layout(x).pitch},
                                 {s.pixel(layout(gate), pixel ? 0 : y, 0), pixel ? 0 : layout(gate).pitch},
                                 {s.pixel(layout(out), y, 0), layout(out).pitch}, rows * layout(out).width, layout(out).pitch);
    });
}

void Network::pool(int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads,
                   std::function<void(const Window &, int64_t, uint8_t *, int64_t)> of) {
    require(layout(checked(x, true)).channels == layout(checked(out, false)).channels, "a pool");
    for (size_t side = 0; side < 4; ++side) require(pads[side] >= 0 && pads[side] < kernel[side % 2], "a pool");
    const Sides before = layout(x).borders;
    const int32_t fill = layout(x).fill;
    pad(x, kernel, strides, {1, 1}, pads, std::max(fill, 0), layout(out).height, layout(out).width);
    tensors_[static_cast<size_t>(x)].borders = before, tensors_[static_cast<size_t>(x)].fill = fill;  // its windows are cut instead
    step(out, {x}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        const Tensor &from = layout(x);
        for (int64_t y = begin; y < end; ++y) {
            const int64_t top = std::max<int64_t>(y * strides[0] - pads[0], 0);
            const int64_t bottom = std::min(y * strides[0] - pads[0] + kernel[0], from.height);
            for (int64_t column = 0; column < layout(out).width; ++column) {
                const int64_t left = std::max<int64_t>(column * strides[1] - pads[1], 0);
                const int64_t right = std::min(column * strides[1] - pads[1] + kernel[1], from.width);
                const Window window{s.pixel(from, top, left), bottom - top, right - left, from.row(), from.pitch};
                of(window, kernel[0] * kernel[1], s.pixel(layout(out), y, column), layout(out).pitch);
            }
        }
    });
}

void Network::max_pool(int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads) {
    pool(x, out, kernel, strides, pads, [this](const Window &w, int64_t, uint8_t *to, int64_t channels) {
        isa_.images->max_pool(w, to, channels);
    });
}

void Network::average_pool(int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads, Mean mean, bool padded) {
    pool(x, out, kernel, strides, pads, [=](const Window &w, int64_t taps, uint8_t *to, int64_t channels) {
        Mean counted = mean;
        counted.count = static_cast<float>(padded ? taps : w.rows * w.columns);
        isa_.images->mean(w, counted, to, channels);
    });
}

void Network::global_average(int64_t x, int64_t out, int32_t x_zero, float scale, int32_t zero) {
    if (out < 0) {
        result_count_ = 0;
        const int64_t channels = layout(checked(x, true)).channels;
        step(-1, {x}, 1, [=](const Sample &s, int64_t, int64_t) {
            const Tensor &t = layout(x);
            std::vector<int64_t> sums(static_cast<size_t>(channels), -t.height * t.width * x_zero);
            for (int64_t y = 0; y < t.height; ++y)
                for (int64_t column = 0; column < t.width; ++column)
                    for (int64_t c = 0; c < channels; ++c) sums[static_cast<size_t>(c)] += s.pixel(t, y, column)[c];
            for (int64_t c = 0; c < channels; ++c) s.out[c] = static_cast<float>(sums[static_cast<size_t>(c)]) * scale;
        });
        result_count_ = channels;
        return;
    }
    require(layout(checked(out, false)).height == 1 && layout(out).width == 1 && layout(checked(x, true)).channels == layout(out).channels, "a mean");
    step(out, {x}, 1, [=](const Sample &s, int64_t, int64_t) {
        const Tensor &t = layout(x);
        isa_.images->global_mean({s.pixel(t, 0, 0), t.height, t.width, t.row(), t.pitch}, x_zero, scale, zero, s.pixel(layout(out), 0, 0),
                                 layout(out).pitch);
    });
}

void Network::lookup(int64_t x, int64_t out, const uint8_t *tables, int64_t count) {
    require(layout(checked(x, true)).height == layout(checked(out, false)).height && layout(x).width == layout(out).width, "a lookup");
    require(layout(x).channels == layout(out).channels && (count == 1 || count == layout(x).channels), "a lookup");
    std::vector<uint8_t> of(tables, tables + kTable * count);
    if (count > 1) {
        of.resize(static_cast<size_t>(kTable * layout(out).pitch));
        return step(out, {x}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
            constexpr int64_t kPixelsAtOnce = 256;  // that look up in the tables of sixteen channels, which stay in L1
            const int64_t width = layout(out).width, rows = std::max<int64_t>(kPixelsAtOnce / width, 1);
            for (int64_t y = begin; y < end; y += rows)
                for (int64_t c = 0; c < count; c += 16)
                    for (int64_t row = y; row < std::min(y + rows, end); ++row)
                        look_up_channels(of.data() + kTable * c, {s.pixel(layout(x), row, 0) + c, layout(x).pitch}, {s.pixel(layout(out), row, 0) + c, layout(out).pitch}, width);
        });
    }
    step(out, {x}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        const bool joined = layout(x).pitch == layout(out).pitch;
        for (int64_t y = begin; y < end; ++y)
            for (int64_t column = 0; column < (joined ? 1 : layout(out).width); ++column)
                isa_.images->lookup(of.data(), s.pixel(layout(x), y, column), s.pixel(layout(out), y, column),
                                    joined ? layout(out).width * layout(out).pitch : layout(out).channels);
    });
}

void Network::concatenation(const std::vector<int64_t> &xs, int64_t out) {
    const bool floats = layout(existing(out, false)).floats();
    int64_t channels = 0;
    for (int64_t x : xs) {
        require(layout(checked(x, true, floats)).height == layout(checked(out, false, floats)).height &&
                layout(x).width == layout(out).width, "a concatenation");
        channels += layout(x).channels;
    }
    require(channels == layout(out).channels, "a concatenation");
    step(out, xs, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t size = floats ? 4 : 1, tail = floats ? layout(out).pitch - channels * size : 0;
        for (int64_t y = begin; y < end; ++y) {
            uint8_t *to = s.pixel(layout(out), y, 0);
            for (int64_t x : xs) {
                copy_pixels({s.pixel(layout(x), y, 0), layout(x).pitch}, {to, layout(out).pitch}, layout(x).channels * size, layout(out).width);
                to += layout(x).channels * size;
            }
            for (int64_t column = 0; column < layout(out).width && tail; ++column, to += layout(out).pitch) std::fill_n(to, tail, uint8_t{0});
        }
    });
}

void Network::stacking(const std::vector<int64_t> &xs, int64_t out) {
    const bool floats = layout(existing(out, false)).floats();
    int64_t pixels = 0;
    for (int64_t x : xs) {
        require(layout(checked(x, true, floats)).channels == layout(checked(out, false, floats)).channels, "stacked pixels");
        pixels += pixels_in(x);
    }
    require(pixels == layout(out).height && layout(out).width == 1, "stacked pixels");
    step(out, xs, pixels, [=](const Sample &s, int64_t begin, int64_t end) {
        const int64_t bytes = layout(out).channels * (floats ? 4 : 1), tail = floats ? layout(out).pitch - bytes : 0;
        int64_t first = 0;
        for (int64_t x : xs) {
            for (int64_t p = std::max(begin - first, int64_t{0}); p < std::min(end - first, pixels_in(x)); ++p)
                std::fill_n(std::copy_n(s.pixel(layout(x), p / layout(x).width, p % layout(x).width), bytes,
                            s.pixel(layout(out), first + p, 0)), tail, uint8_t{0});
            first += pixels_in(x);
        }
    });
}

void Network::selection(int64_t x, int64_t out, const std::vector<int64_t> &channels) {
    require(layout(checked(x, true)).height == layout(checked(out, false)).height && layout(x).width == layout(out).width, "a selection");
    require(static_cast<int64_t>(channels.size()) == layout(out).channels, "a selection");
    std::vector<Pair> runs;  // of channels that follow each other: the first, how many
    for (int64_t c : channels) {
        require(c >= 0 && c < layout(x).channels, "a selection");
        if (!runs.empty() && runs.back()[0] + runs.back()[1] == c) ++runs.back()[1];
        else runs.push_back({c, 1});
    }
    const bool scattered = 4 * runs.size() > channels.size();
    step(out, {x}, layout(out).height, [=](const Sample &s, int64_t begin, int64_t end) {
        for (int64_t y = begin; y < end; ++y) {
            uint8_t *row = s.pixel(layout(out), y, 0);
            for (const auto &[first, count] : scattered ? std::vector<Pair>{} : runs) {
                copy_pixels({s.pixel(layout(x), y, 0) + first, layout(x).pitch}, {row, layout(out).pitch}, count, layout(out).width);
                row += count;
            }
            for (int64_t column = 0; column < layout(out).width && scattered; ++column) {
                const uint8_t *from = s.pixel(layout(x), y, column);
                uint8_t *to = s.pixel(layout(out), y, column);
                for (int64_t c : channels) *to++ = from[c];
            }
        }
    });
}

}  // namespace zoo
