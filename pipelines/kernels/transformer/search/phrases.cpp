#include "transformer/search/phrases.h"

#include <algorithm>
#include <functional>
#include <map>

namespace zoo {
namespace {

int64_t progress(const std::vector<int32_t> &phrase, const std::vector<int32_t> &tokens) {
    if (std::search(tokens.begin(), tokens.end(), phrase.begin(), phrase.end()) != tokens.end()) return static_cast<int64_t>(phrase.size());
    for (auto count = static_cast<std::ptrdiff_t>(std::min(phrase.size() - 1, tokens.size())); count > 0; --count)
        if (std::equal(tokens.end() - count, tokens.end(), phrase.begin())) return count;
    return 0;
}

}  // namespace

PhraseState::PhraseState(const Phrases &phrases, const std::vector<int32_t> &tokens) : phrases_(phrases) {
    for (const auto &phrase : phrases) progress_.push_back(progress(phrase, tokens));
}

size_t PhraseState::count() const {
    size_t count = 0;
    for (size_t i = 0; i < phrases_.size(); ++i) count += progress_[i] == static_cast<int64_t>(phrases_[i].size());
    return count;
}

std::vector<int32_t> PhraseState::wanted() const {
    std::vector<int32_t> tokens;
    for (size_t i = 0; i < phrases_.size(); ++i) {
        if (progress_[i] == static_cast<int64_t>(phrases_[i].size())) continue;
        tokens.push_back(phrases_[i][static_cast<size_t>(progress_[i])]);
        tokens.push_back(phrases_[i][0]);
    }
    std::sort(tokens.begin(), tokens.end());
    return tokens;
}

int64_t PhraseState::bank() const {
    int64_t contained = 0, begun = 0;
    for (size_t i = 0; i < phrases_.size(); ++i) {
        if (progress_[i] == static_cast<int64_t>(phrases_[i].size())) {
            contained += progress_[i];
        } else {
            begun = std::max(begun, progress_[i]);
        }
    }
    return contained + begun;
}

std::vector<size_t> allocate(const std::vector<int64_t> &banks, int64_t beam) {
    std::map<int64_t, std::vector<size_t>, std::greater<>> members;
    for (size_t i = 0; i < banks.size(); ++i) members[banks[i]].push_back(i);
    std::vector<const std::vector<size_t> *> all, chosen;
    for (const auto &bank : members) all.push_back(&bank.second);
    const auto count = static_cast<int64_t>(all.size()), kept = std::min(count, beam);
    for (int64_t i = 0; i < kept; ++i) chosen.push_back(all[static_cast<size_t>(kept > 1 ? i * (count - 1) / (kept - 1) : 0)]);
    std::vector<size_t> places;
    for (size_t rank = 0; static_cast<int64_t>(places.size()) < beam; ++rank) {
        bool more = false;
        for (const auto *bank : chosen) {
            if (rank >= bank->size()) continue;
            more = true;
            if (static_cast<int64_t>(places.size()) < beam) places.push_back((*bank)[rank]);
        }
        if (!more) break;
    }
    std::sort(places.begin(), places.end());
    return places;
}

}  // namespace zoo
