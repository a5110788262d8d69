// Beam search over a decoder with continuous batching; its reference is zoo/translation/search/beam_search.py.
#pragma once
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transformer/layers/decoder.h"
#include "transformer/search/phrases.h"
#include "transformer/search/score_rules.h"
#include "transformer/search/speculation.h"

namespace zoo {

struct Options : SearchRules {
    int64_t start, end, beam, n_best, slots;  // end: -1 for none, every sentence then reaches its limit; slots: sentences in a batch
    double length_penalty;
    const Speculation *speculation = nullptr;  // none: no tokens are proposed
    // Words that a sentence needs at least.
    int64_t least_words() const { return 2 * beam + static_cast<int64_t>(banned.size()) + (least > 0); }
};

// What one sentence's translation is to have.
struct Demands {
    std::vector<int32_t> prefix{};  // tokens behind the first ones, which have no part in the length
    Phrases phrases{};              // that it contains
    std::shared_ptr<const std::string> word_marks{};  // of all tokens, see `PhraseState`; null: phrases may be parts of words
    std::optional<std::vector<int32_t>> first{};  // tokens that it begins with, in place of the rules' prefix
};

// Concatenated sources: their tokens and the encoder, or the encoder's results, [sum of lengths, width].
struct Sources {
    const Encoder *encoder;
    std::vector<int32_t> tokens;
    const float *memory;
    std::vector<int64_t> limits, first;  // first: row of each sentence, then the number of rows
    int64_t count;
    std::vector<int32_t> words{};       // shortlists of the sentences, concatenated; empty: the whole vocabulary
    std::vector<int64_t> first_word{};  // offset of each sentence in `words`, then their number
    std::vector<int64_t> numbers{};     // sentence numbers for `SentenceQueue::done`; empty: 0, 1, ...
    std::vector<Demands> demands{};     // of the sentences; empty: none
};

constexpr int64_t kEncoderRows = 192;  // maximum tokens that are encoded together, except for a longer sentence

using Hypotheses = std::vector<Sentence::Hypothesis>;

// Source of sentences for the searches, and sink of their hypotheses.
class SentenceQueue {
  public:
    virtual ~SentenceQueue() = default;
    // Sentences [begin, end) of `sources`.
    struct Taken {
        std::shared_ptr<const Sources> sources;
        int64_t begin, end;
    };
    // Returns at most `most` sentences for a search with `live` active ones; none if the queue is empty. A search without active ones
    // waits for sentences; none then means that the queue is closed.
    virtual Taken take(int64_t most, int64_t live) = 0;
    virtual void done(int64_t number, Hypotheses hypotheses) = 0;
    // Called after a step in which sentences were finished, to wake the consumers once.
    virtual void step_over() {}
    // Whether a sentence is cancelled; checked only while `leaving` is set.
    virtual bool is_cancelled(int64_t) { return false; }
    std::atomic<bool> stop{false}, leaving{false};
};

// Beam search of one thread with continuous batching: finished sentences are replaced from a queue. Results do not depend on the
// batch.
class BeamSearch {
  public:
    BeamSearch(const Decoder &decoder, const Options &options, SentenceQueue &queue);
    ~BeamSearch();
    BeamSearch(const BeamSearch &) = delete;
    // Runs until the queue is closed. between: called every 10 ms, may throw. The GIL is not held.
    void run(void (*between)());

  private:
    void refill();
    void encode_next();
    Rows encoder_results(const Sources &sources, int64_t begin, int64_t end);
    void finish(std::unique_ptr<Sentence> sentence);
    void recycle(std::unique_ptr<Sentence> sentence);
    void drop_cancelled();
    void list_rows();
    bool take_step(Sentence &sentence, int64_t row);

    struct Candidate {
        double score;  // sum of log probabilities
        int64_t slot;
        int32_t token;
        // The order of candidates: by score, then the first beam, then its first token.
        bool operator<(const Candidate &other) const {
            return score != other.score ? score > other.score : slot != other.slot ? slot < other.slot : token < other.token;
        }
    };

    std::vector<int32_t> history(const Sentence &sentence, int64_t slot) const;
    void rank(int64_t slot, int64_t row);
    void choose_constrained(const Sentence &sentence);
    void merge_candidates(const Sentence &sentence, int64_t row, bool last);
    bool advance(Sentence &sentence, int64_t row);
    bool advance_samples(Sentence &sentence, int64_t row);
    bool advance_groups(Sentence &sentence, int64_t row);
    Sentence::Hypothesis hypothesis(const Sentence &sentence, const Candidate &candidate, int64_t length) const;
    void extend(Sentence &sentence, const std::vector<Candidate> &chosen);
    bool is_done(const Sentence &sentence, const Hypotheses &hypotheses, int64_t beam, int64_t length) const;

    const Decoder &decoder_;
    const Options &options_;
    SentenceQueue &queue_;
    std::unique_ptr<Workspace> workspace_;
    Workspace &work_;
    std::unique_ptr<Proposer> proposer_;
    std::vector<std::unique_ptr<Sentence>> live_, waiting_;
    std::vector<Beam> beams_;
    const ScoreRules rules_;
    std::vector<Candidate> candidates_;
    struct Continuation {
        double score;  // log probability
        int32_t token;
    };
    std::vector<std::vector<Continuation>> ranked_;  // of each beam of a sentence, the likeliest first
    std::vector<size_t> merged_;                     // of each beam: how many are among the candidates
    double complete_ = -INFINITY;                    // score of the likeliest candidate that goes on and contains all phrases
};

// The first row of each sentence, and the end of all; lengths int64 [sentences], each 1 to `most`.
std::vector<int64_t> offsets(const Array &lengths, size_t rows, int64_t most);
// A checked copy of tokens, int32, 0 to before `most`, which the caller cannot change.
std::vector<int32_t> checked_tokens(const Array &tokens, int64_t most);

// Shortlists: sorted tokens of all sentences, and the number of each.
using Shortlists = std::optional<std::pair<Array, Array>>;
// Passes over given translations, see forced.cpp. tokens and lengths: of the sources; targets and target_lengths: of the translations.
// Returns the log probabilities, float64 [targets, 1]. excluded: tokens without a share of the probability; shortlists: others have none.
NewArray<double> forced_scores(const Decoder &decoder, const Encoder &encoder, const Array &tokens, const Array &lengths, const Array &targets,
                               const Array &target_lengths, int64_t start, int64_t threads, const std::vector<int32_t> &excluded,
                               const Shortlists &shortlists);
// Returns the weights of a cross-attention, the mean of some heads: float32 [sum of target length * source length, 1], pair by pair.
NewArray<float> forced_attention(const Decoder &decoder, const Encoder &encoder, const Array &tokens, const Array &lengths, const Array &targets,
                                 const Array &target_lengths, int64_t start, int64_t threads, int64_t layer, std::vector<int64_t> heads);

}  // namespace zoo
