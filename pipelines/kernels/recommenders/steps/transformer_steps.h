// Steps of click programs that are small transformers over sequences, see transformers.py.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "recommenders/steps/sequence_steps.h"
#include "transformer/layers/layers.h"

namespace zoo {
namespace {

constexpr int64_t kRowsTogether = 192;  // items of sequences that pass the layers of an encoder together: they stay in L2

class TransformerSteps : public SequenceProgram {
  public:
    using SequenceProgram::SequenceProgram;

    // One row of a table of float32, its columns as they are.
    void rows(int out, int64_t column, Array table) {
        const Slot to = slot(out, Kind::kFloats, "rows");
        const auto *values = data_of<float>(table, "table", 2);
        require(static_cast<int64_t>(table.shape(1)) == to.width && reads_rows(column, 1, static_cast<int64_t>(table.shape(0))), "rows");
        const int64_t stride = columns();
        add({}, {whole(to)}, reach_of(reach_ids_, column, 1), [=](const Block &b) {
            for (int64_t s = 0; s < b.n; ++s)
                std::copy_n(values + b.ids[s * stride + column] * to.width, to.width, b.data<float>(to) + s * to.stride);
        });
        kept_.push_back(std::move(table));
    }

    // items, keys_values: tables of whole sixteens of columns; places: what the places add to keys and values, the target's first.
    // layers: weight and bias of query, joined, inner and outer; norms: scale and bias of both layer normalizations.
    // gaps: what the time gaps of `gap_begin`, if any, add to keys and values.
    void target_transformer(int out, int64_t column, int64_t begin, int64_t count, int64_t padding, int64_t heads, Array items,
                            Array keys_values, const Array &places, const Array &position, const std::vector<Array> &layers, const Array &slope,
                            const std::vector<Array> &norms, float epsilon, int64_t gap_begin, const std::vector<Array> &gaps) {
        const char *name = "target_transformer";
        const Slot to = slot(out, Kind::kFloats, name);
        auto t = std::make_shared<Target>();
        const auto size = [](const Array &array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); };
        t->items = data_of<float>(items, "items", 2), t->keys_values = data_of<float>(keys_values, "keys_values", 2);
        const auto *added = data_of<float>(places, "places", 2), *own = data_of<float>(position, "position", 1);
        t->size = to.width, t->room = size(items, 1), t->heads = heads, t->padding = static_cast<uint32_t>(padding);
        t->column = column, t->begin = begin, t->count = count, t->ids = columns();
        require(layers.size() == 8 && norms.size() == 4 && heads >= 1 && heads <= to.width && to.width % heads == 0 && count >= 1 &&
                    count <= kWidest && padding >= 0 && t->room == round_up(to.width, 16) && size(keys_values, 1) == 2 * t->room &&
                    size(keys_values, 0) == size(items, 0) && size(places, 0) == 1 + count && size(places, 1) == 2 * t->room &&
                    size(position, 0) == t->room && reads_rows(column, 1, size(items, 0)) && reads_rows(begin, count, size(items, 0)),
                name);
        t->gap_begin = gap_begin, t->gaps = gap_rows(gap_begin, count, gaps, 2 * t->room, name);
        t->places = copied(*t, added, 1 + count, 2 * t->room), t->position = copied(*t, own, 1, t->room);
        const int64_t inner = size(slope, 0);
        t->stride = round_up(std::max(t->room, inner), kColumns);
        const int64_t inputs[] = {to.width, to.width, to.width, inner}, outputs[] = {to.width, to.width, inner, to.width};
        for (size_t i = 0; i < 4; ++i) t->layers[i] = float_layer(*t, layers[2 * i], layers[2 * i + 1], inputs[i], outputs[i], name);
        t->slope.slope = filled(*t, data_of<float>(slope, "slope", 1), inner, round_up(inner, 16));
        for (size_t i = 0; i < 2; ++i) t->norms[i] = layer_norm(*t, norms[2 * i], norms[2 * i + 1], to.width, epsilon, name);
        const auto *kernels = isa_.sequences;
        const auto *row_kernels = isa_.rows;
        const bool shared = alike_ids(begin, count) && (gap_begin < 0 || alike_ids(gap_begin, count));
        const int64_t kept = shared ? kept_bytes((t->history_size() + 16) * 4) : 0;
        add({}, {whole(to)}, Reach::kSample, [=](const Block &b) {
            static thread_local Buffer<float> memory;
            const int64_t n = round_up(b.n, 4);
            memory.reserve(3 * n * t->stride + round_up(1 + t->count, 16) + t->history_size());
            float *x = memory.data(), *y = x + n * t->stride, *z = y + n * t->stride, *scores = z + n * t->stride;
            float *history = shared ? reinterpret_cast<float *>(b.memory + kept) : scores + round_up(1 + t->count, 16);
            std::memset(x, 0, static_cast<size_t>(3 * n * t->stride) * 4);
            for (int64_t s = 0; s < b.n; ++s)
                kernels->add(t->items + b.ids[s * t->ids + t->column] * t->room, t->position, t->room, x + s * t->stride);
            kernels->layer(t->layers[0], x, t->stride, n, nullptr, y, t->stride);
            int64_t item_count = 0;
            if (shared && !b.first) std::memcpy(&item_count, history + t->history_size(), sizeof item_count);
            for (int64_t s = 0; s < b.n; ++s) {
                if (!shared || (b.first && s == 0)) item_count = t->place(*kernels, b.ids + s * t->ids, history);
                t->place_target(*kernels, b.ids[s * t->ids + t->column], item_count, history);
                kernels->attend_heads(y + s * t->stride, t->keys(history), t->values(history), item_count, t->heads, t->size / t->heads, scores,
                                      z + s * t->stride);
            }
            if (shared && b.first) std::memcpy(history + t->history_size(), &item_count, sizeof item_count);
            kernels->layer(t->layers[1], z, t->stride, n, x, y, t->stride);
            const Rows normed{x, nullptr, nullptr, t->stride};
            row_kernels->layer_norm(t->norms[0], y, t->stride, normed, n);
            kernels->layer(t->layers[2], x, t->stride, n, nullptr, z, t->stride);
            kernels->activate(t->slope, z, t->stride, t->layers[2].outputs, n, z);
            kernels->layer(t->layers[3], z, t->stride, n, x, y, t->stride);
            row_kernels->layer_norm(t->norms[1], y, t->stride, {b.data<float>(to), nullptr, nullptr, to.stride}, b.n);
        });
        kept_.push_back(std::move(items)), kept_.push_back(std::move(keys_values));
    }

