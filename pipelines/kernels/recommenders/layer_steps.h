// Linear layers as steps of click programs, see layers.py. A first layer is summed in parts: of inputs that are the same in all samples, of
// those of an item, and of the others.
#pragma once
#include <memory>
#include <tuple>
#include <vector>

#include "recommenders/tables/table_steps.h"

namespace zoo {
namespace {

class LayerSteps : public TableSteps {
  public:
    using TableSteps::TableSteps;

    void mixed(int x, int64_t first, const Array &weight, const Array &scale, const Array &bias, const std::vector<std::tuple<int, int64_t, bool>> &outs,
               const std::optional<Array> &table, const Array &columns, const Array &offsets, const Array &rows, int shift, int added,
               int64_t ahead) {
        const auto *w = data_of<int16_t>(weight, "weight", 2);
        const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1);
        const int64_t inputs = static_cast<int64_t>(weight.shape(0)), width = static_cast<int64_t>(weight.shape(1));
        const int64_t fields = static_cast<int64_t>(columns.shape(0)), stride = width, pairs = (inputs + 1) / 2;
        const Slot from = inputs ? slot(x, Kind::kWords, "mixed") : Slot{}, plus = added < 0 ? Slot{} : slot(added, Kind::kFloats, "mixed");
        const bool fits = width >= 1 && width % kColumns == 0 && width <= kWidest && static_cast<int64_t>(scale.shape(0)) == width &&
                    static_cast<int64_t>(bias.shape(0)) == width && shift >= 0 && shift <= 14 && fields <= kMaxFields && !outs.empty() && outs.size() <= kOuts &&
                    first >= 0 && (!inputs || first + inputs <= from.width) && table.has_value() == (fields > 0) &&
                    (added < 0 || plus.width == width) && ahead >= 1 && ahead <= kBlocksAhead;
        require(fits, "mixed");
        auto step = std::make_shared<Mixed>();
        MixedLinear &m = step->linear;
        m.fields = fields, m.pairs = pairs, m.stride = stride, m.shift = shift, m.sparse = from.relu, m.ahead = ahead;
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
        if (!m.sparse) leave_out_zeros(*step, w, inputs);
        m.weight = step->weight.data(), m.scale = step->scale.data(), m.bias = step->bias.data();
        std::vector<Span> writes;
        for (const auto &out : step->outs) writes.push_back(whole(std::get<0>(out)));
        std::optional<Reach> reach;
        for (const Field &field : step->fields) reach = zoo::joined(reach, reach_of(field));
        std::vector<Span> reads;
        if (inputs) reads.push_back({from, first, inputs});
        if (added >= 0) reads.push_back(whole(plus));
        const bool splits = joined(reach, reads) == Reach::kSample;
        if (splits) {
            split(*step, from, first, inputs);
            reads.clear();
            for (int64_t p : step->other_pairs(pairs)) reads.push_back({from, first + 2 * p, std::min<int64_t>(2, inputs - 2 * p)});
            if (added >= 0) reads.push_back(whole(plus));
            add_sums(step, from, first, inputs);
        }
        const int64_t start = step->call ? kept_bytes(stride * 4) : 0;
        const auto run = [=, this](const Block &block) {
            MixedLinear linear = step->linear;
            if (added >= 0) linear.added = block.data<float>(plus);
            const int16_t *codes = pairs ? block.data<int16_t>(from) + first : nullptr;
            const int64_t codes_stride = pairs ? from.stride : 0;
            if (step->call) {
                auto *sums = reinterpret_cast<int32_t *>(block.memory + start);
                if (block.first) add_up(*step->call, block, codes, codes_stride, 1, sums);
                linear.shared = sums;
            }
            const int32_t *own[kSamples];
            if (step->item) {
                for (int64_t s = 0; s < block.n; ++s) own[s] = reinterpret_cast<const int32_t *>(block.records[s] + step->sums->offset);
                linear.own = own;
            }
            Columns to[kOuts];
            for (size_t i = 0; i < step->outs.size(); ++i) {
                const auto &[slot, last, relu] = step->outs[i];
                to[i] = {slot.kind, slot.width, last, block.memory + slot.offset, slot.stride, relu};
            }
            kernels_.mixed(linear, rows_of(step->fields, block, block.n), codes, codes_stride, block.n, to);
        };
        if (splits)
            add_to_samples(reads, writes, !step->fields.empty(), run);
        else
            add(reads, writes, reach, run);
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
        const auto [begin, end] = differing(whole(from));
        const int64_t first = begin, last = end;
        Linear &l = step->linear;
        l.inputs = last - first, l.outputs = outputs, l.float_output = to.kind == Kind::kFloats, l.zero_point = zero_point, l.low = low;
        step->weight.reserve(isa_.packed_bytes(l.inputs, outputs));
        isa_.pack_linear(w + first * outputs, l.inputs, outputs, step->weight.data());
        pad(*step, b, s, outputs);
        l.weight = step->weight.data(), l.bias = step->bias.data(), l.scale = step->scale.data();
        const Isa *isa = &isa_;
        if (l.inputs == inputs) {
            add({whole(from)}, {whole(to)}, std::nullopt, [=](const Block &block) {
                isa->linear(step->linear, RowEpilogue{}, block.data<uint8_t>(from), from.stride, block.n, block.memory + to.offset, to.stride);
            });
            return;
        }
        // The sums of inputs that are the same in all samples become the bias of a call.
        const auto others = std::make_shared<std::vector<int8_t>>(w, w + first * outputs);
        others->insert(others->end(), w + last * outputs, w + inputs * outputs);
        const int64_t start = kept_bytes(round_up(outputs, kColumns) * 4);
        add_to_samples({{from, first, last - first}}, {whole(to)}, false, [=](const Block &block) {
            const auto *x = block.data<uint8_t>(from);
            auto *sums = reinterpret_cast<int32_t *>(block.memory + start);
            if (block.first) {
                std::copy_n(step->bias.data(), round_up(outputs, kColumns), sums);
                const int8_t *weights = others->data();
                for (int64_t k = 0; k < inputs; ++k) {
                    if (k >= first && k < last) continue;
                    for (int64_t j = 0; j < outputs; ++j) sums[j] += int32_t{x[k]} * weights[j];
                    weights += outputs;
                }
            }
            Linear linear = step->linear;
            linear.bias = sums;
            isa->linear(linear, RowEpilogue{}, x + first, from.stride, block.n, block.memory + to.offset, to.stride);
        });
    }

