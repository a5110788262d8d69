// Click programs as Python objects: a method a step, named as its record in steps/, whose arguments are checked when it is added.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <memory>

#include "recommenders/layer_steps.h"

using namespace nb::literals;

namespace zoo {
namespace {

class ClickProgram : public LayerSteps {
  public:
    using LayerSteps::LayerSteps;

    void numbers(int out, int64_t position, const Array &columns, const Array &scale) {
        const Slot to = slot(out, Kind::kWords, "numbers");
        const auto *column = data_of<int32_t>(columns, "columns", 1);
        const auto *values = data_of<float>(scale, "scale", 1);
        const int64_t count = static_cast<int64_t>(scale.shape(0));
        require(static_cast<int64_t>(columns.shape(0)) == count && count >= 1 && position >= 0 && position + count <= to.width, "numbers");
        for (int64_t k = 0; k < count; ++k) require(column[k] >= 0 && column[k] < numbers_, "numbers");
        for (int64_t k = 0, end; k < count; k = end) {  // runs of columns that depend on the same
            const auto reach_at = [&](int64_t index) { return reach_numbers_[static_cast<size_t>(column[index])]; };
            for (end = k + 1; end < count && reach_at(end) == reach_at(k);) ++end;
            const int64_t width = end - k, begin = position + k;
            const auto padded = static_cast<size_t>(round_up(width, kColumns));
            std::vector<int32_t> chosen(padded, 0);
            std::vector<float> scales(padded, 0.0f);
            std::copy_n(column + k, width, chosen.data()), std::copy_n(values + k, width, scales.data());
            add({}, {{to, begin, width}}, reach_at(k), [=, kernels = &kernels_, stride = numbers_](const Block &b) {
                kernels->numbers(b.numbers, stride, chosen.data(), scales.data(), width, b.n, b.data<int16_t>(to) + begin, to.stride);
            });
        }
    }

    // The rows `first` .. `first + rows` of table int16 [R, stride], flat; `position`: where they go.
    void gather(int out, int64_t position, Array table, int64_t first, int64_t rows, int64_t stride, int64_t width, int64_t column,
                int64_t count, const std::string &pool, float factor, int64_t mean) {
        if (table.dtype() == nb::dtype<uint8_t>()) return gather_bytes(out, position, std::move(table), rows, stride, width, column, count, pool);
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
        const Reach list = reach_of(reach_ids_, column, count);
        const auto *cached = first ? nullptr : cached_tables_.add(data, stride * 2, column, count);
        if (cached) r.table = static_cast<const int16_t *>(cached->memory());
        add({}, {{to, position, width}}, mean < 0 ? list : zoo::joined(list, reach_means_[static_cast<size_t>(mean)]), [=](const Block &b) {
            const uint32_t *ids = cached ? cached->places_of(b.place) : b.ids + column;
            kernels->gather(r, ids, cached ? count : columns, mean < 0 ? nullptr : b.means + mean, means, b.n, b.data<int16_t>(to) + position, to.stride);
        });
        kept_.push_back(std::move(table));
    }

    void quantize(int x, int out, int64_t position, float factor, bool relu) {
        const Slot from = slot(x, Kind::kFloats, "quantize"), to = slot(out, Kind::kWords, "quantize");
        require(position >= 0 && position + from.width <= to.width, "quantize");
        const auto *kernels = &kernels_;
        add({whole(from)}, {{to, position, from.width}}, std::nullopt, [=](const Block &b) {
            kernels->quantize(b.data<float>(from), from.stride, factor, relu ? 0 : -kCodeLimit, from.width, b.n, b.data<int16_t>(to) + position, to.stride);
        });
    }

    void factorization(int x, int out, const Array &positions, int64_t width, float scale) {
        const Slot from = slot(x, Kind::kWords, "factorization"), to = slot(out, Kind::kFloats, "factorization");
        const auto begins = vectors(positions, width, from, "factorization");
        std::vector<Span> reads;
        for (const int32_t begin : begins) reads.push_back({from, begin, width});
        const auto *kernels = &kernels_;
        add(reads, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->factorization(b.data<int16_t>(from), from.stride, begins.data(), static_cast<int64_t>(begins.size()), width, scale, b.n,
                                   b.data<float>(to), to.stride);
        });
    }

