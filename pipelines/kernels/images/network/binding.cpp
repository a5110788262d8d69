// Image classifiers for Python: see images/network/network.h.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "images/network/network.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

using Floats = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Operands = std::tuple<int64_t, float, int32_t>;
using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;

// [outputs, rows, columns, inputs], groups, bytes a pixel, whether it is dilated along rows
ConvolutionShape shape_of(const std::array<int64_t, 4> &weight, int64_t groups, int64_t pitch, bool dilated) {
    constexpr int64_t kMost = 1 << 24;
    for (int64_t size : weight)
        if (size < 1 || size > kMost) throw nb::value_error("a convolution has no weights, or too many");
    const bool even = groups >= 1 && weight[0] % groups == 0;
    if (!even || (pitch == 4 ? weight[3] * groups > 4 : pitch != round_up(weight[3] * groups, 16)))
        throw nb::value_error("a convolution's groups or pixels do not fit its weights");
    return {weight[0], weight[1], weight[2], weight[3], groups, pitch, dilated && weight[2] > 1};
}

class BoundNetwork : public Network {
  public:
    using Network::Network;
    std::vector<Array> kept;  // packed weights

    Floats call(const Array &x, int64_t threads) {
        if (x.ndim() < 1 || threads < 1 || threads > 1024) throw nb::value_error("an image network takes samples, and 1 to 1024 threads");
        const void *data = pixels_of(x);
        const auto n = static_cast<int64_t>(x.shape(0));
        if (!results() || static_cast<int64_t>(x.size()) != n * sample()) throw nb::value_error("the input has another size than the network's");
        auto *buffer = new Buffer<float>(std::max<int64_t>(n * results(), 1));
        nb::capsule owner(buffer, [](void *pointer) noexcept { delete static_cast<Buffer<float> *>(pointer); });
        {
            nb::gil_scoped_release release;
            run(data, n, buffer->data(), threads);
        }
        return Floats(buffer->data(), {static_cast<size_t>(n), static_cast<size_t>(results())}, owner);
    }

    std::vector<double> time(const Array &x, double seconds) const {
        const void *data = pixels_of(x);
        if (!results() || static_cast<int64_t>(x.size()) != sample()) throw nb::value_error("the input has another size; expected one sample");
        return time_steps(data, seconds);
    }

  private:
    const void *pixels_of(const Array &x) const {
        if (floats()) return data_of<float>(x, "the input", x.ndim());
        return data_of<uint8_t>(x, "the input", x.ndim());
    }
};

Bytes pack(const Array &weight, const Array &bias, const Array &scale, int64_t groups, int64_t pitch, bool dilated, const std::string &isa) {
    const int8_t *weights = data_of<int8_t>(weight, "weight", 4);
    const int32_t *biases = data_of<int32_t>(bias, "bias", 1);
    const float *scales = data_of<float>(scale, "scale", 1);
    const auto size = [&](size_t axis) { return static_cast<int64_t>(weight.shape(axis)); };
    const ConvolutionShape shape = shape_of({size(0), size(1), size(2), size(3)}, groups, pitch, dilated);
    if (static_cast<int64_t>(bias.size()) != shape.outputs || static_cast<int64_t>(scale.size()) != shape.outputs)
        throw nb::value_error("a convolution has another number of biases or scales than outputs");
    const Isa &chosen = choose_isa(isa);
    const int64_t bytes = shape.packed_bytes(chosen);
    auto *buffer = new Buffer<uint8_t>(bytes);
    nb::capsule owner(buffer, [](void *pointer) noexcept { delete static_cast<Buffer<uint8_t> *>(pointer); });
    std::fill_n(buffer->data(), bytes, uint8_t{0});
    shape.pack(chosen, weights, biases, scales, buffer->data());
    return Bytes(buffer->data(), {static_cast<size_t>(bytes)}, owner);
}

void activation_table(ActivationTable *table, int32_t factor, int32_t zero, int32_t shift, const Array &starts) {
    constexpr int64_t kCount = ActivationTable::kSegments + 1;
    const int16_t *first = data_of<int16_t>(starts, "starts", 1);
    if (static_cast<int64_t>(starts.size()) != kCount || factor < 1 || factor > 32767 || shift < 1 || shift > 9 || zero < 0 || zero > 255)
        throw nb::value_error("an activation has 65 starts, a factor of 15 bits, segments of 1 to 9 bits and a byte as zero point");
    new (table) ActivationTable{factor, zero, shift, static_cast<int32_t>(ActivationTable::kSegments << shift) - 1, {}};
    std::copy_n(first, kCount, table->starts);
}

