// What click programs are but for their steps: buffers of a block of samples, inputs that are checked, results. Ids are checked before a table
// is read; no lock is held while computing. Inputs may be declared to be the same in all samples of a call, as those of a user whose
// candidates are ranked: what depends on them alone is computed once a call.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/variant.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "isa/arrays.h"
#include "isa/dispatch.h"

namespace nb = nanobind;

namespace zoo {
namespace {

constexpr int64_t kSamples = 64;  // that go through all steps together: their buffers stay in L2
constexpr int64_t kSlack = 32;    // int16 that kernels may touch behind a row
constexpr int64_t kWidest = int64_t{1} << 20;
constexpr size_t kOutputs = 64;
constexpr int64_t kOuts = 64;  // of one step
constexpr int64_t kNear = 1 << 18;  // bytes of a table that stays in L2
constexpr float kRoundToInt = 12582912.0f;  // 1.5 * 2^23: added to a code and taken away, it rounds, ties to even

thread_local Buffer<uint8_t> buffers;

struct Slot {
    Kind kind;
    int64_t width, stride, offset;  // offset: bytes of one block
    bool relu = false;
    int index = -1;
    int64_t size() const { return kind == Kind::kBytes ? 1 : kind == Kind::kWords ? 2 : 4; }
};

// What the steps see of a block.
struct Block {
    uint8_t *memory;
    const uint32_t *ids;  // [n, columns], checked
    const float *numbers, *means;
    int64_t n;
    bool first;  // of the call
    template <class T>
    T *at(const Slot &slot) const { return reinterpret_cast<T *>(memory + slot.offset); }
};

// Columns of a buffer that a step reads or writes.
struct Span {
    Slot slot;
    int64_t first, width;
};

void require(bool fits, const char *step) {
    if (!fits) throw nb::value_error((std::string("the arguments of the step ") + step + " do not fit the program").c_str());
}

class Program {
  public:
    // rows: how many rows an id of each column chooses from, 0 for a column that is not read.
    Program(const Array &rows, int64_t numbers, int64_t means, const std::vector<std::pair<std::string, int64_t>> &slots,
                 const std::string &isa)
        : isa_(choose_isa(isa)), kernels_(*isa_.clicks), numbers_(numbers), means_(means) {
        const auto *given = data_of<int32_t>(rows, "rows", 1);
        rows_.assign(given, given + rows.shape(0));
        require(!rows_.empty() && numbers >= 0 && means >= 0 && *std::min_element(rows_.begin(), rows_.end()) >= 0, "program");
        for (int32_t each : rows_) last_.push_back(std::max(each, 1) - 1), read_.push_back(each ? -1 : 0);
        ids_offset_ = 0;
        size_ = round_up(kSamples * columns() * 4, 64);
        for (const auto &[kind, width] : slots) {
            require(width >= 1 && width <= kWidest && (kind == "u1" || kind == "i2" || kind == "f4"), "buffer");
            Slot slot{kind == "u1" ? Kind::kBytes : kind == "i2" ? Kind::kWords : Kind::kFloats, width, round_up(width, kColumns), size_, false};
            if (slot.kind == Kind::kWords) slot.stride += kSlack;
            slot.index = static_cast<int>(slots_.size());
            size_ += round_up(kSamples * slot.stride * slot.size() + 64, 64);
            slots_.push_back(slot);
            alike_.emplace_back(static_cast<size_t>(width), false);
        }
        alike_ids_.assign(rows_.size(), false), alike_numbers_.assign(static_cast<size_t>(numbers), false);
        alike_means_.assign(static_cast<size_t>(means), false);
    }

    // The columns of the inputs that are the same in all samples of a call; to be told before the first step.
    void share(const std::vector<int64_t> &ids, const std::vector<int64_t> &numbers, const std::vector<int64_t> &means) {
        require(steps_.empty(), "share");
        const auto mark = [](std::vector<bool> &alike, const std::vector<int64_t> &columns) {
            for (int64_t each : columns) {
                require(each >= 0 && each < static_cast<int64_t>(alike.size()), "share");
                alike[static_cast<size_t>(each)] = true;
            }
        };
        mark(alike_ids_, ids), mark(alike_numbers_, numbers), mark(alike_means_, means);
    }

    void outputs(const std::vector<int> &slots) {
        require(slots.size() <= kOutputs, "outputs");
        for (int each : slots) results_.push_back(slot(each, Kind::kFloats, "outputs"));
    }

