// Phrases that a translation contains: constrained beam search (Post and Vilar 2018, "Fast Lexically Constrained Decoding with Dynamic
// Beam Allocation"); the reference is zoo/translation/search/controls/phrases.py.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace zoo {

using Phrases = std::vector<std::vector<int32_t>>;

// Marks of a token, see zoo/translation/search/controls/words.py: a word begins with it, or it ends one.
constexpr char kBegins = 1, kEnds = 2;

// What a translation has of its phrases.
class PhraseState {
  public:
    // marks: of all tokens, so that a phrase is no part of a longer word; null: it may be.
    PhraseState(const Phrases &phrases, const std::vector<int32_t> &tokens, const std::string *marks);
    bool complete() const { return count() == phrases_.size(); }
    // Phrases that it contains.
    size_t count() const;
    // Whether it contains all, but a token that goes on with the last word would take a phrase away.
    bool is_open() const;
    // Tokens that continue a phrase, or begin one, in order.
    std::vector<int32_t> wanted() const;
    // Tokens of the phrases that it contains, and of one that it ends with the beginning of.
    int64_t bank() const;

  private:
    const Phrases &phrases_;
    const std::vector<int32_t> &tokens_;
    const std::string *marks_;
    std::vector<int64_t> progress_;  // of each phrase the tokens that end the translation; its size: it is contained
};

// Chooses the `beam` of these candidates that go on: of the banks the largest, the smallest and evenly some between them, from each
// in turn. Candidates are in order of their scores. Returns their places in order.
std::vector<size_t> allocate(const std::vector<int64_t> &banks, int64_t beam);

}  // namespace zoo
