// The kernels of a decoder alone, as Python functions: what the tests compare with rowwise.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <optional>

#include "transformer/encoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

// Rows [n, width] as the kernels take them.
struct Input : Register {
    int64_t n, width;
    Input(const Any &x, const char *name) {
        const auto *data = data_of<float>(x, name, 2);
        n = static_cast<int64_t>(x.shape(0)), width = static_cast<int64_t>(x.shape(1));
        if (!width) throw nb::value_error((std::string(name) + " has no columns").c_str());
        size(n, width);
        for (int64_t r = 0; r < n; ++r)
            std::fill_n(std::copy_n(data + r * width, width, real.data() + r * stride), stride - width, 0.0f);
    }
};

// As RowLinear has them.
Levels levels_of(const Given &given, bool positive) { return given ? Levels{given->first, given->second} : Levels{0, positive ? 0 : 128}; }

nb::tuple quantize_rows(const Any &x, bool positive, const std::string &isa, const Given &given) {
    const Input in(x, "x");
    choose(isa).rows->quantize(in.rows(), in.stride, levels_of(given, positive), in.n);
    return nb::make_tuple(array_of(in.bytes.data(), in.n, in.width, in.stride), array_of(in.scale.data(), in.n, 1, 1));
}

nb::tuple layer_norm(const Any &x, const Any &scale, const Any &bias, float epsilon, const std::string &isa, const Given &given) {
    const Input in(x, "x");
    const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1);
    if (static_cast<int64_t>(scale.shape(0)) != in.width || static_cast<int64_t>(bias.shape(0)) != in.width)
        throw nb::value_error("scale and bias have other lengths than a row");
    Buffer<float> scales(in.stride), biases(in.stride);
    std::fill_n(std::copy_n(s, in.width, scales.data()), in.stride - in.width, 0.0f);
    std::fill_n(std::copy_n(b, in.width, biases.data()), in.stride - in.width, 0.0f);
    Register out;
    out.size(in.n, in.width);
    choose(isa).rows->norm({in.width, scales.data(), biases.data(), epsilon, levels_of(given, false)}, in.real.data(), in.stride, out.rows(), in.n);
    return nb::make_tuple(array_of(out.real.data(), in.n, in.width, in.stride), array_of(out.bytes.data(), in.n, in.width, in.stride),
                          array_of(out.scale.data(), in.n, 1, 1));
}

// Queries [n, width] that look at keys and values, float32 [rows, 2 width].
struct Asked {
    Input in, kept;
    int64_t heads, size;
    Buffer<float> out;
    Asked(const Any &queries, const Any &keys_values, int64_t heads)
        : in(queries, "queries"), kept(keys_values, "keys_values"), heads(heads), size(in.width / std::max<int64_t>(heads, 1)),
          out(std::max<int64_t>(in.n * in.width, 1)) {
        if (heads < 1 || heads > in.width || in.width % (16 * heads) || kept.width != 2 * in.width || !kept.n)
            throw nb::value_error("queries, keys and values do not fit each other and the heads");
    }
    Buffer<Half> halves(const Isa &isa) const {
        Buffer<Half> found(kept.n * kept.stride);
        isa.rows->halve(kept.real.data(), kept.n * kept.stride, found.data());
        return found;
    }
    template <class T, class Look>
    void look(Look function, const T *rows) {
        Buffer<T> keys(in.width * round_up(kept.n, 16));
        transpose(rows, kept.stride, kept.n, in.width, keys.data());
        function(in.real.data(), in.stride, in.n, {keys.data(), rows + in.width, kept.n, kept.stride}, heads, size, out.data(), in.width);
    }
    nb::object result() const { return array_of(out.data(), in.n, in.width, in.width); }
};

