// What the encoder and the decoder of a Transformer share: a list of steps over numbered registers, checked as they are added.
#pragma once
#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isa/arrays.h"
#include "isa/isa.h"

namespace zoo {

constexpr int64_t kMaxWidth = 65536;
constexpr int64_t kPanel = 256;  // logits of a row that are there at a time

// (scale, zero) of a graph's QuantizeLinear; none: each row by its own range.
using Given = std::optional<std::pair<float, int32_t>>;

// Raises ValueError.
[[noreturn]] void refuse(const char *step, const std::string &why);

// Fully connected on quantized rows: int8 weights, packed once, columns padded to whole 64.
class RowLinear {
  public:
    // weight int8 [inputs, outputs], scale and shift float32 [outputs]. positive: inputs are nowhere negative, where no levels are given.
    // padding: the shift of the columns that pad.
    RowLinear(const Isa &isa, const Any &weight, const Any &scale, const Any &shift, const Given &given, bool positive, float padding = 0);
    // in.bytes and in.scale -> out [n, out_stride], whole 64 columns; residual: [n, residual_stride] or null.
    void run(const Rows &in, int64_t n, bool relu, const float *residual, int64_t residual_stride, float *out, int64_t out_stride) const;
    // The likeliest columns of every row and the logarithm of the sum of all exponentials, norms [n]; panel: scratch, [n, kPanel].
    void rank(const Rows &in, int64_t n, float *panel, const Ranking &ranking, double *norms) const;
    // The weights of one output, int8 [inputs].
    void column(int64_t output, int8_t *weight) const { isa_.unpack_column(weight_.data(), linear_.inputs, output, weight); }
    const Levels &levels() const { return levels_; }  // of the rows it takes
    int64_t inputs() const { return linear_.inputs; }
    int64_t outputs() const { return outputs_; }

  private:
    const Isa &isa_;
    Linear linear_{};
    Levels levels_;
    int64_t outputs_;
    Buffer<uint8_t> weight_;
    Buffer<int32_t> bias_;
    Buffer<float> scale_, shift_;
};

// Memory for rows of floats and of bytes.
struct Register {
    Buffer<float> real, scale;
    Buffer<uint8_t> bytes;
    int64_t stride = 0;
    void size(int64_t rows, int64_t width) {
        stride = round_up(width, kColumns);
        real.reserve(rows * stride), bytes.reserve(rows * stride), scale.reserve(rows);
    }
    Rows rows() const { return {real.data(), bytes.data(), scale.data(), stride}; }
};

class Layers {
  public:
    explicit Layers(const std::string &isa) : isa_(choose(isa)) {}
    Layers(const Layers &) = delete;
    // Each appends a step, and raises ValueError for one that does not fit the ones before.
    // table: int8 [tokens, width]; without one the columns of the vocabulary, those of `shared` or of the step that is to come, are it.
    void embed(std::optional<Any> table, const Layers *shared, const Any &scale, const Any &positions, int64_t out);
    void norm(int64_t in, const Any &scale, const Any &bias, float epsilon, int64_t out);
    void linear(int64_t in, const Any &weight, const Any &scale, const Any &shift, const Given &given, bool relu, int64_t residual, int64_t out);
    const char *isa() const { return isa_.name; }

    bool complete() const { return complete_; }
    int64_t tokens() const { return tokens_; }
    int64_t positions() const { return positions_; }
    int64_t width() const { return values_[static_cast<size_t>(last_)].width; }  // of the result
    std::vector<Register> registers(int64_t rows) const;

  protected:
    enum class Kind { kEmbed, kNorm, kLinear, kAttention, kSelf, kCross };
    struct Step {
        Kind kind;
        int64_t in, out, residual = -1, layer = 0, heads = 0, size = 0, width = 0;
        bool relu = false, real = false, bytes = false;  // of the result: which forms of it are read
        Levels levels;
        Norm norm{};
        const RowLinear *linear = nullptr;
    };
    struct Value {  // a register, as the steps so far leave it
        int64_t width = 0;
        bool positive = false;
    };
    void open(const char *step) const;
    const Value &read(int64_t index, const char *step) const;
    Step &append(Kind kind, int64_t in, int64_t out, int64_t width, bool positive = false);
    // A step on queries that have `parts` times its result's columns.
    Step &attention(Kind kind, int64_t in, int64_t parts, int64_t heads, int64_t out, const char *step);
    const RowLinear *keep(const Any &weight, const Any &scale, const Any &shift, const Given &given, bool positive, int64_t inputs,
                          const char *step, float padding = 0);
    // No step follows: `last` is the register that is read, by `reader`, or as floats.
    void close(int64_t last, const RowLinear *reader);
    // All steps on n rows; `compute` makes the results of embeddings and attention.
    template <class Compute>
    void run(std::vector<Register> &registers, int64_t n, Compute compute) const;
    bool embeds_columns() const { return !rows_; }
    void embed_row(int64_t token, int64_t position, float *to) const;

    const Isa &isa_;
    int64_t positions_ = 0, tokens_ = 0, last_ = 0;  // last_: a register
    bool complete_ = false;
    const RowLinear *vocabulary_ = nullptr;  // also where it is another's
    std::vector<Value> values_;
    std::vector<int64_t> widest_;  // of every register
    std::vector<Step> steps_;

    int64_t width_ = 0;  // of the embeddings

  private:
    std::deque<RowLinear> linears_;
    std::deque<Buffer<float>> floats_;
    std::optional<Any> table_;     // kept alive
    const int8_t *rows_ = nullptr;
    const float *row_scale_ = nullptr, *position_ = nullptr;
};

template <class Compute>
void Layers::run(std::vector<Register> &registers, int64_t n, Compute compute) const {
    const auto at = [&](int64_t index) -> Register & { return registers[static_cast<size_t>(index)]; };
    for (const Step &step : steps_) {
        Register &out = at(step.out);
        out.stride = round_up(step.width, kColumns);
        Rows rows = out.rows();
        if (step.kind == Kind::kNorm) {
            if (!step.real) rows.real = nullptr;
            if (!step.bytes) rows.bytes = nullptr;
            isa_.rows->norm(step.norm, at(step.in).real.data(), at(step.in).stride, rows, n);
            continue;
        }
        if (step.kind == Kind::kLinear) {
            const float *residual = step.residual < 0 ? nullptr : at(step.residual).real.data();
            step.linear->run(at(step.in).rows(), n, step.relu, residual, out.stride, rows.real, rows.stride);
        } else {
            compute(step, step.in < 0 ? Rows{} : at(step.in).rows(), rows);
            if (step.width < rows.stride)
                for (int64_t r = 0; r < n; ++r) std::fill(rows.real + r * rows.stride + step.width, rows.real + (r + 1) * rows.stride, 0.0f);
        }
        if (step.bytes) isa_.rows->quantize(rows, rows.stride, step.levels, n);
    }
}

}  // namespace zoo
