// Beam search over a decoder with continuous batching, by the rules of the numpy one (zoo/transformer_mt/decode.py); the Python bindings of
// encoder and decoder.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "transformer/decoder.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

struct Options {
    int64_t start, end, beam, n_best, slots;  // end: -1 for none, every sentence then reaches its limit; slots: sentences in a batch
    double length_penalty;
    // zoo/transformer_mt/decode.py has the rules
    std::string kind, early_stopping;
    std::vector<int32_t> prefix, banned;
    int64_t least, no_repeat_ngram;
    bool forced_end;
    double word_penalty;
    // Candidates of a row that may be forbidden: as many more are looked at.
    int64_t spare(int64_t longest) const {
        return static_cast<int64_t>(banned.size()) + (least > 0) + (no_repeat_ngram == 1 ? longest : no_repeat_ngram ? kRepeated : 0);
    }
    static constexpr int64_t kRepeated = 32;  // no n - 1 tokens come more often in a translation where what follows them differs
};

// The sources, one after the other: their tokens and their encoder, or the encoder's results, [sum of lengths, width].
struct Sources {
    const Encoder *encoder;
    std::vector<int32_t> tokens;
    const float *memory;
    std::vector<int64_t> limits, first;  // first: row of each sentence, and of the end
    int64_t count;
    std::vector<int32_t> words{};       // that each sentence may have, one after the other; none: all may come
    std::vector<int64_t> first_word{};  // of each sentence, and of the end
};

constexpr int64_t kEncoderRows = 192;  // tokens that are encoded together, unless one sentence is longer

// The queue from which the threads take sentences.
class SentenceQueue {
  public:
    explicit SentenceQueue(const Sources &sources) : sources_(sources) {}
    std::atomic<bool> stop{false};
    // The next sentences, at most `most`; [begin, end).
    std::pair<int64_t, int64_t> take(int64_t most) {
        const std::lock_guard<std::mutex> locked(taking_);
        const int64_t begin = next_, last = std::min(sources_.count, begin + most);
        const auto row = [&](int64_t i) { return sources_.first[static_cast<size_t>(i)]; };
        while (next_ < last && (next_ == begin || row(next_ + 1) - row(begin) <= kEncoderRows)) ++next_;
        return {begin, next_};
    }

  private:
    const Sources &sources_;
    std::mutex taking_;
    int64_t next_ = 0;
};

using Results = std::vector<std::vector<Sentence::Hypothesis>>;

constexpr auto kSignalInterval = std::chrono::milliseconds(10);  // between two checks for Ctrl-C, unless a step takes longer

// Beam search of one thread, with continuous batching: sentences come from a common queue into its slots, and leave when they are done.
class BeamSearch {
  public:
    BeamSearch(const Decoder &decoder, const Sources &sources, const Options &options, SentenceQueue &queue, Results &results)
        : decoder_(decoder), sources_(sources), options_(options), queue_(queue), results_(results),
          workspace_(decoder.acquire(options.slots * options.beam, options.beam,
                                     std::min(decoder.vocabulary_size(), 2 * options.beam + options.spare(decoder.positions())))),
          work_(*workspace_) {}
    ~BeamSearch() {
        for (auto *sentences : {&live_, &waiting_})  // not empty after an error
            for (auto &sentence : *sentences) recycle(std::move(sentence));
        decoder_.release(std::move(workspace_));
    }
    BeamSearch(const BeamSearch &) = delete;

    // main_thread: it checks for Ctrl-C. The GIL is not held.
    void run(bool main_thread) {
        auto checked = std::chrono::steady_clock::now();
        while (!queue_.stop) {
            refill();
            if (live_.empty()) return;
            beams_.clear();
            for (const auto &sentence : live_)
                for (int64_t slot = 0; slot < sentence->beams; ++slot) beams_.push_back({sentence.get(), slot});
            decoder_.step(work_, beams_);
            int64_t row = 0;
            for (auto &sentence : live_) {
                const int64_t beams = sentence->beams;
                if (advance(*sentence, row)) finish(std::move(sentence));
                row += beams;
            }
            live_.erase(std::remove(live_.begin(), live_.end(), nullptr), live_.end());
            if (main_thread && std::chrono::steady_clock::now() - checked >= kSignalInterval) {
                nb::gil_scoped_acquire locked;
                if (PyErr_CheckSignals()) throw nb::python_error();
                checked = std::chrono::steady_clock::now();
            }
        }
    }

