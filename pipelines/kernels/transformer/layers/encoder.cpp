#include "transformer/layers/encoder.h"

#include <cmath>

namespace zoo {

void Encoder::attention(int64_t in, int64_t heads, int64_t out) { Layers::attention(Kind::kAttention, in, 3, heads, out, "attention"); }

void Encoder::quantized_attention(int64_t in, int64_t heads, const std::optional<Array> &bias, int64_t out) {
    Operation &operation = Layers::attention(Kind::kQuantizedAttention, in, 3, heads, out, "attention");
    if (positions_ > kMostCodes) refuse("attention", "its sums can overflow 32 bits");
    if (!bias) return;
    const auto *values = data_of<float>(*bias, "bias", 2);
    const auto rows = static_cast<int64_t>(bias->shape(0)), width = static_cast<int64_t>(bias->shape(1));
    if (rows != heads || !(width % 2)) refuse("attention", "its bias has other heads, or no middle");
    if (!std::all_of(values, values + rows * width, [](float x) { return std::isfinite(x); })) refuse("attention", "its bias is not finite");
    biases_.emplace_back(rows * width);
    std::copy_n(values, rows * width, biases_.back().data());
    operation.factors = biases_.back().data(), operation.layer = width / 2 + 1;
    reach_ = std::min(reach_, operation.layer);
}

void Encoder::finish(int64_t in) {
    require_open("the result");
    read(in, "the result");
    close(in, nullptr);
}

Rows Encoder::encode(Encoding &work, const int32_t *tokens, const int64_t *first, int64_t count, const int32_t *types,
                     int64_t longest) const {
    const int64_t n = first[count] - first[0];
    work.registers.resize(register_widths_.size());
    for (size_t i = 0; i < register_widths_.size(); ++i) work.registers[i].size(n, register_widths_[i]);
    run(work.registers, n, [&](const Operation &operation, const Rows &in, const Rows &out) {
        for (int64_t sentence = 0; sentence < count; ++sentence) {
            const int64_t begin = first[sentence] - first[0], rows = first[sentence + 1] - first[sentence];
            float *to = out.values + begin * out.stride;
            if (operation.kind == Kind::kEmbed) {
                for (int64_t i = 0; i < rows; ++i) embed_row(tokens[begin + i], i + (types ? types[begin + i] * longest : 0), to + i * out.stride);
                continue;
            }
            const float *from = in.values + begin * in.stride;
            if (operation.kind == Kind::kQuantizedAttention) {
                const int64_t reach = operation.layer;  // tokens that a bias is of
                isa_.rows->quantized_attention(from, in.stride, rows, operation.heads, operation.size,
                                               operation.factors ? operation.factors + reach - 1 : nullptr, 2 * reach - 1, to, out.stride);
                continue;
            }
            work.keys.reserve(operation.width * round_up(rows, 16));
            transpose(from + operation.width, in.stride, rows, operation.width, work.keys.data());
            const KeysValues<float> kv{work.keys.data(), from + 2 * operation.width, rows, in.stride, operation.size};
            isa_.rows->attention(from, in.stride, rows, kv, operation.heads, operation.size, to, out.stride);
        }
    });
    return work.registers[static_cast<size_t>(last_)].rows();
}

}  // namespace zoo
