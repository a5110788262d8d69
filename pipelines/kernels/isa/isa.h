// The interface between the layers and their kernels, one table of functions (`Isa`) an instruction set. The arithmetic is defined in
// recommenders/steps/, images/steps/, images/operators.py and transformer/operations/, with the same in numpy.
#pragma once
#include <cstddef>
#include <cstdint>

#include "isa/late_interaction/kernels.h"
#include "isa/retrieval/kernels.h"
#include "isa/sequences/kernels.h"
#include "isa/tables/kernels.h"

namespace zoo {

constexpr int64_t kColumns = 64;  // table rows, hidden vectors and packed weights come in whole 64 columns
constexpr int64_t kMaxFields = 258;  // so many int8 fit the int16 sum of a column
constexpr float kCodeLimit = 4095.0f;  // int16 codes of click programs are quantized to -4095 to 4095

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Fully connected: uint8 [n, inputs] to uint8 or float32 [n, outputs].
struct Linear {
    int64_t inputs, outputs;
    const void *weight;      // packed, see Isa::pack_linear
    const int32_t *bias;     // [outputs padded to whole 64]
    const float *scale;      // [outputs padded to whole 64]
    int32_t zero_point, low;
    bool float_output;       // float32 results, not requantized to uint8
};

// The epilogue of a layer whose input has a scale a row: y = float(acc) * (row scale * column scale) + bias, ReLU, plus a residual.
// `scale` null: the epilogue of `Linear` itself, without these.
struct RowEpilogue {
    const float *scale = nullptr;     // [n]
    const float *bias = nullptr;      // [outputs padded to whole 64]
    const float *residual = nullptr;  // [n, residual_stride] or null; may be the result's own memory
    int64_t residual_stride = 0;
    bool relu = false;
};

// The same of float32 [n, inputs] with float weights, in panels of 64 columns: [outputs / 64][inputs][64].
struct FloatLinear {
    int64_t inputs, outputs;     // outputs: whole 64
    const float *weight;
    const float *scale, *bias;   // [outputs]
};

// Quantization of activations to uint8. Static: clip(rint(x / scale) + zero_point), as ONNX's QuantizeLinear. scale 0: dynamic, each row
// by its own range, symmetric around the zero point 128, or with zero point 0 where nothing is negative.
struct QParams {
    float scale = 0;
    int32_t zero_point = 128;
    bool operator==(const QParams &other) const { return scale == other.scale && zero_point == other.zero_point; }
};

// Activations: float32 rows, the same quantized to uint8 with a scale a row, or both. Strides are whole 64s (of `values` alone, whole 16s);
// rows are padded with 0 (quantized: the zero point).
struct Rows {
    float *values;       // [n, stride] or null
    uint8_t *quantized;  // [n, stride] or null
    float *scale;        // [n]
    int64_t stride;
};

constexpr float kSmallestAbsMax = 1e-30f;  // a row whose max|x| is smaller counts as a row of zeros

// Layer normalization over `width` columns, or, without a bias, RMS normalization; scale and bias are padded with zeros to whole 64.
struct LayerNorm {
    int64_t width;
    const float *scale, *bias;
    float epsilon;
    QParams qparams;  // of the result
};

// Rows of bytes: clip(rint(x factor) + zero, 0, 255) of floats x, NaN as 0. stride: whole 16.
struct ByteRows {
    uint8_t *data;  // [n, stride]
    int64_t stride;
    float factor;
    int32_t zero;
};

// A running top-k of logits, a row's largest first, and the state of an online softmax: the maximum, and sum exp(logit - maximum) in
// sixteen lanes.
struct TopK {
    int64_t k;
    float *values, *exp_sums, *maxima;  // [n, k], [n, 16], [n]
    int32_t *tokens;                    // [n, k]
};

using Float16 = uint16_t;  // the bits of an IEEE half

// Keys and values of attention, float32 or float16: keys transposed, [width, count rounded up to 16], values [count, stride], those of a
// head `next` after those of the head before. ahead: keys and values that are read next, behind each other, which come into L2, or null.
template <class T>
struct KeysValues {
    const T *keys, *values;
    int64_t count, stride, next;
    const T *ahead = nullptr;
};

enum class Activation { kNone, kSwish, kGelu, kGeluTanh, kTanh, kSigmoid, kRelu };

constexpr float kLog2E = 1.44269504f;

// Self-attention in integers, `QuantizedAttention` of transformer/operations: rows of `heads` queries, then `key_heads` keys, then as many
// values, of `size` columns each. Pointers are null where there is no such thing.
struct QuantizedAttention {
    int64_t heads, key_heads, size;
    int64_t before, after;                 // so many keys before and after its own a query attends to
    const float *bias;                     // [heads, bias_stride], the middle of each row for the query's own key
    int64_t bias_stride;
    const float *query_norm, *key_norm;    // [size], of RMS normalization
    float epsilon;
    const float *cos, *sin;                // [positions, turned]
    int64_t turned;                        // columns of a half that rotary positions turn
    struct Positions {                     // codes and scales of relative positions, see `Disentangled`
        const int8_t *codes;               // [heads, rows, size]
        const float *scale;                // [heads, size]
    } to_position, to_content;
    const int32_t *rows;                   // their row by distance, the middle for the query's own key
    int64_t row_count;
    const float *added = nullptr;          // to the scores of one head, times log2(e): [queries, keys to whole 16], -inf behind the keys; in place of a bias
    const float *keys = nullptr;           // [n, key_stride]: [key | value], null: those behind the queries
    int64_t key_stride = 0;
    bool centered = false;                 // whether the codes of keys are of their distances to the middle of each column
};

// The kernels of vectors/row_kernels.h, lowered for one instruction set.
struct RowKernels {
    void (*quantize_rows)(const Rows &rows, int64_t stride, const QParams &, int64_t n);
    void (*layer_norm)(const LayerNorm &, const float *x, int64_t x_stride, const Rows &out, int64_t n);
    void (*layer_norm_bytes)(const LayerNorm &, const float *x, int64_t x_stride, const ByteRows &out, int64_t n);  // with a bias
    // y = (sum_k x_k weight_k) scale + bias, summed in order; of the epilogue ReLU and residual are used.
    void (*float_linear)(const FloatLinear &, const RowEpilogue &, const float *x, int64_t x_stride, int64_t n, float *out, int64_t out_stride);
    // To the nearest, ties to even, clipped to the largest float16; count: whole sixteens.
    void (*to_float16)(const float *x, int64_t count, Float16 *out);
    // One query over a KV cache: keys[t] points to the key of position t, its value behind it. bias [heads, reach]: added to the scores of
    // the newest `reach` positions, the query's own last; the first one to those before, too; or null. next: keys that are read next, which
    // come into L2.
    void (*self_attention)(const float *q, const Float16 *const *keys, int64_t count, const Float16 *const *next, int64_t next_count,
                           int64_t heads, int64_t size, const float *bias, int64_t reach, float *out);
    // n queries over the same keys and values: self-attention of an encoder, cross-attention of a decoder.
    void (*attention)(const float *q, int64_t q_stride, int64_t n, const KeysValues<float> &, int64_t heads, int64_t size, float *out,
                      int64_t out_stride);
    void (*attention_float16)(const float *q, int64_t q_stride, int64_t n, const KeysValues<Float16> &, int64_t heads, int64_t size,
                              float *out, int64_t out_stride);
    // n queries, the newest first, each over its own key and value and those behind it.
    void (*causal_attention)(const float *q, int64_t q_stride, int64_t n, const KeysValues<float> &, int64_t heads, int64_t size, float *out,
                             int64_t out_stride);
    // Of a text of n tokens, over the first `keys` of them.
    void (*quantized_attention)(const QuantizedAttention &, const float *x, int64_t stride, int64_t n, int64_t keys, float *out,
                                int64_t out_stride);
    // Updates `TopK` by logits [n, stride] of tokens [first, first + count).
    void (*top_k)(const float *logits, int64_t stride, int64_t first, int64_t count, const TopK &, int64_t n);
    float (*sum_lanes)(const float *sums);
    // One step of the simpler simple recurrent unit: gates [2 width], of the forget gate and of the value; residual or null; width:
    // whole sixteens. after = sigmoid(forget) before + (1 - sigmoid(forget)) value; out = relu(after) + residual.
    void (*recurrence)(const float *gates, int64_t width, const float *before, const float *residual, float *after, float *out);
    // A row of whole sixteens.
    void (*activate)(Activation, const float *x, int64_t count, float *out);
    // activation(gate) up
    void (*activate_gate)(Activation, const float *gate, const float *up, int64_t count, float *out);
};

// Scratch memory of this thread for one call of a kernel, aligned to cache lines. It is allocated in dispatch.cpp, since a template of the
// standard library that was compiled for one instruction set must not be linked into code for another.
void *kernel_scratch(int64_t bytes);

// Resize along one axis, weights packed by Isa::pack_weights: output i is the weighted sum of 4 * tap_groups[i] inputs from first[i] on.
struct Resampling {
    const int32_t *first;
    const int32_t *tap_groups;
    const int32_t *weights;  // [outputs][stride]
    int64_t stride;
};

// The first layer of a click program: sums of int8 table rows, stored as uint8, + 128, and an int16 matrix product.
struct MixedLinear {
    int64_t fields, pairs, stride;  // inputs come in pairs; columns in whole 64
    int32_t shift;
    const uint8_t *table;       // [rows, stride], or null with no fields
    const int16_t *wide_table;  // the same as int16, in place of `table`
    const int16_t *weight;      // [stride / (4 * lanes)][pairs][4 * lanes][2], lanes of ClickKernels
    const float *scale, *bias;  // [stride]
    bool sparse;                // inputs come out of a ReLU
    const int32_t *chosen;      // the pairs that are read, [chosen_count], or null for all of them
    int64_t chosen_count;
    const int32_t *shared;      // [stride] sums that all rows have in common, or null
    const int32_t *const *own;  // [stride] further sums of every row, or null
    const float *added;         // [n, stride] added to the results, or null
    int64_t ahead;              // blocks of four samples between a row's fetch into L2 and its use, 1 or more
};

// Where `width` columns of a MixedLinear go, from the one before's `end`, a whole 64, on.
enum class Kind { kBytes, kWords, kFloats, kSums };  // kSums: int32, neither scaled nor with a bias
struct Columns {
    Kind kind;
    int64_t width, end;
    void *out;  // [n, stride], whole vectors of each row are written
    int64_t stride;
    bool relu;
};

enum class Pool { kNone, kSum, kMean, kMax };

// Rows of an int16 table, one or several a sample that are pooled.
struct WordRows {
    const int16_t *table;  // readable for 32 more after the last row
    int64_t stride, width, count;
    Pool pool;
    float factor;  // of a sum
    bool far;      // rows are fetched ahead
};

// One layer of a cross network, in units of the codes k of x_0: x_l = k g_l. Arrays are padded to whole 64.
struct Cross {
    int64_t width;
    bool first;            // g_0 is 1
    float factor;          // of the codes of x_l
    const float *factors;  // [width] of the bytes of x_l, or null
    const float *weight;   // [width] or null
};

// Multi-head attention of every field of a sample to all of them, see `FieldAttention` in steps/fields.py.
struct FieldAttention {
    int64_t fields, inputs, heads, size, outputs;  // outputs: 3 or 4 * heads * size, with the residual or without
    const int32_t *begins;      // [fields] first code of every field, or null: field f has the codes f, f + fields, ..
    const int32_t *weight;  // [outputs, pairs of inputs]
    const float *scale, *bias;  // [outputs]
    float score, most, value;
    bool relu;
};

// The kernels of vectors/click_kernels.h and vectors/field_kernels.h. Rows of int16 may be read and written for 32 more than their width, and float rows come in whole 64.
struct ClickKernels {
    int64_t lanes;
    void (*mixed)(const MixedLinear &, const uint32_t *rows, const int16_t *x, int64_t x_stride, int64_t n, const Columns *columns);
    void (*gather)(const WordRows &, const uint32_t *ids, int64_t ids_stride, const float *means, int64_t means_stride, int64_t n,
                   int16_t *out, int64_t out_stride);
    // `width` of the numbers [n, x_stride], chosen and scaled; columns and scale are readable for whole 64
    void (*numbers)(const float *x, int64_t x_stride, const int32_t *columns, const float *scale, int64_t width, int64_t n, int16_t *out,
                    int64_t out_stride);
    void (*quantize)(const float *x, int64_t x_stride, float factor, float low, int64_t width, int64_t n, int16_t *out, int64_t out_stride);
    // `width` bytes of the rows of a table [rows, stride] that the ids choose
    void (*gather_bytes)(const uint8_t *table, int64_t stride, int64_t width, const uint32_t *ids, int64_t ids_stride, int64_t n, uint8_t *out,
                         int64_t out_stride);
    // the eight higher bits of codes: clip(((x_j + 16) >> 5) + 128, 0, 255)
    void (*code_bytes)(const int16_t *x, int64_t x_stride, int64_t width, int64_t n, uint8_t *out, int64_t out_stride);
    // codes by column: clip(rint(x_j factor_j), -128, 127) + 128; whole 64 of factors are read and of bytes written
    void (*column_bytes)(const int16_t *x, int64_t x_stride, const float *factor, int64_t width, int64_t n, uint8_t *out, int64_t out_stride);
    // 0.5 scale^2 (|sum_f k_f|^2 - sum_f |k_f|^2) of the int16 vectors that start at `begins`
    void (*factorization)(const int16_t *x, int64_t x_stride, const int32_t *begins, int64_t fields, int64_t width, float scale, int64_t n,
                          float *out, int64_t out_stride);
    void (*cross)(const Cross &, const int16_t *x, int64_t x_stride, const float *u, int64_t u_stride, float *g, int64_t stride, int64_t n, int16_t *out,
                  int64_t out_stride, uint8_t *bytes, int64_t bytes_stride, float *total, int64_t total_stride);
    // dots of the int16 vectors that start at `begins`, i > j, times `factor` each (readable for 16 more), as int16
    void (*dots)(const int16_t *x, int64_t x_stride, const int32_t *begins, int64_t vectors, int64_t width, const float *factor, int64_t n, int16_t *out,
                 int64_t out_stride);
    // the same where samples have all vectors in common but `own`, whose factors by the other vector are rows of whole 16
    void (*dots_of)(const int16_t *x, int64_t x_stride, const int32_t *begins, int64_t vectors, int64_t width, const float *factor, const int32_t *own,
                    int64_t own_count, const float *own_factor, int64_t n, int16_t *out, int64_t out_stride);
    // sum_j x_j weight_j
    void (*weighted)(const int16_t *x, int64_t x_stride, const float *weight, int64_t width, int64_t n, float *out, int64_t out_stride);
    void (*normalize)(const float *x, int64_t stride, int64_t width, float epsilon, float least, bool relu, int64_t n, float *out);
    // x_j, times slope_j where it is below 0; slopes are readable up to the next whole vector
    void (*leaky)(const float *x, int64_t stride, const float *slope, int64_t width, int64_t n, float *out);
    // tanh(x_j)
    void (*tanh)(const float *x, int64_t stride, int64_t width, int64_t n, float *out);
    // slices of x of this width, each times its part of the softmax of the gates
    void (*mixture)(const float *x, int64_t stride, const float *gates, int64_t gates_stride, int64_t experts, int64_t width, int64_t n,
                    float *out);
    // sums of the rows [n, stride] of `experts`, each times its part of the softmax of the gates
    void (*gated_sum)(const float *const *x, int64_t stride, const float *gates, int64_t gates_stride, int64_t experts, int64_t width,
                      bool relu, int64_t n, float *out);
    void (*product)(const float *x, const float *y, int64_t stride, int64_t width, int64_t n, float *out, int64_t out_stride);
    // scale sum_j x_j y_j
    void (*code_product)(const float *x, int64_t x_stride, const int16_t *y, int64_t y_stride, int64_t width, float scale, int64_t n,
                         float *out, int64_t out_stride);
    // x_j sigmoid(gates_j)
    void (*sigmoid_product)(const float *x, const float *gates, int64_t stride, int64_t width, int64_t n, float *out);
    // x_j sigmoid(gates_j) as codes, if there is `out`, and times factors as in column_bytes, if there is `bytes`
    void (*gate_codes)(const int16_t *x, int64_t x_stride, const float *gates, int64_t gates_stride, const float *curve, float scale,
                       const float *factors, int64_t width, int64_t n, int16_t *out, int64_t out_stride, uint8_t *bytes, int64_t bytes_stride);
    void (*field_attention)(const FieldAttention &, const int16_t *x, int64_t x_stride, int64_t n, int16_t *out, int64_t out_stride);
};

// Bytes from sums of products: clip(rint(float(sum + bias) * scale) + zero, low, high). Bias and scale are packed with the weights.
struct Requantization {
    int32_t zero, low, high;
};

// An activation from sums to bytes in integers of 16 bits, see `ActivationTable` of images/steps/activation.py.
struct ActivationTable {
    static constexpr int64_t kSegments = 64;
    int32_t factor, zero;  // factor / 2^15 steps of the bytes is 1, and their zero point
    int32_t shift, limit;  // bits of a segment, and the largest magnitude in the segments
    int16_t starts[kSegments + 1];
};

// The quantized sum of two tensors of bytes: clip(rint(fma(a, a_ratio, fma(b, b_ratio, fixed))), low, high).
struct ByteSum {
    float a_ratio, b_ratio, fixed;
    int32_t low, high;
};

// A quantized product of bytes, see `Product` in images/steps/elementwise.py.
struct ByteProduct {
    int32_t x_zero, gate_zero;
    float x_scale, gate_scale, scale;
    int32_t zero, low, high;
};

// Pixels one after the other, each `pitch` elements behind the one before it.
template <class T>
struct PixelRow {
    T *data;
    int64_t pitch;
};

// A linear layer of each of `groups` runs of a pixel's floats: weight [outputs, inputs], bias [outputs].
struct GroupLinear {
    int64_t groups, inputs, outputs;
    const float *weight, *bias;
};

// A convolution, of which every output pixel reads a window: `stretches` of `stretch` bytes, whole fours, each at its offset.
struct Dense {
    int64_t stretches, stretch, outputs;  // outputs: whole 16
    const int64_t *offsets;
    const void *packed;                   // see ImageKernels::pack_dense
    Requantization bytes;
    const ByteSum *sum;                   // null, or the bytes are summed with others
    bool other_first;                     // these are a
    const ActivationTable *activation;    // null, or it makes the bytes, by float(sum + bias) * scale as 16 bits
    const void *gains = nullptr;          // null, or the activation's words are multiplied by gain / 2^15: packed as the biases of no inputs
};

// A depthwise convolution: taps in groups of four, each tap at its offset from the window's pointer.
struct Depthwise {
    int64_t channels, groups;    // channels: whole 16
    const int64_t *offsets;      // [4 * groups]
    int64_t x_step, out_step;    // bytes from one output pixel's window to the next, and from pixel to pixel
    int64_t x_row, out_row;      // the same of rows
    int64_t side;                // 3: of a window whose groups are columns (the fourth tap has weight 0); 5: of one whose groups are the first
                                 // four rows of its columns, those of four columns of the last row, and the last tap; or 0
    const void *packed;          // see ImageKernels::pack_depthwise
    Requantization bytes;
};

// Windows of a pool are cut at the borders: rows [top, bottom) and columns [left, right) of x, row by row.
struct Window {
    const uint8_t *x;
    int64_t rows, columns, row_pitch, pixel_pitch;
};

struct Mean {
    float x_scale, count, scale, zero;
    int32_t x_zero;
};

// A depthwise convolution of float32 pixels: bias + sum of x weight, row after row of the window. Distances are in floats.
struct FloatDepthwise {
    int64_t channels, kernel_rows, kernel_columns;  // channels: whole 16, those of a pixel of `out`
    const float *weight, *bias;                     // [kernel_rows, kernel_columns, channels], [channels]
    int64_t tap_row, tap_column;                    // from tap to tap of a window
    int64_t x_row, x_step, out_row;                 // from window to window, down and across, and from row to row of the result
};

// A convolution of float32 pixels, of which every output pixel reads a window: bias + sum of x weight, in order, plus another tensor, within bounds.
struct FloatConvolution {
    int64_t inputs, outputs;   // of a window; outputs: whole 16
    const int64_t *offsets;    // [inputs] of floats, from the first one of a window
    const void *weight;        // [outputs / 16, inputs, 16]: floats or, where there is a scale, int8
    const float *bias;         // [outputs]
    float low, high;
    const float *scale = nullptr;  // [outputs], or null
};

// The kernels of image classifiers (isa/images/). Pixels have whole 16 bytes, of which those behind the channels hold anything; up to 64 bytes behind
// the last pixel of a tensor may be read.
struct ImageKernels {
    int64_t (*dense_bytes)(int64_t inputs, int64_t outputs);
    // weight int8 [inputs, outputs], bias, scale [outputs], outputs whole 16 -> packed
    void (*pack_dense)(const int8_t *weight, const int32_t *bias, const float *scale, int64_t inputs, int64_t outputs, void *packed);
    // n pixels: in and out point to the window and to the bytes of each, others to the bytes to sum with
    void (*dense)(const Dense &, const uint8_t *const *in, uint8_t *const *out, const uint8_t *const *others, int64_t n);
    // the same as float(sum + bias) * scale, plus the floats at `added`, if there are any
    void (*dense_floats)(const Dense &, const uint8_t *const *in, float *const *out, const float *const *added, int64_t n);