  private:
    void refill() {
        while (static_cast<int64_t>(live_.size()) < options_.slots) {
            if (waiting_.empty()) encode_next();
            if (waiting_.empty()) return;
            live_.push_back(std::move(waiting_.back()));
            waiting_.pop_back();
        }
    }

    // Sentences from the queue, encoded, the first one last.
    void encode_next() {
        const auto [begin, end] = queue_.take(options_.slots);
        if (begin == end) return;
        for (int64_t index = begin; index < end; ++index) {
            if (work_.free_sentences.empty()) work_.free_sentences.push_back(std::make_unique<Sentence>());
            std::unique_ptr<Sentence> sentence = std::move(work_.free_sentences.back());
            work_.free_sentences.pop_back();
            const auto at = static_cast<size_t>(index);
            sentence->index = index, sentence->limit = sources_.limits[at], sentence->position = 0, sentence->beams = 1;
            sentence->source_length = sources_.first[at + 1] - sources_.first[at];
            sentence->top_ended = false, sentence->hypotheses.clear();
            const auto room = static_cast<size_t>(sentence->limit * options_.beam);
            sentence->ancestors.assign(room, 0), sentence->next_ancestors.assign(room, 0), sentence->tokens.assign(room, 0);
            sentence->tokens[0] = static_cast<int32_t>(options_.start);
            sentence->cells.reserve(2 * options_.beam * decoder_.cell_width());
            sentence->words.clear();
            if (!sources_.words.empty()) {
                sentence->words.assign(sources_.words.begin() + sources_.first_word[at], sources_.words.begin() + sources_.first_word[at + 1]);
                decoder_.gather_words(*sentence);
            }
            sentence->scores.assign(1, 0.0);
            waiting_.push_back(std::move(sentence));
        }
        decoder_.fill_cross_kv(work_, waiting_, encoder_results(begin, end));
        std::reverse(waiting_.begin(), waiting_.end());
    }

    Rows encoder_results(int64_t begin, int64_t end) {
        const int64_t *first = sources_.first.data() + begin, n = first[end - begin] - *first, width = decoder_.memory_width();
        Rows rows = work_.memory.rows();
        if (sources_.encoder) {
            rows = sources_.encoder->encode(work_.encoding, sources_.tokens.data() + *first, first, end - begin);
        } else {
            work_.memory.size(n, width);
            rows = work_.memory.rows();
            for (int64_t r = 0; r < n; ++r)
                std::fill_n(std::copy_n(sources_.memory + (*first + r) * width, width, rows.values + r * rows.stride), rows.stride - width,
                            0.0f);
        }
        for (int64_t r = 0; r < n; ++r)
            if (!std::all_of(rows.values + r * rows.stride, rows.values + r * rows.stride + width,
                             [](float x) { return std::isfinite(x); }))
                throw std::runtime_error("the encoder's result is not finite; check its weights");
        return rows;
    }

    void finish(std::unique_ptr<Sentence> sentence) {
        auto &hypotheses = sentence->hypotheses;
        std::stable_sort(hypotheses.begin(), hypotheses.end(), [](const auto &a, const auto &b) { return a.score > b.score; });
        if (static_cast<int64_t>(hypotheses.size()) > options_.n_best) hypotheses.resize(static_cast<size_t>(options_.n_best));
        results_[static_cast<size_t>(sentence->index)] = std::move(hypotheses);
        recycle(std::move(sentence));
    }

    void recycle(std::unique_ptr<Sentence> sentence) {
        if (!sentence) return;
        work_.free_pages.insert(work_.free_pages.end(), sentence->pages.begin(), sentence->pages.end());
        sentence->pages.clear();
        work_.free_sentences.push_back(std::move(sentence));
    }

    struct Candidate {
        double score;  // log probability, summed
        int64_t slot;
        int32_t token;
    };

    // The tokens so far of a beam, without the start.
    std::vector<int32_t> history(const Sentence &sentence, int64_t slot) const {
        std::vector<int32_t> tokens;
        const uint8_t *ancestors = sentence.ancestors.data() + slot * sentence.limit;
        for (int64_t t = 1; t <= sentence.position; ++t)
            tokens.push_back(sentence.tokens[static_cast<size_t>(t * options_.beam + (t < sentence.position ? ancestors[t] : slot))]);
        return tokens;
    }

