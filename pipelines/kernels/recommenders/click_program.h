// What click programs are but for their steps: buffers of a block of samples, inputs that are checked, results. Ids are checked before a table
// is read; no lock is held while computing. Inputs may be declared to be the same in all samples of a call, as those of a user whose
// candidates are ranked: what depends on them alone is computed once a call. The other inputs may be declared to be those of items: what
// depends on them alone is computed once an item, see `Items`.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/variant.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "isa/arrays.h"
#include "isa/dispatch.h"
#include "recommenders/tables/cached_tables.h"

namespace nb = nanobind;

namespace zoo {
namespace {

constexpr int64_t kSamples = 64;  // that go through all steps together: their buffers stay in L2
constexpr int64_t kSlack = 32;    // int16 that kernels may touch behind a row
constexpr int64_t kWidest = int64_t{1} << 20;
constexpr size_t kOutputs = 64;
constexpr int64_t kOuts = 64;  // of one step
constexpr int64_t kBlocksAhead = 16;
constexpr int64_t kNear = 1 << 18;  // bytes of a table that stays in L2
constexpr float kRoundToInt = 12582912.0f;  // 1.5 * 2^23: added to a code and taken away, it rounds, ties to even

constexpr int64_t kMostItemBytes = int64_t{1} << 46;

thread_local Buffer<uint8_t> buffers;
std::atomic<int64_t> programs{0};  // made so far

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
    uint8_t *const *records;  // of every sample's item, or null
    const class Items *items;
    const int64_t *places;  // of the samples among the items
    int64_t place = 0;  // of its first sample among the kPart
    template <class T>
    T *data(const Slot &slot) const { return reinterpret_cast<T *>(memory + slot.offset); }
};

// Columns of a buffer that a step reads or writes.
struct Span {
    Slot slot;
    int64_t first, width;
};

// What a value depends on: inputs that are the same in all samples of a call, inputs of the sample's item, or any.
enum class Reach : uint8_t { kCall, kItem, kSample };

inline Reach joined(std::optional<Reach> a, Reach b) { return a.value_or(b) == b ? b : Reach::kSample; }

// Items and what was computed of them: a record each, and scores of pairs with other items: [rows, count] of every step that has some.
class Items {
  public:
    Items(int64_t program, int64_t count, int64_t record, const std::vector<int64_t> &scored) : program_(program), count_(count), record_(record) {
        records_.reserve(count * record);
        for (const int64_t rows : scored) scores_.emplace_back(count * rows), bytes_ += 4 * count * rows;
    }

    int64_t program() const { return program_; }
    int64_t count() const { return count_; }
    int64_t bytes() const { return count_ * record_ + bytes_; }
    uint8_t *record(int64_t item) const { return const_cast<uint8_t *>(records_.data()) + item * record_; }
    float *scores(size_t step) const { return const_cast<float *>(scores_[step].data()); }

  private:
    int64_t program_, count_, record_, bytes_ = 0;  // program: its number; bytes: of scores
    std::vector<Buffer<float>> scores_;
    Buffer<uint8_t> records_;
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
        const auto *counts = data_of<int32_t>(rows, "rows", 1);
        rows_.assign(counts, counts + rows.shape(0));
        require(!rows_.empty() && numbers >= 0 && means >= 0 && *std::min_element(rows_.begin(), rows_.end()) >= 0, "program");
        for (int32_t count : rows_) last_.push_back(std::max(count, 1) - 1), read_.push_back(count ? -1 : 0);
        ids_offset_ = 0;
        size_ = round_up(kSamples * columns() * 4, 64);
        for (const auto &[kind, width] : slots) {
            require(width >= 1 && width <= kWidest && (kind == "u1" || kind == "i2" || kind == "f4"), "buffer");
            Slot slot{kind == "u1" ? Kind::kBytes : kind == "i2" ? Kind::kWords : Kind::kFloats, width, round_up(width, kColumns), size_, false};
            if (slot.kind == Kind::kWords) slot.stride += kSlack;
            slot.index = static_cast<int>(slots_.size());
            size_ += round_up(kSamples * slot.stride * slot.size() + 64, 64);
            slots_.push_back(slot);
            reach_.emplace_back(static_cast<size_t>(width), Reach::kSample);
            overwritten_.push_back(false);
        }
        reach_ids_.assign(rows_.size(), Reach::kSample), reach_numbers_.assign(static_cast<size_t>(numbers), Reach::kSample);
        reach_means_.assign(static_cast<size_t>(means), Reach::kSample);
    }