    int64_t (*depthwise_bytes)(int64_t groups, int64_t channels);
    // weight int8 [4 * groups, channels], bias, scale [channels], channels whole 16 -> packed
    void (*pack_depthwise)(const int8_t *weight, const int32_t *bias, const float *scale, int64_t groups, int64_t channels, void *packed);
    // rows x n pixels, x: the first window
    void (*depthwise)(const Depthwise &, const uint8_t *x, uint8_t *out, int64_t rows, int64_t n);

    void (*sum)(const ByteSum &, const uint8_t *a, const uint8_t *b, uint8_t *out, int64_t count);
    // channels, count: whole 16; a gate of pitch 0 is that of all pixels
    void (*product)(const ByteProduct &, const PixelRow<const uint8_t> &x, const PixelRow<const uint8_t> &gate, const PixelRow<uint8_t> &out,
                    int64_t pixels, int64_t channels);
    void (*max_pool)(const Window &, uint8_t *out, int64_t count);
    void (*mean)(const Window &, const Mean &, uint8_t *out, int64_t count);
    void (*global_mean)(const Window &, int32_t x_zero, float scale, int32_t zero, uint8_t *out, int64_t count);
    // clip(rint(x / scale) + zero, 0, 255), NaN as 0
    void (*quantize)(const float *x, float scale, int32_t zero, int64_t n, uint8_t *out);
    // the same of x factor, in place of x / scale
    void (*quantize_floats)(const float *x, float factor, int32_t zero, int64_t n, uint8_t *out);
    // three planes of n bytes and a constant, interleaved
    void (*interleave)(const uint8_t *const *planes, uint8_t fill, int64_t n, uint8_t *out);
    // table[each of n bytes]
    void (*lookup)(const uint8_t *table, const uint8_t *x, uint8_t *out, int64_t n);
    // the same of rows of n bytes each, whole 16, as floats
    void (*lookup_floats)(const float *table, const PixelRow<const uint8_t> &x, const PixelRow<float> &out, int64_t rows, int64_t n);
    // the addresses of n pixels, each `step` bytes behind the one before it; there is room for whole eights
    void (*list_pixels)(const void *first, int64_t step, int64_t n, void *addresses);
    // `rounds` of exact products in registers alone, which no kernel outruns: returns how many products they were
    int64_t (*products)(int64_t rounds);