    // Takes what may not come out of a beam's own likeliest tokens; returns how many are left.
    int64_t allowed(const Sentence &sentence, int64_t slot, int64_t row) {
        const int64_t count = work_.top_k;
        if (!options_.spare(1)) return count;
        std::vector<int32_t> forbidden = options_.banned;
        if (sentence.position + 1 < options_.least) forbidden.push_back(static_cast<int32_t>(options_.end));
        if (options_.no_repeat_ngram) {
            const std::vector<int32_t> tokens = history(sentence, slot);
            const auto size = static_cast<std::ptrdiff_t>(options_.no_repeat_ngram), length = static_cast<std::ptrdiff_t>(tokens.size());
            for (std::ptrdiff_t i = 0; i + size <= length; ++i)
                if (std::equal(tokens.begin() + i, tokens.begin() + i + size - 1, tokens.end() - size + 1))
                    forbidden.push_back(tokens[static_cast<size_t>(i + size - 1)]);
        }
        int64_t left = 0;
        for (int64_t at = (row + slot) * count, i = 0; i < count; ++i) {
            if (std::find(forbidden.begin(), forbidden.end(), work_.top_tokens[at + i]) != forbidden.end()) continue;
            work_.top_tokens[at + left] = work_.top_tokens[at + i], work_.top_values[at + left] = work_.top_values[at + i];
            ++left;
        }
        return left;
    }

    // The 2 * beam likeliest continuations of a sentence's beams, whose rows begin at `row`: a merge of the beams' own; of ties the first
    // beam's, then its first. last: the sentence is at its limit.
    void merge_candidates(const Sentence &sentence, int64_t row, bool last) {
        const int64_t count = work_.top_k;
        candidates_.clear(), taken_.assign(static_cast<size_t>(sentence.beams), 0), left_.clear();
        const auto score = [&](int64_t slot) {
            const int64_t at = (row + slot) * count + taken_[static_cast<size_t>(slot)];
            return sentence.scores[static_cast<size_t>(slot)] + (static_cast<double>(work_.top_values[at]) - work_.log_sum_exp[row + slot]);
        };
        for (int64_t slot = 0; slot < sentence.beams; ++slot)
            if (!std::isfinite(work_.log_sum_exp[row + slot]))
                throw std::runtime_error("the model computes NaN or infinite logits; check its weights");
        if (last && options_.forced_end) {  // beams come the likeliest first
            for (int64_t slot = 0; slot < sentence.beams; ++slot)
                candidates_.push_back({sentence.scores[static_cast<size_t>(slot)], slot, static_cast<int32_t>(options_.end)});
            return;
        }
        for (int64_t slot = 0; slot < sentence.beams; ++slot) left_.push_back(allowed(sentence, slot, row));
        // Marian's hypotheses leave no room for other beams
        const bool narrows = options_.kind == "marian";
        const int64_t wanted = narrows ? options_.beam - static_cast<int64_t>(sentence.hypotheses.size()) : 2 * options_.beam;
        while (static_cast<int64_t>(candidates_.size()) < wanted) {
            int64_t best = -1;
            double best_score = 0;
            for (int64_t slot = 0; slot < sentence.beams; ++slot) {
                if (taken_[static_cast<size_t>(slot)] == left_[static_cast<size_t>(slot)]) continue;
                const double candidate = score(slot);
                if (best < 0 || candidate > best_score) best = slot, best_score = candidate;
            }
            if (best < 0) return;
            int64_t &taken = taken_[static_cast<size_t>(best)];
            candidates_.push_back({best_score, best, work_.top_tokens[(row + best) * count + taken]});
            ++taken;
        }
    }

