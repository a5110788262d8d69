// The layers as Python objects: arguments checked, weights packed once, no lock held while computing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "isa/arrays.h"
#include "isa/dispatch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

using Floats = nb::ndarray<nb::numpy, float, nb::device::cpu>;

// What a thread computes in; it stays with the thread, so that small batches need no allocation.
struct Scratch {
    Buffer<uint32_t> rows;
    Buffer<int16_t> numbers;
    Buffer<uint8_t> layers[2];
    Buffer<float> wide;
};
thread_local Scratch scratch;

constexpr int64_t kBlock = 256;  // samples that go through all layers together: weights are read once a block, activations stay in L2

class ParallelEmbedding {
  public:
    ParallelEmbedding(Array table, const Array &columns, const Array &offsets, const Array &rows, const Array &weight, const Array &scale,
                      const Array &bias, const Array &number_scale, int shift, const std::optional<Array> &wide, const std::string &isa)
        : isa_(choose_isa(isa)), table_(std::move(table)) {
        const auto *column = data_of<int32_t>(columns, "columns", 1), *offset = data_of<int32_t>(offsets, "offsets", 1);
        const auto *count = data_of<int32_t>(rows, "rows", 1);
        fields_ = static_cast<int64_t>(columns.shape(0)), width_ = static_cast<int64_t>(scale.shape(0));
        numbers_ = static_cast<int64_t>(number_scale.shape(0));
        const int64_t stride = round_up(width_, kColumns), pairs = (numbers_ + 1) / 2, lanes = isa_.lanes;
        embedding_.table = data_of<uint8_t>(table_, "table", 2);
        const auto *w = data_of<int16_t>(weight, "weight", 2);
        const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1),
                   *t = data_of<float>(number_scale, "number_scale", 1);
        const int64_t height = static_cast<int64_t>(table_.shape(0));
        bool fits = fields_ >= 1 && fields_ <= kMaxFields && static_cast<int64_t>(table_.shape(1)) == stride && shift >= 0 && shift <= 14;
        for (const Array *array : {&offsets, &rows}) fits = fits && static_cast<int64_t>(array->shape(0)) == fields_;
        fits = fits && static_cast<int64_t>(bias.shape(0)) == width_ && static_cast<int64_t>(weight.shape(0)) == numbers_ &&
               static_cast<int64_t>(weight.shape(1)) == width_;
        for (int64_t f = 0; fits && f < fields_; ++f)
            fits = column[f] >= 0 && offset[f] >= 0 && count[f] >= 1 && int64_t{offset[f]} + count[f] <= height;
        if (wide) {
            const auto *values = data_of<float>(*wide, "wide", 1);
            fits = fits && static_cast<int64_t>(wide->shape(0)) == height;
            if (fits) wide_.assign(values, values + height);
        }
        if (!fits) throw nb::value_error("the arrays of ParallelEmbedding do not fit each other");
        columns_.assign(column, column + fields_), offsets_.assign(offset, offset + fields_), rows_.assign(count, count + fields_);
        number_scale_.assign(t, t + numbers_);
        weight_.reserve(stride * pairs * 2), scale_.reserve(stride), bias_.reserve(stride);
        // groups of 4 * lanes columns, [group][pair][i][lane][2] and [group][i][lane]: column 4 * lane + i of the group
        for (int64_t j = 0; j < stride; ++j) {
            const int64_t group = j / (4 * lanes), lane = j % (4 * lanes) / 4, i = j % 4;
            const int64_t at = (group * 4 + i) * lanes + lane;
            scale_[at] = j < width_ ? s[j] : 0, bias_[at] = j < width_ ? b[j] : 0;
            for (int64_t m = 0; m < 2 * pairs; ++m)
                weight_[(((group * pairs + m / 2) * 4 + i) * lanes + lane) * 2 + m % 2] =
                    m < numbers_ && j < width_ ? w[m * width_ + j] : 0;
        }
        embedding_.stride = stride, embedding_.fields = fields_, embedding_.pairs = pairs, embedding_.shift = shift;
        embedding_.weight = weight_.data(), embedding_.scale = scale_.data(), embedding_.bias = bias_.data();
        embedding_.wide = wide_.empty() ? nullptr : wide_.data();
    }

    // ids [n, columns] int32 or int64, numbers float32 [n, M]; every id is checked before anything else is read.
    struct Input {
        const int32_t *ids32 = nullptr;
        const int64_t *ids64 = nullptr;
        const float *numbers = nullptr;
        int64_t count = 0, columns = 0;
    };

    Input input(const Array &ids, const std::optional<Array> &numbers) const {
        Input in;
        if (ids.dtype() == nb::dtype<int64_t>())
            in.ids64 = data_of<int64_t>(ids, "ids", 2);
        else
            in.ids32 = data_of<int32_t>(ids, "ids", 2);
        in.count = static_cast<int64_t>(ids.shape(0)), in.columns = static_cast<int64_t>(ids.shape(1));
        if (*std::max_element(columns_.begin(), columns_.end()) >= in.columns)
            throw nb::value_error("ids have too few columns");
        if (numbers) in.numbers = data_of<float>(*numbers, "numbers", 2);
        const int64_t width = numbers ? static_cast<int64_t>(numbers->shape(1)) : 0;
        if (width != numbers_ || (numbers && static_cast<int64_t>(numbers->shape(0)) != in.count))
            throw nb::value_error("numbers have another shape than the ids and the layer want");
        return in;
    }

    // The table row of field f in sample s. Raises IndexError, naming the place, where the id is no row of its field.
    // It is read once: nobody can change it after the check.
    uint32_t row(const Input &in, int64_t s, int64_t f) const {
        const int64_t at = s * in.columns + columns_[f];
        const int64_t id = in.ids32 ? __atomic_load_n(in.ids32 + at, __ATOMIC_RELAXED) : __atomic_load_n(in.ids64 + at, __ATOMIC_RELAXED);
        if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows_[f]))
            throw nb::index_error(("found id " + std::to_string(id) + " in row " + std::to_string(s) + ", column " +
                                   std::to_string(columns_[f]) + "; wanted 0 to " + std::to_string(rows_[f] - 1))
                                      .c_str());
        return static_cast<uint32_t>(offsets_[f] + id);
    }

    // Nothing is computed before all ids are known to be right.
    void check(const Input &in) const {
        for (int64_t s = 0; s < in.count; ++s)
            for (int64_t f = 0; f < fields_; ++f) row(in, s, f);
    }

    // Samples [first, first + n) of checked input.
    void run(const Input &in, int64_t first, int64_t n, uint8_t *hidden, int64_t hidden_stride, float *wide) const {
        const int64_t pairs = embedding_.pairs;
        scratch.rows.reserve((kBlock + 1) * fields_), scratch.numbers.reserve(kBlock * pairs * 2);
        for (int64_t start = 0; start < n; start += kBlock) {
            const int64_t count = std::min(kBlock, n - start), begin = first + start;
            const int64_t last = std::min(begin + count, in.count - 1);  // one more, to prefetch
            uint32_t *next = scratch.rows.data();
            for (int64_t s = begin; s <= begin + count; ++s)
                for (int64_t f = 0; f < fields_; ++f) *next++ = row(in, std::min(s, last), f);
            int16_t *quantized = scratch.numbers.data();
            for (int64_t s = begin; s < begin + count; ++s) {
                for (int64_t m = 0; m < numbers_; ++m) {
                    const float value = in.numbers[s * numbers_ + m] * number_scale_[m];
                    const float limit = kNumberLimit;
                    const float clipped = value >= limit ? limit : value >= -limit ? value : value < -limit ? -limit : 0;  // NaN: 0
                    *quantized++ = static_cast<int16_t>(std::lrintf(clipped));
                }
                if (numbers_ % 2) *quantized++ = 0;
            }
            isa_.embed(embedding_, scratch.rows.data(), scratch.numbers.data(), count, hidden + start * hidden_stride, hidden_stride,
                       wide ? wide + start : nullptr, 1);
        }
    }

    nb::tuple call(const Array &ids, const std::optional<Array> &numbers) const {
        const Input in = input(ids, numbers);
        const int64_t stride = embedding_.stride;
        auto *hidden = new Buffer<uint8_t>(std::max<int64_t>(in.count * stride, 1));
        nb::capsule owner(hidden, [](void *pointer) noexcept { delete static_cast<Buffer<uint8_t> *>(pointer); });
        auto *wide = new Buffer<float>(std::max<int64_t>(in.count, 1));
        nb::capsule wide_owner(wide, [](void *pointer) noexcept { delete static_cast<Buffer<float> *>(pointer); });
        {
            nb::gil_scoped_release unlocked;
            check(in);
            if (embedding_.wide == nullptr) std::fill_n(wide->data(), in.count, 0.0f);
            run(in, 0, in.count, hidden->data(), stride, wide->data());
            if (stride != width_)  // close the gaps, in place
                for (int64_t s = 1; s < in.count; ++s)
                    std::memmove(hidden->data() + s * width_, hidden->data() + s * stride, static_cast<size_t>(width_));
        }
        const size_t n = static_cast<size_t>(in.count);
        return nb::make_tuple(nb::ndarray<nb::numpy, uint8_t>(hidden->data(), {n, static_cast<size_t>(width_)}, owner),
                              nb::ndarray<nb::numpy, float>(wide->data(), {n, 1}, wide_owner));
    }

    bool wide() const { return embedding_.wide != nullptr; }
    int64_t stride() const { return embedding_.stride; }
    int64_t width() const { return width_; }
    const char *isa() const { return isa_.name; }

  private:
    const Isa &isa_;
    Array table_;  // kept alive; it may be a file's mapping that other processes share
    Embedding embedding_{};
    int64_t fields_ = 0, width_ = 0, numbers_ = 0;
    std::vector<int32_t> columns_, offsets_, rows_;
    std::vector<float> number_scale_, wide_;
    Buffer<int16_t> weight_;
    Buffer<float> scale_, bias_;
};

