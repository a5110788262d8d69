// The operations that an encoder and a decoder share.
#include "transformer/layers/layers.h"

#include <cmath>

namespace nb = nanobind;

namespace zoo {

void refuse(const char *operation, const std::string &why) { throw nb::value_error((std::string(operation) + ": " + why).c_str()); }

const float *finite_table(const Array &array, const char *name, int64_t rows, int64_t columns, const char *operation) {
    const auto *values = data_of<float>(array, name, 2);
    if (static_cast<int64_t>(array.shape(0)) != rows || static_cast<int64_t>(array.shape(1)) != columns)
        refuse(operation, std::string(name) + " has another shape than " + std::to_string(rows) + " x " + std::to_string(columns));
    if (!std::all_of(values, values + rows * columns, [](float x) { return std::isfinite(x); }))
        refuse(operation, std::string(name) + " is not finite");
    return values;
}

namespace {

constexpr int64_t kMaxRegisters = 256;

std::string text(int64_t value) { return std::to_string(value); }

// A 1-D float32 array of this length, finite, padded with zeros to whole 64.
Buffer<float> padded(const Array &array, const char *name, int64_t count, const char *operation) {
    const float *data = data_of<float>(array, name, 1);
    if (static_cast<int64_t>(array.shape(0)) != count)
        refuse(operation, std::string(name) + " has " + text(static_cast<int64_t>(array.shape(0))) + " elements, expected " + text(count));
    if (!std::all_of(data, data + count, [](float x) { return std::isfinite(x); })) refuse(operation, std::string(name) + " is not finite");
    const int64_t room = round_up(count, kColumns);
    Buffer<float> values(room);
    std::fill_n(std::copy_n(data, count, values.data()), room - count, 0.0f);
    return values;
}

Activation activation_of(const std::string &kind) {
    if (kind == "swish") return Activation::kSwish;
    if (kind == "gelu") return Activation::kGelu;
    if (kind != "gelu_tanh") refuse("activation", "there is no " + kind);
    return Activation::kGeluTanh;
}

}  // namespace

FloatRowLinear::FloatRowLinear(const Isa &isa, const Array &weight, const Array &scale, const Array &bias, Arena &arena) : isa_(isa) {
    const auto *w = data_of<float>(weight, "weight", 2);
    const auto inputs = static_cast<int64_t>(weight.shape(0));
    outputs_ = static_cast<int64_t>(weight.shape(1));
    if (!inputs || !outputs_ || inputs > kMaxWidth) refuse("linear", "weights of " + text(inputs) + " x " + text(outputs_));
    finite_table(weight, "weight", inputs, outputs_, "linear");
    scale_ = padded(scale, "scale", outputs_, "linear"), bias_ = padded(bias, "bias", outputs_, "linear");
    const int64_t all = round_up(outputs_, kColumns);
    auto *packed = static_cast<float *>(arena.take(inputs * all * 4));
    for (int64_t column = 0; column < all; column += kColumns)
        for (int64_t k = 0; k < inputs; ++k) {
            const int64_t count = std::min(kColumns, outputs_ - column);
            float *to = packed + column * inputs + k * kColumns;
            std::fill(std::copy_n(w + k * outputs_ + column, count, to), to + kColumns, 0.0f);
        }
    linear_ = {inputs, all, packed, scale_.data(), bias_.data()};
}

RowLinear::RowLinear(const Isa &isa, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams,
                     bool nonnegative, float padding, Arena *arena)
    : isa_(isa) {
    qparams_.zero_point = nonnegative ? 0 : 128;
    if (qparams) qparams_ = {qparams->first, qparams->second};
    if (qparams && (!(qparams_.scale > 0) || !std::isfinite(qparams_.scale) || qparams_.zero_point < 0 || qparams_.zero_point > 255))
        refuse("linear", "inputs quantized by scale " + std::to_string(qparams_.scale) + " and zero point " + text(qparams_.zero_point));
    const auto *w = data_of<int8_t>(weight, "weight", 2);
    const int64_t inputs = static_cast<int64_t>(weight.shape(0));
    outputs_ = static_cast<int64_t>(weight.shape(1));
    if (!inputs || !outputs_ || inputs > kMaxWidth) refuse("linear", "weights of " + text(inputs) + " x " + text(outputs_));
    scale_ = padded(scale, "scale", outputs_, "linear"), bias_ = padded(bias, "bias", outputs_, "linear");
    const int64_t all = round_up(outputs_, kColumns);
    std::fill(bias_.data() + outputs_, bias_.data() + all, padding);
    std::vector<int8_t> padded_weight(static_cast<size_t>(inputs * all));
    std::vector<int64_t> sums(static_cast<size_t>(all)), magnitudes(static_cast<size_t>(all));
    for (int64_t k = 0; k < inputs; ++k)
        for (int64_t j = 0; j < outputs_; ++j) {
            const int8_t value = padded_weight[static_cast<size_t>(k * all + j)] = w[k * outputs_ + j];
            sums[static_cast<size_t>(j)] += value, magnitudes[static_cast<size_t>(j)] += std::abs(value);
        }
    compensation_.reserve(all);
    for (int64_t j = 0; j < all; ++j) {
        if (255 * magnitudes[static_cast<size_t>(j)] >= INT32_MAX) refuse("linear", "its sums can overflow 32 bits");
        compensation_[j] = static_cast<int32_t>(-qparams_.zero_point * sums[static_cast<size_t>(j)]);
    }
    const int64_t bytes = isa.packed_bytes(inputs, all);
    if (!arena) weight_.reserve(bytes);
    void *packed = arena ? arena->take(bytes) : weight_.data();
    isa.pack_linear(padded_weight.data(), inputs, all, packed);
    linear_.inputs = inputs, linear_.outputs = all, linear_.weight = packed, linear_.bias = compensation_.data();
    linear_.scale = scale_.data(), linear_.float_output = true;
}

void RowLinear::gather(const RowLinear &whole, const std::vector<int32_t> &columns) {
    qparams_ = whole.qparams_, linear_ = whole.linear_, outputs_ = static_cast<int64_t>(columns.size());
    const int64_t all = round_up(outputs_, kColumns);
    weight_.reserve(isa_.packed_bytes(linear_.inputs, all)), compensation_.reserve(all), scale_.reserve(all), bias_.reserve(all);
    isa_.gather_columns(whole.linear_.weight, linear_.inputs, columns.data(), outputs_, weight_.data());
    for (int64_t j = 0; j < all; ++j) {
        const int64_t column = j < outputs_ ? columns[static_cast<size_t>(j)] : -1;
        compensation_[j] = column < 0 ? 0 : whole.compensation_[column];
        scale_[j] = column < 0 ? 0 : whole.scale_[column];
        bias_[j] = column < 0 ? -INFINITY : whole.bias_[column];
    }
    linear_.outputs = all, linear_.weight = weight_.data(), linear_.bias = compensation_.data(), linear_.scale = scale_.data();
}

void RowLinear::run(const Rows &in, int64_t n, bool relu, const float *residual, int64_t residual_stride, float *out,
                    int64_t out_stride) const {
    isa_.linear(linear_, {in.scale, bias_.data(), residual, residual_stride, relu}, in.quantized, in.stride, n, out, out_stride);
}

void RowLinear::panel(const Rows &in, int64_t n, int64_t begin, float *out) const {
    Linear part = linear_;
    part.outputs = std::min(kPanel, linear_.outputs - begin);
    part.weight = static_cast<const uint8_t *>(linear_.weight) + isa_.packed_bytes(linear_.inputs, begin + kColumns) - isa_.packed_bytes(linear_.inputs, kColumns);
    part.bias = linear_.bias + begin, part.scale = linear_.scale + begin;
    isa_.linear(part, {in.scale, bias_.data() + begin, nullptr, 0, false}, in.quantized, in.stride, n, out, kPanel);
}

void RowLinear::begin_top_k(const TopK &top, int64_t n) {
    std::fill_n(top.values, n * top.k, -INFINITY), std::fill_n(top.tokens, n * top.k, -1);
    std::fill_n(top.maxima, n, -INFINITY), std::fill_n(top.exp_sums, n * 16, 0.0f);
}

void RowLinear::add_top_k(const Rows &in, int64_t n, float *panel, int64_t first, const TopK &top,
                          const std::vector<Taken> *taken) const {
    for (int64_t begin = 0; begin < outputs_; begin += kPanel) {
        this->panel(in, n, begin, panel);
        for (int64_t r = 0; taken && r < n; ++r) {
            const auto before = [](const Taken &entry, int64_t column) { return entry.column < column; };
            for (auto entry = std::lower_bound(taken[r].begin(), taken[r].end(), begin, before);
                 entry != taken[r].end() && entry->column < begin + kPanel; ++entry) {
                float &logit = panel[r * kPanel + entry->column - begin];
                *entry->logit = logit, logit = kTaken;
            }
        }
        isa_.rows->top_k(panel, kPanel, first + begin, std::min(kPanel, outputs_ - begin), top, n);
    }
}

void RowLinear::end_top_k(const Rows &in, int64_t n, const TopK &top, double *log_sum_exp) const {
    for (int64_t r = 0; r < n; ++r) {
        log_sum_exp[r] = std::log(static_cast<double>(isa_.rows->sum_lanes(top.exp_sums + r * 16))) + static_cast<double>(top.maxima[r]);
        if (!std::isfinite(in.scale[r]) || !std::isfinite(log_sum_exp[r])) log_sum_exp[r] = NAN;
    }
}

void RowLinear::top_k(const Rows &in, int64_t n, float *panel, const TopK &top, double *log_sum_exp) const {
    begin_top_k(top, n);
    add_top_k(in, n, panel, 0, top);
    end_top_k(in, n, top, log_sum_exp);
}

std::vector<Register> Layers::registers(int64_t rows) const {
    std::vector<Register> registers(register_widths_.size());
    for (size_t i = 0; i < registers.size(); ++i) registers[i].size(rows, register_widths_[i]);
    return registers;
}

void Layers::require_open(const char *operation) const {
    if (complete_) refuse(operation, "there was a last step already");
    if (!positions_) refuse(operation, "the first step is the embedding");
}

const Layers::Value &Layers::read(int64_t index, const char *operation) const {
    if (index < 0 || index >= static_cast<int64_t>(register_values_.size()) || !register_values_[static_cast<size_t>(index)].width)
        refuse(operation, "register " + text(index) + " holds nothing yet");
    return register_values_[static_cast<size_t>(index)];
}

Layers::Operation &Layers::append(Kind kind, int64_t in, int64_t out, int64_t width, bool nonnegative) {
    if (out < 0 || out >= kMaxRegisters) refuse("step", "there is no register " + text(out));
    if (out == in) refuse("step", "reads and writes register " + text(out));
    if (width < 1 || width > 3 * kMaxWidth) refuse("step", "a width of " + text(width));
    const auto index = static_cast<size_t>(out);
    if (index >= register_values_.size()) register_values_.resize(index + 1), register_widths_.resize(index + 1, 1);
    register_widths_[index] = std::max(register_widths_[index], width);
    Operation operation{};
    operation.kind = kind, operation.in = in, operation.out = out, operation.width = width;
    operations_.push_back(operation);
    register_values_[index] = {width, nonnegative};
    return operations_.back();
}

void Layers::require_inputs(const Array &weight, int64_t inputs, const char *operation) {
    if (weight.ndim() == 2 && static_cast<int64_t>(weight.shape(0)) != inputs)
        refuse(operation, "takes " + text(static_cast<int64_t>(weight.shape(0))) + " inputs, is given " + text(inputs));
}

const RowLinear *Layers::add_linear(const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams,
                                    bool nonnegative, int64_t inputs, const char *operation, float padding) {
    require_inputs(weight, inputs, operation);
    linears_.emplace_back(isa_, weight, scale, bias, qparams, nonnegative, padding, &arena_);
    return &linears_.back();
}

void Layers::embedding(std::optional<Array> table, const Layers *shared, const Array &scale, const Array &positions, int64_t longest, int64_t out) {
    if (positions_) refuse("embedding", "there is one already");
    if (shared && (table || !shared->complete_ || !shared->vocabulary_)) refuse("embedding", "there is no vocabulary that it shares");
    const auto *rows = table ? data_of<int8_t>(*table, "table", 2) : nullptr;
    const auto *position = data_of<float>(positions, "positions", 2);
    const auto size = [](const Array &array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); };
    const Array &per_token = table ? *table : scale;
    const int64_t width = size(positions, 1), tokens = per_token.ndim() ? size(per_token, 0) : 0;
    if (!tokens || tokens > INT32_MAX || !width || width > kMaxWidth || !size(positions, 0) || (table && size(*table, 1) != width) ||
        (shared && (shared->vocabulary_->inputs() != width || shared->vocabulary_->outputs() != tokens)))
        refuse("embedding",
               "a table of " + text(tokens) + " rows does not fit positions of " + text(size(positions, 0)) + " x " + text(width));
    if (!std::all_of(position, position + size(positions, 0) * width, [](float x) { return std::isfinite(x); }))
        refuse("embedding", "positions are not finite");
    parameters_.push_back(padded(scale, "scale", tokens, "embedding"));
    row_scale_ = parameters_.back().data();
    parameters_.emplace_back(size(positions, 0) * width);
    position_rows_ = parameters_.back().data();
    std::copy_n(position, size(positions, 0) * width, parameters_.back().data());
    append(Kind::kEmbed, -1, out, width);
    if (longest < 0 || longest > INT32_MAX) refuse("embedding", "it takes " + text(longest) + " tokens");
    tokens_ = tokens, width_ = width, places_ = size(positions, 0);
    positions_ = longest ? longest : places_, by_position_ = !longest;
    table_ = std::move(table), table_rows_ = rows, vocabulary_ = shared ? shared->vocabulary_ : nullptr;
}