    // float(x - zero) * scale
    void (*dequantize)(const uint8_t *x, float scale, int32_t zero, int64_t n, float *out);
    void (*add_floats)(const float *a, const float *b, int64_t n, float *out);
    // x gain + bias
    void (*scale_floats)(const float *x, const float *gain, const float *bias, int64_t n, float *out);
    // rows x width pixels, x: the first window
    void (*float_depthwise)(const FloatDepthwise &, const float *x, float *out, int64_t rows, int64_t width);
    // n pixels: in and out point to the window and to the results of each, added to what is added to them, if there is anything
    void (*float_convolution)(const FloatConvolution &, const float *const *in, float *const *out, const float *const *added, int64_t n);
    void (*multiply_floats)(const float *a, const float *b, int64_t n, float *out);
    // sum over rows x of x weight, in order; n: whole 16
    void (*weigh_floats)(const float *const *xs, const float *weights, int64_t rows, int64_t n, float *out);
    // out + (x - mean)^2
    void (*add_squares)(const float *x, const float *mean, int64_t n, float *out);
    // exp(x - max) / sum over each of `groups` runs of `size` floats of n pixels; pitches in floats
    void (*softmax)(const float *x, int64_t x_pitch, int64_t groups, int64_t size, int64_t n, float *out, int64_t out_pitch);
    // of each of `groups` runs of `inputs` floats of n pixels: their products with weight [outputs, inputs], plus bias [outputs]
    void (*group_linear)(const GroupLinear &, const PixelRow<const float> &x, const PixelRow<float> &out, int64_t n);
};

// One instruction set's version of the kernels.
struct Isa {
    const char *name;
    const char *needs;     // of a CPU, for people
    bool vnni;             // products of bytes are summed in 32 bits by one instruction
    int64_t vector_bits;
    bool listed = true;    // else it runs only where it is asked for by name
    bool (*supported)();