    // norms: scale and bias of the layer normalizations in order. layers: of every block weight, scale and bias of query, keys and values,
    // joined, inner and outer. fine: weights of the layers that are float32, by their numbers. gaps: what the time gaps of `gap_begin`, if any,
    // add to the items.
    void sequence_encoder(int out, int64_t begin, int64_t count, int64_t padding, int64_t heads, Array items, const Array &positions,
                          const std::vector<Array> &norms, float epsilon, const std::vector<Array> &layers,
                          const std::vector<std::pair<int64_t, Array>> &fine, int64_t gap_begin, const std::vector<Array> &gaps) {
        const char *name = "sequence_encoder";
        const Slot to = slot(out, Kind::kFloats, name);
        auto e = std::make_shared<Encoded>();
        const auto size = [](const Array &array, size_t axis) { return static_cast<int64_t>(array.shape(axis)); };
        e->items = data_of<float>(items, "items", 2);
        const auto *added = data_of<float>(positions, "positions", 2);
        e->size = to.width, e->padding = static_cast<uint32_t>(padding), e->begin = begin, e->count = count, e->ids = columns();
        const size_t blocks = layers.size() / 15;
        require(blocks >= 1 && layers.size() == 15 * blocks && norms.size() == 4 * blocks + 2 && count >= 1 && count <= kWidest && padding >= 0 &&
                    heads >= 1 && size(items, 1) == to.width && size(positions, 0) == count && size(positions, 1) == to.width &&
                    reads_rows(begin, count, size(items, 0)),
                name);
        e->gap_begin = gap_begin, e->gaps = gap_rows(gap_begin, count, gaps, to.width, name);
        e->positions = copied(*e, added, count, to.width);
        for (size_t i = 0; i < norms.size(); i += 2) e->norms.push_back(layer_norm(*e, norms[i], norms[i + 1], to.width, epsilon, name));
        for (size_t i = 0; i < layers.size(); i += 3) {
            require(layers[i].ndim() == 2, name);
            e->layers.push_back({RowLinear(isa_, layers[i], layers[i + 1], layers[i + 2], std::nullopt, i / 3 % 5 == 4), {}});
        }
        e->heads = heads, e->width = e->layers[0].coarse.outputs(), e->inner = e->layers[3].coarse.outputs();
        require(e->width % (16 * heads) == 0, name);
        const int64_t w = e->width, inputs[] = {to.width, to.width, w, to.width, e->inner}, outputs[] = {w, 2 * w, to.width, e->inner, to.width};
        for (size_t i = 0; i < e->layers.size(); ++i)
            require(e->layers[i].coarse.inputs() == inputs[i % 5] && e->layers[i].coarse.outputs() == outputs[i % 5], name);
        for (const auto &[number, weight] : fine) {
            require(number >= 0 && number < static_cast<int64_t>(e->layers.size()), name);
            const auto index = static_cast<size_t>(number);
            e->layers[index].fine = float_layer(*e, weight, layers[3 * index + 2], inputs[index % 5], outputs[index % 5], name);
        }
        e->any_fine = !fine.empty();
        e->rectified.slope = filled(*e, nullptr, 0, round_up(e->inner, 16));
        const auto *kernels = isa_.sequences;
        const auto *row_kernels = isa_.rows;
        const Reach items_reach = reach_of(reach_ids_, begin, count);
        const Reach reach = gap_begin < 0 ? items_reach : zoo::joined(items_reach, reach_of(reach_ids_, gap_begin, count));
        add({}, {whole(to)}, reach, [=](const Block &b) {
            int64_t s = 0;
            while (s < b.n) s = e->run(*kernels, *row_kernels, b, s, b.data<float>(to), to.stride);
        });
        kept_.push_back(std::move(items));
    }

