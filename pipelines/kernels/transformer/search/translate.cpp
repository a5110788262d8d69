// Translation for Python: batches and streams of sentences; bindings of encoder and decoder.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "isa/threads.h"
#include "transformer/search/beam_search.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

// Queue of all sentences of a call, shared by its threads.
class SentenceList : public SentenceQueue {
  public:
    explicit SentenceList(std::shared_ptr<const Sources> sources)
        : results(static_cast<size_t>(sources->count)), sources_(std::move(sources)) {}
    Taken take(int64_t most, int64_t) override {
        const std::lock_guard<std::mutex> locked(taking_);
        const int64_t begin = next_, last = std::min(sources_->count, begin + most);
        const auto row = [&](int64_t i) { return sources_->first[static_cast<size_t>(i)]; };
        while (next_ < last && (next_ == begin || row(next_ + 1) - row(begin) <= kEncoderRows)) ++next_;
        return {sources_, begin, next_};
    }
    void done(int64_t number, Hypotheses hypotheses) override { results[static_cast<size_t>(number)] = std::move(hypotheses); }
    std::vector<Hypotheses> results;

  private:
    const std::shared_ptr<const Sources> sources_;
    std::mutex taking_;
    int64_t next_ = 0;
};

void check_signals() {
    nb::gil_scoped_acquire locked;
    if (PyErr_CheckSignals()) throw nb::python_error();
}

// Translates all sources; the calling thread takes part.
std::vector<Hypotheses> beam_search(const Decoder &decoder, std::shared_ptr<const Sources> sources, const Options &options,
                                    int64_t threads) {
    SentenceList queue(sources);
    on_threads(std::min(threads, sources->count), [&](bool main_thread) {
        try {
            BeamSearch(decoder, options, queue).run(main_thread ? check_signals : nullptr);
        } catch (...) {
            queue.stop = true;
            throw;
        }
    });
    return std::move(queue.results);
}

[[noreturn]] void refuse(const std::string &why) { throw nb::value_error(why.c_str()); }

std::vector<int32_t> encoder_tokens(const Encoder &encoder, const Array &tokens) {
    if (!encoder.complete()) refuse("the encoder has no result yet");
    return checked_tokens(tokens, encoder.tokens());
}

NewArray<float> encode(const Encoder &encoder, const Array &tokens, const Array &lengths) {
    const std::vector<int32_t> copy = encoder_tokens(encoder, tokens);
    const std::vector<int64_t> first = offsets(lengths, copy.size(), std::min(encoder.positions(), encoder.reach()));
    Encoding work;
    const Rows rows = encoder.encode(work, copy.data(), first.data(), static_cast<int64_t>(first.size()) - 1);
    return array_of(rows.values, first.back(), encoder.width(), rows.stride);
}

// Shortlists of the sentences: sorted int32 tokens, and the number of tokens of each.
void take_words(Sources &sources, const Decoder &decoder, const Options &options, const Array &words, const Array &counts) {
    const auto *word = data_of<int32_t>(words, "words", 1);
    sources.words.assign(word, word + words.shape(0));
    const auto *count = data_of<int64_t>(counts, "word_counts", 1);
    if (static_cast<int64_t>(counts.shape(0)) != sources.count) refuse("there are words for another number of sentences");
    const int64_t least = std::min(decoder.vocabulary_size(), options.least_words());
    sources.first_word.push_back(0);
    for (int64_t i = 0; i < sources.count; ++i) {
        const int64_t first = sources.first_word.back(), last = first + count[i];
        if (count[i] < least || last > static_cast<int64_t>(sources.words.size()))
            refuse("a sentence has " + std::to_string(count[i]) + " words, expected at least " + std::to_string(least));
        bool ends = options.end < 0;
        for (int64_t word = first; word < last; ++word) {
            const int32_t token = sources.words[static_cast<size_t>(word)];
            if (token < 0 || token >= decoder.vocabulary_size() || (word > first && token <= sources.words[static_cast<size_t>(word - 1)]))
                refuse("words are not in order, or none of the vocabulary");
            ends = ends || token == options.end;
        }
        if (!ends) refuse("a sentence may not end");
        sources.first_word.push_back(last);
    }
}

