#include "transformer/encoder.h"

namespace zoo {

void Encoder::attention(int64_t in, int64_t heads, int64_t out) { Layers::attention(Kind::kAttention, in, 3, heads, out, "attention"); }

void Encoder::finish(int64_t in) {
    require_open("the result");
    read(in, "the result");
    close(in, nullptr);
}

Rows Encoder::encode(Encoding &work, const int32_t *tokens, const int64_t *first, int64_t count) const {
    const int64_t n = first[count] - first[0];
    work.registers.resize(register_widths_.size());
    for (size_t i = 0; i < register_widths_.size(); ++i) work.registers[i].size(n, register_widths_[i]);
    run(work.registers, n, [&](const Operation &operation, const Rows &in, const Rows &out) {
        for (int64_t sentence = 0; sentence < count; ++sentence) {
            const int64_t begin = first[sentence] - first[0], rows = first[sentence + 1] - first[sentence];
            float *to = out.values + begin * out.stride;
            if (operation.kind == Kind::kEmbed) {
                for (int64_t i = 0; i < rows; ++i) embed_row(tokens[begin + i], i, to + i * out.stride);
                continue;
            }
            const float *from = in.values + begin * in.stride;
            work.keys.reserve(operation.width * round_up(rows, 16));
            transpose(from + operation.width, in.stride, rows, operation.width, work.keys.data());
            isa_.rows->attention(from, in.stride, rows, {work.keys.data(), from + 2 * operation.width, rows, in.stride}, operation.heads,
                                 operation.size, to, out.stride);
        }
    });
    return work.registers[static_cast<size_t>(last_)].rows();
}

}  // namespace zoo
