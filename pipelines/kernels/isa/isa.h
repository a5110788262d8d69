// The layers as every instruction set sees them. Arithmetic: operators.py (the definition) and reference.py (the same in numpy).
#pragma once
#include <cstddef>
#include <cstdint>

namespace zoo {

constexpr int64_t kColumns = 64;  // table rows, hidden vectors and packed weights come in whole 64 columns
constexpr int64_t kMaxFields = 258;  // so many int8 fit the int16 sum of a column
constexpr int64_t kNumberLimit = 2048;

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// ParallelEmbedding: rows of int8 (stored + 128) summed, numbers added, ReLU, requantized to uint8.
struct Embedding {
    const uint8_t *table;    // [rows, stride]
    int64_t stride;          // bytes a table row: the width padded to whole 64
    int64_t fields, pairs;   // numbers come in pairs
    int32_t shift;
    const int16_t *weight;   // packed, see pack_embedding
    const float *scale, *bias;  // packed likewise, [stride]
    const float *wide;       // [rows] or null
};

// Fully connected: uint8 [n, inputs] to uint8 or float32 [n, outputs].
struct Linear {
    int64_t inputs, outputs;
    const void *weight;      // packed, see Isa::pack_linear
    const int32_t *bias;     // [outputs padded to whole 64]
    const float *scale;      // [outputs padded to whole 64]
    int32_t zero, low;
    bool real;               // float32 results
};

// What a layer makes of inputs that were quantized row by row: y = float(acc) * (scale of the row * scale of the column) + shift of the
// column, its ReLU, plus a residual. `scale` null: the layer as it is above.
struct RowScales {
    const float *scale = nullptr;     // [n]
    const float *shift = nullptr;     // [outputs padded to whole 64]
    const float *residual = nullptr;  // [n, residual_stride] or null; may be the result's own memory
    int64_t residual_stride = 0;
    bool relu = false;
};

// How rows become bytes. scale 0: each row by its own range, and a zero of 0 says that nothing is negative; else clip(rint(x / scale) + zero),
// as ONNX's QuantizeLinear.
struct Levels {
    float scale = 0;
    int32_t zero = 128;
    bool operator==(const Levels &other) const { return scale == other.scale && zero == other.zero; }
};

// Rows as a decoder has them: floats, their bytes with a scale a row, or both. Strides are whole 64s, what pads a row is 0 (byte `zero`).
struct Rows {
    float *real;     // [n, stride] or null
    uint8_t *bytes;  // [n, stride] or null
    float *scale;    // [n]
    int64_t stride;
};

constexpr float kSmallest = 1e-30f;  // rows of smaller values are rows of zeros

// Layer normalization over `width` columns; scale and bias are padded with zeros to whole 64.
struct Norm {
    int64_t width;
    const float *scale, *bias;
    float epsilon;
    Levels levels;
};

// The likeliest of the tokens so far, a row's best first, and the sum of exp(logit - largest), in sixteen parts.
struct Ranking {
    int64_t count;                // wanted of each row
    float *values, *sums, *largest;  // [n, count] [n, 16] [n]
    int32_t *tokens;              // [n, count]
};

using Half = uint16_t;  // a float16's bits

// What attention looks at, floats or halves: keys [width, count rounded up to 16], a column's together, and values [count, stride].
template <class T>
struct Looked {
    const T *keys, *values;
    int64_t count, stride;
};

// The kernels of rowwise.h, as one instruction set has them.
struct RowKernels {
    void (*quantize)(const Rows &rows, int64_t stride, const Levels &, int64_t n);
    void (*norm)(const Norm &, const float *x, int64_t x_stride, const Rows &out, int64_t n);
    // Rounded to the nearest, of two equals the even, and to the largest where it is too large; count: whole sixteens.
    void (*halve)(const float *x, int64_t count, Half *out);
    void (*attend)(const float *q, const Half *const *keys, int64_t count, int64_t heads, int64_t size, float *out);
    // Attention of n queries, all to the same.
    void (*look)(const float *q, int64_t q_stride, int64_t n, const Looked<float> &at, int64_t heads, int64_t size, float *out, int64_t out_stride);
    void (*look_at_halves)(const float *q, int64_t q_stride, int64_t n, const Looked<Half> &at, int64_t heads, int64_t size, float *out,
                           int64_t out_stride);
    void (*rank)(const float *logits, int64_t stride, int64_t first, int64_t count, const Ranking &, int64_t n);
    float (*rank_sum)(const float *sums);
};

// Memory of this thread for one call of a kernel, aligned to cache lines. It comes from here, since a template of the standard library that
// was compiled for one instruction set must not be linked into code for another.
void *kernel_scratch(int64_t bytes);

// Resize along one axis, weights packed by Isa::pack_weights: output i is the weighted sum of the 4 * fours[i] inputs from first[i] on.
struct Resampling {
    const int32_t *first;
    const int32_t *fours;
    const int32_t *weights;  // [outputs][stride]
    int64_t stride;
};

// One instruction set's version of the kernels.
struct Isa {
    const char *name;
    bool (*supported)();
    int64_t lanes;  // int32 lanes of a vector: columns are packed in groups of 4 * lanes, see pack_embedding

    // rows: table row of each field [n + 1, fields], the last one only prefetched; numbers: whole steps [n, 2 * pairs].
    void (*embed)(const Embedding &, const uint32_t *rows, const int16_t *numbers, int64_t n, uint8_t *hidden, int64_t hidden_stride,
                  float *wide, int64_t wide_stride);

    int64_t (*packed_bytes)(int64_t inputs, int64_t outputs);
    // weight int8 [inputs, outputs] -> packed
    void (*pack_linear)(const int8_t *weight, int64_t inputs, int64_t outputs, void *packed);
    // packed, of more than kNarrow outputs -> the weights of one of them, int8 [inputs]
    void (*unpack_column)(const void *packed, int64_t inputs, int64_t column, int8_t *weight);
    // x [n, x_stride], readable up to round_up(inputs, 4) in every row; out uint8 [n, out_stride] or float [n, out_stride]
    void (*linear)(const Linear &, const RowScales &, const uint8_t *x, int64_t x_stride, int64_t n, void *out, int64_t out_stride);

    // four int32 weights, |w| < 2^23, in place -> what resample takes
    void (*pack_weights)(int32_t *four);
    // in [inputs, in_stride], readable up to the last four inputs of every output; out [outputs, out_stride]; width: a multiple of 64
    void (*resample)(const Resampling &, int64_t outputs, const uint8_t *in, int64_t in_stride, int64_t width, uint8_t *out, int64_t out_stride);

    const RowKernels *rows;
};

extern const Isa kPortable;
#ifdef ZOO_AVX2
extern const Isa kAvx2;
#endif
#ifdef ZOO_AVX512
extern const Isa kAvx512;
#endif

constexpr int kWeightBits = 22;  // after the point of a resizing weight: Pillow's PRECISION_BITS

// Layers of few outputs are a dot product per output instead of a panel of 64 columns.
constexpr int64_t kNarrow = 8;

}  // namespace zoo