void convolution(BoundNetwork &network, int64_t x, int64_t out, const Array &packed, const std::array<int64_t, 4> &weight_shape, int64_t groups,
                 int64_t pitch, Pair strides, Sides pads, Pair dilations, int32_t fill, int32_t zero, int32_t low, int32_t high,
                 const std::optional<ByteSum> &sum, int64_t other, bool other_first, int64_t residual, const std::optional<ActivationTable> &activation,
                 const std::optional<Array> &gains, const std::optional<Array> &table) {
    const uint8_t *data = data_of<uint8_t>(packed, "packed", 1);
    if (table && table->size() != 256) throw nb::value_error("a layer's table has 256 bytes");
    if (gains && static_cast<int64_t>(gains->size()) != weight_shape[0]) throw nb::value_error("an activation has a gain an output");
    const SumArguments adds = sum ? SumArguments{*sum, other, other_first} : SumArguments{};
    network.convolution(x, out, shape_of(weight_shape, groups, pitch, dilations[1] > 1), data, static_cast<int64_t>(packed.size()), strides, pads,
                        dilations, fill, {zero, low, high}, sum ? &adds : nullptr, residual, activation ? &*activation : nullptr,
                        gains ? data_of<int16_t>(*gains, "gains", 1) : nullptr, table ? data_of<uint8_t>(*table, "table", 1) : nullptr);
    network.kept.push_back(packed);
}

void product(BoundNetwork &network, int64_t x, int64_t gate, int64_t out, int32_t x_zero, int32_t gate_zero, float x_scale, float gate_scale,
             float scale, int32_t zero, int32_t low, int32_t high) {
    network.product(x, gate, out, {x_zero, gate_zero, x_scale, gate_scale, scale, zero, low, high});
}

void average_pool(BoundNetwork &network, int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads, float x_scale, int32_t x_zero,
                  float scale, float zero, bool padded) {
    network.average_pool(x, out, kernel, strides, pads, {x_scale, 0, scale, zero, x_zero}, padded);
}

void lookup(BoundNetwork &network, int64_t x, int64_t out, const Array &table) {
    const uint8_t *data = data_of<uint8_t>(table, "table", table.ndim());
    if (table.size() == 0 || table.size() % 256 != 0) throw nb::value_error("a lookup has tables of 256 bytes");
    network.lookup(x, out, data, static_cast<int64_t>(table.size() / 256));
}

Operand operand_of(const Operands &of) {
    const auto [tensor, scale, zero] = of;
    if (!(scale >= 0)) throw nb::value_error("an operand has a negative scale");
    return {tensor, scale, zero};
}

void channel_scale(BoundNetwork &network, const Operands &x, const Operands &out, const Array &gain, const Array &bias) {
    const float *gains = data_of<float>(gain, "gain", 2), *biases = data_of<float>(bias, "bias", 2);
    const auto pixels = static_cast<int64_t>(gain.shape(0)), channels = static_cast<int64_t>(gain.shape(1));
    if (bias.shape(0) != gain.shape(0) || bias.shape(1) != gain.shape(1)) throw nb::value_error("a scale has a gain and a bias a channel");
    network.channel_scale(operand_of(x), operand_of(out), gains, biases, pixels, channels);
}

const float *table_of(const Array &table) {
    const float *data = data_of<float>(table, "table", 1);
    if (table.size() != 256) throw nb::value_error("a table has 256 floats");
    return data;
}

void group_linear(BoundNetwork &network, const Operands &x, const Operands &out, const Array &weight, const Array &bias) {
    const float *weights = data_of<float>(weight, "weight", 2), *biases = data_of<float>(bias, "bias", 1);
    if (weight.shape(0) != bias.size()) throw nb::value_error("a linear layer has a bias an output");
    const auto outputs = static_cast<int64_t>(weight.shape(0)), inputs = static_cast<int64_t>(weight.shape(1));
    network.group_linear(operand_of(x), operand_of(out), weights, biases, inputs, outputs);
}

void layer_norm(BoundNetwork &network, const Operands &x, const Operands &out, const Array &gain, const std::optional<Array> &bias, float epsilon) {
    const float *gains = data_of<float>(gain, "gain", 1), *biases = bias ? data_of<float>(*bias, "bias", 1) : nullptr;
    if (bias && gain.size() != bias->size()) throw nb::value_error("a norm has a gain and a bias a channel");
    network.layer_norm(operand_of(x), operand_of(out), gains, biases, static_cast<int64_t>(gain.size()), epsilon);
}