    std::variant<NewArray<float>, nb::typed<nb::tuple, NewArray<float>, nb::ellipsis>> call(const Array &ids, const std::optional<Array> &numbers, const std::optional<Array> &means) const {
        const bool wide = ids.dtype() == nb::dtype<int64_t>();
        const void *given = wide ? static_cast<const void *>(data_of<int64_t>(ids, "ids", 2)) : data_of<int32_t>(ids, "ids", 2);
        const int64_t n = static_cast<int64_t>(ids.shape(0));
        if (static_cast<int64_t>(ids.shape(1)) != columns()) throw nb::value_error("ids have another number of columns than the program");
        const float *x = floats(numbers, "numbers", n, numbers_), *m = floats(means, "scales", n, means_);
        float *results[kOutputs];
        std::vector<NewArray<float>> arrays;
        for (size_t i = 0; i < results_.size(); ++i) {
            const int64_t width = results_[i].width;
            auto *buffer = new Buffer<float>(std::max<int64_t>(n * width, 1));
            nb::capsule owner(buffer, [](void *pointer) noexcept { delete static_cast<Buffer<float> *>(pointer); });
            results[i] = buffer->data();
            arrays.emplace_back(results[i], std::initializer_list<size_t>{static_cast<size_t>(n), static_cast<size_t>(width)}, owner);
        }
        {
            nb::gil_scoped_release unlocked;
            buffers.reserve(size_);
            auto *rows = reinterpret_cast<int32_t *>(buffers.data() + ids_offset_);
            for (int64_t first = 0; first < n; first += kSamples) {
                const int64_t count = std::min(kSamples, n - first);
                if (wide)
                    read_ids(static_cast<const int64_t *>(given), first, count, rows);
                else
                    read_ids(static_cast<const int32_t *>(given), first, count, rows);
                const Block block{buffers.data(), reinterpret_cast<const uint32_t *>(rows), x + first * numbers_, m + first * means_, count, first == 0};
                for (const auto &step : steps_) step(block);
                for (size_t i = 0; i < results_.size(); ++i) {
                    const Slot &slot = results_[i];
                    const auto *from = block.at<float>(slot);
                    for (int64_t s = 0; s < count; ++s)
                        std::copy_n(from + s * slot.stride, slot.width, results[i] + (first + s) * slot.width);
                }
            }
        }
        if (results_.size() == 1) return arrays[0];
        nb::list all;
        for (const NewArray<float> &array : arrays) all.append(array);
        return nb::typed<nb::tuple, NewArray<float>, nb::ellipsis>(nb::tuple(all));
    }

    const char *isa() const { return isa_.name; }

  protected:
    struct Field {
        int32_t column, offset;
    };
    int64_t columns() const { return static_cast<int64_t>(rows_.size()); }

    static bool all_of(const std::vector<bool> &alike, int64_t first, int64_t count) {
        return std::all_of(alike.begin() + first, alike.begin() + first + count, [](bool each) { return each; });
    }
    bool alike(const Span &span) const { return all_of(alike_[static_cast<size_t>(span.slot.index)], span.first, span.width); }

    // Memory of a block that the blocks after it in a call may read.
    int64_t kept_bytes(int64_t bytes) { return std::exchange(size_, size_ + round_up(bytes, 64)); }

    // Adds a step. One whose inputs are the same in all samples runs for the first sample of a call, whose results become those of all.
    void add(const std::vector<Span> &reads, const std::vector<Span> &writes, bool inputs_alike, std::function<void(const Block &)> run) {
        if (!inputs_alike || !std::all_of(reads.begin(), reads.end(), [&](const Span &span) { return alike(span); })) {
            steps_.push_back(std::move(run));
            return;
        }
        std::vector<std::pair<Span, int64_t>> results;
        for (const Span &span : writes) {
            auto &columns = alike_[static_cast<size_t>(span.slot.index)];
            std::fill_n(columns.begin() + span.first, span.width, true);
            results.emplace_back(span, kept_bytes(span.width * span.slot.size()));
        }
        steps_.push_back([=](const Block &b) {
            if (b.first) run({b.memory, b.ids, b.numbers, b.means, 1, true});
            for (const auto &[span, kept] : results) {
                const int64_t size = span.slot.size(), bytes = span.width * size;
                uint8_t *to = b.memory + span.slot.offset + span.first * size;
                if (b.first) std::memcpy(b.memory + kept, to, static_cast<size_t>(bytes));
                for (int64_t s = 0; s < b.n; ++s) std::memcpy(to + s * span.slot.stride * size, b.memory + kept, static_cast<size_t>(bytes));
            }
        });
    }
    static Span whole(const Slot &slot) { return {slot, 0, slot.width}; }

