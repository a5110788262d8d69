// Steps of click programs on sequences, see sequences.py.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "isa/sequences/kernels.h"
#include "recommenders/click_program.h"

namespace zoo {
namespace {

class SequenceProgram : public Program {
  public:
    using Program::Program;

    // out = x with an activation: arrays of `width`; scale, shift and rise are empty for a PReLU. epsilon: see Unit.
    void dice(int x, int out, const Array &scale, const Array &shift, const Array &rise, const Array &slope, float epsilon) {
        const Slot from = slot(x, Kind::kFloats, "dice"), to = slot(out, Kind::kFloats, "dice");
        require(from.width == to.width && static_cast<int64_t>(slope.shape(0)) == from.width, "dice");
        require(epsilon == 0 || (epsilon > 0 && scale.shape(0) > 0), "dice");
        const int64_t width = round_up(from.width, 16);
        auto kept = std::make_shared<std::vector<Buffer<float>>>();
        Unit unit = activation(scale, shift, rise, slope, width, *kept, "dice");
        unit.units = from.width, unit.epsilon = epsilon;
        const auto *kernels = isa_.sequences;
        add({whole(from)}, {whole(to)}, std::nullopt, [=](const Block &b) {
            (void)kept;
            kernels->activate(unit, b.data<float>(from), from.stride, width, b.n, b.data<float>(to));
        });
    }

    // Columns of the ids: the target, and `count` of the sequence from `begin` on. Tables have whole sixteens of columns, codes whole 32.
    void target_attention(int out, int64_t column, int64_t begin, int64_t count, int64_t padding, Array items, Array codes, Array keys,
                          Array queries, const Array &product, const std::vector<Array> &one, const Array &hidden, const Array &bias,
                          const std::vector<Array> &two, float score_bias, bool softmax, bool raw, int64_t gap_begin,
                          const std::vector<Array> &gaps) {
        const Slot to = slot(out, Kind::kFloats, "target_attention");
        TargetAttention t{};
        const int64_t rows = static_cast<int64_t>(items.shape(0));
        t.items = data_of<float>(items, "items", 2), t.codes = data_of<int16_t>(codes, "codes", 2);
        t.keys = data_of<int32_t>(keys, "keys", 2), t.queries = data_of<int32_t>(queries, "queries", 2);
        t.size = static_cast<int64_t>(items.shape(1)), t.depth = static_cast<int64_t>(codes.shape(1));
        t.first = static_cast<int64_t>(keys.shape(1));
        const auto *p = data_of<int16_t>(product, "product", 2), *h = data_of<int16_t>(hidden, "hidden", 2);
        const auto *b = data_of<int32_t>(bias, "bias", 1);
        const int64_t units = static_cast<int64_t>(hidden.shape(0)), second = static_cast<int64_t>(hidden.shape(1));
        t.pairs = round_up(round_up(to.width, 2) / 2, 2), t.units = round_up(units, 4), t.second = round_up(second, 4);
        t.column = column, t.begin = begin, t.count = count, t.padding = static_cast<uint32_t>(padding);
        t.score_bias = score_bias, t.softmax = softmax, t.raw = raw;
        const auto alike_rows = [&](const Array &table, int64_t width) {
            return static_cast<int64_t>(table.shape(0)) == rows && static_cast<int64_t>(table.shape(1)) == width;
        };
        const bool fits = rows >= 1 && alike_rows(codes, t.depth) && alike_rows(keys, t.first) && alike_rows(queries, t.first) && t.size % 16 == 0 &&
                    t.first % 16 == 0 && t.depth % 32 == 0 && t.size >= to.width && t.depth >= to.width && t.size <= to.stride &&
                    static_cast<int64_t>(product.shape(0)) == to.width && static_cast<int64_t>(product.shape(1)) == units && units >= 1 &&
                    units <= t.first && second >= 1 && second <= kWidest && t.first <= kWidest && t.depth <= kWidest &&
                    static_cast<int64_t>(bias.shape(0)) == second && padding >= 0 && one.size() == 3 && two.size() == 3 &&
                    reads_rows(begin, count, rows) && reads_rows(column, 1, rows);
        require(fits, "target_attention");
        time_gaps(t, gap_begin, gaps, "target_attention");
        auto words = std::make_shared<std::vector<Buffer<int32_t>>>();
        auto floats = std::make_shared<std::vector<Buffer<float>>>();
        t.product = word_pairs(p, to.width, units, *words), t.hidden = word_pairs(h, units, second, *words);
        Buffer<int32_t> biases(t.second);
        std::fill_n(biases.data(), t.second, 0), std::copy_n(b, second, biases.data());
        words->push_back(std::move(biases));
        t.bias = words->back().data();
        t.one = curves(one, units, *floats), t.two = curves(two, second, *floats);
        t.one_history = alike_ids(begin, count) && (gap_begin < 0 || alike_ids(gap_begin, count));
        const auto *kernels = isa_.sequences;
        const int64_t stride = columns();
        if (keeps_scores_ && t.one_history && reach_of(reach_ids_, column, 1) == Reach::kItem) {
            keep_scores(t, rows, to, [words, floats] {});
        } else {
            add({}, {whole(to)}, Reach::kSample, [=](const Block &block) {
                (void)words, (void)floats;
                kernels->attend(t, block.ids, stride, block.n, block.data<float>(to), to.stride);
            });
        }
        for (Array *array : {&items, &codes, &keys, &queries}) kept_.push_back(std::move(*array));
    }

