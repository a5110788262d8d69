// The best rows of an int8 matrix for an int8 query, by all dot products; the largest scores; the positions of ids.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "isa/dispatch.h"
#include "recommenders/arrays.h"

namespace nb = nanobind;
using clicks::owned;

namespace {

using Codes = nb::ndarray<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr int64_t ITEMS = 512; // whose products are computed before they are compared: they stay in the first cache

template <class T> struct HitOf {
    T product;
    int64_t item;
};
using Hit = HitOf<int32_t>;

// Whether a stands before b: the larger product, of equals the lower row. As a heap's order the worst comes first.
template <class T> bool before(const HitOf<T> &a, const HitOf<T> &b) { return a.product > b.product || (a.product == b.product && a.item < b.item); }

std::tuple<nb::ndarray<nb::numpy, int64_t>, nb::ndarray<nb::numpy, int32_t>> top_k(Codes queries, Codes items, int64_t count, const std::string &isa) {
    const auto n = static_cast<int64_t>(queries.shape(0)), m = static_cast<int64_t>(items.shape(0));
    const auto size = static_cast<int64_t>(queries.shape(1));
    if (static_cast<int64_t>(items.shape(1)) != size || size < 1 || size > (1 << 16))
        throw std::invalid_argument("expected queries and items of one size, 1 to 65536");
    if (count < 1 || count > m)
        throw std::invalid_argument("expected 1 to as many results as there are items");
    const zoo::RetrievalKernels &kernels = *zoo::choose_isa(isa).retrieval;
    std::unique_ptr<int64_t[]> best(new int64_t[n * count]);
    std::unique_ptr<int32_t[]> scores(new int32_t[n * count]);
    {
        nb::gil_scoped_release released;
        constexpr int64_t TOGETHER = 16; // queries that read a block of items while it is in the cache
        int32_t block_products[ITEMS], positions[ITEMS];
        std::vector<std::vector<Hit>> heaps(std::min(n, TOGETHER));
        for (int64_t first = 0; first < n; first += TOGETHER) {
            const int64_t queries_here = std::min(TOGETHER, n - first);
            for (auto &heap : heaps)
                heap.clear();
            for (int64_t begin = 0; begin < m; begin += ITEMS) {
                const int64_t here = std::min(ITEMS, m - begin);
                for (int64_t q = 0; q < queries_here; ++q) {
                    kernels.dots(queries.data() + (first + q) * size, items.data() + begin * size, here, size, block_products);
                    auto &heap = heaps[q];
                    int64_t i = 0;
                    for (; i < here && static_cast<int64_t>(heap.size()) < count; ++i) {
                        heap.push_back({block_products[i], begin + i});
                        std::push_heap(heap.begin(), heap.end(), before<int32_t>);
                    }
                    const int64_t match_count = i == here ? 0 : kernels.above(block_products + i, here - i, heap.front().product, positions);
                    for (int64_t k = 0; k < match_count; ++k) {
                        const Hit hit{block_products[i + positions[k]], begin + i + positions[k]};
                        if (hit.product <= heap.front().product)
                            continue; // an equal one comes later and loses
                        std::pop_heap(heap.begin(), heap.end(), before<int32_t>);
                        heap.back() = hit;
                        std::push_heap(heap.begin(), heap.end(), before<int32_t>);
                    }
                }
            }
            for (int64_t q = 0; q < queries_here; ++q) {
                std::sort_heap(heaps[q].begin(), heaps[q].end(), before<int32_t>);
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

using Scores = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, int64_t> largest(Scores scores, int64_t count) {
    const auto n = static_cast<int64_t>(scores.shape(0));
    if (count < 1 || count > n)
        throw std::invalid_argument("expected 1 to as many results as there are scores");
    std::unique_ptr<int64_t[]> best(new int64_t[count]);
    {
        nb::gil_scoped_release released;
        const float *const values = scores.data();
        std::vector<HitOf<float>> heap;
        heap.reserve(count);
        for (int64_t i = 0; i < n; ++i) {
            const float score = std::isnan(values[i]) ? -std::numeric_limits<float>::infinity() : values[i];
            const bool full = static_cast<int64_t>(heap.size()) == count;
            if (full && score <= heap.front().product)
                continue; // an equal one comes later and loses
            if (full) {
                std::pop_heap(heap.begin(), heap.end(), before<float>);
                heap.pop_back();
            }
            heap.push_back({score, i});
            std::push_heap(heap.begin(), heap.end(), before<float>);
        }
        std::sort_heap(heap.begin(), heap.end(), before<float>);
        for (int64_t k = 0; k < count; ++k)
            best[k] = heap[k].item;
    }
    return owned(std::move(best), {static_cast<size_t>(count)});
}

std::optional<nb::ndarray<nb::numpy, int64_t>> distinct_positions(nb::dict places, nb::list ids, int64_t count) {
    const size_t n = ids.size();
    std::unique_ptr<int64_t[]> positions(new int64_t[n]);
    std::vector<uint64_t> seen(static_cast<size_t>(std::max<int64_t>(count, 0)) / 64 + 1);
    for (size_t i = 0; i < n; ++i) {
        PyObject *const id = PyList_GET_ITEM(ids.ptr(), i);
        PyObject *const place = PyUnicode_CheckExact(id) ? PyDict_GetItemWithError(places.ptr(), id) : nullptr;
        if (!place || !PyLong_CheckExact(place)) {
            PyErr_Clear();
            return std::nullopt;
        }
        int overflow = 0;
        const int64_t index = PyLong_AsLongLongAndOverflow(place, &overflow);
        if (overflow || index < 0 || index >= count || seen[index / 64] >> index % 64 & 1)
            return std::nullopt;
        seen[index / 64] |= uint64_t{1} << index % 64;
        positions[i] = index;
    }
    return owned(std::move(positions), {n});
}

} // namespace

void bind_top_k(nb::module_ &module) {
    module.def(
        "largest", &largest, nb::arg("scores"), nb::arg("count"),
        "Positions of the largest of scores (float32 [n]), int64 [count], by falling score, then rising position; NaN counts as -infinity.\n"
        "Raises ValueError for another count than 1 to n.");
    module.def(
        "distinct_positions", &distinct_positions, nb::arg("places"), nb::arg("ids"), nb::arg("count"),
        "Positions of ids, int64 [n], by the dictionary {id: position} of `count` items. None where an id is no text, is not there, or\n"
        "occurs twice.");
    module.def(
        "top_k", &top_k, nb::arg("queries"), nb::arg("items"), nb::arg("count"), nb::arg("isa") = "",
        "The rows of items (int8 [m, size]) with the largest dot products with each of queries (int8 [n, size]): (rows int64, products\n"
        "int32, both [n, count]), by falling product, then rising row. Raises ValueError for other sizes, or an isa that is not in isas().");
}