void require_tokens(const Decoder &decoder, const std::vector<int32_t> &tokens) {
    for (const int32_t token : tokens)
        if (token < 0 || token >= decoder.vocabulary_size()) refuse("a token of the rules is none of the vocabulary");
}

// Prefix and phrases of each translation; none: nothing.
using AllDemands = std::optional<std::vector<std::pair<std::vector<int32_t>, Phrases>>>;

// word_marks: see `PhraseState`; none: phrases may be parts of words.
std::vector<Demands> checked_demands(const Decoder &decoder, const Options &options, const AllDemands &asked, const std::optional<nb::bytes> &word_marks,
                                     int64_t count) {
    std::vector<Demands> demands;
    if (!asked) return demands;
    std::shared_ptr<const std::string> marks;
    if (word_marks) marks = std::make_shared<const std::string>(word_marks->c_str(), word_marks->size());
    if (marks && static_cast<int64_t>(marks->size()) != decoder.vocabulary_size()) refuse("word_marks are not of all tokens");
    if (static_cast<int64_t>(asked->size()) != count) refuse("there are demands for another number of sentences");
    for (const auto &[prefix, phrases] : *asked) {
        require_tokens(decoder, prefix);
        for (const auto &phrase : phrases) {
            if (phrase.empty()) refuse("a phrase has no tokens");
            require_tokens(decoder, phrase);
        }
        if (!phrases.empty() && (options.sample || options.groups > 1)) refuse("samples and groups of beams have no phrases");
        if (!phrases.empty() && (options.beam < 2 || options.end < 0)) refuse("phrases need a beam of 2 or more, and an end");
        demands.push_back({prefix, phrases, marks});
    }
    return demands;
}

// Limits int64 [sentences]: 1 to the decoder's positions, and beyond the prefix.
std::vector<int64_t> checked_limits(const Decoder &decoder, const Options &options, const Array &limits, int64_t count,
                                    const std::vector<Demands> &demands) {
    const auto *limit = data_of<int64_t>(limits, "limits", 1);
    std::vector<int64_t> copy(limit, limit + limits.shape(0));  // the caller cannot change the copy
    if (static_cast<int64_t>(copy.size()) != count) refuse("lengths and limits are not as many");
    for (size_t i = 0; i < copy.size(); ++i) {
        const int64_t length = copy[i];
        size_t prefix = options.prefix.size();
        if (!demands.empty()) prefix = (demands[i].first ? demands[i].first->size() : prefix) + demands[i].prefix.size();
        if (length < 1 || length > decoder.positions())
            refuse("found a limit of " + std::to_string(length) + " tokens, expected 1 to " + std::to_string(decoder.positions()));
        if (length <= static_cast<int64_t>(prefix)) refuse("a limit leaves no token after those that come first");
    }
    return copy;
}

