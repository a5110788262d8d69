// Python bindings of the row kernels (isa/vectors/row_kernels.h) and of RowLinear alone: the tests compare them with transformer/reference/.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "transformer/layers/encoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

// Rows [n, width] as the kernels take them.
struct Input : Register {
    int64_t n, width;
    Input(const Array &x, const char *name) {
        const auto *data = data_of<float>(x, name, 2);
        n = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
        if (!width) throw nb::value_error((std::string(name) + " has no columns").c_str());
        size(n, width);
        for (int64_t r = 0; r < n; ++r)
            std::fill_n(std::copy_n(data + r * width, width, values.data() + r * stride), stride - width, 0.0f);
    }
};

// As RowLinear chooses them.
QParams qparams_of(const StaticQParams &qparams, bool nonnegative) {
    return qparams ? QParams{qparams->first, qparams->second} : QParams{0, nonnegative ? 0 : 128};
}

std::tuple<NewArray<uint8_t>, NewArray<float>> quantize_rows(const Array &x, bool nonnegative, const std::string &isa, const StaticQParams &qparams) {
    const Input in(x, "x");
    choose_isa(isa).rows->quantize_rows(in.rows(), in.stride, qparams_of(qparams, nonnegative), in.n);
    return {array_of(in.quantized.data(), in.n, in.width, in.stride), array_of(in.scale.data(), in.n, 1, 1)};
}

std::tuple<NewArray<float>, NewArray<uint8_t>, NewArray<float>> layer_norm(const Array &x, const Array &scale, const Array &bias, float epsilon,
                                                                           const std::string &isa, const StaticQParams &qparams) {
    const Input in(x, "x");
    const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1);
    if (static_cast<int64_t>(scale.shape(0)) != in.width || static_cast<int64_t>(bias.shape(0)) != in.width)
        throw nb::value_error("scale and bias have other lengths than a row");
    Buffer<float> scales(in.stride), biases(in.stride);
    std::fill_n(std::copy_n(s, in.width, scales.data()), in.stride - in.width, 0.0f);
    std::fill_n(std::copy_n(b, in.width, biases.data()), in.stride - in.width, 0.0f);
    Register out;
    out.size(in.n, in.width);
    const LayerNorm norm{in.width, scales.data(), biases.data(), epsilon, qparams_of(qparams, false)};
    choose_isa(isa).rows->layer_norm(norm, in.values.data(), in.stride, out.rows(), in.n);
    return {array_of(out.values.data(), in.n, in.width, in.stride), array_of(out.quantized.data(), in.n, in.width, in.stride),
            array_of(out.scale.data(), in.n, 1, 1)};
}

// The arguments and the result of attention: queries [n, width], keys and values [rows, 2 width], all float32.
struct AttentionCall {
    Input in, kv;
    int64_t heads, size;
    Buffer<float> out;
    AttentionCall(const Array &queries, const Array &keys_values, int64_t heads)
        : in(queries, "queries"), kv(keys_values, "keys_values"), heads(heads), size(in.width / std::max<int64_t>(heads, 1)),
          out(std::max<int64_t>(in.n * in.width, 1)) {
        if (heads < 1 || heads > in.width || in.width % (16 * heads) || kv.width != 2 * in.width || !kv.n)
            throw nb::value_error("queries, keys and values do not fit each other and the heads");
    }
    Buffer<Float16> kv_float16(const Isa &isa) const {
        Buffer<Float16> rounded(kv.n * kv.stride);
        isa.rows->to_float16(kv.values.data(), kv.n * kv.stride, rounded.data());
        return rounded;
    }
    template <class T, class Attention>
    void run(Attention function, const T *rows) {
        Buffer<T> keys(in.width * round_up(kv.n, 16));
        transpose(rows, kv.stride, kv.n, in.width, keys.data());
        function(in.values.data(), in.stride, in.n, {keys.data(), rows + in.width, kv.n, kv.stride, size}, heads, size, out.data(), in.width);
    }
    NewArray<float> result() const { return array_of(out.data(), in.n, in.width, in.width); }
};