    // `dense` of floats and `cross` in one: a panel of columns after the other, whose floats stay in L2.
    void cross_layer(int h, const Array &weight, const Array &bias, const Array &scale, int x, int g, bool first, float factor, std::optional<int> out,
                     std::optional<int> bytes, const std::optional<Array> &factors) {
        const char *name = "cross_layer";
        const Slot hidden = slot(h, Kind::kBytes, name), from = slot(x, Kind::kWords, name), state = slot(g, Kind::kFloats, name),
                   words = out ? slot(*out, Kind::kWords, name) : Slot{}, coarse = bytes ? slot(*bytes, Kind::kBytes, name) : Slot{};
        const int64_t inputs = hidden.width, outputs = state.width;
        const auto *w = data_of<int8_t>(weight, "weight", 2);
        const auto *b = data_of<int32_t>(bias, "bias", 1);
        const auto *s = data_of<float>(scale, "scale", 1);
        require(static_cast<int64_t>(weight.shape(0)) == inputs && static_cast<int64_t>(weight.shape(1)) == outputs && from.width == outputs &&
                    static_cast<int64_t>(bias.shape(0)) == outputs && static_cast<int64_t>(scale.shape(0)) == outputs && (!out || words.width == outputs) &&
                    (!bytes || coarse.width == outputs) && factors.has_value() == bytes.has_value(),
                name);
        const auto units = factors ? padded(*factors, outputs, name) : nullptr;
        auto step = std::make_shared<Dense>();
        std::vector<Linear> panels;
        std::vector<int64_t> offsets;
        int64_t size = 0;
        for (int64_t column = 0; column < outputs; column += kPanel) {
            offsets.push_back(size);
            size += round_up(isa_.packed_bytes(inputs, std::min(kPanel, outputs - column)), 64);
        }
        step->weight.reserve(size), pad(*step, b, s, outputs);
        for (int64_t column = 0; column < outputs; column += kPanel) {
            const int64_t columns = std::min(kPanel, outputs - column);
            std::vector<int8_t> part(static_cast<size_t>(inputs * columns));
            for (int64_t k = 0; k < inputs; ++k) std::copy_n(w + k * outputs + column, columns, part.data() + k * columns);
            uint8_t *packed = step->weight.data() + offsets[panels.size()];
            isa_.pack_linear(part.data(), inputs, columns, packed);
            panels.push_back({inputs, columns, packed, step->bias.data() + column, step->scale.data() + column, 0, 0, true});
        }
        const bool stores = out.has_value(), stores_bytes = bytes.has_value();
        const auto *kernels = &kernels_;
        const Isa *isa = &isa_;
        std::vector<Span> reads{whole(hidden), whole(from)}, writes{whole(state)};
        if (!first) reads.push_back(whole(state));
        if (stores) writes.push_back(whole(words));
        if (stores_bytes) writes.push_back(whole(coarse));
        add_to_samples(reads, writes, false, [=, keep = step](const Block &block) {
            static thread_local Buffer<float> floats;
            floats.reserve(kSamples * kPanel);
            int64_t column = 0;
            for (const Linear &panel : panels) {
                isa->linear(panel, RowEpilogue{}, block.data<uint8_t>(hidden), hidden.stride, block.n, floats.data(), kPanel);
                const Cross c{panel.outputs, first, factor, units ? units->data() + column : nullptr, nullptr};
                kernels->cross(c, block.data<int16_t>(from) + column, from.stride, floats.data(), kPanel,
                               block.data<float>(state) + column, state.stride, block.n,
                               stores ? block.data<int16_t>(words) + column : nullptr, stores ? words.stride : 0,
                               stores_bytes ? block.data<uint8_t>(coarse) + column : nullptr, stores_bytes ? coarse.stride : 0, nullptr, 0);
                column += panel.outputs;
            }
        });
    }

