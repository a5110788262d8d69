#include "transformer/layers/encoder.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "isa/threads.h"

namespace zoo {

void Encoder::attention(int64_t in, int64_t heads, int64_t out) { Layers::attention(Kind::kAttention, in, 3, heads, out, "attention"); }

namespace {

constexpr int64_t kBlock = 192;  // rows that pass through linear layers together: their results stay in the cache

std::string text(int64_t value) { return std::to_string(value); }

}  // namespace

void Encoder::quantized_attention(int64_t in, int64_t heads, int64_t key_heads, int64_t before, int64_t after, const std::optional<Array> &bias,
                                  const std::optional<std::tuple<Array, Array, float>> &norm,
                                  const std::optional<std::pair<Array, Array>> &rotary, const std::optional<Array> &rows,
                                  const std::optional<std::pair<Array, Array>> &to_position,
                                  const std::optional<std::pair<Array, Array>> &to_content, int64_t out) {
    require_open("attention");
    const int64_t columns = read(in, "attention").width, parts = heads + 2 * key_heads;
    if (heads < 1 || key_heads < 1 || heads > columns || key_heads > heads || heads % key_heads || columns % (16 * parts))
        refuse("attention", text(heads) + " heads of queries and " + text(key_heads) + " of keys on " + text(columns) + " columns; a head has a multiple of 16");
    if (positions_ > kMostCodes) refuse("attention", "its sums can overflow 32 bits");
    const int64_t size = columns / parts;
    zoo::QuantizedAttention attention{};
    attention.heads = heads, attention.key_heads = key_heads, attention.size = size;
    attention.before = before < 0 ? kMostCodes : before, attention.after = after < 0 ? kMostCodes : after;
    const auto keep = [&](const Array &array) { kept_.push_back(array); };
    const auto limit = [&](int64_t tokens) { reach_ = std::min(reach_, tokens); };
    if (bias) {
        attention.bias_stride = bias->ndim() == 2 ? static_cast<int64_t>(bias->shape(1)) : 0;
        if (attention.bias_stride % 2 == 0) refuse("attention", "its bias has no middle");
        attention.bias = finite_table(*bias, "bias", heads, attention.bias_stride, "attention"), keep(*bias);
        limit(attention.bias_stride / 2 + 1);
    }
    if (norm) {
        const auto &[query, key, epsilon] = *norm;
        if (!(epsilon >= 0) || !std::isfinite(epsilon)) refuse("attention", "epsilon is negative or no number");
        if (static_cast<int64_t>(query.size()) != size || static_cast<int64_t>(key.size()) != size) refuse("attention", "its norms are of other columns than a head's");
        attention.query_norm = data_of<float>(query, "query", 1), attention.key_norm = data_of<float>(key, "key", 1), attention.epsilon = epsilon;
        keep(query), keep(key);
    }
    if (rotary) {
        const Array &cos = rotary->first, &sin = rotary->second;
        const int64_t rows = cos.ndim() == 2 ? static_cast<int64_t>(cos.shape(0)) : 0;
        attention.turned = rows ? static_cast<int64_t>(cos.shape(1)) : 0;
        if (!attention.turned || 2 * attention.turned > size) refuse("attention", "it turns other columns than a head's");
        attention.cos = finite_table(cos, "cos", rows, attention.turned, "attention"), attention.sin = finite_table(sin, "sin", rows, attention.turned, "attention");
        keep(cos), keep(sin), limit(rows);
    }
    const std::optional<std::pair<Array, Array>> *const tables[] = {&to_position, &to_content};
    for (size_t i = 0; rows && i < 2; ++i) {
        if (!*tables[i]) continue;
        const auto &[codes, scale] = **tables[i];
        zoo::QuantizedAttention::Positions positions{data_of<int8_t>(codes, "positions", 3), finite_table(scale, "scale of positions", heads, size, "attention")};
        const auto count = static_cast<int64_t>(codes.shape(1));
        if (key_heads != heads || static_cast<int64_t>(codes.shape(0)) != heads || static_cast<int64_t>(codes.shape(2)) != size || !count ||
            (attention.row_count && attention.row_count != count))
            refuse("attention", "its positions are of other heads or rows");
        attention.row_count = count;
        (i ? attention.to_content : attention.to_position) = positions;
        keep(codes), keep(scale);
    }
    if (rows) {
        const auto *data = data_of<int32_t>(*rows, "rows", 1);
        const auto distances = static_cast<int64_t>(rows->shape(0));
        if (distances % 2 == 0) refuse("attention", "its rows have no middle");
        rows_.emplace_back(data, data + distances);  // as a copy: nobody can change them after the check
        for (const int32_t row : rows_.back())
            if (row < 0 || row >= attention.row_count) refuse("attention", "it has no row " + text(row) + " of positions");
        attention.rows = rows_.back().data() + distances / 2, limit(distances / 2 + 1);
    }
    Operation &operation = append(Kind::kQuantizedAttention, in, out, heads * size);
    operation.layer = static_cast<int64_t>(attentions_.size()), operation.heads = key_heads;
    attentions_.push_back(attention);
}

void Encoder::neighbours(int64_t in, int64_t count, int64_t out) {
    require_open("neighbours");
    const int64_t width = read(in, "neighbours").width;
    if (count < 1 || count % 2 == 0 || count > kMaxWidth / width)
        refuse("neighbours", text(count) + " rows of " + text(width) + " columns; expected an odd number");
    append(Kind::kNeighbours, in, out, count * width).size = count;
}

void Encoder::finish(int64_t in) {
    require_open("the result");
    read(in, "the result");
    close(in, nullptr);
    divide(kBlock);
    tail_ = operations_.size();
    while (operations_[tail_ - 1].by_row()) --tail_;
    std::vector<bool> own(register_widths_.size());  // written there
    const auto carry = [&](int64_t index) {
        if (index >= 0 && !own[static_cast<size_t>(index)] && std::find(carried_.begin(), carried_.end(), index) == carried_.end()) carried_.push_back(index);
    };
    for (size_t i = tail_; i < operations_.size(); ++i) {
        carry(operations_[i].in), carry(operations_[i].residual);
        own[static_cast<size_t>(operations_[i].out)] = true;
    }
    carry(last_);
}

void Encoder::embed(const int32_t *tokens, int64_t n, const int32_t *types, int64_t longest, const Rows &out) const {
    for (int64_t i = 0; i < n; ++i) {
        const int64_t type = types ? types[i] : 0;
        embed_row(tokens[i], by_position_ ? i + type * longest : type, out.values + i * out.stride);
    }
}

void Encoder::join(const Operation &operation, const Rows &in, int64_t n, int64_t attended, const Rows &out) const {
    const int64_t count = operation.size, width = operation.width / count;
    for (int64_t r = 0; r < n; ++r) {
        float *to = out.values + r * out.stride;
        for (int64_t t = r - count / 2; t <= r + count / 2; ++t, to += width) {
            if (t < 0 || t >= attended) std::fill_n(to, width, 0.0f);
            else std::copy_n(in.values + t * in.stride, width, to);
        }
    }
}

void Encoder::attend(Encoding &work, const Operation &operation, const Rows &in, int64_t n, int64_t keys, int64_t begin, int64_t heads,
                     const Rows &out) const {
    if (operation.kind == Kind::kQuantizedAttention) {
        const zoo::QuantizedAttention &whole = attentions_[static_cast<size_t>(operation.layer)];
        if (heads == whole.key_heads) return isa_.rows->quantized_attention(whole, in.values, in.stride, n, keys, out.values, out.stride);
        const int64_t group = whole.heads / whole.key_heads, size = whole.size, first = begin * group;
        zoo::QuantizedAttention part = whole;
        part.heads = heads * group, part.key_heads = heads;
        if (part.bias) part.bias += first * part.bias_stride;
        for (auto *positions : {&part.to_position, &part.to_content})
            if (positions->codes) positions->codes += first * part.row_count * size, positions->scale += first * size;
        const int64_t stride = (part.heads + 2 * heads) * size;
        work.keys.reserve(n * stride);
        float *to = work.keys.data();
        for (int64_t r = 0; r < n; ++r) {
            const float *row = in.values + r * in.stride, *key = row + (whole.heads + begin) * size;
            to = std::copy_n(row + first * size, part.heads * size, to);
            to = std::copy_n(key, heads * size, to);
            to = std::copy_n(key + whole.key_heads * size, heads * size, to);
        }
        return isa_.rows->quantized_attention(part, work.keys.data(), stride, n, keys, out.values + first * size, out.stride);
    }
    const int64_t column = begin * operation.size, width = heads * operation.size;
    work.keys.reserve(width * round_up(keys, 16));
    transpose(in.values + operation.width + column, in.stride, keys, width, work.keys.data());
    const KeysValues<float> kv{work.keys.data(), in.values + 2 * operation.width + column, keys, in.stride, operation.size};
    isa_.rows->attention(in.values + column, in.stride, n, kv, heads, operation.size, out.values + column, out.stride);
}

Rows Encoder::encode(Encoding &work, const int32_t *tokens, const int64_t *first, int64_t count, const int32_t *types, int64_t longest,
                     const int64_t *attended, Picked picked) const {
    const int64_t n = first[count] - first[0];
    work.registers.resize(register_widths_.size());
    for (size_t i = 0; i < register_widths_.size(); ++i)
        work.registers[i].size(register_rows(i, n), register_widths_[i], register_quantizes_[i]);
    work.largest = std::max(work.largest, n);
    const auto compute = [&](const Operation &operation, const Rows &in, const Rows &out) {
        for (int64_t sentence = 0; sentence < count; ++sentence) {
            const int64_t begin = first[sentence] - first[0], rows = first[sentence + 1] - first[sentence];
            if (operation.kind == Kind::kEmbed)
                embed(tokens + begin, rows, types ? types + begin : nullptr, longest, rows_from(out, begin));
            else if (operation.kind == Kind::kNeighbours)
                join(operation, rows_from(in, begin), rows, attended ? attended[sentence] : rows, rows_from(out, begin));
            else
                attend(work, operation, rows_from(in, begin), rows, attended ? attended[sentence] : rows, 0, operation.heads, rows_from(out, begin));
        }
    };
    run(0, tail_, work.registers, n, compute);
    for (size_t carried = 0; picked != Picked::kAll && carried < carried_.size(); ++carried) {
        const Rows rows = work.registers[static_cast<size_t>(carried_[carried])].rows();
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = (picked == Picked::kFirst ? first[i] : first[i + 1] - 1) - first[0];
            std::memmove(rows.values + i * rows.stride, rows.values + row * rows.stride, static_cast<size_t>(rows.stride) * sizeof(float));
            if (!rows.quantized) continue;
            std::memmove(rows.quantized + i * rows.stride, rows.quantized + row * rows.stride, static_cast<size_t>(rows.stride));
            rows.scale[i] = rows.scale[row];
        }
    }
    run(tail_, operations_.size(), work.registers, picked == Picked::kAll ? n : count, compute);
    return work.registers[static_cast<size_t>(last_)].rows();
}