void group_norm(BoundNetwork &network, const Operands &x, const Operands &out, const Array &gain, const Array &bias, int64_t groups, float epsilon) {
    const float *gains = data_of<float>(gain, "gain", 1), *biases = data_of<float>(bias, "bias", 1);
    if (gain.size() != bias.size()) throw nb::value_error("a norm has a gain and a bias a channel");
    network.group_norm(operand_of(x), operand_of(out), gains, biases, static_cast<int64_t>(gain.size()), groups, epsilon);
}

Taps taps_of(const std::vector<int64_t> &places, const Array &weights) {
    const float *data = data_of<float>(weights, "weights", 2);
    return {static_cast<int64_t>(weights.shape(1)), places, std::vector<float>(data, data + weights.size())};
}

void activation(BoundNetwork &network, const Operands &x, const Operands &out, const std::string &kind) {
    network.activation(operand_of(x), operand_of(out), activation_named(kind));
}

void gathering(BoundNetwork &network, const Operands &x, const Operands &out, const std::vector<int64_t> &places, const std::optional<Array> &added) {
    const int64_t channels = added ? static_cast<int64_t>(added->shape(added->ndim() - 1)) : 0;
    const float *adds = added ? data_of<float>(*added, "added", 2) : nullptr;
    if (added && (static_cast<int64_t>(added->shape(0)) != network.pixels_in(std::get<0>(out)) || channels != network.channels(std::get<0>(out)))) throw nb::value_error("what is added does not fit");
    network.gathering(operand_of(x), operand_of(out), places, adds);
}

void attention(BoundNetwork &network, int64_t x, int64_t keys, const Operands &out, int64_t heads, int64_t size, int64_t windows,
               const std::optional<Array> &bias) {
    const float *biases = bias ? data_of<float>(*bias, "bias", 4) : nullptr;
    const int64_t biased = bias ? static_cast<int64_t>(bias->shape(0)) : 0, parts = std::max<int64_t>(windows, 1);
    const int64_t tokens = network.pixels_in(x) / parts, attended = network.pixels_in(keys < 0 ? x : keys) / parts;
    if (bias && static_cast<int64_t>(bias->size()) != biased * heads * tokens * attended)
        throw nb::value_error("a bias does not fit the heads and tokens of a window");
    network.attention(x, keys, operand_of(out), heads, size, windows, biases, biased);
}

void float_depthwise(BoundNetwork &network, int64_t x, int64_t out, const Array &weight, const Array &bias, Pair strides, Sides pads, Pair dilations) {
    const float *weights = data_of<float>(weight, "weight", 3), *biases = data_of<float>(bias, "bias", 1);
    if (weight.shape(2) != bias.size()) throw nb::value_error("a convolution has a bias a channel");
    network.float_depthwise(x, out, weights, biases, {static_cast<int64_t>(weight.shape(0)), static_cast<int64_t>(weight.shape(1))},
                            static_cast<int64_t>(weight.shape(2)), strides, pads, dilations);
}

void float_convolution(BoundNetwork &network, int64_t x, const Operands &out, const Array &weight, const std::optional<Array> &scale, const Array &bias,
                       int64_t groups, Pair strides, Sides pads, Pair dilations, int64_t residual, float low, float high) {
    const void *weights = scale ? static_cast<const void *>(data_of<int8_t>(weight, "weight", 4)) : data_of<float>(weight, "weight", 4);
    const float *biases = data_of<float>(bias, "bias", 1), *scales = scale ? data_of<float>(*scale, "scale", 1) : nullptr;
    if (weight.shape(0) != bias.size() || (scale && scale->size() != bias.size())) throw nb::value_error("a convolution has a bias and a scale an output");
    FloatConvolutionShape shape{{}, groups, strides, pads, dilations};
    for (size_t axis = 0; axis < 4; ++axis) shape.weight[axis] = static_cast<int64_t>(weight.shape(axis));
    network.float_convolution(x, operand_of(out), shape, weights, scales, biases, residual, low, high);
}

}  // namespace
}  // namespace zoo

