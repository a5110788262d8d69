// The encoder of a Transformer and what makes one result of each text or token: pooling, layers of a head, normalization (transformer/text/program.py).
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transformer/layers/encoder.h"

namespace zoo {

class TextEncoder {
  public:
    // The encoder's embedding has `types` tables of positions, one after the other. poolings: their results are concatenated; none: each
    // token has a result.
    TextEncoder(const Encoder &encoder, int64_t types, const std::vector<std::string> &poolings);
    // Steps of the head, in order. weight float32 [outputs, inputs], bias float32 [outputs]; activation: "" for none.
    void dense(const Array &weight, const Array &bias, const std::string &activation);
    void layer_norm(const Array &scale, const Array &bias, float epsilon);
    void truncate(int64_t components);
    void normalize();
    // The last step, where nothing is pooled: of each column of a layer log(1 + y) of the largest y of a text's tokens, 0 at least.
    void vocabulary(const Array &weight, const Array &scale, const Array &bias);
    int64_t longest() const { return longest_; }
    int64_t tokens() const { return encoder_.tokens(); }
    int64_t types() const { return types_; }
    int64_t width() const { return width_; }
    bool pools() const { return !poolings_.empty(); }
    bool by_token() const { return !pools() && !vocabulary_; }
    // tokens, types: of `count` texts, one after the other; first [count + 1]: where each begins, and the end; attended [count]: how many of
    // a text's first tokens the others attend to, or null for all. out [count, width()], or [first[count], width()] where nothing is pooled.
    void compute(const int32_t *tokens, const int32_t *types, const int64_t *first, int64_t count, const int64_t *attended, int64_t threads,
                 float *out) const;

  private:
    enum class Pooling { kMean, kCls, kMax, kLast, kWeightedMean, kMeanSqrtLength };
    enum class Kind { kDense, kLayerNorm, kTruncate, kNormalize };
    struct Step {
        Kind kind;
        int64_t inputs, outputs;
        std::vector<float> weight, bias;  // of a layer: rows of whole sixteens; of a norm: padded with zeros to whole 64
        Activation activation = Activation::kNone;
        float epsilon = 0;
    };
    // The pooled rows of a text of `count` rows, padded with zeros to whole 64.
    void pool(const Rows &rows, int64_t begin, int64_t count, std::vector<float> &x) const;
    // The head's result of x.
    void finish(std::vector<float> &x, std::vector<float> &y, float *out) const;

    // The results of `vocabulary` of the texts [begin, end), whose rows are `rows`.
    void largest(const Rows &rows, const int64_t *first, int64_t begin, int64_t end, float *out) const;

    const Encoder &encoder_;
    int64_t types_, longest_, width_;
    std::vector<Pooling> poolings_;
    Encoder::Picked picked_ = Encoder::Picked::kAll;
    std::deque<Step> steps_;
    std::optional<RowLinear> vocabulary_;
    // Memory of calls that are over: new memory would be cleared by the system, page by page.
    std::unique_ptr<Encoding> take() const;
    void give_back(std::unique_ptr<Encoding> memory) const;
    mutable std::mutex mutex_;
    mutable std::vector<std::unique_ptr<Encoding>> idle_;
};

}  // namespace zoo
