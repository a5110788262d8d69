// Beam search over a decoder with continuous batching, by the rules of the numpy one (zoo/translation/search/beam_search.py).
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transformer/layers/decoder.h"

namespace zoo {

struct Options {
    int64_t start, end, beam, n_best, slots;  // end: -1 for none, every sentence then reaches its limit; slots: sentences in a batch
    double length_penalty;
    // zoo/translation/search/beam_search.py has the rules
    std::string kind, early_stopping;
    std::vector<int32_t> prefix, banned;
    int64_t least, no_repeat_ngram;
    bool forced_end;
    double word_penalty;
    bool renormalize;
    // Candidates of a row that may be forbidden: as many more are looked at.
    int64_t spare(int64_t longest) const {
        return static_cast<int64_t>(banned.size()) + (least > 0) + (no_repeat_ngram == 1 ? longest : no_repeat_ngram ? kRepeated : 0);
    }
    static constexpr int64_t kRepeated = 32;  // no n - 1 tokens come more often in a translation where what follows them differs
};

// The sources, one after the other: their tokens and their encoder, or the encoder's results, [sum of lengths, width].
struct Sources {
    const Encoder *encoder;
    std::vector<int32_t> tokens;
    const float *memory;
    std::vector<int64_t> limits, first;  // first: row of each sentence, and of the end
    int64_t count;
    std::vector<int32_t> words{};       // that each sentence may have, one after the other; none: all may come
    std::vector<int64_t> first_word{};  // of each sentence, and of the end
    std::vector<int64_t> numbers{};     // by which `SentenceQueue::done` knows each sentence; none: 0, 1, ...
};

constexpr int64_t kEncoderRows = 192;  // tokens that are encoded together, unless one sentence is longer

using Hypotheses = std::vector<Sentence::Hypothesis>;

// Where searches take sentences from, and leave what they found.
class SentenceQueue {
  public:
    virtual ~SentenceQueue() = default;
    // Some sentences of `sources`, [begin, end).
    struct Taken {
        std::shared_ptr<const Sources> sources;
        int64_t begin, end;
    };
    // The next sentences, at most `most`, for a search that has `live` ones; none: there are none now, or where it has none and may wait
    // for some, no more.
    virtual Taken take(int64_t most, int64_t live) = 0;
    virtual void done(int64_t number, Hypotheses hypotheses) = 0;
    // A step is over in which sentences were done: who waits for them is woken once for all.
    virtual void step_over() {}
    // Whether nobody wants a sentence any more; looked at only where `leaving`.
    virtual bool unwanted(int64_t) { return false; }
    std::atomic<bool> stop{false}, leaving{false};
};

// Beam search of one thread: sentences come from a queue into its slots, and leave when they are done. No result depends on who else is
// there.
class BeamSearch {
  public:
    BeamSearch(const Decoder &decoder, const Options &options, SentenceQueue &queue);
    ~BeamSearch();
    BeamSearch(const BeamSearch &) = delete;
    // Searches until the queue has no more sentences. between: called now and then, may throw. The GIL is not held.
    void run(void (*between)());

  private:
    void refill();
    void encode_next();
    Rows encoder_results(const Sources &sources, int64_t begin, int64_t end);
    void finish(std::unique_ptr<Sentence> sentence);
    void recycle(std::unique_ptr<Sentence> sentence);
    void dismiss();

    struct Candidate {
        double score;  // log probability, summed
        int64_t slot;
        int32_t token;
    };

    std::vector<int32_t> history(const Sentence &sentence, int64_t slot) const;
    std::vector<int32_t> forbidden(const Sentence &sentence, int64_t slot) const;
    int64_t allowed(const Sentence &sentence, int64_t slot, int64_t row);
    void merge_candidates(const Sentence &sentence, int64_t row, bool last);
    bool advance(Sentence &sentence, int64_t row);
    bool is_done(const Sentence &sentence, int64_t length) const;

    const Decoder &decoder_;
    const Options &options_;
    SentenceQueue &queue_;
    std::unique_ptr<Workspace> workspace_;
    Workspace &work_;
    std::vector<std::unique_ptr<Sentence>> live_, waiting_;
    std::vector<Beam> beams_;
    std::vector<Candidate> candidates_;
    std::vector<int64_t> taken_, left_;  // of each beam: how many of its continuations are among the candidates, and how many there are
};

}  // namespace zoo