Options checked_options(const Decoder &decoder, const Encoder *encoder, int64_t start, int64_t end, int64_t beam, int64_t n_best,
                        double length_penalty, int64_t slots, int64_t threads, const SearchRules *asked, const Speculation *speculation) {
    const SearchRules rules = asked ? *asked : SearchRules{};
    if (!decoder.complete()) refuse("the decoder has no vocabulary yet");
    if (encoder && !encoder->complete()) refuse("the encoder has no result yet");
    if (encoder && encoder->width() != decoder.memory_width()) refuse("the encoder's rows have another width than the decoder wants");
    if (beam < 1 || beam > kMaxBeam || n_best < 1 || n_best > beam || (2 * beam > decoder.vocabulary_size() && !rules.sample))
        refuse("found beam " + std::to_string(beam) + " and n-best " + std::to_string(n_best) + "; expected a beam of 1 to " +
               std::to_string(std::min(kMaxBeam, decoder.vocabulary_size() / 2)) + ", and no more translations than it");
    if (start < 0 || start >= decoder.vocabulary_size() || end < -1 || end >= decoder.vocabulary_size())
        refuse("the start or end token is none of the vocabulary");
    if (slots < 1 || slots > 65536 || threads < 1 || !(std::abs(length_penalty) < 100))
        refuse("impossible slots, threads or length penalty");
    if (rules.kind != "ctranslate2" && rules.kind != "transformers" && rules.kind != "marian") refuse("there are no rules of " + rules.kind);
    for (const auto *tokens : {&rules.prefix, &rules.banned, &rules.first_banned, &rules.counted}) require_tokens(decoder, *tokens);
    for (const auto &word : rules.bad_words) {
        if (word.empty()) refuse("a bad word has no tokens");
        require_tokens(decoder, word);
    }
    if (rules.least < 0 || rules.no_repeat_ngram < 0 || rules.encoder_no_repeat_ngram < 0 || !std::isfinite(rules.word_penalty) ||
        !(rules.repetition_penalty > 0 && std::isfinite(rules.repetition_penalty)) || (rules.forced_end && end < 0))
        refuse("impossible rules of the search");
    if (!(rules.temperature > 0 && std::isfinite(rules.temperature)) || !(rules.top_p > 0 && rules.top_p <= 1) || rules.top_k < 0 ||
        !(rules.diversity_penalty >= 0 && std::isfinite(rules.diversity_penalty)) || rules.groups < 1 || beam % rules.groups)
        refuse("impossible rules of sampling or groups of beams");
    if (rules.sample && (rules.groups > 1 || speculation)) refuse("samples have no groups and no proposals");
    if (rules.reads_source() && !encoder) refuse("a rule reads the source, which is encoded already");
    if (speculation && !speculation->is_for(decoder)) refuse("proposals are for another decoder");
    return {rules, start, end, beam, n_best, slots, length_penalty, speculation};
}

using Translation = std::vector<std::pair<std::vector<int32_t>, double>>;

Translation plain(Hypotheses hypotheses) {
    Translation translation;
    for (auto &hypothesis : hypotheses) translation.emplace_back(std::move(hypothesis.tokens), hypothesis.score);
    return translation;
}

// rows: tokens for the encoder, or without an encoder its results.
std::vector<Translation> translate(const Decoder &decoder, const Encoder *encoder, const Array &rows, const Array &lengths,
                                   const Array &limits, int64_t start, int64_t end, int64_t beam, int64_t n_best, double length_penalty,
                                   int64_t slots, int64_t threads, const SearchRules *asked, const std::optional<Array> &words,
                                   const std::optional<Array> &word_counts, const AllDemands &demands, const std::optional<nb::bytes> &word_marks,
                                   const Speculation *speculation) {
    Options options = checked_options(decoder, encoder, start, end, beam, n_best, length_penalty, slots, threads, asked, speculation);
    auto sources = std::make_shared<Sources>(Sources{encoder, {}, nullptr, {}, {}, static_cast<int64_t>(lengths.shape(0))});
    if (encoder) {
        sources->tokens = encoder_tokens(*encoder, rows);
    } else {
        sources->memory = data_of<float>(rows, "memory", 2);
        if (static_cast<int64_t>(rows.shape(1)) != decoder.memory_width()) refuse("memory has another width than the decoder wants");
    }
    sources->first = offsets(lengths, rows.shape(0), encoder ? encoder->positions() : kMaxSource);
    sources->demands = checked_demands(decoder, options, demands, word_marks, sources->count);
    sources->limits = checked_limits(decoder, options, limits, sources->count, sources->demands);
    options.slots = std::max<int64_t>(1, std::min(slots, (sources->count + threads - 1) / threads));
    if (words && word_counts) take_words(*sources, decoder, options, *words, *word_counts);
    std::vector<Hypotheses> results;
    {
        nb::gil_scoped_release unlocked;
        results = beam_search(decoder, sources, options, threads);
    }
    std::vector<Translation> translations;
    for (auto &hypotheses : results) translations.push_back(plain(std::move(hypotheses)));
    return translations;
}

