// Sampling; the reference is zoo/translation/search/controls/variants.py.
#pragma once
#include <cstdint>
#include <vector>

#include "transformer/search/score_rules.h"

namespace zoo {

// Where the numbers of a sentence's samples begin: of the seed and the source, so that they depend on no batch.
uint64_t sample_key(int64_t seed, const std::vector<int32_t> &source);
// A number from 0 to 1 for a position of one of the sentence's samples.
double uniform(uint64_t key, int64_t sample, int64_t position);
// Draws one of the scores, which are in order, the largest first, after temperature, top-k and top-p.
size_t draw(const std::vector<double> &scores, const SearchRules &rules, double number);

}  // namespace zoo
