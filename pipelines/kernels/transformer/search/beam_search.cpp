#include "transformer/search/beam_search.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>

#include "transformer/search/variants.h"

namespace zoo {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(10);  // between two calls of `between`, unless a step takes longer

// log(exp(a) + exp(b))
double log_add(double a, double b) { return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b))); }

}  // namespace

BeamSearch::BeamSearch(const Decoder &decoder, const Options &options, SentenceQueue &queue)
    : decoder_(decoder), options_(options), queue_(queue),
      workspace_(decoder.acquire(options.slots * options.beam + (options.speculation ? kMaxProposed : 0), options.beam,
                                 std::min(decoder.vocabulary_size(), std::max(2 * options.beam, options.top_k)))),
      work_(*workspace_), rules_(options, options.end, decoder.vocabulary_size()), ranked_(static_cast<size_t>(options.beam)) {
    work_.taken.clear();
    work_.cells = options.speculation ? kMaxProposed + 2 : 2;
    if (options.speculation)
        proposer_ = std::make_unique<Proposer>(*options.speculation, decoder, options.beam == 1, static_cast<int32_t>(options.end), options.banned);
}

BeamSearch::~BeamSearch() {
    for (auto *sentences : {&live_, &waiting_})  // they are not empty after an error
        for (auto &sentence : *sentences) recycle(std::move(sentence));
    decoder_.release(std::move(workspace_));
}

void BeamSearch::run(void (*between)()) {
    auto checked = std::chrono::steady_clock::now();
    while (!queue_.stop) {
        if (queue_.leaving) drop_cancelled();
        refill();
        if (live_.empty()) return;
        if (proposer_) proposer_->propose(work_, live_);
        list_rows();
        decoder_.step(work_, beams_);
        int64_t row = 0;
        for (auto &sentence : live_) {
            const int64_t rows = sentence->rows();
            if (take_step(*sentence, row)) finish(std::move(sentence));
            row += rows;
        }
        const auto left = std::remove(live_.begin(), live_.end(), nullptr);
        if (left != live_.end()) queue_.step_over();
        live_.erase(left, live_.end());
        if (between && std::chrono::steady_clock::now() - checked >= kInterval) {
            between();
            checked = std::chrono::steady_clock::now();
        }
    }
}

// The rows of a step, and the rules of their tokens.
void BeamSearch::list_rows() {
    beams_.clear();
    for (const auto &sentence : live_) {
        for (int64_t slot = 0; slot < sentence->beams; ++slot) beams_.push_back({sentence.get(), slot});
        for (int64_t ahead = 1; ahead <= sentence->proposed; ++ahead) beams_.push_back({sentence.get(), 0, ahead});
    }
    if (work_.taken.size() < beams_.size()) work_.taken.resize(beams_.size());
    std::vector<int32_t> tokens;
    for (size_t i = 0; i < beams_.size(); ++i) {
        Sentence &sentence = *beams_[i].sentence;
        sentence.position += beams_[i].ahead;
        if (rules_.reads_history(sentence)) tokens = history(sentence, beams_[i].slot);
        rules_.list(sentence, sentence.position + 1, tokens, work_.taken[i]);
        sentence.position -= beams_[i].ahead;
    }
}

// Extends a sentence by the results of its rows, which begin at `row`: proposed tokens hold as long as they are those that the search
// chooses. Returns whether the sentence is finished.
bool BeamSearch::take_step(Sentence &sentence, int64_t row) {
    const int64_t proposed = sentence.proposed, begin = sentence.position;
    bool finished = false;
    for (int64_t i = 0; i <= proposed && !finished; ++i) {
        const auto next = static_cast<size_t>((sentence.position + 1) * options_.beam);
        const int32_t expected = i < proposed ? sentence.tokens[next] : -1;
        sentence.last_row = row + i;
        finished = advance(sentence, row + i);
        if (finished || sentence.tokens[next] != expected) break;
    }
    if (proposer_ && proposed) proposer_->verified(sentence, proposed, finished ? sentence.last_row - row : sentence.position - begin - 1);
    sentence.proposed = 0;
    return finished;
}

