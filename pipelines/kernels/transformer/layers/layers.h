// What the encoder and the decoder of a Transformer share: a list of operations over numbered registers, checked as they are added
// (transformer/program.py has the same as dataclasses).
#pragma once
#include <algorithm>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isa/arrays.h"
#include "isa/dispatch.h"

namespace zoo {

constexpr int64_t kMaxWidth = 65536;
constexpr int64_t kMostCodes = 65536;  // products of codes, 255 times 127 at most, that a sum of 32 bits takes
constexpr int64_t kTile = 6;     // rows of a linear layer that are computed together
constexpr int64_t kPanel = 256;  // logits of a row that are computed at a time
constexpr float kTaken = -1e30f;  // in place of a logit that is taken out; finite, as all columns of a panel may be

// (scale, zero point) of the QuantizeLinear before a layer; none: dynamic quantization, each row by its own range.
using StaticQParams = std::optional<std::pair<float, int32_t>>;

// Raises ValueError: "operation: why".
[[noreturn]] void refuse(const char *operation, const std::string &why);

// Finite float32 [rows, columns] of an operation; raises ValueError for others.
const float *finite_table(const Array &array, const char *name, int64_t rows, int64_t columns, const char *operation);

// Fully connected layer on rows quantized to uint8: int8 weights, packed once, columns padded to whole 64.
class RowLinear {
  public:
    // weight int8 [inputs, outputs], scale and bias float32 [outputs]. nonnegative: dynamic quantization may use the zero point 0.
    // padding: the bias of the columns that pad. arena: where the weights lie, which outlives the layer; null: in memory of its own.
    RowLinear(const Isa &isa, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams, bool nonnegative,
              float padding = 0, Arena *arena = nullptr);
    // in.quantized and in.scale -> out [n, out_stride], whole 64 columns; residual: [n, residual_stride] or null.
    void run(const Rows &in, int64_t n, bool relu, const float *residual, int64_t residual_stride, float *out, int64_t out_stride) const;
    // Columns [begin, begin + kPanel), fewer at the end, of the result: out [n, kPanel].
    void panel(const Rows &in, int64_t n, int64_t begin, float *out) const;
    // The largest columns of every row, and log(sum_j exp(y_j)), [n], over all of them; panel: scratch, [n, kPanel].
    void top_k(const Rows &in, int64_t n, float *panel, const TopK &top, double *log_sum_exp) const;
    // The same in parts, where columns of several layers compete: nothing yet; those of this layer, numbered from `first` on; the end.
    static void begin_top_k(const TopK &top, int64_t n);
    // A column whose logit is stored, and has no part in the sum and the largest ones.
    struct Taken {
        int32_t column;
        float *logit;
    };
    // taken: of each row the columns, in order; null: none.
    void add_top_k(const Rows &in, int64_t n, float *panel, int64_t first, const TopK &top, const std::vector<Taken> *taken = nullptr) const;
    void end_top_k(const Rows &in, int64_t n, const TopK &top, double *log_sum_exp) const;
    // Without any weights yet.
    explicit RowLinear(const Isa &isa) : isa_(isa), outputs_(0) {}
    // Becomes the layer of these columns of `whole`, which has more than kNarrow; its memory is used again.
    void gather(const RowLinear &whole, const std::vector<int32_t> &columns);
    // The weights of one output, int8 [inputs].
    void column(int64_t output, int8_t *weight) const { isa_.unpack_column(linear_.weight, linear_.inputs, output, weight); }
    const QParams &qparams() const { return qparams_; }  // of the rows it takes
    int64_t inputs() const { return linear_.inputs; }
    int64_t outputs() const { return outputs_; }

  private:
    const Isa &isa_;
    Linear linear_{};
    QParams qparams_;
    int64_t outputs_;
    Buffer<uint8_t> weight_;        // where no arena has them
    Buffer<int32_t> compensation_;  // -zero_point * sum of a column's weights
    Buffer<float> scale_, bias_;
};

// Fully connected layer on float32 rows, weights packed once, columns padded to whole 64.
class FloatRowLinear {
  public:
    // See RowLinear, with float32 weights.
    FloatRowLinear(const Isa &isa, const Array &weight, const Array &scale, const Array &bias, Arena &arena);
    // in.values -> out [n, out_stride], see RowLinear.
    void run(const Rows &in, int64_t n, bool relu, const float *residual, int64_t residual_stride, float *out, int64_t out_stride) const {
        isa_.rows->float_linear(linear_, {nullptr, nullptr, residual, residual_stride, relu}, in.values, in.stride, n, out, out_stride);
    }
    int64_t outputs() const { return outputs_; }

