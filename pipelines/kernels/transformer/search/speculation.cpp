#include "transformer/search/speculation.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace zoo {
namespace {

constexpr int64_t kMaxDrafting = 8;     // sentences of a search, at most, that drafts are made for
constexpr double kNewest = 1.0 / 32;    // weight of the newest observation in a running mean
constexpr double kRetry = 1.0 / 512;    // of the prior, where nothing is observed
constexpr int64_t kPause = 64;          // steps without drafts where they cost more than they save
constexpr int64_t kRounds = 9, kSource = 16, kRows = 4;  // of a measurement

void move(std::atomic<double> &mean, double observed, double weight) {
    const double before = mean.load(std::memory_order_relaxed);
    mean.store(before + (observed - before) * weight, std::memory_order_relaxed);
}

double microseconds(std::chrono::steady_clock::time_point since) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - since).count();
}

void prepare(Sentence &sentence, int64_t limit, int64_t source_length, int64_t cells) {
    sentence.limit = limit, sentence.position = 0, sentence.beams = 1, sentence.proposed = 0, sentence.source_length = source_length;
    sentence.ancestors.assign(static_cast<size_t>(limit), 0), sentence.tokens.assign(static_cast<size_t>(limit), 0);
    sentence.cells.reserve(cells), sentence.words.clear(), sentence.shares = false;
}

// A sentence of zeros to time steps with.
struct Probe {
    Probe(const Decoder &decoder, int64_t positions) : decoder(decoder), work(decoder, kRows, 1, 1) {
        work.cells = kRows + 2;
        prepare(sentence, std::min(positions, decoder.positions()), kSource, work.cells * decoder.cell_width());
        work.memory.size(kSource, decoder.memory_width());
        const Rows memory = work.memory.rows();
        std::fill_n(memory.values, kSource * memory.stride, 0.0f);
        decoder.fill_cross_kv(work, {&sentence}, memory);
    }
    double time(int64_t rows) {
        std::vector<Beam> beams;
        sentence.proposed = rows - 1;
        for (int64_t ahead = 0; ahead < rows; ++ahead) beams.push_back({&sentence, 0, ahead});
        const auto begin = std::chrono::steady_clock::now();
        decoder.step(work, beams);
        return microseconds(begin);
    }
    const Decoder &decoder;
    Workspace work;
    Sentence sentence;
};

}  // namespace

void Speculation::set_draft(const Decoder &draft, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams,
                            const std::optional<Array> &offsets, const std::optional<Array> &targets, const std::vector<int32_t> &common) {
    if (!decoder_.complete() || !draft.complete()) refuse("draft", "a decoder has no vocabulary yet");
    if (draft.memory_width() != decoder_.memory_width() || draft.vocabulary_size() > decoder_.vocabulary_size())
        refuse("draft", "it is of another encoder or vocabulary");
    if (draft.positions() < 2) refuse("draft", "it has no positions");
    state_ = std::make_unique<RowLinear>(draft.instruction_set(), weight, scale, bias, qparams, false);
    if (state_->inputs() != decoder_.result_width() || state_->outputs() != draft.cell_width() || !(state_->qparams() == decoder_.result_qparams()))
        refuse("draft", "its cells are of another decoder");
    if (offsets && targets) {
        const auto *offset = data_of<int64_t>(*offsets, "offsets", 1);
        const auto *target = data_of<int32_t>(*targets, "targets", 1);
        offsets_.assign(offset, offset + offsets->shape(0)), targets_.assign(target, target + targets->shape(0)), common_ = common;
        if (offsets_.empty() || offsets_.front() || offsets_.back() != static_cast<int64_t>(targets_.size()) ||
            !std::is_sorted(offsets_.begin(), offsets_.end()) || common_.empty())
            refuse("draft", "its words are not in order");
        for (const auto *words : {&targets_, &common_})
            for (const int32_t word : *words)
                if (word < 0 || word >= draft.vocabulary_size()) refuse("draft", "a word is none of the vocabulary");
    }
    draft_ = &draft;
}

// The words that a sentence's draft may have.
void Speculation::choose_words(Sentence &draft, const int32_t *tokens) const {
    if (offsets_.empty()) return;
    draft.words = common_;
    for (int64_t i = 0; i < draft.source_length; ++i) {
        const auto token = static_cast<size_t>(tokens[i]);
        if (token + 1 < offsets_.size()) draft.words.insert(draft.words.end(), targets_.begin() + offsets_[token], targets_.begin() + offsets_[token + 1]);
    }
    std::sort(draft.words.begin(), draft.words.end());
    draft.words.erase(std::unique(draft.words.begin(), draft.words.end()), draft.words.end());
    draft_->gather_words(draft);
}

