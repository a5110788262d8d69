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
};

// The sources, one after the other: their tokens and their encoder, or the encoder's results, [sum of lengths, width].
struct Sources {
    const Encoder *encoder;
    std::vector<int32_t> tokens;
    const float *memory;
    std::vector<int64_t> limits, first;  // first: row of each sentence, and of the end
    int64_t count;
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
          workspace_(decoder.acquire(options.slots * options.beam, options.beam, 2 * options.beam)), work_(*workspace_) {}
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
        for (auto &page : sentence->pages) work_.free_pages.push_back(std::move(page));
        sentence->pages.clear();
        work_.free_sentences.push_back(std::move(sentence));
    }

    struct Candidate {
        double score;  // log probability, summed
        int64_t slot;
        int32_t token;
    };

    // The 2 * beam likeliest continuations of a sentence's beams, whose rows begin at `row`: a merge of the beams' own; of ties the first
    // beam's, then its first.
    void merge_candidates(const Sentence &sentence, int64_t row) {
        const int64_t count = work_.top_k;
        candidates_.clear(), taken_.assign(static_cast<size_t>(sentence.beams), 0);
        const auto score = [&](int64_t slot) {
            const int64_t at = (row + slot) * count + taken_[static_cast<size_t>(slot)];
            return sentence.scores[static_cast<size_t>(slot)] + (static_cast<double>(work_.top_values[at]) - work_.log_sum_exp[row + slot]);
        };
        for (int64_t slot = 0; slot < sentence.beams; ++slot)
            if (!std::isfinite(work_.log_sum_exp[row + slot]))
                throw std::runtime_error("the model computes NaN or infinite logits; check its weights");
        while (static_cast<int64_t>(candidates_.size()) < count) {
            int64_t best = -1;
            double best_score = 0;
            for (int64_t slot = 0; slot < sentence.beams; ++slot) {
                if (taken_[static_cast<size_t>(slot)] == count) continue;
                const double candidate = score(slot);
                if (best < 0 || candidate > best_score) best = slot, best_score = candidate;
            }
            int64_t &taken = taken_[static_cast<size_t>(best)];
            candidates_.push_back({best_score, best, work_.top_tokens[(row + best) * count + taken]});
            ++taken;
        }
    }

    // Extends the sentence's beams by their likeliest continuations; true where the sentence is done.
    bool advance(Sentence &sentence, int64_t row) {
        merge_candidates(sentence, row);
        const int64_t beam = options_.beam, now = sentence.position, length = now + 1;
        const bool last = sentence.limit <= length;
        const auto ends = [&](const Candidate &candidate) { return candidate.token == options_.end; };
        for (int64_t i = 0; i < beam; ++i) {
            const Candidate &candidate = candidates_[static_cast<size_t>(i)];
            if (!last && !ends(candidate)) continue;
            std::vector<int32_t> tokens;
            const uint8_t *ancestors = sentence.ancestors.data() + candidate.slot * sentence.limit;
            for (int64_t t = 1; t <= now; ++t)
                tokens.push_back(sentence.tokens[static_cast<size_t>(t * beam + (t < now ? ancestors[t] : candidate.slot))]);
            if (!ends(candidate)) tokens.push_back(candidate.token);
            sentence.hypotheses.push_back(
                {std::move(tokens), candidate.score / std::pow(static_cast<double>(length), options_.length_penalty)});
        }
        sentence.top_ended = sentence.top_ended || ends(candidates_[0]);
        const bool penalized = options_.length_penalty != 0;
        const bool enough = static_cast<int64_t>(sentence.hypotheses.size()) >= (penalized ? beam : options_.n_best);
        if (last || (enough && (sentence.top_ended || penalized))) return true;

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
    std::vector<int64_t> taken_;  // of each beam: how many of its continuations are among the candidates
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

// rows: tokens for the encoder, or without one its results.
Translations translate(const Decoder &decoder, const Encoder *encoder, const Array &rows, const Array &lengths, const Array &limits,
                       int64_t start, int64_t end, int64_t beam, int64_t n_best, double length_penalty, int64_t slots, int64_t threads) {
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
    const Options options{start,         end, beam, n_best, std::max<int64_t>(1, std::min(slots, (sources.count + threads - 1) / threads)),
                          length_penalty};
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
        .def_prop_ro("isa", &Layers::isa);
    nb::class_<Encoder, Layers>(module, "Encoder")
        .def(nb::init<const std::string &>(), "isa"_a)
        .def("attention", &Encoder::attention, "input"_a, "heads"_a, "out"_a)
        .def("finish", &Encoder::finish, "input"_a)
        .def("encode", &encode, "tokens"_a, "lengths"_a);
    nb::class_<Decoder, Layers>(module, "Decoder")
        .def(nb::init<int64_t, const std::string &>(), "memory_width"_a, "isa"_a)
        .def("self_attention", &Decoder::self_attention, "input"_a, "heads"_a, "out"_a)
        .def("cross_attention", &Decoder::cross_attention, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none(), "heads"_a,
             "out"_a)
        .def("vocabulary", &Decoder::vocabulary, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none())
        .def("translate", &translate, "encoder"_a.none(), "rows"_a, "lengths"_a, "limits"_a, "start"_a, "end"_a, "beam"_a, "n_best"_a,
             "length_penalty"_a, "slots"_a, "threads"_a);
}