void BeamSearch::refill() {
    while (static_cast<int64_t>(live_.size()) < options_.slots) {
        if (waiting_.empty()) encode_next();
        if (waiting_.empty()) return;
        live_.push_back(std::move(waiting_.back()));
        waiting_.pop_back();
    }
}

// Sentences from the queue, encoded, the first one last.
void BeamSearch::encode_next() {
    const auto [taken, begin, end] = queue_.take(options_.slots, static_cast<int64_t>(live_.size()));
    if (begin == end) return;
    const Sources &sources = *taken;
    for (int64_t index = begin; index < end; ++index) {
        if (work_.free_sentences.empty()) work_.free_sentences.push_back(std::make_unique<Sentence>());
        std::unique_ptr<Sentence> sentence = std::move(work_.free_sentences.back());
        work_.free_sentences.pop_back();
        const auto place = static_cast<size_t>(index);
        sentence->index = sources.numbers.empty() ? index : sources.numbers[place];
        sentence->limit = sources.limits[place], sentence->position = 0, sentence->beams = 1;
        sentence->source_length = sources.first[place + 1] - sources.first[place];
        sentence->top_ended = false, sentence->hypotheses.clear();
        const auto room = static_cast<size_t>(sentence->limit * options_.beam);
        sentence->ancestors.assign(room, 0), sentence->next_ancestors.assign(room, 0), sentence->tokens.assign(room, 0);
        sentence->tokens[0] = static_cast<int32_t>(options_.start);
        sentence->cells.reserve(work_.cells * options_.beam * decoder_.cell_width());
        sentence->proposed = 0, sentence->last_row = -1;
        sentence->words.clear(), sentence->shares = false;
        if (!sources.words.empty()) {
            sentence->words.assign(sources.words.begin() + sources.first_word[place], sources.words.begin() + sources.first_word[place + 1]);
            decoder_.gather_words(*sentence);
        }
        sentence->scores.assign(1, 0.0);
        sentence->prefix = options_.prefix, sentence->uncounted = 0, sentence->phrases.clear(), sentence->members.clear();
        if (!sources.demands.empty()) {
            const Demands &demands = sources.demands[place];
            if (demands.first) sentence->prefix = *demands.first;
            sentence->prefix.insert(sentence->prefix.end(), demands.prefix.begin(), demands.prefix.end());
            sentence->uncounted = static_cast<int64_t>(demands.prefix.size()), sentence->phrases = demands.phrases;
            sentence->word_marks = demands.word_marks;
        }
        sentence->source_tokens.clear();
        if ((options_.reads_source() || (proposer_ && proposer_->reads_source())) && !sources.tokens.empty())
            sentence->source_tokens.assign(sources.tokens.begin() + sources.first[place], sources.tokens.begin() + sources.first[place + 1]);
        if (options_.sample) sentence->key = sample_key(options_.seed, sentence->source_tokens);
        waiting_.push_back(std::move(sentence));
    }
    std::vector<Sentence *> sentences;
    for (const auto &sentence : waiting_) sentences.push_back(sentence.get());
    const Rows memory = encoder_results(sources, begin, end);
    decoder_.fill_cross_kv(work_, sentences, memory);
    if (proposer_) proposer_->begin(sentences, sources.tokens.empty() ? nullptr : sources.tokens.data() + sources.first[static_cast<size_t>(begin)], memory,
                                    static_cast<int64_t>(live_.size() + waiting_.size()));
    std::reverse(waiting_.begin(), waiting_.end());
}