Rows Encoder::encode_together(const std::vector<std::unique_ptr<Encoding>> &works, const int32_t *tokens, int64_t n, const int32_t *types,
                              int64_t longest, int64_t attended) const {
    const auto threads = static_cast<int64_t>(works.size());
    const auto is_own = [&](size_t index) { return static_cast<int64_t>(index) >= first_short_; };  // registers of a block
    for (int64_t thread = 0; thread < threads; ++thread) {
        Encoding &work = *works[static_cast<size_t>(thread)];
        work.registers.resize(register_widths_.size());
        for (size_t i = 0; i < register_widths_.size(); ++i)
            if (!thread || is_own(i)) work.registers[i].size(register_rows(i, n), register_widths_[i], register_quantizes_[i]);
        work.largest = std::max(work.largest, n);
    }
    const std::vector<Share> parts = shares(n, threads);
    Pieces pieces(static_cast<int64_t>(parts.size()));
    std::atomic<size_t> joined{0};
    on_threads(threads, [&](bool) {
        Encoding &work = *works[joined++];
        std::vector<Rows> views;
        for (size_t i = 0; i < register_widths_.size(); ++i) views.push_back((is_own(i) ? work : *works[0]).registers[i].rows());
        size_t over = 0;
        const auto before = [&](int64_t index) { return parts[static_cast<size_t>(index)].before; };
        for (int64_t piece; (piece = pieces.take(before)) >= 0;) {
            const Pieces::Taken taken(pieces);
            run_share(parts[static_cast<size_t>(piece)], views, over,
                      [&](const Operation &operation, const Rows &in, const Rows &out, int64_t begin, int64_t heads) {
                          if (operation.kind == Kind::kEmbed)
                              embed(tokens, n, types, longest, out);
                          else if (operation.kind == Kind::kNeighbours)
                              join(operation, in, n, attended, out);
                          else
                              attend(work, operation, in, n, attended, begin, heads, out);
                      });
        }
    });
    Register &last = works[0]->registers[static_cast<size_t>(last_)];
    last.stride = round_up(width(), kColumns);
    return last.rows();
}

}  // namespace zoo