  protected:
    static constexpr int64_t kPanel = 256;  // columns
    Reach reach_of(const Field &field) const { return reach_ids_[static_cast<size_t>(field.column)]; }
    using TableSteps::reach_of;

  private:
    // A part of a layer: these fields and pairs of inputs.
    struct Sums {
        MixedLinear linear{};
        std::vector<Field> fields;
        std::vector<int32_t> chosen;
    };
    struct Mixed : Sums {
        std::unique_ptr<Sums> call, item;  // the parts that are the same in all samples, and of an item
        std::shared_ptr<Part> sums;        // of the items
        std::vector<std::tuple<Slot, int64_t, bool>> outs;
        Buffer<int16_t> weight;
        Buffer<float> scale, bias;

        // Pairs of inputs that every sample reads.
        std::vector<int64_t> other_pairs(int64_t pairs) const {
            std::vector<int64_t> all(linear.pairs ? static_cast<size_t>(linear.chosen ? linear.chosen_count : pairs) : 0);
            for (size_t i = 0; i < all.size(); ++i) all[i] = linear.chosen ? linear.chosen[i] : static_cast<int64_t>(i);
            return all;
        }
    };
    struct Dense {
        Linear linear{};
        Buffer<uint8_t> weight;
        Buffer<int32_t> bias;
        Buffer<float> scale;
    };

    // Bias and scale of a layer, padded with zeros to whole 64.
    static void pad(Dense &step, const int32_t *bias, const float *scale, int64_t outputs) {
        const int64_t padded = round_up(outputs, kColumns);
        step.bias.reserve(padded), step.scale.reserve(padded);
        std::fill_n(step.bias.data(), padded, 0), std::fill_n(step.scale.data(), padded, 0.0f);
        std::copy_n(bias, outputs, step.bias.data()), std::copy_n(scale, outputs, step.scale.data());
    }

