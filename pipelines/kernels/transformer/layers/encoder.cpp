#include "transformer/layers/encoder.h"

#include <cmath>
#include <cstring>

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
    append(Kind::kQuantizedAttention, in, out, heads * size).layer = static_cast<int64_t>(attentions_.size());
    attentions_.push_back(attention);
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
            float *to = out.values + begin * out.stride;
            if (operation.kind == Kind::kEmbed) {
                for (int64_t i = 0; i < rows; ++i) {
                    const int64_t type = types ? types[begin + i] : 0;
                    embed_row(tokens[begin + i], by_position_ ? i + type * longest : type, to + i * out.stride);
                }
                continue;
            }
            const float *from = in.values + begin * in.stride;
            const int64_t keys = attended ? attended[sentence] : rows;
            if (operation.kind == Kind::kQuantizedAttention) {
                isa_.rows->quantized_attention(attentions_[static_cast<size_t>(operation.layer)], from, in.stride, rows, keys, to, out.stride);
                continue;
            }
            work.keys.reserve(operation.width * round_up(keys, 16));
            transpose(from + operation.width, in.stride, keys, operation.width, work.keys.data());
            const KeysValues<float> kv{work.keys.data(), from + 2 * operation.width, keys, in.stride, operation.size};
            isa_.rows->attention(from, in.stride, rows, kv, operation.heads, operation.size, to, out.stride);
        }
    };
    run(0, tail_, work.registers, n, compute);
    for (size_t each = 0; picked != Picked::kAll && each < carried_.size(); ++each) {
        const Rows rows = work.registers[static_cast<size_t>(carried_[each])].rows();
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

}  // namespace zoo