    // The columns of the inputs that are the same in all samples of a call; to be told before the first step.
    void share(const std::vector<int64_t> &ids, const std::vector<int64_t> &numbers, const std::vector<int64_t> &means) {
        require(steps_.empty(), "share");
        const auto mark = [](std::vector<Reach> &reach, const std::vector<int64_t> &columns) {
            for (int64_t column : columns) {
                require(column >= 0 && column < static_cast<int64_t>(reach.size()), "share");
                reach[static_cast<size_t>(column)] = Reach::kCall;
            }
        };
        mark(reach_ids_, ids), mark(reach_numbers_, numbers), mark(reach_means_, means);
    }

    // All other columns are those of items; to be told before the first step. scores: whether those of all pairs are kept.
    void keep_items(bool scores) {
        require(steps_.empty(), "keep_items");
        for (auto *reach : {&reach_ids_, &reach_numbers_, &reach_means_}) std::replace(reach->begin(), reach->end(), Reach::kSample, Reach::kItem);
        keeps_items_ = true, keeps_scores_ = scores;
    }

    // To be told before the first step.
    void cache(const std::string &path, const std::vector<CachedTables::Table> &tables) {
        require(steps_.empty(), "cache");
        cached_tables_.open(path, tables);
    }

    std::pair<int64_t, int64_t> cached_rows() const { return cached_tables_.rows(); }

    void outputs(const std::vector<int> &slots) {
        require(slots.size() <= kOutputs, "outputs");
        for (int number : slots) {
            results_.push_back(slot(number, Kind::kFloats, "outputs"));
            use(whole(results_.back()));
        }
        record_ = 0;
        for (auto &part : parts_)
            if (part->read) part->offset = record_, record_ = round_up(record_ + part->bytes, 64);
        item_ids_ = record_, record_ = round_up(record_ + (reads_ids_ ? 4 * columns() : 0), 64);
    }

    int64_t item_bytes() const { return record_ + score_bytes(); }
    int64_t score_bytes() const { return 4 * std::accumulate(scored_.begin(), scored_.end(), int64_t{0}); }

    std::unique_ptr<Items> items(int64_t count) const {
        require(keeps_items_ && count >= 0 && count <= kMostItemBytes / std::max<int64_t>(item_bytes(), 1), "items");
        return std::make_unique<Items>(number_, count, record_, scored_);
    }

    // Computes what depends on items alone, of items from `first` on; the columns that are not theirs must have ids of rows.
    void fill(const Items &items, int64_t first, const Array &ids, const std::optional<Array> &numbers, const std::optional<Array> &means) const {
        require_own(items);
        const int64_t n = rows_of_ids(ids);
        if (first < 0 || first + n > items.count()) throw nb::value_error("there are fewer items");
        const float *x = floats(numbers, "numbers", n, numbers_), *m = floats(means, "scales", n, means_);
        nb::gil_scoped_release unlocked;
        buffers.reserve(size_);
        uint8_t *records[kSamples];
        int64_t places[kSamples];
        for (int64_t begin = 0; begin < n; begin += kSamples) {
            const int64_t count = std::min(kSamples, n - begin);
            const auto *rows = read_block(ids, begin, count);
            for (int64_t s = 0; s < count; ++s) places[s] = first + begin + s, records[s] = items.record(places[s]);
            const Block block{buffers.data(), rows, x + begin * numbers_, m + begin * means_, count, begin == 0, records, &items, places};
            for (const auto &step : item_steps_) step(block);
            for (int64_t s = 0; reads_ids_ && s < count; ++s) std::memcpy(records[s] + item_ids_, rows + s * columns(), static_cast<size_t>(4 * columns()));
        }
    }

    using Results = std::variant<NewArray<float>, nb::typed<nb::tuple, NewArray<float>, nb::ellipsis>>;

