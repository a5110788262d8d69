// Rules for the scores of a row's next token ("logits processors"); their reference is zoo/translation/search/controls/score_rules.py.
#pragma once
#include <string>
#include <vector>

#include "transformer/layers/decoder.h"

namespace zoo {

// `SearchConfig` of zoo/translation/search/config.py.
struct SearchRules {
    std::string kind = "ctranslate2", early_stopping = "False";
    std::vector<int32_t> prefix, banned, first_banned, counted;
    std::vector<std::vector<int32_t>> bad_words;
    int64_t least = 0, no_repeat_ngram = 0, encoder_no_repeat_ngram = 0;
    double repetition_penalty = 1, word_penalty = 0;
    bool forced_end = false, renormalize = false, sample = false;  // sample: every beam draws its tokens
    double temperature = 1, top_p = 1, diversity_penalty = 0;
    int64_t top_k = 0, seed = 0, groups = 1;

    // Whether a rule reads the tokens of the source.
    bool reads_source() const { return encoder_no_repeat_ngram > 0 || sample; }
    // Whether every token may be drawn.
    bool draws_all() const { return sample && !top_k; }
};

// The token rules of the rows of a search.
class ScoreRules {
  public:
    // tokens: of the vocabulary.
    ScoreRules(const SearchRules &rules, int64_t end, int64_t tokens) : rules_(rules), end_(static_cast<int32_t>(end)), tokens_(static_cast<int32_t>(tokens)) {}
    // Whether rules depend on the tokens of a translation so far.
    bool reads_history(const Sentence &sentence) const;
    // The rules of a row whose translation begins with `history`, sorted by token, one a token. history: empty unless `reads_history`.
    void list(const Sentence &sentence, int64_t length, const std::vector<int32_t> &history, std::vector<TokenRule> &rules) const;
    // The penalized score.
    double penalized(double score) const { return score < 0 ? score * rules_.repetition_penalty : score / rules_.repetition_penalty; }

  private:
    const SearchRules &rules_;
    const int32_t end_, tokens_;
};

}  // namespace zoo
