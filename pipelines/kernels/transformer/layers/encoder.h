// The encoder of a Transformer, over sentences of any lengths one after the other: nothing is padded.
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "transformer/layers/layers.h"

namespace zoo {

// The memory in which one thread encodes.
struct Encoding {
    std::vector<Register> registers;
    Buffer<float> keys;    // transposed, or queries, keys and values of some heads
    int64_t largest = 0;   // number of rows so far
};

// Transposes keys, rows [n, stride], to [width, n rounded up to 16], padded with 0; see KeysValues.
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
    // Operations, see `Layers`: self-attention over all tokens of a sentence.
    void attention(int64_t in, int64_t heads, int64_t out);
    // The same in integers, see `QuantizedAttention`. before, after: -1 for all keys. norm: scales of queries and of keys, and epsilon;
    // rotary: cos and sin; rows, to_position, to_content: of relative positions, codes and their scales. Their arrays are kept, not copied.
    void quantized_attention(int64_t in, int64_t heads, int64_t key_heads, int64_t before, int64_t after, const std::optional<Array> &bias,
                             const std::optional<std::tuple<Array, Array, float>> &norm, const std::optional<std::pair<Array, Array>> &rotary,
                             const std::optional<Array> &rows, const std::optional<std::pair<Array, Array>> &to_position,
                             const std::optional<std::pair<Array, Array>> &to_content, int64_t out);
    // `count` rows side by side, see `Neighbours`.
    void neighbours(int64_t in, int64_t count, int64_t out);
    // The register `in` is the result; no operation follows.
    void finish(int64_t in);
    // Rows of the result: one a token, or that of each sentence's first or last token alone.
    enum class Picked { kAll, kFirst, kLast };
    // tokens: of `count` sentences, one after the other; first [count + 1]: where each begins, and the end. Returns float32 rows, which hold
    // until the next call with this workspace.
    // types: of the tokens, each with a table of `longest` positions of its own, or with a row for all positions; or null.
    // attended [count]: how many of a sentence's first tokens are keys; null: all.
    Rows encode(Encoding &work, const int32_t *tokens, const int64_t *first, int64_t count, const int32_t *types = nullptr,
                int64_t longest = 0, const int64_t *attended = nullptr,
                Picked picked = Picked::kAll) const;
    // One sentence of n tokens, of which the first `attended` are keys, on as many threads as there are workspaces; the rows are in the
    // first of them. The same bits.
    Rows encode_together(const std::vector<std::unique_ptr<Encoding>> &works, const int32_t *tokens, int64_t n, const int32_t *types,
                         int64_t longest, int64_t attended) const;
    // In place; count: whole sixteens.
    void activate(zoo::Activation kind, float *x, int64_t count) const { isa_.rows->activate(kind, x, count, x); }
    // Of one row, padded with zeros to whole 64; to another one.
    void normalize(const zoo::LayerNorm &norm, const float *x, float *out) const {
        isa_.rows->layer_norm(norm, x, round_up(norm.width, kColumns), {out, nullptr, nullptr, round_up(norm.width, kColumns)}, 1);
    }
    const Isa &kernels() const { return isa_; }
    int64_t reach() const { return reach_; }  // tokens of a text, at most, that all tables of attention are of

  private:
    void embed(const int32_t *tokens, int64_t n, const int32_t *types, int64_t longest, const Rows &out) const;
    // Of a sentence of n tokens, of which the first `attended` have rows that are no zeros.
    void join(const Operation &operation, const Rows &in, int64_t n, int64_t attended, const Rows &out) const;
    // Heads [begin, begin + heads) of the first `keys` tokens of a sentence of n, and those of queries that they serve.
    void attend(Encoding &work, const Operation &operation, const Rows &in, int64_t n, int64_t keys, int64_t begin, int64_t heads,
                const Rows &out) const;
    std::deque<zoo::QuantizedAttention> attentions_;
    std::deque<std::vector<int32_t>> rows_;
    int64_t reach_ = INT64_MAX;
    // Behind the last attention a row depends on itself alone: the first operation there, and the registers of before that are read there.
    size_t tail_ = 0;
    std::vector<int64_t> carried_;
};

}  // namespace zoo