void Speculation::measure() {
    Probe decoder(decoder_, kRows + 1);
    std::optional<Probe> draft;
    if (draft_) {
        draft.emplace(*draft_, kRows + 1);
        int32_t tokens[kSource];  // words of some tokens
        for (int64_t i = 0; i < kSource; ++i) tokens[i] = static_cast<int32_t>(i * static_cast<int64_t>(offsets_.size()) / kSource);
        choose_words(draft->sentence, tokens);
    }
    double one = INFINITY, many = INFINITY, drafted = INFINITY;
    for (int64_t i = 0; i < kRounds; ++i) {  // in turn, each with the caches that the others leave
        one = std::min(one, decoder.time(1));
        many = std::min(many, decoder.time(kRows));
        if (draft) drafted = std::min(drafted, draft->time(1));
    }
    step_ = one, row_ = std::max((many - one) / (kRows - 1), 0.0), drafted_ = draft ? drafted : 0.0;
}

Proposer::Proposer(const Speculation &speculation, const Decoder &decoder, bool greedy, int32_t end, const std::vector<int32_t> &banned)
    : speculation_(speculation), decoder_(decoder), greedy_(greedy), end_(end), banned_(banned) {
    if (!greedy || !speculation.draft_) return;
    draft_work_ = speculation.draft_->acquire(kMaxDrafting, 1, 1);
    cells_ = round_up(speculation.draft_->cell_width(), kColumns);
}

Proposer::~Proposer() {
    if (draft_work_) speculation_.draft_->release(std::move(draft_work_));
}

void Proposer::begin(const std::vector<Sentence *> &sentences, const int32_t *tokens, const Rows &memory, int64_t live) {
    const bool drafts = draft_work_ && live <= kMaxDrafting && (tokens || speculation_.offsets_.empty());
    std::vector<Sentence *> drafted;
    for (Sentence *sentence : sentences) {
        if (drafts) {
            begin_draft(*sentence, tokens);
            drafted.push_back(sentence->draft.get());
        }
        if (tokens) tokens += sentence->source_length;
    }
    if (drafts) speculation_.draft_->fill_cross_kv(*draft_work_, drafted, memory);
}

void Proposer::end(Sentence &sentence) {
    if (sentence.draft) draft_work_->free_sentences.push_back(std::move(sentence.draft));
}

void Proposer::begin_draft(Sentence &sentence, const int32_t *tokens) {
    if (draft_work_->free_sentences.empty()) draft_work_->free_sentences.push_back(std::make_unique<Sentence>());
    sentence.draft = std::move(draft_work_->free_sentences.back());
    draft_work_->free_sentences.pop_back();
    Sentence &draft = *sentence.draft;
    prepare(draft, std::min(speculation_.draft_->positions(), kMaxProposed + 1), sentence.source_length, draft_work_->cells * cells_);
    speculation_.choose_words(draft, tokens);
}

int64_t Proposer::room(const Sentence &sentence) const {
    return std::max<int64_t>(0, std::min(sentence.limit - 1 - sentence.position - sentence.proposed, kMaxProposed - proposed_));
}

void Proposer::add(Sentence &sentence, int32_t token, int64_t from) {
    sentence.tokens[static_cast<size_t>((sentence.position + ++sentence.proposed) * beam_)] = token;
    sentence.matched = from, ++proposed_;
}

void Proposer::propose(const Workspace &work, const std::vector<std::unique_ptr<Sentence>> &live) {
    const auto [step, row, drafted] = speculation_.costs();
    // What a token costs in a step of all sentences without proposals, which one that holds saves.
    const double saved = std::max(step - row, 0.0) / static_cast<double>(live.size()) + std::max(row, 1e-9);
    least_ = (row + drafted) / saved, proposed_ = 0, beam_ = work.beam;
    for (const auto &sentence : live) {
        const int64_t prefix = static_cast<int64_t>(sentence->prefix.size()) - sentence->position;
        while (sentence->proposed < prefix && room(*sentence))
            add(*sentence, sentence->prefix[static_cast<size_t>(sentence->position + sentence->proposed)], Sentence::kPrefix);
        if (prefix <= 0 && reads_source() && !sentence->source_tokens.empty()) propose_copies(*sentence, row / saved);
    }
    if (speculation_.paused_ > 0) {
        --speculation_.paused_;
    } else if (draft_work_ && least_ < 1) {
        propose_drafted(work, live);
    }
}

