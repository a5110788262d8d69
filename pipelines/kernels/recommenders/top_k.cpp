// The best rows of an int8 matrix for an int8 query, by all dot products; the largest scores; the positions of ids.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
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

// Positions of the products above a limit, in order; returns their number.
int64_t above_portable(const int32_t *products, int64_t count, int32_t limit, int32_t *positions) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
        positions[found] = static_cast<int32_t>(i);
        found += products[i] > limit;
    }
    return found;
}

using Above = int64_t (*)(const int32_t *, int64_t, int32_t, int32_t *);
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

#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")))

// Sums of products of a row, + 128 a value, with the query, in sixteen lanes.
VNNI inline __m512i lanes_of(const int8_t *query, const int8_t *row, int64_t whole, __mmask64 tail) {
    const __m512i shift = _mm512_set1_epi8(-128);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t j = 0; j < whole; j += 64)
        sum = _mm512_dpbusd_epi32(sum, _mm512_xor_si512(_mm512_loadu_si512(row + j), shift), _mm512_loadu_si512(query + j));
    if (tail)
        sum = _mm512_dpbusd_epi32(sum, _mm512_xor_si512(_mm512_maskz_loadu_epi8(tail, row + whole), shift), _mm512_maskz_loadu_epi8(tail, query + whole));
    return sum;
}

VNNI inline __m512i joined(__m512i a, __m512i b) { return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); }

VNNI void dots_vnni(const int8_t *query, const int8_t *rows, int64_t count, int64_t size, int32_t *out) {
    const int64_t whole = size / 64 * 64;
    const __mmask64 tail = size > whole ? ~uint64_t{0} >> (64 - (size - whole)) : 0;
    int32_t shifted = 0; // what 128 in every value of a row adds
    for (int64_t j = 0; j < size; ++j)
        shifted += 128 * query[j];
    const __m128i less = _mm_set1_epi32(shifted);
    int64_t i = 0;
    for (; i + 4 <= count; i += 4, rows += 4 * size) {
        const __m512i ab = joined(lanes_of(query, rows, whole, tail), lanes_of(query, rows + size, whole, tail));
        const __m512i cd = joined(lanes_of(query, rows + 2 * size, whole, tail), lanes_of(query, rows + 3 * size, whole, tail));
        const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        const __m128i one = _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), _mm_sub_epi32(one, less));
    }
    for (; i < count; ++i, rows += size)
        out[i] = _mm512_reduce_add_epi32(lanes_of(query, rows, whole, tail)) - shifted;
}

AVX512 int64_t above_avx512(const int32_t *products, int64_t count, int32_t limit, int32_t *positions) {
    int64_t found = 0;
    __m512i position = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < count; i += 16, position = _mm512_add_epi32(position, _mm512_set1_epi32(16))) {
        const __mmask16 here = static_cast<__mmask16>(count - i >= 16 ? 0xFFFF : (1 << (count - i)) - 1);
        const __mmask16 mask = _mm512_mask_cmpgt_epi32_mask(here, _mm512_maskz_loadu_epi32(here, products + i), _mm512_set1_epi32(limit));
        if (!mask)
            continue;
        _mm512_mask_compressstoreu_epi32(positions + found, mask, position);
        found += __builtin_popcount(mask);
    }
    return found;
}

Above above_of(Dots dots) { return dots == dots_avx512 || dots == dots_vnni ? above_avx512 : above_portable; }

// The quickest of them that the CPU runs, or the one named.
Dots dots_of(const std::string &isa) {
    const Dots found = versions.of(isa);
    return found == dots_avx512 && __builtin_cpu_supports("avx512vnni") ? dots_vnni : found;
}
#else
constexpr clicks::Versions<Dots> versions{dots_portable};
Dots dots_of(const std::string &isa) { return versions.of(isa); }
Above above_of(Dots) { return above_portable; }
#endif

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
    const Dots products = dots_of(isa);
    std::unique_ptr<int64_t[]> best(new int64_t[n * count]);
    std::unique_ptr<int32_t[]> scores(new int32_t[n * count]);
    {
        nb::gil_scoped_release released;
        constexpr int64_t TOGETHER = 16; // queries that read a block of items while it is in the cache
        const Above above = above_of(products);
        int32_t block_products[ITEMS], positions[ITEMS];
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
                    int64_t i = 0;
                    for (; i < here && static_cast<int64_t>(heap.size()) < count; ++i) {
                        heap.push_back({block_products[i], at + i});
                        std::push_heap(heap.begin(), heap.end(), before<int32_t>);
                    }
                    const int64_t found = i == here ? 0 : above(block_products + i, here - i, heap.front().product, positions);
                    for (int64_t k = 0; k < found; ++k) {
                        const Hit hit{block_products[i + positions[k]], at + i + positions[k]};
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
        const int64_t at = PyLong_AsLongLongAndOverflow(place, &overflow);
        if (overflow || at < 0 || at >= count || seen[at / 64] >> at % 64 & 1)
            return std::nullopt;
        seen[at / 64] |= uint64_t{1} << at % 64;
        positions[i] = at;
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
        "int32, both [n, count]), by falling product, then rising row. Raises ValueError for other sizes, or an isa that the CPU has not:\n"
        "avx512, avx2 or portable.");
}