    // Splits a layer into its parts of inputs that are the same in all samples and of those of items, if there are any, and the rest. Rows of
    // items that are shorter than their sums are no part.
    void split(Mixed &step, const Slot &from, int64_t first, int64_t inputs) const {
        Sums parts[3];
        for (const Field &field : step.fields) parts[static_cast<size_t>(reach_of(field))].fields.push_back(field);
        for (int64_t p : step.other_pairs(step.linear.pairs))
            parts[static_cast<size_t>(reach_of(Span{from, first + 2 * p, std::min<int64_t>(2, inputs - 2 * p)}))].chosen.push_back(static_cast<int32_t>(p));
        Sums &call = parts[static_cast<size_t>(Reach::kCall)], &item = parts[static_cast<size_t>(Reach::kItem)],
             &sample = parts[static_cast<size_t>(Reach::kSample)];
        if (item.chosen.empty() && item.fields.size() * (step.linear.wide_table ? 2 : 1) < sizeof(int32_t)) {
            sample.fields.insert(sample.fields.end(), item.fields.begin(), item.fields.end());
            item.fields.clear();
        }
        if (call.fields.empty() && call.chosen.empty() && item.fields.empty() && item.chosen.empty()) return;
        const auto limit = [&](Sums &part) {
            part.linear = step.linear, part.linear.fields = static_cast<int64_t>(part.fields.size());
            if (part.fields.empty()) part.linear.table = nullptr, part.linear.wide_table = nullptr;
            if (part.chosen.empty()) part.linear.pairs = 0;
            part.linear.chosen = part.chosen.data(), part.linear.chosen_count = static_cast<int64_t>(part.chosen.size()), part.linear.sparse = false;
        };
        for (Sums &part : parts) limit(part);
        if (!call.fields.empty() || !call.chosen.empty()) step.call = std::make_unique<Sums>(std::move(call));
        if (!item.fields.empty() || !item.chosen.empty()) step.item = std::make_unique<Sums>(std::move(item));
        static_cast<Sums &>(step) = std::move(sample);
    }

    // Sums of a part of a layer, of n samples.
    void add_up(const Sums &part, const Block &block, const int16_t *codes, int64_t codes_stride, int64_t n, int32_t *sums) const {
        const int64_t stride = part.linear.stride;
        const Columns all{Kind::kSums, stride, stride, sums, stride, false};
        kernels_.mixed(part.linear, rows_of(part.fields, block, n), codes, codes_stride, n, &all);
    }

    // The part of items of a layer, if there is any, in their records.
    void add_sums(const std::shared_ptr<Mixed> &step, const Slot &from, int64_t first, int64_t inputs) {
        if (!step->item) return;
        const int64_t stride = step->linear.stride;
        step->sums = std::make_shared<Part>(Part{Span{}, 4 * stride, 0, true});
        parts_.push_back(step->sums);
        item_steps_.push_back([=, this](const Block &block) {
            static thread_local Buffer<int32_t> sums;
            sums.reserve(kSamples * stride);
            add_up(*step->item, block, inputs ? block.data<int16_t>(from) + first : nullptr, inputs ? from.stride : 0, block.n, sums.data());
            for (int64_t s = 0; s < block.n; ++s)
                std::memcpy(block.records[s] + step->sums->offset, sums.data() + s * stride, static_cast<size_t>(4 * stride));
        });
    }

    // Pairs of inputs whose weights are all zero, as between vectors that a layer reads, are not read.
    static void leave_out_zeros(Mixed &step, const int16_t *weight, int64_t inputs) {
        MixedLinear &m = step.linear;
        for (int64_t p = 0; p < m.pairs; ++p) {
            const int16_t *pair = weight + 2 * p * m.stride, *end = weight + std::min(2 * p + 2, inputs) * m.stride;
            if (std::any_of(pair, end, [](int16_t code) { return code != 0; })) step.chosen.push_back(static_cast<int32_t>(p));
        }
        m.chosen_count = static_cast<int64_t>(step.chosen.size());
        if (m.chosen_count == m.pairs) step.chosen.clear();
        else m.chosen = step.chosen.data();
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