    // The same from the scores of all pairs, [rows, rows].
    void scored_attention(int out, int64_t column, int64_t begin, int64_t count, int64_t padding, Array items, Array scores, bool softmax,
                          bool raw, int64_t gap_begin, const std::vector<Array> &gaps) {
        const Slot to = slot(out, Kind::kFloats, "scored_attention");
        TargetAttention t{};
        t.rows = static_cast<int64_t>(items.shape(0));
        t.items = data_of<float>(items, "items", 2), t.scores = data_of<float>(scores, "scores", 2);
        t.size = static_cast<int64_t>(items.shape(1));
        t.column = column, t.begin = begin, t.count = count, t.padding = static_cast<uint32_t>(padding), t.softmax = softmax, t.raw = raw;
        require(t.rows >= 1 && static_cast<int64_t>(scores.shape(0)) == t.rows && static_cast<int64_t>(scores.shape(1)) == t.rows &&
                    t.size % 16 == 0 && t.size >= to.width && t.size <= to.stride && padding >= 0 && reads_rows(begin, count, t.rows) &&
                    reads_rows(column, 1, t.rows),
                "scored_attention");
        time_gaps(t, gap_begin, gaps, "scored_attention");
        const auto *kernels = isa_.sequences;
        const int64_t stride = columns();
        add({}, {whole(to)}, Reach::kSample,
            [=](const Block &block) { kernels->attend(t, block.ids, stride, block.n, block.data<float>(to), to.stride); });
        kept_.push_back(std::move(items)), kept_.push_back(std::move(scores));
    }

  protected:
    // Whether these columns of the ids choose among `height` rows.
    bool reads_rows(int64_t first, int64_t count, int64_t height) const {
        if (first < 0 || count < 1 || first + count > columns()) return false;
        return std::all_of(rows_.begin() + first, rows_.begin() + first + count, [&](int32_t row_count) { return row_count >= 1 && row_count <= height; });
    }

    // The table of time gaps, which `count` columns of the ids from `begin` on select, `width` columns; null for begin -1 and no table.
    const float *gap_rows(int64_t begin, int64_t count, const std::vector<Array> &gaps, int64_t width, const char *step) {
        require(begin >= -1 && gaps.empty() == (begin < 0), step);
        if (begin < 0) return nullptr;
        const auto *rows = data_of<float>(gaps[0], "gaps", 2);
        require(static_cast<int64_t>(gaps[0].shape(1)) == width && reads_rows(begin, count, static_cast<int64_t>(gaps[0].shape(0))), step);
        kept_.push_back(gaps[0]);
        return rows;
    }

  private:
    // gaps: what the time gaps add to the items and to their scores.
    void time_gaps(TargetAttention &t, int64_t begin, const std::vector<Array> &gaps, const char *step) {
        t.gap_begin = begin, t.gap_items = gap_rows(begin, t.count, gaps, t.size, step);
        if (begin < 0) return;
        require(gaps.size() == 2 && gaps[0].shape(0) == gaps[1].shape(0), step);
        t.gap_scores = data_of<float>(gaps[1], "gaps", 1);
        kept_.push_back(gaps[1]);
    }

