// Passes over given translations (teacher forcing): all tokens of a translation are rows of one step, as proposed tokens are in speculation.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "isa/threads.h"
#include "transformer/search/beam_search.h"

namespace nb = nanobind;

namespace zoo {
namespace {

constexpr int64_t kForcedRows = 128;  // target tokens of a step, at most

[[noreturn]] void refuse(const std::string &why) { throw nb::value_error(why.c_str()); }

// Sources and their translations. Sentences get rows of up to kForcedRows positions a step, which `compute` takes.
class ForcedPass {
  public:
    using Compute = std::function<void(Workspace &work, const std::vector<Beam> &beams)>;

    ForcedPass(const Decoder &decoder, const Encoder &encoder, const Array &tokens, const Array &lengths, const Array &targets,
               const Array &target_lengths, int64_t start)
        : decoder_(decoder), encoder_(encoder) {
        if (!decoder.complete() || !encoder.complete() || encoder.width() != decoder.memory_width()) refuse("encoder and decoder are not of one model");
        if (start < 0 || start >= decoder.vocabulary_size()) refuse("the start token is none of the vocabulary");
        sources = checked_tokens(tokens, encoder.tokens());
        this->targets = checked_tokens(targets, decoder.vocabulary_size());
        first_source = offsets(lengths, sources.size(), encoder.positions());
        first_target = offsets(target_lengths, this->targets.size(), decoder.positions());
        if (first_source.size() != first_target.size()) refuse("there are not as many sources as translations");
        start_ = static_cast<int32_t>(start);
    }

    int64_t count() const { return static_cast<int64_t>(first_source.size()) - 1; }
    // Place of a row's target token.
    int64_t place(const Beam &beam) const { return first_target[static_cast<size_t>(beam.sentence->index)] + beam.position(); }

    // prepare: called for each sentence before it is computed.
    void run(int64_t threads, const std::function<void(Sentence &)> &prepare, const Compute &compute) const {
        std::atomic<int64_t> next{0};
        nb::gil_scoped_release unlocked;
        on_threads(std::min(threads, count()), [&](bool) {
            std::unique_ptr<Workspace> work = decoder_.acquire(kForcedRows, 1, 1);
            work->taken.clear(), work->cells = 2;
            try {
                for (;;) {
                    int64_t begin = next, end;
                    do {
                        end = group_end(begin);
                    } while (!next.compare_exchange_weak(begin, end));
                    if (begin == end) break;
                    run_group(*work, begin, end, prepare, compute);
                }
            } catch (...) {
                next = count();
                throw;  // with the workspace, whose sentences are lost
            }
            decoder_.release(std::move(work));
        });
    }

    std::vector<int32_t> sources, targets;
    std::vector<int64_t> first_source, first_target;  // of each sentence, then the number of all tokens

  private:
    int64_t group_end(int64_t begin) const {
        const auto tokens = [&](const std::vector<int64_t> &first, int64_t end) { return first[static_cast<size_t>(end)] - first[static_cast<size_t>(begin)]; };
        int64_t end = std::min(begin + 1, count());
        while (end < count() && tokens(first_target, end + 1) <= kForcedRows && tokens(first_source, end + 1) <= kEncoderRows) ++end;
        return end;
    }