class LinearLayer {
  public:
    LinearLayer(const Array &weight, const Array &bias, const Array &scale, std::optional<int> zero_point, int low, const std::string &isa)
        : isa_(choose_isa(isa)) {
        const auto *w = data_of<int8_t>(weight, "weight", 2);
        const auto *b = data_of<int32_t>(bias, "bias", 1);
        const auto *s = data_of<float>(scale, "scale", 1);
        linear_.inputs = static_cast<int64_t>(weight.shape(0)), linear_.outputs = static_cast<int64_t>(weight.shape(1));
        if (!linear_.inputs || !linear_.outputs || static_cast<int64_t>(bias.shape(0)) != linear_.outputs ||
            static_cast<int64_t>(scale.shape(0)) != linear_.outputs)
            throw nb::value_error("the arrays of a linear layer do not fit each other");
        weight_.reserve(isa_.packed_bytes(linear_.inputs, linear_.outputs));
        isa_.pack_linear(w, linear_.inputs, linear_.outputs, weight_.data());
        const int64_t padded = round_up(linear_.outputs, kColumns);
        bias_.reserve(padded), scale_.reserve(padded);
        std::fill_n(bias_.data(), padded, 0), std::fill_n(scale_.data(), padded, 0.0f);
        std::copy_n(b, linear_.outputs, bias_.data()), std::copy_n(s, linear_.outputs, scale_.data());
        linear_.weight = weight_.data(), linear_.bias = bias_.data(), linear_.scale = scale_.data();
        linear_.float_output = !zero_point, linear_.zero_point = zero_point.value_or(0), linear_.low = low;
    }

