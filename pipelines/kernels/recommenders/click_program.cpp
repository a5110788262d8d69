// Click programs as Python objects: a method a step, named as its record in steps/, whose arguments are checked when it is added.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>
#include <tuple>

#include "recommenders/tables/table_steps.h"

using namespace nb::literals;

namespace zoo {
namespace {

class ClickProgram : public TableSteps {
  public:
    using TableSteps::TableSteps;

    void numbers(int out, int64_t position, const Array &columns, const Array &scale) {
        const Slot to = slot(out, Kind::kWords, "numbers");
        const auto *column = data_of<int32_t>(columns, "columns", 1);
        const auto *values = data_of<float>(scale, "scale", 1);
        const int64_t count = static_cast<int64_t>(scale.shape(0));
        require(static_cast<int64_t>(columns.shape(0)) == count && count >= 1 && position >= 0 && position + count <= to.width, "numbers");
        for (int64_t k = 0; k < count; ++k) require(column[k] >= 0 && column[k] < numbers_, "numbers");
        const auto padded = static_cast<size_t>(round_up(count, kColumns));
        std::vector<int32_t> chosen(padded, 0);
        std::vector<float> scales(padded, 0.0f);
        std::copy_n(column, count, chosen.data()), std::copy_n(values, count, scales.data());
        const auto *kernels = &kernels_;
        const int64_t stride = numbers_;
        auto &columns_alike = alike_[static_cast<size_t>(out)];
        bool all = true;
        for (int64_t k = 0; k < count; ++k) all &= columns_alike[static_cast<size_t>(position + k)] = alike_numbers_[static_cast<size_t>(column[k])];
        add({}, {{to, position, count}}, all, [=](const Block &b) {
            kernels->numbers(b.numbers, stride, chosen.data(), scales.data(), count, b.n, b.at<int16_t>(to) + position, to.stride);
        });
    }

    // The rows `first` .. `first + rows` of table int16 [R, stride], flat; `position`: where they go.
    void gather(int out, int64_t position, Array table, int64_t first, int64_t rows, int64_t stride, int64_t width, int64_t column,
                int64_t count, const std::string &pool, float factor, int64_t mean) {
        const Slot to = slot(out, Kind::kWords, "gather");
        const auto *data = data_of<int16_t>(table, "table", 1);
        WordRows r{data + first * stride, stride, width, count, Pool::kNone, factor, 2 * rows * stride > kNear};
        r.pool = pool == "sum" ? Pool::kSum : pool == "mean" ? Pool::kMean : pool == "max" ? Pool::kMax : Pool::kNone;
        const int64_t size = static_cast<int64_t>(table.shape(0));
        require(first >= 0 && rows >= 1 && stride >= 1 && width >= 1 && width <= stride && stride <= kWidest && first <= size &&
                    rows <= size && (first + rows) * stride + kSlack <= size && position >= 0 && position + width <= to.width &&
                    (pool == "" || pool == "sum" || pool == "mean" || pool == "max") && (pool == "mean") == (mean >= 0) && mean < means_ &&
                    count >= 1 && (pool != "" || count == 1) && column >= 0 && column + count <= columns() && count <= kWidest,
                "gather");
        for (int64_t c = column; c < column + count; ++c) require(rows_[static_cast<size_t>(c)] >= 1 && rows_[static_cast<size_t>(c)] <= rows, "gather");
        const auto *kernels = &kernels_;
        const int64_t columns = this->columns(), means = means_;
        const bool alike = all_of(alike_ids_, column, count) && (mean < 0 || alike_means_[static_cast<size_t>(mean)]);
        add({}, {{to, position, width}}, alike, [=](const Block &b) {
            kernels->gather(r, b.ids + column, columns, mean < 0 ? nullptr : b.means + mean, means, b.n, b.at<int16_t>(to) + position,
                            to.stride);
        });
        kept_.push_back(std::move(table));
    }