void Layers::layer_norm(int64_t in, const Array &scale, const Array &bias, float epsilon, int64_t out) {
    require_open("norm");
    const int64_t width = read(in, "norm").width;
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) refuse("norm", "epsilon is negative or no number");
    Buffer<float> scales = padded(scale, "scale", width, "norm"), biases = padded(bias, "bias", width, "norm");
    const LayerNorm norm{width, scales.data(), biases.data(), epsilon, {}};
    append(Kind::kLayerNorm, in, out, width).norm = norm;
    parameters_.push_back(std::move(scales)), parameters_.push_back(std::move(biases));
}

void Layers::part_norms(int64_t in, const Array &scale, const Array &bias, float epsilon, int64_t out) {
    require_open("norm");
    const int64_t columns = read(in, "norm").width, parts = scale.ndim() == 2 ? static_cast<int64_t>(scale.shape(0)) : 0;
    const int64_t width = parts ? static_cast<int64_t>(scale.shape(1)) : 0;
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) refuse("norm", "epsilon is negative or no number");
    if (!width || width % kColumns || width > columns / parts)
        refuse("norm", "of " + text(parts) + " parts of " + text(width) + " columns does not fit rows of " + text(columns));
    const float *values[] = {finite_table(scale, "scale", parts, width, "norm"), finite_table(bias, "bias", parts, width, "norm")};
    for (const float *&table : values) {
        parameters_.emplace_back(parts * width);
        std::copy_n(table, parts * width, parameters_.back().data());
        table = parameters_.back().data();
    }
    Operation &operation = append(Kind::kPartNorms, in, out, columns);
    operation.norm = {width, values[0], values[1], epsilon, {}}, operation.size = parts;
}