    void run_group(Workspace &work, int64_t begin, int64_t end, const std::function<void(Sentence &)> &prepare, const Compute &compute) const {
        std::vector<std::unique_ptr<Sentence>> group;
        std::vector<Sentence *> sentences;
        for (int64_t index = begin; index < end; ++index) {
            const auto place = static_cast<size_t>(index);
            if (work.free_sentences.empty()) work.free_sentences.push_back(std::make_unique<Sentence>());
            group.push_back(std::move(work.free_sentences.back()));
            work.free_sentences.pop_back();
            Sentence &sentence = *group.back();
            sentence.index = index, sentence.position = 0, sentence.beams = 1, sentence.proposed = 0;
            sentence.limit = first_target[place + 1] - first_target[place];
            sentence.source_length = first_source[place + 1] - first_source[place];
            sentence.ancestors.assign(static_cast<size_t>(sentence.limit), 0);
            sentence.tokens.assign(1, start_);
            sentence.tokens.insert(sentence.tokens.end(), targets.begin() + first_target[place], targets.begin() + first_target[place + 1] - 1);
            sentence.cells.reserve(work.cells * decoder_.cell_width());
            sentence.words.clear(), sentence.shares = false;
            prepare(sentence);
            sentences.push_back(&sentence);
        }
        const int64_t *first = first_source.data() + begin;
        decoder_.fill_cross_kv(work, sentences, encoder_.encode(work.encoding, sources.data() + *first, first, end - begin));
        for (;;) {
            std::vector<Beam> beams;
            for (Sentence *sentence : sentences) {
                const int64_t count = std::min(sentence->limit - sentence->position, kForcedRows - static_cast<int64_t>(beams.size()));
                sentence->proposed = count - 1;
                for (int64_t ahead = 0; ahead < count; ++ahead) beams.push_back({sentence, 0, ahead});
            }
            if (beams.empty()) break;
            compute(work, beams);
            for (Sentence *sentence : sentences) sentence->position += sentence->proposed + 1, sentence->proposed = 0;
        }
        for (auto &sentence : group) {
            work.free_pages.insert(work.free_pages.end(), sentence->pages.begin(), sentence->pages.end());
            sentence->pages.clear();
            work.free_sentences.push_back(std::move(sentence));
        }
    }