    // Extends the sentence's beams by their likeliest continuations; true where the sentence is done.
    bool advance(Sentence &sentence, int64_t row) {
        const int64_t beam = options_.beam, now = sentence.position, length = now + 1;
        if (now < static_cast<int64_t>(options_.prefix.size())) {  // one beam so far
            sentence.tokens[static_cast<size_t>(length * beam)] = options_.prefix[static_cast<size_t>(now)];
            sentence.position = length;
            return false;
        }
        const bool last = sentence.limit <= length;
        merge_candidates(sentence, row, last);
        const auto ends = [&](const Candidate &candidate) { return candidate.token == options_.end; };
        for (size_t i = 0; i < std::min(static_cast<size_t>(beam), candidates_.size()); ++i) {
            const Candidate &candidate = candidates_[i];
            if (!last && !ends(candidate)) continue;
            std::vector<int32_t> tokens = history(sentence, candidate.slot);
            if (!ends(candidate)) tokens.push_back(candidate.token);
            sentence.hypotheses.push_back(
                {std::move(tokens), (candidate.score - options_.word_penalty * static_cast<double>(length)) /
                                        std::pow(static_cast<double>(length), options_.length_penalty)});
        }
        if (candidates_.empty()) throw std::runtime_error("every token of a sentence is banned");
        sentence.top_ended = sentence.top_ended || ends(candidates_[0]);
        if (last || is_done(sentence, length)) return true;

        sentence.scores.clear();
        for (const Candidate &candidate : candidates_) {
            const auto slot = static_cast<int64_t>(sentence.scores.size());
            if (slot == beam) break;
            if (ends(candidate)) continue;  // a beam ends in one way only: enough are left
            sentence.scores.push_back(candidate.score);
            uint8_t *ancestors = sentence.next_ancestors.data() + slot * sentence.limit;
            ancestors = std::copy_n(sentence.ancestors.data() + candidate.slot * sentence.limit, now, ancestors);
            *ancestors = static_cast<uint8_t>(candidate.slot);
            sentence.tokens[static_cast<size_t>(length * beam + slot)] = candidate.token;
        }
        sentence.ancestors.swap(sentence.next_ancestors);
        sentence.position = length, sentence.beams = static_cast<int64_t>(sentence.scores.size());
        return false;
    }

    // Whether a sentence has its translations after `length` tokens, by the toolkit's rules; see `KINDS` in decode.py.
    bool is_done(const Sentence &sentence, int64_t length) const {
        const auto count = static_cast<int64_t>(sentence.hypotheses.size());
        const double penalty = options_.length_penalty;
        if (options_.kind == "marian") return count >= options_.beam;
        if (options_.kind == "ctranslate2") return penalty != 0 ? count >= options_.beam : count >= options_.n_best && sentence.top_ended;
        if (count < options_.beam) return false;
        if (options_.early_stopping == "True" || options_.beam == 1) return true;
        const auto going = std::find_if(candidates_.begin(), candidates_.end(), [&](const auto &each) { return each.token != options_.end; });
        if (going == candidates_.end()) return true;
        const int64_t reached = options_.early_stopping == "never" && penalty > 0 ? sentence.limit : length;
        std::vector<double> scores;
        for (const auto &each : sentence.hypotheses) scores.push_back(each.score);
        std::nth_element(scores.begin(), scores.begin() + options_.beam - 1, scores.end(), std::greater<>());
        return going->score / std::pow(static_cast<double>(reached), penalty) <= scores[static_cast<size_t>(options_.beam - 1)];
    }

    const Decoder &decoder_;
    const Sources &sources_;
    const Options &options_;
    SentenceQueue &queue_;
    Results &results_;
    std::unique_ptr<Workspace> workspace_;
    Workspace &work_;
    std::vector<std::unique_ptr<Sentence>> live_, waiting_;
    std::vector<Beam> beams_;
    std::vector<Candidate> candidates_;
    std::vector<int64_t> taken_, left_;  // of each beam: how many of its continuations are among the candidates, and how many there are
};

// Translates all sources; the calling thread works, too.
Results beam_search(const Decoder &decoder, const Sources &sources, const Options &options, int64_t threads) {
    Results results(static_cast<size_t>(sources.count));
    SentenceQueue queue(sources);
    std::exception_ptr error;
    std::mutex error_mutex;
    const auto work = [&](bool main_thread) {
        try {
            BeamSearch(decoder, sources, options, queue, results).run(main_thread);
        } catch (...) {
            queue.stop = true;
            const std::lock_guard<std::mutex> locked(error_mutex);
            if (!error || main_thread) error = std::current_exception();  // Ctrl-C above all
        }
    };
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < std::min(threads, sources.count); ++i) others.emplace_back(work, false);
    } catch (...) {  // no more threads: those that are there do the work
    }
    work(true);
    for (auto &thread : others) thread.join();
    if (error) std::rethrow_exception(error);
    return results;
}

using Translations = std::vector<std::vector<std::pair<std::vector<int32_t>, double>>>;

[[noreturn]] void refuse(const std::string &why) { throw nb::value_error(why.c_str()); }

// The first row of each sentence, and the end of all; lengths int64 [sentences], each 1 to `most`.
std::vector<int64_t> offsets(const Array &lengths, size_t rows, int64_t most) {
    const auto *length = data_of<int64_t>(lengths, "lengths", 1);
    std::vector<int64_t> first{0};
    for (size_t i = 0; i < lengths.shape(0); ++i) {
        const int64_t rows_of_source = length[i];
        if (rows_of_source < 1 || rows_of_source > most)
            refuse("found a source of " + std::to_string(rows_of_source) + " rows, wanted 1 to " + std::to_string(most));
        first.push_back(first.back() + rows_of_source);
    }
    if (static_cast<int64_t>(rows) != first.back()) refuse("the rows are not as many as the lengths want");
    return first;
}