    nb::object call(const Array &x) const {
        const auto *input = data_of<uint8_t>(x, "x", 2);
        const int64_t n = static_cast<int64_t>(x.shape(0)), size = linear_.float_output ? 4 : 1;
        if (static_cast<int64_t>(x.shape(1)) != linear_.inputs) throw nb::value_error("x has another width than the layer takes");
        auto *out = new Buffer<uint8_t>(std::max<int64_t>(n * linear_.outputs * size, 1));
        nb::capsule owner(out, [](void *pointer) noexcept { delete static_cast<Buffer<uint8_t> *>(pointer); });
        {
            nb::gil_scoped_release unlocked;
            int64_t stride = linear_.inputs;
            Buffer<uint8_t> padded;
            if (stride % 4) {  // rows are read four inputs at a time
                stride = round_up(stride, 4);
                padded.reserve(n * stride);
                std::fill_n(padded.data(), n * stride, uint8_t{0});
                for (int64_t s = 0; s < n; ++s) std::copy_n(input + s * linear_.inputs, linear_.inputs, padded.data() + s * stride);
                input = padded.data();
            }
            isa_.linear(linear_, RowEpilogue{}, input, stride, n, out->data(), linear_.outputs);
        }
        const size_t rows = static_cast<size_t>(n), columns = static_cast<size_t>(linear_.outputs);
        if (linear_.float_output) return nb::cast(nb::ndarray<nb::numpy, float>(out->data(), {rows, columns}, owner));
        return nb::cast(nb::ndarray<nb::numpy, uint8_t>(out->data(), {rows, columns}, owner));
    }

    void run(const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride) const {
        isa_.linear(linear_, RowEpilogue{}, x, x_stride, n, out, out_stride);
    }

    int64_t inputs() const { return linear_.inputs; }
    int64_t outputs() const { return linear_.outputs; }
    bool float_output() const { return linear_.float_output; }
    const char *isa() const { return isa_.name; }