    // Results of one user, a row of inputs, and the items at these positions.
    Results rank(const Items &items, const Array &positions, const Array &ids, const std::optional<Array> &numbers, const std::optional<Array> &means) const {
        require_own(items);
        const auto *chosen = data_of<int64_t>(positions, "positions", 1);
        const int64_t n = static_cast<int64_t>(positions.shape(0));
        if (rows_of_ids(ids) != 1) throw nb::value_error("expected the ids of one user");
        const float *x = floats(numbers, "numbers", 1, numbers_), *m = floats(means, "scales", 1, means_);
        return computed(n, [&](const auto &store) {
            std::vector<uint32_t> row(static_cast<size_t>(columns()));
            std::copy_n(read_block(ids, 0, 1), row.size(), row.begin());
            auto *rows = reinterpret_cast<uint32_t *>(buffers.data() + ids_offset_);
            uint8_t *records[kSamples];
            int64_t places[kSamples];
            for (int64_t first = 0; first < n; first += kSamples) {
                const int64_t count = std::min(kSamples, n - first);
                for (int64_t s = 0; s < count; ++s) {
                    const int64_t index = places[s] = __atomic_load_n(chosen + first + s, __ATOMIC_RELAXED);
                    if (index < 0 || index >= items.count())
                        throw nb::index_error(("found the item " + std::to_string(index) + " among " + std::to_string(items.count())).c_str());
                    records[s] = items.record(index);
                    for (int64_t byte = 0; byte < record_; byte += 64) __builtin_prefetch(records[s] + byte, 0, 2);
                }
                for (int64_t s = 0; reads_ids_ && s < count; ++s) {
                    const auto *own = reinterpret_cast<const uint32_t *>(records[s] + item_ids_);
                    for (size_t c = 0; c < row.size(); ++c) rows[s * columns() + static_cast<int64_t>(c)] = reach_ids_[c] == Reach::kCall ? row[c] : own[c];
                }
                const Block block{buffers.data(), rows, x, m, count, first == 0, records, &items, places};
                for (const auto &step : steps_) step(block);
                store(block, first);
            }
        });
    }

    Results call(const Array &ids, const std::optional<Array> &numbers, const std::optional<Array> &means) const {
        if (keeps_items_) throw nb::value_error("the program takes items, see rank");
        const int64_t n = rows_of_ids(ids);
        const float *x = floats(numbers, "numbers", n, numbers_), *m = floats(means, "scales", n, means_);
        return computed(n, [&](const auto &store) {
            for (int64_t first = 0; first < n; first += kSamples) {
                const int64_t count = std::min(kSamples, n - first);
                if (!cached_tables_.empty() && first % kPart == 0) read_rows(ids, first, std::min(kPart, n - first));
                const Block block{buffers.data(), read_block(ids, first, count), x + first * numbers_, m + first * means_, count, first == 0, nullptr, nullptr, nullptr, first % kPart};
                for (const auto &step : steps_) step(block);
                store(block, first);
            }
        });
    }

    const char *isa() const { return isa_.name; }

  protected:
    struct Field {
        int32_t column, offset;
    };
    int64_t columns() const { return static_cast<int64_t>(rows_.size()); }

