// Beam search over a decoder, with the rules of the numpy one (zoo/transformer_mt/decode.py), and the Python objects of both.
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
    int64_t start, end, beam, best, slots;  // end: -1 for none, every sentence then reaches its limit
    double penalty;
};

// Sentences one after the other: their tokens, and who encodes them, or what an encoder found, [sum of lengths, width].
struct Sources {
    const Encoder *encoder;
    std::vector<int32_t> tokens;
    const float *memory;
    std::vector<int64_t> limits, first;  // first: row of each sentence, and of the end
    int64_t count;
};

constexpr int64_t kEncoded = 192;  // rows of sentences that are encoded together, unless one is longer

// What the threads take sentences from.
class Queue {
  public:
    explicit Queue(const Sources &sources) : sources_(sources) {}
    std::atomic<bool> stop{false};
    // The next sentences, at most `most`; [begin, end).
    std::pair<int64_t, int64_t> take(int64_t most) {
        const std::lock_guard<std::mutex> locked(taking_);
        const int64_t begin = next_, last = std::min(sources_.count, begin + most);
        const auto row = [&](int64_t i) { return sources_.first[static_cast<size_t>(i)]; };
        while (next_ < last && (next_ == begin || row(next_ + 1) - row(begin) <= kEncoded)) ++next_;
        return {begin, next_};
    }

  private:
    const Sources &sources_;
    std::mutex taking_;
    int64_t next_ = 0;
};

using Found = std::vector<std::vector<Sentence::Hypothesis>>;

constexpr auto kPatience = std::chrono::milliseconds(10);  // between two looks for Ctrl-C, unless a step takes longer

// One thread's share: sentences come from a common queue into its slots, and leave when they are done.
class Search {
  public:
    Search(const Decoder &decoder, const Sources &sources, const Options &options, Queue &queue, Found &found)
        : decoder_(decoder), sources_(sources), options_(options), queue_(queue), found_(found),
          lent_(decoder.lend(options.slots * options.beam, options.beam, 2 * options.beam)), work_(*lent_) {}
    ~Search() {
        for (auto *each : {&live_, &waiting_})  // where it broke off
            for (auto &sentence : *each) leave(std::move(sentence));
        decoder_.take_back(std::move(lent_));
    }
    Search(const Search &) = delete;

    // watched: by the thread that may be interrupted; it holds no lock.
    void run(bool watched) {
        auto seen = std::chrono::steady_clock::now();
        while (!queue_.stop) {
            refill();
            if (live_.empty()) return;
            beams_.clear();
            for (const auto &each : live_)
                for (int64_t slot = 0; slot < each->width; ++slot) beams_.push_back({each.get(), slot});
            decoder_.step(work_, beams_);
            int64_t row = 0;
            for (auto &each : live_) {
                const int64_t width = each->width;
                if (advance(*each, row)) finish(std::move(each));
                row += width;
            }
            live_.erase(std::remove(live_.begin(), live_.end(), nullptr), live_.end());
            if (watched && std::chrono::steady_clock::now() - seen >= kPatience) {
                nb::gil_scoped_acquire locked;
                if (PyErr_CheckSignals()) throw nb::python_error();
                seen = std::chrono::steady_clock::now();
            }
        }
    }

  private:
    void refill() {
        while (static_cast<int64_t>(live_.size()) < options_.slots) {
            if (waiting_.empty()) fetch();
            if (waiting_.empty()) return;
            live_.push_back(std::move(waiting_.back()));
            waiting_.pop_back();
        }
    }

    // Sentences from the queue, encoded, the first one last.
    void fetch() {
        const auto [begin, end] = queue_.take(options_.slots);
        if (begin == end) return;
        for (int64_t index = begin; index < end; ++index) {
            if (work_.sentences.empty()) work_.sentences.push_back(std::make_unique<Sentence>());
            std::unique_ptr<Sentence> sentence = std::move(work_.sentences.back());
            work_.sentences.pop_back();
            const auto at = static_cast<size_t>(index);
            sentence->index = index, sentence->limit = sources_.limits[at], sentence->position = 0, sentence->width = 1;
            sentence->source = sources_.first[at + 1] - sources_.first[at];
            sentence->topped = false, sentence->found.clear();
            const auto room = static_cast<size_t>(sentence->limit * options_.beam);
            sentence->ancestors.assign(room, 0), sentence->spare.assign(room, 0), sentence->tokens.assign(room, 0);
            sentence->tokens[0] = static_cast<int32_t>(options_.start);
            sentence->scores.assign(1, 0.0);
            waiting_.push_back(std::move(sentence));
        }
        decoder_.remember(work_, waiting_, encoded(begin, end));
        std::reverse(waiting_.begin(), waiting_.end());
    }