  private:
    const Isa &isa_;
    Linear linear_{};
    Buffer<uint8_t> weight_;
    Buffer<int32_t> bias_;
    Buffer<float> scale_;
};

// A whole click model: embedding, linear layers down to one float, plus the wide sum, then the sigmoid.
class ClickNetwork {
  public:
    ClickNetwork(const ParallelEmbedding &embedding, std::vector<const LinearLayer *> layers, bool sigmoid)
        : embedding_(embedding), layers_(std::move(layers)), sigmoid_(sigmoid) {
        int64_t width = embedding_.width();
        if (std::count(layers_.begin(), layers_.end(), nullptr))
            throw nb::type_error("the layers of the network are Linear objects, not None");
        bool fits = !layers_.empty() && layers_.back()->float_output() && layers_.back()->outputs() == 1;
        for (const LinearLayer *layer : layers_) {
            fits = fits && layer->inputs() == width && layer->float_output() == (layer == layers_.back());
            width = layer->outputs();
            widest_ = std::max(widest_, round_up(width, kColumns));
        }
        if (!fits) throw nb::value_error("the layers of the network do not follow one another down to one float");
        widest_ = std::max(widest_, embedding_.stride());
    }

    nb::object call(const Array &ids, const std::optional<Array> &numbers) const {
        const ParallelEmbedding::Input in = embedding_.input(ids, numbers);
        auto *out = new Buffer<float>(std::max<int64_t>(in.count, 1));
        nb::capsule owner(out, [](void *pointer) noexcept { delete static_cast<Buffer<float> *>(pointer); });
        {
            nb::gil_scoped_release unlocked;
            embedding_.check(in);
            for (auto &layer : scratch.layers) layer.reserve(std::min(in.count, kBlock) * widest_);
            scratch.wide.reserve(kBlock);
            for (int64_t first = 0; first < in.count; first += kBlock)
                run(in, first, std::min(kBlock, in.count - first), out->data() + first);
        }
        return nb::cast(nb::ndarray<nb::numpy, float>(out->data(), {static_cast<size_t>(in.count), 1}, owner));
    }

  private:
    void run(const ParallelEmbedding::Input &in, int64_t first, int64_t n, float *out) const {
        uint8_t *x = scratch.layers[0].data(), *y = scratch.layers[1].data();
        int64_t stride = embedding_.stride();
        float *wide = scratch.wide.data();
        embedding_.run(in, first, n, x, stride, wide);
        for (const LinearLayer *layer : layers_) {
            if (layer->float_output()) {
                layer->run(x, stride, n, out, 1);
            } else {
                const int64_t next = round_up(layer->outputs(), kColumns);
                layer->run(x, stride, n, y, next);
                std::swap(x, y), stride = next;
            }
        }
        for (int64_t s = 0; s < n; ++s) {
            const float logit = embedding_.wide() ? out[s] + wide[s] : out[s];
            out[s] = sigmoid_ ? 1.0f / (1.0f + std::exp(-logit)) : logit;
        }
    }

    const ParallelEmbedding &embedding_;
    std::vector<const LinearLayer *> layers_;
    bool sigmoid_;
    int64_t widest_ = 0;
};

}  // namespace
}  // namespace zoo

void bind_click_network(nb::module_ &module) {
    using namespace zoo;
    nb::class_<ParallelEmbedding>(module, "ParallelEmbedding")
        .def(nb::init<Array, const Array &, const Array &, const Array &, const Array &, const Array &, const Array &, const Array &, int,
                      const std::optional<Array> &, const std::string &>(),
             "table"_a, "columns"_a, "offsets"_a, "rows"_a, "weight"_a, "scale"_a, "bias"_a, "number_scale"_a, "shift"_a, "wide"_a.none(),
             "isa"_a)
        .def("__call__", &ParallelEmbedding::call, "ids"_a, "numbers"_a.none())
        .def_prop_ro("isa", &ParallelEmbedding::isa);
    nb::class_<LinearLayer>(module, "Linear")
        .def(nb::init<const Array &, const Array &, const Array &, std::optional<int>, int, const std::string &>(), "weight"_a, "bias"_a,
             "scale"_a, "zero_point"_a.none(), "low"_a, "isa"_a)
        .def("__call__", &LinearLayer::call, "x"_a)
        .def_prop_ro("isa", &LinearLayer::isa);
    nb::class_<ClickNetwork>(module, "ClickNetwork")
        .def(nb::init<const ParallelEmbedding &, std::vector<const LinearLayer *>, bool>(), "embedding"_a, "layers"_a, "sigmoid"_a,
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("__call__", &ClickNetwork::call, "ids"_a, "numbers"_a.none());
}
