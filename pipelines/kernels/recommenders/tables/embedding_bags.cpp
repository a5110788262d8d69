// Embedding bags of quantized tables as a Python object: ids of a batch in, pooled rows of all tables side by side out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>
#include <vector>

#include "isa/dispatch.h"
#include "recommenders/tables/table_kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

constexpr int64_t kBlock = 1 << 15;  // ids of a table that are checked, then looked up: they stay in L2

class EmbeddingBags {
  public:
    explicit EmbeddingBags(const std::string &isa) : isa_(choose_isa(isa)), kernels_(*isa_.tables) {}

    void add(Array table, int64_t rows, int64_t width, int bits, float scale_unit, float bias_unit, int64_t count, bool mean) {
        const float share = mean ? 1.0f / static_cast<float>(count) : 1.0f;
        const QuantizedRows view = quantized_rows(table, rows, width, bits, count, scale_unit * share, bias_unit * share);
        if (!view.table) throw nb::value_error("the sizes of the table do not fit its array");
        bags_.push_back({view, rows, columns_, width_});
        columns_ += count, width_ += width;
        kept_.push_back(std::move(table));
    }

    NewArray<float> call(const Array &ids) const {
        const bool wide = ids.dtype() == nb::dtype<int64_t>();
        const void *data = wide ? static_cast<const void *>(data_of<int64_t>(ids, "ids", 2)) : data_of<int32_t>(ids, "ids", 2);
        const auto n = static_cast<int64_t>(ids.shape(0));
        if (static_cast<int64_t>(ids.shape(1)) != columns_) throw nb::value_error("ids have another number of columns than the tables");
        auto *buffer = new Buffer<float>(std::max<int64_t>(n * width_, 1));
        nb::capsule owner(buffer, [](void *pointer) noexcept { delete static_cast<Buffer<float> *>(pointer); });
        {
            nb::gil_scoped_release unlocked;
            if (wide)
                look_up(static_cast<const int64_t *>(data), n, buffer->data());
            else
                look_up(static_cast<const int32_t *>(data), n, buffer->data());
        }
        return {buffer->data(), {static_cast<size_t>(n), static_cast<size_t>(width_)}, owner};
    }

    const char *isa() const { return isa_.name; }

  private:
    struct Bag {
        QuantizedRows rows;
        int64_t height, column, position;
    };

    // Table by table, whose hot rows then stay in the caches.
    template <class T>
    void look_up(const T *ids, int64_t n, float *out) const {
        static thread_local Buffer<uint32_t> rows, next_rows;
        int64_t most = n;
        for (const Bag &bag : bags_) most = std::min(most, std::max<int64_t>(kBlock / bag.rows.count, 1));
        for (int64_t first = 0; first < n; first += most) {
            const int64_t samples = std::min(most, n - first);
            Buffer<uint32_t> *now = &rows, *next = &next_rows;
            for (size_t b = 0; b <= bags_.size(); ++b) {
                if (b < bags_.size()) read(bags_[b], ids, first, samples, *next);
                if (b) kernels_.pool(bags_[b - 1].rows, now->data(), nullptr, samples, out + first * width_ + bags_[b - 1].position, width_);
                std::swap(now, next);
            }
        }
    }

    // The rows of a table, sample by sample; the first of them are fetched while the table before is looked up. Ids are copied, each read once, so that
    // nobody can change one after its check.
    template <class T>
    void read(const Bag &bag, const T *ids, int64_t first, int64_t samples, Buffer<uint32_t> &rows) const {
        constexpr int64_t kSamplesAhead = 16;
        const int64_t count = bag.rows.count;
        rows.reserve(samples * count + kRowsAhead);
        uint32_t *next = rows.data();
        const T *from = ids + first * columns_ + bag.column;
        uint64_t largest = 0;
        for (int64_t s = 0; s < samples; ++s, from += columns_) {
            const T *ahead = from + (s + kSamplesAhead < samples ? kSamplesAhead * columns_ : 0);
            for (int64_t l = 0; l < count; l += 64 / static_cast<int64_t>(sizeof(T))) __builtin_prefetch(ahead + l);
            __builtin_prefetch(ahead + count - 1);
            for (int64_t l = 0; l < count; ++l) {
                const auto id = static_cast<uint64_t>(static_cast<int64_t>(__atomic_load_n(from + l, __ATOMIC_RELAXED)));
                largest = id > largest ? id : largest;
                *next++ = static_cast<uint32_t>(id);
            }
        }
        if (largest >= static_cast<uint64_t>(bag.height)) refuse(bag, ids, first, samples, static_cast<int64_t>(largest));
        std::fill_n(next, kRowsAhead, next[-1]);
        fetch_first(bag.rows, rows.data(), samples * count);
    }

    // Raises IndexError, with the place of the first id of this value.
    template <class T>
    void refuse(const Bag &bag, const T *ids, int64_t first, int64_t samples, int64_t id) const {
        int64_t row = first, column = bag.column;
        for (int64_t i = samples * bag.rows.count - 1; i >= 0; --i) {
            const int64_t r = first + i / bag.rows.count, c = bag.column + i % bag.rows.count;
            if (ids[r * columns_ + c] == id) row = r, column = c;
        }
        throw nb::index_error(("found id " + std::to_string(id) + " in row " + std::to_string(row) + ", column " + std::to_string(column) +
                               "; expected 0 to " + std::to_string(bag.height - 1))
                                  .c_str());
    }

    const Isa &isa_;
    const TableKernels &kernels_;
    std::vector<Bag> bags_;
    std::vector<Array> kept_;
    int64_t columns_ = 0, width_ = 0;
};

}  // namespace
}  // namespace zoo

void bind_embedding_bags(nb::module_ &module) {
    using zoo::EmbeddingBags;
    nb::class_<EmbeddingBags>(module, "EmbeddingBags")
        .def(nb::init<const std::string &>(), "isa"_a = "")
        .def("add", &EmbeddingBags::add, "table"_a, "rows"_a, "width"_a, "bits"_a, "scale_unit"_a, "bias_unit"_a, "count"_a, "mean"_a)
        .def("__call__", &EmbeddingBags::call, "ids"_a)
        .def_prop_ro("isa", &EmbeddingBags::isa);
}