Rows BeamSearch::encoder_results(const Sources &sources, int64_t begin, int64_t end) {
    const int64_t *first = sources.first.data() + begin, n = first[end - begin] - *first, width = decoder_.memory_width();
    Rows rows = work_.memory.rows();
    if (sources.encoder) {
        rows = sources.encoder->encode(work_.encoding, sources.tokens.data() + *first, first, end - begin);
    } else {
        work_.memory.size(n, width);
        rows = work_.memory.rows();
        for (int64_t r = 0; r < n; ++r)
            std::fill_n(std::copy_n(sources.memory + (*first + r) * width, width, rows.values + r * rows.stride), rows.stride - width,
                        0.0f);
    }
    for (int64_t r = 0; r < n; ++r)
        if (!std::all_of(rows.values + r * rows.stride, rows.values + r * rows.stride + width,
                         [](float x) { return std::isfinite(x); }))
            throw std::runtime_error("the encoder's result is not finite; check its weights");
    return rows;
}

void BeamSearch::finish(std::unique_ptr<Sentence> sentence) {
    auto &hypotheses = sentence->hypotheses;
    std::stable_sort(hypotheses.begin(), hypotheses.end(), [](const auto &a, const auto &b) { return a.score > b.score; });
    const auto phrases = [&](const auto &phrase) { return PhraseState(sentence->phrases, phrase.tokens, sentence->word_marks.get()).count(); };
    if (!sentence->phrases.empty())
        std::stable_sort(hypotheses.begin(), hypotheses.end(), [&](const auto &a, const auto &b) { return phrases(a) > phrases(b); });
    if (static_cast<int64_t>(hypotheses.size()) > options_.n_best) hypotheses.resize(static_cast<size_t>(options_.n_best));
    queue_.done(sentence->index, std::move(hypotheses));
    recycle(std::move(sentence));
}

// Removes cancelled sentences.
void BeamSearch::drop_cancelled() {
    queue_.leaving = false;
    for (auto *sentences : {&live_, &waiting_}) {
        for (auto &sentence : *sentences)
            if (queue_.is_cancelled(sentence->index)) recycle(std::move(sentence));
        sentences->erase(std::remove(sentences->begin(), sentences->end(), nullptr), sentences->end());
    }
}

void BeamSearch::recycle(std::unique_ptr<Sentence> sentence) {
    if (!sentence) return;
    work_.free_pages.insert(work_.free_pages.end(), sentence->pages.begin(), sentence->pages.end());
    sentence->pages.clear();
    if (proposer_) proposer_->end(*sentence);
    work_.free_sentences.push_back(std::move(sentence));
}

// The tokens so far of a beam, without the start.
std::vector<int32_t> BeamSearch::history(const Sentence &sentence, int64_t slot) const {
    std::vector<int32_t> tokens;
    const uint8_t *ancestors = sentence.ancestors.data() + slot * sentence.limit;
    for (int64_t t = 1; t <= sentence.position; ++t)
        tokens.push_back(sentence.tokens[static_cast<size_t>(t * options_.beam + (t < sentence.position ? ancestors[t] : slot))]);
    return tokens;
}

// Ranks the continuations of a beam, whose results are in `row`. As in transformers, rules see log probabilities, in greedy search logits.
void BeamSearch::rank(int64_t slot, int64_t row) {
    std::vector<Continuation> &ranked = ranked_[static_cast<size_t>(slot)];
    const std::vector<TokenRule> &taken = work_.taken[static_cast<size_t>(row)];
    double norm = work_.log_sum_exp[row];
    for (const TokenRule &rule : taken)
        if (rule.logit != -INFINITY) norm = log_add(norm, static_cast<double>(rule.logit));
    if (!std::isfinite(norm)) throw std::runtime_error("the model computes NaN or infinite logits; check its weights");
    const double base = options_.beam > 1 && !options_.sample ? norm : 0.0;
    double total = options_.renormalize ? work_.log_sum_exp[row] - base : norm - base;
    ranked.clear();
    for (int64_t place = row * work_.top_k; place < (row + 1) * work_.top_k; ++place)
        if (work_.top_tokens[place] >= 0 && work_.top_values[place] > kTaken)
            ranked.push_back({static_cast<double>(work_.top_values[place]) - base, work_.top_tokens[place]});
    const size_t unchanged = ranked.size();
    for (const TokenRule &rule : taken) {
        if (rule.banned || rule.logit == -INFINITY) continue;
        const double score = static_cast<double>(rule.logit) - base;
        ranked.push_back({rule.penalized ? rules_.penalized(score) : score, rule.token});
        if (options_.renormalize) total = log_add(total, ranked.back().score);
    }
    if (ranked.size() > unchanged)
        std::sort(ranked.begin(), ranked.end(), [](const auto &a, const auto &b) { return a.score > b.score || (a.score == b.score && a.token < b.token); });
    for (Continuation &continuation : ranked) continuation.score -= total;
}