void Layers::run_part_norms(const Operation &operation, const Rows &in, const Rows &out, int64_t n) const {
    LayerNorm norm = operation.norm;
    const int64_t columns = operation.size * norm.width;
    for (int64_t part = 0; part < columns; part += norm.width, norm.scale += norm.width, norm.bias += norm.width)
        isa_.rows->layer_norm(norm, in.values + part, in.stride, {out.values + part, nullptr, nullptr, out.stride}, n);
    for (int64_t r = 0; r < n; ++r)
        std::copy(in.values + r * in.stride + columns, in.values + r * in.stride + operation.width, out.values + r * out.stride + columns);
}

void Layers::rms_norm(int64_t in, const Array &scale, float epsilon, int64_t out) {
    require_open("norm");
    const int64_t width = read(in, "norm").width;
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) refuse("norm", "epsilon is negative or no number");
    parameters_.push_back(padded(scale, "scale", width, "norm"));
    append(Kind::kLayerNorm, in, out, width).norm = {width, parameters_.back().data(), nullptr, epsilon, {}};
}

void Layers::linear(int64_t in, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams, bool relu,
                    int64_t residual, int64_t out) {
    require_open("linear");
    const Value from = read(in, "linear");
    const bool is_float = weight.dtype() == nb::dtype<float>();
    const RowLinear *layer = is_float ? nullptr : add_linear(weight, scale, bias, qparams, from.nonnegative, from.width, "linear");
    if (is_float) require_inputs(weight, from.width, "linear"), float_linears_.emplace_back(isa_, weight, scale, bias, arena_);
    const int64_t outputs = layer ? layer->outputs() : float_linears_.back().outputs();
    if (residual != -1 && read(residual, "linear").width != outputs)
        refuse("linear", "gives " + text(outputs) + " columns, the residual has " + text(read(residual, "linear").width));
    Operation &operation = append(Kind::kLinear, in, out, outputs, relu && residual == -1);
    operation.relu = relu, operation.residual = residual, operation.linear = layer;
    if (is_float) operation.float_linear = &float_linears_.back();
}