    int64_t (*packed_bytes)(int64_t inputs, int64_t outputs);
    // weight int8 [inputs, outputs] -> packed
    void (*pack_linear)(const int8_t *weight, int64_t inputs, int64_t outputs, void *packed);
    // packed, of more than kNarrow outputs -> the weights of one of them, int8 [inputs]
    void (*unpack_column)(const void *packed, int64_t inputs, int64_t column, int8_t *weight);
    // packed, of more than kNarrow outputs -> the same of `count` of them, padded with zeros to whole 64
    void (*gather_columns)(const void *packed, int64_t inputs, const int32_t *columns, int64_t count, void *gathered);
    // x [n, x_stride], readable up to round_up(inputs, 4) in every row; out uint8 [n, out_stride] or float [n, out_stride]
    void (*linear)(const Linear &, const RowEpilogue &, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride);

    // four int32 weights, |w| < 2^23, in place -> what resample takes
    void (*pack_weights)(int32_t *four);
    // in [inputs, in_stride], readable up to the last four inputs of every output; out [outputs, out_stride]; width: a multiple of 64
    void (*resample)(const Resampling &, int64_t outputs, const uint8_t *in, int64_t in_stride, int64_t width, uint8_t *out,
                     int64_t out_stride);

    const RowKernels *rows;
    const ClickKernels *clicks;
    const ImageKernels *images;
    const TableKernels *tables;
    const SequenceKernels *sequences;
    const LateInteractionKernels *late_interaction;
    const RetrievalKernels *retrieval;
};

#ifdef ZOO_SET
namespace ZOO_SET {  // the instruction set that this file is compiled for, named after its folder
extern const Isa kIsa;
extern const RowKernels kRows;
extern const ClickKernels kClicks;
extern const ImageKernels kImages;
extern const TableKernels kTables;
extern const SequenceKernels kSequences;
extern const LateInteractionKernels kLateInteraction;
extern const RetrievalKernels kRetrieval;
}  // namespace ZOO_SET
#endif

constexpr int kWeightBits = 22;  // fractional bits of a resampling weight: Pillow's PRECISION_BITS

// Layers of few outputs are a dot product per output instead of a panel of 64 columns.
constexpr int64_t kNarrow = 8;

}  // namespace zoo