  private:
    const Isa &isa_;
    FloatLinear linear_{};
    int64_t outputs_;
    Buffer<float> scale_, bias_;
};
// The rows from `begin` on.
inline Rows rows_from(Rows rows, int64_t begin) {
    if (rows.values) rows.values += begin * rows.stride;
    if (rows.quantized) rows.quantized += begin * rows.stride, rows.scale += begin;
    return rows;
}

// Memory for rows of float32 and of uint8.
struct Register {
    Buffer<float> values, scale;
    Buffer<uint8_t> quantized;
    int64_t stride = 0;
    void size(int64_t rows, int64_t width, bool quantizes = true) {
        stride = round_up(width, kColumns);
        values.reserve(rows * stride);
        if (quantizes) quantized.reserve(rows * stride), scale.reserve(rows);
    }
    Rows rows(int64_t begin = 0) const {
        return rows_from({values.data(), quantized.data(), quantized.data() ? scale.data() : nullptr, stride}, begin);
    }
};

class Layers {
  public:
    explicit Layers(const std::string &isa) : isa_(choose_isa(isa)) {}
    Layers(const Layers &) = delete;
    // Each appends an operation. Raises ValueError for one that does not fit those before.
    // table: int8 [tokens, width]; without one the embedding is tied: the weight columns of the vocabulary projection, that of `shared` or
    // one that follows.
    // longest: the most tokens where a row of `positions` is added at all positions alike; 0: a row a position.
    void embedding(std::optional<Array> table, const Layers *shared, const Array &scale, const Array &positions, int64_t longest, int64_t out);
    void layer_norm(int64_t in, const Array &scale, const Array &bias, float epsilon, int64_t out);
    void part_norms(int64_t in, const Array &scale, const Array &bias, float epsilon, int64_t out);  // [parts, columns of a part]
    void rms_norm(int64_t in, const Array &scale, float epsilon, int64_t out);
    // weight: int8, or float32 of a layer that quantizes nothing.
    void linear(int64_t in, const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams, bool relu,
                int64_t residual, int64_t out);
    void activation(int64_t in, const std::string &kind, int64_t out);        // "swish", "gelu" or "gelu_tanh"
    void gated_activation(int64_t in, const std::string &kind, int64_t out);  // of [gate | up]
    void sum(int64_t in, int64_t residual, int64_t out);
    void scale(int64_t in, const Array &factors, int64_t out);          // of each column
    const char *isa() const { return isa_.name; }
    const Isa &instruction_set() const { return isa_; }

    bool complete() const { return complete_; }
    int64_t tokens() const { return tokens_; }
    int64_t positions() const { return positions_; }      // the most tokens
    int64_t places() const { return places_; }            // rows of the table of positions
    bool by_position() const { return by_position_; }     // else a row of it is added at all positions alike
    int64_t width() const { return result_width_; }
    std::vector<Register> registers(int64_t rows) const;

