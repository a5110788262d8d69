// A decoder of an encoder-decoder Transformer: a list of steps over numbered registers, and what a sentence keeps while it is decoded.
#pragma once
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arrays.h"
#include "network.h"

namespace zoo {

constexpr int64_t kPage = 16;        // positions whose keys and values are allocated at once
constexpr int64_t kPanel = 256;       // logits of a row that are there at a time
constexpr int64_t kMaxBeam = 128;    // a slot is a byte
constexpr int64_t kMaxSource = 1 << 20;

// Fully connected on rows that were quantized one by one: int8 weights, packed once, columns padded to whole 64.
class RowLinear {
  public:
    // weight int8 [inputs, outputs], scale and shift float32 [outputs]. positive: inputs are nowhere negative. padding: the shift of the
    // columns that pad.
    RowLinear(const Isa &isa, const Any &weight, const Any &scale, const Any &shift, bool positive, float padding = 0);
    // in.bytes and in.scale -> out [n, out_stride], whole 64 columns; residual: [n, residual_stride] or null.
    void run(const Rows &in, int64_t n, bool relu, const float *residual, int64_t residual_stride, float *out, int64_t out_stride) const;
    // The likeliest columns of every row and the logarithm of the sum of all exponentials, norms [n]; panel: scratch, [n, kPanel].
    void rank(const Rows &in, int64_t n, float *panel, const Ranking &ranking, double *norms) const;
    int64_t inputs() const { return linear_.inputs; }
    int64_t outputs() const { return outputs_; }

  private:
    const Isa &isa_;
    Linear linear_{};
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

// What a sentence keeps: keys and values of its source, and of every position so far, [layer][position][slot][key | value] in pages. A beam
// finds its history through its ancestors: the slot of every position. Nothing is copied but these.
struct Sentence {
    int64_t index = 0, limit = 0, position = 0, width = 1, source = 0;  // width: beams so far
    bool topped = false;
    std::vector<Buffer<float>> pages, memory;  // memory: [cross-attention][source, stride]
    std::vector<uint8_t> ancestors, spare;     // [beam, limit]
    std::vector<int32_t> tokens;               // fed at every position, [limit, beam]
    std::vector<double> scores;                // [width]
    struct Hypothesis {
        std::vector<int32_t> tokens;
        double score;
    };
    std::vector<Hypothesis> found;
};

// One beam of one sentence in a step.
struct Beam {
    Sentence *sentence;
    int64_t slot;
};

class Decoder;

// The memory in which one thread computes steps of up to `rows` beams.
struct Workspace {
    Workspace(const Decoder &decoder, int64_t rows, int64_t beam, int64_t likeliest);
    int64_t rows, beam, likeliest;
    std::vector<Register> registers;
    Register source;
    Buffer<float> panel, values, sums, largest;
    Buffer<int32_t> tokens;
    Buffer<double> norms;
    std::vector<const float *> keys;
    std::vector<Buffer<float>> pages;                  // that finished sentences left
    std::vector<std::unique_ptr<Sentence>> sentences;  // likewise
};

class Decoder {
  public:
    Decoder(int64_t memory_width, const std::string &isa);
    Decoder(const Decoder &) = delete;
    // Each appends a step, and raises ValueError for one that does not fit the ones before.
    void embed(Any table, const Any &scale, const Any &positions, int64_t out);
    void norm(int64_t in, const Any &scale, const Any &bias, float epsilon, int64_t out);
    void linear(int64_t in, const Any &weight, const Any &scale, const Any &shift, bool relu, int64_t residual, int64_t out);
    void self_attention(int64_t in, int64_t heads, int64_t out);
    void cross_attention(int64_t in, const Any &weight, const Any &scale, const Any &shift, int64_t heads, int64_t out);
    void vocabulary(int64_t in, const Any &weight, const Any &scale, const Any &shift);
    const char *isa() const { return isa_.name; }

    bool complete() const { return vocabulary_ != nullptr; }
    int64_t words() const { return vocabulary_->outputs(); }
    int64_t positions() const { return positions_; }
    int64_t memory_width() const { return memory_width_; }

    // Memory for a thread, that of an earlier call where it fits: fresh pages cost more than what is computed in them.
    std::unique_ptr<Workspace> lend(int64_t rows, int64_t beam, int64_t likeliest) const;
    void take_back(std::unique_ptr<Workspace> work) const;

    // Keys and values of a sentence's source, float32 [source, memory_width].
    void remember(Workspace &work, Sentence &sentence, const float *memory) const;
    // The newest token of every beam (`Sentence::tokens`) through all steps; the likeliest that follow are in the workspace.
    void step(Workspace &work, const std::vector<Beam> &beams) const;

  private:
    friend struct Workspace;
    enum class Kind { kEmbed, kNorm, kLinear, kSelf, kCross };
    struct Step {
        Kind kind;
        int64_t in, out, residual = -1, layer = 0, heads = 0, size = 0;
        bool relu = false, real = true, bytes = true, positive = false;  // of the result: which forms of it are read, and its sign
        Norm norm{};
        const RowLinear *linear = nullptr;
    };
    struct Value {  // a register, as the steps so far leave it
        int64_t width = 0, writer = 0;
        bool positive = false;
    };
    const Value &read(int64_t index, const char *step) const;
    Step &append(Kind kind, int64_t in, int64_t out, int64_t width, bool positive);
    void open(const char *step) const;
    const RowLinear *keep(const Any &weight, const Any &scale, const Any &shift, bool positive, int64_t inputs, const char *step,
                          float padding = 0);
    void trim();
    int64_t width_of(const Step &step) const;
    void embed_rows(Workspace &work, const Step &step, const std::vector<Beam> &beams) const;
    const float *key(const Workspace &work, const Sentence &sentence, int64_t layer, int64_t position, int64_t slot) const;
    void attend_self(Workspace &work, const Step &step, const std::vector<Beam> &beams) const;
    void attend_cross(Workspace &work, const Step &step, const std::vector<Beam> &beams) const;

    const Isa &isa_;
    int64_t memory_width_, positions_ = 0, width_ = 0, last_ = 0, tokens_ = 0;  // last_: a register
    std::vector<Value> values_;
    std::vector<int64_t> widest_;  // of every register
    std::vector<Step> steps_;
    std::vector<int64_t> own_;     // floats of one position and slot before each self-attention's, then in all
    std::vector<const RowLinear *> sources_;
    std::deque<RowLinear> linears_;
    std::deque<Buffer<float>> floats_;
    const RowLinear *vocabulary_ = nullptr;
    Any table_;                    // int8 [tokens, width], kept alive
    const int8_t *rows_ = nullptr;
    const float *row_scale_ = nullptr, *position_ = nullptr;
    mutable std::mutex lending_;
    mutable std::vector<std::unique_ptr<Workspace>> idle_;
};

}  // namespace zoo