    void mixed(int x, int64_t first, const Array &weight, const Array &scale, const Array &bias, const std::vector<std::tuple<int, int64_t, bool>> &outs,
               const std::optional<Array> &table, const Array &columns, const Array &offsets, const Array &rows, int shift) {
        const auto *w = data_of<int16_t>(weight, "weight", 2);
        const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1);
        const int64_t inputs = static_cast<int64_t>(weight.shape(0)), width = static_cast<int64_t>(weight.shape(1));
        const int64_t fields = static_cast<int64_t>(columns.shape(0)), stride = width, pairs = (inputs + 1) / 2;
        const Slot from = inputs ? slot(x, Kind::kWords, "mixed") : Slot{};
        const bool fits = width >= 1 && width % kColumns == 0 && width <= kWidest && static_cast<int64_t>(scale.shape(0)) == width &&
                    static_cast<int64_t>(bias.shape(0)) == width && shift >= 0 && shift <= 14 && fields <= kMaxFields && !outs.empty() && outs.size() <= kOuts &&
                    first >= 0 && (!inputs || first + inputs <= from.width) && table.has_value() == (fields > 0);
        require(fits, "mixed");
        auto step = std::make_shared<Mixed>();
        MixedLinear &m = step->linear;
        m.fields = fields, m.pairs = pairs, m.stride = stride, m.shift = shift, m.sparse = from.relu;
        if (table) {
            if (table->dtype() == nb::dtype<int16_t>())
                m.wide_table = data_of<int16_t>(*table, "table", 2);
            else
                m.table = data_of<uint8_t>(*table, "table", 2);
            require(static_cast<int64_t>(table->shape(1)) == stride, "mixed");
            step->fields = this->fields(columns, offsets, rows, static_cast<int64_t>(table->shape(0)), "mixed");
            kept_.push_back(*table);
        }
        int64_t end = 0;
        for (const auto &[index, columns_of, relu] : outs) {
            require(index >= 0 && index < static_cast<int64_t>(slots_.size()), "mixed");
            Slot &to = slots_[static_cast<size_t>(index)];
            to.relu = relu;
            require(columns_of == to.width, "mixed");
            end += round_up(columns_of, kColumns);
            step->outs.push_back({to, end, relu});
        }
        require(end == width, "mixed");
        const int64_t group = 4 * kernels_.lanes;
        step->weight.reserve(stride * pairs * 2), step->scale.reserve(stride), step->bias.reserve(stride);
        for (int64_t j = 0; j < stride; ++j) {
            step->scale[j] = s[j], step->bias[j] = b[j];
            for (int64_t k = 0; k < 2 * pairs; ++k)
                step->weight[((j / group * pairs + k / 2) * group + j % group) * 2 + k % 2] = k < inputs ? w[k * width + j] : 0;
        }
        m.weight = step->weight.data(), m.scale = step->scale.data(), m.bias = step->bias.data();
        std::vector<Span> writes;
        for (const auto &each : step->outs) writes.push_back(whole(std::get<0>(each)));
        const bool fields_alike = std::all_of(step->fields.begin(), step->fields.end(), [&](const Field &field) { return alike_ids_[static_cast<size_t>(field.column)]; });
        if (!fields_alike || (inputs && !alike({from, first, inputs}))) split(*step, from, first, inputs);
        const int64_t start = step->common ? kept_bytes(stride * 4) : 0;
        add(inputs ? std::vector<Span>{{from, first, inputs}} : std::vector<Span>{}, writes, fields_alike, [=, this](const Block &block) {
            MixedLinear linear = step->linear;
            const int16_t *codes = pairs ? block.at<int16_t>(from) + first : nullptr;
            const int64_t codes_stride = pairs ? from.stride : 0;
            if (step->common) {
                auto *sums = reinterpret_cast<int32_t *>(block.memory + start);
                if (block.first) {
                    const Columns all{Kind::kSums, stride, stride, sums, stride, false};
                    kernels_.mixed(step->common->linear, rows_of(step->common->fields, block, 1), codes, codes_stride, 1, &all);
                }
                linear.shared = sums;
            }
            Columns to[kOuts];
            for (size_t i = 0; i < step->outs.size(); ++i) {
                const auto &[slot, last, relu] = step->outs[i];
                to[i] = {slot.kind, slot.width, last, block.memory + slot.offset, slot.stride, relu};
            }
            kernels_.mixed(linear, rows_of(step->fields, block, block.n), codes, codes_stride, block.n, to);
        });
    }