    Rows encoded(int64_t begin, int64_t end) {
        const int64_t *first = sources_.first.data() + begin, n = first[end - begin] - *first, width = decoder_.memory_width();
        Rows rows = work_.given.rows();
        if (sources_.encoder) {
            rows = sources_.encoder->encode(work_.encoding, sources_.tokens.data() + *first, first, end - begin);
        } else {
            work_.given.size(n, width);
            rows = work_.given.rows();
            for (int64_t r = 0; r < n; ++r)
                std::fill_n(std::copy_n(sources_.memory + (*first + r) * width, width, rows.real + r * rows.stride), rows.stride - width, 0.0f);
        }
        for (int64_t r = 0; r < n; ++r)
            if (!std::all_of(rows.real + r * rows.stride, rows.real + r * rows.stride + width, [](float x) { return std::isfinite(x); }))
                throw std::runtime_error("the encoder's result is not finite; check its weights");
        return rows;
    }

    void finish(std::unique_ptr<Sentence> sentence) {
        auto &found = sentence->found;
        std::stable_sort(found.begin(), found.end(), [](const auto &a, const auto &b) { return a.score > b.score; });
        if (static_cast<int64_t>(found.size()) > options_.best) found.resize(static_cast<size_t>(options_.best));
        found_[static_cast<size_t>(sentence->index)] = std::move(found);
        leave(std::move(sentence));
    }

    void leave(std::unique_ptr<Sentence> sentence) {
        if (!sentence) return;
        for (auto &page : sentence->pages) work_.pages.push_back(std::move(page));
        sentence->pages.clear();
        work_.sentences.push_back(std::move(sentence));
    }

    struct Candidate {
        double total;
        int64_t slot;
        int32_t token;
    };

    // The 2 * beam likeliest continuations of a sentence's beams, whose rows begin at `row`; of equals the first beam's, then its first.
    void gather(const Sentence &sentence, int64_t row) {
        const int64_t wanted = work_.likeliest;
        candidates_.clear(), taken_.assign(static_cast<size_t>(sentence.width), 0);
        const auto total = [&](int64_t slot) {
            const int64_t at = (row + slot) * wanted + taken_[static_cast<size_t>(slot)];
            return sentence.scores[static_cast<size_t>(slot)] + (static_cast<double>(work_.values[at]) - work_.norms[row + slot]);
        };
        for (int64_t slot = 0; slot < sentence.width; ++slot)
            if (!std::isfinite(work_.norms[row + slot]))
                throw std::runtime_error("the model computes NaN or infinite logits; check its weights");
        while (static_cast<int64_t>(candidates_.size()) < wanted) {
            int64_t best = -1;
            double most = 0;
            for (int64_t slot = 0; slot < sentence.width; ++slot) {
                if (taken_[static_cast<size_t>(slot)] == wanted) continue;
                const double each = total(slot);
                if (best < 0 || each > most) best = slot, most = each;
            }
            int64_t &taken = taken_[static_cast<size_t>(best)];
            candidates_.push_back({most, best, work_.tokens[(row + best) * wanted + taken]});
            ++taken;
        }
    }