  private:
    struct Kept {
        std::vector<Buffer<float>> arrays;
    };

    struct Target : Kept {
        int64_t size, room, stride, heads, column, begin, count, ids;  // room: size in whole sixteens; ids: columns of the ids
        int64_t gap_begin;
        uint32_t padding;
        const float *items, *keys_values, *places, *position, *gaps;
        FloatLayer layers[4];  // query, joined, inner, outer
        LayerNorm norms[2];
        Unit slope{};

        // Of a history: rows of keys and values, whole sixteens, and both transposed.
        int64_t places_room() const { return round_up(1 + count, 16); }
        int64_t history_size() const { return 4 * places_room() * room; }
        float *keys(float *history) const { return history + 2 * places_room() * room; }
        float *values(float *history) const { return history + 3 * places_room() * room; }

        // Keys and values of the items of a sequence, behind those of the target; returns their number with the target.
        int64_t place(const SequenceKernels &kernels, const uint32_t *row, float *history) const {
            int64_t item_count = 1;
            for (int64_t p = 0; p < count; ++p) {
                const uint32_t id = row[begin + p];
                if (id == padding) continue;
                float *to = history + item_count++ * 2 * room;
                kernels.add(keys_values + id * 2 * room, places + (1 + p) * 2 * room, 2 * room, to);
                if (gaps) kernels.add(to, gaps + row[gap_begin + p] * 2 * room, 2 * room, to);
            }
            const int64_t whole = round_up(item_count, 16);
            std::memset(history, 0, static_cast<size_t>(2 * room) * 4);
            std::memset(history + item_count * 2 * room, 0, static_cast<size_t>((whole - item_count) * 2 * room) * 4);
            kernels.transpose(history, 2 * room, whole, room, whole, keys(history));
            kernels.transpose(history + room, 2 * room, whole, room, whole, values(history));
            return item_count;
        }

        void place_target(const SequenceKernels &kernels, uint32_t id, int64_t item_count, float *history) const {
            const int64_t whole = round_up(item_count, 16);
            kernels.add(keys_values + id * 2 * room, places, 2 * room, history);
            float *key = keys(history), *value = values(history);
            for (int64_t j = 0; j < size; ++j) key[j * whole] = history[j], value[j * whole] = history[room + j];
        }
    };

    // The memory in which a thread encodes.
    struct Encoding {
        Register x, y, parts, inner, newest, normed, state;
        Buffer<float> keys;
        std::vector<int64_t> first;
    };

    // A layer of int8 weights, or of float32 where it has some.
    struct EncoderLayer {
        RowLinear coarse;
        FloatLayer fine;
    };

    struct Encoded : Kept {
        int64_t size, heads, width, inner, begin, count, ids;  // width: of a query, heads of whole sixteens; ids: columns of the ids
        int64_t gap_begin;
        uint32_t padding;
        const float *items, *positions, *gaps;
        std::vector<LayerNorm> norms;
        std::vector<EncoderLayer> layers;
        Unit rectified{};  // a ReLU
        bool any_fine = false;