    void dense(int x, int out, const Array &weight, const Array &bias, const Array &scale, int zero_point, int low) {
        const Slot from = slot(x, Kind::kBytes, "dense");
        require(out >= 0 && out < static_cast<int64_t>(slots_.size()), "dense");
        const Slot to = slots_[static_cast<size_t>(out)];
        const auto *w = data_of<int8_t>(weight, "weight", 2);
        const auto *b = data_of<int32_t>(bias, "bias", 1);
        const auto *s = data_of<float>(scale, "scale", 1);
        const int64_t inputs = static_cast<int64_t>(weight.shape(0)), outputs = static_cast<int64_t>(weight.shape(1));
        require(inputs == from.width && outputs == to.width && to.kind != Kind::kWords && static_cast<int64_t>(bias.shape(0)) == outputs &&
                    static_cast<int64_t>(scale.shape(0)) == outputs && zero_point >= 0 && zero_point <= 255 && low >= 0 && low <= 255,
                "dense");
        auto step = std::make_shared<Dense>();
        Linear &l = step->linear;
        l.inputs = inputs, l.outputs = outputs, l.float_output = to.kind == Kind::kFloats, l.zero_point = zero_point, l.low = low;
        step->weight.reserve(isa_.packed_bytes(inputs, outputs));
        isa_.pack_linear(w, inputs, outputs, step->weight.data());
        const int64_t padded = round_up(outputs, kColumns);
        step->bias.reserve(padded), step->scale.reserve(padded);
        std::fill_n(step->bias.data(), padded, 0), std::fill_n(step->scale.data(), padded, 0.0f);
        std::copy_n(b, outputs, step->bias.data()), std::copy_n(s, outputs, step->scale.data());
        l.weight = step->weight.data(), l.bias = step->bias.data(), l.scale = step->scale.data();
        const Isa *isa = &isa_;
        add({whole(from)}, {whole(to)}, true, [=](const Block &block) {
            isa->linear(step->linear, RowEpilogue{}, block.at<uint8_t>(from), from.stride, block.n, block.memory + to.offset, to.stride);
        });
    }

    void quantize(int x, int out, int64_t position, float factor, bool relu) {
        const Slot from = slot(x, Kind::kFloats, "quantize"), to = slot(out, Kind::kWords, "quantize");
        require(position >= 0 && position + from.width <= to.width, "quantize");
        const auto *kernels = &kernels_;
        add({whole(from)}, {{to, position, from.width}}, true, [=](const Block &b) {
            kernels->quantize(b.at<float>(from), from.stride, factor, relu ? 0 : -kCodeLimit, from.width, b.n, b.at<int16_t>(to) + position, to.stride);
        });
    }

    void factorization(int x, int out, const Array &positions, int64_t width, float scale) {
        const Slot from = slot(x, Kind::kWords, "factorization"), to = slot(out, Kind::kFloats, "factorization");
        const auto at = vectors(positions, width, from, "factorization");
        std::vector<Span> reads;
        for (const int32_t each : at) reads.push_back({from, each, width});
        const auto *kernels = &kernels_;
        add(reads, {whole(to)}, true, [=](const Block &b) {
            kernels->factorization(b.at<int16_t>(from), from.stride, at.data(), static_cast<int64_t>(at.size()), width, scale, b.n,
                                   b.at<float>(to), to.stride);
        });
    }