void Layers::activation(int64_t in, const std::string &kind, int64_t out) {
    require_open("activation");
    const Activation activation = activation_of(kind);
    append(Kind::kActivation, in, out, read(in, "activation").width).activation = activation;
}

void Layers::gated_activation(int64_t in, const std::string &kind, int64_t out) {
    require_open("activation");
    const Activation activation = activation_of(kind);
    const int64_t columns = read(in, "activation").width;
    if (columns % 32) refuse("activation", "gates of " + text(columns) + " columns, expected twice a multiple of 16");
    append(Kind::kGated, in, out, columns / 2).activation = activation;
}

void Layers::sum(int64_t in, int64_t residual, int64_t out) {
    require_open("sum");
    const int64_t width = read(in, "sum").width;
    if (read(residual, "sum").width != width) refuse("sum", "of " + text(width) + " and " + text(read(residual, "sum").width) + " columns");
    append(Kind::kSum, in, out, width).residual = residual;
}

void Layers::scale(int64_t in, const Array &factors, int64_t out) {
    require_open("scale");
    const int64_t width = read(in, "scale").width;
    Buffer<float> values = padded(factors, "factors", width, "scale");
    append(Kind::kScale, in, out, width).factors = values.data();
    parameters_.push_back(std::move(values));
}

Layers::Operation &Layers::attention(Kind kind, int64_t in, int64_t parts, int64_t heads, int64_t out, const char *name) {
    require_open(name);
    const int64_t columns = read(in, name).width, width = columns / parts;
    if (heads < 1 || heads > width || parts * width != columns || width % (16 * heads))
        refuse(name, text(heads) + " heads on " + text(columns) + " columns; a head has a multiple of 16");
    Operation &operation = append(kind, in, out, width);
    operation.heads = heads, operation.size = width / heads;
    return operation;
}