void bind_image_network(nb::module_ &module) {
    using namespace zoo;
    module.def("pack_convolution", pack, "weight"_a, "bias"_a, "scale"_a, "groups"_a, "pitch"_a, "dilated"_a, "isa"_a = "");
    module.def("product_limit", product_limit, "isa"_a = "", "seconds"_a = 0.1, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<ByteSum>(module, "ByteSum", "Parameters of a quantized sum, see `Sum` of pipelines.kernels.images.steps.")
        .def(nb::init<float, float, float, int32_t, int32_t>(), "a_ratio"_a, "b_ratio"_a, "fixed"_a, "low"_a, "high"_a);
    nb::class_<ActivationTable>(module, "ActivationTable", "A table of pipelines.kernels.images.steps.activation; starts: int16 [65].")
        .def("__init__", activation_table, "factor"_a, "zero"_a, "shift"_a, "starts"_a);
    nb::class_<BoundNetwork>(module, "ImageNetwork",
                             "An image network; its methods add the steps that pipelines.kernels.images.steps defines.")
        .def(nb::init<std::string>(), "isa"_a = "")
        .def_prop_ro("isa", &BoundNetwork::isa)
        .def_prop_ro("arena", &BoundNetwork::arena)
        .def("tensor", &BoundNetwork::tensor, "height"_a, "width"_a, "channels"_a, "pitch"_a)
        .def("pixels", &BoundNetwork::pixels, "out"_a, "channels"_a, "fills"_a, "last"_a, "floats"_a, "scale"_a, "zero"_a, "offset"_a)
        .def("convolution", convolution, "x"_a, "out"_a, "packed"_a, "weight_shape"_a, "groups"_a, "pitch"_a, "strides"_a, "pads"_a,
             "dilations"_a, "fill"_a, "zero"_a, "low"_a, "high"_a, "sum"_a.none(), "other"_a, "other_first"_a,
             "residual"_a, "activation"_a.none(), "gains"_a.none(), "table"_a.none())
        .def("addition", &BoundNetwork::addition, "a"_a, "b"_a, "out"_a, "sum"_a)
        .def("product", product, "x"_a, "gate"_a, "out"_a, "x_zero"_a, "gate_zero"_a, "x_scale"_a, "gate_scale"_a, "scale"_a, "zero"_a, "low"_a,
             "high"_a)
        .def("max_pool", &BoundNetwork::max_pool, "x"_a, "out"_a, "kernel"_a, "strides"_a, "pads"_a)
        .def("average_pool", average_pool, "x"_a, "out"_a, "kernel"_a, "strides"_a, "pads"_a, "x_scale"_a, "x_zero"_a, "scale"_a, "zero"_a,
             "padded"_a)
        .def("global_average", &BoundNetwork::global_average, "x"_a, "out"_a, "x_zero"_a, "scale"_a, "zero"_a)
        .def("lookup", lookup, "x"_a, "out"_a, "table"_a)
        .def("concatenation", &BoundNetwork::concatenation, "xs"_a, "out"_a)
        .def("stacking", &BoundNetwork::stacking, "xs"_a, "out"_a)
        .def("selection", &BoundNetwork::selection, "x"_a, "out"_a, "channels"_a)
        .def("resampling", &BoundNetwork::resampling, "x"_a, "out"_a, "rows"_a, "columns"_a)
        .def("float_copy", [](BoundNetwork &n, const Operands &x, const Operands &out) { n.float_copy(operand_of(x), operand_of(out)); }, "x"_a, "out"_a)
        .def("float_sum", [](BoundNetwork &n, const Operands &a, const Operands &b, const Operands &out) {
                 n.float_sum(operand_of(a), operand_of(b), operand_of(out));
             }, "a"_a, "b"_a, "out"_a)
        .def("float_mean", [](BoundNetwork &n, const Operands &x, const Operands &out) { n.float_mean(operand_of(x), operand_of(out)); }, "x"_a, "out"_a)
        .def("float_clip", [](BoundNetwork &n, const Operands &x, const Operands &out, float low, float high) { n.float_clip(operand_of(x), operand_of(out), low, high); },
             "x"_a, "out"_a, "low"_a, "high"_a)
        .def("response_gate", [](BoundNetwork &n, const Operands &x, const Operands &out, float epsilon) { n.response_gate(operand_of(x), operand_of(out), epsilon); },
             "x"_a, "out"_a, "epsilon"_a)
        .def("gathering", gathering, "x"_a, "out"_a, "places"_a, "added"_a.none())
        .def("attention", attention, "x"_a, "keys"_a, "out"_a, "heads"_a, "size"_a, "windows"_a, "bias"_a.none())
        .def("matrix_product", &BoundNetwork::matrix_product, "a"_a, "b"_a, "out"_a, "groups"_a)
        .def("channel_scale", channel_scale, "x"_a, "out"_a, "gain"_a, "bias"_a)
        .def("activation", activation, "x"_a, "out"_a, "kind"_a)
        .def("layer_norm", layer_norm, "x"_a, "out"_a, "gain"_a, "bias"_a.none(), "epsilon"_a)
        .def("group_norm", group_norm, "x"_a, "out"_a, "gain"_a, "bias"_a, "groups"_a, "epsilon"_a)
        .def("float_product", [](BoundNetwork &n, const Operands &a, const Operands &b, const Operands &out) {
                 n.float_product(operand_of(a), operand_of(b), operand_of(out));
             }, "a"_a, "b"_a, "out"_a)
        .def("interpolation", [](BoundNetwork &n, const Operands &x, const Operands &out, const std::vector<int64_t> &rows, const Array &row_weights,
                                 const std::vector<int64_t> &columns, const Array &column_weights) {
                 n.interpolation(operand_of(x), operand_of(out), taps_of(rows, row_weights), taps_of(columns, column_weights));
             }, "x"_a, "out"_a, "rows"_a, "row_weights"_a, "columns"_a, "column_weights"_a)
        .def("float_convolution", float_convolution, "x"_a, "out"_a, "weight"_a, "scale"_a.none(), "bias"_a, "groups"_a, "strides"_a, "pads"_a, "dilations"_a,
             "residual"_a, "low"_a, "high"_a)
        .def("float_depthwise", float_depthwise, "x"_a, "out"_a, "weight"_a, "bias"_a, "strides"_a, "pads"_a, "dilations"_a)
        .def("sampling", &BoundNetwork::sampling, "x"_a, "grid"_a, "out"_a, "groups"_a, "taps"_a, "outside"_a, "align"_a, "plane"_a.none())
        .def("pixel_sums", &BoundNetwork::pixel_sums, "x"_a, "out"_a, "places"_a)
        .def("float_difference", [](BoundNetwork &n, const Operands &a, const Operands &b, const Operands &out) {
                 n.float_difference(operand_of(a), operand_of(b), operand_of(out));
             }, "a"_a, "b"_a, "out"_a)
        .def("float_lookup", [](BoundNetwork &n, int64_t x, int64_t out, const Array &table) { n.float_lookup(x, out, table_of(table)); }, "x"_a,
             "out"_a, "table"_a)
        .def("top_k", [](BoundNetwork &n, const Operands &x, int64_t out, int64_t count, bool largest) { n.top_k(operand_of(x), out, count, largest); },
             "x"_a, "out"_a, "count"_a, "largest"_a)
        .def("choice", &BoundNetwork::choice, "x"_a, "indices"_a, "out"_a)
        .def("suppression", &BoundNetwork::suppression, "boxes"_a, "scores"_a, "out"_a, "most"_a, "overlap"_a, "least"_a, "centered"_a)
        .def("float_log", [](BoundNetwork &n, const Operands &x, const Operands &out) { n.float_log(operand_of(x), operand_of(out)); }, "x"_a, "out"_a)
        .def("float_floor", [](BoundNetwork &n, const Operands &x, const Operands &out, float divisor) { n.float_floor(operand_of(x), operand_of(out), divisor); },
             "x"_a, "out"_a, "divisor"_a)
        .def("float_quotient", [](BoundNetwork &n, const Operands &a, const Operands &b, const Operands &out) {
                 n.float_quotient(operand_of(a), operand_of(b), operand_of(out));
             }, "a"_a, "b"_a, "out"_a)
        .def("softmax", [](BoundNetwork &n, const Operands &x, const Operands &out, int64_t first, int64_t size) {
                 n.softmax(operand_of(x), operand_of(out), first, size);
             }, "x"_a, "out"_a, "first"_a, "size"_a)
        .def("group_linear", group_linear, "x"_a, "out"_a, "weight"_a, "bias"_a)
        .def("dequantize", [](BoundNetwork &n, int64_t x, float scale, int32_t zero, bool last, const std::optional<Array> &table, int64_t offset,
                              int64_t pitch) { n.dequantize(x, scale, zero, last, table ? table_of(*table) : nullptr, offset, pitch); },
             "x"_a, "scale"_a, "zero"_a, "last"_a, "table"_a.none(), "offset"_a, "pitch"_a)
        .def("finish", &BoundNetwork::finish, "results"_a)
        .def("time_steps", &BoundNetwork::time, "x"_a, "seconds"_a)
        .def("__call__", &BoundNetwork::call, "x"_a, "threads"_a = 1);
}