// Merges the likeliest continuations of a sentence's beams, whose rows begin at `row`, to 2 * beam candidates; ties: the first beam,
// then its first token. last: the sentence is at its limit.
void BeamSearch::merge_candidates(const Sentence &sentence, int64_t row, bool last) {
    candidates_.clear(), merged_.assign(static_cast<size_t>(sentence.beams), 0);
    for (int64_t slot = 0; slot < sentence.beams; ++slot) rank(slot, row + slot);
    if (last && options_.forced_end) {  // beams are sorted by score
        for (int64_t slot = 0; slot < sentence.beams; ++slot)
            candidates_.push_back({sentence.scores[static_cast<size_t>(slot)], slot, static_cast<int32_t>(options_.end)});
        return;
    }
    if (!sentence.phrases.empty()) return choose_constrained(sentence);
    // in Marian every hypothesis narrows the beam by one
    const bool narrows = options_.kind == "marian";
    const int64_t target = narrows ? options_.beam - static_cast<int64_t>(sentence.hypotheses.size()) : 2 * options_.beam;
    while (static_cast<int64_t>(candidates_.size()) < target) {
        int64_t best = -1;
        double best_score = 0;
        for (int64_t slot = 0; slot < sentence.beams; ++slot) {
            const std::vector<Continuation> &ranked = ranked_[static_cast<size_t>(slot)];
            const size_t next = merged_[static_cast<size_t>(slot)];
            if (next == ranked.size()) continue;
            const double score = sentence.scores[static_cast<size_t>(slot)] + ranked[next].score;
            if (best < 0 || score > best_score) best = slot, best_score = score;
        }
        if (best < 0) return;
        candidates_.push_back({best_score, best, ranked_[static_cast<size_t>(best)][merged_[static_cast<size_t>(best)]++].token});
    }
}

// The candidates of a sentence with phrases: those that end, then those that go on, at most `beam` each.
void BeamSearch::choose_constrained(const Sentence &sentence) {
    struct Constrained : Candidate {
        int64_t bank;
        bool complete;
    };
    std::vector<Constrained> all;
    const std::string *marks = sentence.word_marks.get();
    const auto end = static_cast<int32_t>(options_.end);
    for (int64_t slot = 0; slot < sentence.beams; ++slot) {
        std::vector<int32_t> tokens = history(sentence, slot);
        const PhraseState before(sentence.phrases, tokens, marks);
        std::vector<int32_t> wanted = before.wanted();
        if (before.is_open()) wanted.insert(std::upper_bound(wanted.begin(), wanted.end(), end), end);
        tokens.push_back(0);
        int64_t others = 0;
        for (const Continuation &continuation : ranked_[static_cast<size_t>(slot)]) {
            if (!std::binary_search(wanted.begin(), wanted.end(), continuation.token) && others++ >= 2 * options_.beam) continue;
            tokens.back() = continuation.token;
            const PhraseState state(sentence.phrases, tokens, marks);
            all.push_back({{sentence.scores[static_cast<size_t>(slot)] + continuation.score, slot, continuation.token}, state.bank(), state.complete()});
        }
    }
    std::sort(all.begin(), all.end());
    std::vector<Constrained> running;
    int64_t complete = 0;
    for (const Constrained &candidate : all) {
        complete += candidate.complete;
        if (candidate.token != options_.end) {
            running.push_back(candidate);
        } else if (candidate.complete && complete <= options_.beam) {
            candidates_.push_back(candidate);
        }
    }
    std::vector<int64_t> banks;
    for (const Constrained &candidate : running) banks.push_back(candidate.bank);
    complete_ = -INFINITY;
    for (const size_t place : allocate(banks, options_.beam)) {
        candidates_.push_back(running[place]);
        if (running[place].complete) complete_ = std::max(complete_, running[place].score);
    }
}

