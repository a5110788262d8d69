// Steps of sampling and of diverse beam search.
#include "transformer/search/variants.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

#include "transformer/search/beam_search.h"

namespace zoo {
namespace {

uint64_t mixed(uint64_t x) {  // splitmix64
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

}  // namespace

uint64_t sample_key(int64_t seed, const std::vector<int32_t> &source) {
    uint64_t key = mixed(static_cast<uint64_t>(seed));
    for (const int32_t token : source) key = mixed(key ^ static_cast<uint64_t>(token));
    return key;
}

double uniform(uint64_t key, int64_t sample, int64_t position) {
    return std::ldexp(static_cast<double>(mixed(mixed(key ^ static_cast<uint64_t>(sample)) ^ static_cast<uint64_t>(position)) >> 11), -53);
}

size_t draw(const std::vector<double> &scores, const SearchRules &rules, double number) {
    const size_t count = rules.top_k ? std::min(scores.size(), static_cast<size_t>(rules.top_k)) : scores.size();
    std::vector<double> weights;
    double total = 0;
    for (size_t i = 0; i < count; ++i) weights.push_back(std::exp((scores[i] - scores[0]) / rules.temperature)), total += weights.back();
    double tail = 0;
    while (weights.size() > 1 && (tail + weights.back()) / total <= 1 - rules.top_p) tail += weights.back(), weights.pop_back();
    double left = number * (total - tail);
    for (size_t i = 0; i + 1 < weights.size(); ++i)
        if ((left -= weights[i]) < 0) return i;
    return weights.size() - 1;
}

// A finished translation of `length` tokens.
Sentence::Hypothesis BeamSearch::hypothesis(const Sentence &sentence, const Candidate &candidate, int64_t length) const {
    std::vector<int32_t> tokens = history(sentence, candidate.slot);
    if (candidate.token != options_.end) tokens.push_back(candidate.token);
    const auto counted = static_cast<double>(length - sentence.uncounted);
    return {std::move(tokens), (candidate.score - options_.word_penalty * counted) / std::pow(counted, options_.length_penalty)};
}

// Continues the sentence's beams by these candidates.
void BeamSearch::extend(Sentence &sentence, const std::vector<Candidate> &chosen) {
    const int64_t now = sentence.position, length = now + 1;
    sentence.scores.clear();
    for (const Candidate &candidate : chosen) {
        const auto slot = static_cast<int64_t>(sentence.scores.size());
        sentence.scores.push_back(candidate.score);
        uint8_t *ancestors = sentence.next_ancestors.data() + slot * sentence.limit;
        ancestors = std::copy_n(sentence.ancestors.data() + candidate.slot * sentence.limit, now, ancestors);
        *ancestors = static_cast<uint8_t>(candidate.slot);
        sentence.tokens[static_cast<size_t>(length * options_.beam + slot)] = candidate.token;
    }
    sentence.ancestors.swap(sentence.next_ancestors);
    sentence.position = length, sentence.beams = static_cast<int64_t>(sentence.scores.size());
}

// Draws the next token of every sample; each of them is a beam of its own.
bool BeamSearch::advance_samples(Sentence &sentence, int64_t row) {
    const int64_t length = sentence.position + 1;
    const bool last = sentence.limit <= length, first = sentence.members.empty();
    std::vector<std::vector<double>> scores;
    for (int64_t slot = 0; slot < sentence.beams; ++slot) {
        rank(slot, row + slot);
        scores.emplace_back();
        for (const Continuation &continuation : ranked_[static_cast<size_t>(slot)]) scores.back().push_back(continuation.score);
        if (scores.back().empty()) throw std::runtime_error("every token of a sentence is banned");
    }
    std::vector<Candidate> running;
    std::vector<int64_t> members;
    for (int64_t i = 0; i < (first ? options_.beam : sentence.beams); ++i) {
        const int64_t slot = first ? 0 : i, sample = first ? i : sentence.members[static_cast<size_t>(i)];
        const auto index = static_cast<size_t>(slot);
        Candidate next{sentence.scores[index], slot, static_cast<int32_t>(options_.end)};
        if (!last || !options_.forced_end) {
            const Continuation &drawn = ranked_[index][draw(scores[index], options_, uniform(sentence.key, sample, length))];
            next.score += drawn.score, next.token = drawn.token;
        }
        if (last || next.token == options_.end) {
            sentence.hypotheses.push_back(hypothesis(sentence, next, length));
        } else {
            running.push_back(next), members.push_back(sample);
        }
    }
    sentence.members = std::move(members);
    extend(sentence, running);
    return running.empty();
}

// Extends the groups of beams one after the other; tokens that earlier groups chose in this step cost a penalty (Vijayakumar et al. 2018,
// "Diverse Beam Search for Improved Description of Complex Scenes").
bool BeamSearch::advance_groups(Sentence &sentence, int64_t row) {
    const int64_t length = sentence.position + 1, size = options_.beam / options_.groups;
    const bool last = sentence.limit <= length, first = sentence.members.empty();
    if (first) sentence.grouped.assign(static_cast<size_t>(options_.groups), {}), sentence.group_done.assign(static_cast<size_t>(options_.groups), false);
    for (int64_t slot = 0; slot < sentence.beams; ++slot) rank(slot, row + slot);
    std::map<int32_t, int64_t> counts;  // of tokens that earlier groups chose
    std::vector<Candidate> running;
    std::vector<int64_t> members;
    for (int64_t group = 0; group < options_.groups; ++group) {
        const auto g = static_cast<size_t>(group);
        if (sentence.group_done[g]) continue;
        candidates_.clear();
        for (int64_t slot = 0; slot < sentence.beams; ++slot) {
            if (!first && sentence.members[static_cast<size_t>(slot)] != group) continue;
            const double score = sentence.scores[static_cast<size_t>(slot)];
            if (last && options_.forced_end) {
                candidates_.push_back({score, slot, static_cast<int32_t>(options_.end)});
                continue;
            }
            for (const Continuation &continuation : ranked_[static_cast<size_t>(slot)]) {
                const auto count = counts.find(continuation.token);
                const double penalty = count == counts.end() ? 0.0 : options_.diversity_penalty * static_cast<double>(count->second);
                candidates_.push_back({score + continuation.score - penalty, slot, continuation.token});
            }
        }
        std::sort(candidates_.begin(), candidates_.end());
        if (candidates_.empty()) throw std::runtime_error("every token of a sentence is banned");
        if (static_cast<int64_t>(candidates_.size()) > 2 * size) candidates_.resize(static_cast<size_t>(2 * size));
        std::vector<Sentence::Hypothesis> &group_hypotheses = sentence.grouped[g];
        for (size_t i = 0; i < std::min(candidates_.size(), static_cast<size_t>(size)); ++i)
            if (last || candidates_[i].token == options_.end) group_hypotheses.push_back(hypothesis(sentence, candidates_[i], length));
        sentence.group_done[g] = last || is_done(sentence, group_hypotheses, size, length);
        if (sentence.group_done[g]) continue;
        int64_t left = size;
        for (const Candidate &candidate : candidates_) {
            if (candidate.token == options_.end || !left) continue;
            running.push_back(candidate), members.push_back(group), ++counts[candidate.token], --left;
        }
    }
    sentence.members = std::move(members);
    extend(sentence, running);
    if (!running.empty()) return false;
    for (auto &group_hypotheses : sentence.grouped)
        for (auto &hypothesis : group_hypotheses) sentence.hypotheses.push_back(std::move(hypothesis));
    return true;
}

}  // namespace zoo
