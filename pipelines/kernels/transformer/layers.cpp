// The steps that an encoder and a decoder share.
#include "transformer/layers.h"

#include <cmath>

namespace nb = nanobind;

namespace zoo {

void refuse(const char *step, const std::string &why) { throw nb::value_error((std::string(step) + ": " + why).c_str()); }

namespace {

constexpr int64_t kMaxRegisters = 256;

std::string text(int64_t value) { return std::to_string(value); }

// A 1-D float32 array of this length, finite, padded with zeros to whole 64.
Buffer<float> padded(const Any &array, const char *name, int64_t count, const char *step) {
    const float *data = data_of<float>(array, name, 1);
    if (static_cast<int64_t>(array.shape(0)) != count)
        refuse(step, std::string(name) + " has " + text(static_cast<int64_t>(array.shape(0))) + " elements, wanted " + text(count));
    if (!std::all_of(data, data + count, [](float x) { return std::isfinite(x); })) refuse(step, std::string(name) + " is not finite");
    const int64_t room = round_up(count, kColumns);
    Buffer<float> made(room);
    std::fill_n(std::copy_n(data, count, made.data()), room - count, 0.0f);
    return made;
}

}  // namespace

RowLinear::RowLinear(const Isa &isa, const Any &weight, const Any &scale, const Any &shift, const Given &given, bool positive, float padding)
    : isa_(isa) {
    levels_.zero = positive ? 0 : 128;
    if (given) levels_ = {given->first, given->second};
    if (given && (!(levels_.scale > 0) || !std::isfinite(levels_.scale) || levels_.zero < 0 || levels_.zero > 255))
        refuse("linear", "inputs quantized by scale " + std::to_string(levels_.scale) + " and zero point " + text(levels_.zero));
    const auto *w = data_of<int8_t>(weight, "weight", 2);
    const int64_t inputs = static_cast<int64_t>(weight.shape(0));
    outputs_ = static_cast<int64_t>(weight.shape(1));
    if (!inputs || !outputs_ || inputs > kMaxWidth) refuse("linear", "weights of " + text(inputs) + " x " + text(outputs_));
    scale_ = padded(scale, "scale", outputs_, "linear"), shift_ = padded(shift, "shift", outputs_, "linear");
    const int64_t all = round_up(outputs_, kColumns);
    std::fill(shift_.data() + outputs_, shift_.data() + all, padding);
    std::vector<int8_t> wide(static_cast<size_t>(inputs * all));
    std::vector<int64_t> sums(static_cast<size_t>(all)), magnitudes(static_cast<size_t>(all));
    for (int64_t k = 0; k < inputs; ++k)
        for (int64_t j = 0; j < outputs_; ++j) {
            const int8_t value = wide[static_cast<size_t>(k * all + j)] = w[k * outputs_ + j];
            sums[static_cast<size_t>(j)] += value, magnitudes[static_cast<size_t>(j)] += std::abs(value);
        }
    bias_.reserve(all);
    for (int64_t j = 0; j < all; ++j) {
        if (255 * magnitudes[static_cast<size_t>(j)] >= INT32_MAX) refuse("linear", "its sums can overflow 32 bits");
        bias_[j] = static_cast<int32_t>(-levels_.zero * sums[static_cast<size_t>(j)]);
    }
    weight_.reserve(isa.packed_bytes(inputs, all));
    isa.pack_linear(wide.data(), inputs, all, weight_.data());
    linear_.inputs = inputs, linear_.outputs = all, linear_.weight = weight_.data(), linear_.bias = bias_.data();
    linear_.scale = scale_.data(), linear_.real = true;
}

void RowLinear::run(const Rows &in, int64_t n, bool relu, const float *residual, int64_t residual_stride, float *out,
                    int64_t out_stride) const {
    isa_.linear(linear_, {in.scale, shift_.data(), residual, residual_stride, relu}, in.bytes, in.stride, n, out, out_stride);
}

void RowLinear::rank(const Rows &in, int64_t n, float *panel, const Ranking &ranking, double *norms) const {
    std::fill_n(ranking.values, n * ranking.count, -INFINITY), std::fill_n(ranking.tokens, n * ranking.count, -1);
    std::fill_n(ranking.largest, n, -INFINITY), std::fill_n(ranking.sums, n * 16, 0.0f);
    Linear part = linear_;
    for (int64_t first = 0; first < outputs_; first += kPanel) {
        part.outputs = std::min(kPanel, linear_.outputs - first);
        part.weight = weight_.data() + isa_.packed_bytes(linear_.inputs, first + kColumns) - isa_.packed_bytes(linear_.inputs, kColumns);
        part.bias = linear_.bias + first, part.scale = linear_.scale + first;
        isa_.linear(part, {in.scale, shift_.data() + first, nullptr, 0, false}, in.bytes, in.stride, n, panel, kPanel);
        isa_.rows->rank(panel, kPanel, first, std::min(kPanel, outputs_ - first), ranking, n);
    }
    for (int64_t r = 0; r < n; ++r) {
        norms[r] = std::log(static_cast<double>(isa_.rows->rank_sum(ranking.sums + r * 16))) + static_cast<double>(ranking.largest[r]);
        if (!std::isfinite(in.scale[r]) || !std::isfinite(norms[r])) norms[r] = NAN;
    }
}

std::vector<Register> Layers::registers(int64_t rows) const {
    std::vector<Register> made(widest_.size());
    for (size_t i = 0; i < made.size(); ++i) made[i].size(rows, widest_[i]);
    return made;
}

void Layers::open(const char *step) const {
    if (complete_) refuse(step, "there was a last step already");
    if (!positions_) refuse(step, "the first step is the embedding");
}

const Layers::Value &Layers::read(int64_t index, const char *step) const {
    if (index < 0 || index >= static_cast<int64_t>(values_.size()) || !values_[static_cast<size_t>(index)].width)
        refuse(step, "register " + text(index) + " holds nothing yet");
    return values_[static_cast<size_t>(index)];
}

Layers::Step &Layers::append(Kind kind, int64_t in, int64_t out, int64_t width, bool positive) {
    if (out < 0 || out >= kMaxRegisters) refuse("step", "there is no register " + text(out));
    if (out == in) refuse("step", "reads and writes register " + text(out));
    if (width < 1 || width > 3 * kMaxWidth) refuse("step", "a width of " + text(width));
    const auto at = static_cast<size_t>(out);
    if (at >= values_.size()) values_.resize(at + 1), widest_.resize(at + 1, 1);
    widest_[at] = std::max(widest_[at], width);
    Step step{};
    step.kind = kind, step.in = in, step.out = out, step.width = width;
    steps_.push_back(step);
    values_[at] = {width, positive};
    return steps_.back();
}

const RowLinear *Layers::keep(const Any &weight, const Any &scale, const Any &shift, const Given &given, bool positive, int64_t inputs,
                              const char *step, float padding) {
    if (weight.ndim() == 2 && static_cast<int64_t>(weight.shape(0)) != inputs)
        refuse(step, "takes " + text(static_cast<int64_t>(weight.shape(0))) + " inputs, is given " + text(inputs));
    linears_.emplace_back(isa_, weight, scale, shift, given, positive, padding);
    return &linears_.back();
}

void Layers::embed(std::optional<Any> table, const Layers *shared, const Any &scale, const Any &positions, int64_t out) {
    if (positions_) refuse("embedding", "there is one already");
    if (shared && (table || !shared->complete_ || !shared->vocabulary_)) refuse("embedding", "there is no vocabulary that it shares");
    const auto *rows = table ? data_of<int8_t>(*table, "table", 2) : nullptr;
    const auto *position = data_of<float>(positions, "positions", 2);
    const auto size = [](const Any &array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); };
    const Any &counted = table ? *table : scale;
    const int64_t width = size(positions, 1), tokens = counted.ndim() ? size(counted, 0) : 0;
    if (!tokens || tokens > INT32_MAX || !width || width > kMaxWidth || !size(positions, 0) || (table && size(*table, 1) != width) ||
        (shared && (shared->vocabulary_->inputs() != width || shared->vocabulary_->outputs() != tokens)))
        refuse("embedding", "a table of " + text(tokens) + " rows does not fit positions of " + text(size(positions, 0)) + " x " + text(width));
    if (!std::all_of(position, position + size(positions, 0) * width, [](float x) { return std::isfinite(x); }))
        refuse("embedding", "positions are not finite");
    floats_.push_back(padded(scale, "scale", tokens, "embedding"));
    row_scale_ = floats_.back().data();
    floats_.emplace_back(size(positions, 0) * width);
    position_ = floats_.back().data();
    std::copy_n(position, size(positions, 0) * width, floats_.back().data());
    append(Kind::kEmbed, -1, out, width);
    tokens_ = tokens, width_ = width, positions_ = size(positions, 0);
    table_ = std::move(table), rows_ = rows, vocabulary_ = shared ? shared->vocabulary_ : nullptr;
}

