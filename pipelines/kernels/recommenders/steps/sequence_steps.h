// Steps of click programs on sequences, see sequences.py.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "isa/sequences/kernels.h"
#include "recommenders/click_program.h"

namespace zoo {
namespace {

inline const SequenceKernels &sequence_kernels(const std::string &isa) {
#ifdef ZOO_AVX512
    if (isa == "avx512" || isa == "amx") return kAvx512Sequences;
#endif
#ifdef ZOO_AVX2
    if (isa == "avx2") return kAvx2Sequences;
#endif
    return kPortableSequences;
}

class SequenceProgram : public Program {
  public:
    using Program::Program;

    // out = x with an activation: arrays of `width`; scale, shift and rise are empty for a PReLU.
    void dice(int x, int out, const Array &scale, const Array &shift, const Array &rise, const Array &slope) {
        const Slot from = slot(x, Kind::kFloats, "dice"), to = slot(out, Kind::kFloats, "dice");
        require(from.width == to.width && static_cast<int64_t>(slope.shape(0)) == from.width, "dice");
        const int64_t width = round_up(from.width, 16);
        auto kept = std::make_shared<std::vector<Buffer<float>>>();
        const Unit unit = activation(scale, shift, rise, slope, width, *kept, "dice");
        const auto *kernels = &sequence_kernels(isa_.name);
        add({whole(from)}, {whole(to)}, true, [=](const Block &b) {
            (void)kept;
            kernels->activate(unit, b.at<float>(from), from.stride, width, b.n, b.at<float>(to));
        });
    }

    // Columns of the ids: the target, and `count` of the sequence from `begin` on. The tables have `rows` rows of whole sixteens.
    void target_attention(int out, int64_t column, int64_t begin, int64_t count, int64_t padding, Array items, Array keys, Array queries,
                          const Array &product, const std::vector<Array> &one, const Array &hidden, const Array &bias,
                          const std::vector<Array> &two, const Array &score, float score_bias, bool softmax) {
        const Slot to = slot(out, Kind::kFloats, "target_attention");
        TargetAttention t{};
        const int64_t rows = static_cast<int64_t>(items.shape(0));
        t.items = data_of<float>(items, "items", 2), t.keys = data_of<float>(keys, "keys", 2), t.queries = data_of<float>(queries, "queries", 2);
        t.size = static_cast<int64_t>(items.shape(1)), t.first = static_cast<int64_t>(keys.shape(1));
        const auto *p = data_of<float>(product, "product", 2), *h = data_of<float>(hidden, "hidden", 2);
        const auto *b = data_of<float>(bias, "bias", 1), *w = data_of<float>(score, "score", 1);
        t.size_inputs = to.width, t.first_inputs = static_cast<int64_t>(hidden.shape(0));
        t.second = round_up(static_cast<int64_t>(hidden.shape(1)), 16);
        t.column = column, t.begin = begin, t.count = count, t.padding = static_cast<uint32_t>(padding);
        t.score_bias = score_bias, t.softmax = softmax;
        const int64_t outputs = static_cast<int64_t>(hidden.shape(1));
        bool fits = rows >= 1 && static_cast<int64_t>(keys.shape(0)) == rows && static_cast<int64_t>(queries.shape(0)) == rows &&
                    static_cast<int64_t>(queries.shape(1)) == t.first && t.size % 16 == 0 && t.first % 16 == 0 && t.size >= to.width &&
                    t.size <= to.stride && static_cast<int64_t>(product.shape(0)) == t.size_inputs &&
                    static_cast<int64_t>(product.shape(1)) == t.first && t.first_inputs >= 1 && t.first_inputs <= t.first && outputs >= 1 &&
                    t.first <= kWidest && static_cast<int64_t>(bias.shape(0)) == outputs && static_cast<int64_t>(score.shape(0)) == outputs && count >= 1 && begin >= 0 &&
                    begin + count <= columns() && column >= 0 && column < columns() && padding >= 0 && one.size() == 4 && two.size() == 4;
        require(fits, "target_attention");
        fits = rows_[static_cast<size_t>(column)] >= 1 && rows_[static_cast<size_t>(column)] <= rows;
        for (int64_t c = begin; c < begin + count; ++c) fits &= rows_[static_cast<size_t>(c)] >= 1 && rows_[static_cast<size_t>(c)] <= rows;
        require(fits, "target_attention");
        auto kept = std::make_shared<std::vector<Buffer<float>>>();
        const auto copied = [&](const float *from, int64_t from_rows, int64_t from_columns, int64_t stride) {
            Buffer<float> made(from_rows * stride);
            std::fill_n(made.data(), from_rows * stride, 0.0f);
            for (int64_t r = 0; r < from_rows; ++r) std::copy_n(from + r * from_columns, from_columns, made.data() + r * stride);
            kept->push_back(std::move(made));
            return kept->back().data();
        };
        t.product = copied(p, t.size_inputs, t.first, t.first), t.hidden = copied(h, t.first_inputs, outputs, t.second);
        t.bias = copied(b, 1, outputs, t.second), t.score = copied(w, 1, outputs, t.second);
        t.one = activation(one[0], one[1], one[2], one[3], t.first, *kept, "target_attention");
        t.two = activation(two[0], two[1], two[2], two[3], t.second, *kept, "target_attention");
        const auto *kernels = &sequence_kernels(isa_.name);
        const int64_t stride = columns();
        add({}, {whole(to)}, false, [=](const Block &block) {
            (void)kept;
            kernels->attend(t, block.ids, stride, block.n, block.at<float>(to), to.stride);
        });
        for (Array *each : {&items, &keys, &queries}) kept_.push_back(std::move(*each));
    }

  private:
    // An activation whose arrays are filled up with zeros to `width`.
    static Unit activation(const Array &scale, const Array &shift, const Array &rise, const Array &slope, int64_t width,
                           std::vector<Buffer<float>> &kept, const char *step) {
        const Array *arrays[] = {&scale, &shift, &rise, &slope};
        const float *found[4];
        const bool plain = scale.shape(0) == 0;
        for (int i = 0; i < 4; ++i) {
            const auto *values = data_of<float>(*arrays[i], "activation", 1);
            const int64_t count = static_cast<int64_t>(arrays[i]->shape(0));
            require(count <= width && count == (plain && i < 3 ? 0 : static_cast<int64_t>(slope.shape(0))), step);
            Buffer<float> made(width);
            std::fill_n(made.data(), width, 0.0f), std::copy_n(values, count, made.data());
            kept.push_back(std::move(made));
            found[i] = kept.back().data();
        }
        return {plain ? nullptr : found[0], found[1], found[2], found[3]};
    }
};

}  // namespace
}  // namespace zoo