    // Runs `compute` without the lock; it calls its argument with every block and the number of the samples before it.
    template <class Compute>
    Results computed(int64_t n, const Compute &compute) const {
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
            const auto alone = cached_tables_.lock();
            buffers.reserve(size_);
            compute([&](const Block &block, int64_t first) {
                for (size_t i = 0; i < results_.size(); ++i) {
                    const Slot &slot = results_[i];
                    const auto *from = block.data<float>(slot);
                    for (int64_t s = 0; s < block.n; ++s)
                        std::copy_n(from + s * slot.stride, slot.width, results[i] + (first + s) * slot.width);
                }
            });
        }
        if (results_.size() == 1) return arrays[0];
        nb::list all;
        for (const NewArray<float> &array : arrays) all.append(array);
        return nb::typed<nb::tuple, NewArray<float>, nb::ellipsis>(nb::tuple(all));
    }

    static Reach reach_of(const std::vector<Reach> &reach, int64_t first, int64_t count) {
        const Reach first_reach = reach[static_cast<size_t>(first)];
        return std::all_of(reach.begin() + first, reach.begin() + first + count, [&](Reach other) { return other == first_reach; })
                       ? first_reach
                       : Reach::kSample;
    }
    Reach reach_of(const Span &span) const { return reach_of(reach_[static_cast<size_t>(span.slot.index)], span.first, span.width); }
    Reach joined(std::optional<Reach> reach, const std::vector<Span> &spans) const {
        for (const Span &span : spans) reach = zoo::joined(reach, reach_of(span));
        return reach.value_or(Reach::kCall);
    }
    bool alike_ids(int64_t first, int64_t count) const { return reach_of(reach_ids_, first, count) == Reach::kCall; }

    // What an item has of the buffers, or of memory of a step: bytes of its record, if any step of a call reads them.
    struct Part {
        Span span;
        int64_t bytes, offset = 0;
        bool read = false;
    };

    // A step of a call reads these columns.
    void use(const Span &span) {
        for (auto &part : parts_)
            if (part->span.slot.index == span.slot.index && part->span.first < span.first + span.width && span.first < part->span.first + part->span.width)
                part->read = true;
    }

    // Memory of a block that the blocks after it in a call may read.
    int64_t kept_bytes(int64_t bytes) { return std::exchange(size_, size_ + round_up(bytes, 64)); }

    // Adds a step; inputs: what its inputs that are no buffers depend on, if it has any. A step whose inputs are the same in all samples runs
    // for the first sample of a call, whose results become those of all; one whose inputs are those of items runs for these, once.
    void add(const std::vector<Span> &reads, const std::vector<Span> &writes, std::optional<Reach> inputs, std::function<void(const Block &)> run) {
        const Reach reach = joined(inputs, reads);
        if (reach == Reach::kSample) return add_to_samples(reads, writes, inputs.has_value(), std::move(run));
        for (const Span &span : writes) {
            auto &columns = reach_[static_cast<size_t>(span.slot.index)];
            std::fill_n(columns.begin() + span.first, span.width, reach);
        }
        if (reach == Reach::kItem) return add_to_items(writes, std::move(run));
        std::vector<std::pair<Span, int64_t>> results;
        for (const Span &span : writes) results.emplace_back(span, kept_bytes(span.width * span.slot.size()));
        steps_.push_back([=, this](const Block &b) {
            if (b.first) run({b.memory, b.ids, b.numbers, b.means, 1, true, b.records, b.items, b.places, b.place});
            for (const auto &[span, kept] : results) {
                const int64_t size = span.slot.size(), bytes = span.width * size;
                uint8_t *to = b.memory + span.slot.offset + span.first * size;
                if (b.first) std::memcpy(b.memory + kept, to, static_cast<size_t>(bytes));
                if (!b.first && !overwritten_[static_cast<size_t>(span.slot.index)]) continue;  // still there
                for (int64_t s = 0; s < b.n; ++s) std::memcpy(to + s * span.slot.stride * size, b.memory + kept, static_cast<size_t>(bytes));
            }
        });
    }

    // A step that runs for every sample of a call; it may write behind its columns. ids: whether it reads them.
    void add_to_samples(const std::vector<Span> &reads, const std::vector<Span> &writes, bool ids, std::function<void(const Block &)> run) {
        reads_ids_ |= ids;
        for (const Span &span : reads) use(span);
        for (const Span &span : writes) overwritten_[static_cast<size_t>(span.slot.index)] = true;
        steps_.push_back(std::move(run));
    }

    // A step that runs for items; a call takes its results from their records.
    void add_to_items(const std::vector<Span> &writes, std::function<void(const Block &)> run) {
        item_steps_.push_back(std::move(run));
        for (const Span &span : writes) {
            auto part = std::make_shared<Part>(Part{span, span.width * span.slot.size()});
            parts_.push_back(part);
            const auto copy = [part](const Block &b, bool keep) {
                const Span &span = part->span;
                const int64_t size = span.slot.size();
                uint8_t *codes = b.memory + span.slot.offset + span.first * size;
                for (int64_t s = 0; part->read && s < b.n; ++s, codes += span.slot.stride * size) {
                    uint8_t *own = b.records[s] + part->offset;
                    std::memcpy(keep ? own : codes, keep ? codes : own, static_cast<size_t>(part->bytes));
                }
            };
            item_steps_.push_back([copy](const Block &b) { copy(b, true); });
            steps_.push_back([copy](const Block &b) { copy(b, false); });
        }
    }
    static Span whole(const Slot &slot) { return {slot, 0, slot.width}; }

    // Brings the rows of some samples into the memory of their caches.
    void read_rows(const Array &ids, int64_t first, int64_t n) const {
        static thread_local Buffer<uint32_t> part;
        part.reserve(kPart * columns());
        for (int64_t s = 0; s < n; s += kSamples) {
            const int64_t count = std::min(kSamples, n - s);
            std::copy_n(read_block(ids, first + s, count), count * columns(), part.data() + s * columns());
        }
        cached_tables_.look_up(part.data(), columns(), n);
    }

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
        std::vector<Field> result;
        for (size_t f = 0; f < size; ++f) {
            require(column[f] >= 0 && column[f] < this->columns() && offset[f] >= 0 && count[f] >= 1 && int64_t{offset[f]} + count[f] <= height,
                    step);
            const int32_t most = rows_[static_cast<size_t>(column[f])];
            require(most >= 1 && most <= count[f], step);
            result.push_back({column[f], offset[f]});
        }
        return result;
    }

    // The vectors of `width` int16 at these positions of a row; sums of 128 products of codes fit int32.
    std::vector<int32_t> vectors(const Array &positions, int64_t width, const Slot &from, const char *step) const {
        const auto *begins = data_of<int32_t>(positions, "positions", 1);
        const size_t count = positions.shape(0);
        require(count >= 1 && count <= 128 && width >= 1 && width <= 128, step);
        for (size_t i = 0; i < count; ++i) require(begins[i] >= 0 && begins[i] + width <= from.width, step);
        return {begins, begins + count};
    }

    // A factor of every column, padded with zeros to whole 64.
    static std::shared_ptr<Buffer<float>> padded(const Array &array, int64_t width, const char *step) {
        const auto *values = data_of<float>(array, "factor", 1);
        require(static_cast<int64_t>(array.shape(0)) == width, step);
        auto made = std::make_shared<Buffer<float>>(round_up(width, kColumns));
        std::fill_n(made->data(), round_up(width, kColumns), 0.0f), std::copy_n(values, width, made->data());
        return made;
    }

    const float *floats(const std::optional<Array> &array, const char *name, int64_t n, int64_t width) const {
        static const float none = 0;
        const float *values = array ? data_of<float>(*array, name, 2) : &none;
        const bool fits = array ? static_cast<int64_t>(array->shape(0)) == n && static_cast<int64_t>(array->shape(1)) == width : width == 0;
        if (!fits) throw nb::value_error((std::string(name) + " have another shape than the ids and the program want").c_str());
        return values;
    }

    void require_own(const Items &items) const {
        if (items.program() != number_) throw nb::value_error("the items are those of another program");
    }

    int64_t rows_of_ids(const Array &ids) const {
        if (ids.dtype() == nb::dtype<int64_t>())
            data_of<int64_t>(ids, "ids", 2);
        else
            data_of<int32_t>(ids, "ids", 2);
        if (static_cast<int64_t>(ids.shape(1)) != columns()) throw nb::value_error("ids have another number of columns than the program");
        return static_cast<int64_t>(ids.shape(0));
    }

    // The ids of a block, checked, in the memory of the block.
    const uint32_t *read_block(const Array &ids, int64_t first, int64_t n) const {
        auto *rows = reinterpret_cast<int32_t *>(buffers.data() + ids_offset_);
        if (ids.dtype() == nb::dtype<int64_t>())
            read_ids(static_cast<const int64_t *>(ids.data()), first, n, rows);
        else
            read_ids(static_cast<const int32_t *>(ids.data()), first, n, rows);
        return reinterpret_cast<const uint32_t *>(rows);
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
    std::vector<std::vector<Reach>> reach_;  // of every buffer: what its columns depend on
    std::vector<bool> overwritten_;          // which buffers a step of every sample writes
    std::vector<Reach> reach_ids_, reach_numbers_, reach_means_;
    const int64_t number_ = ++programs;
    bool keeps_items_ = false, keeps_scores_ = false, reads_ids_ = false;  // reads_ids: a step of a call reads ids of items
    int64_t record_ = 0, item_ids_ = 0;             // bytes of an item's record, and where its ids are in it
    std::vector<std::shared_ptr<Part>> parts_;
    std::vector<int64_t> scored_;  // rows of the scores of every step that keeps some
    std::vector<std::function<void(const Block &)>> steps_, item_steps_;
    std::vector<Array> kept_;  // tables that lie in a file's mapping
    CachedTables cached_tables_;
};

}  // namespace
}  // namespace zoo
