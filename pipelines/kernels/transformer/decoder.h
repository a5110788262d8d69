// A decoder of an encoder-decoder Transformer, and what a sentence keeps while it is decoded.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "transformer/encoder.h"

namespace zoo {

constexpr int64_t kPage = 16;        // positions whose keys and values are allocated at once
constexpr int64_t kMaxBeam = 128;    // a slot is a byte
constexpr int64_t kMaxSource = 1 << 20;

// What a sentence keeps: keys and values of its source, and of every position so far, [layer][position][slot][key | value] in pages. A beam
// finds its history through its ancestors: the slot of every position. Nothing is copied but these.
struct Sentence {
    int64_t index = 0, limit = 0, position = 0, width = 1, source = 0;  // width: beams so far
    bool topped = false;
    std::vector<Buffer<Half>> pages, memory;  // memory: of each cross-attention keys, transposed, then values; see RowKernels::look
    std::vector<uint8_t> ancestors, spare;    // [beam, limit]
    std::vector<int32_t> tokens;              // fed at every position, [limit, beam]
    std::vector<double> scores;               // [width]
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
    Encoding encoding;
    Register given, pairs;  // what an encoder found, where that is given; keys and values of it
    Buffer<Half> halves;    // the same, rounded
    Buffer<float> panel, values, sums, largest;
    Buffer<int32_t> tokens;
    Buffer<double> norms;
    std::vector<const Half *> keys;
    std::vector<Buffer<Half>> pages;                   // that finished sentences left
    std::vector<std::unique_ptr<Sentence>> sentences;  // likewise
};

class Decoder : public Layers {
  public:
    Decoder(int64_t memory_width, const std::string &isa);
    // As those of Layers.
    void self_attention(int64_t in, int64_t heads, int64_t out);
    void cross_attention(int64_t in, const Any &weight, const Any &scale, const Any &shift, const Given &given, int64_t heads, int64_t out);
    void vocabulary(int64_t in, const Any &weight, const Any &scale, const Any &shift, const Given &given);

    int64_t words() const { return vocabulary_->outputs(); }
    int64_t memory_width() const { return memory_width_; }

    // Memory for a thread, that of an earlier call where it fits: fresh pages cost more than what is computed in them.
    std::unique_ptr<Workspace> lend(int64_t rows, int64_t beam, int64_t likeliest) const;
    void take_back(std::unique_ptr<Workspace> work) const;

    // Keys and values of the sources of these sentences, whose rows, floats, follow one another in `memory`.
    void remember(Workspace &work, const std::vector<std::unique_ptr<Sentence>> &sentences, const Rows &memory) const;
    // The newest token of every beam (`Sentence::tokens`) through all steps; the likeliest that follow are in the workspace.
    void step(Workspace &work, const std::vector<Beam> &beams) const;

  private:
    friend struct Workspace;
    Half *key(const Workspace &work, const Sentence &sentence, int64_t layer, int64_t position, int64_t slot) const;
    void attend_self(Workspace &work, const Step &step, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const;
    void attend_cross(const Step &step, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const;

    int64_t memory_width_;
    std::vector<int64_t> own_;  // halves of one position and slot before each self-attention's, then in all
    std::vector<const RowLinear *> sources_;
    mutable std::mutex lending_;
    mutable std::vector<std::unique_ptr<Workspace>> idle_;
};

}  // namespace zoo