// Decides in which forms, float32 or uint8 by which qparams, every result is stored: those that a later operation reads.
void Layers::close(int64_t last, const RowLinear *reader) {
    for (size_t i = 0; i < operations_.size(); ++i) {
        Operation &operation = operations_[i];
        const auto quantize_for = [&](const RowLinear *reader) {
            if (operation.quantized_output && !(operation.qparams == reader->qparams()))
                refuse("linear", "takes rows that another quantizes otherwise");
            operation.quantized_output = true, operation.qparams = operation.norm.qparams = reader->qparams();
        };
        bool overwritten = false;
        for (size_t next = i + 1; next < operations_.size() && !overwritten; ++next) {
            const Operation &later = operations_[next];
            if (later.in == operation.out && later.linear) quantize_for(later.linear);
            operation.float_output =
                operation.float_output || (later.in == operation.out && !later.linear) || later.residual == operation.out;
            overwritten = later.out == operation.out;
        }
        if (overwritten || operation.out != last) continue;
        if (reader) quantize_for(reader);
        operation.float_output = operation.float_output || !reader;
    }
    last_ = last, result_width_ = register_values_[static_cast<size_t>(last)].width, complete_ = true;
}

void Layers::divide(int64_t rows) {
    const auto count = static_cast<int64_t>(register_widths_.size());
    std::vector<bool> is_short(operations_.size());
    for (size_t i = 0; i < operations_.size(); ++i) {
        const int64_t out = operations_[i].out;
        bool together = operations_[i].by_row(), within = together, overwritten = false;
        for (size_t next = i + 1; next < operations_.size() && !overwritten; ++next) {
            together = together && operations_[next].by_row();
            within = within && (together || !operations_[next].reads(out));
            overwritten = operations_[next].out == out;
        }
        is_short[i] = within && (overwritten || out != last_);
    }
    block_ = rows, first_short_ = 2 * count;
    register_widths_.assign(static_cast<size_t>(3 * count), 1), register_quantizes_.assign(register_widths_.size(), false);
    std::vector<int64_t> now(static_cast<size_t>(count)), lengths(register_widths_.size());  // of a row, whole 64
    std::vector<int64_t> whole;  // registers of all rows that were read since the last operation on more than a row
    for (size_t i = 0; i < operations_.size(); ++i) {
        Operation &operation = operations_[i];
        if (!operation.by_row()) whole.clear();
        for (int64_t *read : {&operation.in, &operation.residual}) {
            if (*read < 0) continue;
            *read = now[static_cast<size_t>(*read)];
            if (operation.by_row()) whole.push_back(*read);
        }
        const int64_t length = round_up(operation.width, kColumns), out = operation.out;
        // Rows of another length would overwrite those that the next block reads: they go elsewhere.
        const bool overwrites = lengths[static_cast<size_t>(out)] != length && std::find(whole.begin(), whole.end(), out) != whole.end();
        now[static_cast<size_t>(out)] = operation.out = out + (is_short[i] ? 2 * count : overwrites ? count : 0);
        const auto index = static_cast<size_t>(operation.out);
        lengths[index] = length, register_widths_[index] = std::max(register_widths_[index], operation.width);
        if (operation.quantized_output) register_quantizes_[index] = true;
    }
    last_ = now[static_cast<size_t>(last_)];
    register_quantizes_[static_cast<size_t>(last_)] = true;  // a decoder quantizes the result there
}