void Layers::norm(int64_t in, const Any &scale, const Any &bias, float epsilon, int64_t out) {
    open("norm");
    const int64_t width = read(in, "norm").width;
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) refuse("norm", "epsilon is negative or no number");
    Buffer<float> one = padded(scale, "scale", width, "norm"), two = padded(bias, "bias", width, "norm");
    const Norm norm{width, one.data(), two.data(), epsilon, {}};
    append(Kind::kNorm, in, out, width).norm = norm;
    floats_.push_back(std::move(one)), floats_.push_back(std::move(two));
}

void Layers::linear(int64_t in, const Any &weight, const Any &scale, const Any &shift, const Given &given, bool relu, int64_t residual,
                    int64_t out) {
    open("linear");
    const Value from = read(in, "linear");
    const RowLinear *made = keep(weight, scale, shift, given, from.positive, from.width, "linear");
    if (residual != -1 && read(residual, "linear").width != made->outputs())
        refuse("linear", "gives " + text(made->outputs()) + " columns, the residual has " + text(read(residual, "linear").width));
    Step &step = append(Kind::kLinear, in, out, made->outputs(), relu && residual == -1);
    step.relu = relu, step.residual = residual, step.linear = made;
}

Layers::Step &Layers::attention(Kind kind, int64_t in, int64_t parts, int64_t heads, int64_t out, const char *name) {
    open(name);
    const int64_t given = read(in, name).width, width = given / parts;
    if (heads < 1 || heads > width || parts * width != given || width % (16 * heads))
        refuse(name, text(heads) + " heads on " + text(given) + " columns; a head has a multiple of 16");
    Step &step = append(kind, in, out, width);
    step.heads = heads, step.size = width / heads;
    return step;
}

