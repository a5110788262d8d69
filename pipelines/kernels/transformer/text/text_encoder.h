// The encoder of a Transformer and what makes one result of each text: pooling, layers of a head, normalization (transformer/text/program.py).
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "transformer/layers/encoder.h"

namespace zoo {

class TextEncoder {
  public:
    // The encoder's embedding has `types` tables of positions, one after the other.
    TextEncoder(const Encoder &encoder, int64_t types, const std::string &pooling, bool normalize);
    // weight float32 [outputs, inputs], bias float32 [outputs]; activation: "", "tanh" or "relu".
    void dense(const Array &weight, const Array &bias, const std::string &activation);
    int64_t longest() const { return longest_; }
    int64_t tokens() const { return encoder_.tokens(); }
    int64_t types() const { return types_; }
    int64_t width() const { return layers_.empty() ? encoder_.width() : layers_.back().outputs; }
    // tokens, types: of `count` texts, one after the other; first [count + 1]: where each begins, and the end. out [count, width()].
    void compute(const int32_t *tokens, const int32_t *types, const int64_t *first, int64_t count, int64_t threads, float *out) const;

  private:
    enum class Pooling { kMean, kCls, kMax };
    enum class Then { kNothing, kTanh, kRelu };
    struct Dense {
        int64_t inputs, outputs;
        std::vector<float> weight, bias;  // rows of whole sixteens
        Then then;
    };
    // The result of a text of `count` rows.
    void pool(const Rows &rows, int64_t begin, int64_t count, std::vector<float> &x, std::vector<float> &y, float *out) const;

    const Encoder &encoder_;
    int64_t types_, longest_;
    Pooling pooling_;
    bool normalize_;
    std::deque<Dense> layers_;
};

}  // namespace zoo
