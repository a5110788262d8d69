// The steps of a decoder for all beams of all sentences of a batch at once.
#include "transformer/decoder.h"

#include <algorithm>

namespace zoo {

Workspace::Workspace(const Decoder &decoder, int64_t rows, int64_t beam, int64_t likeliest)
    : rows(rows), beam(beam), likeliest(likeliest), registers(decoder.registers(rows)) {
    panel.reserve(rows * kPanel), values.reserve(rows * likeliest), sums.reserve(rows * 16), largest.reserve(rows);
    tokens.reserve(rows * likeliest), norms.reserve(rows);
}

Decoder::Decoder(int64_t memory_width, const std::string &isa) : Layers(isa), memory_width_(memory_width), own_{0} {
    if (memory_width < 1 || memory_width > kMaxWidth) refuse("decoder", "a memory of width " + std::to_string(memory_width));
}

std::unique_ptr<Workspace> Decoder::lend(int64_t rows, int64_t beam, int64_t likeliest) const {
    {
        const std::lock_guard<std::mutex> locked(lending_);
        while (!idle_.empty()) {
            std::unique_ptr<Workspace> found = std::move(idle_.back());
            idle_.pop_back();
            if (found->rows == rows && found->beam == beam && found->likeliest == likeliest) return found;
        }
    }
    return std::make_unique<Workspace>(*this, rows, beam, likeliest);
}

void Decoder::take_back(std::unique_ptr<Workspace> work) const {
    const std::lock_guard<std::mutex> locked(lending_);
    idle_.push_back(std::move(work));
}

void Decoder::self_attention(int64_t in, int64_t heads, int64_t out) {
    Step &step = attention(Kind::kSelf, in, 3, heads, out, "self-attention");
    step.layer = static_cast<int64_t>(own_.size()) - 1;
    own_.push_back(own_.back() + 2 * step.width);
}

void Decoder::cross_attention(int64_t in, const Any &weight, const Any &scale, const Any &shift, const Given &given, int64_t heads,
                              int64_t out) {
    Step &step = attention(Kind::kCross, in, 1, heads, out, "cross-attention");
    step.layer = static_cast<int64_t>(sources_.size());
    sources_.push_back(keep(weight, scale, shift, given, false, memory_width_, "cross-attention"));
    if (!(sources_.back()->levels() == sources_.front()->levels())) refuse("cross-attention", "another quantizes the memory otherwise");
    if (sources_.back()->outputs() != 2 * step.width)
        refuse("cross-attention", "keys and values have " + std::to_string(sources_.back()->outputs()) + " columns, queries " +
                                      std::to_string(step.width));
}

void Decoder::vocabulary(int64_t in, const Any &weight, const Any &scale, const Any &shift, const Given &given) {
    open("vocabulary");
    if (vocabulary_) refuse("vocabulary", "the embedding is that of another vocabulary");
    const Value from = read(in, "vocabulary");
    vocabulary_ = keep(weight, scale, shift, given, from.positive, from.width, "vocabulary", -INFINITY);
    if (vocabulary_->outputs() > tokens_ || (embeds_columns() && (vocabulary_->outputs() != tokens_ || vocabulary_->inputs() != width_)))
        refuse("vocabulary", "has " + std::to_string(vocabulary_->outputs()) + " words, the embedding " + std::to_string(tokens_));
    close(in, vocabulary_);
}

void Decoder::remember(Workspace &work, const std::vector<std::unique_ptr<Sentence>> &sentences, const Rows &memory) const {
    int64_t n = 0;
    for (const auto &each : sentences) n += each->source, each->memory.resize(sources_.size());
    if (!sources_.empty()) isa_.rows->quantize(memory, memory.stride, sources_[0]->levels(), n);
    for (size_t i = 0; i < sources_.size(); ++i) {
        const int64_t width = sources_[i]->outputs() / 2;
        work.pairs.size(n, 2 * width);
        const int64_t stride = work.pairs.stride;
        sources_[i]->run(memory, n, false, nullptr, 0, work.pairs.real.data(), stride);
        work.halves.reserve(n * stride);
        isa_.rows->halve(work.pairs.real.data(), n * stride, work.halves.data());
        const Half *from = work.halves.data();
        for (const auto &each : sentences) {
            const int64_t rows = each->source, keys = width * round_up(rows, 16);
            each->memory[i].reserve(keys + width * rows);
            transpose(from, stride, rows, width, each->memory[i].data());
            for (int64_t r = 0; r < rows; ++r, from += stride) std::copy_n(from + width, width, each->memory[i].data() + keys + r * width);
        }
    }
}

Half *Decoder::key(const Workspace &work, const Sentence &sentence, int64_t layer, int64_t position, int64_t slot) const {
    const auto at = static_cast<size_t>(layer);
    const int64_t size = own_[at + 1] - own_[at];
    return sentence.pages[static_cast<size_t>(position / kPage)].data() + own_[at] * kPage * work.beam +
           (position % kPage * work.beam + slot) * size;
}

void Decoder::attend_self(Workspace &work, const Step &step, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const {
    const int64_t width = step.width;
    for (size_t i = 0; i < beams.size(); ++i) {
        const Sentence &sentence = *beams[i].sentence;
        const int64_t r = static_cast<int64_t>(i), now = sentence.position;
        const uint8_t *ancestors = sentence.ancestors.data() + beams[i].slot * sentence.limit;
        const float *query = in.real + r * in.stride;
        work.keys.resize(static_cast<size_t>(now) + 1);
        for (int64_t t = 0; t < now; ++t) work.keys[static_cast<size_t>(t)] = key(work, sentence, step.layer, t, ancestors[t]);
        Half *own = key(work, sentence, step.layer, now, beams[i].slot);
        isa_.rows->halve(query + width, 2 * width, own);
        work.keys[static_cast<size_t>(now)] = own;
        isa_.rows->attend(query, work.keys.data(), now + 1, step.heads, step.size, out.real + r * out.stride);
    }
}

void Decoder::attend_cross(const Step &step, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const {
    for (size_t i = 0; i < beams.size();) {  // the beams of a sentence follow one another
        const Sentence &sentence = *beams[i].sentence;
        const Half *keys = sentence.memory[static_cast<size_t>(step.layer)].data();
        const int64_t r = static_cast<int64_t>(i), rows = sentence.source;
        isa_.rows->look_at_halves(in.real + r * in.stride, in.stride, sentence.width,
                                  {keys, keys + step.width * round_up(rows, 16), rows, step.width}, step.heads, step.size,
                                  out.real + r * out.stride, out.stride);
        i += static_cast<size_t>(sentence.width);
    }
}

void Decoder::step(Workspace &work, const std::vector<Beam> &beams) const {
    const auto n = static_cast<int64_t>(beams.size());
    for (const Beam &each : beams) {
        Sentence &sentence = *each.sentence;
        if (sentence.position / kPage < static_cast<int64_t>(sentence.pages.size())) continue;
        if (work.pages.empty()) work.pages.emplace_back(own_.back() * kPage * work.beam);
        sentence.pages.push_back(std::move(work.pages.back()));
        work.pages.pop_back();
    }
    run(work.registers, n, [&](const Step &step, const Rows &in, const Rows &out) {
        if (step.kind == Kind::kSelf) attend_self(work, step, in, out, beams);
        if (step.kind == Kind::kCross) attend_cross(step, in, out, beams);
        if (step.kind != Kind::kEmbed) return;
        for (int64_t r = 0; r < n; ++r) {
            const Beam &beam = beams[static_cast<size_t>(r)];
            const int64_t now = beam.sentence->position;
            embed_row(beam.sentence->tokens[static_cast<size_t>(now * work.beam + beam.slot)], now, out.real + r * out.stride);
        }
    });
    vocabulary_->rank(work.registers[static_cast<size_t>(last_)].rows(), n, work.panel.data(),
                      {work.likeliest, work.values.data(), work.sums.data(), work.largest.data(), work.tokens.data()}, work.norms.data());
}

}  // namespace zoo