// Decoder self-attention, one query at a time over a float16 cache.
NewArray<float> self_attention(const Array &queries, const Array &keys_values, int64_t heads, const std::string &isa,
                               const std::optional<Array> &bias) {
    AttentionCall call(queries, keys_values, heads);
    const int64_t reach = bias && bias->ndim() == 2 ? static_cast<int64_t>(bias->shape(1)) : 0;
    if (bias && !reach) throw nb::value_error("the bias is of no position");
    const float *rows = bias ? finite_table(*bias, "bias", heads, reach, "self-attention") : nullptr;
    const Buffer<Float16> cache = call.kv_float16(choose_isa(isa));
    std::vector<const Float16 *> keys;
    for (int64_t t = 0; t < call.kv.n; ++t) keys.push_back(cache.data() + t * call.kv.stride);
    for (int64_t r = 0; r < call.in.n; ++r)
        choose_isa(isa).rows->self_attention(call.in.values.data() + r * call.in.stride, keys.data(), call.kv.n, nullptr, 0, heads, call.size, rows,
                                             reach, call.out.data() + r * call.in.width);
    return call.result();
}

// All queries over the same keys and values, which are rounded to float16 if asked.
NewArray<float> attention(const Array &queries, const Array &keys_values, int64_t heads, bool float16, const std::string &isa) {
    AttentionCall call(queries, keys_values, heads);
    if (float16)
        call.run(choose_isa(isa).rows->attention_float16, call.kv_float16(choose_isa(isa)).data());
    else
        call.run(choose_isa(isa).rows->attention, call.kv.values.data());
    return call.result();
}

class PyRowLinear {
  public:
    PyRowLinear(const Array &weight, const Array &scale, const Array &bias, bool nonnegative, const std::string &isa,
                const StaticQParams &qparams)
        : isa_(choose_isa(isa)), linear_(isa_, weight, scale, bias, qparams, nonnegative),
          vocabulary_(isa_, weight, scale, bias, qparams, nonnegative, -INFINITY) {}

    NewArray<float> call(const Array &x, bool relu, const std::optional<Array> &residual) const {
        const Input in = input(x);
        Register out;
        out.size(in.n, linear_.outputs());
        std::optional<Input> added;
        if (residual) added.emplace(*residual, "residual");
        if (added && (added->n != in.n || added->width != linear_.outputs())) throw nb::value_error("the residual has another shape");
        linear_.run(in.rows(), in.n, relu, added ? added->values.data() : nullptr, out.stride, out.values.data(), out.stride);
        return array_of(out.values.data(), in.n, linear_.outputs(), out.stride);
    }

    std::tuple<NewArray<float>, NewArray<int32_t>, NewArray<double>> top_k(const Array &x, int64_t k) const {
        const Input in = input(x);
        if (k < 1 || k > linear_.outputs()) throw nb::value_error("there are not so many columns");
        Buffer<float> logits(in.n * kPanel), values(in.n * k), exp_sums(in.n * 16), maxima(in.n);
        Buffer<int32_t> tokens(in.n * k);
        Buffer<double> log_sum_exp(in.n);
        vocabulary_.top_k(in.rows(), in.n, logits.data(), {k, values.data(), exp_sums.data(), maxima.data(), tokens.data()},
                          log_sum_exp.data());
        return {array_of(values.data(), in.n, k, k), array_of(tokens.data(), in.n, k, k), array_of(log_sum_exp.data(), in.n, 1, 1)};
    }

  private:
    Input input(const Array &x) const {
        Input in(x, "x");
        if (in.width != linear_.inputs()) throw nb::value_error("x has another width than the layer takes");
        isa_.rows->quantize_rows(in.rows(), in.stride, linear_.qparams(), in.n);
        return in;
    }

    const Isa &isa_;
    RowLinear linear_, vocabulary_;
};

}  // namespace
}  // namespace zoo

void bind_row_kernels(nb::module_ &module) {
    using namespace zoo;
    module.def("quantize_rows", &quantize_rows, "x"_a, "nonnegative"_a, "isa"_a, "qparams"_a.none() = nb::none());
    module.def("layer_norm", &layer_norm, "x"_a, "scale"_a, "bias"_a, "epsilon"_a, "isa"_a, "qparams"_a.none() = nb::none());
    module.def("self_attention", &self_attention, "queries"_a, "keys_values"_a, "heads"_a, "isa"_a, "bias"_a.none() = nb::none());
    module.def("attention", &attention, "queries"_a, "keys_values"_a, "heads"_a, "float16"_a, "isa"_a);
    nb::class_<PyRowLinear>(module, "RowLinear")
        .def(nb::init<const Array &, const Array &, const Array &, bool, const std::string &, const StaticQParams &>(), "weight"_a,
             "scale"_a, "bias"_a, "nonnegative"_a, "isa"_a, "qparams"_a.none() = nb::none())
        .def("__call__", &PyRowLinear::call, "x"_a, "relu"_a, "residual"_a.none())
        .def("top_k", &PyRowLinear::top_k, "x"_a, "k"_a);
}