// What follows the newest tokens in the source; at first the source from its beginning.
void Proposer::propose_copies(Sentence &sentence, double least) {
    const std::vector<int32_t> &source = sentence.source_tokens;
    const auto length = static_cast<int64_t>(source.size());
    int64_t begin = 0, matched = 0;
    for (int64_t position = 0; sentence.position && position + 1 < length; ++position) {
        int64_t same = 0;
        while (same < Speculation::kMatch && same <= position && same < sentence.position &&
               source[static_cast<size_t>(position - same)] == sentence.tokens[static_cast<size_t>(sentence.position - same)])
            ++same;
        if (same > matched) matched = same, begin = position + 1;
    }
    if (!matched && sentence.position) return;
    std::atomic<double> &rate = speculation_.copy_rates_[matched];
    double chance = 1;
    for (int64_t position = begin; position < length && room(sentence) && (chance *= rate) >= least; ++position)
        add(sentence, source[static_cast<size_t>(position)], matched);
    if (!sentence.proposed) move(rate, Speculation::kPrior, kRetry);
}

void Proposer::propose_drafted(const Workspace &work, const std::vector<std::unique_ptr<Sentence>> &live) {
    const Rows results = decoder_.results(work);
    std::vector<Sentence *> owners;
    beams_.clear(), chances_.clear();
    for (const auto &sentence : live) {
        if (!sentence->draft || sentence->proposed || sentence->last_row < 0 || room(*sentence) < 1) continue;
        Sentence &draft = *sentence->draft;
        const int64_t row = sentence->last_row;
        speculation_.state_->run({results.values, results.quantized + row * results.stride, results.scale + row, results.stride}, 1, false, nullptr, 0,
                                 draft.cells.data(), cells_);
        draft.position = 1, draft.tokens[1] = sentence->tokens[static_cast<size_t>(sentence->position)];
        beams_.push_back({&draft, 0}), chances_.push_back(1), owners.push_back(sentence.get());
    }
    int64_t steps = 0;
    for (; !beams_.empty() && proposed_ < kMaxProposed; ++steps) {
        speculation_.draft_->step(*draft_work_, beams_);
        size_t kept = 0;
        for (size_t i = 0; i < beams_.size(); ++i) {
            Sentence &sentence = *owners[i], &draft = *beams_[i].sentence;
            const int32_t token = draft_work_->top_tokens[static_cast<int64_t>(i)];
            const double chance = chances_[i] * std::exp(static_cast<double>(draft_work_->top_values[static_cast<int64_t>(i)]) -
                                                         draft_work_->log_sum_exp[static_cast<int64_t>(i)]);
            if (!(chance >= least_) || token < 0 || !room(sentence) || std::find(banned_.begin(), banned_.end(), token) != banned_.end()) continue;
            add(sentence, token, Sentence::kDrafted);
            if (token == end_ || ++draft.position == draft.limit) continue;
            draft.tokens[static_cast<size_t>(draft.position)] = token;
            beams_[kept] = beams_[i], chances_[kept] = chance, owners[kept++] = &sentence;
        }
        beams_.resize(kept), chances_.resize(kept), owners.resize(kept);
    }
    // `verified` adds what the proposals save.
    move(speculation_.balance_, speculation_.balance_ - static_cast<double>(steps) * speculation_.drafted_, kNewest);
    if (speculation_.balance_ < -speculation_.drafted_) speculation_.balance_ = 0, speculation_.paused_ = kPause;
}

void Proposer::verified(const Sentence &sentence, int64_t proposed, int64_t accepted) {
    if (sentence.matched == Sentence::kPrefix) return;
    ++speculation_.steps_, speculation_.proposed_ += proposed, speculation_.accepted_ += accepted;
    if (sentence.matched >= 0) {
        std::atomic<double> &rate = speculation_.copy_rates_[sentence.matched];
        for (int64_t i = 0; i < std::min(accepted + 1, proposed); ++i) move(rate, i < accepted, kNewest);
    } else {
        const double saved = static_cast<double>(accepted) * speculation_.step_ - static_cast<double>(proposed) * speculation_.row_;
        move(speculation_.balance_, speculation_.balance_ + saved, kNewest);
    }
}

}  // namespace zoo
