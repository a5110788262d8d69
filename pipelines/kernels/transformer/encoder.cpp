#include "transformer/encoder.h"

namespace zoo {

void Encoder::attention(int64_t in, int64_t heads, int64_t out) { Layers::attention(Kind::kAttention, in, 3, heads, out, "attention"); }

void Encoder::finish(int64_t in) {
    open("the result");
    read(in, "the result");
    close(in, nullptr);
}

Rows Encoder::encode(Encoding &work, const int32_t *tokens, const int64_t *first, int64_t count) const {
    const int64_t n = first[count] - first[0];
    work.registers.resize(widest_.size());
    for (size_t i = 0; i < widest_.size(); ++i) work.registers[i].size(n, widest_[i]);
    run(work.registers, n, [&](const Step &step, const Rows &in, const Rows &out) {
        for (int64_t each = 0; each < count; ++each) {
            const int64_t begin = first[each] - first[0], rows = first[each + 1] - first[each];
            float *to = out.real + begin * out.stride;
            if (step.kind == Kind::kEmbed) {
                for (int64_t i = 0; i < rows; ++i) embed_row(tokens[begin + i], i, to + i * out.stride);
                continue;
            }
            const float *from = in.real + begin * in.stride;
            work.keys.reserve(step.width * round_up(rows, 16));
            transpose(from + step.width, in.stride, rows, step.width, work.keys.data());
            isa_.rows->look(from, in.stride, rows, {work.keys.data(), from + 2 * step.width, rows, in.stride}, step.heads, step.size, to,
                            out.stride);
        }
    });
    return work.registers[static_cast<size_t>(last_)].rows();
}

}  // namespace zoo