// A copy of tokens, all in the encoder's vocabulary: nobody can change them after the check.
std::vector<int32_t> checked_tokens(const Encoder &encoder, const Array &tokens) {
    if (!encoder.complete()) refuse("the encoder has no result yet");
    const auto *data = data_of<int32_t>(tokens, "tokens", 1);
    const std::vector<int32_t> copy(data, data + tokens.shape(0));
    for (const int32_t token : copy)
        if (token < 0 || token >= encoder.tokens())
            refuse("found token " + std::to_string(token) + ", wanted 0 to " + std::to_string(encoder.tokens() - 1));
    return copy;
}

nb::object encode(const Encoder &encoder, const Array &tokens, const Array &lengths) {
    const std::vector<int32_t> copy = checked_tokens(encoder, tokens);
    const std::vector<int64_t> first = offsets(lengths, copy.size(), encoder.positions());
    Encoding work;
    const Rows rows = encoder.encode(work, copy.data(), first.data(), static_cast<int64_t>(first.size()) - 1);
    return array_of(rows.values, first.back(), encoder.width(), rows.stride);
}

// The words that each sentence may have: int32, in order, and how many of each.
void take_words(Sources &sources, const Decoder &decoder, const Options &options, const Array &words, const Array &counts) {
    const auto *word = data_of<int32_t>(words, "words", 1);
    sources.words.assign(word, word + words.shape(0));
    const auto *count = data_of<int64_t>(counts, "word_counts", 1);
    if (static_cast<int64_t>(counts.shape(0)) != sources.count) refuse("there are words for another number of sentences");
    const int64_t least = std::min(decoder.vocabulary_size(), 2 * options.beam + options.spare(decoder.positions()));
    sources.first_word.push_back(0);
    for (int64_t i = 0; i < sources.count; ++i) {
        const int64_t first = sources.first_word.back(), last = first + count[i];
        if (count[i] < least || last > static_cast<int64_t>(sources.words.size()))
            refuse("a sentence has " + std::to_string(count[i]) + " words, wanted at least " + std::to_string(least));
        bool ends = options.end < 0;
        for (int64_t at = first; at < last; ++at) {
            const int32_t token = sources.words[static_cast<size_t>(at)];
            if (token < 0 || token >= decoder.vocabulary_size() || (at > first && token <= sources.words[static_cast<size_t>(at - 1)]))
                refuse("words are not in order, or none of the vocabulary");
            ends = ends || token == options.end;
        }
        if (!ends) refuse("a sentence may not end");
        sources.first_word.push_back(last);
    }
}