// A busy search delays a few sentences by a step, to encode more of them together at lower cost.
constexpr int64_t kTogether = 8;  // fewer than one per so many active sentences are few
constexpr int64_t kPatience = 1;

// Stream of sentences with continuous batching: new ones join the batch of a thread between two steps. They are numbered from 0.
class TranslationStream {
  public:
    // A finished sentence: its number, translations, and error ("" for none).
    using Finished = std::tuple<int64_t, Translation, std::string>;

    TranslationStream(const Decoder &decoder, const Encoder &encoder, Options options, int64_t threads)
        : decoder_(decoder), encoder_(encoder), options_(std::move(options)) {
        for (int64_t i = 0; i < threads; ++i) workers_.push_back(std::make_unique<Worker>(*this));
        try {
            for (auto &worker : workers_) threads_.emplace_back([this, &worker] { work(*worker); });
        } catch (...) {
            close();
            throw;
        }
    }
    ~TranslationStream() {
        nb::gil_scoped_release unlocked;
        close();
    }

    // Returns the number of the first sentence; the others follow. first: see `Demands`.
    int64_t submit(const Array &tokens, const Array &lengths, const Array &limits, const std::optional<Array> &words,
                   const std::optional<Array> &word_counts, const AllDemands &demands, const std::optional<nb::bytes> &word_marks,
                   const std::optional<std::vector<int32_t>> &first) {
        Sources sources{&encoder_, encoder_tokens(encoder_, tokens), nullptr, {}, {}, static_cast<int64_t>(lengths.shape(0))};
        sources.first = offsets(lengths, sources.tokens.size(), encoder_.positions());
        sources.demands = checked_demands(decoder_, options_, demands, word_marks, sources.count);
        sources.demands.resize(static_cast<size_t>(sources.count));
        if (first) require_tokens(decoder_, *first);
        for (Demands &own : sources.demands) own.first = first;
        sources.limits = checked_limits(decoder_, options_, limits, sources.count, sources.demands);
        if (words && word_counts) take_words(sources, decoder_, options_, *words, *word_counts);
        const std::lock_guard<std::mutex> locked(mutex_);
        if (closed_) throw std::runtime_error("the stream is closed");
        const int64_t number = next_;
        for (int64_t i = 0; i < sources.count; ++i) {
            const auto cut = [i](const std::vector<int32_t> &values, const std::vector<int64_t> &first) {
                const auto index = static_cast<size_t>(i);
                return std::vector<int32_t>(values.begin() + first[index], values.begin() + first[index + 1]);
            };
            waiting_.push_back({next_++, sources.limits[static_cast<size_t>(i)], cut(sources.tokens, sources.first),
                                sources.words.empty() ? std::vector<int32_t>{} : cut(sources.words, sources.first_word),
                                sources.demands[static_cast<size_t>(i)]});
        }
        come_.notify_all();
        return number;
    }

    // Returns the finished sentences, each once; waits for the first. Empty: timeout, or the stream is closed.
    std::vector<Finished> finished(double seconds) {
        std::vector<Finished> results;
        nb::gil_scoped_release unlocked;
        std::unique_lock<std::mutex> locked(mutex_);
        const auto ready = [this] { return closed_ || !finished_.empty(); };
        finish_.wait_for(locked, std::chrono::duration<double>(std::clamp(seconds, 0.0, 3600.0)), ready);
        results.swap(finished_);
        return results;
    }