    // The scores of all items of the table and every item are computed with these; `kept`: what the attention points to.
    void keep_scores(const TargetAttention &t, int64_t rows, const Slot &to, std::function<void()> kept) {
        const auto *kernels = isa_.sequences;
        const int64_t stride = columns();
        const size_t step = scored_.size();
        scored_.push_back(rows);
        item_steps_.push_back([=](const Block &b) {
            (void)kept;
            std::vector<uint32_t> all(static_cast<size_t>(rows)), targets(static_cast<size_t>(b.n));
            std::iota(all.begin(), all.end(), 0u);
            for (int64_t s = 0; s < b.n; ++s) targets[static_cast<size_t>(s)] = b.ids[s * stride + t.column];
            kernels->score(t, all.data(), rows, targets.data(), b.n, b.items->scores(step) + b.places[0], b.items->count());
        });
        add_to_samples({}, {whole(to)}, false, [=](const Block &b) {
            static thread_local Buffer<float> scores;
            static thread_local std::vector<uint32_t> items, gaps;
            const int64_t places = round_up(t.count, kScores), all = b.items->count();
            scores.reserve(kSamples * places);
            items.clear(), gaps.clear();
            for (int64_t p = 0; p < t.count; ++p) {
                if (b.ids[t.begin + p] == t.padding) continue;
                items.push_back(b.ids[t.begin + p]);
                if (t.gap_begin >= 0) gaps.push_back(b.ids[t.gap_begin + p]);
            }
            for (size_t p = 0; p < items.size(); ++p) {
                const float *own = b.items->scores(step) + items[p] * all;
                for (int64_t s = 0; s < b.n; ++s) scores.data()[s * places + static_cast<int64_t>(p)] = own[b.places[s]];
            }
            kernels->attend_scores(t, items.data(), gaps.data(), static_cast<int64_t>(items.size()), scores.data(), places, b.n, b.data<float>(to),
                                   to.stride);
        });
    }
    static constexpr int64_t kScores = 16;  // of a sample: whole vectors

    // Weights int16 [inputs, outputs] as words of two inputs: [outputs / 4, inputs / 2, 4], zeros where there are none.
    static const int32_t *word_pairs(const int16_t *weight, int64_t inputs, int64_t outputs, std::vector<Buffer<int32_t>> &kept) {
        const int64_t pairs = round_up(round_up(inputs, 2) / 2, 2), groups = round_up(outputs, 4) / 4;
        Buffer<int32_t> made(groups * pairs * 4);
        const auto weight_at = [&](int64_t k, int64_t j) { return k < inputs && j < outputs ? static_cast<uint16_t>(weight[k * outputs + j]) : uint16_t{0}; };
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t k = 0; k < pairs; ++k)
                for (int64_t j = 4 * g; j < 4 * g + 4; ++j)
                    made.data()[(g * pairs + k) * 4 + j % 4] = static_cast<int32_t>(weight_at(2 * k, j) | static_cast<uint32_t>(weight_at(2 * k + 1, j)) << 16);
        kept.push_back(std::move(made));
        return kept.back().data();
    }

    // (scale, shift, coefficients) of `units`, filled up with zeros to whole fours.
    static Curves curves(const std::vector<Array> &arrays, int64_t units, std::vector<Buffer<float>> &kept) {
        const float *pointers[3];
        for (size_t i = 0; i < 3; ++i) {
            const auto *values = data_of<float>(arrays[i], "curves", i < 2 ? 1 : 3);
            const int64_t unit_values = i < 2 ? 1 : 3 * kSegments;
            bool fits = static_cast<int64_t>(arrays[i].shape(0)) == units;
            if (i == 2) fits &= arrays[i].shape(1) == 3 && static_cast<int64_t>(arrays[i].shape(2)) == kSegments;
            require(fits, "target_attention");
            Buffer<float> made(round_up(units, 4) * unit_values);
            std::fill_n(made.data(), round_up(units, 4) * unit_values, 0.0f), std::copy_n(values, units * unit_values, made.data());
            kept.push_back(std::move(made));
            pointers[i] = kept.back().data();
        }
        return {pointers[0], pointers[1], pointers[2]};
    }

    // An activation whose arrays are filled up with zeros to `width`.
    static Unit activation(const Array &scale, const Array &shift, const Array &rise, const Array &slope, int64_t width,
                           std::vector<Buffer<float>> &kept, const char *step) {
        const Array *arrays[] = {&scale, &shift, &rise, &slope};
        const float *pointers[4];
        const bool plain = scale.shape(0) == 0;
        for (int i = 0; i < 4; ++i) {
            const auto *values = data_of<float>(*arrays[i], "activation", 1);
            const int64_t count = static_cast<int64_t>(arrays[i]->shape(0));
            require(count <= width && count == (plain && i < 3 ? 0 : static_cast<int64_t>(slope.shape(0))), step);
            Buffer<float> made(width);
            std::fill_n(made.data(), width, 0.0f), std::copy_n(values, count, made.data());
            kept.push_back(std::move(made));
            pointers[i] = kept.back().data();
        }
        return {plain ? nullptr : pointers[0], pointers[1], pointers[2], pointers[3], 0, 0};
    }
};

}  // namespace
}  // namespace zoo
