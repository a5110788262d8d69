// Steps of click programs on the fields of a sample, as methods named as their records in fields.py.
#pragma once
#include <memory>

#include "recommenders/steps/transformer_steps.h"

namespace zoo {
namespace {

class FieldSteps : public TransformerSteps {
  public:
    using TransformerSteps::TransformerSteps;

    void sigmoid_product(int x, int gates, int out) {
        const Slot from = slot(x, Kind::kFloats, "sigmoid_product"), by = slot(gates, Kind::kFloats, "sigmoid_product"),
                   to = slot(out, Kind::kFloats, "sigmoid_product");
        require(from.width == to.width && by.width == to.width, "sigmoid_product");
        const auto *kernels = &kernels_;
        add({whole(from), whole(by)}, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->sigmoid_product(b.data<float>(from), b.data<float>(by), from.stride, from.width, b.n, b.data<float>(to));
        });
    }

    void gate_codes(int x, int gates, std::optional<int> out, Array curve, float scale, std::optional<int> bytes, const std::optional<Array> &factors) {
        const char *name = "gate_codes";
        const Slot from = slot(x, Kind::kWords, name), by = slot(gates, Kind::kFloats, name), words = out ? slot(*out, Kind::kWords, name) : Slot{},
                   coarse = bytes ? slot(*bytes, Kind::kBytes, name) : Slot{};
        const auto *values = data_of<float>(curve, "curve", 2);
        const bool stores = out.has_value(), stores_bytes = bytes.has_value();
        require(by.width == from.width && (!out || words.width == from.width) && (!bytes || coarse.width == from.width) && (stores || stores_bytes) &&
                    factors.has_value() == stores_bytes && curve.shape(0) == 3 && curve.shape(1) == 32 && scale > 0,
                name);
        const auto *kernels = &kernels_;
        const auto units = factors ? padded(*factors, from.width, name) : nullptr;
        std::vector<Span> writes;
        if (stores) writes.push_back(whole(words));
        if (stores_bytes) writes.push_back(whole(coarse));
        add_to_samples({whole(from), whole(by)}, writes, false, [=](const Block &b) {
            kernels->gate_codes(b.data<int16_t>(from), from.stride, b.data<float>(by), by.stride, values, scale, units ? units->data() : nullptr, from.width,
                                b.n, stores ? b.data<int16_t>(words) : nullptr, stores ? words.stride : 0,
                                stores_bytes ? b.data<uint8_t>(coarse) : nullptr, stores_bytes ? coarse.stride : 0);
        });
        kept_.push_back(std::move(curve));
    }

    void code_product(int x, int y, int out, float scale) {
        const Slot a = slot(x, Kind::kFloats, "code_product"), c = slot(y, Kind::kWords, "code_product"), to = slot(out, Kind::kFloats, "code_product");
        require(a.width == c.width, "code_product");
        const auto *kernels = &kernels_;
        add({whole(a), whole(c)}, {whole(to)}, std::nullopt, [=](const Block &b) {
            kernels->code_product(b.data<float>(a), a.stride, b.data<int16_t>(c), c.stride, a.width, scale, b.n, b.data<float>(to), to.stride);
        });
    }

    // positions: of the fields' codes in x; none: x has the columns of all fields, one after the other
    void field_attention(int x, int out, int64_t fields, int64_t heads, int64_t size, const std::optional<Array> &positions, const Array &weight,
                         const Array &scale, const Array &bias, float score, float value, bool relu) {
        const char *name = "field_attention";
        const Slot from = slot(x, Kind::kWords, name), to = slot(out, Kind::kWords, name);
        const auto *w = data_of<int16_t>(weight, "weight", 2);
        const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1);
        const int64_t inputs = static_cast<int64_t>(weight.shape(0)), outputs = static_cast<int64_t>(weight.shape(1)), pairs = (inputs + 1) / 2;
        require(fields >= 1 && fields <= kMostFields && heads >= 1 && size >= 1 && size <= 64 && heads <= 64 && inputs >= 1 &&
                    (outputs == 3 * heads * size || outputs == 4 * heads * size) && static_cast<int64_t>(scale.shape(0)) == outputs &&
                    static_cast<int64_t>(bias.shape(0)) == outputs && to.width == fields * heads * size,
                name);
        require(positions || from.width == fields * inputs, name);
        struct Kept {
            FieldAttention attention{};
            std::vector<int32_t> begins;
            Buffer<int32_t> weight;
            Buffer<float> scale, bias;
        };
        auto step = std::make_shared<Kept>();
        std::vector<Span> reads;
        if (positions) {
            step->begins = vectors(*positions, inputs, from, name);
            require(static_cast<int64_t>(step->begins.size()) == fields, name);
            for (const int32_t begin : step->begins) reads.push_back({from, begin, inputs});
        } else {
            reads.push_back(whole(from));
        }
        step->weight.reserve(outputs * pairs), step->scale.reserve(outputs), step->bias.reserve(outputs);
        std::copy_n(s, outputs, step->scale.data()), std::copy_n(b, outputs, step->bias.data());
        for (int64_t o = 0; o < outputs; ++o)
            for (int64_t p = 0; p < pairs; ++p) {
                const uint16_t low = static_cast<uint16_t>(w[2 * p * outputs + o]);
                const uint16_t high = 2 * p + 1 < inputs ? static_cast<uint16_t>(w[(2 * p + 1) * outputs + o]) : 0;
                step->weight.data()[o * pairs + p] = static_cast<int32_t>(low | uint32_t{high} << 16);
            }
        const float most = static_cast<float>(std::min<int64_t>(32767, kWeights / fields));
        step->attention = {fields, inputs, heads, size, outputs, positions ? step->begins.data() : nullptr, step->weight.data(),
                           step->scale.data(), step->bias.data(), score, most, value, relu};
        const auto *kernels = &kernels_;
        add(reads, {whole(to)}, std::nullopt, [=](const Block &block) {
            kernels->field_attention(step->attention, block.data<int16_t>(from), from.stride, block.n, block.data<int16_t>(to), to.stride);
        });
    }

  private:
    static constexpr int64_t kMostFields = 128;
    static constexpr int64_t kWeights = 524416;  // weights of all fields: times the largest code within int32
};

}  // namespace
}  // namespace zoo