// rows: tokens for the encoder, or without one its results.
Translations translate(const Decoder &decoder, const Encoder *encoder, const Array &rows, const Array &lengths, const Array &limits,
                       int64_t start, int64_t end, int64_t beam, int64_t n_best, double length_penalty, int64_t slots, int64_t threads,
                       const std::string &kind, const std::string &early_stopping, const std::vector<int32_t> &prefix,
                       const std::vector<int32_t> &banned, int64_t least, bool forced_end, int64_t no_repeat_ngram, double word_penalty,
                       const std::optional<Array> &words, const std::optional<Array> &word_counts) {
    if (!decoder.complete()) refuse("the decoder has no vocabulary yet");
    Sources sources{encoder, {}, nullptr, {}, {}, static_cast<int64_t>(lengths.shape(0))};
    if (encoder) {
        sources.tokens = checked_tokens(*encoder, rows);
        if (encoder->width() != decoder.memory_width()) refuse("the encoder's rows have another width than the decoder wants");
    } else {
        sources.memory = data_of<float>(rows, "memory", 2);
        if (static_cast<int64_t>(rows.shape(1)) != decoder.memory_width()) refuse("memory has another width than the decoder wants");
    }
    sources.first = offsets(lengths, rows.shape(0), encoder ? encoder->positions() : kMaxSource);
    const auto *limit = data_of<int64_t>(limits, "limits", 1);
    sources.limits.assign(limit, limit + limits.shape(0));  // nobody can change it after the check
    if (static_cast<int64_t>(sources.limits.size()) != sources.count) refuse("lengths and limits are not as many");
    for (const int64_t length : sources.limits)
        if (length < 1 || length > decoder.positions())
            refuse("found a limit of " + std::to_string(length) + " tokens, wanted 1 to " + std::to_string(decoder.positions()));
    if (beam < 1 || beam > kMaxBeam || n_best < 1 || n_best > beam || 2 * beam > decoder.vocabulary_size())
        refuse("found beam " + std::to_string(beam) + " and n-best " + std::to_string(n_best) + "; wanted a beam of 1 to " +
               std::to_string(std::min(kMaxBeam, decoder.vocabulary_size() / 2)) + ", and no more translations than it");
    if (start < 0 || start >= decoder.vocabulary_size() || end < -1 || end >= decoder.vocabulary_size())
        refuse("the start or end token is none of the vocabulary");
    if (slots < 1 || slots > 65536 || threads < 1 || !(std::abs(length_penalty) < 100))
        refuse("impossible slots, threads or length penalty");
    if (kind != "ctranslate2" && kind != "transformers" && kind != "marian") refuse("there are no rules of " + kind);
    for (const auto *tokens : {&prefix, &banned})
        for (const int32_t token : *tokens)
            if (token < 0 || token >= decoder.vocabulary_size()) refuse("a token that comes first or never is none of the vocabulary");
    if (least < 0 || no_repeat_ngram < 0 || !std::isfinite(word_penalty) || (forced_end && end < 0)) refuse("impossible rules of the search");
    for (const int64_t limit : sources.limits)
        if (limit <= static_cast<int64_t>(prefix.size())) refuse("a limit leaves no token after those that come first");
    const Options options{start, end, beam, n_best, std::max<int64_t>(1, std::min(slots, (sources.count + threads - 1) / threads)),
                          length_penalty, kind, early_stopping, prefix, banned, least, no_repeat_ngram, forced_end, word_penalty};
    if (words && word_counts) take_words(sources, decoder, options, *words, *word_counts);
    Results results;
    {
        nb::gil_scoped_release unlocked;
        results = beam_search(decoder, sources, options, threads);
    }
    Translations translations;
    for (auto &hypotheses : results) {
        translations.emplace_back();
        for (auto &hypothesis : hypotheses) translations.back().emplace_back(std::move(hypothesis.tokens), hypothesis.score);
    }
    return translations;
}

}  // namespace
}  // namespace zoo

void bind_transformer(nb::module_ &module) {
    using namespace zoo;
    nb::class_<Layers>(module, "Layers")
        .def("embedding", &Layers::embedding, nb::keep_alive<1, 3>(), "table"_a.none(), "shared"_a.none(), "scale"_a, "positions"_a,
             "out"_a)
        .def("layer_norm", &Layers::layer_norm, "input"_a, "scale"_a, "bias"_a, "epsilon"_a, "out"_a)
        .def("linear", &Layers::linear, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none(), "relu"_a, "residual"_a, "out"_a)
        .def("activation", &Layers::activation, "input"_a, "kind"_a, "out"_a)
        .def_prop_ro("isa", &Layers::isa);
    nb::class_<Encoder, Layers>(module, "Encoder")
        .def(nb::init<const std::string &>(), "isa"_a)
        .def("attention", &Encoder::attention, "input"_a, "heads"_a, "out"_a)
        .def("finish", &Encoder::finish, "input"_a)
        .def("encode", &encode, "tokens"_a, "lengths"_a);
    nb::class_<Decoder, Layers>(module, "Decoder")
        .def(nb::init<int64_t, const std::string &>(), "memory_width"_a, "isa"_a)
        .def("self_attention", &Decoder::self_attention, "input"_a, "heads"_a, "out"_a)
        .def("recurrence", &Decoder::recurrence, "input"_a, "residual"_a, "out"_a)
        .def("cross_attention", &Decoder::cross_attention, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none(), "heads"_a,
             "out"_a)
        .def("vocabulary", &Decoder::vocabulary, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none())
        .def("translate", &translate, "encoder"_a.none(), "rows"_a, "lengths"_a, "limits"_a, "start"_a, "end"_a, "beam"_a, "n_best"_a,
             "length_penalty"_a, "slots"_a, "threads"_a, "kind"_a = "ctranslate2", "early_stopping"_a = "False",
             "prefix"_a = std::vector<int32_t>{}, "banned"_a = std::vector<int32_t>{}, "least"_a = 0, "forced_end"_a = false,
             "no_repeat_ngram"_a = 0, "word_penalty"_a = 0.0, "words"_a.none() = nb::none(), "word_counts"_a.none() = nb::none());
}
