// The kernels of quantized embedding tables: rows of 8, 4 or 2 bits with a scale and a bias each, pooled. Written once and lowered for each instruction
// set; recommenders/tables/quantized_rows.py defines what they compute.
#pragma once
#include <cstdint>

namespace zoo {

constexpr int64_t kRowsAhead = 32;  // rows that are fetched ahead, into L2: L1 waits for few lines at a time

// Rows of a table that a sample pools: out = float(sum_l scale_l codes_l) scale_unit + float(sum_l bias_l) bias_unit, sums in int32; or the maximum over l.
struct QuantizedRows {
    const uint8_t *table;  // [rows, stride]: codes, scale and bias (int16) of a row; 64 bytes behind the last row may be read
    int64_t stride, width, count;
    int bits;
    float scale_unit, bias_unit;
    bool far;  // rows are fetched ahead
    bool maximum = false;  // int16 codes of the maximum, not of the sum
};

struct TableKernels {
    // rows [n, count], kRowsAhead further ones behind them; factors [n] of the samples' units, or null
    void (*pool)(const QuantizedRows &, const uint32_t *rows, const float *factors, int64_t n, float *out, int64_t out_stride);
    // The same as int16 codes, clipped to kCodeLimit, ties to even; up to 32 more than a row's width are written.
    void (*pool_codes)(const QuantizedRows &, const uint32_t *rows, const float *factors, int64_t n, int16_t *out, int64_t out_stride);
};

}  // namespace zoo