        // x [n] -> out: rows of whole 64 columns; with room for whole fours of them.
        void apply(const SequenceKernels &sequences, const EncoderLayer &layer, const Rows &x, int64_t n, bool relu, const float *residual,
                   float *out, int64_t out_stride) const {
            if (!layer.fine.weight) {
                layer.coarse.run(x, n, relu, residual, out_stride, out, out_stride);
                return;
            }
            const int64_t fours = round_up(n, 4);
            sequences.layer(layer.fine, x.values, x.stride, fours, residual, out, out_stride);
            if (relu) sequences.activate(rectified, out, out_stride, layer.fine.outputs, n, out);
            for (int64_t r = 0; r < n && !residual; ++r) std::fill(out + r * out_stride + layer.fine.outputs, out + (r + 1) * out_stride, 0.0f);
        }

        // Quantized, and as floats where a layer reads these.
        void normalize(const RowKernels &kernels, size_t norm, const Rows &x, const Rows &y, int64_t n) const {
            kernels.layer_norm(norms[norm], x.values, x.stride, {any_fine ? y.values : nullptr, y.quantized, y.scale, y.stride}, n);
        }

        static void quantize(const RowKernels &kernels, const Rows &rows, const EncoderLayer &reader, int64_t n) {
            if (!reader.fine.weight) kernels.quantize_rows(rows, rows.stride, reader.coarse.qparams(), n);
        }

        // Joins attention to x, then the feed-forward network: x [n] of whole 64 columns. `attended`: its results.
        void finish(const SequenceKernels &sequences, const RowKernels &kernels, size_t block, const Rows &attended, const Rows &x, const Rows &y,
                    const Rows &hidden, int64_t n) const {
            const EncoderLayer *layer = &layers[5 * block];
            quantize(kernels, attended, layer[2], n);
            apply(sequences, layer[2], attended, n, false, x.values, x.values, x.stride);
            normalize(kernels, 2 * block + 1, x, y, n);
            apply(sequences, layer[3], y, n, true, nullptr, hidden.values, hidden.stride);
            quantize(kernels, hidden, layer[4], n);
            apply(sequences, layer[4], hidden, n, false, x.values, x.values, x.stride);
        }