std::vector<Layers::Share> Layers::shares(int64_t n, int64_t threads) const {
    std::vector<Share> result;
    const auto add = [&](Share::Of of, size_t first, size_t end, int64_t count, int64_t most) {
        const auto before = static_cast<int64_t>(result.size());
        for (int64_t begin = 0; begin < count; begin += most) result.push_back({of, first, end, begin, std::min(most, count - begin), before});
    };
    const int64_t rows = std::min(round_up((n - 1) / threads + 1, kTile), block_);
    for (size_t first = 0, end; first < operations_.size(); first = end) {
        const Operation &operation = operations_[first];
        end = first + 1;
        if (operation.by_row()) {
            while (end < operations_.size() && operations_[end].by_row()) ++end;
            add(Share::Of::kRows, first, end, n, rows);
        } else if (operation.kind == Kind::kEmbed || operation.kind == Kind::kNeighbours) {
            add(Share::Of::kRows, first, end, n, n);
        } else {
            add(Share::Of::kHeads, first, end, operation.heads, (operation.heads - 1) / threads + 1);
            if (operation.quantized_output || operation.width % kColumns) add(Share::Of::kResults, first, end, n, rows);
        }
    }
    return result;
}

void Layers::complete_rows(const Operation &operation, const Rows &rows, int64_t n) const {
    for (int64_t r = 0; operation.width < rows.stride && r < n; ++r)
        std::fill(rows.values + r * rows.stride + operation.width, rows.values + (r + 1) * rows.stride, 0.0f);
    if (operation.quantized_output) isa_.rows->quantize_rows(rows, rows.stride, operation.qparams, n);
}

void Layers::run_rows(const Operation &operation, const Rows &in, const Rows &residual, const Rows &out, int64_t n) const {
    const int64_t stride = out.stride, width = operation.width;
    for (int64_t r = 0; r < n; ++r) {
        const float *from = in.values + r * in.stride;
        const Rows row{out.values + (operation.float_output ? r : 0) * stride, out.quantized + r * stride, out.scale + r, stride};
        if (operation.kind == Kind::kActivation) {
            isa_.rows->activate(operation.activation, from, stride, row.values);
        } else if (operation.kind == Kind::kGated) {
            isa_.rows->activate_gate(operation.activation, from, from + width, width, row.values);
            std::fill(row.values + width, row.values + stride, 0.0f);
        } else {
            const float *other = operation.kind == Kind::kScale ? operation.factors : residual.values + r * residual.stride;
            for (int64_t j = 0; j < stride; ++j) row.values[j] = operation.kind == Kind::kScale ? from[j] * other[j] : from[j] + other[j];
        }
        if (operation.quantized_output) isa_.rows->quantize_rows(row, stride, operation.qparams, 1);
    }
}

void Layers::embed_row(int64_t token, int64_t place, float *to) const {
    const float *position_row = position_rows_ + place * width_, scale = row_scale_[token];
    const int8_t *row = table_rows_ ? table_rows_ + token * width_ : nullptr;
    if (!row) {
        auto *column = static_cast<int8_t *>(kernel_scratch(width_));
        vocabulary_->column(token, column);
        row = column;
    }
    for (int64_t j = 0; j < width_; ++j) to[j] = static_cast<float>(row[j]) * scale + position_row[j];
}

}  // namespace zoo
