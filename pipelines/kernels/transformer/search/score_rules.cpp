#include "transformer/search/score_rules.h"

#include <algorithm>

#include "transformer/search/phrases.h"

namespace zoo {
namespace {

using Tokens = std::vector<int32_t>;

// Calls then(token) for each token that follows the last size - 1 tokens of `history` in `text`.
template <class Then>
void following(const Tokens &text, const Tokens &history, int64_t size, Then then) {
    const auto known = static_cast<std::ptrdiff_t>(size) - 1, length = static_cast<std::ptrdiff_t>(text.size());
    if (static_cast<std::ptrdiff_t>(history.size()) < known) return;
    for (std::ptrdiff_t i = 0; i + known < length; ++i)
        if (std::equal(history.end() - known, history.end(), text.begin() + i)) then(text[static_cast<size_t>(i + known)]);
}

bool ends_with(const Tokens &history, const Tokens &word, size_t count) {
    return history.size() >= count && std::equal(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(count), history.end() - static_cast<std::ptrdiff_t>(count));
}

}  // namespace

bool ScoreRules::reads_history(const Sentence &sentence) const {
    return !sentence.phrases.empty() || rules_.no_repeat_ngram || rules_.encoder_no_repeat_ngram || rules_.repetition_penalty != 1 || !rules_.bad_words.empty();
}

void ScoreRules::list(const Sentence &sentence, int64_t length, const Tokens &history, std::vector<TokenRule> &found) const {
    found.clear();
    const auto ban = [&](int32_t token) { found.push_back({token, true, false}); };
    std::for_each(rules_.banned.begin(), rules_.banned.end(), ban);
    if (length == static_cast<int64_t>(sentence.prefix.size()) + 1) std::for_each(rules_.first_banned.begin(), rules_.first_banned.end(), ban);
    if (length < rules_.least) ban(end_);
    if (rules_.no_repeat_ngram) {
        Tokens all = rules_.counted;
        all.insert(all.end(), history.begin(), history.end());
        following(all, all, rules_.no_repeat_ngram, ban);
    }
    if (rules_.encoder_no_repeat_ngram) following(sentence.source_tokens, history, rules_.encoder_no_repeat_ngram, ban);
    for (const Tokens &word : rules_.bad_words)
        if (ends_with(history, word, word.size() - 1)) ban(word.back());
    if (rules_.repetition_penalty != 1)
        for (const Tokens *tokens : {&rules_.counted, &history})
            for (const int32_t token : *tokens) found.push_back({token, false, true});
    if (!sentence.phrases.empty()) {
        const PhraseState state(sentence.phrases, history, sentence.word_marks.get());
        if (!state.complete()) ban(end_);
        if (state.is_open()) found.push_back({end_, false, false});
        for (const int32_t token : state.wanted()) found.push_back({token, false, false});
    }
    std::sort(found.begin(), found.end(), [](const TokenRule &a, const TokenRule &b) { return a.token < b.token; });
    size_t count = 0;
    for (const TokenRule &rule : found) {
        if (count && found[count - 1].token == rule.token) {
            found[count - 1].banned |= rule.banned, found[count - 1].penalized |= rule.penalized;
        } else {
            found[count++] = rule;
        }
    }
    found.resize(count);
    if (!rules_.draws_all()) return;
    std::vector<TokenRule> all;
    for (int32_t token = 0; token < tokens_; ++token) all.push_back({token, false, false});
    for (const TokenRule &rule : found)
        if (rule.token < tokens_) all[static_cast<size_t>(rule.token)] = rule;
    found = std::move(all);
}

}  // namespace zoo