// Extends the sentence's beams by their likeliest continuations; returns whether the sentence is finished.
bool BeamSearch::advance(Sentence &sentence, int64_t row) {
    const int64_t beam = options_.beam, now = sentence.position, length = now + 1;
    if (now < static_cast<int64_t>(sentence.prefix.size())) {  // one beam so far
        sentence.tokens[static_cast<size_t>(length * beam)] = sentence.prefix[static_cast<size_t>(now)];
        sentence.position = length;
        return false;
    }
    if (options_.sample) return advance_samples(sentence, row);
    if (options_.groups > 1) return advance_groups(sentence, row);
    const bool last = sentence.limit <= length;
    merge_candidates(sentence, row, last);
    const auto ends = [&](const Candidate &candidate) { return candidate.token == options_.end; };
    for (size_t i = 0; i < std::min(static_cast<size_t>(beam), candidates_.size()); ++i) {
        const Candidate &candidate = candidates_[i];
        if (!last && !ends(candidate)) continue;
        sentence.hypotheses.push_back(hypothesis(sentence, candidate, length));
    }
    if (candidates_.empty()) throw std::runtime_error("every token of a sentence is banned");
    sentence.top_ended = sentence.top_ended || ends(candidates_[0]);
    if (last || is_done(sentence, sentence.hypotheses, beam, length)) return true;
    std::vector<Candidate> running;
    for (const Candidate &candidate : candidates_)  // at most one continuation of a beam ends, so enough are left
        if (!ends(candidate) && static_cast<int64_t>(running.size()) < beam) running.push_back(candidate);
    extend(sentence, running);
    return running.empty();  // all other tokens are banned
}

// Whether a beam has the translations that it found after `length` tokens, by the toolkit's rules; see `TERMINATION` in
// zoo/translation/search/beam_search.py.
bool BeamSearch::is_done(const Sentence &sentence, const Hypotheses &hypotheses, int64_t beam, int64_t length) const {
    const auto count = static_cast<int64_t>(hypotheses.size());
    const double penalty = options_.length_penalty;
    const bool constrained = !sentence.phrases.empty();  // then by the rule of transformers, whatever the toolkit
    if (!constrained && options_.kind == "ctranslate2" && penalty == 0 && options_.groups == 1) return count >= options_.n_best && sentence.top_ended;
    if (count < beam) return false;
    if (!constrained && (options_.kind != "transformers" || options_.early_stopping == "True")) return true;
    const auto going = std::find_if(candidates_.begin(), candidates_.end(), [&](const auto &candidate) { return candidate.token != options_.end; });
    if (beam == 1 || going == candidates_.end()) return true;
    const int64_t reached = !constrained && options_.early_stopping == "never" && penalty > 0 ? sentence.limit : length;
    const auto counted = static_cast<double>(reached - sentence.uncounted);
    std::vector<double> scores;
    for (const auto &hypothesis : hypotheses) scores.push_back(hypothesis.score);
    std::nth_element(scores.begin(), scores.begin() + beam - 1, scores.end(), std::greater<>());
    const double running = constrained ? complete_ : going->score;
    return running / std::pow(counted, penalty) <= scores[static_cast<size_t>(beam - 1)];
}

}  // namespace zoo