    void cross(int x, int u, int g, bool first, float factor, std::optional<int> out, std::optional<int> total,
               const std::optional<Array> &weight) {
        const Slot from = slot(x, Kind::kWords, "cross"), change = slot(u, Kind::kFloats, "cross"), state = slot(g, Kind::kFloats, "cross");
        require(change.width == state.width && from.width == change.width && weight.has_value() == total.has_value(), "cross");
        const Slot words = out ? slot(*out, Kind::kWords, "cross") : Slot{}, sum = total ? slot(*total, Kind::kFloats, "cross") : Slot{};
        require(!out || words.width == from.width, "cross");
        auto weights = std::make_shared<Buffer<float>>(state.stride);
        if (weight) {
            const auto *values = data_of<float>(*weight, "weight", 1);
            require(static_cast<int64_t>(weight->shape(0)) == state.width, "cross");
            std::fill_n(weights->data(), state.stride, 0.0f), std::copy_n(values, state.width, weights->data());
        }
        const Cross c{state.width, first, factor, weight ? weights->data() : nullptr};
        const bool stores = out.has_value(), sums = total.has_value();
        const auto *kernels = &kernels_;
        steps_.push_back([=, keep = weights](const Block &b) {
            kernels->cross(c, b.at<int16_t>(from), from.stride, b.at<float>(change), b.at<float>(state), state.stride, b.n,
                           stores ? b.at<int16_t>(words) : nullptr, stores ? words.stride : 0, sums ? b.at<float>(sum) : nullptr,
                           sums ? sum.stride : 0);
        });
    }

    void dots(int x, int out, int64_t position, const Array &positions, int64_t width, const Array &factor) {
        const Slot from = slot(x, Kind::kWords, "dots"), to = slot(out, Kind::kWords, "dots");
        const auto at = vectors(positions, width, from, "dots");
        const auto *values = data_of<float>(factor, "factor", 1);
        const int64_t count = static_cast<int64_t>(at.size());
        const int64_t pairs = count * (count - 1) / 2;
        require(count >= 2 && position >= 0 && position + pairs <= to.width && static_cast<int64_t>(factor.shape(0)) == pairs, "dots");
        auto factors = std::make_shared<Buffer<float>>(pairs + kColumns);
        std::fill_n(factors->data(), pairs + kColumns, 0.0f), std::copy_n(values, pairs, factors->data());
        std::vector<Span> reads;
        for (const int32_t each : at) reads.push_back({from, each, width});
        auto *columns_alike = &alike_[static_cast<size_t>(out)];
        for (int64_t i = 1, pair = position; i < count; ++i)
            for (int64_t j = 0; j < i; ++j, ++pair)
                (*columns_alike)[static_cast<size_t>(pair)] = alike(reads[static_cast<size_t>(i)]) && alike(reads[static_cast<size_t>(j)]);
        std::vector<int32_t> own; // vectors that samples do not have in common
        for (int64_t i = 0; i < count; ++i)
            if (!alike(reads[static_cast<size_t>(i)])) own.push_back(static_cast<int32_t>(i));
        const auto *kernels = &kernels_;
        if (const auto owned = static_cast<int64_t>(own.size()); 2 * owned < count && owned) {
            const int64_t columns = round_up(count, 16);
            auto own_factors = std::make_shared<Buffer<float>>(owned * columns + kColumns);
            std::fill_n(own_factors->data(), owned * columns + kColumns, 0.0f);
            for (int64_t k = 0; k < owned; ++k)
                for (int64_t j = 0; j < count; ++j) {
                    const int64_t high = std::max<int64_t>(own[static_cast<size_t>(k)], j), low = std::min<int64_t>(own[static_cast<size_t>(k)], j);
                    if (high != low) own_factors->data()[k * columns + j] = values[high * (high - 1) / 2 + low];
                }
            steps_.push_back([=](const Block &b) {
                kernels->dots_of(b.at<int16_t>(from), from.stride, at.data(), count, width, factors->data(), own.data(), owned, own_factors->data(),
                                 b.n, b.at<int16_t>(to) + position, to.stride);
            });
            return;
        }
        add(reads, {{to, position, pairs}}, true, [=](const Block &b) {
            kernels->dots(b.at<int16_t>(from), from.stride, at.data(), count, width, factors->data(), b.n, b.at<int16_t>(to) + position, to.stride);
        });
    }