    Slot slot(int index, Kind kind, const char *step) const {
        require(index >= 0 && index < static_cast<int64_t>(slots_.size()) && slots_[static_cast<size_t>(index)].kind == kind, step);
        return slots_[static_cast<size_t>(index)];
    }

    // Fields of a table of `height` rows: the column of the ids that chooses among `rows` of them from `offset` on.
    std::vector<Field> fields(const Array &columns, const Array &offsets, const Array &rows, int64_t height, const char *step) const {
        const auto *column = data_of<int32_t>(columns, "columns", 1), *offset = data_of<int32_t>(offsets, "offsets", 1),
                   *count = data_of<int32_t>(rows, "rows", 1);
        const size_t size = columns.shape(0);
        require(offsets.shape(0) == size && rows.shape(0) == size, step);
        std::vector<Field> found;
        for (size_t f = 0; f < size; ++f) {
            require(column[f] >= 0 && column[f] < this->columns() && offset[f] >= 0 && count[f] >= 1 && int64_t{offset[f]} + count[f] <= height,
                    step);
            const int32_t most = rows_[static_cast<size_t>(column[f])];
            require(most >= 1 && most <= count[f], step);
            found.push_back({column[f], offset[f]});
        }
        return found;
    }

    // The vectors of `width` int16 at these positions of a row; sums of 128 products of codes fit int32.
    std::vector<int32_t> vectors(const Array &positions, int64_t width, const Slot &from, const char *step) const {
        const auto *at = data_of<int32_t>(positions, "positions", 1);
        const size_t count = positions.shape(0);
        require(count >= 1 && count <= 128 && width >= 1 && width <= 128, step);
        for (size_t i = 0; i < count; ++i) require(at[i] >= 0 && at[i] + width <= from.width, step);
        return {at, at + count};
    }

    const float *floats(const std::optional<Array> &array, const char *name, int64_t n, int64_t width) const {
        static const float none = 0;
        const float *found = array ? data_of<float>(*array, name, 2) : &none;
        const bool fits = array ? static_cast<int64_t>(array->shape(0)) == n && static_cast<int64_t>(array->shape(1)) == width : width == 0;
        if (!fits) throw nb::value_error((std::string(name) + " have another shape than the ids and the program want").c_str());
        return found;
    }

    // Ids, each read once, since nobody can change it after the check. Raises IndexError, naming the place, where one is no row.
    template <class T>
    void read_ids(const T *ids, int64_t first, int64_t n, int32_t *out) const {
        const int64_t count = columns();
        ids += first * count;
        if constexpr (sizeof(T) == 4)
            std::memcpy(out, ids, static_cast<size_t>(n * count) * 4);
        else
            for (int64_t i = 0; i < n * count; ++i) {
                const int64_t id = __atomic_load_n(ids + i, __ATOMIC_RELAXED);
                out[i] = static_cast<int32_t>(id) == id ? static_cast<int32_t>(id) : -1;
            }
        const int32_t *last = last_.data(), *read = read_.data();
        int32_t outside = 0;
        for (int64_t s = 0; s < n; ++s)
            for (int64_t c = 0; c < count; ++c) {
                int32_t &id = out[s * count + c];
                id &= read[c];
                outside |= id | static_cast<int32_t>(static_cast<uint32_t>(last[c]) - static_cast<uint32_t>(id));
            }
        if (outside >= 0) return;
        for (int64_t i = 0; i < n * count; ++i)
            if (out[i] < 0 || out[i] > last[i % count])
                throw nb::index_error(("found id " + std::to_string(ids[i]) + " in row " + std::to_string(first + i / count) + ", column " +
                                       std::to_string(i % count) + "; expected 0 to " + std::to_string(last[i % count]))
                                          .c_str());
    }

    const Isa &isa_;
    const ClickKernels &kernels_;
    int64_t numbers_, means_, ids_offset_ = 0, size_ = 0;
    std::vector<int32_t> rows_, last_, read_;  // of every column: its rows, the last of them, all bits where it is read
    std::vector<Slot> slots_, results_;
    std::vector<std::vector<bool>> alike_;  // of every buffer: which columns are the same in all samples
    std::vector<bool> alike_ids_, alike_numbers_, alike_means_;
    std::vector<std::function<void(const Block &)>> steps_;
    std::vector<Array> kept_;  // tables that lie in a file's mapping
};

}  // namespace
}  // namespace zoo