nb::object attention(const Any &queries, const Any &keys_values, int64_t heads, const std::string &isa) {
    Asked asked(queries, keys_values, heads);
    const Buffer<Half> halves = asked.halves(choose(isa));
    std::vector<const Half *> keys;
    for (int64_t t = 0; t < asked.kept.n; ++t) keys.push_back(halves.data() + t * asked.kept.stride);
    for (int64_t r = 0; r < asked.in.n; ++r)
        choose(isa).rows->attend(asked.in.real.data() + r * asked.in.stride, keys.data(), asked.kept.n, heads, asked.size,
                                 asked.out.data() + r * asked.in.width);
    return asked.result();
}

// All queries look at the same keys and values, which are rounded to halves or not.
nb::object attention_to(const Any &queries, const Any &keys_values, int64_t heads, bool halved, const std::string &isa) {
    Asked asked(queries, keys_values, heads);
    if (halved)
        asked.look(choose(isa).rows->look_at_halves, asked.halves(choose(isa)).data());
    else
        asked.look(choose(isa).rows->look, asked.kept.real.data());
    return asked.result();
}

class PyRowLinear {
  public:
    PyRowLinear(const Any &weight, const Any &scale, const Any &shift, bool positive, const std::string &isa, const Given &given)
        : isa_(choose(isa)), linear_(isa_, weight, scale, shift, given, positive),
          ranked_(isa_, weight, scale, shift, given, positive, -INFINITY) {}

    nb::object call(const Any &x, bool relu, const std::optional<Any> &residual) const {
        const Input in = input(x);
        Register out;
        out.size(in.n, linear_.outputs());
        std::optional<Input> more;
        if (residual) more.emplace(*residual, "residual");
        if (more && (more->n != in.n || more->width != linear_.outputs())) throw nb::value_error("the residual has another shape");
        linear_.run(in.rows(), in.n, relu, more ? more->real.data() : nullptr, out.stride, out.real.data(), out.stride);
        return array_of(out.real.data(), in.n, linear_.outputs(), out.stride);
    }

    nb::tuple likeliest(const Any &x, int64_t count) const {
        const Input in = input(x);
        if (count < 1 || count > linear_.outputs()) throw nb::value_error("there are not so many columns");
        Buffer<float> panel(in.n * kPanel), values(in.n * count), sums(in.n * 16), largest(in.n);
        Buffer<int32_t> tokens(in.n * count);
        Buffer<double> norms(in.n);
        ranked_.rank(in.rows(), in.n, panel.data(), {count, values.data(), sums.data(), largest.data(), tokens.data()}, norms.data());
        return nb::make_tuple(array_of(values.data(), in.n, count, count), array_of(tokens.data(), in.n, count, count),
                              array_of(norms.data(), in.n, 1, 1));
    }

  private:
    Input input(const Any &x) const {
        Input in(x, "x");
        if (in.width != linear_.inputs()) throw nb::value_error("x has another width than the layer takes");
        isa_.rows->quantize(in.rows(), in.stride, linear_.levels(), in.n);
        return in;
    }

    const Isa &isa_;
    RowLinear linear_, ranked_;
};

}  // namespace
}  // namespace zoo

void bind_rowwise(nb::module_ &module) {
    using namespace zoo;
    module.def("quantize_rows", &quantize_rows, "x"_a, "positive"_a, "isa"_a, "given"_a.none() = nb::none());
    module.def("layer_norm", &layer_norm, "x"_a, "scale"_a, "bias"_a, "epsilon"_a, "isa"_a, "given"_a.none() = nb::none());
    module.def("attention", &attention, "queries"_a, "keys_values"_a, "heads"_a, "isa"_a);
    module.def("attention_to", &attention_to, "queries"_a, "keys_values"_a, "heads"_a, "halved"_a, "isa"_a);
    nb::class_<PyRowLinear>(module, "RowLinear")
        .def(nb::init<const Any &, const Any &, const Any &, bool, const std::string &, const Given &>(), "weight"_a, "scale"_a, "shift"_a,
             "positive"_a, "isa"_a, "given"_a.none() = nb::none())
        .def("__call__", &PyRowLinear::call, "x"_a, "relu"_a, "residual"_a.none())
        .def("likeliest", &PyRowLinear::likeliest, "x"_a, "count"_a);
}