    void normalize(int x, int out, float epsilon, float least, bool relu) {
        const Slot from = slot(x, Kind::kFloats, "normalize"), to = slot(out, Kind::kFloats, "normalize");
        require(from.width == to.width, "normalize");
        const auto *kernels = &kernels_;
        add({whole(from)}, {whole(to)}, true, [=](const Block &b) {
            kernels->normalize(b.at<float>(from), from.stride, from.width, epsilon, least, relu, b.n, b.at<float>(to));
        });
    }

    void leaky(int x, int out, const Array &slope) {
        const Slot from = slot(x, Kind::kFloats, "leaky"), to = slot(out, Kind::kFloats, "leaky");
        const auto *values = data_of<float>(slope, "slope", 1);
        require(from.width == to.width && static_cast<int64_t>(slope.shape(0)) == from.width, "leaky");
        auto slopes = std::make_shared<Buffer<float>>(from.stride);
        std::fill_n(slopes->data(), from.stride, 0.0f), std::copy_n(values, from.width, slopes->data());
        const auto *kernels = &kernels_;
        add({whole(from)}, {whole(to)}, true, [=](const Block &b) {
            kernels->leaky(b.at<float>(from), from.stride, slopes->data(), from.width, b.n, b.at<float>(to));
        });
    }

    void tanh(int x, int out) {
        const Slot from = slot(x, Kind::kFloats, "tanh"), to = slot(out, Kind::kFloats, "tanh");
        require(from.width == to.width, "tanh");
        const auto *kernels = &kernels_;
        add({whole(from)}, {whole(to)}, true, [=](const Block &b) { kernels->tanh(b.at<float>(from), from.stride, from.width, b.n, b.at<float>(to)); });
    }

    void mixture(int x, int gates, int out) {
        const Slot from = slot(x, Kind::kFloats, "mixture"), by = slot(gates, Kind::kFloats, "mixture"), to = slot(out, Kind::kFloats, "mixture");
        require(from.width == to.width && from.width % by.width == 0, "mixture");
        const auto *kernels = &kernels_;
        add({whole(from), whole(by)}, {whole(to)}, true, [=](const Block &b) {
            kernels->mixture(b.at<float>(from), from.stride, b.at<float>(by), by.stride, by.width, from.width / by.width, b.n, b.at<float>(to));
        });
    }

    void gated_sum(const std::vector<int> &x, int gates, int out, bool relu) {
        const Slot by = slot(gates, Kind::kFloats, "gated_sum"), to = slot(out, Kind::kFloats, "gated_sum");
        std::vector<Slot> from;
        for (int each : x) from.push_back(slot(each, Kind::kFloats, "gated_sum"));
        require(!from.empty() && static_cast<int64_t>(from.size()) == by.width && by.width <= kOuts, "gated_sum");
        for (const Slot &each : from) require(each.width == to.width && each.offset != to.offset, "gated_sum");
        const auto *kernels = &kernels_;
        std::vector<Span> reads{whole(by)};
        for (const Slot &each : from) reads.push_back(whole(each));
        add(reads, {whole(to)}, true, [=](const Block &b) {
            const float *experts[kOuts];
            for (size_t e = 0; e < from.size(); ++e) experts[e] = b.at<float>(from[e]);
            kernels->gated_sum(experts, to.stride, b.at<float>(by), by.stride, by.width, to.width, relu, b.n, b.at<float>(to));
        });
    }

