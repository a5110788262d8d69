// The steps of a decoder: checked as they are added, computed for all beams of all sentences of a batch at once.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace nb = nanobind;

namespace zoo {
namespace {

constexpr int64_t kMaxRegisters = 256, kMaxWidth = 65536;

[[noreturn]] void refuse(const char *step, const std::string &why) { throw nb::value_error((std::string(step) + ": " + why).c_str()); }

std::string text(int64_t value) { return std::to_string(value); }

// A 1-D float32 array of this length, finite, padded with zeros to whole 64.
Buffer<float> padded(const Any &array, const char *name, int64_t count, const char *step) {
    const float *data = data_of<float>(array, name, 1);
    if (static_cast<int64_t>(array.shape(0)) != count)
        refuse(step, std::string(name) + " has " + text(static_cast<int64_t>(array.shape(0))) + " elements, wanted " + text(count));
    if (!std::all_of(data, data + count, [](float x) { return std::isfinite(x); })) refuse(step, std::string(name) + " is not finite");
    const int64_t room = round_up(count, kColumns);
    Buffer<float> made(room);
    std::fill_n(std::copy_n(data, count, made.data()), room - count, 0.0f);
    return made;
}

}  // namespace

RowLinear::RowLinear(const Isa &isa, const Any &weight, const Any &scale, const Any &shift, bool positive, float padding) : isa_(isa) {
    const auto *w = data_of<int8_t>(weight, "weight", 2);
    const int64_t inputs = static_cast<int64_t>(weight.shape(0));
    outputs_ = static_cast<int64_t>(weight.shape(1));
    if (!inputs || !outputs_ || inputs > kMaxWidth) refuse("linear", "weights of " + text(inputs) + " x " + text(outputs_));
    scale_ = padded(scale, "scale", outputs_, "linear"), shift_ = padded(shift, "shift", outputs_, "linear");
    const int64_t all = round_up(outputs_, kColumns);
    std::fill(shift_.data() + outputs_, shift_.data() + all, padding);
    std::vector<int8_t> wide(static_cast<size_t>(inputs * all));
    std::vector<int64_t> sums(static_cast<size_t>(all)), magnitudes(static_cast<size_t>(all));
    for (int64_t k = 0; k < inputs; ++k)
        for (int64_t j = 0; j < outputs_; ++j) {
            const int8_t value = wide[static_cast<size_t>(k * all + j)] = w[k * outputs_ + j];
            sums[static_cast<size_t>(j)] += value, magnitudes[static_cast<size_t>(j)] += std::abs(value);
        }
    bias_.reserve(all);
    for (int64_t j = 0; j < all; ++j) {
        if (255 * magnitudes[static_cast<size_t>(j)] >= INT32_MAX) refuse("linear", "its sums can overflow 32 bits");
        bias_[j] = positive ? 0 : static_cast<int32_t>(-128 * sums[static_cast<size_t>(j)]);
    }
    weight_.reserve(isa.packed_bytes(inputs, all));
    isa.pack_linear(wide.data(), inputs, all, weight_.data());
    linear_.inputs = inputs, linear_.outputs = all, linear_.weight = weight_.data(), linear_.bias = bias_.data();
    linear_.scale = scale_.data(), linear_.real = true;
}

void RowLinear::run(const Rows &in, int64_t n, bool relu, const float *residual, int64_t residual_stride, float *out,
                    int64_t out_stride) const {
    isa_.linear(linear_, {in.scale, shift_.data(), residual, residual_stride, relu}, in.bytes, in.stride, n, out, out_stride);
}

void RowLinear::rank(const Rows &in, int64_t n, float *panel, const Ranking &ranking, double *norms) const {
    std::fill_n(ranking.values, n * ranking.count, -INFINITY), std::fill_n(ranking.tokens, n * ranking.count, -1);
    std::fill_n(ranking.largest, n, -INFINITY), std::fill_n(ranking.sums, n * 16, 0.0f);
    Linear part = linear_;
    for (int64_t first = 0; first < outputs_; first += kPanel) {
        part.outputs = std::min(kPanel, linear_.outputs - first);
        part.weight = weight_.data() + isa_.packed_bytes(linear_.inputs, first + kColumns) - isa_.packed_bytes(linear_.inputs, kColumns);
        part.bias = linear_.bias + first, part.scale = linear_.scale + first;
        isa_.linear(part, {in.scale, shift_.data() + first, nullptr, 0, false}, in.bytes, in.stride, n, panel, kPanel);
        isa_.rows->rank(panel, kPanel, first, std::min(kPanel, outputs_ - first), ranking, n);
    }
    for (int64_t r = 0; r < n; ++r) {
        norms[r] = std::log(static_cast<double>(isa_.rows->rank_sum(ranking.sums + r * 16))) + static_cast<double>(ranking.largest[r]);
        if (!std::isfinite(in.scale[r]) || !std::isfinite(norms[r])) norms[r] = NAN;
    }
}

Workspace::Workspace(const Decoder &decoder, int64_t rows, int64_t beam, int64_t likeliest)
    : rows(rows), beam(beam), likeliest(likeliest) {
    registers.resize(decoder.widest_.size());
    for (size_t i = 0; i < registers.size(); ++i) registers[i].size(rows, decoder.widest_[i]);
    panel.reserve(rows * kPanel), values.reserve(rows * likeliest), sums.reserve(rows * 16), largest.reserve(rows);
    tokens.reserve(rows * likeliest), norms.reserve(rows);
}

Decoder::Decoder(int64_t memory_width, const std::string &isa) : isa_(choose(isa)), memory_width_(memory_width), own_{0} {
    if (memory_width < 1 || memory_width > kMaxWidth) refuse("decoder", "a memory of width " + text(memory_width));
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

void Decoder::open(const char *step) const {
    if (vocabulary_) refuse(step, "the vocabulary is the last step");
    if (!rows_) refuse(step, "the first step is the embedding");
}

const Decoder::Value &Decoder::read(int64_t index, const char *step) const {
    if (index < 0 || index >= static_cast<int64_t>(values_.size()) || !values_[static_cast<size_t>(index)].width)
        refuse(step, "register " + text(index) + " holds nothing yet");
    return values_[static_cast<size_t>(index)];
}

Decoder::Step &Decoder::append(Kind kind, int64_t in, int64_t out, int64_t width, bool positive) {
    if (out < 0 || out >= kMaxRegisters) refuse("step", "there is no register " + text(out));
    if (out == in) refuse("step", "reads and writes register " + text(out));
    if (width < 1 || width > 3 * kMaxWidth) refuse("step", "a width of " + text(width));
    const auto at = static_cast<size_t>(out);
    if (at >= values_.size()) values_.resize(at + 1), widest_.resize(at + 1, 1);
    widest_[at] = std::max(widest_[at], width);
    Step step{};
    step.kind = kind, step.in = in, step.out = out, step.positive = positive;
    steps_.push_back(step);
    values_[at] = {width, static_cast<int64_t>(steps_.size()) - 1, positive};
    return steps_.back();
}

const RowLinear *Decoder::keep(const Any &weight, const Any &scale, const Any &shift, bool positive, int64_t inputs, const char *step,
                               float padding) {
    if (weight.ndim() == 2 && static_cast<int64_t>(weight.shape(0)) != inputs)
        refuse(step, "takes " + text(static_cast<int64_t>(weight.shape(0))) + " inputs, is given " + text(inputs));
    linears_.emplace_back(isa_, weight, scale, shift, positive, padding);
    return &linears_.back();
}

void Decoder::embed(Any table, const Any &scale, const Any &positions, int64_t out) {
    if (rows_) refuse("embedding", "there is one already");
    const auto *rows = data_of<int8_t>(table, "table", 2);
    const auto *position = data_of<float>(positions, "positions", 2);
    tokens_ = static_cast<int64_t>(table.shape(0)), width_ = static_cast<int64_t>(table.shape(1));
    positions_ = static_cast<int64_t>(positions.shape(0));
    if (!tokens_ || tokens_ > INT32_MAX || !width_ || width_ > kMaxWidth || !positions_ ||
        static_cast<int64_t>(positions.shape(1)) != width_)
        refuse("embedding", "a table of " + text(tokens_) + " x " + text(width_) + " and positions of " + text(positions_) + " x " +
                                text(static_cast<int64_t>(positions.shape(1))));
    if (!std::all_of(position, position + positions_ * width_, [](float x) { return std::isfinite(x); }))
        refuse("embedding", "positions are not finite");
    floats_.push_back(padded(scale, "scale", tokens_, "embedding"));
    row_scale_ = floats_.back().data();
    floats_.emplace_back(positions_ * width_);
    std::copy_n(position, positions_ * width_, floats_.back().data());
    position_ = floats_.back().data();
    table_ = std::move(table), rows_ = rows;
    append(Kind::kEmbed, -1, out, width_, false);
}

void Decoder::norm(int64_t in, const Any &scale, const Any &bias, float epsilon, int64_t out) {
    open("norm");
    const int64_t width = read(in, "norm").width;
    if (!(epsilon >= 0) || !std::isfinite(epsilon)) refuse("norm", "epsilon is negative or no number");
    Buffer<float> one = padded(scale, "scale", width, "norm"), two = padded(bias, "bias", width, "norm");
    Norm norm{width, one.data(), two.data(), epsilon};
    append(Kind::kNorm, in, out, width, false).norm = norm;
    floats_.push_back(std::move(one)), floats_.push_back(std::move(two));
}

void Decoder::linear(int64_t in, const Any &weight, const Any &scale, const Any &shift, bool relu, int64_t residual, int64_t out) {
    open("linear");
    const Value from = read(in, "linear");
    const RowLinear *made = keep(weight, scale, shift, from.positive, from.width, "linear");
    if (residual != -1 && read(residual, "linear").width != made->outputs())
        refuse("linear", "gives " + text(made->outputs()) + " columns, the residual has " + text(read(residual, "linear").width));
    Step &step = append(Kind::kLinear, in, out, made->outputs(), relu && residual == -1);
    step.relu = relu, step.residual = residual, step.linear = made;
}

void Decoder::self_attention(int64_t in, int64_t heads, int64_t out) {
    open("self-attention");
    const int64_t width = read(in, "self-attention").width / 3;
    if (heads < 1 || heads > width || 3 * width != read(in, "self-attention").width || width % (16 * heads))
        refuse("self-attention", text(heads) + " heads on queries, keys and values of " + text(read(in, "self-attention").width) +
                                     " columns; a head has a multiple of 16");
    Step &step = append(Kind::kSelf, in, out, width, false);
    step.heads = heads, step.size = width / heads, step.layer = static_cast<int64_t>(own_.size()) - 1;
    own_.push_back(own_.back() + 2 * width);
}

void Decoder::cross_attention(int64_t in, const Any &weight, const Any &scale, const Any &shift, int64_t heads, int64_t out) {
    open("cross-attention");
    const int64_t width = read(in, "cross-attention").width;
    if (heads < 1 || heads > width || width % (16 * heads))
        refuse("cross-attention", text(heads) + " heads on queries of " + text(width) + " columns; a head has a multiple of 16");
    const RowLinear *made = keep(weight, scale, shift, false, memory_width_, "cross-attention");
    if (made->outputs() != 2 * width)
        refuse("cross-attention", "keys and values have " + text(made->outputs()) + " columns, queries " + text(width));
    Step &step = append(Kind::kCross, in, out, width, false);
    step.heads = heads, step.size = width / heads, step.layer = static_cast<int64_t>(sources_.size());
    sources_.push_back(made);
}

void Decoder::vocabulary(int64_t in, const Any &weight, const Any &scale, const Any &shift) {
    open("vocabulary");
    const Value from = read(in, "vocabulary");
    const RowLinear *made = keep(weight, scale, shift, from.positive, from.width, "vocabulary", -INFINITY);
    if (made->outputs() > tokens_)
        refuse("vocabulary", "has " + text(made->outputs()) + " words, the embedding " + text(tokens_));
    last_ = in, vocabulary_ = made;
    trim();
}

// Of every result the forms that are read.
void Decoder::trim() {
    for (size_t i = 0; i < steps_.size(); ++i) {
        const int64_t made = steps_[i].out;
        bool real = false, bytes = false, over = false;
        for (size_t next = i + 1; next < steps_.size() && !over; ++next) {
            const Step &reader = steps_[next];
            if (reader.in == made) (reader.kind == Kind::kLinear ? bytes : real) = true;
            real = real || reader.residual == made;
            over = reader.out == made;
        }
        steps_[i].real = real, steps_[i].bytes = bytes || (!over && made == last_);
    }
}

void Decoder::remember(Workspace &work, Sentence &sentence, const float *memory) const {
    const int64_t n = sentence.source;
    work.source.size(n, memory_width_);
    const Rows rows = work.source.rows();
    for (int64_t r = 0; r < n; ++r) {
        float *to = std::copy_n(memory + r * memory_width_, memory_width_, rows.real + r * rows.stride);
        std::fill_n(to, rows.stride - memory_width_, 0.0f);
    }
    isa_.rows->quantize(rows, rows.stride, false, n);
    sentence.memory.resize(sources_.size());
    for (size_t i = 0; i < sources_.size(); ++i) {
        const int64_t stride = round_up(sources_[i]->outputs(), kColumns);
        sentence.memory[i].reserve(n * stride);
        sources_[i]->run(rows, n, false, nullptr, 0, sentence.memory[i].data(), stride);
    }
}

const float *Decoder::key(const Workspace &work, const Sentence &sentence, int64_t layer, int64_t position, int64_t slot) const {
    const auto at = static_cast<size_t>(layer);
    const int64_t size = own_[at + 1] - own_[at];
    return sentence.pages[static_cast<size_t>(position / kPage)].data() + own_[at] * kPage * work.beam +
           (position % kPage * work.beam + slot) * size;
}

void Decoder::attend_self(Workspace &work, const Step &step, const std::vector<Beam> &beams) const {
    const Rows in = work.registers[static_cast<size_t>(step.in)].rows(), out = work.registers[static_cast<size_t>(step.out)].rows();
    const int64_t width = step.heads * step.size;
    for (size_t i = 0; i < beams.size(); ++i) {
        const Sentence &sentence = *beams[i].sentence;
        const int64_t r = static_cast<int64_t>(i), now = sentence.position;
        const uint8_t *ancestors = sentence.ancestors.data() + beams[i].slot * sentence.limit;
        const float *query = in.real + r * in.stride;
        work.keys.resize(static_cast<size_t>(now) + 1);
        for (int64_t t = 0; t < now; ++t) work.keys[static_cast<size_t>(t)] = key(work, sentence, step.layer, t, ancestors[t]);
        const float *own = work.keys[static_cast<size_t>(now)] = key(work, sentence, step.layer, now, beams[i].slot);
        std::memcpy(const_cast<float *>(own), query + width, static_cast<size_t>(8 * width));  // the page is the sentence's own
        isa_.rows->attend(query, work.keys.data(), now + 1, step.heads, step.size, out.real + r * out.stride);
    }
}

void Decoder::attend_cross(Workspace &work, const Step &step, const std::vector<Beam> &beams) const {
    const Rows in = work.registers[static_cast<size_t>(step.in)].rows(), out = work.registers[static_cast<size_t>(step.out)].rows();
    const int64_t stride = round_up(2 * step.heads * step.size, kColumns);
    const Sentence *before = nullptr;
    for (size_t i = 0; i < beams.size(); ++i) {
        const Sentence *sentence = beams[i].sentence;
        if (sentence != before) {  // its beams follow one another
            work.keys.resize(static_cast<size_t>(sentence->source));
            const float *memory = sentence->memory[static_cast<size_t>(step.layer)].data();
            for (int64_t s = 0; s < sentence->source; ++s) work.keys[static_cast<size_t>(s)] = memory + s * stride;
            before = sentence;
        }
        const int64_t r = static_cast<int64_t>(i);
        isa_.rows->attend(in.real + r * in.stride, work.keys.data(), sentence->source, step.heads, step.size, out.real + r * out.stride);
    }
}

void Decoder::embed_rows(Workspace &work, const Step &step, const std::vector<Beam> &beams) const {
    const Rows out = work.registers[static_cast<size_t>(step.out)].rows();
    for (size_t i = 0; i < beams.size(); ++i) {
        const Sentence &sentence = *beams[i].sentence;
        const int64_t now = sentence.position, token = sentence.tokens[static_cast<size_t>(now * work.beam + beams[i].slot)];
        const int8_t *row = rows_ + token * width_;
        const float *position = position_ + now * width_, scale = row_scale_[token];
        float *to = out.real + static_cast<int64_t>(i) * out.stride;
        for (int64_t j = 0; j < width_; ++j) to[j] = static_cast<float>(row[j]) * scale + position[j];
    }
}

int64_t Decoder::width_of(const Step &step) const {
    switch (step.kind) {
        case Kind::kEmbed: return width_;
        case Kind::kNorm: return step.norm.width;
        case Kind::kLinear: return step.linear->outputs();
        default: return step.heads * step.size;
    }
}

void Decoder::step(Workspace &work, const std::vector<Beam> &beams) const {
    const auto n = static_cast<int64_t>(beams.size());
    const auto at = [&](int64_t index) -> Register & { return work.registers[static_cast<size_t>(index)]; };
    for (const Beam &each : beams) {
        Sentence &sentence = *each.sentence;
        if (sentence.position / kPage < static_cast<int64_t>(sentence.pages.size())) continue;
        if (work.pages.empty()) work.pages.emplace_back(own_.back() * kPage * work.beam);
        sentence.pages.push_back(std::move(work.pages.back()));
        work.pages.pop_back();
    }
    for (const Step &step : steps_) {
        Register &out = at(step.out);
        const int64_t width = width_of(step);
        out.stride = round_up(width, kColumns);
        Rows rows = out.rows();
        if (step.kind == Kind::kNorm) {
            if (!step.real) rows.real = nullptr;
            if (!step.bytes) rows.bytes = nullptr;
            isa_.rows->norm(step.norm, at(step.in).real.data(), at(step.in).stride, rows, n);
            continue;
        }
        if (step.kind == Kind::kLinear) {
            const float *residual = step.residual < 0 ? nullptr : at(step.residual).real.data();
            step.linear->run(at(step.in).rows(), n, step.relu, residual, out.stride, rows.real, rows.stride);
        } else {
            if (step.kind == Kind::kEmbed) embed_rows(work, step, beams);
            if (step.kind == Kind::kSelf) attend_self(work, step, beams);
            if (step.kind == Kind::kCross) attend_cross(work, step, beams);
            for (int64_t r = 0; r < n; ++r) std::fill(rows.real + r * rows.stride + width, rows.real + (r + 1) * rows.stride, 0.0f);
        }
        if (step.bytes) isa_.rows->quantize(rows, rows.stride, step.positive, n);
    }
    vocabulary_->rank(at(last_).rows(), n, work.panel.data(),
                      {work.likeliest, work.values.data(), work.sums.data(), work.largest.data(), work.tokens.data()}, work.norms.data());
}

}  // namespace zoo
