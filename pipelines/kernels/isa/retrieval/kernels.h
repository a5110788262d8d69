// The kernels of exact retrieval, lowered for each instruction set; recommenders/top_k.cpp calls them.
#pragma once
#include <cstdint>

namespace zoo {

struct RetrievalKernels {
    // dot products of an int8 query [size] with int8 rows [count, size], size at most 65536
    void (*dots)(const int8_t *query, const int8_t *rows, int64_t count, int64_t size, int32_t *out);
    // positions of the products above a limit, in order; returns their number. There is room for `count`.
    int64_t (*above)(const int32_t *products, int64_t count, int32_t limit, int32_t *positions);
};

}  // namespace zoo
