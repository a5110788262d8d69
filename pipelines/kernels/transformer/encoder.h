// An encoder of a Transformer over sentences of any lengths, one after the other: nothing is padded.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "transformer/layers.h"

namespace zoo {

// The memory in which one thread encodes.
struct Encoding {
    std::vector<Register> registers;
    Buffer<float> keys;
};

// Keys as RowKernels::look wants them, [width, room] of rows [n, stride]; what pads them is 0.
template <class T>
void transpose(const T *rows, int64_t stride, int64_t n, int64_t width, T *keys) {
    constexpr int64_t kBlock = 16;
    const int64_t room = round_up(n, kBlock);
    for (int64_t begin = 0; begin < width; begin += kBlock)
        for (int64_t r = 0; r < room; r += kBlock)
            for (int64_t j = begin; j < std::min(begin + kBlock, width); ++j)
                for (int64_t i = r; i < r + kBlock; ++i) keys[j * room + i] = i < n ? rows[i * stride + j] : T{};
}

class Encoder : public Layers {
  public:
    using Layers::Layers;
    // As those of Layers: every row looks at all rows of its sentence.
    void attention(int64_t in, int64_t heads, int64_t out);
    void finish(int64_t in);
    // Token i of a sentence stands in row first[sentence] + i; first [count + 1]. The result, floats, holds until the next call.
    Rows encode(Encoding &work, const int32_t *tokens, const int64_t *first, int64_t count) const;
};

}  // namespace zoo