    const Decoder &decoder_;
    const Encoder &encoder_;
    int32_t start_;
};

}  // namespace

NewArray<double> forced_scores(const Decoder &decoder, const Encoder &encoder, const Array &tokens, const Array &lengths, const Array &targets,
                               const Array &target_lengths, int64_t start, int64_t threads, const std::vector<int32_t> &excluded,
                               const Shortlists &shortlists) {
    const ForcedPass pass(decoder, encoder, tokens, lengths, targets, target_lengths, start);
    for (const int32_t token : excluded)
        if (token < 0 || token >= decoder.vocabulary_size()) refuse("an excluded token is none of the vocabulary");
    std::vector<int32_t> words;
    std::vector<int64_t> first_word;
    if (shortlists) {
        words = checked_tokens(shortlists->first, decoder.vocabulary_size());
        first_word = offsets(shortlists->second, words.size(), decoder.vocabulary_size());
        if (static_cast<int64_t>(first_word.size()) != pass.count() + 1) refuse("there are shortlists of another number of sentences");
        for (size_t i = 0; i + 1 < first_word.size(); ++i)
            if (!std::is_sorted(words.begin() + first_word[i], words.begin() + first_word[i + 1], std::less_equal<>())) refuse("a shortlist is not in order");
    }
    std::vector<double> scores(pass.targets.size());
    const auto is_allowed = [&](int64_t index, int32_t token) {
        if (!shortlists) return true;
        const auto place = static_cast<size_t>(index);
        return std::binary_search(words.begin() + first_word[place], words.begin() + first_word[place + 1], token);
    };
    const auto prepare = [&](Sentence &sentence) {
        if (!shortlists) return;
        const auto place = static_cast<size_t>(sentence.index);
        sentence.words.assign(words.begin() + first_word[place], words.begin() + first_word[place + 1]);
        for (int64_t i = pass.first_target[place]; i < pass.first_target[place + 1]; ++i) sentence.words.push_back(pass.targets[static_cast<size_t>(i)]);
        std::sort(sentence.words.begin(), sentence.words.end());
        sentence.words.erase(std::unique(sentence.words.begin(), sentence.words.end()), sentence.words.end());
        decoder.gather_words(sentence);
    };
    pass.run(threads, prepare, [&](Workspace &work, const std::vector<Beam> &beams) {
        if (work.taken.size() < beams.size()) work.taken.resize(beams.size());
        for (size_t r = 0; r < beams.size(); ++r) {  // the target token; those of a shortlist's sentence that it lacks have no share
            std::vector<int32_t> listed = excluded;
            listed.push_back(pass.targets[static_cast<size_t>(pass.place(beams[r]))]);
            if (shortlists) listed.insert(listed.end(), pass.targets.begin() + pass.first_target[static_cast<size_t>(beams[r].sentence->index)],
                                          pass.targets.begin() + pass.first_target[static_cast<size_t>(beams[r].sentence->index) + 1]);
            std::sort(listed.begin(), listed.end());
            listed.erase(std::unique(listed.begin(), listed.end()), listed.end());
            work.taken[r].clear();
            for (const int32_t token : listed) {
                const bool banned = std::find(excluded.begin(), excluded.end(), token) != excluded.end() || !is_allowed(beams[r].sentence->index, token);
                work.taken[r].push_back({token, banned, false});
            }
        }
        decoder.step(work, beams);
        for (size_t r = 0; r < beams.size(); ++r) {
            const int32_t target = pass.targets[static_cast<size_t>(pass.place(beams[r]))];
            double norm = work.log_sum_exp[static_cast<int64_t>(r)], logit = -INFINITY;
            for (const TokenRule &rule : work.taken[r]) {
                const auto value = static_cast<double>(rule.logit);
                if (rule.token == target) logit = value;
                if (!rule.banned && value != -INFINITY) norm = std::max(norm, value) + std::log1p(std::exp(-std::abs(norm - value)));
            }
            if (!std::isfinite(norm)) throw std::runtime_error("the model computes NaN or infinite logits; check its weights");
            scores[static_cast<size_t>(pass.place(beams[r]))] = logit - norm;
        }
    });
    return array_of(scores.data(), static_cast<int64_t>(scores.size()), 1, 1);
}

NewArray<float> forced_attention(const Decoder &decoder, const Encoder &encoder, const Array &tokens, const Array &lengths, const Array &targets,
                                 const Array &target_lengths, int64_t start, int64_t threads, int64_t layer, std::vector<int64_t> heads) {
    const ForcedPass pass(decoder, encoder, tokens, lengths, targets, target_lengths, start);
    if (layer < 0 || layer >= decoder.cross_attentions()) refuse("the decoder has no such cross-attention");
    const int64_t count = decoder.heads(layer);
    if (heads.empty())
        for (int64_t head = 0; head < count; ++head) heads.push_back(head);
    for (const int64_t head : heads)
        if (head < 0 || head >= count) refuse("found head " + std::to_string(head) + ", the cross-attention has " + std::to_string(count));
    std::vector<int64_t> first{0};  // weight of each pair
    for (size_t i = 0; i + 1 < pass.first_source.size(); ++i)
        first.push_back(first.back() + (pass.first_source[i + 1] - pass.first_source[i]) * (pass.first_target[i + 1] - pass.first_target[i]));
    std::vector<float> weights(static_cast<size_t>(first.back()));
    pass.run(threads, [](Sentence &) {}, [&](Workspace &work, const std::vector<Beam> &beams) {
        decoder.attend(work, beams, layer, heads, [&](const Beam &beam) {
            return weights.data() + first[static_cast<size_t>(beam.sentence->index)] + beam.position() * beam.sentence->source_length;
        });
    });
    return array_of(weights.data(), static_cast<int64_t>(weights.size()), 1, 1);
}

std::vector<int64_t> offsets(const Array &lengths, size_t rows, int64_t most) {
    const auto *length = data_of<int64_t>(lengths, "lengths", 1);
    std::vector<int64_t> first{0};
    for (size_t i = 0; i < lengths.shape(0); ++i) {
        const int64_t rows_of_source = length[i];
        if (rows_of_source < 1 || rows_of_source > most)
            refuse("found a source of " + std::to_string(rows_of_source) + " rows, expected 1 to " + std::to_string(most));
        first.push_back(first.back() + rows_of_source);
    }
    if (static_cast<int64_t>(rows) != first.back()) refuse("the rows are not as many as the lengths want");
    return first;
}

std::vector<int32_t> checked_tokens(const Array &tokens, int64_t most) {
    const auto *data = data_of<int32_t>(tokens, "tokens", 1);
    const std::vector<int32_t> copy(data, data + tokens.shape(0));
    for (const int32_t token : copy)
        if (token < 0 || token >= most)
            refuse("found token " + std::to_string(token) + ", expected 0 to " + std::to_string(most - 1));
    return copy;
}

}  // namespace zoo