    void product(int x, int y, int out) {
        const Slot a = slot(x, Kind::kFloats, "product"), b = slot(y, Kind::kFloats, "product"), to = slot(out, Kind::kFloats, "product");
        require(a.width == b.width, "product");
        const auto *kernels = &kernels_;
        add({whole(a), whole(b)}, {whole(to)}, true, [=](const Block &block) {
            kernels->product(block.at<float>(a), block.at<float>(b), a.stride, a.width, block.n, block.at<float>(to), to.stride);
        });
    }

    void weighted(int x, int64_t first, const Array &weight, int out) {
        const Slot from = slot(x, Kind::kWords, "weighted"), to = slot(out, Kind::kFloats, "weighted");
        const auto *w = data_of<float>(weight, "weight", 1);
        const int64_t width = static_cast<int64_t>(weight.shape(0));
        require(first >= 0 && width >= 1 && width <= from.width && first <= from.width - width, "weighted");
        auto weights = std::make_shared<Buffer<float>>(round_up(width, kColumns));
        std::fill_n(weights->data(), round_up(width, kColumns), 0.0f), std::copy_n(w, width, weights->data());
        const auto *kernels = &kernels_;
        add({{from, first, width}}, {whole(to)}, true, [=](const Block &b) {
            kernels->weighted(b.at<int16_t>(from) + first, from.stride, weights->data(), width, b.n, b.at<float>(to), to.stride);
        });
    }

    // The floats of one row of each field, added in their order.
    void lookup_sum(int out, const Array &table, const Array &columns, const Array &offsets, const Array &rows) {
        const Slot to = slot(out, Kind::kFloats, "lookup_sum");
        const auto *values = data_of<float>(table, "table", 1);
        const auto found = fields(columns, offsets, rows, static_cast<int64_t>(table.shape(0)), "lookup_sum");
        require(!found.empty(), "lookup_sum");
        const int64_t stride = this->columns();
        const bool all = std::all_of(found.begin(), found.end(), [&](const Field &field) { return alike_ids_[static_cast<size_t>(field.column)]; });
        add({}, {whole(to)}, all, [=](const Block &b) {
            auto *result = b.at<float>(to);
            const uint32_t *ids = b.ids;
            for (int64_t s = 0; s < b.n; ++s, ids += stride) {
                float sum = 0;
                for (const Field &field : found) sum += values[field.offset + ids[field.column]];
                result[s * to.stride] = sum;
            }
        });
        kept_.push_back(table);
    }

    // out = sigmoid(bias + sum_t terms[t] * factor[t])
    void total(int out, const std::vector<std::pair<int, float>> &terms, float bias, bool sigmoid) {
        const Slot to = slot(out, Kind::kFloats, "total");
        std::vector<std::pair<Slot, float>> parts;
        for (const auto &[index, factor] : terms) parts.emplace_back(slot(index, Kind::kFloats, "total"), factor);
        std::vector<Span> reads;
        for (const auto &[part, factor] : parts) reads.push_back(whole(part));
        add(reads, {whole(to)}, true, [=](const Block &b) {
            auto *result = b.at<float>(to);
            for (int64_t s = 0; s < b.n; ++s) {
                float logit = bias;
                for (const auto &[part, factor] : parts) logit += b.at<float>(part)[s * part.stride] * factor;
                result[s * to.stride] = sigmoid ? 1.0f / (1.0f + std::exp(-logit)) : logit;
            }
        });
    }

  private:
    // The part of a layer whose inputs are the same in all samples.
    struct Common {
        MixedLinear linear{};
        std::vector<Field> fields;
        std::vector<int32_t> chosen;
    };
    struct Mixed {
        MixedLinear linear{};
        std::vector<Field> fields;
        std::vector<int32_t> chosen;
        std::unique_ptr<Common> common;
        std::vector<std::tuple<Slot, int64_t, bool>> outs;
        Buffer<int16_t> weight;
        Buffer<float> scale, bias;
    };
    struct Dense {
        Linear linear{};
        Buffer<uint8_t> weight;
        Buffer<int32_t> bias;
        Buffer<float> scale;
    };