        // Encodes sequences from sample s on, as many as stay in the cache; returns the next sample.
        int64_t run(const SequenceKernels &sequences, const RowKernels &kernels, const Block &b, int64_t s, float *out, int64_t out_stride) const {
            static thread_local Encoding work;
            const int64_t room = round_up(kRowsTogether + count, 4), narrow = round_up(size, kColumns), all = round_up(width, kColumns);
            work.x.size(room, size), work.y.size(room, size), work.parts.size(room, all + 2 * width), work.inner.size(room, inner);
            work.newest.size(room, size), work.normed.size(room, size), work.state.size(room, all), work.keys.reserve(round_up(count, 16) * width);
            work.first.assign(1, 0);
            const Rows x = work.x.rows(), y = work.y.rows(), hidden = work.inner.rows(), attended = work.state.rows();
            int64_t n = 0, next = s;
            for (; next < b.n && n < kRowsTogether; ++next) {
                const uint32_t *row = b.ids + next * ids;
                for (int64_t p = 0; p < count; ++p) {
                    if (p && row[begin + p] == padding) continue;
                    const float *item = items + row[begin + p] * size, *position = positions + p * size;
                    float *to = x.values + n++ * narrow;
                    for (int64_t j = 0; j < size; ++j) to[j] = item[j] + position[j];
                    const float *gap = gaps ? gaps + row[gap_begin + p] * size : nullptr;
                    for (int64_t j = 0; gap && j < size; ++j) to[j] += gap[j];
                    std::fill(to + size, to + narrow, 0.0f);
                }
                work.first.push_back(n);
            }
            const int64_t sequences_count = next - s;
            const size_t blocks = layers.size() / 5;
            for (size_t block = 0; block < blocks; ++block) {
                const bool last = block + 1 == blocks;
                const EncoderLayer *layer = &layers[5 * block];
                normalize(kernels, 2 * block, x, y, n);
                const Rows newest = work.newest.rows(), normed = work.normed.rows();
                Rows queries = y;
                if (last) {  // the newest states alone
                    for (int64_t i = 0; i < sequences_count; ++i) {
                        const int64_t from = work.first[static_cast<size_t>(i)];
                        std::copy_n(x.values + from * x.stride, x.stride, newest.values + i * newest.stride);
                        std::copy_n(y.quantized + from * y.stride, y.stride, normed.quantized + i * normed.stride);
                        if (any_fine) std::copy_n(y.values + from * y.stride, y.stride, normed.values + i * normed.stride);
                        normed.scale[i] = y.scale[from];
                    }
                    queries = normed;
                }
                const int64_t query_count = last ? sequences_count : n, stride = round_up(2 * width, kColumns);
                float *keys_values = work.parts.values.data(), *query = keys_values + room * stride;
                apply(sequences, layer[0], queries, query_count, false, nullptr, query, all);
                apply(sequences, layer[1], y, n, false, nullptr, keys_values, stride);
                for (int64_t i = 0; i < sequences_count; ++i) {
                    const int64_t from = work.first[static_cast<size_t>(i)], items_count = work.first[static_cast<size_t>(i) + 1] - from;
                    const int64_t row = last ? i : from;
                    const float *own = keys_values + from * stride;
                    const int64_t whole = items_count / 4 * 4, padded = round_up(items_count, 16);
                    sequences.transpose(own, stride, whole, width, padded, work.keys.data());
                    for (int64_t r = whole; r < items_count; ++r)
                        for (int64_t j = 0; j < width; ++j) work.keys[j * padded + r] = own[r * stride + j];
                    const KeysValues<float> kv{work.keys.data(), own + width, items_count, stride, width / heads};
                    kernels.causal_attention(query + row * all, all, last ? 1 : items_count, kv, heads, width / heads, attended.values + row * all, all);
                }
                if (all > width)
                    for (int64_t i = 0; i < query_count; ++i) std::fill(attended.values + i * all + width, attended.values + (i + 1) * all, 0.0f);
                finish(sequences, kernels, block, attended, last ? newest : x, y, hidden, query_count);
            }
            const Rows newest = work.newest.rows();
            kernels.layer_norm(norms.back(), newest.values, newest.stride, {out + s * out_stride, nullptr, nullptr, out_stride}, sequences_count);
            return next;
        }
    };

    static const float *copied(Kept &kept, const float *from, int64_t rows, int64_t width) { return filled(kept, from, rows * width, rows * width); }

    // A copy, filled up with zeros.
    static const float *filled(Kept &kept, const float *from, int64_t count, int64_t room) {
        Buffer<float> made(room);
        std::fill_n(count ? std::copy_n(from, count, made.data()) : made.data(), room - count, 0.0f);
        kept.arrays.push_back(std::move(made));
        return kept.arrays.back().data();
    }

    static FloatLayer float_layer(Kept &kept, const Array &weight, const Array &bias, int64_t inputs, int64_t outputs, const char *step) {
        const auto *w = data_of<float>(weight, "weight", 2), *b = data_of<float>(bias, "bias", 1);
        require(static_cast<int64_t>(weight.shape(0)) == inputs && static_cast<int64_t>(weight.shape(1)) == outputs &&
                    static_cast<int64_t>(bias.shape(0)) == outputs && outputs >= 1 && outputs <= kWidest,
                step);
        const int64_t room = round_up(outputs, 16);
        Buffer<float> made(inputs * room);
        std::fill_n(made.data(), inputs * room, 0.0f);
        for (int64_t k = 0; k < inputs; ++k) std::copy_n(w + k * outputs, outputs, made.data() + k * room);
        kept.arrays.push_back(std::move(made));
        const float *packed = kept.arrays.back().data();
        return {inputs, room, packed, filled(kept, b, outputs, room)};
    }

    static LayerNorm layer_norm(Kept &kept, const Array &scale, const Array &bias, int64_t width, float epsilon, const char *step) {
        const auto *s = data_of<float>(scale, "scale", 1), *b = data_of<float>(bias, "bias", 1);
        require(static_cast<int64_t>(scale.shape(0)) == width && static_cast<int64_t>(bias.shape(0)) == width && epsilon >= 0, step);
        const int64_t room = round_up(width, kColumns);
        const float *scales = filled(kept, s, width, room), *biases = filled(kept, b, width, room);
        return {width, scales, biases, epsilon, {}};
    }
};

}  // namespace
}  // namespace zoo