    // Takes the likeliest continuations in; true where the sentence is done.
    bool advance(Sentence &sentence, int64_t row) {
        gather(sentence, row);
        const int64_t beam = options_.beam, now = sentence.position, length = now + 1;
        const bool last = sentence.limit <= length;
        const auto ends = [&](const Candidate &each) { return each.token == options_.end; };
        for (int64_t i = 0; i < beam; ++i) {
            const Candidate &each = candidates_[static_cast<size_t>(i)];
            if (!last && !ends(each)) continue;
            std::vector<int32_t> tokens;
            const uint8_t *ancestors = sentence.ancestors.data() + each.slot * sentence.limit;
            for (int64_t t = 1; t <= now; ++t)
                tokens.push_back(sentence.tokens[static_cast<size_t>(t * beam + (t < now ? ancestors[t] : each.slot))]);
            if (!ends(each)) tokens.push_back(each.token);
            sentence.found.push_back({std::move(tokens), each.total / std::pow(static_cast<double>(length), options_.penalty)});
        }
        sentence.topped = sentence.topped || ends(candidates_[0]);
        const bool penalized = options_.penalty != 0;
        const bool enough = static_cast<int64_t>(sentence.found.size()) >= (penalized ? beam : options_.best);
        if (last || (enough && (sentence.topped || penalized))) return true;

        sentence.scores.clear();
        for (const Candidate &each : candidates_) {
            const auto slot = static_cast<int64_t>(sentence.scores.size());
            if (slot == beam) break;
            if (ends(each)) continue;  // a beam ends in one way only: enough are left
            sentence.scores.push_back(each.total);
            uint8_t *to = sentence.spare.data() + slot * sentence.limit;
            to = std::copy_n(sentence.ancestors.data() + each.slot * sentence.limit, now, to);
            *to = static_cast<uint8_t>(each.slot);
            sentence.tokens[static_cast<size_t>(length * beam + slot)] = each.token;
        }
        sentence.ancestors.swap(sentence.spare);
        sentence.position = length, sentence.width = static_cast<int64_t>(sentence.scores.size());
        return false;
    }

    const Decoder &decoder_;
    const Sources &sources_;
    const Options &options_;
    Queue &queue_;
    Found &found_;
    std::unique_ptr<Workspace> lent_;
    Workspace &work_;
    std::vector<std::unique_ptr<Sentence>> live_, waiting_;
    std::vector<Beam> beams_;
    std::vector<Candidate> candidates_;
    std::vector<int64_t> taken_;
};

Found search(const Decoder &decoder, const Sources &sources, const Options &options, int64_t threads) {
    Found found(static_cast<size_t>(sources.count));
    Queue queue(sources);
    std::exception_ptr fault;
    std::mutex faulty;
    const auto work = [&](bool watched) {
        try {
            Search(decoder, sources, options, queue, found).run(watched);
        } catch (...) {
            queue.stop = true;
            const std::lock_guard<std::mutex> locked(faulty);
            if (!fault || watched) fault = std::current_exception();  // Ctrl-C above all
        }
    };
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < std::min(threads, sources.count); ++i) others.emplace_back(work, false);
    } catch (...) {  // no more threads: those that are there do the work
    }
    work(true);
    for (auto &each : others) each.join();
    if (fault) std::rethrow_exception(fault);
    return found;
}

using Translations = std::vector<std::vector<std::pair<std::vector<int32_t>, double>>>;

[[noreturn]] void refuse(const std::string &why) { throw nb::value_error(why.c_str()); }

// The first row of each sentence, and the end of all; lengths int64 [sentences], each 1 to `most`.
std::vector<int64_t> offsets(const Any &lengths, size_t rows, int64_t most) {
    const auto *length = data_of<int64_t>(lengths, "lengths", 1);
    std::vector<int64_t> first{0};
    for (size_t i = 0; i < lengths.shape(0); ++i) {
        const int64_t each = length[i];
        if (each < 1 || each > most) refuse("found a source of " + std::to_string(each) + " rows, wanted 1 to " + std::to_string(most));
        first.push_back(first.back() + each);
    }
    if (static_cast<int64_t>(rows) != first.back()) refuse("the rows are not as many as the lengths want");
    return first;
}

std::vector<int32_t> checked(const Encoder &encoder, const Any &tokens) {
    if (!encoder.complete()) refuse("the encoder has no result yet");
    const auto *given = data_of<int32_t>(tokens, "tokens", 1);
    const std::vector<int32_t> found(given, given + tokens.shape(0));  // nobody can change them after the check
    for (const int32_t each : found)
        if (each < 0 || each >= encoder.tokens())
            refuse("found token " + std::to_string(each) + ", wanted 0 to " + std::to_string(encoder.tokens() - 1));
    return found;
}

nb::object encode(const Encoder &encoder, const Any &tokens, const Any &lengths) {
    const std::vector<int32_t> found = checked(encoder, tokens);
    const std::vector<int64_t> first = offsets(lengths, found.size(), encoder.positions());
    Encoding work;
    const Rows rows = encoder.encode(work, found.data(), first.data(), static_cast<int64_t>(first.size()) - 1);
    return array_of(rows.real, first.back(), encoder.width(), rows.stride);
}