  protected:
    enum class Kind { kEmbed, kLayerNorm, kLinear, kActivation, kAttention, kQuantizedAttention, kSelfAttention, kCrossAttention, kRecurrence, kScale,
                      kGated, kSum, kPartNorms, kNeighbours };
    struct Operation {
        Kind kind;
        int64_t in, out, residual = -1, layer = 0, heads = 0, size = 0, width = 0;
        bool relu = false, float_output = false, quantized_output = false;  // in which forms the result is read
        QParams qparams;  // of the quantized result
        LayerNorm norm{};
        const RowLinear *linear = nullptr;
        const FloatRowLinear *float_linear = nullptr;
        const float *factors = nullptr;  // of a scale; of self-attention the bias, [heads, reach]
        int64_t reach = 0;
        Activation activation{};
        bool by_row() const {
            return kind == Kind::kLayerNorm || kind == Kind::kLinear || kind == Kind::kActivation || kind == Kind::kScale ||
                   kind == Kind::kGated || kind == Kind::kSum || kind == Kind::kPartNorms;
        }
        bool reads(int64_t index) const { return in == index || residual == index; }
    };
    struct Value {  // what a register holds after the operations so far
        int64_t width = 0;
        bool nonnegative = false;
    };
    void require_open(const char *operation) const;
    const Value &read(int64_t index, const char *operation) const;
    Operation &append(Kind kind, int64_t in, int64_t out, int64_t width, bool nonnegative = false);
    // Attention whose input has `parts` times its result's columns: 3 of query | key | value, 1 of the query alone.
    Operation &attention(Kind kind, int64_t in, int64_t parts, int64_t heads, int64_t out, const char *operation);
    const RowLinear *add_linear(const Array &weight, const Array &scale, const Array &bias, const StaticQParams &qparams, bool nonnegative,
                                int64_t inputs, const char *operation, float padding = 0);
    static void require_inputs(const Array &weight, int64_t inputs, const char *operation);
    // No operation follows: the register `last` is read by `reader`, or as float32.
    void close(int64_t last, const RowLinear *reader);
    // Operations on one row at a time pass through `rows` rows together, and what they alone read gets registers of so many rows. There are
    // three times as many registers then: those of all rows, others in their place (see `overwrites`), and those of `rows` rows.
    void divide(int64_t rows);
    // Rows of a register where n are computed.
    int64_t register_rows(size_t index, int64_t n) const { return static_cast<int64_t>(index) < first_short_ ? n : std::min(n, block_); }
    // All operations on n rows; `compute` those of embeddings and attention.
    template <class Compute>
    void run(std::vector<Register> &registers, int64_t n, Compute compute) const {
        run(0, operations_.size(), registers, n, compute);
    }
    // The same from one operation on to before another.
    template <class Compute>
    void run(size_t from, size_t to, std::vector<Register> &registers, int64_t n, Compute compute) const;
    // A part of the operations on n rows that one thread computes: on rows [begin, begin + count), or on so many heads of an attention,
    // or the forms of what these heads gave.
    struct Share {
        enum class Of { kRows, kHeads, kResults } of;
        size_t first, end;  // operations
        int64_t begin, count;
        int64_t before;     // shares that are over when it begins
    };
    // All of them, for several threads.
    std::vector<Share> shares(int64_t n, int64_t threads) const;
    // views: rows of the registers as this thread sees them, with the strides of what they hold; `over`: operations that these are of.
    // compute(operation, in, out, first head, heads)
    template <class Compute>
    void run_share(const Share &share, std::vector<Rows> &views, size_t &over, Compute compute) const;
    // at(index): rows of a register.
    template <class RowsOf, class Compute>
    void run_operation(const Operation &operation, const RowsOf &rows_of, int64_t n, Compute compute) const;
    // The forms in which the result of an embedding or an attention is read.
    void complete_rows(const Operation &operation, const Rows &rows, int64_t n) const;
    // An operation on one row at a time; a row that is read quantized alone is stored nowhere else.
    void run_rows(const Operation &operation, const Rows &in, const Rows &residual, const Rows &out, int64_t n) const;
    void run_part_norms(const Operation &operation, const Rows &in, const Rows &out, int64_t n) const;
    bool tied_embedding() const { return !table_rows_; }
    // place: row of the table of positions.
    void embed_row(int64_t token, int64_t place, float *to) const;

    const Isa &isa_;
    int64_t positions_ = 0, places_ = 0, tokens_ = 0, result_width_ = 0, last_ = 0;  // last_: a register
    bool complete_ = false, by_position_ = true;
    int64_t block_ = INT64_MAX, first_short_ = INT64_MAX;  // rows that are computed together, the first register of so many
    const RowLinear *vocabulary_ = nullptr;  // also where it is that of `shared`
    std::vector<Value> register_values_;
    std::vector<int64_t> register_widths_;  // the widest value of each
    std::vector<bool> register_quantizes_;  // whether any value of it is read quantized
    std::vector<Operation> operations_;

    int64_t width_ = 0;  // of the embeddings

