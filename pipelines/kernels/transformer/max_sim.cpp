// MaxSim of one query and many documents, in pieces that threads take (transformer/token_vectors.py).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "isa/late_interaction/kernels.h"
#include "isa/threads.h"
#include "transformer/layers/layers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

constexpr int64_t kPiece = 4096;  // tokens of documents, about, that a thread takes at a time

// query int8 [n, size] and its scales; codes uint8 [tokens, size] and their scales; first int64 [documents + 1]: where each begins, and the
// end; chosen int64: the documents to score, or none for all. Returns float32 [documents, 1].
NewArray<float> max_sim(const Array &query, const Array &query_scale, const Array &codes, const Array &scale, const Array &first,
                        const std::optional<Array> &chosen, int64_t threads, const std::string &isa) {
    const auto *q = data_of<int8_t>(query, "query", 2);
    const auto *qs = data_of<float>(query_scale, "query_scale", 1), *s = data_of<float>(scale, "scale", 1);
    const auto *c = data_of<uint8_t>(codes, "codes", 2);
    const auto *f = data_of<int64_t>(first, "first", 1);
    const auto n = static_cast<int64_t>(query.shape(0)), size = static_cast<int64_t>(query.shape(1)), tokens = static_cast<int64_t>(codes.shape(0));
    const auto documents = static_cast<int64_t>(first.shape(0)) - 1;
    if (!n || size % 16 || !size || size > kMostCodes || static_cast<int64_t>(codes.shape(1)) != size)
        refuse("max_sim", "vectors of " + std::to_string(size) + " and " + std::to_string(codes.shape(1)) + " codes; expected as many, whole sixteens");
    if (static_cast<int64_t>(query_scale.shape(0)) != n || static_cast<int64_t>(scale.shape(0)) != tokens) refuse("max_sim", "scales are not those of the vectors");
    if (documents < 0 || f[0] != 0 || f[documents] != tokens || threads < 1) refuse("max_sim", "documents are not those of the vectors, or there are no threads");
    for (int64_t i = 0; i < documents; ++i)
        if (f[i + 1] <= f[i]) refuse("max_sim", "document " + std::to_string(i) + " has no vectors");
    std::vector<int64_t> rows;
    if (chosen) {
        const auto *data = data_of<int64_t>(*chosen, "chosen", 1);
        rows.assign(data, data + chosen->shape(0));
        for (const int64_t row : rows)
            if (row < 0 || row >= documents) refuse("max_sim", "there is no document " + std::to_string(row));
    }
    const int64_t count = chosen ? static_cast<int64_t>(rows.size()) : documents, stride = round_up(n, 16);
    const LateInteractionKernels &kernels = *choose_isa(isa).late_interaction;
    Buffer<int32_t> words(kernels.query_words(size, stride));
    Buffer<float> scales(stride), out(std::max<int64_t>(count, 1));
    kernels.pack_query(q, n, size, stride, words.data());
    std::fill_n(std::copy_n(qs, n, scales.data()), stride - n, 0.0f);
    {
        nb::gil_scoped_release unlocked;
        const int64_t piece = std::max<int64_t>(1, kPiece * std::max<int64_t>(documents, 1) / std::max<int64_t>(tokens, 1));
        std::atomic<int64_t> next{0};
        on_threads(std::min(threads, (count + piece - 1) / piece), [&](bool) {
            for (int64_t begin; (begin = next.fetch_add(piece)) < count;)
                for (int64_t i = begin; i < std::min(begin + piece, count); ++i) {
                    const int64_t row = chosen ? rows[static_cast<size_t>(i)] : i, first_token = f[row];
                    out.data()[i] = kernels.max_sim(words.data(), scales.data(), stride, size,
                                                    c + first_token * size, s + first_token, f[row + 1] - first_token);
                }
        });
    }
    return array_of(out.data(), count, 1, 1);
}

}  // namespace
}  // namespace zoo

void bind_max_sim(nb::module_ &module) {
    using namespace zoo;
    module.def("max_sim", &max_sim, "query"_a, "query_scale"_a, "codes"_a, "scale"_a, "first"_a, "chosen"_a.none(), "threads"_a, "isa"_a);
}