// rows: tokens for the encoder, or without one what it would find.
Translations translate(const Decoder &decoder, const Encoder *encoder, const Any &rows, const Any &lengths, const Any &limits, int64_t start,
                       int64_t end, int64_t beam, int64_t best, double penalty, int64_t slots, int64_t threads) {
    if (!decoder.complete()) refuse("the decoder has no vocabulary yet");
    Sources sources{encoder, {}, nullptr, {}, {}, static_cast<int64_t>(lengths.shape(0))};
    if (encoder) {
        sources.tokens = checked(*encoder, rows);
        if (encoder->width() != decoder.memory_width()) refuse("the encoder's rows have another width than the decoder wants");
    } else {
        sources.memory = data_of<float>(rows, "memory", 2);
        if (static_cast<int64_t>(rows.shape(1)) != decoder.memory_width()) refuse("memory has another width than the decoder wants");
    }
    sources.first = offsets(lengths, rows.shape(0), encoder ? encoder->positions() : kMaxSource);
    const auto *limit = data_of<int64_t>(limits, "limits", 1);
    sources.limits.assign(limit, limit + limits.shape(0));  // nobody can change it after the check
    if (static_cast<int64_t>(sources.limits.size()) != sources.count) refuse("lengths and limits are not as many");
    for (const int64_t each : sources.limits)
        if (each < 1 || each > decoder.positions())
            refuse("found a limit of " + std::to_string(each) + " tokens, wanted 1 to " + std::to_string(decoder.positions()));
    if (beam < 1 || beam > kMaxBeam || best < 1 || best > beam || 2 * beam > decoder.words())
        refuse("found beam " + std::to_string(beam) + " and n-best " + std::to_string(best) + "; wanted a beam of 1 to " +
               std::to_string(std::min(kMaxBeam, decoder.words() / 2)) + ", and no more translations than it");
    if (start < 0 || start >= decoder.words() || end < -1 || end >= decoder.words())
        refuse("the start or end token is none of the vocabulary");
    if (slots < 1 || slots > 65536 || threads < 1 || !(std::abs(penalty) < 100)) refuse("impossible slots, threads or length penalty");
    const Options options{start, end, beam, best, std::max<int64_t>(1, std::min(slots, (sources.count + threads - 1) / threads)), penalty};
    Found found;
    {
        nb::gil_scoped_release unlocked;
        found = search(decoder, sources, options, threads);
    }
    Translations made;
    for (auto &each : found) {
        made.emplace_back();
        for (auto &one : each) made.back().emplace_back(std::move(one.tokens), one.score);
    }
    return made;
}

}  // namespace
}  // namespace zoo

void bind_decoder(nb::module_ &module) {
    using namespace zoo;
    nb::class_<Layers>(module, "Layers")
        .def("embed", &Layers::embed, nb::keep_alive<1, 3>(), "table"_a.none(), "shared"_a.none(), "scale"_a, "positions"_a, "out"_a)
        .def("norm", &Layers::norm, "input"_a, "scale"_a, "bias"_a, "epsilon"_a, "out"_a)
        .def("linear", &Layers::linear, "input"_a, "weight"_a, "scale"_a, "shift"_a, "given"_a.none(), "relu"_a, "residual"_a,
             "out"_a)
        .def_prop_ro("isa", &Layers::isa);
    nb::class_<Encoder, Layers>(module, "Encoder")
        .def(nb::init<const std::string &>(), "isa"_a)
        .def("attention", &Encoder::attention, "input"_a, "heads"_a, "out"_a)
        .def("finish", &Encoder::finish, "input"_a)
        .def("encode", &encode, "tokens"_a, "lengths"_a);
    nb::class_<Decoder, Layers>(module, "Decoder")
        .def(nb::init<int64_t, const std::string &>(), "memory_width"_a, "isa"_a)
        .def("self_attention", &Decoder::self_attention, "input"_a, "heads"_a, "out"_a)
        .def("cross_attention", &Decoder::cross_attention, "input"_a, "weight"_a, "scale"_a, "shift"_a, "given"_a.none(), "heads"_a,
             "out"_a)
        .def("vocabulary", &Decoder::vocabulary, "input"_a, "weight"_a, "scale"_a, "shift"_a, "given"_a.none())
        .def("translate", &translate, "encoder"_a.none(), "rows"_a, "lengths"_a, "limits"_a, "start"_a, "end"_a, "beam"_a, "best"_a,
             "penalty"_a, "slots"_a, "threads"_a);
}