    std::deque<Array> kept_;  // tables of operations that are not copied

  private:
    Arena arena_;
    std::deque<RowLinear> linears_;
    std::deque<FloatRowLinear> float_linears_;
    std::deque<Buffer<float>> parameters_;
    std::optional<Array> table_;  // kept alive
    const int8_t *table_rows_ = nullptr;
    const float *row_scale_ = nullptr, *position_rows_ = nullptr;
};

template <class Compute>
void Layers::run(size_t from, size_t to, std::vector<Register> &registers, int64_t n, Compute compute) const {
    const int64_t blocks = (n - 1) / block_ + 1, rows = round_up((n - 1) / blocks + 1, kTile);
    const auto run_rows_from = [&](const Operation &operation, int64_t begin, int64_t count) {
        registers[static_cast<size_t>(operation.out)].stride = round_up(operation.width, kColumns);
        const auto rows_of = [&](int64_t index) { return registers[static_cast<size_t>(index)].rows(index < first_short_ ? begin : 0); };
        run_operation(operation, rows_of, count, compute);
    };
    for (size_t first = from, end; first < to; first = end) {
        end = first;
        while (end < to && operations_[end].by_row()) ++end;
        if (end == first) {
            run_rows_from(operations_[end++], 0, n);
            continue;
        }
        for (int64_t begin = 0; begin < n; begin += rows)
            for (size_t i = first; i < end; ++i) run_rows_from(operations_[i], begin, std::min(rows, n - begin));
    }
}

template <class Compute>
void Layers::run_share(const Share &share, std::vector<Rows> &views, size_t &over, Compute compute) const {
    const auto enter = [&](size_t i) { views[static_cast<size_t>(operations_[i].out)].stride = round_up(operations_[i].width, kColumns); };
    for (; over < share.first; ++over) enter(over);
    for (size_t i = share.first; i < share.end; ++i) {
        const Operation &operation = operations_[i];
        enter(i);
        const int64_t begin = share.of == Share::Of::kHeads ? 0 : share.begin;
        const auto rows_of = [&](int64_t index) { return rows_from(views[static_cast<size_t>(index)], index < first_short_ ? begin : 0); };
        if (share.of == Share::Of::kHeads)
            compute(operation, rows_of(operation.in), rows_of(operation.out), share.begin, share.count);
        else if (share.of == Share::Of::kResults)
            complete_rows(operation, rows_of(operation.out), share.count);
        else
            run_operation(operation, rows_of, share.count,
                          [&](const Operation &single, const Rows &in, const Rows &out) { compute(single, in, out, 0, single.heads); });
    }
    over = std::max(over, share.end);
}

template <class RowsOf, class Compute>
void Layers::run_operation(const Operation &operation, const RowsOf &rows_of, int64_t n, Compute compute) const {
    Rows rows = rows_of(operation.out);
    const Rows in = operation.in < 0 ? Rows{} : rows_of(operation.in), residual = operation.residual < 0 ? Rows{} : rows_of(operation.residual);
    if (operation.kind == Kind::kLayerNorm) {
        if (!operation.float_output) rows.values = nullptr;
        if (!operation.quantized_output) rows.quantized = nullptr;
        isa_.rows->layer_norm(operation.norm, in.values, in.stride, rows, n);
        return;
    }
    if (operation.kind == Kind::kPartNorms) {
        run_part_norms(operation, in, rows, n);
        return complete_rows(operation, rows, n);
    }
    if (operation.kind == Kind::kActivation || operation.kind == Kind::kScale || operation.kind == Kind::kGated || operation.kind == Kind::kSum)
        return run_rows(operation, in, residual, rows, n);
    if (operation.kind == Kind::kLinear) {
        const auto compute_layer = [&](const auto &layer) { layer.run(in, n, operation.relu, residual.values, rows.stride, rows.values, rows.stride); };
        operation.linear ? compute_layer(*operation.linear) : compute_layer(*operation.float_linear);
        if (operation.quantized_output) isa_.rows->quantize_rows(rows, rows.stride, operation.qparams, n);
    } else {
        compute(operation, in, rows);
        complete_rows(operation, rows, n);
    }
}

}  // namespace zoo
