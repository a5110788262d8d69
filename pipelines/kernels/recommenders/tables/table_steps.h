// Lookups of quantized rows as steps of click programs.
#pragma once
#include "recommenders/steps/field_steps.h"
#include "recommenders/tables/table_kernels.h"

namespace zoo {
namespace {

class TableSteps : public FieldSteps {
  public:
    using FieldSteps::FieldSteps;

    // table: uint8, flat; `position`: where the codes of the pooled rows go.
    void quantized_gather(int out, int64_t position, Array table, int64_t height, int64_t width, int bits, float scale_unit, float bias_unit, int64_t column,
                          int64_t count, const std::string &pool, float factor, int64_t mean) {
        const Slot to = slot(out, Kind::kWords, "quantized_gather");
        const float units = mean < 0 ? factor : 1.0f;
        QuantizedRows r = quantized_rows(table, height, width, bits, pool == "max" ? 1 : count, scale_unit * units, bias_unit * units);
        r.count = count, r.maximum = pool == "max";
        require(r.table && count >= 1 && count <= kWidest && position >= 0 && position + width <= to.width &&
                    (pool == "" || pool == "sum" || pool == "mean" || pool == "max") &&
                    (pool == "mean") == (mean >= 0) && mean < means_ && (pool != "" || count == 1) && column >= 0 && column + count <= columns(),
                "quantized_gather");
        for (int64_t c = column; c < column + count; ++c)
            require(rows_[static_cast<size_t>(c)] >= 1 && rows_[static_cast<size_t>(c)] <= height, "quantized_gather");
        const auto *kernels = isa_.tables;
        const int64_t columns = this->columns(), means = means_;
        const Reach list = reach_of(reach_ids_, column, count);
        const auto *cached = cached_tables_.add(r.table, r.stride, column, count);
        if (cached) r.table = static_cast<const uint8_t *>(cached->memory());
        add({}, {{to, position, width}}, mean < 0 ? list : zoo::joined(list, reach_means_[static_cast<size_t>(mean)]), [=](const Block &b) {
            static thread_local Buffer<uint32_t> chosen;
            const uint32_t *rows = cached ? cached->places_of(b.place) : nullptr;
            if (!rows) {
                chosen.reserve(b.n * count + kRowsAhead);
                uint32_t *next = chosen.data();
                for (int64_t s = 0; s < b.n; ++s) next = std::copy_n(b.ids + s * columns + column, count, next);
                std::fill_n(next, kRowsAhead, next[-1]);
                rows = chosen.data();
            }
            fetch_first(r, rows, b.n * count);
            float factors[kSamples];
            for (int64_t s = 0; mean >= 0 && s < b.n; ++s) {
                const float scaled = b.means[s * means + mean] * factor;
                factors[s] = scaled - scaled == 0 ? scaled : 0;  // infinite, or NaN
            }
            kernels->pool_codes(r, rows, mean < 0 ? nullptr : factors, b.n, b.data<int16_t>(to) + position, to.stride);
        });
        kept_.push_back(std::move(table));
    }

    void code_bytes(int x, int64_t first, int out, int64_t position, int64_t width) {
        const Slot from = slot(x, Kind::kWords, "code_bytes"), to = slot(out, Kind::kBytes, "code_bytes");
        require(first >= 0 && position >= 0 && width >= 1 && first + width <= from.width && position + width <= to.width, "code_bytes");
        const auto *kernels = &kernels_;
        add_columns({from, first, width}, {to, position, width}, [=](const Block &b, int64_t begin, int64_t count) {
            kernels->code_bytes(b.data<int16_t>(from) + first + begin, from.stride, count, b.n, b.data<uint8_t>(to) + position + begin, to.stride);
        });
    }

    void column_bytes(int x, int64_t first, int out, const Array &factor) {
        const Slot from = slot(x, Kind::kWords, "column_bytes"), to = slot(out, Kind::kBytes, "column_bytes");
        require(first >= 0 && first + to.width <= from.width, "column_bytes");
        const auto factors = padded(factor, to.width, "column_bytes");
        const auto *kernels = &kernels_;
        add_columns({from, first, to.width}, whole(to), [=](const Block &b, int64_t begin, int64_t count) {
            kernels->column_bytes(b.data<int16_t>(from) + first + begin, from.stride, factors->data() + begin, count, b.n,
                                  b.data<uint8_t>(to) + begin, to.stride);
        });
    }

  protected:
    static constexpr int64_t kGroup = 16;  // columns that a kernel may write together

    // [begin, end) of the columns, in whole groups: those before and behind are the same in all samples of a call. All columns where none differs.
    std::pair<int64_t, int64_t> differing(const Span &span) const {
        int64_t begin = span.width, end = 0;
        for (int64_t column = 0; column < span.width; column += kGroup)
            if (const int64_t count = std::min(kGroup, span.width - column); reach_of(Span{span.slot, span.first + column, count}) != Reach::kCall)
                begin = std::min(begin, column), end = column + count;
        return begin < end ? std::pair(begin, end) : std::pair(int64_t{0}, span.width);
    }

    // Adds a step that computes every column from one, `run(block, first, count)`: the columns before and behind the differing ones once a call.
    template <class Run> void add_columns(const Span &from, const Span &to, const Run &run) {
        const auto [begin, end] = differing(from);
        const auto part = [&](int64_t first, int64_t last) {
            const Span reads{from.slot, from.first + first, last - first}, writes{to.slot, to.first + first, last - first};
            const auto columns = [=](const Block &block) { run(block, first, last - first); };
            if (first == last) return;
            if (first == begin && last - first < from.width)
                add_to_samples({reads}, {writes}, false, columns);
            else
                add({reads}, {writes}, std::nullopt, columns);
        };
        part(0, begin), part(begin, end), part(end, from.width);
    }

    // `gather` of a table of bytes, a row a sample.
    void gather_bytes(int out, int64_t position, Array table, int64_t rows, int64_t stride, int64_t width, int64_t column, int64_t count,
                      const std::string &pool) {
        const Slot to = slot(out, Kind::kBytes, "gather");
        const auto *data = data_of<uint8_t>(table, "table", 1);
        require(rows >= 1 && width >= 1 && width <= stride && stride <= kWidest && rows * stride <= static_cast<int64_t>(table.shape(0)) && position >= 0 &&
                    position + width <= to.width && pool == "" && count == 1 && column >= 0 && column < columns() &&
                    rows_[static_cast<size_t>(column)] >= 1 && rows_[static_cast<size_t>(column)] <= rows,
                "gather");
        const auto *kernels = &kernels_;
        const int64_t columns = this->columns();
        add({}, {{to, position, width}}, reach_ids_[static_cast<size_t>(column)], [=](const Block &b) {
            kernels->gather_bytes(data, stride, width, b.ids + column, columns, b.n, b.data<uint8_t>(to) + position, to.stride);
        });
        kept_.push_back(std::move(table));
    }
};

}  // namespace
}  // namespace zoo
