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

using ProductTuple = std::tuple<int32_t, int32_t, float, float, float, int32_t, int32_t, int32_t>;
using SumTuple = std::tuple<float, float, float, int32_t, int32_t>;

ByteSum sum_of(const SumTuple &s) { return {std::get<0>(s), std::get<1>(s), std::get<2>(s), std::get<3>(s), std::get<4>(s)}; }

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
    std::vector<nb::object> kept;  // weights

    nb::object call(const Array &x, int64_t threads) {
        const void *data = nullptr;
        if (x.ndim() < 1 || threads < 1 || threads > 1024) throw nb::value_error("an image network takes samples, and 1 to 1024 threads");
        data = floats() ? static_cast<const void *>(data_of<float>(x, "the input", x.ndim())) : data_of<uint8_t>(x, "the input", x.ndim());
        const auto n = static_cast<int64_t>(x.shape(0));
        if (!results() || static_cast<int64_t>(x.size()) != n * sample()) throw nb::value_error("the input has another size than the network's");
        auto *buffer = new Buffer<float>(std::max<int64_t>(n * results(), 1));
        nb::capsule owner(buffer, [](void *pointer) noexcept { delete static_cast<Buffer<float> *>(pointer); });
        {
            nb::gil_scoped_release release;
            run(data, n, buffer->data(), threads);
        }
        return nb::cast(nb::ndarray<nb::numpy, float>(buffer->data(), {static_cast<size_t>(n), static_cast<size_t>(results())}, owner));
    }
};

nb::object pack(const Array &weight, const Array &bias, const Array &scale, int64_t groups, int64_t pitch, bool dilated, const std::string &isa) {
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
    return nb::cast(nb::ndarray<nb::numpy, uint8_t>(buffer->data(), {static_cast<size_t>(bytes)}, owner));
}

void convolution(BoundNetwork &network, int64_t x, int64_t out, nb::object packed, const std::array<int64_t, 4> &weight, int64_t groups,
                 int64_t pitch, Pair strides, Sides pads, Pair dilations, int32_t fill, std::array<int32_t, 3> bytes,
                 const std::optional<SumTuple> &sum, int64_t other, bool other_first) {
    const auto array = nb::cast<Array>(packed);
    const uint8_t *data = data_of<uint8_t>(array, "packed", 1);
    const SumArguments adds = sum ? SumArguments{sum_of(*sum), other, other_first} : SumArguments{};
    network.convolution(x, out, shape_of(weight, groups, pitch, dilations[1] > 1), data, static_cast<int64_t>(array.size()), strides, pads,
                        dilations, fill, {bytes[0], bytes[1], bytes[2]}, sum ? &adds : nullptr);
    network.kept.push_back(packed);
}

}  // namespace
}  // namespace zoo

void bind_image_network(nb::module_ &module) {
    using namespace zoo;
    module.def("pack_convolution", pack, "weight"_a, "bias"_a, "scale"_a, "groups"_a, "pitch"_a, "dilated"_a, "isa"_a = "");
    module.def("product_limit", product_limit, "isa"_a = "", "seconds"_a = 0.1, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<BoundNetwork>(module, "ImageNetwork")
        .def(nb::init<std::string>(), "isa"_a = "")
        .def_prop_ro("isa", &BoundNetwork::isa)
        .def_prop_ro("arena", &BoundNetwork::arena)
        .def("tensor", &BoundNetwork::tensor)
        .def("pixels", &BoundNetwork::pixels)
        .def("convolution", convolution, "x"_a, "out"_a, "packed"_a, "weight"_a, "groups"_a, "pitch"_a, "strides"_a, "pads"_a, "dilations"_a,
             "fill"_a, "bytes"_a, "sum"_a.none(), "other"_a, "other_first"_a)
        .def("addition", [](BoundNetwork &n, int64_t a, int64_t b, int64_t out, const SumTuple &s) { n.addition(a, b, out, sum_of(s)); })
        .def("product", [](BoundNetwork &n, int64_t x, int64_t gate, int64_t out, const ProductTuple &p) {
            n.product(x, gate, out, std::apply([](auto... numbers) { return ByteProduct{numbers...}; }, p));
        })
        .def("max_pool", &BoundNetwork::max_pool)
        .def("average_pool", [](BoundNetwork &n, int64_t x, int64_t out, Pair kernel, Pair strides, Sides pads, float x_scale, int32_t x_zero,
                                float scale, float zero, bool padded) {
            n.average_pool(x, out, kernel, strides, pads, {x_scale, 0, scale, zero, x_zero}, padded);
        })
        .def("global_average", &BoundNetwork::global_average)
        .def("lookup", [](BoundNetwork &n, int64_t x, int64_t out, const Array &table) {
            const uint8_t *data = data_of<uint8_t>(table, "table", table.ndim());
            if (table.size() == 0 || table.size() % 256 != 0) throw nb::value_error("a lookup has tables of 256 bytes");
            n.lookup(x, out, data, static_cast<int64_t>(table.size() / 256));
        })
        .def("concatenation", &BoundNetwork::concatenation)
        .def("selection", &BoundNetwork::selection)
        .def("resampling", &BoundNetwork::resampling)
        .def("dequantize", &BoundNetwork::dequantize)
        .def("finish", &BoundNetwork::finish)
        .def("time_steps", [](const BoundNetwork &n, const Array &x, double seconds) {
            const auto size = static_cast<int64_t>(x.size());
            const void *data = n.floats() ? static_cast<const void *>(data_of<float>(x, "the input", x.ndim())) : data_of<uint8_t>(x, "the input", x.ndim());
            if (!n.results() || size != n.sample()) throw nb::value_error("wanted one sample");
            return n.time_steps(data, seconds);
        })
        .def("__call__", &BoundNetwork::call, "x"_a, "threads"_a = 1);
}