    // Splits a layer into its part of inputs that are the same in all samples, if there are any, and the rest.
    void split(Mixed &step, const Slot &from, int64_t first, int64_t inputs) const {
        auto common = std::make_unique<Common>();
        std::vector<Field> other;
        for (const Field &field : step.fields) (alike_ids_[static_cast<size_t>(field.column)] ? common->fields : other).push_back(field);
        for (int64_t p = 0; p < step.linear.pairs; ++p)
            (alike({from, first + 2 * p, std::min<int64_t>(2, inputs - 2 * p)}) ? common->chosen : step.chosen).push_back(static_cast<int32_t>(p));
        if (common->fields.empty() && common->chosen.empty()) {
            step.chosen.clear();
            return;
        }
        const auto limit = [](MixedLinear &linear, const std::vector<Field> &fields, const std::vector<int32_t> &chosen) {
            linear.fields = static_cast<int64_t>(fields.size());
            if (fields.empty()) linear.table = nullptr, linear.wide_table = nullptr;
            if (chosen.empty()) linear.pairs = 0;
            linear.chosen = chosen.data(), linear.chosen_count = static_cast<int64_t>(chosen.size()), linear.sparse = false;
        };
        common->linear = step.linear, step.fields = std::move(other);
        limit(step.linear, step.fields, step.chosen), limit(common->linear, common->fields, common->chosen);
        step.common = std::move(common);
    }

    // The table rows of n samples, sample by sample.
    const uint32_t *rows_of(const std::vector<Field> &fields, const Block &block, int64_t n) const {
        static thread_local Buffer<uint32_t> chosen;
        chosen.reserve(kSamples * static_cast<int64_t>(fields.size()));
        uint32_t *next = chosen.data();
        for (int64_t r = 0; r < n; ++r)
            for (const Field &field : fields) *next++ = static_cast<uint32_t>(field.offset) + block.ids[r * columns() + field.column];
        return chosen.data();
    }
};

}  // namespace
}  // namespace zoo

