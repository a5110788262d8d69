// The decoder of an encoder-decoder Transformer, and the state of a sentence that is decoded: its KV caches and its beams.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transformer/layers/encoder.h"

namespace zoo {

constexpr int64_t kPage = 16;        // positions of a KV cache that are allocated at once
constexpr int64_t kMaxBeam = 256;    // ancestors are uint8
constexpr int64_t kMaxSource = 1 << 20;
constexpr int64_t kMaxProposed = 8;  // tokens that are proposed for the sentences of a step, at most

// A sentence in beam search. Its KV cache is float16, [layer][position][slot][key | value] in pages; a beam finds its history through its
// ancestors, the slot of every position before: only these are copied when beams are reordered, never keys and values. Both lie in the
// workspace's arena.
struct Sentence {
    int64_t index = 0, limit = 0, position = 0, beams = 1, source_length = 0;
    int64_t proposed = 0;    // tokens after the newest one that this step verifies (speculative decoding); more than 0 only for one beam
    int64_t rows() const { return beams + proposed; }
    bool top_ended = false;  // the best continuation of a step was the end
    std::vector<Float16 *> pages;           // of the KV cache of self-attention
    Buffer<float> cells;                    // of all recurrences after the last positions, [position % Workspace::cells][slot][columns]
    std::vector<Part<Float16>> cross_kv;    // of each cross-attention the keys, transposed, then the values of one head after the other; see KeysValues
    std::vector<uint8_t> ancestors, next_ancestors;  // [beam, limit]
    std::vector<int32_t> tokens;                     // fed at every position, [limit, beam]
    std::vector<int32_t> prefix;                     // that the translation begins with
    int64_t uncounted = 0;                           // tokens of the prefix that have no part in its length
    std::vector<int32_t> source_tokens;              // where a rule or a proposer reads them
    std::vector<std::vector<int32_t>> phrases;       // that the translation contains
    std::shared_ptr<const std::string> word_marks;   // of all tokens; null: phrases may be parts of words
    std::vector<double> scores;                      // [beams]
    struct Hypothesis {
        std::vector<int32_t> tokens;
        double score;
    };
    std::vector<Hypothesis> hypotheses;
    std::vector<int64_t> members;                    // of each beam its sample, or its group of diverse beams
    std::vector<std::vector<Hypothesis>> grouped;    // of each group
    std::vector<bool> group_done;
    uint64_t key = 0;                                // of the numbers that samples are drawn by
    std::vector<int32_t> words;         // the only ones that it may have, in order; none: the whole vocabulary
    bool shares = false;                // those that sentences share, and `words` besides
    std::unique_ptr<RowLinear> words_layer;  // the vocabulary projection of `words`
    // For proposals, see search/speculation.h.
    std::unique_ptr<Sentence> draft;  // in the draft's decoder; null: none
    int64_t last_row = -1;  // of the newest result in the step before
    int64_t matched = 0;    // tokens that copies follow, or kPrefix or kDrafted: where the proposed tokens are from
    static constexpr int64_t kPrefix = -1, kDrafted = -2;
};

// One row of a decoding step: a beam of a sentence, or its token `ahead` positions after the newest.
struct Beam {
    Sentence *sentence;
    int64_t slot, ahead = 0;
    int64_t position() const { return sentence->position + ahead; }
};

class Decoder;

// A token that follows a row and whose score a rule changes.
struct TokenRule {
    int32_t token;
    bool banned, penalized;
    float logit = -INFINITY;  // -infinity: not among the sentence's words
};

// The memory in which one thread computes decoding steps of up to `rows` beams.
struct Workspace {
    Workspace(const Decoder &decoder, int64_t rows, int64_t beam, int64_t top_k);
    int64_t rows, beam, top_k;
    int64_t cells = 2;  // positions whose cells of recurrences are kept
    std::vector<Register> registers;
    Encoding encoding;
    Register memory, keys_values;         // the encoder's result, where the caller computed it; keys and values of cross-attention
    Buffer<Float16> keys_values_float16;
    Buffer<float> logits, top_values, exp_sums, maxima, no_cell;  // no_cell: zeros
    Buffer<int32_t> top_tokens;
    Buffer<double> log_sum_exp;
    std::vector<std::vector<TokenRule>> taken;         // of each row the tokens, in order, that have no part in `top_tokens` and `log_sum_exp`
    std::vector<std::vector<RowLinear::Taken>> taken_columns;
    std::vector<Float16 *> keys, next_keys;            // of every position, for self-attention; of the next beam
    Arena arena;                                       // of keys and values
    std::vector<Float16 *> free_pages;                 // of finished sentences
    std::vector<std::unique_ptr<Sentence>> free_sentences;
};

class Decoder : public Layers {
  public:
    Decoder(int64_t memory_width, const std::string &isa);
    // Operations, see `Layers`.
    // bias: [heads, reach] of relative positions, see `RowKernels::self_attention`; it is kept, not copied.
    void self_attention(int64_t in, int64_t heads, const std::optional<Array> &bias, int64_t out);
    void recurrence(int64_t in, int64_t residual, int64_t out);
    void cross_attention(int64_t in, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams,
                         int64_t heads, int64_t out);
    // Words, in order, that many sentences have: their logits are computed for all of them at once. Before any sentence comes.
    void share_words(const std::vector<int32_t> &words);
    // Choose a sentence's words.
    void gather_words(Sentence &sentence) const;
    void vocabulary(int64_t in, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams);

