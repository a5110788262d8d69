#include "transformer/search/phrases.h"

#include <algorithm>
#include <functional>
#include <map>

namespace zoo {
namespace {

using Tokens = std::vector<int32_t>;

// Whether words end between the token at `place` and the one before it, or there are none.
bool is_apart(const Tokens &tokens, size_t place, const std::string *marks) {
    if (!marks || place == 0 || place >= tokens.size()) return true;
    const auto mark = [&](size_t position) { return (*marks)[static_cast<size_t>(tokens[position])]; };
    return (mark(place - 1) & kEnds) || (mark(place) & kBegins);
}

// Whether the phrase ends before `most` tokens.
bool contains(const Tokens &tokens, const Tokens &phrase, const std::string *marks, size_t most) {
    for (size_t first = 0; first + phrase.size() <= most; ++first)
        if (std::equal(phrase.begin(), phrase.end(), tokens.begin() + static_cast<std::ptrdiff_t>(first)) && is_apart(tokens, first, marks) &&
            is_apart(tokens, first + phrase.size(), marks))
            return true;
    return false;
}

int64_t progress(const Tokens &phrase, const Tokens &tokens, const std::string *marks) {
    if (contains(tokens, phrase, marks, tokens.size())) return static_cast<int64_t>(phrase.size());
    for (size_t count = std::min(phrase.size() - 1, tokens.size()); count > 0; --count)
        if (std::equal(tokens.end() - static_cast<std::ptrdiff_t>(count), tokens.end(), phrase.begin()) &&
            is_apart(tokens, tokens.size() - count, marks))
            return static_cast<int64_t>(count);
    return 0;
}

}  // namespace

PhraseState::PhraseState(const Phrases &phrases, const Tokens &tokens, const std::string *marks) : phrases_(phrases), tokens_(tokens), marks_(marks) {
    for (const auto &phrase : phrases) progress_.push_back(progress(phrase, tokens, marks));
}

bool PhraseState::is_open() const {
    if (!marks_ || !complete()) return false;
    return std::any_of(phrases_.begin(), phrases_.end(), [&](const Tokens &phrase) {
        return phrase.size() <= tokens_.size() && std::equal(phrase.rbegin(), phrase.rend(), tokens_.rbegin()) &&
               !((*marks_)[static_cast<size_t>(phrase.back())] & kEnds) && !contains(tokens_, phrase, marks_, tokens_.size() - 1);
    });
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