    // Cancels a sentence, which will not appear among the finished ones.
    void cancel(int64_t number) {
        const std::lock_guard<std::mutex> locked(mutex_);
        const auto waits = [number](const Waiting &waiting) { return waiting.number == number; };
        waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), waits), waiting_.end());
        for (auto &worker : workers_)
            if (worker->taken.erase(number)) worker->leaving = true;
        const auto same = [number](const Finished &finished) { return std::get<0>(finished) == number; };
        finished_.erase(std::remove_if(finished_.begin(), finished_.end(), same), finished_.end());
    }

    // Stops the threads; unfinished sentences are dropped.
    void close() {
        {
            const std::lock_guard<std::mutex> locked(mutex_);
            closed_ = true;
            for (auto &worker : workers_) worker->stop = true;
            come_.notify_all();
            finish_.notify_all();
        }
        for (auto &thread : threads_) thread.join();
        threads_.clear();
    }

  private:
    struct Waiting {
        int64_t number, limit;
        std::vector<int32_t> tokens, words;
        Demands demands;
    };

    // Queue of one thread. taken: its active sentences that are not cancelled.
    struct Worker : SentenceQueue {
        explicit Worker(TranslationStream &owner) : stream(owner) {}
        Taken take(int64_t most, int64_t live) override { return stream.take(*this, most, live); }
        void done(int64_t number, Hypotheses hypotheses) override { stream.done(*this, number, plain(std::move(hypotheses)), ""); }
        void step_over() override { stream.finish_.notify_one(); }
        bool is_cancelled(int64_t number) override {
            const std::lock_guard<std::mutex> locked(stream.mutex_);
            return !taken.count(number);
        }
        TranslationStream &stream;
        std::set<int64_t> taken;
        int64_t delayed = 0;  // steps by which few sentences were delayed
    };

    SentenceQueue::Taken take(Worker &worker, int64_t most, int64_t live) {
        std::unique_lock<std::mutex> locked(mutex_);
        if (!live) come_.wait(locked, [this] { return closed_ || !waiting_.empty(); });
        if (closed_ || waiting_.empty()) return {nullptr, 0, 0};
        const auto waiting = static_cast<int64_t>(waiting_.size()), workers = static_cast<int64_t>(workers_.size());
        if (waiting * kTogether < live && worker.delayed++ < kPatience) return {nullptr, 0, 0};
        worker.delayed = 0;
        most = std::min(most, (waiting + workers - 1) / workers);  // share the sentences among the threads
        auto sources = std::make_shared<Sources>(Sources{&encoder_, {}, nullptr, {}, {0}, 0});
        while (sources->count < most) {
            Waiting &next = waiting_.front();
            const int64_t rows = sources->first.back() + static_cast<int64_t>(next.tokens.size());
            if (sources->count && (rows > kEncoderRows || next.words.empty() != sources->words.empty())) break;
            if (!next.words.empty() && !sources->count) sources->first_word.push_back(0);
            sources->tokens.insert(sources->tokens.end(), next.tokens.begin(), next.tokens.end());
            sources->words.insert(sources->words.end(), next.words.begin(), next.words.end());
            if (!next.words.empty()) sources->first_word.push_back(static_cast<int64_t>(sources->words.size()));
            sources->first.push_back(rows), sources->limits.push_back(next.limit), sources->numbers.push_back(next.number);
            sources->demands.push_back(std::move(next.demands));
            worker.taken.insert(next.number);
            ++sources->count;
            waiting_.pop_front();
        }
        const int64_t count = sources->count;
        return {std::move(sources), 0, count};
    }

    void done(Worker &worker, int64_t number, Translation translation, const std::string &error) {
        const std::lock_guard<std::mutex> locked(mutex_);
        if (!worker.taken.erase(number)) return;  // cancelled
        finished_.emplace_back(number, std::move(translation), error);
    }

    void work(Worker &worker) {
        while (!worker.stop) {
            try {
                BeamSearch(decoder_, options_, worker).run(nullptr);
            } catch (const std::exception &error) {  // the next sentences get a new search
                const std::set<int64_t> lost = [&] {
                    const std::lock_guard<std::mutex> locked(mutex_);
                    return worker.taken;
                }();
                for (const int64_t number : lost) done(worker, number, {}, error.what());
                worker.step_over();
            }
        }
    }

    const Decoder &decoder_;
    const Encoder &encoder_;
    const Options options_;
    std::mutex mutex_;  // guards all members below
    std::condition_variable come_, finish_;
    std::deque<Waiting> waiting_;
    std::vector<Finished> finished_;
    std::vector<std::unique_ptr<Worker>> workers_;
    int64_t next_ = 0;
    bool closed_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace
}  // namespace zoo

