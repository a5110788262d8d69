// Speculative decoding of greedy search (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"): cheap
// proposals for the next tokens, which the decoder verifies in one step. The tokens are those of the decoder alone.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "transformer/layers/decoder.h"

namespace zoo {

// A source of proposals: a draft, a small decoder over the same encoder, whose cells begin with the decoder's newest result (Cheng et al.
// 2024, "Recurrent Drafter"), or the source itself (Saxena 2023, "Prompt Lookup Decoding").
class Speculation {
  public:
    // Microseconds of a decoding step of one row, of each further row, and of a step of the draft.
    using Costs = std::tuple<double, double, double>;

    // copies: whether source tokens are target tokens that may be proposed.
    Speculation(const Decoder &decoder, bool copies) : decoder_(decoder), copies_(copies) {}
    // draft: its cells of the positions before are layer(the decoder's newest result). offsets int64 [source tokens + 1], targets int32: the
    // words of each source token, besides those that the draft's sentences share; none: the whole vocabulary.
    void set_draft(const Decoder &draft, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams,
                   const std::optional<Array> &offsets, const std::optional<Array> &targets, const std::vector<int32_t> &common);
    // Measures the costs, in a few milliseconds; or assumes others than usual ones.
    void measure();
    void assume(const Costs &costs) { std::tie(step_, row_, drafted_) = costs; }

    const Decoder *draft() const { return draft_; }
    bool copies() const { return copies_; }
    Costs costs() const { return {step_, row_, drafted_}; }
    bool is_for(const Decoder &decoder) const { return &decoder == &decoder_; }
    // Of all searches: steps that verified proposals, proposed tokens, and those that held.
    std::tuple<int64_t, int64_t, int64_t> counts() const { return {steps_, proposed_, accepted_}; }

  private:
    friend class Proposer;
    void choose_words(Sentence &draft, const int32_t *tokens) const;
    const Decoder &decoder_;
    const bool copies_;
    const Decoder *draft_ = nullptr;
    std::unique_ptr<RowLinear> state_;  // newest result of the decoder -> cells of the draft
    std::vector<int64_t> offsets_;
    std::vector<int32_t> targets_, common_;
    double step_ = 1, row_ = 0.3, drafted_ = 0.1;
    // What all searches observed; updates of threads may overwrite one another.
    static constexpr int64_t kMatch = 3;     // tokens, at most, that a copy follows
    static constexpr double kPrior = 0.5;    // of a copy's chance
    mutable std::atomic<double> copy_rates_[kMatch + 1]{kPrior, kPrior, kPrior, kPrior};  // chance that a copied token holds, by the tokens that it follows
    mutable std::atomic<double> balance_{0};  // microseconds that drafts saved, a running mean
    mutable std::atomic<int64_t> paused_{0};  // steps without drafts
    mutable std::atomic<int64_t> steps_{0}, proposed_{0}, accepted_{0};
};

// The proposals for the sentences of one search. A token is proposed where it pays: where the chance that it holds is worth more than
// its row in the step.
class Proposer {
  public:
    // greedy: whether more than the prefix is proposed.
    Proposer(const Speculation &speculation, const Decoder &decoder, bool greedy, int32_t end, const std::vector<int32_t> &banned);
    ~Proposer();
    // Whether it proposes what follows in the source.
    bool reads_source() const { return speculation_.copies_ && greedy_; }
    // New sentences, with their tokens, or null, and the encoder's results one after the other; live: sentences of the search.
    void begin(const std::vector<Sentence *> &sentences, const int32_t *tokens, const Rows &memory, int64_t live);
    void end(Sentence &sentence);
    // Proposes tokens (`Sentence::proposed`) behind the newest ones, given the workspace of the step before.
    void propose(const Workspace &work, const std::vector<std::unique_ptr<Sentence>> &live);
    // The first `accepted` of the proposed tokens held.
    void verified(const Sentence &sentence, int64_t proposed, int64_t accepted);

  private:
    void begin_draft(Sentence &sentence, const int32_t *tokens);
    void add(Sentence &sentence, int32_t token, int64_t from);
    void propose_copies(Sentence &sentence, double least);
    void propose_drafted(const Workspace &work, const std::vector<std::unique_ptr<Sentence>> &live);
    // Tokens that may be proposed for a sentence.
    int64_t room(const Sentence &sentence) const;

    const Speculation &speculation_;
    const Decoder &decoder_;
    int64_t beam_ = 1;
    const bool greedy_;
    const int32_t end_;
    const std::vector<int32_t> &banned_;
    std::unique_ptr<Workspace> draft_work_;
    std::vector<Beam> beams_;
    std::vector<double> chances_;     // of the beams' proposals so far
    double least_ = 1;                // chance from which on a drafted token is proposed
    int64_t cells_ = 0, proposed_ = 0;
};

}  // namespace zoo
