// The best rows of an int8 matrix for an int8 query, by all dot products.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "recommenders/arrays.h"

namespace nb = nanobind;
using clicks::owned;

namespace {

using Codes = nb::ndarray<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t ITEMS = 512; // whose products are computed before they are compared: they stay in the first cache

// Products of one query with `count` rows: int8 values, so that pairs of products fit 32 bits by far.
ALWAYS_INLINE void dots(const int8_t *__restrict query, const int8_t *__restrict rows, int64_t count, int64_t size, int32_t *__restrict out) {
    for (int64_t i = 0; i < count; ++i) {
        const int8_t *row = rows + i * size;
        int32_t sum = 0;
        for (int64_t j = 0; j < size; ++j)
            sum += static_cast<int32_t>(static_cast<int16_t>(query[j])) * static_cast<int16_t>(row[j]);
        out[i] = sum;
    }
}

using Dots = void (*)(const int8_t *, const int8_t *, int64_t, int64_t, int32_t *);

void dots_portable(const int8_t *query, const int8_t *rows, int64_t count, int64_t size, int32_t *out) {
    dots(query, rows, count, size, out);
}
#if defined(__x86_64__)
AVX2 void dots_avx2(const int8_t *query, const int8_t *rows, int64_t count, int64_t size, int32_t *out) {
    dots(query, rows, count, size, out);
}
AVX512 void dots_avx512(const int8_t *query, const int8_t *rows, int64_t count, int64_t size, int32_t *out) {
    dots(query, rows, count, size, out);
}
constexpr clicks::Versions<Dots> versions{dots_portable, dots_avx2, dots_avx512};
#else
constexpr clicks::Versions<Dots> versions{dots_portable};
#endif

struct Hit {
    int32_t product;
    int64_t item;
};

// Whether a stands before b: the larger product, of equals the lower row. As a heap's order the worst comes first.
bool before(const Hit &a, const Hit &b) { return a.product > b.product || (a.product == b.product && a.item < b.item); }

std::tuple<nb::ndarray<nb::numpy, int64_t>, nb::ndarray<nb::numpy, int32_t>> top_k(Codes queries, Codes items, int64_t count, const std::string &isa) {
    const auto n = static_cast<int64_t>(queries.shape(0)), m = static_cast<int64_t>(items.shape(0));
    const auto size = static_cast<int64_t>(queries.shape(1));
    if (static_cast<int64_t>(items.shape(1)) != size || size < 1 || size > (1 << 16))
        throw std::invalid_argument("expected queries and items of one size, 1 to 65536");
    if (count < 1 || count > m)
        throw std::invalid_argument("expected 1 to as many results as there are items");
    const Dots products = versions.of(isa);
    std::unique_ptr<int64_t[]> best(new int64_t[n * count]);
    std::unique_ptr<int32_t[]> scores(new int32_t[n * count]);
    {
        nb::gil_scoped_release released;
        constexpr int64_t TOGETHER = 16; // queries that read a block of items while it is in the cache
        int32_t block_products[ITEMS];
        std::vector<std::vector<Hit>> heaps(std::min(n, TOGETHER));
        for (int64_t first = 0; first < n; first += TOGETHER) {
            const int64_t queries_here = std::min(TOGETHER, n - first);
            for (auto &heap : heaps)
                heap.clear();
            for (int64_t at = 0; at < m; at += ITEMS) {
                const int64_t here = std::min(ITEMS, m - at);
                for (int64_t q = 0; q < queries_here; ++q) {
                    products(queries.data() + (first + q) * size, items.data() + at * size, here, size, block_products);
                    auto &heap = heaps[q];
                    for (int64_t i = 0; i < here; ++i) {
                        const Hit hit{block_products[i], at + i};
                        if (static_cast<int64_t>(heap.size()) < count) {
                            heap.push_back(hit);
                            std::push_heap(heap.begin(), heap.end(), before);
                        } else if (block_products[i] > heap.front().product) { // an equal one comes later and loses
                            std::pop_heap(heap.begin(), heap.end(), before);
                            heap.back() = hit;
                            std::push_heap(heap.begin(), heap.end(), before);
                        }
                    }
                }
            }
            for (int64_t q = 0; q < queries_here; ++q) {
                std::sort_heap(heaps[q].begin(), heaps[q].end(), before);
                for (int64_t k = 0; k < count; ++k) {
                    best[(first + q) * count + k] = heaps[q][k].item;
                    scores[(first + q) * count + k] = heaps[q][k].product;
                }
            }
        }
    }
    const auto rows = queries.shape(0), columns = static_cast<size_t>(count);
    return {owned(std::move(best), {rows, columns}), owned(std::move(scores), {rows, columns})};
}

} // namespace

void bind_top_k(nb::module_ &module) {
    module.def(
        "top_k", &top_k, nb::arg("queries"), nb::arg("items"), nb::arg("count"), nb::arg("isa") = "",
        "The rows of items (int8 [m, size]) with the largest dot products with each of queries (int8 [n, size]): (rows int64, products\n"
        "int32, both [n, count]), by falling product, then rising row. Raises ValueError for other sizes, or an isa that the CPU has not:\n"
        "avx512, avx2 or portable.");
}