void bind_click_program(nb::module_ &module) {
    using zoo::ClickProgram;
    using Slots = std::vector<std::pair<std::string, int64_t>>;
    nb::class_<ClickProgram>(module, "ClickProgram")
        .def(nb::init<const zoo::Array &, int64_t, int64_t, const Slots &, const std::string &>(), "rows"_a, "numbers"_a, "means"_a, "slots"_a,
             "isa"_a)
        .def("numbers", &ClickProgram::numbers, "out"_a, "position"_a, "columns"_a, "scale"_a)
        .def("gather", &ClickProgram::gather, "out"_a, "position"_a, "table"_a, "first"_a, "rows"_a, "stride"_a, "width"_a, "column"_a,
             "count"_a, "pool"_a, "factor"_a, "mean"_a)
        .def("quantized_gather", &ClickProgram::quantized_gather, "out"_a, "position"_a, "table"_a, "rows"_a, "width"_a, "bits"_a, "scale_unit"_a,
             "bias_unit"_a, "column"_a, "count"_a, "pool"_a, "factor"_a, "mean"_a)
        .def("mixed", &ClickProgram::mixed, "x"_a, "first"_a, "weight"_a, "scale"_a, "bias"_a, "outs"_a, "table"_a.none(), "columns"_a,
             "offsets"_a, "rows"_a, "shift"_a)
        .def("dense", &ClickProgram::dense, "x"_a, "out"_a, "weight"_a, "bias"_a, "scale"_a, "zero_point"_a, "low"_a)
        .def("quantize", &ClickProgram::quantize, "x"_a, "out"_a, "position"_a, "factor"_a, "relu"_a)
        .def("factorization", &ClickProgram::factorization, "x"_a, "out"_a, "positions"_a, "width"_a, "scale"_a)
        .def("cross", &ClickProgram::cross, "x"_a, "u"_a, "g"_a, "first"_a, "factor"_a, "out"_a.none(), "total"_a.none(), "weight"_a.none())
        .def("dots", &ClickProgram::dots, "x"_a, "out"_a, "position"_a, "positions"_a, "width"_a, "factor"_a)
        .def("weighted", &ClickProgram::weighted, "x"_a, "first"_a, "weight"_a, "out"_a)
        .def("normalize", &ClickProgram::normalize, "x"_a, "out"_a, "epsilon"_a, "least"_a, "relu"_a)
        .def("leaky", &ClickProgram::leaky, "x"_a, "out"_a, "slope"_a)
        .def("tanh", &ClickProgram::tanh, "x"_a, "out"_a)
        .def("mixture", &ClickProgram::mixture, "x"_a, "gates"_a, "out"_a)
        .def("gated_sum", &ClickProgram::gated_sum, "x"_a, "gates"_a, "out"_a, "relu"_a)
        .def("product", &ClickProgram::product, "x"_a, "y"_a, "out"_a)
        .def("dice", &ClickProgram::dice, "x"_a, "out"_a, "scale"_a, "shift"_a, "rise"_a, "slope"_a)
        .def("target_attention", &ClickProgram::target_attention, "out"_a, "column"_a, "begin"_a, "count"_a, "padding"_a, "items"_a, "codes"_a,
             "keys"_a, "queries"_a, "product"_a, "one"_a, "hidden"_a, "bias"_a, "two"_a, "score_bias"_a, "softmax"_a, "raw"_a)
        .def("scored_attention", &ClickProgram::scored_attention, "out"_a, "column"_a, "begin"_a, "count"_a, "padding"_a, "items"_a, "scores"_a,
             "softmax"_a, "raw"_a)
        .def("sigmoid_product", &ClickProgram::sigmoid_product, "x"_a, "gates"_a, "out"_a)
        .def("gate_codes", &ClickProgram::gate_codes, "x"_a, "gates"_a, "out"_a)
        .def("code_product", &ClickProgram::code_product, "x"_a, "y"_a, "out"_a, "scale"_a)
        .def("field_attention", &ClickProgram::field_attention, "x"_a, "out"_a, "fields"_a, "heads"_a, "size"_a, "positions"_a.none(),
             "weight"_a, "scale"_a, "bias"_a, "score"_a, "value"_a, "relu"_a)
        .def("lookup_sum", &ClickProgram::lookup_sum, "out"_a, "table"_a, "columns"_a, "offsets"_a, "rows"_a)
        .def("total", &ClickProgram::total, "out"_a, "terms"_a, "bias"_a, "sigmoid"_a)
        .def("rows", &ClickProgram::rows, "out"_a, "column"_a, "table"_a)
        .def("target_transformer", &ClickProgram::target_transformer, "out"_a, "column"_a, "begin"_a, "count"_a, "padding"_a, "heads"_a,
             "items"_a, "keys_values"_a, "places"_a, "position"_a, "layers"_a, "slope"_a, "norms"_a, "epsilon"_a)
        .def("sequence_encoder", &ClickProgram::sequence_encoder, "out"_a, "begin"_a, "count"_a, "padding"_a, "heads"_a, "items"_a,
             "positions"_a, "norms"_a, "epsilon"_a, "layers"_a, "fine"_a)
        .def("share", &ClickProgram::share, "ids"_a, "numbers"_a, "means"_a)
        .def("outputs", &ClickProgram::outputs, "slots"_a)
        .def("__call__", &ClickProgram::call, "ids"_a, "numbers"_a.none(), "scales"_a.none())
        .def_prop_ro("isa", &ClickProgram::isa);
}