    void cross(int x, int u, int g, bool first, float factor, std::optional<int> out, std::optional<int> total, const std::optional<Array> &weight,
               std::optional<int> bytes, const std::optional<Array> &factors) {
        const Slot from = slot(x, Kind::kWords, "cross"), change = slot(u, Kind::kFloats, "cross"), state = slot(g, Kind::kFloats, "cross");
        require(change.width == state.width && from.width == change.width && weight.has_value() == total.has_value() && factors.has_value() == bytes.has_value(),
                "cross");
        const Slot words = out ? slot(*out, Kind::kWords, "cross") : Slot{}, sum = total ? slot(*total, Kind::kFloats, "cross") : Slot{},
                   coarse = bytes ? slot(*bytes, Kind::kBytes, "cross") : Slot{};
        require((!out || words.width == from.width) && (!bytes || coarse.width == from.width), "cross");
        const auto weights = weight ? padded(*weight, state.width, "cross") : nullptr, units = factors ? padded(*factors, state.width, "cross") : nullptr;
        const Cross c{state.width, first, factor, units ? units->data() : nullptr, weights ? weights->data() : nullptr};
        const bool stores = out.has_value(), sums = total.has_value(), stores_bytes = bytes.has_value();
        const auto *kernels = &kernels_;
        std::vector<Span> reads{whole(from), whole(change)};
        if (!first) reads.push_back(whole(state));
        std::vector<Span> writes{whole(state)};
        if (stores) writes.push_back(whole(words));
        if (stores_bytes) writes.push_back(whole(coarse));
        if (sums) writes.push_back(whole(sum));
        add_to_samples(reads, writes, false, [=, keep = std::pair(weights, units)](const Block &b) {
            kernels->cross(c, b.data<int16_t>(from), from.stride, b.data<float>(change), change.stride, b.data<float>(state), state.stride, b.n,
                           stores ? b.data<int16_t>(words) : nullptr, stores ? words.stride : 0, stores_bytes ? b.data<uint8_t>(coarse) : nullptr,
                           stores_bytes ? coarse.stride : 0, sums ? b.data<float>(sum) : nullptr, sums ? sum.stride : 0);
        });
    }

    void dots(int x, int out, int64_t position, const Array &positions, int64_t width, const Array &factor) {
        const Slot from = slot(x, Kind::kWords, "dots"), to = slot(out, Kind::kWords, "dots");
        const auto begins = vectors(positions, width, from, "dots");
        const auto *values = data_of<float>(factor, "factor", 1);
        const int64_t count = static_cast<int64_t>(begins.size());
        const int64_t pairs = count * (count - 1) / 2;
        require(count >= 2 && position >= 0 && position + pairs <= to.width && static_cast<int64_t>(factor.shape(0)) == pairs, "dots");
        auto factors = std::make_shared<Buffer<float>>(pairs + kColumns);
        std::fill_n(factors->data(), pairs + kColumns, 0.0f), std::copy_n(values, pairs, factors->data());
        std::vector<Span> reads;
        for (const int32_t begin : begins) reads.push_back({from, begin, width});
        std::vector<int32_t> own; // vectors that samples do not have in common
        for (int64_t i = 0; i < count; ++i)
            if (reach_of(reads[static_cast<size_t>(i)]) != Reach::kCall) own.push_back(static_cast<int32_t>(i));
        for (int64_t i = 1, pair = position; i < count; ++i)
            for (int64_t j = 0; j < i; ++j, ++pair)
                if (zoo::joined(reach_of(reads[static_cast<size_t>(i)]), reach_of(reads[static_cast<size_t>(j)])) == Reach::kCall)
                    reach_[static_cast<size_t>(out)][static_cast<size_t>(pair)] = Reach::kCall;
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
            add_to_samples(reads, {{to, position, pairs}}, false, [=](const Block &b) {
                kernels->dots_of(b.data<int16_t>(from), from.stride, begins.data(), count, width, factors->data(), own.data(), owned, own_factors->data(),
                                 b.n, b.data<int16_t>(to) + position, to.stride);
            });
            return;
        }
        add(reads, {{to, position, pairs}}, std::nullopt, [=](const Block &b) {
            kernels->dots(b.data<int16_t>(from), from.stride, begins.data(), count, width, factors->data(), b.n, b.data<int16_t>(to) + position, to.stride);
        });
    }