// Of every result the forms that are read are made.
void Layers::close(int64_t last, const RowLinear *reader) {
    for (size_t i = 0; i < steps_.size(); ++i) {
        Step &step = steps_[i];
        const auto quantized = [&](const RowLinear *by) {
            if (step.bytes && !(step.levels == by->levels())) refuse("linear", "takes rows that another quantizes otherwise");
            step.bytes = true, step.levels = step.norm.levels = by->levels();
        };
        bool over = false;
        for (size_t next = i + 1; next < steps_.size() && !over; ++next) {
            const Step &at = steps_[next];
            if (at.in == step.out && at.linear) quantized(at.linear);
            step.real = step.real || (at.in == step.out && !at.linear) || at.residual == step.out;
            over = at.out == step.out;
        }
        if (over || step.out != last) continue;
        if (reader) quantized(reader);
        step.real = step.real || !reader;
    }
    last_ = last, complete_ = true;
}

void Layers::embed_row(int64_t token, int64_t position, float *to) const {
    const float *more = position_ + position * width_, scale = row_scale_[token];
    const int8_t *row = rows_ ? rows_ + token * width_ : nullptr;
    if (!row) {
        auto *column = static_cast<int8_t *>(kernel_scratch(width_));
        vocabulary_->column(token, column);
        row = column;
    }
    for (int64_t j = 0; j < width_; ++j) to[j] = static_cast<float>(row[j]) * scale + more[j];
}

}  // namespace zoo
