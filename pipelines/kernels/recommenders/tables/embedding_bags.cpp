// Embedding bags of quantized tables as a Python object: ids of a batch in, pooled rows of all tables side by side out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "isa/dispatch.h"
#include "recommenders/tables/table_kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace zoo {
namespace {

constexpr int64_t kBlock = 1 << 16;  // ids that are checked, then looked up: they stay in L2

class EmbeddingBags {
  public:
    explicit EmbeddingBags(const std::string &isa) : isa_(choose_isa(isa)), kernels_(table_kernels(isa_.name)) {}

    void add(Array table, int64_t rows, int64_t width, int bits, float scale_unit, float bias_unit, int64_t count, bool mean) {
        const float share = mean ? 1.0f / static_cast<float>(count) : 1.0f;
        const QuantizedRows view = quantized_rows(table, rows, width, bits, count, scale_unit * share, bias_unit * share);
        if (!view.table) throw nb::value_error("the sizes of the table do not fit its array");
        bags_.push_back({view, rows, columns_, width_});
        columns_ += count, width_ += width;
        last_.insert(last_.end(), static_cast<size_t>(count), static_cast<int32_t>(rows - 1));
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

    template <class T>
    void look_up(const T *ids, int64_t n, float *out) const {
        static thread_local Buffer<int32_t> all;
        static thread_local Buffer<uint32_t> rows, next_rows;
        if (bags_.empty()) return;
        const int64_t most = std::min(std::max<int64_t>(kBlock / columns_, 1), n);
        all.reserve(most * columns_);
        for (int64_t first = 0; first < n; first += most) {
            const int64_t samples = std::min(most, n - first);
            read(ids, first, samples, all.data());
            Buffer<uint32_t> *now = &rows, *next = &next_rows;
            rows_of(bags_[0], all.data(), samples, *now, columns_);
            for (size_t b = 0; b < bags_.size(); ++b) {
                if (b + 1 < bags_.size()) rows_of(bags_[b + 1], all.data(), samples, *next, columns_);
                kernels_.pool(bags_[b].rows, now->data(), nullptr, samples, out + first * width_ + bags_[b].position, width_);
                std::swap(now, next);
            }
        }
    }

    // Ids are copied, each read once, so that nobody can change one after its check.
    template <class T>
    void read(const T *ids, int64_t first, int64_t samples, int32_t *out) const {
        const int32_t *last = last_.data();
        int32_t outside = 0;
        for (int64_t s = 0; s < samples; ++s) {
            const T *from = ids + (first + s) * columns_;
            int32_t *to = out + s * columns_;
            if constexpr (sizeof(T) == 4)
                std::memcpy(to, from, static_cast<size_t>(columns_) * 4);
            else
                for (int64_t c = 0; c < columns_; ++c) {
                    const int64_t id = __atomic_load_n(from + c, __ATOMIC_RELAXED);
                    to[c] = static_cast<int32_t>(id) == id ? static_cast<int32_t>(id) : -1;
                }
            for (int64_t c = 0; c < columns_; ++c)
                outside |= to[c] | static_cast<int32_t>(static_cast<uint32_t>(last[c]) - static_cast<uint32_t>(to[c]));
        }
        if (outside >= 0) return;
        for (int64_t i = 0; i < samples * columns_; ++i)
            if (out[i] < 0 || out[i] > last[i % columns_])
                throw nb::index_error(("found id " + std::to_string(ids[first * columns_ + i]) + " in row " + std::to_string(first + i / columns_) + ", column " +
                                       std::to_string(i % columns_) + "; expected 0 to " + std::to_string(last[i % columns_]))
                                          .c_str());
    }

    // The rows of a table, sample by sample; the first of them are fetched while the table before is read.
    static void rows_of(const Bag &bag, const int32_t *ids, int64_t samples, Buffer<uint32_t> &rows, int64_t columns) {
        const int64_t count = bag.rows.count;
        rows.reserve(samples * count + kRowsAhead);
        uint32_t *next = rows.data();
        ids += bag.column;
        for (int64_t s = 0; s < samples; ++s, ids += columns)
            for (int64_t l = 0; l < count; ++l) *next++ = static_cast<uint32_t>(ids[l]);
        std::fill_n(next, kRowsAhead, next[-1]);
        fetch_first(bag.rows, rows.data(), samples * count);
    }

    const Isa &isa_;
    const TableKernels &kernels_;
    std::vector<Bag> bags_;
    std::vector<Array> kept_;
    std::vector<int32_t> last_;  // row of the table of every column
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
