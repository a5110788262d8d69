#include "transformer/search/score_rules.h"

#include <algorithm>

#include "transformer/search/phrases.h"

namespace zoo {
namespace {

using Tokens = std::vector<int32_t>;

// Calls then(token) for each token that follows the last size - 1 tokens of `history` in `text`.
template <class Then>
void following(const Tokens &text, const Tokens &history, int64_t size, Then then) {
    const auto context = static_cast<std::ptrdiff_t>(size) - 1, length = static_cast<std::ptrdiff_t>(text.size());
    if (static_cast<std::ptrdiff_t>(history.size()) < context) return;
    for (std::ptrdiff_t i = 0; i + context < length; ++i)
        if (std::equal(history.end() - context, history.end(), text.begin() + i)) then(text[static_cast<size_t>(i + context)]);
}

bool ends_with(const Tokens &history, const Tokens &word, size_t count) {
    return history.size() >= count && std::equal(word.begin(), word.begin() + static_cast<std::ptrdiff_t>(count), history.end() - static_cast<std::ptrdiff_t>(count));
}

}  // namespace

bool ScoreRules::reads_history(const Sentence &sentence) const {
    return !sentence.phrases.empty() || rules_.no_repeat_ngram || rules_.encoder_no_repeat_ngram || rules_.repetition_penalty != 1 || !rules_.bad_words.empty();
}

void ScoreRules::list(const Sentence &sentence, int64_t length, const Tokens &history, std::vector<TokenRule> &rules) const {
    rules.clear();
    const auto ban = [&](int32_t token) { rules.push_back({token, true, false}); };
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
            for (const int32_t token : *tokens) rules.push_back({token, false, true});
    if (!sentence.phrases.empty()) {
        const PhraseState state(sentence.phrases, history, sentence.word_marks.get());
        if (!state.complete()) ban(end_);
        if (state.is_open()) rules.push_back({end_, false, false});
        for (const int32_t token : state.wanted()) rules.push_back({token, false, false});
    }
    std::sort(rules.begin(), rules.end(), [](const TokenRule &a, const TokenRule &b) { return a.token < b.token; });
    size_t count = 0;
    for (const TokenRule &rule : rules) {
        if (count && rules[count - 1].token == rule.token) {
            rules[count - 1].banned |= rule.banned, rules[count - 1].penalized |= rule.penalized;
        } else {
            rules[count++] = rule;
        }
    }
    rules.resize(count);
    if (!rules_.draws_all()) return;
    std::vector<TokenRule> all;
    for (int32_t token = 0; token < tokens_; ++token) all.push_back({token, false, false});
    for (const TokenRule &rule : rules)
        if (rule.token < tokens_) all[static_cast<size_t>(rule.token)] = rule;
    rules = std::move(all);
}

}  // namespace zoo
