// A decoding step for all beams of all sentences of a batch at once.
#include "transformer/decoder.h"

#include <algorithm>

namespace zoo {

Workspace::Workspace(const Decoder &decoder, int64_t rows, int64_t beam, int64_t top_k)
    : rows(rows), beam(beam), top_k(top_k), registers(decoder.registers(rows)) {
    logits.reserve(rows * kPanel), top_values.reserve(rows * top_k), exp_sums.reserve(rows * 16), maxima.reserve(rows);
    top_tokens.reserve(rows * top_k), log_sum_exp.reserve(rows);
    no_cell.reserve(decoder.cell_width());
    std::fill_n(no_cell.data(), decoder.cell_width(), 0.0f);
}

Decoder::Decoder(int64_t memory_width, const std::string &isa) : Layers(isa), memory_width_(memory_width), kv_offsets_{0}, cell_offsets_{0} {
    if (memory_width < 1 || memory_width > kMaxWidth) refuse("decoder", "a memory of width " + std::to_string(memory_width));
}

std::unique_ptr<Workspace> Decoder::acquire(int64_t rows, int64_t beam, int64_t top_k) const {
    {
        const std::lock_guard<std::mutex> locked(idle_mutex_);
        while (!idle_.empty()) {
            std::unique_ptr<Workspace> work = std::move(idle_.back());
            idle_.pop_back();
            if (work->rows == rows && work->beam == beam && work->top_k == top_k) return work;
        }
    }
    return std::make_unique<Workspace>(*this, rows, beam, top_k);
}

void Decoder::release(std::unique_ptr<Workspace> work) const {
    const std::lock_guard<std::mutex> locked(idle_mutex_);
    idle_.push_back(std::move(work));
}

void Decoder::self_attention(int64_t in, int64_t heads, int64_t out) {
    Operation &operation = attention(Kind::kSelfAttention, in, 3, heads, out, "self-attention");
    operation.layer = static_cast<int64_t>(kv_offsets_.size()) - 1;
    kv_offsets_.push_back(kv_offsets_.back() + 2 * operation.width);
}

void Decoder::recurrence(int64_t in, int64_t residual, int64_t out) {
    require_open("recurrence");
    const int64_t columns = read(in, "recurrence").width, width = columns / 2;
    if (columns % 32) refuse("recurrence", std::to_string(columns) + " columns of gates; wanted twice a multiple of 16");
    if (residual != -1 && read(residual, "recurrence").width != width)
        refuse("recurrence", "gives " + std::to_string(width) + " columns, the residual has others");
    Operation &operation = append(Kind::kRecurrence, in, out, width, residual == -1);
    operation.residual = residual, operation.layer = static_cast<int64_t>(cell_offsets_.size()) - 1;
    cell_offsets_.push_back(cell_offsets_.back() + width);
}

void Decoder::cross_attention(int64_t in, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams,
                              int64_t heads, int64_t out) {
    Operation &operation = attention(Kind::kCrossAttention, in, 1, heads, out, "cross-attention");
    operation.layer = static_cast<int64_t>(kv_projections_.size());
    kv_projections_.push_back(add_linear(weight, scale, bias, qparams, false, memory_width_, "cross-attention"));
    if (!(kv_projections_.back()->qparams() == kv_projections_.front()->qparams()))
        refuse("cross-attention", "another quantizes the memory otherwise");
    if (kv_projections_.back()->outputs() != 2 * operation.width)
        refuse("cross-attention", "keys and values have " + std::to_string(kv_projections_.back()->outputs()) + " columns, queries " +
                                      std::to_string(operation.width));
}

void Decoder::vocabulary(int64_t in, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams) {
    require_open("vocabulary");
    if (vocabulary_) refuse("vocabulary", "the embedding is that of another vocabulary");
    const Value from = read(in, "vocabulary");
    vocabulary_ = add_linear(weight, scale, bias, qparams, from.nonnegative, from.width, "vocabulary", -INFINITY);
    if (vocabulary_->outputs() > tokens_ || (tied_embedding() && (vocabulary_->outputs() != tokens_ || vocabulary_->inputs() != width_)))
        refuse("vocabulary", "has " + std::to_string(vocabulary_->outputs()) + " words, the embedding " + std::to_string(tokens_));
    close(in, vocabulary_);
}

void Decoder::fill_cross_kv(Workspace &work, const std::vector<std::unique_ptr<Sentence>> &sentences, const Rows &memory) const {
    int64_t n = 0;
    for (const auto &sentence : sentences) n += sentence->source_length, sentence->cross_kv.resize(kv_projections_.size());
    if (!kv_projections_.empty()) isa_.rows->quantize_rows(memory, memory.stride, kv_projections_[0]->qparams(), n);
    for (size_t i = 0; i < kv_projections_.size(); ++i) {
        const int64_t width = kv_projections_[i]->outputs() / 2;
        work.keys_values.size(n, 2 * width);
        const int64_t stride = work.keys_values.stride;
        kv_projections_[i]->run(memory, n, false, nullptr, 0, work.keys_values.values.data(), stride);
        work.keys_values_float16.reserve(n * stride);
        isa_.rows->to_float16(work.keys_values.values.data(), n * stride, work.keys_values_float16.data());
        const Float16 *from = work.keys_values_float16.data();
        for (const auto &sentence : sentences) {
            const int64_t rows = sentence->source_length, keys = width * round_up(rows, 16);
            sentence->cross_kv[i].reserve(keys + width * rows, work.arena);
            transpose(from, stride, rows, width, sentence->cross_kv[i].data());
            for (int64_t r = 0; r < rows; ++r, from += stride)
                std::copy_n(from + width, width, sentence->cross_kv[i].data() + keys + r * width);
        }
    }
}

Float16 *Decoder::cached_key_value(const Workspace &work, const Sentence &sentence, int64_t layer, int64_t position, int64_t slot) const {
    const auto at = static_cast<size_t>(layer);
    const int64_t size = kv_offsets_[at + 1] - kv_offsets_[at];
    return sentence.pages[static_cast<size_t>(position / kPage)] + kv_offsets_[at] * kPage * work.beam +
           (position % kPage * work.beam + slot) * size;
}

void Decoder::run_self_attention(Workspace &work, const Operation &operation, const Rows &in, const Rows &out,
                                 const std::vector<Beam> &beams) const {
    const int64_t width = operation.width;
    for (size_t i = 0; i < beams.size(); ++i) {
        const Sentence &sentence = *beams[i].sentence;
        const int64_t r = static_cast<int64_t>(i), now = sentence.position;
        const uint8_t *ancestors = sentence.ancestors.data() + beams[i].slot * sentence.limit;
        const float *query = in.values + r * in.stride;
        work.keys.resize(static_cast<size_t>(now) + 1);
        for (int64_t t = 0; t < now; ++t)
            work.keys[static_cast<size_t>(t)] = cached_key_value(work, sentence, operation.layer, t, ancestors[t]);
        Float16 *newest = cached_key_value(work, sentence, operation.layer, now, beams[i].slot);
        isa_.rows->to_float16(query + width, 2 * width, newest);
        work.keys[static_cast<size_t>(now)] = newest;
        isa_.rows->self_attention(query, work.keys.data(), now + 1, operation.heads, operation.size, out.values + r * out.stride);
    }
}

void Decoder::run_recurrence(Workspace &work, const Operation &operation, const Rows &in, const Rows &out,
                             const std::vector<Beam> &beams) const {
    const int64_t all = cell_width(), offset = cell_offsets_[static_cast<size_t>(operation.layer)];
    const Rows residual = operation.residual < 0 ? Rows{} : work.registers[static_cast<size_t>(operation.residual)].rows();
    for (size_t i = 0; i < beams.size(); ++i) {
        Sentence &sentence = *beams[i].sentence;
        const int64_t r = static_cast<int64_t>(i), slot = beams[i].slot, now = sentence.position;
        const auto cell = [&](int64_t position, int64_t of) {
            return sentence.cells.data() + (position % 2 * work.beam + of) * all + offset;
        };
        const float *before = now ? cell(now - 1, sentence.ancestors[static_cast<size_t>(slot * sentence.limit + now - 1)]) : work.no_cell.data();
        isa_.rows->recurrence(in.values + r * in.stride, operation.width, before,
                              residual.values ? residual.values + r * residual.stride : nullptr, cell(now, slot), out.values + r * out.stride);
    }
}

void Decoder::run_cross_attention(const Operation &operation, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const {
    for (size_t i = 0; i < beams.size();) {  // the beams of a sentence follow one another
        const Sentence &sentence = *beams[i].sentence;
        const Float16 *keys = sentence.cross_kv[static_cast<size_t>(operation.layer)].data();
        const int64_t r = static_cast<int64_t>(i), rows = sentence.source_length;
        isa_.rows->attention_float16(in.values + r * in.stride, in.stride, sentence.beams,
                                     {keys, keys + operation.width * round_up(rows, 16), rows, operation.width}, operation.heads,
                                     operation.size, out.values + r * out.stride, out.stride);
        i += static_cast<size_t>(sentence.beams);
    }
}

void Decoder::step(Workspace &work, const std::vector<Beam> &beams) const {
    const auto n = static_cast<int64_t>(beams.size());
    for (const Beam &beam : beams) {
        Sentence &sentence = *beam.sentence;
        if (sentence.position / kPage < static_cast<int64_t>(sentence.pages.size())) continue;
        if (work.free_pages.empty()) {
            const int64_t size = kv_offsets_.back() * kPage * work.beam * static_cast<int64_t>(sizeof(Float16));
            work.free_pages.push_back(static_cast<Float16 *>(work.arena.take(size)));
        }
        sentence.pages.push_back(work.free_pages.back());
        work.free_pages.pop_back();
    }
    run(work.registers, n, [&](const Operation &operation, const Rows &in, const Rows &out) {
        if (operation.kind == Kind::kSelfAttention) run_self_attention(work, operation, in, out, beams);
        if (operation.kind == Kind::kRecurrence) run_recurrence(work, operation, in, out, beams);
        if (operation.kind == Kind::kCrossAttention) run_cross_attention(operation, in, out, beams);
        if (operation.kind != Kind::kEmbed) return;
        for (int64_t r = 0; r < n; ++r) {
            const Beam &beam = beams[static_cast<size_t>(r)];
            const int64_t now = beam.sentence->position;
            embed_row(beam.sentence->tokens[static_cast<size_t>(now * work.beam + beam.slot)], now, out.values + r * out.stride);
        }
    });
    const Rows rows = work.registers[static_cast<size_t>(last_)].rows();
    const int64_t k = work.top_k;
    const auto top_k = [&](const RowLinear &layer, int64_t first, int64_t count) {
        layer.top_k({rows.values + first * rows.stride, rows.quantized + first * rows.stride, rows.scale + first, rows.stride}, count,
                    work.logits.data(),
                    {k, work.top_values.data() + first * k, work.exp_sums.data() + first * 16, work.maxima.data() + first,
                     work.top_tokens.data() + first * k},
                    work.log_sum_exp.data() + first);
    };
    int64_t whole = 0;  // rows of sentences that may have all words, before `i`
    for (int64_t i = 0; i < n;) {  // the beams of a sentence follow one another
        const Sentence &sentence = *beams[static_cast<size_t>(i)].sentence;
        if (sentence.words.empty()) {
            i += sentence.beams, whole += sentence.beams;
            continue;
        }
        if (whole) top_k(*vocabulary_, i - whole, whole);
        top_k(*sentence.words_layer, i, sentence.beams);
        for (int64_t at = i * k; at < (i + sentence.beams) * k; ++at)
            work.top_tokens[at] = sentence.words[static_cast<size_t>(work.top_tokens[at])];
        i += sentence.beams, whole = 0;
    }
    if (whole) top_k(*vocabulary_, n - whole, whole);
}

void Decoder::gather_words(Sentence &sentence) const {
    if (!sentence.words_layer) sentence.words_layer = std::make_unique<RowLinear>(isa_);
    sentence.words_layer->gather(*vocabulary_, sentence.words);
}

}  // namespace zoo