    int64_t vocabulary_size() const { return vocabulary_->outputs(); }
    int64_t memory_width() const { return memory_width_; }

    // Memory for a thread, that of an earlier call where it fits: page faults of fresh memory cost more than what is computed in it.
    std::unique_ptr<Workspace> acquire(int64_t rows, int64_t beam, int64_t top_k) const;
    void release(std::unique_ptr<Workspace> work) const;

    // Floats of all recurrences for one beam.
    int64_t cell_width() const { return cell_offsets_.back(); }
    // Rows of the last step that the vocabulary projection read, quantized by these parameters.
    Rows results(const Workspace &work) const { return work.registers[static_cast<size_t>(last_)].rows(); }
    const QParams &result_qparams() const { return vocabulary_->qparams(); }
    int64_t result_width() const { return vocabulary_->inputs(); }

    // Fills the cross-attention caches of these sentences; the encoder's results, float32, follow one another in `memory`.
    void fill_cross_kv(Workspace &work, const std::vector<Sentence *> &sentences, const Rows &memory) const;
    // One decoding step: the newest token of every beam (`Sentence::tokens`), then those that are proposed; the top-k continuations of
    // each are in the workspace. A row is the same bits whatever rows are computed with it.
    void step(Workspace &work, const std::vector<Beam> &beams) const;
    // The same rows up to a cross-attention, by its number, whose weights go to row(beam), a float for each source token: the mean of some heads.
    void attend(Workspace &work, const std::vector<Beam> &beams, int64_t layer, const std::vector<int64_t> &heads,
                const std::function<float *(const Beam &)> &row) const;
    int64_t cross_attentions() const { return static_cast<int64_t>(kv_projections_.size()); }
    // Heads of a cross-attention.
    int64_t heads(int64_t layer) const;

  private:
    friend struct Workspace;
    // Key and value of a position and slot in the KV cache of one self-attention.
    Float16 *cached_key_value(const Workspace &work, const Sentence &sentence, int64_t layer, int64_t position, int64_t slot) const;
    // Those of all positions of a beam, its newest one last.
    void list_keys(const Workspace &work, const Operation &operation, const Beam &beam, std::vector<Float16 *> &keys) const;
    void run_self_attention(Workspace &work, const Operation &operation, const Rows &in, const Rows &out,
                            const std::vector<Beam> &beams) const;
    void run_recurrence(Workspace &work, const Operation &operation, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const;
    void run_cross_attention(const Operation &operation, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const;
    // An embedding or an attention.
    void run_beams(Workspace &work, const Operation &operation, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const;
    // Pages of the KV caches for the positions of these rows.
    void take_pages(Workspace &work, const std::vector<Beam> &beams) const;
    size_t cross_attention_at(int64_t layer) const;

    int64_t memory_width_;
    std::vector<int64_t> kv_offsets_;  // of each self-attention in the float16s of one position and slot, then the size of these
    std::vector<int64_t> cell_offsets_;  // of each recurrence in the floats of one beam, then the size of these
    std::vector<const RowLinear *> kv_projections_;  // of each cross-attention
    std::vector<int64_t> head_sizes_;                // of each cross-attention
    std::vector<int32_t> shared_words_;
    std::vector<bool> is_shared_;  // of each word of the vocabulary
    std::unique_ptr<RowLinear> shared_layer_;
    mutable std::mutex idle_mutex_;
    mutable std::vector<std::unique_ptr<Workspace>> idle_;
};

}  // namespace zoo
