// The kernel of MaxSim, lowered for each instruction set; transformer/token_vectors.py defines what it computes.
#pragma once
#include <cstdint>

namespace zoo {

// Components come in whole sixteens, `size`, columns of a query in whole sixteens, `stride`.
struct LateInteractionKernels {
    int64_t (*query_words)(int64_t size, int64_t stride);  // of a packed query
    // codes [n, size] -> packed, columns behind n with zeros
    void (*pack_query)(const int8_t *codes, int64_t n, int64_t size, int64_t stride, int32_t *words);
    // MaxSim with a document of n tokens, uint8 [n, size] with the zero point 128, and their scales; query_scale [stride], 0 behind the query
    float (*max_sim)(const int32_t *words, const float *query_scale, int64_t stride, int64_t size, const uint8_t *tokens, const float *scale, int64_t n);
};

}  // namespace zoo
