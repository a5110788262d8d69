// The kernels of sequences of click programs: target attention, Dice, and the layers of small transformers. Written once and lowered for each instruction set;
// recommenders/steps/sequences.py defines what they compute.
#pragma once
#include <cstdint>

namespace zoo {

// x (slope + rise sigmoid(x scale + shift)), or x, times slope below 0, where `scale` is null. Arrays of whole sixteens.
// With epsilon above 0, the sigmoid reads x less its mean over the `units` columns, divided by its deviation, instead of x.
struct Unit {
    const float *scale, *shift, *rise, *slope;
    int64_t units;
    float epsilon;
};

constexpr int64_t kSegments = 32;        // of a curve
constexpr float kHiddenLimit = 16383.0f;  // codes between both layers of target attention

// Functions of the units of a layer, quadratic in t = x scale + shift between integers; c0, c1 and c2 of all segments a unit.
struct Curves {
    const float *scale, *shift, *coefficients;  // [units], [units], [units, 3, kSegments]
};

// The weighted sum of the items of a sequence, TargetAttention of recommenders/steps/sequences.py; with `scores`, ScoredAttention.
struct TargetAttention {
    int64_t size, depth, first;       // columns of items (whole sixteens), of their codes (whole 32), of keys and queries (whole sixteens)
    int64_t pairs, units, second;     // pairs of codes that are no filling; units of both layers, whole fours
    int64_t column, begin, count;     // of the ids: the target, and the sequence
    uint32_t padding;                 // the id behind the items
    const float *items;
    const int16_t *codes;
    const int32_t *keys, *queries;
    const int32_t *product, *hidden;  // int32 of two weights each: [units / 4, pairs, 4], [second / 4, units / 2, 4]
    const int32_t *bias;              // [second]
    Curves one, two;
    float score_bias;
    const float *scores;              // [rows, rows] of target and item, or null: the network computes them
    int64_t rows;
    bool softmax, raw, one_history;   // raw: the weights are the scores; one_history: the sequence of the first sample is that of all
    int64_t gap_begin;                // of the ids: the time gaps, or -1
    const float *gap_items, *gap_scores;  // [gaps, size], [gaps]: added to an item and to its score
};

// A layer of float32, its columns filled up with zeros to whole sixteens: y_j = bias_j + sum_k weight_kj x_k, summed in the order of k.
struct FloatLayer {
    int64_t inputs, outputs;  // outputs: whole sixteens
    const float *weight, *bias;  // [inputs, outputs], [outputs]
};

struct SequenceKernels {
    void (*attend)(const TargetAttention &attention, const uint32_t *ids, int64_t ids_stride, int64_t n, float *out, int64_t out_stride);
    // Scores of `count` items and n targets: [count, stride].
    void (*score)(const TargetAttention &attention, const uint32_t *items, int64_t count, const uint32_t *targets, int64_t n, float *scores,
                  int64_t stride);
    // `attend` from the scores [n, stride], whole sixteens, of the items of one sequence and their time gaps.
    void (*attend_scores)(const TargetAttention &attention, const uint32_t *items, const uint32_t *gaps, int64_t count, float *scores,
                          int64_t stride, int64_t n, float *out, int64_t out_stride);
    void (*activate)(const Unit &unit, const float *x, int64_t stride, int64_t width, int64_t n, float *out);
    // n rows, whole fours; residual: added to the result, of its stride, or null
    void (*layer)(const FloatLayer &layer, const float *x, int64_t stride, int64_t n, const float *residual, float *out, int64_t out_stride);
    // One query over `count` keys and values, [heads * size, count rounded up to 16], those behind `count` finite; scores: scratch of a row.
    void (*attend_heads)(const float *q, const float *keys, const float *values, int64_t count, int64_t heads, int64_t size, float *scores,
                         float *out);
    // out = x + y, whole sixteens
    void (*add)(const float *x, const float *y, int64_t count, float *out);
    // [n, stride] of `width` columns to [width, room]; both whole fours
    void (*transpose)(const float *x, int64_t stride, int64_t n, int64_t width, int64_t room, float *out);
};

}  // namespace zoo