void bind_transformer(nb::module_ &module) {
    using namespace zoo;
    nb::class_<Layers>(module, "Layers")
        .def("embedding", &Layers::embedding, nb::keep_alive<1, 3>(), "table"_a.none(), "shared"_a.none(), "scale"_a, "positions"_a,
             "longest"_a, "out"_a)
        .def("layer_norm", &Layers::layer_norm, "input"_a, "scale"_a, "bias"_a, "epsilon"_a, "out"_a)
        .def("part_norms", &Layers::part_norms, "input"_a, "scale"_a, "bias"_a, "epsilon"_a, "out"_a)
        .def("rms_norm", &Layers::rms_norm, "input"_a, "scale"_a, "epsilon"_a, "out"_a)
        .def("linear", &Layers::linear, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none(), "relu"_a, "residual"_a, "out"_a)
        .def("activation", &Layers::activation, "input"_a, "kind"_a, "out"_a)
        .def("gated_activation", &Layers::gated_activation, "input"_a, "kind"_a, "out"_a)
        .def("sum", &Layers::sum, "input"_a, "residual"_a, "out"_a)
        .def("scale", &Layers::scale, "input"_a, "factors"_a, "out"_a)
        .def_prop_ro("isa", &Layers::isa);
    nb::class_<SearchRules>(module, "SearchRules")
        .def(nb::init<>())
        .def_rw("kind", &SearchRules::kind)
        .def_rw("early_stopping", &SearchRules::early_stopping)
        .def_rw("prefix", &SearchRules::prefix)
        .def_rw("banned", &SearchRules::banned)
        .def_rw("first_banned", &SearchRules::first_banned)
        .def_rw("counted", &SearchRules::counted)
        .def_rw("bad_words", &SearchRules::bad_words)
        .def_rw("least", &SearchRules::least)
        .def_rw("no_repeat_ngram", &SearchRules::no_repeat_ngram)
        .def_rw("encoder_no_repeat_ngram", &SearchRules::encoder_no_repeat_ngram)
        .def_rw("repetition_penalty", &SearchRules::repetition_penalty)
        .def_rw("word_penalty", &SearchRules::word_penalty)
        .def_rw("forced_end", &SearchRules::forced_end)
        .def_rw("renormalize", &SearchRules::renormalize)
        .def_rw("sample", &SearchRules::sample)
        .def_rw("temperature", &SearchRules::temperature)
        .def_rw("top_k", &SearchRules::top_k)
        .def_rw("top_p", &SearchRules::top_p)
        .def_rw("seed", &SearchRules::seed)
        .def_rw("groups", &SearchRules::groups)
        .def_rw("diversity_penalty", &SearchRules::diversity_penalty);
    nb::class_<Encoder, Layers>(module, "Encoder")
        .def(nb::init<const std::string &>(), "isa"_a)
        .def("attention", &Encoder::attention, "input"_a, "heads"_a, "out"_a)
        .def("quantized_attention", &Encoder::quantized_attention, "input"_a, "heads"_a, "key_heads"_a, "before"_a,
             "after"_a, "bias"_a.none(), "norm"_a.none(), "rotary"_a.none(), "rows"_a.none(), "to_position"_a.none(),
             "to_content"_a.none(), "out"_a)
        .def("neighbours", &Encoder::neighbours, "input"_a, "count"_a, "out"_a)
        .def("finish", &Encoder::finish, "input"_a)
        .def("encode", &encode, "tokens"_a, "lengths"_a);
    nb::class_<Decoder, Layers>(module, "Decoder")
        .def(nb::init<int64_t, const std::string &>(), "memory_width"_a, "isa"_a)
        .def("self_attention", &Decoder::self_attention, "input"_a, "heads"_a, "bias"_a.none(), "out"_a)
        .def("recurrence", &Decoder::recurrence, "input"_a, "residual"_a, "out"_a)
        .def("cross_attention", &Decoder::cross_attention, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none(), "heads"_a,
             "out"_a)
        .def("vocabulary", &Decoder::vocabulary, "input"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none())
        .def("share_words", &Decoder::share_words, "words"_a)
        .def_prop_ro("cross_attentions", &Decoder::cross_attentions)
        .def("forced_scores", &forced_scores, "encoder"_a, "tokens"_a, "lengths"_a, "targets"_a, "target_lengths"_a, "start"_a, "threads"_a,
             "excluded"_a, "shortlists"_a.none() = nb::none())
        .def("forced_attention", &forced_attention, "encoder"_a, "tokens"_a, "lengths"_a, "targets"_a, "target_lengths"_a, "start"_a, "threads"_a,
             "layer"_a, "heads"_a)
        .def("translate", &translate, "encoder"_a.none(), "rows"_a, "lengths"_a, "limits"_a, "start"_a, "end"_a, "beam"_a, "n_best"_a,
             "length_penalty"_a, "slots"_a, "threads"_a, "rules"_a.none() = nb::none(), "words"_a.none() = nb::none(),
             "word_counts"_a.none() = nb::none(), "demands"_a.none() = nb::none(), "word_marks"_a.none() = nb::none(),
             "speculation"_a.none() = nb::none());
    nb::class_<Speculation>(module, "Speculation")
        .def(nb::init<const Decoder &, bool>(), nb::keep_alive<1, 2>(), "decoder"_a, "copies"_a)
        .def("set_draft", &Speculation::set_draft, nb::keep_alive<1, 2>(), "draft"_a, "weight"_a, "scale"_a, "bias"_a, "qparams"_a.none(),
             "offsets"_a.none() = nb::none(), "targets"_a.none() = nb::none(), "common"_a = std::vector<int32_t>{})
        .def("measure", &Speculation::measure)
        .def_prop_ro("costs", &Speculation::costs)
        .def("assume", &Speculation::assume, "costs"_a)
        .def_prop_ro("counts", &Speculation::counts);
    nb::class_<TranslationStream>(module, "TranslationStream")
        .def(
            "__init__",
            [](TranslationStream *self, const Decoder &decoder, const Encoder &encoder, int64_t start, int64_t end, int64_t beam,
               int64_t n_best, double length_penalty, int64_t slots, int64_t threads, const SearchRules *asked, const Speculation *speculation) {
                Options options = checked_options(decoder, &encoder, start, end, beam, n_best, length_penalty, slots, threads, asked, speculation);
                new (self) TranslationStream(decoder, encoder, std::move(options), threads);
            },
            nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 12>(), "decoder"_a, "encoder"_a, "start"_a, "end"_a, "beam"_a, "n_best"_a,
            "length_penalty"_a, "slots"_a, "threads"_a, "rules"_a.none() = nb::none(), "speculation"_a.none() = nb::none())
        .def("submit", &TranslationStream::submit, "tokens"_a, "lengths"_a, "limits"_a, "words"_a.none() = nb::none(),
             "word_counts"_a.none() = nb::none(), "demands"_a.none() = nb::none(), "word_marks"_a.none() = nb::none(),
             "first"_a.none() = nb::none())
        .def("finished", &TranslationStream::finished, "seconds"_a)
        .def("cancel", &TranslationStream::cancel, "number"_a)
        .def("close", &TranslationStream::close, nb::call_guard<nb::gil_scoped_release>());
}
