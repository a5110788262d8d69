// The checks of a table of quantized rows.
#pragma once
#include <algorithm>

#include "isa/arrays.h"
#include "isa/tables/kernels.h"

namespace zoo {

// The kernels' view of a table, uint8 [rows * stride + slack], or one without rows where its sizes do not fit.
inline QuantizedRows quantized_rows(const Array &table, int64_t rows, int64_t width, int bits, int64_t count, float scale_unit,
                                    float bias_unit) {
    constexpr int64_t kSlack = 64, kMost = int64_t{1} << 20, kNear = 1 << 18, kMostScale = 32639;  // kNear: bytes that stay in L2
    const auto *data = data_of<uint8_t>(table, "table", 1);
    const bool sizes = rows >= 1 && rows <= INT32_MAX && width >= 1 && width <= kMost && (bits == 8 || bits == 4 || bits == 2) && count >= 1 && count <= kMost;
    if (!sizes || count * ((1 << bits) - 1) * kMostScale > INT32_MAX) return {};
    const int64_t entries = 128 / bits, tail = width % entries, whole = (width - tail) * bits / 8;
    const int64_t codes = bits == 8 ? width : whole + (tail ? std::max<int64_t>(round_up(tail, 16) * bits / 8, 4) : 0);
    const int64_t rounded = bits == 2 && tail > 32 ? whole + 16 : codes;
    const int64_t stride = rounded + 4;
    if (static_cast<int64_t>(table.shape(0)) < rows * stride + kSlack) return {};
    return {data, stride, width, count, bits, scale_unit, bias_unit, rows * stride > kNear, false};
}

// Brings the first rows of a table into L2; the kernels fetch those behind them.
inline void fetch_first(const QuantizedRows &r, const uint32_t *rows, int64_t count) {
    if (!r.far) return;
    for (int64_t i = 0; i < std::min(kRowsAhead, count); ++i) {
        const uint8_t *row = r.table + rows[i] * r.stride;
        for (int64_t offset = 0; offset < r.stride - 1; offset += 64) __builtin_prefetch(row + offset, 0, 2);
        __builtin_prefetch(row + r.stride - 1, 0, 2);
    }
}

}  // namespace zoo
