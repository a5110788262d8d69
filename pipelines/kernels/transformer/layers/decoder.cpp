// A decoding step for all beams of all sentences of a batch at once.
#include "transformer/layers/decoder.h"

#include <algorithm>
#include <iterator>

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

void Decoder::self_attention(int64_t in, int64_t heads, const std::optional<Array> &bias, int64_t out) {
    const int64_t reach = bias && bias->ndim() == 2 ? static_cast<int64_t>(bias->shape(1)) : 0;
    if (bias && !reach) refuse("self-attention", "its bias is of no position");
    const float *rows = bias ? finite_table(*bias, "bias", heads, reach, "self-attention") : nullptr;
    Operation &operation = attention(Kind::kSelfAttention, in, 3, heads, out, "self-attention");
    operation.factors = rows, operation.reach = reach;
    if (bias) kept_.push_back(*bias);
    operation.layer = static_cast<int64_t>(kv_offsets_.size()) - 1;
    kv_offsets_.push_back(kv_offsets_.back() + 2 * operation.width);
}

void Decoder::recurrence(int64_t in, int64_t residual, int64_t out) {
    require_open("recurrence");
    const int64_t columns = read(in, "recurrence").width, width = columns / 2;
    if (columns % 32) refuse("recurrence", std::to_string(columns) + " columns of gates; expected twice a multiple of 16");
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
    head_sizes_.push_back(operation.size);
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

void Decoder::fill_cross_kv(Workspace &work, const std::vector<Sentence *> &sentences, const Rows &memory) const {
    int64_t n = 0;
    for (Sentence *sentence : sentences) n += sentence->source_length, sentence->cross_kv.resize(kv_projections_.size());
    if (!kv_projections_.empty()) isa_.rows->quantize_rows(memory, memory.stride, kv_projections_[0]->qparams(), n);
    for (size_t i = 0; i < kv_projections_.size(); ++i) {
        const int64_t width = kv_projections_[i]->outputs() / 2, size = head_sizes_[i];
        work.keys_values.size(n, 2 * width);
        const int64_t stride = work.keys_values.stride;
        kv_projections_[i]->run(memory, n, false, nullptr, 0, work.keys_values.values.data(), stride);
        work.keys_values_float16.reserve(n * stride);
        isa_.rows->to_float16(work.keys_values.values.data(), n * stride, work.keys_values_float16.data());
        const Float16 *from = work.keys_values_float16.data();
        for (Sentence *sentence : sentences) {
            const int64_t rows = sentence->source_length, keys = width * round_up(rows, 16);
            sentence->cross_kv[i].reserve(keys + width * rows, work.arena);
            transpose(from, stride, rows, width, sentence->cross_kv[i].data());
            Float16 *values = sentence->cross_kv[i].data() + keys;
            for (int64_t j = 0; j < width; j += size)  // head by head, as they are read
                for (int64_t r = 0; r < rows; ++r, values += size) std::copy_n(from + r * stride + width + j, size, values);
            from += rows * stride;
        }
    }
}

Float16 *Decoder::cached_key_value(const Workspace &work, const Sentence &sentence, int64_t layer, int64_t position, int64_t slot) const {
    const auto index = static_cast<size_t>(layer);
    const int64_t size = kv_offsets_[index + 1] - kv_offsets_[index];
    return sentence.pages[static_cast<size_t>(position / kPage)] + kv_offsets_[index] * kPage * work.beam +
           (position % kPage * work.beam + slot) * size;
}

void Decoder::list_keys(const Workspace &work, const Operation &operation, const Beam &beam, std::vector<Float16 *> &keys) const {
    const Sentence &sentence = *beam.sentence;
    const int64_t now = beam.position();
    const uint8_t *ancestors = sentence.ancestors.data() + beam.slot * sentence.limit;
    keys.resize(static_cast<size_t>(now) + 1);
    for (int64_t t = 0; t < now; ++t) keys[static_cast<size_t>(t)] = cached_key_value(work, sentence, operation.layer, t, ancestors[t]);
    keys[static_cast<size_t>(now)] = cached_key_value(work, sentence, operation.layer, now, beam.slot);
}

void Decoder::run_self_attention(Workspace &work, const Operation &operation, const Rows &in, const Rows &out,
                                 const std::vector<Beam> &beams) const {
    const int64_t width = operation.width;
    list_keys(work, operation, beams[0], work.keys);
    for (size_t i = 0; i < beams.size(); ++i) {
        const int64_t r = static_cast<int64_t>(i), now = beams[i].position();
        const float *query = in.values + r * in.stride;
        const bool last = i + 1 == beams.size();
        if (!last) list_keys(work, operation, beams[i + 1], work.next_keys);
        const int64_t ahead = last || beams[i + 1].sentence == beams[i].sentence ? 0 : beams[i + 1].position();  // keys that are read next
        isa_.rows->to_float16(query + width, 2 * width, work.keys.back());
        isa_.rows->self_attention(query, work.keys.data(), now + 1, work.next_keys.data(), ahead, operation.heads, operation.size,
                                  operation.factors, operation.reach, out.values + r * out.stride);
        work.keys.swap(work.next_keys);
    }
}

void Decoder::run_recurrence(Workspace &work, const Operation &operation, const Rows &in, const Rows &out,
                             const std::vector<Beam> &beams) const {
    const int64_t all = cell_width(), offset = cell_offsets_[static_cast<size_t>(operation.layer)];
    const Rows residual = operation.residual < 0 ? Rows{} : work.registers[static_cast<size_t>(operation.residual)].rows();
    for (size_t i = 0; i < beams.size(); ++i) {
        Sentence &sentence = *beams[i].sentence;
        const int64_t r = static_cast<int64_t>(i), slot = beams[i].slot, now = beams[i].position();
        const auto cell = [&](int64_t position, int64_t of) {
            return sentence.cells.data() + (position % work.cells * work.beam + of) * all + offset;
        };
        const float *before = now ? cell(now - 1, sentence.ancestors[static_cast<size_t>(slot * sentence.limit + now - 1)]) : work.no_cell.data();
        isa_.rows->recurrence(in.values + r * in.stride, operation.width, before,
                              residual.values ? residual.values + r * residual.stride : nullptr, cell(now, slot), out.values + r * out.stride);
    }
}

void Decoder::run_cross_attention(const Operation &operation, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const {
    for (size_t i = 0; i < beams.size();) {  // the rows of a sentence follow one another
        const Sentence &sentence = *beams[i].sentence;
        const Float16 *keys = sentence.cross_kv[static_cast<size_t>(operation.layer)].data();
        const int64_t r = static_cast<int64_t>(i), rows = sentence.source_length;
        i += static_cast<size_t>(sentence.rows());
        const Float16 *ahead = i < beams.size() ? beams[i].sentence->cross_kv[static_cast<size_t>(operation.layer)].data() : nullptr;
        isa_.rows->attention_float16(in.values + r * in.stride, in.stride, sentence.rows(),
                                     {keys, keys + operation.width * round_up(rows, 16), rows, operation.size, rows * operation.size, ahead},
                                     operation.heads, operation.size, out.values + r * out.stride, out.stride);
    }
}

void Decoder::take_pages(Workspace &work, const std::vector<Beam> &beams) const {
    for (const Beam &beam : beams) {
        Sentence &sentence = *beam.sentence;
        if (beam.position() / kPage < static_cast<int64_t>(sentence.pages.size())) continue;
        if (work.free_pages.empty()) {
            const int64_t size = kv_offsets_.back() * kPage * work.beam * static_cast<int64_t>(sizeof(Float16));
            work.free_pages.push_back(static_cast<Float16 *>(work.arena.take(size)));
        }
        sentence.pages.push_back(work.free_pages.back());
        work.free_pages.pop_back();
    }
}

void Decoder::run_beams(Workspace &work, const Operation &operation, const Rows &in, const Rows &out, const std::vector<Beam> &beams) const {
    if (operation.kind == Kind::kSelfAttention) run_self_attention(work, operation, in, out, beams);
    if (operation.kind == Kind::kRecurrence) run_recurrence(work, operation, in, out, beams);
    if (operation.kind == Kind::kCrossAttention) run_cross_attention(operation, in, out, beams);
    if (operation.kind != Kind::kEmbed) return;
    for (size_t r = 0; r < beams.size(); ++r) {
        const int64_t now = beams[r].position();
        embed_row(beams[r].sentence->tokens[static_cast<size_t>(now * work.beam + beams[r].slot)], by_position_ ? now : 0,
                  out.values + static_cast<int64_t>(r) * out.stride);
    }
}

size_t Decoder::cross_attention_at(int64_t layer) const {
    const auto match = std::find_if(operations_.begin(), operations_.end(), [&](const Operation &operation) {
        return operation.kind == Kind::kCrossAttention && operation.layer == layer;
    });
    return static_cast<size_t>(match - operations_.begin());
}

int64_t Decoder::heads(int64_t layer) const { return operations_[cross_attention_at(layer)].heads; }

void Decoder::attend(Workspace &work, const std::vector<Beam> &beams, int64_t layer, const std::vector<int64_t> &heads,
                     const std::function<float *(const Beam &)> &row) const {
    constexpr Float16 kOne = 0x3C00;
    const auto n = static_cast<int64_t>(beams.size());
    take_pages(work, beams);
    run(0, cross_attention_at(layer) + 1, work.registers, n, [&](const Operation &operation, const Rows &in, const Rows &out) {
        if (operation.kind != Kind::kCrossAttention || operation.layer != layer) return run_beams(work, operation, in, out, beams);
        std::fill_n(out.values, n * out.stride, 0.0f);
        for (int64_t i = 0; i < n;) {  // the rows of a sentence follow one another; its values are columns of the identity
            const Sentence &sentence = *beams[static_cast<size_t>(i)].sentence;
            const int64_t count = sentence.source_length, size = operation.size, rows = sentence.rows(), room = round_up(count, 16);
            std::vector<float> values(static_cast<size_t>(rows * size));
            for (int64_t first = 0; first < count; first += size) {
                const int64_t columns = std::min(size, count - first);
                std::vector<Float16> identity(static_cast<size_t>(count * size));
                for (int64_t column = 0; column < columns; ++column) identity[static_cast<size_t>((first + column) * size + column)] = kOne;
                for (const int64_t head : heads) {
                    const Float16 *keys = sentence.cross_kv[static_cast<size_t>(layer)].data() + head * size * room;
                    isa_.rows->attention_float16(in.values + i * in.stride + head * size, in.stride, rows, {keys, identity.data(), count, size, 0}, 1,
                                                 size, values.data(), size);
                    for (int64_t r = 0; r < rows; ++r) {
                        float *to = row(beams[static_cast<size_t>(i + r)]) + first;
                        for (int64_t column = 0; column < columns; ++column)
                            to[column] = (head == heads.front() ? 0.0f : to[column]) +
                                         values[static_cast<size_t>(r * size + column)] / static_cast<float>(heads.size());
                    }
                }
            }
            i += rows;
        }
    });
}

void Decoder::step(Workspace &work, const std::vector<Beam> &beams) const {
    const auto n = static_cast<int64_t>(beams.size());
    take_pages(work, beams);
    run(work.registers, n, [&](const Operation &operation, const Rows &in, const Rows &out) { run_beams(work, operation, in, out, beams); });
    const Rows rows = work.registers[static_cast<size_t>(last_)].rows();
    const auto from = [&](int64_t first) -> Rows {
        return {rows.values + first * rows.stride, rows.quantized + first * rows.stride, rows.scale + first, rows.stride};
    };
    const int64_t k = work.top_k;
    const auto top = [&](int64_t first) -> TopK {
        return {k, work.top_values.data() + first * k, work.exp_sums.data() + first * 16, work.maxima.data() + first,
                work.top_tokens.data() + first * k};
    };
    const auto sentence_of = [&](int64_t row) -> const Sentence & { return *beams[static_cast<size_t>(row)].sentence; };
    // Whose columns a sentence has together with others; null: none.
    const auto common = [&](const Sentence &sentence) {
        return sentence.shares ? shared_layer_.get() : sentence.words.empty() ? vocabulary_ : nullptr;
    };
    for (int64_t begin = 0, end = 0; begin < n; begin = end) {  // the rows of a sentence follow one another
        const RowLinear *layer = common(sentence_of(begin));
        while (end < n && common(sentence_of(end)) == layer) end += sentence_of(end).rows();
        RowLinear::begin_top_k(top(begin), end - begin);
        // The tokens that are taken out, as columns of a layer over these words; null: over the vocabulary.
        const auto taken = [&](int64_t first, int64_t count, const std::vector<int32_t> *words) -> const std::vector<RowLinear::Taken> * {
            if (work.taken.empty()) return nullptr;
            work.taken_columns.resize(std::max(work.taken_columns.size(), static_cast<size_t>(n)));
            for (int64_t r = first; r < first + count; ++r) {
                auto &columns = work.taken_columns[static_cast<size_t>(r)];
                columns.clear();
                for (TokenRule &rule : work.taken[static_cast<size_t>(r)]) {
                    if (!words) {
                        columns.push_back({rule.token, &rule.logit});
                    } else if (const auto word = std::lower_bound(words->begin(), words->end(), rule.token); word != words->end() && *word == rule.token) {
                        columns.push_back({static_cast<int32_t>(word - words->begin()), &rule.logit});
                    }
                }
            }
            return work.taken_columns.data() + first;
        };
        if (layer)
            layer->add_top_k(from(begin), end - begin, work.logits.data(), 0, top(begin),
                             taken(begin, end - begin, layer == vocabulary_ ? nullptr : &shared_words_));
        for (int64_t i = begin; i < end && layer != vocabulary_; i += sentence_of(i).rows()) {
            const Sentence &sentence = sentence_of(i);
            const auto shared = sentence.shares ? static_cast<int64_t>(shared_words_.size()) : 0;
            if (!sentence.words.empty())
                sentence.words_layer->add_top_k(from(i), sentence.rows(), work.logits.data(), shared, top(i),
                                                taken(i, sentence.rows(), &sentence.words));
            for (int64_t place = i * k; place < (i + sentence.rows()) * k; ++place) {
                int32_t &token = work.top_tokens[place];
                if (token < 0) continue;  // of logits that are no numbers
                token = token < shared ? shared_words_[static_cast<size_t>(token)] : sentence.words[static_cast<size_t>(token - shared)];
            }
        }
        vocabulary_->end_top_k(from(begin), end - begin, top(begin), work.log_sum_exp.data() + begin);
    }
}

void Decoder::share_words(const std::vector<int32_t> &words) {
    if (!complete_) refuse("share_words", "the decoder has no vocabulary yet");
    if (words.empty()) refuse("share_words", "there are none");
    is_shared_.assign(static_cast<size_t>(vocabulary_size()), false);
    for (size_t i = 0; i < words.size(); ++i) {
        if (words[i] < 0 || words[i] >= vocabulary_size() || (i && words[i] <= words[i - 1]))
            refuse("share_words", "they are not in order, or none of the vocabulary");
        is_shared_[static_cast<size_t>(words[i])] = true;
    }
    shared_words_ = words;
    shared_layer_ = std::make_unique<RowLinear>(isa_);
    shared_layer_->gather(*vocabulary_, words);
}

void Decoder::gather_words(Sentence &sentence) const {
    std::vector<int32_t> own;
    std::copy_if(sentence.words.begin(), sentence.words.end(), std::back_inserter(own),
                 [&](int32_t word) { return is_shared_.empty() || !is_shared_[static_cast<size_t>(word)]; });
    sentence.shares = shared_layer_ && own.size() + shared_words_.size() == sentence.words.size();
    if (sentence.shares) sentence.words.swap(own);
    if (sentence.words.empty()) return;
    if (!sentence.words_layer) sentence.words_layer = std::make_unique<RowLinear>(isa_);
    sentence.words_layer->gather(*vocabulary_, sentence.words);
}

}  // namespace zoo