    void normalize(int x, int out, float epsilon, float least, bool relu) {
        const Slot from = slot(x, Kind::kFloats, "normalize"), to = slot(out, Kind::kFloats, "normalize");
        require(from.width == to.width, "normalize");
        const auto *kernels = &kernels_;
        add({whole(from)}, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->normalize(b.data<float>(from), from.stride, from.width, epsilon, least, relu, b.n, b.data<float>(to));
        });
    }

    void leaky(int x, int out, const Array &slope) {
        const Slot from = slot(x, Kind::kFloats, "leaky"), to = slot(out, Kind::kFloats, "leaky");
        require(from.width == to.width, "leaky");
        const auto slopes = padded(slope, from.width, "leaky");
        const auto *kernels = &kernels_;
        add({whole(from)}, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->leaky(b.data<float>(from), from.stride, slopes->data(), from.width, b.n, b.data<float>(to));
        });
    }

    void tanh(int x, int out) {
        const Slot from = slot(x, Kind::kFloats, "tanh"), to = slot(out, Kind::kFloats, "tanh");
        require(from.width == to.width, "tanh");
        const auto *kernels = &kernels_;
        add({whole(from)}, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->tanh(b.data<float>(from), from.stride, from.width, b.n, b.data<float>(to)); });
    }

    void mixture(int x, int gates, int out) {
        const Slot from = slot(x, Kind::kFloats, "mixture"), by = slot(gates, Kind::kFloats, "mixture"), to = slot(out, Kind::kFloats, "mixture");
        require(from.width == to.width && from.width % by.width == 0, "mixture");
        const auto *kernels = &kernels_;
        add({whole(from), whole(by)}, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->mixture(b.data<float>(from), from.stride, b.data<float>(by), by.stride, by.width, from.width / by.width, b.n, b.data<float>(to));
        });
    }

    void gated_sum(const std::vector<int> &x, int gates, int out, bool relu) {
        const Slot by = slot(gates, Kind::kFloats, "gated_sum"), to = slot(out, Kind::kFloats, "gated_sum");
        std::vector<Slot> from;
        for (int number : x) from.push_back(slot(number, Kind::kFloats, "gated_sum"));
        require(!from.empty() && static_cast<int64_t>(from.size()) == by.width && by.width <= kOuts, "gated_sum");
        for (const Slot &expert : from) require(expert.width == to.width && expert.offset != to.offset, "gated_sum");
        const auto *kernels = &kernels_;
        std::vector<Span> reads{whole(by)};
        for (const Slot &expert : from) reads.push_back(whole(expert));
        add(reads, {whole(to)}, std::nullopt, [=](const Block &b) {
            const float *experts[kOuts];
            for (size_t e = 0; e < from.size(); ++e) experts[e] = b.data<float>(from[e]);
            kernels->gated_sum(experts, to.stride, b.data<float>(by), by.stride, by.width, to.width, relu, b.n, b.data<float>(to));
        });
    }

    void product(int x, int y, int out) {
        const Slot a = slot(x, Kind::kFloats, "product"), b = slot(y, Kind::kFloats, "product"), to = slot(out, Kind::kFloats, "product");
        require(a.width == b.width, "product");
        const auto *kernels = &kernels_;
        add({whole(a), whole(b)}, {whole(to)}, std::nullopt, [=](const Block &block) {
            kernels->product(block.data<float>(a), block.data<float>(b), a.stride, a.width, block.n, block.data<float>(to), to.stride);
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
        add({{from, first, width}}, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->weighted(b.data<int16_t>(from) + first, from.stride, weights->data(), width, b.n, b.data<float>(to), to.stride);
        });
    }

    // The floats of one row of each field, added in their order.
    void lookup_sum(int out, const Array &table, const Array &columns, const Array &offsets, const Array &rows) {
        const Slot to = slot(out, Kind::kFloats, "lookup_sum");
        const auto *values = data_of<float>(table, "table", 1);
        const auto sum_fields = fields(columns, offsets, rows, static_cast<int64_t>(table.shape(0)), "lookup_sum");
        require(!sum_fields.empty(), "lookup_sum");
        const int64_t stride = this->columns();
        std::optional<Reach> reach;
        for (const Field &field : sum_fields) reach = zoo::joined(reach, reach_of(field));
        add({}, {whole(to)}, reach, [=](const Block &b) {
            auto *result = b.data<float>(to);
            const uint32_t *ids = b.ids;
            for (int64_t s = 0; s < b.n; ++s, ids += stride) {
                float sum = 0;
                for (const Field &field : sum_fields) sum += values[field.offset + ids[field.column]];
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
        add(reads, {whole(to)}, std::nullopt, [=](const Block &b) {
            auto *result = b.data<float>(to);
            for (int64_t s = 0; s < b.n; ++s) {
                float logit = bias;
                for (const auto &[part, factor] : parts) logit += b.data<float>(part)[s * part.stride] * factor;
                result[s * to.stride] = sigmoid ? 1.0f / (1.0f + std::exp(-logit)) : logit;
            }
        });
    }
};

}  // namespace
}  // namespace zoo

void bind_click_program(nb::module_ &module) {
    using zoo::ClickProgram;
    using Slots = std::vector<std::pair<std::string, int64_t>>;
    nb::class_<zoo::Items>(module, "ClickItems").def("__len__", &zoo::Items::count).def_prop_ro("nbytes", &zoo::Items::bytes);
    nb::class_<ClickProgram>(module, "ClickProgram")
        .def(nb::init<const zoo::Array &, int64_t, int64_t, const Slots &, const std::string &>(), "rows"_a, "numbers"_a, "means"_a, "slots"_a,
             "isa"_a)
        .def("numbers", &ClickProgram::numbers, "out"_a, "position"_a, "columns"_a, "scale"_a)
        .def("gather", &ClickProgram::gather, "out"_a, "position"_a, "table"_a, "first"_a, "rows"_a, "stride"_a, "width"_a, "column"_a,
             "count"_a, "pool"_a, "factor"_a, "mean"_a)
        .def("quantized_gather", &ClickProgram::quantized_gather, "out"_a, "position"_a, "table"_a, "rows"_a, "width"_a, "bits"_a, "scale_unit"_a,
             "bias_unit"_a, "column"_a, "count"_a, "pool"_a, "factor"_a, "mean"_a)
        .def("mixed", &ClickProgram::mixed, "x"_a, "first"_a, "weight"_a, "scale"_a, "bias"_a, "outs"_a, "table"_a.none(), "columns"_a,
             "offsets"_a, "rows"_a, "shift"_a, "added"_a, "ahead"_a)
        .def("dense", &ClickProgram::dense, "x"_a, "out"_a, "weight"_a, "bias"_a, "scale"_a, "zero_point"_a, "low"_a)
        .def("code_bytes", &ClickProgram::code_bytes, "x"_a, "first"_a, "out"_a, "position"_a, "width"_a)
        .def("quantize", &ClickProgram::quantize, "x"_a, "out"_a, "position"_a, "factor"_a, "relu"_a)
        .def("factorization", &ClickProgram::factorization, "x"_a, "out"_a, "positions"_a, "width"_a, "scale"_a)
        .def("column_bytes", &ClickProgram::column_bytes, "x"_a, "first"_a, "out"_a, "factor"_a)
        .def("cross", &ClickProgram::cross, "x"_a, "u"_a, "g"_a, "first"_a, "factor"_a, "out"_a.none(), "total"_a.none(), "weight"_a.none(),
             "bytes"_a.none(), "factors"_a.none())
        .def("cross_layer", &ClickProgram::cross_layer, "h"_a, "weight"_a, "bias"_a, "scale"_a, "x"_a, "g"_a, "first"_a, "factor"_a, "out"_a.none(),
             "bytes"_a.none(), "factors"_a.none())
        .def("dots", &ClickProgram::dots, "x"_a, "out"_a, "position"_a, "positions"_a, "width"_a, "factor"_a)
        .def("weighted", &ClickProgram::weighted, "x"_a, "first"_a, "weight"_a, "out"_a)
        .def("normalize", &ClickProgram::normalize, "x"_a, "out"_a, "epsilon"_a, "least"_a, "relu"_a)
        .def("leaky", &ClickProgram::leaky, "x"_a, "out"_a, "slope"_a)
        .def("tanh", &ClickProgram::tanh, "x"_a, "out"_a)
        .def("mixture", &ClickProgram::mixture, "x"_a, "gates"_a, "out"_a)
        .def("gated_sum", &ClickProgram::gated_sum, "x"_a, "gates"_a, "out"_a, "relu"_a)
        .def("product", &ClickProgram::product, "x"_a, "y"_a, "out"_a)
        .def("dice", &ClickProgram::dice, "x"_a, "out"_a, "scale"_a, "shift"_a, "rise"_a, "slope"_a, "epsilon"_a)
        .def("target_attention", &ClickProgram::target_attention, "out"_a, "column"_a, "begin"_a, "count"_a, "padding"_a, "items"_a, "codes"_a,
             "keys"_a, "queries"_a, "product"_a, "one"_a, "hidden"_a, "bias"_a, "two"_a, "score_bias"_a, "softmax"_a, "raw"_a,
             "gap_begin"_a, "gaps"_a)
        .def("scored_attention", &ClickProgram::scored_attention, "out"_a, "column"_a, "begin"_a, "count"_a, "padding"_a, "items"_a, "scores"_a,
             "softmax"_a, "raw"_a, "gap_begin"_a, "gaps"_a)
        .def("sigmoid_product", &ClickProgram::sigmoid_product, "x"_a, "gates"_a, "out"_a)
        .def("gate_codes", &ClickProgram::gate_codes, "x"_a, "gates"_a, "out"_a.none(), "curve"_a, "scale"_a, "bytes"_a.none(),
             "factors"_a.none())
        .def("code_product", &ClickProgram::code_product, "x"_a, "y"_a, "out"_a, "scale"_a)
        .def("field_attention", &ClickProgram::field_attention, "x"_a, "out"_a, "fields"_a, "heads"_a, "size"_a, "positions"_a.none(),
             "weight"_a, "scale"_a, "bias"_a, "score"_a, "value"_a, "relu"_a)
        .def("lookup_sum", &ClickProgram::lookup_sum, "out"_a, "table"_a, "columns"_a, "offsets"_a, "rows"_a)
        .def("total", &ClickProgram::total, "out"_a, "terms"_a, "bias"_a, "sigmoid"_a)
        .def("rows", &ClickProgram::rows, "out"_a, "column"_a, "table"_a)
        .def("target_transformer", &ClickProgram::target_transformer, "out"_a, "column"_a, "begin"_a, "count"_a, "padding"_a, "heads"_a,
             "items"_a, "keys_values"_a, "places"_a, "position"_a, "layers"_a, "slope"_a, "norms"_a, "epsilon"_a,
             "gap_begin"_a, "gaps"_a)
        .def("sequence_encoder", &ClickProgram::sequence_encoder, "out"_a, "begin"_a, "count"_a, "padding"_a, "heads"_a, "items"_a,
             "positions"_a, "norms"_a, "epsilon"_a, "layers"_a, "fine"_a, "gap_begin"_a, "gaps"_a)
        .def("share", &ClickProgram::share, "ids"_a, "numbers"_a, "means"_a)
        .def("keep_items", &ClickProgram::keep_items, "scores"_a)
        .def("cache", &ClickProgram::cache, "path"_a, "tables"_a)
        .def_prop_ro("cached_rows", &ClickProgram::cached_rows)
        .def("outputs", &ClickProgram::outputs, "slots"_a)
        .def("__call__", &ClickProgram::call, "ids"_a, "numbers"_a.none(), "scales"_a.none())
        .def("items", &ClickProgram::items, "count"_a)
        .def("fill", &ClickProgram::fill, "items"_a, "first"_a, "ids"_a, "numbers"_a.none(), "scales"_a.none())
        .def("rank", &ClickProgram::rank, "items"_a, "positions"_a, "ids"_a, "numbers"_a.none(), "scales"_a.none())
        .def_prop_ro("item_bytes", &ClickProgram::item_bytes)
        .def_prop_ro("score_bytes", &ClickProgram::score_bytes)
        .def_prop_ro("isa", &ClickProgram::isa);
}
